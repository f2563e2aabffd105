//! Datasets: where pixels and labels come from, and the batches made of them.
//!
//! A dataset is a file here that exports a `DatasetSpec`, and its entry in `DATASETS`. Keys of its own in a recipe's `[data]` are a struct in
//! that file, named by `DatasetSpec::options` and read by `Request::own`.
//!
#![doc = include_str!("README.md")]

pub mod augment;
pub mod check;
mod cifar;
mod class_folders;
mod fashion_mnist;
pub mod fetch;
mod image_folder;
pub mod imagenet;
mod loader;
mod options;
mod packed;
mod picture;
pub mod rand_augment;
mod resident;
pub mod sampler;
mod stl10;
mod synthetic;
mod tiny_imagenet;

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rayon::prelude::*;
use serde::de::DeserializeOwned;
use tch::Tensor;

use crate::error::{Error, Result};
use crate::limits::{self, Need};
use crate::registry;

pub use augment::{Mix, Transform};
pub use class_folders::images_below;
pub use fetch::Archive;
pub use loader::Loader;
pub use options::{Options, OwnOptions, Task};
pub use picture::{Picture, Rect};
pub use rand_augment::RandAugment;
pub use resident::Resident;

/// All a dataset file exports.
pub struct DatasetSpec {
    /// Its name in recipes and on the command line.
    pub name: &'static str,
    /// One line for lists.
    pub about: &'static str,
    /// Reads it; what it was asked for has been checked.
    pub open: fn(&Request) -> Result<Dataset>,
    /// Its own keys in `[data]`.
    pub options: OwnOptions,
    /// What `data check` can compare it with; returns what to say.
    pub compare: Option<fn(&Dataset) -> Result<Vec<String>>>,
    /// How it may lie on disk: (its folder, a file or folder in it), the preferred layout first.
    pub layouts: &'static [(&'static str, &'static str)],
    /// Whether a folder of another name than its layouts have holds this set, and not another one with files of the same names.
    pub recognise: fn(&Path) -> bool,
    /// What `data fetch` can bring, the preferred one first.
    pub archives: &'static [Archive],
    /// Images of the official set, for training and testing.
    pub images: Option<(usize, usize)>,
    /// Published checksums of files in its folder.
    pub md5s: &'static [(&'static str, &'static str)],
}

impl DatasetSpec {
    /// A dataset that no archive, layout or checksum is published of; files add what they know.
    const fn new(name: &'static str, about: &'static str, open: fn(&Request) -> Result<Dataset>) -> DatasetSpec {
        DatasetSpec {
            name,
            about,
            open,
            options: OwnOptions::NONE,
            compare: None,
            layouts: &[],
            recognise: |_| true,
            archives: &[],
            images: None,
            md5s: &[],
        }
    }
}

/// Every dataset by its name in recipes and on the command line.
#[rustfmt::skip] // one a line
pub const DATASETS: &[DatasetSpec] = &[
    cifar::CIFAR10,
    cifar::CIFAR100,
    stl10::SPEC,
    tiny_imagenet::SPEC,
    fashion_mnist::SPEC,
    imagenet::SPEC,
    image_folder::SPEC,
    synthetic::SPEC,
];

/// The dataset of this name, or the error that lists all.
pub fn find(name: &str) -> Result<&'static DatasetSpec> {
    registry::find("dataset", name, DATASETS, |spec| spec.name)
}

/// Opens a dataset from under `data` (the `--data` folder), `MCL_DATA` or `./data`, whichever holds it first.
pub fn open(name: &str, data: Option<&Path>, options: &Options) -> Result<Dataset> {
    let spec = find(name)?;
    spec.options.check(spec.name, &options.own)?;
    (spec.open)(&Request { spec, roots: roots(data), options })
}

/// What a dataset is opened from.
pub struct Request<'a> {
    /// The dataset.
    pub spec: &'static DatasetSpec,
    /// Where data are looked for, best first, and what named the place.
    pub roots: Vec<(PathBuf, &'static str)>,
    /// What was asked for.
    pub options: &'a Options,
}

/// The places data are looked for, and who named them: the caller, `MCL_DATA`, `./data`.
pub fn roots(data: Option<&Path>) -> Vec<(PathBuf, &'static str)> {
    let from_env = std::env::var_os("MCL_DATA").filter(|dir| !dir.is_empty()).map(|dir| (PathBuf::from(dir), "MCL_DATA"));
    data.map(|dir| (dir.to_path_buf(), "given")).into_iter().chain(from_env).chain([(PathBuf::from("data"), "./data")]).collect()
}

