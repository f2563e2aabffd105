//! 3 x 3 convolutions of frozen networks by Winograd's F(2 x 2, 3 x 3) (Lavin and Gray, CVPR 2016): 16 products instead of 36 for a tile of
//! 2 x 2 outputs and a pair of channels. With d the 4 x 4 inputs that a tile sees and g the window,
//!
//! ```text
//! Y = A' [ sum over input channels of (G g G') * (B' d B) ] A        * place by place
//!
//!      1  0 -1  0         1   0   0        1  1  1  0
//! B' = 0  1  1  0     G = 1/2 1/2 1/2 A' = 0  1 -1 -1
//!      0 -1  1  0         1/2-1/2 1/2
//!      0  1  0 -1         0   0   1
//! ```
//!
//! The window is transformed once. Inputs are transformed for some rows of tiles at a time, so that they stay in the core's own cache; then a
//! matrix product follows for each of the 16 places, and the way back ends with bias, residual sum and ReLU.
//!
//! What is unsafe here: instructions that a machine may lack, and memory that is named by pointers. `Maps::check` looks at all sizes once.

use std::cell::RefCell;

#[cfg(target_arch = "x86_64")]
use super::super::lanes::{Avx2, Avx512, HalfAvx2};
use super::super::lanes::{Instructions, LANES, Lanes, Line, lines, load};
use super::{Maps, Window};

/// Places of a transformed tile.
const PLACES: usize = 16;
/// Tiles transformed together, unless one row has more: their products must make good use of the registers.
const TILES: usize = 16;
/// The same where weights do not stay in the core's own cache: each time they are fetched they must serve longer.
const MORE_TILES: usize = 64;
/// Bytes of transformed weights from where that is so.
const MANY_WEIGHTS: usize = 1 << 20;

/// A convolution with its bias, its windows transformed.
pub struct Winograd {
    window: Window,
    /// Registers of output channels that are computed together.
    wide: usize,
    /// [c_out / LANES / wide][place][c_in][wide]
    weights: Vec<Line>,
    bias: Vec<f32>,
}

#[derive(Default)]
struct Scratch {
    /// Transformed inputs, [place][c_in / LANES][tile], and a line so that places do not meet in one set of the cache.
    inputs: Vec<Line>,
    /// Products, [place][wide][tile], and a line.
    products: Vec<Line>,
    /// A row of zeros above and below the image.
    zeros: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Winograd {
    /// Is this a convolution that the code is for?
    pub fn serves(window: Window) -> bool {
        window.kernel == 3
            && window.stride == 1
            && window.padding == 1
            && window.c_in.is_multiple_of(LANES)
            && window.c_out.is_multiple_of(LANES)
    }

    /// `weight` is [c_out][c_in][3][3].
    pub fn new(window: Window, weight: &[f32], bias: &[f32], with: Instructions) -> Winograd {
        Winograd::laid_out(window, weight, bias, with.wide(window.c_out))
    }

    fn laid_out(window: Window, weight: &[f32], bias: &[f32], wide: usize) -> Winograd {
        let Window { c_in, c_out, .. } = window;
        assert!(Winograd::serves(window) && weight.len() == c_out * c_in * 9 && bias.len() == c_out, "{window:?}");
        let mut weights = lines(c_out / LANES * PLACES * c_in);
        for (co, of_output) in weight.chunks_exact(c_in * 9).enumerate() {
            let (group, lane) = (co / LANES / wide, co % LANES);
            for (ci, window) in of_output.chunks_exact(9).enumerate() {
                for (place, value) in transformed(window).into_iter().enumerate() {
                    weights[((group * PLACES + place) * c_in + ci) * wide + co / LANES % wide].0[lane] = value;
                }
            }
        }
        Winograd { window, wide, weights, bias: bias.to_vec() }
    }

    /// The convolution of all images.
    ///
    /// # Safety
    /// The machine has the instructions of `with`, the same as `new` had, and `maps` were checked.
    pub unsafe fn run(&self, maps: Maps, with: Instructions) {
        SCRATCH.with_borrow_mut(|scratch| match with {
            // SAFETY: the caller's word.
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 => unsafe { self.avx512(maps, scratch) },
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 => unsafe { self.avx2(maps, scratch) },
        })
    }

    /// # Safety
    /// As `whole`, on a machine with AVX-512.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    unsafe fn avx512(&self, maps: Maps, scratch: &mut Scratch) {
        unsafe {
            match self.wide {
                1 => self.whole::<Avx512, Avx512, 1, 16>(maps, scratch),
                _ => self.whole::<Avx512, Avx512, 2, 8>(maps, scratch),
            }
        }
    }

