//! What is measured while training: sums over an epoch, accuracy counters, and what they write into an epoch's row.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use crate::extractor::Answer;
use crate::run::Row;
use crate::system::ranks::Ranks;
use crate::train::step::StepReport;

/// Means over an epoch. Values stay on their device as detached tensors until somebody looks.
#[derive(Default)]
pub struct Meter {
    sums: BTreeMap<String, (Tensor, u64)>,
}

/// A meter as saved in a checkpoint: name to (sum, count).
pub type MeterState = BTreeMap<String, (f64, u64)>;

impl Meter {
    /// Adds a scalar. The sum is in f64 (in place), so that its order of magnitude does not eat the last digits.
    pub fn add(&mut self, name: &str, value: &Tensor) {
        let value = value.detach().to_kind(Kind::Double);
        match self.sums.get_mut(name) {
            Some((sum, count)) => {
                let _ = sum.g_add_(&value);
                *count += 1;
            }
            // A copy: the value may be a view of something that changes.
            None => drop(self.sums.insert(name.to_string(), (value.copy(), 1))),
        }
    }

    /// Adds a number.
    pub fn add_value(&mut self, name: &str, value: f64) {
        self.add(name, &Tensor::from(value));
    }

    /// Adds what a step reported; `seconds` are those of the whole step, the meta step included.
    pub fn add_step(&mut self, report: &StepReport, lr: f64, seconds: f64) {
        let mut total = 0.0;
        let mut raw: BTreeMap<&str, (Tensor, Tensor)> = Default::default();
        for term in &report.terms {
            let weighted = &term.value * term.weight;
            match raw.get_mut(term.name) {
                Some((sum, weighted_sum)) => {
                    *sum = &*sum + &term.value;
                    *weighted_sum = &*weighted_sum + weighted;
                }
                None => drop(raw.insert(term.name, (term.value.shallow_clone(), weighted))),
            }
        }
        let mut loss: Option<Tensor> = None;
        for (name, (value, weighted)) in raw {
            self.add(&format!("term.{name}"), &value);
            self.add(&format!("weighted.{name}"), &weighted);
            loss = Some(loss.map_or(weighted.shallow_clone(), |sum| sum + &weighted));
        }
        if let Some(loss) = loss {
            self.add("loss", &loss);
        }
        for (name, value) in &report.notes {
            self.add(name, value);
        }
        if let Some(norm) = &report.grad_norm {
            self.add("grad_norm", norm);
        }
        self.add_value("lr", lr);
        if let Some(meta) = report.meta_seconds {
            self.add_value("seconds.meta_step", meta);
            total += meta;
        }
        self.add_value("seconds.step", seconds - total);
        self.add_value("seconds.step_and_meta", seconds);
    }

    /// Names and means, in the order of the names.
    pub fn means(&self) -> Vec<(String, f64)> {
        self.sums.iter().map(|(name, (sum, count))| (name.clone(), sum.double_value(&[]) / *count as f64)).collect()
    }

    /// The mean of one name, if there is one.
    pub fn mean(&self, name: &str) -> Option<f64> {
        self.sums.get(name).map(|(sum, count)| sum.double_value(&[]) / *count as f64)
    }

    /// For a checkpoint. Waits for the device.
    pub fn state(&self) -> MeterState {
        self.sums.iter().map(|(name, (sum, count))| (name.clone(), (sum.double_value(&[]), *count))).collect()
    }

    /// As it was saved.
    pub fn restore(state: &MeterState) -> Meter {
        Meter { sums: state.iter().map(|(name, (sum, count))| (name.clone(), (Tensor::from(*sum), *count))).collect() }
    }
}

/// Right answers among the first one and the first five.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Accuracy {
    /// Images whose class has the highest score.
    pub top1: u64,
    /// Images whose class is among the five highest scores.
    pub top5: u64,
    /// All images.
    pub count: u64,
}

impl Accuracy {
    /// `scores` [B, C], `labels` `[B]`.
    pub fn add(&mut self, scores: &Tensor, labels: &Tensor) {
        let k = scores.size()[1].min(5);
        let (_, best) = scores.topk(k, 1, true, true);
        let hits = best.eq_tensor(&labels.unsqueeze(1)); // [B, k]
        self.top1 += hits.select(1, 0).sum(Kind::Int64).int64_value(&[]) as u64;
        self.top5 += hits.sum(Kind::Int64).int64_value(&[]) as u64;
        self.count += labels.size()[0] as u64;
    }

    /// In percent.
    pub fn top1(&self) -> f64 {
        100.0 * self.top1 as f64 / self.count.max(1) as f64
    }

    /// In percent.
    pub fn top5(&self) -> f64 {
        100.0 * self.top5 as f64 / self.count.max(1) as f64
    }
}

/// A cohort's accuracy on one split: by network and stage (the last stage is the network's own), and of the ensemble of all networks.
#[derive(Debug, Clone, Default)]
pub struct CohortAccuracy {
    /// By network, then by stage.
    pub stages: Vec<Vec<Accuracy>>,
    /// The mean of the networks' probabilities.
    pub ensemble: Accuracy,
}

impl CohortAccuracy {
    /// Counts a batch: every network's answers, and the labels `[B]`.
    pub fn add(&mut self, answers: &[Answer], labels: &Tensor) {
        self.stages.resize(answers.len(), vec![]);
        for (own, answer) in self.stages.iter_mut().zip(answers) {
            own.resize(answer.logits.len(), Accuracy::default());
            own.iter_mut().zip(&answer.logits).for_each(|(acc, z)| acc.add(z, labels));
        }
        let probabilities: Vec<Tensor> = answers.iter().map(|a| a.logit().softmax(-1, Kind::Float)).collect();
        self.ensemble.add(&Tensor::stack(&probabilities, 0).mean_dim(0, false, None), labels);
    }

    /// Adds up what every rank counted on its part of a split.
    pub fn over_ranks(&mut self, ranks: Ranks) {
        let mut all: Vec<&mut Accuracy> = self.stages.iter_mut().flatten().chain([&mut self.ensemble]).collect();
        let counted: Vec<u64> = all.iter().flat_map(|a| [a.top1, a.top5, a.count]).collect();
        let sums = ranks.sum_counts(&counted);
        all.iter_mut().zip(sums.chunks_exact(3)).for_each(|(a, s)| **a = Accuracy { top1: s[0], top5: s[1], count: s[2] });
    }

    /// The networks' own accuracy.
    pub fn networks(&self) -> Vec<Accuracy> {
        self.stages.iter().map(|s| *s.last().expect("a network has a last stage")).collect()
    }

    /// `prefix.peerM.top1`, `prefix.peerM.stageL.top1`, `prefix.ensemble.top1`.
    pub fn write(&self, prefix: &str, row: &mut Row) {
        for (m, stages) in self.stages.iter().enumerate() {
            let (own, branches) = stages.split_last().expect("a network has a last stage");
            row.insert(format!("{prefix}.peer{m}.top1"), own.top1().into());
            row.insert(format!("{prefix}.peer{m}.top5"), own.top5().into());
            for (l, branch) in branches.iter().enumerate() {
                row.insert(format!("{prefix}.peer{m}.stage{}.top1", l + 1), branch.top1().into());
            }
        }
        row.insert(format!("{prefix}.ensemble.top1"), self.ensemble.top1().into());
        row.insert(format!("{prefix}.ensemble.top5"), self.ensemble.top5().into());
    }
}
