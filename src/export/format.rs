//! What a format is, and the list of them.

use std::path::Path;

use tch::{Device, Kind, Tensor};

use super::{Source, detectron2, mmdet, onnx, safetensors, timm, torchscript, torchvision};
use crate::error::{Error, Result};
use crate::nets::layers::Pass;
use crate::nets::{Arch, Network};
use crate::params::{Named, Scope};
use crate::weights::{self, Classifier, LoadOptions, Weights};

/// Every format by its name for `--to`.
pub(super) const FORMATS: &[&dyn Format] = &[
    &torchscript::TorchScript,
    &onnx::Onnx,
    &timm::Timm,
    &torchvision::Torchvision,
    &mmdet::Mmdet,
    &detectron2::Detectron2,
    &safetensors::Safetensors,
];

/// What a written file makes of images.
pub(super) type Reloaded = Box<dyn Fn(&Tensor) -> Result<Vec<Tensor>>>;

/// A format that networks are exported in. The defaults are those of a file that holds tensors under our names.
pub(super) trait Format: Sync {
    /// Its name for `--to` and its folder's.
    fn name(&self) -> &'static str;

    /// Whom it serves, in texts.
    fn framework(&self) -> &'static str;

    /// What its file's name ends with.
    fn extension(&self) -> &'static str;

    /// The name of its file.
    fn file(&self, arch: &Arch) -> String {
        format!("{}.{}", arch.name, self.extension())
    }

    /// Has the framework this architecture?
    fn takes(&self, _arch: &Arch) -> bool {
        true
    }

    /// Has it a place for a classifier?
    fn takes_classifier(&self) -> bool {
        true
    }

    /// Our names of the tensors of the file: all, or those that the maps depend on.
    fn names(&self, source: &Source) -> Vec<String> {
        source.names()
    }

    /// The tensors of the file under the names they have there.
    fn tensors(&self, ours: Named, _arch: &Arch) -> Result<Named> {
        Ok(ours)
    }

    /// Writes the file; `tensors` are its own.
    fn write(&self, path: &Path, source: &Source, tensors: &Named) -> Result<()>;

    /// The tensors of a written file under our names.
    fn read(&self, path: &Path) -> Result<Named> {
        Ok(weights::read(path)?.tensors)
    }

    /// What the file makes of images, in the order of `expected`. By default its tensors are put into a network of ours, and each must come
    /// back.
    fn open(&self, path: &Path, source: &Source) -> Result<Reloaded> {
        let arch = source.network.arch;
        let scope = Scope::blank(Device::Cpu, Kind::Float);
        let net = Network::new(arch, &scope, source.network.meta.classes.len().max(1) as i64);
        let options = LoadOptions { allow_partial: true, classifier: Classifier::Optional, ..Default::default() };
        let read = Weights { path: path.to_path_buf(), tensors: self.read(path)?, meta: None };
        let report = weights::load_into(&scope.params(), &read, arch, &options)?;
        let wanted = self.names(source);
        let lost = report.missing.iter().any(|name| wanted.contains(name));
        if lost || !report.unexpected.is_empty() || !report.misshapen.is_empty() {
            return Err(Error::failed(format!("{} did not come back as it was written: {report}", path.display())));
        }
        let with_classifier = source.with_classifier;
        Ok(Box::new(move |images| Ok(super::answers(&net.forward(images, Pass::EVAL), with_classifier))))
    }

    /// Which of the network's answers (its maps, then its logits where they are exported) the file gives.
    fn expected(&self, all: Vec<Tensor>, _with_classifier: bool) -> Vec<Tensor> {
        all
    }

    /// Batch, height and width of the two inputs that its file is compared on; the first is shipped with it.
    fn golden(&self, arch: &Arch) -> [[i64; 3]; 2] {
        arch.golden
    }

    /// What its own templates ask for as `own`.
    fn facts(&self, _source: &Source) -> Result<serde_json::Value> {
        Ok(serde_json::Value::Null)
    }

    /// More files beside it, each a name and a template.
    fn extras(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }

    /// The template of README.md, which has `common.md` in it.
    fn readme(&self) -> &'static str;

    /// The template of check.py.
    fn check(&self, arch: &Arch) -> &'static str;

    /// What check.py needs to be installed.
    fn needs(&self, arch: &Arch) -> &'static str;
}

/// Refuses what the format has no place for.
pub(super) fn accepts(format: &dyn Format, source: &Source) -> Result<()> {
    let network = source.network;
    if !format.takes(network.arch) {
        let known: Vec<&str> = crate::nets::archs().filter(|arch| format.takes(arch)).map(|arch| arch.name).collect();
        let all = FORMATS.iter().filter(|f| crate::nets::archs().all(|arch| f.takes(arch)));
        return Err(Error::input(format!(
            "--to {}: {} has no {} ({}); it takes {}; every architecture goes to {}",
            format.name(),
            format.framework(),
            network.arch.name,
            network.name,
            known.join(", "),
            all.map(|f| f.name()).collect::<Vec<_>>().join(", ")
        )));
    }
    if source.with_classifier && !format.takes_classifier() {
        return Err(Error::input(format!(
            "--with-classifier: {} takes backbones only; leave it out for --to {}",
            format.framework(),
            format.name()
        )));
    }
    if source.with_classifier && network.meta.classes.is_empty() {
        return Err(Error::input(format!("--with-classifier: {} holds no classifier", network.file.display())));
    }
    Ok(())
}
