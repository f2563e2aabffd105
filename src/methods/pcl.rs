//! PCL: Peer Collaborative Learning for Online Knowledge Distillation, Wu and Gong, AAAI 2021. Each network sees its own
//! augmentation; a classifier on all their features is the ensemble that teaches them, and so do the running averages of the
//! weights of their peers (mean teachers), which are what is kept.

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::{
    Batches, Clock, Frozen, Group, Method, MethodSpec, Needs, Reported, Start, Stepped, Task, Views, at_least, below_one, positive, rampup,
    read_options, resolved, shared_trunk, task_rows, weights,
};
use crate::cohort::{Cohort, Peer};
use crate::data::Batch;
use crate::error::Result;
use crate::losses::logit;
use crate::losses::terms::Terms;
use crate::nets::Outputs;
use crate::nets::layers::{Layer, Linear, Mode, Pass};
use crate::optim::{Rule, lists, schedule::ramp};
use crate::params::{Named, Params, Scope};
use crate::rng;

pub(super) const SPEC: MethodSpec = MethodSpec {
    name: "pcl",
    about: "Peer Collaborative Learning (Wu and Gong 2021)",
    needs: "one architecture: all stages but the last shared; several: independent networks; M >= 2, a view each; ships the mean teachers",
    reported: Reported::All,
    frozen: Frozen::Refused(
        "a peer teaches by the running mean of its weights and by a classifier on the features of all, which learns with them",
    ),
    presets: PRESETS,
    build,
};

/// Steps at half and three quarters of the run, and three branches, belong to `[train]` and `[cohort]`.
const PRESETS: &[(&str, &str)] = &[("original", "branch = true\nrampup = 80")];

#[derive(Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    temperature: f64,
    /// Of all divergences.
    weight: f64,
    /// Epochs over which that weight grows; by default 80 of the common protocol's 300, and the same part of other runs.
    rampup: Option<usize>,
    /// Peers on a shared trunk, or independent networks; by default shared where there is one architecture.
    branch: Option<bool>,
    /// The most a mean teacher keeps of itself in a step.
    momentum: f64,
}

impl Default for Options {
    fn default() -> Options {
        Options { temperature: 3.0, weight: 1.0, rampup: None, branch: None, momentum: 0.999 }
    }
}

struct Pcl {
    options: Options,
    rampup: usize,
    /// E, on the concatenated features.
    ensemble: Linear,
    params: Params,
    rule: Rule,
    shared_stages: usize,
    smoothing: f64,
    teachers: Cohort,
    /// The mean teachers' logits on the batch under way.
    targets: Vec<Tensor>,
}

fn build(task: &Task, options: toml::Table) -> Result<Box<dyn Method>> {
    let mut options: Options = read_options(&SPEC, options)?;
    let rampup = *options.rampup.get_or_insert(rampup(task.epochs));
    let branch = *options.branch.get_or_insert(task.archs.iter().all(|a| a.name == task.archs[0].name));
    positive("temperature", options.temperature)?;
    weights(&[("weight", options.weight)])?;
    below_one("momentum", options.momentum)?;
    at_least("pcl", 2, task.archs.len(), "a network learns from the mean teachers of its peers")?;
    let shared_stages = shared_trunk("pcl", task.archs, branch, 1)?;
    let scope = Scope::root(rng::derive(task.seed, "pcl", 0), task.device, task.kind);
    let ensemble = Linear::new(scope.sub("ensemble"), task.archs.iter().map(|a| a.dim).sum(), task.classes);
    let teachers = task.cohort(Needs { shared_stages, ..Needs::default() });
    let smoothing = task.label_smoothing;
    Ok(Box::new(Pcl {
        options,
        rampup,
        ensemble,
        params: scope.params(),
        rule: task.rule,
        shared_stages,
        smoothing,
        teachers,
        targets: vec![],
    }))
}

/// phi of step g (from 0): the share of itself a mean teacher keeps. The first step makes it a copy.
pub fn kept(step: usize, momentum: f64) -> f64 {
    (1.0 - 1.0 / (step + 1) as f64).min(momentum)
}

impl Method for Pcl {
    /// With a view each, a shared trunk runs once per view.
    fn needs(&self) -> Needs {
        Needs { views: Views::PerPeer, shared_stages: self.shared_stages, ..Needs::default() }
    }

    fn options(&self) -> toml::Table {
        resolved(&self.options)
    }

    fn epoch_start(&mut self, cohort: &mut Cohort, _: Option<&mut Batches>, clock: Clock) -> Result<Start> {
        if clock.step == 0 {
            self.teachers.params().copy_from(&cohort.params());
        }
        Ok(Start::Continued)
    }

    /// Mean teachers normalise by the batch and keep running statistics of their own, as the networks do.
    fn prepare(&mut self, batch: &Batch, _: Clock) -> Result<()> {
        let _guard = tch::no_grad_guard();
        self.targets = self.teachers.forward(batch, Mode::Train).into_iter().map(|o| o.logit().shallow_clone()).collect();
        Ok(())
    }

    fn losses(&self, outs: &[Outputs], batch: &Batch, clock: Clock) -> Result<Terms> {
        let mut terms = Terms::default();
        task_rows(&mut terms, outs, &batch.labels, self.smoothing);
        let feats: Vec<&Tensor> = outs.iter().map(Outputs::feat).collect();
        let ensemble = self.ensemble.forward(&Tensor::cat(&feats, 1), Pass::EVAL);
        terms.add("task_ensemble", 1.0, logit::smooth_ce(&ensemble, &batch.labels, self.smoothing));
        let (t, weight) = (self.options.temperature, self.options.weight * ramp(clock.epoch, self.rampup));
        for (m, own) in outs.iter().enumerate() {
            terms.add_for(m, "ens", weight, logit::kl(&ensemble, own.logit(), t));
            let others = self.targets.iter().enumerate().filter(|(n, _)| *n != m);
            let sum = others.map(|(_, mean)| logit::kl(mean, own.logit(), t)).reduce(|sum, row| sum + row).expect("a peer to learn from");
            terms.add_for(m, "mean_teacher", weight, sum / (outs.len() - 1) as f64);
        }
        Ok(terms)
    }

    fn groups(&self, _: &Cohort) -> Vec<Group> {
        vec![Group::new("ensemble", self.params.shallow_clone(), self.rule)]
    }

    fn after_step(&mut self, stepped: Stepped<'_>) -> Result<()> {
        let _guard = tch::no_grad_guard();
        let fresh = 1.0 - kept(stepped.clock.step, self.options.momentum);
        lists::approach(&self.teachers.params().tensors(), &stepped.theta.tensors(), fresh, stepped.skip);
        Ok(())
    }

    fn shipped<'a>(&'a self, _: &'a Cohort) -> Vec<&'a Peer> {
        self.teachers.peers.iter().collect()
    }

    fn state(&self) -> Named {
        self.teachers.params().prefixed("teacher.").named()
    }
}
