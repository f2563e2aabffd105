//! Checkpoints: everything a run needs to go on, to the bit. A folder `checkpoints/step-N` is whole or is not there: it is written as
//! `step-N.tmp`, synced and renamed; `last` and `best` are links replaced by rename; older folders go only afterwards.
//!
//! A manifest says which `format` it has. A change that a reader of `FORMAT` would misunderstand counts it up, and `read_manifest` goes
//! on reading every format there ever was; keys that are only added have defaults instead.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::error::{Error, Result};
use crate::files;
use crate::params::Named;
use crate::recipe::Recipe;
use crate::run::{self, Best, CheckpointFolder, Row, RunFolder};
use crate::train::metrics::MeterState;

/// The format of manifests written now.
const FORMAT: u32 = 1;

/// Where a run stands: everything but the tensors.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Progress {
    /// Optimizer steps taken.
    pub step: usize,
    /// The epoch the next step belongs to, from 0.
    pub epoch: usize,
    /// The next step within its epoch, from 0.
    pub batch: usize,
    /// One row for each finished epoch.
    pub rows: Vec<Row>,
    /// Sums of the epoch under way.
    pub meter: MeterState,
    /// Seconds of training so far, over all sittings.
    pub seconds: f64,
    /// What the held-out images chose so far.
    pub best: Option<Best>,
}

/// Manifest of format 1.
#[derive(Serialize, Deserialize)]
struct Manifest {
    format: u32,
    recipe: String,
    recipe_hash: String,
    progress: Progress,
    files: BTreeMap<String, FileEntry>,
}

#[derive(Serialize, Deserialize)]
struct FileEntry {
    bytes: u64,
    sha256: String,
}

/// A manifest of any format, as the newest one would say it.
fn read_manifest(text: &str) -> Result<Manifest, String> {
    let foreign = |e: serde_json::Error| format!("not a manifest of ours: {e}");
    let value: serde_json::Value = serde_json::from_str(text).map_err(foreign)?;
    match value["format"].as_u64() {
        Some(1) => serde_json::from_value(value).map_err(foreign),
        Some(other) => Err(format!("format {other}; this version reads 1 to {FORMAT}")),
        None => Err("not a manifest of ours: it does not say its format".into()),
    }
}

/// The checkpoints of one run.
pub struct Checkpoints {
    folder: PathBuf,
    run: RunFolder,
}

/// What goes into a checkpoint.
pub struct Content<'a> {
    /// What is trained.
    pub recipe: &'a Recipe,
    /// Where the run stands.
    pub progress: &'a Progress,
    /// Every tensor that is needed to go on.
    pub state: &'a Named,
    /// Deployable networks.
    pub extras: &'a [Extra<'a>],
}

/// A checkpoint read back and verified.
pub struct Loaded {
    /// `step-N`.
    pub name: String,
    /// The recipe's text as it was then.
    pub recipe: String,
    /// Where the run stood.
    pub progress: Progress,
    tensors: BTreeMap<String, Tensor>,
}

/// One more file of a checkpoint, e.g. a deployable network: its name and what writes it.
pub type Extra<'a> = (String, Box<dyn Fn(&Path) -> Result<()> + 'a>);

impl Checkpoints {
    /// Of the run in this folder.
    pub fn of(run: &RunFolder) -> Checkpoints {
        Checkpoints { folder: run.checkpoints(), run: run.clone() }
    }

    /// Is there anything to resume from?
    pub fn any(&self) -> bool {
        !self.names().is_empty()
    }

    /// Whole checkpoints, newest first.
    fn names(&self) -> Vec<String> {
        let mut found: Vec<(usize, String)> = fs::read_dir(&self.folder)
            .map(|entries| entries.filter_map(|e| Some(e.ok()?.file_name().to_string_lossy().into_owned())).collect::<Vec<_>>())
            .unwrap_or_default()
            .into_iter()
            .filter_map(|name| Some((run::checkpoint_step(&name)?, name)))
            .collect();
        found.sort_by(|a, b| b.cmp(a));
        found.into_iter().map(|(_, name)| name).collect()
    }

    /// Writes a checkpoint and points `last` (and `best`, where this is it) at it. On a failure nothing that was there is lost.
    pub fn save(&self, content: &Content, best: bool) -> Result<PathBuf> {
        fs::create_dir_all(&self.folder).map_err(Error::io("cannot make", &self.folder))?;
        let name = run::checkpoint_name(content.progress.step);
        let (whole, partial) = (self.folder.join(&name), self.folder.join(format!("{name}.tmp")));
        fill(&partial, content).inspect_err(|_| {
            let _ = fs::remove_dir_all(&partial);
        })?;
        install(&partial, &whole)?;
        files::sync_folder(&self.folder)?;
        let (last_link, best_link) = (self.folder.join(run::LAST), self.folder.join(run::BEST));
        let before = link_target(&last_link).unwrap_or_default();
        files::point(&last_link, &name)?;
        if best {
            files::point(&best_link, &name)?;
        }
        files::sync_folder(&self.folder)?;
        let best = link_target(&best_link).unwrap_or_default();
        // The one before the last stays too: it is what is offered should the last one turn out damaged.
        let previous = if before == name { self.names().into_iter().nth(1).unwrap_or_default() } else { before };
        for old in self.names().into_iter().filter(|n| ![&name, &previous, &best].contains(&n)) {
            let path = self.folder.join(old);
            fs::remove_dir_all(&path).map_err(Error::io("cannot remove", &path))?;
        }
        Ok(whole)
    }