    /// # Safety
    /// As `whole`, on a machine with AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn avx2(&self, maps: Maps, scratch: &mut Scratch) {
        unsafe { self.whole::<Avx2, HalfAvx2, 1, 6>(maps, scratch) }
    }

    /// All images: `WIDE` times `TALL` sums at a time, as many as the registers hold. Transforms want many numbers of few channels (`T`).
    ///
    /// # Safety
    /// The caller has the instructions of `L` and `T`, and `maps` were checked.
    #[inline(always)]
    unsafe fn whole<L: Lanes, T: Lanes, const WIDE: usize, const TALL: usize>(&self, maps: Maps, scratch: &mut Scratch) {
        let Window { c_in, c_out, .. } = self.window;
        let [h, w] = maps.side;
        let output = maps.output.as_mut_ptr();
        let across = w.div_ceil(2);
        let down = h.div_ceil(2);
        let tiles_at_once = if size_of_val(&self.weights[..]) > MANY_WEIGHTS { MORE_TILES } else { TILES };
        let rows_at_once = tiles_at_once.div_ceil(across);
        let most = rows_at_once * across;
        let blocks = c_in / LANES;
        let input_stride = blocks * most + 1;
        let product_stride = WIDE * most + 1;
        scratch.inputs.resize(PLACES * input_stride, Line([0.0; LANES]));
        scratch.products.resize(PLACES * product_stride, Line([0.0; LANES]));
        scratch.zeros.resize(scratch.zeros.len().max(w * c_in), 0.0);
        let inputs: *mut f32 = scratch.inputs.as_mut_ptr().cast();
        let products: *mut f32 = scratch.products.as_mut_ptr().cast();
        let rows = maps.images * down;
        for first in (0..rows).step_by(rows_at_once) {
            let here = first..(first + rows_at_once).min(rows);
            let tiles = here.len() * across;
            for (i, row) in here.clone().enumerate() {
                let (image, y) = (row / down, 2 * (row % down));
                // Rows y - 1 to y + 2; those outside the image are zeros.
                let lines: [*const f32; 4] = std::array::from_fn(|k| match (y + k).checked_sub(1) {
                    Some(y) if y < h => unsafe { maps.input.as_ptr().add((image * h + y) * w * c_in) },
                    _ => scratch.zeros.as_ptr(),
                });
                for channel in (0..c_in).step_by(T::COUNT) {
                    let (block, lane) = (channel / LANES, channel % LANES);
                    let lines = lines.map(|line| unsafe { line.add(channel) });
                    let to = unsafe { inputs.add((block * tiles + i * across) * LANES + lane) };
                    unsafe { inwards::<T>(lines, w, c_in, to, input_stride * LANES) };
                }
            }
            for (group, weights) in self.weights.chunks_exact(PLACES * c_in * WIDE).enumerate() {
                for place in 0..PLACES {
                    let weights: *const f32 = weights[place * c_in * WIDE..].as_ptr().cast();
                    let from = unsafe { inputs.add(place * input_stride * LANES) };
                    let to = unsafe { products.add(place * product_stride * LANES) };
                    let mut at = 0;
                    macro_rules! tiles {
                        ($n:expr) => {
                            while tiles - at >= $n {
                                unsafe {
                                    let (from, to) = (from.add(at * LANES), to.add(at * LANES));
                                    product::<L, WIDE, { $n }>(from, tiles, blocks, weights, to);
                                }
                                at += $n;
                            }
                        };
                    }
                    tiles!(TALL);
                    tiles!(4);
                    tiles!(2);
                    tiles!(1);
                }
                for (i, row) in here.clone().enumerate() {
                    let (image, y) = (row / down, 2 * (row % down));
                    for lane in (0..WIDE * LANES).step_by(T::COUNT) {
                        let channel = group * WIDE * LANES + lane;
                        let from = unsafe { products.add((lane / LANES * tiles + i * across) * LANES + lane % LANES) };
                        let bias = unsafe { T::load(self.bias.as_ptr().add(channel)) };
                        let place = (image * h + y) * w * c_out + channel;
                        let row = Row { w, c: c_out, below: y + 1 < h, relu: maps.relu };
                        unsafe {
                            let other = maps.other.map(|other| other.as_ptr().add(place));
                            outwards::<T>(from, product_stride * LANES, bias, row, other, output.add(place));
                        }
                    }
                }
            }
        }
    }
}

