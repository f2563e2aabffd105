//! The process and the machine: device, allocator, child processes and signals, C++ answers, ranks.
//!
#![doc = include_str!("README.md")]

pub mod allocator;
pub(crate) mod cpp;
pub mod device;
pub mod machine;
pub mod process;
pub mod ranks;
