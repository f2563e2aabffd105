//! A direct convolution for the small maps of frozen CIFAR networks: bias, residual sum and ReLU in the same pass, weights laid out for
//! the registers, one image after another so that everything stays in the core's own cache. libtorch's convolutions serve the rest.
//!
//! What is unsafe here: instructions that a machine may lack (`Direct::with` is chosen from what it has), and sums over raw pointers, because
//! bounds checks in the innermost loop would cost more than its product. `apply` checks the shapes once, for all of them.

use std::cell::RefCell;

use tch::{Device, Kind, Tensor};

#[cfg(target_arch = "x86_64")]
use super::lanes::{Avx2, Avx512};
use super::lanes::{Instructions, LANES, Lanes, instructions};
use crate::nets::layers::ConvShape;

/// What comes after the convolution and its bias.
#[derive(Clone, Copy)]
pub enum Then<'a> {
    Nothing,
    Relu,
    /// The sum with a map of the same shape, then a ReLU.
    AddRelu(&'a Tensor),
}

impl Then<'_> {
    /// What comes after `ys`, in place: neither BatchNorm nor a convolution needs its own output for its derivative.
    pub fn after(self, mut ys: Tensor) -> Tensor {
        match self {
            Then::Nothing => ys,
            Then::Relu => ys.relu_(),
            Then::AddRelu(shortcut) => ys.g_add_(shortcut).relu_(),
        }
    }
}

/// Bytes of weights that stay in the first-level cache while they pass over a map.
const WEIGHTS_AT_ONCE: usize = 18 << 10;
/// Beyond this, weights leave the second-level cache and libtorch's blocking wins.
const MOST_WEIGHTS: usize = 256 << 10;

/// A convolution with its bias, its weights laid out for the registers.
pub struct Direct {
    shape: ConvShape,
    /// What `apply` runs with; this machine has them, because only `new` and tests choose, from `lanes::available`.
    with: Instructions,
    /// [c_out / LANES][blocks of input channels][ky][kx][input channel][LANES]
    weights: Vec<f32>,
    bias: Vec<f32>,
}

thread_local! {
    /// One image with zeros around it.
    static PADDED: RefCell<Vec<f32>> = const { RefCell::new(vec![]) };
}

fn is_ours(map: &Tensor) -> bool {
    map.device() == Device::Cpu && map.kind() == Kind::Float // on the CPU only
}

/// A map [B, c, h, w] in the order [B, h, w, c].
fn channels_last(map: &Tensor) -> Tensor {
    map.permute([0, 2, 3, 1]).contiguous()
}

/// # Safety
/// The tensor is contiguous f32 on the CPU and outlives the slice, and nobody writes to it meanwhile.
unsafe fn floats<'a>(tensor: &Tensor) -> &'a [f32] {
    unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast(), tensor.numel()) }
}

impl Direct {
    /// None where libtorch serves better, or this machine or tensor is not what the code is for.
    pub fn new(xs: &Tensor, weight: &Tensor, bias: &Tensor, shape: ConvShape) -> Option<Direct> {
        let [c_in, c_out, k] = [shape.c_in, shape.c_out, shape.kernel].map(|n| n as usize);
        let small = c_in * c_out * k * k * size_of::<f32>() <= MOST_WEIGHTS;
        let plain = shape.groups == 1 && shape.dilation == 1 && c_out.is_multiple_of(LANES);
        let with = instructions()?;
        if !(small && plain && is_ours(xs)) {
            return None;
        }
        let (weight, bias) = (weight.contiguous(), bias.contiguous());
        let mut weights = Vec::with_capacity(weight.numel());
        // SAFETY: both are contiguous, on the CPU as their input, and live until the end of this function.
        let (weight, bias) = unsafe { (floats(&weight), floats(&bias)) };
        for lanes in (0..c_out).step_by(LANES) {
            for block in blocks(c_in, k) {
                for at in 0..k * k {
                    for ci in block.clone() {
                        weights.extend((lanes..lanes + LANES).map(|co| weight[(co * c_in + ci) * k * k + at]));
                    }
                }
            }
        }
        Some(Direct { shape, with, weights, bias: bias.to_vec() })
    }

