//! Statistics behind the intervals and comparisons: bootstrap, McNemar's test, Student's t, linear CKA. Pure functions.

use rand::distributions::Distribution;
use rand_distr::Binomial;
use tch::{Kind, Tensor};

use crate::rng::Rng;

/// Mean and standard deviation over n - 1 (none for one value).
pub(crate) fn mean_std(values: &[f64]) -> (f64, Option<f64>) {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let std = (values.len() > 1).then(|| (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n - 1.0)).sqrt());
    (mean, std)
}

/// The value below which `q` of the sorted values lie, linear between neighbours (numpy's default).
pub(crate) fn quantile(sorted: &[f64], q: f64) -> f64 {
    let at = q * (sorted.len() - 1) as f64;
    let (low, part) = (at.floor() as usize, at.fract());
    let high = (low + 1).min(sorted.len() - 1);
    sorted[low] + (sorted[high] - sorted[low]) * part
}

fn central(mut draws: Vec<f64>) -> (f64, f64) {
    draws.sort_by(f64::total_cmp);
    (quantile(&draws, 0.025), quantile(&draws, 0.975))
}

fn binomial(n: u64, p: f64, rng: &mut Rng) -> u64 {
    Binomial::new(n, p.clamp(0.0, 1.0)).expect("a probability between 0 and 1").sample(rng)
}

/// The 95 % percentile bootstrap interval of an accuracy of `right` in `count`, as a fraction. The sum of a resample of zeros and ones is
/// binomial, so it is drawn as such.
pub fn bootstrap(right: u64, count: u64, resamples: usize, rng: &mut Rng) -> (f64, f64) {
    let n = count.max(1);
    let p = right as f64 / n as f64;
    central((0..resamples.max(1)).map(|_| binomial(n, p, rng) as f64 / n as f64).collect())
}

/// The 95 % percentile bootstrap interval of the mean of `values`. Equal values are drawn together: there are few different ones, and how
/// often each comes up in a resample is multinomial.
pub fn bootstrap_mean(values: &[f64], resamples: usize, rng: &mut Rng) -> (f64, f64) {
    let mut counts: Vec<(f64, u64)> = vec![];
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    for value in sorted {
        match counts.last_mut() {
            Some((last, count)) if *last == value => *count += 1,
            _ => counts.push((value, 1)),
        }
    }
    let n = values.len() as u64;
    let mut draw = || {
        let (mut left, mut images, mut sum) = (n, n, 0.0);
        for &(value, count) in &counts {
            let drawn = if images > 0 { binomial(left, count as f64 / images as f64, rng) } else { 0 };
            sum += value * drawn as f64;
            left -= drawn;
            images -= count;
        }
        sum / n as f64
    };
    central((0..resamples.max(1)).map(|_| draw()).collect())
}

/// Two classifiers on the same images: how often only the first, only the second was right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pairs {
    /// Images only the first got right.
    pub only_a: u64,
    /// Images only the second got right.
    pub only_b: u64,
    /// All images.
    pub count: u64,
}

impl Pairs {
    /// From what each got right, image by image.
    pub fn new(a: &[bool], b: &[bool]) -> Pairs {
        assert_eq!(a.len(), b.len(), "the same images");
        let only = |x: &[bool], y: &[bool]| x.iter().zip(y).filter(|(x, y)| **x && !**y).count() as u64;
        Pairs { only_a: only(a, b), only_b: only(b, a), count: a.len() as u64 }
    }

    /// Accuracy of b minus that of a, as a fraction.
    pub fn difference(&self) -> f64 {
        (self.only_b as f64 - self.only_a as f64) / self.count.max(1) as f64
    }

    /// The 95 % percentile interval of the difference when the images are drawn anew, both answers together.
    pub fn bootstrap(&self, resamples: usize, rng: &mut Rng) -> (f64, f64) {
        let n = self.count.max(1);
        let (pa, pb) = (self.only_a as f64 / n as f64, self.only_b as f64 / n as f64);
        let mut draw = || {
            let a = binomial(n, pa, rng);
            let b = if pa < 1.0 { binomial(n - a, pb / (1.0 - pa), rng) } else { 0 };
            (b as f64 - a as f64) / n as f64
        };
        central((0..resamples.max(1)).map(|_| draw()).collect())
    }

