//! `mcl-eval evidence PLAN`: an experiment that can be spread over sittings and machines. A run with all its measurements that is finished
//! is kept in a folder for git and never made again; what was stopped goes on. Ends in a report.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use clap::Args as ClapArgs;

use super::plan::{Item, Plan, PlannedRun, Work};
use super::report;
use super::rows::{ItemFacts, Rows};
use super::runner::{Progress, make_below};
use crate::error::{Error, Result};
use crate::eval::Common;
use crate::files;
use crate::limits;
use crate::run::RunFolder;
use crate::system::machine;

/// What the command does.
pub const ABOUT: &str = "Make, skip or go on with the runs and measurements of a plan, and report on them";

/// The flags of the command.
#[derive(Debug, Clone, ClapArgs)]
pub struct Args {
    /// The plan, e.g. protocols/plans/evidence.toml
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
    /// Make the runs of these seeds only; the others are reported as missing
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    seeds: Vec<u64>,
    /// Make the runs of these settings only; the others are reported as missing
    #[arg(long, value_name = "NAME,..", value_delimiter = ',')]
    settings: Vec<String>,
    /// Make nothing, write the report from what is kept
    #[arg(long)]
    report_only: bool,
    /// Markdown that shows tables too: between `<!-- evidence -->` and `<!-- /evidence -->` the main one, between `<!-- hypotheses -->`
    /// and `<!-- /hypotheses -->` the verdicts (may be repeated)
    #[arg(long, value_name = "FILE")]
    readme: Vec<PathBuf>,
}

/// Makes what is missing, then writes the report.
pub fn run(args: &Args, common: &Common) -> Result<()> {
    if args.jobs == 0 {
        return Err(Error::input("--jobs 0; accepted: 1 or more"));
    }
    limits::threads("--jobs", args.jobs)?;
    let plan = Plan::read(&args.plan)?;
    let items = plan.items(&args.runs)?;
    std::fs::create_dir_all(&args.out).map_err(Error::io("cannot make", &args.out))?;
    sweep(args, &items)?;
    let made = if args.report_only { Ok(()) } else { make(args, &items, common) };
    // What is finished is reported even when something failed or a stop was asked for.
    let rows = Rows::read(&args.out)?;
    let missing = report::write(&plan, &items, &rows, &args.out)?;
    let results = report::Results::new(&plan, &items, &rows);
    for file in &args.readme {
        show(file, &[("evidence", results.main_table()?.markdown()), ("hypotheses", results.verdicts()?.markdown())])?;
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

/// What a kill left half written in the report's folder goes, unless another process makes these runs and writes there.
fn sweep(args: &Args, items: &[Item]) -> Result<()> {
    let lock = if args.runs.is_dir() { files::try_lock(&RunFolder::at(&args.runs).lock())? } else { None };
    if lock.is_some() {
        files::sweep(&args.out, |_| true)?;
        files::sweep(&args.out.join("figures"), |_| true)?;
        let rows = Rows::read(&args.out)?;
        items.iter().try_for_each(|item| files::sweep(&rows.item_folder(&item.name), |_| true))?;
    }
    Ok(())
}

/// Puts each table between its marks, where the file has them.
fn show(file: &Path, tables: &[(&str, String)]) -> Result<()> {
    let text = std::fs::read_to_string(file).map_err(Error::open(file))?;
    let (mut new, mut shown) = (text.clone(), false);
    for (name, table) in tables {
        let (open, close) = (format!("<!-- {name} -->\n"), format!("<!-- /{name} -->"));
        let place = new.split_once(&open).and_then(|(before, rest)| Some((before, rest.split_once(&close)?.1)));
        if let Some((before, after)) = place {
            (new, shown) = (format!("{before}{open}\n{table}\n{close}{after}"), true);
        }
    }
    if !shown {
        return Err(Error::file(file, "has no lines <!-- evidence --> and <!-- /evidence -->, or of `hypotheses`, for a table"));
    }
    if new == text { Ok(()) } else { files::write(file, new.as_bytes()) }
}

impl Args {
    /// Is this run to be made, as far as the flags choose?
    fn choose(&self, run: &PlannedRun) -> bool {
        (self.seeds.is_empty() || self.seeds.contains(&run.seed)) && (self.settings.is_empty() || self.settings.contains(&run.setting))
    }
}

/// A seed or a setting that no run of the plan has is a slip.
fn check_choice(args: &Args, items: &[Item]) -> Result<()> {
    let runs = || items.iter().filter_map(Item::run);
    let plan = args.plan.display();
    if let Some(seed) = args.seeds.iter().find(|seed| runs().all(|run| run.seed != **seed)) {
        let seeds: BTreeSet<u64> = runs().map(|run| run.seed).collect();
        let seeds: Vec<String> = seeds.iter().map(u64::to_string).collect();
        return Err(Error::input(format!("--seeds {seed}: the runs of {plan} have {}", seeds.join(", "))));
    }
    if let Some(setting) = args.settings.iter().find(|setting| runs().all(|run| run.setting != **setting)) {
        let settings: BTreeSet<&str> = runs().map(|run| run.setting.as_str()).collect();
        return Err(Error::input(format!("--settings {setting}: the runs of {plan} have {}", Vec::from_iter(settings).join(", "))));
    }
    Ok(())
}

/// Makes every item that is not kept yet.
fn make(args: &Args, items: &[Item], common: &Common) -> Result<()> {
    let rows = Rows::read(&args.out)?;
    check_choice(args, items)?;
    let of_all = args.seeds.is_empty() && args.settings.is_empty();
    let chosen = |item: &Item| of_all || item.run().is_some_and(|run| args.choose(run));
    // What is measured over several runs waits until all of them are asked for or there.
    let there = |name: &String| items.iter().any(|i| i.name == *name && (rows.has(i) || chosen(i)));
    let asked = |item: &Item| match &item.work {
        Work::Joint(members) => members.iter().all(there),
        Work::Run(_) | Work::Network(_) => chosen(item),
    };
    let pending: Vec<usize> = (0..items.len()).filter(|&i| !rows.has(&items[i]) && asked(&items[i])).collect();
    let finished = items.iter().filter(|item| rows.has(item)).count();
    common.say(format!("{}: {} runs and joint measurements, {finished} finished", args.plan.display(), items.len()));
    if pending.is_empty() {
        return Ok(());
    }
    let here = machine::environment(common.device, common.threads, common.commit);
    warn_of_other_processors(items, &pending, &rows, here["cpu"].as_str().unwrap_or_default(), common)?;
    let rows = Mutex::new(rows);
    let finish = |item: &Item, progress: &Progress| {
        let facts = ItemFacts::new(item, progress, args.jobs, &here)?;
        rows.lock().expect("no worker panicked").add(item, facts, items)
    };
    make_below(&args.runs, "--runs", items, pending, args.jobs, &finish, common)
}

/// Settings of one seed are compared with each other. Where some were made on another kind of processor, roundings may differ.
fn warn_of_other_processors(items: &[Item], pending: &[usize], rows: &Rows, here: &str, common: &Common) -> Result<()> {
    let seeds: BTreeSet<u64> = pending.iter().filter_map(|&i| items[i].run()).map(|run| run.seed).collect();
    for seed in seeds {
        for (kind, settings) in rows.processors(items, seed)?.into_iter().filter(|(kind, _)| kind != here) {
            let made = settings.join(", ");
            common.warn(format!("seed {seed}: {made} on {kind}; what is missing of it is made on {here}, where roundings may differ"));
        }
    }
    Ok(())
}
