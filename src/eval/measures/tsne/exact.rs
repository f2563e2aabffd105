//! t-SNE in which every pair of points repels (van der Maaten and Hinton 2008): no tree and no grid, so nothing is approximated there.
//! For as many points as people look at, sixteen pairs at a time on all threads are faster than a tree. Every sum is taken in one
//! order, whatever the threads and the instructions, so the same features give the same map.

use std::ops::Range;

use rayon::prelude::*;
use tch::{Kind, Tensor};

use super::map::conditional;
use crate::nets::{Instructions, instructions};

/// Pairs computed together.
const LANES: usize = 16;
/// Points whose forces are one piece of work for a thread.
const PIECE: usize = 64;
/// Where points stand that fill up the last sixteen: so far away that 1 / distance^4 is 0 in f32.
const FAR: f32 = 1e15;
/// As in the authors' code: gains grow by a summand and shrink by a factor.
const GAIN_UP: f32 = 0.2;
const GAIN_DOWN: f32 = 0.8;
const LEAST_GAIN: f32 = 0.01;

/// One stretch of gradient descent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Phase {
    pub iterations: usize,
    /// How much stronger points attract each other.
    pub exaggeration: f32,
    /// For a gradient without the factor 4, as openTSNE has it.
    pub rate: f32,
    pub momentum: f32,
}

/// P of t-SNE over the nearest neighbours, symmetric; its numbers add up to 1. Row i is `columns` and `values` in `starts[i]..starts[i + 1]`.
struct Affinities {
    starts: Vec<usize>,
    columns: Vec<u32>,
    values: Vec<f32>,
}

impl Affinities {
    /// Of the rows of `x` [N, D]: a Gaussian of this perplexity over three times as many neighbours, as every fast t-SNE takes.
    fn new(x: &Tensor, perplexity: f64) -> Affinities {
        let n = x.size()[0] as usize;
        let near = ((3.0 * perplexity) as usize).clamp(1, n - 1);
        let (columns, squares) = neighbours(x, near);
        let given: Vec<Vec<f64>> = squares.par_chunks(near).map(|d| conditional(d, usize::MAX, perplexity)).collect();
        let mut rows: Vec<Vec<(u32, f64)>> = vec![Vec::with_capacity(2 * near); n];
        for (i, p) in given.iter().enumerate() {
            for (&j, &p) in columns[i * near..(i + 1) * near].iter().zip(p) {
                let half = p / (2 * n) as f64;
                rows[i].push((j, half));
                rows[j as usize].push((i as u32, half));
            }
        }
        let mut all = Affinities { starts: vec![0], columns: vec![], values: vec![] };
        for mut row in rows {
            row.sort_by_key(|(j, _)| *j);
            // A pair that are neighbours of each other stands twice.
            for same in row.chunk_by(|a, b| a.0 == b.0) {
                all.columns.push(same[0].0);
                all.values.push(same.iter().map(|(_, p)| p).sum::<f64>() as f32);
            }
            all.starts.push(all.columns.len());
        }
        all
    }
}

/// The nearest other rows of every row of `x` [N, D], and the squares of their distances; `near` of each, the nearest first.
fn neighbours(x: &Tensor, near: usize) -> (Vec<u32>, Vec<f64>) {
    const ROWS: i64 = 512;
    let _guard = tch::no_grad_guard();
    let x = x.to_kind(Kind::Double);
    // Distances do not change, and small numbers lose less in |a|^2 + |b|^2 - 2ab.
    let x = &x - x.mean_dim(0, true, Kind::Double);
    let (n, lengths) = (x.size()[0], x.square().sum_dim_intlist(1, false, Kind::Double));
    let (mut columns, mut squares) = (vec![], vec![]);
    for from in (0..n).step_by(ROWS as usize) {
        let count = ROWS.min(n - from);
        let rows = x.narrow(0, from, count);
        let mut d = lengths.narrow(0, from, count).unsqueeze(1) + &lengths - rows.matmul(&x.transpose(0, 1)) * 2.0;
        let _ = d.narrow(1, from, count).diagonal(0, 0, 1).fill_(f64::INFINITY);
        let (nearest, which) = d.clamp_min_(0.0).topk(near as i64, 1, false, true);
        let read = Vec::<i64>::try_from(which.contiguous().view(-1)).expect("a vector of places");
        columns.extend(read.into_iter().map(|j| j as u32));
        squares.extend(Vec::<f64>::try_from(nearest.contiguous().view(-1)).expect("a vector of distances"));
    }
    (columns, squares)
}

