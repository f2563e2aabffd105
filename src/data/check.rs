//! Looks into datasets: which are there, whether they are whole, which of their files cannot be read.

use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde::Serialize;

use super::fetch::md5_of;
use super::{DATASETS, Dataset, DatasetSpec, Options, Picture, Request, Split, find, roots};
use crate::error::{Error, Result};
use crate::system::progress::Progress;

/// One dataset as `data list` shows it.
#[derive(Debug, Serialize)]
pub struct Listed {
    /// As in the registry.
    pub name: &'static str,
    /// One line about it.
    pub about: &'static str,
    /// Where it was found; none for a set that is not there, or that needs no files.
    pub home: Option<PathBuf>,
    /// What brings it, for a set that is not there.
    pub bring: Option<String>,
    /// Its own keys in a recipe's `[data]`.
    pub keys: &'static [&'static str],
}

/// Every dataset, whether it is here, and what brings it otherwise.
pub fn list(data: Option<&Path>) -> Vec<Listed> {
    let roots = roots(data);
    let entry = |spec: &'static DatasetSpec| {
        let request = Request { spec, roots: roots.clone(), options: &Options::default() };
        let home = request.locate().map(|(home, _)| home);
        let bring = match (&home, spec.archives.first()) {
            (None, Some(archive)) => Some(format!("mcl-eval data fetch {} ({} MB)", spec.name, archive.megabytes)),
            (None, None) if !spec.layouts.is_empty() => Some("point --data or MCL_DATA to it".to_string()),
            _ => None,
        };
        Listed { name: spec.name, about: spec.about, home, bring, keys: spec.options.keys() }
    };
    DATASETS.iter().map(entry).collect()
}

impl fmt::Display for Listed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:14} {}", self.name, self.about)?;
        if !self.keys.is_empty() {
            write!(f, "\n{:14} keys of its own in [data]: {}", "", self.keys.join(", "))?;
        }
        match (&self.home, &self.bring) {
            (Some(home), _) => write!(f, "\n{:14} in {}", "", home.display()),
            (None, Some(bring)) => write!(f, "\n{:14} not here: {bring}", ""),
            (None, None) => Ok(()),
        }
    }
}

/// What `data check` found.
#[derive(Debug, Serialize)]
pub struct Check {
    /// As in the registry.
    pub name: &'static str,
    /// Where it was found; none for a drawn set.
    pub home: Option<PathBuf>,
    /// How many classes it has.
    pub classes: usize,
    /// The training and the test split.
    pub splits: Vec<SplitCheck>,
    /// Files whose checksums are published.
    pub hashes: Vec<HashCheck>,
    /// What it was compared with.
    pub notes: Vec<String>,
}

/// One split of a set.
#[derive(Debug, Serialize)]
pub struct SplitCheck {
    /// `train` or `test`.
    pub name: &'static str,
    /// How many images it has.
    pub images: usize,
    /// What the official set has; more than `images` in a subset.
    pub official: Option<usize>,
    /// Images of each class, by name.
    pub by_class: Vec<(String, usize)>,
    /// Smallest and largest width and height in pixels.
    pub width: (usize, usize),
    /// Likewise.
    pub height: (usize, usize),
    /// Files that cannot be decoded, and why.
    pub undecodable: Vec<(PathBuf, String)>,
}

/// A file whose checksum is published.
#[derive(Debug, Serialize)]
pub struct HashCheck {
    /// Where it is.
    pub file: PathBuf,
    /// The checksum it has.
    pub md5: String,
    /// The checksum it should have.
    pub published: &'static str,
}

/// Opens a dataset, decodes every file of it and compares it with what is published. An unreadable set is an error; see `Check::verdict`.
pub fn check(name: &str, data: Option<&Path>, options: &Options) -> Result<Check> {
    check_watched(name, data, options, &Progress::new(true, "", 0, ""))
}

/// The same; `progress` counts images.
pub fn check_watched(name: &str, data: Option<&Path>, options: &Options, progress: &Progress) -> Result<Check> {
    let spec = find(name)?;
    let set = super::open(name, data, options)?;
    progress.expect(set.train.len() + set.test.len());
    let official = spec.images.map_or([None; 2], |(train, test)| [Some(train), Some(test)]);
    let splits = vec![look("train", &set, &set.train, official[0], progress)?, look("test", &set, &set.test, official[1], progress)?];
    let mut hashes = vec![];
    for &(file, published) in spec.md5s {
        let Some(path) = set.home.as_ref().map(|home| home.join(file)).filter(|path| path.is_file()) else { continue };
        let mut open = File::open(&path).map_err(Error::open(&path))?;
        hashes.push(HashCheck { md5: md5_of(&mut open, &path)?, file: path, published });
    }
    let notes = spec.compare.map_or(Ok(vec![]), |compare| compare(&set))?;
    Ok(Check { name: spec.name, home: set.home, classes: set.classes.len(), splits, hashes, notes })
}

