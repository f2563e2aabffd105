//! The process and the machine: device, allocator, C++ answers, ranks.

pub mod allocator;
pub(crate) mod cpp;
pub mod device;
pub mod machine;
pub mod ranks;