    /// The convolution of a map [B, c_in, h, w], its bias and what comes after, in one pass.
    pub fn apply(&self, xs: &Tensor, then: Then) -> Tensor {
        let (b, c, h, w) = xs.size4().expect("maps have four dimensions");
        assert!(c == self.shape.c_in && is_ours(xs), "{xs:?} for {:?}", self.shape);
        let ConvShape { kernel, stride, padding, .. } = self.shape;
        let out = |side: i64| (side + 2 * padding - kernel) / stride + 1;
        let ys = Tensor::empty([b, out(h), out(w), self.shape.c_out], (Kind::Float, xs.device()));
        let xs = channels_last(xs);
        let other = match then {
            Then::AddRelu(other) => Some(channels_last(other)),
            Then::Nothing | Then::Relu => None,
        };
        assert!(other.as_ref().is_none_or(|other| is_ours(other) && other.size() == ys.size()), "the sum of {other:?} and {ys:?}");
        let sides = |h: i64, w: i64| [h as usize, w as usize];
        let map = Map { side: sides(h, w), out: sides(out(h), out(w)), relu: !matches!(then, Then::Nothing) };
        // SAFETY: all three are contiguous f32 on the CPU and live to the end; `ys` was made here and nobody else has it.
        let (input, other) = unsafe { (floats(&xs), other.as_ref().map(|other| floats(other))) };
        let output = unsafe { std::slice::from_raw_parts_mut(ys.data_ptr().cast::<f32>(), ys.numel()) };
        let (image, answer) = (input.len() / b.max(1) as usize, output.len() / b.max(1) as usize);
        PADDED.with_borrow_mut(|padded| {
            for (i, out) in output.chunks_exact_mut(answer.max(1)).enumerate() {
                let padded = self.pad(&input[i * image..(i + 1) * image], &map, padded);
                self.image(padded, &map, other.map(|other| &other[i * answer..(i + 1) * answer]), out);
            }
        });
        ys.permute([0, 3, 1, 2])
    }

    /// The image with zeros around it, or as it is where none are wanted.
    fn pad<'a>(&self, image: &'a [f32], map: &Map, padded: &'a mut Vec<f32>) -> &'a [f32] {
        let p = self.shape.padding as usize;
        if p == 0 {
            return image;
        }
        let (c, [h, w]) = (self.shape.c_in as usize, map.side);
        let row = (w + 2 * p) * c;
        padded.clear();
        padded.resize((h + 2 * p) * row, 0.0);
        for (y, line) in image.chunks_exact(w * c).enumerate() {
            let from = (y + p) * row + p * c;
            padded[from..from + w * c].copy_from_slice(line);
        }
        padded
    }

    fn image(&self, input: &[f32], map: &Map, other: Option<&[f32]>, out: &mut [f32]) {
        match self.with {
            // SAFETY: the machine has the instructions, because `lanes::available` looked; `apply` gives slices of the sizes that `map` says.
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 => unsafe { self.image_avx512(input, map, other, out) },
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 => unsafe { self.image_avx2(input, map, other, out) },
        }
    }

