//! What happens to an image between the dataset and the network: crop, flip, normalise. All randomness comes from the generator passed in.

use rand::Rng as _;
use serde::{Deserialize, Serialize};

use super::picture::{Picture, Rect};
use crate::error::{Error, Result};
use crate::rng::Rng;

/// The way from a stored image to `size` x `size` normalised floats.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Transform {
    pub size: usize,
    pub crop: Crop,
    /// Mirror every second image, by chance.
    pub flip: bool,
    pub mean: [f64; 3],
    pub std: [f64; 3],
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Crop {
    /// The image as it is, which must have the size.
    None,
    /// Zeros around it, then any of the (2 pad + 1)^2 crops: torchvision's RandomCrop(size, padding).
    Pad { pad: usize },
    /// torchvision's RandomResizedCrop(size, scale, ratio).
    RandomResized { scale: [f64; 2], ratio: [f64; 2] },
    /// The shorter side resized to `resize`, then the middle: torchvision's Resize and CenterCrop.
    Centre { resize: usize },
    /// The whole image stretched to the size.
    Stretch,
}

impl Transform {
    /// Training on small images, as the paper does on CIFAR-100: zero-pad 4, crop, flip.
    pub fn pad_crop(size: usize, mean: [f64; 3], std: [f64; 3]) -> Transform {
        Transform { size, crop: Crop::Pad { pad: 4 }, flip: true, mean, std }
    }

    /// Training on ImageNet: RandomResizedCrop of 8 to 100 % of the area, flip.
    pub fn random_resized(size: usize, mean: [f64; 3], std: [f64; 3]) -> Transform {
        Transform { size, crop: Crop::RandomResized { scale: [0.08, 1.0], ratio: [3.0 / 4.0, 4.0 / 3.0] }, flip: true, mean, std }
    }

    /// Testing on small images: normalise only.
    pub fn plain(size: usize, mean: [f64; 3], std: [f64; 3]) -> Transform {
        Transform { size, crop: Crop::None, flip: false, mean, std }
    }

    /// Testing on ImageNet: the shorter side to 8/7 of the size (256 for 224), centre crop.
    pub fn centre(size: usize, mean: [f64; 3], std: [f64; 3]) -> Transform {
        Transform { size, crop: Crop::Centre { resize: size * 8 / 7 }, flip: false, mean, std }
    }

    /// Floats of one image.
    pub fn floats(&self) -> usize {
        self.size * self.size * 3
    }

    /// The normalised value of every byte, by channel.
    pub fn table(&self) -> Table {
        let value = |c: usize, byte: usize| ((byte as f64 / 255.0 - self.mean[c]) / self.std[c]) as f32;
        Table(Box::new(std::array::from_fn(|byte| std::array::from_fn(|c| value(c, byte)))))
    }

    /// Writes one augmented, normalised image to `out`, [size, size, 3].
    pub fn apply(&self, image: &Picture, table: &Table, rng: &mut Rng, out: &mut [f32]) -> Result<()> {
        let size = self.size;
        let fits = image.height == size && image.width == size;
        let (resized, window) = match self.crop {
            Crop::None | Crop::Pad { .. } if !fits => {
                return Err(Error::input(format!(
                    "an image of {} x {} pixels where {size} x {size} are expected",
                    image.width, image.height
                )));
            }
            Crop::None => (None, Window::default()),
            Crop::Pad { pad } => {
                let mut offset = || rng.gen_range(0..=2 * pad) as isize - pad as isize;
                (None, Window { top: offset(), left: offset() })
            }
            Crop::RandomResized { scale, ratio } => {
                let part = resized_crop(image.height, image.width, scale, ratio, rng);
                (Some(image.resize_part(part, size, size)), Window::default())
            }
            Crop::Centre { resize } => {
                let (height, width) = shorter_to(image.height, image.width, resize);
                let middle = |long: usize| ((long as f64 - size as f64) / 2.0).round_ties_even() as isize;
                (Some(image.resize(height, width)), Window { top: middle(height), left: middle(width) })
            }
            Crop::Stretch => (Some(image.resize(size, size)), Window::default()),
        };
        let mirrored = self.flip && rng.r#gen::<bool>();
        write(resized.as_ref().unwrap_or(image), window, mirrored, table, size, out);
        Ok(())
    }
}

