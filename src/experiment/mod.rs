//! Experiments: many runs and measurements, planned, made, reported.

pub mod compare;
pub mod jobs;
mod plan;
pub mod report;
mod rows;
mod runner;

pub use runner::*;
