//! Losses on class logits: cross-entropy, the gated ensemble, distillation (Eq. 14 and 18-22).

use tch::{Reduction, Tensor};

/// L_ce of one classifier, mean over rows. `logits` [B, C]; `targets` class indices [B] or probabilities [B, C].
pub fn ce(logits: &Tensor, targets: &Tensor) -> Tensor {
    logits.cross_entropy_loss::<Tensor>(targets, None, Reduction::Mean, -100, 0.0)
}

/// L^task of one network, Eq. 14: the cross-entropies of all its classifiers, branches included. Each [B, C].
pub fn task(logits: &[Tensor], targets: &Tensor) -> Tensor {
    let mut rows = logits.iter().map(|z| ce(z, targets));
    let first = rows.next().expect("a network has a classifier");
    rows.fold(first, |sum, row| sum + row)
}

/// z^ens, Eq. 18: the logits of all stages under the gate's weights. `weights` [B, L] with rows that sum to 1; `logits` L x [B, C].
pub fn ensemble(weights: &Tensor, logits: &[Tensor]) -> Tensor {
    (weights.unsqueeze(-1) * Tensor::stack(logits, 1)).sum_dim_intlist(1i64, false, None)
}

/// z^ens without a gate: w = 1/L.
pub fn mean(logits: &[Tensor]) -> Tensor {
    Tensor::stack(logits, 0).mean_dim(0i64, false, None)
}

/// T^2 KL(sigma(teacher/T) || sigma(student/T)), mean over rows (Eq. 21). Both [B, C]; the teacher is detached.
pub fn kl(teacher: &Tensor, student: &Tensor, temperature: f64) -> Tensor {
    let p = (teacher.detach() / temperature).log_softmax(-1, None);
    let q = (student / temperature).log_softmax(-1, None);
    let rows = (p.exp() * (p - q)).sum_dim_intlist(-1i64, false, None); // [B]
    rows.mean(None) * temperature.powi(2)
}