    /// # Safety
    /// As `whole`, on a machine with AVX-512.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    unsafe fn image_avx512(&self, input: &[f32], map: &Map, other: Option<&[f32]>, out: &mut [f32]) {
        unsafe { self.whole::<Avx512, 14>(input, map, other, out) }
    }

    /// # Safety
    /// As `whole`, on a machine with AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn image_avx2(&self, input: &[f32], map: &Map, other: Option<&[f32]>, out: &mut [f32]) {
        unsafe { self.whole::<Avx2, 6>(input, map, other, out) }
    }

    /// One image, `TILE` positions at a time: as many sums as the registers hold.
    ///
    /// # Safety
    /// The caller has the instructions of `L`. `input` is the image with its padding, `out` (and `other`, where there is one) the whole
    /// answer, each as large as `map` and the shape say: `tile` reads and writes by pointers, without looking.
    #[inline(always)]
    unsafe fn whole<L: Lanes, const TILE: usize>(&self, input: &[f32], map: &Map, other: Option<&[f32]>, out: &mut [f32]) {
        let [c_in, c_out, k, stride, p] =
            [self.shape.c_in, self.shape.c_out, self.shape.kernel, self.shape.stride, self.shape.padding].map(|n| n as usize);
        let row = (map.side[1] + 2 * p) * c_in;
        let positions = map.out[0] * map.out[1];
        let mut weights = &self.weights[..];
        for lanes in (0..c_out).step_by(LANES) {
            for block in blocks(c_in, k) {
                let here = &weights[..k * k * block.len() * LANES];
                weights = &weights[here.len()..];
                let pass = Pass {
                    weights: here,
                    channels: block.len(),
                    first: (block.start == 0).then(|| &self.bias[lanes..lanes + LANES]),
                    last: block.end == c_in,
                    lanes,
                    c_in,
                    c_out,
                    k,
                    row,
                };
                let start = |at: usize| (at / map.out[1] * row + at % map.out[1] * c_in) * stride + block.start;
                let mut at = 0;
                macro_rules! tiles {
                    ($n:expr) => {
                        while positions - at >= $n {
                            let starts: [usize; $n] = std::array::from_fn(|i| start(at + i));
                            unsafe { pass.tile::<L, { $n }>(input, starts, at, map.relu, other, out) };
                            at += $n;
                        }
                    };
                }
                tiles!(TILE);
                tiles!(4);
                tiles!(1);
            }
        }
    }
}

struct Map {
    side: [usize; 2],
    out: [usize; 2],
    relu: bool,
}

/// One block of input channels and `LANES` output channels.
struct Pass<'a> {
    weights: &'a [f32],
    channels: usize,
    /// The bias, in the first block; later ones go on from what is there.
    first: Option<&'a [f32]>,
    last: bool,
    lanes: usize,
    c_in: usize,
    c_out: usize,
    k: usize,
    row: usize,
}

impl Pass<'_> {
    /// # Safety
    /// For every start and every offset of the kernel, `channels` numbers lie in `input`; the positions from `at` on lie in `out`.
    #[inline(always)]
    unsafe fn tile<L: Lanes, const N: usize>(
        &self,
        input: &[f32],
        starts: [usize; N],
        at: usize,
        relu: bool,
        other: Option<&[f32]>,
        out: &mut [f32],
    ) {
        let place = at * self.c_out + self.lanes;
        unsafe {
            let out = out.as_mut_ptr().add(place);
            let mut sums: [L; N] = match self.first {
                Some(bias) => [L::load(bias.as_ptr()); N],
                None => std::array::from_fn(|i| L::load(out.add(i * self.c_out))),
            };
            let starts = starts.map(|start| input.as_ptr().add(start));
            let mut weights = self.weights.as_ptr();
            for ky in 0..self.k {
                for kx in 0..self.k {
                    let offset = ky * self.row + kx * self.c_in;
                    for ci in offset..offset + self.channels {
                        let weight = L::load(weights);
                        weights = weights.add(LANES);
                        for (sum, start) in sums.iter_mut().zip(&starts) {
                            *sum = sum.add_product(*start.add(ci), weight);
                        }
                    }
                }
            }
            for (i, mut sum) in sums.into_iter().enumerate() {
                if self.last {
                    if let Some(other) = other {
                        sum = sum.add(L::load(other.as_ptr().add(place + i * self.c_out)));
                    }
                    if relu {
                        sum = sum.relu();
                    }
                }
                sum.store(out.add(i * self.c_out));
            }
        }
    }
}

