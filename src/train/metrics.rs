//! What is measured while training: sums over an epoch, accuracy counters, and what they write into an epoch's row.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::extractor::Answer;
use crate::methods::EpochMeans;
use crate::run::Row;
use crate::system::ranks::Ranks;
use crate::train::step::StepReport;

/// Sum and count by name.
type Sums = BTreeMap<String, (f64, u64)>;

/// Means over an epoch, summed on the host. What a device computed stays there until somebody looks, so that no step waits for it.
#[derive(Default)]
pub struct Meter {
    sums: Sums,
    /// The same since `take_window`, where rows inside an epoch are asked for.
    window: Option<Sums>,
    /// Reports nobody has looked at.
    unread: Vec<StepReport>,
}

/// A meter as saved in a checkpoint: name to (sum, count). JSON has no word for a sum that is not finite: it is none.
pub type MeterState = BTreeMap<String, (Option<f64>, u64)>;

/// A scalar and whether it is f32: sums of such are rounded as that.
#[derive(Clone, Copy)]
struct Scalar {
    value: f64,
    single: bool,
}

impl Scalar {
    fn rounded(value: f64, single: bool) -> Scalar {
        Scalar { value: if single { f64::from(value as f32) } else { value }, single }
    }

    fn times(self, weight: f64) -> Scalar {
        let weight = if self.single { f64::from(weight as f32) } else { weight };
        Scalar::rounded(self.value * weight, self.single)
    }

    fn plus(self, other: Scalar) -> Scalar {
        Scalar::rounded(self.value + other.value, self.single && other.single)
    }
}

impl Meter {
    /// Adds a number.
    pub fn add_value(&mut self, name: &str, value: f64) {
        for sums in [&mut self.sums].into_iter().chain(&mut self.window) {
            match sums.get_mut(name) {
                Some((sum, count)) => {
                    *sum += value;
                    *count += 1;
                }
                None => drop(sums.insert(name.to_string(), (value, 1))),
            }
        }
    }

    /// Adds what a step reported; `seconds` are those of the whole step, the meta step included.
    pub fn add_step(&mut self, report: StepReport, lr: f64, seconds: f64) {
        let mut total = 0.0;
        self.add_value("lr", lr);
        if let Some(meta) = report.meta_seconds {
            self.add_value("seconds.meta_step", meta);
            total += meta;
        }
        self.add_value("seconds.step", seconds - total);
        self.add_value("seconds.step_and_meta", seconds);
        self.unread.push(report);
        // In host memory looking costs nothing.
        if self.unread.iter().all(|report| report.packed.is_none()) {
            self.look();
        }
    }

    /// Takes in what is on a device, of all steps at once. Waits for it.
    fn look(&mut self) {
        let unread = std::mem::take(&mut self.unread);
        let packed: Vec<&Tensor> = unread.iter().filter_map(|report| report.packed.as_ref()).collect();
        let mut numbers = match packed.is_empty() {
            true => vec![],
            false => Vec::<f64>::try_from(Tensor::cat(&packed, 0).to_kind(Kind::Double).to_device(Device::Cpu)).expect("a vector of f64"),
        }
        .into_iter();
        for report in unread {
            // A step that waited (f16, several ranks) packed nothing: its numbers are read one by one.
            let packed = report.packed.is_some();
            let mut read = |t: &Tensor| {
                let ahead = packed && t.device().is_cuda();
                let value = if ahead { numbers.next().expect("packed in this order") } else { t.double_value(&[]) };
                Scalar { value, single: t.kind() == Kind::Float }
            };
            let mut raw: BTreeMap<&str, (Scalar, Scalar)> = Default::default();
            for term in &report.terms {
                let value = read(&term.value);
                let weighted = value.times(term.weight);
                match raw.get_mut(term.name) {
                    Some((sum, weighted_sum)) => (*sum, *weighted_sum) = (sum.plus(value), weighted_sum.plus(weighted)),
                    None => drop(raw.insert(term.name, (value, weighted))),
                }
            }
            let loss = raw.values().map(|(_, weighted)| *weighted).reduce(Scalar::plus);
            for (name, (value, weighted)) in raw {
                self.add_value(&format!("term.{name}"), value.value);
                self.add_value(&format!("weighted.{name}"), weighted.value);
            }
            if let Some(loss) = loss {
                self.add_value("loss", loss.value);
            }
            for (name, value) in &report.notes {
                let value = read(value);
                self.add_value(name, value.value);
            }
            if let Some(norm) = report.grad_norm.as_ref().map(&mut read) {
                self.add_value("grad_norm", norm.value);
            }
        }
    }

    /// Names and means, in the order of the names. Waits for the device, as everything below does.
    pub fn means(&mut self) -> Vec<(String, f64)> {
        self.look();
        self.sums.iter().map(|(name, (sum, count))| (name.clone(), sum / *count as f64)).collect()
    }

    /// The mean of one name, if there is one.
    pub fn mean(&mut self, name: &str) -> Option<f64> {
        self.look();
        self.sums.get(name).map(|(sum, count)| sum / *count as f64)
    }

