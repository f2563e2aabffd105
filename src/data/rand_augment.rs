//! RandAugment, Cubuk et al., CVPR-W 2020, with torchvision's operations, magnitudes and 31 bins, each to the last bit as Pillow does it.

use rand::Rng as _;
use serde::{Deserialize, Serialize};

use super::picture::Picture;
use crate::rng::Rng;

/// `ops` operations drawn by chance, one after another; `magnitude` is a bin from 0 to 30.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RandAugment {
    /// How many operations an image gets.
    pub ops: usize,
    /// How strong they are, one of 31 steps.
    pub magnitude: usize,
}

impl Default for RandAugment {
    fn default() -> RandAugment {
        RandAugment { ops: 2, magnitude: 9 }
    }
}

/// The largest bin.
pub const BINS: usize = 30;

/// An operation, by torchvision's name for it.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(missing_docs)] // the names say it, and torchvision's documentation the rest
pub enum Op {
    Identity,
    ShearX,
    ShearY,
    TranslateX,
    TranslateY,
    Rotate,
    Brightness,
    Color,
    Contrast,
    Sharpness,
    Posterize,
    Solarize,
    AutoContrast,
    Equalize,
}

/// In torchvision's order.
pub const OPS: [Op; 14] = [
    Op::Identity,
    Op::ShearX,
    Op::ShearY,
    Op::TranslateX,
    Op::TranslateY,
    Op::Rotate,
    Op::Brightness,
    Op::Color,
    Op::Contrast,
    Op::Sharpness,
    Op::Posterize,
    Op::Solarize,
    Op::AutoContrast,
    Op::Equalize,
];

impl RandAugment {
    /// The image after the operations drawn for it.
    pub fn apply(&self, image: Picture<'static>, rng: &mut Rng) -> Picture<'static> {
        (0..self.ops).fold(image, |image, _| {
            let op = OPS[rng.gen_range(0..OPS.len())];
            let negative = op.signed() && rng.r#gen::<bool>();
            op.apply(image, self.magnitude, negative)
        })
    }
}

impl Op {
    /// Whether the operation has two directions.
    fn signed(self) -> bool {
        use Op::*;
        matches!(self, ShearX | ShearY | TranslateX | TranslateY | Rotate | Brightness | Color | Contrast | Sharpness)
    }

