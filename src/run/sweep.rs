//! What a process that was killed leaves beside the files it was writing. Whoever alone writes a file sweeps for it.

use super::RunFolder;
use crate::error::Result;
use crate::files;

impl RunFolder {
    /// After a trainer; called by the one that holds the lock. What measurements write is theirs.
    pub(super) fn sweep(&self) -> Result<()> {
        let own = [
            self.recipe(),
            self.environment(),
            self.train_indices(),
            self.holdout_indices(),
            self.metrics_csv(),
            self.metrics_jsonl(),
            self.metrics_steps(),
            self.summary(),
        ];
        files::sweep(self.path(), |target| own.iter().any(|file| file == target) || self.is_event_file(target))?;
        files::sweep(&self.networks(), |_| true)
    }

    /// After an experiment; called by the one that makes this run now.
    pub(crate) fn sweep_experiment(&self) -> Result<()> {
        files::sweep(self.path(), |target| *target == self.asked() || *target == self.experiment_progress())
    }
}
