//! The formats a network is exported in: whom they serve, what the file is called, how it is written and read back.

use std::path::Path;

use tch::{CModule, Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::eval::network::TrainedNetwork;
use crate::nets::layers::Pass;
use crate::nets::script::{self, Answer};
use crate::nets::{self, Arch, Network};
use crate::params::{Named, Scope};
use crate::weights::{self, Classifier, LoadOptions, Weights, frameworks, torchscript};

pub struct Target {
    pub name: &'static str,
    pub form: Form,
    pub extension: &'static str,
    /// Its full name in texts.
    pub framework: &'static str,
    /// The architectures it has under our names; None: all.
    pub archs: Option<&'static [&'static str]>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    TorchScript,
    Torchvision,
    Mmdet,
    Detectron2,
    Safetensors,
}

const RESNETS: &[&str] = &["resnet18", "resnet34", "resnet50"];
const RESNETS_SWIN: &[&str] = &["resnet18", "resnet34", "resnet50", "swin_t", "swin_s"];
pub const TORCHVISION: &[&str] = &["resnet18", "resnet34", "resnet50", "shufflenet_v2_x0_5", "shufflenet_v2_x1_0", "swin_t", "swin_s"];

pub const TARGETS: &[Target] = &[
    Target { name: "torchscript", form: Form::TorchScript, extension: "pt", framework: "TorchScript", archs: None },
    Target { name: "torchvision", form: Form::Torchvision, extension: "pth", framework: "torchvision", archs: Some(TORCHVISION) },
    Target { name: "mmdet", form: Form::Mmdet, extension: "pth", framework: "MMDetection", archs: Some(RESNETS_SWIN) },
    Target { name: "detectron2", form: Form::Detectron2, extension: "pkl", framework: "Detectron2", archs: Some(RESNETS) },
    Target { name: "safetensors", form: Form::Safetensors, extension: "safetensors", framework: "safetensors", archs: None },
];

impl Target {
    /// Refuses what the framework has no place for.
    pub fn accepts(&self, subject: &TrainedNetwork, with_classifier: bool) -> Result<()> {
        let arch = subject.arch.name;
        if let Some(known) = self.archs.filter(|known| !known.contains(&arch)) {
            let all: Vec<&str> = TARGETS.iter().filter(|t| t.archs.is_none()).map(|t| t.name).collect();
            return Err(Error::input(format!(
                "--to {}: {} has no {arch} ({}); it takes {}; every architecture goes to {}",
                self.name,
                self.framework,
                subject.name,
                known.join(", "),
                all.join(", ")
            )));
        }
        if with_classifier && [Form::Mmdet, Form::Detectron2].contains(&self.form) {
            return Err(Error::input(format!(
                "--with-classifier: {} takes backbones only; leave it out for --to {}",
                self.framework, self.name
            )));
        }
        if with_classifier && subject.meta.classes.is_empty() {
            return Err(Error::input(format!("--with-classifier: {} holds no classifier", subject.file.display())));
        }
        Ok(())
    }

    /// Writes the network, or the part of it that its maps depend on. The number of tensors.
    pub fn write(&self, path: &Path, subject: &TrainedNetwork, with_classifier: bool) -> Result<usize> {
        let tensors = self.tensors(subject, with_classifier)?;
        match self.form {
            Form::TorchScript => {
                let answer = if with_classifier { Answer::Logits } else { Answer::Maps };
                torchscript::save(path, &script::module(subject.arch, &subject.params, answer))?
            }
            Form::Torchvision | Form::Mmdet => weights::save_pth(path, &tensors)?,
            Form::Detectron2 => frameworks::save_detectron2(path, &tensors)?,
            Form::Safetensors => weights::save_safetensors(path, &tensors, &meta(subject, with_classifier))?,
        }
        Ok(tensors.len())
    }

