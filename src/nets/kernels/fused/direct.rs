//! Convolutions of frozen networks, window by window: those that `winograd` is not for (strides, 1 x 1, stems). Weights are laid out for the
//! registers, and one image after another is copied into blocks of channels, so that every address is a constant away from the last.
//!
//! What is unsafe here: instructions that a machine may lack, and sums over raw pointers, because bounds checks in the innermost loop would
//! cost more than its product. `Maps::check` looks at all sizes once.

use std::cell::RefCell;
use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::super::lanes::{Avx2, Avx512};
use super::super::lanes::{Instructions, LANES, Lanes, Line, lines, load};
use super::{Maps, Window};

/// Beyond this, weights leave the second-level cache and libtorch's blocking wins.
const MOST_WEIGHTS: usize = 256 << 10;
/// Input channels in a block: the few of a stem, or a line of the cache.
const FEW: usize = 4;

/// A convolution with its bias, its weights laid out for the registers.
pub struct Direct {
    window: Window,
    /// Registers of output channels that are computed together.
    wide: usize,
    /// [c_out / LANES / wide][block of input channels][ky][kx][input channel][wide]
    weights: Vec<Line>,
    bias: Vec<f32>,
}

thread_local! {
    /// One image, [block of channels][y][x][channel], with zeros around it.
    static BLOCKED: RefCell<Vec<Line>> = const { RefCell::new(vec![]) };
}

impl Direct {
    /// Is this a convolution that the code is for?
    pub fn serves(window: Window) -> bool {
        let small = window.c_in * window.c_out * window.kernel * window.kernel * size_of::<f32>() <= MOST_WEIGHTS;
        small
            && window.c_out.is_multiple_of(LANES)
            && (window.stride <= 2 || window.kernel == 1)
            && (window.kernel > 1 || window.padding == 0)
    }

    /// `weight` is [c_out][c_in][kernel][kernel].
    pub fn new(window: Window, weight: &[f32], bias: &[f32], with: Instructions) -> Direct {
        Direct::laid_out(window, weight, bias, with.wide(window.c_out))
    }

    fn laid_out(window: Window, weight: &[f32], bias: &[f32], wide: usize) -> Direct {
        let Window { c_in, c_out, kernel, .. } = window;
        let places = kernel * kernel;
        assert!(Direct::serves(window) && weight.len() == c_out * c_in * places && bias.len() == c_out, "{window:?}");
        let mut weights = lines(c_out / LANES * c_in * places);
        let mut lines = weights.iter_mut();
        for group in (0..c_out).step_by(wide * LANES) {
            for channels in blocks(c_in) {
                for place in 0..places {
                    for ci in channels.clone() {
                        for co in (group..group + wide * LANES).step_by(LANES) {
                            let line = lines.next().expect("as many lines as weights");
                            line.0 = std::array::from_fn(|lane| weight[((co + lane) * c_in + ci) * places + place]);
                        }
                    }
                }
            }
        }
        Direct { window, wide, weights, bias: bias.to_vec() }
    }

    /// The convolution of all images.
    ///
    /// # Safety
    /// The machine has the instructions of `with`, the same as `new` had, and `maps` were checked.
    pub unsafe fn run(&self, maps: Maps, with: Instructions) {
        BLOCKED.with_borrow_mut(|blocked| match with {
            // SAFETY: the caller's word.
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 => unsafe { self.avx512(maps, blocked) },
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 => unsafe { self.avx2(maps, blocked) },
        })
    }

