//! `mcl-eval tsne`: maps of the features of several networks side by side, from the same images and the same start, each with the numbers
//! that say how far it may be believed. Engines: our own with every pair of points (default), bhtsne (Barnes-Hut) and linfa-tsne.

mod exact;
mod joint;
pub mod map;
mod output;

use std::time::Instant;

use linfa::traits::Transformer;
use serde::Deserialize;
use tch::{Kind, Tensor};

use super::Measurement;
use crate::data::{self, sampler};
use crate::error::{Error, Result};
use crate::eval::Common;
use crate::eval::answers::own_dataset;
use crate::eval::dataset::TargetDataset;
use crate::eval::feature_file::Part;
use crate::eval::features::{self, Prepared};
use crate::eval::network::{NetworkArgs, PeerChoice};
use crate::eval::protocol::{HowArgs, Protocol, Shipped, require};
use crate::eval::record::Record;
use crate::files;
use crate::limits;
use crate::report::map::{Map, Panel};
use crate::report::plot::Points;
use crate::report::{Cell, Table};
use crate::run::RunFolder;

/// The flags of the command.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    networks: NetworkArgs,
    /// The dataset whose test images are mapped [default: what the networks were trained on]
    #[arg(long)]
    dataset: Option<String>,
    /// One map of all networks of a run, as in the paper: markers tell networks, colours classes. Contrastive runs are mapped by their
    /// embeddings, others by their features
    #[arg(long)]
    joint: bool,
    /// auto, exact, bhtsne or linfa [default: the protocol's]
    #[arg(long)]
    engine: Option<String>,
    /// Write the features too, as a folder that TensorBoard's projector shows
    #[arg(long)]
    projector: bool,
    #[command(flatten)]
    how: HowArgs,
}

/// How a map is made.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tsne {
    /// Side of the images; 0: the network's own.
    pub image_size: i64,
    /// Test images that are mapped.
    pub samples: usize,
    /// About how many neighbours count.
    pub perplexity: f64,
    /// How much stronger points attract each other in the first iterations.
    pub exaggeration: f64,
    /// 0: chosen by the number of points.
    pub learning_rate: f64,
    /// Of both phases together.
    pub iterations: usize,
    /// Which implementation.
    pub engine: Engine,
    /// Draws the images.
    pub seed: u64,
    /// Of the score that tells how many of them a map keeps.
    pub neighbours: usize,
}

/// An implementation of t-SNE.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// `Exact` up to 20,000 points, `Bhtsne` beyond.
    Auto,
    /// Ours: every pair of points repels, nothing is approximated. Two runs give the same map.
    Exact,
    /// The Barnes-Hut approximation. On several threads two runs give maps that differ.
    Bhtsne,
    /// linfa's, from a start of its own.
    Linfa,
}

/// Iterations with exaggerated attraction.
const EXAGGERATED: usize = 250;
/// Momentum in them, and after them.
const MOMENTA: [f32; 2] = [0.5, 0.8];
/// How coarse the Barnes-Hut tree may be.
const THETA: f32 = 0.5;
const LEAST_RATE: f64 = 200.0;
/// Up to here all pairs are computed; beyond, a tree is faster.
const ALL_PAIRS: usize = 20_000;

/// Maps `x` [N, D] from `start`.
pub fn embed(x: &Tensor, start: &[[f64; 2]], p: &Tsne) -> Result<Vec<[f64; 2]>> {
    embed_watched(x, start, p, || ())
}

/// The same; `tick` is called after each iteration of an engine that tells.
fn embed_watched(x: &Tensor, start: &[[f64; 2]], p: &Tsne, tick: impl Fn() + Sync) -> Result<Vec<[f64; 2]>> {
    let (n, dim) = (x.size()[0] as usize, x.size()[1] as usize);
    if 3.0 * p.perplexity > n as f64 - 1.0 {
        return Err(Error::input(format!(
            "t-SNE of {n} points with perplexity {}: at most {:.0} for so many points",
            p.perplexity,
            ((n as f64 - 1.0) / 3.0).floor()
        )));
    }
    match p.engine {
        Engine::Auto if n <= ALL_PAIRS => exact(x, start, p, n, &tick),
        Engine::Exact => exact(x, start, p, n, &tick),
        Engine::Auto | Engine::Bhtsne => bhtsne(x, start, p, (n, dim), &tick),
        Engine::Linfa => linfa(x, p, n, dim),
    }
}

