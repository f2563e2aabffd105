//! Contrastive losses: VCL, ICL and their soft forms (section 3 of the paper), MCL, and layer-wise MCL with a weight per sample
//! (section 4.2), mined in the batch or from memory banks. Embeddings are unit vectors. In a matrix of similarities rows are anchors
//! and columns contrast samples; soft targets are always detached.

use tch::{Kind, Tensor};

/// The soft terms (Eq. 8-9): how two contrastive distributions are compared. Here is their temperature.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SoftTerms {
    /// T: similarities are divided by it and the divergence multiplied by T^2.
    pub temperature: f64,
    /// Does the anchor's own column belong to the distribution? (Batch mining; a bank has no such column.)
    pub diagonal: bool,
}

impl SoftTerms {
    /// Eq. 1 and 4: plain distributions over the K + 1 contrast samples.
    pub const PAPER: SoftTerms = SoftTerms { temperature: 1.0, diagonal: false };
    /// The released code: T = 3 as for the logits, over whole rows.
    pub const RELEASED: SoftTerms = SoftTerms { temperature: 3.0, diagonal: true };
}

/// Which columns count for an anchor, and which of them are its positives.
pub struct Contrast {
    /// 1/|P_i| at the positives of row i, 0 elsewhere. [B, K].
    positives: Tensor,
    /// True at columns that are no contrast sample (the anchor itself), which leave every denominator. [B, K].
    own: Option<Tensor>,
    /// Minus infinity where `own` is true, else 0: added, it takes those columns out of a sum of exponentials. [B, K].
    barrier: Option<Tensor>,
    tau: f64,
}

impl Contrast {
    /// Batch mining: the others of the batch are the contrast samples, those of the anchor's class its positives. A class that
    /// occurs once would divide by zero: callers refuse it. `labels` `[B]`; `kind` that of the embeddings.
    pub fn in_batch(labels: &Tensor, tau: f64, kind: Kind) -> Contrast {
        let own = Tensor::eye(labels.size()[0], (Kind::Bool, labels.device()));
        let mates = labels.unsqueeze(1).eq_tensor(&labels.unsqueeze(0)).fill_diagonal_(0, false).to_kind(kind);
        let positives = &mates / mates.sum_dim_intlist(1i64, true, None);
        let barrier = Some(positives.zeros_like().masked_fill_(&own, f64::NEG_INFINITY));
        Contrast { positives, own: Some(own), barrier, tau }
    }

    /// Memory mining: the first `positives` columns are the positives, all columns count. `like` [.., B, K] gives shape and place.
    fn in_memory(like: &Tensor, positives: i64, tau: f64) -> Contrast {
        let size = like.size();
        let row = Tensor::zeros([1, size[size.len() - 1]], (like.kind(), like.device()));
        let _ = row.narrow(1, 0, positives).fill_(1.0 / positives as f64);
        Contrast { positives: row, own: None, barrier: None, tau }
    }

    /// How many negatives an anchor has, mean over the batch: a scalar tensor.
    pub fn negatives(&self) -> Tensor {
        let mut negative = self.positives.eq(0.0);
        if self.own.is_some() {
            let _ = negative.fill_diagonal_(0, false); // [B, B]
        }
        negative.sum_dim_intlist(-1i64, false, self.positives.kind()).mean(None)
    }

    /// log of the denominator of Eq. 2 and 5, row by row. `scores` [.., B, K] -> [.., B].
    fn log_sum(&self, scores: &Tensor) -> Tensor {
        match &self.barrier {
            Some(barrier) => (scores + barrier).logsumexp(-1, false),
            None => scores.logsumexp(-1, false),
        }
    }

    /// -log of the positives' probability given the row's denominator, mean over the positives (Eq. 2, 5). [.., B].
    fn hard(&self, scores: &Tensor, log_sum: &Tensor) -> Tensor {
        log_sum - (scores * &self.positives).sum_dim_intlist(-1i64, false, None)
    }

