//! What contrastive embeddings of different networks know of each other: noted for the log, and said in words when it is nothing.

use tch::Tensor;

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
    for (a, from) in embeds.iter().enumerate() {
        for (b, to) in embeds.iter().enumerate().filter(|(b, _)| *b != a) {
            let (log_k, icl) = match samples {
                Samples::Batch(contrast) => (contrast.negatives().log(), contrast::icl(from, to, contrast)),
                Samples::Memory { banks, negatives, tau, layout } => {
                    let icl = contrast::icl_memory(from, &banks[b], *tau, *layout);
                    (icl.full_like((*negatives as f64).ln()), icl)
                }
            };
            terms.note(format!("mutual_information.{a}.{b}"), &(log_k - icl));
        }
        terms.note(format!("likeness.{a}"), &likeness(from));
    }
}

/// The column `likeness` of the metrics: the mean cosine between the embeddings of two different images. `embeds` [B, d], unit rows.
fn likeness(embeds: &Tensor) -> Tensor {
    let rows = embeds.size()[0] as f64;
    // |sum of all rows|^2 counts every pair, and every row with itself.
    (embeds.sum_dim_intlist(0i64, false, None).square().sum(None) - rows) / (rows * (rows - 1.0)).max(1.0)
}

/// Above this mean cosine, similarities differ by less than a tenth of tau: all contrast samples of an anchor weigh about the same.
const ALIKE: f64 = 0.99;

/// A sentence for the log when the embeddings have collapsed, from the means of an epoch. The soft terms are least when all embeddings
/// are one point. At a high learning rate they get there in the first hundred steps, before the hard terms have parted anything, and
/// the hard terms then need hundreds of steps to get out.
pub fn remark(means: &[(String, f64)]) -> Option<String> {
    let alike = means.iter().filter(|(name, mean)| name.starts_with("likeness.") && *mean > ALIKE);
    let most = alike.map(|(_, mean)| *mean).max_by(f64::total_cmp)?;
    Some(format!(
        "the embeddings of different images are nearly the same (mean cosine {most:.4} in this epoch), so the contrastive terms teach little; \
         if it lasts, a learning rate that rises first (train.warmup=1) or a smaller method.beta keeps them apart"
    ))
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
    fn a_collapse_is_said_and_nothing_else() {
        let means = |alike: f64| vec![("loss".to_string(), 3.0), ("likeness.0".to_string(), 0.4), ("likeness.1".to_string(), alike)];
        assert_eq!(remark(&means(0.9)), None);
        assert_eq!(remark(&[("loss".to_string(), 3.0)]), None);
        let said = remark(&means(0.9991)).unwrap();
        assert!(said.contains("0.9991") && said.contains("train.warmup=1"), "{said}");
    }
}