    /// # Safety
    /// As `whole`, on a machine with AVX-512.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    unsafe fn avx512(&self, maps: Maps, blocked: &mut Vec<Line>) {
        unsafe {
            match self.wide {
                1 => self.stepping::<Avx512, 1, 16>(maps, blocked),
                _ => self.stepping::<Avx512, 2, 8>(maps, blocked),
            }
        }
    }

    /// # Safety
    /// As `whole`, on a machine with AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn avx2(&self, maps: Maps, blocked: &mut Vec<Line>) {
        unsafe { self.stepping::<Avx2, 1, 6>(maps, blocked) }
    }

    /// # Safety
    /// As `whole`.
    #[inline(always)]
    unsafe fn stepping<L: Lanes, const WIDE: usize, const TALL: usize>(&self, maps: Maps, blocked: &mut Vec<Line>) {
        let two = self.window.kernel > 1 && self.window.stride == 2;
        unsafe {
            match (deep(self.window.c_in), two) {
                (FEW, false) => self.whole::<L, WIDE, TALL, FEW>(maps, blocked),
                (FEW, true) => self.whole::<L, WIDE, TALL, { 2 * FEW }>(maps, blocked),
                (_, false) => self.whole::<L, WIDE, TALL, LANES>(maps, blocked),
                (_, true) => self.whole::<L, WIDE, TALL, { 2 * LANES }>(maps, blocked),
            }
        }
    }

    /// All images: `WIDE` times `TALL` sums at a time, as many as the registers hold. `STEP` numbers lie between the inputs of neighbours.
    ///
    /// # Safety
    /// The caller has the instructions of `L`, and `maps` were checked.
    #[inline(always)]
    unsafe fn whole<L: Lanes, const WIDE: usize, const TALL: usize, const STEP: usize>(&self, maps: Maps, blocked: &mut Vec<Line>) {
        let Window { c_in, c_out, kernel, .. } = self.window;
        let form = Form::new(self.window, maps.side);
        let answer = form.rows * form.across * c_out;
        let copy = form.room(blocked);
        let output = maps.output.as_mut_ptr();
        for (image, input) in maps.input.chunks_exact(maps.side[0] * maps.side[1] * c_in).enumerate() {
            // SAFETY: the caller's word.
            unsafe { form.copy::<L>(input, copy) };
            for (group, weights) in self.weights.chunks_exact(kernel * kernel * c_in * WIDE).enumerate() {
                let bias = &self.bias[group * WIDE * LANES..(group + 1) * WIDE * LANES];
                for y in 0..form.rows {
                    let mut x = 0;
                    macro_rules! tiles {
                        ($n:expr) => {
                            while form.across - x >= $n {
                                let place = image * answer + (y * form.across + x) * c_out + group * WIDE * LANES;
                                // SAFETY: the windows of these outputs lie in the copy, and the outputs in the answer and the other map.
                                unsafe {
                                    let from = copy.as_ptr().add(y * form.step_down + x * STEP);
                                    let other = maps.other.map(|other| other.as_ptr().add(place));
                                    let sums = sums::<L, WIDE, { $n }, STEP>(&form, from, weights.as_ptr().cast(), bias);
                                    finish(sums, c_out, other, maps.relu, output.add(place));
                                }
                                x += $n;
                            }
                        };
                    }
                    tiles!(TALL);
                    tiles!(4);
                    tiles!(2);
                    tiles!(1);
                }
            }
        }
    }
}

/// Input channels of a block.
fn deep(c_in: usize) -> usize {
    if c_in <= FEW { FEW } else { LANES }
}

/// The input channels, block by block.
fn blocks(c_in: usize) -> impl Iterator<Item = Range<usize>> {
    let deep = deep(c_in);
    (0..c_in).step_by(deep).map(move |from| from..(from + deep).min(c_in))
}

/// How an image is copied into blocks of channels. Of a window of one pixel only the pixels that it sees are copied, and the answer is one
/// long row.
struct Form {
    window: Window,
    /// Of the image.
    side: [usize; 2],
    /// Rows of the answer, and its pixels in one.
    rows: usize,
    across: usize,
    /// Numbers of a pixel in a block.
    deep: usize,
    /// Numbers of a row of the copy, and of a block.
    row: usize,
    plane: usize,
    /// Numbers from one row of windows to the next.
    step_down: usize,
}

impl Form {
    fn new(window: Window, side: [usize; 2]) -> Form {
        let (out, deep) = (window.out(side), deep(window.c_in));
        if window.kernel == 1 {
            let pixels = out[0] * out[1];
            return Form { window, side, rows: 1, across: pixels, deep, row: pixels * deep, plane: pixels * deep, step_down: 0 };
        }
        let [h, w] = side.map(|side| side + 2 * window.padding);
        let row = w * deep;
        Form { window, side, rows: out[0], across: out[1], deep, row, plane: h * row, step_down: window.stride * row }
    }

    /// Room for one image; zeros where the image is not.
    fn room<'a>(&self, blocked: &'a mut Vec<Line>) -> &'a mut [f32] {
        let numbers = self.window.c_in.div_ceil(self.deep) * self.plane;
        blocked.clear();
        blocked.resize(numbers.div_ceil(LANES), Line([0.0; LANES]));
        // SAFETY: the lines hold as many numbers, or a few more.
        unsafe { std::slice::from_raw_parts_mut(blocked.as_mut_ptr().cast(), numbers) }
    }

    /// # Safety
    /// The caller has the instructions of `L`.
    #[inline(always)]
    unsafe fn copy<L: Lanes>(&self, image: &[f32], to: &mut [f32]) {
        let Window { c_in, kernel, stride, padding, .. } = self.window;
        let step = if kernel == 1 { stride } else { 1 };
        for (channels, plane) in blocks(c_in).zip(to.chunks_exact_mut(self.plane)) {
            for (y, row) in image.chunks_exact(self.side[1] * c_in).enumerate().step_by(step) {
                let start = if kernel == 1 {
                    y / stride * self.side[1].div_ceil(stride) * self.deep
                } else {
                    (y + padding) * self.row + padding * self.deep
                };
                for (from, to) in row.chunks_exact(c_in).step_by(step).zip(plane[start..].chunks_exact_mut(self.deep)) {
                    if channels.len() == LANES {
                        // SAFETY: both hold so many numbers.
                        unsafe { L::load(from[channels.clone()].as_ptr()).store(to.as_mut_ptr()) };
                    } else {
                        to.iter_mut().zip(&from[channels.clone()]).for_each(|(to, from)| *to = *from);
                    }
                }
            }
        }
    }
}

