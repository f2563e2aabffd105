//! `mcl-eval evidence PLAN`: an experiment that can be spread over sittings and machines. A unit is a pre-training run with all its
//! measurements; what is finished is kept in a folder for git and never made again; what was interrupted goes on. Ends in a report.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::process::Command as Process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use super::plan::{Plan, Unit, Work};
pub use super::rows::{Kept, Made, Measure, Row};
use super::{jobs, report};
use crate::error::{Error, Result};
use crate::eval::Common;
use crate::files;

pub const ABOUT: &str = "Make, skip or go on with the runs and measurements of a plan, and report on them";

#[derive(Debug, Clone, ClapArgs)]
pub struct Args {
    /// The plan, e.g. protocols/evidence/plan.toml
    pub plan: PathBuf,
    /// Where rows, predictions and the report are kept, for git; units found there are not made again
    #[arg(long, default_value = "reports/evidence")]
    pub out: PathBuf,
    /// Where runs go
    #[arg(long, default_value = "runs/evidence")]
    pub runs: PathBuf,
    /// Units made side by side; with --threads 1 as many as there are cores is quickest for small networks
    #[arg(long, default_value_t = 1)]
    pub jobs: usize,
    /// Make nothing, write the report from what is kept
    #[arg(long)]
    pub report_only: bool,
    /// Markdown that shows the main table too: the lines between `<!-- evidence -->` and `<!-- /evidence -->` are replaced
    #[arg(long, value_name = "FILE")]
    pub readme: Option<PathBuf>,
}

pub fn run(args: &Args, common: &Common) -> Result<()> {
    if args.jobs == 0 {
        return Err(Error::input("--jobs 0; accepted: 1 or more"));
    }
    let plan = Plan::read(&args.plan)?;
    let units = plan.units(&args.plan, &args.runs)?;
    std::fs::create_dir_all(&args.out).map_err(Error::io("cannot make", &args.out))?;
    let made = if args.report_only { Ok(()) } else { make(args, &plan, &units, common) };
    // What is finished is reported even when something failed or a stop was asked for.
    let kept = Kept::read(&args.out)?;
    let missing = report::write(&plan, &units, &kept, &args.out)?;
    if let Some(file) = &args.readme {
        show(file, &report::Found::new(&plan, &units, &kept).main_table()?.markdown())?;
    }
    if common.json {
        let finished: Vec<&str> = units.iter().filter(|u| kept.has(u)).map(|u| u.name.as_str()).collect();
        common.print_json(&serde_json::json!({ "folder": args.out, "finished": finished, "missing": missing }));
    } else {
        println!("{} of {} units -> {}", units.len() - missing.len(), units.len(), args.out.join("report.html").display());
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

/// How far a unit has come; kept in its run folder.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Progress {
    /// Measurements that are done.
    done: Vec<String>,
    train_cpu_seconds: f64,
    evaluate_seconds: f64,
    evaluate_cpu_seconds: f64,
}

impl Progress {
    fn read(folder: &Path) -> Result<Progress> {
        let path = folder.join(PROGRESS);
        if !path.exists() {
            return Ok(Progress::default());
        }
        let text = std::fs::read_to_string(&path).map_err(Error::open(&path))?;
        serde_json::from_str(&text).map_err(|e| Error::file(&path, e.to_string()))
    }

    fn write(&self, folder: &Path) -> Result<()> {
        std::fs::create_dir_all(folder).map_err(Error::io("cannot make", folder))?;
        files::write(&folder.join(PROGRESS), serde_json::to_string(self).expect("plain values serialise").as_bytes())
    }
}

const PROGRESS: &str = "evidence.json";

/// What the workers share.
struct Queue {
    /// Places in the list of units.
    pending: Vec<usize>,
    running: usize,
    kept: Kept,
    failed: Vec<String>,
    skipped: Vec<String>,
}

struct Maker<'a> {
    args: &'a Args,
    protocol: PathBuf,
    units: &'a [Unit],
    order: Vec<String>,
    common: &'a Common,
    /// Both programs, and flags for either.
    train: PathBuf,
    eval: PathBuf,
    flags: Vec<String>,
    stop: Arc<AtomicBool>,
    queue: Mutex<Queue>,
}

