//! Fitting classifiers on frozen features.

pub mod heads;
pub mod logreg;
