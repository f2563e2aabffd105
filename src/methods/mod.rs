//! Methods: what a cohort minimises. One file a method, one entry in `METHODS`.

pub mod afd;
mod baseline;
pub mod ckd_mkt;
mod dml;
pub mod ffsd;
pub mod kdcl;
pub mod l_mcl;
mod mcl;
pub mod okddip;
pub mod one;
pub mod parts;
pub mod pcl;
mod refusals;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tch::{Device, Kind, Tensor};

use crate::cohort::{Cohort, CohortOptions, Peer};
use crate::data::{Batch, Sampling};
use crate::error::{Error, Result};
use crate::losses::terms::Terms;
use crate::nets::layers::Pass;
use crate::nets::{Arch, Network, Outputs};
use crate::optim::{Rule, Schedule};
use crate::params::{Named, Params};
use crate::recipe::Recipe;
use crate::registry;
use crate::system::ranks::Ranks;
pub use parts::frozen::Frozen;
use parts::rows::{mutual_rows, task_rows};
use refusals::{at_least, below_one, contrast_limits, count, one_architecture, paired_classes, positive, projector_memory, weights};

/// Every method, in the order they are listed.
pub const METHODS: &[MethodSpec] = &[
    baseline::SPEC,
    dml::SPEC,
    one::SPEC,
    okddip::SPEC,
    afd::SPEC,
    kdcl::SPEC,
    pcl::SPEC,
    ffsd::SPEC,
    ckd_mkt::SPEC,
    mcl::SPEC,
    l_mcl::SPEC,
];

/// An entry of `METHODS`.
pub struct MethodSpec {
    /// Its name in recipes.
    pub name: &'static str,
    /// The paper it is from, for `list methods`.
    pub about: &'static str,
    /// What it needs and ships, in a few words, for `list methods`.
    pub needs: &'static str,
    /// Which of the shipped networks are the method's result.
    pub reported: Reported,
    /// What networks that do not learn (`[cohort] frozen`) do in it, or why there are none.
    pub frozen: Frozen,
    /// Sets of values for the keys that a recipe leaves out, name and TOML, beside "paper": the defaults.
    presets: &'static [(&'static str, &'static str)],
    /// Reads its own options (the `[method]` table without `name`), refuses what it cannot do.
    pub build: fn(&Task, toml::Table) -> Result<Box<dyn Method>>,
}

/// Which of the networks that ship count as the method's result in tables. Epochs of a first phase (CKD-MKT's) never do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reported {
    /// All of them; a run's number is their mean. PCL ships its mean teachers, so these are meant.
    All,
    /// The first: the leader its paper keeps (OKDDip, FFSD).
    First,
}

impl Reported {
    /// For lists.
    pub fn words(self) -> &'static str {
        match self {
            Reported::All => "mean of the shipped networks",
            Reported::First => "the leader, shipped first",
        }
    }

    /// Does the shipped network of this number count?
    pub fn counts(self, number: usize) -> bool {
        match self {
            Reported::All => true,
            Reported::First => number == 0,
        }
    }
}

impl MethodSpec {
    /// What the key `preset` of its options may be.
    pub fn presets(&self) -> impl Iterator<Item = &'static str> {
        std::iter::once("paper").chain(self.presets.iter().map(|p| p.0))
    }
}

/// The method of this name, or an error that lists those there are.
pub fn find(name: &str) -> Result<&'static MethodSpec> {
    registry::find("method", name, METHODS, |m| m.name)
}

/// The names of all methods, in the order they are listed.
pub fn names() -> Vec<&'static str> {
    METHODS.iter().map(|m| m.name).collect()
}

/// What a method may know about the job when it is built.
pub struct Task<'a> {
    /// The architectures of the recipe's networks.
    pub archs: &'a [&'static Arch],
    /// How many networks teach beside them and do not learn.
    pub frozen: usize,
    /// How many classes the dataset has.
    pub classes: i64,
    /// The labels of the training split, in its order: memory banks key on them.
    pub train_labels: &'a [i64],
    /// Images in a batch.
    pub batch: usize,
    /// The optimizer of the networks: a method's own modules usually follow it.
    pub rule: Rule,
    /// The share of a label's weight that is spread over all classes.
    pub label_smoothing: f64,
    /// Images per class held out of the training split; 0 is none.
    pub holdout: usize,
    /// Epochs of the recipe.
    pub epochs: usize,
    /// Where the method's modules live.
    pub device: Device,
    /// The precision of their weights.
    pub kind: Kind,
    /// Decides their starting values.
    pub seed: u64,
    /// The processes that train together.
    pub ranks: Ranks,
}

