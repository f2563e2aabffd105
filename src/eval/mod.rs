//! What is measured after training, and of the build itself.

pub mod selftest;
