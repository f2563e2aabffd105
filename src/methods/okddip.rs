//! OKDDip: Online Knowledge Distillation with Diverse Peers, Chen et al., AAAI 2020. All networks but the last are peers, each taught
//! by its own attention-weighted aggregate of the peers' logits; the last is the leader, taught by their mean, and is the one kept.

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::{
    Clock, Frozen, Group, Method, MethodSpec, Needs, Reported, Task, at_least, positive, rampup, read_options, resolved, shared_trunk,
    task_rows, weights,
};
use crate::cohort::{Cohort, Peer};
use crate::data::Batch;
use crate::error::{Error, Result};
use crate::losses::logit;
use crate::losses::terms::Terms;
use crate::nets::Outputs;
use crate::nets::layers::{Layer, Linear, Pass};
use crate::optim::{Rule, schedule::ramp};
use crate::params::{Init, Params, Scope};
use crate::rng;

pub(super) const SPEC: MethodSpec = MethodSpec {
    name: "okddip",
    about: "Online Knowledge Distillation with Diverse Peers (Chen et al. 2020)",
    needs: "one architecture, all stages but the last shared (branch = false: independent), M >= 3; ships the leader (the last network), then the peers",
    reported: Reported::First,
    frozen: Frozen::Refused("a peer is weighed by attention between features that learn with it"),
    presets: PRESETS,
    build,
};

/// Steps at half and three quarters of the run, the official schedule, belong to `[train]`.
const PRESETS: &[(&str, &str)] = &[("original", "rampup = 80")];

#[derive(Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    temperature: f64,
    /// Of all divergences (alpha).
    weight: f64,
    /// Epochs over which that weight grows; by default 80 of the common protocol's 300, and the same part of other runs.
    rampup: Option<usize>,
    /// Peers on a shared trunk, or independent networks.
    branch: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options { temperature: 3.0, weight: 1.0, rampup: None, branch: true }
    }
}

struct Okddip {
    options: Options,
    rampup: usize,
    /// W_L and W_E: queries and keys of the attention between peers.
    query: Linear,
    key: Linear,
    params: Params,
    rule: Rule,
    shared_stages: usize,
    smoothing: f64,
}

fn build(task: &Task, options: toml::Table) -> Result<Box<dyn Method>> {
    let mut options: Options = read_options(&SPEC, options)?;
    let rampup = *options.rampup.get_or_insert(rampup(task.epochs));
    positive("temperature", options.temperature)?;
    weights(&[("weight", options.weight)])?;
    at_least(
        "okddip",
        3,
        task.archs.len(),
        "the last one leads, and with a single peer to learn from its target would be that peer's own prediction",
    )?;
    let arch = task.archs[0];
    let shared_stages = shared_trunk("okddip", task.archs, options.branch, 1)?;
    let peers = &task.archs[..task.archs.len() - 1];
    if let Some(other) = peers.iter().find(|a| a.dim != arch.dim) {
        return Err(Error::input(format!(
            "okddip compares the features of its peers, so they need one width: {} has {} and {} has {}",
            arch.name, arch.dim, other.name, other.dim
        )));
    }
    let scope = Scope::root(rng::derive(task.seed, "okddip", 0), task.device, task.kind);
    let projection =
        |name: &str| Linear::with_init(scope.sub(name), arch.dim, arch.dim / 8, Init::Uniform(1.0 / (arch.dim as f64).sqrt()), None);
    let (query, key) = (projection("query"), projection("key"));
    Ok(Box::new(Okddip {
        options,
        rampup,
        query,
        key,
        params: scope.params(),
        rule: task.rule,
        shared_stages,
        smoothing: task.label_smoothing,
    }))
}

/// t_a, the target of each peer: its attention over all peers, itself included, applied to their logits. `queries`, `keys` [P, B, d],
/// `logits` [P, B, C] -> [P, B, C].
pub fn aggregate(queries: &Tensor, keys: &Tensor, logits: &Tensor) -> Tensor {
    let by_sample = |t: &Tensor| t.transpose(0, 1);
    let attention = by_sample(queries).matmul(&by_sample(keys).transpose(1, 2)).softmax(-1, None); // [B, P, P]
    by_sample(&attention.matmul(&by_sample(logits)))
}

impl Method for Okddip {
    fn needs(&self) -> Needs {
        Needs { shared_stages: self.shared_stages, ..Needs::default() }
    }

    fn options(&self) -> toml::Table {
        resolved(&self.options)
    }

    fn losses(&self, outs: &[Outputs], batch: &Batch, clock: Clock) -> Result<Terms> {
        let mut terms = Terms::default();
        task_rows(&mut terms, outs, &batch.labels, self.smoothing);
        let (leader, peers) = outs.split_last().expect("three networks at least");
        let stack = |part: fn(&Outputs) -> &Tensor| Tensor::stack(&peers.iter().map(part).collect::<Vec<_>>(), 0);
        let (feats, logits) = (stack(Outputs::feat), stack(Outputs::logit));
        let targets = aggregate(&self.query.forward(&feats, Pass::EVAL), &self.key.forward(&feats, Pass::EVAL), &logits);
        let weight = self.options.weight * ramp(clock.epoch, self.rampup);
        // No target is detached, in the official code too: the attention is trained through them and by nothing else.
        for (a, own) in peers.iter().enumerate() {
            terms.add_for(a, "aggregate", weight, logit::kl_through(&targets.get(a as i64), own.logit(), self.options.temperature));
        }
        let mean = logits.mean_dim(0i64, false, None);
        terms.add_for(peers.len(), "leader", weight, logit::kl_through(&mean, leader.logit(), self.options.temperature));
        Ok(terms)
    }

    fn groups(&self, _: &Cohort) -> Vec<Group> {
        vec![Group::new("attention", self.params.shallow_clone(), self.rule)]
    }

    fn shipped<'a>(&'a self, cohort: &'a Cohort) -> Vec<&'a Peer> {
        cohort.peers.last().into_iter().chain(&cohort.peers[..cohort.peers.len() - 1]).collect()
    }
}
