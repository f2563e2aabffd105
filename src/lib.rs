//! Layer-wise Mutual Contrastive Learning: pre-train cohorts of vision networks, measure how well they transfer.

pub mod cohort;
pub mod commands;
pub mod data;
pub mod error;
pub mod eval;
pub mod experiment;
pub mod export;
pub mod extractor;
pub mod files;
pub mod losses;
pub mod methods;
pub mod nets;
pub mod optim;
pub mod params;
pub mod pickle;
pub mod recipe;
pub mod registry;
pub mod report;
pub mod rng;
pub mod run;
pub mod settings;
pub mod system;
pub mod train;
pub mod weights;
