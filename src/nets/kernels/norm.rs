//! BatchNorm in training on the CPU, with the residual sum and the ReLU that follow it: what the autograd function (norm.cpp) is called
//! with, and what it calls. The loops over the maps are in `loops`; libtorch serves what they are not for.
//!
//! What is unsafe: the functions that C++ calls take pointers and sizes, and believe norm.cpp that they fit; parts of a map are written by
//! several threads at once, each its own rows.

pub(super) mod loops;

use std::ffi::c_char;

use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use super::lanes::{HasAvx2, LANES, has_avx2};
use super::parallel::{Shared, in_parallel, parts_of};
use crate::system::cpp;
use loops::{Maps, Mix, Moments, SUMS, affine, all_sums, by_part, moments, part_of, write_gradient, write_second};

unsafe extern "C" {
    fn mcl_norm_train(x: *const C_tensor, norm: *const NormCall, error: *mut *mut c_char) -> *mut C_tensor;
}

/// The tensors of a BatchNorm, [channels] each.
pub struct State<'a> {
    /// gamma
    pub weight: &'a Tensor,
    /// beta
    pub bias: &'a Tensor,
    /// The running mean.
    pub mean: &'a Tensor,
    /// The running variance.
    pub var: &'a Tensor,
}

/// What a norm is told beside its map, as C++ has it (`NormCall` in differentiable.h).
#[repr(C)]
pub(super) struct NormCall {
    gamma: *const C_tensor,
    beta: *const C_tensor,
    mean: *const C_tensor,
    var: *const C_tensor,
    residual: *const C_tensor,
    relu: bool,
    momentum: f64,
    eps: f64,
}

impl NormCall {
    /// Points to tensors that must outlive it.
    pub(super) fn new(state: &State, residual: Option<&Tensor>, relu: bool, momentum: f64, eps: f64) -> NormCall {
        let pointer = |t: &Tensor| t.as_ptr();
        NormCall {
            gamma: pointer(state.weight),
            beta: pointer(state.bias),
            mean: pointer(state.mean),
            var: pointer(state.var),
            residual: residual.map_or(std::ptr::null(), pointer),
            relu,
            momentum,
            eps,
        }
    }
}

/// Are the loops for this map?
pub fn serves(xs: &Tensor) -> bool {
    let size = xs.size();
    let ours = xs.device() == Device::Cpu && xs.kind() == Kind::Float && size.len() == 4; // on the CPU only
    ours && size[1] % LANES as i64 == 0 && size[0] * size[2] * size[3] > 1 && has_avx2().is_some()
}

/// ReLU(BN(xs) + residual), ReLU(BN(xs)) or BN(xs) with the statistics of the batch; the running ones move. Can be differentiated twice.
pub fn train(xs: &Tensor, state: State, residual: Option<&Tensor>, relu: bool, momentum: f64, eps: f64) -> Tensor {
    let norm = NormCall::new(&state, residual, relu, momentum, eps);
    // SAFETY: all tensors live through the call.
    let call = |error| unsafe { mcl_norm_train(xs.as_ptr(), &norm, error) };
    // SAFETY: the answer is ours.
    unsafe { cpp::tensor(|| format!("BatchNorm of {:?}", xs.size()), call) }
}

/// What `serves` has looked for before any of this is called.
pub(super) fn looked() -> HasAvx2 {
    has_avx2().expect("only maps that `serves` takes come here")
}

/// None where C++ has nothing to give.
///
/// # Safety
/// Null, or so many numbers that outlive the call.
pub(super) unsafe fn maybe<'a>(from: *const f32, len: usize) -> Option<&'a [f32]> {
    (!from.is_null()).then(|| unsafe { std::slice::from_raw_parts(from, len) })
}

/// # Safety
/// So many numbers that outlive the call.
pub(super) unsafe fn floats<'a>(from: *const f32, len: usize) -> &'a [f32] {
    unsafe { std::slice::from_raw_parts(from, len) }
}

/// y = BN(x) + residual, then the ReLU; `stats` are the means and inverse deviations that the derivatives take.
///
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
    let here = looked();
    let (rows, c) = (rows as usize, c as usize);
    let (x, residual) = unsafe { (floats(x, rows * c), maybe(residual, rows * c)) };
    let (gamma, beta) = unsafe { (floats(gamma, c), floats(beta, c)) };
    let parts = parts_of(x.len());
    let found = by_part(parts, |part| moments(here, x, c, part_of(rows, part, parts)));
    let all = found.iter().fold(Moments::none(c), Moments::join);
    let running = unsafe { [Shared(running_mean).slice(0, c), Shared(running_var).slice(0, c)] };
    let (scale, shift) = settle(&all, (gamma, beta), unsafe { Shared(stats).slice(0, 2 * c) }, running, (momentum, eps));
    write_affine(here, x, residual, (&scale, &shift), relu, Shared(y));
}

/// What follows from the moments of all rows: `stats`, new running statistics, and (scale, shift) of the affine map.
pub(super) fn settle(
    all: &Moments,
    (gamma, beta): (&[f32], &[f32]),
    stats: &mut [f32],
    [running_mean, running_var]: [&mut [f32]; 2],
    (momentum, eps): (f64, f64),
) -> (Vec<f32>, Vec<f32>) {
    let Moments { means, squares, seen } = all;
    let c = means.len();
    let (mut scale, mut shift) = (vec![0f32; c], vec![0f32; c]);
    for i in 0..c {
        let inverse = 1.0 / (squares[i] / seen + eps).sqrt();
        (stats[i], stats[c + i]) = (means[i] as f32, inverse as f32);
        scale[i] = (gamma[i] as f64 * inverse) as f32;
        shift[i] = (beta[i] as f64 - means[i] * gamma[i] as f64 * inverse) as f32;
        running_mean[i] = ((1.0 - momentum) * running_mean[i] as f64 + momentum * means[i]) as f32;
        running_var[i] = ((1.0 - momentum) * running_var[i] as f64 + momentum * squares[i] / (seen - 1.0)) as f32;
    }
    (scale, shift)
}

