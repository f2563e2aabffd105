//! Stateful bricks that methods are put together from.

pub mod gate;
pub mod memory_bank;
pub mod meta_network;
pub mod projector;