impl<'a> Task<'a> {
    /// What the recipe says, for these networks and training labels, in one process and f32.
    pub fn new(recipe: &Recipe, archs: &'a [&'static Arch], classes: i64, train_labels: &'a [i64], device: Device) -> Task<'a> {
        let train = &recipe.train;
        Task {
            archs,
            frozen: recipe.cohort.frozen.len(),
            classes,
            train_labels,
            batch: train.batch,
            rule: train.rule(),
            label_smoothing: train.label_smoothing,
            holdout: recipe.data.holdout,
            epochs: train.epochs,
            device,
            kind: Kind::Float,
            seed: train.seed,
            ranks: Ranks::ALONE,
        }
    }

    /// A cohort as a method with these needs trains it.
    pub fn cohort(&self, needs: Needs) -> Cohort {
        Cohort::new(&CohortOptions {
            archs: &needs.archs(self.archs),
            classes: self.classes,
            branches: needs.branches,
            shared_stages: needs.shared_stages,
            device: self.device,
            kind: self.kind,
            seed: self.seed,
            ranks: self.ranks,
        })
    }
}

/// One view shared by all peers, or one each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Views {
    /// All peers see the same augmentation of an image.
    Shared,
    /// Each peer sees an augmentation of its own.
    PerPeer,
}

/// What the trainer must provide.
#[derive(Debug, Clone, Copy)]
pub struct Needs {
    /// How batches are drawn.
    pub sampling: Sampling,
    /// How many augmentations of each image.
    pub views: Views,
    /// Auxiliary branches on every stage but the last.
    pub branches: bool,
    /// How many stages all peers share.
    pub shared_stages: usize,
    /// Networks of the first architecture behind those of the recipe, trained like them (FFSD's leader).
    pub extra_peers: usize,
}

impl Default for Needs {
    fn default() -> Needs {
        Needs { sampling: Sampling::Shuffled, views: Views::Shared, branches: false, shared_stages: 0, extra_peers: 0 }
    }
}

impl Needs {
    /// The architectures of the whole cohort: the recipe's and the extra peers'.
    pub fn archs(&self, recipe: &[&'static Arch]) -> Vec<&'static Arch> {
        let extra = recipe.first().into_iter().flat_map(|first| std::iter::repeat_n(*first, self.extra_peers));
        recipe.iter().copied().chain(extra).collect()
    }
}

/// Where a step stands.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    /// The epoch, from 0.
    pub epoch: usize,
    /// The batch within the epoch, from 0.
    pub batch: usize,
    /// Steps since the beginning of the run, from 0.
    pub step: usize,
    /// The networks' learning rate in this step.
    pub lr: f64,
    /// The seed of the run, for streams of random numbers.
    pub seed: u64,
}

/// Modules of the method's own, stepped from the same backward pass as the networks.
pub struct Group {
    /// Its name in checkpoints and for `Terms::add_apart`.
    pub name: &'static str,
    /// What is stepped.
    pub params: Params,
    /// How it is stepped.
    pub rule: Rule,
    /// At which learning rate.
    pub rate: Rate,
    /// Stepped by the rows added for it alone (`Terms::add_apart`), from a backward pass of its own; may hold the networks' variables.
    pub apart: bool,
}

impl Group {
    /// Learns with the networks, at their rate.
    pub fn new(name: &'static str, params: Params, rule: Rule) -> Group {
        Group { name, params, rule, rate: Rate::Networks, apart: false }
    }
}

/// The learning rate of a group.
#[derive(Debug, Clone, PartialEq)]
pub enum Rate {
    /// That of the networks.
    Networks,
    /// A base of its own, divided by 10 at each of these epochs.
    Steps {
        /// The rate of the first epoch.
        base: f64,
        /// Epochs, from 0, at which it is divided by 10.
        milestones: Vec<usize>,
    },
}

impl Rate {
    /// The learning rate of a step.
    pub fn at(&self, clock: Clock) -> f64 {
        match self {
            Rate::Networks => clock.lr,
            Rate::Steps { base, milestones } => base * Schedule::Steps(milestones.clone()).factor(clock.epoch, 0),
        }
    }
}

/// What `Method::epoch_start` did to the networks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Nothing, or nothing that optimizers need to know of.
    Continued,
    /// They were initialised again: every optimizer starts afresh too.
    Anew,
}

