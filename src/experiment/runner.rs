//! Makes the items of a plan: trains what is not trained, measures what is not measured, by child processes and as many side by side as
//! asked for. What was stopped goes on, because every step leaves behind how far it came.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tch::Device;

use super::plan::{Item, PlannedRun, Work};
use crate::error::{Error, Result};
use crate::eval::Common;
use crate::eval::record::{self, Record};
use crate::eval::rows::newest;
use crate::files;
use crate::run::{RunFolder, Summary};
use crate::system::process;

/// How far an item has come and what it took; kept in its folder.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Progress {
    /// The ids of measurements that are done.
    done: Vec<String>,
    pub(crate) train_cpu_seconds: f64,
    pub(crate) evaluate_seconds: f64,
    pub(crate) evaluate_cpu_seconds: f64,
}

impl Progress {
    fn read(folder: &RunFolder) -> Result<Progress> {
        let path = folder.experiment_progress();
        if path.exists() { files::read_json(&path) } else { Ok(Progress::default()) }
    }

    fn write(&self, folder: &RunFolder) -> Result<()> {
        std::fs::create_dir_all(folder.path()).map_err(Error::io("cannot make", folder.path()))?;
        files::write_json(&folder.experiment_progress(), self)
    }
}

/// The two programs that do the work.
pub(crate) struct Programs {
    pub(crate) train: PathBuf,
    pub(crate) eval: PathBuf,
}

/// What happened to an item.
pub(crate) enum Event<'a> {
    Begun,
    /// A measurement of it, and so many of so many are done.
    Measured {
        line: &'a str,
        done: usize,
        of: usize,
        seconds: f64,
    },
    /// After so many seconds of this sitting.
    Finished(f64),
    Stopped,
    Failed(&'a Error),
}

/// Makes items of one plan.
pub(crate) struct Runner<'a> {
    pub(crate) items: &'a [Item],
    /// Items made at the same time.
    pub(crate) side_by_side: usize,
    pub(crate) programs: Programs,
    /// Handed on to either program.
    pub(crate) flags: Vec<String>,
    /// What chooses another folder for the runs, for messages.
    pub(crate) folder_flag: &'static str,
    /// Set from outside (a signal): what is under way is told to save and stop.
    pub(crate) stop: &'a AtomicBool,
    /// Told of every item, by its place in the list, when it begins and ends.
    pub(crate) tell: &'a (dyn Fn(usize, Event) + Sync),
    /// Takes over what is finished. Until it returns, the item is not.
    pub(crate) finish: &'a (dyn Fn(&Item, &Progress) -> Result<()> + Sync),
}

/// How it went.
#[derive(Default)]
pub(crate) struct Outcome {
    /// Items that failed, and why.
    pub(crate) failed: Vec<String>,
    /// Measurements over several runs that cannot be made here, and why.
    pub(crate) skipped: Vec<String>,
    pub(crate) stopped: bool,
}

impl Outcome {
    /// An error unless everything went well.
    pub(crate) fn end(&self) -> Result<()> {
        if self.stopped {
            return Err(Error::Interrupted("stopped; the same command goes on where it was".into()));
        }
        if self.failed.is_empty() { Ok(()) } else { Err(Error::failed(format!("failed: {}", self.failed.join("; ")))) }
    }
}

/// What the workers share.
struct Queue {
    /// Places in the list of items.
    pending: Vec<usize>,
    running: usize,
    /// By place in the list of items.
    finished: Vec<bool>,
    outcome: Outcome,
}

