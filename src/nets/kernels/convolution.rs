//! The convolution that training runs on the CPU: libtorch's, with derivatives of our own (convolution.cpp) and a kernel for the
//! gradient of a 3 x 3 weight, which libtorch computes at half the speed of the other two.

use std::ffi::c_char;
use std::ops::Range;

use tch::Tensor;
use torch_sys::C_tensor;

#[cfg(target_arch = "x86_64")]
use super::lanes::{Avx2, Avx512};
use super::lanes::{Instructions, LANES, Lanes, instructions};
use super::parallel::{Shared, in_parallel, parts_of};
use crate::nets::layers::ConvShape;
use crate::system::cpp;

unsafe extern "C" {
    fn mcl_convolution(
        x: *const C_tensor,
        w: *const C_tensor,
        stride: i64,
        padding: i64,
        dilation: i64,
        groups: i64,
        error: *mut *mut c_char,
    ) -> *mut C_tensor;
}

/// conv2d of `xs` and `weight` without bias. Can be differentiated any number of times.
pub fn convolution(xs: &Tensor, weight: &Tensor, shape: ConvShape) -> Tensor {
    // SAFETY: both tensors live through the call, and the answer is ours.
    unsafe {
        cpp::tensor(
            || format!("convolution of {:?} with {:?}", xs.size(), weight.size()),
            |error| mcl_convolution(xs.as_ptr(), weight.as_ptr(), shape.stride, shape.padding, shape.dilation, shape.groups, error),
        )
    }
}

/// What the kernel is told of the maps.
#[derive(Clone, Copy)]
struct Maps {
    w: usize,
    c_in: usize,
    h_out: usize,
    w_out: usize,
    c_out: usize,
    stride: usize,
}

const K: usize = 3;
/// Bytes of the input that stay in the first-level cache while every tile of the weight passes over them.
const INPUT_AT_ONCE: usize = 20 << 10;

/// Input times output channels: every image passes over the whole gradient (nine times as many numbers), which must stay in the core's own
/// caches. Beyond, libtorch's matrix product is the faster one: a step of ResNet-18 at 64 pixels took 1.09 s instead of 1.94 s.
const CHANNELS_AT_MOST: usize = 8192;

/// dw [3][3][c_in][c_out] = sum over images and places of x (at the window's offset) times g; x and g in channels_last, padding 1.
///
/// # Safety
/// `x`, `g`, `dw` point to as many numbers as `sizes` says: b, h, w, c_in, h_out, w_out, c_out, stride.
#[unsafe(no_mangle)]
unsafe extern "C" fn mcl_weight_gradient(x: *const f32, g: *const f32, dw: *mut f32, sizes: *const i64) -> bool {
    // SAFETY: as promised by the caller.
    let [b, h, w, c_in, h_out, w_out, c_out, stride] = unsafe { *sizes.cast::<[i64; 8]>() }.map(|n| n as usize);
    let maps = Maps { w, c_in, h_out, w_out, c_out, stride };
    let Some(with) = instructions() else { return false };
    if !c_out.is_multiple_of(LANES) || !c_in.is_multiple_of(rows_of(with)) || c_in * c_out > CHANNELS_AT_MOST {
        return false;
    }
    let (x, g, dw) = unsafe {
        (
            std::slice::from_raw_parts(x, b * h * w * c_in),
            std::slice::from_raw_parts(g, b * h_out * w_out * c_out),
            std::slice::from_raw_parts_mut(dw, K * K * c_in * c_out),
        )
    };
    let (copies, groups) = shares(parts_of(x.len() + g.len()).min(b.max(1)), size_of_val(dw), c_out / LANES);
    sum_images(x, g, dw, (b, h), maps, with, (copies, groups));
    true
}

/// Bytes of weight gradients held at once, one for every part of the images: with many threads and many channels fewer parts than threads.
const COPIES_AT_ONCE: usize = 64 << 20;

/// How `parts` threads share the work on a weight of so many bytes and so many groups of `LANES` output channels: into how many parts the
/// images are cut, each with a gradient of its own, and into how many the output channels, which need none.
fn shares(parts: usize, bytes: usize, lanes: usize) -> (usize, usize) {
    let copies = parts.min(COPIES_AT_ONCE / bytes.max(1)).max(1);
    (copies, (parts / copies).clamp(1, lanes.max(1)))
}

