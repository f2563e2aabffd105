//! What the tests of methods share: a task on four classes, engines on ResNet-8, answers made by hand, and comparisons.

use std::collections::HashMap;

use mcl::data::Batch;
use mcl::losses::terms::Terms;
use mcl::methods::{self, Clock, Group, Method, Task, Views};
use mcl::nets::layers::Mode;
use mcl::nets::{self, Arch, Outputs};
use mcl::recipe::{Data, Recipe, Train};
use mcl::train::step::{Engine, StepReport};
use tch::{Device, Kind, Tensor};

pub const CLASSES: i64 = 4;

/// What every method is tried with: its name, options, and the sizes of cohort. Each method of `METHODS` has a line at least.
pub const TRIALS: &[(&str, &str, &[usize])] = &[
    ("baseline", "", &[1, 2]),
    ("dml", "", &[2, 3]),
    ("one", "", &[2, 3]),
    ("okddip", "", &[3]),
    ("okddip", "branch = false", &[3]),
    ("kdcl", "", &[2, 3]),
    ("kdcl", "teacher = 'naive'", &[2, 3]),
    ("kdcl", "teacher = 'minlogit'", &[2, 3]),
    ("kdcl", "teacher = 'linear'", &[2, 3]),
    ("afd", "", &[2, 3]),
    ("pcl", "", &[2, 3]),
    ("pcl", "branch = false", &[2, 3]),
    ("ffsd", "", &[2, 3]),
    ("ckd_mkt", "pretrain_epochs = 1", &[2, 3]),
    ("ckd_mkt", "pretrain_epochs = 0\ngamma = 0.0", &[2]),
    ("mcl", "", &[2, 3]),
    ("mcl", "branch = true", &[3]),
    ("mcl", "logit = 'ensemble'", &[2, 3]),
    ("mcl", "logit = 'dml'", &[2]),
    ("mcl", "mode = 'reference'\nlogit = 'ensemble'", &[2, 3]),
    ("mcl", "mining = 'memory'\nnegatives = 20", &[2, 3]),
    ("mcl", "mode = 'reference'\nmining = 'memory'\nnegatives = 20", &[2]),
    ("l_mcl", "", &[2, 3]),
    ("l_mcl", "mode = 'reference'\nmining = 'memory'\nnegatives = 20", &[2]),
    ("l_mcl", "mining = 'queue'\nqueue_length = 20\nnegatives = 5\nhvp = 'difference'", &[2]),
];

pub fn archs(names: &[&str]) -> Vec<&'static Arch> {
    names.iter().map(|name| nets::find(name).unwrap()).collect()
}

/// A task on four classes of ten images, in double precision unless networks run.
pub fn task<'a>(archs: &'a [&'static Arch], labels: &'a [i64], kind: Kind, seed: u64) -> Task<'a> {
    let train = Train { batch: 8, seed, ..Train::default() };
    let recipe = Recipe { train, data: Data { holdout: 5, ..Data::default() }, ..Recipe::default() };
    Task { kind, ..Task::new(&recipe, archs, CLASSES, labels, Device::Cpu) }
}

pub fn labels() -> Vec<i64> {
    (0..40).map(|i| i % CLASSES).collect()
}