impl Runner<'_> {
    /// Makes the items at these places; the others are finished.
    pub(crate) fn run(&self, pending: Vec<usize>) -> Result<Outcome> {
        let measured = pending.iter().any(|&i| !self.items[i].measurements.is_empty());
        let trained = pending.iter().any(|&i| self.items[i].run().is_some());
        for program in [trained.then_some(&self.programs.train), measured.then_some(&self.programs.eval)].into_iter().flatten() {
            if !program.exists() {
                let missing = program.display();
                return Err(Error::input(format!(
                    "{missing} is missing: mcl-train and mcl-eval belong beside each other; `make install` copies both"
                )));
            }
        }
        self.items.iter().try_for_each(|item| item.folder.sweep_experiment())?;
        let finished = (0..self.items.len()).map(|i| !pending.contains(&i)).collect();
        let queue = Mutex::new(Queue { pending, running: 0, finished, outcome: Outcome::default() });
        std::thread::scope(|scope| {
            for _ in 0..self.side_by_side {
                scope.spawn(|| self.work(&queue));
            }
        });
        let mut outcome = queue.into_inner().expect("no worker panicked").outcome;
        outcome.stopped = self.stop.load(Ordering::Relaxed);
        Ok(outcome)
    }

    /// Takes items until none is left.
    fn work(&self, queue: &Mutex<Queue>) {
        let locked = || -> MutexGuard<Queue> { queue.lock().expect("no worker panicked") };
        while !self.stop.load(Ordering::Relaxed) {
            let Some(place) = self.next(&mut locked()) else {
                let queue = locked();
                // What waits for items of other workers may become ready.
                if queue.pending.is_empty() || queue.running == 0 {
                    return;
                }
                drop(queue);
                std::thread::sleep(Duration::from_millis(200));
                continue;
            };
            let item = &self.items[place];
            (self.tell)(place, Event::Begun);
            let began = Instant::now();
            let made = match self.elsewhere(item) {
                Some(why) => {
                    locked().outcome.skipped.push(why);
                    Ok(())
                }
                None => self.make(place).and_then(|progress| (self.finish)(item, &progress)).map(|()| locked().finished[place] = true),
            };
            let mut queue = locked();
            queue.running -= 1;
            match made {
                Ok(()) => (self.tell)(place, Event::Finished(began.elapsed().as_secs_f64())),
                Err(Error::Interrupted(_)) => {
                    // Whoever stopped one of them by a signal of its own means all of them.
                    self.stop.store(true, Ordering::Relaxed);
                    (self.tell)(place, Event::Stopped)
                }
                Err(e) => {
                    (self.tell)(place, Event::Failed(&e));
                    queue.outcome.failed.push(format!("{}: {e}", item.name));
                }
            }
        }
    }

    /// The next item that can be made: measurements over several runs as soon as these are there, else the next run.
    fn next(&self, queue: &mut Queue) -> Option<usize> {
        let ready = |&i: &usize| match &self.items[i].work {
            Work::Run(_) => false,
            Work::Network(_) => true,
            Work::Joint(members) => self.items.iter().zip(&queue.finished).all(|(other, done)| *done || !members.contains(&other.name)),
        };
        let run = |&i: &usize| self.items[i].run().is_some();
        let place = queue.pending.iter().position(ready).or_else(|| queue.pending.iter().position(run))?;
        queue.running += 1;
        Some(queue.pending.remove(place))
    }

    /// The folders of the runs that an item measures.
    fn measured<'i>(&'i self, item: &'i Item) -> Vec<&'i RunFolder> {
        match &item.work {
            Work::Run(_) => vec![&item.folder],
            Work::Network(_) => vec![],
            Work::Joint(members) => {
                let of = |name: &String| self.items.iter().find(|i| i.name == *name).map(|i| &i.folder);
                members.iter().filter_map(of).collect()
            }
        }
    }

    /// Why a measurement over several runs cannot be made here: their rows are kept, their networks are not.
    fn elsewhere(&self, item: &Item) -> Option<String> {
        let gone = self.measured(item).into_iter().find(|run| item.run().is_none() && !run.networks().is_dir())?;
        Some(format!("{}: not made, the networks in {} are on another machine", item.name, gone.path().display()))
    }

    /// Trains and measures what is not there yet.
    fn make(&self, place: usize) -> Result<Progress> {
        let item = &self.items[place];
        let folder = &item.folder;
        let mut progress = Progress::read(folder)?;
        if let Some(run) = item.run()
            && item.summary(self.folder_flag)?.is_none()
        {
            self.train(run, folder, &mut progress)?;
        }
        for measurement in item.measurements.iter() {
            if progress.done.contains(&measurement.id) {
                continue;
            }
            let mut command = Command::new(&self.programs.eval);
            command.args(measurement.line.split_whitespace()).args(&self.flags).args(["--id", &measurement.id]);
            for run in self.measured(item) {
                command.arg("--run").arg(run.path());
            }
            if let Work::Network(flags) = &item.work {
                command.args(flags);
            }
            if item.run().is_none() {
                command.arg("--out").arg(folder.path());
            }
            let began = Instant::now();
            let ended = process::run(command, self.stop)?;
            progress.evaluate_seconds += began.elapsed().as_secs_f64();
            progress.evaluate_cpu_seconds += ended.cpu_seconds;
            if ended.code == Some(0) {
                progress.done.push(measurement.id.clone());
            }
            progress.write(folder)?;
            self.check(ended.code, &format!("mcl-eval {}", measurement.line), folder.path())?;
            let done = item.measurements.iter().filter(|m| progress.done.contains(&m.id)).count();
            let (line, of, seconds) = (&measurement.line, item.measurements.len(), began.elapsed().as_secs_f64());
            (self.tell)(place, Event::Measured { line, done, of, seconds });
        }
        Ok(progress)
    }

    /// `mcl-train run` that starts the run or goes on with it.
    fn train(&self, run: &PlannedRun, folder: &RunFolder, progress: &mut Progress) -> Result<()> {
        std::fs::create_dir_all(folder.path()).map_err(Error::io("cannot make", folder.path()))?;
        let asked = || files::write(&folder.asked(), run.recipe.to_toml().as_bytes());
        // A run that no experiment began is looked at by the trainer, which refuses one of another recipe. Only then is it this one's.
        let foreign = folder.recipe().exists() && !folder.asked().exists();
        if !foreign {
            asked()?;
        }
        self.wait_for_the_last(folder)?;
        let mut command = Command::new(&self.programs.train);
        command.arg("run").arg(&run.from).arg("--out").arg(folder.path()).arg("--resume").args(&self.flags);
        for set in &run.sets {
            command.args(["--set", set]);
        }
        let ended = process::run(command, self.stop)?;
        progress.train_cpu_seconds += ended.cpu_seconds;
        progress.write(folder)?;
        self.check(ended.code, "mcl-train run", folder.path())?;
        if !folder.summary().exists() {
            return Err(Error::failed(format!("{} has no summary", folder.path().display())));
        }
        if foreign { asked() } else { Ok(()) }
    }

    /// An experiment that was killed leaves trainers behind, which save and stop: until then the folder is theirs. One that does not let
    /// go of it in this time is another's, and the trainer will say so.
    fn wait_for_the_last(&self, folder: &RunFolder) -> Result<()> {
        let until = Instant::now() + Duration::from_secs(60);
        while files::try_lock(&folder.lock())?.is_none() && Instant::now() < until && !self.stop.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    fn check(&self, code: Option<i32>, what: &str, folder: &Path) -> Result<()> {
        match code {
            Some(0) => Ok(()),
            Some(process::STOPPED) => Err(Error::Interrupted(what.into())),
            _ if self.stop.load(Ordering::Relaxed) => Err(Error::Interrupted(what.into())),
            Some(code) => Err(Error::failed(format!("`{what}` ended with exit code {code}; see {}", folder.display()))),
            None => Err(Error::failed(format!("`{what}` was ended by a signal; see {}", folder.display()))),
        }
    }
}

