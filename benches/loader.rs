//! Images per second of the training loader and the memory it takes, as one JSON line:
//!
//!     cargo bench --bench loader -- [FOLDER OF CIFAR-100]
//!
//! Without CIFAR-100 (there, in MCL_DATA or in ./data) it measures `synthetic`. Batches of 128 are taken and dropped; memory is
//! what the process holds beyond what it held with libtorch loaded.

use std::path::PathBuf;
use std::time::Instant;

use mcl::data::{Loader, Options, Sampling, open, sampler};
use tch::{Device, Kind, Tensor};

const BATCH: usize = 128;
const IMAGES: usize = 200_000;

fn main() {
    // Cargo passes --bench.
    let folder: Option<PathBuf> = std::env::args().skip(1).find(|arg| !arg.starts_with("--")).map(PathBuf::from);
    let _touch = Tensor::ones([64, 64], (Kind::Float, Device::Cpu)).matmul(&Tensor::ones([64, 64], (Kind::Float, Device::Cpu)));
    let before = resident();
    let options = Options::default();
    let set =
        open("cifar100", folder.as_deref(), &options).or_else(|_| open("synthetic", None, &options)).expect("synthetic needs no files");
    let transform = set.train_transform();
    let epochs = IMAGES.div_ceil(set.train.len()) as u64;
    let run = |epoch: u64| -> usize {
        let order = sampler::epoch(&set.train.labels, Sampling::Shuffled, BATCH, 0, epoch).expect("a batch of 128");
        let loader = Loader::new(&set.train, order, transform.clone(), 1, 0, epoch, 0);
        loader.map(|batch| batch.expect("images in memory").labels.size()[0] as usize).sum()
    };
    run(0);
    let start = Instant::now();
    let images: usize = (1..=epochs).map(run).sum();
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "{}",
        serde_json::json!({
            "bench": "loader", "dataset": set.name, "batch": BATCH, "images": images, "images_per_second": (images as f64 / seconds).round(),
            "resident_mb": ((resident() - before) / 1e6).round(), "libtorch_mb": (before / 1e6).round(),
        })
    );
}

/// Bytes of this process in memory.
fn resident() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("every process has a VmRSS");
    line.trim().trim_end_matches(" kB").parse::<f64>().expect("kB") * 1024.0
}