    /// The tensors of the file under the names they have there.
    pub fn tensors(&self, subject: &TrainedNetwork, with_classifier: bool) -> Result<Named> {
        let wanted = tensors_names(subject, with_classifier);
        let ours: Named = subject.params.named().into_iter().filter(|(name, _)| wanted.contains(name)).collect();
        match self.form {
            Form::Mmdet if is_swin(subject.arch) => frameworks::to_mmdet_swin(&ours),
            Form::Detectron2 => Ok(ours.into_iter().map(|(name, t)| (frameworks::detectron2_name(&name), t)).collect()),
            _ => Ok(ours),
        }
    }

    /// What the file makes of images: its maps, then its logits where it has a classifier (a TorchScript classifier: only those).
    pub fn open(
        &self,
        path: &Path,
        subject: &TrainedNetwork,
        with_classifier: bool,
    ) -> Result<Box<dyn Fn(&Tensor) -> Result<Vec<Tensor>>>> {
        let tensors = match self.form {
            Form::TorchScript => {
                let module = CModule::load(path)?;
                return Ok(Box::new(move |images| torchscript::forward(&module, images)));
            }
            Form::Mmdet => frameworks::from_mmdet_swin(&weights::read(path)?.tensors),
            Form::Detectron2 => frameworks::read_detectron2(path)?,
            Form::Torchvision | Form::Safetensors => weights::read(path)?.tensors,
        };
        let (net, scope) = blank(subject.arch, subject.meta.classes.len().max(1) as i64);
        let options = LoadOptions { allow_partial: true, classifier: Classifier::Optional, ..Default::default() };
        let read = Weights { path: path.to_path_buf(), tensors, meta: None };
        let report = weights::load_into(&scope.params(), &read, subject.arch, &options)?;
        let wanted = tensors_names(subject, with_classifier);
        let lost: Vec<&String> = report.missing.iter().filter(|name| wanted.contains(name)).collect();
        if !lost.is_empty() || !report.unexpected.is_empty() || !report.misshapen.is_empty() {
            return Err(Error::failed(format!("{} did not come back as it was written: {report}", path.display())));
        }
        Ok(Box::new(move |images| {
            let outputs = net.forward(images, Pass::EVAL);
            Ok(answers(&outputs, with_classifier))
        }))
    }

    /// What the network itself makes of images, in the order of `open`.
    pub fn reference(&self, subject: &TrainedNetwork, images: &Tensor, with_classifier: bool) -> Vec<Tensor> {
        let all = answers(&subject.net.forward(images, Pass::EVAL), with_classifier);
        if self.form == Form::TorchScript && with_classifier { all.into_iter().last().into_iter().collect() } else { all }
    }
}

pub fn is_swin(arch: &Arch) -> bool {
    arch.name.starts_with("swin")
}

fn blank(arch: &Arch, classes: i64) -> (Network, Scope) {
    let scope = Scope::blank(Device::Cpu, Kind::Float);
    (Network::new(arch, &scope, classes), scope)
}

pub fn answers(outputs: &nets::Outputs, with_classifier: bool) -> Vec<Tensor> {
    let logits = with_classifier.then(|| outputs.logit().shallow_clone());
    outputs.maps.iter().map(Tensor::shallow_clone).chain(logits).collect()
}

/// Our names of the tensors of the file.
fn tensors_names(subject: &TrainedNetwork, with_classifier: bool) -> Vec<String> {
    match with_classifier {
        true => subject.params.all().map(|(name, _)| name.clone()).collect(),
        false => script::backbone_names(subject.arch, &subject.params),
    }
}

fn meta(subject: &TrainedNetwork, with_classifier: bool) -> weights::Meta {
    weights::Meta {
        arch: subject.arch.name.to_string(),
        classes: if with_classifier { subject.meta.classes.clone() } else { vec![] },
        image_size: subject.meta.image_size,
        mean: subject.meta.mean,
        std: subject.meta.std,
        interpolation: "bilinear".to_string(),
        run: subject.name.clone(),
        recipe: subject.meta.recipe.clone(),
        peer: subject.peer,
        dataset: subject.meta.dataset.clone(),
        epoch: subject.meta.epoch,
    }
}