/// See `Transform::table`: by byte, then channel, so that the three lookups of a grey pixel share a cache line.
pub struct Table(Box<[[f32; 3]; 256]>);

/// Where the crop begins; what lies outside the image is black.
#[derive(Default, Clone, Copy)]
struct Window {
    top: isize,
    left: isize,
}

fn write(image: &Picture, window: Window, mirrored: bool, table: &Table, size: usize, out: &mut [f32]) {
    let table = &table.0;
    let black = table[0];
    // Columns of the crop that lie inside the image.
    let from = (-window.left).clamp(0, size as isize) as usize;
    let to = (image.width as isize - window.left).clamp(from as isize, size as isize) as usize;
    for (y, row) in out.chunks_exact_mut(size * 3).enumerate() {
        let source_y = y as isize + window.top;
        if source_y < 0 || source_y >= image.height as isize {
            row.chunks_exact_mut(3).for_each(|pixel| pixel.copy_from_slice(&black));
            continue;
        }
        let start = (source_y as usize * image.width + (from as isize + window.left) as usize) * 3;
        let source = image.data[start..start + (to - from) * 3].chunks_exact(3);
        let look = |pixel: &mut [f32], bytes: &[u8]| {
            for c in 0..3 {
                pixel[c] = table[bytes[c] as usize][c];
            }
        };
        // Mirrored, what lies left of the image comes out on the right.
        let ahead = if mirrored { size - to } else { from };
        let (before, rest) = row.split_at_mut(ahead * 3);
        let (inside, after) = rest.split_at_mut((to - from) * 3);
        if mirrored {
            inside.chunks_exact_mut(3).rev().zip(source).for_each(|(pixel, bytes)| look(pixel, bytes));
        } else {
            inside.chunks_exact_mut(3).zip(source).for_each(|(pixel, bytes)| look(pixel, bytes));
        }
        before.chunks_exact_mut(3).chain(after.chunks_exact_mut(3)).for_each(|pixel| pixel.copy_from_slice(&black));
    }
}

/// torchvision's Resize(side): the shorter side gets it, the longer one is cut to a whole number.
fn shorter_to(height: usize, width: usize, side: usize) -> (usize, usize) {
    let long = |long: usize, short: usize| (side as f64 * long as f64 / short as f64) as usize;
    if height <= width { (side, long(width, height)) } else { (long(height, width), side) }
}

/// torchvision's RandomResizedCrop.get_params: ten tries at an area and an aspect ratio, then the largest allowed centre crop.
fn resized_crop(height: usize, width: usize, scale: [f64; 2], ratio: [f64; 2], rng: &mut Rng) -> Rect {
    let area = (height * width) as f64;
    for _ in 0..10 {
        let target = area * rng.gen_range(scale[0]..=scale[1]);
        let aspect = rng.gen_range(ratio[0].ln()..=ratio[1].ln()).exp();
        let w = (target * aspect).sqrt().round_ties_even() as usize;
        let h = (target / aspect).sqrt().round_ties_even() as usize;
        if 0 < w && w <= width && 0 < h && h <= height {
            return Rect { top: rng.gen_range(0..=height - h), left: rng.gen_range(0..=width - w), height: h, width: w };
        }
    }
    let whole = width as f64 / height as f64;
    let (h, w) = if whole < ratio[0] {
        ((width as f64 / ratio[0]).round_ties_even() as usize, width)
    } else if whole > ratio[1] {
        (height, (height as f64 * ratio[1]).round_ties_even() as usize)
    } else {
        (height, width)
    };
    let (h, w) = (h.clamp(1, height), w.clamp(1, width));
    Rect { top: (height - h) / 2, left: (width - w) / 2, height: h, width: w }
}
