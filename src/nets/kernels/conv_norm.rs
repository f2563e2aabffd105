//! A convolution and its BatchNorm in training as one autograd function (conv_norm.cpp). Images are taken a few at a time, so that what one
//! loop leaves in the core's cache the next one finds there: the statistics of an output just written, and in the backward pass the gradient
//! after the convolution's output, which two products take and which never goes to memory.
//!
//! What is unsafe: as in `norm`, the functions that C++ calls believe conv_norm.cpp that pointers and sizes fit, and threads write images of
//! their own.

use std::cell::RefCell;
use std::ffi::c_char;
use std::ops::Range;

use tch::Tensor;
use torch_sys::C_tensor;

use super::lanes::instructions;
use super::norm::loops::{Maps as NormMaps, Moments, by_part, moments, part_of, write_gradient};
use super::norm::{self, NormCall, State, floats, gradient_mix, looked, maybe, settle, write_affine};
use super::parallel::{Shared, parts_of};
use super::winograd::{Maps, forward, most_sums, space, sum, with_sums, with_weights};
use crate::nets::layers::ConvShape;
use crate::system::cpp;

unsafe extern "C" {
    fn mcl_conv_norm_train(x: *const C_tensor, w: *const C_tensor, norm: *const NormCall, error: *mut *mut c_char) -> *mut C_tensor;
}

/// Is the pair for this map? Both `winograd` and `norm` must be.
pub fn serves(xs: &Tensor, shape: ConvShape) -> bool {
    let ConvShape { c_in, c_out, kernel, stride, padding, dilation, groups } = shape;
    let window = (kernel, stride, padding, dilation, groups) == (3, 1, 1, 1, 1);
    window && norm::serves(xs) && xs.size4().is_ok_and(|(b, c, h, w)| c == c_in && Maps::of([b, h, w, c_in, c_out]).served())
}

/// ReLU(BN(conv(xs)) + residual), ReLU(BN(conv(xs))) or BN(conv(xs)) with the statistics of the batch; the running ones move. Can be
/// differentiated twice.
pub fn train(xs: &Tensor, weight: &Tensor, state: State, residual: Option<&Tensor>, relu: bool, momentum: f64, eps: f64) -> Tensor {
    let norm = NormCall::new(&state, residual, relu, momentum, eps);
    // SAFETY: all tensors live through the call.
    let call = |error| unsafe { mcl_conv_norm_train(xs.as_ptr(), weight.as_ptr(), &norm, error) };
    // SAFETY: the answer is ours.
    unsafe { cpp::tensor(|| format!("convolution of {:?} with {:?} and its BatchNorm", xs.size(), weight.size()), call) }
}

thread_local! {
    /// The gradient after the convolution's output, of the images at hand.
    static GRADIENT_SPACE: RefCell<Vec<f32>> = const { RefCell::new(vec![]) };
}

/// Bytes of a map that the loops over it leave in the core's own cache.
const AT_ONCE: usize = 96 << 10;

/// Some images of a part, as many at a time as the cache holds.
fn groups(maps: Maps, images: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let one = maps.h * maps.w * maps.c_out.max(maps.c_in) * size_of::<f32>();
    let step = (AT_ONCE / one).max(1);
    images.clone().step_by(step).map(move |first| first..(first + step).min(images.end))
}