    /// Means since the last call, in the order of the names, for a row inside an epoch.
    pub fn take_window(&mut self) -> Vec<(String, f64)> {
        self.look();
        let taken = self.window.replace(BTreeMap::new()).unwrap_or_default();
        taken.into_iter().map(|(name, (sum, count))| (name, sum / count as f64)).collect()
    }

    /// For a checkpoint: of the epoch, and of the window.
    pub fn state(&mut self) -> (MeterState, MeterState) {
        self.look();
        let finite = |sum: f64| Some(sum).filter(|sum| sum.is_finite());
        let saved = |sums: &Sums| sums.iter().map(|(name, (sum, count))| (name.clone(), (finite(*sum), *count))).collect();
        (saved(&self.sums), self.window.as_ref().map(saved).unwrap_or_default())
    }

    /// As it was saved. `windows`: are rows inside an epoch asked for?
    pub fn restore(state: &MeterState, window: &MeterState, windows: bool) -> Meter {
        let read =
            |state: &MeterState| state.iter().map(|(name, (sum, count))| (name.clone(), (sum.unwrap_or(f64::NAN), *count))).collect();
        Meter { sums: read(state), window: windows.then(|| read(window)), unread: vec![] }
    }

    /// For the next epoch: its own sums are none, a window goes on.
    pub fn next_epoch(&mut self) {
        self.look();
        self.sums.clear();
    }
}

/// Finished epochs as methods look back on them.
pub fn epochs(rows: &[Row]) -> Vec<EpochMeans> {
    let means = |row: &Row| row.iter().filter_map(|(name, value)| Some((name.clone(), value.as_f64()?))).collect();
    let steps = |row: &Row| row.get("step").and_then(|step| step.as_u64()).unwrap_or_default() as usize;
    rows.iter().map(|row| EpochMeans { steps: steps(row), means: means(row) }).collect()
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
    /// In percent.
    pub fn top1(&self) -> f64 {
        100.0 * self.top1 as f64 / self.count.max(1) as f64
    }

    /// In percent.
    pub fn top5(&self) -> f64 {
        100.0 * self.top5 as f64 / self.count.max(1) as f64
    }
}

/// Right answers among the first one and the first five, of `scores` [B, C] and `labels` `[B]`: two scalars.
fn hits(scores: &Tensor, labels: &Tensor) -> [Tensor; 2] {
    let (_, best) = scores.topk(scores.size()[1].min(5), 1, true, true);
    let hits = best.eq_tensor(&labels.unsqueeze(1)); // [B, k]
    [hits.select(1, 0).sum(Kind::Int64), hits.sum(Kind::Int64)]
}

/// A cohort's accuracy on one split: by network and stage (the last stage is the network's own), and of the ensemble of all networks.
#[derive(Debug, Default)]
pub struct CohortAccuracy {
    /// By network, then by stage.
    pub stages: Vec<Vec<Accuracy>>,
    /// The mean of the networks' probabilities.
    pub ensemble: Accuracy,
    /// Images that each network answered with numbers that are not finite.
    pub not_finite: Vec<u64>,
    /// Hits of every stage and of the ensemble and images that are not finite, counted where the answers are and read once, by `finish`.
    counted: Option<Tensor>,
}

impl CohortAccuracy {
    /// Counts a batch: every network's answers, and the labels `[B]`.
    pub fn add(&mut self, answers: &[Answer], labels: &Tensor) {
        self.stages.resize(answers.len(), vec![]);
        let mut found = vec![];
        for (own, answer) in self.stages.iter_mut().zip(answers) {
            own.resize(answer.logits.len(), Accuracy::default());
            answer.logits.iter().for_each(|z| found.extend(hits(z, labels)));
        }
        let probabilities: Vec<Tensor> = answers.iter().map(|a| a.logit().softmax(-1, Kind::Float)).collect();
        found.extend(hits(&Tensor::stack(&probabilities, 0).mean_dim(0, false, None), labels));
        let not_finite = |a: &Answer| a.logits.iter().map(|z| z.isfinite().all_dim(1, false).logical_not()).reduce(|a, b| a.logical_or(&b));
        found.extend(answers.iter().filter_map(not_finite).map(|images| images.sum(Kind::Int64)));
        let found = Tensor::stack(&found, 0);
        self.counted = Some(self.counted.take().map_or(found.shallow_clone(), |sum| sum + found));
        let images = labels.size()[0] as u64;
        self.stages.iter_mut().flatten().chain([&mut self.ensemble]).for_each(|a| a.count += images);
    }

    /// Reads what was counted. Waits for the device.
    pub fn finish(&mut self) {
        let Some(counted) = self.counted.take() else { return };
        let counted = Vec::<i64>::try_from(counted.to_device(Device::Cpu)).expect("a vector of int64");
        let (counted, not_finite) = counted.split_at(counted.len() - self.stages.len());
        self.not_finite = not_finite.iter().map(|&images| images as u64).collect();
        for (a, hits) in self.stages.iter_mut().flatten().chain([&mut self.ensemble]).zip(counted.chunks_exact(2)) {
            a.top1 += hits[0] as u64;
            a.top5 += hits[1] as u64;
        }
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
