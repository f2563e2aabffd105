//! How convolutions and norms are computed: where libtorch is slow for our networks, code of our own, and libtorch everywhere else. All of
//! it is behind `nets::layers`; no architecture chooses.
//!
//! | what is computed | when | by |
//! |---|---|---|
//! | convolution, forward | `Mode::Train` and `Mode::Eval`, weight that is trained, no bias, f32 or f64, CPU | libtorch's kernel, in an autograd function of ours that can be differentiated any number of times (`convolution`) |
//! | its gradient after the weight | as above, f32, 3 x 3, padding 1, no dilation, no groups, output channels a multiple of 16, input channels of 8 (AVX-512) or 2 (AVX2) | our kernel (`convolution`, on libtorch's threads) |
//! | its other gradients | as above | libtorch's |
//! | convolution, BatchNorm, residual sum and ReLU as one | `Mode::Frozen`, f32, CPU with AVX2 or AVX-512, no dilation, no groups, output channels a multiple of 16, at most 256 KB of weights | our kernel, on the calling thread (`direct`) |
//! | the same | `Mode::Frozen`, everything else | BatchNorm is folded into the weights once, then libtorch's convolution with a bias |
//! | BatchNorm, residual sum and ReLU, with two derivatives | `Mode::Train`, f32 outside autocast, CPU with AVX2, channels a multiple of 16, more than one number a channel, statistics of this rank alone | our loops, on libtorch's threads (`norm`) |
//! | BatchNorm over all ranks | `Mode::Train` with `train.sync_bn` on several ranks | tensor operations (`layers::BatchNorm`) |
//! | everything else: other sizes, f64, bf16 and f16, CUDA, other CPUs, Linear, LayerNorm, attention, pooling | always | libtorch |
//!
//! The instruction set is the best that the CPU has (`lanes::instructions`): AVX-512, then AVX2 with FMA, then none. Nothing in a recipe or in
//! the environment forces a kernel today. Each falls back by the shape and type of what it is given, so a network in f64 (as the goldens take
//! it) or with `train.precision = "bf16"` runs on libtorch alone. The tests of `direct` run every instruction set that the machine has.

pub mod autocast;
pub mod convolution;
pub mod direct;
mod lanes;
pub mod norm;
mod parallel;