    /// What an interrupted save left; called by whoever holds the run's lock.
    pub fn sweep(&self) -> Result<()> {
        for entry in fs::read_dir(&self.folder).into_iter().flatten() {
            let path = entry.map_err(Error::io("cannot list", &self.folder))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.contains(".tmp") {
                let removed = if path.is_dir() && !path.is_symlink() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
                removed.map_err(Error::io("cannot remove", &path))?;
            }
        }
        Ok(())
    }

    /// Reads a checkpoint: the one named, or the last. A damaged one is refused, and the newest whole one is offered.
    pub fn load(&self, name: Option<&str>) -> Result<Loaded> {
        let name = match name {
            Some(name) => name.trim_end_matches('/').to_string(),
            None => match link_target(&self.folder.join(run::LAST)) {
                Some(target) => target,
                // Killed between the first rename and the first link.
                None => {
                    self.names().into_iter().next().ok_or_else(|| Error::input(format!("no checkpoint in {}", self.folder.display())))?
                }
            },
        };
        self.read(&name).map_err(|e| {
            let others: Vec<String> = self.names().into_iter().filter(|n| *n != name && self.read(n).is_ok()).collect();
            let offer = match others.first() {
                Some(other) => format!("; {other} is whole: go on from it with --resume --from {other}"),
                None => "; there is no other checkpoint in this run".to_string(),
            };
            Error::input(format!("{e}{offer}"))
        })
    }

    fn read(&self, name: &str) -> Result<Loaded> {
        let folder = self.run.checkpoint(name);
        let manifest_path = folder.manifest();
        let text = fs::read_to_string(&manifest_path)
            .map_err(|e| Error::file(&manifest_path, format!("the checkpoint has no readable manifest: {e}")))?;
        let manifest = read_manifest(&text).map_err(|e| Error::file(&manifest_path, e))?;
        for (file, entry) in &manifest.files {
            let path = folder.file(file);
            let bytes = fs::read(&path).map_err(|e| Error::file(&path, format!("cannot be read: {e}")))?;
            if bytes.len() as u64 != entry.bytes {
                return Err(Error::file(&path, format!("has {} bytes, the manifest says {}", bytes.len(), entry.bytes)));
            }
            let found = files::sha256(&bytes);
            if found != entry.sha256 {
                return Err(Error::file(
                    &path,
                    format!("damaged: sha256 {}..., the manifest says {}...", &found[..12], &entry.sha256[..12]),
                ));
            }
        }
        let state_path = folder.state();
        if !manifest.files.contains_key(CheckpointFolder::STATE) {
            return Err(Error::file(&manifest_path, format!("lists no {}", CheckpointFolder::STATE)));
        }
        let tensors = Tensor::read_safetensors(&state_path).map_err(|e| Error::file(&state_path, e.to_string()))?;
        Ok(Loaded { name: name.to_string(), recipe: manifest.recipe, progress: manifest.progress, tensors: tensors.into_iter().collect() })
    }
}

impl Loaded {
    /// Writes the saved values through the live handles. Every name must be there with its shape, and no other.
    pub fn restore(mut self, state: &Named) -> Result<Progress> {
        let foreign = |what: String| Error::input(format!("checkpoint {} is not of this run: {what}", self.name));
        for (name, live) in state {
            match self.tensors.get(name) {
                None => return Err(foreign(format!("it has no `{name}`"))),
                Some(saved) if saved.size() != live.size() || saved.kind() != live.kind() => {
                    return Err(foreign(format!(
                        "`{name}` is {:?} {:?} there and {:?} {:?} here",
                        saved.kind(),
                        saved.size(),
                        live.kind(),
                        live.size()
                    )));
                }
                Some(_) => {}
            }
        }
        if let Some(extra) = self.tensors.keys().find(|k| !state.iter().any(|(n, _)| n == *k)) {
            return Err(foreign(format!("it has `{extra}`, which nothing here uses")));
        }
        let _guard = tch::no_grad_guard();
        for (name, live) in state {
            let saved = self.tensors.remove(name).expect("checked above");
            live.shallow_clone().copy_(&saved);
        }
        Ok(self.progress)
    }
}

/// Where a link points; none where there is no link.
fn link_target(link: &Path) -> Option<String> {
    fs::read_link(link).ok().map(|target| target.to_string_lossy().into_owned())
}