pub fn try_build(name: &str, options: &str, archs: &[&'static Arch], kind: Kind, seed: u64) -> mcl::error::Result<Box<dyn Method>> {
    tch::set_num_threads(1);
    (methods::find(name).unwrap().build)(&task(archs, &labels(), kind, seed), options.parse().unwrap())
}

/// A method by itself, in double precision, for M networks of resnet8.
pub fn method(name: &str, options: &str, count: usize) -> Box<dyn Method> {
    try_build(name, options, &archs(&vec!["resnet8"; count]), Kind::Double, 1).unwrap()
}

pub fn engine_on(name: &str, options: &str, names: &[&str], classes: i64, seed: u64) -> Engine {
    tch::set_num_threads(1);
    let archs = archs(names);
    let labels = labels();
    let task = Task { classes, ..task(&archs, &labels, Kind::Float, seed) };
    let method = (methods::find(name).unwrap().build)(&task, options.parse().unwrap()).unwrap();
    Engine::of(&task, method)
}

pub fn engine(name: &str, options: &str, count: usize, seed: u64) -> Engine {
    engine_on(name, options, &vec!["resnet8"; count], CLASSES, seed)
}

pub fn clock(epoch: usize, step: usize) -> Clock {
    Clock { epoch, batch: step, step, lr: 0.05, seed: 7 }
}

/// Class pairs of 16 x 16 images, other ones for each step and view.
pub fn batch(step: usize, views: usize) -> Batch {
    let wave = |v: usize| {
        (Tensor::arange(8 * 3 * 16 * 16, (Kind::Float, Device::Cpu)) * (0.37 + 0.11 * (step * 3 + v) as f64)).sin().view([8, 3, 16, 16])
    };
    let (labels, index) = ([0i64, 0, 1, 1, 2, 2, 3, 3], [0i64, 4, 1, 5, 2, 6, 3, 7]);
    Batch {
        views: (0..views).map(wave).collect(),
        labels: Tensor::from_slice(&labels),
        index: Tensor::from_slice(&index),
        noise: step as u64,
    }
}

pub fn batch_for(engine: &Engine, step: usize) -> Batch {
    let per_peer = engine.method.needs().views == Views::PerPeer;
    batch(step, if per_peer { engine.cohort.peers.len() } else { 1 })
}

pub fn step(engine: &mut Engine, epoch: usize, step: usize) -> StepReport {
    let batch = batch_for(engine, step);
    engine.step(&[batch], clock(epoch, step), None).unwrap()
}

pub fn rows(values: &[&[f64]]) -> Tensor {
    Tensor::from_slice2(values)
}

/// An answer made by hand: logits with gradients, features of a given width, and maps that pool to `map`.
pub fn answer(logits: &Tensor) -> Outputs {
    let size = logits.size()[0];
    let map = Tensor::zeros([size, 2, 1, 1], (logits.kind(), Device::Cpu));
    Outputs {
        maps: vec![map.shallow_clone(), map.shallow_clone(), map.shallow_clone()],
        pre_pool: map,
        feats: vec![Tensor::zeros([size, 64], (logits.kind(), Device::Cpu))],
        logits: vec![logits.shallow_clone()],
    }
}

/// Logits of three networks on two samples of three classes. Numbers that tests expect of them were computed with torch 2.13 in float64
/// from the published formulas, or by the official code where there is one.
pub fn example() -> (Vec<Tensor>, Tensor) {
    let z1 = rows(&[&[2.0, 0.5, -1.0], &[0.1, 0.2, 0.3]]);
    let z2 = rows(&[&[1.0, 1.5, 0.0], &[-0.4, 0.9, 0.2]]);
    let z3 = rows(&[&[0.3, -0.2, 0.8], &[1.1, 0.4, -0.6]]);
    (vec![z1, z2, z3].into_iter().map(|z| z.set_requires_grad(true)).collect(), Tensor::from_slice(&[0i64, 2]))
}

pub fn labelled(labels: &Tensor) -> Batch {
    Batch { views: vec![], labels: labels.shallow_clone(), index: labels.shallow_clone(), noise: 0 }
}

pub fn value(t: &Tensor) -> f64 {
    t.double_value(&[])
}

pub fn values(t: &Tensor) -> Vec<f64> {
    Vec::<f64>::try_from(t.flatten(0, -1).to_kind(Kind::Double)).unwrap()
}

#[track_caller]
pub fn close(got: f64, wanted: f64, tolerance: f64) {
    assert!((got - wanted).abs() <= tolerance, "got {got}, wanted {wanted}");
}

#[track_caller]
pub fn all_close(got: &Tensor, wanted: &[f64], tolerance: f64) {
    let got = values(got);
    assert!(got.len() == wanted.len() && got.iter().zip(wanted).all(|(g, w)| (g - w).abs() <= tolerance), "got {got:?}, wanted {wanted:?}");
}

pub fn same(a: &Tensor, b: &Tensor) -> bool {
    a.size() == b.size() && a.isclose(b, 0.0, 0.0, true).all().int64_value(&[]) != 0
}

pub fn copies(engine: &Engine) -> HashMap<String, Tensor> {
    engine.state().into_iter().map(|(name, t)| (name, t.copy())).collect()
}

/// Is the gradient of `loss` for `var` there and not zero?
pub fn reaches(loss: &Tensor, var: &Tensor) -> bool {
    let grad = Tensor::run_backward(&[loss], std::slice::from_ref(var), true, false).remove(0);
    grad.defined() && value(&grad.abs().max()) > 0.0
}

pub fn trained(engine: &Engine) -> i64 {
    engine.theta.count() + engine.groups.iter().filter(|(g, _)| !g.apart).map(|(g, _)| g.params.count()).sum::<i64>()
}

pub fn holdout() -> Vec<mcl::error::Result<Batch>> {
    vec![Ok(batch(90, 1)), Ok(batch(91, 1))]
}

pub fn begin(engine: &mut Engine, epoch: usize, at: usize) {
    engine.epoch_start(Some(&mut holdout().into_iter()), clock(epoch, at)).unwrap();
}

/// The forward pass of an engine on a batch and its losses, with their graph.
pub fn evaluated(engine: &mut Engine, at: Clock) -> (Vec<Outputs>, Terms, Batch) {
    let batch = batch_for(engine, 0);
    engine.method.prepare(&batch, at).unwrap();
    let outs = engine.cohort.forward(&batch, Mode::Train);
    let terms = engine.method.losses(&outs, &batch, at).unwrap();
    (outs, terms, batch)
}

pub fn row<'a>(terms: &'a Terms, name: &str, peer: Option<usize>) -> &'a Tensor {
    &terms.rows.iter().find(|r| r.name == name && r.peer == peer).unwrap_or_else(|| panic!("no row {name} of {peer:?}")).value
}

pub fn group<'a>(engine: &'a Engine, name: &str) -> &'a Group {
    &engine.groups.iter().find(|(g, _)| g.name == name).unwrap().0
}

/// Rows brought to length 1, by hand: the tests do not use what they judge.
pub fn unit(t: &Tensor) -> Tensor {
    t / t.norm_scalaropt_dim(2.0, [-1i64].as_slice(), true)
}
