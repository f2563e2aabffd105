//! A convolution of a frozen network with its BatchNorm folded in, and what comes after it, in one pass over memory: by `winograd` where it
//! serves, else by `direct`. libtorch's convolutions serve the rest. Here tensors become slices; the kernels know none.

mod direct;
mod winograd;

use tch::{Device, Kind, Tensor};

use super::lanes::{Instructions, instructions};
use crate::nets::layers::ConvShape;
use direct::Direct;
use winograd::Winograd;

/// What comes after the convolution and its bias.
#[derive(Clone, Copy)]
pub enum Then<'a> {
    Nothing,
    Relu,
    /// The sum with a map of the same shape, then a ReLU.
    AddRelu(&'a Tensor),
}

impl<'a> Then<'a> {
    /// The map that is added, and whether there is a ReLU.
    pub fn parts(self) -> (Option<&'a Tensor>, bool) {
        match self {
            Then::Nothing => (None, false),
            Then::Relu => (None, true),
            Then::AddRelu(shortcut) => (Some(shortcut), true),
        }
    }

    /// What comes after `ys`, in place: neither BatchNorm nor a convolution needs its own output for its derivative.
    pub fn after(self, mut ys: Tensor) -> Tensor {
        match self {
            Then::Nothing => ys,
            Then::Relu => ys.relu_(),
            Then::AddRelu(shortcut) => ys.g_add_(shortcut).relu_(),
        }
    }
}

/// The geometry of a convolution without groups and dilation.
#[derive(Debug, Clone, Copy)]
pub struct Window {
    pub c_in: usize,
    pub c_out: usize,
    pub kernel: usize,
    pub stride: usize,
    pub padding: usize,
}

impl Window {
    /// None where there are groups or dilation.
    fn of(shape: ConvShape) -> Option<Window> {
        let [c_in, c_out, kernel, stride, padding] =
            [shape.c_in, shape.c_out, shape.kernel, shape.stride, shape.padding].map(|n| n as usize);
        (shape.groups == 1 && shape.dilation == 1).then_some(Window { c_in, c_out, kernel, stride, padding })
    }

    /// The sides of the output of a map of these sides.
    pub fn out(self, side: [usize; 2]) -> [usize; 2] {
        let inside = |side: usize| (side + 2 * self.padding).checked_sub(self.kernel).filter(|_| side > 0);
        side.map(|side| inside(side).unwrap_or_else(|| panic!("a map of side {side} for {self:?}")) / self.stride + 1)
    }
}

/// What a kernel reads and writes: maps in the order [image, y, x, channel].
pub struct Maps<'a> {
    pub images: usize,
    /// Height and width of the input.
    pub side: [usize; 2],
    pub input: &'a [f32],
    /// What is added before the ReLU.
    pub other: Option<&'a [f32]>,
    pub relu: bool,
    pub output: &'a mut [f32],
}

impl Maps<'_> {
    /// The kernels read and write by pointers without looking: every size is checked here.
    pub fn check(&self, window: Window) {
        let pixels = |[h, w]: [usize; 2]| self.images * h * w;
        let output = pixels(window.out(self.side)) * window.c_out;
        let lengths = (self.input.len(), self.output.len(), self.other.map_or(output, <[f32]>::len));
        assert_eq!(lengths, (pixels(self.side) * window.c_in, output, output), "{} images of {:?} for {window:?}", self.images, self.side);
    }
}

/// A kernel with its weights laid out.
enum Kernel {
    Winograd(Winograd),
    Direct(Direct),
}

/// A convolution with a bias, ready to be applied to any number of maps.
pub struct Fused {
    window: Window,
    /// What `apply` runs with; this machine has them, because only `new` and tests choose, from `lanes::available`.
    with: Instructions,
    kernel: Kernel,
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

impl Fused {
    /// None where libtorch serves better, or this machine or tensor is not what the code is for.
    pub fn new(xs: &Tensor, weight: &Tensor, bias: &Tensor, shape: ConvShape) -> Option<Fused> {
        Fused::with(instructions()?, xs, weight, bias, shape)
    }

    fn with(with: Instructions, xs: &Tensor, weight: &Tensor, bias: &Tensor, shape: ConvShape) -> Option<Fused> {
        let window = Window::of(shape).filter(|_| is_ours(xs))?;
        let (weight, bias) = (weight.contiguous(), bias.contiguous());
        // SAFETY: both are contiguous, of the kind and on the device of their input, and live until the end of this function.
        let (weight, bias) = unsafe { (floats(&weight), floats(&bias)) };
        let kernel = if Winograd::serves(window) {
            Kernel::Winograd(Winograd::new(window, weight, bias, with))
        } else if Direct::serves(window) {
            Kernel::Direct(Direct::new(window, weight, bias, with))
        } else {
            return None;
        };
        Some(Fused { window, with, kernel })
    }