/// # Safety
/// As conv_norm.cpp says.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn mcl_conv_norm(
    x: *const f32,
    w: *const f32,
    residual: *const f32,
    gamma: *const f32,
    beta: *const f32,
    z: *mut f32,
    y: *mut f32,
    stats: *mut f32,
    running_mean: *mut f32,
    running_var: *mut f32,
    sizes: *const [i64; 5],
    relu: bool,
    momentum: f64,
    eps: f64,
) {
    let (here, with) = (looked(), instructions().expect("only maps that `serves` takes come here"));
    let maps = Maps::of(unsafe { *sizes });
    let (places, c) = (maps.h * maps.w, maps.c_out);
    let len = maps.images * places;
    let (x, w, residual) = unsafe { (floats(x, len * maps.c_in), floats(w, 9 * maps.c_in * c), maybe(residual, len * c)) };
    let parts = parts_of(x.len()).min(maps.images);
    let whole = Shared(z);
    let found = with_weights(w, maps, false, with, parts, |u| {
        by_part(parts, |part| {
            groups(maps, part_of(maps.images, part, parts)).fold(Moments::none(c), |all, images| {
                let few = Maps { images: images.len(), ..maps };
                let x = &x[images.start * places * maps.c_in..images.end * places * maps.c_in];
                // SAFETY: the images of the parts do not overlap.
                let own = unsafe {
                    let z = whole.slice(images.start * places * c, images.len() * places * c);
                    forward(with, x, u, Shared(z.as_mut_ptr()), few, 0..few.tiles());
                    z
                };
                all.join(&moments(here, own, c, 0..images.len() * places))
            })
        })
    });
    let all = found.iter().fold(Moments::none(c), Moments::join);
    let running = unsafe { [Shared(running_mean).slice(0, c), Shared(running_var).slice(0, c)] };
    let (scale, shift) =
        unsafe { settle(&all, (floats(gamma, c), floats(beta, c)), Shared(stats).slice(0, 2 * c), running, (momentum, eps)) };
    write_affine(here, unsafe { floats(z, len * c) }, residual, (&scale, &shift), relu, Shared(y));
}

