//! Layer-wise Mutual Contrastive Learning: pre-train cohorts of vision networks, measure how well they transfer.

pub mod data;
pub mod error;
pub mod files;
pub mod nets;
pub mod params;
pub mod pickle;
pub mod registry;
pub mod rng;
pub mod weights;
