//! Bricks that several methods are put together from.

pub mod gate;
pub mod information;
pub mod memory_bank;
pub mod meta_network;
pub mod projector;
