//! The training loop: the only place where data, cohort, method, metrics and checkpoints meet. It knows no method, architecture or
//! dataset by name.
//!
#![doc = include_str!("README.md")]

mod checkpoint;
mod diverged;
mod evaluate;
mod frozen;
mod manifest;
mod metrics;
mod progress;
mod report;
mod setup;
pub mod step;
mod summary;
mod tensorboard;
mod watch;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use tch::Device;

use crate::data::{Loader, Split, sampler};
use crate::error::{Error, Result, counted};
use crate::methods::{Batches, Clock, Needs, Views};
use crate::nets::Arch;
use crate::params::{self, Named};
use crate::recipe::{Choose, Recipe, Train};
use crate::run::{Best, OpenRun, Row, RunFolder, StepRows, Summary, network_file, network_name, stage_file};
use crate::system::device::{self, Precision};
use crate::system::ranks::Ranks;
use crate::system::{allocator, exhausted, gpu};
use crate::weights::{self, Meta};

use checkpoint::{Checkpoints, Content, Extra};
use manifest::{Progress, Splits};
use metrics::{CohortAccuracy, Meter};
use progress::{Display, Epoch, Pace};
use setup::Prepared;
use step::Engine;
use tensorboard::EventWriter;

/// Images per forward pass of an evaluation.
const EVAL_BATCH: usize = 250;
/// On a device, which small batches leave idle.
const EVAL_BATCH_ON_DEVICE: usize = 1000;

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
    let (device, train) = (job.device, job.recipe.train.clone());
    let checkpoints = Checkpoints::of(&RunFolder::at(&job.out));
    exhausted::caught(|| Trainer::new(job)?.train()).map_err(|e| match e {
        Error::Exhausted(what) => Error::Exhausted(no_memory(&what, device, &train, &checkpoints)),
        other => other,
    })
}

/// What to lower where a run has no room, and what is left of it.
fn no_memory(what: &str, device: Device, train: &Train, checkpoints: &Checkpoints) -> String {
    let halved = format!("train.batch below {} (with train.accumulate above {} as many images make a step)", train.batch, train.accumulate);
    let precision = if train.precision == Precision::F32 && device.is_cuda() { ", or train.precision=\"bf16\"" } else { "" };
    let last = if checkpoints.any() { "the last checkpoint is good" } else { "there was no checkpoint yet" };
    format!("no memory left on {}: {what}; lower {halved}{precision}; {last}", device::name(device))
}

