//! All weights of a network trained on labelled images, a fresh classifier on top: SGD, the rate rising and then falling as half a cosine.

use std::collections::BTreeMap;
use std::rc::Rc;

use tch::{Device, Kind, Tensor};

use crate::data::{Batch, Loader, Resident, Sampling, Split, Transform, sampler};
use crate::error::{Error, Result};
use crate::extractor::Extractor;
use crate::losses::logit;
use crate::nets::layers::Pass;
use crate::nets::{Arch, Network};
use crate::optim::{Optimizer, Rule, grads};
use crate::params::{Params, check_finite};
use crate::system::progress::Progress;
use crate::system::ranks::Ranks;

/// Test images answered at once.
const ANSWERED: usize = 256;

/// How long and in what steps a network is trained.
#[derive(Debug, Clone, Copy)]
pub struct Course {
    /// The highest learning rate.
    pub lr: f64,
    /// Passes over the images.
    pub epochs: usize,
    /// Images of a step.
    pub batch: usize,
    /// Share of the steps in which the rate rises.
    pub warmup: f64,
    /// Draws order and augmentation.
    pub seed: u64,
}

/// How a training ended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Ended {
    /// The mean loss of the last epoch.
    Finite(f64),
    /// Loss, weights or running statistics were not finite any more after this epoch, from 1.
    Diverged(usize),
}

/// The part of the highest rate that step `step` of `steps` (from 0) is taken with.
pub fn factor(step: usize, steps: usize, warmup: f64) -> f64 {
    let rising = (warmup * steps as f64).round() as usize;
    if step < rising {
        return (step + 1) as f64 / rising as f64;
    }
    0.5 * (1.0 + (std::f64::consts::PI * (step - rising) as f64 / (steps - rising) as f64).cos())
}

/// A copy of a trained network with a fresh classifier; the network it was copied from stays as it is.
pub struct Tuned {
    arch: &'static Arch,
    classes: i64,
    net: Network,
    /// Of all of it, the classifier too.
    pub params: Params,
    optimizer: Optimizer,
}

impl Tuned {
    /// Weights and running statistics of `trained`; the classifier starts as the architecture's does, from `seed`.
    pub fn new(arch: &'static Arch, trained: &Params, classes: i64, rule: Rule, seed: u64, device: Device) -> Tuned {
        let (net, params) = Network::build(arch, classes, seed, device, Kind::Float);
        let values: BTreeMap<&str, &Tensor> = trained.all().map(|(name, value)| (name.as_str(), value)).collect();
        let classifier = format!("{}.", arch.classifier);
        {
            let _guard = tch::no_grad_guard();
            for (name, live) in params.all().filter(|(name, _)| !name.starts_with(&classifier)) {
                live.shallow_clone().copy_(values[name.as_str()]);
            }
        }
        let optimizer = Optimizer::new(rule, &params);
        Tuned { arch, classes, net, params, optimizer }
    }

    /// One step on a batch that is where the network is. Returns its loss, which nobody waited for.
    pub fn step(&mut self, batch: &Batch, lr: f64) -> Tensor {
        let logits = self.net.forward(&batch.views[0], Pass::train(batch.noise));
        let loss = logit::ce(logits.logit(), &batch.labels);
        let gradient = grads(&loss, &self.params.tensors(), false);
        self.optimizer.step(&self.params, &gradient, lr);
        loss.detach()
    }

    /// Trains on a split. `progress` is told of images.
    pub fn train(&mut self, split: &Split, transform: &Transform, course: Course, progress: &Progress) -> Result<Ended> {
        let device = self.params.vars.first().map_or(Device::Cpu, |(_, var)| var.device());
        let resident = Resident::wanted(None, split, transform, device)?.map(Rc::new);
        let mut mean = f64::NAN;
        let mut step = 0;
        for epoch in 0..course.epochs {
            let order = sampler::epoch(&split.labels, Sampling::Shuffled, course.batch, course.seed, epoch as u64)?;
            let order = sampler::for_training(order, &split.labels, Sampling::Shuffled, 1, false)?;
            let per_epoch = order.len();
            let (ranks, seed) = (Ranks::ALONE, course.seed);
            let mut loader = Loader::of_rank(split, order, transform.clone(), 1, seed, epoch as u64, 0, ranks, device, resident.clone());
            let mut losses = vec![];
            while let Some(placed) = loader.next_on(device) {
                let batch = placed?.batch;
                let lr = course.lr * factor(step, course.epochs * per_epoch, course.warmup);
                losses.push(self.step(&batch, lr));
                progress.add(batch.labels.size()[0] as usize);
                step += 1;
            }
            // Once an epoch: asking a device after every step would stop it.
            mean = Tensor::stack(&losses, 0).mean(Kind::Float).double_value(&[]);
            if !mean.is_finite() || check_finite(self.params.all()).is_err() {
                return Ok(Ended::Diverged(epoch + 1));
            }
        }
        Ok(Ended::Finite(mean))
    }

    /// Its answers about a split, [N, C] on the CPU.
    pub fn scores(&self, split: &Split, transform: &Transform, threads: usize) -> Result<Tensor> {
        let mut extractor = Extractor::new(self.arch, &self.params, None, self.classes, threads);
        let mut parts = vec![];
        for batch in Loader::eval(split, ANSWERED, transform.clone()) {
            parts.push(extractor.extract(&batch?.views[0], false)?.logit().shallow_clone());
        }
        match parts.is_empty() {
            true => Err(Error::failed("there are no images to answer about")),
            false => Ok(Tensor::cat(&parts, 0)),
        }
    }
}
