//! Drawn images: a class is a shape filled with a texture. Colours, place, size, tilt, phase and background are by chance, and the
//! colours of shape, texture and background are drawn alike, so that the mean image of every class is the same: a linear model on
//! pixels has next to nothing to go by, while shape and texture are what convolutions are good at.

use std::f32::consts::PI;
use std::sync::Arc;

use rand::Rng as _;
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;
use serde::Deserialize;

use super::{Dataset, DatasetSpec, OwnOptions, Pixels, Raw, Request, Split, Task};
use crate::error::{Error, Result};
use crate::limits::{self, Need};
use crate::rng::{self, Rng};

pub const SPEC: DatasetSpec = DatasetSpec {
    options: OwnOptions::of::<Own>(),
    ..DatasetSpec::new("synthetic", "drawn images, nothing to download: a source task (32 classes) and a transfer task (16 others)", open)
};

#[derive(Debug, Clone, Copy, PartialEq)]
enum Shape {
    Disc,
    Square,
    Triangle,
    Ring,
    Cross,
    Chevron,
    Half,
    Tee,
    Star,
    Crescent,
    Frame,
    Angle,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Texture {
    Plain,
    Stripes,
    Checks,
    Dots,
    Rings,
    Grid,
    Waves,
    Bricks,
}

/// (shapes, textures) of a task: every pair is a class.
fn families(task: Task) -> (&'static [Shape], &'static [Texture]) {
    match task {
        Task::Source => (
            &[Shape::Disc, Shape::Square, Shape::Triangle, Shape::Ring, Shape::Cross, Shape::Chevron, Shape::Half, Shape::Tee],
            &[Texture::Plain, Texture::Stripes, Texture::Checks, Texture::Dots],
        ),
        Task::Transfer => {
            (&[Shape::Star, Shape::Crescent, Shape::Frame, Shape::Angle], &[Texture::Rings, Texture::Grid, Texture::Waves, Texture::Bricks])
        }
    }
}

/// Its own keys in `[data]`.
#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Own {
    /// Images a class for training; a third as many are drawn for testing.
    per_class: usize,
    /// Draws them.
    seed: u64,
}

impl Default for Own {
    fn default() -> Own {
        Own { per_class: 120, seed: 0 }
    }
}

const SIDE: usize = 32;
const SMALLEST: usize = 8;

fn open(request: &Request) -> Result<Dataset> {
    let (options, Own { per_class, seed }) = (request.options, request.own()?);
    let side = options.size.unwrap_or(SIDE);
    if side < SMALLEST || per_class == 0 {
        return Err(Error::input(format!("synthetic: size {side} and {per_class} images a class; at least {SMALLEST} and 1 are needed")));
    }
    limits::side("synthetic: size", side as i64)?;
    let (shapes, textures) = families(options.task);
    let drawn = shapes.len() * textures.len();
    limits::count("synthetic: per_class", per_class, 1, limits::MOST_ROUNDS)?;
    Need::new()
        .and(format!("{drawn} classes"), limits::stored_images(drawn * (per_class + (per_class / 3).max(1)), side))
        .check(&format!("synthetic: {per_class} images a class of {side} x {side} pixels"))?;
    let pairs: Vec<(Shape, Texture)> = shapes.iter().flat_map(|&shape| textures.iter().map(move |&texture| (shape, texture))).collect();
    let (name, task) = match options.task {
        Task::Source => ("source", 0),
        Task::Transfer => ("transfer", 1),
    };
    let split = |part: u64, per_class: usize| {
        let labels: Vec<i64> = (0..per_class * pairs.len()).map(|i| (i % pairs.len()) as i64).collect();
        let mut data = vec![0; labels.len() * side * side * 3];
        data.par_chunks_exact_mut(side * side * 3).enumerate().for_each(|(i, out)| {
            let (shape, texture) = pairs[labels[i] as usize];
            paint(shape, texture, side, &mut rng::stream(seed, "synthetic", &[task, part, i as u64]), out);
        });
        Split::new(Pixels::Memory(Arc::new(Raw { height: side, width: side, data })), labels)
    };
    Ok(Dataset {
        name: request.spec.name,
        train: split(0, per_class),
        test: split(1, (per_class / 3).max(1)),
        classes: pairs.iter().map(|(shape, texture)| format!("{name} {texture:?} {shape:?}").to_lowercase()).collect(),
        mean: [0.5; 3],
        std: [0.25; 3],
        image_size: side,
        one_size: true,
        home: None,
    })
}

type Colour = [f32; 3];