/// dw = the sum over all images, in `copies` parts of the images times `groups` parts of the output channels. The sums of the parts are added
/// in order, so that one thread count gives one result.
fn sum_images(
    x: &[f32],
    g: &[f32],
    dw: &mut [f32],
    (b, h): (usize, usize),
    maps: Maps,
    with: Instructions,
    (copies, groups): (usize, usize),
) {
    let Maps { w, c_in, h_out, w_out, c_out, .. } = maps;
    let len = K * K * c_in * c_out;
    let mut sums = vec![0f32; copies * len];
    let shared = Shared(sums.as_mut_ptr());
    let blocks = c_out / LANES;
    in_parallel(copies * groups, &|part| {
        let (copy, group) = (part / groups, part % groups);
        let lanes = group * blocks / groups * LANES..(group + 1) * blocks / groups * LANES;
        let mut padded = vec![0f32; (h + 2) * (w + 2) * c_in];
        for image in copy * b / copies..(copy + 1) * b / copies {
            pad(&x[image * h * w * c_in..][..h * w * c_in], maps, &mut padded);
            let g = &g[image * h_out * w_out * c_out..][..h_out * w_out * c_out];
            // SAFETY: every part is run once, and nobody else has these channels of this copy, which outlives the call. The machine has the
            // instructions: `instructions` or `available` looked.
            unsafe {
                let own = shared.at(copy * len);
                match with {
                    #[cfg(target_arch = "x86_64")]
                    Instructions::Avx512 => image_avx512(&padded, g, maps, lanes.clone(), own),
                    #[cfg(target_arch = "x86_64")]
                    Instructions::Avx2 => image_avx2(&padded, g, maps, lanes.clone(), own),
                }
            }
        }
    });
    let (first, others) = sums.split_at(len);
    dw.copy_from_slice(first);
    for part in others.chunks_exact(len) {
        dw.iter_mut().zip(part).for_each(|(sum, more)| *sum += more);
    }
}

/// Input channels in one tile: with the three offsets of a window's row, as many sums as the registers hold.
const fn rows_of(with: Instructions) -> usize {
    match with {
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx512 => 8,
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx2 => 2,
    }
}