/// Makes every unit that is not kept yet.
fn make(args: &Args, plan: &Plan, units: &[Unit], common: &Common) -> Result<()> {
    let kept = Kept::read(&args.out)?;
    let pending: Vec<usize> = (0..units.len()).filter(|&i| !kept.has(&units[i])).collect();
    common.say(format!("{}: {} units, {} finished", args.plan.display(), units.len(), units.len() - pending.len()));
    if pending.is_empty() {
        return Ok(());
    }
    std::fs::create_dir_all(&args.runs).map_err(Error::io("cannot make", &args.runs))?;
    let lock_path = args.runs.join("lock");
    let lock =
        OpenOptions::new().create(true).truncate(false).write(true).open(&lock_path).map_err(Error::io("cannot write", &lock_path))?;
    lock.try_lock().map_err(|_| Error::input(format!("another process makes units in {}; wait for it", args.runs.display())))?;
    let stop = Arc::new(AtomicBool::new(false));
    jobs::watch_signals(&stop)?;
    let eval = std::env::current_exe().map_err(|e| Error::failed(format!("cannot find the running program: {e}")))?;
    let train = eval.with_file_name("mcl-train");
    if !train.exists() {
        return Err(Error::input(format!("{} is missing: mcl-train belongs beside mcl-eval; `make install` copies both", train.display())));
    }
    let device = match common.device {
        tch::Device::Cuda(n) => format!("cuda:{n}"),
        _ => "cpu".to_string(),
    };
    let mut flags = vec!["--quiet".to_string(), "--device".into(), device, "--threads".into(), common.threads.to_string()];
    if let Some(data) = &common.data {
        flags.extend(["--data".to_string(), data.display().to_string()]);
    }
    let maker = Maker {
        args,
        protocol: plan.protocol(&args.plan),
        units,
        order: units.iter().map(|u| u.name.clone()).collect(),
        common,
        train,
        eval,
        flags,
        stop,
        queue: Mutex::new(Queue { pending, running: 0, kept, failed: vec![], skipped: vec![] }),
    };
    std::thread::scope(|scope| {
        for _ in 0..args.jobs {
            scope.spawn(|| maker.work());
        }
    });
    let queue = maker.queue.into_inner().expect("no worker panicked");
    queue.skipped.iter().for_each(|line| common.warn(line));
    if maker.stop.load(Ordering::Relaxed) {
        return Err(Error::Interrupted("stopped; the same command goes on where it was".into()));
    }
    if queue.failed.is_empty() { Ok(()) } else { Err(Error::failed(format!("failed: {}", queue.failed.join("; ")))) }
}

