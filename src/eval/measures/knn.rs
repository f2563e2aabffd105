//! `mcl-eval knn`: weighted nearest neighbours on frozen features (Wu et al. 2018): cosine similarity, votes exp(similarity / temperature).

use std::time::Instant;

use clap::Args as ClapArgs;
use serde::Deserialize;
use tch::{Kind, Tensor};

use crate::error::Result;
use crate::eval::Common;
use crate::eval::dataset::Target;
use crate::eval::features::{self, Features, Prepared};
use crate::eval::network::{PeerChoice, SubjectArgs};
use crate::eval::protocol::{HowArgs, require};
use crate::eval::record::{self, Record};
use crate::eval::score::Score;
use crate::losses::unit::Norm;
use crate::report::{Cell, Table};

pub const ABOUT: &str = "Classify by nearest neighbours in frozen features";

#[derive(Debug, Clone, ClapArgs)]
pub struct Args {
    #[command(flatten)]
    pub subjects: SubjectArgs,
    /// The dataset whose training images are the neighbours and whose test images are classified
    #[arg(long)]
    pub dataset: String,
    /// Numbers of neighbours, e.g. 1,20,200 [default: the protocol's]
    #[arg(long, value_delimiter = ',')]
    pub k: Vec<i64>,
    /// knn or a TOML file
    #[arg(long, default_value = "knn")]
    pub protocol: String,
    #[command(flatten)]
    pub how: HowArgs,
}

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

pub fn run(args: &Args, common: &Common) -> Result<()> {
    let mut protocol = args.how.protocol(&args.protocol, &["knn"])?;
    if !args.k.is_empty() {
        protocol.set("ks", args.k.clone());
    }
    let p: Knn = protocol.options()?;
    require(!p.ks.is_empty() && p.ks.iter().all(|k| *k > 0), "ks", &p.ks, "numbers from 1")?;
    require(p.temperature > 0.0, "temperature", p.temperature, "above 0")?;
    let subjects = args.subjects.open(common, PeerChoice::Best)?;
    let target = Target::open(&args.dataset, common)?;
    let classes = target.dataset.classes.len() as i64;
    let mut records = vec![];
    for subject in &subjects {
        let side = subject.image_size(p.image_size);
        let prepared = Prepared::new(&target.dataset, subject, side)?;
        let features = |split| features::features(subject, split, &prepared.transform, !args.how.no_cache, common);
        let (train, test) = (features(&prepared.dataset.train)?, features(&prepared.dataset.test)?);
        let began = Instant::now();
        // More neighbours than there are images is the same as all of them: said once, not measured twice.
        let mut ks: Vec<i64> = p.ks.iter().map(|k| (*k).min(train.y.len() as i64)).collect();
        ks.dedup();
        let all = scores(&train, &test, &ks, p.temperature, classes);
        subject.check_unchanged()?;
        let seconds = began.elapsed().as_secs_f64();
        let mut own = vec![];
        for (k, scores) in ks.iter().zip(&all) {
            let score = Score::new(scores, &test.y);
            let (low, high) = score.interval(1);
            let warnings: Vec<String> = score.at_chance().then(|| format!("k = {k}: at chance level")).into_iter().collect();
            warnings.iter().for_each(|w| common.warn(format!("{}: {w}", subject.name)));
            own.push(Record {
                variant: format!("k={k}"),
                dataset: target.dataset.name.into(),
                value: score.top1(),
                ci_low: Some(low),
                ci_high: Some(high),
                top5: Some(score.top5()),
                n_train: train.y.len(),
                n_test: test.y.len(),
                split_hash: target.hash.clone(),
                image_size: side,
                seconds,
                warnings,
                detail: score.detail(&target.dataset.classes),
                ..Record::new("knn", subject, common).protocol(&protocol)
            });
        }
        record::keep(&own, std::slice::from_ref(subject), common)?;
        records.extend(own);
    }
    if common.json {
        common.print_json(&record::json(&records, common));
        return Ok(());
    }
    let mut shown = Table::new("", &["network", "method", "k", "top-1", "95 % interval", "top-5"]);
    for r in &records {
        let interval = format!("{:.2} to {:.2}", r.ci_low.unwrap_or(f64::NAN), r.ci_high.unwrap_or(f64::NAN));
        shown.push(vec![
            Cell::text(&r.subject),
            Cell::text(&r.method),
            Cell::text(&r.variant[2..]),
            Cell::Score(r.value, 2),
            Cell::text(interval),
            Cell::score(r.top5),
        ]);
    }
    println!(
        "nearest neighbours -> {}, {} training and {} test images",
        target.dataset.name,
        target.dataset.train.len(),
        target.dataset.test.len()
    );
    print!("{}", shown.plain());
    Ok(())
}
