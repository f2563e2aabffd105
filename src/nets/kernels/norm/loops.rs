//! The loops of BatchNorm over maps in channels_last, `[rows][c]`, sixteen channels at a time: statistics, the affine map with what follows it,
//! and the sums and mixtures of its two derivatives. Sums are taken in f32 over a few rows and joined in f64, the parts of threads in their
//! order, so that one thread count gives one result.

use super::super::lanes::{HasAvx2, LANES};
use super::super::parallel::{in_parallel, parts_of};

/// One number for each of `LANES` channels.
type Lane = [f32; LANES];
/// Rows whose sums are taken in f32 before they join the sums in f64, and which stay in the first-level cache.
const ROWS: usize = 64;

#[inline(always)]
fn lane(from: &[f32], at: usize) -> Lane {
    from[at..at + LANES].try_into().expect("a slice of that length")
}

#[inline(always)]
fn zip(a: Lane, b: Lane, f: impl Fn(f32, f32) -> f32) -> Lane {
    std::array::from_fn(|i| f(a[i], b[i]))
}

/// Where the ReLU let pass; everywhere without one.
#[inline(always)]
fn masked(g: Lane, y: Option<&[f32]>, at: usize) -> Lane {
    match y {
        Some(y) => zip(g, lane(y, at), |g, y| if y > 0.0 { g } else { 0.0 }),
        None => g,
    }
}

/// Compiles a loop for AVX2. Its first argument is the proof that the machine has it.
macro_rules! with_avx2 {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($here:ident: HasAvx2, $($arg:ident: $type:ty),* $(,)?) $(-> $out:ty)? $body:block) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name($here: HasAvx2, $($arg: $type),*) $(-> $out)? {
            #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma"))]
            unsafe fn inner($($arg: $type),*) $(-> $out)? $body
            let HasAvx2 { .. } = $here;
            // SAFETY: there is a `HasAvx2` only where the machine has the instructions.
            unsafe { inner($($arg),*) }
        }
    };
}

/// Some rows at a time: memory is read in order, whatever the number of channels.
fn blocks(rows: std::ops::Range<usize>) -> impl Iterator<Item = std::ops::Range<usize>> {
    rows.clone().step_by(ROWS).map(move |top| top..(top + ROWS).min(rows.end))
}

/// The rows of a map in as many parts as threads.
pub(in super::super) fn part_of(rows: usize, part: usize, parts: usize) -> std::ops::Range<usize> {
    part * rows / parts..(part + 1) * rows / parts
}

/// Of some rows, by channel: means, sums of squared deviations from them, and how many rows.
pub(in super::super) struct Moments {
    pub means: Vec<f64>,
    pub squares: Vec<f64>,
    pub seen: f64,
}

impl Moments {
    pub fn none(c: usize) -> Moments {
        Moments { means: vec![0.0; c], squares: vec![0.0; c], seen: 0.0 }
    }

    /// Those of both, by Chan's formula.
    pub fn join(mut self, other: &Moments) -> Moments {
        let all = self.seen + other.seen;
        for i in 0..self.means.len() {
            let gap = other.means[i] - self.means[i];
            self.means[i] += gap * other.seen / all;
            self.squares[i] += other.squares[i] + gap * gap * self.seen * other.seen / all;
        }
        Moments { seen: all, ..self }
    }
}

with_avx2! {
/// Over some rows: by ROWS at a time, joined as above.
pub(in super::super) fn moments(here: HasAvx2, x: &[f32], c: usize, rows: std::ops::Range<usize>) -> Moments {
    let (mut means, mut squares) = (vec![0f64; c], vec![0f64; c]);
    let mut seen = 0f64;
    for top in rows.clone().step_by(ROWS) {
        let bottom = (top + ROWS).min(rows.end);
        let count = (bottom - top) as f32;
        for at in (0..c).step_by(LANES) {
            let mut sum = [0f32; LANES];
            for r in top..bottom {
                sum = zip(sum, lane(x, r * c + at), |s, x| s + x);
            }
            let mean = zip(sum, [count; LANES], |s, count| s / count);
            let mut square = [0f32; LANES];
            for r in top..bottom {
                let x = lane(x, r * c + at);
                square = std::array::from_fn(|i| (x[i] - mean[i]).mul_add(x[i] - mean[i], square[i]));
            }
            let (here, all) = (count as f64, seen + count as f64);
            for i in 0..LANES {
                let gap = mean[i] as f64 - means[at + i];
                means[at + i] += gap * here / all;
                squares[at + i] += square[i] as f64 + gap * gap * seen * here / all;
            }
        }
        seen += count as f64;
    }
    Moments { means, squares, seen }
}
}

