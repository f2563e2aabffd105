//! The arithmetic of Winograd's convolution on some tiles or some channels, for either instruction set. Vectors run over channels.

use std::ops::Range;

use super::super::lanes::LANES;
use super::super::parallel::Shared;
use super::super::vector::Vector;
#[cfg(target_arch = "x86_64")]
use super::super::vector::{Eight, Sixteen};
use super::{Maps, PLACES, TILES};

/// A function for either instruction set, with as many rows as its registers hold.
macro_rules! with_both {
    ($wide:ident, $narrow:ident, $generic:ident($($arg:ident: $type:ty),*) $(, $two:literal or $small:literal)*) => {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f")]
        pub(super) unsafe fn $wide($($arg: $type),*) {
            unsafe { $generic::<Sixteen $(, $two)*>($($arg),*) }
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        pub(super) unsafe fn $narrow($($arg: $type),*) {
            unsafe { $generic::<Eight $(, $small)*>($($arg),*) }
        }
    };
}
with_both!(weights_avx512, weights_avx2, weights(w: &[f32], maps: Maps, turned: bool, channels: Range<usize>, u: Shared));
with_both!(forward_avx512, forward_avx2, forward(x: &[f32], u: &[f32], y: Shared, maps: Maps, tiles: Range<usize>, space: &mut [f32]), 12 or 6, 24 or 6);
with_both!(sum_avx512, sum_avx2, sum(x: &[f32], g: &[f32], du: &mut [f32], maps: Maps, tiles: Range<usize>, space: &mut [f32]), 8 or 4, 16 or 4);
with_both!(join_avx512, join_avx2, join(sums: &[f32], maps: Maps, channels: Range<usize>, dw: Shared));

/// U = G w G' for some output channels: [place][c_out / WIDTH][c_in][WIDTH].
#[inline(always)]
unsafe fn weights<L: Vector>(w: &[f32], maps: Maps, turned: bool, channels: Range<usize>, u: Shared) {
    let Maps { c_in, c_out, .. } = maps;
    let mut near = [[0f32; LANES]; 9];
    for block in channels.step_by(L::WIDTH) {
        for i in 0..c_in {
            for o in 0..L::WIDTH {
                // Turned around, the weight's own output channels are the input here.
                let from = if turned { (i * c_out + block + o) * 9 } else { ((block + o) * c_in + i) * 9 };
                for k in 0..9 {
                    near[k][o] = w[from + if turned { 8 - k } else { k }];
                }
            }
            unsafe {
                let half = L::splat(0.5);
                let mut t = [[L::zero(); 3]; 4];
                for x in 0..3 {
                    let column = spread([L::load(near[x].as_ptr()), L::load(near[3 + x].as_ptr()), L::load(near[6 + x].as_ptr())], half);
                    for y in 0..4 {
                        t[y][x] = column[y];
                    }
                }
                let to = u.at((block * c_in) + i * L::WIDTH);
                for y in 0..4 {
                    let row = spread(t[y], half);
                    for x in 0..4 {
                        row[x].store(to.add((y * 4 + x) * c_in * c_out));
                    }
                }
            }
        }
    }
}

/// G w
#[inline(always)]
unsafe fn spread<L: Vector>(w: [L; 3], half: L) -> [L; 4] {
    unsafe {
        let (ends, middle) = (w[0].add(w[2]).mul(half), w[1].mul(half));
        [w[0], ends.add(middle), ends.sub(middle), w[2]]
    }
}

/// B' d
#[inline(always)]
unsafe fn differences<L: Vector>(d: [L; 4]) -> [L; 4] {
    unsafe { [d[0].sub(d[2]), d[1].add(d[2]), d[2].sub(d[1]), d[1].sub(d[3])] }
}

/// V of some tiles: [place][tile][c].
#[inline(always)]
unsafe fn into_v<L: Vector>(x: &[f32], maps: Maps, tiles: Range<usize>, v: *mut f32, zeros: *const f32) {
    let Maps { h, w, c_in: c, .. } = maps;
    let step = TILES * c;
    for run in maps.runs(tiles) {
        unsafe {
            let mut rows = [zeros; 4];
            for (i, row) in rows.iter_mut().enumerate() {
                let y = 2 * run.ty + i; // one more than the row of the map
                if y >= 1 && y <= h {
                    *row = x.as_ptr().add((run.image * h + y - 1) * w * c);
                }
            }
            for at in (0..c).step_by(L::WIDTH) {
                // Neighbours share two columns.
                let mut one = if run.tx == 0 { [L::zero(); 4] } else { column::<L>(rows, w, c, at, 2 * run.tx - 1) };
                let mut two = column::<L>(rows, w, c, at, 2 * run.tx);
                for i in 0..run.len {
                    let three = column::<L>(rows, w, c, at, 2 * (run.tx + i) + 1);
                    let four = column::<L>(rows, w, c, at, 2 * (run.tx + i) + 2);
                    let to = v.add((run.at + i) * c + at);
                    for y in 0..4 {
                        let row = differences([one[y], two[y], three[y], four[y]]);
                        for x in 0..4 {
                            row[x].store(to.add((y * 4 + x) * step));
                        }
                    }
                    (one, two) = (three, four);
                }
            }
        }
    }
}

/// B' of one column of four rows; zeros beyond the map.
#[inline(always)]
unsafe fn column<L: Vector>(rows: [*const f32; 4], w: usize, c: usize, at: usize, x: usize) -> [L; 4] {
    unsafe {
        if x >= w {
            return [L::zero(); 4];
        }
        let at = x * c + at;
        differences([L::load(rows[0].add(at)), L::load(rows[1].add(at)), L::load(rows[2].add(at)), L::load(rows[3].add(at))])
    }
}

/// y[r] = sum over k of x[r * row + k * step] times w[k], for `R` rows and `C` vectors side by side; added to what is there if `more`.
#[inline(always)]
unsafe fn product<L: Vector, const R: usize, const C: usize>(
    x: *const f32,
    (row, step): (usize, usize),
    count: usize,
    w: [*const f32; C],
    y: [*mut f32; C],
    more: bool,
) {
    unsafe {
        let mut sums = [[L::zero(); C]; R];
        if more {
            for r in 0..R {
                for c in 0..C {
                    sums[r][c] = L::load(y[c].add(r * L::WIDTH));
                }
            }
        }
        let (mut x, mut w) = (x, w);
        for _ in 0..count {
            let mut here = [L::zero(); C];
            for c in 0..C {
                here[c] = L::load(w[c]);
                w[c] = w[c].add(L::WIDTH);
            }
            for r in 0..R {
                let factor = L::splat(*x.add(r * row));
                for c in 0..C {
                    sums[r][c] = factor.mul_add(here[c], sums[r][c]);
                }
            }
            x = x.add(step);
        }
        for r in 0..R {
            for c in 0..C {
                sums[r][c].store(y[c].add(r * L::WIDTH));
            }
        }
    }
}

/// Lines of memory that are wanted soon, asked for a few at a time while products are computed: loads would wait for them.
struct Wishes {
    lines: [*const f32; Wishes::MOST],
    count: usize,
}

impl Wishes {
    const MOST: usize = 768;

    fn none() -> Wishes {
        Wishes { lines: [std::ptr::null(); Wishes::MOST], count: 0 }
    }

    /// Adds the two rows of a map of `c` channels that lie `first` rows below the upper one of some tiles.
    #[inline(always)]
    fn add(&mut self, map: *const f32, maps: Maps, c: usize, tiles: Range<usize>, first: usize) {
        let line = 64 / size_of::<f32>();
        for run in maps.runs(tiles) {
            for y in [2 * run.ty + first, 2 * run.ty + first + 1] {
                let from = ((run.image * maps.h + y) * maps.w + 2 * run.tx) * c;
                let len = (2 * run.len).min(maps.w - 2 * run.tx) * c;
                for at in (from..from + len).step_by(line) {
                    if y < maps.h && self.count < Wishes::MOST {
                        self.lines[self.count] = map.wrapping_add(at);
                        self.count += 1;
                    }
                }
            }
        }
    }

    /// A share of them, one of `PLACES`.
    #[inline(always)]
    fn ask<L: Vector>(&self, place: usize) {
        for line in &self.lines[place * self.count / PLACES..(place + 1) * self.count / PLACES] {
            L::prefetch(*line);
        }
    }
}

/// A' M A of one tile, whose places lie `step` apart.
#[inline(always)]
unsafe fn answer<L: Vector>(m: *const f32, step: usize) -> [[L; 2]; 2] {
    unsafe {
        let mut t = [[L::zero(); 4]; 2];
        for x in 0..4 {
            let at = |y: usize| m.add((y * 4 + x) * step);
            let (m0, m1, m2, m3) = (L::load(at(0)), L::load(at(1)), L::load(at(2)), L::load(at(3)));
            (t[0][x], t[1][x]) = (m0.add(m1.add(m2)), m1.sub(m2).sub(m3));
        }
        let mut out = [[L::zero(); 2]; 2];
        for y in 0..2 {
            let m = t[y];
            out[y] = [m[0].add(m[1]).add(m[2]), m[1].sub(m[2]).sub(m[3])];
        }
        out
    }
}

/// The tiles of y, `TWO` rows of a product at a time with two vectors of channels, or `ONE` with one.
#[inline(always)]
unsafe fn forward<L: Vector, const TWO: usize, const ONE: usize>(
    x: &[f32],
    u: &[f32],
    y: Shared,
    maps: Maps,
    tiles: Range<usize>,
    space: &mut [f32],
) {
    let Maps { h, w, c_in, c_out, .. } = maps;
    let (v, rest) = space.split_at_mut(PLACES * TILES * c_in);
    let (m, zeros) = rest.split_at_mut(PLACES * TILES * c_out);
    zeros.fill(0.0);
    let (v, m, blocks) = (v.as_mut_ptr(), m.as_mut_ptr(), c_out / L::WIDTH);
    let mut wishes = Wishes::none();
    for first in tiles.clone().step_by(TILES) {
        let here = first..(first + TILES).min(tiles.end);
        unsafe {
            into_v::<L>(x, maps, here.clone(), v, zeros.as_ptr());
            let next = here.end..(here.end + TILES).min(tiles.end);
            wishes.count = 0;
            wishes.add(y.at(0), maps, c_out, here.clone(), 0);
            wishes.add(x.as_ptr(), maps, c_in, next, 1);
            for place in 0..PLACES {
                wishes.ask::<L>(place);
                let (v, u, m) = (v.add(place * TILES * c_in), u.as_ptr().add(place * c_in * c_out), m.add(place * TILES * c_out));
                for block in (0..blocks).step_by(2) {
                    let (u, m) = (u.add(block * c_in * L::WIDTH), m.add(block * TILES * L::WIDTH));
                    if block + 1 < blocks {
                        for t in (0..here.len()).step_by(TWO) {
                            let to = m.add(t * L::WIDTH);
                            let (u, to) = ([u, u.add(c_in * L::WIDTH)], [to, to.add(TILES * L::WIDTH)]);
                            product::<L, TWO, 2>(v.add(t * c_in), (c_in, 1), c_in, u, to, false);
                        }
                    } else {
                        for t in (0..here.len()).step_by(ONE) {
                            product::<L, ONE, 1>(v.add(t * c_in), (c_in, 1), c_in, [u], [m.add(t * L::WIDTH)], false);
                        }
                    }
                }
            }
            for run in maps.runs(here) {
                let to = y.at(((run.image * h + 2 * run.ty) * w + 2 * run.tx) * c_out);
                let below = 2 * run.ty + 1 < h;
                for block in 0..blocks {
                    for i in 0..run.len {
                        let out = answer::<L>(m.add((block * TILES + run.at + i) * L::WIDTH), TILES * c_out);
                        let to = to.add(block * L::WIDTH + 2 * i * c_out);
                        let beside = 2 * (run.tx + i) + 1 < w;
                        out[0][0].store(to);
                        if beside {
                            out[0][1].store(to.add(c_out));
                        }
                        if below {
                            out[1][0].store(to.add(w * c_out));
                        }
                        if beside && below {
                            out[1][1].store(to.add((w + 1) * c_out));
                        }
                    }
                }
            }
        }
    }
}

/// M = A g A' of one tile.
#[inline(always)]
unsafe fn into_m<L: Vector>(g: [[L; 2]; 2], to: *mut f32, step: usize) {
    unsafe {
        let zero = L::zero();
        let mut t = [[zero; 2]; 4];
        for x in 0..2 {
            let (a, b) = (g[0][x], g[1][x]);
            (t[0][x], t[1][x], t[2][x], t[3][x]) = (a, a.add(b), a.sub(b), zero.sub(b));
        }
        for y in 0..4 {
            let ([a, b], to) = (t[y], to.add(y * 4 * step));
            a.store(to);
            a.add(b).store(to.add(step));
            a.sub(b).store(to.add(2 * step));
            zero.sub(b).store(to.add(3 * step));
        }
    }
}

/// du [place][c_out / WIDTH][c_in][WIDTH] += V' M over some tiles; rows of a product as in `forward`.
#[inline(always)]
unsafe fn sum<L: Vector, const TWO: usize, const ONE: usize>(
    x: &[f32],
    g: &[f32],
    du: &mut [f32],
    maps: Maps,
    tiles: Range<usize>,
    space: &mut [f32],
) {
    let Maps { h, w, c_in, c_out, .. } = maps;
    let (v, rest) = space.split_at_mut(PLACES * TILES * c_in);
    let (m, zeros) = rest.split_at_mut(PLACES * TILES * c_out);
    zeros.fill(0.0);
    let (v, m, du, blocks) = (v.as_mut_ptr(), m.as_mut_ptr(), du.as_mut_ptr(), c_out / L::WIDTH);
    let mut wishes = Wishes::none();
    for first in tiles.clone().step_by(TILES) {
        let here = first..(first + TILES).min(tiles.end);
        unsafe {
            into_v::<L>(x, maps, here.clone(), v, zeros.as_ptr());
            for run in maps.runs(here.clone()) {
                let from = g.as_ptr().add(((run.image * h + 2 * run.ty) * w + 2 * run.tx) * c_out);
                let below = 2 * run.ty + 1 < h;
                for block in 0..blocks {
                    for i in 0..run.len {
                        let from = from.add(block * L::WIDTH + 2 * i * c_out);
                        let beside = 2 * (run.tx + i) + 1 < w;
                        let mut tile = [[L::zero(); 2]; 2];
                        tile[0][0] = L::load(from);
                        if beside {
                            tile[0][1] = L::load(from.add(c_out));
                        }
                        if below {
                            tile[1][0] = L::load(from.add(w * c_out));
                        }
                        if beside && below {
                            tile[1][1] = L::load(from.add((w + 1) * c_out));
                        }
                        into_m::<L>(tile, m.add((block * TILES + run.at + i) * L::WIDTH), TILES * c_out);
                    }
                }
            }
            let next = here.end..(here.end + TILES).min(tiles.end);
            wishes.count = 0;
            wishes.add(g.as_ptr(), maps, c_out, next.clone(), 0);
            wishes.add(x.as_ptr(), maps, c_in, next, 1);
            for place in 0..PLACES {
                wishes.ask::<L>(place);
                let (v, du, m) = (v.add(place * TILES * c_in), du.add(place * c_in * c_out), m.add(place * TILES * c_out));
                for block in (0..blocks).step_by(2) {
                    let (du, m) = (du.add(block * c_in * L::WIDTH), m.add(block * TILES * L::WIDTH) as *const f32);
                    if block + 1 < blocks {
                        for c in (0..c_in).step_by(TWO) {
                            let to = du.add(c * L::WIDTH);
                            let (m, to) = ([m, m.add(TILES * L::WIDTH)], [to, to.add(c_in * L::WIDTH)]);
                            product::<L, TWO, 2>(v.add(c), (1, c_in), here.len(), m, to, true);
                        }
                    } else {
                        for c in (0..c_in).step_by(ONE) {
                            product::<L, ONE, 1>(v.add(c), (1, c_in), here.len(), [m], [du.add(c * L::WIDTH)], true);
                        }
                    }
                }
            }
        }
    }
}

/// G' u
#[inline(always)]
unsafe fn gathered<L: Vector>(u: [L; 4], half: L) -> [L; 3] {
    unsafe {
        let (sum, difference) = (u[1].add(u[2]).mul(half), u[1].sub(u[2]).mul(half));
        [u[0].add(sum), difference, sum.add(u[3])]
    }
}

/// dw = G' (the sum of all parts' du) G for some output channels.
#[inline(always)]
unsafe fn join<L: Vector>(sums: &[f32], maps: Maps, channels: Range<usize>, dw: Shared) {
    let Maps { c_in, c_out, .. } = maps;
    let mut near = [[0f32; LANES]; 9];
    for block in channels.step_by(L::WIDTH) {
        for i in 0..c_in {
            unsafe {
                let half = L::splat(0.5);
                let mut t = [[L::zero(); 4]; 3];
                for x in 0..4 {
                    let mut u = [L::zero(); 4];
                    for y in 0..4 {
                        for part in sums.chunks_exact(PLACES * c_in * c_out) {
                            u[y] = u[y].add(L::load(part.as_ptr().add((y * 4 + x) * c_in * c_out + block * c_in + i * L::WIDTH)));
                        }
                    }
                    let column = gathered(u, half);
                    for y in 0..3 {
                        t[y][x] = column[y];
                    }
                }
                for y in 0..3 {
                    let row = gathered(t[y], half);
                    for x in 0..3 {
                        row[x].store(near[y * 3 + x].as_mut_ptr());
                    }
                }
                for o in 0..L::WIDTH {
                    let to = dw.slice(((block + o) * c_in + i) * 9, 9);
                    for k in 0..9 {
                        to[k] = near[k][o];
                    }
                }
            }
        }
    }
}
