//! The process and the machine: device, allocator, child processes and signals, C++ answers, ranks.

pub mod allocator;
pub(crate) mod cpp;
pub mod device;
pub mod machine;
pub mod process;
pub mod ranks;