    /// The distribution of Eq. 1 or 4. `log_sum` is the hard denominator, reused where it is the same.
    fn soft(&self, scores: &Tensor, log_sum: &Tensor, soft_terms: SoftTerms) -> Distribution {
        let own = self.own.as_ref().filter(|_| !soft_terms.diagonal).map(Tensor::shallow_clone);
        if soft_terms.temperature == 1.0 && own.is_some() == self.own.is_some() {
            return Distribution { log_p: scores - log_sum.unsqueeze(-1), own };
        }
        let scores = scores / soft_terms.temperature;
        let log_sum = match &own {
            Some(own) => scores.masked_fill(own, f64::NEG_INFINITY).logsumexp(-1, true),
            None => scores.logsumexp(-1, true),
        };
        Distribution { log_p: scores - log_sum, own }
    }
}

/// A contrastive distribution. The anchor's own column, where it does not belong, is cut from targets, so its value here never counts.
struct Distribution {
    log_p: Tensor,
    own: Option<Tensor>,
}

/// A distribution as a constant: p and sum p log p.
#[derive(Debug)]
struct Target {
    prob: Tensor,
    negentropy: Tensor,
}

impl Target {
    fn shallow_clone(&self) -> Target {
        Target { prob: self.prob.shallow_clone(), negentropy: self.negentropy.shallow_clone() }
    }
}

impl Distribution {
    fn target(&self) -> Target {
        let log_p = self.log_p.detach();
        let prob = log_p.exp();
        let prob = self.own.as_ref().map_or(prob.shallow_clone(), |own| prob.masked_fill(own, 0.0));
        let negentropy = (&prob * log_p).sum_dim_intlist(-1i64, false, None);
        Target { prob, negentropy }
    }

    /// KL(target || self) row by row, without T^2. [.., B].
    fn kl(&self, target: &Target) -> Tensor {
        &target.negentropy - (&target.prob * &self.log_p).sum_dim_intlist(-1i64, false, None)
    }
}

/// Rows [B] of one block of similarities. `a`, `b`: [B, d].
fn block(a: &Tensor, b: &Tensor, contrast: &Contrast) -> (Tensor, Tensor) {
    let scores = a.matmul(&b.tr()) / contrast.tau;
    let log_sum = contrast.log_sum(&scores);
    (scores, log_sum)
}

/// L^VCL of one network, Eq. 2: the positive among the contrast samples of its own embedding space. `v` [B, d]. Mean over anchors.
pub fn vcl(v: &Tensor, contrast: &Contrast) -> Tensor {
    icl(v, v, contrast)
}

/// L^ICL_{a->b}, Eq. 5: the anchor from `a`, the contrast samples from `b`. Both [B, d]. Mean over anchors. The anchor's own image
/// seen by `b` is no contrast sample (Eq. 4).
pub fn icl(a: &Tensor, b: &Tensor, contrast: &Contrast) -> Tensor {
    let (scores, log_sum) = block(a, b, contrast);
    contrast.hard(&scores, &log_sum).mean(None)
}

/// `icl` of each of these pairs of embeddings. On a device all at once: starting a kernel costs more there than such small ones compute.
pub(crate) fn icls(embeds: &[&Tensor], pairs: &[(usize, usize)], contrast: &Contrast) -> Vec<Tensor> {
    if pairs.is_empty() || !embeds[0].device().is_cuda() {
        return pairs.iter().map(|&(a, b)| icl(embeds[a], embeds[b], contrast)).collect();
    }
    let side = |pick: fn(&(usize, usize)) -> usize| Tensor::stack(&pairs.iter().map(|p| embeds[pick(p)]).collect::<Vec<_>>(), 0);
    let scores = side(|p| p.0).matmul(&side(|p| p.1).transpose(1, 2)) / contrast.tau;
    contrast.hard(&scores, &contrast.log_sum(&scores)).mean_dim(1i64, false, None).unbind(0)
}

/// L^ICL of every ordered pair of N embeddings [N, B, d] at once: row a, column b, anchors from a; the diagonal is VCL. [N, N].
pub(crate) fn icl_of_all(stacked: &Tensor, contrast: &Contrast) -> Tensor {
    let scores = stacked.unsqueeze(1).matmul(&stacked.transpose(1, 2).unsqueeze(0)) / contrast.tau; // [N, N, B, B]
    contrast.hard(&scores, &contrast.log_sum(&scores)).mean_dim(-1i64, false, None)
}

