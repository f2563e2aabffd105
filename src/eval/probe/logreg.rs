//! Multinomial logistic regression by L-BFGS (Liu and Nocedal 1989) with a strong Wolfe line search (Nocedal and Wright, algorithms 3.5
//! and 3.6), on scikit-learn's objective: mean cross-entropy + |W|^2 / (2 C n), the bias free. `C` means what it means there. Steps are
//! preconditioned with the second moments of the features (Boehning 1992: they bound the Hessian), so that features of very different
//! scale, as networks give them, do not cost thousands of iterations.

use std::collections::VecDeque;

use linfa::traits::{Fit, Predict};
use ndarray::Array2;
use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::system::device;

/// How a fit is made.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Inverse strength of the penalty.
    pub c: f64,
    /// Stop when no entry of the gradient is larger.
    pub tolerance: f64,
    /// Stop after so many, converged or not.
    pub max_iterations: usize,
}

/// A linear classifier: `weight` `[C, D]`, `bias` `[C]`, f64.
pub struct Classifier {
    /// `[C, D]`.
    pub weight: Tensor,
    /// `[C]`.
    pub bias: Tensor,
}

/// A fit and how it ended.
pub struct Fitted {
    /// What was found.
    pub classifier: Classifier,
    /// The objective there.
    pub loss: f64,
    /// Steps that were taken.
    pub iterations: usize,
    /// How often loss and gradient were computed.
    pub evaluations: usize,
    /// Largest entry of the gradient at the end.
    pub gradient: f64,
    /// The tolerance was met, or f64 has nothing left to gain.
    pub converged: bool,
}

impl Classifier {
    /// Logits of `x` [N, D] in its own precision.
    pub fn scores(&self, x: &Tensor) -> Tensor {
        x.linear(&self.weight.to_kind(x.kind()), Some(&self.bias.to_kind(x.kind())))
    }
}

/// Steps kept to model the curvature; scipy's number.
const HISTORY: usize = 10;
/// Scores held at once; more rows go in parts.
const MAX_SCORES: i64 = 16_000_000;

/// Products of one pass over the rows below which one thread does it all.
const ALONE: i64 = 8_000_000;

/// Fits `x` `[N, D]` with labels `y` `[N]` in 0 .. classes. The products are computed in the precision of `x`, and in f64 from where f32 can
/// tell no better from worse; everything else in f64. `start` continues from a neighbouring fit (a path over C).
pub fn fit(x: &Tensor, y: &Tensor, classes: i64, options: Options, start: Option<&Classifier>) -> Result<Fitted> {
    let _guard = tch::no_grad_guard();
    check(x, y, classes, options)?;
    let dim = x.size()[1];
    let _alone = (x.numel() as i64 * classes < ALONE).then(device::alone);
    let start = start.map_or_else(
        || Tensor::zeros([classes, dim + 1], (Kind::Double, x.device())),
        |c| Tensor::cat(&[&c.weight, &c.bias.unsqueeze(1)], 1),
    );
    let mut fitted = descend(&Objective::new(x, y, classes, options.c), start, options);
    if x.kind() != Kind::Double && !fitted.within(options) && fitted.iterations < options.max_iterations {
        let rest = Options { max_iterations: options.max_iterations - fitted.iterations, ..options };
        let finer = descend(&Objective::new(&x.to_kind(Kind::Double), y, classes, options.c), fitted.at.point, rest);
        let (iterations, evaluations) = (fitted.iterations + finer.iterations, fitted.evaluations + finer.evaluations);
        fitted = Descent { iterations, evaluations, ..finer };
    }
    let Descent { at, iterations, evaluations, converged } = fitted;
    if !at.loss.is_finite() {
        return Err(Error::failed(format!(
            "logistic regression with C = {}: the loss is {}; are the features finite?",
            options.c, at.loss
        )));
    }
    let weight = at.point.narrow(1, 0, dim).contiguous();
    let bias = at.point.select(1, dim).contiguous();
    let (loss, gradient) = (at.loss, at.largest());
    Ok(Fitted { classifier: Classifier { weight, bias }, loss, iterations, evaluations, gradient, converged })
}

/// Where a descent in one precision ended.
struct Descent {
    at: At,
    iterations: usize,
    evaluations: usize,
    /// The tolerance was met, or f64 has nothing left to gain.
    converged: bool,
}

impl Descent {
    fn within(&self, options: Options) -> bool {
        self.at.largest() <= options.tolerance
    }
}