/// # Safety
/// As conv_norm.cpp says.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn mcl_conv_norm_gradient(
    gy: *const f32,
    gz: *const f32,
    x: *const f32,
    w: *const f32,
    z: *const f32,
    y: *const f32,
    gamma: *const f32,
    stats: *const f32,
    dx: *mut f32,
    dw: *mut f32,
    dgamma: *mut f32,
    dbeta: *mut f32,
    passed: *mut f32,
    sizes: *const [i64; 5],
) {
    let (here, with) = (looked(), instructions().expect("only maps that `serves` takes come here"));
    let maps = Maps::of(unsafe { *sizes });
    let (places, c, c_in) = (maps.h * maps.w, maps.c_out, maps.c_in);
    let len = maps.images * places;
    let (x, w, z) = unsafe { (floats(x, len * c_in), floats(w, 9 * c_in * c), floats(z, len * c)) };
    let (gy, gz, y) = unsafe { (maybe(gy, len * c), maybe(gz, len * c), maybe(y, len * c)) };
    let (means, inverse) = unsafe { floats(stats, 2 * c) }.split_at(c);
    let of_norm = gy.map(|g| {
        let norm = NormMaps { g, x: z, y, a: None, means };
        let (dgamma, dbeta) = unsafe { (Shared(dgamma).slice(0, c), Shared(dbeta).slice(0, c)) };
        (norm, gradient_mix(here, norm, unsafe { floats(gamma, c) }, inverse, dgamma, dbeta))
    });
    let parts = parts_of(x.len() + z.len()).min(maps.images).min(most_sums(maps));
    let passed = (!passed.is_null()).then_some(Shared(passed));
    let (dx, dw) = ((!dx.is_null()).then_some(Shared(dx)), (!dw.is_null()).then_some(Shared(dw)));
    let back = Maps { c_in: c, c_out: c_in, ..maps };
    // One part: the gradient after z a few images at a time, then what is wanted of it.
    let run = |part: usize, u: &[f32], mut sums: Option<&mut [f32]>| {
        for images in groups(maps, part_of(maps.images, part, parts)) {
            let rows = images.start * places..images.end * places;
            space(&GRADIENT_SPACE, rows.len() * c, |dz| {
                if let Some((norm, mix)) = &of_norm {
                    // SAFETY: the images of the parts do not overlap, here and below.
                    let passed = passed.map(|p| unsafe { p.slice(rows.start * c, rows.len() * c) });
                    write_gradient(here, *norm, mix, rows.clone(), dz, passed);
                }
                match gz.map(|gz| &gz[rows.start * c..rows.end * c]) {
                    Some(gz) if of_norm.is_some() => dz.iter_mut().zip(gz).for_each(|(d, g)| *d += g),
                    Some(gz) => dz.copy_from_slice(gz),
                    None => {}
                }
                if let Some(dx) = dx {
                    let few = Maps { images: images.len(), ..back };
                    unsafe { forward(with, dz, u, Shared(dx.at(rows.start * c_in)), few, 0..few.tiles()) };
                }
                if let Some(sums) = sums.as_deref_mut() {
                    let few = Maps { images: images.len(), ..maps };
                    sum(with, &x[rows.start * c_in..rows.end * c_in], dz, sums, few, 0..few.tiles());
                }
            });
        }
    };
    let all = |u: &[f32]| match dw {
        Some(dw) => with_sums(dw, maps, with, parts, |part, sums| run(part, u, Some(sums))),
        None => super::parallel::in_parallel(parts, &|part| run(part, u, None)),
    };
    match dx {
        Some(_) => with_weights(w, back, true, with, parts, all),
        None => all(&[]),
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    fn wave(shape: &[i64], step: f64, kind: Kind) -> Tensor {
        (Tensor::arange(shape.iter().product::<i64>(), (Kind::Double, Device::Cpu)) * step).sin().view(shape).to_kind(kind)
    }

    /// The answer, running statistics, and first and second derivatives after x, w, gamma, beta and the residual.
    fn derivatives(ours: bool, residual: bool, relu: bool, [b, h, w, c_in, c_out]: [i64; 5], kind: Kind) -> Vec<Tensor> {
        let x = (wave(&[b, h, w, c_in], 0.37, kind) + wave(&[b, h, w, c_in], 0.011, kind)).permute([0, 3, 1, 2]).set_requires_grad(true);
        let weight = wave(&[c_out, c_in, 3, 3], 0.7, kind).set_requires_grad(true);
        let gamma = (wave(&[c_out], 1.3, kind) + 1.5).set_requires_grad(true);
        let beta = wave(&[c_out], 0.9, kind).set_requires_grad(true);
        let other = wave(&[b, c_out, h, w], 0.29, kind).set_requires_grad(true);
        let (mean, var) = (wave(&[c_out], 0.5, kind), wave(&[c_out], 0.6, kind).square());
        let y = if ours {
            assert!(serves(&x, ConvShape::new(c_in, c_out, 3, 1)) || instructions().is_none());
            let state = State { weight: &gamma, bias: &beta, mean: &mean, var: &var };
            train(&x, &weight, state, residual.then_some(&other), relu, 0.1, 1e-5)
        } else {
            let z = x.conv2d(&weight, None::<&Tensor>, [1, 1], [1, 1], [1, 1], 1);
            let y = z.batch_norm(Some(&gamma), Some(&beta), Some(&mean), Some(&var), true, 0.1, 1e-5, false);
            let y = if residual { y + &other } else { y };
            if relu { y.relu() } else { y }
        };
        let mut after = vec![&x, &weight, &gamma, &beta];
        if residual {
            after.push(&other);
        }
        let loss = (wave(&[b, c_out, h, w], 0.61, kind) * &y * &y).sum(None);
        let plain = Tensor::run_backward(&[&loss], &after, true, false); // the way of training: not to be differentiated again
        let first = Tensor::run_backward(&[&loss], &after, true, true);
        let again = first.iter().enumerate().map(|(i, d)| (d * wave(&d.size(), 0.17 + 0.1 * i as f64, kind) * d).sum(None));
        let again = again.reduce(|a, b| a + b).unwrap();
        let second = Tensor::run_backward(&[&again], &after, false, false);
        [y, mean, var].into_iter().chain(plain).chain(first).chain(second).collect()
    }

    #[test]
    fn answers_and_two_derivatives_are_libtorchs() {
        if instructions().is_none() {
            return; // no code for this machine; `lanes` is tested for it
        }
        for size in [[4, 9, 7, 16, 16], [9, 8, 8, 32, 48], [40, 16, 16, 16, 32]] {
            for (residual, relu) in [(false, false), (false, true), (true, true)] {
                let got = derivatives(true, residual, relu, size, Kind::Float);
                let want = derivatives(false, residual, relu, size, Kind::Double); // the truth in f64
                assert_eq!(got.len(), want.len());
                for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                    let error = ((got.to_kind(Kind::Double) - want).abs().max() / want.abs().max()).double_value(&[]);
                    assert!(error < 2e-5, "{size:?}, residual {residual}, relu {relu}, tensor {i}: {error}");
                }
            }
        }
    }
}
