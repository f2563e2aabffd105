//! A 3 x 3 convolution of stride 1 and its gradients with 16 products where the definition has 36 (Winograd's F(2 x 2, 3 x 3); Lavin and
//! Gray, CVPR 2016). A tile is 2 x 2 numbers of the output, made from 4 x 4 of the input. With the matrices
//!
//!   B' = 1 0 -1 0 / 0 1 1 0 / 0 -1 1 0 / 0 1 0 -1     A' = 1 1 1 0 / 0 1 -1 -1     G = 1 0 0 / .5 .5 .5 / .5 -.5 .5 / 0 0 1
//!
//! and V = B' x B, U = G w G', for every one of the 16 places of a tile: M = V U, a product of matrices over channels, then y = A' M A. The
//! gradient after the input is the convolution of the output's gradient with the weight turned around. That after the weight is
//! G' (sum over tiles of V' (A g A')) G. All factors are 0, 1 and 1/2, so that rounding stays that of an ordinary sum.
//!
//! Tiles are taken `TILES` at a time, so that V and M stay in the core's own caches. A tile's answer does not depend on its neighbours:
//! outputs are the same for any number of threads. The weight's gradient is a sum over threads, in their order.
//!
//! What is unsafe: instructions that a machine may lack, and sums over raw pointers, as in `direct`. The functions with `extern "C"` believe
//! convolution.cpp that pointers and sizes fit.

mod tiles;

use std::cell::RefCell;
use std::ops::Range;

use super::lanes::{Instructions, LANES, instructions};
use super::parallel::{Shared, in_parallel, parts_of};
#[cfg(target_arch = "x86_64")]
use tiles::*;

/// Places of a tile.
const PLACES: usize = 16;
/// Tiles at a time: a multiple of the rows of every product below, and no power of two, which would put the places of a tile in one line of
/// the cache.
const TILES: usize = 24;

/// A map [images][h][w] of `c_in` channels, and one of `c_out`.
#[derive(Clone, Copy)]
pub(super) struct Maps {
    pub images: usize,
    pub h: usize,
    pub w: usize,
    pub c_in: usize,
    pub c_out: usize,
}

impl Maps {
    /// b, h, w, c_in, c_out
    pub fn of(sizes: [i64; 5]) -> Maps {
        let [images, h, w, c_in, c_out] = sizes.map(|n| n as usize);
        Maps { images, h, w, c_in, c_out }
    }

    /// Is the code for it? Maps of fewer than four rows or columns are mostly the zeros around them.
    pub fn served(self) -> bool {
        self.c_in.is_multiple_of(LANES) && self.c_out.is_multiple_of(LANES) && self.h >= 4 && self.w >= 4
    }

    pub fn tiles(self) -> usize {
        self.images * self.h.div_ceil(2) * self.w.div_ceil(2)
    }

    /// Some of the tiles, row by row.
    fn runs(self, tiles: Range<usize>) -> Runs {
        let (down, across) = (self.h.div_ceil(2), self.w.div_ceil(2));
        let (image, ty, tx) = (tiles.start / (down * across), tiles.start / across % down, tiles.start % across);
        Runs { down, across, image, ty, tx, at: 0, count: tiles.len() }
    }
}

/// Tiles that lie side by side.
struct Run {
    image: usize,
    /// Row and column of the first, counted in tiles.
    ty: usize,
    tx: usize,
    /// Which of the tiles at hand the first one is.
    at: usize,
    len: usize,
}

struct Runs {
    down: usize,
    across: usize,
    image: usize,
    ty: usize,
    tx: usize,
    at: usize,
    count: usize,
}

impl Iterator for Runs {
    type Item = Run;

    #[inline(always)]
    fn next(&mut self) -> Option<Run> {
        if self.at >= self.count {
            return None;
        }
        let len = (self.across - self.tx).min(self.count - self.at);
        let run = Run { image: self.image, ty: self.ty, tx: self.tx, at: self.at, len };
        (self.at, self.tx, self.ty) = (self.at + len, 0, self.ty + 1);
        if self.ty == self.down {
            (self.ty, self.image) = (0, self.image + 1);
        }
        Some(run)
    }
}