/// y = scale x + shift + residual, then the ReLU, on all threads.
pub(super) fn write_affine(here: HasAvx2, x: &[f32], residual: Option<&[f32]>, (scale, shift): (&[f32], &[f32]), relu: bool, y: Shared) {
    let (c, parts) = (scale.len(), parts_of(x.len()));
    in_parallel(parts, &|part| {
        let rows = part_of(x.len() / c, part, parts);
        // SAFETY: the parts do not overlap.
        let own = unsafe { y.slice(rows.start * c, rows.len() * c) };
        affine(here, x, residual, scale, shift, relu, rows, own);
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
    let here = looked();
    let (rows, c) = (rows as usize, c as usize);
    let (gamma, stats) = unsafe { (floats(gamma, c), floats(stats, 2 * c)) };
    let (means, inverse) = stats.split_at(c);
    let maps = unsafe { Maps { g: floats(g, rows * c), x: floats(x, rows * c), y: maybe(y, rows * c), a: None, means } };
    let (dgamma, dbeta) = unsafe { (Shared(dgamma).slice(0, c), Shared(dbeta).slice(0, c)) };
    let mix = gradient_mix(here, maps, gamma, inverse, dgamma, dbeta);
    let parts = parts_of(maps.x.len());
    let (dx, passed) = (Shared(dx), (!passed.is_null()).then_some(Shared(passed)));
    in_parallel(parts, &|part| {
        let rows = part_of(rows, part, parts);
        // SAFETY: the parts do not overlap.
        let (own, passed) = unsafe { (dx.slice(rows.start * c, rows.len() * c), passed.map(|p| p.slice(rows.start * c, rows.len() * c))) };
        write_gradient(here, maps, &mix, rows, own, passed);
    });
}

/// Writes dgamma and dbeta; dx is the mixture of g and x that comes back.
pub(super) fn gradient_mix(here: HasAvx2, maps: Maps, gamma: &[f32], inverse: &[f32], dgamma: &mut [f32], dbeta: &mut [f32]) -> Mix {
    let c = gamma.len();
    let rows = maps.x.len() / c;
    let found = all_sums(here, maps, rows);
    for i in 0..c {
        (dbeta[i], dgamma[i]) = (found[i] as f32, (found[c + i] * inverse[i] as f64) as f32);
    }
    Mix::new(c, |i| {
        let (s, n) = (inverse[i] as f64, rows as f64);
        let factor = gamma[i] as f64 * s;
        let of_x = -factor * s * s * found[c + i] / n;
        [factor, 0.0, of_x, -factor * found[i] / n - of_x * maps.means[i] as f64]
    })
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
    let here = looked();
    let (rows, c) = (rows as usize, c as usize);
    let (gamma, stats) = unsafe { (floats(gamma, c), floats(stats, 2 * c)) };
    let (ddgamma, ddbeta, more) = unsafe { (maybe(ddgamma, c), maybe(ddbeta, c), maybe(dpassed, rows * c)) };
    let (means, inverse) = stats.split_at(c);
    let maps = unsafe { Maps { g: floats(g, rows * c), x: floats(x, rows * c), y: maybe(y, rows * c), a: maybe(ddx, rows * c), means } };
    let found = all_sums(here, maps, rows);
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
        write_second(here, maps, &for_g, &for_x, more, rows, dg, dx);
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

    /// The gradient of a sum is one number seen many times: no memory lies behind its other places.
    #[test]
    fn cotangents_that_are_expanded_views_are_read_rightly() {
        let second = |ours: bool, kind: Kind| {
            let x = wave(&[4, 5, 5, 32], 0.37, kind).permute([0, 3, 1, 2]).set_requires_grad(true);
            let gamma = (wave(&[32], 1.3, kind) + 1.5).set_requires_grad(true);
            let beta = wave(&[32], 0.9, kind).set_requires_grad(true);
            let (mean, var) = (wave(&[32], 0.5, kind), wave(&[32], 0.6, kind).square());
            let y = if ours {
                train(&x, State { weight: &gamma, bias: &beta, mean: &mean, var: &var }, None, false, 0.1, 1e-5)
            } else {
                x.batch_norm(Some(&gamma), Some(&beta), Some(&mean), Some(&var), true, 0.1, 1e-5, false)
            };
            let loss = (y.square() * &y).sum(None);
            let first = Tensor::run_backward(&[&loss], &[&gamma, &beta], true, true);
            let sums = first[0].sum(None) + 2.0 * first[1].sum(None);
            Tensor::run_backward(&[&sums], &[&x, &gamma, &beta], false, false)
        };
        for (i, (got, want)) in second(true, Kind::Float).iter().zip(second(false, Kind::Double)).enumerate() {
            let error = ((got.to_kind(Kind::Double) - &want).abs().max() / want.abs().max()).double_value(&[]);
            assert!(error < 2e-5, "tensor {i}: {error}");
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
