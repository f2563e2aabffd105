//! pi: the meta-network that says how much two layers of two networks should learn from each other (Eq. 17).

use tch::Tensor;

use crate::losses::contrast::Pairs;
use crate::losses::unit::Norm;
use crate::nets::layers::Linear;
use crate::params::{Init, Scope};

/// One projection xi for each layer of each network, in the order of the embeddings.
pub struct MetaNetwork {
    /// xi, one a layer of a network.
    pub projections: Vec<Linear>,
    norm: Norm,
}

impl MetaNetwork {
    /// d x d without bias, on embeddings: the paper.
    pub fn on_embeddings(scopes: Vec<Scope>, dim: i64, norm: Norm) -> MetaNetwork {
        let init = Init::Uniform(1.0 / (dim as f64).sqrt());
        MetaNetwork { projections: scopes.into_iter().map(|scope| Linear::with_init(scope, dim, dim, init, None)).collect(), norm }
    }

    /// With bias, on raw pooled features of each layer's width: the released code.
    pub(crate) fn on_features(scopes: Vec<Scope>, widths: &[i64], dim: i64, norm: Norm) -> MetaNetwork {
        MetaNetwork { projections: scopes.into_iter().zip(widths).map(|(scope, &width)| Linear::new(scope, width, dim)).collect(), norm }
    }

    /// lambda, Eq. 17: the sigmoid of the projections' cosine, between 0.269 and 0.731, for each pair and sample. `inputs` N x [B, .],
    /// embeddings or features as it was made for. -> [P, B]. Symmetric: (a, la, b, lb) and (b, lb, a, la) have one lambda.
    pub fn lambda(&self, inputs: &[Tensor], pairs: &Pairs) -> Tensor {
        let rows = Linear::each(&self.projections.iter().collect::<Vec<_>>(), inputs);
        pairs.dot(&self.norm.apply(&rows)).sigmoid()
    }
}