impl Tsne {
    /// n / exaggeration (Belkina et al. 2019) in either phase, as openTSNE chooses it. scikit-learn writes max(n / exaggeration / 4, 50) and
    /// means max(n / exaggeration, 200): its gradient carries the factor 4 that openTSNE's, bhtsne's and ours leave out.
    fn rate(&self, n: usize, exaggeration: f64) -> f32 {
        (if self.learning_rate > 0.0 { self.learning_rate } else { (n as f64 / exaggeration).max(LEAST_RATE) }) as f32
    }
}

fn exact(x: &Tensor, start: &[[f64; 2]], p: &Tsne, n: usize, tick: &dyn Fn()) -> Result<Vec<[f64; 2]>> {
    let exaggerated = EXAGGERATED.min(p.iterations);
    let phase = |iterations: usize, exaggeration: f64, momentum: f32| exact::Phase {
        iterations,
        exaggeration: exaggeration as f32,
        rate: p.rate(n, exaggeration),
        momentum,
    };
    let phases = [phase(exaggerated, p.exaggeration, MOMENTA[0]), phase(p.iterations - exaggerated, 1.0, MOMENTA[1])];
    finite(exact::embed(x, start, p.perplexity, &phases, tick))
}

/// The same, for the person watching.
fn embed_shown(x: &Tensor, start: &[[f64; 2]], p: &Tsne, what: &str, common: &Common) -> Result<Vec<[f64; 2]>> {
    let progress = match p.engine {
        Engine::Auto | Engine::Exact | Engine::Bhtsne => common.progress(format!("{what}: t-SNE"), p.iterations, "iterations"),
        // linfa does not tell how far it is.
        Engine::Linfa => common.progress(format!("{what}: t-SNE by linfa, {} iterations", p.iterations), 0, ""),
    };
    embed_watched(x, start, p, || progress.add(1))
}

fn bhtsne(x: &Tensor, start: &[[f64; 2]], p: &Tsne, (n, dim): (usize, usize), tick: &(dyn Fn() + Sync)) -> Result<Vec<[f64; 2]>> {
    let flat = Vec::<f32>::try_from(x.to_kind(Kind::Float).contiguous().view(-1)).expect("a vector of floats");
    let samples: Vec<&[f32]> = flat.chunks_exact(dim).collect();
    let first: Vec<f32> = start.iter().flatten().map(|&v| v as f32).collect();
    let distance = |a: &&[f32], b: &&[f32]| distance(a, b);
    let exaggerated = EXAGGERATED.min(p.iterations);
    let mut tsne = bhtsne::tSNE::<f32, &[f32], 2>::new(&samples);
    tsne.perplexity(p.perplexity as f32)
        .epochs(exaggerated)
        .early_exaggeration(p.exaggeration as f32)
        .stop_lying_epoch(exaggerated)
        .momentum_switch_epoch(exaggerated)
        .momentum(MOMENTA[0])
        .learning_rate(p.rate(n, p.exaggeration))
        .initial_embedding(first)
        .epoch_callback(|_, _| tick())
        .barnes_hut(THETA, distance);
    if p.iterations > exaggerated {
        // The affinities are kept from the first phase.
        let map = tsne.embedding();
        tsne.epochs(p.iterations - exaggerated)
            .stop_lying_epoch(0)
            .momentum(MOMENTA[1])
            .learning_rate(p.rate(n, 1.0))
            .initial_embedding(map)
            .barnes_hut(THETA, distance);
    }
    let map = tsne.embedding();
    finite(map.chunks_exact(2).map(|p| [f64::from(p[0]), f64::from(p[1])]).collect())
}