/// G g G', row by row; in f64, because it is done once.
fn transformed(g: &[f32]) -> [f32; PLACES] {
    let along = |a: f64, b: f64, c: f64| [a, 0.5 * (a + b + c), 0.5 * (a - b + c), c];
    let g = |y: usize, x: usize| f64::from(g[3 * y + x]);
    let columns: [[f64; 4]; 3] = std::array::from_fn(|x| along(g(0, x), g(1, x), g(2, x)));
    std::array::from_fn(|place| {
        let y = place / 4;
        along(columns[0][y], columns[1][y], columns[2][y])[place % 4] as f32
    })
}

/// B' d B of all tiles of a row, for the channels of one register: place p of tile t goes to `to` + p * `stride` + t * `LANES`.
///
/// # Safety
/// At each of `lines` there are `w` pixels, `c` numbers apart, or zeros; there is room at `to`; the caller has the instructions.
#[inline(always)]
unsafe fn inwards<L: Lanes>(lines: [*const f32; 4], w: usize, c: usize, to: *mut f32, stride: usize) {
    unsafe {
        let outside = [L::zero(); 4];
        let (mut first, mut second) = (outside, column::<L>(lines, 0));
        for tile in 0..w.div_ceil(2) {
            let x = 2 * tile + 1;
            let third = if x < w { column::<L>(lines, x * c) } else { outside };
            let fourth = if x + 1 < w { column::<L>(lines, (x + 1) * c) } else { outside };
            for y in 0..4 {
                let to = to.add(4 * y * stride + tile * LANES);
                first[y].sub(third[y]).store(to);
                second[y].add(third[y]).store(to.add(stride));
                third[y].sub(second[y]).store(to.add(2 * stride));
                second[y].sub(fourth[y]).store(to.add(3 * stride));
            }
            (first, second) = (third, fourth);
        }
    }
}

/// B' d for one column of a tile; neighbours share two of their four.
///
/// # Safety
/// As `inwards`.
#[inline(always)]
unsafe fn column<L: Lanes>(lines: [*const f32; 4], at: usize) -> [L; 4] {
    unsafe {
        let [a, b, c, d] = [L::load(lines[0].add(at)), L::load(lines[1].add(at)), L::load(lines[2].add(at)), L::load(lines[3].add(at))];
        [a.sub(c), b.add(c), c.sub(b), b.sub(d)]
    }
}

/// `TALL` tiles of one place, all input channels, `WIDE` registers of output channels.
///
/// # Safety
/// `from` holds `blocks` times `tiles` lines, of which the first `TALL` of each are taken; `weights` holds `WIDE` lines for each input channel;
/// `to` has room for `WIDE` times `tiles` lines; the caller has the instructions.
#[inline(always)]
unsafe fn product<L: Lanes, const WIDE: usize, const TALL: usize>(
    mut from: *const f32,
    tiles: usize,
    blocks: usize,
    mut weights: *const f32,
    to: *mut f32,
) {
    unsafe {
        let mut sums = [[L::zero(); WIDE]; TALL];
        for _ in 0..blocks {
            for channel in 0..LANES {
                let weight = load::<L, WIDE>(weights);
                weights = weights.add(WIDE * LANES);
                for (tile, sums) in sums.iter_mut().enumerate() {
                    let x = *from.add(tile * LANES + channel);
                    for (sum, weight) in sums.iter_mut().zip(weight) {
                        *sum = sum.add_product(x, weight);
                    }
                }
            }
            from = from.add(tiles * LANES);
        }
        for (tile, sums) in sums.into_iter().enumerate() {
            for (i, sum) in sums.into_iter().enumerate() {
                sum.store(to.add((i * tiles + tile) * LANES));
            }
        }
    }
}

