//! Detectron2: the pickle that its checkpointer knows, arrays under its ResNet's names.

use std::path::Path;

use super::Source;
use super::format::Format;
use crate::error::Result;
use crate::nets::Arch;
use crate::params::Named;
use crate::weights::frameworks;

pub(super) struct Detectron2;

impl Format for Detectron2 {
    fn name(&self) -> &'static str {
        "detectron2"
    }

    fn framework(&self) -> &'static str {
        "Detectron2"
    }

    fn extension(&self) -> &'static str {
        "pkl"
    }

    fn takes(&self, arch: &Arch) -> bool {
        arch.elsewhere.detectron2.is_some()
    }

    fn takes_classifier(&self) -> bool {
        false
    }

    fn tensors(&self, ours: Named, _: &Arch) -> Result<Named> {
        Ok(ours.into_iter().map(|(name, tensor)| (frameworks::detectron2_name(&name), tensor)).collect())
    }

    fn write(&self, path: &Path, _: &Source, tensors: &Named) -> Result<()> {
        frameworks::save_detectron2(path, tensors)
    }

    fn read(&self, path: &Path) -> Result<Named> {
        frameworks::read_detectron2(path)
    }

    fn readme(&self) -> &'static str {
        include_str!("templates/detectron2.md")
    }

    fn check(&self, _: &Arch) -> &'static str {
        include_str!("templates/detectron2.py")
    }

    fn needs(&self, _: &Arch) -> &'static str {
        "detectron2"
    }
}
