//! Folders of classes: what ImageNet, Tiny-ImageNet and any folder of one's own have in common.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::imagenet::{CROP, MEAN, STD};
use super::{Dataset, Pixels, Request, Split};
use crate::error::{Error, Result};

/// The folders inside `dir`, by name. Hidden ones are left out.
pub fn class_names(dir: &Path) -> Result<Vec<String>> {
    entries(dir, |path| path.is_dir())
}

/// The image files inside `dir`, by name: .jpg, .jpeg, .png in any case. Hidden ones are left out (macOS leaves `._` twins).
fn images(dir: &Path) -> Result<Vec<PathBuf>> {
    let is_image = |path: &Path| {
        let suffix = path.extension().and_then(|s| s.to_str()).map(str::to_lowercase);
        matches!(suffix.as_deref(), Some("jpg" | "jpeg" | "png")) && path.is_file()
    };
    Ok(entries(dir, is_image)?.into_iter().map(|name| dir.join(name)).collect())
}

/// The image files inside `dir` and all folders in it, those of a folder before those of the folders in it. Links are followed, but a link
/// to a folder that holds it is refused: it would count its images once for every turn.
pub fn images_below(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files = vec![];
    collect(dir, &mut vec![], &mut files)?;
    Ok(files)
}

/// `above`: the folders on the way here, with links followed.
fn collect(dir: &Path, above: &mut Vec<PathBuf>, files: &mut Vec<PathBuf>) -> Result<()> {
    let real = dir.canonicalize().map_err(Error::open(dir))?;
    if above.contains(&real) {
        return Err(Error::file(dir, format!("a link to {}, which it lies in: a loop; remove it", real.display())));
    }
    if above.len() > DEEPEST {
        return Err(Error::file(dir, format!("folders nested more than {DEEPEST} deep")));
    }
    above.push(real);
    files.extend(images(dir)?);
    for folder in class_names(dir)? {
        collect(&dir.join(folder), above, files)?;
    }
    above.pop();
    Ok(())
}

/// Folders in folders of one class.
const DEEPEST: usize = 64;

/// Files and labels of the folders `dir/CLASS`, however deep in them; a class of `classes` that is not there has none.
pub fn labelled(dir: &Path, classes: &[String]) -> Result<(Vec<PathBuf>, Vec<i64>)> {
    let (mut files, mut labels) = (vec![], vec![]);
    for (label, class) in classes.iter().enumerate() {
        let folder = dir.join(class);
        if folder.is_dir() {
            files.extend(images_below(&folder)?);
            labels.resize(files.len(), label as i64);
        }
    }
    if files.is_empty() {
        return Err(Error::file(dir, "no images (.jpg, .jpeg, .png) in its class folders"));
    }
    Ok((files, labels))
}

/// The images of `dir/CLASS` as a split.
pub fn split(dir: &Path, classes: &[String]) -> Result<Split> {
    let (files, labels) = labelled(dir, classes)?;
    Ok(Split::new(Pixels::Files(Arc::new(files)), labels))
}

/// The classes of a training folder and both its splits; a class that only the test folder has is refused.
pub fn train_and_test(train: &Path, test: &Path) -> Result<(Vec<String>, Split, Split)> {
    let classes = class_names(train)?;
    if let Some(stranger) = class_names(test)?.iter().find(|class| !classes.contains(class)) {
        return Err(Error::file(test.join(stranger), format!("a class that {} does not have", train.display())));
    }
    let (train, test) = (split(train, &classes)?, split(test, &classes)?);
    Ok((classes, train, test))
}

/// Photos of any size, normalised and cut out as everybody does with ImageNet's.
pub fn photos(request: &Request, home: PathBuf, (classes, train, test): (Vec<String>, Split, Split)) -> Dataset {
    Dataset {
        name: request.spec.name,
        train,
        test,
        classes,
        mean: MEAN,
        std: STD,
        image_size: request.options.size.unwrap_or(CROP),
        one_size: false,
        home: Some(home),
    }
}

fn entries(dir: &Path, wanted: impl Fn(&Path) -> bool) -> Result<Vec<String>> {
    let mut names = vec![];
    for entry in fs::read_dir(dir).map_err(Error::open(dir))? {
        let entry = entry.map_err(Error::open(dir))?;
        let name = entry.file_name();
        let name = name.to_str().ok_or_else(|| Error::file(entry.path(), "a name that is no UTF-8"))?;
        if !name.starts_with('.') && wanted(&entry.path()) {
            names.push(name.to_string());
        }
    }
    names.sort();
    Ok(names)
}