/// A row of tiles on its way out.
#[derive(Clone, Copy)]
struct Row {
    /// Pixels of the map's row, and numbers from one to the next.
    w: usize,
    c: usize,
    /// Is there a second row of pixels?
    below: bool,
    relu: bool,
}

/// A' m A of all tiles of a row, then bias, sum and ReLU, for the channels of one register.
///
/// # Safety
/// The mirror of `inwards`: `from` holds the tiles; `to`, and `other` where it is given, are the row's first pixel in maps of `row`'s form.
#[inline(always)]
unsafe fn outwards<L: Lanes>(from: *const f32, stride: usize, bias: L, row: Row, other: Option<*const f32>, to: *mut f32) {
    unsafe {
        for tile in 0..row.w.div_ceil(2) {
            let from = from.add(tile * LANES);
            let mut columns = [[L::zero(); 2]; 4];
            for (x, column) in columns.iter_mut().enumerate() {
                let place = |y: usize| from.add((4 * y + x) * stride);
                *column = along(L::load(place(0)), L::load(place(1)), L::load(place(2)), L::load(place(3)));
            }
            for y in 0..1 + usize::from(row.below) {
                let pixels = along(columns[0][y], columns[1][y], columns[2][y], columns[3][y]);
                for (i, sum) in pixels.into_iter().enumerate() {
                    let x = 2 * tile + i;
                    if x < row.w {
                        let place = (y * row.w + x) * row.c;
                        let mut sum = sum.add(bias);
                        if let Some(other) = other {
                            sum = sum.add(L::load(other.add(place)));
                        }
                        if row.relu {
                            sum = sum.relu();
                        }
                        sum.store(to.add(place));
                    }
                }
            }
        }
    }
}

/// A' of one column.
///
/// # Safety
/// The caller has the instructions.
#[inline(always)]
unsafe fn along<L: Lanes>(a: L, b: L, c: L, d: L) -> [L; 2] {
    unsafe { [a.add(b).add(c), b.sub(c).sub(d)] }
}

#[cfg(test)]
mod tests {
    use super::super::super::lanes::Plain;
    use super::super::tests::{close, plain, wave};
    use super::*;

    /// The transform of a window that is 1 in its middle alone: G's middle column, times itself.
    #[test]
    fn transforms_a_window() {
        let mut g = [0.0; 9];
        g[4] = 1.0;
        let along = [0.0, 0.5, -0.5, 0.0];
        let want: [f32; PLACES] = std::array::from_fn(|i| along[i / 4] * along[i % 4]);
        assert_eq!(transformed(&g), want);
    }

    #[test]
    fn is_a_convolution_in_words_that_every_machine_has() {
        for (c_in, c_out, side, wide) in [(16, 16, [4, 4], 1), (32, 16, [5, 3], 1), (16, 32, [1, 2], 2), (16, 64, [7, 9], 2)] {
            let window = Window { c_in, c_out, kernel: 3, stride: 1, padding: 1 };
            let (weight, bias) = (wave(c_in * c_out * 9, 0.7), wave(c_out, 1.1));
            let (input, other) = (wave(2 * side[0] * side[1] * c_in, 0.013), wave(2 * side[0] * side[1] * c_out, 0.31));
            let made = Winograd::laid_out(window, &weight, &bias, wide);
            let mut output = vec![f32::NAN; other.len()];
            let maps = Maps { images: 2, side, input: &input, other: Some(&other), relu: true, output: &mut output };
            maps.check(window);
            let mut scratch = Scratch::default();
            // SAFETY: every machine has these, and the maps were checked.
            unsafe {
                match wide {
                    1 => made.whole::<Plain, Plain, 1, 3>(maps, &mut scratch),
                    _ => made.whole::<Plain, Plain, 2, 3>(maps, &mut scratch),
                }
            }
            let want: Vec<f64> = plain(window, &weight, &bias, &input, 2, side);
            let want: Vec<f64> = want.iter().zip(&other).map(|(sum, other)| (sum + f64::from(*other)).max(0.0)).collect();
            close(&output, &want, 1e-6, &format!("{window:?} on {side:?}"));
        }
    }
}
