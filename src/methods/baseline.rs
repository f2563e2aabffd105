//! Independent training: every network learns from the labels alone.

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::{Clock, Frozen, Method, MethodSpec, Reported, Task, read_options, resolved, task_rows};
use crate::data::Batch;
use crate::error::Result;
use crate::losses::terms::Terms;
use crate::nets::Outputs;

pub(super) const SPEC: MethodSpec = MethodSpec {
    name: "baseline",
    about: "independent training with cross-entropy",
    needs: "independent networks, M >= 1; ships all",
    reported: Reported::All,
    frozen: Frozen::Refused("its networks learn from labels alone"),
    presets: &[],
    build,
};

#[derive(Serialize, Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct Options {}

struct Baseline {
    options: Options,
    smoothing: f64,
}

fn build(task: &Task, options: toml::Table) -> Result<Box<dyn Method>> {
    Ok(Box::new(Baseline { options: read_options(&SPEC, options)?, smoothing: task.label_smoothing }))
}

impl Method for Baseline {
    fn options(&self) -> toml::Table {
        resolved(&self.options)
    }

    fn mixes(&self) -> bool {
        true
    }

    fn mixed_losses(&self, _: &[Outputs], mixed: &[Outputs], targets: &Tensor, _: &Batch, _: Clock) -> Result<Terms> {
        let mut terms = Terms::default();
        task_rows(&mut terms, mixed, targets, self.smoothing);
        Ok(terms)
    }
}
