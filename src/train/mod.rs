//! The training loop: the only place where data, cohort, method, metrics and checkpoints meet. It knows no method, architecture or
//! dataset by name.

pub mod checkpoint;
pub mod metrics;
pub mod step;
pub mod tensorboard;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use tch::Device;

use crate::data::{self, Batch, Dataset, Loader, Mix, RandAugment, Split, Transform, sampler};
use crate::error::{Error, Result};
use crate::files;
use crate::methods::{self, Batches, Clock, Needs, Task, Views};
use crate::nets::{self, Arch, LossScale};
use crate::recipe::Recipe;
use crate::run::{Best, FourWays, NetworkSummary, OpenRun, Row, RunFolder, Summary, column, network_file};
use crate::system::device::Precision;
use crate::system::ranks::Ranks;
use crate::system::{allocator, machine};
use crate::train::checkpoint::{Checkpoints, Extra, Progress};
use crate::train::metrics::{CohortAccuracy, Meter};
use crate::train::step::{Engine, StepReport};
use crate::train::tensorboard::EventWriter;
use crate::weights::{self, LoadOptions, Meta};

/// Images per forward pass of an evaluation.
const EVAL_BATCH: usize = 250;
/// How often a plain line is printed where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(20);

/// A run as asked for on the command line.
pub struct Job<'a> {
    pub recipe: Recipe,
    pub out: PathBuf,
    pub data: Option<PathBuf>,
    pub device: Device,
    pub threads: usize,
    /// Go on from the last checkpoint, or from `from`; where there is none, start.
    pub resume: bool,
    pub from: Option<String>,
    /// Weights every network starts from.
    pub init: Option<PathBuf>,
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
    let mut trainer = Trainer::new(job)?;
    trainer.train()
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
    /// Seconds of earlier sittings.
    before: f64,
    last_save: Instant,
    /// The recipe's epochs and those the method trains before them.
    epochs: usize,
}

/// The splits of a run after `fraction` and `holdout`.
struct Prepared {
    dataset: Dataset,
    train: Split,
    held: Option<Split>,
    train_transform: Transform,
    test_transform: Transform,
}

