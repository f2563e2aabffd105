//! The paper's linear classification protocol: SGD on features of freshly augmented images.

use serde::Deserialize;
use serde_json::json;
use tch::{Device, Tensor};

use super::heads::Heads;
use super::{Probe, check_counts, check_sgd};
use crate::data::{Loader, Sampling, sampler};
use crate::error::Result;
use crate::eval::Common;
use crate::eval::features::{Features, Prepared};
use crate::eval::network::TrainedNetwork;
use crate::eval::protocol::{Shipped, require};
use crate::eval::score::Score;

pub(super) const SHIPPED: Shipped =
    Shipped { name: "paper", text: include_str!("../../../protocols/eval/linear-probe.toml"), repeats: &["seeds"] };

/// The keys of the protocol.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Paper {
    pub(super) image_size: i64,
    augment: bool,
    batch: usize,
    epochs: usize,
    lr: f64,
    /// From which epochs on the rate is a tenth: numbers below 1 are parts of all epochs.
    milestones: Vec<f64>,
    momentum: f64,
    weight_decay: f64,
    pub(super) seeds: Vec<u64>,
}

/// Backbone passes take this many images at once: the backbone is frozen, so the steps of the classifier (a batch each) are the same.
const PASS: usize = 256;

impl Paper {
    pub(super) fn check(&self) -> Result<()> {
        check_counts(self.batch, self.epochs)?;
        require(self.lr > 0.0 && self.lr.is_finite(), "lr", self.lr, "above 0")?;
        let fits = |at: &f64| *at > 0.0 && (*at < 1.0 || at.fract() == 0.0);
        require(self.milestones.iter().all(fits), "milestones", &self.milestones, "parts of all epochs between 0 and 1, or whole epochs")?;
        check_sgd(self.momentum, self.weight_decay)
    }

    /// The epochs from which on the rate is a tenth of what it was. Parts follow `epochs`.
    fn falls(&self) -> Vec<usize> {
        let epoch = |at: &f64| if *at < 1.0 { (at * self.epochs as f64).round() as usize } else { *at as usize };
        self.milestones.iter().map(epoch).collect()
    }

    /// Trains a classifier on the training split and scores it on `test`.
    pub(super) fn probe(
        &self,
        network: &TrainedNetwork,
        prepared: &Prepared,
        test: &Features,
        seed: u64,
        common: &Common,
    ) -> Result<Probe> {
        let split = &prepared.dataset.train;
        let transform = prepared.training_transform(self.augment);
        let classes = prepared.dataset.classes.len() as i64;
        let mut heads = Heads::new(&[self.lr], classes, test.x.size()[1], self.momentum, self.weight_decay, seed, Device::Cpu);
        let mut extractor = network.extractor(common)?;
        let group = (PASS / self.batch).max(1) * self.batch;
        let falls = self.falls();
        let progress = common.progress(format!("{}: probe", network.name), self.epochs * split.len(), "images");
        type Pass = Result<(Tensor, (Tensor, f64))>;
        let epoch = |epoch: usize| -> Result<Box<dyn Iterator<Item = Pass>>> {
            let factor = 0.1f64.powi(falls.iter().filter(|m| epoch >= **m).count() as i32);
            let order: Vec<u32> = sampler::epoch(&split.labels, Sampling::Shuffled, self.batch, seed, epoch as u64)?.concat();
            let passes = order.chunks(group).map(<[u32]>::to_vec).collect();
            let batches = Loader::new(split, passes, transform.clone(), 1, seed, epoch as u64, 0);
            Ok(Box::new(batches.map(move |batch| batch.map(|batch| (batch.views[0].shallow_clone(), (batch.labels, factor))))))
        };
        let passes = (0..self.epochs).flat_map(|e| epoch(e).unwrap_or_else(|error| Box::new(std::iter::once(Err(error)))));
        extractor.each(passes, |answer, (labels, factor)| {
            heads.steps(&answer.features, &labels, self.batch as i64, factor);
            progress.add(labels.size()[0] as usize);
            Ok(())
        })?;
        let scores = heads.scores(&test.x).remove(0);
        let mut warnings = vec![];
        if heads.diverged() {
            warnings.push(format!("diverged: the classifier is not finite at lr {}", self.lr));
        }
        Ok(Probe { score: Score::new(&scores, &test.y), warnings, chosen: json!({ "lr": self.lr, "epochs": self.epochs, "falls": falls }) })
    }
}
