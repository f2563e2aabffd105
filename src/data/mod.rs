//! Datasets: where pixels and labels come from, and the batches made of them.

use std::path::PathBuf;
use std::sync::Arc;

use tch::Tensor;

/// A dataset as read from disk (or drawn, for `synthetic`).
pub struct Dataset {
    pub name: &'static str,
    pub train: Split,
    pub test: Split,
    /// The names of the classes, in the order of the labels.
    pub classes: Vec<String>,
    /// Channel statistics its networks are trained with.
    pub mean: [f64; 3],
    pub std: [f64; 3],
    /// Side of its square images, or what ImageNet-like sets are cropped to.
    pub image_size: i64,
}

/// Images and labels; cloning is cheap. `rows[i]` is the place in `pixels` of image i, so a subset shares the pixels.
#[derive(Clone)]
pub struct Split {
    pub pixels: Pixels,
    pub rows: Arc<Vec<u32>>,
    pub labels: Arc<Vec<i64>>,
}

#[derive(Clone)]
pub enum Pixels {
    /// Small sets, whole in memory.
    Memory(Arc<Raw>),
    /// ImageNet-sized sets, decoded batch by batch.
    Files(Arc<Vec<PathBuf>>),
}

/// u8 images of one size, [count, height, width, 3]: channels last, as batches are made.
pub struct Raw {
    pub height: usize,
    pub width: usize,
    pub data: Vec<u8>,
}

/// `views` has one entry shared by all peers, or one per peer (KDCL, PCL); f32 [B, 3, H, W] in channels_last, normalised.
/// `index` is the place in the training split (after `fraction` and `holdout`): memory banks key on it.
pub struct Batch {
    pub views: Vec<Tensor>,
    pub labels: Tensor,
    pub index: Tensor,
    /// Seeds what networks draw in training (drop-path): see `nets::layers::Pass`.
    pub noise: u64,
}

/// How an epoch's batches are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sampling {
    Shuffled,
    /// B/2 classes x 2 images: every anchor has a positive.
    ClassPairs,
}
