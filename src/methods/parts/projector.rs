//! zeta: the projection head from a pooled feature to an embedding on the unit sphere (section 3.1).

use tch::Tensor;

use crate::nets::layers::{Layer, Linear, Pass};
use crate::params::Scope;

/// Linear, ReLU, Linear, l2 normalisation.
pub struct Projector {
    pub first: Linear,
    pub second: Linear,
    pub norm: Norm,
}

/// How vectors are brought to length 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Norm {
    /// A vector of zeros stays one: lengths below 1e-12 count as that.
    Guarded,
    /// x / sqrt(sum x^2), as the released code.
    Bare,
}

impl Norm {
    /// Rows of the last dimension.
    pub fn apply(self, xs: &Tensor) -> Tensor {
        match self {
            Norm::Guarded => xs / xs.norm_scalaropt_dim(2.0, [-1i64].as_slice(), true).clamp_min(1e-12),
            Norm::Bare => xs / xs.pow_tensor_scalar(2).sum_dim_intlist(-1i64, true, None).sqrt(),
        }
    }
}

impl Projector {
    /// From features of width `width` to embeddings of width `dim`; the middle layer is as wide as the embedding.
    pub fn new(scope: Scope, width: i64, dim: i64, norm: Norm) -> Projector {
        Projector { first: Linear::new(scope.sub(0), width, dim), second: Linear::new(scope.sub(2), dim, dim), norm }
    }

    /// [B, D] -> [B, d].
    pub fn forward(&self, feats: &Tensor) -> Tensor {
        self.norm.apply(&self.second.forward(&self.first.forward(feats, Pass::EVAL).relu(), Pass::EVAL))
    }
}
