//! Features of whole splits, extracted once and kept by content: weights, preprocessing, images, class of device and precision are the key, so a cached
//! set is never stale. Probe, kNN, few-shot and t-SNE share it.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use tch::{Device, Kind, Tensor};

use super::Common;
use super::dataset::TargetDataset;
use super::feature_file::{self, FeatureFile, Part};
use super::network::TrainedNetwork;
use crate::data::augment::Crop;
use crate::data::{Dataset, Loader, Pixels, Split, Transform};
use crate::error::{Error, Result};
use crate::limits::{self, Need};

/// Changes when the numbers of a forward pass change for another reason than weights and inputs.
const VERSION: &str = "3";
const BATCH: usize = 256;
/// Images up to this side are resized once and kept in memory; larger ones are resized batch by batch.
const SMALL: usize = 64;

/// Pooled features of a split, in its order: `x` [N, D] f32 on the CPU.
pub struct Features {
    /// Features, a row an image.
    pub x: Tensor,
    /// Labels.
    pub y: Vec<i64>,
}

impl Features {
    /// The labels as a tensor.
    pub fn labels(&self) -> Tensor {
        Tensor::from_slice(&self.y)
    }

    /// Some of the rows.
    pub fn rows(&self, rows: &[usize]) -> Features {
        let index: Vec<i64> = rows.iter().map(|&r| r as i64).collect();
        Features { x: self.x.index_select(0, &Tensor::from_slice(&index)), y: rows.iter().map(|&r| self.y[r]).collect() }
    }
}

/// Where features are kept: $MCL_CACHE, or mcl in the user's cache folder.
fn folder() -> Option<PathBuf> {
    let own = std::env::var_os("MCL_CACHE").filter(|v| !v.is_empty()).map(PathBuf::from);
    let user = || {
        std::env::var_os("XDG_CACHE_HOME")
            .filter(|v| !v.is_empty())
            .map(PathBuf::from)
            .or_else(|| std::env::home_dir().map(|h| h.join(".cache")))
    };
    own.or_else(|| user().map(|c| c.join("mcl"))).map(|c| c.join("features"))
}

/// A dataset brought to the size a network is measured at, and what happens to its images: normalised as the network was trained, never
/// with the target's own statistics.
pub(crate) struct Prepared {
    pub(crate) dataset: Dataset,
    pub(crate) transform: Transform,
    /// Before its images were brought to the size: their files have names.
    original: Dataset,
}

impl Prepared {
    pub(crate) fn new(dataset: &Dataset, network: &TrainedNetwork, side: usize) -> Result<Prepared> {
        let (mean, std) = (network.meta.mean, network.meta.std);
        limits::side("image_size", side as i64)?;
        let most = dataset.train.len().max(dataset.test.len()).min(BATCH);
        // One batch is asked about and two are made ahead.
        Need::new()
            .and(format!("{most} images at a time"), 3 * limits::float_images(most, side))
            .check(&format!("{} on images of {side} x {side} pixels", network.name))?;
        if side <= SMALL {
            let transform = Transform::plain(side, mean, std);
            return Ok(Prepared { dataset: dataset.resized(side)?, transform, original: dataset.clone() });
        }
        let fits = dataset.one_size && dataset.image_size == side;
        let transform = match (fits, dataset.one_size) {
            (true, _) => Transform::plain(side, mean, std),
            (false, true) => Transform { crop: Crop::Stretch, ..Transform::plain(side, mean, std) },
            (false, false) => Transform::centre(side, mean, std),
        };
        Ok(Prepared { dataset: dataset.clone(), transform, original: dataset.clone() })
    }
}

impl Prepared {
    /// What happens to training images: what happens to all, or the augmentation networks of this size are trained with.
    pub(crate) fn training_transform(&self, augment: bool) -> Transform {
        let Transform { size, mean, std, .. } = self.transform;
        match (augment, size <= SMALL) {
            (false, _) => self.transform.clone(),
            (true, true) => Transform::pad_crop(size, mean, std),
            (true, false) => Transform::random_resized(size, mean, std),
        }
    }
}

