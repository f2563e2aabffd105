//! The named loss table of one step.

use tch::Tensor;

/// One row: the raw value (a scalar tensor with its graph) and its weight apart, so that runs with other weights compare.
pub struct Term {
    /// Its name in the log.
    pub name: &'static str,
    /// The network the row belongs to, where it belongs to one: a divergence names it.
    pub peer: Option<usize>,
    /// The factor on the value in the total.
    pub weight: f64,
    /// The value before the weight.
    pub value: Tensor,
    /// The group this row trains and nothing else does; None trains the networks and all groups that are not apart.
    pub apart: Option<&'static str>,
}

/// All rows of a step; rows of one name add up in the log.
#[derive(Default)]
pub struct Terms {
    /// What is trained on.
    pub rows: Vec<Term>,
    /// Numbers to be logged and not trained on (lambda means, gate weights): name and detached scalar, averaged over the epoch.
    pub notes: Vec<(String, Tensor)>,
}

impl Terms {
    /// A row of the whole cohort.
    pub(crate) fn add(&mut self, name: &'static str, weight: f64, value: Tensor) {
        self.rows.push(Term { name, peer: None, weight, value, apart: None });
    }

    /// A row of network `peer`.
    pub(crate) fn add_for(&mut self, peer: usize, name: &'static str, weight: f64, value: Tensor) {
        self.rows.push(Term { name, peer: Some(peer), weight, value, apart: None });
    }

    /// A row of network `peer` whose gradient goes to the group called `group` alone, from a backward pass of its own.
    pub(crate) fn add_apart(&mut self, group: &'static str, peer: usize, name: &'static str, weight: f64, value: Tensor) {
        self.rows.push(Term { name, peer: Some(peer), weight, value, apart: Some(group) });
    }

    /// A number to be logged and not trained on.
    pub(crate) fn note(&mut self, name: impl Into<String>, value: &Tensor) {
        self.notes.push((name.into(), value.detach()));
    }

    /// The sum of weight x value: what is minimised.
    pub fn total(&self) -> Tensor {
        self.sum(None).expect("a method has at least one term")
    }

    /// The same over the rows of one group that is stepped apart.
    pub(crate) fn total_apart(&self, group: &str) -> Option<Tensor> {
        self.sum(Some(group))
    }

    fn sum(&self, apart: Option<&str>) -> Option<Tensor> {
        let rows = self.rows.iter().filter(|row| row.apart == apart);
        rows.map(|row| if row.weight == 1.0 { row.value.shallow_clone() } else { &row.value * row.weight }).reduce(|sum, row| sum + row)
    }
}
