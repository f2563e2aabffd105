//! Any folder of class folders: with train/ and val/ (or test/), or one set of classes that is split by the seed.

use std::path::Path;

use serde::Deserialize;

use super::{Dataset, DatasetSpec, OwnOptions, Request, Split, class_folders, sampler};
use crate::error::{Error, Result};

pub const SPEC: DatasetSpec = DatasetSpec {
    options: OwnOptions::of::<Own>(),
    ..DatasetSpec::new("image_folder", "a folder of your own: CLASS/*.jpg, or train/CLASS/*.jpg and val/ or test/", open)
};

/// Its own keys in `[data]`, for a folder that has no split.
#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Own {
    /// The share of every class that is for testing.
    test_share: f64,
    /// Draws that share.
    seed: u64,
}

impl Default for Own {
    fn default() -> Own {
        Own { test_share: 0.2, seed: 0 }
    }
}

fn open(request: &Request) -> Result<Dataset> {
    let own: Own = request.own()?;
    if !(own.test_share > 0.0 && own.test_share < 1.0) {
        return Err(Error::input(format!("dataset image_folder: test_share = {}; accepted: more than 0 and less than 1", own.test_share)));
    }
    let (home, _) = request.roots.iter().find(|(root, _)| root.is_dir()).ok_or_else(|| {
        Error::value(
            &["data"],
            format!("dataset image_folder: no folder at {}; point {{data}} to the folder that holds the class folders", request.places()),
        )
    })?;
    let home = if home.join("image_folder").is_dir() { home.join("image_folder") } else { home.clone() };
    let train = home.join("train");
    let test = ["val", "test"].map(|part| home.join(part)).into_iter().find(|dir| dir.is_dir());
    let parts = match (train.is_dir(), test) {
        (true, Some(test)) => class_folders::train_and_test(&train, &test)?,
        (true, None) => return Err(Error::file(home, "a train folder without a val or test folder beside it")),
        (false, _) => without_split(&home, &own)?,
    };
    Ok(class_folders::photos(request, home, parts))
}

fn without_split(home: &Path, own: &Own) -> Result<(Vec<String>, Split, Split)> {
    let classes = class_folders::class_names(home)?;
    if classes.is_empty() {
        return Err(Error::file(home, "no class folders in it; CLASS/*.jpg, or train/CLASS/*.jpg and val/CLASS/*.jpg, are expected"));
    }
    let all = class_folders::split(home, &classes)?;
    if let Some((class, n)) = classes.iter().zip(all.counts(classes.len())).find(|(_, n)| *n < 2) {
        return Err(Error::file(home.join(class), format!("{n} image(s); a class needs at least 2 to be split for training and testing")));
    }
    let test = sampler::stratified(&all.labels, own.test_share, own.seed);
    let train: Vec<usize> = (0..all.len()).filter(|i| test.binary_search(i).is_err()).collect();
    Ok((classes, all.subset(&train), all.subset(&test)))
}
