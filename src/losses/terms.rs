//! The named loss table of one step.

use tch::Tensor;

/// One row: the raw value (a scalar tensor with its graph) and its weight apart, so that runs with other weights compare.
pub struct Term {
    pub name: &'static str,
    /// The network the row belongs to, where it belongs to one: a divergence names it.
    pub peer: Option<usize>,
    pub weight: f64,
    pub value: Tensor,
}

/// All rows of a step; rows of one name add up in the log.
#[derive(Default)]
pub struct Terms {
    pub rows: Vec<Term>,
    /// Numbers to be logged and not trained on (lambda means, gate weights): name and detached scalar, averaged over the epoch.
    pub notes: Vec<(String, Tensor)>,
}

impl Terms {
    pub fn add(&mut self, name: &'static str, weight: f64, value: Tensor) {
        self.rows.push(Term { name, peer: None, weight, value });
    }

    pub fn add_for(&mut self, peer: usize, name: &'static str, weight: f64, value: Tensor) {
        self.rows.push(Term { name, peer: Some(peer), weight, value });
    }

    pub fn note(&mut self, name: impl Into<String>, value: &Tensor) {
        self.notes.push((name.into(), value.detach()));
    }

    /// The sum of weight x value: what is minimised.
    pub fn total(&self) -> Tensor {
        let mut rows = self.rows.iter().map(|row| if row.weight == 1.0 { row.value.shallow_clone() } else { &row.value * row.weight });
        let first = rows.next().expect("a method has at least one term");
        rows.fold(first, |sum, row| sum + row)
    }
}
