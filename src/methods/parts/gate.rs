//! G: the gate that weighs the logits of a network's stages, from the concatenation of its features (Eq. 19).

use tch::Tensor;

use crate::nets::layers::{Layer, Linear, Pass};
use crate::params::Scope;

/// Linear, ReLU, Linear, softmax over the stages.
pub struct Gate {
    /// From the concatenated features to the middle layer.
    pub first: Linear,
    /// From the middle layer to a score for each stage.
    pub second: Linear,
}

impl Gate {
    /// For `stages` features of width `width`; the middle layer is as wide as one feature.
    pub(crate) fn new(scope: Scope, stages: i64, width: i64) -> Gate {
        Gate { first: Linear::new(scope.sub(0), stages * width, width), second: Linear::new(scope.sub(2), width, stages) }
    }

    /// w, [B, L] with rows that sum to 1. Gradients flow into the features.
    pub fn forward(&self, feats: &[Tensor]) -> Tensor {
        let hidden = self.first.forward(&Tensor::cat(feats, 1), Pass::EVAL).relu();
        self.second.forward(&hidden, Pass::EVAL).softmax(-1, None)
    }
}
