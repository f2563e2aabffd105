//! How a training step grows with the number of networks, stages, images and threads: a table (CSV) and a figure (SVG). L-MCL on ResNet-32,
//! plain steps, f32, random images. Stages are those of the losses alone: an architecture has as many as it has.
//!
//!     cargo bench --bench growth -- [--out FOLDER] [--arch resnet32] [--iters 5]

use std::path::PathBuf;
use std::time::Instant;

use clap::Parser;
use mcl::data::Batch;
use mcl::error::Result;
use mcl::files;
use mcl::methods::l_mcl::{LMcl, Options, Setting, Shape};
use mcl::methods::{self, Clock, Method, Task};
use mcl::nets::{self, Arch, Outputs};
use mcl::optim::{Rule, grads};
use mcl::recipe::{Recipe, Train};
use mcl::report::{Lines, Palette, Series};
use mcl::system::ranks::Ranks;
use mcl::train::step::Engine;
use tch::{Device, Kind, Tensor};

#[derive(Parser)]
struct Args {
    /// Where growth.csv and growth.svg are written; without it the numbers are only printed
    #[arg(long)]
    out: Option<PathBuf>,
    #[arg(long, default_value = "resnet32")]
    arch: String,
    #[arg(long, default_value_t = 5)]
    iters: usize,
    /// Given by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

const CLASSES: i64 = 100;
const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);
const CLOCK: Clock = Clock { epoch: 0, batch: 1, step: 1, lr: 0.1, seed: 0 };

fn batch(images: i64, side: i64) -> Batch {
    let index = Tensor::arange(images, (Kind::Int64, Device::Cpu));
    let view = Tensor::randn([images, side, side, 3], CPU).permute([0, 3, 1, 2]);
    Batch { views: vec![view], labels: index.floor_divide_scalar(2).remainder(CLASSES), index, noise: 0 }
}

/// Median seconds after one warm-up call.
fn median(iters: usize, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    work()?;
    let mut seconds = (0..iters)
        .map(|_| {
            let start = Instant::now();
            work().map(|()| start.elapsed().as_secs_f64())
        })
        .collect::<Result<Vec<f64>>>()?;
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[iters / 2])
}

/// A plain step of so many networks on so many images.
fn step(arch: &'static Arch, networks: usize, images: usize, iters: usize) -> Result<f64> {
    let (archs, labels) = (vec![arch; networks], (0..2 * CLASSES).map(|i| i % CLASSES).collect::<Vec<i64>>());
    let recipe = Recipe { train: Train { batch: images, seed: 0, ..Train::default() }, ..Recipe::default() };
    let task = Task::new(&recipe, &archs, CLASSES, &labels, Device::Cpu);
    let mut engine = Engine::of(&task, (methods::find("l_mcl")?.build)(&task, toml::Table::new())?);
    let batch = batch(images as i64, arch.image_size);
    median(iters, || engine.step(std::slice::from_ref(&batch), CLOCK, None).map(drop))
}

/// Heads, lambda, gates and terms of two networks of so many stages, forward and backward, on given features.
fn losses(stages: usize, width: i64, images: i64, iters: usize) -> Result<f64> {
    let labels: Vec<i64> = (0..2 * CLASSES).map(|i| i % CLASSES).collect();
    let setting = Setting {
        shapes: &[Shape { stages, width }; 2],
        train_labels: &labels,
        batch: images as usize,
        rule: Rule::Sgd { momentum: 0.9, weight_decay: 5e-4, nesterov: true },
        device: Device::Cpu,
        kind: Kind::Float,
        seed: 0,
        ranks: Ranks::ALONE,
    };
    let method = LMcl::new(Options::default(), &setting)?;
    let leaves = |width: i64| -> Vec<Tensor> { (0..stages).map(|_| Tensor::randn([images, width], CPU).set_requires_grad(true)).collect() };
    let one = || Outputs { maps: vec![], pre_pool: Tensor::zeros([0], CPU), feats: leaves(width), logits: leaves(CLASSES) };
    let outs = [one(), one()];
    let after: Vec<Tensor> = outs.iter().flat_map(|o| o.feats.iter().chain(&o.logits).map(Tensor::shallow_clone)).collect();
    let batch = batch(images, 1);
    median(4 * iters, || {
        grads(&method.losses(&outs, &batch, CLOCK)?.total(), &after, false);
        Ok(())
    })
}

fn main() -> Result<()> {
    let args = Args::parse();
    mcl::system::allocator::keep_large_blocks();
    nets::check_instructions()?;
    let arch = nets::find(&args.arch)?;
    let most = std::thread::available_parallelism().map_or(1, |n| n.get()) as i32;
    let mut rows: Vec<(String, f64, f64)> = vec![];
    let mut add = |what: &str, n: usize, seconds: f64| {
        println!("{what} {n}: {seconds:.3} s");
        rows.push((what.to_string(), n as f64, seconds));
    };
    for threads in (0..).map(|k| 1 << k).take_while(|&n| n <= most) {
        tch::set_num_threads(threads);
        add("threads", threads as usize, step(arch, 2, 128, args.iters)?);
    }
    tch::set_num_threads(most);
    for networks in [2, 3, 4] {
        add("networks (M)", networks, step(arch, networks, 128, args.iters)?);
    }
    for images in [32, 64, 128] {
        add("images in a batch", images, step(arch, 2, images, args.iters)?);
    }
    for stages in [1, 2, 3, 4] {
        add("stages (L), losses alone", stages, losses(stages, arch.dim, 128, args.iters)?);
    }
    let mut csv = "what,n,seconds\n".to_string();
    rows.iter().for_each(|(what, n, seconds)| csv += &format!("\"{what}\",{n},{seconds:.4}\n"));
    let mut series: Vec<Series> = vec![];
    for (what, n, seconds) in &rows {
        if series.last().is_none_or(|last| &last.name != what) {
            series.push(Series { name: what.clone(), points: vec![(*n, *seconds)], band: vec![] });
        } else if let Some(last) = series.last_mut() {
            last.points.push((*n, *seconds));
        }
    }
    // Everything as a multiple of the smallest: one axis for all.
    for line in &mut series {
        let (n, seconds) = line.points[0];
        line.points.iter_mut().for_each(|p| *p = (p.0 / n, p.1 / seconds));
    }
    let title = format!("A plain step of L-MCL, {}, {most} threads: growth", args.arch);
    let palette = Palette::of(series.iter().map(|line| &line.name));
    let (x, y) = ("times the smallest number", "times its seconds");
    let chart = Lines { title: &title, x, y, series: &series, palette: &palette, band: "" };
    for (name, text) in [("growth.csv", csv), ("growth.svg", chart.figure("growth", title.as_str()).svg)] {
        if let Some(folder) = &args.out {
            files::write(&folder.join(name), text.as_bytes())?;
        }
    }
    Ok(())
}
