//! The process and the machine: device, GPU, allocator, memory that runs out, printing, progress, child processes and signals, C++
//! answers, ranks.
//!
#![doc = include_str!("README.md")]

pub mod allocator;
pub(crate) mod arrival;
pub(crate) mod cpp;
pub mod device;
pub mod exhausted;
pub mod gpu;
pub mod machine;
#[macro_use]
pub mod output;
pub mod panics;
pub mod process;
pub mod progress;
pub mod ranks;
