//! Logistic regression, solved to the optimum, and how its C is chosen: on a held-out part of the training split, then fitted again on
//! the whole of it.

use serde::Deserialize;
use serde_json::json;
use tch::{Kind, Tensor};

use super::logreg::{self, Options};
use super::{Probe, best, edge_warning, held_out};
use crate::error::Result;
use crate::eval::Common;
use crate::eval::features::Features;
use crate::eval::protocol::{Shipped, require};
use crate::eval::score::Score;
use crate::limits;

pub(super) const SHIPPED: Shipped =
    Shipped { name: "lbfgs", text: include_str!("../../../protocols/eval/lbfgs.toml"), repeats: &["seeds"] };

/// The keys of the protocol.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lbfgs {
    pub(super) image_size: i64,
    cs: Vec<f64>,
    tolerance: f64,
    max_iterations: usize,
    precision: Precision,
    engine: Engine,
    holdout: f64,
    pub(super) seeds: Vec<u64>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Precision {
    F32,
    F64,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Engine {
    Own,
    Linfa,
}

impl Lbfgs {
    pub(super) fn check(&self) -> Result<()> {
        require(!self.cs.is_empty() && self.cs.iter().all(|c| *c > 0.0 && c.is_finite()), "cs", &self.cs, "numbers above 0")?;
        require(self.cs.is_sorted(), "cs", &self.cs, "in rising order")?;
        require(self.holdout > 0.0 && self.holdout < 1.0, "holdout", self.holdout, "between 0 and 1")?;
        limits::count("protocol: max_iterations", self.max_iterations, 1, limits::MOST_ROUNDS)?;
        require(
            self.tolerance > 0.0 && self.max_iterations > 0,
            "tolerance, max_iterations",
            (self.tolerance, self.max_iterations),
            "above 0, 1 or more",
        )
    }

    fn fit(&self, c: f64) -> Options {
        Options { c, tolerance: self.tolerance, max_iterations: self.max_iterations }
    }

    /// Chooses C on a held-out part of `train`, fits it again on all of it and scores it on `test`.
    pub fn probe(&self, train: &Features, test: &Features, classes: i64, seed: u64, common: &Common) -> Result<Probe> {
        let (kept, held) = held_out(&train.y, self.holdout, seed)?;
        let (part, held) = (train.rows(&kept), train.rows(&held));
        match self.engine {
            Engine::Own => self.own(train, &part, &held, test, classes, common),
            Engine::Linfa => self.linfa(train, &part, &held, test, classes, common),
        }
    }

    fn own(&self, train: &Features, part: &Features, held: &Features, test: &Features, classes: i64, common: &Common) -> Result<Probe> {
        let kind = match self.precision {
            Precision::F32 => Kind::Float,
            Precision::F64 => Kind::Double,
        };
        let (x, y, held_x) = (part.x.to_kind(kind), part.labels(), held.x.to_kind(kind));
        let progress = common.progress("choosing C", self.cs.len() + 1, "fits");
        let mut accuracies = vec![];
        let mut loose = vec![];
        let mut last = None;
        // From the strongest penalty to the weakest, each from where the one before ended.
        for &c in &self.cs {
            let fitted = logreg::fit(&x, &y, classes, self.fit(c), last.as_ref())?;
            accuracies.push(Score::new(&fitted.classifier.scores(&held_x), &held.y).top1());
            if !fitted.converged {
                loose.push(c);
            }
            last = Some(fitted.classifier);
            progress.add(1);
        }
        let chosen = best(&accuracies);
        let c = self.cs[chosen];
        let fitted = logreg::fit(&train.x.to_kind(kind), &train.labels(), classes, self.fit(c), None)?;
        let mut warnings: Vec<String> = edge_warning("C", chosen, &self.cs).into_iter().collect();
        if !fitted.converged {
            warnings.push(format!("not converged: gradient {:.1e} after {} iterations with C = {c}", fitted.gradient, fitted.iterations));
        }
        if !loose.is_empty() {
            warnings.push(format!("not converged in the sweep at C = {loose:?}"));
        }
        let score = Score::new(&fitted.classifier.scores(&test.x.to_kind(kind)), &test.y);
        let chosen = json!({ "c": c, "cs": self.cs, "holdout_top1": accuracies, "loss": fitted.loss, "iterations": fitted.iterations });
        Ok(Probe { score, warnings, chosen })
    }

    fn linfa(&self, train: &Features, part: &Features, held: &Features, test: &Features, classes: i64, common: &Common) -> Result<Probe> {
        let array = |f: &Features| -> ndarray::Array2<f64> {
            let flat = Vec::<f64>::try_from(f.x.to_kind(Kind::Double).contiguous().view(-1)).expect("a vector of doubles");
            ndarray::Array2::from_shape_vec((f.y.len(), f.x.size()[1] as usize), flat).expect("rows times columns")
        };
        let right = |predicted: &[i64], y: &[i64]| 100.0 * predicted.iter().zip(y).filter(|(a, b)| a == b).count() as f64 / y.len() as f64;
        let (x, held_x) = (array(part), array(held));
        let progress = common.progress("choosing C with linfa", self.cs.len() + 1, "fits");
        let mut accuracies = vec![];
        for &c in &self.cs {
            accuracies.push(right(&logreg::linfa(&x, &part.y, &held_x, self.fit(c))?, &held.y));
            progress.add(1);
        }
        let chosen = best(&accuracies);
        let predicted = logreg::linfa(&array(train), &train.y, &array(test), self.fit(self.cs[chosen]))?;
        // linfa gives the class only: the five best are the one.
        let one_hot = Tensor::from_slice(&predicted).one_hot(classes).to_kind(Kind::Float);
        let mut score = Score::new(&one_hot, &test.y);
        score.in_five = score.right();
        let warnings = edge_warning("C", chosen, &self.cs).into_iter().collect();
        Ok(Probe { score, warnings, chosen: json!({ "c": self.cs[chosen], "cs": self.cs, "holdout_top1": accuracies, "engine": "linfa" }) })
    }
}