    /// The convolution of a map [B, c_in, h, w], its bias and what comes after, in one pass.
    pub fn apply(&self, xs: &Tensor, then: Then) -> Tensor {
        let (b, c, h, w) = xs.size4().expect("maps have four dimensions");
        assert!(c as usize == self.window.c_in && is_ours(xs), "{xs:?} for {:?}", self.window);
        let side = [h as usize, w as usize];
        let [h, w] = self.window.out(side).map(|side| side as i64);
        let ys = Tensor::empty([b, h, w, self.window.c_out as i64], (Kind::Float, xs.device()));
        let xs = channels_last(xs);
        let other = match then {
            Then::AddRelu(other) => Some(channels_last(other)),
            Then::Nothing | Then::Relu => None,
        };
        assert!(other.as_ref().is_none_or(|other| is_ours(other) && other.size() == ys.size()), "the sum of {other:?} and {ys:?}");
        // SAFETY: all three are contiguous f32 on the CPU and live to the end; `ys` was made here and nobody else has it. The machine has the
        // instructions.
        unsafe {
            let maps = Maps {
                images: b as usize,
                side,
                input: floats(&xs),
                other: other.as_ref().map(|other| floats(other)),
                relu: !matches!(then, Then::Nothing),
                output: std::slice::from_raw_parts_mut(ys.data_ptr().cast::<f32>(), ys.numel()),
            };
            maps.check(self.window);
            match &self.kernel {
                Kernel::Winograd(winograd) => winograd.run(maps, self.with),
                Kernel::Direct(direct) => direct.run(maps, self.with),
            }
        }
        ys.permute([0, 3, 1, 2])
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::super::lanes::available;
    use super::*;

    /// Numbers that repeat nowhere.
    pub fn wave(count: usize, step: f64) -> Vec<f32> {
        (0..count).map(|i| (i as f64 * step).sin() as f32).collect()
    }

    /// What is computed: a convolution with a bias, in f64, number by number.
    pub fn plain(window: Window, weight: &[f32], bias: &[f32], input: &[f32], images: usize, [h, w]: [usize; 2]) -> Vec<f64> {
        let Window { c_in, c_out, kernel, stride, padding } = window;
        let [rows, across] = window.out([h, w]);
        let mut output = vec![];
        for (image, y, x) in (0..images * rows * across).map(|i| (i / (rows * across), i / across % rows, i % across)) {
            for co in 0..c_out {
                let mut sum = f64::from(bias[co]);
                for (ky, kx) in (0..kernel * kernel).map(|i| (i / kernel, i % kernel)) {
                    let (y, x) = ((y * stride + ky).wrapping_sub(padding), (x * stride + kx).wrapping_sub(padding));
                    if y < h && x < w {
                        let pixel = &input[((image * h + y) * w + x) * c_in..][..c_in];
                        let products = pixel.iter().enumerate();
                        sum += products
                            .map(|(ci, v)| f64::from(*v) * f64::from(weight[((co * c_in + ci) * kernel + ky) * kernel + kx]))
                            .sum::<f64>();
                    }
                }
                output.push(sum);
            }
        }
        output
    }

    /// No number is farther away than so much of the largest.
    pub fn close(got: &[f32], want: &[f64], within: f64, what: &str) {
        assert_eq!(got.len(), want.len(), "{what}");
        let largest = want.iter().fold(0f64, |most, want| most.max(want.abs()));
        let farthest =
            got.iter().zip(want).map(|(got, want)| (f64::from(*got) - want).abs()).fold(0.0, |a: f64, b| if b <= a { a } else { b });
        assert!(farthest / largest <= within, "{what}: {}", farthest / largest);
    }

    fn tensor(size: &[i64], step: f64) -> Tensor {
        Tensor::from_slice(&wave(size.iter().product::<i64>() as usize, step)).view(size)
    }

    #[test]
    fn equals_f64_for_every_geometry_it_takes() {
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
        for (c_in, c_out, kernel, stride) in [
            (3, 16, 3, 1),
            (16, 16, 3, 1),
            (16, 32, 3, 1),
            (16, 32, 3, 2),
            (16, 32, 1, 2),
            (33, 48, 3, 1),
            (48, 48, 3, 1),
            (64, 64, 3, 1),
            (64, 64, 3, 2),
            (64, 256, 1, 1),
            (160, 128, 3, 1),
            (5, 16, 7, 2),
        ] {
            let shape = ConvShape::new(c_in, c_out, kernel, stride);
            let (weight, bias) = (tensor(&[c_out, c_in, kernel, kernel], 0.7), tensor(&[c_out], 1.1));
            for (b, h, w) in [(1, 32, 32), (3, 9, 7), (2, 1, 5)] {
                let xs = tensor(&[b, c_in, h, w], 0.013);
                let f64s = |t: &Tensor| t.to_kind(Kind::Double);
                let plain = f64s(&xs).conv2d(&f64s(&weight), Some(&f64s(&bias)), [stride, stride], [kernel / 2, kernel / 2], [1, 1], 1);
                let other = tensor(&plain.size(), 0.31);
                for &with in &here {
                    let fused = Fused::with(with, &xs, &weight, &bias, shape).expect("one of the geometries it takes");
                    for (got, want) in [
                        (fused.apply(&xs, Then::Nothing), plain.shallow_clone()),
                        (fused.apply(&xs, Then::Relu), plain.relu()),
                        (fused.apply(&xs, Then::AddRelu(&other)), (&plain + &other).relu()),
                    ] {
                        let numbers = |t: &Tensor| t.contiguous().view(-1);
                        let (got, want) = (Vec::try_from(numbers(&got)).unwrap(), Vec::try_from(numbers(&want)).unwrap());
                        close(&got, &want, 3e-6, &format!("{shape:?} on {b} x {h} x {w} with {with:?}"));
                    }
                }
            }
        }
    }

    #[test]
    fn a_map_smaller_than_the_window_is_named_before_anything_is_allocated() {
        let shape = ConvShape { padding: 0, ..ConvShape::new(16, 16, 3, 1) };
        let zeros = |size: &[i64]| Tensor::zeros(size, (Kind::Float, Device::Cpu));
        let Some(fused) = Fused::new(&zeros(&[1, 16, 8, 8]), &zeros(&[16, 16, 3, 3]), &zeros(&[16]), shape) else { return };
        assert_eq!(fused.apply(&zeros(&[1, 16, 3, 4]), Then::Relu).size(), [1, 16, 1, 2]);
        let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| fused.apply(&zeros(&[1, 16, 2, 8]), Then::Relu)));
        let said = refused.unwrap_err().downcast_ref::<String>().cloned().unwrap_or_default();
        assert!(said.starts_with("a map of side 2 for Window"), "{said}");
    }