/// Points of the plane, filled up to a multiple of `LANES`.
struct Plane {
    x: Vec<f32>,
    y: Vec<f32>,
    /// How many there are.
    points: usize,
}

/// What all other points do to one: the sums of q^2 (y_i - y_j), and of q = 1 / (1 + |y_i - y_j|^2).
#[derive(Debug, Clone, Copy, Default)]
struct Repulsion {
    x: f32,
    y: f32,
    q: f32,
}

impl Plane {
    fn new(start: &[[f64; 2]]) -> Plane {
        let axis = |k: usize| {
            let mut axis: Vec<f32> = start.iter().map(|p| p[k] as f32).collect();
            axis.resize(start.len().next_multiple_of(LANES), FAR);
            axis
        };
        Plane { x: axis(0), y: axis(1), points: start.len() }
    }

    /// Of some points; a point's own q of 1 is left out.
    #[inline(always)]
    fn repulsions(&self, of: Range<usize>, out: &mut [Repulsion]) {
        let (xs, _) = self.x.as_chunks::<LANES>();
        let (ys, _) = self.y.as_chunks::<LANES>();
        for (i, out) in of.zip(out) {
            let (x, y) = (self.x[i], self.y[i]);
            let (mut sum_x, mut sum_y, mut sum_q) = ([0f32; LANES], [0f32; LANES], [0f32; LANES]);
            for (xs, ys) in xs.iter().zip(ys) {
                for k in 0..LANES {
                    let (dx, dy) = (x - xs[k], y - ys[k]);
                    let q = 1.0 / (1.0 + dx * dx + dy * dy);
                    sum_q[k] += q;
                    sum_x[k] += q * q * dx;
                    sum_y[k] += q * q * dy;
                }
            }
            *out = Repulsion { x: sum_x.iter().sum(), y: sum_y.iter().sum(), q: sum_q.iter().sum::<f32>() - 1.0 };
        }
    }

