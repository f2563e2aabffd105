//! `mcl-eval linear-probe`: a linear classifier on frozen features, by the paper's protocol, a sweep of learning rates, or L-BFGS.

use std::time::Instant;

use clap::Args as ClapArgs;
use serde::Deserialize;
use serde_json::json;
use tch::{Device, Kind, Tensor};

use crate::data::{Loader, Sampling, Transform, sampler};
use crate::error::{Error, Result};
use crate::eval::Common;
use crate::eval::dataset::Target;
use crate::eval::features::{self, Features, Prepared};
use crate::eval::network::{PeerChoice, Subject, SubjectArgs};
use crate::eval::probe::heads::Heads;
use crate::eval::probe::logreg::{self, Options as FitOptions};
use crate::eval::protocol::{HowArgs, Protocol, require};
use crate::eval::record::{self, Record};
use crate::eval::score::Score;
use crate::report::{Cell, Table, table};
use crate::system::device;

pub const ABOUT: &str = "Train a linear classifier on frozen features of another dataset";

#[derive(Debug, Clone, ClapArgs)]
pub struct Args {
    #[command(flatten)]
    pub subjects: SubjectArgs,
    /// The dataset the classifier is trained and tested on
    #[arg(long)]
    pub dataset: String,
    /// paper, sweep, lbfgs or a TOML file
    #[arg(long, default_value = "paper")]
    pub protocol: String,
    /// Seeds to repeat with, e.g. 1,2,3 [default: the protocol's]
    #[arg(long, value_delimiter = ',')]
    pub seeds: Vec<u64>,
    #[command(flatten)]
    pub how: HowArgs,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Paper {
    image_size: i64,
    augment: bool,
    batch: usize,
    epochs: usize,
    lr: f64,
    milestones: Vec<usize>,
    momentum: f64,
    weight_decay: f64,
    seeds: Vec<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sweep {
    image_size: i64,
    batch: usize,
    epochs: usize,
    lrs: Vec<f64>,
    momentum: f64,
    weight_decay: f64,
    schedule: Falling,
    holdout: f64,
    seeds: Vec<u64>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Falling {
    Cosine,
    Constant,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lbfgs {
    pub image_size: i64,
    cs: Vec<f64>,
    tolerance: f64,
    max_iterations: usize,
    precision: Precision,
    engine: Engine,
    holdout: f64,
    pub seeds: Vec<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Precision {
    F32,
    F64,
}

#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Engine {
    Own,
    Linfa,
}

/// One trained classifier's scores on the test split, and what was noticed.
pub struct Probe {
    pub score: Score,
    pub warnings: Vec<String>,
    /// What was chosen and how the fit went.
    pub chosen: serde_json::Value,
}

/// A probe and the seed, the side of the images and the seconds of it.
pub struct Seeded {
    pub probe: Probe,
    pub seed: u64,
    pub side: usize,
    pub seconds: f64,
}

pub fn run(args: &Args, common: &Common) -> Result<()> {
    let protocol = protocol(&args.protocol, &args.how, &args.seeds)?;
    let subjects = args.subjects.open(common, PeerChoice::Best)?;
    let target = Target::open(&args.dataset, common)?;
    let mut records = vec![];
    for subject in &subjects {
        common.say(format!("{}: {} on {} ({} protocol)", subject.name, subject.arch.name, target.dataset.name, protocol.kind));
        let own = measure(subject, &target, &protocol, !args.how.no_cache, common)?;
        // Kept at once: a later subject that fails does not take these with it.
        record::keep(&own, std::slice::from_ref(subject), common)?;
        records.extend(own);
    }
    print(&records, &target, common)
}

/// A probe's protocol with what the flags change, checked before anything is loaded.
pub fn protocol(name: &str, how: &HowArgs, seeds: &[u64]) -> Result<Protocol> {
    let mut protocol = how.protocol(name, &["paper", "sweep", "lbfgs"])?;
    if !seeds.is_empty() {
        protocol.set("seeds", seeds.iter().map(|&s| s as i64).collect::<Vec<_>>());
    }
    check(&protocol)?;
    Ok(protocol)
}

fn check(protocol: &Protocol) -> Result<()> {
    let seeds = match protocol.kind.as_str() {
        "paper" => {
            let p: Paper = protocol.options()?;
            require(p.batch > 0 && p.epochs > 0, "batch, epochs", (p.batch, p.epochs), "1 or more")?;
            require(p.lr > 0.0 && p.lr.is_finite(), "lr", p.lr, "above 0")?;
            require(
                (0.0..1.0).contains(&p.momentum) && p.weight_decay >= 0.0,
                "momentum, weight_decay",
                (p.momentum, p.weight_decay),
                "0 to 1, 0 or more",
            )?;
            p.seeds
        }
        "sweep" => {
            let p: Sweep = protocol.options()?;
            require(p.batch > 0 && p.epochs > 0, "batch, epochs", (p.batch, p.epochs), "1 or more")?;
            require(!p.lrs.is_empty() && p.lrs.iter().all(|l| *l > 0.0 && l.is_finite()), "lrs", &p.lrs, "numbers above 0")?;
            require(p.lrs.is_sorted(), "lrs", &p.lrs, "in rising order")?;
            require(p.holdout > 0.0 && p.holdout < 1.0, "holdout", p.holdout, "between 0 and 1")?;
            require(
                (0.0..1.0).contains(&p.momentum) && p.weight_decay >= 0.0,
                "momentum, weight_decay",
                (p.momentum, p.weight_decay),
                "0 to 1, 0 or more",
            )?;
            p.seeds
        }
        _ => {
            let p: Lbfgs = protocol.options()?;
            require(!p.cs.is_empty() && p.cs.iter().all(|c| *c > 0.0 && c.is_finite()), "cs", &p.cs, "numbers above 0")?;
            require(p.cs.is_sorted(), "cs", &p.cs, "in rising order")?;
            require(p.holdout > 0.0 && p.holdout < 1.0, "holdout", p.holdout, "between 0 and 1")?;
            require(
                p.tolerance > 0.0 && p.max_iterations > 0,
                "tolerance, max_iterations",
                (p.tolerance, p.max_iterations),
                "above 0, 1 or more",
            )?;
            p.seeds
        }
    };
    require(!seeds.is_empty(), "seeds", &seeds, "at least one")
}

/// The classifiers of one subject, one a seed of the protocol.
pub fn probes(subject: &Subject, target: &Target, protocol: &Protocol, cached: bool, common: &Common) -> Result<Vec<Seeded>> {
    let kind = protocol.kind.as_str();
    let (image_size, seeds) = match kind {
        "paper" => protocol.options::<Paper>().map(|p| (p.image_size, p.seeds))?,
        "sweep" => protocol.options::<Sweep>().map(|p| (p.image_size, p.seeds))?,
        _ => protocol.options::<Lbfgs>().map(|p| (p.image_size, p.seeds))?,
    };
    let side = subject.image_size(image_size);
    let prepared = Prepared::new(&target.dataset, subject, side)?;
    let features = |split| features::features(subject, split, &prepared.transform, cached, common);
    let test = features(&prepared.dataset.test)?;
    let train = if kind == "paper" { None } else { Some(features(&prepared.dataset.train)?) };
    let classes = target.dataset.classes.len() as i64;
    let mut probes = vec![];
    for &seed in &seeds {
        let began = Instant::now();
        let mut probe = match (kind, &train) {
            ("sweep", Some(train)) => sweep(&protocol.options()?, train, &test, classes, seed, common)?,
            ("lbfgs", Some(train)) => lbfgs(&protocol.options()?, train, &test, classes, seed)?,
            _ => paper(&protocol.options()?, subject, &prepared, &test, seed, common)?,
        };
        subject.check_unchanged()?;
        let seconds = began.elapsed().as_secs_f64();
        if probe.score.at_chance() {
            probe.warnings.push(format!("at chance level: {:.2} % of {} classes", probe.score.top1(), classes));
        }
        probe.warnings.iter().for_each(|w| common.warn(format!("{}: {w}", subject.name)));
        probes.push(Seeded { probe, seed, side, seconds });
    }
    Ok(probes)
}

/// All seeds of one subject, one record each.
fn measure(subject: &Subject, target: &Target, protocol: &Protocol, cached: bool, common: &Common) -> Result<Vec<Record>> {
    let mut records = vec![];
    for Seeded { probe, seed, side, seconds } in probes(subject, target, protocol, cached, common)? {
        let (low, high) = probe.score.interval(seed);
        let mut detail = probe.score.detail(&target.dataset.classes);
        detail["chosen"] = probe.chosen;
        records.push(Record {
            dataset: target.dataset.name.into(),
            value: probe.score.top1(),
            ci_low: Some(low),
            ci_high: Some(high),
            top5: Some(probe.score.top5()),
            seed: Some(seed),
            n_train: target.dataset.train.len(),
            n_test: target.dataset.test.len(),
            split_hash: target.hash.clone(),
            image_size: side,
            seconds,
            warnings: probe.warnings,
            detail,
            ..Record::new("linear-probe", subject, common).protocol(protocol)
        });
        common.say(format!(
            "{}: seed {seed}: top-1 {:.2} [{low:.2}, {high:.2}], top-5 {:.2}, {seconds:.1} s",
            subject.name,
            probe.score.top1(),
            probe.score.top5()
        ));
    }
    Ok(records)
}

/// Backbone passes take this many images at once: the backbone is frozen, so the steps of the classifier (a batch each) are the same.
const PASS: usize = 256;

/// The paper's protocol: SGD on features of freshly augmented images.
fn paper(p: &Paper, subject: &Subject, prepared: &Prepared, test: &Features, seed: u64, common: &Common) -> Result<Probe> {
    let split = &prepared.dataset.train;
    let side = prepared.transform.size;
    let (mean, std) = (subject.meta.mean, subject.meta.std);
    let transform = match (p.augment, side <= features::SMALL) {
        (false, _) => prepared.transform.clone(),
        (true, true) => Transform::pad_crop(side, mean, std),
        // What networks for large images are trained with.
        (true, false) => Transform::random_resized(side, mean, std),
    };
    let classes = prepared.dataset.classes.len() as i64;
    let mut heads = Heads::new(&[p.lr], classes, subject.arch.dim, p.momentum, p.weight_decay, seed, Device::Cpu);
    let mut extractor = subject.extractor(common);
    let group = (PASS / p.batch).max(1) * p.batch;
    for epoch in 0..p.epochs {
        let factor = 0.1f64.powi(p.milestones.iter().filter(|m| epoch >= **m).count() as i32);
        let order: Vec<u32> = sampler::epoch(&split.labels, Sampling::Shuffled, p.batch, seed, epoch as u64)?.concat();
        let passes = order.chunks(group).map(<[u32]>::to_vec).collect();
        for batch in Loader::new(split, passes, transform.clone(), 1, seed, epoch as u64, 0) {
            let batch = batch?;
            let x = extractor.extract(&batch.views[0], false)?.features;
            let count = x.size()[0];
            let mut first = 0;
            while first < count {
                let rows = (p.batch as i64).min(count - first);
                heads.step(&x.narrow(0, first, rows), &batch.labels.narrow(0, first, rows), factor);
                first += rows;
            }
        }
        common.progress(epoch + 1, p.epochs, "epoch");
    }
    let scores = heads.scores(&test.x).remove(0);
    let mut warnings = vec![];
    if heads.diverged() {
        warnings.push(format!("diverged: the classifier is not finite at lr {}", p.lr));
    }
    Ok(Probe { score: Score::new(&scores, &test.y), warnings, chosen: json!({ "lr": p.lr }) })
}

/// SGD over cached features with several rates at once.
fn train_heads(p: &Sweep, lrs: &[f64], train: &Features, classes: i64, seed: u64, common: &Common) -> Result<Heads> {
    let (x, y) = (train.x.to_device(common.device), train.labels().to_device(common.device));
    let mut heads = Heads::new(lrs, classes, x.size()[1], p.momentum, p.weight_decay, seed, common.device);
    let _alone = device::alone();
    let per_epoch = train.y.len().div_ceil(p.batch);
    for epoch in 0..p.epochs {
        for (i, rows) in sampler::epoch(&train.y, Sampling::Shuffled, p.batch, seed, epoch as u64)?.iter().enumerate() {
            let rows: Vec<i64> = rows.iter().map(|&r| i64::from(r)).collect();
            let rows = Tensor::from_slice(&rows).to_device(common.device);
            let done = (epoch * per_epoch + i) as f64 / (p.epochs * per_epoch) as f64;
            let factor = match p.schedule {
                Falling::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * done).cos()),
                Falling::Constant => 1.0,
            };
            heads.step(&x.index_select(0, &rows), &y.index_select(0, &rows), factor);
        }
    }
    Ok(heads)
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
fn best(accuracies: &[f64]) -> usize {
    (0..accuracies.len()).rev().max_by(|&a, &b| accuracies[a].total_cmp(&accuracies[b])).expect("at least one setting")
}

fn edge_warning(what: &str, chosen: usize, values: &[f64]) -> Option<String> {
    let edge = values.len() > 1 && (chosen == 0 || chosen + 1 == values.len());
    edge.then(|| format!("the best {what} is {}, at the edge of the sweep: widen it", values[chosen]))
}

/// Several learning rates at once; a held-out part of the training split chooses one, which then learns from all of it.
pub fn sweep(p: &Sweep, train: &Features, test: &Features, classes: i64, seed: u64, common: &Common) -> Result<Probe> {
    let (kept, held) = held_out(&train.y, p.holdout, seed)?;
    let held = train.rows(&held);
    let heads = train_heads(p, &p.lrs, &train.rows(&kept), classes, seed, common)?;
    let accuracies: Vec<f64> = heads.scores(&held.x.to_device(common.device)).iter().map(|s| Score::new(s, &held.y).top1()).collect();
    let chosen = best(&accuracies);
    let refit = train_heads(p, &p.lrs[chosen..=chosen], train, classes, seed, common)?;
    let score = Score::new(&refit.scores(&test.x.to_device(common.device)).remove(0), &test.y);
    let warnings = edge_warning("learning rate", chosen, &p.lrs).into_iter().collect();
    Ok(Probe { score, warnings, chosen: json!({ "lr": p.lrs[chosen], "holdout_top1": accuracies, "lrs": p.lrs }) })
}

/// Logistic regression with C chosen on a held-out part of the training split.
pub fn lbfgs(p: &Lbfgs, train: &Features, test: &Features, classes: i64, seed: u64) -> Result<Probe> {
    let (kept, held) = held_out(&train.y, p.holdout, seed)?;
    let (part, held) = (train.rows(&kept), train.rows(&held));
    if p.engine == Engine::Linfa {
        return linfa(p, train, &part, &held, test, classes);
    }
    let kind = if p.precision == Precision::F64 { Kind::Double } else { Kind::Float };
    let options = |c: f64| FitOptions { c, tolerance: p.tolerance, max_iterations: p.max_iterations };
    let (x, y, held_x) = (part.x.to_kind(kind), part.labels(), held.x.to_kind(kind));
    let mut accuracies = vec![];
    let mut loose = vec![];
    let mut last = None;
    // From the strongest penalty to the weakest, each from where the one before ended.
    for &c in &p.cs {
        let fitted = logreg::fit(&x, &y, classes, options(c), last.as_ref())?;
        accuracies.push(Score::new(&fitted.classifier.scores(&held_x), &held.y).top1());
        if !fitted.converged {
            loose.push(c);
        }
        last = Some(fitted.classifier);
    }
    let chosen = best(&accuracies);
    let fitted = logreg::fit(&train.x.to_kind(kind), &train.labels(), classes, options(p.cs[chosen]), None)?;
    let mut warnings: Vec<String> = edge_warning("C", chosen, &p.cs).into_iter().collect();
    if !fitted.converged {
        warnings.push(format!(
            "not converged: gradient {:.1e} after {} iterations with C = {}",
            fitted.gradient, fitted.iterations, p.cs[chosen]
        ));
    }
    if !loose.is_empty() {
        warnings.push(format!("not converged in the sweep at C = {loose:?}"));
    }
    let score = Score::new(&fitted.classifier.scores(&test.x.to_kind(kind)), &test.y);
    let chosen = json!({ "c": p.cs[chosen], "cs": p.cs, "holdout_top1": accuracies, "loss": fitted.loss, "iterations": fitted.iterations });
    Ok(Probe { score, warnings, chosen })
}

fn linfa(p: &Lbfgs, train: &Features, part: &Features, held: &Features, test: &Features, classes: i64) -> Result<Probe> {
    let array = |f: &Features| -> ndarray::Array2<f64> {
        let flat = Vec::<f64>::try_from(f.x.to_kind(Kind::Double).contiguous().view(-1)).expect("a vector of doubles");
        ndarray::Array2::from_shape_vec((f.y.len(), f.x.size()[1] as usize), flat).expect("rows times columns")
    };
    let options = |c: f64| FitOptions { c, tolerance: p.tolerance, max_iterations: p.max_iterations };
    let right = |predicted: &[i64], y: &[i64]| 100.0 * predicted.iter().zip(y).filter(|(a, b)| a == b).count() as f64 / y.len() as f64;
    let (x, held_x) = (array(part), array(held));
    let mut accuracies = vec![];
    for &c in &p.cs {
        accuracies.push(right(&logreg::linfa(&x, &part.y, &held_x, options(c))?, &held.y));
    }
    let chosen = best(&accuracies);
    let predicted = logreg::linfa(&array(train), &train.y, &array(test), options(p.cs[chosen]))?;
    // linfa gives the class only: the five best are the one.
    let one_hot = Tensor::from_slice(&predicted).one_hot(classes).to_kind(Kind::Float);
    let mut score = Score::new(&one_hot, &test.y);
    score.in_five = score.right();
    let warnings = edge_warning("C", chosen, &p.cs).into_iter().collect();
    Ok(Probe { score, warnings, chosen: json!({ "c": p.cs[chosen], "cs": p.cs, "holdout_top1": accuracies, "engine": "linfa" }) })
}

fn print(records: &[Record], target: &Target, common: &Common) -> Result<()> {
    if common.json {
        common.print_json(&record::json(records, common));
        return Ok(());
    }
    let mut shown = Table::new("", &["network", "method", "top-1", "95 % interval", "top-5", "seeds", "mean ± std"]);
    let measured: Vec<(Vec<String>, f64)> = records.iter().map(|r| (vec![r.subject.clone()], r.value)).collect();
    for group in table::group(&measured)? {
        let own: Vec<&Record> = records.iter().filter(|r| r.subject == group.keys[0]).collect();
        let first = own[0];
        let (low, high) = (first.ci_low.unwrap_or(f64::NAN), first.ci_high.unwrap_or(f64::NAN));
        shown.push(vec![
            Cell::text(&first.subject),
            Cell::text(&first.method),
            Cell::Score(first.value, 2),
            Cell::text(format!("{low:.2} to {high:.2}")),
            Cell::score(first.top5),
            Cell::Count(own.len() as i64),
            Cell::text(group.cell().shown()),
        ]);
    }
    println!(
        "linear probe -> {}, {} training and {} test images, split {}",
        target.dataset.name,
        target.dataset.train.len(),
        target.dataset.test.len(),
        &target.hash[..16]
    );
    print!("{}", shown.plain());
    Ok(())
}
