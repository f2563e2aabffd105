//! Losses on class logits: cross-entropy, the gated ensemble, distillation (Eq. 14 and 18-22).

use tch::{Reduction, Tensor};

/// L_ce of one classifier, mean over rows. `logits` [B, C]; `targets` class indices `[B]` or probabilities [B, C].
pub fn ce(logits: &Tensor, targets: &Tensor) -> Tensor {
    logits.cross_entropy_loss::<Tensor>(targets, None, Reduction::Mean, -100, 0.0)
}

/// The same with the labels smoothed: 1 - s on the class, s spread over all.
pub(crate) fn smooth_ce(logits: &Tensor, targets: &Tensor, smoothing: f64) -> Tensor {
    logits.cross_entropy_loss::<Tensor>(targets, None, Reduction::Mean, -100, smoothing)
}

/// L^task of one network, Eq. 14: the cross-entropies of all its classifiers, branches included, with smoothed labels. Each [B, C].
pub fn task(logits: &[Tensor], targets: &Tensor, smoothing: f64) -> Tensor {
    if logits.len() > 1 && logits[0].device().is_cuda() {
        // One loss of all rows: starting a kernel costs more there than such small ones compute.
        let times = [&[logits.len() as i64], vec![1; targets.dim() - 1].as_slice()].concat();
        return smooth_ce(&Tensor::cat(logits, 0), &targets.repeat(times), smoothing) * logits.len() as f64;
    }
    let mut rows = logits.iter().map(|z| smooth_ce(z, targets, smoothing));
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

/// The same with gradients through the teacher too, for teachers that are trained by it. Both [B, C].
pub fn kl_through(teacher: &Tensor, student: &Tensor, temperature: f64) -> Tensor {
    let p = (teacher / temperature).log_softmax(-1, None);
    let q = (student / temperature).log_softmax(-1, None);
    (p.exp() * (&p - q)).sum_dim_intlist(-1i64, false, None).mean(None) * temperature.powi(2)
}

/// What network m learns from its peers: the mean over the others n of `KL(sg[z_n] -> z_m)`. M x [B, C].
pub fn mutual(logits: &[&Tensor], m: usize, temperature: f64) -> Tensor {
    let others = logits.iter().enumerate().filter(|(n, _)| *n != m);
    let sum = others.map(|(_, z)| kl(z, logits[m], temperature)).reduce(|sum, row| sum + row).expect("a peer to learn from");
    sum / (logits.len() - 1) as f64
}
