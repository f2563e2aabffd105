//! MMDetection: a state dict that the `init_cfg` of a backbone loads. Its ResNet has torchvision's names, its Swin has its own.

use std::path::Path;

use super::Source;
use super::format::Format;
use crate::error::Result;
use crate::nets::{self, Arch};
use crate::params::Named;
use crate::weights::{self, frameworks};

pub(super) struct Mmdet;

impl Format for Mmdet {
    fn name(&self) -> &'static str {
        "mmdet"
    }

    fn framework(&self) -> &'static str {
        "MMDetection"
    }

    fn extension(&self) -> &'static str {
        "pth"
    }

    fn takes(&self, arch: &Arch) -> bool {
        arch.elsewhere.mmdet.is_some()
    }

    fn takes_classifier(&self) -> bool {
        false
    }

    fn tensors(&self, ours: Named, arch: &Arch) -> Result<Named> {
        match arch.elsewhere.mmdet {
            Some(nets::Mmdet::SwinTransformer { .. }) => frameworks::to_mmdet_swin(&ours),
            Some(nets::Mmdet::ResNet { .. }) | None => Ok(ours),
        }
    }

    fn write(&self, path: &Path, _: &Source, tensors: &Named) -> Result<()> {
        weights::save_pth(path, tensors)
    }

    /// What is not a Swin's keeps its name.
    fn read(&self, path: &Path) -> Result<Named> {
        Ok(frameworks::from_mmdet_swin(&weights::read(path)?.tensors))
    }

    fn extras(&self) -> &'static [(&'static str, &'static str)] {
        &[("mask_rcnn.py", include_str!("templates/mmdet_mask_rcnn.py"))]
    }

    fn readme(&self) -> &'static str {
        include_str!("templates/mmdet.md")
    }

    fn check(&self, _: &Arch) -> &'static str {
        include_str!("templates/mmdet.py")
    }

    fn needs(&self, _: &Arch) -> &'static str {
        "mmdet"
    }
}
