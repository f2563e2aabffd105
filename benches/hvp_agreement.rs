//! How well d pi by central differences agrees with the exact one, on real batches along a real run: the measurement that decides the
//! default of `hvp`. One JSON line for each place of the run: medians over the batches of cosine and norm ratio.
//!
//!     cargo bench --bench hvp_agreement -- [--arch resnet32] [--batch 128] [--steps 100,390,1170] [--batches 20] [--data DIR]

use std::path::PathBuf;

use clap::Parser;
use mcl::cohort::{Cohort, CohortOptions};
use mcl::data::{self, Batch, Loader, Sampling, sampler};
use mcl::error::Result;
use mcl::methods::l_mcl::{LMcl, Options, Setting, Shape};
use mcl::methods::{Clock, Method};
use mcl::nets;
use mcl::optim::Rule;
use mcl::optim::reverse_hg::Hvp;
use mcl::params::Named;
use mcl::system::ranks::Ranks;
use mcl::train::step::Engine;
use serde_json::json;
use tch::{Device, Kind, Tensor};

#[derive(Parser)]
struct Args {
    #[arg(long, default_value = "resnet32")]
    arch: String,
    #[arg(long, default_value = "cifar100")]
    dataset: String,
    #[arg(long)]
    data: Option<PathBuf>,
    #[arg(long, default_value_t = 128)]
    batch: usize,
    /// After how many steps to measure
    #[arg(long, value_delimiter = ',', default_value = "100,390,1170")]
    steps: Vec<usize>,
    /// Batches to measure on, each time
    #[arg(long, default_value_t = 20)]
    batches: usize,
    #[arg(long, default_value_t = 2)]
    threads: i32,
    /// Given by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

const RULE: Rule = Rule::Sgd { momentum: 0.9, weight_decay: 5e-4, nesterov: true };
const LR: f64 = 0.1;

fn main() -> Result<()> {
    let args = Args::parse();
    mcl::system::allocator::keep_large_blocks();
    tch::set_num_threads(args.threads);
    let arch = nets::find(&args.arch)?;
    let set = data::open(&args.dataset, args.data.as_deref(), &data::Options::default())?;
    let classes = set.classes.len() as i64;
    let shapes = [Shape { stages: arch.depth, width: arch.dim }; 2];
    let setting = Setting {
        shapes: &shapes,
        train_labels: &set.train.labels,
        batch: args.batch,
        rule: RULE,
        device: Device::Cpu,
        kind: Kind::Float,
        seed: 0,
        ranks: Ranks::ALONE,
    };
    let method = || LMcl::new(Options { hvp: Hvp::Difference, ..Options::default() }, &setting);
    // The engine owns its method; `probe` is a second one that takes over its heads and meta-network to be asked for gradients.
    let mut probe = method()?;
    let cohort = Cohort::new(&CohortOptions {
        archs: &[arch, arch],
        classes,
        branches: true,
        shared_stages: 0,
        device: Device::Cpu,
        kind: Kind::Float,
        seed: 0,
        ranks: Ranks::ALONE,
    });
    let mut engine = Engine::new(cohort, Box::new(method()?), RULE);

    let batches = |epoch: u64| -> Result<Loader> {
        let order = sampler::epoch(&set.train.labels, Sampling::ClassPairs, args.batch, 0, epoch)?;
        Ok(Loader::new(&set.train, order, set.train_transform(), 1, 0, epoch, 0))
    };
    let (mut epoch, mut loader, mut place, mut step) = (0u64, batches(0)?, 0usize, 0usize);
    for &until in &args.steps {
        while step < until {
            let Some(batch) = loader.next() else {
                epoch += 1;
                (loader, place) = (batches(epoch)?, 0);
                continue;
            };
            engine.step(&[batch?], Clock { epoch: epoch as usize, batch: place, step, lr: LR, seed: 0 }, None)?;
            (place, step) = (place + 1, step + 1);
        }
        let clock = Clock { epoch: epoch as usize, batch: 0, step, lr: LR, seed: 0 };
        take_over(&probe, &engine);
        let (mut cosines, mut ratios) = (vec![], vec![]);
        // Batches of an epoch that is never trained on.
        for batch in batches(1_000_000)?.take(args.batches) {
            let (cosine, ratio) = compare(&mut probe, &mut engine, &batch?, clock)?;
            eprintln!("step {step}: cosine {cosine:.4}, norm ratio {ratio:.4}");
            cosines.push(cosine);
            ratios.push(ratio);
        }
        let median = |values: &[f64]| {
            let mut sorted = values.to_vec();
            sorted.sort_by(f64::total_cmp);
            (sorted[(sorted.len() - 1) / 2] + sorted[sorted.len() / 2]) / 2.0
        };
        let low = cosines.iter().copied().fold(f64::INFINITY, f64::min);
        println!(
            "{}",
            json!({ "arch": args.arch, "dataset": set.name, "batch": args.batch, "step": step, "batches": cosines.len(),
                    "median_cosine": median(&cosines), "least_cosine": low, "median_norm_ratio": median(&ratios) })
        );
    }
    Ok(())
}

/// Copies heads and pi of the engine's method into `probe`.
fn take_over(probe: &LMcl, engine: &Engine) {
    let _guard = tch::no_grad_guard();
    let heads = |groups: Vec<mcl::methods::Group>| groups.into_iter().find(|g| g.name == "heads").expect("l_mcl has heads").params.named();
    let copy = |to: Named, from: Named| {
        for ((name, live), (other, value)) in to.into_iter().zip(from) {
            assert_eq!(name, other, "both methods were built alike");
            live.shallow_clone().copy_(&value);
        }
    };
    copy(heads(probe.groups(&engine.cohort)), heads(engine.method.groups(&engine.cohort)));
    copy(probe.state(), engine.method.state());
}

/// Cosine of the two d pi, and the norm by differences over the exact norm.
fn compare(probe: &mut LMcl, engine: &mut Engine, batch: &Batch, clock: Clock) -> Result<(f64, f64)> {
    let mut flat = |hvp: Hvp| -> Result<Tensor> {
        let gradient = probe.meta_gradient(&mut engine.cohort, &engine.theta, batch, clock, hvp)?;
        Ok(Tensor::cat(&gradient.iter().map(|g| g.flatten(0, -1)).collect::<Vec<_>>(), 0).to_kind(Kind::Double))
    };
    let (exact, difference) = (flat(Hvp::Exact)?, flat(Hvp::Difference)?);
    let norms = (exact.norm().double_value(&[]), difference.norm().double_value(&[]));
    Ok(((&exact * &difference).sum(None).double_value(&[]) / (norms.0 * norms.1), norms.1 / norms.0))
}