struct Trainer<'a> {
    job: Job<'a>,
    /// Rank 0 writes for all.
    folder: Option<OpenRun>,
    checkpoints: Checkpoints,
    archs: Vec<&'static Arch>,
    data: Prepared,
    splits: Splits,
    needs: Needs,
    engine: Engine,
    progress: Progress,
    meter: Meter,
    events: Option<EventWriter>,
    /// Where rows inside an epoch go, if any are asked for.
    step_rows: Option<StepRows>,
    pace: Pace,
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
            "{} on {}: {} ({}), {} training images, {} held out, {} test, batch {}{}, {}, {}, {} -> {}",
            self.job.recipe.method_name(),
            data.dataset.name,
            counted(self.archs.len(), "network"),
            self.job.recipe.cohort.archs.join(", "),
            data.train.len(),
            data.held.as_ref().map_or(0, Split::len),
            data.dataset.test.len(),
            train.batch,
            if self.job.ranks.count() > 1 { format!(" over {} ranks", self.job.ranks.count()) } else { String::new() },
            counted(self.epochs, "epoch"),
            device::name(self.job.device),
            counted(self.job.threads, "thread"),
            self.job.out.display()
        ))?;
        if self.progress.step == 0 {
            self.present_frozen()?;
            let steps = self.drawn()?.len().div_ceil(self.job.recipe.train.accumulate);
            for line in self.engine.method.announcements(steps) {
                self.say(&format!("note: {line}"))?;
            }
        }
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
        let metas = (0..steps).map(|batch| self.engine.method.meta_due(Clock { batch, ..self.clock(steps) })).collect();
        let mut display = Display::new(quiet, Epoch { number: epoch, epochs: self.epochs, steps, first, metas });
        if first == 0 {
            self.start_epoch(steps)?;
        }
        while self.progress.batch < steps {
            let meta = display.begin(self.progress.batch, &self.pace);
            let taken = self.step(&mut loader, steps)?;
            drop(meta);
            let log = |line: &str| self.folder.as_mut().map_or(Ok(()), |folder| folder.log(line));
            display.tick(&mut self.meter, &mut self.pace, taken, self.progress.batch, log)?;
            self.save_if_due(steps, &display)?;
        }
        display.clear();
        let began = Instant::now();
        self.confirm()?;
        self.finish_epoch(epoch)?;
        self.pace.between(began.elapsed().as_secs_f64());
        Ok(())
    }

    /// The batches of the current epoch as they were drawn.
    fn drawn(&self) -> Result<Vec<Vec<u32>>> {
        let t = &self.job.recipe.train;
        sampler::epoch(&self.data.train.labels, self.needs.sampling, t.batch, t.seed, self.progress.epoch as u64)
    }

    /// The batches of the current epoch that are still to come, and how many steps the whole epoch has.
    fn loader(&self) -> Result<(Loader, usize)> {
        let (t, epoch, ranks) = (&self.job.recipe.train, self.progress.epoch as u64, self.job.ranks);
        let (labels, sampling) = (&self.data.train.labels, self.needs.sampling);
        let order = sampler::for_training(self.drawn()?, labels, sampling, ranks.count(), t.gather_negatives)?;
        let steps = order.len().div_ceil(t.accumulate);
        let views = if self.needs.views == Views::PerPeer { self.engine.cohort.peers.len() + self.engine.cohort.frozen.len() } else { 1 };
        let first = self.progress.batch * t.accumulate;
        let (transform, resident) = (self.data.train_transform.clone(), self.data.resident.clone());
        Ok((Loader::of_rank(&self.data.train, order, transform, views, t.seed, epoch, first, ranks, self.job.device, resident), steps))
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

    /// One optimizer step. Returns on how many images, over all ranks, and the seconds of its meta step, if it had one.
    fn step(&mut self, loader: &mut Loader, steps: usize) -> Result<(usize, Option<f64>)> {
        let (t, ranks) = (&self.job.recipe.train, self.job.ranks);
        let mut batches = vec![];
        while batches.len() < t.accumulate
            && let Some(batch) = loader.next_on(self.job.device)
        {
            batches.push(batch?);
        }
        let (clock, clip) = (self.clock(steps), (t.clip > 0.0).then_some(t.clip));
        let (began, waited) = (Instant::now(), ranks.seconds());
        let images = ranks.count() as i64 * batches.iter().map(|b| b.labels.size()[0]).sum::<i64>();
        let report = self.engine.step_placed(batches, clock, clip);
        let report = report.map_err(|e| self.diverged(e))?;
        let meta = report.meta_seconds;
        self.meter.add_value("images_per_step", images as f64);
        self.meter.add_step(report, clock.lr, began.elapsed().as_secs_f64());
        if ranks.count() > 1 {
            self.meter.add_value("seconds.communication", ranks.seconds() - waited);
        }
        self.progress.step += 1;
        self.progress.batch += 1;
        self.record_step(clock.epoch)?;
        Ok((images as usize, meta))
    }

    /// A row inside an epoch, where they are asked for and one is due: means over the steps since the last.
    fn record_step(&mut self, epoch: usize) -> Result<()> {
        let every = self.job.recipe.save.metrics_every;
        if every == 0 || !self.progress.step.is_multiple_of(every) {
            return Ok(());
        }
        // Only what is known to be finite is written down, as at the end of an epoch.
        self.confirm()?;
        let mut row = Row::new();
        row.insert("epoch".into(), (epoch + 1).into());
        row.insert("step".into(), self.progress.step.into());
        row.extend(self.meter.take_window().into_iter().map(|(name, mean)| (name, mean.into())));
        if let Some(events) = &mut self.events {
            let tagged = row.iter().map(|(name, value)| (format!("by_step.{name}"), value.clone())).collect();
            events.row(self.progress.step as u64, &tagged)?;
        }
        self.step_rows.as_mut().map_or(Ok(()), |rows| rows.add(row))
    }

    /// Waits until every step taken is known to be finite: nothing else is saved, evaluated or shipped.
    fn confirm(&mut self) -> Result<()> {
        let known = self.engine.confirm();
        known.map_err(|e| self.diverged(e))
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
            return Err(interrupted(format!("step {}", self.progress.step), &path, &self.job.out));
        }
        if due {
            self.save(false)?;
        }
        Ok(())
    }

    /// Evaluates the networks, writes the epoch down, chooses what would ship, saves.
    fn finish_epoch(&mut self, epoch: usize) -> Result<()> {
        // A number that is none is named with its network, before any image is answered with it.
        self.check_finite()?;
        let test = self.evaluate(&self.data.dataset.test)?;
        let held = self.data.held.as_ref().map(|split| self.evaluate(split)).transpose()?;
        self.record(epoch, &test, held.as_ref())?;
        self.progress.epoch = epoch + 1;
        self.progress.batch = 0;
        self.meter.next_epoch();
        let better = held.is_some_and(|held| self.choose(epoch, &held));
        if let Some(open) = &self.folder {
            open.folder.write_metrics(&self.progress.rows)?;
        }
        let last = self.progress.epoch == self.epochs;
        let due = better || last || self.progress.epoch.is_multiple_of(self.job.recipe.save.every_epochs);
        let chosen = self.data.held.is_some() && self.job.recipe.train.choose != Choose::Last;
        let saved = if due { Some(self.save(better || !chosen)?) } else { None };
        let [stop] = self.job.ranks.any([self.job.stop.load(Ordering::Relaxed)]);
        if stop && !last {
            let path = saved.map_or_else(|| self.save(false), Ok)?;
            return Err(interrupted(format!("epoch {}", epoch + 1), &path, &self.job.out));
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
        let loss = self.meter.mean("loss").unwrap_or(f64::NAN);
        row.insert("images_per_second".into(), (per_step / seconds).into());
        row.insert("peak_mb".into(), allocator::peak_mb().into());
        if let Some(memory) = gpu::memory(self.job.device) {
            row.insert("device_peak_mb".into(), memory.peak_mb.into());
        }
        if let Some(events) = &mut self.events {
            events.row(self.progress.step as u64, &row)?;
        }
        let networks = |acc: &CohortAccuracy| acc.networks().iter().map(|a| format!("{:.2}", a.top1())).collect::<Vec<_>>().join(" ");
        let holdout = held.map_or(String::new(), |h| format!(", held out {}", networks(h)));
        // Top-1 in percent; a pair's line fits 80 columns. The speed is in the lines between and in the metrics.
        self.say(&format!(
            "epoch {}/{}: loss {loss:.2}, test {} (ensemble {:.2}){holdout}",
            epoch + 1,
            self.epochs,
            networks(test),
            test.ensemble.top1()
        ))?;
        self.progress.rows.push(row);
        for remark in self.engine.method.remarks(&metrics::epochs(&self.progress.rows)) {
            self.say(&format!("note: {remark}"))?;
        }
        Ok(())
    }

    /// The best network on the held-out images becomes what ships, if it beats what was chosen before; with `train.choose = "any"` the
    /// best of all stages that ship. What a first phase trained is never chosen.
    fn choose(&mut self, epoch: usize, held: &CohortAccuracy) -> bool {
        if epoch < self.engine.method.extra_epochs() || self.job.recipe.train.choose == Choose::Last {
            return false;
        }
        let shipped = self.engine.shipped();
        let any = self.job.recipe.train.choose == Choose::Any;
        let mut candidates: Vec<(usize, Option<usize>, f64)> = vec![];
        for (peer, stages) in held.stages.iter().enumerate() {
            let (own, branches) = stages.split_last().expect("a network has a last stage");
            candidates.push((peer, None, own.top1()));
            let ships = |l: &usize| any && shipped[peer].stage(*l).is_some();
            candidates.extend((0..branches.len()).filter(ships).map(|l| (peer, Some(l + 1), branches[l].top1())));
        }
        let first = candidates.into_iter().rev().max_by(|a, b| a.2.total_cmp(&b.2)); // of equals the first
        let (peer, stage, holdout_top1) = first.expect("a cohort has networks");
        let new = Best { epoch: epoch + 1, step: self.progress.step, peer, holdout_top1, stage };
        let better = self.progress.best.is_none_or(|old| new.holdout_top1 > old.holdout_top1);
        if better {
            self.progress.best = Some(new);
        }
        better
    }

    /// Writes a checkpoint; `best`: it is the one that would ship.
    fn save(&mut self, best: bool) -> Result<PathBuf> {
        self.confirm()?;
        self.last_save = Instant::now();
        self.job.ranks.check_same_state(&self.engine.state(), self.progress.step)?;
        self.check_finite()?;
        if !self.job.ranks.leads() {
            return Ok(self.job.out.clone());
        }
        (self.progress.meter, self.progress.window) = self.meter.state();
        self.progress.seconds = self.before + self.started.elapsed().as_secs_f64();
        let recipe = &self.job.recipe;
        let hash = recipe.hash();
        let mut extras: Vec<Extra> = vec![];
        for (m, peer) in self.engine.shipped().into_iter().enumerate() {
            let stages = (0..peer.branches.len()).filter_map(|l| Some((stage_file(m, l + 1), peer.stage(l)?)));
            for (file, named) in std::iter::once((network_file(m), peer.params.named())).chain(stages) {
                let meta = self.meta(peer.arch, m, &hash);
                extras.push((file, Box::new(move |path: &Path| weights::save_safetensors(path, &named, &meta))));
            }
        }
        let path = self.checkpoints.save(
            &Content { recipe, splits: &self.splits, progress: &self.progress, state: &self.engine.state(), extras: &extras },
            best,
        )?;
        self.last_save = Instant::now();
        Ok(path)
    }

    /// A network, a running statistic or anything else that would be saved and holds a number that is none ends the run on every rank:
    /// what ships computes with all of them.
    fn check_finite(&mut self) -> Result<()> {
        let shipped = self.engine.shipped();
        let named = shipped.iter().enumerate().flat_map(|(m, peer)| {
            let place = network_name(m);
            peer.params.named().into_iter().map(move |(name, t)| (format!("{place} ({}) {name}", peer.arch.name), t))
        });
        let named: Named = named.collect();
        let checked = params::check_finite(&named).and_then(|()| params::check_finite(&self.engine.state()));
        let Err(found) = checked else { return Ok(()) };
        let last = if self.checkpoints.any() { "the last checkpoint is good" } else { "there was no checkpoint yet" };
        let what = format!("{found}; nothing was saved; {last}");
        self.log(&format!("at step {}: {what}", self.progress.step))?;
        Err(Error::Diverged { step: self.progress.step, what })
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

    /// Says where what made a step fail is kept; the last checkpoint is as it was. Other faults stay as they are.
    fn diverged(&mut self, error: Error) -> Error {
        let Error::Diverged { step, what } = error else { return error };
        let kept = diverged::keep_batches(&RunFolder::at(&self.job.out), step, self.job.ranks, self.engine.faulty_batches());
        let last = if self.checkpoints.any() { "the last checkpoint is good" } else { "there was no checkpoint yet" };
        let what = format!("{what}; {kept}; {last}");
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

/// The folder is named: without `--out` the same command would begin a run of its own.
fn interrupted(after: String, checkpoint: &Path, run: &Path) -> Error {
    let (saved, run) = (checkpoint.display(), run.display());
    Error::Interrupted(format!("stopped after {after}; everything is in {saved}; the same command with --out {run} --resume goes on"))
}
