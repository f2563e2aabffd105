//! `mcl-eval knn`: weighted nearest neighbours on frozen features (Wu et al. 2018): cosine similarity, votes exp(similarity / temperature).

use std::time::Instant;

use serde::Deserialize;
use tch::{Kind, Tensor};

use super::Measurement;
use crate::data;
use crate::error::Result;
use crate::eval::Common;
use crate::eval::dataset::TargetDataset;
use crate::eval::features::{self, Features};
use crate::eval::network::{NetworkArgs, PeerChoice};
use crate::eval::protocol::{HowArgs, Protocol, Shipped, require};
use crate::eval::record::{self, Record};
use crate::eval::score::Score;
use crate::losses::unit::Norm;

/// The flags of the command.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    networks: NetworkArgs,
    /// The dataset whose training images are the neighbours and whose test images are classified
    #[arg(long)]
    dataset: String,
    /// Numbers of neighbours, e.g. 1,20,200 [default: the protocol's]
    #[arg(long, value_delimiter = ',')]
    k: Vec<i64>,
    #[command(flatten)]
    how: HowArgs,
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

/// Class scores of every test row for each k: one tensor [N, C] a k.
pub fn scores(train: &Features, test: &Features, ks: &[i64], temperature: f64, classes: i64) -> Vec<Tensor> {
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
        let votes = (similar / temperature).exp();
        let classes_of = labels.index_select(0, &at.reshape([-1])).view([count, most]);
        for (part, &k) in parts.iter_mut().zip(ks) {
            let k = k.min(most);
            let zero = Tensor::zeros([count, classes], (Kind::Float, votes.device()));
            part.push(zero.scatter_add(1, &classes_of.narrow(1, 0, k), &votes.narrow(1, 0, k)));
        }
        first += count;
    }
    parts.iter().map(|part| Tensor::cat(part, 0)).collect()
}

impl Args {
    fn protocol(&self) -> Result<(Protocol, Knn)> {
        let mut protocol = self.how.protocol(Self::PROTOCOLS, Self::DEFAULT_PROTOCOL)?;
        if !self.k.is_empty() {
            protocol.set("ks", self.k.clone());
        }
        let p: Knn = protocol.options()?;
        require(!p.ks.is_empty() && p.ks.iter().all(|k| *k > 0), "ks", &p.ks, "numbers from 1")?;
        require(p.temperature > 0.0, "temperature", p.temperature, "above 0")?;
        Ok((protocol, p))
    }
}

impl Measurement for Args {
    const NAME: &'static str = "knn";
    const ABOUT: &'static str = "Classify by nearest neighbours in frozen features";
    const PROTOCOLS: &'static [Shipped] =
        &[Shipped { name: "knn", text: include_str!("../../../protocols/eval/knn.toml"), repeats: &["ks"] }];

    fn check(&self) -> Result<()> {
        self.networks.check()?;
        data::find(&self.dataset)?;
        self.protocol().map(drop)
    }

    fn run(&self, common: &Common) -> Result<()> {
        let (protocol, p) = self.protocol()?;
        let networks = self.networks.open(common, PeerChoice::Best)?;
        let target = TargetDataset::open(&self.dataset, common)?;
        let classes = &target.dataset.classes;
        let mut records = vec![];
        for network in &networks {
            let side = network.image_size(p.image_size);
            let (train, test) = features::of_dataset(network, &target, side, !self.how.no_cache, common)?;
            let began = Instant::now();
            // More neighbours than there are images is the same as all of them: said once, not measured twice.
            let mut ks: Vec<i64> = p.ks.iter().map(|k| (*k).min(train.y.len() as i64)).collect();
            ks.dedup();
            let all = scores(&train, &test, &ks, p.temperature, classes.len() as i64);
            network.check_unchanged()?;
            let seconds = began.elapsed().as_secs_f64();
            let mut own = vec![];
            for (k, scores) in ks.iter().zip(&all) {
                let record = Record::new(Self::NAME, network, common).on(&target, side).trained_on(&target).protocol(&protocol);
                let record = record.variant(format!("k={k}")).score(&Score::new(scores, &test.y), 1, classes);
                own.push(Record { seconds, ..record });
            }
            record::keep(&own, common)?;
            records.extend(own);
        }
        record::show(&records, &format!("nearest neighbours -> {}", target.counted()), "k", common);
        Ok(())
    }
}
