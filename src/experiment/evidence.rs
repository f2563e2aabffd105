//! `mcl-eval evidence PLAN`: an experiment that can be spread over sittings and machines. A run with all its measurements that is finished
//! is kept in a folder for git and never made again; what was stopped goes on. Ends in a report.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use clap::Args as ClapArgs;

use super::plan::{Item, Plan};
use super::report;
use super::rows::{ItemFacts, Rows};
use super::runner::{Event, Programs, Runner, device_flag, flags};
use crate::error::{Error, Result};
use crate::eval::Common;
use crate::files;
use crate::run::RunFolder;
use crate::system::{machine, process};

/// What the command does.
pub const ABOUT: &str = "Make, skip or go on with the runs and measurements of a plan, and report on them";

/// The flags of the command.
#[derive(Debug, Clone, ClapArgs)]
pub struct Args {
    /// The plan, e.g. protocols/plans/evidence/plan.toml
    plan: PathBuf,
    /// Where rows, predictions and the report are kept, for git; runs and measurements found there are not made again
    #[arg(long, default_value = "reports/evidence")]
    out: PathBuf,
    /// Where runs go
    #[arg(long, default_value = "runs/evidence")]
    runs: PathBuf,
    /// Runs made side by side; with --threads 1 as many as there are cores is quickest for small networks
    #[arg(long, default_value_t = 1)]
    jobs: usize,
    /// Make nothing, write the report from what is kept
    #[arg(long)]
    report_only: bool,
    /// Markdown that shows the main table too: the lines between `<!-- evidence -->` and `<!-- /evidence -->` are replaced
    #[arg(long, value_name = "FILE")]
    readme: Option<PathBuf>,
}

/// Makes what is missing, then writes the report.
pub fn run(args: &Args, common: &Common) -> Result<()> {
    if args.jobs == 0 {
        return Err(Error::input("--jobs 0; accepted: 1 or more"));
    }
    let plan = Plan::read(&args.plan)?;
    let items = plan.items(&args.runs)?;
    std::fs::create_dir_all(&args.out).map_err(Error::io("cannot make", &args.out))?;
    let made = if args.report_only { Ok(()) } else { make(args, &plan, &items, common) };
    // What is finished is reported even when something failed or a stop was asked for.
    let rows = Rows::read(&args.out)?;
    let missing = report::write(&plan, &items, &rows, &args.out)?;
    if let Some(file) = &args.readme {
        show(file, &report::Results::new(&plan, &items, &rows).main_table()?.markdown())?;
    }
    if common.json {
        let finished: Vec<&str> = items.iter().filter(|i| rows.has(i)).map(|i| i.name.as_str()).collect();
        common.print_json(&serde_json::json!({ "folder": args.out, "finished": finished, "missing": missing }));
    } else {
        println!("{} of {} finished -> {}", items.len() - missing.len(), items.len(), args.out.join("report.html").display());
        if !missing.is_empty() {
            println!("missing: {}", missing.join(", "));
        }
    }
    made
}

/// Puts the table between its marks.
fn show(file: &Path, table: &str) -> Result<()> {
    const MARKS: [&str; 2] = ["<!-- evidence -->\n", "<!-- /evidence -->"];
    let text = std::fs::read_to_string(file).map_err(Error::open(file))?;
    let place = text.split_once(MARKS[0]).and_then(|(before, rest)| Some((before, rest.split_once(MARKS[1])?.1)));
    let (before, after) =
        place.ok_or_else(|| Error::file(file, format!("has no lines {} and {} for the table", MARKS[0].trim(), MARKS[1])))?;
    let new = format!("{before}{}\n{table}\n{}{after}", MARKS[0], MARKS[1]);
    if new == text { Ok(()) } else { files::write(file, new.as_bytes()) }
}

/// Makes every item that is not kept yet.
fn make(args: &Args, plan: &Plan, items: &[Item], common: &Common) -> Result<()> {
    let rows = Rows::read(&args.out)?;
    let pending: Vec<usize> = (0..items.len()).filter(|&i| !rows.has(&items[i])).collect();
    let finished = items.len() - pending.len();
    common.say(format!("{}: {} runs and joint measurements, {finished} finished", args.plan.display(), items.len()));
    if pending.is_empty() {
        return Ok(());
    }
    std::fs::create_dir_all(&args.runs).map_err(Error::io("cannot make", &args.runs))?;
    // Two processes would write over each other's rows.
    let _lock = files::try_lock(&RunFolder::at(&args.runs).lock())?
        .ok_or_else(|| Error::input(format!("another process makes runs in {}; wait for it", args.runs.display())))?;
    let stop = process::watch_signals()?;
    let eval = process::own_program()?;
    let here = machine::environment(common.device, common.threads, common.commit);
    let rows = Mutex::new(rows);
    let runner = Runner {
        plan,
        items,
        side_by_side: args.jobs,
        programs: Programs { train: eval.with_file_name("mcl-train"), eval },
        flags: flags(common.data.as_deref(), &device_flag(common.device), common.threads, true),
        folder_flag: "--runs",
        stop: &stop,
        tell: &|place, event| {
            let name = &items[place].name;
            common.say(match event {
                Event::Begun => format!("{name}: begun"),
                Event::Finished(seconds) => format!("{name}: finished, {seconds:.0} s in this sitting"),
                Event::Stopped => format!("{name}: stopped"),
                Event::Failed(e) => format!("{name}: failed: {e}"),
            });
        },
        finish: &|item, progress| {
            let facts = ItemFacts::new(item, progress, args.jobs, &here)?;
            rows.lock().expect("no worker panicked").add(item, facts, items)
        },
    };
    let outcome = runner.run(pending)?;
    outcome.skipped.iter().for_each(|line| common.warn(line));
    outcome.end()
}