with_avx2! {
/// y = scale x + shift, plus the residual, then the ReLU, over some rows. `y` is those rows alone.
pub(in super::super) fn affine(here: HasAvx2, x: &[f32], residual: Option<&[f32]>, scale: &[f32], shift: &[f32], relu: bool, rows: std::ops::Range<usize>, y: &mut [f32]) {
    let (c, first) = (scale.len(), rows.start);
    for block in blocks(rows) {
        for at in (0..c).step_by(LANES) {
            let (scale, shift) = (lane(scale, at), lane(shift, at));
            for r in block.clone() {
                // Loops, no closures: one that the compiler does not inline has not the instructions. `map` cost a twentieth of a step.
                let mut v = lane(x, r * c + at);
                for i in 0..LANES {
                    v[i] = v[i].mul_add(scale[i], shift[i]);
                }
                if let Some(residual) = residual {
                    v = zip(v, lane(residual, r * c + at), |v, r| v + r);
                }
                if relu {
                    for v in &mut v {
                        // Not max: a NaN must go on and be seen.
                        *v = if *v < 0.0 { 0.0 } else { *v };
                    }
                }
                let own = (r - first) * c + at;
                y[own..own + LANES].copy_from_slice(&v);
            }
        }
    }
}
}

/// Maps of one call, [rows][c] each.
#[derive(Clone, Copy)]
pub(in super::super) struct Maps<'a> {
    /// What comes back from after the ReLU.
    pub g: &'a [f32],
    pub x: &'a [f32],
    /// The answer after the ReLU, which tells where it let pass; none without one.
    pub y: Option<&'a [f32]>,
    /// The cotangent of dx, in the second derivative.
    pub a: Option<&'a [f32]>,
    pub means: &'a [f32],
}

/// Sums by channel, u = x - mean: of g, g u, a, a u, a g; the last three only with `a`.
pub(in super::super) const SUMS: usize = 5;

with_avx2! {
/// Over some rows: SUMS numbers for every channel, those of one sum together.
fn sums(here: HasAvx2, maps: Maps, rows: std::ops::Range<usize>) -> Vec<f64> {
    let c = maps.means.len();
    let mut all = vec![0f64; SUMS * c];
    for top in rows.clone().step_by(ROWS) {
        let bottom = (top + ROWS).min(rows.end);
        for at in (0..c).step_by(LANES) {
            let mean = lane(maps.means, at);
            let mut here = [[0f32; LANES]; SUMS];
            for r in top..bottom {
                let place = r * c + at;
                let g = masked(lane(maps.g, place), maps.y, place);
                let u = zip(lane(maps.x, place), mean, |x, m| x - m);
                here[0] = zip(here[0], g, |s, g| s + g);
                here[1] = std::array::from_fn(|i| g[i].mul_add(u[i], here[1][i]));
                if let Some(a) = maps.a {
                    let a = lane(a, place);
                    here[2] = zip(here[2], a, |s, a| s + a);
                    here[3] = std::array::from_fn(|i| a[i].mul_add(u[i], here[3][i]));
                    here[4] = std::array::from_fn(|i| a[i].mul_add(g[i], here[4][i]));
                }
            }
            for (k, here) in here.iter().enumerate() {
                for i in 0..LANES {
                    all[k * c + at + i] += here[i] as f64;
                }
            }
        }
    }
    all
}
}

/// `sums` over all rows, the parts added in their order.
pub(in super::super) fn all_sums(here: HasAvx2, maps: Maps, rows: usize) -> Vec<f64> {
    let parts = parts_of(maps.x.len());
    let found = by_part(parts, |part| sums(here, maps, part_of(rows, part, parts)));
    let mut total = vec![0f64; SUMS * maps.means.len()];
    found.iter().flatten().zip((0..parts).flat_map(|_| 0..SUMS * maps.means.len())).for_each(|(v, i)| total[i] += v);
    total
}

