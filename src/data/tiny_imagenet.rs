//! Tiny-ImageNet, Le & Yang 2015 (Stanford CS231n): the layout of the official zip. Its test images have no labels; the test split is `val`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Archive, Dataset, DatasetSpec, Pixels, Request, Split, class_folders};
use crate::error::{Error, Result};
use crate::files;

pub const SPEC: DatasetSpec = DatasetSpec {
    layouts: &[("tiny-imagenet-200", "wnids.txt")],
    archives: &[Archive {
        folder: "tiny-imagenet-200",
        file: "tiny-imagenet-200.zip",
        base: "http://cs231n.stanford.edu/",
        md5: "90528d7ca1a48142e341f4ef8d21d0de",
        megabytes: 248,
    }],
    images: Some((100_000, 10_000)),
    ..DatasetSpec::new("tiny_imagenet", "Tiny-ImageNet: 100,000 + 10,000 images of 64 x 64 in 200 classes", open)
};

fn open(request: &Request) -> Result<Dataset> {
    let (home, _) = request.home()?;
    let wnids = home.join("wnids.txt");
    let mut ids: Vec<String> = files::read_text(&wnids)?.split_whitespace().map(str::to_string).collect();
    ids.sort(); // as everybody's folder readers number them
    let (files, labels) = class_folders::labelled(&home.join("train"), &ids)?;
    let train = Split::new(Pixels::Files(Arc::new(files)), labels);
    let test = annotated(&home.join("val"), &ids)?;
    Ok(Dataset {
        name: request.spec.name,
        train,
        test,
        classes: titled(&home.join("words.txt"), &ids)?,
        mean: [0.4802, 0.4481, 0.3975],
        std: [0.2770, 0.2691, 0.2821],
        image_size: 64,
        one_size: true,
        home: Some(home),
    })
}

/// The validation images with the classes val_annotations.txt gives them.
fn annotated(val: &Path, ids: &[String]) -> Result<Split> {
    let path = val.join("val_annotations.txt");
    let text = files::read_text(&path)?;
    let label_of: HashMap<&str, i64> = ids.iter().enumerate().map(|(i, id)| (id.as_str(), i as i64)).collect();
    let (mut files, mut labels): (Vec<PathBuf>, Vec<i64>) = (vec![], vec![]);
    for (i, line) in text.lines().enumerate() {
        let mut fields = line.split('\t');
        let (Some(file), Some(id)) = (fields.next(), fields.next()) else {
            return Err(Error::file(&path, format!("line {}: {line:?} is no `file<tab>class`", i + 1)));
        };
        let label = label_of.get(id).ok_or_else(|| Error::file(&path, format!("line {}: class {id} is not in wnids.txt", i + 1)))?;
        let file = val.join("images").join(file);
        if !file.is_file() {
            return Err(Error::file(&path, format!("line {}: {} is not there", i + 1, file.display())));
        }
        files.push(file);
        labels.push(*label);
    }
    if files.is_empty() {
        return Err(Error::file(&path, "no images in it"));
    }
    Ok(Split::new(Pixels::Files(Arc::new(files)), labels))
}

/// "n01443537 goldfish", where words.txt has a word; the id alone otherwise.
fn titled(words: &Path, ids: &[String]) -> Result<Vec<String>> {
    if !words.exists() {
        return Ok(ids.to_vec());
    }
    let text = files::read_text(words)?;
    let words: HashMap<&str, &str> = text.lines().filter_map(|line| line.split_once('\t')).collect();
    let first = |id: &str| words.get(id).and_then(|all| all.split(',').next());
    Ok(ids.iter().map(|id| first(id).map_or_else(|| id.clone(), |word| format!("{id} {}", word.trim()))).collect())
}
