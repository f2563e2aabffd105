//! Every path against the definition of a convolution, in f64.

use super::super::lanes::available;
use super::*;

/// Calls `visit` with the places in x, w and y of every product that a convolution is the sum of: y += x w, dx += g w, dw += x g.
fn products(maps: Maps, mut visit: impl FnMut(usize, usize, usize)) {
    let Maps { images, h, w, c_in, c_out } = maps;
    for (image, y, x) in (0..images * h * w).map(|at| (at / (h * w), at / w % h, at % w)) {
        for (ky, kx) in (0..9).map(|k| (k / 3, k % 3)) {
            if !(1..=h).contains(&(y + ky)) || !(1..=w).contains(&(x + kx)) {
                continue; // a zero of the padding
            }
            let (from, to) = ((image * h + y + ky - 1) * w + x + kx - 1, (image * h + y) * w + x);
            for (o, i) in (0..c_out * c_in).map(|at| (at / c_in, at % c_in)) {
                visit(from * c_in + i, (o * c_in + i) * 9 + ky * 3 + kx, to * c_out + o);
            }
        }
    }
}

/// Noise between -1 and 1, the same for one seed.
fn noise(len: usize, seed: u64) -> Vec<f32> {
    use rand::Rng as _;
    let mut rng = crate::rng::stream(seed, "noise", &[]);
    (0..len).map(|_| rng.gen_range(-1f32..1.0)).collect()
}

fn error(got: &[f32], want: &[f64]) -> f64 {
    let most = |values: &mut dyn Iterator<Item = f64>| values.fold(0f64, |most, v| most.max(v.abs()));
    most(&mut got.iter().zip(want).map(|(&g, w)| g as f64 - w)) / most(&mut want.iter().copied())
}

#[test]
fn every_path_is_the_definition() {
    for (images, h, w, c_in, c_out) in [(1, 4, 4, 16, 16), (3, 7, 5, 16, 32), (2, 8, 8, 48, 16), (3, 9, 6, 32, 64), (2, 16, 16, 16, 16)] {
        let maps = Maps { images, h, w, c_in, c_out };
        let (x, g) = (noise(images * h * w * c_in, 1), noise(images * h * w * c_out, 2));
        let weight = noise(9 * c_in * c_out, 3);
        let (mut y, mut dx, mut dw) = (vec![0f64; g.len()], vec![0f64; x.len()], vec![0f64; weight.len()]);
        products(maps, |ix, iw, iy| {
            let (x, w, g) = (x[ix] as f64, weight[iw] as f64, g[iy] as f64);
            (y[iy], dx[ix], dw[iw]) = (y[iy] + x * w, dx[ix] + g * w, dw[iw] + x * g);
        });
        for with in available() {
            for parts in [1, 2, 5] {
                let mut got = [vec![f32::NAN; y.len()], vec![f32::NAN; dx.len()], vec![f32::NAN; dw.len()]];
                let [to_y, to_dx, to_dw] = got.each_mut().map(|t| Shared(t.as_mut_ptr()));
                convolve(&x, &weight, to_y, maps, false, with, parts);
                convolve(&g, &weight, to_dx, Maps { c_in: c_out, c_out: c_in, ..maps }, true, with, parts);
                weight_gradient(&x, &g, to_dw, maps, with, parts);
                for (what, got, want) in [("y", &got[0], &y), ("dx", &got[1], &dx), ("dw", &got[2], &dw)] {
                    let error = error(got, want);
                    assert!(error < 1e-6, "{what} of {images} x {h} x {w}, {c_in} to {c_out}, {with:?}, {parts} parts: {error}");
                }
            }
        }
    }
}

/// Outputs do not depend on how tiles are shared.
#[test]
fn any_number_of_threads_gives_one_output() {
    let maps = Maps { images: 5, h: 6, w: 7, c_in: 16, c_out: 32 };
    let (x, weight) = (noise(5 * 42 * 16, 1), noise(9 * 16 * 32, 3));
    for with in available() {
        let run = |parts: usize| {
            let mut y = vec![0f32; 5 * 42 * 32];
            convolve(&x, &weight, Shared(y.as_mut_ptr()), maps, false, with, parts);
            y
        };
        assert!((2..6).all(|parts| run(parts) == run(1)), "{with:?}");
    }
}