impl Item {
    /// How its run came out, if it is finished and an experiment began it. Refused where the folder holds a run of another recipe; `flag`
    /// chooses another folder.
    pub(crate) fn summary(&self, flag: &str) -> Result<Option<Summary>> {
        let asked = self.folder.asked();
        let (Some(run), true) = (self.run(), asked.exists()) else { return Ok(None) };
        let before = std::fs::read_to_string(&asked).map_err(Error::open(&asked))?;
        if before != run.recipe.to_toml() {
            return Err(Error::input(format!(
                "{} was begun with another recipe (compare it with {}); choose another {flag}",
                self.folder.path().display(),
                asked.display()
            )));
        }
        self.folder.read_summary()
    }

    /// Is its run there, and everything measured of it?
    pub(crate) fn finished(&self, flag: &str) -> Result<bool> {
        Ok(self.summary(flag)?.is_some() && self.measured()?)
    }

    /// Is everything measured?
    pub(crate) fn measured(&self) -> Result<bool> {
        let done = Progress::read(&self.folder)?.done;
        Ok(self.measurements.iter().all(|m| done.contains(&m.id)))
    }

    /// The rows of its measurements, found by their ids: a folder may hold what was measured on other occasions.
    pub(crate) fn records(&self) -> Result<Vec<Record>> {
        let all = record::read(self.folder.path())?;
        let own: Vec<&Record> = all.iter().filter(|r| self.measurements.iter().any(|m| m.id == r.id)).collect();
        let newest: Vec<Record> = newest(&own)?.into_iter().cloned().collect();
        if newest.is_empty() {
            return Err(Error::failed(format!("{}: its measurements left no rows in {}", self.name, self.folder.path().display())));
        }
        Ok(newest)
    }
}

