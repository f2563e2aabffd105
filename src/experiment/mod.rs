//! Experiments: many runs and measurements as one plan, made by one runner. What is finished is not made again; what was stopped goes on.
//! `evidence` reads its plan from a file and keeps rows for git; `compare`, `fractions` and `transfer` make
//! theirs of flags and end in a table.
//!
#![doc = include_str!("README.md")]

pub mod compare;
pub mod cost;
pub mod evidence;
pub mod extras;
pub mod fractions;
pub mod paper;
mod plan;
pub mod report;
mod rows;
mod runner;
pub mod table;
pub mod transfer;

pub use plan::{Item, Plan, PlannedRun, Work};
pub use rows::{Question, Row, Rows};
