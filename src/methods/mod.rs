//! Methods: what a cohort minimises. One file a method, one entry in `METHODS`.

pub mod afd;
pub mod baseline;
pub mod ckd_mkt;
pub mod dml;
pub mod ffsd;
pub mod kdcl;
pub mod l_mcl;
pub mod mcl;
pub mod okddip;
pub mod one;
pub mod parts;
pub mod pcl;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tch::{Device, Kind, Tensor};

use crate::cohort::{Cohort, CohortOptions, Peer};
use crate::data::{Batch, Sampling};
use crate::error::{Error, Result};
use crate::losses::logit;
use crate::losses::terms::Terms;
use crate::nets::layers::Pass;
use crate::nets::{Arch, Network, Outputs};
use crate::optim::{Rule, Schedule};
use crate::params::{Named, Params};
use crate::recipe::Recipe;
use crate::registry;
use crate::system::ranks::Ranks;

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

pub struct MethodSpec {
    pub name: &'static str,
    /// The paper it is from, for `list methods`.
    pub about: &'static str,
    /// What it needs and ships, in a few words, for `list methods`.
    pub needs: &'static str,
    /// Reads its own options (the `[method]` table without `name`), refuses what it cannot do.
    pub build: fn(&Task, toml::Table) -> Result<Box<dyn Method>>,
}

pub fn find(name: &str) -> Result<&'static MethodSpec> {
    registry::find("method", name, METHODS, |m| m.name)
}

/// The names of all methods, in the order they are listed.
pub fn names() -> Vec<&'static str> {
    METHODS.iter().map(|m| m.name).collect()
}

/// What a method may know about the job when it is built.
pub struct Task<'a> {
    pub archs: &'a [&'static Arch],
    pub classes: i64,
    /// The labels of the training split, in its order: memory banks key on them.
    pub train_labels: &'a [i64],
    pub batch: usize,
    /// The optimizer of the networks: a method's own modules usually follow it.
    pub rule: Rule,
    pub label_smoothing: f64,
    /// Images per class held out of the training split; 0 is none.
    pub holdout: usize,
    pub epochs: usize,
    pub device: Device,
    pub kind: Kind,
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
    Shared,
    PerPeer,
}

/// What the trainer must provide.
#[derive(Debug, Clone, Copy)]
pub struct Needs {
    pub sampling: Sampling,
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
        recipe.iter().copied().chain(std::iter::repeat_n(recipe[0], self.extra_peers)).collect()
    }
}

/// Where a step stands.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    pub epoch: usize,
    /// The batch within the epoch, from 0.
    pub batch: usize,
    /// Steps since the beginning of the run, from 0.
    pub step: usize,
    pub lr: f64,
    pub seed: u64,
}

/// Modules of the method's own, stepped from the same backward pass as the networks.
pub struct Group {
    pub name: &'static str,
    pub params: Params,
    pub rule: Rule,
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
    Steps { base: f64, milestones: Vec<usize> },
}

impl Rate {
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
    Continued,
    /// They were initialised again: every optimizer starts afresh too.
    Anew,
}

/// Batches without augmentation.
pub type Batches<'a> = dyn Iterator<Item = Result<Batch>> + 'a;

/// What a method sees after the networks were stepped.
pub struct Stepped<'a> {
    pub cohort: &'a mut Cohort,
    /// The cohort's parameters (networks and branches), in the optimizer's order.
    pub theta: &'a Params,
    pub batch: &'a Batch,
    /// The outputs the step was computed from (before the weights moved).
    pub outs: &'a [Outputs],
    pub clock: Clock,
}

/// A training method. `losses` may be evaluated many times on one batch (the bilevel scheme does): it changes nothing but the
/// running statistics of normalisation layers, as a network's forward pass does.
pub trait Method: Send {
    fn needs(&self) -> Needs;

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

    /// Once per batch, before the forward pass: draw negatives, run mean teachers.
    fn prepare(&mut self, _batch: &Batch, _clock: Clock) -> Result<()> {
        Ok(())
    }

    fn losses(&self, outs: &[Outputs], batch: &Batch, clock: Clock) -> Result<Terms>;

    /// Can it learn from mixed images (`mixed_losses`)?
    fn mixes(&self) -> bool {
        false
    }

    /// `losses` where images are mixed: terms of labels and logits on `mixed` with the probabilities `targets` [B, C], terms that ask
    /// whether two images are of one class on the unmixed `outs`.
    fn mixed_losses(&self, _outs: &[Outputs], _mixed: &[Outputs], _targets: &Tensor, _batch: &Batch, _clock: Clock) -> Result<Terms> {
        Err(Error::failed("this method learns from unmixed images only"))
    }

    fn groups(&self, _cohort: &Cohort) -> Vec<Group> {
        vec![]
    }

    /// After the backward pass of each batch, before the weights move: memory banks take in its embeddings.
    fn after_batch(&mut self, _outs: &[Outputs], _batch: &Batch, _clock: Clock) -> Result<()> {
        Ok(())
    }