    /// Two-sided p of McNemar's test, by the binomial itself rather than its chi-squared limit.
    pub fn mcnemar(&self) -> f64 {
        let n = self.only_a + self.only_b;
        let few = self.only_a.min(self.only_b);
        if n == 0 {
            return 1.0;
        }
        // ln C(n, i) step by step.
        let mut ln_choose = 0.0;
        let mut tail = 0.0;
        for i in 0..=few {
            if i > 0 {
                ln_choose += ((n - i + 1) as f64).ln() - (i as f64).ln();
            }
            tail += (ln_choose - n as f64 * std::f64::consts::LN_2).exp();
        }
        (2.0 * tail).min(1.0)
    }
}

/// A p as a person reads it: three decimals, and powers of ten only below them.
pub(crate) fn shown_p(p: f64) -> String {
    if p >= 0.001 { format!("{p:.3}") } else { format!("{p:.1e}") }
}

/// P(|T| <= t) of Student's t with `freedom` degrees, by the finite sums of Abramowitz and Stegun 26.7.3 and 26.7.4.
fn within_t(t: f64, freedom: usize) -> f64 {
    let angle = (t / (freedom as f64).sqrt()).atan();
    let (sin, cos) = angle.sin_cos();
    let odd = freedom % 2 == 1;
    let mut term = if odd { cos } else { 1.0 };
    let mut sum = if freedom == 1 { 0.0 } else { term };
    let mut power = if odd { 3 } else { 2 };
    while power + 2 <= freedom {
        term *= (power - 1) as f64 / power as f64 * cos * cos;
        sum += term;
        power += 2;
    }
    if odd { 2.0 / std::f64::consts::PI * (angle + sin * sum) } else { sin * sum }
}

/// The t beyond which 2.5 % lie on either side.
pub fn t_975(freedom: usize) -> f64 {
    let (mut low, mut high) = (0.0, 13.0);
    for _ in 0..100 {
        let middle = 0.5 * (low + high);
        if within_t(middle, freedom) < 0.95 { low = middle } else { high = middle }
    }
    0.5 * (low + high)
}

/// Two-sided p of a paired t-test: how often draws with a mean of zero give a mean as far from it as these differences. None for one draw.
/// Equal differences have no spread to compare with: their p is 0, or 1 if they are zero.
pub fn paired_t(differences: &[f64]) -> Option<f64> {
    let (mean, std) = mean_std(differences);
    let error = std? / (differences.len() as f64).sqrt();
    if error == 0.0 {
        return Some(if mean == 0.0 { 1.0 } else { 0.0 });
    }
    Some(1.0 - within_t((mean / error).abs(), differences.len() - 1))
}

/// p values corrected for their number by Holm's method (1979), in their order: the chance of one or more false finds among all of them
/// stays below the level that a corrected value is compared with.
pub fn holm(p: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|&a, &b| p[a].total_cmp(&p[b]));
    let (mut corrected, mut least) = (vec![0.0; p.len()], 0.0f64);
    for (rank, &i) in order.iter().enumerate() {
        least = least.max((p.len() - rank) as f64 * p[i]).min(1.0);
        corrected[i] = least;
    }
    corrected
}

/// Mean and the half-width of its 95 % interval over independent draws (none for one draw).
pub fn mean_interval(values: &[f64]) -> (f64, Option<f64>) {
    let (mean, std) = mean_std(values);
    (mean, std.map(|s| t_975(values.len() - 1) * s / (values.len() as f64).sqrt()))
}

/// Linear CKA of two sets of features of the same images, Kornblith et al. 2019: |Y'X|^2 / (|X'X| |Y'Y|), columns centred.
pub fn linear_cka(x: &Tensor, y: &Tensor) -> f64 {
    let centred = |t: &Tensor| {
        let t = t.to_kind(Kind::Double);
        &t - t.mean_dim(0, true, Kind::Double)
    };
    let (x, y) = (centred(x), centred(y));
    let norm = |a: &Tensor, b: &Tensor| a.transpose(0, 1).matmul(b).norm().double_value(&[]);
    norm(&y, &x).powi(2) / (norm(&x, &x) * norm(&y, &y))
}
