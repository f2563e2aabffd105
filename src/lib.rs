//! Layer-wise Mutual Contrastive Learning (L-MCL): pre-train cohorts of vision networks, measure how well they transfer.
//!
//! Two programs stand on this library: `mcl-train` makes runs, `mcl-eval` measures and hands on what they left.
//!
//! # Where to start reading
//!
//! Training is read downwards: [`train`] is the loop, [`methods::l_mcl`] what it minimises, [`losses::contrast`] the equations of the
//! paper. Measuring starts with a file of [`eval::measures`]. What lies in a run's folder, and what each of its numbers means, is in
//! [`run`]. The colours of a report are in src/report/colours.rs.
//!
//! # The rooms
//!
//! A room imports only rooms that stand above it in this list; tests/layers.rs holds every room to its own line of them.
//!
//! | room | what it owns | what it may import |
//! |---|---|---|
//! | [`error`] | the one error type | nothing |
//! | [`registry`] | looking up names in the visible lists | error |
//! | [`rng`] | named random streams | nothing |
//! | [`files`] | files that appear whole or not at all | error, limits |
//! | [`settings`] | one setting given as text, `train.epochs=3` | error |
//! | [`limits`] | what a number that a user gave will need, and what there is | error |
//! | [`pickle`] | Python pickles as plain values, nothing executed | error |
//! | [`params`] | named tensors in one order everywhere | rng |
//! | [`system`] | device, allocator, machine, progress, processes, ranks | error, files, limits, params |
//! | [`losses`] | the equations, as pure functions over tensors | nothing |
//! | [`optim`] | rules that step, schedules, the hypergradient | the ground above |
//! | [`nets`] | layers and architectures, one file a family; their kernels | the ground above |
//! | [`extractor`] | what a frozen network says about images | nets |
//! | [`report`] | tables, figures, colours, pages; the paper's numbers | error, files, system |
//! | [`run`] | the run folder: names of files, meaning of numbers | report, files |
//! | [`data`] | datasets, one file each; augmentation, batches | pickle and the ground |
//! | [`recipe`] | the TOML of a training run, checked once | data, optim, settings |
//! | [`weights`] | formats of weights, in and out | nets, pickle, files |
//! | [`cohort`] | the networks that learn together, and their forward pass | nets, data |
//! | [`methods`] | what a cohort minimises, one file a method | cohort, losses, optim |
//! | [`train`] | the loop, one step, checkpoints, metrics | all above but report |
//! | [`eval`] | what measurements share, and one file a measurement | all above but train |
//! | [`export`] | networks as other frameworks load them | eval, weights |
//! | [`experiment`] | many runs and measurements by a plan | eval, methods, recipe, report, run |
//! | [`commands`] | what is neither training nor measuring: list, doctor, data, selftest, embed, report | any |
//!
//! # As a library
//!
//! Build an architecture by its name, ask it about a batch, and put the answer into an equation of the paper:
//!
//! ```
//! use mcl::losses::contrast::{Contrast, vcl};
//! use mcl::nets::{self, Network, layers::Pass};
//! use mcl::tch::{self, Device, Kind, Tensor};
//!
//! let arch = nets::find("resnet8")?;
//! let (network, params) = Network::build(arch, 100, 1, Device::Cpu, Kind::Float); // classes, seed
//! assert!(params.count() > 70_000);
//!
//! let images = Tensor::randn([8, 3, 32, 32], (Kind::Float, Device::Cpu));
//! let answer = tch::no_grad(|| network.forward(&images, Pass::EVAL));
//! assert_eq!(answer.logit().size(), [8, 100]);
//!
//! // Eq. 2 on unit embeddings. Each class occurs at least twice: an anchor needs a positive.
//! let feats = answer.feat();
//! let embeds = feats / feats.norm_scalaropt_dim(2, 1i64, true);
//! let labels = Tensor::from_slice(&[0i64, 0, 1, 1, 2, 2, 3, 3]);
//! let loss = vcl(&embeds, &Contrast::in_batch(&labels, 0.1, Kind::Float));
//! assert!(loss.double_value(&[]) > 0.0);
//!
//! // Where all embeddings are one point, the positive is any of the other seven: ln 7.
//! let one_point = vcl(&embeds.narrow(0, 0, 1).repeat([8, 1]), &Contrast::in_batch(&labels, 0.1, Kind::Float));
//! assert!((one_point.double_value(&[]) - 7f64.ln()).abs() < 1e-4);
//! # Ok::<(), mcl::error::Error>(())
//! ```

#![warn(missing_docs)]

// First: what it prints with takes the place of the standard macros in all that follows.
#[macro_use]
pub mod system;

/// Tensors, in the version that this crate is built with: programs outside need no line for it.
pub use tch;

pub mod cohort;
pub mod commands;
pub mod data;
pub mod error;
pub mod eval;
pub mod experiment;
pub mod export;
pub mod extractor;
pub mod files;
pub mod limits;
pub mod losses;
pub mod methods;
pub mod nets;
pub mod optim;
pub mod params;
pub mod pickle;
pub mod recipe;
pub mod registry;
pub mod report;
pub mod rng;
pub mod run;
pub mod settings;
pub mod train;
pub mod weights;