/// The Euclidean distance, in sums that the compiler can keep side by side.
fn distance(a: &[f32], b: &[f32]) -> f32 {
    const SUMS: usize = 16;
    let mut sums = [0f32; SUMS];
    for (a, b) in a.chunks(SUMS).zip(b.chunks(SUMS)) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += (a - b) * (a - b);
        }
    }
    sums.iter().sum::<f32>().sqrt()
}

/// linfa-tsne draws its own start and knows no exaggeration factor.
fn linfa(x: &Tensor, p: &Tsne, n: usize, dim: usize) -> Result<Vec<[f64; 2]>> {
    use rand::SeedableRng;
    let flat = Vec::<f64>::try_from(x.to_kind(Kind::Double).contiguous().view(-1)).expect("a vector of doubles");
    let data = ndarray::Array2::from_shape_vec((n, dim), flat).expect("rows times columns");
    let rng = rand::rngs::SmallRng::seed_from_u64(p.seed);
    let map = linfa_tsne::TSneParams::embedding_size_with_rng(2, rng)
        .perplexity(p.perplexity)
        .approx_threshold(0.5)
        .max_iter(p.iterations)
        .preliminary_iter(EXAGGERATED.min(p.iterations))
        .transform(data)
        .map_err(|e| Error::failed(format!("linfa's t-SNE: {e}")))?;
    finite(map.rows().into_iter().map(|row| [row[0], row[1]]).collect())
}

fn finite(map: Vec<[f64; 2]>) -> Result<Vec<[f64; 2]>> {
    if map.iter().flatten().all(|v| v.is_finite()) {
        Ok(map)
    } else {
        Err(Error::failed("the map is not finite; try a lower exaggeration"))
    }
}

/// As many images of every class as fit into `samples`, by seed, in the order of the split.
fn draw(labels: &[i64], samples: usize, seed: u64) -> Vec<usize> {
    if samples >= labels.len() {
        (0..labels.len()).collect()
    } else {
        sampler::stratified(labels, samples as f64 / labels.len() as f64, seed)
    }
}

impl Args {
    fn protocol(&self) -> Result<(Protocol, Tsne)> {
        let mut protocol = self.how.protocol(Self::PROTOCOLS, Self::DEFAULT_PROTOCOL)?;
        if let Some(engine) = &self.engine {
            protocol.set("engine", engine.clone());
        }
        let p: Tsne = protocol.options()?;
        require(p.perplexity >= 1.0, "perplexity", p.perplexity, "1 or more")?;
        require(p.exaggeration >= 1.0, "exaggeration", p.exaggeration, "1 or more")?;
        require(p.learning_rate >= 0.0, "learning_rate", p.learning_rate, "above 0, or 0 for one by the number of points")?;
        require(
            p.samples > 3 && p.iterations > 0 && p.neighbours > 0,
            "samples, iterations, neighbours",
            (p.samples, p.iterations, p.neighbours),
            "4, 1, 1 or more",
        )?;
        limits::count("protocol: iterations", p.iterations, 1, limits::MOST_ROUNDS)?;
        Ok((protocol, p))
    }
}

impl Measurement for Args {
    const NAME: &'static str = "tsne";
    const ABOUT: &'static str = "Map features to the plane, several networks side by side";
    const PROTOCOLS: &'static [Shipped] =
        &[Shipped { name: "tsne", text: include_str!("../../../../protocols/eval/tsne.toml"), repeats: &[] }];

    fn check(&self) -> Result<()> {
        self.networks.check()?;
        self.dataset.as_deref().map(data::find).transpose()?;
        self.protocol().map(drop)
    }

