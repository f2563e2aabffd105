//! How convolutions and norms are computed.

pub mod autocast;
pub mod convolution;
pub mod direct;
mod lanes;
pub mod norm;
mod parallel;