/// Batches without augmentation.
pub type Batches<'a> = dyn Iterator<Item = Result<Batch>> + 'a;

/// What a method sees after the networks were stepped.
pub struct Stepped<'a> {
    /// The networks, stepped.
    pub cohort: &'a mut Cohort,
    /// The cohort's parameters (networks and branches), in the optimizer's order.
    pub theta: &'a Params,
    /// The batch of the step.
    pub batch: &'a Batch,
    /// The outputs the step was computed from (before the weights moved).
    pub outs: &'a [Outputs],
    /// Where the step stands.
    pub clock: Clock,
    /// On a device that nobody waits for, a scalar there: where it is 1 the step was not finite, and nothing may change.
    pub skip: Option<&'a Tensor>,
}

/// What became of a step whose batches a method has seen.
#[derive(Debug, Clone, Copy)]
pub enum Outcome<'a> {
    /// It counts.
    Stands,
    /// Its numbers were not finite: everything is to be as before it.
    Undone,
    /// Undone where this scalar on the device is 1, as `Stepped::skip`.
    UndoneWhere(&'a Tensor),
}

/// A training method. `losses` may be evaluated many times on one batch (the bilevel scheme does): it changes nothing but the
/// running statistics of normalisation layers, as a network's forward pass does.
pub trait Method: Send {
    /// What the trainer must provide; by default shuffled batches, one view, no branches, nothing shared.
    fn needs(&self) -> Needs {
        Needs::default()
    }

    /// Its options as resolved: every key with its value, as written to the run folder.
    fn options(&self) -> toml::Table;

    /// Epochs the method trains before those of the recipe, with the recipe's schedule stretched over them (CKD-MKT's first phase).
    /// `Clock::epoch` counts through.
    fn extra_epochs(&self) -> usize {
        0
    }

    /// Before the first batch of each epoch. `holdout`: the held-out images in evaluation form, where there are any.
    fn epoch_start(&mut self, _cohort: &mut Cohort, _holdout: Option<&mut Batches>, _clock: Clock) -> Result<Start> {
        Ok(Start::Continued)
    }

    /// The plain networks that are evaluated and saved, the one its paper keeps first where it names one.
    fn shipped<'a>(&'a self, cohort: &'a Cohort) -> Vec<&'a Peer> {
        cohort.peers.iter().collect()
    }

    /// Once per batch, before the forward pass: draw negatives, run mean teachers. Labels and places are in host memory if the step was
    /// given them there.
    fn prepare(&mut self, _batch: &Batch, _clock: Clock) -> Result<()> {
        Ok(())
    }

    /// Before `losses` and `mixed_losses`, where there are networks that do not learn: what they say of the same images (of the mixed ones
    /// where they are mixed), F x [B, C] without a graph. For methods that let them teach (`MethodSpec::frozen`).
    fn taught_by(&mut self, _frozen: Vec<Tensor>) {}

    /// The terms to be minimised on a batch. A method that `mixes` writes `mixed_losses` alone: this is the same with nothing mixed.
    fn losses(&self, outs: &[Outputs], batch: &Batch, clock: Clock) -> Result<Terms> {
        self.mixed_losses(outs, outs, &batch.labels, batch, clock)
    }

    /// Can it learn from mixed images (`mixed_losses`)?
    fn mixes(&self) -> bool {
        false
    }

    /// Where images are mixed, does it ask about the unmixed ones too? Only then are they run through the networks.
    fn asks_unmixed(&self) -> bool {
        false
    }

    /// `losses` where images are mixed: terms of labels and logits on `mixed` with the probabilities `targets` [B, C], terms that ask
    /// whether two images are of one class on the unmixed `outs`, which are the mixed ones again unless `asks_unmixed`.
    fn mixed_losses(&self, _outs: &[Outputs], _mixed: &[Outputs], _targets: &Tensor, _batch: &Batch, _clock: Clock) -> Result<Terms> {
        Err(Error::failed("this method learns from unmixed images only"))
    }

    /// Modules of its own that are trained with the networks.
    fn groups(&self, _cohort: &Cohort) -> Vec<Group> {
        vec![]
    }

    /// After the backward pass of each batch, before the weights move: memory banks take in its embeddings. Labels and places as for
    /// `prepare`.
    fn after_batch(&mut self, _outs: &[Outputs], _batch: &Batch, _clock: Clock) -> Result<()> {
        Ok(())
    }

