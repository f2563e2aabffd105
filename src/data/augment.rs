//! What happens to an image between the dataset and the network: crop, flip, normalise, and what transformers want beyond. All randomness comes from the generator passed in.

use rand::Rng as _;
use rand_distr::{Beta, Distribution, StandardNormal};
use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::picture::{Picture, Rect};
use super::rand_augment::RandAugment;
use crate::error::{Error, Result};
use crate::limits;
use crate::rng::Rng;

/// The way from a stored image to `size` x `size` normalised floats.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Transform {
    /// Side of the images it makes.
    pub size: usize,
    /// Which part of an image is taken, and how it is brought to that side.
    pub crop: Crop,
    /// Mirror every second image, by chance.
    pub flip: bool,
    /// What channels are normalised with.
    pub mean: [f64; 3],
    /// Likewise.
    pub std: [f64; 3],
    /// RandAugment after the crop.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rand_augment: Option<RandAugment>,
    /// Random erasing (Zhong et al., AAAI 2020) of the finished image with this probability.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub erase: f64,
}

fn is_zero(probability: &f64) -> bool {
    *probability == 0.0
}

/// How a batch is mixed with itself: the alpha of mixup's (Zhang et al., ICLR 2018) and of CutMix's (Yun et al., ICCV 2019) Beta
/// distribution; 0 leaves one out, with both a batch gets either by chance.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Mix {
    /// Parameter of the Beta distribution that images are mixed with; 0 is off.
    pub mixup: f64,
    /// Likewise for pasted rectangles; 0 is off.
    pub cutmix: f64,
}

/// The numbers Swin transformers are trained with.
impl Default for Mix {
    fn default() -> Mix {
        Mix { mixup: 0.8, cutmix: 1.0 }
    }
}

/// Which part of an image is taken.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Crop {
    /// The image as it is, which must have the size.
    None,
    /// Zeros around it, then any of the (2 pad + 1)^2 crops: torchvision's RandomCrop(size, padding).
    Pad {
        /// Zeros around every side.
        pad: usize,
    },
    /// torchvision's RandomResizedCrop(size, scale, ratio).
    RandomResized {
        /// Share of the area that is taken, smallest and largest.
        scale: [f64; 2],
        /// Width divided by height, smallest and largest.
        ratio: [f64; 2],
    },
    /// The shorter side resized to `resize`, then the middle: torchvision's Resize and CenterCrop.
    Centre {
        /// What the shorter side is brought to before the middle is cut out.
        resize: usize,
    },
    /// The whole image stretched to the size.
    Stretch,
}

impl Transform {
    /// Training on small images, as the paper does on CIFAR-100: zero-pad 4, crop, flip.
    pub fn pad_crop(size: usize, mean: [f64; 3], std: [f64; 3]) -> Transform {
        Transform { crop: Crop::Pad { pad: 4 }, flip: true, ..Transform::plain(size, mean, std) }
    }

    /// Training on ImageNet: RandomResizedCrop of 8 to 100 % of the area, flip.
    pub fn random_resized(size: usize, mean: [f64; 3], std: [f64; 3]) -> Transform {
        Transform {
            crop: Crop::RandomResized { scale: [0.08, 1.0], ratio: [3.0 / 4.0, 4.0 / 3.0] },
            flip: true,
            ..Transform::plain(size, mean, std)
        }
    }

    /// Testing on small images: normalise only.
    pub fn plain(size: usize, mean: [f64; 3], std: [f64; 3]) -> Transform {
        Transform { size, crop: Crop::None, flip: false, mean, std, rand_augment: None, erase: 0.0 }
    }

