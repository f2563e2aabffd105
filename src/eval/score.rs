//! What a set of predictions is worth: top-1, top-5, per class, confusion, interval.

use serde_json::{Value, json};
use tch::{Kind, Tensor};

use super::stats;
use crate::rng;

/// Resamples behind every bootstrap interval.
pub const RESAMPLES: usize = 2000;

/// Stands where there is no further answer; no label is below 0.
const NO_CLASS: i64 = -1;

/// Scored predictions of one classifier on one split.
pub struct Score {
    /// What is true.
    pub labels: Vec<i64>,
    /// What was answered.
    pub predicted: Vec<i64>,
    /// Is the label among the first five?
    pub in_five: Vec<bool>,
    /// How many there are.
    pub classes: usize,
}

impl Score {
    /// `scores` `[N, C]`, `labels` `[N]`. A class whose score is minus infinity is not among the answers.
    pub fn new(scores: &Tensor, labels: &[i64]) -> Score {
        let (count, classes) = (scores.size()[0] as usize, scores.size()[1] as usize);
        assert_eq!(count, labels.len(), "a label for each row");
        let five = classes.min(5);
        let (values, best) = scores.topk(five as i64, 1, true, true);
        let none = values.eq(f64::NEG_INFINITY);
        let best = best.masked_fill(&none, NO_CLASS);
        let best: Vec<i64> =
            Vec::try_from(best.to_kind(Kind::Int64).to_device(tch::Device::Cpu).contiguous().view(-1)).expect("a vector of indices");
        let rows = best.chunks_exact(five);
        let predicted = rows.clone().map(|row| row[0]).collect();
        let in_five = rows.zip(labels).map(|(row, label)| row.contains(label)).collect();
        Score { labels: labels.to_vec(), predicted, in_five, classes }
    }

    /// Image by image.
    pub fn right(&self) -> Vec<bool> {
        self.labels.iter().zip(&self.predicted).map(|(l, p)| l == p).collect()
    }

    fn right_count(&self) -> usize {
        self.right().iter().filter(|r| **r).count()
    }

    /// Percent right.
    pub fn top1(&self) -> f64 {
        100.0 * self.right_count() as f64 / self.labels.len().max(1) as f64
    }

    /// Percent with the label among the first five.
    pub fn top5(&self) -> f64 {
        100.0 * self.in_five.iter().filter(|r| **r).count() as f64 / self.labels.len().max(1) as f64
    }

    /// 95 % bootstrap interval of the top-1 accuracy, in percent.
    pub(crate) fn interval(&self, seed: u64) -> (f64, f64) {
        let mut rng = rng::stream(seed, "bootstrap", &[]);
        let (low, high) = stats::bootstrap(self.right_count() as u64, self.labels.len() as u64, RESAMPLES, &mut rng);
        (100.0 * low, 100.0 * high)
    }

    /// [true class][predicted class] counts.
    fn confusion(&self) -> Vec<Vec<u32>> {
        let mut counts = vec![vec![0; self.classes]; self.classes];
        for (&label, &predicted) in self.labels.iter().zip(&self.predicted) {
            counts[label as usize][predicted as usize] += 1;
        }
        counts
    }

    /// Percent right of each class; none for a class without images.
    fn per_class(&self) -> Vec<Option<f64>> {
        let confusion = self.confusion();
        let share = |(c, row): (usize, &Vec<u32>)| {
            let all: u32 = row.iter().sum();
            (all > 0).then(|| 100.0 * f64::from(row[c]) / f64::from(all))
        };
        confusion.iter().enumerate().map(share).collect()
    }

    /// No better than guessing? Within two standard errors of one in C.
    fn at_chance(&self) -> bool {
        let chance = 1.0 / self.classes.max(1) as f64;
        let error = (chance * (1.0 - chance) / self.labels.len().max(1) as f64).sqrt();
        self.top1() / 100.0 <= chance + 2.0 * error
    }

    /// A warning where the number is no better than guessing.
    pub(crate) fn doubt(&self) -> Option<String> {
        self.at_chance().then(|| format!("at chance level: {:.2} % of {} classes", self.top1(), self.classes))
    }

    /// How often both name the same class, in percent.
    pub(crate) fn agreement(&self, other: &Score) -> f64 {
        100.0 * self.predicted.iter().zip(&other.predicted).filter(|(a, b)| a == b).count() as f64 / self.predicted.len().max(1) as f64
    }

    /// For the `detail` of a record. Labels and answers image by image: what is compared later need not be measured again.
    pub(crate) fn detail(&self, class_names: &[String]) -> Value {
        json!({ "classes": class_names, "per_class": self.per_class(), "confusion": self.confusion(), "labels": self.labels,
            "predicted": self.predicted })
    }
}
