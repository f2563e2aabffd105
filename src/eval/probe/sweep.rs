//! A sweep: several learning rates trained in the same pass over kept features; a held-out part of the training split chooses one.

use serde::Deserialize;
use serde_json::json;
use tch::Tensor;

use super::heads::Heads;
use super::{Probe, best, check_choice, check_counts, check_sgd, edge_warning, held_out};
use crate::data::{Sampling, sampler};
use crate::error::Result;
use crate::eval::Common;
use crate::eval::features::Features;
use crate::eval::protocol::Shipped;
use crate::eval::score::Score;
use crate::system::device;

pub(super) const SHIPPED: Shipped =
    Shipped { name: "sweep", text: include_str!("../../../protocols/eval/sweep.toml"), repeats: &["seeds"] };

/// The keys of the protocol.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sweep {
    pub(super) image_size: i64,
    batch: usize,
    epochs: usize,
    lrs: Vec<f64>,
    momentum: f64,
    weight_decay: f64,
    schedule: Falling,
    holdout: f64,
    pub(super) seeds: Vec<u64>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Falling {
    Cosine,
    Constant,
}

impl Sweep {
    pub(super) fn check(&self) -> Result<()> {
        check_counts(self.batch, self.epochs)?;
        check_choice(&self.lrs, self.holdout)?;
        check_sgd(self.momentum, self.weight_decay)
    }

    /// Trains all rates on a part of `train`, chooses by the rest, trains the chosen one on all of it and scores it on `test`.
    pub fn probe(&self, train: &Features, test: &Features, classes: i64, seed: u64, common: &Common) -> Result<Probe> {
        let (kept, held) = held_out(&train.y, self.holdout, seed)?;
        let held = train.rows(&held);
        let heads = self.train_heads(&self.lrs, &train.rows(&kept), classes, seed, common)?;
        let accuracies: Vec<f64> = heads.scores(&held.x.to_device(common.device)).iter().map(|s| Score::new(s, &held.y).top1()).collect();
        let chosen = best(&accuracies);
        let refit = self.train_heads(&self.lrs[chosen..=chosen], train, classes, seed, common)?;
        let score = Score::new(&refit.scores(&test.x.to_device(common.device)).remove(0), &test.y);
        let warnings = edge_warning("learning rate", chosen, &self.lrs).into_iter().collect();
        Ok(Probe { score, warnings, chosen: json!({ "lr": self.lrs[chosen], "holdout_top1": accuracies, "lrs": self.lrs }) })
    }

    /// SGD over kept features with several rates at once.
    fn train_heads(&self, lrs: &[f64], train: &Features, classes: i64, seed: u64, common: &Common) -> Result<Heads> {
        let (x, y) = (train.x.to_device(common.device), train.labels().to_device(common.device));
        let mut heads = Heads::new(lrs, classes, x.size()[1], self.momentum, self.weight_decay, seed, common.device);
        let _alone = device::alone();
        let per_epoch = train.y.len().div_ceil(self.batch);
        let what = if lrs.len() > 1 { "choosing the learning rate" } else { "training with it" };
        let progress = common.progress(what, self.epochs * per_epoch, "steps");
        for epoch in 0..self.epochs {
            for (i, rows) in sampler::epoch(&train.y, Sampling::Shuffled, self.batch, seed, epoch as u64)?.iter().enumerate() {
                let rows: Vec<i64> = rows.iter().map(|&r| i64::from(r)).collect();
                let rows = Tensor::from_slice(&rows).to_device(common.device);
                let done = (epoch * per_epoch + i) as f64 / (self.epochs * per_epoch) as f64;
                let factor = match self.schedule {
                    Falling::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * done).cos()),
                    Falling::Constant => 1.0,
                };
                heads.step(&x.index_select(0, &rows), &y.index_select(0, &rows), factor);
                progress.add(1);
            }
        }
        Ok(heads)
    }
}
