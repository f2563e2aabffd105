//! Seconds of a training step, as the trainer takes it: f32, random images, no data loading. Ours beside PyTorch's (benches/peers/training.py),
//! in turns, as one table; with `--only` one JSON line of ours alone.
//!
//!     PEER_PYTHON=python cargo bench --bench step -- [--rounds 3] [--no-meta | --shapes] [--threads 2]
//!     cargo bench --bench step -- --only plain [--arch resnet32] [--batch 128] [--threads 2] [--iters 5] [--device cuda:0]

#[path = "peers/mod.rs"]
mod peers;

use std::time::Instant;

use clap::Parser;
use mcl::data::Batch;
use mcl::methods::{self, Clock, Task};
use mcl::nets::{self, Arch, Outputs};
use mcl::optim::grads;
use mcl::recipe::{Recipe, Train};
use mcl::system::device::{self, DeviceChoice};
use mcl::system::gpu;
use mcl::train::step::Engine;
use peers::{Peer, Unit};
use serde_json::json;
use tch::{Device, Kind, Tensor};

#[derive(Parser, Clone)]
struct Args {
    #[arg(long, default_value = "resnet32")]
    arch: String,
    /// M
    #[arg(long, default_value_t = 2)]
    networks: usize,
    #[arg(long, default_value_t = 128)]
    batch: usize,
    #[arg(long, default_value_t = 2)]
    threads: i32,
    /// Threads of the cohort: 2 and more run every network on its own
    #[arg(long, default_value_t = 1)]
    peer_threads: usize,
    #[arg(long, default_value_t = 5)]
    iters: usize,
    #[arg(long, default_value_t = 2)]
    meta_iters: usize,
    /// How often each line of the table is measured
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Leave the lines of meta steps out
    #[arg(long)]
    no_meta: bool,
    /// The table of other networks, batches and images: steps of bare networks, each NAME@SIDE
    #[arg(long, value_delimiter = ',', num_args = 0.., default_missing_value = "wrn_16_2@32,shufflenet_v2_x1_0@64,resnet18@64")]
    shapes: Vec<String>,
    /// Side of the images, instead of the one the architecture was made for
    #[arg(long)]
    side: Option<i64>,
    /// plain: plain steps alone, with peak_mb; losses: also what heads, lambda, gates and terms take on given features; baseline: steps of
    /// bare networks alone; exact, difference: meta steps of that kind alone
    #[arg(long)]
    only: Option<Only>,
    /// auto, cpu or cuda:N
    #[arg(long, default_value = "cpu")]
    device: DeviceChoice,
    /// Count CPU seconds instead of wall time: with --threads 1 they mean something on a busy machine, too
    #[arg(long)]
    cpu: bool,
    /// Given by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum Only {
    Plain,
    Losses,
    Baseline,
    Exact,
    Difference,
}

const EVERY: f64 = 50.0;
/// Short steps are repeated for at least so long.
const LEAST_SECONDS: f64 = 1.5;
const CLASSES: i64 = 100;

fn engine(args: &Args, arch: &'static Arch, method: &str, options: &str) -> mcl::error::Result<Engine> {
    let archs = vec![arch; args.networks];
    let labels: Vec<i64> = (0..2 * CLASSES).map(|i| i % CLASSES).collect();
    let recipe = Recipe { train: Train { batch: args.batch, seed: 0, ..Train::default() }, ..Recipe::default() };
    let task = Task::new(&recipe, &archs, CLASSES, &labels, args.device.0);
    let method = (methods::find(method)?.build)(&task, options.parse().expect("the bench's own options"))?;
    let mut engine = Engine::of(&task, method);
    engine.cohort.threads = args.peer_threads;
    Ok(engine)
}

/// Noise as the loader would hand it over: channels_last; B/2 classes twice.
fn batch(args: &Args, arch: &Arch) -> Batch {
    let (b, side) = (args.batch as i64, args.side.unwrap_or(arch.image_size));
    let noise: Vec<f32> = {
        use rand::Rng;
        let mut rng = mcl::rng::stream(0, "images", &[]);
        (0..b * side * side * 3).map(|_| rng.gen_range(-1.7f32..1.7)).collect()
    };
    let images = Tensor::from_slice(&noise).view([b, side, side, 3]).permute([0, 3, 1, 2]);
    let index = Tensor::arange(b, (Kind::Int64, Device::Cpu));
    Batch { views: vec![images], labels: index.floor_divide_scalar(2).remainder(CLASSES), index, noise: 0 }.to_device(args.device.0)
}

