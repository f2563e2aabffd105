//! Maps of features in the plane: the shared PCA start, and how far a map may be believed (exact KL divergence, neighbours kept).

use rayon::prelude::*;
use tch::{Kind, Tensor};

use crate::error::{Error, Result};

/// The first two principal components of `x` [N, D], scaled so that the first has a standard deviation of 1e-4: the start scikit-learn and
/// openTSNE use. Signs are fixed by the largest entry of each axis. Returns N pairs.
pub fn pca_start(x: &Tensor) -> Vec<[f64; 2]> {
    let _guard = tch::no_grad_guard();
    let x = x.to_kind(Kind::Double);
    let x = &x - x.mean_dim(0, true, Kind::Double);
    let (_, axes) = x.transpose(0, 1).matmul(&x).linalg_eigh("L"); // ascending
    let dim = axes.size()[1];
    let axis = |k: i64| {
        let axis = if k < dim { axes.select(1, dim - 1 - k) } else { axes.select(1, 0).zeros_like() };
        let largest = axis.abs().argmax(0, false).int64_value(&[]);
        if axis.double_value(&[largest]) < 0.0 { -axis } else { axis }
    };
    let (a, b) = (x.matmul(&axis(0)), x.matmul(&axis(1)));
    let std = a.square().mean(Kind::Double).sqrt().double_value(&[]).max(f64::MIN_POSITIVE);
    let read = |t: Tensor| Vec::<f64>::try_from(t * (1e-4 / std)).expect("a vector of doubles");
    read(a).into_iter().zip(read(b)).map(|(a, b)| [a, b]).collect()
}

/// Columns of several feature sets side by side, each set scaled to unit total variance: one start for all panels of a figure.
pub fn side_by_side(sets: &[Tensor]) -> Tensor {
    let _guard = tch::no_grad_guard();
    let scaled: Vec<Tensor> = sets
        .iter()
        .map(|x| {
            let x = x.to_kind(Kind::Double);
            let x = &x - x.mean_dim(0, true, Kind::Double);
            let total = x.square().sum(Kind::Double).double_value(&[]).sqrt();
            x / total.max(f64::MIN_POSITIVE)
        })
        .collect();
    Tensor::cat(&scaled, 1)
}

/// Squared Euclidean distances from row i to all rows.
fn distances(x: &[f64], dim: usize, i: usize) -> Vec<f64> {
    let own = &x[i * dim..(i + 1) * dim];
    x.chunks_exact(dim).map(|row| row.iter().zip(own).map(|(a, b)| (a - b) * (a - b)).sum()).collect()
}

fn rows(x: &Tensor) -> (Vec<f64>, usize) {
    let flat = x.to_kind(Kind::Double).contiguous().view(-1);
    (Vec::try_from(flat).expect("a vector of doubles"), x.size()[1] as usize)
}

/// p_{j|i} of t-SNE: a Gaussian around point i whose entropy is ln(perplexity), over all other points; over all of `d` where i is none.
pub(super) fn conditional(d: &[f64], i: usize, perplexity: f64) -> Vec<f64> {
    let nearest = d.iter().enumerate().filter(|(j, _)| *j != i).map(|(_, d)| *d).fold(f64::INFINITY, f64::min);
    let (target, mut beta, mut low, mut high) =
        (perplexity.ln(), (d.len() as f64 / d.iter().sum::<f64>()).min(f64::MAX), 0.0, f64::INFINITY);
    let mut p = vec![0.0; d.len()];
    for _ in 0..200 {
        let (mut z, mut mean, mut square) = (0.0, 0.0, 0.0);
        for (j, (p, d)) in p.iter_mut().zip(d).enumerate() {
            // Relative to the nearest, so that the sum never vanishes.
            let d = d - nearest;
            *p = if j == i { 0.0 } else { (-beta * d).exp() };
            z += *p;
            mean += *p * d;
            square += *p * d * d;
        }
        (mean, square) = (mean / z, square / z);
        let over = z.ln() + beta * mean - target;
        if over.abs() < 1e-7 {
            break;
        }
        if over > 0.0 {
            low = beta
        } else {
            high = beta
        }
        // Newton in ln(beta), where the entropy is nearly straight; never by more than e^2 at once, for it is flat where all distances are
        // alike. Where it leaves the bracket, the middle of that.
        let newton = beta * (over / (beta * beta * (square - mean * mean)).max(1e-12)).clamp(-2.0, 2.0).exp();
        beta = if newton > low && newton < high { newton } else { (low * high).sqrt() };
    }
    let z: f64 = p.iter().sum();
    p.iter_mut().for_each(|p| *p /= z);
    p
}

