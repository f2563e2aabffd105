//! Where networks are measured, and what a run folder says about them.

use super::Common;
use crate::data::{self, Dataset, sampler};
use crate::error::{Error, Result};
use crate::run::RunFolder;

/// A dataset networks are measured on.
pub struct TargetDataset {
    /// Its images and classes.
    pub dataset: Dataset,
    /// Of the places of its training and test images.
    pub hash: String,
}

impl TargetDataset {
    /// Opens a dataset to transfer to; `synthetic` means its transfer task.
    pub(crate) fn open(name: &str, common: &Common) -> Result<TargetDataset> {
        TargetDataset::with_task(name, data::Task::Transfer, common)
    }

    /// Opens the dataset networks were pre-trained on.
    pub(crate) fn source(name: &str, common: &Common) -> Result<TargetDataset> {
        TargetDataset::with_task(name, data::Task::Source, common)
    }

    fn with_task(name: &str, task: data::Task, common: &Common) -> Result<TargetDataset> {
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
        Ok(TargetDataset { dataset, hash })
    }

    /// How many images there are, for the line above a table.
    pub(crate) fn counted(&self) -> String {
        format!("{}, {} training and {} test images", self.dataset.name, self.dataset.train.len(), self.dataset.test.len())
    }
}

/// What a run's recipe says that measurements need.
pub(crate) struct RunRecipe {
    pub(crate) method: String,
    pub(crate) dataset: String,
}

/// Reads the method and the dataset of a run.
pub(crate) fn recipe(run: &RunFolder) -> Result<RunRecipe> {
    let table = run.read_recipe()?;
    let name = |section: &str| {
        let found = table.get(section).and_then(|s| s.get("name")).and_then(|n| n.as_str());
        found.map(String::from).ok_or_else(|| Error::file(run.recipe(), format!("[{section}] has no name")))
    };
    Ok(RunRecipe { method: name("method")?, dataset: name("data")? })
}