thread_local! {
    /// V and M of the tiles at hand, and a row of zeros.
    static TILE_SPACE: RefCell<Vec<f32>> = const { RefCell::new(vec![]) };
    /// U.
    static WEIGHT_SPACE: RefCell<Vec<f32>> = const { RefCell::new(vec![]) };
    /// The sums of the weight's gradient.
    static SUM_SPACE: RefCell<Vec<f32>> = const { RefCell::new(vec![]) };
}

/// The first `len` numbers of a thread's own memory, which grows but is never given back: they are whatever was there.
pub(super) fn space<T>(of: &'static std::thread::LocalKey<RefCell<Vec<f32>>>, len: usize, work: impl FnOnce(&mut [f32]) -> T) -> T {
    of.with_borrow_mut(|space| {
        if space.len() < len {
            space.resize(len, 0.0);
        }
        work(&mut space[..len])
    })
}

/// y = the convolution of x [b][h][w][c_in] with w [c_out][c_in][3][3]; if `turned`, x has `c_out` channels, y `c_in`, and y is the gradient
/// after the input where x is that after the output. `sizes`: b, h, w, c_in, c_out. False: not for this kernel, nothing was written.
///
/// # Safety
/// `x`, `w`, `y` point to as many numbers as `sizes` says.
#[unsafe(no_mangle)]
unsafe extern "C" fn mcl_winograd(x: *const f32, w: *const f32, y: *mut f32, sizes: *const [i64; 5], turned: bool) -> bool {
    let maps = Maps::of(unsafe { *sizes });
    let Some(with) = instructions().filter(|_| maps.served()) else { return false };
    let w = unsafe { std::slice::from_raw_parts(w, 9 * maps.c_in * maps.c_out) };
    let (c_in, c_out) = if turned { (maps.c_out, maps.c_in) } else { (maps.c_in, maps.c_out) };
    let x = unsafe { std::slice::from_raw_parts(x, maps.images * maps.h * maps.w * c_in) };
    convolve(x, w, Shared(y), Maps { c_in, c_out, ..maps }, turned, with, parts_of(x.len()));
    true
}

fn convolve(x: &[f32], w: &[f32], y: Shared, maps: Maps, turned: bool, with: Instructions, parts: usize) {
    with_weights(w, maps, turned, with, parts, |u| {
        let tiles = maps.tiles();
        in_parallel(parts, &|part| {
            // SAFETY: every tile of y is written by one part.
            unsafe { forward(with, x, u, y, maps, part * tiles / parts..(part + 1) * tiles / parts) };
        });
    });
}

/// Calls `work` with U.
pub(super) fn with_weights<T>(w: &[f32], maps: Maps, turned: bool, with: Instructions, parts: usize, work: impl FnOnce(&[f32]) -> T) -> T {
    space(&WEIGHT_SPACE, PLACES * maps.c_in * maps.c_out, |u| {
        let whole = Shared(u.as_mut_ptr());
        let blocks = maps.c_out / LANES;
        let shares = parts.min(parts_of(u.len())).min(blocks);
        in_parallel(shares, &|part| {
            let channels = part * blocks / shares * LANES..(part + 1) * blocks / shares * LANES;
            // SAFETY: the machine has the instructions, here and below; the channels of the parts do not overlap.
            match with {
                #[cfg(target_arch = "x86_64")]
                Instructions::Avx512 => unsafe { weights_avx512(w, maps, turned, channels, whole) },
                #[cfg(target_arch = "x86_64")]
                Instructions::Avx2 => unsafe { weights_avx2(w, maps, turned, channels, whole) },
            }
        });
        work(u)
    })
}

/// Some tiles of y, by the thread that calls.
///
/// # Safety
/// Nobody else writes these tiles; x and y are as large as `maps` says.
pub(super) unsafe fn forward(with: Instructions, x: &[f32], u: &[f32], y: Shared, maps: Maps, tiles: Range<usize>) {
    space(&TILE_SPACE, tile_space(maps), |space| match with {
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx512 => unsafe { forward_avx512(x, u, y, maps, tiles, space) },
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx2 => unsafe { forward_avx2(x, u, y, maps, tiles, space) },
    });
}

