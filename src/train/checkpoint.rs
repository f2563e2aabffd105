//! Checkpoints: everything a run needs to go on, to the bit. A folder `checkpoints/step-N` is whole or is not there: it is written as
//! `step-N.tmp`, synced and renamed; `last` and `best` are links replaced by rename; older folders go only afterwards.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use tch::Tensor;

use super::manifest::{self, FORMAT, FileEntry, Manifest, Progress, Splits};
use crate::error::{Error, Result, disk_fault};
use crate::files;
use crate::params::{self, Named};
use crate::recipe::Recipe;
use crate::run::{self, CheckpointFolder, RunFolder};

/// What the name of a checkpoint ends in while another takes its place where two folders cannot change places in one step.
const REPLACED: &str = ".replaced";

/// The checkpoints of one run.
pub struct Checkpoints {
    folder: PathBuf,
    run: RunFolder,
}

/// What goes into a checkpoint.
pub struct Content<'a> {
    /// What is trained.
    pub recipe: &'a Recipe,
    /// Which images it uses.
    pub splits: &'a Splits,
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
    /// The images that were used; none where a manifest of format 1 did not say.
    pub splits: Splits,
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
        self.entries().iter().any(|name| run::checkpoint_step(name.trim_end_matches(REPLACED)).is_some())
    }

    fn entries(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten();
        entries.filter_map(|e| Some(e.ok()?.file_name().to_string_lossy().into_owned())).collect()
    }

    /// Whole checkpoints, newest first.
    fn names(&self) -> Vec<String> {
        let entries = self.entries().into_iter();
        let mut found: Vec<(usize, String)> = entries.filter_map(|name| Some((run::checkpoint_step(&name)?, name))).collect();
        found.sort_by(|a, b| b.cmp(a));
        found.into_iter().map(|(_, name)| name).collect()
    }

    /// Writes a checkpoint and points `last` (and `best`, where this is it) at it. On a failure nothing that was there is lost.
    pub fn save(&self, content: &Content, best: bool) -> Result<PathBuf> {
        fs::create_dir_all(&self.folder).map_err(Error::io("cannot make", &self.folder))?;
        let name = run::checkpoint_name(content.progress.step);
        let (whole, partial) = (self.folder.join(&name), self.folder.join(format!("{name}.tmp")));
        fill(&partial, content).and_then(|()| install(&partial, &whole)).inspect_err(|_| {
            let _ = fs::remove_dir_all(&partial);
        })?;
        files::sync_folder(&self.folder)?;
        let (last_link, best_link) = (self.folder.join(run::LAST), self.folder.join(run::BEST));
        let before = link_target(&last_link).unwrap_or_default();
        files::point(&last_link, &name)?;
        if best {
            files::point(&best_link, &name)?;
        }
        files::sync_folder(&self.folder)?;
        let best = link_target(&best_link).unwrap_or_default();
        // The one before the last stays too: it is what is offered should the last one turn out damaged. With it stays what it says was
        // chosen, which ships if nothing better comes.
        let previous = if before == name { self.names().into_iter().nth(1).unwrap_or_default() } else { before };
        let its_best = self.manifest(&previous).ok().and_then(|m| m.progress.best).map_or(String::new(), |b| run::checkpoint_name(b.step));
        for old in self.names().into_iter().filter(|n| ![&name, &previous, &best, &its_best].contains(&n)) {
            // Under another name first: a kill in between leaves no half of a checkpoint under a whole one's.
            let (path, gone) = (self.folder.join(&old), self.folder.join(format!("{old}.tmp")));
            fs::rename(&path, &gone).and_then(|()| fs::remove_dir_all(&gone)).map_err(Error::io("cannot remove", &path))?;
        }
        Ok(whole)
    }

    /// What an interrupted save left; called by whoever holds the run's lock.
    pub fn sweep(&self) -> Result<()> {
        for entry in fs::read_dir(&self.folder).into_iter().flatten() {
            let path = entry.map_err(Error::io("cannot list", &self.folder))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            // Killed while another took its place: either it stands there, or this one is still the checkpoint.
            if let Some(own) = name.strip_suffix(REPLACED) {
                let own = self.folder.join(own);
                if !own.exists() {
                    fs::rename(&path, &own).map_err(Error::io("cannot rename to", &own))?;
                    continue;
                }
            }
            if name.contains(".tmp") || name.ends_with(REPLACED) {
                let removed = if path.is_dir() && !path.is_symlink() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
                removed.map_err(Error::io("cannot remove", &path))?;
            }
        }
        Ok(())
    }

    /// Reads a checkpoint: the one named, or the last. A damaged one is refused, and the newest whole one is offered.
    pub fn load(&self, name: Option<&str>) -> Result<Loaded> {
        let name = match name.map(|name| name.trim_end_matches('/')) {
            Some(link @ (run::LAST | run::BEST)) => link_target(&self.folder.join(link)).unwrap_or_else(|| link.to_string()),
            Some(name) => name.to_string(),
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
        let manifest = self.manifest(name)?;
        let folder = self.run.checkpoint(name);
        for file in manifest.files.keys() {
            self.file(name, &manifest, file)?;
        }
        let state_path = folder.state();
        let tensors = Tensor::read_safetensors(&state_path).map_err(|e| Error::file(&state_path, e.to_string()))?;
        params::check_finite(&tensors).map_err(|what| Error::file(&state_path, what.to_string()))?;
        if let Some(best) = manifest.progress.best.filter(|best| best.step != manifest.progress.step) {
            let chosen = run::checkpoint_name(best.step);
            self.manifest(&chosen).map_err(|e| Error::input(format!("{name} says that {chosen} was chosen on held-out images: {e}")))?;
        }
        let Manifest { recipe, splits, progress, .. } = manifest;
        Ok(Loaded { name: name.to_string(), recipe, splits, progress, tensors: tensors.into_iter().collect() })
    }

    /// What a checkpoint says of itself, once it is known to be what was written.
    fn manifest(&self, name: &str) -> Result<Manifest> {
        let path = self.run.checkpoint(name).manifest();
        let step = run::checkpoint_step(name)
            .ok_or_else(|| Error::input(format!("`{name}` is no checkpoint's name; accepted: step-N, {} or {}", run::LAST, run::BEST)))?;
        let text = fs::read_to_string(&path).map_err(|e| Error::file(&path, format!("the checkpoint has no readable manifest: {e}")))?;
        let manifest = manifest::read(&text).map_err(|e| Error::file(&path, e))?;
        if manifest.progress.step != step {
            return Err(Error::file(&path, format!("damaged: it is of step {}, in the folder of step {step}", manifest.progress.step)));
        }
        Ok(manifest)
    }

    /// A file of a checkpoint, if it is what its manifest says.
    fn file(&self, name: &str, manifest: &Manifest, file: &str) -> Result<Vec<u8>> {
        let path = self.run.checkpoint(name).file(file);
        let bytes = fs::read(&path).map_err(|e| Error::file(&path, format!("cannot be read: {e}")))?;
        let entry = manifest.files.get(file).ok_or_else(|| Error::file(&path, "is not in the manifest of its checkpoint"))?;
        entry.check(&bytes).map_err(|what| Error::file(&path, what))?;
        Ok(bytes)
    }

    /// The networks of the checkpoint after this many steps: verified, and finite.
    pub fn networks(&self, step: usize, files: &[String]) -> Result<Vec<Vec<u8>>> {
        let name = run::checkpoint_name(step);
        let manifest = self.manifest(&name)?;
        let verified = |file: &String| {
            let bytes = self.file(&name, &manifest, file)?;
            let path = self.run.checkpoint(&name).file(file);
            let tensors = Tensor::read_safetensors(&path).map_err(|e| Error::file(&path, e.to_string()))?;
            params::check_finite(&tensors).map_err(|what| Error::failed(format!("{}: {what}; it does not ship", path.display())))?;
            Ok(bytes)
        };
        files.iter().map(verified).collect()
    }

    /// The same of those that the checkpoint has, with their names.
    pub fn networks_there(&self, step: usize, files: &[String]) -> Result<Vec<(String, Vec<u8>)>> {
        let manifest = self.manifest(&run::checkpoint_name(step))?;
        let there: Vec<String> = files.iter().filter(|file| manifest.files.contains_key(*file)).cloned().collect();
        let networks = self.networks(step, &there)?;
        Ok(there.into_iter().zip(networks).collect())
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
        .map_err(|e| Error::failed(format!("cannot write {}: {}", state_path.display(), disk_fault(&e))))?;
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
        entries.insert(name, FileEntry::of(&bytes));
    }
    let manifest = Manifest {
        format: FORMAT,
        recipe: content.recipe.to_toml(),
        recipe_hash: content.recipe.hash(),
        splits: content.splits.clone(),
        progress: content.progress.clone(),
        files: entries,
    };
    let text = manifest::write(&manifest).map_err(|e| Error::failed(format!("cannot write the manifest: {e}")))?;
    files::write(&checkpoint.manifest(), text.as_bytes())
}