    /// Will `after_step` run a meta step now? Its seconds are logged apart.
    fn meta_due(&self, _clock: Clock) -> bool {
        false
    }

    /// After the step: averages, discriminators, the meta step (on the last batch, when gradients were accumulated).
    fn after_step(&mut self, _stepped: Stepped<'_>) -> Result<()> {
        Ok(())
    }

    /// After each epoch, given the means of what was logged in it: what a person should know, a line each.
    fn remarks(&self, _means: &[(String, f64)]) -> Vec<String> {
        vec![]
    }

    /// State that is in no group (banks, the meta-network and its optimizer): saving reads these handles, resuming writes through them.
    fn state(&self) -> Named {
        vec![]
    }
}

/// Options as the recipe gives them, over the preset it names, over the defaults. Defaults (`preset = "paper"`) are the common
/// protocol of the L-MCL paper's tables; `presets` are the others: name and TOML.
fn read_options<T: DeserializeOwned>(mut table: toml::Table, presets: &[(&str, &str)]) -> Result<T> {
    if let Some(preset) = table.remove("preset") {
        let known = || std::iter::once("paper").chain(presets.iter().map(|p| p.0));
        let values = match (preset.as_str(), presets.iter().find(|p| preset.as_str() == Some(p.0))) {
            (Some("paper"), _) => "",
            (_, Some((_, values))) => values,
            _ => {
                return Err(Error::input(format!(
                    "[method] preset = {preset}; accepted: {}",
                    known().map(|k| format!("\"{k}\"")).collect::<Vec<_>>().join(", ")
                )));
            }
        };
        for (key, value) in values.parse::<toml::Table>().expect("a preset is valid TOML") {
            table.entry(key).or_insert(value);
        }
    }
    table.try_into().map_err(Error::options("method"))
}

/// For `Method::options`.
fn resolved<T: Serialize>(options: &T) -> toml::Table {
    toml::Table::try_from(options).expect("plain options serialise")
}

/// The ramp-up of 80 epochs in runs of 300, and the same part of other runs.
fn rampup(epochs: usize) -> usize {
    (epochs as f64 * 80.0 / 300.0).round() as usize
}

/// Refuses a value that is not a number above 0.
fn positive(key: &str, value: f64) -> Result<()> {
    if value > 0.0 && value.is_finite() {
        Ok(())
    } else {
        Err(Error::input(format!("[method] {key} = {value}; accepted: a number above 0")))
    }
}

/// Refuses weights below 0.
fn weights(values: &[(&str, f64)]) -> Result<()> {
    match values.iter().find(|(_, value)| !(*value >= 0.0 && value.is_finite())) {
        Some((key, value)) => Err(Error::input(format!("[method] {key} = {value}; accepted: 0 or more"))),
        None => Ok(()),
    }
}

/// Refuses cohorts that are too small.
fn at_least(method: &str, count: usize, archs: &[&'static Arch], why: &str) -> Result<()> {
    if archs.len() >= count {
        Ok(())
    } else {
        Err(Error::input(format!("{method} needs {count} networks or more and [cohort] archs has {}: {why}", archs.len())))
    }
}

/// Refuses cohorts of different architectures.
fn one_architecture(method: &str, archs: &[&'static Arch], why: &str) -> Result<()> {
    match archs.iter().find(|a| a.name != archs[0].name) {
        None => Ok(()),
        Some(other) => Err(Error::input(format!(
            "{method} needs networks of one architecture and [cohort] archs has {} and {}: {why}",
            archs[0].name, other.name
        ))),
    }
}

/// Refuses training images of which a class has one alone: batch mining draws two images of a class.
fn paired_classes(labels: &[i64]) -> Result<()> {
    let mut counts = vec![0usize; labels.iter().max().map_or(0, |&c| c as usize + 1)];
    labels.iter().for_each(|&c| counts[c as usize] += 1);
    match counts.iter().position(|&n| n == 1) {
        Some(class) => Err(Error::input(format!("class {class} has one training image: an anchor needs a positive, so two of each class"))),
        None => Ok(()),
    }
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

/// L^task of the networks themselves, a row each. `labels` [B].
fn task_rows(terms: &mut Terms, outs: &[Outputs], labels: &Tensor, smoothing: f64) {
    for (m, own) in outs.iter().enumerate() {
        terms.add_for(m, "task", 1.0, logit::smooth_ce(own.logit(), labels, smoothing));
    }
}

/// Every network learns from the predictions of the others, a row each (Deep Mutual Learning).
fn mutual_rows(terms: &mut Terms, outs: &[Outputs], temperature: f64) {
    let logits: Vec<&Tensor> = outs.iter().map(Outputs::logit).collect();
    for m in 0..logits.len() {
        terms.add_for(m, "mutual", 1.0, logit::mutual(&logits, m, temperature));
    }
}