/// dw [c_out][c_in][3][3] from x [b][h][w][c_in] and g [b][h][w][c_out]; `sizes` as above. False: not for this kernel.
///
/// # Safety
/// `x`, `g`, `dw` point to as many numbers as `sizes` says.
#[unsafe(no_mangle)]
unsafe extern "C" fn mcl_winograd_weight(x: *const f32, g: *const f32, dw: *mut f32, sizes: *const [i64; 5]) -> bool {
    let maps = Maps::of(unsafe { *sizes });
    let Some(with) = instructions().filter(|_| maps.served()) else { return false };
    let rows = maps.images * maps.h * maps.w;
    let (x, g) = unsafe { (std::slice::from_raw_parts(x, rows * maps.c_in), std::slice::from_raw_parts(g, rows * maps.c_out)) };
    weight_gradient(x, g, Shared(dw), maps, with, parts_of(x.len() + g.len()).min(most_sums(maps)));
    true
}

/// Bytes of sums held at once, one for every thread.
const COPIES_AT_ONCE: usize = 64 << 20;

fn weight_gradient(x: &[f32], g: &[f32], dw: Shared, maps: Maps, with: Instructions, parts: usize) {
    let tiles = maps.tiles();
    with_sums(dw, maps, with, parts, |part, own| sum(with, x, g, own, maps, part * tiles / parts..(part + 1) * tiles / parts));
}

/// How many threads may have sums of their own.
pub(super) fn most_sums(maps: Maps) -> usize {
    (COPIES_AT_ONCE / (PLACES * maps.c_in * maps.c_out * size_of::<f32>())).max(1)
}

/// Runs `work` once for every part, each with sums of its own that begin at zero, and makes the gradient of the weight from all of them.
pub(super) fn with_sums(dw: Shared, maps: Maps, with: Instructions, parts: usize, work: impl Fn(usize, &mut [f32]) + Sync) {
    let len = PLACES * maps.c_in * maps.c_out;
    space(&SUM_SPACE, parts * len, |sums| {
        let whole = Shared(sums.as_mut_ptr());
        in_parallel(parts, &|part| {
            // SAFETY: every part has sums of its own.
            let own = unsafe { whole.slice(part * len, len) };
            own.fill(0.0);
            work(part, own);
        });
        let blocks = maps.c_out / LANES;
        let shares = parts.min(parts_of(len)).min(blocks);
        let sums = &*sums;
        in_parallel(shares, &|part| {
            let channels = part * blocks / shares * LANES..(part + 1) * blocks / shares * LANES;
            // SAFETY: the machine has the instructions; the channels of the parts do not overlap.
            match with {
                #[cfg(target_arch = "x86_64")]
                Instructions::Avx512 => unsafe { join_avx512(sums, maps, channels, dw) },
                #[cfg(target_arch = "x86_64")]
                Instructions::Avx2 => unsafe { join_avx2(sums, maps, channels, dw) },
            }
        });
    });
}

/// Adds some tiles to a part's sums, by the thread that calls.
pub(super) fn sum(with: Instructions, x: &[f32], g: &[f32], own: &mut [f32], maps: Maps, tiles: Range<usize>) {
    let rows = maps.images * maps.h * maps.w;
    assert!(x.len() == rows * maps.c_in && g.len() == rows * maps.c_out && tiles.end <= maps.tiles());
    space(&TILE_SPACE, tile_space(maps), |space| match with {
        // SAFETY: the machine has the instructions, and the maps are as large as they should be.
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx512 => unsafe { sum_avx512(x, g, own, maps, tiles, space) },
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx2 => unsafe { sum_avx2(x, g, own, maps, tiles, space) },
    });
}

/// Numbers of V, of M and of a row of zeros.
fn tile_space(maps: Maps) -> usize {
    PLACES * TILES * (maps.c_in + maps.c_out) + maps.w * maps.c_in
}

#[cfg(test)]
mod tests;