/// T^2 KL(p_teacher || p_student), a term of Eq. 8. Both [B, d]; the teacher is detached. Mean over anchors.
pub fn soft_vcl(teacher: &Tensor, student: &Tensor, contrast: &Contrast, soft_terms: SoftTerms) -> Tensor {
    let soft = |v: &Tensor| {
        let (scores, log_sum) = block(v, v, contrast);
        contrast.soft(&scores, &log_sum, soft_terms)
    };
    soft(student).kl(&soft(teacher).target()).mean(None) * soft_terms.temperature.powi(2)
}

/// T^2 KL(q_{b->a} || q_{a->b}), a term of Eq. 9. Both [B, d]; q_{b->a} is detached. Mean over anchors.
pub fn soft_icl(a: &Tensor, b: &Tensor, contrast: &Contrast, soft_terms: SoftTerms) -> Tensor {
    let soft = |a: &Tensor, b: &Tensor| {
        let (scores, log_sum) = block(a, b, contrast);
        contrast.soft(&scores, &log_sum, soft_terms)
    };
    soft(a, b).kl(&soft(b, a).target()).mean(None) * soft_terms.temperature.powi(2)
}

/// The four contrastive terms, unweighted by alpha and beta.
#[derive(Debug)]
pub struct Parts {
    /// Eq. 2 and 3: within each network's embedding space.
    pub vcl: Tensor,
    /// Eq. 5 and 7: anchors of one network, contrast samples of another.
    pub icl: Tensor,
    /// Eq. 8: networks mimic each other's distributions of VCL.
    pub soft_vcl: Tensor,
    /// Eq. 9: and those of ICL.
    pub soft_icl: Tensor,
}

impl Parts {
    /// The terms by the names they are logged under: the hard ones (weighted by alpha), then the soft ones (by beta).
    pub(crate) fn named(&self) -> [(&'static str, &Tensor); 4] {
        [("vcl", &self.vcl), ("icl", &self.icl), ("soft_vcl", &self.soft_vcl), ("soft_icl", &self.soft_icl)]
    }
}

/// Which embeddings meet. Embeddings of all networks and layers stand in one list of N; a pair is unordered, (i, j) with i < j.
pub struct Pairs {
    /// (i, j) of every pair: places in the list of embeddings.
    pub list: Vec<(usize, usize)>,
    first: Tensor,
    second: Tensor,
    /// [N * N, P]: writes a value per pair at (i, j) and (j, i).
    both_ways: Tensor,
    nodes: i64,
}

impl Pairs {
    /// Every embedding with every other, one of each network.
    pub fn of_networks(networks: usize, like: &Tensor) -> Pairs {
        Pairs::new((0..networks).flat_map(|a| (a + 1..networks).map(move |b| (a, b))).collect(), networks, like)
    }

    /// Index tables where the embeddings live (`like`).
    pub fn new(list: Vec<(usize, usize)>, nodes: usize, like: &Tensor) -> Pairs {
        let (n, count) = (nodes, list.len());
        let mut both_ways = vec![0f32; n * n * count];
        for (p, &(i, j)) in list.iter().enumerate() {
            both_ways[(i * n + j) * count + p] = 1.0;
            both_ways[(j * n + i) * count + p] = 1.0;
        }
        let index = |pick: fn(&(usize, usize)) -> usize| {
            Tensor::from_slice(&list.iter().map(|p| pick(p) as i64).collect::<Vec<_>>()).to_device(like.device())
        };
        let both_ways = Tensor::from_slice(&both_ways).view([(n * n) as i64, count as i64]).to_kind(like.kind()).to_device(like.device());
        Pairs { first: index(|p| p.0), second: index(|p| p.1), both_ways, nodes: n as i64, list }
    }

    /// The dot product of the two vectors of each pair. `vectors` [N, B, d] -> [P, B].
    pub fn dot(&self, vectors: &Tensor) -> Tensor {
        (vectors.index_select(0, &self.first) * vectors.index_select(0, &self.second)).sum_dim_intlist(-1i64, false, None)
    }

