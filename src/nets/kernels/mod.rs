//! How convolutions and norms are computed: where libtorch is slow for our networks, code of our own, and libtorch everywhere else. All of
//! it is behind `nets::layers`; no architecture chooses.
//!
//! | what is computed | when | by |
//! |---|---|---|
//! | convolution and its gradients | `Mode::Train` and `Mode::Eval`, weight that is trained, no bias, f32, CPU with AVX2 or AVX-512, 3 x 3, stride 1, padding 1, no dilation, no groups, channels multiples of 16, maps of 4 x 4 and more | our kernel (`winograd`, on libtorch's threads), in an autograd function of ours that can be differentiated any number of times (`convolution`) |
//! | the same with its BatchNorm, residual sum and ReLU | `Mode::Train`, where both kernels serve | both, as one autograd function (`conv_norm`) |
//! | its gradient after the weight | as `convolution` with stride 2; output channels a multiple of 16, input channels of 8 (AVX-512) or 2 (AVX2), their product at most 8192 | our kernel (`convolution`) |
//! | convolution and its gradients | every other size, f32 or f64 | libtorch's kernels in the same autograd function |
//! | convolution, BatchNorm, residual sum and ReLU as one | `Mode::Frozen`, f32, CPU with AVX2 or AVX-512, no dilation, no groups, 3 x 3, stride 1, padding 1, channels multiples of 16 | our kernel, on the calling thread (`fused::winograd`) |
//! | the same | as above, every other window of stride 1 or 2, output channels a multiple of 16, at most 256 KB of weights | our kernel, on the calling thread (`fused::direct`) |
//! | the same | `Mode::Frozen`, everything else | BatchNorm is folded into the weights once, then libtorch's convolution with a bias |
//! | BatchNorm, residual sum and ReLU, with two derivatives | `Mode::Train`, f32 outside autocast, CPU with AVX2, channels a multiple of 16, more than one number a channel, statistics of this rank alone | our loops, on libtorch's threads (`norm`) |
//! | BatchNorm over all ranks | `Mode::Train` with `train.sync_bn` on several ranks | tensor operations (`layers::BatchNorm`) |
//! | everything else: other sizes, f64, bf16 and f16, CUDA, other CPUs, Linear, LayerNorm, attention, pooling | always | libtorch |
//!
//! The instruction set is the best that the CPU has (`lanes::instructions`): AVX-512, then AVX2 with FMA, then none. `MCL_ISA=avx2` in the
//! environment forces the second and `MCL_ISA=none` leaves everything to libtorch; nothing in a recipe does. Each kernel falls back by the
//! shape and type of what it is given, so a network in f64 (as the goldens take it) or with `train.precision = "bf16"` runs on libtorch
//! alone. The tests run every instruction set that the machine has.

use crate::error::{Error, Result};

pub mod autocast;
pub mod conv_norm;
pub mod convolution;
pub mod fused;
mod lanes;
pub mod norm;
mod parallel;
mod vector;
mod winograd;

pub use lanes::{Instructions, available, instructions};

/// Refuses an `MCL_ISA` that this machine cannot follow. Programs ask before they compute.
pub fn check_instructions() -> Result<()> {
    lanes::allowed().map(drop).map_err(Error::input)
}
