//! torchvision: a state dict for its network of the same name.

use std::path::Path;

use super::Source;
use super::format::Format;
use crate::error::Result;
use crate::nets::Arch;
use crate::params::Named;
use crate::weights;

pub(super) struct Torchvision;

/// Loads a state dict, of this format or of safetensors, into torchvision's network and compares.
pub(super) const CHECK: &str = include_str!("templates/torchvision.py");

impl Format for Torchvision {
    fn name(&self) -> &'static str {
        "torchvision"
    }

    fn framework(&self) -> &'static str {
        "torchvision"
    }

    fn extension(&self) -> &'static str {
        "pth"
    }

    fn takes(&self, arch: &Arch) -> bool {
        arch.elsewhere.torchvision.is_some()
    }

    fn write(&self, path: &Path, _: &Source, tensors: &Named) -> Result<()> {
        weights::save_pth(path, tensors)
    }

    fn extras(&self) -> &'static [(&'static str, &'static str)] {
        &[("export.py", include_str!("templates/export.py"))]
    }

    fn readme(&self) -> &'static str {
        include_str!("templates/torchvision.md")
    }

    fn check(&self, _: &Arch) -> &'static str {
        CHECK
    }

    fn needs(&self, _: &Arch) -> &'static str {
        "torchvision and numpy"
    }
}