fn clock(step: usize, meta: bool) -> Clock {
    Clock { epoch: 0, batch: if meta { 0 } else { 1 }, step, lr: 0.1, seed: 0 }
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// Seconds of a clock that only runs forward: wall, or CPU of this process.
fn now(args: &Args) -> f64 {
    thread_local!(static START: Instant = Instant::now());
    if args.cpu { mcl::system::allocator::cpu_seconds() } else { START.with(|start| start.elapsed().as_secs_f64()) }
}

/// Median seconds of `f` after one warm-up call.
fn timed(args: &Args, iters: usize, f: impl FnMut() -> mcl::error::Result<()>) -> mcl::error::Result<f64> {
    all_times(args, iters, f).map(median)
}

fn all_times(args: &Args, iters: usize, mut f: impl FnMut() -> mcl::error::Result<()>) -> mcl::error::Result<Vec<f64>> {
    // A GPU works on after a call has returned: what is timed begins and ends with its queue empty.
    let wait = || {
        if let Device::Cuda(n) = args.device.0 {
            tch::Cuda::synchronize(n as i64);
        }
    };
    f()?;
    wait();
    let mut seconds = vec![];
    for _ in 0..iters {
        let start = now(args);
        f()?;
        wait();
        seconds.push(now(args) - start);
    }
    Ok(seconds)
}

/// Heads, lambda, gates and all terms, forward and backward, on given features.
fn losses(args: &Args, engine: &mut Engine, batch: &Batch) -> mcl::error::Result<f64> {
    let outs = engine.cohort.forward(batch, mcl::nets::layers::Mode::Train);
    let leaf = |ts: &Vec<Tensor>| -> Vec<Tensor> { ts.iter().map(|t| t.detach().copy().set_requires_grad(true)).collect() };
    let outs: Vec<Outputs> = outs
        .iter()
        .map(|o| Outputs { maps: vec![], pre_pool: o.pre_pool.detach(), feats: leaf(&o.feats), logits: leaf(&o.logits) })
        .collect();
    let mut vars: Vec<Tensor> = outs.iter().flat_map(|o| o.feats.iter().chain(&o.logits).map(Tensor::shallow_clone)).collect();
    vars.extend(engine.groups.iter().flat_map(|(g, _)| g.params.tensors()));
    timed(args, args.iters.max(10), || {
        let terms = engine.method.losses(&outs, batch, clock(0, false))?;
        grads(&terms.total(), &vars, false);
        Ok(())
    })
}

/// Seconds of a step: the median of as many as fit into a while.
fn for_a_while(args: &Args, mut step: impl FnMut()) -> f64 {
    let mut seconds = vec![];
    while seconds.is_empty() || seconds.iter().sum::<f64>() < LEAST_SECONDS {
        let start = now(args);
        step();
        seconds.push(now(args) - start);
    }
    median(seconds)
}

/// Ours beside PyTorch's.
fn table(args: &Args) -> mcl::error::Result<()> {
    // PyTorch's steps are on the CPU.
    let mut peer = if args.device.0 == Device::Cpu { Peer::start("training.py", args.threads as usize) } else { None };
    println!("{} threads", args.threads);
    peers::head();
    for shape in &args.shapes {
        let (name, side) = shape.split_once('@').expect("a shape is NAME@SIDE");
        for images in [32, 256] {
            let args = Args { side: side.parse().ok(), batch: images, ..args.clone() };
            let arch = nets::find(name)?;
            let batch = batch(&args, arch);
            let mut bare = engine(&args, arch, "baseline", "")?;
            let mut step = || bare.step(std::slice::from_ref(&batch), clock(1, false), None).map(drop).expect("a step");
            let (task, what) = (format!("baseline {name} {side} {images}"), format!("{name}, {side} pixels, {images} images"));
            peers::row(&what, Unit::Seconds, args.rounds, || for_a_while(&args, &mut step), peer.as_mut(), &task);
        }
    }
    if !args.shapes.is_empty() {
        return Ok(());
    }
    let arch = nets::find(&args.arch)?;
    let batch = batch(args, arch);
    let batch = std::slice::from_ref(&batch);
    let depth = args.arch.trim_start_matches("resnet");
    for (what, method, task) in [
        ("plain step of L-MCL", "l_mcl", format!("plain {depth} {}", args.batch)),
        ("step of the same networks alone", "baseline", format!("baseline {} {} {}", args.arch, batch[0].views[0].size()[3], args.batch)),
    ] {
        let mut engine = engine(args, arch, method, "")?;
        let mut step = || engine.step(batch, clock(1, false), None).map(drop).expect("a step");
        peers::row(what, Unit::Seconds, args.rounds, || for_a_while(args, &mut step), peer.as_mut(), &task);
    }
    for hvp in ["exact", "difference"].into_iter().filter(|_| !args.no_meta) {
        let mut engine = engine(args, arch, "l_mcl", &format!("hvp = \"{hvp}\""))?;
        let mut step = |meta: bool| engine.step(batch, clock(1, meta), None).map(drop).expect("a step");
        step(true);
        let mut meta = || {
            // The heap is not what it was before the meta step: most of a run's plain steps are like these.
            let plain = for_a_while(args, || step(false));
            let start = now(args);
            step(true);
            now(args) - start - plain
        };
        let (what, task) = (format!("meta step, {hvp}"), format!("meta {depth} {}", args.batch));
        peers::row(&what, Unit::Seconds, args.rounds, &mut meta, peer.as_mut(), &task);
    }
    Ok(())
}

/// Ours alone, one part of it.
fn part(args: &Args, only: Only) -> mcl::error::Result<()> {
    let arch = nets::find(&args.arch)?;
    let batch = batch(args, arch);
    let batch = std::slice::from_ref(&batch);
    let depth: Option<u32> = args.arch.strip_prefix("resnet").and_then(|d| d.parse().ok());
    let mut line = json!({ "arch": args.arch, "networks": args.networks, "depth": depth, "side": args.side.unwrap_or(arch.image_size), "batch": args.batch, "threads": args.threads, "peer_threads": args.peer_threads, "device": device::name(args.device.0) });
    let round = |s: f64| (s * 1e4).round() / 1e4;
    match only {
        Only::Baseline => {
            let mut bare = engine(args, arch, "baseline", "")?;
            line["baseline_s"] = json!(round(timed(args, args.iters, || bare.step(batch, clock(1, false), None).map(drop))?));
        }
        Only::Exact | Only::Difference => {
            let hvp = if only == Only::Exact { "exact" } else { "difference" };
            let mut engine = engine(args, arch, "l_mcl", &format!("hvp = \"{hvp}\""))?;
            let both = timed(args, args.meta_iters, || engine.step(batch, clock(1, true), None).map(drop))?;
            let plain = timed(args, args.iters, || engine.step(batch, clock(1, false), None).map(drop))?;
            (line["meta_s"], line["plain_after_meta_s"], line["hvp"]) = (json!(round(both - plain)), json!(round(plain)), json!(hvp));
            line["amortised_s"] = json!(round(plain + (both - plain) / EVERY));
        }
        Only::Plain | Only::Losses => {
            let mut l_mcl = engine(args, arch, "l_mcl", "")?;
            let times = all_times(args, args.iters, || l_mcl.step(batch, clock(1, false), None).map(drop))?;
            // A run logs the mean of its steps: on a busy machine it is well above the median.
            line["plain_mean_s"] = json!(round(times.iter().sum::<f64>() / times.len() as f64));
            let plain = median(times);
            line["plain_s"] = json!(round(plain));
            if only == Only::Losses {
                let part = losses(args, &mut l_mcl, &batch[0])?;
                line["losses_s"] = json!(round(part));
                line["losses_share"] = json!(round(part / plain));
            }
        }
    }
    line["peak_mb"] = json!(mcl::system::allocator::peak_mb());
    if let Some(memory) = gpu::memory(args.device.0) {
        line["device_peak_mb"] = json!(memory.peak_mb);
    }
    println!("{line}");
    Ok(())
}

fn main() -> mcl::error::Result<()> {
    let args = Args::parse();
    mcl::system::allocator::keep_large_blocks();
    tch::set_num_threads(args.threads);
    gpu::set(Train::default().tf32, Train::default().deterministic);
    nets::check_instructions()?;
    match args.only {
        None => table(&args),
        Some(only) => part(&args, only),
    }
}
