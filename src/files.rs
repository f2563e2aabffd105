//! Files that appear whole or not at all: written under a temporary name beside their place, synced, then renamed.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

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
        let temporary = temporary(path);
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
        // The rename itself lives in the folder.
        sync_folder(self.path.parent().unwrap_or(Path::new(".")))
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.committed {
            let _ = fs::remove_file(&self.temporary); // the error that led here is the one to report
        }
    }
}

/// The name something has until it is whole; `.tmp` in it tells a sweep what was left by a kill.
pub fn temporary(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}.tmp", std::process::id()))
}

/// Writes a whole file: readers see the old one or the new one, never a part.
pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut pending = Pending::create(path)?;
    pending.file().write_all(bytes).map_err(Error::io("cannot write", path))?;
    pending.commit()
}

/// For writers that want a path, not a file: `work` writes under the temporary name it is given.
pub fn write_with(path: &Path, work: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let mut pending = Pending::create(path)?;
    work(&pending.temporary)?;
    pending.file = File::open(&pending.temporary).map_err(Error::io("cannot write", path))?;
    pending.commit()
}

/// Makes renames in a folder survive a power cut.
pub fn sync_folder(folder: &Path) -> Result<()> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    File::open(folder).and_then(|f| f.sync_all()).map_err(Error::io("cannot sync", folder))
}

/// Makes `link` a relative symlink to `target`, replacing an older one by rename.
pub fn point(link: &Path, target: &str) -> Result<()> {
    if fs::read_link(link).is_ok_and(|old| old == Path::new(target)) {
        return Ok(());
    }
    if link.exists() && !link.is_symlink() {
        return Err(Error::input(format!(
            "{} is a file or folder of its own; a link to {target} belongs there: move it away",
            link.display()
        )));
    }
    let temporary = temporary(link);
    let _ = fs::remove_file(&temporary); // of an earlier process with this number
    std::os::unix::fs::symlink(target, &temporary).map_err(Error::io("cannot link", &temporary))?;
    fs::rename(&temporary, link).map_err(Error::io("cannot link", link))
}

pub fn sha256(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}
