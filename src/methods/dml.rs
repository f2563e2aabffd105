//! Deep Mutual Learning, Zhang et al., CVPR 2018: every network also learns from the predictions of every other one.

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::parts::frozen::Said;
use super::{Clock, Frozen, Method, MethodSpec, Reported, Task, at_least, mutual_rows, positive, read_options, resolved, task_rows};
use crate::data::Batch;
use crate::error::Result;
use crate::losses::terms::Terms;
use crate::nets::Outputs;

pub(super) const SPEC: MethodSpec = MethodSpec {
    name: "dml",
    about: "Deep Mutual Learning (Zhang et al. 2018)",
    needs: "independent networks, M >= 2, or one and a frozen one; ships all",
    reported: Reported::All,
    frozen: Frozen::Teach("as one more peer"),
    presets: PRESETS,
    build,
};

/// The original's own schedule (200 epochs of batch 64, divided by 10 every 60) belongs to `[train]`.
const PRESETS: &[(&str, &str)] = &[("original", "temperature = 1.0")];

#[derive(Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    /// 2 in the only public code of the L-MCL paper's authors; the original has no temperature.
    temperature: f64,
}

impl Default for Options {
    fn default() -> Options {
        Options { temperature: 2.0 }
    }
}

struct Dml {
    options: Options,
    smoothing: f64,
    frozen: Said,
}

fn build(task: &Task, options: toml::Table) -> Result<Box<dyn Method>> {
    let options: Options = read_options(&SPEC, options)?;
    positive("temperature", options.temperature)?;
    at_least("dml", 2, task.archs.len() + task.frozen, "a network learns from its peers, of which [cohort] frozen may be one")?;
    Ok(Box::new(Dml { options, smoothing: task.label_smoothing, frozen: Said::by(task.frozen) }))
}

impl Method for Dml {
    fn options(&self) -> toml::Table {
        resolved(&self.options)
    }

    fn mixes(&self) -> bool {
        true
    }

    fn taught_by(&mut self, frozen: Vec<Tensor>) {
        self.frozen.hear(frozen);
    }

    /// All networks step at once on one batch; the official loop feeds each network a batch of its own.
    fn mixed_losses(&self, _: &[Outputs], mixed: &[Outputs], targets: &Tensor, _: &Batch, _: Clock) -> Result<Terms> {
        let mut terms = Terms::default();
        task_rows(&mut terms, mixed, targets, self.smoothing);
        mutual_rows(&mut terms, mixed, self.frozen.logits()?, self.options.temperature);
        Ok(terms)
    }
}