fn prepare_data(recipe: &Recipe, data_root: Option<&Path>, archs: &[&'static Arch]) -> Result<Prepared> {
    let table = &recipe.data;
    let asked = (table.image_size > 0).then_some(table.image_size);
    // The data themselves do not depend on the training seed: an evaluator must see the same split of a folder.
    let mut dataset = data::open(&table.name, data_root, &data::Options { size: asked, ..Default::default() })?;
    match asked {
        Some(size) if dataset.image_size != size => dataset = dataset.resized(size)?,
        Some(_) => {}
        None => {
            // A CIFAR network on large images, or an ImageNet network on small ones, is seldom meant: it is asked for by name.
            let size = dataset.image_size;
            if let Some(arch) = archs.iter().find(|a| a.image_size != size as i64) {
                return Err(Error::input(format!(
                    "{} is made for images of side {own} and {} has {size}: set data.image_size={own} to resize them, or data.image_size={size} to train on them as they are",
                    arch.name,
                    dataset.name,
                    own = arch.image_size
                )));
            }
        }
    }
    let (kept, held) = sampler::holdout(&dataset.train.labels, table.holdout, recipe.train.seed)?;
    let held = (table.holdout > 0).then(|| dataset.train.subset(&held));
    let mut train = dataset.train.subset(&kept);
    if table.fraction < 1.0 {
        train = train.subset(&sampler::stratified(&train.labels, table.fraction, recipe.train.seed));
    }
    let train_transform = Transform {
        erase: recipe.train.random_erasing,
        rand_augment: recipe.train.rand_augment.then(RandAugment::default),
        ..dataset.train_transform()
    };
    Ok(Prepared { train, held, train_transform, test_transform: dataset.test_transform(), dataset })
}

impl<'a> Trainer<'a> {
    fn new(job: Job<'a>) -> Result<Trainer<'a>> {
        let recipe = &job.recipe;
        let archs = recipe.cohort.archs.iter().map(|name| nets::find(name)).collect::<Result<Vec<_>>>()?;
        let data = prepare_data(recipe, job.data.as_deref(), &archs)?;
        let classes = data.dataset.classes.len() as i64;
        let rule = recipe.train.rule();
        let ranks = job.ranks.sharing(recipe.train.sync_bn, recipe.train.gather_negatives);
        let task = Task { ranks, ..Task::new(recipe, &archs, classes, &data.train.labels, job.device) };
        let method = (methods::find(recipe.method_name())?.build)(&task, recipe.method_options())?;
        let needs = method.needs();
        let mix = Mix { mixup: recipe.train.mixup, cutmix: recipe.train.cutmix };
        let mixes = mix.mixup > 0.0 || mix.cutmix > 0.0;
        if mixes && !method.mixes() {
            return Err(Error::input(format!(
                "method {} learns from unmixed images only: set train.mixup and train.cutmix to 0",
                recipe.method_name()
            )));
        }
        // Draw one epoch's order now: a batch that cannot be made is said before anything is written.
        let order = sampler::epoch(&data.train.labels, needs.sampling, recipe.train.batch, recipe.train.seed, 0)?;
        let t = &recipe.train;
        sampler::for_ranks(order, &data.train.labels, needs.sampling, ranks.count(), t.gather_negatives)?;
        if ranks.count() > 1 && t.sync_bn && t.peer_threads > 1 {
            return Err(Error::input(format!(
                "train.sync_bn=true on {} ranks with train.peer_threads={}: networks on threads of their own would meet the other ranks in no fixed order; set train.peer_threads=1",
                ranks.count(),
                t.peer_threads
            )));
        }

        let mut job = job;
        let mut method_table = method.options();
        method_table.insert("name".into(), job.recipe.method_name().into());
        job.recipe.method = method_table;

        // One folder, named by rank 0, which alone looks into it: the others are told what it found.
        job.out = PathBuf::from(ranks.broadcast_text(0, &job.out.display().to_string()));
        let checkpoints = Checkpoints::of(&job.out);
        if ranks.leads() && checkpoints.any() && !job.resume {
            return Err(Error::input(format!(
                "{} already holds a run with checkpoints; add --resume to go on with it, or choose another --out",
                job.out.display()
            )));
        }
        let mut folder = if ranks.leads() { Some(RunFolder::at(&job.out).open()?) } else { None };
        let mut log = |line: &str| folder.as_mut().map_or(Ok(()), |folder| folder.log(line));
        if ranks.leads() {
            checkpoints.sweep()?;
        }
        let t = &job.recipe.train;
        let mut cohort = task.cohort(needs);
        (cohort.threads, cohort.drop_path, cohort.precision) = (t.peer_threads, t.drop_path, t.precision);
        let loss_scale = (t.precision == Precision::F16).then(LossScale::default);
        let engine = Engine { mix: mixes.then_some(mix), loss_scale, ..Engine::new(cohort, method, rule) };

        let mut progress = Progress::default();
        if ranks.leads() && checkpoints.any() {
            let loaded = checkpoints.load(job.from.as_deref())?;
            let saved = Recipe::parse(&loaded.recipe, &format!("of checkpoint {}", loaded.name), &[], &methods::names())?;
            job.recipe.check_resume(&saved, &job.out)?;
            let from = loaded.name.clone();
            progress = loaded.restore(&engine.state())?;
            log(&format!("resumed from {from}: epoch {}, step {}", progress.epoch, progress.step))?;
        } else if let (true, Some(init)) = (ranks.leads(), &job.init) {
            for (m, peer) in engine.cohort.peers.iter().enumerate() {
                let report = weights::load_into(&peer.params, &weights::read(init)?, peer.arch, &LoadOptions::default())?;
                log(&format!("network {m} starts from {}: {report}", init.display()))?;
            }
        }
        if ranks.count() > 1 {
            let text = ranks.broadcast_text(0, &serde_json::to_string(&progress).expect("plain values serialise"));
            progress = serde_json::from_str(&text).map_err(|e| Error::failed(format!("what rank 0 sent is no progress: {e}")))?;
            ranks.broadcast_state(&engine.state());
        }
        let epochs = job.recipe.train.epochs + engine.method.extra_epochs();
        let meter = Meter::restore(&progress.meter);
        let events = if ranks.leads() { Some(EventWriter::create(&job.out)?) } else { None };
        let before = progress.seconds;
        let mut trainer = Trainer {
            job,
            folder,
            checkpoints,
            archs,
            data,
            needs,
            engine,
            progress,
            meter,
            events,
            started: Instant::now(),
            before,
            last_save: Instant::now(),
            epochs,
        };
        trainer.write_inputs()?;
        Ok(trainer)
    }

    /// Recipe, environment and splits, before step 0.
    fn write_inputs(&mut self) -> Result<()> {
        let Some(open) = &self.folder else { return Ok(()) };
        let folder = &open.folder;
        let recipe = &self.job.recipe;
        files::write(&folder.recipe(), recipe.to_toml().as_bytes())?;
        let mut environment = machine::environment(self.job.device, self.job.threads, self.job.commit);
        environment["ranks"] = self.job.ranks.count().into();
        environment["recipe_hash"] = recipe.hash().into();
        let rows = |split: &Split| split.rows.iter().map(|&r| r as usize).collect::<Vec<_>>();
        environment["train_images"] = self.data.train.len().into();
        environment["train_split_hash"] = sampler::hash(&rows(&self.data.train)).into();
        if recipe.data.fraction < 1.0 || recipe.data.holdout > 0 {
            sampler::write_index(&folder.train_indices(), &rows(&self.data.train))?;
        }
        if let Some(held) = &self.data.held {
            environment["holdout_split_hash"] = sampler::hash(&rows(held)).into();
            sampler::write_index(&folder.holdout_indices(), &rows(held))?;
        }
        environment["extra_epochs"] = self.engine.method.extra_epochs().into();
        files::write_json(&folder.environment(), &environment)?;
        folder.write_metrics(&self.progress.rows)?;
        open.point_latest()
    }

    fn train(&mut self) -> Result<Summary> {
        let epochs = self.epochs;
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
            epochs,
            self.job.device,
            self.job.threads,
            self.job.out.display()
        ))?;
        while self.progress.epoch < epochs {
            self.epoch()?;
        }
        self.ship()
    }

    /// The rest of the current epoch, its evaluation, its row and its checkpoint.
    fn epoch(&mut self) -> Result<()> {
        let recipe = self.job.recipe.clone();
        let (t, epoch, epochs) = (&recipe.train, self.progress.epoch, self.epochs);
        let (labels, sampling) = (&self.data.train.labels, self.needs.sampling);
        let order = sampler::epoch(labels, sampling, t.batch, t.seed, epoch as u64)?;
        let order = sampler::for_ranks(order, labels, sampling, self.job.ranks.count(), t.gather_negatives)?;
        let steps = order.len().div_ceil(t.accumulate);
        let views = if self.needs.views == Views::PerPeer { self.engine.cohort.peers.len() } else { 1 };
        let first = self.progress.batch * t.accumulate;
        let mut loader =
            Loader::of_rank(&self.data.train, order, self.data.train_transform.clone(), views, t.seed, epoch as u64, first, self.job.ranks);
        let mut display = Display::new(self.job.quiet || !self.job.ranks.leads(), epoch, epochs, steps, self.progress.batch);
        let clip = (t.clip > 0.0).then_some(t.clip);
        // The epochs a method trains first have the whole schedule to themselves.
        let extra = self.engine.method.extra_epochs();
        let (in_phase, of_phase) = if epoch < extra { (epoch, extra) } else { (epoch - extra, t.epochs) };
        let clock = |i: usize, step: usize| Clock {
            epoch,
            batch: i,
            step,
            lr: t.schedule.lr(t.rate(), t.warmup, in_phase, of_phase, i, steps),
            seed: t.seed,
        };
        if self.progress.batch == 0 {
            let device = self.job.device;
            let mut held = self
                .data
                .held
                .as_ref()
                .map(|split| Loader::eval(split, EVAL_BATCH, self.data.test_transform.clone()).map(|b| Ok(b?.to_device(device))));
            self.engine.epoch_start(held.as_mut().map(|batches| batches as &mut Batches), clock(0, self.progress.step))?;
        }
        while self.progress.batch < steps {
            let mut batches = vec![];
            for batch in loader.by_ref().take(t.accumulate) {
                batches.push(batch?.to_device(self.job.device));
            }
            let i = self.progress.batch;
            let clock = clock(i, self.progress.step);
            let (began, waited) = (Instant::now(), self.job.ranks.seconds());
            let report = match self.engine.step(&batches, clock, clip) {
                Ok(report) => report,
                Err(e @ Error::Diverged { .. }) => return Err(self.diverged(e, &batches)),
                Err(e) => return Err(e),
            };
            let images = self.job.ranks.count() as i64 * batches.iter().map(|b| b.labels.size()[0]).sum::<i64>();
            self.meter.add_value("images_per_step", images as f64);
            self.measure(&report, clock.lr, began.elapsed().as_secs_f64());
            if self.job.ranks.count() > 1 {
                self.meter.add_value("seconds.communication", self.job.ranks.seconds() - waited);
            }
            self.progress.step += 1;
            self.progress.batch += 1;
            display.tick(&self.meter, images as usize, self.progress.batch, steps, epochs - epoch - 1, &mut |line| {
                self.folder.as_mut().map_or(Ok(()), |folder| folder.log(line))
            })?;
            let minutes = recipe.save.every_minutes;
            let due = minutes > 0.0 && self.progress.batch < steps && self.last_save.elapsed().as_secs_f64() >= minutes * 60.0;
            // Signals and clocks are a rank's own; what follows from them is for all at the same step.
            let [stop, due] = self.job.ranks.any([self.job.stop.load(Ordering::Relaxed), due && self.job.ranks.leads()]);
            if stop {
                let path = self.save(false)?;
                display.clear();
                return Err(Error::Interrupted(format!(
                    "stopped after step {}; everything is in {}; the same command with --resume goes on",
                    self.progress.step,
                    path.display()
                )));
            }
            if due {
                self.save(false)?;
            }
        }
        display.clear();
        self.finish_epoch(epoch)
    }

    /// Adds a step to the sums of the epoch.
    fn measure(&mut self, report: &StepReport, lr: f64, seconds: f64) {
        let mut total = 0.0;
        let mut raw: std::collections::BTreeMap<&str, (tch::Tensor, tch::Tensor)> = Default::default();
        for term in &report.terms {
            let weighted = &term.value * term.weight;
            match raw.get_mut(term.name) {
                Some((sum, weighted_sum)) => {
                    *sum = &*sum + &term.value;
                    *weighted_sum = &*weighted_sum + weighted;
                }
                None => drop(raw.insert(term.name, (term.value.shallow_clone(), weighted))),
            }
        }
        let mut loss: Option<tch::Tensor> = None;
        for (name, (value, weighted)) in raw {
            self.meter.add(&format!("term.{name}"), &value);
            self.meter.add(&format!("weighted.{name}"), &weighted);
            loss = Some(loss.map_or(weighted.shallow_clone(), |sum| sum + &weighted));
        }
        if let Some(loss) = loss {
            self.meter.add("loss", &loss);
        }
        for (name, value) in &report.notes {
            self.meter.add(name, value);
        }
        if let Some(norm) = &report.grad_norm {
            self.meter.add("grad_norm", norm);
        }
        self.meter.add_value("lr", lr);
        if let Some(meta) = report.meta_seconds {
            self.meter.add_value("seconds.meta_step", meta);
            total += meta;
        }
        self.meter.add_value("seconds.step", seconds - total);
        self.meter.add_value("seconds.step_and_meta", seconds);
    }

    fn finish_epoch(&mut self, epoch: usize) -> Result<()> {
        let test = self.evaluate(&self.data.dataset.test.clone())?;
        let held = self.data.held.clone().map(|split| self.evaluate(&split)).transpose()?;
        let mut row = Row::new();
        row.insert("epoch".into(), (epoch + 1).into());
        row.insert("step".into(), self.progress.step.into());
        test.write("test", &mut row);
        if let Some(held) = &held {
            held.write("holdout", &mut row);
        }
        let means = self.meter.means();
        row.extend(means.iter().map(|(name, mean)| (name.clone(), (*mean).into())));
        let per_step = self.meter.mean("images_per_step").unwrap_or(f64::NAN);
        let seconds = self.meter.mean("seconds.step_and_meta").unwrap_or(f64::NAN);
        row.insert("images_per_second".into(), (per_step / seconds).into());
        row.insert("peak_mb".into(), allocator::peak_mb().into());
        let scalars: Vec<(String, f64)> = row.iter().filter_map(|(k, v)| Some((k.replacen('.', "/", 1), v.as_f64()?))).collect();
        if let Some(events) = &mut self.events {
            events.scalars(self.progress.step as u64, &scalars)?;
        }

        let networks = |acc: &CohortAccuracy| acc.networks().iter().map(|a| format!("{:.2}", a.top1())).collect::<Vec<_>>().join(" ");
        let holdout = held.as_ref().map_or(String::new(), |h| format!(", held out {}", networks(h)));
        let line = format!(
            "epoch {}/{}: loss {:.4}, test top-1 {} (ensemble {:.2}){holdout}, {:.0} images/s",
            epoch + 1,
            self.epochs,
            self.meter.mean("loss").unwrap_or(f64::NAN),
            networks(&test),
            test.ensemble.top1(),
            per_step / seconds
        );
        self.say(&line)?;
        for remark in self.engine.method.remarks(&means) {
            self.say(&format!("note: {remark}"))?;
        }

        self.progress.rows.push(row);
        self.progress.epoch = epoch + 1;
        self.progress.batch = 0;
        self.meter = Meter::default();
        let chosen = held.filter(|_| epoch >= self.engine.method.extra_epochs()).map(|held| {
            let (peer, acc) = held
                .networks()
                .into_iter()
                .enumerate()
                .rev()
                .max_by(|a, b| a.1.top1().total_cmp(&b.1.top1()))
                .expect("a cohort has networks");
            Best { epoch: epoch + 1, step: self.progress.step, peer, holdout_top1: acc.top1() }
        });
        let better = chosen.is_some_and(|new| self.progress.best.is_none_or(|old| new.holdout_top1 > old.holdout_top1));
        if better {
            self.progress.best = chosen;
        }
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
            return Err(Error::Interrupted(format!(
                "stopped after epoch {}; everything is in {}; the same command with --resume goes on",
                epoch + 1,
                path.display()
            )));
        }
        Ok(())
    }

    fn evaluate(&mut self, split: &Split) -> Result<CohortAccuracy> {
        let mut accuracy = CohortAccuracy::default();
        let (rank, ranks) = (self.job.ranks.rank(), self.job.ranks.count());
        let own = split.subset(&(rank * split.len() / ranks..(rank + 1) * split.len() / ranks).collect::<Vec<_>>());
        let mut networks = self.engine.frozen(self.data.dataset.classes.len() as i64, tch::get_num_threads() as usize);
        for batch in Loader::eval(&own, EVAL_BATCH, self.data.test_transform.clone()) {
            let batch = batch?;
            let answers = networks.iter_mut().map(|n| n.extract(&batch.views[0], false)).collect::<Result<Vec<_>>>()?;
            accuracy.add(&answers, &batch.labels);
        }
        accuracy.over_ranks(self.job.ranks);
        Ok(accuracy)
    }

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
        let path = self.checkpoints.save(&recipe.to_toml(), &hash, &self.progress, &self.engine.state(), &extras, best)?;
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

    /// Keeps what made the step fail, for replay; the weights and the last checkpoint are as they were.
    fn diverged(&mut self, error: Error, batches: &[Batch]) -> Error {
        let of_rank = (self.job.ranks.count() > 1).then(|| self.job.ranks.rank());
        let path = RunFolder::at(&self.job.out).diverged_batch(self.progress.step, of_rank);
        let mut tensors = vec![];
        for (i, batch) in batches.iter().enumerate() {
            tensors.extend(batch.views.iter().enumerate().map(|(v, t)| (format!("batch.{i}.view.{v}"), t.contiguous())));
            tensors.push((format!("batch.{i}.labels"), batch.labels.shallow_clone()));
            tensors.push((format!("batch.{i}.index"), batch.index.shallow_clone()));
        }
        let kept = match tch::Tensor::write_safetensors(&tensors, &path) {
            Ok(()) => format!(
                "the batch{} is in {}",
                if of_rank.is_none() { "" } else { " of this rank (the others' beside it)" },
                path.display()
            ),
            Err(e) => format!("the batch could not be written to {}: {e}", path.display()),
        };
        let last = if self.checkpoints.any() { "the last checkpoint is good" } else { "there was no checkpoint yet" };
        match error {
            Error::Diverged { step, what } => {
                let what = format!("{what}; no weight was changed by this step; {kept}; {last}");
                if let Err(e) = self.log(&format!("diverged at step {step}: {what}")) {
                    return e;
                }
                Error::Diverged { step, what }
            }
            other => other,
        }
    }

    /// Copies the networks that ship to `networks/`: the epoch the held-out part chose, or the last one.
    fn ship(&mut self) -> Result<Summary> {
        let Some(open) = &self.folder else { return Ok(self.summary(vec![])) };
        let folder = open.folder.clone();
        let from = folder.checkpoints().join(if self.data.held.is_some() { "best" } else { "last" });
        let to = folder.networks();
        std::fs::create_dir_all(&to).map_err(Error::io("cannot make", &to))?;
        let mut shipped = vec![];
        for m in 0..self.engine.shipped().len() {
            let (source, target) = (from.join(network_file(m)), folder.network(m));
            files::write(&target, &std::fs::read(&source).map_err(Error::io("cannot read", &source))?)?;
            shipped.push(target);
        }
        if let Some(best) = self.progress.best {
            files::point(&folder.best_network(), &network_file(best.peer))?;
        }
        let summary = self.summary(shipped);
        folder.write_summary(&summary)?;
        self.log(&format!("finished: {} steps", self.progress.step))?;
        Ok(summary)
    }

    fn summary(&self, shipped: Vec<PathBuf>) -> Summary {
        // What a first phase trained is not what ships.
        let extra = self.engine.method.extra_epochs();
        let rows = &self.progress.rows;
        let counted = &rows[extra..];
        let last = |name: &str| column(counted, name).last().copied().unwrap_or(f64::NAN);
        let mean = |name: &str| column(counted, name).iter().sum::<f64>() / counted.len() as f64;
        let networks = self.engine.shipped().into_iter().enumerate().map(|(m, peer)| NetworkSummary {
            arch: peer.arch.name.to_string(),
            accuracy: FourWays::of(rows, m, extra).expect("a finished run has rows"),
        });
        Summary {
            out: self.job.out.clone(),
            networks: networks.collect(),
            ensemble_top1: last("test.ensemble.top1"),
            best: self.progress.best,
            epochs: self.progress.rows.len(),
            steps: self.progress.step,
            seconds: self.before + self.started.elapsed().as_secs_f64(),
            seconds_per_step: mean("seconds.step_and_meta"),
            peak_mb: column(counted, "peak_mb").into_iter().fold(0.0, f64::max),
            shipped,
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

/// A bar on a terminal, a plain line now and then elsewhere.
struct Display {
    bar: Option<ProgressBar>,
    quiet: bool,
    label: String,
    last_line: Instant,
    started: Instant,
    images: usize,
    first: usize,
}

impl Display {
    fn new(quiet: bool, epoch: usize, epochs: usize, steps: usize, first: usize) -> Display {
        let label = format!("epoch {}/{epochs}", epoch + 1);
        let bar = (!quiet && std::io::stderr().is_terminal()).then(|| {
            let style = ProgressStyle::with_template("{prefix} {bar:30} {pos}/{len} {msg}").expect("a valid template");
            let bar = ProgressBar::new(steps as u64).with_style(style).with_prefix(label.clone()).with_position(first as u64);
            bar.tick();
            bar
        });
        Display { bar, quiet, label, last_line: Instant::now(), started: Instant::now(), images: 0, first }
    }

    fn tick(
        &mut self,
        meter: &Meter,
        images: usize,
        done: usize,
        steps: usize,
        epochs_left: usize,
        log: &mut dyn FnMut(&str) -> Result<()>,
    ) -> Result<()> {
        self.images += images;
        let due = self.last_line.elapsed() >= if self.bar.is_some() { Duration::from_millis(500) } else { LINE_EVERY };
        if let Some(bar) = &self.bar {
            bar.set_position(done as u64);
        }
        if !due {
            return Ok(());
        }
        self.last_line = Instant::now();
        let elapsed = self.started.elapsed().as_secs_f64();
        let per_step = elapsed / (done - self.first).max(1) as f64;
        let left = per_step * (steps - done + epochs_left * steps) as f64;
        let terms: Vec<String> =
            meter.means().into_iter().filter_map(|(n, v)| Some(format!("{} {v:.3}", n.strip_prefix("term.")?))).collect();
        let message = format!("{:.0} images/s, {} left, {}", self.images as f64 / elapsed, clock_time(left), terms.join(" "));
        match &self.bar {
            Some(bar) => bar.set_message(message),
            None => {
                let line = format!("{} {done}/{steps}: {message}", self.label);
                if !self.quiet {
                    eprintln!("{line}");
                }
                log(&line)?;
            }
        }
        Ok(())
    }

    fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// 3:07 or 1:02:45.
pub fn clock_time(seconds: f64) -> String {
    let s = seconds.max(0.0) as u64;
    if s >= 3600 { format!("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60) } else { format!("{}:{:02}", s / 60, s % 60) }
}
