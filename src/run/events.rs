//! The files for TensorBoard: one for each process that trained in the folder.

use std::fs;
use std::path::{Path, PathBuf};

use super::RunFolder;
use crate::error::{Error, Result};

impl RunFolder {
    /// What TensorBoard reads: one file for each process that trained here, by when it started (seconds since 1970) and its number.
    pub fn events(&self, started: u64, process: u32) -> PathBuf {
        self.path.join(format!("events.out.tfevents.{started:010}.{process}.mcl"))
    }

    /// What earlier processes left for TensorBoard, oldest first.
    pub fn event_files(&self) -> Result<Vec<PathBuf>> {
        let entries = fs::read_dir(&self.path).map_err(Error::io("cannot list", &self.path))?;
        let mut found: Vec<PathBuf> = entries.filter_map(|e| Some(e.ok()?.path())).filter(|path| self.is_event_file(path)).collect();
        found.sort();
        Ok(found)
    }

    /// Does this path have the name of a file for TensorBoard?
    pub(super) fn is_event_file(&self, path: &Path) -> bool {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("events.out.tfevents.") && name.ends_with(".mcl")
    }
}
