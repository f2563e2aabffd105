//! Which networks a run folder holds: those of the finished run, or those of a checkpoint, also while it trains.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::SystemTime;

use super::Common;
use crate::error::{Error, Result};
use crate::run::{self, RunFolder};

/// A checkpoint by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint(String);

impl FromStr for Checkpoint {
    type Err = Error;

    fn from_str(text: &str) -> Result<Checkpoint> {
        if [run::LAST, run::BEST].contains(&text) || run::checkpoint_step(text).is_some() {
            return Ok(Checkpoint(text.to_string()));
        }
        Err(Error::input(format!("checkpoint `{text}`; accepted: {}, {}, or step-N as in checkpoints/", run::LAST, run::BEST)))
    }
}

impl std::fmt::Display for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl Checkpoint {
    fn files(&self, folder: &RunFolder) -> Vec<PathBuf> {
        let there = folder.checkpoint(&self.0);
        (0..).map(|m| there.file(&run::network_file(m))).take_while(|file| file.exists()).collect()
    }

    /// The networks in it.
    pub(super) fn networks(&self, folder: &RunFolder) -> Result<Vec<PathBuf>> {
        let files = self.files(folder);
        if !files.is_empty() {
            return Ok(files);
        }
        let mut steps: Vec<(usize, String)> = names(&folder.checkpoints()).filter_map(|n| Some((run::checkpoint_step(&n)?, n))).collect();
        steps.sort();
        let known = match steps.len() {
            0 => "it has none yet".to_string(),
            _ => format!("it has {}", steps.into_iter().map(|(_, name)| name).collect::<Vec<_>>().join(", ")),
        };
        Err(Error::input(format!("{} has no networks at checkpoint {}; {known}", folder.path().display(), self.0)))
    }
}

/// The names in a folder; none where there is no folder.
fn names(folder: &Path) -> impl Iterator<Item = String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    entries.filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
}

/// The folder of a run that is there.
pub(super) fn folder(run: &Path) -> Result<RunFolder> {
    if run.is_dir() {
        return Ok(RunFolder::at(run));
    }
    Err(Error::input(format!("no run at {}; accepted: a folder `mcl-train run` made", run.display())))
}

/// The networks of a finished run.
pub(super) fn shipped(folder: &RunFolder) -> Result<Vec<PathBuf>> {
    let files = folder.shipped();
    if !files.is_empty() {
        return Ok(files);
    }
    let instead = if folder.checkpoint(run::LAST).path().exists() { AS_FAR_AS_IT_IS } else { "; --run DIR names another" };
    Err(Error::input(format!("{}{instead}", folder.unfinished())))
}

const AS_FAR_AS_IT_IS: &str = "; --checkpoint last measures how far it is";

/// `runs/latest`, or where it cannot be measured as asked the newest run beside it that can: then it is said.
pub(super) fn latest(checkpoint: Option<&Checkpoint>, common: &Common) -> Result<PathBuf> {
    let latest = PathBuf::from("runs/latest");
    if !latest.is_dir() {
        return Err(Error::input("no run at runs/latest; train one (`mcl-train run ...`) or name it with --run"));
    }
    let networks = |run: &Path| {
        let folder = RunFolder::at(run);
        checkpoint.map_or_else(|| folder.shipped(), |checkpoint| checkpoint.files(&folder))
    };
    if !networks(&latest).is_empty() {
        return Ok(latest);
    }
    let made = |run: PathBuf| -> Option<(SystemTime, PathBuf)> {
        let first = networks(&run).into_iter().next()?;
        Some((first.metadata().and_then(|m| m.modified()).ok()?, run))
    };
    let Some((_, newest)) = names(Path::new("runs")).map(|name| Path::new("runs").join(name)).filter_map(made).max() else {
        return Ok(latest);
    };
    let folder = RunFolder::at(&latest);
    let why = match checkpoint {
        None => format!("{}{AS_FAR_AS_IT_IS}", folder.unfinished()),
        Some(checkpoint) => format!("runs/latest ({}) has no checkpoint {checkpoint}", folder.name()?),
    };
    common.say(format!("measuring {}, the newest that can be measured: {why}", newest.display()));
    Ok(newest)
}
