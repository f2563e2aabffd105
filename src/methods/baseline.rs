//! Independent training: every network learns from the labels alone.

use serde::Deserialize;

use super::{Clock, Method, MethodSpec, Needs, Task};
use crate::data::Batch;
use crate::error::{Error, Result};
use crate::losses::terms::Terms;
use crate::nets::Outputs;

pub const SPEC: MethodSpec = MethodSpec { name: "baseline", about: "independent training with cross-entropy", needs: "independent networks, M >= 1", build };

#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct Baseline {}

fn build(_: &Task, options: toml::Table) -> Result<Box<dyn Method>> {
    Ok(Box::new(options.try_into::<Baseline>().map_err(Error::options("method"))?))
}

impl Method for Baseline {
    fn needs(&self) -> Needs {
        Needs::default()
    }

    fn options(&self) -> toml::Table {
        toml::Table::new()
    }

    fn losses(&self, outs: &[Outputs], batch: &Batch, _: Clock) -> Result<Terms> {
        let mut terms = Terms::default();
        for (m, own) in outs.iter().enumerate() {
            terms.add_for(m, "task", 1.0, own.logit().cross_entropy_for_logits(&batch.labels));
        }
        Ok(terms)
    }
}