fn descend(objective: &Objective, start: Tensor, options: Options) -> Descent {
    let mut at = objective.at(start);
    let mut memory = Memory::default();
    let (mut iterations, mut converged) = (0, false);
    // What a sum in f32 can still tell apart; scipy stops at 64 units in the last place of f64.
    let flat = if objective.x.kind() == Kind::Double { 64.0 * f64::EPSILON } else { 1e-9 };
    while iterations < options.max_iterations {
        if at.largest() <= options.tolerance {
            converged = true;
            break;
        }
        let mut direction = memory.direction(&at.gradient, &objective.preconditioner);
        let mut slope = dot(&direction, &at.gradient);
        if slope >= 0.0 {
            memory = Memory::default();
            direction = memory.direction(&at.gradient, &objective.preconditioner);
            slope = dot(&direction, &at.gradient);
        }
        let Some(next) = search(objective, &at, &direction, slope) else { break };
        iterations += 1;
        let gain = (at.loss - next.loss) / at.loss.abs().max(next.loss.abs()).max(1.0);
        memory.push(&next.point - &at.point, &next.gradient - &at.gradient);
        at = next;
        if gain <= flat {
            // Nothing left to gain in this precision.
            converged = true;
            break;
        }
    }
    Descent { at, iterations, evaluations: objective.count.get(), converged }
}

fn check(x: &Tensor, y: &Tensor, classes: i64, options: Options) -> Result<()> {
    if x.dim() != 2 || y.dim() != 1 || x.size()[0] != y.size()[0] || x.size()[0] == 0 {
        return Err(Error::input(format!(
            "logistic regression: features {:?} and labels {:?}; accepted: [N, D] and [N] with N above 0",
            x.size(),
            y.size()
        )));
    }
    if !(options.c > 0.0 && options.c.is_finite()) {
        return Err(Error::input(format!("logistic regression: C = {}; accepted: a number above 0", options.c)));
    }
    let (low, high) = (y.min().int64_value(&[]), y.max().int64_value(&[]));
    if low < 0 || high >= classes {
        return Err(Error::input(format!(
            "logistic regression: labels from {low} to {high} for {classes} classes; accepted: 0 to {}",
            classes - 1
        )));
    }
    Ok(())
}

fn dot(a: &Tensor, b: &Tensor) -> f64 {
    (a * b).sum(Kind::Double).double_value(&[])
}

struct Objective {
    /// The features and a column of ones for the bias, [N, D + 1].
    x: Tensor,
    y: Tensor,
    /// 1 / (C n), and 0 for the bias: [D + 1].
    penalty: Tensor,
    /// The inverse of the second moments of `x` plus the penalty, [D + 1, D + 1].
    preconditioner: Tensor,
    rows: i64,
    count: std::cell::Cell<usize>,
}

/// The objective at a point.
struct At {
    point: Tensor,
    loss: f64,
    gradient: Tensor,
}

impl At {
    fn largest(&self) -> f64 {
        self.gradient.abs().max().double_value(&[])
    }
}

impl Objective {
    fn new(x: &Tensor, y: &Tensor, classes: i64, c: f64) -> Objective {
        let (n, dim) = (x.size()[0], x.size()[1]);
        let x = Tensor::cat(&[x, &Tensor::ones([n, 1], (x.kind(), x.device()))], 1);
        let mut penalty = Tensor::full([dim + 1], 1.0 / (c * n as f64), (Kind::Double, x.device()));
        let _ = penalty.narrow(0, dim, 1).zero_();
        let moments = x.transpose(0, 1).matmul(&x).to_kind(Kind::Double) / n as f64;
        // A little of the mean scale on the diagonal: constant or repeated features must not make it singular.
        let ridge = moments.diagonal(0, 0, 1).mean(Kind::Double).double_value(&[]).max(f64::MIN_POSITIVE) * 1e-6;
        let preconditioner = (&moments + (&penalty + ridge).diag(0)).inverse();
        penalty = penalty.unsqueeze(0);
        Objective { x, y: y.unsqueeze(1), penalty, preconditioner, rows: (MAX_SCORES / classes).max(1), count: std::cell::Cell::new(0) }
    }

    fn at(&self, point: Tensor) -> At {
        self.count.set(self.count.get() + 1);
        let (n, kind) = (self.x.size()[0], self.x.kind());
        let w = point.to_kind(kind).transpose(0, 1); // [D + 1, C]
        let mut loss = 0.0;
        let mut gradient = point.zeros_like();
        let mut first = 0;
        while first < n {
            let rows = self.rows.min(n - first);
            let (x, y) = (self.x.narrow(0, first, rows), self.y.narrow(0, first, rows));
            let mut p = x.matmul(&w).log_softmax(-1, kind); // [rows, C]
            loss -= p.gather(1, &y, false).sum(Kind::Double).double_value(&[]);
            let _ = p.exp_();
            let minus = Tensor::full(y.size(), -1.0, (kind, self.x.device()));
            let _ = p.scatter_add_(1, &y, &minus); // softmax - one-hot
            gradient += p.transpose(0, 1).matmul(&x).to_kind(Kind::Double);
            first += rows;
        }
        let penalised = &point * &self.penalty;
        let gradient = gradient / n as f64 + &penalised;
        let loss = loss / n as f64 + 0.5 * dot(&penalised, &point);
        At { point, loss, gradient }
    }
}

/// The last steps and what the gradient did over them.
#[derive(Default)]
struct Memory {
    pairs: VecDeque<(Tensor, Tensor, f64)>,
}

