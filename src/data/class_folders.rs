//! Folders of classes: what ImageNet, Tiny-ImageNet and any folder of one's own have in common.

use std::fs;
use std::path::{Path, PathBuf};

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

/// The image files inside `dir` and all folders in it, those of a folder before those of the folders in it.
pub fn images_below(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files = images(dir)?;
    for folder in class_names(dir)? {
        files.extend(images_below(&dir.join(folder))?);
    }
    Ok(files)
}

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
