//! Everything before the first step: the data, the engine, the run folder, and what a checkpoint says. Whatever can be refused is
//! refused before anything is written.

use std::path::PathBuf;
use std::rc::Rc;
use std::time::Instant;

use tch::Device;

use super::checkpoint::{Checkpoints, Loaded};
use super::frozen;
use super::manifest::{Progress, Splits};
use super::metrics::Meter;
use super::progress::Pace;
use super::step::Engine;
use super::tensorboard::EventWriter;
use super::{Job, Trainer};
use crate::cohort::FrozenPeer;
use crate::data::{self, Dataset, Mix, RandAugment, Resident, Sampling, Split, Transform, sampler};
use crate::error::{Error, Result};
use crate::files;
use crate::limits::{self, Need};
use crate::methods::{self, Method, Needs, Task, Views};
use crate::nets::{self, Arch, LossScale};
use crate::recipe::Recipe;
use crate::run::{OpenRun, RunFolder};
use crate::system::device::Precision;
use crate::system::gpu;
use crate::system::machine;
use crate::system::progress::Progress as Watched;
use crate::weights::{self, LoadOptions};

impl<'a> Trainer<'a> {
    /// A trainer that stands where the run shall start or go on.
    pub(super) fn new(mut job: Job<'a>) -> Result<Trainer<'a>> {
        job.ranks = job.ranks.sharing(job.recipe.train.sync_bn, job.recipe.train.gather_negatives);
        gpu::set(job.recipe.train.tf32, job.recipe.train.deterministic);
        let archs = job.recipe.cohort.archs.iter().map(|name| nets::find(name)).collect::<Result<Vec<_>>>()?;
        let spec = methods::find(job.recipe.method_name())?;
        spec.check_frozen(job.recipe.cohort.frozen.len())?;
        let reading = Watched::new(job.quiet || !job.ranks.leads(), format!("reading {}", job.recipe.data.name), 0, "");
        let data = prepare_data(&job, &archs)?;
        drop(reading);
        let classes = data.dataset.classes.len() as i64;
        let task = Task { ranks: job.ranks, ..Task::new(&job.recipe, &archs, classes, &data.train.labels, job.device) };
        let method = (spec.build)(&task, job.recipe.method_options())?;
        check_together(&job, &data, &*method)?;
        let frozen = frozen::open(&mut job, &data.dataset)?;
        check_memory(&job, &data, &method.needs(), &archs, &frozen)?;
        resolve_method(&mut job.recipe, &*method);

        let (needs, epochs) = (method.needs(), job.recipe.train.epochs + method.extra_epochs());
        let mut engine = build_engine(&job.recipe, &task, method);
        engine.cohort.frozen = frozen;
        check_statistics(&job, &data, needs.sampling, &engine)?;
        let (folder, checkpoints) = open_folder(&mut job)?;
        let mut trainer = Trainer {
            needs,
            epochs,
            engine,
            splits: splits(&data),
            job,
            folder,
            checkpoints,
            archs,
            data,
            progress: Progress::default(),
            meter: Meter::default(),
            events: None,
            step_rows: None,
            pace: Pace::default(),
            started: Instant::now(),
            before: 0.0,
            last_save: Instant::now(),
        };
        trainer.resume()?;
        trainer.share_start()?;
        trainer.check_place()?;
        trainer.write_inputs()?;
        Ok(trainer)
    }

    /// Reads the checkpoint to go on from; where there is none, the weights to start from, if any.
    fn resume(&mut self) -> Result<()> {
        if !self.job.ranks.leads() {
            return Ok(());
        }
        if self.checkpoints.any() {
            let loaded = self.checkpoints.load(self.job.from.as_deref())?;
            let saved = Recipe::parse(&loaded.recipe, &format!("of checkpoint {}", loaded.name), &[], &methods::names())?;
            self.job.recipe.check_resume(&saved, &self.job.out)?;
            self.check_splits(&loaded)?;
            let (from, old) = (loaded.name.clone(), loaded.splits.is_empty());
            self.progress = loaded.restore(&self.engine.state())?;
            let (then, now) = (saved.train.epochs, self.job.recipe.train.epochs);
            if then != now {
                self.say(&format!(
                    "note: train.epochs was {then} and is {now} now; from here on the learning rate is that of a run of {now} epochs"
                ))?;
            }
            self.log(&format!("resumed from {from}: epoch {}, step {}", self.progress.epoch, self.progress.step))?;
            if old && self.progress.epoch < self.epochs && self.drawn()?.last().is_some_and(|last| last.len() == 1) {
                self.say("note: the last batch of an epoch had one image; from here on that image joins the batch before it, and an epoch has a batch less")?;
            }
        } else if let Some(init) = self.job.init.clone() {
            for m in 0..self.engine.cohort.peers.len() {
                let peer = &self.engine.cohort.peers[m];
                let report = weights::load_into(&peer.params, &weights::read(&init)?, peer.arch, &LoadOptions::default())?;
                self.log(&format!("network {m} starts from {}: {report}", init.display()))?;
            }
        }
        Ok(())
    }

    /// Refuses to go on with other images than the run began with. A checkpoint of an old format does not say; the run's environment does.
    fn check_splits(&self, loaded: &Loaded) -> Result<()> {
        let mut before = loaded.splits.clone();
        if before.is_empty() {
            let environment = RunFolder::at(&self.job.out).read_environment()?;
            for (name, key) in [("train", "train_split_hash"), ("holdout", "holdout_split_hash")] {
                before.extend(environment[key].as_str().map(|hash| (name.to_string(), hash.to_string())));
            }
        }
        let changed: Vec<&str> =
            before.iter().filter(|(name, hash)| self.splits.get(*name) != Some(*hash)).map(|(name, _)| name.as_str()).collect();
        if changed.is_empty() {
            return Ok(());
        }
        Err(Error::input(format!(
            "cannot resume {}: the dataset {} is not the one that {} was trained on (other images in: {}); bring back the one it had, or choose another folder",
            self.job.out.display(),
            self.data.dataset.name,
            loaded.name,
            changed.join(", ")
        )))
    }

    /// What rank 0 read is where all ranks stand.
    fn share_start(&mut self) -> Result<()> {
        let ranks = self.job.ranks;
        if ranks.count() > 1 {
            let text = ranks.broadcast_text(0, &serde_json::to_string(&self.progress).expect("plain values serialise"));
            self.progress = serde_json::from_str(&text).map_err(|e| Error::failed(format!("what rank 0 sent is no progress: {e}")))?;
            ranks.broadcast_state(&self.engine.state());
        }
        self.meter = Meter::restore(&self.progress.meter, &self.progress.window, self.job.recipe.save.metrics_every > 0);
        self.before = self.progress.seconds;
        Ok(())
    }

    /// Refuses a place that no epoch of this run has. Before a last batch of one image joined the one before it, an epoch had one more.
    fn check_place(&self) -> Result<()> {
        let Progress { epoch, batch, .. } = self.progress;
        if epoch >= self.epochs && batch == 0 {
            return Ok(());
        }
        let steps = self.drawn()?.len().div_ceil(self.job.recipe.train.accumulate);
        if epoch >= self.epochs || batch > steps {
            return Err(Error::input(format!(
                "cannot resume {}: the checkpoint stands at step {batch} of epoch {}, and this run has {} epochs of {steps} steps",
                self.job.out.display(),
                epoch + 1,
                self.epochs
            )));
        }
        Ok(())
    }

    /// Rank 0 writes recipe, environment and splits, before step 0.
    fn write_inputs(&mut self) -> Result<()> {
        let Some(open) = &self.folder else { return Ok(()) };
        let folder = &open.folder;
        let recipe = &self.job.recipe;
        files::write(&folder.recipe(), recipe.to_toml().as_bytes())?;
        let mut environment = machine::environment(self.job.device, self.job.threads, self.job.commit);
        environment["ranks"] = self.job.ranks.count().into();
        environment["recipe_hash"] = recipe.hash().into();
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
        let first = folder.read_environment().ok().filter(|_| self.progress.step > 0);
        files::write_json(&folder.environment(), &machine::over_sittings(first, environment, self.progress.step))?;
        folder.write_metrics(&self.progress.rows)?;
        self.events = Some(EventWriter::create(folder, self.progress.step as u64)?);
        if recipe.save.metrics_every > 0 {
            self.step_rows = Some(folder.open_metrics_steps(self.progress.step)?);
        }
        open.point_latest()
    }
}

/// The places of a split's images in the dataset.
fn rows(split: &Split) -> Vec<usize> {
    split.rows.iter().map(|&row| row as usize).collect()
}

/// What tells the images of this run from others: which ones they are, and their classes.
fn splits(data: &Prepared) -> Splits {
    let labels = |split: &Split| sampler::hash(&split.labels.iter().map(|&label| label as usize).collect::<Vec<_>>());
    let mut all = vec![("train", sampler::hash(&rows(&data.train))), ("train labels", labels(&data.train))];
    all.push(("test labels", labels(&data.dataset.test)));
    all.extend(data.held.as_ref().map(|held| ("holdout", sampler::hash(&rows(held)))));
    all.into_iter().map(|(name, hash)| (name.to_string(), hash)).collect()
}

/// The splits of a run after `fraction` and `holdout`.
pub(super) struct Prepared {
    /// As it was opened: its test split, classes and normalisation.
    pub dataset: Dataset,
    /// What is learnt from.
    pub train: Split,
    /// What the epoch and network that ship are chosen on.
    pub held: Option<Split>,
    /// With augmentation.
    pub train_transform: Transform,
    /// Without.
    pub test_transform: Transform,
    /// The training images on the device, where they live there.
    pub resident: Option<Rc<Resident>>,
}

fn prepare_data(job: &Job, archs: &[&'static Arch]) -> Result<Prepared> {
    let recipe = &job.recipe;
    let table = &recipe.data;
    let asked = (table.image_size > 0).then_some(table.image_size);
    // The data themselves do not depend on the training seed: an evaluator must see the same split of a folder.
    let mut dataset =
        data::open(&table.name, job.data.as_deref(), &data::Options { size: asked, own: table.options.clone(), ..Default::default() })?;
    if dataset.classes.len() < 2 {
        return Err(Error::input(format!(
            "dataset {} has one class ({}): there is nothing to tell apart; at least two are needed",
            dataset.name,
            dataset.classes.join(", ")
        )));
    }
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
    let (train, held) = sampler::for_run(&dataset.train, table.fraction, table.holdout, recipe.train.seed)?;
    let train_transform = Transform {
        erase: recipe.train.random_erasing,
        rand_augment: recipe.train.rand_augment.then(RandAugment::default),
        ..dataset.train_transform()
    };
    let resident = Resident::wanted(table.on_device.asked(), &train, &train_transform, job.device)?.map(Rc::new);
    Ok(Prepared { train, held, train_transform, test_transform: dataset.test_transform(), resident, dataset })
}

/// Refuses what recipe, data, method and ranks cannot do together.
fn check_together(job: &Job, data: &Prepared, method: &dyn Method) -> Result<()> {
    let (train, ranks, sampling) = (&job.recipe.train, job.ranks, method.needs().sampling);
    if mix(&job.recipe).is_some() && !method.mixes() {
        return Err(Error::input(format!(
            "method {} learns from unmixed images only: set train.mixup and train.cutmix to 0",
            job.recipe.method_name()
        )));
    }
    // Draw one epoch's order now: a batch that cannot be made is said before anything is written.
    let order = sampler::epoch(&data.train.labels, sampling, train.batch, train.seed, 0)?;
    sampler::for_training(order, &data.train.labels, sampling, ranks.count(), train.gather_negatives)?;
    if ranks.count() > 1 && train.sync_bn && train.peer_threads > 1 {
        return Err(Error::input(format!(
            "train.sync_bn=true on {} ranks with train.peer_threads={}: networks on threads of their own would meet the other ranks in no fixed order; set train.peer_threads=1",
            ranks.count(),
            train.peer_threads
        )));
    }
    Ok(())
}

/// Refuses batches that cannot be in memory together with the maps that the backward pass needs. A GPU says itself what it has.
fn check_memory(job: &Job, data: &Prepared, needs: &Needs, archs: &[&'static Arch], frozen: &[FrozenPeer]) -> Result<()> {
    if job.device != Device::Cpu {
        return Ok(());
    }
    let all = job.recipe.train.batch.min(data.train.len());
    let (batch, side) = (all.div_ceil(job.ranks.count()), data.dataset.image_size);
    let networks = needs.archs(archs);
    let views = if needs.views == Views::PerPeer { (networks.len() + frozen.len()) as u128 } else { 1 };
    // Of images one batch is learnt from while two are made ahead (`data::Loader`).
    let need = Need::new()
        .and(format!("batches of {batch} images of {side} x {side}"), 3 * views * limits::float_images(batch, side))
        .and(format!("the maps of {} networks", networks.len()), networks.iter().map(|arch| limits::maps(batch, side, arch.maps)).sum());
    // Networks that do not learn answer one after another, and nothing of them is kept.
    let most = frozen.iter().map(|peer| limits::maps(batch, side, peer.arch.maps)).max();
    let need = if let Some(most) = most { need.and("the maps of a frozen network", most) } else { need };
    need.check(&format!("[train] batch = {}", job.recipe.train.batch))
}

/// Refuses batches that leave a BatchNorm one image to take statistics from: their variance would be 0/0.
fn check_statistics(job: &Job, data: &Prepared, sampling: Sampling, engine: &Engine) -> Result<()> {
    let (train, ranks) = (&job.recipe.train, job.ranks);
    let order = sampler::epoch(&data.train.labels, sampling, train.batch, train.seed, 0)?;
    let order = sampler::for_training(order, &data.train.labels, sampling, ranks.count(), train.gather_negatives)?;
    let takers = if ranks.sync_norms() { 1 } else { ranks.count() };
    let normed = engine.state().iter().any(|(name, _)| name.ends_with("running_var"));
    if !normed || order.iter().all(|batch| batch.len() > takers) {
        return Ok(());
    }
    let why = if ranks.count() > 1 {
        format!("train.batch={} on {} ranks", train.batch, ranks.count())
    } else {
        format!("train.batch={} of {} training images", train.batch, data.train.len())
    };
    Err(Error::input(format!("{why}: BatchNorm cannot take statistics from one image; accepted: at least two images a rank and step")))
}

/// The recipe's mixing of images; none where it asks for none.
fn mix(recipe: &Recipe) -> Option<Mix> {
    let mix = Mix { mixup: recipe.train.mixup, cutmix: recipe.train.cutmix };
    (mix.mixup > 0.0 || mix.cutmix > 0.0).then_some(mix)
}

/// The recipe gets every option of the method with its value.
fn resolve_method(recipe: &mut Recipe, method: &dyn Method) {
    let mut table = method.options();
    table.insert("name".into(), recipe.method_name().into());
    recipe.method = table;
}

/// One folder, named by rank 0, which alone looks into it and writes to it: the others are told what it found.
fn open_folder(job: &mut Job) -> Result<(Option<OpenRun>, Checkpoints)> {
    job.out = PathBuf::from(job.ranks.broadcast_text(0, &job.out.display().to_string()));
    let run = RunFolder::at(&job.out);
    let checkpoints = Checkpoints::of(&run);
    if !job.ranks.leads() {
        return Ok((None, checkpoints));
    }
    if checkpoints.any() && !job.resume {
        return Err(Error::value_for(
            &job.out,
            &["resume", "out"],
            "already holds a run with checkpoints; {resume} goes on with it, or choose another {out}",
        ));
    }
    let folder = run.open()?;
    checkpoints.sweep()?;
    Ok((Some(folder), checkpoints))
}

/// Fresh networks, the method's own modules and their optimizers.
fn build_engine(recipe: &Recipe, task: &Task, method: Box<dyn Method>) -> Engine {
    let train = &recipe.train;
    let mut engine = Engine::of(task, method);
    engine.cohort.threads = train.peer_threads;
    engine.cohort.drop_path = train.drop_path;
    engine.cohort.precision = train.precision;
    engine.mix = mix(recipe);
    engine.loss_scale = (train.precision == Precision::F16).then(LossScale::default);
    engine
}
