//! What one plain training step asks of a CUDA device, counted on the one in tests/cuda: kernels started, copies to the device and back,
//! numbers read, and everything that waits for it. One JSON line for each pair of networks and method; no GPU is needed.
//!
//!     cargo bench --bench launches -- [--arch resnet8 --arch resnet32] [--method l_mcl --method baseline] [--steps 8]

#[path = "../tests/cuda/mod.rs"]
mod cuda;

use clap::Parser;
use mcl::data::Batch;
use mcl::methods::{self, Clock, Task};
use mcl::nets;
use mcl::recipe::{Recipe, Train};
use mcl::train::step::Engine;
use serde_json::json;
use tch::{Device, Kind, Tensor};

#[derive(Parser)]
struct Args {
    /// Two networks of it
    #[arg(long, default_values = ["resnet8", "resnet32"])]
    arch: Vec<String>,
    #[arg(long, default_values = ["l_mcl", "baseline"])]
    method: Vec<String>,
    /// Steps counted, after as many that are not
    #[arg(long, default_value_t = 8)]
    steps: usize,
    /// Given by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

const CLASSES: i64 = 100;
const BATCH: i64 = 8;

fn count(args: &Args, arch: &str, method: &str) -> mcl::error::Result<serde_json::Value> {
    let archs = vec![nets::find(arch)?; 2];
    let labels: Vec<i64> = (0..2 * CLASSES).map(|i| i % CLASSES).collect();
    let recipe = Recipe { train: Train { batch: BATCH as usize, seed: 0, ..Train::default() }, ..Recipe::default() };
    let task = Task::new(&recipe, &archs, CLASSES, &labels, Device::Cuda(0));
    let method_of = (methods::find(method)?.build)(&task, toml::Table::new())?;
    let mut engine = Engine::of(&task, method_of);
    // How many kernels there are depends on neither the images nor how many.
    let images = Tensor::rand([BATCH, 32, 32, 3], (Kind::Float, Device::Cpu)).permute([0, 3, 1, 2]);
    let index = Tensor::arange(BATCH, (Kind::Int64, Device::Cpu));
    let batch = Batch { views: vec![images], labels: index.floor_divide_scalar(2), index, noise: 0 }.pinned();
    let mut before = cuda::counts().expect("the device is preloaded");
    for step in 0..2 * args.steps {
        if step == args.steps {
            before = cuda::counts().expect("the device is preloaded");
        }
        let clock = Clock { epoch: 0, batch: 1, step, lr: 0.01, seed: 0 };
        engine.step(&[batch.shallow_clone()], clock, None)?;
    }
    let counts = cuda::counts().expect("the device is preloaded").since(before);
    engine.confirm()?;
    let each = |n: i64| n as f64 / args.steps as f64;
    Ok(json!({
        "arch": arch,
        "networks": 2,
        "method": method,
        "launches": each(counts.launches),
        "to_device": each(counts.to_device),
        "to_host": each(counts.to_host),
        "reads": each(counts.reads),
        "waits": each(counts.waits),
    }))
}

fn main() -> mcl::error::Result<()> {
    let args = Args::parse();
    if cuda::counts().is_none() {
        let library = match cuda::library() {
            Ok(library) => library,
            Err(why) => {
                println!("skipped: {why}");
                return Ok(());
            }
        };
        let mut again = std::process::Command::new(std::env::current_exe().expect("this program"));
        let status = cuda::preload(again.args(std::env::args_os().skip(1)), &library).status().expect("this program starts again");
        std::process::exit(status.code().unwrap_or(1));
    }
    for arch in &args.arch {
        for method in &args.method {
            println!("{}", count(&args, arch, method)?);
        }
    }
    Ok(())
}