/// Colours of equal distribution, no two of them too close to tell apart.
fn colours<const N: usize>(rng: &mut Rng) -> [Colour; N] {
    loop {
        let drawn: [Colour; N] = std::array::from_fn(|_| std::array::from_fn(|_| rng.r#gen()));
        let apart = |a: &Colour, b: &Colour| (0..3).map(|c| (a[c] - b[c]).abs()).sum::<f32>() > 1.1;
        if (0..N).all(|i| (0..i).all(|j| apart(&drawn[i], &drawn[j]))) {
            return drawn;
        }
    }
}

fn paint(shape: Shape, texture: Texture, side: usize, rng: &mut Rng, out: &mut [u8]) {
    let [ink, paper, ground, clutter] = colours::<4>(rng);
    let contrast = rng.gen_range(0.9f32..1.0);
    let radius = rng.gen_range(0.38f32..0.46);
    let (cx, cy) = (rng.r#gen::<f32>(), rng.r#gen::<f32>());
    let (tilt_sin, tilt_cos) = rng.gen_range(-0.15f32..0.15).sin_cos();
    let (grain_sin, grain_cos) = rng.gen_range(0.0f32..PI).sin_cos();
    let frequency = rng.gen_range(5.0f32..6.0); // waves over the side: a period of 5 to 6 pixels of 32
    let (phase_u, phase_v): (f32, f32) = (rng.r#gen(), rng.r#gen());
    // The ground is grained like the shapes, so that no class stands out by how rough its image is.
    let (ground_sin, ground_cos) = rng.gen_range(0.0f32..PI).sin_cos();
    let ground_frequency = rng.gen_range(2.0f32..9.0);
    let (ground_phase, depth) = (rng.r#gen::<f32>(), rng.gen_range(0.0f32..0.1));
    let blobs: [[f32; 3]; 1] = std::array::from_fn(|_| [rng.r#gen(), rng.r#gen(), rng.gen_range(0.04f32..0.08)]);
    let noise = rng.gen_range(0.01f32..0.04);

    // Two by two samples a pixel soften the edges.
    const SAMPLES: [f32; 2] = [0.25, 0.75];
    for (i, pixel) in out.chunks_exact_mut(3).enumerate() {
        let mut sum = [0f32; 3];
        for (dy, dx) in SAMPLES.iter().flat_map(|&dy| SAMPLES.map(|dx| (dy, dx))) {
            let (x, y) = (((i % side) as f32 + dx) / side as f32, ((i / side) as f32 + dy) / side as f32);
            // Around the edges: a shape is as likely here as there, so pixels at fixed places tell nothing.
            let (px, py) = (around(x - cx), around(y - cy));
            let colour = if shape.covers((px * tilt_cos + py * tilt_sin) / radius, (py * tilt_cos - px * tilt_sin) / radius) {
                let u = frequency * (px * grain_cos + py * grain_sin) + phase_u;
                let v = frequency * (py * grain_cos - px * grain_sin) + phase_v;
                if texture.inked(u, v, frequency * radius_of(px, py) + phase_u) { ink } else { paper }
            } else if blobs.iter().any(|[bx, by, r]| radius_of(x - bx, y - by) < *r) {
                clutter
            } else {
                let wave = wave(ground_frequency * (x * ground_cos + y * ground_sin) + ground_phase);
                ground.map(|c| c + depth * wave * (0.5 - (c - 0.5).abs()))
            };
            (0..3).for_each(|c| sum[c] += colour[c] / 4.0);
        }
        for (byte, sum) in pixel.iter_mut().zip(sum) {
            let grain: f32 = StandardNormal.sample(rng);
            *byte = ((0.5 + contrast * (sum - 0.5) + noise * grain) * 255.0).round().clamp(0.0, 255.0) as u8;
        }
    }
}

impl Shape {
    /// Whether the point is inside; the shape fills about the unit disc.
    fn covers(self, x: f32, y: f32) -> bool {
        let r = radius_of(x, y);
        let (ax, ay) = (x.abs(), y.abs());
        match self {
            Shape::Disc => r < 0.85,
            Shape::Square => ax.max(ay) < 0.78,
            Shape::Triangle => y < 0.65 && y > -0.95 + 1.75 * ax,
            Shape::Ring => (0.5..0.98).contains(&r),
            Shape::Cross => ax.max(ay) < 0.95 && ax.min(ay) < 0.32,
            Shape::Chevron => ax < 0.95 && (y + 0.35 - 0.9 * ax).abs() < 0.38,
            Shape::Half => r < 0.95 && y > -0.1,
            Shape::Tee => ax < 0.9 && y.abs() < 0.9 && (y < -0.35 || ax < 0.28),
            Shape::Star => r < 0.62 + 0.36 * (5.0 * y.atan2(x)).cos(),
            Shape::Crescent => r < 0.95 && radius_of(x - 0.45, y) > 0.72,
            Shape::Frame => (0.45..0.88).contains(&ax.max(ay)),
            Shape::Angle => ax.max(ay) < 0.88 && (x < -0.3 || y > 0.3),
        }
    }
}

impl Texture {
    /// Which of the two colours, from phases in turns: u and v along two axes, w along the radius.
    fn inked(self, u: f32, v: f32, w: f32) -> bool {
        match self {
            Texture::Plain => true,
            Texture::Stripes => wave(u) > 0.0,
            Texture::Checks => (wave(u) > 0.0) != (wave(v) > 0.0),
            Texture::Dots => wave(u) + wave(v) > 0.6,
            Texture::Rings => wave(w) > 0.0,
            Texture::Grid => wave(u).max(wave(v)) > 0.5,
            Texture::Waves => wave(u + 0.25 * wave(0.5 * v)) > 0.0,
            Texture::Bricks => wave(v) > 0.5 || wave(0.5 * u + 0.5 * (v + 0.5).floor()) > 0.6,
        }
    }
}

/// A triangle wave of period 1 between -1 and 1.
fn wave(turns: f32) -> f32 {
    1.0 - 4.0 * (turns - turns.floor() - 0.5).abs()
}

/// A distance on a circle of length 1, between -0.5 and 0.5.
fn around(distance: f32) -> f32 {
    distance - distance.round()
}

fn radius_of(x: f32, y: f32) -> f32 {
    (x * x + y * y).sqrt()
}
