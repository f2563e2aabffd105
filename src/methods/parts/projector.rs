//! zeta: the projection head from a pooled feature to an embedding on the unit sphere (section 3.1).

use tch::Tensor;

use crate::losses::unit::Norm;
use crate::nets::layers::{Layer, Linear, Pass};
use crate::params::Scope;

/// Linear, ReLU, Linear, l2 normalisation.
pub struct Projector {
    /// From the feature to the middle layer.
    pub first: Linear,
    /// From the middle layer to the embedding before normalisation.
    pub second: Linear,
    norm: Norm,
}

impl Projector {
    /// From features of width `width` to embeddings of width `dim`; the middle layer is as wide as the embedding.
    pub(crate) fn new(scope: Scope, width: i64, dim: i64, norm: Norm) -> Projector {
        Projector { first: Linear::new(scope.sub(0), width, dim), second: Linear::new(scope.sub(2), dim, dim), norm }
    }

    /// Of several heads at once that normalise in one way, a feature each: N x [B, D] -> [N, B, d].
    pub(crate) fn each(heads: &[Projector], feats: &[Tensor]) -> Tensor {
        let layers = |pick: fn(&Projector) -> &Linear| heads.iter().map(pick).collect::<Vec<_>>();
        let hidden = Linear::each(&layers(|head| &head.first), feats).relu();
        heads[0].norm.apply(&Linear::at_once(&layers(|head| &head.second), &hidden))
    }

    /// [B, D] -> [B, d].
    pub(crate) fn forward(&self, feats: &Tensor) -> Tensor {
        self.norm.apply(&self.second.forward(&self.first.forward(feats, Pass::EVAL).relu(), Pass::EVAL))
    }
}