/// sha256 of a split: labels, and pixels, or the names, sizes and times of files.
fn split_hash(split: &Split) -> Result<String> {
    let mut hash = Sha256::new();
    for label in split.labels.iter() {
        hash.update(label.to_le_bytes());
    }
    match &split.pixels {
        Pixels::Memory(raw) => {
            let size = raw.height * raw.width * 3;
            hash.update(format!("{} x {}", raw.height, raw.width));
            for &row in split.rows.iter() {
                hash.update(&raw.data[row as usize * size..(row as usize + 1) * size]);
            }
        }
        Pixels::Files(paths) => {
            for &row in split.rows.iter() {
                let path = &paths[row as usize];
                let known = std::fs::metadata(path).map_err(Error::open(path))?;
                hash.update(format!("{} {} {:?}\n", path.display(), known.len(), known.modified().ok()));
            }
        }
    }
    Ok(format!("{:x}", hash.finalize()))
}

/// Features of a dataset's training and test images, brought to a side.
pub(crate) fn of_dataset(
    network: &TrainedNetwork,
    target: &TargetDataset,
    side: usize,
    cached: bool,
    common: &Common,
) -> Result<(Features, Features)> {
    let prepared = Prepared::new(&target.dataset, network, side)?;
    let of = |part| features(network, &prepared, part, cached, common);
    Ok((of(Part::Train)?, of(Part::Test)?))
}

/// Extracts the features of a part of a dataset, or takes them from the cache.
pub(crate) fn features(network: &TrainedNetwork, prepared: &Prepared, part: Part, cached: bool, common: &Common) -> Result<Features> {
    let (split, transform) = (part.of(&prepared.dataset), &prepared.transform);
    let y = split.labels.to_vec();
    let Some(folder) = folder().filter(|_| cached) else {
        return Ok(Features { x: extract(network, split, transform, common)?, y });
    };
    let described = serde_json::to_string(transform).expect("plain values serialise");
    let key = crate::files::sha256(
        format!("{VERSION}\n{}\n{}\n{described}\n{}\n{}", network.hash, network.features_of(), split_hash(split)?, numbers(common.device))
            .as_bytes(),
    );
    let path = folder.join(format!("{}.safetensors", &key[..32]));
    if let Some(x) = take(&path, y.len()) {
        common.say(format!("features {} x {} from the cache ({})", y.len(), x.size()[1], size(&path)));
        return Ok(Features { x, y });
    }
    let x = extract(network, split, transform, common)?;
    std::fs::create_dir_all(&folder).map_err(Error::io("cannot make", &folder))?;
    // Its own name until it is whole: another process may be looking for it.
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
    let file = FeatureFile { dataset: &prepared.original, network, side: transform.size, parts: vec![(part, &x)] };
    file.write(&temporary)
        .map_err(|e| Error::failed(format!("cannot keep features in {}: {e}; $MCL_CACHE names another folder", temporary.display())))?;
    std::fs::rename(&temporary, &path).map_err(Error::io("cannot write", &path))?;
    common.say(format!("features {} x {} extracted and kept ({} in {})", y.len(), x.size()[1], size(&path), folder.display()));
    Ok(Features { x, y })
}

/// In what and where features are computed. Devices of one class round alike (all that is measured is in f32, never in TF32); two classes
/// do not, and what one made is not what another would have.
fn numbers(device: Device) -> &'static str {
    match device {
        Device::Cpu => "f32",
        Device::Cuda(_) => "f32 cuda",
        _ => "f32 other",
    }
}

/// A cached set; none where it cannot be read, is damaged or is not what its name promises: then it is made anew.
fn take(path: &Path, rows: usize) -> Option<Tensor> {
    let x = feature_file::read(path)?;
    let fits = x.dim() == 2 && x.size()[0] == rows as i64 && x.kind() == Kind::Float;
    (fits && bool::try_from(x.isfinite().all()).unwrap_or(false)).then_some(x)
}

fn size(path: &Path) -> String {
    let bytes = std::fs::metadata(path).map_or(0, |m| m.len()) as f64;
    if bytes >= 1e6 { format!("{:.1} MB", bytes / 1e6) } else { format!("{:.0} kB", bytes / 1e3) }
}

/// Pooled features of all images, in the order of the split.
fn extract(network: &TrainedNetwork, split: &Split, transform: &Transform, common: &Common) -> Result<Tensor> {
    let mut extractor = network.extractor(common)?;
    let progress = common.progress(format!("{}: features", network.name), split.len(), "images");
    let mut parts = vec![];
    let batches = Loader::eval(split, BATCH, transform.clone()).map(|batch| batch.map(|batch| (batch.views[0].shallow_clone(), ())));
    extractor.each(batches, |answer, ()| {
        progress.add(answer.features.size()[0] as usize);
        parts.push(answer.features);
        Ok(())
    })?;
    Ok(Tensor::cat(&parts, 0))
}