impl Request<'_> {
    /// The dataset's own keys.
    pub fn own<T: DeserializeOwned>(&self) -> Result<T> {
        options::read(self.spec.name, &self.options.own)
    }

    /// The first folder that holds one of the set's layouts, and which. A root may also be the folder itself.
    pub fn locate(&self) -> Option<(PathBuf, usize)> {
        for (root, _) in &self.roots {
            for (i, (folder, file)) in self.spec.layouts.iter().enumerate() {
                let named = root.join(folder);
                if named.join(file).exists() {
                    return Some((named, i));
                }
                if root.join(file).exists() && (root.ends_with(folder) || (self.spec.recognise)(root)) {
                    return Some((root.clone(), i));
                }
            }
        }
        None
    }

    /// `locate`, or the error that says where was looked and what brings the set.
    pub fn home(&self) -> Result<(PathBuf, usize)> {
        self.locate().ok_or_else(|| {
            let name = self.spec.name;
            let wanted: Vec<String> = self.spec.layouts.iter().map(|(folder, file)| format!("{folder}/{file}")).collect();
            let bring = if self.spec.archives.is_empty() {
                "it cannot be fetched: point {data} or MCL_DATA to it".to_string()
            } else {
                format!("`mcl-eval data fetch {name}` brings it, or point {{data}} or MCL_DATA to it")
            };
            Error::value(&["data"], format!("dataset {name}: no {} in {}; {bring}", wanted.join(" or "), self.places()))
        })
    }

    /// Where was looked, for messages.
    pub fn places(&self) -> String {
        let places: Vec<String> = self.roots.iter().map(|(root, from)| format!("{} ({from})", root.display())).collect();
        places.join(", ")
    }
}

/// A dataset as read from disk (or drawn, for `synthetic`).
#[derive(Clone)]
pub struct Dataset {
    /// As in the registry.
    pub name: &'static str,
    /// What networks learn from.
    pub train: Split,
    /// What they are tested on.
    pub test: Split,
    /// The names of the classes, in the order of the labels.
    pub classes: Vec<String>,
    /// Channel statistics its networks are trained with.
    pub mean: [f64; 3],
    /// Likewise.
    pub std: [f64; 3],
    /// Side of its square images, or what images of many sizes are cropped to.
    pub image_size: usize,
    /// Whether all images are `image_size` square; otherwise they are cropped as ImageNet's are.
    pub one_size: bool,
    /// Where it was read from; none for `synthetic`.
    pub home: Option<PathBuf>,
}

impl Dataset {
    /// Augmentation of its training images.
    pub fn train_transform(&self) -> Transform {
        if self.one_size {
            Transform::pad_crop(self.image_size, self.mean, self.std)
        } else {
            Transform::random_resized(self.image_size, self.mean, self.std)
        }
    }

    /// What its images get when networks are tested.
    pub fn test_transform(&self) -> Transform {
        if self.one_size {
            Transform::plain(self.image_size, self.mean, self.std)
        } else {
            Transform::centre(self.image_size, self.mean, self.std)
        }
    }

    /// All images resized to `side` x `side` once, in memory: how larger images meet networks trained on small ones.
    pub fn resized(&self, side: usize) -> Result<Dataset> {
        Ok(Dataset { train: self.train.resized(side)?, test: self.test.resized(side)?, image_size: side, one_size: true, ..self.clone() })
    }
}

/// Images and labels; cloning is cheap. `rows[i]` is the place in `pixels` of image i, so a subset shares the pixels.
#[derive(Clone)]
pub struct Split {
    /// The images, of this split and perhaps of others.
    pub pixels: Pixels,
    /// Which of them are this split's.
    pub rows: Arc<Vec<u32>>,
    /// The class of each.
    pub labels: Arc<Vec<i64>>,
}

/// Where images are.
#[derive(Clone)]
pub enum Pixels {
    /// Small sets, whole in memory.
    Memory(Arc<Raw>),
    /// ImageNet-sized sets, decoded batch by batch.
    Files(Arc<Vec<PathBuf>>),
}

/// u8 images of one size, [count, height, width, 3]: channels last, as batches are made.
pub struct Raw {
    /// Of each image, in pixels.
    pub height: usize,
    /// Likewise.
    pub width: usize,
    /// All images one after another.
    pub data: Vec<u8>,
}

impl Split {
    /// All of `pixels`, with a label each.
    pub fn new(pixels: Pixels, labels: Vec<i64>) -> Split {
        assert_eq!(pixels.len(), labels.len(), "as many labels as images");
        Split { pixels, rows: Arc::new((0..labels.len() as u32).collect()), labels: Arc::new(labels) }
    }

    /// How many images it has.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Has it none?
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// The images at these places of this split, sharing its pixels.
    pub fn subset(&self, indices: &[usize]) -> Split {
        Split {
            pixels: self.pixels.clone(),
            rows: Arc::new(indices.iter().map(|&i| self.rows[i]).collect()),
            labels: Arc::new(indices.iter().map(|&i| self.labels[i]).collect()),
        }
    }