impl Memory {
    fn push(&mut self, step: Tensor, change: Tensor) {
        let curvature = dot(&step, &change);
        if curvature > f64::EPSILON * dot(&change, &change) {
            self.pairs.push_back((step, change, curvature));
            if self.pairs.len() > HISTORY {
                self.pairs.pop_front();
            }
        }
    }

    /// The two-loop recursion: minus the modelled inverse Hessian times the gradient, starting from the preconditioner.
    fn direction(&self, gradient: &Tensor, preconditioner: &Tensor) -> Tensor {
        let mut q = -gradient;
        let mut weights = vec![];
        for (step, change, curvature) in self.pairs.iter().rev() {
            let a = dot(step, &q) / curvature;
            q -= change * a;
            weights.push(a);
        }
        q = q.matmul(preconditioner);
        if let Some((_, change, curvature)) = self.pairs.back() {
            q *= curvature / dot(change, &change.matmul(preconditioner));
        }
        for ((step, change, curvature), a) in self.pairs.iter().zip(weights.iter().rev()) {
            let b = dot(change, &q) / curvature;
            q += step * (a - b);
        }
        q
    }
}

const SUFFICIENT: f64 = 1e-4;
const CURVATURE: f64 = 0.9;
const MAX_TRIES: usize = 40;

/// One try of the line search.
struct Try {
    step: f64,
    slope: f64,
    at: At,
}

/// A point along `direction` with the strong Wolfe conditions, or the lowest one found; none where the loss does not fall at all.
fn search(objective: &Objective, from: &At, direction: &Tensor, slope: f64) -> Option<At> {
    let evaluate = |step: f64| {
        let at = objective.at(&from.point + direction * step);
        Try { step, slope: dot(&at.gradient, direction), at }
    };
    let high = |t: &Try| !t.at.loss.is_finite() || t.at.loss > from.loss + SUFFICIENT * t.step * slope;
    let flat = |t: &Try| t.slope.abs() <= -CURVATURE * slope;
    // The bracket's lower end: (step, loss, slope, the point itself unless it is the start).
    let mut low = (0.0, from.loss, slope, None::<At>);
    let mut ceiling: Option<(f64, f64, f64)> = None;
    let mut step = 1.0;
    for tries in 0..MAX_TRIES {
        let t = evaluate(step);
        if high(&t) || (tries > 0 && t.at.loss >= low.1) {
            ceiling = Some((t.step, t.at.loss, t.slope));
        } else {
            if flat(&t) {
                return Some(t.at);
            }
            // The lower end moves here; where the slope points back to the old one, that becomes the other end.
            let span = ceiling.map_or(1.0, |c| c.0 - low.0);
            if t.slope * span >= 0.0 {
                ceiling = Some((low.0, low.1, low.2));
            }
            low = (t.step, t.at.loss, t.slope, Some(t.at));
        }
        step = match ceiling {
            None => low.0 * 2.0,
            Some(end) => {
                let width = end.0 - low.0;
                if width.abs() < 1e-12 {
                    break;
                }
                // Never closer than a tenth to either end: the bracket must shrink.
                let (a, b) = (low.0 + 0.1 * width, low.0 + 0.9 * width);
                cubic((low.0, low.1, low.2), end).clamp(a.min(b), a.max(b))
            }
        };
    }
    low.3
}

/// The minimiser of the cubic through two points with their slopes; the middle where there is none.
fn cubic(a: (f64, f64, f64), b: (f64, f64, f64)) -> f64 {
    let middle = 0.5 * (a.0 + b.0);
    let d1 = a.2 + b.2 - 3.0 * (a.1 - b.1) / (a.0 - b.0);
    let root = d1 * d1 - a.2 * b.2;
    if !(root.is_finite() && root >= 0.0) {
        return middle;
    }
    let d2 = root.sqrt() * (b.0 - a.0).signum();
    let at = b.0 - (b.0 - a.0) * (b.2 + d2 - d1) / (b.2 - a.2 + 2.0 * d2);
    if at.is_finite() { at } else { middle }
}

/// The same objective through linfa-logistic, whose penalty is on the sum over the rows: alpha = 1 / C. Returns predictions for `test`.
pub fn linfa(x: &Array2<f64>, y: &[i64], test: &Array2<f64>, options: Options) -> Result<Vec<i64>> {
    let labels = ndarray::Array1::from_vec(y.iter().map(|&l| l as usize).collect());
    let data = linfa::Dataset::new(x.clone(), labels);
    // Its gradient is of the sum: the tolerance scales with the rows.
    let fitted = linfa_logistic::MultiLogisticRegression::default()
        .alpha(1.0 / options.c)
        .max_iterations(options.max_iterations as u64)
        .gradient_tolerance(options.tolerance * y.len() as f64)
        .fit(&data)
        .map_err(|e| Error::failed(format!("linfa's logistic regression: {e}")))?;
    Ok(fitted.predict(test).iter().map(|&l| l as i64).collect())
}
