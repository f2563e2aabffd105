//! `mcl-eval knn`: weighted nearest neighbours on frozen features (Wu et al. 2018): cosine similarity, votes exp(similarity / temperature).
//! A class that none of the k neighbours has gets no vote, and is never an answer: at k = 1 top-5 is top-1.

use std::time::Instant;

use serde::Deserialize;
use tch::{Kind, Tensor};

use super::Measurement;
use crate::error::Result;
use crate::eval::Common;
use crate::eval::features::Features;
use crate::eval::protocol::{Protocol, Shipped, all_different, require};
use crate::eval::record::{self, Record};
use crate::eval::score::Score;
use crate::eval::target::TargetArgs;
use crate::losses::unit::Norm;

/// The flags of the command.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    on: TargetArgs,
    /// Numbers of neighbours, e.g. 1,20,200 [default: the protocol's]
    #[arg(long, value_delimiter = ',')]
    k: Vec<i64>,
}

/// The keys of the protocol.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Knn {
    image_size: i64,
    ks: Vec<i64>,
    temperature: f64,
}

/// Similarities held at once.
const MAX_SIMILARITIES: i64 = 32_000_000;

/// Class scores of every test row for each k: one tensor [N, C] a k; minus infinity for a class without a vote. Votes are relative to the
/// nearest neighbour's, which changes no order and overflows at no temperature.
pub fn scores(train: &Features, test: &Features, ks: &[i64], temperature: f64, classes: i64) -> Vec<Tensor> {
    scores_watched(train, test, ks, temperature, classes, |_| ())
}

/// The same; `done` is told of so many more test rows.
fn scores_watched(train: &Features, test: &Features, ks: &[i64], temperature: f64, classes: i64, done: impl Fn(usize)) -> Vec<Tensor> {
    let _guard = tch::no_grad_guard();
    let (base, queries) = (Norm::Guarded.apply(&train.x), Norm::Guarded.apply(&test.x));
    let labels = train.labels();
    let most = ks.iter().copied().max().unwrap_or(1).min(base.size()[0]);
    let rows = (MAX_SIMILARITIES / base.size()[0]).max(1);
    let mut parts: Vec<Vec<Tensor>> = ks.iter().map(|_| vec![]).collect();
    let mut first = 0;
    while first < queries.size()[0] {
        let count = rows.min(queries.size()[0] - first);
        let similar = queries.narrow(0, first, count).matmul(&base.transpose(0, 1));
        let (similar, at) = similar.topk(most, 1, true, true);
        let votes = ((&similar - similar.narrow(1, 0, 1)) / temperature).exp();
        let classes_of = labels.index_select(0, &at.reshape([-1])).view([count, most]);
        for (part, &k) in parts.iter_mut().zip(ks) {
            let k = k.min(most);
            let zero = Tensor::zeros([count, classes], (Kind::Float, votes.device()));
            let (classes_of, votes) = (classes_of.narrow(1, 0, k), votes.narrow(1, 0, k));
            let voted = zero.scatter_add(1, &classes_of, &votes.ones_like()).gt(0.0);
            part.push(zero.scatter_add(1, &classes_of, &votes).where_scalarother(&voted, f64::NEG_INFINITY));
        }
        first += count;
        done(count as usize);
    }
    parts.iter().map(|part| Tensor::cat(part, 0)).collect()
}

impl Args {
    fn protocol(&self) -> Result<(Protocol, Knn)> {
        let mut protocol = self.on.how.protocol(Self::PROTOCOLS, Self::DEFAULT_PROTOCOL)?;
        if !self.k.is_empty() {
            protocol.set("ks", self.k.clone());
        }
        let p: Knn = protocol.options()?;
        require(!p.ks.is_empty() && p.ks.iter().all(|k| *k > 0) && all_different(&p.ks), "ks", &p.ks, "numbers from 1, each once")?;
        require(p.temperature > 0.0 && p.temperature.is_finite(), "temperature", p.temperature, "above 0")?;
        Ok((protocol, p))
    }
}

impl Measurement for Args {
    const NAME: &'static str = "knn";
    const ABOUT: &'static str = "Classify by nearest neighbours in frozen features";
    const PROTOCOLS: &'static [Shipped] =
        &[Shipped { name: "knn", text: include_str!("../../../protocols/eval/knn.toml"), repeats: &["ks"] }];

    fn check(&self) -> Result<()> {
        self.on.check()?;
        self.protocol().map(drop)
    }

    fn run(&self, common: &Common) -> Result<()> {
        let (protocol, p) = self.protocol()?;
        let subjects = self.on.open(common)?;
        let classes = &subjects.target.dataset.classes;
        let records = subjects.each(common, |network| {
            let side = network.image_size(p.image_size);
            let (train, test) = subjects.features(network, side, common)?;
            let began = Instant::now();
            // More neighbours than there are images is the same as all of them: said once, not measured twice.
            let mut ks: Vec<i64> = p.ks.iter().map(|k| (*k).min(train.y.len() as i64)).collect();
            ks.dedup();
            let progress = common.progress(format!("{}: neighbours", network.name), test.y.len(), "images");
            let all = scores_watched(&train, &test, &ks, p.temperature, classes.len() as i64, |rows| progress.add(rows));
            drop(progress);
            let seconds = began.elapsed().as_secs_f64();
            let measured = |(k, scores): (&i64, &Tensor)| {
                let record = subjects.record(Self::NAME, network, side, &protocol, common);
                Record { seconds, ..record.variant(format!("k={k}")).score(&Score::new(scores, &test.y), 1, classes) }
            };
            Ok(ks.iter().zip(&all).map(measured).collect())
        })?;
        let title = format!("nearest neighbours at temperature {} -> {}", p.temperature, subjects.target.counted());
        record::show(&records, &title, "k", common);
        Ok(())
    }
}
