//! One image as bytes: decoding files, cropping and resizing.

use std::borrow::Cow;
use std::path::Path;

use image::ImageReader;

use crate::error::{Error, Result};
use crate::files;
use crate::limits;

/// RGB, [height, width, 3].
#[derive(Debug, Clone, PartialEq)]
pub struct Picture<'a> {
    /// In pixels.
    pub height: usize,
    /// Likewise.
    pub width: usize,
    /// Its pixels, row by row, three channels each.
    pub data: Cow<'a, [u8]>,
}

/// A part of an image, in pixels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rect {
    /// Rows above it.
    pub top: usize,
    /// Columns left of it.
    pub left: usize,
    /// In pixels.
    pub height: usize,
    /// Likewise.
    pub width: usize,
}

impl Picture<'static> {
    /// Decodes a JPEG or PNG file by what it contains, not by its name (ImageNet has a PNG called .JPEG); grey and CMYK become RGB.
    pub fn open(path: &Path) -> Result<Picture<'static>> {
        let bytes = files::read(path)?;
        Picture::decode(&bytes).map_err(|what| Error::file(path, what))
    }

    /// Decodes a JPEG or PNG; the error lacks the file's name.
    pub fn decode(bytes: &[u8]) -> std::result::Result<Picture<'static>, String> {
        let reader = ImageReader::new(std::io::Cursor::new(bytes)).with_guessed_format().expect("reading from memory");
        if reader.format().is_none() {
            return Err("neither a JPEG nor a PNG file".to_string());
        }
        // The decoder fills what is missing with grey; a picture cut short is no picture.
        if reader.format() == Some(image::ImageFormat::Jpeg) && !has_end(bytes) {
            return Err("a JPEG that ends before its picture does".to_string());
        }
        // What the file promises is read before a pixel is made.
        let promised = reader.into_dimensions().map_err(|e| format!("cannot be decoded: {e}"))?;
        limits::picture(promised.0, promised.1)?;
        let reader = ImageReader::new(std::io::Cursor::new(bytes)).with_guessed_format().expect("reading from memory");
        let image = reader.decode().map_err(|e| format!("cannot be decoded: {e}"))?.into_rgb8();
        Ok(Picture { height: image.height() as usize, width: image.width() as usize, data: Cow::Owned(image.into_raw()) })
    }
}

/// Whether the end marker follows the last scan. Inside a scan 0xFF is always followed by 0 or a restart marker, so neither is taken for data.
fn has_end(jpeg: &[u8]) -> bool {
    let last = |marker: u8| jpeg.windows(2).rposition(|pair| pair == [0xff, marker]);
    match (last(0xda), last(0xd9)) {
        (Some(scan), Some(end)) => end > scan,
        _ => false,
    }
}

impl Picture<'_> {
    /// All of it.
    pub fn whole(&self) -> Rect {
        Rect { top: 0, left: 0, height: self.height, width: self.width }
    }

    /// Stretched to height x width.
    pub fn resize(&self, height: usize, width: usize) -> Picture<'static> {
        self.resize_part(self.whole(), height, width)
    }

    /// A part of it stretched to height x width: bilinear with antialiasing, to the last bit what Pillow (and so torchvision on PIL
    /// images) does after cropping: first along rows, then along columns, with 8-bit pixels between.
    pub fn resize_part(&self, part: Rect, height: usize, width: usize) -> Picture<'static> {
        assert!(part.top + part.height <= self.height && part.left + part.width <= self.width, "{part:?} is inside the image");
        let (columns, rows) = (Weights::new(part.width, width), Weights::new(part.height, height));
        let line = |y: usize| {
            let from = ((part.top + y) * self.width + part.left) * 3;
            &self.data[from..from + part.width * 3]
        };
        let across: Vec<u8> = if width == part.width {
            (0..part.height).flat_map(line).copied().collect()
        } else {
            let mut out = Vec::with_capacity(part.height * width * 3);
            for y in 0..part.height {
                let source = line(y);
                for x in 0..width {
                    let (from, weights) = columns.of(x);
                    let mut sum = [HALF; 3];
                    for (pixel, &weight) in source[from * 3..].chunks_exact(3).zip(weights) {
                        for (sum, &value) in sum.iter_mut().zip(pixel) {
                            *sum += weight * i32::from(value);
                        }
                    }
                    out.extend(sum.map(clip));
                }
            }
            out
        };
        if height == part.height {
            return Picture { height, width, data: Cow::Owned(across) };
        }
        let mut out = Vec::with_capacity(height * width * 3);
        let mut sums = vec![0; width * 3];
        for y in 0..height {
            let (from, weights) = rows.of(y);
            sums.fill(HALF);
            for (source, &weight) in across[from * width * 3..].chunks_exact(width * 3).zip(weights) {
                for (sum, &value) in sums.iter_mut().zip(source) {
                    *sum += weight * i32::from(value);
                }
            }
            out.extend(sums.iter().map(|&sum| clip(sum)));
        }
        Picture { height, width, data: Cow::Owned(out) }
    }
}

/// Pillow's fixed point: 22 bits behind the point leave room for 8-bit sums.
const BITS: u32 = 22;
const HALF: i32 = 1 << (BITS - 1);

fn clip(sum: i32) -> u8 {
    (sum >> BITS).clamp(0, 255) as u8
}

/// For each output pixel along one axis: the first input pixel it takes from, and the weights of that one and the next.
struct Weights {
    first: Vec<usize>,
    weights: Vec<i32>,
    /// Start of each pixel's weights, and the end of the last one's.
    at: Vec<usize>,
}

impl Weights {
    /// The triangle filter, as wide as the reduction.
    fn new(input: usize, output: usize) -> Weights {
        let scale = input as f64 / output as f64;
        let reach = scale.max(1.0);
        let mut weights = Weights { first: vec![], weights: vec![], at: vec![0] };
        for i in 0..output {
            let centre = (i as f64 + 0.5) * scale;
            let from = ((centre - reach + 0.5) as i64).max(0) as usize;
            let to = ((centre + reach + 0.5) as i64).min(input as i64) as usize;
            let raw: Vec<f64> = (from..to).map(|x| (1.0 - ((x as f64 - centre + 0.5) * (1.0 / reach)).abs()).max(0.0)).collect();
            let sum: f64 = raw.iter().sum();
            weights.first.push(from);
            weights.weights.extend(raw.iter().map(|w| (0.5 + w / sum * f64::from(1u32 << BITS)) as i32));
            weights.at.push(weights.weights.len());
        }
        weights
    }

    fn of(&self, i: usize) -> (usize, &[i32]) {
        (self.first[i], &self.weights[self.at[i]..self.at[i + 1]])
    }
}
