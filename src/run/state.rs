//! How far a run has come that has not shipped its networks, in words for the person who wants to use it.

use std::fs::{File, TryLockError};
use std::path::PathBuf;

use super::{RunFolder, column};
use crate::error::counted;

impl RunFolder {
    /// Does a process train here now?
    pub fn is_training(&self) -> bool {
        let Ok(lock) = File::open(self.lock()) else { return false };
        // Shared: two who look at the same time do not take each other for a trainer. The lock goes with `lock`.
        matches!(lock.try_lock_shared(), Err(TryLockError::WouldBlock))
    }

    /// Why it holds no finished networks: it trains, was stopped, or is no run at all.
    pub fn unfinished(&self) -> String {
        let shown = self.path().display();
        let Ok(recipe) = self.read_recipe() else {
            return format!("{shown} is no run: it has no {}; accepted: a folder `mcl-train run` made", file_name(self.recipe()));
        };
        // `runs/latest` is a link: the folder it means is named.
        let (named, folder) = match self.name() {
            Ok(name) if !self.path().ends_with(&name) => (format!("{shown} ({name})"), self.path().with_file_name(name)),
            _ => (shown.to_string(), self.path().to_path_buf()),
        };
        let done = column(&self.read_metrics().unwrap_or_default(), "epoch").last().copied().unwrap_or(0.0) as usize;
        let of = recipe.get("train").and_then(|train| train.get("epochs"));
        let done = of.map_or_else(|| counted(done, "epoch"), |of| format!("{done} of {of} epochs"));
        match self.is_training() {
            true => format!("{named} is still training; done so far: {done}"),
            false => {
                format!("{named} was stopped after {done}; its command with --out {} --resume finishes it", folder.display())
            }
        }
    }
}

fn file_name(path: PathBuf) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
