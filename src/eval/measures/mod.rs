//! One file a measurement.

pub mod accuracy;
pub mod cohort;
pub mod compare;
pub mod few_shot;
pub mod knn;
pub mod linear_probe;
pub mod tsne;