    /// When it is known whether the step is finite, before `after_step`: takes back what `after_batch` remembered, if it is not.
    /// Running statistics and counters among `state` are put back by the caller.
    fn settle(&mut self, _outcome: Outcome<'_>) {}

    /// Will `after_step` run a meta step now? Its seconds are logged apart.
    fn meta_due(&self, _clock: Clock) -> bool {
        false
    }

    /// After the step: averages, discriminators, the meta step (on the last batch, when gradients were accumulated).
    fn after_step(&mut self, _stepped: Stepped<'_>) -> Result<()> {
        Ok(())
    }

    /// Before the first step of a run whose epochs have so many: what a person should know, a line each.
    fn announcements(&self, _steps: usize) -> Vec<String> {
        vec![]
    }

    /// After each epoch, given all so far, the newest last: what a person should know, a line each.
    fn remarks(&self, _epochs: &[EpochMeans]) -> Vec<String> {
        vec![]
    }

    /// lambda of each ordered pair of layers and each image, where it learns one: what `mcl-eval lambda` shows.
    fn layer_weights(&self, _outs: &[Outputs]) -> Vec<(l_mcl::LayerPair, Tensor)> {
        vec![]
    }

    /// The networks' last embeddings, M x [B, d] with unit rows, where it compares networks in a space of their own.
    fn last_embeddings(&self, _outs: &[Outputs]) -> Option<Vec<Tensor>> {
        None
    }

    /// State that is in no group (banks, the meta-network and its optimizer): saving reads these handles, resuming writes through them.
    fn state(&self) -> Named {
        vec![]
    }
}

/// What was logged in an epoch.
pub struct EpochMeans {
    /// Steps of the run up to its end.
    pub steps: usize,
    /// Means over the epoch, by column.
    pub means: Vec<(String, f64)>,
}

/// Options as the recipe gives them, over the preset it names, over the defaults. `preset` names a set of values for the keys that a
/// recipe leaves out. "paper" is the defaults, the common protocol of the L-MCL paper's tables; a method may have others: "original" for
/// what its own authors did, "imagenet" for the L-MCL paper's numbers on another dataset.
fn read_options<T: DeserializeOwned>(spec: &MethodSpec, mut table: toml::Table) -> Result<T> {
    if let Some(preset) = table.remove("preset") {
        let values = match (preset.as_str(), spec.presets.iter().find(|p| preset.as_str() == Some(p.0))) {
            (Some("paper"), _) => "",
            (_, Some((_, values))) => values,
            _ => {
                let accepted: Vec<String> = spec.presets().map(|name| format!("\"{name}\"")).collect();
                return Err(Error::input(format!("[method] preset = {preset}; accepted: {}", accepted.join(", "))));
            }
        };
        for (key, value) in values.parse::<toml::Table>().expect("a preset is valid TOML") {
            table.entry(key).or_insert(value);
        }
    }
    table.try_into().map_err(Error::options("method"))
}

/// Every key of the options with its value, for `Method::options`.
fn resolved<T: Serialize>(options: &T) -> toml::Table {
    toml::Table::try_from(options).expect("plain options serialise")
}

/// The ramp-up of 80 epochs in runs of 300, and the same part of other runs.
fn rampup(epochs: usize) -> usize {
    (epochs as f64 * 80.0 / 300.0).round() as usize
}

/// How many stages the networks share where the option `branch` says that they are branches of one trunk: all but the last `own`, one at
/// least. Independent networks share none.
fn shared_trunk(method: &str, archs: &[&'static Arch], branch: bool, own: usize) -> Result<usize> {
    if !branch {
        return Ok(0);
    }
    let method = format!("{method} with branch = true");
    one_architecture(&method, archs, "they are branches of one trunk; set method.branch=false for independent networks")?;
    Ok(archs[0].depth.saturating_sub(own).max(1))
}

/// Channels, height and width of each stage's map and, last, of the map that is pooled, for images of the architecture's own size.
fn map_shapes(arch: &Arch) -> Vec<[i64; 3]> {
    let _guard = tch::no_grad_guard();
    let (net, _) = Network::build(arch, 1, 0, Device::Cpu, Kind::Float); // on the CPU: only its shapes are read
    let outs = net.forward(&Tensor::zeros([1, 3, arch.image_size, arch.image_size], (Kind::Float, Device::Cpu)), Pass::EVAL); // on the CPU
    outs.maps
        .iter()
        .chain([&outs.pre_pool])
        .map(|map| {
            let size = map.size();
            [size[1], size[2], size[3]]
        })
        .collect()
}