/// KL(P || Q) of a map `y` of the points `x` [N, D]: P over all pairs at this perplexity, symmetrised; Q the Student kernel. No tree, no
/// grid, no list of neighbours: O(N^2) time and memory.
pub fn kl(x: &Tensor, y: &[[f64; 2]], perplexity: f64) -> Result<f64> {
    let n = y.len();
    if x.size()[0] as usize != n || n < 3 || perplexity >= n as f64 {
        return Err(Error::input(format!(
            "t-SNE divergence of {n} points with {} feature rows at perplexity {perplexity}: need as many rows as points and a perplexity below that",
            x.size()[0]
        )));
    }
    let (flat, dim) = rows(x);
    // f32: the values are probabilities of pairs, summed in f64.
    let conditionals: Vec<Vec<f32>> = (0..n)
        .into_par_iter()
        .map(|i| conditional(&distances(&flat, dim, i), i, perplexity).into_iter().map(|p| p as f32).collect())
        .collect();
    let student = |i: usize, j: usize| 1.0 / (1.0 + (y[i][0] - y[j][0]).powi(2) + (y[i][1] - y[j][1]).powi(2));
    let sums: Vec<f64> = (0..n).into_par_iter().map(|i| (0..n).filter(|&j| j != i).map(|j| student(i, j)).sum()).collect();
    let z: f64 = sums.iter().sum();
    let parts: Vec<f64> = (0..n)
        .into_par_iter()
        .map(|i| {
            let term = |j: usize| {
                let p = (f64::from(conditionals[i][j]) + f64::from(conditionals[j][i])) / (2.0 * n as f64);
                if p > 0.0 { p * (p / (student(i, j) / z)).ln() } else { 0.0 }
            };
            (0..n).filter(|&j| j != i).map(term).sum()
        })
        .collect();
    Ok(parts.iter().sum())
}

/// The `k` nearest of other rows, by their distances from row i.
fn nearest(d: &[f64], i: usize, k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..d.len()).filter(|&j| j != i).collect();
    order.select_nth_unstable_by(k - 1, |&a, &b| d[a].total_cmp(&d[b]).then(a.cmp(&b)));
    order.truncate(k);
    order
}

/// The class that most of a row's `k` nearest other rows have; of equally many the nearest's.
pub fn vote(x: &Tensor, labels: &[usize], k: usize) -> Vec<usize> {
    let (flat, dim) = rows(x);
    let answer = |i: usize| {
        let d = distances(&flat, dim, i);
        let mut near = nearest(&d, i, k);
        near.sort_by(|&a, &b| d[a].total_cmp(&d[b]).then(a.cmp(&b)));
        let votes = |class: usize| near.iter().filter(|&&j| labels[j] == class).count();
        // The last of equals is taken, so the nearest stands last.
        near.iter().rev().map(|&j| labels[j]).max_by_key(|class| votes(*class)).expect("at least one neighbour")
    };
    (0..labels.len()).into_par_iter().map(answer).collect()
}

/// The mean share of a point's `k` nearest neighbours in `x` that are among its `k` nearest in the map.
pub fn neighbours_kept(x: &Tensor, y: &[[f64; 2]], k: usize) -> f64 {
    let (flat, dim) = rows(x);
    let plane: Vec<f64> = y.iter().flatten().copied().collect();
    let kept: Vec<usize> = (0..y.len())
        .into_par_iter()
        .map(|i| {
            let high = nearest(&distances(&flat, dim, i), i, k);
            let low = nearest(&distances(&plane, 2, i), i, k);
            high.iter().filter(|j| low.contains(j)).count()
        })
        .collect();
    kept.iter().sum::<usize>() as f64 / (k * y.len()) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_neighbours_have_their_way_and_of_equals_the_nearest() {
        // On a line: two of class 0, one of class 1, and the image itself has no vote.
        let x = Tensor::from_slice(&[0.0f64, 1.0, 3.0, 3.5]).view([4, 1]);
        let labels = [0, 0, 1, 1];
        // 0.0 sees 1.0 (0) and 3.0 (1): the nearest; 3.0 sees 3.5 (1) and 1.0 (0): the nearest.
        assert_eq!(vote(&x, &labels, 2), [0, 0, 1, 1]);
        // All three others: 0.0 sees 0, 1, 1.
        assert_eq!(vote(&x, &labels, 3), [1, 1, 0, 0]);
    }
}
