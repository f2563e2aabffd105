//! safetensors: tensors under our names, with what one must know to use them in the header.

use std::path::Path;

use super::format::Format;
use super::{Source, torchvision};
use crate::error::Result;
use crate::nets::Arch;
use crate::params::Named;
use crate::weights;

pub(super) struct Safetensors;

impl Format for Safetensors {
    fn name(&self) -> &'static str {
        "safetensors"
    }

    fn framework(&self) -> &'static str {
        "safetensors"
    }

    fn extension(&self) -> &'static str {
        "safetensors"
    }

    fn write(&self, path: &Path, source: &Source, tensors: &Named) -> Result<()> {
        weights::save_safetensors(path, tensors, &meta(source))
    }

    fn readme(&self) -> &'static str {
        include_str!("templates/safetensors.md")
    }

    /// Where torchvision has the network, its answers are compared; elsewhere the tensors alone.
    fn check(&self, arch: &Arch) -> &'static str {
        if arch.elsewhere.torchvision.is_some() { torchvision::CHECK } else { include_str!("templates/safetensors.py") }
    }

    fn needs(&self, arch: &Arch) -> &'static str {
        if arch.elsewhere.torchvision.is_some() { "safetensors and torchvision" } else { "safetensors and numpy" }
    }
}

/// What one must know to use the network, for the header.
pub(super) fn meta(source: &Source) -> weights::Meta {
    let (network, meta) = (source.network, &source.network.meta);
    weights::Meta {
        arch: network.arch.name.to_string(),
        classes: if source.with_classifier { meta.classes.clone() } else { vec![] },
        image_size: meta.image_size,
        mean: meta.mean,
        std: meta.std,
        interpolation: meta.interpolation.clone(),
        run: network.name.clone(),
        recipe: meta.recipe.clone(),
        peer: network.peer,
        dataset: meta.dataset.clone(),
        epoch: meta.epoch,
    }
}
