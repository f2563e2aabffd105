//! When a run writes: checkpoints, and rows of metrics inside an epoch.

use serde::{Deserialize, Serialize};

use crate::limits;

/// The `[save]` table.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Save {
    /// A checkpoint inside an epoch when the last one is this old; 0 is off.
    pub every_minutes: f64,
    /// A checkpoint at the end of every so many epochs, and of the last.
    pub every_epochs: usize,
    /// A row of metrics-steps.jsonl, and points for TensorBoard, after every so many steps: the means over them; 0 is off.
    pub metrics_every: usize,
}

impl Default for Save {
    fn default() -> Save {
        Save { every_minutes: 10.0, every_epochs: 1, metrics_every: 0 }
    }
}

impl Save {
    /// Values that parse but make no sense.
    pub(super) fn check(&self) -> Result<(), String> {
        if !(0.0..=1e6).contains(&self.every_minutes) {
            return Err(format!("[save] every_minutes = {}; accepted: 0 to 1000000", self.every_minutes));
        }
        let said = |result: crate::error::Result<()>| result.map_err(|e| e.to_string());
        said(limits::count("[save] metrics_every", self.metrics_every, 0, limits::MOST_ROUNDS))?;
        said(limits::count("[save] every_epochs", self.every_epochs, 1, limits::MOST_ROUNDS))
    }
}
