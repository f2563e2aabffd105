//! Linear probes: classifiers on frozen features, and the protocols they are trained by. One file a protocol: the paper's, a sweep of
//! learning rates, and L-BFGS, which also chooses C.

pub mod heads;
pub mod lbfgs;
pub mod logreg;
pub mod paper;
pub mod sweep;

use std::time::Instant;

use serde::Deserialize;

use super::Common;
use super::dataset::TargetDataset;
use super::feature_file::Part;
use super::features::{self, Prepared};
use super::network::TrainedNetwork;
use super::protocol::{HowArgs, Protocol, Shipped, all_different, require};
use super::score::Score;
use crate::data::sampler;
use crate::error::{Error, Result};
use crate::limits;
use lbfgs::Lbfgs;
use paper::Paper;
use sweep::Sweep;

/// The protocols a probe can follow; a file that names no kind has the keys of the first.
pub const PROTOCOLS: &[Shipped] = &[paper::SHIPPED, sweep::SHIPPED, lbfgs::SHIPPED];

/// How a probe is trained: the kinds of `PROTOCOLS` with their keys.
#[derive(Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum ProbeKind {
    /// SGD on freshly augmented images.
    Paper(Paper),
    /// SGD on kept features, the rate chosen on a held-out part.
    Sweep(Sweep),
    /// Logistic regression on kept features, C chosen on a held-out part.
    Lbfgs(Lbfgs),
}

impl ProbeKind {
    fn check(&self) -> Result<()> {
        match self {
            ProbeKind::Paper(p) => p.check()?,
            ProbeKind::Sweep(p) => p.check()?,
            ProbeKind::Lbfgs(p) => p.check()?,
        }
        check_seeds(self.seeds())
    }

    fn image_size(&self) -> i64 {
        match self {
            ProbeKind::Paper(p) => p.image_size,
            ProbeKind::Sweep(p) => p.image_size,
            ProbeKind::Lbfgs(p) => p.image_size,
        }
    }

    fn seeds(&self) -> &[u64] {
        match self {
            ProbeKind::Paper(p) => &p.seeds,
            ProbeKind::Sweep(p) => &p.seeds,
            ProbeKind::Lbfgs(p) => &p.seeds,
        }
    }
}

/// A protocol of a probe, read and checked.
#[derive(Debug)]
pub struct ProbeProtocol {
    /// As rows keep it.
    pub protocol: Protocol,
    /// As it is followed.
    pub kind: ProbeKind,
}

impl ProbeProtocol {
    /// Refuses values that make no sense, before anything is loaded.
    pub fn new(protocol: Protocol) -> Result<ProbeProtocol> {
        let kind: ProbeKind = protocol.options_by_kind()?;
        kind.check()?;
        Ok(ProbeProtocol { protocol, kind })
    }

    /// What the flags of a command ask for.
    pub(crate) fn asked(how: &HowArgs, default: &str, seeds: &[u64]) -> Result<ProbeProtocol> {
        let mut protocol = how.protocol(PROTOCOLS, default)?;
        if !seeds.is_empty() {
            protocol.set("seeds", seeds.iter().map(|&s| s as i64).collect::<Vec<_>>());
        }
        ProbeProtocol::new(protocol)
    }
}

/// One trained classifier's scores on the test split, and what was noticed.
pub struct Probe {
    /// On the test split.
    pub score: Score,
    /// What makes the number doubtful.
    pub warnings: Vec<String>,
    /// What was chosen and how the fit went.
    pub chosen: serde_json::Value,
}

/// A probe and the seed, the side of the images and the seconds of it.
pub(crate) struct Seeded {
    pub(crate) probe: Probe,
    pub(crate) seed: u64,
    pub(crate) side: usize,
    pub(crate) seconds: f64,
}

