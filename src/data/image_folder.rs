//! Any folder of class folders: with train/ and val/ (or test/), or one set of classes that is split by the seed.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::imagenet::{CROP, MEAN, STD};
use super::{Dataset, DatasetSpec, Pixels, Request, Split, class_folders, sampler};
use crate::error::{Error, Result};

pub const SPEC: DatasetSpec = DatasetSpec {
    name: "image_folder",
    about: "a folder of your own: CLASS/*.jpg, or train/CLASS/*.jpg and val/ or test/",
    open,
    compare: None,
    layouts: &[],
    archives: &[],
    images: None,
    md5s: &[],
};

/// Of a folder without a split, this share of every class is for testing.
const TEST_SHARE: f64 = 0.2;

fn open(request: &Request) -> Result<Dataset> {
    let (home, _) = request.roots.iter().find(|(root, _)| root.is_dir()).ok_or_else(|| {
        Error::input(format!(
            "dataset image_folder: no folder at {}; point --data to the folder that holds the class folders",
            request.places()
        ))
    })?;
    let home = if home.join("image_folder").is_dir() { home.join("image_folder") } else { home.clone() };
    let train = home.join("train");
    let test = ["val", "test"].map(|part| home.join(part)).into_iter().find(|dir| dir.is_dir());
    let (classes, train, test) = match (train.is_dir(), test) {
        (true, Some(test)) => with_split(&train, &test)?,
        (true, None) => return Err(Error::file(home, "a train folder without a val or test folder beside it")),
        (false, _) => without_split(&home, request.options.seed)?,
    };
    Ok(Dataset {
        name: request.spec.name,
        train,
        test,
        classes,
        mean: MEAN,
        std: STD,
        image_size: request.options.size.unwrap_or(CROP),
        one_size: false,
        home: Some(home),
    })
}

fn with_split(train: &Path, test: &Path) -> Result<(Vec<String>, Split, Split)> {
    let classes = class_folders::class_names(train)?;
    if let Some(stranger) = class_folders::class_names(test)?.iter().find(|class| !classes.contains(class)) {
        return Err(Error::file(test.join(stranger), format!("a class that {} does not have", train.display())));
    }
    let (train, test) = (files(train, &classes)?, files(test, &classes)?);
    Ok((classes, train, test))
}

fn without_split(home: &Path, seed: u64) -> Result<(Vec<String>, Split, Split)> {
    let classes = class_folders::class_names(home)?;
    if classes.is_empty() {
        return Err(Error::file(home, "no class folders in it; CLASS/*.jpg, or train/CLASS/*.jpg and val/CLASS/*.jpg, are expected"));
    }
    let all = files(home, &classes)?;
    if let Some((class, n)) = classes.iter().zip(all.counts(classes.len())).find(|(_, n)| *n < 2) {
        return Err(Error::file(home.join(class), format!("{n} image(s); a class needs at least 2 to be split for training and testing")));
    }
    let test = sampler::stratified(&all.labels, TEST_SHARE, seed);
    let train: Vec<usize> = (0..all.len()).filter(|i| test.binary_search(i).is_err()).collect();
    Ok((classes, all.subset(&train), all.subset(&test)))
}

fn files(dir: &Path, classes: &[String]) -> Result<Split> {
    let (files, labels): (Vec<PathBuf>, Vec<i64>) = class_folders::labelled(dir, classes)?;
    Ok(Split::new(Pixels::Files(Arc::new(files)), labels))
}