/// The flags that both programs take.
pub(crate) fn flags(data: Option<&Path>, device: &str, threads: usize, quiet: bool) -> Vec<String> {
    let mut flags = vec!["--device".to_string(), device.into(), "--threads".into(), threads.to_string()];
    if let Some(data) = data {
        flags.extend(["--data".to_string(), data.display().to_string()]);
    }
    if quiet {
        flags.push("--quiet".into());
    }
    flags
}

/// A device as `--device` takes it.
pub(crate) fn device_flag(device: Device) -> String {
    match device {
        Device::Cuda(n) => format!("cuda:{n}"),
        _ => "cpu".to_string(),
    }
}

/// Makes items for a command of `mcl-eval`: below `folder`, which `flag` chooses, and which no other process may make runs in meanwhile.
/// Says what begins and ends.
pub(crate) fn make_below(
    folder: &Path,
    flag: &'static str,
    items: &[Item],
    pending: Vec<usize>,
    side_by_side: usize,
    finish: &(dyn Fn(&Item, &Progress) -> Result<()> + Sync),
    common: &Common,
) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(Error::io("cannot make", folder))?;
    // Two processes would write over each other's rows.
    let _lock = files::try_lock(&RunFolder::at(folder).lock())?
        .ok_or_else(|| Error::input(format!("another process makes runs in {}; wait for it", folder.display())))?;
    let stop = process::watch_signals()?;
    let eval = process::own_program()?;
    let runner = Runner {
        items,
        side_by_side,
        programs: Programs { train: eval.with_file_name("mcl-train"), eval },
        flags: flags(common.data.as_deref(), &device_flag(common.device), common.threads, true),
        folder_flag: flag,
        stop: &stop,
        tell: &|place, event| {
            let name = &items[place].name;
            common.say(match event {
                Event::Begun => format!("{name}: begun"),
                Event::Measured { line, done, of, seconds } => format!("{name}: {done} of {of} measured, {line} in {seconds:.0} s"),
                Event::Finished(seconds) => format!("{name}: finished, {seconds:.0} s in this sitting"),
                Event::Stopped => format!("{name}: stopped"),
                Event::Failed(e) => format!("{name}: failed: {e}"),
            });
        },
        finish,
    };
    let outcome = runner.run(pending)?;
    outcome.skipped.iter().for_each(|line| common.warn(line));
    outcome.end()
}
