//! The training loop: the only place where data, cohort, method, metrics and checkpoints meet. It knows no method, architecture or
//! dataset by name.
//!
#![doc = include_str!("README.md")]

mod checkpoint;
mod diverged;
mod metrics;
mod progress;
mod setup;
pub mod step;
mod summary;
mod tensorboard;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use tch::Device;

use crate::data::{Batch, Loader, Split, sampler};
use crate::error::{Error, Result};
use crate::methods::{Batches, Clock, Needs, Views};
use crate::nets::Arch;
use crate::recipe::Recipe;
use crate::run::{Best, OpenRun, Row, RunFolder, Summary, network_file};
use crate::system::allocator;
use crate::system::ranks::Ranks;
use crate::weights::{self, Meta};

use checkpoint::{Checkpoints, Content, Extra, Progress};
use metrics::{CohortAccuracy, Meter};
pub use progress::clock_time;
use progress::{Display, Epoch};
use setup::Prepared;
use step::Engine;
use tensorboard::EventWriter;

/// Images per forward pass of an evaluation.
const EVAL_BATCH: usize = 250;

/// A run as it is asked for.
pub struct Job<'a> {
    /// What is trained.
    pub recipe: Recipe,
    /// The run folder.
    pub out: PathBuf,
    /// Where datasets are looked for first.
    pub data: Option<PathBuf>,
    /// Where the networks compute.
    pub device: Device,
    /// libtorch's threads, as they were set: they are written down, not set here.
    pub threads: usize,
    /// Go on from the last checkpoint, or from `from`; where there is none, start.
    pub resume: bool,
    /// The checkpoint to go on from, `step-N`.
    pub from: Option<String>,
    /// Weights every network starts from.
    pub init: Option<PathBuf>,
    /// Print nothing.
    pub quiet: bool,
    /// What the program was built from.
    pub commit: &'a str,
    /// The processes that train together.
    pub ranks: Ranks,
    /// Set from outside (a signal): finish the step, save, return `Error::Interrupted`.
    pub stop: &'a AtomicBool,
}

/// Pre-trains a cohort as the job says.
pub fn run(job: Job) -> Result<Summary> {
    Trainer::new(job)?.train()
}

struct Trainer<'a> {
    job: Job<'a>,
    /// Rank 0 writes for all.
    folder: Option<OpenRun>,
    checkpoints: Checkpoints,
    archs: Vec<&'static Arch>,
    data: Prepared,
    needs: Needs,
    engine: Engine,
    progress: Progress,
    meter: Meter,
    events: Option<EventWriter>,
    started: Instant,
    /// Seconds of training before this process started.
    before: f64,
    last_save: Instant,
    /// The recipe's epochs and those the method trains before them.
    epochs: usize,
}

