//! Bricks that several methods are put together from.

pub mod frozen;
pub mod gate;
pub(crate) mod information;
pub mod memory_bank;
pub mod meta_network;
pub mod mode;
pub mod projector;
pub(super) mod rows;
