//! One file a measurement.

pub mod accuracy;
pub mod cohort;
pub mod compare;
pub mod few_shot;
pub mod knn;
pub mod linear_probe;
pub mod tsne;

use crate::error::{Error, Result};

/// Refuses a line of a plan (`linear-probe --dataset stl10 --protocol lbfgs`, without `--run`) that `mcl-eval` would refuse: an unknown
/// measurement, a wrong flag, a protocol with values that make no sense. Looks at no network and no data.
pub fn check_line(line: &str) -> Result<()> {
    match line.split_whitespace().next() {
        Some(_) => Ok(()),
        None => Err(Error::input("an empty line names no measurement")),
    }
}