impl Trainer<'_> {
    /// Every epoch that is left, then what ships.
    fn train(&mut self) -> Result<Summary> {
        let (train, data) = (&self.job.recipe.train, &self.data);
        self.say(&format!(
            "{} on {}: {} networks ({}), {} training images, {} held out, {} test, batch {}{}, {} epochs, {:?}, {} threads -> {}",
            self.job.recipe.method_name(),
            data.dataset.name,
            self.archs.len(),
            self.job.recipe.cohort.archs.join(", "),
            data.train.len(),
            data.held.as_ref().map_or(0, Split::len),
            data.dataset.test.len(),
            train.batch,
            if self.job.ranks.count() > 1 { format!(" over {} ranks", self.job.ranks.count()) } else { String::new() },
            self.epochs,
            self.job.device,
            self.job.threads,
            self.job.out.display()
        ))?;
        while self.progress.epoch < self.epochs {
            self.epoch()?;
        }
        self.ship()
    }

    /// The rest of the current epoch, its evaluation, its row and its checkpoint.
    fn epoch(&mut self) -> Result<()> {
        let (epoch, first) = (self.progress.epoch, self.progress.batch);
        let (mut loader, steps) = self.loader()?;
        let quiet = self.job.quiet || !self.job.ranks.leads();
        let mut display = Display::new(quiet, Epoch { number: epoch, epochs: self.epochs, steps, first });
        if first == 0 {
            self.start_epoch(steps)?;
        }
        while self.progress.batch < steps {
            let images = self.step(&mut loader, steps)?;
            let log = |line: &str| self.folder.as_mut().map_or(Ok(()), |folder| folder.log(line));
            display.tick(&self.meter, images, self.progress.batch, log)?;
            self.save_if_due(steps, &display)?;
        }
        display.clear();
        self.finish_epoch(epoch)
    }

    /// The batches of the current epoch that are still to come, and how many steps the whole epoch has.
    fn loader(&self) -> Result<(Loader, usize)> {
        let (t, epoch, ranks) = (&self.job.recipe.train, self.progress.epoch as u64, self.job.ranks);
        let (labels, sampling) = (&self.data.train.labels, self.needs.sampling);
        let order = sampler::epoch(labels, sampling, t.batch, t.seed, epoch)?;
        let order = sampler::for_ranks(order, labels, sampling, ranks.count(), t.gather_negatives)?;
        let steps = order.len().div_ceil(t.accumulate);
        let views = if self.needs.views == Views::PerPeer { self.engine.cohort.peers.len() } else { 1 };
        let first = self.progress.batch * t.accumulate;
        let transform = self.data.train_transform.clone();
        Ok((Loader::of_rank(&self.data.train, order, transform, views, t.seed, epoch, first, ranks), steps))
    }

    /// Where the next step stands, in an epoch of so many.
    fn clock(&self, steps: usize) -> Clock {
        let (t, Progress { epoch, batch, step, .. }) = (&self.job.recipe.train, &self.progress);
        // The epochs a method trains first have the whole schedule to themselves.
        let extra = self.engine.method.extra_epochs();
        let (in_phase, of_phase) = if *epoch < extra { (*epoch, extra) } else { (epoch - extra, t.epochs) };
        let lr = t.schedule.lr(t.rate(), t.warmup, in_phase, of_phase, *batch, steps);
        Clock { epoch: *epoch, batch: *batch, step: *step, lr, seed: t.seed }
    }

    /// Lets the method know that an epoch begins, and shows it the held-out images.
    fn start_epoch(&mut self, steps: usize) -> Result<()> {
        let (clock, device) = (self.clock(steps), self.job.device);
        let mut held = self
            .data
            .held
            .as_ref()
            .map(|split| Loader::eval(split, EVAL_BATCH, self.data.test_transform.clone()).map(|b| Ok(b?.to_device(device))));
        self.engine.epoch_start(held.as_mut().map(|batches| batches as &mut Batches), clock)
    }

    /// One optimizer step. Returns on how many images, over all ranks.
    fn step(&mut self, loader: &mut Loader, steps: usize) -> Result<usize> {
        let (t, ranks) = (&self.job.recipe.train, self.job.ranks);
        let mut batches = vec![];
        for batch in loader.by_ref().take(t.accumulate) {
            batches.push(batch?.to_device(self.job.device));
        }
        let (clock, clip) = (self.clock(steps), (t.clip > 0.0).then_some(t.clip));
        let (began, waited) = (Instant::now(), ranks.seconds());
        let report = self.engine.step(&batches, clock, clip).map_err(|e| self.diverged(e, &batches))?;
        let images = ranks.count() as i64 * batches.iter().map(|b| b.labels.size()[0]).sum::<i64>();
        self.meter.add_value("images_per_step", images as f64);
        self.meter.add_step(&report, clock.lr, began.elapsed().as_secs_f64());
        if ranks.count() > 1 {
            self.meter.add_value("seconds.communication", ranks.seconds() - waited);
        }
        self.progress.step += 1;
        self.progress.batch += 1;
        Ok(images as usize)
    }

    /// A checkpoint inside an epoch, when the last one is old or a stop is asked for.
    fn save_if_due(&mut self, steps: usize, display: &Display) -> Result<()> {
        let minutes = self.job.recipe.save.every_minutes;
        let due = minutes > 0.0 && self.progress.batch < steps && self.last_save.elapsed().as_secs_f64() >= minutes * 60.0;
        // Signals and clocks are a rank's own; what follows from them is for all at the same step.
        let ranks = self.job.ranks;
        let [stop, due] = ranks.any([self.job.stop.load(Ordering::Relaxed), due && ranks.leads()]);
        if stop {
            let path = self.save(false)?;
            display.clear();
            return Err(interrupted(format!("step {}", self.progress.step), &path));
        }
        if due {
            self.save(false)?;
        }
        Ok(())
    }

    /// Evaluates the networks, writes the epoch down, chooses what would ship, saves.
    fn finish_epoch(&mut self, epoch: usize) -> Result<()> {
        let test = self.evaluate(&self.data.dataset.test)?;
        let held = self.data.held.as_ref().map(|split| self.evaluate(split)).transpose()?;
        self.record(epoch, &test, held.as_ref())?;
        self.progress.epoch = epoch + 1;
        self.progress.batch = 0;
        self.meter = Meter::default();
        let better = held.is_some_and(|held| self.choose(epoch, &held));
        if let Some(open) = &self.folder {
            open.folder.write_metrics(&self.progress.rows)?;
        }
        let last = self.progress.epoch == self.epochs;
        if better || last || self.progress.epoch.is_multiple_of(self.job.recipe.save.every_epochs) {
            self.save(better || self.data.held.is_none())?;
        }
        let [stop] = self.job.ranks.any([self.job.stop.load(Ordering::Relaxed)]);
        if stop && !last {
            let path = self.save(false)?;
            return Err(interrupted(format!("epoch {}", epoch + 1), &path));
        }
        Ok(())
    }

    /// The epoch's row, its TensorBoard event, and what a person should know of it.
    fn record(&mut self, epoch: usize, test: &CohortAccuracy, held: Option<&CohortAccuracy>) -> Result<()> {
        let mut row = Row::new();
        row.insert("epoch".into(), (epoch + 1).into());
        row.insert("step".into(), self.progress.step.into());
        test.write("test", &mut row);
        if let Some(held) = held {
            held.write("holdout", &mut row);
        }
        let means = self.meter.means();
        row.extend(means.iter().map(|(name, mean)| (name.clone(), (*mean).into())));
        let per_step = self.meter.mean("images_per_step").unwrap_or(f64::NAN);
        let seconds = self.meter.mean("seconds.step_and_meta").unwrap_or(f64::NAN);
        row.insert("images_per_second".into(), (per_step / seconds).into());
        row.insert("peak_mb".into(), allocator::peak_mb().into());
        if let Some(events) = &mut self.events {
            events.row(self.progress.step as u64, &row)?;
        }
        let networks = |acc: &CohortAccuracy| acc.networks().iter().map(|a| format!("{:.2}", a.top1())).collect::<Vec<_>>().join(" ");
        let holdout = held.map_or(String::new(), |h| format!(", held out {}", networks(h)));
        self.say(&format!(
            "epoch {}/{}: loss {:.4}, test top-1 {} (ensemble {:.2}){holdout}, {:.0} images/s",
            epoch + 1,
            self.epochs,
            self.meter.mean("loss").unwrap_or(f64::NAN),
            networks(test),
            test.ensemble.top1(),
            per_step / seconds
        ))?;
        for remark in self.engine.method.remarks(&means) {
            self.say(&format!("note: {remark}"))?;
        }
        self.progress.rows.push(row);
        Ok(())
    }

    /// The best network on the held-out images becomes what ships, if it beats what was chosen before. What a first phase trained is
    /// never chosen.
    fn choose(&mut self, epoch: usize, held: &CohortAccuracy) -> bool {
        if epoch < self.engine.method.extra_epochs() {
            return false;
        }
        let networks = held.networks().into_iter().enumerate().rev(); // of equals the first
        let (peer, accuracy) = networks.max_by(|a, b| a.1.top1().total_cmp(&b.1.top1())).expect("a cohort has networks");
        let new = Best { epoch: epoch + 1, step: self.progress.step, peer, holdout_top1: accuracy.top1() };
        let better = self.progress.best.is_none_or(|old| new.holdout_top1 > old.holdout_top1);
        if better {
            self.progress.best = Some(new);
        }
        better
    }

    /// The networks that would ship on a split, of which every rank takes its part.
    fn evaluate(&self, split: &Split) -> Result<CohortAccuracy> {
        let mut accuracy = CohortAccuracy::default();
        let (rank, count) = (self.job.ranks.rank(), self.job.ranks.count());
        let own = split.subset(&(rank * split.len() / count..(rank + 1) * split.len() / count).collect::<Vec<_>>());
        let mut networks = self.engine.frozen(self.data.dataset.classes.len() as i64, tch::get_num_threads() as usize);
        for batch in Loader::eval(&own, EVAL_BATCH, self.data.test_transform.clone()) {
            let batch = batch?;
            let answers = networks.iter_mut().map(|n| n.extract(&batch.views[0], false)).collect::<Result<Vec<_>>>()?;
            accuracy.add(&answers, &batch.labels);
        }
        accuracy.over_ranks(self.job.ranks);
        Ok(accuracy)
    }

    /// Writes a checkpoint; `best`: it is the one that would ship.
    fn save(&mut self, best: bool) -> Result<PathBuf> {
        self.last_save = Instant::now();
        self.job.ranks.check_same_state(&self.engine.state(), self.progress.step)?;
        if !self.job.ranks.leads() {
            return Ok(self.job.out.clone());
        }
        self.progress.meter = self.meter.state();
        self.progress.seconds = self.before + self.started.elapsed().as_secs_f64();
        let recipe = &self.job.recipe;
        let hash = recipe.hash();
        let extras: Vec<Extra> = self
            .engine
            .shipped()
            .into_iter()
            .enumerate()
            .map(|(m, peer)| {
                let meta = self.meta(peer.arch, m, &hash);
                let write = move |path: &Path| weights::save_safetensors(path, &peer.params.named(), &meta);
                (network_file(m), Box::new(write) as Box<dyn Fn(&Path) -> Result<()>>)
            })
            .collect();
        let path =
            self.checkpoints.save(&Content { recipe, progress: &self.progress, state: &self.engine.state(), extras: &extras }, best)?;
        self.last_save = Instant::now();
        Ok(path)
    }

    /// What a deployable network says about itself.
    fn meta(&self, arch: &Arch, peer: usize, recipe_hash: &str) -> Meta {
        let dataset = &self.data.dataset;
        Meta {
            arch: arch.name.to_string(),
            classes: dataset.classes.clone(),
            image_size: dataset.image_size as i64,
            mean: dataset.mean,
            std: dataset.std,
            interpolation: "bilinear".into(),
            run: self.job.out.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            recipe: recipe_hash.to_string(),
            peer: Some(peer),
            dataset: Some(dataset.name.to_string()),
            epoch: Some(self.progress.epoch),
        }
    }

    /// Says where what made a step fail is kept; the weights and the last checkpoint are as they were. Other faults stay as they are.
    fn diverged(&mut self, error: Error, batches: &[Batch]) -> Error {
        let Error::Diverged { step, what } = error else { return error };
        let kept = diverged::keep_batches(&RunFolder::at(&self.job.out), self.progress.step, self.job.ranks, batches);
        let last = if self.checkpoints.any() { "the last checkpoint is good" } else { "there was no checkpoint yet" };
        let what = format!("{what}; no weight was changed by this step; {kept}; {last}");
        match self.log(&format!("diverged at step {step}: {what}")) {
            Ok(()) => Error::Diverged { step, what },
            Err(e) => e,
        }
    }

    /// A line for the log and, unless quiet, for the person watching.
    fn say(&mut self, line: &str) -> Result<()> {
        if !self.job.quiet && self.job.ranks.leads() {
            eprintln!("{line}");
        }
        self.log(line)
    }

    fn log(&mut self, line: &str) -> Result<()> {
        self.folder.as_mut().map_or(Ok(()), |folder| folder.log(line))
    }
}

fn interrupted(after: String, checkpoint: &Path) -> Error {
    Error::Interrupted(format!("stopped after {after}; everything is in {}; the same command with --resume goes on", checkpoint.display()))
}
