//! Where networks are measured, and what a run folder says about them.

use std::path::Path;

use super::Common;
use crate::data::{self, Dataset, sampler};
use crate::error::{Error, Result};

/// A dataset networks are measured on.
pub struct Target {
    pub dataset: Dataset,
    /// Of the places of its training and test images.
    pub hash: String,
}

impl Target {
    /// Opens a dataset to transfer to; `synthetic` means its transfer task.
    pub fn open(name: &str, common: &Common) -> Result<Target> {
        Target::with_task(name, data::Task::Transfer, common)
    }

    /// Opens the dataset networks were pre-trained on.
    pub fn source(name: &str, common: &Common) -> Result<Target> {
        Target::with_task(name, data::Task::Source, common)
    }

    fn with_task(name: &str, task: data::Task, common: &Common) -> Result<Target> {
        let dataset = data::open(name, common.data.as_deref(), &data::Options { task, ..Default::default() })?;
        if dataset.train.is_empty() || dataset.test.is_empty() {
            return Err(Error::input(format!(
                "dataset {name} has {} training and {} test images; both are needed",
                dataset.train.len(),
                dataset.test.len()
            )));
        }
        let rows = |split: &data::Split| {
            split.rows.iter().zip(split.labels.iter()).map(|(&r, &l)| r as usize * 100_000 + l as usize).collect::<Vec<_>>()
        };
        let hash = sampler::hash(&[rows(&dataset.train), rows(&dataset.test)].concat());
        Ok(Target { dataset, hash })
    }
}

/// What a run's recipe says that measurements need.
pub struct RunRecipe {
    pub method: String,
    pub dataset: String,
}

pub fn recipe(run: &Path) -> Result<RunRecipe> {
    let path = run.join("recipe.toml");
    let text = std::fs::read_to_string(&path).map_err(Error::open(&path))?;
    let table: toml::Table = text.parse().map_err(|e: toml::de::Error| Error::file(&path, e.message()))?;
    let name = |section: &str| {
        let found = table.get(section).and_then(|s| s.get("name")).and_then(|n| n.as_str());
        found.map(String::from).ok_or_else(|| Error::file(&path, format!("[{section}] has no name")))
    };
    Ok(RunRecipe { method: name("method")?, dataset: name("data")? })
}
