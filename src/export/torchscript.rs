//! TorchScript: a module that runs without our code, in Python and C++, and can be trained on.

use std::collections::BTreeSet;
use std::path::Path;

use tch::{CModule, Tensor};

use super::Source;
use super::format::{Format, Reloaded};
use crate::error::{Error, Result};
use crate::nets::Arch;
use crate::nets::graph::{self, Answer};
use crate::params::Named;
use crate::weights::torchscript;

pub(super) struct TorchScript;

impl Format for TorchScript {
    fn name(&self) -> &'static str {
        "torchscript"
    }

    fn framework(&self) -> &'static str {
        "TorchScript"
    }

    fn extension(&self) -> &'static str {
        "pt"
    }

    fn write(&self, path: &Path, source: &Source, _: &Named) -> Result<()> {
        let answer = if source.with_classifier { Answer::Logits } else { Answer::Maps };
        torchscript::save(path, &graph::module(source.network.arch, &source.network.params, answer))
    }

    /// The archive answers itself; by libtorch's account it must hold the tensors that were promised, and no others.
    fn open(&self, path: &Path, source: &Source) -> Result<Reloaded> {
        let held = torchscript::names(path)?;
        let held: BTreeSet<String> = held.parameters.into_iter().chain(held.buffers).collect();
        let wanted: BTreeSet<String> = source.names().into_iter().collect();
        if held != wanted {
            let differing: Vec<&String> = held.symmetric_difference(&wanted).take(4).collect();
            return Err(Error::failed(format!("{} did not come back as it was written: {differing:?} in one only", path.display())));
        }
        let module = CModule::load(path)?;
        Ok(Box::new(move |images| torchscript::forward(&module, images)))
    }

    /// A module has one answer: maps, or logits alone.
    fn expected(&self, all: Vec<Tensor>, with_classifier: bool) -> Vec<Tensor> {
        if with_classifier { all.into_iter().last().into_iter().collect() } else { all }
    }

    fn readme(&self) -> &'static str {
        include_str!("templates/torchscript.md")
    }

    fn check(&self, _: &Arch) -> &'static str {
        include_str!("templates/torchscript.py")
    }

    fn needs(&self, _: &Arch) -> &'static str {
        "torch and numpy"
    }
}
