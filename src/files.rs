//! Files that appear whole or not at all: written under a temporary name beside their place, synced, then renamed.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// A file being written. `commit` gives it its name; dropped before that, it leaves nothing behind.
pub struct Pending {
    file: File,
    temporary: PathBuf,
    path: PathBuf,
    committed: bool,
}

impl Pending {
    pub fn create(path: &Path) -> Result<Pending> {
        let name = path.file_name().ok_or_else(|| Error::input(format!("{}: not a name for a file", path.display())))?;
        let temporary = path.with_file_name(format!(".{}.{}.tmp", name.to_string_lossy(), std::process::id()));
        let file = File::create(&temporary).map_err(Error::io("cannot write", path))?;
        Ok(Pending { file, temporary, path: path.to_path_buf(), committed: false })
    }

    pub fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// The name it will have.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// On disk, and under its name: what stood there before is replaced.
    pub fn commit(mut self) -> Result<()> {
        self.file.sync_all().map_err(Error::io("cannot write", &self.path))?;
        fs::rename(&self.temporary, &self.path).map_err(Error::io("cannot write", &self.path))?;
        self.committed = true;
        let folder = self.path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // The rename itself lives in the folder.
        File::open(folder).and_then(|dir| dir.sync_all()).map_err(Error::io("cannot sync", folder))
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.committed {
            let _ = fs::remove_file(&self.temporary); // the error that led here is the one to report
        }
    }
}
