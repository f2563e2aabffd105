//! Methods: what a cohort minimises. One file a method, one entry in `METHODS`.

pub mod baseline;

use tch::{Device, Kind};

use crate::cohort::Cohort;
use crate::data::{Batch, Sampling};
use crate::error::Result;
use crate::losses::terms::Terms;
use crate::nets::{Arch, Outputs};
use crate::optim::Rule;
use crate::params::{Named, Params};
use crate::registry;

/// Every method, in the order they are listed.
pub const METHODS: &[MethodSpec] = &[baseline::SPEC];

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
    pub epochs: usize,
    pub device: Device,
    pub kind: Kind,
    pub seed: u64,
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
}

impl Default for Needs {
    fn default() -> Needs {
        Needs { sampling: Sampling::Shuffled, views: Views::Shared, branches: false, shared_stages: 0 }
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

/// Modules of the method's own, stepped from the same backward pass as the networks, with the networks' learning rate.
pub struct Group {
    pub name: &'static str,
    pub params: Params,
    pub rule: Rule,
}

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

/// A training method. `losses` never mutates and may be evaluated many times on one batch (the bilevel scheme does).
pub trait Method: Send {
    fn needs(&self) -> Needs;

    /// The options as resolved, for the recipe in the run folder.
    fn options(&self) -> toml::Table;

    /// Once per batch, before the forward pass: draw negatives, run mean teachers.
    fn prepare(&mut self, _batch: &Batch, _clock: Clock) -> Result<()> {
        Ok(())
    }

    fn losses(&self, outs: &[Outputs], batch: &Batch, clock: Clock) -> Result<Terms>;

    fn groups(&self) -> Vec<Group> {
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

    /// After the step: averages, discriminators, the meta step (on the last batch, when gradients were accumulated). Returns numbers to log.
    fn after_step(&mut self, _stepped: Stepped<'_>) -> Result<Vec<(String, f64)>> {
        Ok(vec![])
    }

    /// State that is in no group (banks, the meta-network and its optimizer): saving reads these handles, resuming writes through them.
    fn state(&self) -> Named {
        vec![]
    }
}
