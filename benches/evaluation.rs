//! Seconds of the evaluation's heavy parts: one epoch of the paper's probe (1000 images, ResNet-56), logistic regression (10000 x 64, 100
//! classes), t-SNE (5000 x 64, 750 iterations). `cargo bench --bench evaluation -- FOLDER` also writes the features, for other tools.

use std::time::Instant;

use mcl::data::{self, Loader, Sampling, Transform, sampler};
use mcl::eval::measures::tsne::map;
use mcl::eval::measures::tsne::{self, Engine, Tsne};
use mcl::eval::probe::heads::Heads;
use mcl::eval::probe::logreg::{self, Options};
use mcl::extractor::Extractor;
use mcl::nets::{self, Network};
use mcl::rng;
use mcl::system::device;
use rand_distr::{Distribution, StandardNormal};
use tch::{Device, Kind, Tensor};

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

fn probe_epoch(threads: usize) -> f64 {
    let dataset = data::open("synthetic", None, &data::Options::default()).expect("embedded");
    let split = dataset.train.subset(&(0..1000).collect::<Vec<_>>());
    let arch = nets::find("resnet56").expect("known");
    let (_, params) = Network::build(arch, 10, 1, Device::Cpu, Kind::Float);
    let mut extractor = Extractor::new(arch, &params, None, 10, threads);
    let transform = Transform::pad_crop(32, dataset.mean, dataset.std);
    let mut heads = Heads::new(&[0.1], dataset.classes.len() as i64, arch.dim, 0.9, 0.0, 1, Device::Cpu);
    let mut epoch = |number: u64| {
        let began = Instant::now();
        let order: Vec<u32> = sampler::epoch(&split.labels, Sampling::Shuffled, 64, 1, number).expect("an order").concat();
        for batch in Loader::new(&split, order.chunks(256).map(<[u32]>::to_vec).collect(), transform.clone(), 1, 1, number, 0) {
            let batch = batch.expect("a batch");
            let x = extractor.extract(&batch.views[0], false).expect("features").features;
            let mut first = 0;
            while first < x.size()[0] {
                let rows = (x.size()[0] - first).min(64);
                heads.step(&x.narrow(0, first, rows), &batch.labels.narrow(0, first, rows), 1.0);
                first += rows;
            }
        }
        began.elapsed().as_secs_f64()
    };
    epoch(0);
    (1..4).map(&mut epoch).fold(f64::INFINITY, f64::min)
}

fn main() {
    let threads = device::set_threads(0);
    let folder = std::env::args().skip(1).find(|a| !a.starts_with("--"));
    println!("{threads} threads");
    println!("probe_sgd_s {:.3}", probe_epoch(threads));
    let (x, y) = clouds(10_000, 64);
    let labels = Tensor::from_slice(&y);
    if let Some(folder) = &folder {
        Tensor::write_safetensors(&[("x", &x), ("y", &labels)], format!("{folder}/clouds.safetensors")).expect("a folder to write to");
    }
    for kind in [Kind::Float, Kind::Double] {
        let began = Instant::now();
        // scikit-learn's own tolerance.
        let fitted =
            logreg::fit(&x.to_kind(kind), &labels, 100, Options { c: 1.0, tolerance: 1e-4, max_iterations: 1000 }, None).expect("a fit");
        println!(
            "logreg_s {:.3} ({kind:?}, loss {:.8}, gradient {:.1e}, {} iterations, {} evaluations)",
            began.elapsed().as_secs_f64(),
            fitted.loss,
            fitted.gradient,
            fitted.iterations,
            fitted.evaluations
        );
    }
    let x = x.narrow(0, 0, 5000);
    let start = map::pca_start(&x);
    let p = Tsne {
        image_size: 0,
        samples: 5000,
        perplexity: 30.0,
        exaggeration: 12.0,
        learning_rate: 0.0,
        iterations: 750,
        engine: Engine::Bhtsne,
        seed: 1,
        neighbours: 15,
    };
    let began = Instant::now();
    let map = tsne::embed(&x, &start, &p).expect("a map");
    let seconds = began.elapsed().as_secs_f64();
    println!(
        "tsne_s {seconds:.3} (KL {:.4}, {:.1} % of 15 neighbours kept)",
        map::kl(&x, &map, 30.0).expect("a divergence"),
        100.0 * map::neighbours_kept(&x, &map, 15)
    );
    if let Some(folder) = &folder {
        let flat: Vec<f64> = map.into_iter().flatten().collect();
        Tensor::write_safetensors(&[("map", Tensor::from_slice(&flat).view([-1, 2]))], format!("{folder}/map.safetensors"))
            .expect("a folder to write to");
    }
}
