//! The learning rate over the epochs.

use serde::{Deserialize, Serialize};

/// Epoch-wise, as in the released code. The cosine never reaches 0: its last epoch is 0.05 (1 + cos(pi (E-1)/E)) of the start.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Schedule {
    /// Half a cosine from the base towards 0.
    Cosine,
    /// The base throughout.
    Constant,
    /// Divided by 10 at each of these epochs.
    Steps(Vec<usize>),
}

impl Schedule {
    /// The factor on the base learning rate in `epoch` (from 0) of `epochs`, warm-up apart.
    pub fn factor(&self, epoch: usize, epochs: usize) -> f64 {
        match self {
            Schedule::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * epoch as f64 / epochs as f64).cos()),
            Schedule::Constant => 1.0,
            Schedule::Steps(milestones) => 0.1f64.powi(milestones.iter().filter(|&&m| epoch >= m).count() as i32),
        }
    }

    /// The learning rate of batch `i` of `batches` in `epoch`. The first `warmup` epochs rise linearly, batch by batch, to the base.
    pub fn lr(&self, base: f64, warmup: usize, epoch: usize, epochs: usize, i: usize, batches: usize) -> f64 {
        if epoch < warmup {
            let done = epoch as f64 + (i + 1) as f64 / batches as f64;
            return base * done / warmup as f64;
        }
        base * self.factor(epoch - warmup, epochs - warmup)
    }
}

/// Weights that grow over the first `over` epochs, exp(-5 (1 - e/A)^2) (Laine and Aila 2017): 0.0067 in epoch 0, 1 from epoch A on.
pub fn ramp(epoch: usize, over: usize) -> f64 {
    if over == 0 {
        return 1.0;
    }
    (-5.0 * (1.0 - epoch.min(over) as f64 / over as f64).powi(2)).exp()
}
