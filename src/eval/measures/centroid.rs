//! `mcl-eval centroid`: nearest class mean on frozen features. Nothing is fitted but one mean a class, so there is nothing to tune; what
//! separates the two rows is the distance alone.

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
        let protocol = self.on.how.protocol(Self::PROTOCOLS, Self::DEFAULT_PROTOCOL)?;
        let p: Centroid = protocol.options()?;
        require(!p.distances.is_empty() && all_different(&p.distances), "distances", &p.distances, "cosine, euclidean or both")?;
        Ok((protocol, p))
    }
}

impl Measurement for Args {
    const NAME: &'static str = "centroid";
    const ABOUT: &'static str = "Classify by the nearest class mean in frozen features";
    const PROTOCOLS: &'static [Shipped] =
        &[Shipped { name: "centroid", text: include_str!("../../../protocols/eval/centroid.toml"), repeats: &["distances"] }];

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
            let progress = common.progress(format!("{}: class means", network.name), p.distances.len(), "distances");
            let measured = |&distance: &Distance| {
                let began = Instant::now();
                let score = Score::new(&scores(&train, &test, distance, classes.len() as i64), &test.y);
                let record = subjects.record(Self::NAME, network, side, &protocol, common);
                let record = record.variant(distance.name()).score(&score, 1, classes);
                progress.add(1);
                Record { seconds: began.elapsed().as_secs_f64(), ..record }
            };
            Ok(p.distances.iter().map(measured).collect())
        })?;
        record::show(&records, &format!("nearest class mean -> {}", subjects.target.counted()), "distance", common);
        Ok(())
    }
}
