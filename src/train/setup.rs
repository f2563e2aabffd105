//! Everything before the first step: the data, the engine, the run folder, and what a checkpoint says. Whatever can be refused is
//! refused before anything is written.

use std::path::PathBuf;
use std::time::Instant;

use super::checkpoint::{Checkpoints, Progress};
use super::metrics::Meter;
use super::step::Engine;
use super::tensorboard::EventWriter;
use super::{Job, Trainer};
use crate::data::{self, Dataset, Mix, RandAugment, Split, Transform, sampler};
use crate::error::{Error, Result};
use crate::files;
use crate::methods::{self, Method, Task};
use crate::nets::{self, Arch, LossScale};
use crate::recipe::Recipe;
use crate::run::{OpenRun, RunFolder};
use crate::system::device::Precision;
use crate::system::machine;
use crate::weights::{self, LoadOptions};

impl<'a> Trainer<'a> {
    /// A trainer that stands where the run shall start or go on.
    pub(super) fn new(mut job: Job<'a>) -> Result<Trainer<'a>> {
        job.ranks = job.ranks.sharing(job.recipe.train.sync_bn, job.recipe.train.gather_negatives);
        let archs = job.recipe.cohort.archs.iter().map(|name| nets::find(name)).collect::<Result<Vec<_>>>()?;
        let data = prepare_data(&job, &archs)?;
        let classes = data.dataset.classes.len() as i64;
        let task = Task { ranks: job.ranks, ..Task::new(&job.recipe, &archs, classes, &data.train.labels, job.device) };
        let method = (methods::find(job.recipe.method_name())?.build)(&task, job.recipe.method_options())?;
        check_together(&job, &data, &*method)?;
        resolve_method(&mut job.recipe, &*method);

        let (folder, checkpoints) = open_folder(&mut job)?;
        let mut trainer = Trainer {
            needs: method.needs(),
            epochs: job.recipe.train.epochs + method.extra_epochs(),
            engine: build_engine(&job.recipe, &task, method),
            job,
            folder,
            checkpoints,
            archs,
            data,
            progress: Progress::default(),
            meter: Meter::default(),
            events: None,
            started: Instant::now(),
            before: 0.0,
            last_save: Instant::now(),
        };
        trainer.resume()?;
        trainer.share_start()?;
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
            let from = loaded.name.clone();
            self.progress = loaded.restore(&self.engine.state())?;
            self.log(&format!("resumed from {from}: epoch {}, step {}", self.progress.epoch, self.progress.step))?;
        } else if let Some(init) = self.job.init.clone() {
            for m in 0..self.engine.cohort.peers.len() {
                let peer = &self.engine.cohort.peers[m];
                let report = weights::load_into(&peer.params, &weights::read(&init)?, peer.arch, &LoadOptions::default())?;
                self.log(&format!("network {m} starts from {}: {report}", init.display()))?;
            }
        }
        Ok(())
    }

    /// What rank 0 read is where all ranks stand.
    fn share_start(&mut self) -> Result<()> {
        let ranks = self.job.ranks;
        if ranks.count() > 1 {
            let text = ranks.broadcast_text(0, &serde_json::to_string(&self.progress).expect("plain values serialise"));
            self.progress = serde_json::from_str(&text).map_err(|e| Error::failed(format!("what rank 0 sent is no progress: {e}")))?;
            ranks.broadcast_state(&self.engine.state());
        }
        self.meter = Meter::restore(&self.progress.meter);
        self.before = self.progress.seconds;
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
        self.events = Some(EventWriter::create(folder)?);
        open.point_latest()
    }
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
}

fn prepare_data(job: &Job, archs: &[&'static Arch]) -> Result<Prepared> {
    let recipe = &job.recipe;
    let table = &recipe.data;
    let asked = (table.image_size > 0).then_some(table.image_size);
    // The data themselves do not depend on the training seed: an evaluator must see the same split of a folder.
    let mut dataset =
        data::open(&table.name, job.data.as_deref(), &data::Options { size: asked, own: table.options.clone(), ..Default::default() })?;
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
    sampler::for_ranks(order, &data.train.labels, sampling, ranks.count(), train.gather_negatives)?;
    if ranks.count() > 1 && train.sync_bn && train.peer_threads > 1 {
        return Err(Error::input(format!(
            "train.sync_bn=true on {} ranks with train.peer_threads={}: networks on threads of their own would meet the other ranks in no fixed order; set train.peer_threads=1",
            ranks.count(),
            train.peer_threads
        )));
    }
    Ok(())
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
        return Err(Error::input(format!(
            "{} already holds a run with checkpoints; add --resume to go on with it, or choose another --out",
            job.out.display()
        )));
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