/// The classifiers of one network, one a seed of the protocol.
pub(crate) fn probes(
    network: &TrainedNetwork,
    target: &TargetDataset,
    protocol: &ProbeProtocol,
    cached: bool,
    common: &Common,
) -> Result<Vec<Seeded>> {
    let kind = &protocol.kind;
    common.say(format!("{}: {} on {} ({} protocol)", network.name, network.architecture(), target.dataset.name, protocol.protocol.kind()));
    let side = network.image_size(kind.image_size());
    let prepared = Prepared::new(&target.dataset, network, side)?;
    let features = |part| features::features(network, &prepared, part, cached, common);
    let test = features(Part::Test)?;
    // The paper's probe sees every image augmented anew: it has no features to keep.
    let train = match kind {
        ProbeKind::Paper(_) => None,
        ProbeKind::Sweep(_) | ProbeKind::Lbfgs(_) => Some(features(Part::Train)?),
    };
    let train = || train.as_ref().expect("extracted for this kind");
    let classes = target.dataset.classes.len() as i64;
    let mut probes = vec![];
    for &seed in kind.seeds() {
        let began = Instant::now();
        let probe = match kind {
            ProbeKind::Paper(p) => p.probe(network, &prepared, &test, seed, common)?,
            ProbeKind::Sweep(p) => p.probe(train(), &test, classes, seed, common)?,
            ProbeKind::Lbfgs(p) => p.probe(train(), &test, classes, seed, common)?,
        };
        network.check_unchanged()?;
        probes.push(Seeded { probe, seed, side, seconds: began.elapsed().as_secs_f64() });
    }
    Ok(probes)
}

/// What a probe was trained with, from `Probe::chosen` or the `detail.chosen` of its row: `C = 0.1`, `learning rate 0.3`, and where a
/// fixed schedule divides it.
pub(crate) fn chosen_in_words(chosen: &serde_json::Value) -> Option<String> {
    let of = |key: &str, words: &str| chosen[key].as_f64().map(|value| format!("{words} {value}"));
    let falls: Vec<String> = chosen["falls"].as_array().into_iter().flatten().map(|epoch| epoch.to_string()).collect();
    let schedule = if falls.is_empty() { String::new() } else { format!(" (/10 at {} of {} epochs)", falls.join(", "), chosen["epochs"]) };
    of("c", "C =").or_else(|| of("lr", "learning rate").map(|rate| rate + &schedule))
}

/// (training part, held-out part) of a training split, by class.
fn held_out(y: &[i64], share: f64, seed: u64) -> Result<(Vec<usize>, Vec<usize>)> {
    let held = sampler::stratified(y, share, seed);
    let mut is_held = vec![false; y.len()];
    held.iter().for_each(|&i| is_held[i] = true);
    let kept: Vec<usize> = (0..y.len()).filter(|&i| !is_held[i]).collect();
    if kept.is_empty() {
        return Err(Error::input(format!("holdout = {share} of {} training images leaves none to train on", y.len())));
    }
    Ok((kept, held))
}

/// The place of the best accuracy, the first of equals.
pub(crate) fn best(accuracies: &[f64]) -> usize {
    (0..accuracies.len()).rev().max_by(|&a, &b| accuracies[a].total_cmp(&accuracies[b])).expect("at least one setting")
}

pub(crate) fn edge_warning(what: &str, chosen: usize, values: &[f64]) -> Option<String> {
    let edge = values.len() > 1 && (chosen == 0 || chosen + 1 == values.len());
    edge.then(|| format!("the best {what} is {}, at the edge of the sweep: widen it", values[chosen]))
}

/// Images of a batch, and passes over them.
pub(crate) fn check_counts(batch: usize, epochs: usize) -> Result<()> {
    limits::count("protocol: batch", batch, 1, limits::MOST_BATCH)?;
    limits::count("protocol: epochs", epochs, 1, limits::MOST_ROUNDS)
}

/// Learning rates that a held-out part chooses among, and that part.
pub(crate) fn check_choice(lrs: &[f64], holdout: f64) -> Result<()> {
    require(!lrs.is_empty() && lrs.iter().all(|l| *l > 0.0 && l.is_finite()), "lrs", lrs, "numbers above 0")?;
    limits::count("protocol: lrs, how many", lrs.len(), 1, 1000)?;
    require(lrs.is_sorted(), "lrs", lrs, "in rising order")?;
    require(holdout > 0.0 && holdout < 1.0, "holdout", holdout, "between 0 and 1")
}

/// Seeds to repeat a measurement with.
pub(crate) fn check_seeds(seeds: &[u64]) -> Result<()> {
    require(!seeds.is_empty() && all_different(seeds), "seeds", seeds, "at least one, each once")
}

/// Momentum and weight decay as SGD takes them.
pub(crate) fn check_sgd(momentum: f64, weight_decay: f64) -> Result<()> {
    let ok = (0.0..1.0).contains(&momentum) && weight_decay >= 0.0 && weight_decay.is_finite();
    require(ok, "momentum, weight_decay", (momentum, weight_decay), "0 to 1, 0 or more")
}
