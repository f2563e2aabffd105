//! BatchNorm in training on the CPU, with the residual sum and the ReLU that follow it: loops over maps in channels_last, and the calls
//! that make an autograd function of them (norm.cpp). libtorch serves what these loops are not for.

use std::ffi::c_char;

use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use super::lanes::{LANES, instructions};
use super::parallel::{Shared, in_parallel, parts_of};
use crate::system::cpp;

unsafe extern "C" {
    #[allow(clippy::too_many_arguments)]
    fn mcl_norm_train(
        x: *const C_tensor,
        gamma: *const C_tensor,
        beta: *const C_tensor,
        residual: *const C_tensor,
        mean: *const C_tensor,
        var: *const C_tensor,
        relu: bool,
        momentum: f64,
        eps: f64,
        error: *mut *mut c_char,
    ) -> *mut C_tensor;
}

/// The tensors of a BatchNorm.
pub struct State<'a> {
    pub weight: &'a Tensor,
    pub bias: &'a Tensor,
    pub mean: &'a Tensor,
    pub var: &'a Tensor,
}

/// Are the loops for this map?
pub fn serves(xs: &Tensor) -> bool {
    let size = xs.size();
    let ours = xs.device() == Device::Cpu && xs.kind() == Kind::Float && size.len() == 4; // on the CPU only
    ours && size[1] % LANES as i64 == 0 && size[0] * size[2] * size[3] > 1 && instructions().is_some()
}

/// ReLU(BN(xs) + residual), ReLU(BN(xs)) or BN(xs) with the statistics of the batch; the running ones move. Can be differentiated twice.
pub fn train(xs: &Tensor, state: State, residual: Option<&Tensor>, relu: bool, momentum: f64, eps: f64) -> Tensor {
    let call = |error| {
        let residual = residual.map_or(std::ptr::null(), |r| r.as_ptr());
        let (weight, bias, mean, var) = (state.weight.as_ptr(), state.bias.as_ptr(), state.mean.as_ptr(), state.var.as_ptr());
        // SAFETY: all tensors live through the call.
        unsafe { mcl_norm_train(xs.as_ptr(), weight, bias, residual, mean, var, relu, momentum, eps, error) }
    };
    // SAFETY: the answer is ours.
    unsafe { cpp::tensor(|| format!("BatchNorm of {:?}", xs.size()), call) }
}

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

/// Compiles a loop for AVX2. The caller has made sure that the machine has it: `serves`.
macro_rules! with_avx2 {
    ($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $out:ty)? $body:block) => {
        $(#[$doc])*
        fn $name($($arg: $type),*) $(-> $out)? {
            #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma"))]
            unsafe fn inner($($arg: $type),*) $(-> $out)? $body
            // SAFETY: `serves` has looked for the instructions.
            unsafe { inner($($arg),*) }
        }
    };
}

/// The rows of a map in as many parts as threads.
fn part_of(rows: usize, part: usize, parts: usize) -> std::ops::Range<usize> {
    part * rows / parts..(part + 1) * rows / parts
}

with_avx2! {
/// (means, sums of squared deviations) by channel over some rows: by ROWS at a time, joined by Chan's formula.
fn moments(x: &[f32], c: usize, rows: std::ops::Range<usize>) -> (Vec<f64>, Vec<f64>) {
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
            let mean = sum.map(|s| s / count);
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
    (means, squares)
}
}

with_avx2! {
/// y = scale x + shift, plus the residual, then the ReLU, over some rows. `y` is those rows alone.
fn affine(x: &[f32], residual: Option<&[f32]>, scale: &[f32], shift: &[f32], relu: bool, rows: std::ops::Range<usize>, y: &mut [f32]) {
    let c = scale.len();
    for at in (0..c).step_by(LANES) {
        let (scale, shift) = (lane(scale, at), lane(shift, at));
        for (r, out) in rows.clone().zip(y.chunks_exact_mut(c)) {
            let x = lane(x, r * c + at);
            let mut v: Lane = std::array::from_fn(|i| x[i].mul_add(scale[i], shift[i]));
            if let Some(residual) = residual {
                v = zip(v, lane(residual, r * c + at), |v, r| v + r);
            }
            if relu {
                // Not max: a NaN must go on and be seen.
                v = v.map(|v| if v < 0.0 { 0.0 } else { v });
            }
            out[at..at + LANES].copy_from_slice(&v);
        }
    }
}
}