    /// The same, compiled for the instructions that kernels may use here. None of them joins a product and a sum: all give the same bits.
    fn repulsions_with(&self, with: Option<Instructions>, of: Range<usize>, out: &mut [Repulsion]) {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f")]
        fn avx512(plane: &Plane, of: Range<usize>, out: &mut [Repulsion]) {
            plane.repulsions(of, out)
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2")]
        fn avx2(plane: &Plane, of: Range<usize>, out: &mut [Repulsion]) {
            plane.repulsions(of, out)
        }
        match with {
            // SAFETY: `instructions` and `available` name only what the machine has.
            #[cfg(target_arch = "x86_64")]
            Some(Instructions::Avx512) => unsafe { avx512(self, of, out) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Some(Instructions::Avx2) => unsafe { avx2(self, of, out) },
            None => self.repulsions(of, out),
        }
    }

    /// Of all points, and the sum of all q.
    fn repel(&self, with: Option<Instructions>, out: &mut [Repulsion]) -> f64 {
        out.par_chunks_mut(PIECE).enumerate().for_each(|(k, out)| {
            let from = k * PIECE;
            self.repulsions_with(with, from..from + out.len(), out)
        });
        out.iter().map(|r| f64::from(r.q)).sum()
    }

    /// The sum of p q (y_i - y_j) over the neighbours j of point i.
    fn attraction(&self, p: &Affinities, i: usize) -> [f32; 2] {
        let (x, y) = (self.x[i], self.y[i]);
        let row = p.starts[i]..p.starts[i + 1];
        let (mut sum_x, mut sum_y) = ([0f32; LANES], [0f32; LANES]);
        for (columns, values) in p.columns[row.clone()].chunks(LANES).zip(p.values[row].chunks(LANES)) {
            for (k, (&j, &p)) in columns.iter().zip(values).enumerate() {
                let (dx, dy) = (x - self.x[j as usize], y - self.y[j as usize]);
                let pq = p / (1.0 + dx * dx + dy * dy);
                sum_x[k] += pq * dx;
                sum_y[k] += pq * dy;
            }
        }
        [sum_x.iter().sum(), sum_y.iter().sum()]
    }

    /// d KL / d y_i, without its factor 4, of every point: attraction times `exaggeration`, less repulsion.
    fn gradient(&self, p: &Affinities, exaggeration: f32, repulsions: &[Repulsion], all_q: f64) -> Vec<[f32; 2]> {
        let least = (1.0 / all_q) as f32;
        let of = |(i, r): (usize, &Repulsion)| {
            let [x, y] = self.attraction(p, i);
            [exaggeration * x - r.x * least, exaggeration * y - r.y * least]
        };
        repulsions.par_iter().enumerate().with_min_len(PIECE).map(of).collect()
    }

    /// The middle of all points goes to the origin: it means nothing, and f32 has most digits there.
    fn centre(&mut self) {
        for axis in [&mut self.x, &mut self.y] {
            let axis = &mut axis[..self.points];
            let mean = (axis.iter().map(|&v| f64::from(v)).sum::<f64>() / axis.len() as f64) as f32;
            axis.iter_mut().for_each(|v| *v -= mean);
        }
    }
}

/// Maps `x` [N, D] from `start`, phase after phase; `tick` is called after every iteration.
pub(super) fn embed(x: &Tensor, start: &[[f64; 2]], perplexity: f64, phases: &[Phase], tick: &dyn Fn()) -> Vec<[f64; 2]> {
    let p = Affinities::new(x, perplexity);
    let with = instructions();
    let mut plane = Plane::new(start);
    let mut repulsions = vec![Repulsion::default(); plane.points];
    for phase in phases {
        let mut velocity = vec![[0f32; 2]; plane.points];
        let mut gains = vec![[1f32; 2]; plane.points];
        for _ in 0..phase.iterations {
            let all_q = plane.repel(with, &mut repulsions);
            let gradient = plane.gradient(&p, phase.exaggeration, &repulsions, all_q);
            for (i, ((g, v), gain)) in gradient.iter().zip(&mut velocity).zip(&mut gains).enumerate() {
                for (k, axis) in [&mut plane.x, &mut plane.y].into_iter().enumerate() {
                    // A gradient that keeps pushing the way the point moves goes faster (Jacobs 1988).
                    let onwards = (g[k] > 0.0) != (v[k] > 0.0);
                    gain[k] = if onwards { gain[k] + GAIN_UP } else { (gain[k] * GAIN_DOWN).max(LEAST_GAIN) };
                    v[k] = phase.momentum * v[k] - phase.rate * gain[k] * g[k];
                    axis[i] += v[k];
                }
            }
            plane.centre();
            tick();
        }
    }
    (0..plane.points).map(|i| [f64::from(plane.x[i]), f64::from(plane.y[i])]).collect()
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;
    use crate::nets::available;

    /// Points and a start that are not on a line, the same everywhere.
    fn clouds(n: usize) -> (Tensor, Vec<[f64; 2]>) {
        let wave = |i: usize, k: usize| ((i * 7 + k * 13) as f64 * 0.37).sin() + if i % 3 == k { 3.0 } else { 0.0 };
        let flat: Vec<f64> = (0..n).flat_map(|i| (0..5).map(move |k| wave(i, k))).collect();
        let start = (0..n).map(|i| [wave(i, 0) * 0.5, wave(i, 1) * 0.5]).collect();
        (Tensor::from_slice(&flat).view([n as i64, 5]), start)
    }

    /// KL(P || Q) as it is defined, in f64, P as given.
    fn kl(p: &Affinities, y: &[[f64; 2]]) -> f64 {
        let q = |i: usize, j: usize| 1.0 / (1.0 + (y[i][0] - y[j][0]).powi(2) + (y[i][1] - y[j][1]).powi(2));
        let all: f64 = (0..y.len()).flat_map(|i| (0..y.len()).filter(move |j| *j != i).map(move |j| (i, j))).map(|(i, j)| q(i, j)).sum();
        let row = |i: usize| p.columns[p.starts[i]..p.starts[i + 1]].iter().zip(&p.values[p.starts[i]..p.starts[i + 1]]);
        let term = |i: usize, j: usize, p: f64| p * (p / (q(i, j) / all)).ln();
        (0..y.len()).map(|i| row(i).map(|(&j, &p)| term(i, j as usize, f64::from(p))).sum::<f64>()).sum()
    }

    #[test]
    fn affinities_are_those_of_all_pairs_where_all_are_neighbours() {
        // Three times the perplexity are all 12 others: P must be p_{j|i} by the definition, made symmetric.
        let (x, _) = clouds(13);
        let p = Affinities::new(&x, 4.0);
        assert_eq!(p.columns.len(), 13 * 12);
        assert!((p.values.iter().map(|&v| f64::from(v)).sum::<f64>() - 1.0).abs() < 1e-6);
        let flat = Vec::<f64>::try_from(x.view(-1)).unwrap();
        let square = |i: usize, j: usize| (0..5).map(|k| (flat[i * 5 + k] - flat[j * 5 + k]).powi(2)).sum::<f64>();
        // The perplexity of a row of conditionals is what was asked for; here they are taken apart again by that definition.
        let given = |i: usize| {
            let d: Vec<f64> = (0..13).map(|j| square(i, j)).collect();
            let entropy = |beta: f64| {
                let e: Vec<f64> = (0..13).map(|j| if j == i { 0.0 } else { (-beta * d[j]).exp() }).collect();
                let z: f64 = e.iter().sum();
                (e.iter().filter(|e| **e > 0.0).map(|e| -(e / z) * (e / z).ln()).sum::<f64>(), e, z)
            };
            let (mut low, mut high) = (1e-9, 1e3);
            for _ in 0..200 {
                let middle = f64::sqrt(low * high);
                if entropy(middle).0 > 4f64.ln() { low = middle } else { high = middle }
            }
            let (_, e, z) = entropy(low);
            e.into_iter().map(|e| e / z).collect::<Vec<f64>>()
        };
        let rows: Vec<Vec<f64>> = (0..13).map(given).collect();
        for i in 0..13 {
            for (&j, &value) in p.columns[p.starts[i]..p.starts[i + 1]].iter().zip(&p.values[p.starts[i]..]) {
                let wanted = (rows[i][j as usize] + rows[j as usize][i]) / 26.0;
                assert!((f64::from(value) - wanted).abs() < 1e-6, "{i} {j}: {value} {wanted}");
            }
        }
    }

    #[test]
    fn the_gradient_is_that_of_the_divergence() {
        // Central differences of KL(P || Q) in f64; 37 points leave the last sixteen half empty.
        let (x, start) = clouds(37);
        let p = Affinities::new(&x, 5.0);
        let plane = Plane::new(&start);
        let mut repulsions = vec![Repulsion::default(); 37];
        let all_q = plane.repel(None, &mut repulsions);
        let gradient = plane.gradient(&p, 1.0, &repulsions, all_q);
        let largest = gradient.iter().flatten().fold(0f32, |most, g| most.max(g.abs()));
        for i in [0, 1, 15, 16, 36] {
            for k in 0..2 {
                let at = |step: f64| {
                    let mut moved = start.clone();
                    moved[i][k] += step;
                    kl(&p, &moved)
                };
                let wanted = (at(1e-5) - at(-1e-5)) / 2e-5 / 4.0;
                assert!(
                    (f64::from(gradient[i][k]) - wanted).abs() < 2e-6 * f64::from(largest).max(1.0),
                    "{i} {k}: {} {wanted}",
                    gradient[i][k]
                );
            }
        }
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        let (_, start) = clouds(531);
        let plane = Plane::new(&start);
        let bits = |with: Option<Instructions>| {
            let mut out = vec![Repulsion::default(); 531];
            let all = plane.repel(with, &mut out);
            (all.to_bits(), out.iter().map(|r| [r.x.to_bits(), r.y.to_bits(), r.q.to_bits()]).collect::<Vec<_>>())
        };
        let plain = bits(None);
        available().for_each(|with| assert_eq!(bits(Some(with)), plain, "{}", with.name()));
    }

    #[test]
    fn the_nearest_are_found_by_their_distances() {
        // On a line: 0, 1, 3, 7, and 7 once more.
        let x = Tensor::from_slice(&[0.0f32, 1.0, 3.0, 7.0, 7.0]).view([5, 1]).to_device(Device::Cpu);
        let (columns, squares) = neighbours(&x, 2);
        assert_eq!(columns, [1, 2, 0, 2, 1, 0, 4, 2, 3, 2]);
        let wanted = [1.0, 9.0, 1.0, 4.0, 4.0, 9.0, 0.0, 16.0, 0.0, 16.0];
        assert!(squares.iter().zip(wanted).all(|(a, b): (&f64, f64)| (a - b).abs() < 1e-12), "{squares:?}");
    }
}
