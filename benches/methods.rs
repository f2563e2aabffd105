//! What a step of each method costs beside its parts timed alone: forward and backward of the networks (or trunk and branches) it
//! needs, a second backward where it takes two gradients, forwards of its teachers, its other networks. Random images, no data loading;
//! the fastest of several rounds, in which all are timed in turn.
//!
//!     cargo bench --bench methods -- [--arch resnet32] [--batch 64] [--threads 2] [--rounds 5] [--method NAME]

use std::time::Instant;

use clap::Parser;
use mcl::cohort::Cohort;
use mcl::data::Batch;
use mcl::methods::{self, Clock, METHODS, Task, Views};
use mcl::nets::layers::Mode;
use mcl::nets::{self, Outputs};
use mcl::optim::{grads, grads_keeping_graph};
use mcl::recipe::{Data, Recipe, Train};
use mcl::train::step::Engine;
use tch::{Device, Kind, Tensor};

#[derive(Parser)]
struct Args {
    #[arg(long, default_value = "resnet32")]
    arch: String,
    #[arg(long, default_value_t = 64)]
    batch: usize,
    #[arg(long, default_value_t = 2)]
    threads: i32,
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// This one alone
    #[arg(long)]
    method: Option<String>,
    /// Given by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

const CLASSES: i64 = 100;

/// What a method asks for beside one forward and one backward pass of its cohort.
#[derive(Clone, Copy, PartialEq)]
enum Besides {
    Nothing,
    SecondBackward,
    /// Teachers' forward passes, in this mode.
    Teachers(Mode),
    /// Networks of its own (FFSD's fusion and decoders), forward and backward on given maps.
    OwnNetworks,
}

fn besides(method: &str) -> Besides {
    match method {
        "afd" => Besides::SecondBackward,
        "pcl" => Besides::Teachers(Mode::Train),
        "ckd_mkt" => Besides::Teachers(Mode::Eval),
        "ffsd" => Besides::OwnNetworks,
        _ => Besides::Nothing,
    }
}

struct Trial {
    name: &'static str,
    engine: Engine,
    /// Networks like the method's own, for the parts and the teachers.
    parts: Cohort,
    teachers: Cohort,
    step: f64,
    alone: f64,
}

fn trial(name: &'static str, args: &Args) -> mcl::error::Result<Trial> {
    let archs = vec![nets::find(&args.arch)?; if name == "okddip" { 3 } else { 2 }];
    let labels: Vec<i64> = (0..2 * CLASSES).map(|i| i % CLASSES).collect();
    let train = Train { batch: args.batch, seed: 0, ..Train::default() };
    let recipe = Recipe { train, data: Data { holdout: 20, ..Data::default() }, ..Recipe::default() };
    let task = Task::new(&recipe, &archs, CLASSES, &labels, Device::Cpu);
    let method = (methods::find(name)?.build)(&task, toml::Table::new())?;
    let needs = method.needs();
    let cohort = || task.cohort(needs);
    Ok(Trial { name, engine: Engine::of(&task, method), parts: cohort(), teachers: cohort(), step: f64::INFINITY, alone: f64::INFINITY })
}

fn batch(trial: &Trial, args: &Args) -> Batch {
    let size = args.batch as i64;
    // Rows of pixels seen as [B, 3, 32, 32]: channels_last, as the loader hands images over.
    let image = |v: i64| {
        let pixels = Tensor::arange(size * 32 * 32 * 3, (Kind::Float, Device::Cpu)) * (0.37 + 0.01 * v as f64);
        pixels.sin().view([size, 32, 32, 3]).permute([0, 3, 1, 2])
    };
    let views = if trial.engine.method.needs().views == Views::PerPeer { trial.engine.cohort.peers.len() as i64 } else { 1 };
    let labels = Tensor::arange(size, (Kind::Int64, Device::Cpu)).divide_scalar_mode(2, "floor").remainder(CLASSES);
    Batch { views: (0..views).map(image).collect(), labels, index: Tensor::arange(size, (Kind::Int64, Device::Cpu)), noise: 0 }
}

fn seconds(work: impl FnOnce() -> mcl::error::Result<()>) -> mcl::error::Result<f64> {
    let began = Instant::now();
    work()?;
    Ok(began.elapsed().as_secs_f64())
}

fn parts(trial: &mut Trial, batch: &Batch, clock: Clock) -> mcl::error::Result<()> {
    let besides = besides(trial.name);
    if let Besides::Teachers(mode) = besides {
        let _guard = tch::no_grad_guard();
        trial.teachers.forward(batch, mode);
    }
    let vars = trial.parts.params().tensors();
    let outs = trial.parts.forward(batch, Mode::Train);
    let sum = |rows: Vec<Tensor>| Tensor::stack(&rows, 0).sum(None);
    if besides == Besides::SecondBackward {
        grads_keeping_graph(&sum(outs.iter().map(|o| o.pre_pool.square().mean(None)).collect()), &vars);
    }
    if besides == Besides::OwnNetworks {
        let held = |list: &[Tensor]| list.iter().map(Tensor::detach).collect();
        let given: Vec<Outputs> = outs
            .iter()
            .map(|o| Outputs { maps: held(&o.maps), pre_pool: o.pre_pool.detach(), feats: held(&o.feats), logits: held(&o.logits) })
            .collect();
        let own: Vec<Tensor> = trial.engine.groups.iter().flat_map(|(group, _)| group.params.tensors()).collect();
        grads(&trial.engine.method.losses(&given, batch, clock)?.total(), &own, false);
    }
    let task = outs.iter().flat_map(|o| &o.logits).map(|z| z.cross_entropy_for_logits(&batch.labels)).collect();
    grads(&sum(task), &vars, false);
    Ok(())
}

fn main() -> mcl::error::Result<()> {
    let args = Args::parse();
    tch::set_num_threads(args.threads);
    let named = METHODS.iter().map(|m| m.name).filter(|n| args.method.as_deref().is_none_or(|only| only == *n));
    let mut trials = named.map(|name| trial(name, &args)).collect::<mcl::error::Result<Vec<_>>>()?;
    for round in 0..args.rounds + 1 {
        for trial in &mut trials {
            let batch = batch(trial, &args);
            // Past all phases and ramps, and not a batch that a meta step follows.
            let clock = Clock { epoch: 299 + trial.engine.method.extra_epochs(), batch: 1, step: 1 + round, lr: 1e-4, seed: 0 };
            let alone = seconds(|| parts(trial, &batch, clock))?;
            let step = seconds(|| trial.engine.step(&[batch], clock, None).map(drop))?;
            // The first round warms up.
            if round > 0 {
                (trial.step, trial.alone) = (trial.step.min(step), trial.alone.min(alone));
            }
        }
    }
    println!("{} x batch {}, {} threads, fastest of {} rounds", args.arch, args.batch, args.threads, args.rounds);
    println!("{:<10} {:>10} {:>10} {:>7}", "method", "step s", "parts s", "ratio");
    for t in &trials {
        println!("{:<10} {:>10.3} {:>10.3} {:>7.3}", t.name, t.step, t.alone, t.step / t.alone);
    }
    Ok(())
}
