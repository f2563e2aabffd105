//! What is logged beside the losses: lambda by layer pair, and what the networks' last embeddings know of each other.

use tch::Tensor;

use super::super::parts::information::{self, Samples};
use super::LMcl;
use super::contrastive::ContrastBatch;
use crate::error::Result;
use crate::losses::terms::Terms;
use crate::nets::Outputs;

/// (a, b, la, lb) of an ordered pair of embeddings: two networks and their stages.
pub type LayerPair = (usize, usize, usize, usize);

impl LMcl {
    /// `lambda.A.B.LA.LB`, the mean over the batch; mutual information and likeness, of the last embeddings and of all stages.
    pub(super) fn note(&self, terms: &mut Terms, seen: &ContrastBatch, lambda: &Tensor) -> Result<()> {
        let _guard = tch::no_grad_guard();
        if self.meta.is_some() {
            let means = lambda.mean_dim(1i64, false, None);
            for (p, &(i, j)) in self.pairs.list.iter().enumerate() {
                let ((a, k), (b, z)) = (self.places[i], self.places[j]);
                terms.note(format!("lambda.{a}.{b}.{k}.{z}"), &means.get(p as i64));
            }
        }
        let tau = self.options.tau;
        match &self.bank {
            Some(bank) => {
                let (banks, negatives, layout) = (bank.samples()?, self.options.negatives, self.options.mode.bank_layout());
                information::note_stages(terms, &seen.stacked, &self.places, &Samples::Memory { banks: &banks, negatives, tau, layout });
            }
            None => information::note_stages(terms, &seen.stacked, &self.places, &Samples::Batch(seen.contrast(tau))),
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