/// What every part found, in order.
pub(in super::super) fn by_part<T: Send>(parts: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let found: Vec<std::sync::Mutex<Option<T>>> = (0..parts).map(|_| std::sync::Mutex::new(None)).collect();
    in_parallel(parts, &|part| {
        let value = work(part);
        if let Ok(mut place) = found[part].lock() {
            *place = Some(value);
        }
    });
    found.into_iter().map(|place| place.into_inner().ok().flatten().expect("every part was run")).collect()
}

/// Four numbers for every channel: the factors of g, a and x, and what is added.
pub(in super::super) struct Mix {
    g: Vec<f32>,
    a: Vec<f32>,
    x: Vec<f32>,
    one: Vec<f32>,
}

impl Mix {
    /// From the four of every channel.
    pub fn new(c: usize, of: impl Fn(usize) -> [f64; 4]) -> Mix {
        let rows: Vec<[f64; 4]> = (0..c).map(of).collect();
        let column = |k: usize| rows.iter().map(|row| row[k] as f32).collect();
        Mix { g: column(0), a: column(1), x: column(2), one: column(3) }
    }
}

with_avx2! {
/// dx = mix of g (where the ReLU let pass) and x; `passed` is that g.
pub(in super::super) fn write_gradient(here: HasAvx2, maps: Maps, mix: &Mix, rows: std::ops::Range<usize>, dx: &mut [f32], passed: Option<&mut [f32]>) {
    let c = maps.means.len();
    let (mut passed, first) = (passed, rows.start);
    for block in blocks(rows) {
        for at in (0..c).step_by(LANES) {
            let (kg, kx, one) = (lane(&mix.g, at), lane(&mix.x, at), lane(&mix.one, at));
            for r in block.clone() {
                let (place, own) = (r * c + at, (r - first) * c + at);
                let g = masked(lane(maps.g, place), maps.y, place);
                let x = lane(maps.x, place);
                let d: Lane = std::array::from_fn(|i| g[i].mul_add(kg[i], x[i].mul_add(kx[i], one[i])));
                dx[own..own + LANES].copy_from_slice(&d);
                if let Some(passed) = passed.as_deref_mut() {
                    passed[own..own + LANES].copy_from_slice(&g);
                }
            }
        }
    }
}
}

with_avx2! {
/// The second derivative's dg (where the ReLU let pass) and dx.
pub(in super::super) fn write_second(here: HasAvx2, maps: Maps, for_g: &Mix, for_x: &Mix, more: Option<&[f32]>, rows: std::ops::Range<usize>, dg: &mut [f32], dx: &mut [f32]) {
    let (c, Some(cotangent)) = (maps.means.len(), maps.a) else { unreachable!("the second derivative has a cotangent") };
    let first = rows.start;
    for block in blocks(rows) {
        for at in (0..c).step_by(LANES) {
            let (ga, gx, g1) = (lane(&for_g.a, at), lane(&for_g.x, at), lane(&for_g.one, at));
            let (xg, xa, xx, x1) = (lane(&for_x.g, at), lane(&for_x.a, at), lane(&for_x.x, at), lane(&for_x.one, at));
            for r in block.clone() {
                let (place, own) = (r * c + at, (r - first) * c + at);
                let g = masked(lane(maps.g, place), maps.y, place);
                let (a, x) = (lane(cotangent, place), lane(maps.x, place));
                let mut to_g: Lane = std::array::from_fn(|i| a[i].mul_add(ga[i], x[i].mul_add(gx[i], g1[i])));
                if let Some(more) = more {
                    to_g = zip(to_g, lane(more, place), |d, m| d + m);
                }
                dg[own..own + LANES].copy_from_slice(&masked(to_g, maps.y, place));
                let to_x: Lane =
                    std::array::from_fn(|i| g[i].mul_add(xg[i], a[i].mul_add(xa[i], x[i].mul_add(xx[i], x1[i]))));
                dx[own..own + LANES].copy_from_slice(&to_x);
            }
        }
    }
}
}