/// The sums of `N` windows, the first of which begins at `from`, and of `WIDE` registers of output channels.
///
/// # Safety
/// The windows lie in the copy that `form` describes; `weights` are those of the window, `bias` has `WIDE` times `LANES` numbers; the caller
/// has the instructions.
#[inline(always)]
unsafe fn sums<L: Lanes, const WIDE: usize, const N: usize, const STEP: usize>(
    form: &Form,
    from: *const f32,
    mut weights: *const f32,
    bias: &[f32],
) -> [[L; WIDE]; N] {
    let Window { c_in, kernel, .. } = form.window;
    unsafe {
        let mut sums = [load::<L, WIDE>(bias.as_ptr()); N];
        for (block, channels) in blocks(c_in).enumerate() {
            for ky in 0..kernel {
                for kx in 0..kernel {
                    let from = from.add(block * form.plane + ky * form.row + kx * form.deep);
                    for channel in 0..channels.len() {
                        let weight = load::<L, WIDE>(weights);
                        weights = weights.add(WIDE * LANES);
                        for (i, sums) in sums.iter_mut().enumerate() {
                            let x = *from.add(i * STEP + channel);
                            for (sum, weight) in sums.iter_mut().zip(weight) {
                                *sum = sum.add_product(x, weight);
                            }
                        }
                    }
                }
            }
        }
        sums
    }
}

/// Sum with the other map, ReLU, and into memory: pixels are `c_out` numbers apart.
///
/// # Safety
/// At `to`, and at `other` where it is given, there are so many pixels; the caller has the instructions.
#[inline(always)]
unsafe fn finish<L: Lanes, const WIDE: usize, const N: usize>(
    sums: [[L; WIDE]; N],
    c_out: usize,
    other: Option<*const f32>,
    relu: bool,
    to: *mut f32,
) {
    unsafe {
        for (i, sums) in sums.into_iter().enumerate() {
            for (lanes, mut sum) in sums.into_iter().enumerate() {
                let place = i * c_out + lanes * LANES;
                if let Some(other) = other {
                    sum = sum.add(L::load(other.add(place)));
                }
                if relu {
                    sum = sum.relu();
                }
                sum.store(to.add(place));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::lanes::Plain;
    use super::super::tests::{close, plain, wave};
    use super::*;

    #[test]
    fn is_a_convolution_in_words_that_every_machine_has() {
        for (c_in, c_out, kernel, stride, side) in [
            (3, 16, 3, 1, [4, 6]),
            (3, 32, 7, 2, [9, 7]),
            (16, 32, 3, 2, [5, 8]),
            (17, 16, 3, 1, [3, 2]),
            (16, 32, 1, 2, [5, 4]),
            (20, 16, 1, 1, [2, 9]),
        ] {
            let window = Window { c_in, c_out, kernel, stride, padding: kernel / 2 };
            let (weight, bias) = (wave(c_in * c_out * kernel * kernel, 0.7), wave(c_out, 1.1));
            let [h, w] = window.out(side);
            let (input, other) = (wave(2 * side[0] * side[1] * c_in, 0.013), wave(2 * h * w * c_out, 0.31));
            let made = Direct::laid_out(window, &weight, &bias, c_out / LANES);
            let mut output = vec![f32::NAN; other.len()];
            let maps = Maps { images: 2, side, input: &input, other: Some(&other), relu: true, output: &mut output };
            maps.check(window);
            let mut blocked = vec![];
            // SAFETY: every machine has these, and the maps were checked.
            unsafe {
                match made.wide {
                    1 => made.stepping::<Plain, 1, 3>(maps, &mut blocked),
                    _ => made.stepping::<Plain, 2, 3>(maps, &mut blocked),
                }
            }
            let want: Vec<f64> = plain(window, &weight, &bias, &input, 2, side);
            let want: Vec<f64> = want.iter().zip(&other).map(|(sum, other)| (sum + f64::from(*other)).max(0.0)).collect();
            close(&output, &want, 1e-6, &format!("{window:?} on {side:?}"));
        }
    }
}
