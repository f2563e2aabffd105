//! ONNX files: one flat graph of a network, made from its operator graph. `write` turns the operations into ONNX's, `proto` has the bytes,
//! and `run` answers for a file with libtorch, so that what was written can be compared before it gets its name.
//!
//! Opset 17 is the first with LayerNormalization, and what ONNX Runtime from 1.12, TensorRT from 8.6 and OpenVINO from 2022.3 read. Weights
//! keep the names and shapes that they have in a state dict. Batch and image size are open.

mod proto;
mod run;
mod write;

pub use proto::{Attribute, Model, Node, Port};
pub use write::model;

/// The version of the standard operators.
pub const OPSET: i64 = 17;
/// What a network is given: [batch, 3, height, width].
pub const INPUT: &str = "input";
/// What a classifier answers: [batch, classes].
pub const LOGITS: &str = "logits";

/// The name of a map.
pub fn feature(l: usize) -> String {
    format!("feature_{l}")
}
