//! What contrastive embeddings of different networks know of each other: noted for the log, and said in words when it stays nothing.

use tch::Tensor;

use super::super::EpochMeans;
use crate::losses::contrast::{self, BankLayout, Contrast};
use crate::losses::terms::Terms;

/// Where the contrast samples of an anchor come from.
pub enum Samples<'a> {
    /// The others of the batch.
    Batch(&'a Contrast),
    /// One bank a network, [B, K', d]; each anchor has this many negatives in it.
    Memory { banks: &'a [Tensor], negatives: usize, tau: f64, layout: BankLayout },
}

/// Notes of the networks' last embeddings, M x [B, d] with unit rows: `mutual_information.A.B`, the lower bound log K - L_ICL of Eq. 6 with
/// lambda 1, and `likeness.M`, the mean cosine between the embeddings of two different images: near 1, all images look the same to network M.
pub fn note(terms: &mut Terms, embeds: &[&Tensor], samples: &Samples) {
    let _guard = tch::no_grad_guard();
    let pairs: Vec<(usize, usize)> =
        (0..embeds.len()).flat_map(|a| (0..embeds.len()).filter(move |b| *b != a).map(move |b| (a, b))).collect();
    let bounds: Vec<Tensor> = match samples {
        Samples::Batch(contrast) => {
            let log_k = contrast.negatives().log();
            contrast::icls(embeds, &pairs, contrast).into_iter().map(|icl| &log_k - icl).collect()
        }
        Samples::Memory { banks, negatives, tau, layout } => {
            let icl = |&(a, b): &(usize, usize)| contrast::icl_memory(embeds[a], &banks[b], *tau, *layout);
            pairs.iter().map(icl).map(|icl| icl.full_like((*negatives as f64).ln()) - icl).collect()
        }
    };
    let likenesses: Vec<Tensor> = match embeds.first() {
        // All at once: starting a kernel costs more there than such small ones compute.
        Some(first) if first.device().is_cuda() => likeness(&Tensor::stack(embeds, 0)).unbind(0),
        _ => embeds.iter().map(|own| likeness(own)).collect(),
    };
    for (a, likeness) in likenesses.iter().enumerate() {
        for ((_, b), bound) in pairs.iter().zip(&bounds).filter(|((of, _), _)| *of == a) {
            terms.note(format!("mutual_information.{a}.{b}"), bound);
        }
        terms.note(format!("likeness.{a}"), likeness);
    }
}

/// The same of every stage: `likeness.M.L`, and `mutual_information.A.B.K.Z` of stage K of network A to stage Z of network B; those of last
/// stages have their short names too. `places` are the (network, stage) of the embeddings `stacked` [N, B, d]. A bank holds last stages
/// alone, so with one Z is always the last.
pub fn note_stages(terms: &mut Terms, stacked: &Tensor, places: &[(usize, usize)], samples: &Samples) {
    let _guard = tch::no_grad_guard();
    let stacked = stacked.detach();
    let last = |m: usize| places.iter().filter(|place| place.0 == m).map(|place| place.1).max().unwrap_or(0);
    let is_last = |(m, l): (usize, usize)| l == last(m);
    // Each pair's bound is a view of one tensor: starting a kernel costs more on a GPU than such small ones compute.
    let mut bounds = vec![];
    match samples {
        Samples::Batch(contrast) => {
            let all = contrast.negatives().log() - contrast::icl_of_all(&stacked, contrast);
            for (i, own) in places.iter().enumerate() {
                for (j, other) in places.iter().enumerate().filter(|(_, other)| other.0 != own.0) {
                    bounds.push((*own, *other, all.get(i as i64).get(j as i64)));
                }
            }
        }
        Samples::Memory { banks, negatives, tau, layout } => {
            for (i, own) in places.iter().enumerate() {
                for (b, bank) in banks.iter().enumerate().filter(|(b, _)| *b != own.0) {
                    let icl = contrast::icl_memory(&stacked.get(i as i64), bank, *tau, *layout);
                    bounds.push((*own, (b, last(b)), icl.full_like((*negatives as f64).ln()) - icl));
                }
            }
        }
    }
    let alike = likeness(&stacked);
    for ((a, _), (b, _), bound) in bounds.iter().filter(|(own, other, _)| is_last(*own) && is_last(*other)) {
        terms.note(format!("mutual_information.{a}.{b}"), bound);
    }
    for (i, (m, l)) in places.iter().enumerate() {
        let alike = alike.get(i as i64);
        if is_last((*m, *l)) {
            terms.note(format!("likeness.{m}"), &alike);
        }
        terms.note(format!("likeness.{m}.{l}"), &alike);
    }
    for ((a, k), (b, z), bound) in &bounds {
        terms.note(format!("mutual_information.{a}.{b}.{k}.{z}"), bound);
    }
}

/// The column `likeness` of the metrics: the mean cosine between the embeddings of two different images. `embeds` [.., B, d], unit rows.
fn likeness(embeds: &Tensor) -> Tensor {
    let rows = embeds.size()[embeds.dim() - 2] as f64;
    // |sum of all rows|^2 counts every pair, and every row with itself.
    (embeds.sum_dim_intlist(-2i64, false, None).square().sum_dim_intlist(-1i64, false, None) - rows) / (rows * (rows - 1.0)).max(1.0)
}

/// Above this mean cosine, similarities differ by less than a tenth of tau: all contrast samples of an anchor weigh about the same.
const ALIKE: f64 = 0.99;

/// Steps after which it is news that embeddings are still alike. The soft terms are least where all embeddings are one point, and a run
/// without a warm-up gets there in its first steps. Paper mode, reference mode and the released objective in plain PyTorch all left it
/// between steps 100 and 125, in every stage (protocols/plans/paper/start, which ends at this step).
const LASTS: usize = 300;

/// A sentence for the log when embeddings stay one point for longer than they usually do, said after the first epoch of which that is
/// true. `epochs`: all so far, the newest last.
pub fn remark(epochs: &[EpochMeans]) -> Option<String> {
    let (now, before) = epochs.split_last()?;
    let most = lasting(now)?;
    if before.iter().any(|epoch| lasting(epoch).is_some()) {
        return None;
    }
    Some(format!(
        "the embeddings of different images are still nearly the same after {} steps (mean cosine {most:.4} in this epoch), so the \
         contrastive terms teach little yet; the paper's recipe leaves that by step 125 on CIFAR-100; train.warmup=1 or a smaller method.beta keeps \
         them apart (this note comes once)",
        now.steps
    ))
}

/// The largest likeness of an epoch that should have parted its embeddings and has not.
fn lasting(epoch: &EpochMeans) -> Option<f64> {
    let alike = epoch.means.iter().filter(|(name, mean)| epoch.steps >= LASTS && name.starts_with("likeness.") && *mean > ALIKE);
    alike.map(|(_, mean)| *mean).max_by(f64::total_cmp)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn likeness_is_the_mean_cosine_of_pairs() {
        let wave = (Tensor::arange(15, (tch::Kind::Double, tch::Device::Cpu)) * 0.7).sin().view([5, 3]);
        let rows = crate::losses::unit::Norm::Guarded.apply(&wave);
        let mut sum = 0.0;
        for i in 0..5 {
            for j in (0..5).filter(|&j| j != i) {
                sum += rows.get(i).dot(&rows.get(j)).double_value(&[]);
            }
        }
        assert!((likeness(&rows).double_value(&[]) - sum / 20.0).abs() < 1e-12);
        assert!((likeness(&rows.narrow(0, 0, 1).expand([4, 3], false)).double_value(&[]) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn likeness_is_said_once_and_only_when_it_lasts() {
        let epoch = |steps: usize, alike: f64| {
            let means = [("loss", 3.0), ("likeness.0", 0.4), ("likeness.1", 0.5), ("likeness.1.0", alike)];
            EpochMeans { steps, means: means.map(|(name, mean)| (name.to_string(), mean)).to_vec() }
        };
        // Which epochs of a run, from 1, are followed by the sentence.
        let said = |run: &[(usize, f64)]| -> Vec<usize> {
            let epochs: Vec<EpochMeans> = run.iter().map(|&(steps, alike)| epoch(steps, alike)).collect();
            (1..=epochs.len()).filter(|&n| remark(&epochs[..n]).is_some()).collect()
        };
        assert_eq!(said(&[(100, 0.9991), (200, 0.995), (300, 0.95), (400, 0.9)]), Vec::<usize>::new(), "as every run starts");
        assert_eq!(said(&[(100, 0.9991), (200, 0.9991), (300, 0.9991), (400, 0.9991), (500, 0.95)]), [3]);
        assert_eq!(said(&[(390, 0.95), (780, 0.9991), (1170, 0.9), (1560, 0.9991)]), [2], "later is news as well, but once");
        let text = remark(&[epoch(390, 0.9991)]).unwrap();
        assert!(text.contains("after 390 steps") && text.contains("0.9991") && text.contains("train.warmup=1"), "{text}");
        assert_eq!(remark(&[EpochMeans { steps: 390, means: vec![("loss".into(), 3.0)] }]), None, "methods without embeddings");
        assert_eq!(remark(&[]), None);
    }
}