/// The input channels in pieces whose weights fit.
fn blocks(c_in: usize, k: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    let most = (WEIGHTS_AT_ONCE / (k * k * LANES * size_of::<f32>())).max(1);
    let pieces = c_in.div_ceil(most);
    let size = c_in.div_ceil(pieces);
    (0..c_in).step_by(size).map(move |from| from..(from + size).min(c_in))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::super::lanes::available;
    use super::*;

    #[test]
    fn equals_libtorch_for_every_geometry_it_takes() {
        let _guard = tch::no_grad_guard();
        // Every path of the code that this machine can run, not only the one it would choose; CI counts the lines of those it cannot.
        let here: Vec<Instructions> = available().collect();
        // Straight to stderr: what print macros write is kept from sight when a test passes.
        let mut stderr = std::io::stderr();
        for missing in Instructions::ALL.iter().filter(|with| !here.contains(with)) {
            writeln!(stderr, "skipped: the direct convolution with {missing:?}, which this CPU does not have").unwrap();
        }
        if Instructions::ALL.is_empty() {
            writeln!(stderr, "skipped: the direct convolution, which has no code for this kind of CPU").unwrap();
        }
        let wave =
            |shape: &[i64], step: f64| (Tensor::arange(shape.iter().product::<i64>(), (Kind::Float, Device::Cpu)) * step).sin().view(shape);
        for (c_in, c_out, kernel, stride) in [
            (3, 16, 3, 1),
            (16, 16, 3, 1),
            (16, 32, 3, 2),
            (16, 32, 1, 2),
            (33, 48, 3, 1),
            (64, 64, 3, 1),
            (64, 64, 3, 2),
            (64, 256, 1, 1),
            (5, 16, 7, 2),
        ] {
            let shape = ConvShape::new(c_in, c_out, kernel, stride);
            let (weight, bias) = (wave(&[c_out, c_in, kernel, kernel], 0.7), wave(&[c_out], 1.1));
            for (b, h, w) in [(1, 32, 32), (3, 9, 7), (2, 1, 5)] {
                let xs = wave(&[b, c_in, h, w], 0.013);
                let plain = xs.conv2d(&weight, Some(&bias), [stride, stride], [kernel / 2, kernel / 2], [1, 1], 1);
                let other = wave(&plain.size(), 0.31);
                for &with in &here {
                    let made = Direct::new(&xs, &weight, &bias, shape).expect("one of the geometries it takes");
                    let direct = Direct { with, ..made };
                    for (got, want) in [
                        (direct.apply(&xs, Then::Nothing), plain.shallow_clone()),
                        (direct.apply(&xs, Then::Relu), plain.relu()),
                        (direct.apply(&xs, Then::AddRelu(&other)), (&plain + &other).relu()),
                    ] {
                        assert_eq!(got.size(), want.size());
                        let difference = ((got - &want).abs().max() / want.abs().max()).double_value(&[]);
                        assert!(difference < 1e-5, "{shape:?} on {b} x {h} x {w} with {with:?}: {difference}");
                    }
                }
            }
        }
    }

    #[test]
    fn leaves_to_libtorch_what_is_not_for_it() {
        let made = |shape: ConvShape, kind: Kind| {
            let zeros = |size: &[i64]| Tensor::zeros(size, (kind, Device::Cpu));
            let weight = zeros(&[shape.c_out, shape.c_in / shape.groups, shape.kernel, shape.kernel]);
            Direct::new(&zeros(&[1, shape.c_in, 8, 8]), &weight, &zeros(&[shape.c_out]), shape).is_some()
        };
        assert_eq!(made(ConvShape::new(16, 16, 3, 1), Kind::Float), instructions().is_some());
        assert!(!made(ConvShape::new(16, 16, 3, 1), Kind::Double));
        assert!(!made(ConvShape::new(16, 24, 3, 1), Kind::Float));
        assert!(!made(ConvShape::depthwise(16, 3, 1), Kind::Float));
        assert!(!made(ConvShape { dilation: 2, ..ConvShape::new(16, 16, 3, 1) }, Kind::Float));
        assert!(!made(ConvShape::new(256, 256, 3, 1), Kind::Float));
    }
}
