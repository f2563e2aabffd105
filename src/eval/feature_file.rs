//! Features as a file: one row an image, with its label, its name and its part of the dataset. `embed --dataset` writes one, and what is kept in the
//! cache is one.

use std::path::Path;

use tch::{Kind, Tensor};

use super::network::TrainedNetwork;
use crate::data::{Dataset, Pixels, Split};
use crate::error::Result;
use crate::files;
use crate::weights::npz::{self, Array};
use crate::weights::safetensors::{self, Reader, Texts};

/// A part of a dataset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Training images.
    Train,
    /// Test images.
    Test,
}

impl Part {
    /// Its images.
    pub(crate) fn of(self, dataset: &Dataset) -> &Split {
        match self {
            Part::Train => &dataset.train,
            Part::Test => &dataset.test,
        }
    }

    /// `train` or `test`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Part::Train => "train",
            Part::Test => "test",
        }
    }
}

/// Features of one or both parts of a dataset, a row an image.
pub(crate) struct FeatureFile<'a> {
    pub(crate) dataset: &'a Dataset,
    pub(crate) network: &'a TrainedNetwork,
    /// Side of the images.
    pub(crate) side: usize,
    /// Rows of each part, [N, D].
    pub(crate) parts: Vec<(Part, &'a Tensor)>,
}

impl FeatureFile<'_> {
    fn names(&self) -> Vec<String> {
        self.parts.iter().flat_map(|(part, _)| names(self.dataset, *part)).collect()
    }

    fn labels(&self) -> Tensor {
        let labels: Vec<i64> = self.parts.iter().flat_map(|(part, _)| part.of(self.dataset).labels.to_vec()).collect();
        Tensor::from_slice(&labels)
    }

    /// 0 for training images, 1 for test images.
    fn split(&self) -> Tensor {
        let each = |(part, rows): &(Part, &Tensor)| vec![u8::from(*part == Part::Test); rows.size()[0] as usize];
        Tensor::from_slice(&self.parts.iter().flat_map(each).collect::<Vec<u8>>())
    }

    /// What one must know to use the rows, and what tells whether they are still those.
    fn texts(&self, features: &Tensor) -> Texts {
        let TrainedNetwork { name, hash, meta, .. } = self.network;
        let parts: Vec<&str> = self.parts.iter().map(|(part, _)| part.name()).collect();
        let text = |key: &str, value: String| (key.to_string(), value);
        [
            text("network", name.clone()),
            text("architecture", self.network.architecture().to_string()),
            text("features_of", self.network.features_of()),
            text("weights_hash", hash.clone()),
            text("dataset", self.dataset.name.to_string()),
            text("parts", parts.join(",")),
            text("classes", serde_json::json!(self.dataset.classes).to_string()),
            text("image_size", self.side.to_string()),
            text("mean", serde_json::json!(meta.mean).to_string()),
            text("std", serde_json::json!(meta.std).to_string()),
            text(CHECKSUM, checksum(features)),
            text("about", "split: 0 train, 1 test; names: a row of UTF-8 bytes for each image, filled up with zeros".to_string()),
        ]
        .into()
    }

    /// Writes .npz where the name ends so, else .safetensors.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let rows: Vec<&Tensor> = self.parts.iter().map(|(_, rows)| *rows).collect();
        let (features, labels, split, names) = (Tensor::cat(&rows, 0), self.labels(), self.split(), self.names());
        if is_npz(path) {
            let about: Vec<String> = self.texts(&features).into_iter().map(|(key, value)| format!("{key}={value}")).collect();
            return npz::save(
                path,
                &[
                    ("features", Array::Numbers(&features)),
                    ("labels", Array::Numbers(&labels)),
                    ("split", Array::Numbers(&split)),
                    ("names", Array::Texts(&names)),
                    ("classes", Array::Texts(&self.dataset.classes)),
                    ("about", Array::Texts(&about)),
                ],
            );
        }
        let bytes = npz::padded(&names);
        let width = bytes.len() / names.len().max(1);
        let names = Tensor::f_from_data_size(&bytes, &[names.len() as i64, width as i64], Kind::Uint8)?;
        let texts = self.texts(&features);
        let tensors = [("features", features), ("labels", labels), ("split", split), ("names", names)];
        safetensors::save(path, &tensors.map(|(name, t)| (name.to_string(), t)).into(), &texts)
    }
}

/// The text of a file that holds the checksum of its features.
const CHECKSUM: &str = "features_sha256";

fn checksum(features: &Tensor) -> String {
    files::sha256(&files::tensor_bytes(features))
}

/// The features of a file that `write` made; none where it cannot be read, or one bit of them is not as it was written.
pub(crate) fn read(path: &Path) -> Option<Tensor> {
    let mut reader = Reader::open(path).ok()?;
    let features = reader.tensor("features").ok()?;
    (reader.texts().get(CHECKSUM)? == &checksum(&features)).then_some(features)
}

/// Shall it be numpy's archive?
fn is_npz(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "npz")
}

/// What images are called: their file below the dataset's folder, or their part and their place in it as the dataset was read.
fn names(dataset: &Dataset, part: Part) -> Vec<String> {
    let split = part.of(dataset);
    match &split.pixels {
        Pixels::Files(paths) => {
            let name = |row: &u32| {
                let path = &paths[*row as usize];
                let below = dataset.home.as_ref().and_then(|home| path.strip_prefix(home).ok());
                below.unwrap_or(path).display().to_string()
            };
            split.rows.iter().map(name).collect()
        }
        Pixels::Memory(_) => split.rows.iter().map(|row| format!("{}/{row}", part.name())).collect(),
    }
}