    /// The operation at a bin from 0 to 30.
    pub fn apply(self, mut image: Picture<'static>, bin: usize, negative: bool) -> Picture<'static> {
        let share = bin as f64 / BINS as f64;
        let sign = if negative { -1.0 } else { 1.0 };
        let (height, width) = (image.height as f64, image.width as f64);
        let shift = |side: f64| -(sign * share * 150.0 / 331.0 * side).trunc();
        let factor = (1.0 + sign * share * 0.9) as f32;
        match self {
            Op::Identity => image,
            Op::ShearX => affine(&image, [1.0, sign * share * 0.3, 0.0, 0.0, 1.0, 0.0]),
            Op::ShearY => affine(&image, [1.0, 0.0, 0.0, sign * share * 0.3, 1.0, 0.0]),
            Op::TranslateX => affine(&image, [1.0, 0.0, shift(width), 0.0, 1.0, 0.0]),
            Op::TranslateY => affine(&image, [1.0, 0.0, 0.0, 0.0, 1.0, shift(height)]),
            Op::Rotate => {
                let (sin, cos) = (-sign * share * 30.0).to_radians().sin_cos();
                let (cx, cy) = (width / 2.0, height / 2.0);
                affine(&image, [cos, sin, cx - cos * cx - sin * cy, -sin, cos, cy + sin * cx - cos * cy])
            }
            Op::Brightness => blend(image, factor, |_| [0; 3]),
            Op::Color => blend(image, factor, |pixel| [grey(pixel); 3]),
            Op::Contrast => {
                let sum: u64 = image.data.chunks_exact(3).map(|pixel| u64::from(grey(pixel))).sum();
                let mean = (sum as f64 / (height * width) + 0.5) as u8;
                blend(image, factor, |_| [mean; 3])
            }
            Op::Sharpness => {
                let smooth = smooth(&image);
                let mut next = smooth.chunks_exact(3);
                blend(image, factor, |_| next.next().and_then(|pixel| pixel.try_into().ok()).expect("as many pixels"))
            }
            Op::Posterize => {
                let bits = 8 - (share * 4.0).round_ties_even() as u32;
                let mask = !((1u32 << (8 - bits)) - 1) as u8;
                image.data.to_mut().iter_mut().for_each(|v| *v &= mask);
                image
            }
            Op::Solarize => {
                let threshold = 255.0 * (1.0 - share);
                image.data.to_mut().iter_mut().filter(|v| f64::from(**v) >= threshold).for_each(|v| *v = 255 - *v);
                image
            }
            Op::AutoContrast => by_channel(image, stretched),
            Op::Equalize => by_channel(image, equalized),
        }
    }
}

/// The pixel nearest to (a x + b y + c, d x + e y + f) for each output pixel, black outside; Pillow's 16.16 fixed point.
fn affine(image: &Picture, [a, b, c, d, e, f]: [f64; 6]) -> Picture<'static> {
    let fix = |v: f64| (v * 65536.0 + 0.5).floor() as i64;
    let (height, width) = (image.height, image.width);
    let mut out = vec![0; image.data.len()];
    let (across_x, across_y, down_x, down_y) = (fix(a), fix(d), fix(b), fix(e));
    let (mut row_x, mut row_y) = (fix(c + a * 0.5 + b * 0.5), fix(f + d * 0.5 + e * 0.5));
    for row in out.chunks_exact_mut(width * 3) {
        let (mut x, mut y) = (row_x, row_y);
        for pixel in row.chunks_exact_mut(3) {
            let (sx, sy) = (x >> 16, y >> 16);
            if (0..width as i64).contains(&sx) && (0..height as i64).contains(&sy) {
                let from = (sy as usize * width + sx as usize) * 3;
                pixel.copy_from_slice(&image.data[from..from + 3]);
            }
            x += across_x;
            y += across_y;
        }
        row_x += down_x;
        row_y += down_y;
    }
    Picture { height, width, data: out.into() }
}

/// From what `plain` makes of each pixel (factor 0) over the image (1) to beyond it.
fn blend(mut image: Picture<'static>, factor: f32, mut plain: impl FnMut(&[u8]) -> [u8; 3]) -> Picture<'static> {
    for pixel in image.data.to_mut().chunks_exact_mut(3) {
        let plain = plain(pixel);
        for (value, from) in pixel.iter_mut().zip(plain) {
            let from = f32::from(from);
            *value = (from + factor * (f32::from(*value) - from)).clamp(0.0, 255.0) as u8;
        }
    }
    image
}

fn grey(pixel: &[u8]) -> u8 {
    let [r, g, b] = [pixel[0], pixel[1], pixel[2]].map(u32::from);
    ((19595 * r + 38470 * g + 7471 * b + 0x8000) >> 16) as u8
}

/// The mean of each pixel and its neighbours, itself counted five times; the border stays.
fn smooth(image: &Picture) -> Vec<u8> {
    let (height, width) = (image.height, image.width);
    let mut out = image.data.to_vec();
    let line = width * 3;
    for y in 1..height.saturating_sub(1) {
        for i in y * line + 3..(y + 1) * line - 3 {
            let row = |at: usize| [at - 3, at, at + 3].iter().map(|&at| u32::from(image.data[at])).sum::<u32>();
            let sum = row(i - line) + row(i) + row(i + line) + 4 * u32::from(image.data[i]);
            out[i] = (sum as f32 / 13.0 + 0.5) as u8;
        }
    }
    out
}

/// Each channel through the table made of its histogram.
fn by_channel(mut image: Picture<'static>, table: fn(&[usize; 256]) -> Option<[u8; 256]>) -> Picture<'static> {
    for c in 0..3 {
        let mut histogram = [0; 256];
        image.data.iter().skip(c).step_by(3).for_each(|&v| histogram[v as usize] += 1);
        if let Some(table) = table(&histogram) {
            image.data.to_mut().iter_mut().skip(c).step_by(3).for_each(|v| *v = table[*v as usize]);
        }
    }
    image
}

/// The darkest value to 0, the brightest to 255; none where all are alike.
fn stretched(histogram: &[usize; 256]) -> Option<[u8; 256]> {
    let (low, high) = (histogram.iter().position(|&n| n > 0)?, histogram.iter().rposition(|&n| n > 0)?);
    if low == high {
        return None;
    }
    let scale = 255.0 / (high - low) as f64;
    let offset = -(low as f64) * scale;
    Some(std::array::from_fn(|v| (v as f64 * scale + offset).clamp(0.0, 255.0) as u8))
}

/// Every value as often as any other, as far as whole steps go; none where there are too few.
fn equalized(histogram: &[usize; 256]) -> Option<[u8; 256]> {
    let last = histogram.iter().rposition(|&n| n > 0)?;
    let step = (histogram.iter().sum::<usize>() - histogram[last]) / 255;
    if step == 0 {
        return None;
    }
    let mut sum = step / 2;
    Some(std::array::from_fn(|v| {
        let value = (sum / step).min(255) as u8;
        sum += histogram[v];
        value
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng;
    use sha2::{Digest, Sha256};

    /// img[y, x, c] = 37 y + 91 x + 53 c + 11 y x mod 256 where x + y is no multiple of 3, 5 x + 3 y + 20 c + 40 mod 200 where it is.
    fn picture() -> Picture<'static> {
        let value = |y: usize, x: usize, c: usize| {
            if !(x + y).is_multiple_of(3) { (37 * y + 91 * x + 53 * c + 11 * y * x) % 256 } else { (5 * x + 3 * y + 20 * c + 40) % 200 }
        };
        let data: Vec<u8> = (0..24).flat_map(|y| (0..20).flat_map(move |x| (0..3).map(move |c| value(y, x, c) as u8))).collect();
        Picture { height: 24, width: 20, data: data.into() }
    }

    #[test]
    fn every_operation_is_torchvisions_on_pil_images() {
        // sha256 of torchvision 0.28's _apply_op(picture, op, magnitude of the bin), Pillow 13
        let golden = [
            (Op::Identity, 9, false, "5fcc49eaf402001b"),
            (Op::ShearX, 9, false, "52b53c4c8c206faf"),
            (Op::ShearX, 9, true, "17f70001b47fff7f"),
            (Op::ShearY, 9, false, "682f05593032040e"),
            (Op::ShearY, 9, true, "047a9aee40306835"),
            (Op::TranslateX, 9, false, "48ae787ab9886049"),
            (Op::TranslateX, 9, true, "dbf9cc1e35a4be5f"),
            (Op::TranslateY, 9, false, "324ba3f07a10c1b6"),
            (Op::TranslateY, 9, true, "6006d4814ce464dd"),
            (Op::Rotate, 9, false, "5769aa7e7eed1d56"),
            (Op::Rotate, 9, true, "2f4123fc9f5e0c53"),
            (Op::Brightness, 9, false, "5184b256f6d355f6"),
            (Op::Brightness, 9, true, "c415162a35705f31"),
            (Op::Color, 9, false, "5bb1946586aea60d"),
            (Op::Color, 9, true, "23436535fc2d7583"),
            (Op::Contrast, 9, false, "c0fe6160bfe696b5"),
            (Op::Contrast, 9, true, "e774ab489330da58"),
            (Op::Sharpness, 9, false, "d87de4768b660c33"),
            (Op::Sharpness, 9, true, "5b9c1106b8de629b"),
            (Op::Posterize, 9, false, "33f1b0c5c221c544"),
            (Op::Solarize, 9, false, "a773b000883a24b2"),
            (Op::AutoContrast, 9, false, "02b7270344a75bfa"),
            (Op::Equalize, 9, false, "ee56110fea401e0e"),
            (Op::Identity, 23, false, "5fcc49eaf402001b"),
            (Op::ShearX, 23, false, "a8733add1d588e3e"),
            (Op::ShearX, 23, true, "4aa962a379b10014"),
            (Op::ShearY, 23, false, "359d92031e4c62c6"),
            (Op::ShearY, 23, true, "8acdff97884fcf14"),
            (Op::TranslateX, 23, false, "f0441c270efe84a0"),
            (Op::TranslateX, 23, true, "3de38ca1f296c4ab"),
            (Op::TranslateY, 23, false, "7f12c59c63339fb9"),
            (Op::TranslateY, 23, true, "c073a93c8f95eb38"),
            (Op::Rotate, 23, false, "85c860c26244aeff"),
            (Op::Rotate, 23, true, "eb4c00e155269ddb"),
            (Op::Brightness, 23, false, "5b4456f945a4f49b"),
            (Op::Brightness, 23, true, "ef9166c2a1ecf8f3"),
            (Op::Color, 23, false, "243af8a8dfb26c29"),
            (Op::Color, 23, true, "365e7944b3e24ba0"),
            (Op::Contrast, 23, false, "be2ec09319ff0612"),
            (Op::Contrast, 23, true, "b190a73e45f2586c"),
            (Op::Sharpness, 23, false, "5d5e4955d6158997"),
            (Op::Sharpness, 23, true, "d421f19f745a901b"),
            (Op::Posterize, 23, false, "35222ef276835da1"),
            (Op::Solarize, 23, false, "172e74874e1802fe"),
            (Op::AutoContrast, 23, false, "02b7270344a75bfa"),
            (Op::Equalize, 23, false, "ee56110fea401e0e"),
        ];
        assert_eq!(golden.iter().map(|g| g.0 as usize).collect::<std::collections::BTreeSet<_>>().len(), OPS.len());
        for (op, bin, negative, want) in golden {
            let out = op.apply(picture(), bin, negative);
            let found: String = Sha256::digest(&out.data).iter().take(8).map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(found, want, "{op:?} bin {bin} negative {negative}");
        }
    }

    #[test]
    fn operations_are_drawn_evenly_and_by_the_stream() {
        let augment = RandAugment { ops: 1, magnitude: 20 };
        let draw = |seed| augment.apply(picture(), &mut rng::stream(seed, "test", &[]));
        assert_eq!(draw(1), draw(1));
        let same = (0..2000).filter(|&seed| draw(seed) == picture()).count() as f64;
        // Identity alone leaves this picture as it is: one in fourteen, 142.9 +- 11.5.
        assert!((100.0..186.0).contains(&same), "{same}");
    }
}
