//! What is logged beside the losses: lambda by layer pair, and what the networks' last embeddings know of each other.

use tch::Tensor;

use super::super::parts::information::{self, Samples};
use super::LMcl;
use super::contrastive::ContrastBatch;
use crate::error::Result;
use crate::losses::contrast::Contrast;
use crate::losses::terms::Terms;
use crate::nets::Outputs;

/// (a, b, la, lb) of an ordered pair of embeddings: two networks and their stages.
pub type LayerPair = (usize, usize, usize, usize);

impl LMcl {
    /// `lambda.A.B.LA.LB`, the mean over the batch; mutual information and likeness of the last embeddings.
    pub(super) fn note(&self, terms: &mut Terms, seen: &ContrastBatch, lambda: &Tensor) -> Result<()> {
        let _guard = tch::no_grad_guard();
        let embeds = &seen.embeds;
        if self.meta.is_some() {
            let means = lambda.mean_dim(1i64, false, None);
            for (p, &(i, j)) in self.pairs.list.iter().enumerate() {
                let ((a, k), (b, z)) = (self.places[i], self.places[j]);
                terms.note(format!("lambda.{a}.{b}.{k}.{z}"), &means.get(p as i64));
            }
        }
        let (tau, networks) = (self.options.tau, self.places.last().map_or(0, |p| p.0 + 1));
        let last: Vec<&Tensor> = (0..networks).map(|m| &embeds[self.last(m)]).collect();
        match &self.bank {
            Some(bank) => {
                let (banks, negatives, layout) = (bank.samples()?, self.options.negatives, self.options.mode.bank_layout());
                information::note(terms, &last, &Samples::Memory { banks: &banks, negatives, tau, layout });
            }
            None => information::note(terms, &last, &Samples::Batch(&Contrast::in_batch(&seen.labels, tau, last[0].kind()))),
        }
        Ok(())
    }

    /// lambda of each ordered pair of embeddings, `[B]`.
    pub fn lambdas(&self, outs: &[Outputs]) -> Vec<(LayerPair, Tensor)> {
        let _guard = tch::no_grad_guard();
        let lambda = self.lambda(&self.embed(outs), &self.meta_feats(outs));
        let mut rows = vec![];
        for (p, &(i, j)) in self.pairs.list.iter().enumerate() {
            let ((a, k), (b, z)) = (self.places[i], self.places[j]);
            rows.push(((a, b, k, z), lambda.get(p as i64)));
            rows.push(((b, a, z, k), lambda.get(p as i64)));
        }
        rows
    }
}