    /// Image i as it was stored.
    pub fn image(&self, i: usize) -> Result<Picture<'_>> {
        match &self.pixels {
            Pixels::Memory(raw) => Ok(raw.image(self.rows[i] as usize)),
            Pixels::Files(paths) => Picture::open(&paths[self.rows[i] as usize]),
        }
    }

    /// The file of image i, where images are files.
    pub fn path(&self, i: usize) -> Option<&Path> {
        match &self.pixels {
            Pixels::Memory(_) => None,
            Pixels::Files(paths) => Some(&paths[self.rows[i] as usize]),
        }
    }

    /// The same images stretched to `side` x `side`, in memory.
    pub fn resized(&self, side: usize) -> Result<Split> {
        if matches!(&self.pixels, Pixels::Memory(raw) if raw.height == side && raw.width == side) {
            return Ok(self.clone());
        }
        limits::side("image_size", side as i64)?;
        Need::new()
            .and(format!("{} images in memory", self.len()), limits::stored_images(self.len(), side))
            .check(&format!("image_size = {side}"))?;
        let mut data = vec![0; self.len() * side * side * 3];
        data.par_chunks_mut(side * side * 3).enumerate().try_for_each(|(i, out)| {
            let image = self.image(i)?;
            let fits = limits::resize((image.height, image.width), (side, side));
            fits.map_err(|what| self.path(i).map_or_else(|| Error::input(&what), |path| Error::file(path, &what)))?;
            out.copy_from_slice(&image.resize(side, side).data);
            Ok::<(), Error>(())
        })?;
        Ok(Split::new(Pixels::Memory(Arc::new(Raw { height: side, width: side, data })), self.labels.to_vec()))
    }

    /// Images of each class.
    pub fn counts(&self, classes: usize) -> Vec<usize> {
        let mut counts = vec![0; classes];
        for &label in self.labels.iter() {
            counts[label as usize] += 1;
        }
        counts
    }
}

impl Pixels {
    /// How many images there are.
    pub fn len(&self) -> usize {
        match self {
            Pixels::Memory(raw) => raw.data.len() / (raw.height * raw.width * 3),
            Pixels::Files(paths) => paths.len(),
        }
    }

    /// Are there none?
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Raw {
    /// The image at this place.
    pub fn image(&self, row: usize) -> Picture<'_> {
        let size = self.height * self.width * 3;
        Picture { height: self.height, width: self.width, data: Cow::Borrowed(&self.data[row * size..(row + 1) * size]) }
    }
}

/// `views` has one entry shared by all peers, or one per peer (KDCL, PCL); f32 [B, 3, H, W] in channels_last, normalised.
/// `index` is the place in the training split (after `fraction` and `holdout`): memory banks key on it.
#[derive(Debug)]
pub struct Batch {
    /// The images, augmented anew for each entry.
    pub views: Vec<Tensor>,
    /// Their classes, int64 `[B]`.
    pub labels: Tensor,
    /// Their places, int64 `[B]`.
    pub index: Tensor,
    /// Seeds what networks draw in training (drop-path): see `nets::layers::Pass`.
    pub noise: u64,
}

impl Batch {
    /// Other handles onto the same images.
    pub fn shallow_clone(&self) -> Batch {
        Batch {
            views: self.views.iter().map(Tensor::shallow_clone).collect(),
            labels: self.labels.shallow_clone(),
            index: self.index.shallow_clone(),
            noise: self.noise,
        }
    }

    /// The batch as the loader has it for a CUDA device: in one piece of pinned memory. Views are f32.
    pub fn pinned(&self) -> Batch {
        let numbers = |t: &Tensor| Vec::<i64>::try_from(t).expect("int64 of one dimension");
        let rows = |t: &Tensor| Vec::<f32>::try_from(t.permute([0, 2, 3, 1]).contiguous().view([-1])).expect("f32");
        let size = self.views[0].size();
        let views: Vec<Vec<f32>> = self.views.iter().map(rows).collect();
        let piece = packed::pack(&numbers(&self.index), &numbers(&self.labels), &views);
        packed::unpack(&piece, views.len(), [size[0], size[2], size[3], size[1]], self.noise)
    }

    /// The batch where the networks are.
    pub fn to_device(&self, device: tch::Device) -> Batch {
        if device.is_cuda()
            && let Some(batch) = packed::send(self, device)
        {
            return batch;
        }
        Batch {
            views: self.views.iter().map(|v| v.to_device(device)).collect(),
            labels: self.labels.to_device(device),
            index: self.index.to_device(device),
            noise: self.noise,
        }
    }
}

/// A batch where the networks are, and its labels and places in host memory too if they came from there: methods draw by them, and
/// reading them back would stop a device.
#[derive(Debug)]
pub struct Placed {
    /// All of it where the networks are.
    pub batch: Batch,
    /// As `Batch::labels`.
    pub labels: Tensor,
    /// As `Batch::index`.
    pub index: Tensor,
}

impl Placed {
    /// The batch brought to a device.
    pub fn on(device: tch::Device, given: &Batch) -> Placed {
        Placed { batch: given.to_device(device), labels: given.labels.shallow_clone(), index: given.index.shallow_clone() }
    }
}

/// How an epoch's batches are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sampling {
    /// Every image once, in an order of the epoch's own.
    Shuffled,
    /// B/2 classes x 2 images: every anchor has a positive.
    ClassPairs,
}