impl Maker<'_> {
    /// Takes units until none is left.
    fn work(&self) {
        while !self.stop.load(Ordering::Relaxed) {
            let Some(at) = self.next() else {
                let queue = self.queue.lock().expect("no worker panicked");
                // What waits for units of other workers may become ready.
                if queue.pending.is_empty() || queue.running == 0 {
                    return;
                }
                drop(queue);
                std::thread::sleep(Duration::from_millis(200));
                continue;
            };
            let unit = &self.units[at];
            self.common.say(format!("{}: begun", unit.name));
            let began = Instant::now();
            let ended = self.unit(unit);
            let mut queue = self.queue.lock().expect("no worker panicked");
            queue.running -= 1;
            match ended {
                Ok(()) => self.common.say(format!("{}: finished, {:.0} s in this sitting", unit.name, began.elapsed().as_secs_f64())),
                Err(Error::Interrupted(_)) => self.common.say(format!("{}: stopped", unit.name)),
                Err(e) => {
                    self.common.say(format!("{}: failed: {e}", unit.name));
                    queue.failed.push(format!("{}: {e}", unit.name));
                }
            }
        }
    }

    /// The next unit that can be made: measurements over several runs as soon as these are there, else the next run.
    fn next(&self) -> Option<usize> {
        let mut queue = self.queue.lock().expect("no worker panicked");
        let ready = |&i: &usize| match &self.units[i].work {
            Work::Run { .. } => false,
            Work::Over(members) => self.units.iter().filter(|u| members.contains(&u.name)).all(|u| queue.kept.has(u)),
        };
        let run = |&i: &usize| matches!(self.units[i].work, Work::Run { .. });
        let place = queue.pending.iter().position(ready).or_else(|| queue.pending.iter().position(run))?;
        queue.running += 1;
        Some(queue.pending.remove(place))
    }

    /// Trains and measures what is not there yet, then hands it over to the kept part.
    fn unit(&self, unit: &Unit) -> Result<()> {
        let (folder, subjects) = match &unit.work {
            Work::Run { run, .. } => (run.out.clone(), vec![run.out.clone()]),
            Work::Over(members) => {
                let runs: Vec<PathBuf> = members.iter().map(|m| self.args.runs.join(m)).collect();
                if let Some(gone) = runs.iter().find(|r| !r.join("networks").is_dir()) {
                    let line = format!("{}: not made, the networks in {} are on another machine", unit.name, gone.display());
                    self.queue.lock().expect("no worker panicked").skipped.push(line);
                    return Ok(());
                }
                (self.args.runs.join(&unit.name), runs)
            }
        };
        let mut progress = Progress::read(&folder)?;
        let mut made = Made {
            unit: unit.name.clone(),
            hash: unit.hash.clone(),
            evaluate: unit.evaluate.clone(),
            jobs: self.args.jobs,
            ..Made::default()
        };
        if let Work::Run { setting, seed, run } = &unit.work {
            if run.summary("--runs")?.is_none() {
                let ended = jobs::run(run.command(&self.train, &self.protocol, &self.flags)?, &self.stop)?;
                progress.train_cpu_seconds += ended.cpu_seconds;
                progress.write(&folder)?;
                self.check(ended.code, "mcl-train run", &folder)?;
            }
            let summary = run.summary("--runs")?.ok_or_else(|| Error::failed(format!("{} has no summary", folder.display())))?;
            (made.setting, made.seed, made.train_seconds) = (setting.clone(), Some(*seed), summary.seconds.round());
            (made.steps, made.seconds_per_step, made.peak_mb) = (summary.steps, summary.seconds_per_step, summary.peak_mb);
            let known = environment(&folder)?;
            made.train_images = known["train_images"].as_u64().unwrap_or(0);
            made.train_split_hash = known["train_split_hash"].as_str().unwrap_or_default().to_string();
            made.machine = machine(&known);
        } else {
            made.machine = machine(&crate::system::machine::environment(self.common.device, self.common.threads, self.common.commit));
        }
        for line in &unit.evaluate {
            if progress.done.contains(line) {
                continue;
            }
            let mut command = Process::new(&self.eval);
            command.args(line.split_whitespace()).args(&self.flags);
            for run in &subjects {
                command.arg("--run").arg(run);
            }
            if matches!(unit.work, Work::Over(_)) {
                command.arg("--out").arg(&folder);
            }
            let began = Instant::now();
            let ended = jobs::run(command, &self.stop)?;
            progress.evaluate_seconds += began.elapsed().as_secs_f64();
            progress.evaluate_cpu_seconds += ended.cpu_seconds;
            if ended.code == Some(0) {
                progress.done.push(line.clone());
            }
            progress.write(&folder)?;
            self.check(ended.code, &format!("mcl-eval {line}"), &folder)?;
        }
        made.train_cpu_seconds = progress.train_cpu_seconds.round();
        (made.evaluate_seconds, made.evaluate_cpu_seconds) = (progress.evaluate_seconds.round(), progress.evaluate_cpu_seconds.round());
        self.queue.lock().expect("no worker panicked").kept.add(unit, &folder, made, &self.order)
    }

    fn check(&self, code: Option<i32>, what: &str, folder: &Path) -> Result<()> {
        match code {
            Some(0) => Ok(()),
            Some(75) => Err(Error::Interrupted(what.into())),
            _ if self.stop.load(Ordering::Relaxed) => Err(Error::Interrupted(what.into())),
            Some(code) => Err(Error::failed(format!("`{what}` ended with exit code {code}; see {}", folder.display()))),
            None => Err(Error::failed(format!("`{what}` was ended by a signal; see {}", folder.display()))),
        }
    }
}

fn environment(folder: &Path) -> Result<Value> {
    let path = folder.join("environment.json");
    let text = std::fs::read_to_string(&path).map_err(Error::open(&path))?;
    serde_json::from_str(&text).map_err(|e| Error::file(&path, e.to_string()))
}

/// What a reader needs to know of a machine, and nothing that says whose it is.
fn machine(environment: &Value) -> BTreeMap<String, Value> {
    let told = ["mcl", "commit", "libtorch", "device", "threads", "cpu", "cores", "memory_mb", "os", "arch"];
    told.iter().map(|key| (key.to_string(), environment[*key].clone())).collect()
}