    /// Testing on ImageNet: the shorter side to 8/7 of the size (256 for 224), centre crop.
    pub fn centre(size: usize, mean: [f64; 3], std: [f64; 3]) -> Transform {
        Transform { crop: Crop::Centre { resize: size * 8 / 7 }, ..Transform::plain(size, mean, std) }
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
                limits::resize((part.height, part.width), (size, size)).map_err(Error::input)?;
                (Some(image.resize_part(part, size, size)), Window::default())
            }
            Crop::Centre { resize } => {
                let (height, width) = shorter_to(image.height, image.width, resize);
                limits::resize((image.height, image.width), (height, width)).map_err(Error::input)?;
                let middle = |long: usize| ((long as f64 - size as f64) / 2.0).round_ties_even() as isize;
                (Some(image.resize(height, width)), Window { top: middle(height), left: middle(width) })
            }
            Crop::Stretch => {
                limits::resize((image.height, image.width), (size, size)).map_err(Error::input)?;
                (Some(image.resize(size, size)), Window::default())
            }
        };
        let mirrored = self.flip && rng.r#gen::<bool>();
        let image = resized.as_ref().unwrap_or(image);
        match self.rand_augment {
            None => write(image, window, mirrored, table, size, out),
            Some(augment) => {
                let cropped = cut(image, window, mirrored, size);
                write(&augment.apply(cropped, rng), Window::default(), false, table, size, out);
            }
        }
        if let Some(part) = self.erased(rng) {
            part.write(size, out);
        }
        Ok(())
    }

    fn erased(&self, rng: &mut Rng) -> Option<Erased> {
        if self.erase > 0.0 && rng.gen_bool(self.erase) { erase(self.size, rng) } else { None }
    }

    /// What `apply` draws for an image that is cropped but not resized, in its order.
    pub(super) fn draw(&self, rng: &mut Rng) -> Drawn {
        let mut offset = |pad: usize| rng.gen_range(0..=2 * pad) as isize - pad as isize;
        let (top, left) = if let Crop::Pad { pad } = self.crop { (offset(pad), offset(pad)) } else { (0, 0) };
        let mirrored = self.flip && rng.r#gen::<bool>();
        Drawn { top, left, mirrored, erased: self.erased(rng) }
    }
}

/// What was drawn for one view of an image.
pub(super) struct Drawn {
    /// Where the crop begins in the image.
    pub top: isize,
    /// Likewise.
    pub left: isize,
    /// Mirrored after the crop?
    pub mirrored: bool,
    /// What is erased last.
    pub erased: Option<Erased>,
}

/// A rectangle and the noise in it, row by row.
pub(super) struct Erased {
    part: Rect,
    /// Three numbers a pixel.
    pub noise: Vec<f32>,
}

impl Erased {
    /// Where the noise goes in an image of `size` x `size` x 3.
    pub fn places(&self, size: usize) -> impl Iterator<Item = usize> {
        let Rect { top, left, height, width } = self.part;
        (top..top + height).flat_map(move |row| (row * size + left) * 3..(row * size + left + width) * 3)
    }

    fn write(&self, size: usize, out: &mut [f32]) {
        self.places(size).zip(&self.noise).for_each(|(place, noise)| out[place] = *noise);
    }
}

/// See `Transform::table`: by byte, then channel, so that the three lookups of a grey pixel share a cache line.
pub struct Table(Box<[[f32; 3]; 256]>);

impl Table {
    /// All of it, three numbers a byte.
    pub(super) fn values(&self) -> &[f32] {
        self.0.as_flattened()
    }
}

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

/// The crop as bytes, for what works on bytes.
fn cut(image: &Picture, window: Window, mirrored: bool, size: usize) -> Picture<'static> {
    let mut data = vec![0; size * size * 3];
    for (i, pixel) in data.chunks_exact_mut(3).enumerate() {
        let column = if mirrored { size - 1 - i % size } else { i % size };
        let (y, x) = ((i / size) as isize + window.top, column as isize + window.left);
        if (0..image.height as isize).contains(&y) && (0..image.width as isize).contains(&x) {
            let from = (y as usize * image.width + x as usize) * 3;
            pixel.copy_from_slice(&image.data[from..from + 3]);
        }
    }
    Picture { height: size, width: size, data: data.into() }
}

/// torchvision's RandomErasing with value "random": a rectangle of 2 to 33 % of the area becomes normal noise; ten tries to fit one.
fn erase(size: usize, rng: &mut Rng) -> Option<Erased> {
    for _ in 0..10 {
        let area = (size * size) as f64 * rng.gen_range(0.02..=0.33);
        let aspect = rng.gen_range(0.3f64.ln()..=3.3f64.ln()).exp();
        let (h, w) = ((area * aspect).sqrt().round_ties_even() as usize, (area / aspect).sqrt().round_ties_even() as usize);
        if h < size && w < size {
            let (top, left) = (rng.gen_range(0..=size - h), rng.gen_range(0..=size - w));
            let noise = (0..3 * h * w).map(|_| StandardNormal.sample(rng)).collect();
            return Some(Erased { part: Rect { top, left, height: h, width: w }, noise });
        }
    }
    None
}

/// Views with another order of the batch mixed in: `weight` of an image's own label, the rest of the one in `labels`.
#[derive(Debug)]
pub struct Mixed {
    /// The images of each view, mixed.
    pub views: Vec<Tensor>,
    /// The classes of the images that were mixed in.
    pub labels: Tensor,
    /// The share of the image's own class; the rest is the other's.
    pub weight: f64,
}

