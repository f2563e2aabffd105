//! Rows that the tables of several methods have.

use tch::Tensor;

use crate::losses::logit;
use crate::losses::terms::Terms;
use crate::nets::Outputs;

/// L^task of the networks themselves, a row each. `labels` [B].
pub fn task_rows(terms: &mut Terms, outs: &[Outputs], labels: &Tensor, smoothing: f64) {
    for (m, own) in outs.iter().enumerate() {
        terms.add_for(m, "task", 1.0, logit::smooth_ce(own.logit(), labels, smoothing));
    }
}

/// Every network learns from the predictions of the others, a row each (Deep Mutual Learning). The logits of networks that do not learn,
/// F x [B, C], are those of F more peers, which have no rows.
pub fn mutual_rows(terms: &mut Terms, outs: &[Outputs], frozen: &[Tensor], temperature: f64) {
    let logits: Vec<&Tensor> = outs.iter().map(Outputs::logit).chain(frozen).collect();
    for m in 0..outs.len() {
        terms.add_for(m, "mutual", 1.0, logit::mutual(&logits, m, temperature));
    }
}