    /// A value per pair [P, B] as a symmetric table [N, N, B], zero where no pair is.
    fn table(&self, values: &Tensor) -> Tensor {
        self.both_ways.matmul(values).view([self.nodes, self.nodes, -1])
    }
}

/// The soft targets of one evaluation of `l_mcl`, to be used again as constants while the embeddings move.
#[derive(Debug)]
pub struct Targets {
    intra: Target,
    cross: Target,
}

impl Targets {
    fn shallow_clone(&self) -> Targets {
        Targets { intra: self.intra.shallow_clone(), cross: self.cross.shallow_clone() }
    }
}

/// L^L_MCL, Eq. 13, all pairs at once: sum over ordered pairs of networks and over layers of lambda x MCL, with lambda_i on the row
/// of anchor i before the mean over anchors. `embeds` [N, B, d]; `lambda` [P, B]. Each block of similarities within an embedding is
/// computed once, however many pairs it enters; unordered pairs count double. With `fixed`, soft targets are those and not the
/// embeddings' own; the targets in use are returned.
pub fn l_mcl(
    embeds: &Tensor,
    pairs: &Pairs,
    lambda: &Tensor,
    contrast: &Contrast,
    soft_terms: SoftTerms,
    fixed: Option<&Targets>,
) -> (Parts, Targets) {
    let anchors = embeds.size()[1] as f64;
    let t2 = soft_terms.temperature.powi(2);
    let intra = embeds.matmul(&embeds.transpose(1, 2)) / contrast.tau; // [N, B, B]: v_i v_i
    let half = embeds.index_select(0, &pairs.first).matmul(&embeds.index_select(0, &pairs.second).transpose(1, 2)) / contrast.tau;
    let cross = Tensor::cat(&[&half, &half.transpose(1, 2)], 0); // [2P, B, B]: v_i v_j for each pair, then v_j v_i
    let (intra_sum, cross_sum) = (contrast.log_sum(&intra), contrast.log_sum(&cross));
    let table = pairs.table(lambda); // [N, N, B]
    let both = Tensor::cat(&[lambda, lambda], 0); // [2P, B]
    let sum = |weights: &Tensor, rows: Tensor| (rows * weights).sum(None) * (2.0 / anchors);
    let squared = |value: Tensor| if t2 == 1.0 { value } else { value * t2 };

    let vcl = sum(&table.sum_dim_intlist(1i64, false, None), contrast.hard(&intra, &intra_sum));
    let icl = sum(&both, contrast.hard(&cross, &cross_sum));

    let (p, q) = (contrast.soft(&intra, &intra_sum, soft_terms), contrast.soft(&cross, &cross_sum, soft_terms));
    let targets = fixed.map_or_else(|| Targets { intra: p.target(), cross: q.target() }, Targets::shallow_clone);
    // Eq. 8 for every two embeddings at once: [B, N, N], teacher i by student j, as `Distribution::kl`.
    let meet = targets.intra.prob.permute([1, 0, 2]).matmul(&p.log_p.permute([1, 2, 0]));
    let kl = targets.intra.negentropy.tr().unsqueeze(2) - meet;
    let soft_vcl = squared(sum(&table.permute([2, 0, 1]), kl));
    // Eq. 9: the target of q_{a->b} is q_{b->a}, the block of the other half.
    let shift = pairs.list.len() as i64;
    let other = Target { prob: targets.cross.prob.roll(shift, 0), negentropy: targets.cross.negentropy.roll(shift, 0) };
    let soft_icl = squared(sum(&both, q.kl(&other)));
    (Parts { vcl, icl, soft_vcl, soft_icl }, targets)
}

/// L^MCL, Eq. 10, of M networks' last embeddings [M, B, d]: Eq. 3, 7, 8 and 9. It is the layer-wise loss of one layer with lambda 1,
/// which counts every own block 2(M - 1) times and every pair twice. `pairs`: `Pairs::of_networks`.
pub fn mcl(embeds: &Tensor, pairs: &Pairs, contrast: &Contrast, soft_terms: SoftTerms) -> Parts {
    let m = embeds.size()[0];
    let ones = Tensor::ones([pairs.list.len() as i64, embeds.size()[1]], (embeds.kind(), embeds.device()));
    let (parts, _) = l_mcl(embeds, pairs, &ones, contrast, soft_terms, None);
    Parts {
        vcl: parts.vcl / (2.0 * (m as f64 - 1.0)),
        icl: parts.icl / 2.0,
        soft_vcl: parts.soft_vcl / 2.0,
        soft_icl: parts.soft_icl / 2.0,
    }
}

/// What a memory bank gives each anchor, where the paper and the released code differ.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum BankLayout {
    /// Columns: one class mate, then the negatives. Each network's vanilla term uses its own bank.
    Paper,
    /// Columns: the anchor's own image, one class mate, then the negatives. ICL has both as positives, VCL leaves the first column
    /// out, and the vanilla terms of a pair (a, b) both use the bank of a.
    Released,
}

