//! Layer-wise Mutual Contrastive Learning: pre-train cohorts of vision networks, measure how well they transfer.

pub mod checkpoint;
pub mod cohort;
pub mod compare;
pub mod data;
pub mod device;
pub mod error;
pub mod eval;
pub mod files;
pub mod listing;
pub mod losses;
pub mod memory;
pub mod methods;
pub mod metrics;
pub mod nets;
pub mod optim;
pub mod params;
pub mod pickle;
pub mod recipe;
pub mod registry;
pub mod report;
pub mod rng;
pub mod runs;
pub mod step;
pub mod tensorboard;
pub mod train;
pub mod weights;