/// Writes the files of a checkpoint, the manifest last.
fn fill(folder: &Path, content: &Content) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder).map_err(Error::io("cannot remove", folder))?;
    }
    fs::create_dir(folder).map_err(Error::io("cannot make", folder))?;
    let checkpoint = CheckpointFolder::at(folder);
    let state_path = checkpoint.state();
    // safetensors are read and written in row-major order; a copy in that layout is made where the live tensor has another.
    let contiguous: Vec<(&str, Tensor)> =
        content.state.iter().map(|(n, t)| (n.as_str(), t.detach().to_device(tch::Device::Cpu).contiguous())).collect();
    Tensor::write_safetensors(&contiguous, &state_path)
        .map_err(|e| Error::failed(format!("cannot write {}: {e}", state_path.display())))?;
    let mut entries = BTreeMap::new();
    let mut names = vec![CheckpointFolder::STATE.to_string()];
    for (name, write) in content.extras {
        write(&checkpoint.file(name))?;
        names.push(name.clone());
    }
    for name in names {
        let path = checkpoint.file(&name);
        let bytes = fs::read(&path).map_err(Error::io("cannot read back", &path))?;
        File::open(&path).and_then(|f| f.sync_all()).map_err(Error::io("cannot sync", &path))?;
        entries.insert(name, FileEntry { bytes: bytes.len() as u64, sha256: files::sha256(&bytes) });
    }
    let manifest = Manifest {
        format: FORMAT,
        recipe: content.recipe.to_toml(),
        recipe_hash: content.recipe.hash(),
        progress: content.progress.clone(),
        files: entries,
    };
    let text = serde_json::to_string_pretty(&manifest).map_err(|e| Error::failed(format!("cannot write the manifest: {e}")))?;
    files::write(&checkpoint.manifest(), text.as_bytes())
}

/// Renames `partial` to `whole`. Where a checkpoint of the same step stands (a stop at the last batch of an epoch, then its end), the
/// two change places in one system call.
fn install(partial: &Path, whole: &Path) -> Result<()> {
    if !whole.exists() {
        return fs::rename(partial, whole).map_err(Error::io("cannot rename to", whole));
    }
    exchange(partial, whole).map_err(Error::io("cannot replace", whole))?;
    fs::remove_dir_all(partial).map_err(Error::io("cannot remove", partial))
}

#[cfg(target_os = "linux")]
fn exchange(a: &Path, b: &Path) -> std::io::Result<()> {
    use std::os::unix::ffi::OsStrExt;
    let c = |p: &Path| std::ffi::CString::new(p.as_os_str().as_bytes()).map_err(std::io::Error::other);
    let (a, b) = (c(a)?, c(b)?);
    // Safe: two valid C strings that outlive the call.
    let done = unsafe { libc::renameat2(libc::AT_FDCWD, a.as_ptr(), libc::AT_FDCWD, b.as_ptr(), libc::RENAME_EXCHANGE) };
    if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

#[cfg(not(target_os = "linux"))]
fn exchange(a: &Path, b: &Path) -> std::io::Result<()> {
    let old = b.with_extension("tmp-old");
    fs::rename(b, &old)?;
    fs::rename(a, b)?;
    fs::rename(&old, a)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As release 0.1.0 wrote it, shortened to one row and one column of metrics.
    const OF_0_1_0: &str = r#"{
  "format": 1,
  "recipe": "[data]\nname = \"synthetic\"\nfraction = 0.1\nholdout = 2\nimage_size = 16\n",
  "recipe_hash": "a0a1a2a3a4a5a6a7",
  "progress": {
    "step": 63,
    "epoch": 1,
    "batch": 3,
    "rows": [{ "epoch": 1, "step": 60, "test.peer0.top1": 12.5 }],
    "meter": { "loss": [7.25, 3] },
    "seconds": 12.5,
    "best": { "epoch": 1, "step": 60, "peer": 1, "holdout_top1": 25.0 }
  },
  "files": { "state.safetensors": { "bytes": 8, "sha256": "00" } }
}"#;

    #[test]
    fn a_manifest_of_the_first_release_is_read() {
        let manifest = read_manifest(OF_0_1_0).unwrap();
        let progress = &manifest.progress;
        assert_eq!((manifest.format, progress.step, progress.epoch, progress.batch), (1, 63, 1, 3));
        assert_eq!(progress.rows[0]["test.peer0.top1"], 12.5);
        assert_eq!(progress.meter["loss"], (7.25, 3));
        assert_eq!(progress.best, Some(Best { epoch: 1, step: 60, peer: 1, holdout_top1: 25.0 }));
        assert!(manifest.recipe.contains("synthetic") && manifest.files.contains_key(CheckpointFolder::STATE));
    }

    #[test]
    fn a_manifest_of_a_format_to_come_is_refused_by_its_number() {
        let newer = OF_0_1_0.replace("\"format\": 1", "\"format\": 2");
        assert_eq!(read_manifest(&newer).err().unwrap(), "format 2; this version reads 1 to 1");
        assert!(read_manifest("{}").err().unwrap().contains("does not say its format"));
    }
}