/// Renames `partial` to `whole`. Where a checkpoint of the same step stands (a stop at the last batch of an epoch, then its end), the
/// two change places in one system call. File systems that cannot do that (NFS) go by a third name, which `sweep` understands: at every
/// moment one of the two is there, whole.
fn install(partial: &Path, whole: &Path) -> Result<()> {
    if !whole.exists() {
        return fs::rename(partial, whole).map_err(Error::io("cannot rename to", whole));
    }
    let replaced = PathBuf::from(format!("{}{REPLACED}", whole.display()));
    match exchange(partial, whole) {
        Ok(()) => return fs::remove_dir_all(partial).map_err(Error::io("cannot remove", partial)),
        Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS | libc::EOPNOTSUPP)) => {}
        Err(e) => return Err(Error::io("cannot replace", whole)(e)),
    }
    if replaced.exists() {
        fs::remove_dir_all(&replaced).map_err(Error::io("cannot remove", &replaced))?; // `whole` stands: it was left by a fault
    }
    fs::rename(whole, &replaced).map_err(Error::io("cannot replace", whole))?;
    fs::rename(partial, whole).map_err(|e| {
        let _ = fs::rename(&replaced, whole); // should this fail too, `sweep` does it
        Error::io("cannot replace", whole)(e)
    })?;
    // The new one has its name for good before the old one goes.
    files::sync_folder(whole.parent().unwrap_or(Path::new(".")))?;
    fs::remove_dir_all(&replaced).map_err(Error::io("cannot remove", &replaced))
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
fn exchange(_: &Path, _: &Path) -> std::io::Result<()> {
    Err(std::io::Error::from_raw_os_error(libc::ENOSYS))
}
