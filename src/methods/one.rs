//! ONE: Knowledge Distillation by On-the-Fly Native Ensemble, Lan et al., NeurIPS 2018. Branches on a shared trunk; a gate on the
//! trunk's output weighs their logits into an ensemble, which is trained and teaches the branches.

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::{
    Clock, Frozen, Group, Method, MethodSpec, Needs, Reported, Task, at_least, map_shapes, one_architecture, positive, read_options,
    resolved, task_rows, weights,
};
use crate::cohort::Cohort;
use crate::data::Batch;
use crate::error::Result;
use crate::losses::logit;
use crate::losses::terms::Terms;
use crate::nets::Outputs;
use crate::nets::layers::{BatchNorm, Layer, Linear, Pass, pool};
use crate::optim::{Rule, schedule::ramp};
use crate::params::{Params, Scope};
use crate::rng;

pub(super) const SPEC: MethodSpec = MethodSpec {
    name: "one",
    about: "On-the-Fly Native Ensemble (Lan et al. 2018)",
    needs: "one architecture, all stages but the last shared, M >= 2; ships every branch with the trunk",
    reported: Reported::All,
    frozen: Frozen::Refused("its networks are branches of one trunk, whose features weigh them in the teacher"),
    presets: PRESETS,
    build,
};

/// The official scripts also have no nesterov, weight decay 1e-4 and steps at half and three quarters: those belong to `[train]`.
const PRESETS: &[(&str, &str)] = &[("original", "rampup = 80")];

#[derive(Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    temperature: f64,
    /// Of the divergences from the ensemble.
    weight: f64,
    /// Epochs over which that weight grows. The loss as published has none, the official script 80.
    rampup: usize,
}

impl Default for Options {
    fn default() -> Options {
        Options { temperature: 3.0, weight: 1.0, rampup: 0 }
    }
}

struct One {
    options: Options,
    gate: Linear,
    norm: BatchNorm,
    params: Params,
    rule: Rule,
    shared_stages: usize,
    smoothing: f64,
}

fn build(task: &Task, options: toml::Table) -> Result<Box<dyn Method>> {
    let options: Options = read_options(&SPEC, options)?;
    positive("temperature", options.temperature)?;
    weights(&[("weight", options.weight)])?;
    at_least("one", 2, task.archs.len(), "the ensemble is made of branches")?;
    one_architecture("one", task.archs, "they are branches of one trunk")?;
    let (arch, branches) = (task.archs[0], task.archs.len() as i64);
    let shared_stages = arch.depth - 1;
    let scope = Scope::root(rng::derive(task.seed, "one", 0), task.device, task.kind);
    let gate = Linear::new(scope.sub("gate"), map_shapes(arch)[shared_stages - 1][0], branches);
    let norm = BatchNorm::new(scope.sub("norm"), branches);
    Ok(Box::new(One { options, gate, norm, params: scope.params(), rule: task.rule, shared_stages, smoothing: task.label_smoothing }))
}

/// The gate's last step: weights of the branches from its normalised scores, both [B, M].
pub fn gate_weights(scores: &Tensor) -> Tensor {
    scores.relu().softmax(-1, None)
}

impl Method for One {
    fn needs(&self) -> Needs {
        Needs { shared_stages: self.shared_stages, ..Needs::default() }
    }

    fn options(&self) -> toml::Table {
        resolved(&self.options)
    }

    fn losses(&self, outs: &[Outputs], batch: &Batch, clock: Clock) -> Result<Terms> {
        let trunk = pool(&outs[0].maps[self.shared_stages - 1]);
        // A batch of one has no variance: its scores are normalised by the running statistics.
        let pass = if trunk.size()[0] > 1 { Pass::train(0) } else { Pass::EVAL };
        let gate = gate_weights(&self.norm.forward(&self.gate.forward(&trunk, pass), pass));
        let logits: Vec<Tensor> = outs.iter().map(|o| o.logit().shallow_clone()).collect();
        let ensemble = logit::ensemble(&gate, &logits);
        let mut terms = Terms::default();
        task_rows(&mut terms, outs, &batch.labels, self.smoothing);
        terms.add("task_gate", 1.0, logit::smooth_ce(&ensemble, &batch.labels, self.smoothing));
        let weight = self.options.weight * ramp(clock.epoch, self.options.rampup);
        for (m, own) in logits.iter().enumerate() {
            terms.add_for(m, "ens", weight, logit::kl(&ensemble, own, self.options.temperature));
            terms.note(format!("gate.peer{m}"), &gate.select(1, m as i64).mean(None));
        }
        Ok(terms)
    }

    fn groups(&self, _: &Cohort) -> Vec<Group> {
        vec![Group::new("gate", self.params.shallow_clone(), self.rule)]
    }
}
