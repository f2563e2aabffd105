//! The contrastive part of the objective, L_MCL (Eq. 13): embeddings of all networks and stages, lambda for their pairs, the four terms.

use std::cell::OnceCell;

use tch::Tensor;

use super::super::parts::mode::Mode;
use super::super::parts::projector::Projector;
use super::LMcl;
use crate::data::Batch;
use crate::error::Result;
use crate::losses::contrast::{self, Contrast, MemoryTargets, Parts, Targets};
use crate::nets::Outputs;

/// The soft targets of one evaluation of L_MCL, by where contrast samples come from.
pub(super) enum SoftTargets {
    Batch(Targets),
    Memory(MemoryTargets),
}

/// What the contrastive terms read of a batch: of this rank, or of all ranks where they gather contrast samples.
pub(super) struct ContrastBatch {
    /// v of all networks and stages, [N, B, d].
    pub stacked: Tensor,
    /// The same one by one, N x [B, d].
    pub embeds: Vec<Tensor>,
    /// The features the meta-network reads in reference mode, N x [B, width]; empty where nobody reads them.
    pub feats: Vec<Tensor>,
    pub labels: Tensor,
    /// See `contrast`.
    contrast: OnceCell<Contrast>,
}

impl ContrastBatch {
    /// Which of the batch are whose contrast samples, made once.
    pub fn contrast(&self, tau: f64) -> &Contrast {
        self.contrast.get_or_init(|| Contrast::in_batch(&self.labels, tau, self.embeds[0].kind()))
    }
}

/// L_MCL evaluated: its terms, lambda [P, B], and the soft targets it held constant.
pub(super) struct Evaluated {
    pub parts: Parts,
    pub lambda: Tensor,
    pub targets: SoftTargets,
}

/// Does lambda carry its graph?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lambda {
    /// In the main step it is a constant.
    Constant,
    /// In the meta step pi is trained through it.
    Learns,
}

impl LMcl {
    /// v of all networks and stages (Eq. 12), N x [B, d].
    pub fn embed(&self, outs: &[Outputs]) -> Vec<Tensor> {
        self.places.iter().zip(&self.heads).map(|(&(m, l), head)| head.forward(&outs[m].feats[l])).collect()
    }

    /// The same as one tensor [N, B, d], and one by one. On a device all heads work at once.
    fn embed_stacked(&self, outs: &[Outputs]) -> (Tensor, Vec<Tensor>) {
        let feats: Vec<Tensor> = self.places.iter().map(|&(m, l)| outs[m].feats[l].shallow_clone()).collect();
        if feats.iter().all(|feat| feat.device().is_cuda()) {
            let stacked = Projector::each(&self.heads, &feats);
            return (stacked.shallow_clone(), stacked.unbind(0));
        }
        let embeds = self.embed(outs);
        (Tensor::stack(&embeds, 0), embeds)
    }

    /// Where in the list network m's last embedding stands.
    pub(super) fn last(&self, m: usize) -> usize {
        self.places.iter().rposition(|&(net, _)| net == m).expect("a network has stages")
    }

    pub(super) fn contrast_batch(&self, outs: &[Outputs], batch: &Batch) -> ContrastBatch {
        let ((stacked, embeds), feats, labels) = (self.embed_stacked(outs), self.meta_feats(outs), batch.labels.shallow_clone());
        let own = ContrastBatch { stacked, embeds, feats, labels, contrast: OnceCell::new() };
        // A bank holds all ranks' images already.
        if self.bank.is_some() || !self.ranks.gather_negatives() {
            return own;
        }
        // The embeddings are of one width, the features are not: one exchange each.
        let stacked = self.ranks.for_contrast(&own.stacked, 1);
        let widths: Vec<i64> = own.feats.iter().map(|f| f.size()[1]).collect();
        let feats = match own.feats.is_empty() {
            true => vec![],
            false => self.ranks.for_contrast(&Tensor::cat(&own.feats, 1), 0).split_with_sizes(&widths, 1),
        };
        let labels = self.ranks.for_contrast(&own.labels, 0);
        ContrastBatch { embeds: stacked.unbind(0), stacked, feats, labels, contrast: OnceCell::new() }
    }

    /// The released code's meta-network reads pooled features.
    pub(super) fn meta_feats(&self, outs: &[Outputs]) -> Vec<Tensor> {
        let read = self.meta.is_some() && self.options.mode == Mode::Reference;
        self.places.iter().filter(|_| read).map(|&(m, l)| outs[m].feats[l].shallow_clone()).collect()
    }

    /// lambda of every pair and sample (Eq. 17), [P, B]: the meta-network's, or 1 where the matching is fixed.
    pub(super) fn lambda(&self, embeds: &[Tensor], feats: &[Tensor]) -> Tensor {
        match &self.meta {
            None => Tensor::ones([self.pairs.list.len() as i64, embeds[0].size()[0]], (embeds[0].kind(), embeds[0].device())),
            Some(meta) => meta.lambda(if self.options.mode == Mode::Paper { embeds } else { feats }, &self.pairs),
        }
    }

    /// L_MCL, Eq. 13. With `fixed`, the soft targets are those and not the embeddings' own.
    pub(super) fn l_mcl(&self, seen: &ContrastBatch, learns: Lambda, fixed: Option<&SoftTargets>) -> Result<Evaluated> {
        let lambda = || self.lambda(&seen.embeds, &seen.feats);
        let lambda = if learns == Lambda::Learns { lambda() } else { tch::no_grad(lambda) };
        let stacked = &seen.stacked;
        let (tau, soft_terms) = (self.options.tau, self.options.soft_terms());
        let Some(bank) = &self.bank else {
            let fixed = fixed.and_then(|f| if let SoftTargets::Batch(t) = f { Some(t) } else { None });
            let (parts, targets) = contrast::l_mcl(stacked, &self.pairs, &lambda, seen.contrast(tau), soft_terms, fixed);
            return Ok(Evaluated { parts, lambda, targets: SoftTargets::Batch(targets) });
        };
        let nets: Vec<usize> = self.places.iter().map(|p| p.0).collect();
        let weight = match bank.usable() {
            Some(usable) => &lambda * usable,
            None => lambda.shallow_clone(),
        };
        let fixed = fixed.and_then(|f| if let SoftTargets::Memory(t) = f { Some(t) } else { None });
        let layout = self.options.mode.bank_layout();
        let (parts, targets) =
            contrast::l_mcl_memory(stacked, &nets, &self.pairs, &weight, &bank.samples()?, tau, soft_terms, layout, fixed);
        Ok(Evaluated { parts, lambda, targets: SoftTargets::Memory(targets) })
    }

    /// The terms of L_MCL that are in use: name, weight (alpha or beta and the term's factor), value.
    pub(super) fn weighted<'a>(&self, parts: &'a Parts) -> impl Iterator<Item = (&'static str, f64, &'a Tensor)> {
        let rows = parts.named().into_iter().zip(self.options.weights());
        rows.map(|((name, value), weight)| (name, weight, value)).filter(|(_, weight, _)| *weight > 0.0)
    }
}