/// The image inside the zeros that `padded` has around it.
fn pad(image: &[f32], maps: Maps, padded: &mut [f32]) {
    let (line, row) = (maps.w * maps.c_in, (maps.w + 2) * maps.c_in);
    for (y, from) in image.chunks_exact(line).enumerate() {
        padded[(y + 1) * row + maps.c_in..][..line].copy_from_slice(from);
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn image_avx512(x: &[f32], g: &[f32], maps: Maps, lanes: Range<usize>, dw: *mut f32) {
    unsafe { image::<Avx512, { rows_of(Instructions::Avx512) }>(x, g, maps, lanes, dw) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn image_avx2(x: &[f32], g: &[f32], maps: Maps, lanes: Range<usize>, dw: *mut f32) {
    unsafe { image::<Avx2, { rows_of(Instructions::Avx2) }>(x, g, maps, lanes, dw) }
}

/// Adds one image to the output channels `lanes` of `dw`: a tile of the weight (one row of the window, `ROWS` input and `LANES` output channels) in registers at a
/// time, over some rows of the map.
///
/// # Safety
/// The caller has the instructions of `L`; the slices are as long as `maps` says, `x` with its padding; `dw` points to the whole gradient,
/// whose channels `lanes` nobody else touches.
#[inline(always)]
unsafe fn image<L: Lanes, const ROWS: usize>(x: &[f32], g: &[f32], maps: Maps, lanes: Range<usize>, dw: *mut f32) {
    let Maps { c_in, c_out, h_out, w_out, stride, .. } = maps;
    let row = (maps.w + 2) * c_in;
    let at_once = (INPUT_AT_ONCE / (row * stride * size_of::<f32>())).clamp(1, h_out);
    for top in (0..h_out).step_by(at_once) {
        let bottom = (top + at_once).min(h_out);
        for lanes in lanes.clone().step_by(LANES) {
            for ky in 0..K {
                for ci in (0..c_in).step_by(ROWS) {
                    let place = |kx: usize, i: usize| ((ky * K + kx) * c_in + ci + i) * c_out + lanes;
                    unsafe {
                        let to = dw;
                        let mut sums: [[L; ROWS]; K] = std::array::from_fn(|kx| std::array::from_fn(|i| L::load(to.add(place(kx, i)))));
                        for y in top..bottom {
                            let mut from = x.as_ptr().add((y * stride + ky) * row + ci);
                            let mut gradient = g.as_ptr().add(y * w_out * c_out + lanes);
                            for _ in 0..w_out {
                                let here = L::load(gradient);
                                for (kx, sums) in sums.iter_mut().enumerate() {
                                    for (i, sum) in sums.iter_mut().enumerate() {
                                        *sum = sum.add_product(*from.add(kx * c_in + i), here);
                                    }
                                }
                                from = from.add(stride * c_in);
                                gradient = gradient.add(c_out);
                            }
                        }
                        for (kx, sums) in sums.into_iter().enumerate() {
                            for (i, sum) in sums.into_iter().enumerate() {
                                sum.store(to.add(place(kx, i)));
                            }
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    fn wave(shape: &[i64], step: f64, kind: Kind) -> Tensor {
        (Tensor::arange(shape.iter().product::<i64>(), (Kind::Double, Device::Cpu)) * step).sin().view(shape).to_kind(kind)
    }

    /// y, dx, dw of L = sum(r * y^2), and the derivatives of |dx|^2 + |dw|^2 after x and w.
    fn derivatives(conv: impl Fn(&Tensor, &Tensor) -> Tensor, x: &Tensor, w: &Tensor) -> Vec<Tensor> {
        let (x, w) = (x.detach().set_requires_grad(true), w.detach().set_requires_grad(true));
        let y = conv(&x, &w);
        let loss = (wave(&y.size(), 0.61, y.kind()) * y.square()).sum(None);
        let first = Tensor::run_backward(&[loss], &[&x, &w], true, true);
        let again = first[0].square().sum(None) + first[1].square().sum(None);
        let second = Tensor::run_backward(&[again], &[&x, &w], false, false);
        [y].into_iter().chain(first).chain(second).collect()
    }

    #[test]
    fn first_and_second_derivatives_are_libtorchs() {
        for (c_in, c_out, kernel, stride, side) in [
            (16, 16, 3, 1, 9),
            (16, 16, 3, 1, 40), // enough for several threads
            (16, 32, 3, 2, 8),
            (16, 32, 3, 2, 7),
            (16, 32, 1, 2, 8),
            (3, 16, 3, 1, 8),
            (32, 24, 3, 1, 5),
            (64, 64, 3, 1, 8),
        ] {
            let shape = ConvShape::new(c_in, c_out, kernel, stride);
            let plain = |x: &Tensor, w: &Tensor| x.conv2d(w, None::<&Tensor>, [stride, stride], [kernel / 2, kernel / 2], [1, 1], 1);
            for (kind, tolerance) in [(Kind::Double, 1e-12), (Kind::Float, 2e-5)] {
                let x = wave(&[5, side, side, c_in], 0.013, kind).permute([0, 3, 1, 2]);
                let w = wave(&[c_out, c_in, kernel, kernel], 0.7, kind);
                for x in [x.shallow_clone(), x.contiguous()] {
                    let (got, want) = (derivatives(|x, w| convolution(x, w, shape), &x, &w), derivatives(plain, &x, &w));
                    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                        assert_eq!(got.size(), want.size());
                        let error = ((got - want).abs().max() / want.abs().max()).double_value(&[]);
                        assert!(error < tolerance, "{shape:?} {kind:?}, tensor {i}: {error}");
                    }
                }
            }
        }
    }

    #[test]
    fn many_threads_hold_few_copies_of_a_large_weight() {
        let large = 9 * 512 * 512 * size_of::<f32>();
        assert_eq!(shares(64, large, 32), (7, 9));
        assert!(7 * large <= COPIES_AT_ONCE);
        assert_eq!(shares(64, 9 * 64 * 64 * size_of::<f32>(), 4), (64, 1));
        assert_eq!(shares(2, large, 32), (2, 1));
        assert_eq!(shares(64, 1 << 30, 2), (1, 2));
    }

    /// However the work is shared, with every kind of instruction that the machine has.
    #[test]
    fn every_sharing_gives_the_gradient() {
        let (b, side, c) = (5, 6, 48);
        let (x, g) = (wave(&[b, side, side, c], 0.013, Kind::Float), wave(&[b, side, side, c], 0.31, Kind::Float));
        let floats = |t: &Tensor| Vec::<f32>::try_from(t.view(-1)).unwrap();
        let maps = Maps { w: 6, c_in: 48, h_out: 6, w_out: 6, c_out: 48, stride: 1 };
        let double = |t: &Tensor| t.to_kind(Kind::Double).permute([0, 3, 1, 2]);
        let w = Tensor::zeros([c, c, 3, 3], (Kind::Double, Device::Cpu)).set_requires_grad(true);
        let y = double(&x).conv2d(&w, None::<&Tensor>, [1, 1], [1, 1], [1, 1], 1);
        let want = Tensor::run_backward(&[(y * double(&g)).sum(None)], &[&w], false, false).remove(0);
        for with in super::super::lanes::available() {
            for shares in [(1, 1), (1, 2), (1, 3), (2, 1), (3, 2), (5, 3)] {
                let mut dw = vec![0f32; 9 * 48 * 48];
                sum_images(&floats(&x), &floats(&g), &mut dw, (5, 6), maps, with, shares);
                let got = Tensor::from_slice(&dw).view([3, 3, c, c]).permute([3, 2, 0, 1]).to_kind(Kind::Double);
                let error = ((got - &want).abs().max() / want.abs().max()).double_value(&[]);
                assert!(error < 1e-6, "{with:?} {shares:?}: {error}");
            }
        }
    }

    #[test]
    fn one_thread_count_gives_one_result() {
        let shape = ConvShape::new(32, 32, 3, 1);
        let (x, w) = (wave(&[33, 32, 12, 12], 0.017, Kind::Float), wave(&[32, 32, 3, 3], 0.7, Kind::Float));
        let once = || derivatives(|x, w| convolution(x, w, shape), &x, &w).swap_remove(2);
        let first = once();
        for _ in 0..5 {
            assert_eq!(once(), first);
        }
    }
}
