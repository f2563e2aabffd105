//! Files that appear whole or not at all: written under a temporary name beside their place, synced, then renamed.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use tch::{Device, Tensor};

use crate::error::{Error, Result};
use crate::limits;

/// A file being written. `commit` gives it its name; dropped before that, it leaves nothing behind.
pub struct Pending {
    file: File,
    temporary: PathBuf,
    path: PathBuf,
    committed: bool,
}

impl Pending {
    /// Beside `path`, under a name of its own.
    pub fn create(path: &Path) -> Result<Pending> {
        let temporary = temporary(path);
        let file = File::create(&temporary).map_err(Error::io("cannot write", path))?;
        Ok(Pending { file, temporary, path: path.to_path_buf(), committed: false })
    }

    /// To write to.
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

/// Of which file this is the temporary name; none where it is none.
fn temporary_of(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.to_string_lossy();
    let (of, process) = name.strip_prefix('.')?.strip_suffix(".tmp")?.rsplit_once('.')?;
    process.parse::<u32>().ok()?;
    Some(path.with_file_name(of))
}

/// Removes what a process that was killed left of files that it was writing in this folder, of those that `of` accepts. Only for who
/// alone writes them.
pub fn sweep(folder: &Path, of: impl Fn(&Path) -> bool) -> Result<()> {
    let listed: Vec<PathBuf> = fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path())).collect();
    for path in listed.into_iter().filter(|path| temporary_of(path).is_some_and(|target| of(&target))) {
        fs::remove_file(&path).map_err(Error::io("cannot remove", &path))?;
    }
    Ok(())
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

/// Makes renames in a folder survive a power cut. Some network file systems cannot sync a folder and say that the call is invalid: theirs
/// to keep then, as other databases take it too.
pub fn sync_folder(folder: &Path) -> Result<()> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    match File::open(folder).and_then(|f| f.sync_all()) {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => Ok(()),
        synced => synced.map_err(Error::io("cannot sync", folder)),
    }
}

/// Makes everything below a folder survive a power cut.
pub fn sync_tree(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder).map_err(Error::io("cannot list", folder))? {
        let entry = entry.map_err(Error::io("cannot list", folder))?;
        let (path, kind) = (entry.path(), entry.file_type().map_err(Error::io("cannot list", folder))?);
        if kind.is_dir() {
            sync_tree(&path)?;
        } else if kind.is_file() {
            File::open(&path).and_then(|f| f.sync_all()).map_err(Error::io("cannot sync", &path))?;
        }
    }
    sync_folder(folder)
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

/// A lock of ours: waits until no other process holds it. Held until the file is dropped.
pub fn lock(path: &Path) -> Result<File> {
    let file = lock_file(path)?;
    file.lock().map_err(Error::io("cannot lock", path))?;
    Ok(file)
}

/// As `lock`, without waiting: none where another process holds it.
pub fn try_lock(path: &Path) -> Result<Option<File>> {
    let file = lock_file(path)?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(fs::TryLockError::WouldBlock) => Ok(None),
        Err(fs::TryLockError::Error(e)) => Err(Error::io("cannot lock", path)(e)),
    }
}

fn lock_file(path: &Path) -> Result<File> {
    OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path).map_err(Error::io("cannot write", path))
}

/// Writes a value as readable JSON.
pub fn write_json<T: Serialize>(path: &Path, value: &T) -> Result<()> {
    let text = serde_json::to_string_pretty(value).map_err(|e| Error::failed(format!("cannot write {}: {e}", path.display())))?;
    write(path, text.as_bytes())
}

/// Reads a JSON file of ours; a file that is not what it should be is named.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    fits(path)?;
    let text = fs::read_to_string(path).map_err(Error::open(path))?;
    serde_json::from_str(&text).map_err(|e| Error::file(path, e.to_string()))
}

/// The largest text that a person wrote: a recipe or a protocol has some kilobytes.
const MOST_TEXT: u64 = 16 << 20;

/// Reads a text that a person wrote: a recipe, a protocol.
pub fn read_text(path: &Path) -> Result<String> {
    let mut text = String::new();
    File::open(path).and_then(|file| file.take(MOST_TEXT + 1).read_to_string(&mut text)).map_err(Error::open(path))?;
    if text.len() as u64 > MOST_TEXT {
        return Err(Error::file(path, format!("longer than {MOST_TEXT} bytes: no text that a person wrote")));
    }
    Ok(text)
}

/// Reads a whole file, after a look at whether it fits into memory: a file may have holes, and be larger than any disk.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    fits(path)?;
    fs::read(path).map_err(Error::open(path))
}

/// Refuses what is no file, or one that is larger than memory; says how large it is.
pub fn fits(path: &Path) -> Result<u64> {
    let known = fs::metadata(path).map_err(Error::open(path))?;
    if !known.is_file() {
        return Err(Error::file(path, "not a file: a folder, a pipe or a device"));
    }
    let length = known.len();
    let need = limits::Need::new().and("its content", u128::from(length));
    need.check(&format!("{length} bytes")).map_err(|e| Error::file(path, e.to_string()))?;
    Ok(length)
}

/// The bytes of a tensor in row-major order, from whatever device it is on.
pub fn tensor_bytes(tensor: &Tensor) -> Vec<u8> {
    let tensor = tensor.detach().to_device(Device::Cpu).contiguous();
    let mut bytes = vec![0u8; tensor.numel() * tensor.kind().elt_size_in_bytes()];
    tensor.copy_data_u8(&mut bytes, tensor.numel());
    bytes
}

/// sha256 as 64 hexadecimal digits.
pub fn sha256(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}