impl Mixed {
    /// The labels of both as probabilities, [B, classes]. `own`: the labels of the images before mixing.
    pub fn targets(&self, own: &Tensor, classes: i64) -> Tensor {
        let hot = |labels: &Tensor| labels.one_hot(classes).to_kind(self.views[0].kind());
        hot(own) * self.weight + hot(&self.labels) * (1.0 - self.weight)
    }
}

impl Mix {
    /// Every view mixed with its own reverse: image i with image B - 1 - i.
    pub fn apply(&self, views: &[Tensor], labels: &Tensor, rng: &mut Rng) -> Result<Mixed> {
        let cut = if self.mixup > 0.0 && self.cutmix > 0.0 { rng.r#gen() } else { self.cutmix > 0.0 };
        let alpha = if cut { self.cutmix } else { self.mixup };
        let beta = Beta::new(alpha, alpha).map_err(|_| {
            Error::input(format!("mixup {} and cutmix {}: at least one must be above 0, none below", self.mixup, self.cutmix))
        })?;
        let lambda: f64 = beta.sample(rng);
        let labels = labels.flip([0]);
        if !cut {
            let views = views.iter().map(|view| view * lambda + view.flip([0]) * (1.0 - lambda)).collect();
            return Ok(Mixed { views, labels, weight: lambda });
        }
        let (height, width) = (views[0].size()[2], views[0].size()[3]);
        // Half the sides of a box of area 1 - lambda around any pixel; what sticks out is cut off and not counted.
        let half = |side: i64| (0.5 * (1.0 - lambda).sqrt() * side as f64) as i64;
        let (y, x) = (rng.gen_range(0..height), rng.gen_range(0..width));
        let (top, bottom) = ((y - half(height)).max(0), (y + half(height)).min(height));
        let (left, right) = ((x - half(width)).max(0), (x + half(width)).min(width));
        let paste = |view: &Tensor| {
            let out = view.copy();
            let region = |t: &Tensor| t.narrow(2, top, bottom - top).narrow(3, left, right - left);
            region(&out).copy_(&region(&view.flip([0])));
            out
        };
        let weight = 1.0 - ((bottom - top) * (right - left)) as f64 / (height * width) as f64;
        Ok(Mixed { views: views.iter().map(paste).collect(), labels, weight })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng;

    const SCALE: [f64; 2] = [0.08, 1.0];
    const RATIO: [f64; 2] = [3.0 / 4.0, 4.0 / 3.0];

    #[test]
    fn resized_crops_have_torchvisions_distribution() {
        // Of 100,000 x RandomResizedCrop.get_params on 300 x 400, torchvision 0.28: areas in ten equal bins of 0.08 to 1, logarithms of
        // the aspect ratio in six of ln 3/4 to ln 4/3
        let areas = [13534, 13376, 13325, 13517, 13409, 12522, 9152, 6239, 3720, 1206];
        let aspects = [12436, 13969, 14871, 17888, 19632, 21204];
        let mut rng = rng::stream(1, "test", &[]);
        let (height, width, draws) = (300, 400, 100_000);
        let (mut by_area, mut by_aspect) = ([0; 10], [0; 6]);
        let mut places = [[0; 4]; 2];
        for _ in 0..draws {
            let part = resized_crop(height, width, SCALE, RATIO, &mut rng);
            assert!(part.top + part.height <= height && part.left + part.width <= width, "{part:?}");
            let area = (part.height * part.width) as f64 / (height * width) as f64;
            let aspect = (part.width as f64 / part.height as f64).ln() / RATIO[1].ln();
            by_area[((area - 0.08) / 0.92 * 10.0).clamp(0.0, 9.0) as usize] += 1;
            by_aspect[((aspect + 1.0) / 2.0 * 6.0).clamp(0.0, 5.0) as usize] += 1;
            places[0][part.top * 4 / (height - part.height + 1)] += 1;
            places[1][part.left * 4 / (width - part.width + 1)] += 1;
        }
        // Two samples of one size; p = 0.001 at 27.9 and 20.5 (9 and 5 degrees of freedom).
        let two = |a: &[i32], b: &[i32]| a.iter().zip(b).map(|(a, b)| f64::from((a - b).pow(2)) / f64::from(a + b)).sum::<f64>();
        assert!(two(&by_area, &areas) < 27.9, "{by_area:?}");
        assert!(two(&by_aspect, &aspects) < 20.5, "{by_aspect:?}");
        // Small leftovers cannot be cut in four evenly, so this one is coarse: no quarter is preferred.
        assert!(places.iter().flatten().all(|n| (22_500..29_000).contains(n)), "{places:?}");
    }

    #[test]
    fn an_image_too_long_for_any_ratio_gets_torchvisions_centre_crop() {
        // RandomResizedCrop.get_params on 10 x 100 falls back to w = round(10 * 4 / 3) in the middle; on 100 x 10 to h = round(10 / 0.75)
        let mut rng = rng::stream(1, "test", &[]);
        let never = [2.0, 3.0]; // no such area fits
        assert_eq!(resized_crop(10, 100, never, RATIO, &mut rng), Rect { top: 0, left: 43, height: 10, width: 13 });
        assert_eq!(resized_crop(100, 10, never, RATIO, &mut rng), Rect { top: 43, left: 0, height: 13, width: 10 });
        assert_eq!(resized_crop(20, 20, never, RATIO, &mut rng), Rect { top: 0, left: 0, height: 20, width: 20 });
    }

    #[test]
    fn the_shorter_side_is_resized() {
        // torchvision Resize(256): 500 x 375 -> 341 x 256, 333 x 500 -> 256 x 384
        assert_eq!(shorter_to(500, 375, 256), (341, 256));
        assert_eq!(shorter_to(333, 500, 256), (256, 384));
        assert_eq!(shorter_to(10, 10, 256), (256, 256));
    }

    #[test]
    fn erasing_fills_one_rectangle_with_noise() {
        let mut rng = rng::stream(1, "test", &[]);
        let mut shares = vec![];
        for _ in 0..200 {
            let mut out = vec![9f32; 32 * 32 * 3];
            if let Some(part) = erase(32, &mut rng) {
                part.write(32, &mut out);
            }
            let erased: Vec<usize> = (0..1024).filter(|i| out[i * 3] != 9.0).collect();
            let (rows, columns): (Vec<usize>, Vec<usize>) = erased.iter().map(|i| (i / 32, i % 32)).unzip();
            let span = |v: &[usize]| v.iter().max().unwrap() - v.iter().min().unwrap() + 1;
            assert_eq!(span(&rows) * span(&columns), erased.len(), "one rectangle");
            assert!(erased.iter().all(|i| out[i * 3..i * 3 + 3].iter().all(|v| *v != 9.0)));
            shares.push(erased.len() as f64 / 1024.0);
        }
        assert!(shares.iter().all(|s| (0.015..0.36).contains(s)), "{shares:?}");
        assert!(shares.iter().any(|s| *s < 0.06) && shares.iter().any(|s| *s > 0.27));
    }

    #[test]
    fn mixing_weighs_pixels_as_it_weighs_labels() {
        let labels = Tensor::from_slice(&[0i64, 1, 2, 3]);
        // Image i is i everywhere: its partner is 3 - i.
        let view = labels.to_kind(tch::Kind::Float).view([4, 1, 1, 1]).expand([4, 3, 16, 16], false).contiguous();
        let mut rng = rng::stream(1, "test", &[]);
        let mut weights = vec![];
        for mix in [Mix { mixup: 0.8, cutmix: 0.0 }, Mix { mixup: 0.0, cutmix: 1.0 }, Mix::default()].iter().cycle().take(60) {
            let mixed = mix.apply(&[view.shallow_clone()], &labels, &mut rng).unwrap();
            assert_eq!(Vec::<i64>::try_from(&mixed.labels).unwrap(), [3, 2, 1, 0]);
            for i in 0..4 {
                let mean = mixed.views[0].get(i).mean(tch::Kind::Double).double_value(&[]);
                let want = mixed.weight * i as f64 + (1.0 - mixed.weight) * (3 - i) as f64;
                assert!((mean - want).abs() < 1e-5, "image {i}: {mean} instead of {want}");
            }
            if mix.mixup == 0.0 {
                let whole = mixed.views[0].frac().abs().sum(tch::Kind::Float).double_value(&[]);
                assert_eq!(whole, 0.0, "a cut pixel is of one image or of the other");
            }
            weights.push(mixed.weight);
        }
        assert!(weights.iter().any(|w| *w < 0.3) && weights.iter().any(|w| *w > 0.7), "{weights:?}");
        assert!(Mix { mixup: 0.0, cutmix: 0.0 }.apply(&[view], &labels, &mut rng).is_err());
    }
}
