//! What methods refuse when they are built: options that make no sense, cohorts and images they cannot learn from.

use crate::error::{Error, Result};
use crate::limits;
use crate::nets::Arch;

/// Refuses a value that is not a number above 0.
pub(super) fn positive(key: &str, value: f64) -> Result<()> {
    if value > 0.0 && value.is_finite() {
        Ok(())
    } else {
        Err(Error::input(format!("[method] {key} = {value}; accepted: a number above 0")))
    }
}

/// Refuses weights that are not a number of 0 or more.
pub(super) fn weights(values: &[(&str, f64)]) -> Result<()> {
    match values.iter().find(|(_, value)| !(*value >= 0.0 && value.is_finite())) {
        Some((key, value)) => Err(Error::input(format!("[method] {key} = {value}; accepted: 0 or more"))),
        None => Ok(()),
    }
}

/// Refuses a whole number below `least`.
pub(super) fn count(key: &str, value: i64, least: i64) -> Result<()> {
    if value >= least { Ok(()) } else { Err(Error::input(format!("[method] {key} = {value}; accepted: {least} or more"))) }
}

/// Refuses embeddings, contrast samples or a queue larger than anybody needs, whatever the machine has.
pub(super) fn contrast_limits(dim: i64, negatives: usize, queue: usize) -> Result<()> {
    limits::count("[method] dim", dim, 1, limits::MOST_DIM as usize)?;
    limits::count("[method] negatives", negatives, 1, limits::MOST_SAMPLES)?;
    limits::count("[method] queue_length", queue, 1, limits::MOST_SAMPLES)
}

/// Refuses embeddings so wide that their heads do not fit into memory: width x dim and dim x dim for each of `widths`, and `more` matrices
/// dim x dim (the meta-networks).
pub(super) fn projector_memory(dim: i64, widths: impl Iterator<Item = i64>, more: usize) -> Result<()> {
    let dim = dim as usize;
    let heads: u128 = widths.map(|width| limits::matrix(width as usize, dim) + limits::matrix(dim, dim)).sum();
    limits::Need::new()
        // A weight, its gradient and its momentum.
        .and("projection heads", 3 * heads)
        .and("meta-networks", 3 * more as u128 * limits::matrix(dim, dim))
        .check(&format!("[method] dim = {dim}"))
}

/// Refuses a momentum outside [0, 1).
pub(super) fn below_one(key: &str, value: f64) -> Result<()> {
    if (0.0..1.0).contains(&value) {
        Ok(())
    } else {
        Err(Error::input(format!("[method] {key} = {value}; accepted: 0 up to, but without, 1")))
    }
}

/// Refuses cohorts of fewer than `least` networks.
pub(super) fn at_least(method: &str, least: usize, networks: usize, why: &str) -> Result<()> {
    if networks >= least {
        Ok(())
    } else {
        Err(Error::input(format!("{method} needs {least} networks or more and [cohort] archs has {networks}: {why}")))
    }
}

/// Refuses cohorts of different architectures.
pub(super) fn one_architecture(method: &str, archs: &[&'static Arch], why: &str) -> Result<()> {
    match archs.iter().find(|a| a.name != archs[0].name) {
        None => Ok(()),
        Some(other) => Err(Error::input(format!(
            "{method} needs networks of one architecture and [cohort] archs has {} and {}: {why}",
            archs[0].name, other.name
        ))),
    }
}

/// Refuses training images of which a class has one alone: batch mining draws two images of a class.
pub(super) fn paired_classes(labels: &[i64]) -> Result<()> {
    let mut counts = vec![0usize; labels.iter().max().map_or(0, |&c| c as usize + 1)];
    labels.iter().for_each(|&c| counts[c as usize] += 1);
    match counts.iter().position(|&n| n == 1) {
        Some(class) => Err(Error::input(format!("class {class} has one training image: an anchor needs a positive, so two of each class"))),
        None => Ok(()),
    }
}