    /// Review C3: a network of NaN weights measured "at chance" because the ReLU made zeros of them.
    #[test]
    fn a_nan_goes_on_through_the_relu() {
        let _guard = tch::no_grad_guard();
        for (c_in, kernel) in [(1, 1), (16, 3)] {
            let shape = ConvShape::new(c_in, 16, kernel, 1);
            let weight = Tensor::ones([16, c_in, kernel, kernel], (Kind::Float, Device::Cpu));
            let bias: Vec<f32> = (0..16).map(|c| [f32::NAN, -1.0, 1.0, f32::INFINITY][c % 4]).collect();
            let xs = Tensor::zeros([1, c_in, 2, 3], (Kind::Float, Device::Cpu));
            let zeros = Tensor::zeros([1, 16, 2, 3], (Kind::Float, Device::Cpu));
            for with in available() {
                let fused = Fused::with(with, &xs, &weight, &Tensor::from_slice(&bias), shape).expect("one of the geometries it takes");
                for ys in [fused.apply(&xs, Then::Relu), fused.apply(&xs, Then::AddRelu(&zeros))] {
                    let got: Vec<f32> = Vec::try_from(ys.permute([0, 2, 3, 1]).contiguous().view(-1)).unwrap();
                    for (i, value) in got.into_iter().enumerate() {
                        let want = [f32::NAN, 0.0, 1.0, f32::INFINITY][i % 4];
                        assert!(value == want || value.is_nan() && want.is_nan(), "channel {} with {with:?}: {value}", i % 16);
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
            Fused::new(&zeros(&[1, shape.c_in, 8, 8]), &weight, &zeros(&[shape.c_out]), shape).is_some()
        };
        assert_eq!(made(ConvShape::new(16, 16, 3, 1), Kind::Float), instructions().is_some());
        assert!(!made(ConvShape::new(16, 16, 3, 1), Kind::Double));
        assert!(!made(ConvShape::new(16, 24, 3, 1), Kind::Float));
        assert!(!made(ConvShape::depthwise(16, 3, 1), Kind::Float));
        assert!(!made(ConvShape { dilation: 2, ..ConvShape::new(16, 16, 3, 1) }, Kind::Float));
        assert!(!made(ConvShape::new(256, 256, 3, 2), Kind::Float));
    }
}
