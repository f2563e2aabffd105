//! Where networks are measured, and what a run folder says about them.

use super::Common;
use super::network::TrainedNetwork;
use crate::data::{self, Dataset, sampler};
use crate::error::{Error, Result};
use crate::run::RunFolder;

/// A dataset networks are measured on.
pub struct TargetDataset {
    /// Its images and classes.
    pub dataset: Dataset,
    /// Of the places of its training and test images.
    pub hash: String,
    /// The options of the dataset's own it was opened with.
    own: toml::Table,
    /// The side of images it was asked for, where a set can be made in any (`synthetic`).
    size: Option<usize>,
}

impl TargetDataset {
    /// Opens a dataset to transfer to; `synthetic` means its transfer task.
    pub(crate) fn open(name: &str, common: &Common) -> Result<TargetDataset> {
        TargetDataset::with_options(name, data::Task::Transfer, toml::Table::new(), None, common)
    }

    /// Opens the dataset `network` was pre-trained on, as its run opened it: with other options of the dataset's own, images it trained on
    /// could stand among the test images, and images that are made in another size and then resized are not the same.
    pub(crate) fn source(name: &str, network: &TrainedNetwork, common: &Common) -> Result<TargetDataset> {
        TargetDataset::with_options(name, data::Task::Source, options_of_run(name, network)?, size_of_run(name, network), common)
    }

    fn with_options(name: &str, task: data::Task, own: toml::Table, size: Option<usize>, common: &Common) -> Result<TargetDataset> {
        let options = data::Options { task, size, own: own.clone() };
        let dataset = data::open(name, common.data.as_deref(), &options)?;
        if dataset.train.is_empty() || dataset.test.is_empty() {
            return Err(Error::input(format!(
                "dataset {name} has {} training and {} test images; both are needed",
                dataset.train.len(),
                dataset.test.len()
            )));
        }
        if dataset.classes.len() < 2 {
            return Err(Error::input(format!(
                "dataset {name} has one class ({}): every answer would be right; at least two are needed",
                dataset.classes.join(", ")
            )));
        }
        let rows = |split: &data::Split| {
            split.rows.iter().zip(split.labels.iter()).map(|(&r, &l)| r as usize * 100_000 + l as usize).collect::<Vec<_>>()
        };
        let hash = sampler::hash(&[rows(&dataset.train), rows(&dataset.test)].concat());
        Ok(TargetDataset { dataset, hash, own, size })
    }

    /// Is it what `source` would open for this network?
    pub(crate) fn is_source(&self, name: &str, network: &TrainedNetwork) -> Result<bool> {
        Ok(self.dataset.name == name && self.size == size_of_run(name, network) && self.own == options_of_run(name, network)?)
    }

    /// How many images there are, for the line above a table.
    pub(crate) fn counted(&self) -> String {
        format!("{}, {} training and {} test images", self.dataset.name, self.dataset.train.len(), self.dataset.test.len())
    }
}

/// The side of the images that a run was trained on, if it was trained on this dataset.
fn size_of_run(name: &str, network: &TrainedNetwork) -> Option<usize> {
    let trained = network.run.is_some() && network.meta.dataset.as_deref() == Some(name);
    trained.then_some(network.meta.image_size as usize)
}

/// The dataset's own options in the recipe of a network's run; none for another dataset, or for a network given by file.
fn options_of_run(name: &str, network: &TrainedNetwork) -> Result<toml::Table> {
    match network.run.as_ref().filter(|_| network.meta.dataset.as_deref() == Some(name)) {
        Some(run) => own_options(name, &RunFolder::at(run)),
        None => Ok(toml::Table::new()),
    }
}

/// The dataset's own options in the recipe of a run that was trained on it.
pub(crate) fn own_options(name: &str, run: &RunFolder) -> Result<toml::Table> {
    let keys = data::find(name)?.options.keys();
    let recipe = run.read_recipe()?;
    let table = recipe.get("data").and_then(|data| data.as_table()).into_iter().flatten();
    Ok(table.filter(|(key, _)| keys.contains(&key.as_str())).map(|(key, value)| (key.clone(), value.clone())).collect())
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