fn look(name: &'static str, set: &Dataset, split: &Split, official: Option<usize>, progress: &Progress) -> Result<SplitCheck> {
    let size = |picture: &Picture| (picture.width, picture.height);
    let sizes: Vec<std::result::Result<(usize, usize), (PathBuf, String)>> = (0..split.len())
        .into_par_iter()
        .inspect(|_| progress.add(1))
        .map(|i| match split.image(i) {
            Ok(picture) => Ok(Ok(size(&picture))),
            Err(Error::File { path, what }) => Ok(Err((path, what))),
            Err(other) => Err(other),
        })
        .collect::<Result<_>>()?;
    let (mut width, mut height) = ((usize::MAX, 0), (usize::MAX, 0));
    let mut undecodable = vec![];
    for size in sizes {
        match size {
            Ok((w, h)) => {
                width = (width.0.min(w), width.1.max(w));
                height = (height.0.min(h), height.1.max(h));
            }
            Err(fault) => undecodable.push(fault),
        }
    }
    let by_class = set.classes.iter().cloned().zip(split.counts(set.classes.len())).collect();
    Ok(SplitCheck { name, images: split.len(), official, by_class, width, height, undecodable })
}

impl Check {
    /// Fewer images than the official set, in any split.
    pub fn is_subset(&self) -> bool {
        self.splits.iter().any(|split| split.official.is_some_and(|official| split.images < official))
    }

    /// The one line that says what is wrong: undecodable files, or a whole set whose files are not the published ones.
    pub fn verdict(&self) -> Result<()> {
        let faults: Vec<&(PathBuf, String)> = self.splits.iter().flat_map(|split| &split.undecodable).collect();
        if let Some((path, what)) = faults.first() {
            let more = if faults.len() > 1 { format!(" (and {} more)", faults.len() - 1) } else { String::new() };
            return Err(Error::file(path, format!("{what}{more}")));
        }
        let differs = |hash: &&HashCheck| hash.md5 != hash.published;
        match self.hashes.iter().find(differs).filter(|_| !self.is_subset()) {
            Some(hash) => Err(Error::file(&hash.file, format!("md5 {}, the published file has {}", hash.md5, hash.published))),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = self.home.as_ref().map_or("drawn".to_string(), |home| home.display().to_string());
        let whole = if self.is_subset() { ", a subset of the official set" } else { "" };
        writeln!(f, "{} ({place}): {} classes{whole}", self.name, self.classes)?;
        for split in &self.splits {
            let of = split.official.filter(|&n| n != split.images).map_or(String::new(), |n| format!(" of {n}"));
            let counts = || split.by_class.iter().map(|(_, n)| *n);
            let range = |(low, high): (usize, usize)| if low == high { format!("{low}") } else { format!("{low}-{high}") };
            let a_class = range((counts().min().unwrap_or(0), counts().max().unwrap_or(0)));
            write!(f, "  {:5} {} images{of}, {a_class} a class", split.name, split.images)?;
            if split.undecodable.len() < split.images {
                write!(f, ", {} x {} pixels", range(split.width), range(split.height))?;
            }
            writeln!(f)?;
            let empty: Vec<&str> = split.by_class.iter().filter(|(_, n)| *n == 0).map(|(name, _)| name.as_str()).collect();
            if !empty.is_empty() {
                writeln!(f, "        without images: {}", empty.join(", "))?;
            }
            for (path, what) in &split.undecodable {
                writeln!(f, "        {}: {what}", path.display())?;
            }
        }
        for hash in &self.hashes {
            let verdict = match (hash.md5 == hash.published, self.is_subset()) {
                (true, _) => "as published".to_string(),
                (false, true) => "not the published file (this is a subset)".to_string(),
                (false, false) => format!("NOT the published file, which has {}", hash.published),
            };
            writeln!(f, "  {} md5 {}: {verdict}", hash.file.display(), hash.md5)?;
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "  {note}"))
    }
}
