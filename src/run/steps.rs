//! Metrics inside an epoch, where a run was asked for them: one line after every so many steps.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::PathBuf;

use serde_json::Value;

use super::{Row, RunFolder};
use crate::error::{Error, Result};
use crate::files;

impl RunFolder {
    /// One row after every `save.metrics_every` steps.
    pub fn metrics_steps(&self) -> PathBuf {
        self.path.join("metrics-steps.jsonl")
    }

    /// Opens the rows to add more after `step`: rows of later steps, and one that a kill cut short, come again and are taken out.
    pub fn open_metrics_steps(&self, step: usize) -> Result<StepRows> {
        let path = self.metrics_steps();
        if path.exists() {
            let content = std::fs::read_to_string(&path).map_err(Error::open(&path))?;
            let stays = |line: &&str| {
                let row = serde_json::from_str::<Value>(line).unwrap_or_default();
                row["step"].as_u64().is_some_and(|at| at <= step as u64)
            };
            let kept: String = content.lines().filter(stays).map(|line| format!("{line}\n")).collect();
            if kept != content {
                files::write(&path, kept.as_bytes())?;
            }
        }
        let file = OpenOptions::new().create(true).append(true).open(&path).map_err(Error::io("cannot write", &path))?;
        Ok(StepRows { file, path })
    }
}

/// The file of `RunFolder::metrics_steps`, open at its end.
pub struct StepRows {
    file: File,
    path: PathBuf,
}

impl StepRows {
    /// Adds a row, in one piece.
    pub fn add(&mut self, row: Row) -> Result<()> {
        self.file.write_all(format!("{}\n", Value::Object(row)).as_bytes()).map_err(Error::io("cannot write", &self.path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_come_again_are_taken_out() {
        let dir = tempfile::tempdir().unwrap();
        let folder = RunFolder::at(dir.path());
        let row = |step: usize| Row::from_iter([("step".to_string(), step.into()), ("loss".to_string(), 0.5.into())]);
        let mut rows = folder.open_metrics_steps(0).unwrap();
        [10, 20, 30].into_iter().for_each(|step| rows.add(row(step)).unwrap());
        rows.file.write_all(b"{\"step\":40,\"lo").unwrap();
        folder.open_metrics_steps(20).unwrap().add(row(30)).unwrap();
        let text = std::fs::read_to_string(folder.metrics_steps()).unwrap();
        assert_eq!(text, "{\"step\":10,\"loss\":0.5}\n{\"step\":20,\"loss\":0.5}\n{\"step\":30,\"loss\":0.5}\n");
    }
}