/// L^ICL_{a->b} with contrast samples from the bank of b, for one layer with lambda 1. `anchor` [B, d], `bank` [B, K', d].
pub(crate) fn icl_memory(anchor: &Tensor, bank: &Tensor, tau: f64, layout: BankLayout) -> Tensor {
    let scores = bank.matmul(&anchor.unsqueeze(-1)).squeeze_dim(-1) / tau; // [B, K']
    let contrast = Contrast::in_memory(&scores, if layout == BankLayout::Paper { 1 } else { 2 }, tau);
    contrast.hard(&scores, &contrast.log_sum(&scores)).mean(None)
}

/// The soft targets of one evaluation of `l_mcl_memory`, by bank and choice of columns.
#[derive(Debug)]
pub struct MemoryTargets(Vec<Vec<Target>>);

/// Every embedding against one bank and one choice of columns, embedding by embedding: hard rows [B], distributions [B, K].
struct Scored {
    hard: Vec<Tensor>,
    log_p: Vec<Tensor>,
    target: Target,
}

/// Eq. 13 with contrast samples from memory banks (the appendix's memory-based algorithm). `embeds` [N, B, d] of any layer; `nets[i]`
/// the network of embedding i; `banks[m]` [B, K', d], what network m remembers of each anchor's contrast samples, the same samples
/// for all networks, columns as `layout` says. Returns the sum over ordered pairs.
#[allow(clippy::too_many_arguments)]
pub fn l_mcl_memory(
    embeds: &Tensor,
    nets: &[usize],
    pairs: &Pairs,
    lambda: &Tensor,
    banks: &[Tensor],
    tau: f64,
    soft_terms: SoftTerms,
    layout: BankLayout,
    fixed: Option<&MemoryTargets>,
) -> (Parts, MemoryTargets) {
    let t2 = soft_terms.temperature.powi(2);
    let by_anchor = embeds.permute([1, 2, 0]); // [B, d, N]
    let score = |m: usize, which: usize, scores: Tensor, positives: i64| {
        let contrast = Contrast::in_memory(&scores, positives, tau);
        let log_sum = contrast.log_sum(&scores);
        let (hard, soft) = (contrast.hard(&scores, &log_sum), contrast.soft(&scores, &log_sum, soft_terms));
        let target = fixed.map_or_else(|| soft.target(), |fixed| fixed.0[m][which].shallow_clone());
        // `unbind` once: selecting an embedding pair by pair would cost a whole zeroed table each in the backward pass.
        Scored { hard: hard.unbind(0), log_p: soft.log_p.unbind(0), target }
    };
    // By bank; within it all columns first, and the columns of VCL last.
    let scored: Vec<Vec<Scored>> = banks
        .iter()
        .enumerate()
        .map(|(m, bank)| {
            let all = bank.matmul(&by_anchor).permute([2, 0, 1]) / tau; // [N, B, K']
            match layout {
                BankLayout::Paper => vec![score(m, 0, all, 1)],
                BankLayout::Released => {
                    let vanilla = all.slice(2, 1, all.size()[2], 1);
                    vec![score(m, 0, all, 2), score(m, 1, vanilla, 1)]
                }
            }
        })
        .collect();
    let (all, vanilla) = (0, scored[0].len() - 1);
    // KL between embedding i at bank m and embedding j at bank n, both ways.
    let mutual = |which: usize, (i, m): (usize, usize), (j, n): (usize, usize)| {
        let one = |(t, tm): (usize, usize), (s, sm): (usize, usize)| {
            let (source, student) = (&scored[tm][which].target, &scored[sm][which]);
            let target = Target { prob: source.prob.get(t as i64), negentropy: source.negentropy.get(t as i64) };
            Distribution { log_p: student.log_p[s].shallow_clone(), own: None }.kl(&target)
        };
        one((i, m), (j, n)) + one((j, n), (i, m))
    };
    let hard = |which: usize, node: usize, bank: usize| &scored[bank][which].hard[node];
    let (mut vcl, mut icl, mut soft_vcl, mut soft_icl) = (vec![], vec![], vec![], vec![]);
    for (p, &(i, j)) in pairs.list.iter().enumerate() {
        let (a, b, weight) = (nets[i], nets[j], lambda.get(p as i64));
        match layout {
            BankLayout::Paper => {
                vcl.push((hard(vanilla, i, a) + hard(vanilla, j, b)) * &weight * 2.0);
                soft_vcl.push(mutual(vanilla, (i, a), (j, b)) * &weight * (2.0 * t2));
            }
            BankLayout::Released => {
                for bank in [a, b] {
                    vcl.push((hard(vanilla, i, bank) + hard(vanilla, j, bank)) * &weight);
                    soft_vcl.push(mutual(vanilla, (i, bank), (j, bank)) * &weight * t2);
                }
            }
        }
        icl.push((hard(all, j, a) + hard(all, i, b)) * &weight * 2.0);
        soft_icl.push(mutual(all, (j, a), (i, b)) * &weight * (2.0 * t2));
    }
    let sum = |rows: Vec<Tensor>| Tensor::stack(&rows, 0).mean_dim(1i64, false, None).sum(None);
    let parts = Parts { vcl: sum(vcl), icl: sum(icl), soft_vcl: sum(soft_vcl), soft_icl: sum(soft_icl) };
    (parts, MemoryTargets(scored.into_iter().map(|bank| bank.into_iter().map(|s| s.target).collect()).collect()))
}

