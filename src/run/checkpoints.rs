//! The names in `checkpoints/`: a folder for each checkpoint, two links to one of them, and the files of a checkpoint.

use std::path::{Path, PathBuf};

use super::RunFolder;

/// A link to the newest checkpoint.
pub const LAST: &str = "last";
/// A link to the checkpoint that was best on held-out images; without those, to the newest.
pub const BEST: &str = "best";

/// What a checkpoint taken after this many steps is called.
pub fn checkpoint_name(step: usize) -> String {
    format!("step-{step}")
}

/// The steps in a checkpoint's name; none where it is no checkpoint's.
pub fn checkpoint_step(name: &str) -> Option<usize> {
    name.strip_prefix("step-")?.parse().ok()
}

/// Where everything of a checkpoint lies. Making one touches no file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointFolder {
    path: PathBuf,
}

impl CheckpointFolder {
    /// The name of the file with every tensor that is needed to go on.
    pub const STATE: &str = "state.safetensors";

    /// The folder at `path`, which need not be there yet.
    pub fn at(path: impl Into<PathBuf>) -> CheckpointFolder {
        CheckpointFolder { path: path.into() }
    }

    /// The folder itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// One of its files, by name.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Every tensor that is needed to go on.
    pub fn state(&self) -> PathBuf {
        self.file(Self::STATE)
    }

    /// Recipe, progress, and a checksum for each of the other files.
    pub fn manifest(&self) -> PathBuf {
        self.file("manifest.json")
    }
}

impl RunFolder {
    /// The checkpoint called `name`: `step-N`, `LAST` or `BEST`.
    pub fn checkpoint(&self, name: &str) -> CheckpointFolder {
        CheckpointFolder::at(self.checkpoints().join(name))
    }
}
