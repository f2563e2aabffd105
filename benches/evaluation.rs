//! The evaluation's heavy parts beside what people use today for the same work (benches/peers/evaluation.py), in turns, as one table:
//!
//!     PEER_PYTHON=python cargo bench --bench evaluation -- [--only features,probe] [--archs resnet56,wrn_16_2@64] [--rounds 3] [--threads 0]
//!
//! features: of each architecture, as `embed` and all measurements take them; probe: one epoch of the paper's probe on 1000 images by a
//! ResNet-56; lbfgs: logistic regression on 10000 x 64, 100 classes; tsne: 5000 x 64, 750 iterations; loader: batches for training.

#[path = "peers/mod.rs"]
mod peers;

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Parser;
use mcl::data::{self, Dataset, Loader, Sampling, Transform, sampler};
use mcl::eval::measures::tsne::map;
use mcl::eval::measures::tsne::{self, Engine, Tsne};
use mcl::eval::probe::heads::Heads;
use mcl::eval::probe::logreg::{self, Options};
use mcl::extractor::{Answer, Extractor};
use mcl::nets::{self, Arch, Network, graph};
use mcl::params::Params;
use mcl::rng;
use mcl::system::device;
use mcl::weights::torchscript;
use peers::{Peer, Unit};
use rand_distr::{Distribution, StandardNormal};
use tch::{Device, Kind, Tensor};