    fn run(&self, common: &Common) -> Result<()> {
        let (protocol, p) = self.protocol()?;
        // One map of several networks needs all of them.
        let networks = self.networks.open(common, if self.joint { PeerChoice::All } else { PeerChoice::Best })?;
        let name = own_dataset(self.dataset.as_deref(), &networks[0])?;
        // Networks are mapped on what they learned, unless asked otherwise: of `synthetic`, then, the task they were trained on.
        let target =
            if self.dataset.is_some() { TargetDataset::open(name, common)? } else { TargetDataset::source(name, &networks[0], common)? };
        let rows = draw(&target.dataset.test.labels, p.samples, p.seed);
        let labels: Vec<usize> = rows.iter().map(|&r| target.dataset.test.labels[r] as usize).collect();
        if self.joint {
            return joint::run(&networks, &target, &rows, &labels, &protocol, &p, common);
        }
        let mut sets = vec![];
        for network in &networks {
            let prepared = Prepared::new(&target.dataset, network, network.image_size(p.image_size))?;
            sets.push(features::features(network, &prepared, Part::Test, !self.how.no_cache, common)?.rows(&rows).x);
            network.check_unchanged()?;
        }
        let start = map::pca_start(&map::side_by_side(&sets));
        let mut panels = vec![];
        let mut records = vec![];
        let mut shown = Table::new("", &["network", "method", "KL divergence", "neighbours kept (%)", "seconds"]);
        for (network, x) in networks.iter().zip(&sets) {
            let began = Instant::now();
            let points = embed_shown(x, &start, &p, &network.name, common)?;
            let seconds = began.elapsed().as_secs_f64();
            let judging = common.progress(format!("{}: judging the map", network.name), 3, "parts");
            let kl = map::kl(x, &points, p.perplexity)?;
            judging.add(1);
            let neighbours = p.neighbours.min(rows.len() - 1);
            let kept = 100.0 * map::neighbours_kept(x, &points, neighbours);
            judging.add(1);
            let answers = map::vote(x, &labels, neighbours);
            drop(judging);
            common.say(format!("{}: KL {kl:.3}, {kept:.1} % of {} neighbours kept, {seconds:.1} s", network.name, p.neighbours));
            shown.push(vec![
                Cell::text(&network.name),
                Cell::text(&network.method),
                Cell::Score(kl, 3),
                Cell::Score(kept, 1),
                Cell::Score(seconds, 1),
            ]);
            let title = if network.method.is_empty() {
                network.name.clone()
            } else {
                format!("{} ({}, {})", network.name, network.method, network.architecture())
            };
            panels.push(Panel {
                name: network.name.clone(),
                title,
                note: format!("KL {kl:.3}, {kept:.0} % of {} nearest neighbours kept", p.neighbours),
                points,
                answers,
            });
            for (metric, value) in [("kl", kl), ("neighbours_kept", kept)] {
                let record = Record::new(Self::NAME, network, common).on(&target, network.image_size(p.image_size)).protocol(&protocol);
                records.push(Record {
                    metric: metric.into(),
                    value,
                    n_test: rows.len(),
                    seed: Some(p.seed),
                    split_hash: sampler::hash(&rows),
                    seconds,
                    ..record
                });
            }
        }
        let folder = RunFolder::at(&networks[0].out).figures();
        let joined: Vec<&str> = networks.iter().map(|n| n.name.as_str()).collect();
        let stem = format!("tsne-{}-{}", target.dataset.name, &files::sha256(format!("{joined:?}{}", protocol.hash()).as_bytes())[..8]);
        let title = format!("t-SNE of {} test images of {} (perplexity {})", rows.len(), target.dataset.name, p.perplexity);
        let map = Map {
            classes: target.dataset.classes.clone(),
            images: rows.clone(),
            labels,
            answered_by: format!("most of the {} nearest mapped images, by their features", p.neighbours.min(rows.len() - 1)),
            panels,
            pictures: None,
        };
        let caption = format!("{title}; the same images and the same start in every panel");
        let figure = Points { title: &title, map: &map }.figure(stem, caption);
        let mut written = output::write(&folder, &figure, &map)?;
        if self.projector {
            written.push(output::projector(&folder, &figure.name, &map, &sets)?);
        }
        output::finish(records, &figure, &written, &shown, common)
    }
}