/// Maps of one call, [rows][c] each.
#[derive(Clone, Copy)]
struct Maps<'a> {
    g: &'a [f32],
    x: &'a [f32],
    y: Option<&'a [f32]>,
    /// The cotangent of dx, in the second derivative.
    a: Option<&'a [f32]>,
    means: &'a [f32],
}

/// Sums by channel, u = x - mean: of g, g u, a, a u, a g; the last three only with `a`.
const SUMS: usize = 5;

with_avx2! {
fn sums(maps: Maps, rows: std::ops::Range<usize>) -> Vec<f64> {
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
fn all_sums(maps: Maps, rows: usize) -> Vec<f64> {
    let parts = parts_of(maps.x.len());
    let found = by_part(parts, |part| sums(maps, part_of(rows, part, parts)));
    let mut total = vec![0f64; SUMS * maps.means.len()];
    found.iter().flatten().zip((0..parts).flat_map(|_| 0..SUMS * maps.means.len())).for_each(|(v, i)| total[i] += v);
    total
}

/// What every part found, in order.
fn by_part<T: Send>(parts: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
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
struct Mix {
    g: Vec<f32>,
    a: Vec<f32>,
    x: Vec<f32>,
    one: Vec<f32>,
}

impl Mix {
    fn new(c: usize, of: impl Fn(usize) -> [f64; 4]) -> Mix {
        let rows: Vec<[f64; 4]> = (0..c).map(of).collect();
        let column = |k: usize| rows.iter().map(|row| row[k] as f32).collect();
        Mix { g: column(0), a: column(1), x: column(2), one: column(3) }
    }
}

with_avx2! {
/// dx = mix of g (where the ReLU let pass) and x; `passed` is that g.
fn write_gradient(maps: Maps, mix: &Mix, rows: std::ops::Range<usize>, dx: &mut [f32], passed: Option<&mut [f32]>) {
    let c = maps.means.len();
    let mut passed = passed;
    for at in (0..c).step_by(LANES) {
        let (kg, kx, one) = (lane(&mix.g, at), lane(&mix.x, at), lane(&mix.one, at));
        for (i, r) in rows.clone().enumerate() {
            let (place, own) = (r * c + at, i * c + at);
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

with_avx2! {
/// The second derivative's dg (where the ReLU let pass) and dx.
fn write_second(maps: Maps, for_g: &Mix, for_x: &Mix, more: Option<&[f32]>, rows: std::ops::Range<usize>, dg: &mut [f32], dx: &mut [f32]) {
    let (c, Some(cotangent)) = (maps.means.len(), maps.a) else { unreachable!("the second derivative has a cotangent") };
    for at in (0..c).step_by(LANES) {
        let (ga, gx, g1) = (lane(&for_g.a, at), lane(&for_g.x, at), lane(&for_g.one, at));
        let (xg, xa, xx, x1) = (lane(&for_x.g, at), lane(&for_x.a, at), lane(&for_x.x, at), lane(&for_x.one, at));
        for (i, r) in rows.clone().enumerate() {
            let (place, own) = (r * c + at, i * c + at);
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

/// # Safety
/// Null, or so many numbers.
unsafe fn maybe<'a>(from: *const f32, len: usize) -> Option<&'a [f32]> {
    (!from.is_null()).then(|| unsafe { std::slice::from_raw_parts(from, len) })
}

/// # Safety
/// So many numbers.
unsafe fn floats<'a>(from: *const f32, len: usize) -> &'a [f32] {
    unsafe { std::slice::from_raw_parts(from, len) }
}

/// # Safety
/// Pointers are to [rows][c] or [c] numbers (`stats`: [2][c]) as norm.cpp says; `residual` may be null.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn mcl_norm(
    x: *const f32,
    residual: *const f32,
    gamma: *const f32,
    beta: *const f32,
    y: *mut f32,
    stats: *mut f32,
    running_mean: *mut f32,
    running_var: *mut f32,
    rows: i64,
    c: i64,
    relu: bool,
    momentum: f64,
    eps: f64,
) {
    let (rows, c) = (rows as usize, c as usize);
    let (x, residual) = unsafe { (floats(x, rows * c), maybe(residual, rows * c)) };
    let (gamma, beta) = unsafe { (floats(gamma, c), floats(beta, c)) };
    let parts = parts_of(x.len());
    let found = by_part(parts, |part| moments(x, c, part_of(rows, part, parts)));
    let (mut means, mut squares, mut seen) = (vec![0f64; c], vec![0f64; c], 0f64);
    for (part, (mean, square)) in found.into_iter().enumerate() {
        let here = part_of(rows, part, parts).len() as f64;
        for i in 0..c {
            let gap = mean[i] - means[i];
            means[i] += gap * here / (seen + here);
            squares[i] += square[i] + gap * gap * seen * here / (seen + here);
        }
        seen += here;
    }
    let (stats, running_mean, running_var) =
        unsafe { (Shared(stats).slice(0, 2 * c), Shared(running_mean).slice(0, c), Shared(running_var).slice(0, c)) };
    let (mut scale, mut shift) = (vec![0f32; c], vec![0f32; c]);
    for i in 0..c {
        let inverse = 1.0 / (squares[i] / seen + eps).sqrt();
        (stats[i], stats[c + i]) = (means[i] as f32, inverse as f32);
        scale[i] = (gamma[i] as f64 * inverse) as f32;
        shift[i] = (beta[i] as f64 - means[i] * gamma[i] as f64 * inverse) as f32;
        running_mean[i] = ((1.0 - momentum) * running_mean[i] as f64 + momentum * means[i]) as f32;
        running_var[i] = ((1.0 - momentum) * running_var[i] as f64 + momentum * squares[i] / (seen - 1.0)) as f32;
    }
    let y = Shared(y);
    in_parallel(parts, &|part| {
        let rows = part_of(rows, part, parts);
        // SAFETY: the parts do not overlap.
        let own = unsafe { y.slice(rows.start * c, rows.len() * c) };
        affine(x, residual, &scale, &shift, relu, rows, own);
    });
}

/// dx = gamma s (g - mean(g) - xhat mean(g xhat)), dgamma = sum(g xhat), dbeta = sum(g), with s = 1 / deviation, xhat = s (x - mean).
///
/// # Safety
/// As `mcl_norm`; `y` and `passed` may be null.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn mcl_norm_gradient(
    g: *const f32,
    x: *const f32,
    y: *const f32,
    gamma: *const f32,
    stats: *const f32,
    dx: *mut f32,
    dgamma: *mut f32,
    dbeta: *mut f32,
    passed: *mut f32,
    rows: i64,
    c: i64,
) {
    let (rows, c) = (rows as usize, c as usize);
    let (gamma, stats) = unsafe { (floats(gamma, c), floats(stats, 2 * c)) };
    let (means, inverse) = stats.split_at(c);
    let maps = unsafe { Maps { g: floats(g, rows * c), x: floats(x, rows * c), y: maybe(y, rows * c), a: None, means } };
    let found = all_sums(maps, rows);
    let (dgamma, dbeta) = unsafe { (Shared(dgamma).slice(0, c), Shared(dbeta).slice(0, c)) };
    for i in 0..c {
        (dbeta[i], dgamma[i]) = (found[i] as f32, (found[c + i] * inverse[i] as f64) as f32);
    }
    let mix = Mix::new(c, |i| {
        let (s, n) = (inverse[i] as f64, rows as f64);
        let factor = gamma[i] as f64 * s;
        let of_x = -factor * s * s * found[c + i] / n;
        [factor, 0.0, of_x, -factor * found[i] / n - of_x * means[i] as f64]
    });
    let parts = parts_of(maps.x.len());
    let (dx, passed) = (Shared(dx), (!passed.is_null()).then_some(Shared(passed)));
    in_parallel(parts, &|part| {
        let rows = part_of(rows, part, parts);
        // SAFETY: the parts do not overlap.
        let (own, passed) = unsafe { (dx.slice(rows.start * c, rows.len() * c), passed.map(|p| p.slice(rows.start * c, rows.len() * c))) };
        write_gradient(maps, &mix, rows, own, passed);
    });
}

/// The derivative of <dx, a> + <dgamma, ddgamma> + <dbeta, ddbeta> (+ <passed, dpassed>) after g, x and gamma. With p = mean(g xhat),
/// q = mean(a xhat), r = mean(a g), bars for means, N rows:
///   dg = gamma s (a - abar - q xhat) + ddgamma xhat + ddbeta
///   dx = -gamma s^2 (xhat (r - abar gbar - 3 p q) + q (g - gbar) + p (a - abar)) + ddgamma s (g - gbar - p xhat)
///   dgamma = s N (r - abar gbar - p q)
///
/// # Safety
/// As `mcl_norm`; `y`, `ddgamma`, `ddbeta` and `dpassed` may be null.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn mcl_norm_second(
    g: *const f32,
    x: *const f32,
    y: *const f32,
    gamma: *const f32,
    stats: *const f32,
    ddx: *const f32,
    ddgamma: *const f32,
    ddbeta: *const f32,
    dpassed: *const f32,
    dg: *mut f32,
    dx: *mut f32,
    dgamma: *mut f32,
    rows: i64,
    c: i64,
) {
    let (rows, c) = (rows as usize, c as usize);
    let (gamma, stats) = unsafe { (floats(gamma, c), floats(stats, 2 * c)) };
    let (ddgamma, ddbeta, more) = unsafe { (maybe(ddgamma, c), maybe(ddbeta, c), maybe(dpassed, rows * c)) };
    let (means, inverse) = stats.split_at(c);
    let maps = unsafe { Maps { g: floats(g, rows * c), x: floats(x, rows * c), y: maybe(y, rows * c), a: maybe(ddx, rows * c), means } };
    let found = all_sums(maps, rows);
    let n = rows as f64;
    // (gbar, p, abar, q, r) of a channel.
    let mean = |i: usize| -> [f64; SUMS] {
        let s = inverse[i] as f64;
        std::array::from_fn(|k| found[k * c + i] / n * if k == 1 || k == 3 { s } else { 1.0 })
    };
    let dgamma = unsafe { Shared(dgamma).slice(0, c) };
    for i in 0..c {
        let [gbar, p, abar, q, r] = mean(i);
        dgamma[i] = (inverse[i] as f64 * n * (r - abar * gbar - p * q)) as f32;
    }
    let at = |values: Option<&[f32]>, i: usize| values.map_or(0.0, |v| v[i] as f64);
    let for_g = Mix::new(c, |i| {
        let [_, _, abar, q, _] = mean(i);
        let (s, factor) = (inverse[i] as f64, gamma[i] as f64 * inverse[i] as f64);
        let of_x = (at(ddgamma, i) - factor * q) * s;
        [0.0, factor, of_x, at(ddbeta, i) - factor * abar - of_x * means[i] as f64]
    });
    let for_x = Mix::new(c, |i| {
        let [gbar, p, abar, q, r] = mean(i);
        let (s, factor) = (inverse[i] as f64, gamma[i] as f64 * inverse[i] as f64 * inverse[i] as f64);
        let (of_g, of_a) = (at(ddgamma, i) * s - factor * q, -factor * p);
        let of_x = (-factor * (r - abar * gbar - 3.0 * p * q) - at(ddgamma, i) * s * p) * s;
        [of_g, of_a, of_x, -of_g * gbar - of_a * abar - of_x * means[i] as f64]
    });
    let parts = parts_of(maps.x.len());
    let (dg, dx) = (Shared(dg), Shared(dx));
    in_parallel(parts, &|part| {
        let rows = part_of(rows, part, parts);
        // SAFETY: the parts do not overlap.
        let (dg, dx) = unsafe { (dg.slice(rows.start * c, rows.len() * c), dx.slice(rows.start * c, rows.len() * c)) };
        write_second(maps, &for_g, &for_x, more, rows, dg, dx);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wave(shape: &[i64], step: f64, kind: Kind) -> Tensor {
        (Tensor::arange(shape.iter().product::<i64>(), (Kind::Double, Device::Cpu)) * step).sin().view(shape).to_kind(kind)
    }

    /// The answer, running statistics, and first and second derivatives after x, gamma, beta and the residual.
    fn derivatives(ours: bool, residual: bool, relu: bool, size: [i64; 4], kind: Kind) -> Vec<Tensor> {
        let [b, c, h, w] = size;
        let x = (wave(&[b, h, w, c], 0.37, kind) + wave(&[b, h, w, c], 0.011, kind) + 0.3).permute([0, 3, 1, 2]).set_requires_grad(true);
        let gamma = (wave(&[c], 1.3, kind) + 1.5).set_requires_grad(true);
        let beta = wave(&[c], 0.9, kind).set_requires_grad(true);
        let other = wave(&[b, c, h, w], 0.29, kind).set_requires_grad(true);
        let (mean, var) = (wave(&[c], 0.5, kind), wave(&[c], 0.6, kind).square());
        let y = if ours {
            let state = State { weight: &gamma, bias: &beta, mean: &mean, var: &var };
            train(&x, state, residual.then_some(&other), relu, 0.1, 1e-5)
        } else {
            let y = x.batch_norm(Some(&gamma), Some(&beta), Some(&mean), Some(&var), true, 0.1, 1e-5, false);
            let y = if residual { y + &other } else { y };
            if relu { y.relu() } else { y }
        };
        let mut after = vec![&x, &gamma, &beta];
        if residual {
            after.push(&other);
        }
        let loss = (wave(&[b, c, h, w], 0.61, kind) * &y * &y).sum(None);
        let first = Tensor::run_backward(&[&loss], &after, true, true);
        let again = first.iter().enumerate().map(|(i, d)| (d * wave(&d.size(), 0.17 + 0.1 * i as f64, kind) * d).sum(None));
        let again = again.reduce(|a, b| a + b).unwrap();
        let second = Tensor::run_backward(&[&again], &after, false, false);
        [y, mean, var].into_iter().chain(first).chain(second).collect()
    }

    #[test]
    fn answers_and_two_derivatives_are_libtorchs() {
        for size in [[4, 16, 9, 7], [33, 16, 24, 24], [3, 48, 5, 5], [150, 32, 1, 1]] {
            for (residual, relu) in [(false, false), (false, true), (true, true)] {
                let got = derivatives(true, residual, relu, size, Kind::Float);
                // The truth in f64; libtorch's own f32 is no nearer to it.
                let want = derivatives(false, residual, relu, size, Kind::Double);
                assert_eq!(got.len(), want.len());
                for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                    let error = ((got.to_kind(Kind::Double) - want).abs().max() / want.abs().max()).double_value(&[]);
                    assert!(error < 2e-5, "{size:?}, residual {residual}, relu {relu}, tensor {i}: {error}");
                }
            }
        }
    }

    #[test]
    fn numbers_far_from_zero_keep_their_variance() {
        let x = (wave(&[64, 16, 16, 16], 0.7, Kind::Float) + 1000.0).set_requires_grad(true);
        let one = |v: f64| Tensor::full([16], v, (Kind::Float, Device::Cpu));
        let (gamma, beta, mean, var) = (one(1.0), one(0.0), one(0.0), one(1.0));
        let y = train(&x, State { weight: &gamma, bias: &beta, mean: &mean, var: &var }, None, false, 1.0, 1e-5);
        let truth = x.to_kind(Kind::Double).var_dim([0i64, 2, 3].as_slice(), true, false);
        let error = ((var.to_kind(Kind::Double) - truth).abs().max()).double_value(&[]);
        assert!(error < 1e-4 && (y.square().mean(None).double_value(&[]) - 1.0).abs() < 1e-3, "{error}");
    }
}