/// L^MCL, Eq. 10, of M networks' last embeddings with contrast samples from memory banks, every vanilla term with the network's own
/// bank (as MCL's released code too). `embeds` [M, B, d]; `banks` M x [B, K', d], columns as `layout` says. Means over anchors.
pub fn mcl_memory(embeds: &Tensor, banks: &[Tensor], tau: f64, soft_terms: SoftTerms, layout: BankLayout) -> Parts {
    let embeds = embeds.unbind(0);
    let t2 = soft_terms.temperature.powi(2);
    let (positives, skip) = match layout {
        BankLayout::Paper => (1, 0),
        BankLayout::Released => (2, 1),
    };
    let score = |a: usize, b: usize| banks[b].matmul(&embeds[a].unsqueeze(-1)).squeeze_dim(-1) / tau; // [B, K']: anchor of a, bank of b
    let judged = |scores: &Tensor, positives: i64| {
        let contrast = Contrast::in_memory(scores, positives, tau);
        let log_sum = contrast.log_sum(scores);
        (contrast.hard(scores, &log_sum).mean(None), contrast.soft(scores, &log_sum, soft_terms))
    };
    let count = embeds.len();
    let own: Vec<(Tensor, Distribution)> = (0..count)
        .map(|m| {
            let scores = score(m, m);
            judged(&scores.slice(1, skip, scores.size()[1], 1), 1)
        })
        .collect();
    let others = |a: usize| (0..count).filter(move |&b| b != a);
    let cross: Vec<Vec<Option<(Tensor, Distribution)>>> =
        (0..count).map(|a| (0..count).map(|b| (a != b).then(|| judged(&score(a, b), positives))).collect()).collect();
    let at = |a: usize, b: usize| cross[a][b].as_ref().expect("two different networks");
    let pairs = || (0..count).flat_map(|a| others(a).map(move |b| (a, b)));
    let sum = |rows: Vec<Tensor>| Tensor::stack(&rows, 0).sum(None);
    Parts {
        vcl: sum(own.iter().map(|(hard, _)| hard.shallow_clone()).collect()),
        icl: sum(pairs().map(|(a, b)| at(a, b).0.shallow_clone()).collect()),
        soft_vcl: sum(pairs().map(|(a, b)| own[a].1.kl(&own[b].1.target()).mean(None) * t2).collect()),
        soft_icl: sum(pairs().map(|(a, b)| at(a, b).1.kl(&at(b, a).1.target()).mean(None) * t2).collect()),
    }
}
