//! `mcl-eval centroid`: nearest class mean on frozen features. Nothing is fitted but one mean a class, so there is nothing to tune; what
//! separates the two rows is the distance alone.

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
    /// The dataset whose training images give the means and whose test images are classified
    #[arg(long)]
    dataset: String,
    #[command(flatten)]
    how: HowArgs,
}

/// The keys of the protocol.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Centroid {
    image_size: i64,
    distances: Vec<Distance>,
}

/// What nearest means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Distance {
    /// The largest cosine of the angle between a feature and a mean.
    Cosine,
    /// The least straight-line distance.
    Euclidean,
}

impl Distance {
    fn name(self) -> &'static str {
        match self {
            Distance::Cosine => "cosine",
            Distance::Euclidean => "euclidean",
        }
    }
}

/// Scores [N, C] of every test row: the larger, the nearer the mean of the class's training rows. A class without any is never chosen.
pub fn scores(train: &Features, test: &Features, distance: Distance, classes: i64) -> Tensor {
    let _guard = tch::no_grad_guard();
    // In f64: far from the origin the differences of squared distances are small beside them.
    let (x, queries) = (train.x.to_kind(Kind::Double), test.x.to_kind(Kind::Double));
    let members = train.labels().one_hot(classes).to_kind(Kind::Double); // [N, C]
    let counts = members.sum_dim_intlist([0i64].as_slice(), false, Kind::Double); // [C]
    let means = members.transpose(0, 1).matmul(&x) / counts.clamp_min(1.0).unsqueeze(1); // [C, D]
    let products = |x: &Tensor, means: &Tensor| x.matmul(&means.transpose(0, 1)); // [N, C]
    let scores = match distance {
        Distance::Cosine => products(&Norm::Guarded.apply(&queries), &Norm::Guarded.apply(&means)),
        // -|x - m|^2 / 2 without |x|^2 / 2, which is the same for every class.
        Distance::Euclidean => products(&queries, &means) - means.square().sum_dim_intlist([1i64].as_slice(), false, Kind::Double) / 2.0,
    };
    scores.masked_fill(&counts.eq(0.0), f64::NEG_INFINITY)
}

impl Args {
    fn protocol(&self) -> Result<(Protocol, Centroid)> {
        let protocol = self.how.protocol(Self::PROTOCOLS, Self::DEFAULT_PROTOCOL)?;
        let p: Centroid = protocol.options()?;
        let once = p.distances.iter().enumerate().all(|(i, d)| !p.distances[..i].contains(d));
        require(!p.distances.is_empty() && once, "distances", &p.distances, "cosine, euclidean or both")?;
        Ok((protocol, p))
    }
}

impl Measurement for Args {
    const NAME: &'static str = "centroid";
    const ABOUT: &'static str = "Classify by the nearest class mean in frozen features";
    const PROTOCOLS: &'static [Shipped] =
        &[Shipped { name: "centroid", text: include_str!("../../../protocols/eval/centroid.toml"), repeats: &["distances"] }];

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
            let mut own = vec![];
            for &distance in &p.distances {
                let began = Instant::now();
                let score = Score::new(&scores(&train, &test, distance, classes.len() as i64), &test.y);
                let record = Record::new(Self::NAME, network, common).on(&target, side).trained_on(&target).protocol(&protocol);
                let record = record.variant(distance.name()).score(&score, 1, classes);
                own.push(Record { seconds: began.elapsed().as_secs_f64(), ..record });
            }
            network.check_unchanged()?;
            record::keep(&own, common)?;
            records.extend(own);
        }
        record::show(&records, &format!("nearest class mean -> {}", target.counted()), "distance", common);
        Ok(())
    }
}