#[derive(Parser)]
struct Args {
    /// features, probe, lbfgs, tsne, loader [default: all]
    #[arg(long, value_delimiter = ',')]
    only: Vec<Work>,
    /// Whose features; @ and a side take images of that size
    #[arg(long, value_delimiter = ',', default_value = "resnet56")]
    archs: Vec<String>,
    /// How often each is measured
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// 0: one for every core
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Given by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum Work {
    Features,
    Probe,
    Lbfgs,
    Tsne,
    Loader,
}

/// The classes of a network whose logits stand for the features that the peer's probe sees: as many as ResNet-56 has features.
const AS_FEATURES: i64 = 64;
/// Passes are repeated for at least so long.
const LEAST_SECONDS: f64 = 1.0;

fn main() {
    // As both programs do.
    mcl::system::allocator::keep_large_blocks();
    let args = Args::parse();
    let threads = device::set_threads(args.threads).expect("0 is always accepted");
    let wanted = |work: Work| args.only.is_empty() || args.only.contains(&work);
    let folder = std::env::temp_dir().join(format!("mcl-bench-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder for what the peers read");
    let mut peer = Peer::start("evaluation.py", threads);
    println!("{threads} threads");
    peers::head();
    let mut row = |name: &str, unit: Unit, ours: &mut dyn FnMut() -> f64, task: &str| {
        peers::row(name, unit, args.rounds, ours, peer.as_mut(), task);
    };
    if wanted(Work::Features) {
        for name in &args.archs {
            let (name, side) = name.split_once('@').map_or((name.as_str(), None), |(name, side)| (name, side.parse().ok()));
            let arch = nets::find(name).expect("an architecture");
            let side = side.unwrap_or(arch.image_size);
            let (file, params) = written(arch, 10, &folder);
            let mut features = Features::new(arch, &params, side, threads);
            let task = format!("script {} {side} {}", file.display(), features.images.size()[0]);
            row(&format!("features of {name}, {side} pixels"), Unit::ImagesPerSecond, &mut || features.per_second(), &task);
        }
    }
    if wanted(Work::Probe) {
        let (file, params) = written(nets::find("resnet56").expect("known"), AS_FEATURES, &folder);
        let mut epoch = probe(&params, threads);
        row("probe, one epoch", Unit::Seconds, &mut epoch, &format!("probe {}", file.display()));
    }
    let (x, y) = clouds(10_000, 64);
    let labels = Tensor::from_slice(&y);
    let file = folder.join("clouds.npy");
    Tensor::cat(&[&x, &labels.to_kind(Kind::Float).unsqueeze(1)], 1).write_npy(&file).expect("a folder to write to");
    // What was found, to see that speed was not bought with it.
    let mut notes = vec![];
    if wanted(Work::Lbfgs) {
        let mut fit = || {
            let began = Instant::now();
            // scikit-learn's own tolerance.
            let options = Options { c: 1.0, tolerance: 1e-4, max_iterations: 1000 };
            let fitted = logreg::fit(&x, &labels, 100, options, None).expect("a fit");
            let seconds = began.elapsed().as_secs_f64();
            notes = vec![format!("lbfgs: loss {:.8}, gradient {:.1e}, {} iterations", fitted.loss, fitted.gradient, fitted.iterations)];
            seconds
        };
        row("lbfgs, 10000 x 64, 100 classes", Unit::Seconds, &mut fit, &format!("logreg {}", file.display()));
    }
    if wanted(Work::Tsne) {
        let x = x.narrow(0, 0, 5000);
        let mut found = String::new();
        let mut map = || {
            let (seconds, map) = tsne(&x);
            let (kl, kept) = (map::kl(&x, &map, 30.0).expect("a divergence"), 100.0 * map::neighbours_kept(&x, &map, 15));
            found = format!("tsne: KL {kl:.4}, {kept:.1} % of 15 neighbours kept");
            seconds
        };
        row("t-SNE, 5000 x 64, 750 iterations", Unit::Seconds, &mut map, &format!("tsne {}", file.display()));
        notes.push(found);
    }
    if wanted(Work::Loader) {
        row("loader, CIFAR images with augmentation", Unit::ImagesPerSecond, &mut loader(), "loader");
    }
    notes.iter().for_each(|note| println!("{note}"));
    std::fs::remove_dir_all(&folder).expect("the folder that was made");
}

/// A network's parameters, and the same as a file for the peers.
fn written(arch: &'static Arch, classes: i64, folder: &Path) -> (PathBuf, Params) {
    let (_, params) = Network::build(arch, classes, 1, Device::Cpu, Kind::Float);
    let file = folder.join(format!("{}-{classes}.pt", arch.name));
    torchscript::save(&file, &graph::module(arch, &params, graph::Answer::Logits)).expect("a folder to write to");
    (file, params)
}

struct Features {
    extractor: Extractor,
    images: Tensor,
}

impl Features {
    /// Batches of 256 small images, or 32 large ones, as the loader hands them over.
    fn new(arch: &'static Arch, params: &Params, side: i64, threads: usize) -> Features {
        let batch = if side <= 64 { 256 } else { 32 };
        let images = Tensor::randn([batch, side, side, 3], (Kind::Float, Device::Cpu)).permute([0, 3, 1, 2]);
        Features { extractor: Extractor::new(arch, params, None, 10, threads), images }
    }

    fn per_second(&mut self) -> f64 {
        let (began, mut images) = (Instant::now(), 0);
        while began.elapsed().as_secs_f64() < LEAST_SECONDS {
            images += self.extractor.extract(&self.images, false).expect("features").features.size()[0];
        }
        images as f64 / began.elapsed().as_secs_f64()
    }
}

/// Epochs of the paper's probe, a number a call.
fn probe(params: &Params, threads: usize) -> impl FnMut() -> f64 {
    let dataset = data::open("synthetic", None, &data::Options::default()).expect("embedded");
    let split = dataset.train.subset(&(0..1000).collect::<Vec<_>>());
    let arch = nets::find("resnet56").expect("known");
    let mut extractor = Extractor::new(arch, params, None, AS_FEATURES, threads);
    let transform = Transform::pad_crop(32, dataset.mean, dataset.std);
    let mut heads = Heads::new(&[0.1], dataset.classes.len() as i64, arch.dim, 0.9, 0.0, 1, Device::Cpu);
    let mut number = 0;
    move || {
        number += 1;
        let began = Instant::now();
        let order: Vec<u32> = sampler::epoch(&split.labels, Sampling::Shuffled, 64, 1, number).expect("an order").concat();
        let passes = Loader::new(&split, order.chunks(256).map(<[u32]>::to_vec).collect(), transform.clone(), 1, 1, number, 0);
        let passes = passes.map(|batch| batch.map(|batch| (batch.views[0].shallow_clone(), batch.labels)));
        let step = |answer: Answer, labels: Tensor| {
            heads.steps(&answer.features, &labels, 64, 1.0);
            Ok(())
        };
        extractor.each(passes, step).expect("an epoch");
        began.elapsed().as_secs_f64()
    }
}

/// Normal clouds around 100 normal centres, 1.5 wide.
fn clouds(count: usize, dim: usize) -> (Tensor, Vec<i64>) {
    let mut rng = rng::stream(0, "bench", &[]);
    let centres: Vec<f32> = (0..100 * dim).map(|_| StandardNormal.sample(&mut rng)).collect();
    let labels: Vec<i64> = (0..count).map(|i| (i * 37 % 100) as i64).collect();
    let mut x = Vec::with_capacity(count * dim);
    for &label in &labels {
        for j in 0..dim {
            let noise: f32 = StandardNormal.sample(&mut rng);
            x.push(centres[label as usize * dim + j] + 1.5 * noise);
        }
    }
    (Tensor::from_slice(&x).view([count as i64, dim as i64]), labels)
}

fn tsne(x: &Tensor) -> (f64, Vec<[f64; 2]>) {
    let start = map::pca_start(x);
    let p = Tsne {
        image_size: 0,
        samples: 5000,
        perplexity: 30.0,
        exaggeration: 12.0,
        learning_rate: 0.0,
        iterations: 750,
        engine: Engine::Auto,
        seed: 1,
        neighbours: 15,
    };
    let began = Instant::now();
    let map = tsne::embed(x, &start, &p).expect("a map");
    (began.elapsed().as_secs_f64(), map)
}

/// Epochs of the training loader, images a second: CIFAR-100 where it is (in MCL_DATA or ./data), else `synthetic`.
fn loader() -> impl FnMut() -> f64 {
    let options = data::Options::default();
    let set: Dataset = data::open("cifar100", None, &options).or_else(|_| data::open("synthetic", None, &options)).expect("embedded");
    let transform = set.train_transform();
    let mut epoch = 0;
    move || {
        let (began, mut images) = (Instant::now(), 0);
        while began.elapsed().as_secs_f64() < LEAST_SECONDS {
            epoch += 1;
            let order = sampler::epoch(&set.train.labels, Sampling::Shuffled, 128, 0, epoch).expect("a batch of 128");
            let loader = Loader::new(&set.train, order, transform.clone(), 1, 0, epoch, 0);
            images += loader.map(|batch| batch.expect("images in memory").labels.size()[0]).sum::<i64>();
        }
        images as f64 / began.elapsed().as_secs_f64()
    }
}
