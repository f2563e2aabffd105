//! What a run's networks are told by: test accuracy in four ways, and what the held-out images chose.

use serde::{Deserialize, Serialize};

use super::{Row, column, columns};
use crate::report::Cell;

/// Test accuracy of one network in percent, told four ways. Tables call them by `FOUR_WAYS`. Epochs count from 1.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct FourWays {
    /// Own classifier, after the last epoch.
    pub last: f64,
    /// Own classifier, at the epoch where it was best on held-out images, and that epoch. None without held-out images.
    pub by_holdout: Option<(f64, usize)>,
    /// Own classifier, at the epoch where it was best on the test images, and that epoch: optimistic.
    #[serde(rename = "best_test")]
    pub best_epoch: (f64, usize),
    /// The best of all stages' classifiers at its best epoch on the test images, that stage (from 1) and epoch: what the released code
    /// prints, more optimistic still.
    #[serde(default)]
    pub best_stage: Option<(f64, usize, usize)>,
}

/// What tables call the four numbers of a network.
pub const FOUR_WAYS: [&str; 4] = ["last epoch", "epoch chosen on held-out images", "best test epoch", "best test epoch and stage"];

/// What a table of the four numbers says under itself.
pub const FOUR_WAYS_NOTE: &str = "Test accuracy of a network, told four ways. The last epoch, and the epoch chosen on held-out images, never looked at the test images. The best test epoch chooses on them and is optimistic. The best test epoch and stage also takes the best of a network's auxiliary classifiers: the released code of the paper prints that one.";

impl FourWays {
    /// The four numbers for a table, in the order of `FOUR_WAYS`.
    pub fn cells(&self) -> [Cell; 4] {
        let noted = |value: f64, note: String| Cell::Noted { value, shown: format!("{value:.2}"), note };
        let at = |(value, epoch): (f64, usize)| noted(value, format!("(epoch {epoch})"));
        let stage = |(value, stage, epoch): (f64, usize, usize)| noted(value, format!("(stage {stage}, epoch {epoch})"));
        [
            Cell::score(Some(self.last)),
            self.by_holdout.map_or(Cell::Empty, at),
            at(self.best_epoch),
            self.best_stage.map_or(Cell::Empty, stage),
        ]
    }

    /// The numbers of network `m`. The first `skipped` epochs trained something else (a method's first phase) and do not count. None
    /// where no epoch is left.
    pub fn of(rows: &[Row], m: usize, skipped: usize) -> Option<FourWays> {
        let rows = rows.get(skipped..).filter(|rows| !rows.is_empty())?;
        let test = column(rows, &format!("test.peer{m}.top1"));
        let best = |values: &[f64]| {
            let known = (0..values.len()).filter(|&i| values[i].is_finite());
            known.rev().max_by(|&a, &b| values[a].total_cmp(&values[b])) // of equals the first
        };
        let own = best(&test)?;
        let held = best(&column(rows, &format!("holdout.peer{m}.top1")));
        let mut best_stage: Option<(f64, usize, usize)> = None;
        for (stage, name) in stage_columns("test", rows, m) {
            let values = column(rows, &name);
            if let Some(i) = best(&values).filter(|&i| best_stage.is_none_or(|(value, ..)| values[i] > value)) {
                best_stage = Some((values[i], stage, skipped + i + 1));
            }
        }
        Some(FourWays {
            last: *test.last()?,
            by_holdout: held.map(|i| (test[i], skipped + i + 1)),
            best_epoch: (test[own], skipped + own + 1),
            best_stage,
        })
    }
}

/// A stage and epoch that held-out images choose, and its test accuracy in percent. Stages and epochs from 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StageChoice {
    /// On the test images.
    pub test: f64,
    /// On the held-out images.
    pub holdout: f64,
    /// The last one is the network's own classifier.
    pub stage: usize,
    /// Of all stages the best.
    pub epoch: usize,
}

impl StageChoice {
    /// The best of network `m`'s stages on the held-out images; of equals the later stage, and of its epochs the first. None without
    /// held-out images. The first `skipped` epochs do not count.
    pub fn of(rows: &[Row], m: usize, skipped: usize) -> Option<StageChoice> {
        let rows = rows.get(skipped..)?;
        let mut best: Option<StageChoice> = None;
        for (stage, name) in stage_columns("test", rows, m).into_iter().rev() {
            let (test, held) = (column(rows, &name), column(rows, &name.replacen("test", "holdout", 1)));
            for epoch in (0..rows.len()).filter(|&i| held[i].is_finite()) {
                if best.is_none_or(|best| held[epoch] > best.holdout) {
                    best = Some(StageChoice { test: test[epoch], holdout: held[epoch], stage, epoch: skipped + epoch + 1 });
                }
            }
        }
        best
    }
}

/// The columns of a network's stages on a split, from the first; the last one is its own classifier.
fn stage_columns(split: &str, rows: &[Row], m: usize) -> Vec<(usize, String)> {
    let prefix = format!("{split}.peer{m}.stage");
    let number = |name: &str| name.strip_prefix(&prefix)?.strip_suffix(".top1")?.parse::<usize>().ok();
    let mut stages: Vec<(usize, String)> = columns(rows).into_iter().filter_map(|name| Some((number(name)?, name.to_string()))).collect();
    stages.sort();
    let own = stages.last().map_or(1, |(stage, _)| stage + 1);
    stages.push((own, format!("{split}.peer{m}.top1")));
    stages
}

/// The network and epoch the held-out images chose.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// From 1.
    pub epoch: usize,
    /// Steps taken by then.
    pub step: usize,
    /// Which network.
    pub peer: usize,
    /// Its accuracy on the held-out images, in percent.
    pub holdout_top1: f64,
    /// The stage that was chosen, from 1, where it is not the network's own classifier (`train.choose = "any"`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stage: Option<usize>,
}
