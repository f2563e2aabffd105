//! The training step: what it does to weights, what it refuses, what it reports.

use mcl::cohort::Cohort;
use mcl::data::Batch;
use mcl::error::Error;
use mcl::methods::{self, Clock, Task};
use mcl::nets;
use mcl::optim::Rule;
use mcl::step::Engine;
use tch::{Device, Kind, Tensor};

const RULE: Rule = Rule::Sgd { momentum: 0.9, weight_decay: 5e-4, nesterov: true };

fn engine(method: &str, options: &str) -> Engine {
    tch::set_num_threads(1);
    let archs = vec![nets::find("resnet8").unwrap(); 2];
    let labels: Vec<i64> = (0..40).map(|i| i % 4).collect();
    let task = Task {
        archs: &archs,
        classes: 4,
        train_labels: &labels,
        batch: 8,
        rule: RULE,
        label_smoothing: 0.0,
        holdout: 0,
        epochs: 2,
        device: Device::Cpu,
        kind: Kind::Float,
        seed: 7,
    };
    let method = (methods::find(method).unwrap().build)(&task, options.parse().unwrap()).unwrap();
    let needs = method.needs();
    let cohort = Cohort::new(&archs, 4, needs.branches, needs.shared_stages, 1, Device::Cpu, Kind::Float, 7);
    Engine::new(cohort, method, RULE)
}

fn batch(from: i64, to: i64) -> Batch {
    let images = (Tensor::arange(8 * 3 * 16 * 16, (Kind::Float, Device::Cpu)) * 0.37).sin().view([8, 3, 16, 16]);
    let labels = Tensor::from_slice(&[0i64, 0, 1, 1, 2, 2, 3, 3]);
    let index = Tensor::from_slice(&[0i64, 4, 1, 5, 2, 6, 3, 7]);
    let rows = |t: &Tensor| t.slice(0, from, to, 1);
    Batch { views: vec![rows(&images)], labels: rows(&labels), index: rows(&index), noise: 1 }
}

fn clock(step: usize) -> Clock {
    Clock { epoch: 0, batch: step, step, lr: 0.05, seed: 7 }
}

fn total(report: &mcl::step::StepReport) -> f64 {
    report.terms.iter().map(|t| t.weight * t.value.double_value(&[])).sum()
}

#[test]
fn steps_on_one_batch_lower_its_loss() {
    let mut engine = engine("baseline", "");
    let first = total(&engine.step(&[batch(0, 8)], clock(0), None).unwrap());
    let mut last = first;
    for step in 1..12 {
        last = total(&engine.step(&[batch(0, 8)], clock(step), Some(5.0)).unwrap());
    }
    assert!(last < 0.5 * first, "loss went from {first} to {last}");
}

#[test]
fn a_nan_weight_is_named_and_no_weight_moves() {
    let mut engine = engine("baseline", "");
    engine.step(&[batch(0, 8)], clock(0), None).unwrap();
    let (_, weight) = engine.theta.vars.iter().find(|(n, _)| n == "peer.1.net.fc.weight").unwrap();
    let _ = tch::no_grad(|| weight.get(0).get(0).fill_(f64::NAN));
    let before: Vec<(String, Tensor)> =
        engine.state().into_iter().filter(|(n, _)| !n.contains("running") && !n.contains("tracked")).map(|(n, t)| (n, t.copy())).collect();
    match engine.step(&[batch(0, 8)], clock(1), None) {
        Err(Error::Diverged { step: 1, what }) => assert_eq!(what, "the term `task` of network 1 is NaN"),
        other => panic!("expected a divergence, got {:?}", other.map(|_| ())),
    }
    let after: std::collections::HashMap<String, Tensor> = engine.state().into_iter().collect();
    for (name, old) in before {
        assert!(old.isclose(&after[&name], 0.0, 0.0, true).all().int64_value(&[]) != 0, "{name} moved");
    }
}

#[test]
fn accumulated_gradients_are_the_mean_of_the_parts() {
    // One network in eval-like conditions is not available (BatchNorm sees other batches), so the linear head's bias is compared:
    // its gradient is the mean of the parts' gradients, which two one-batch engines give.
    let bias = |batches: &[Batch]| {
        let mut engine = engine("baseline", "");
        let find = |e: &Engine| e.theta.vars.iter().find(|(n, _)| n == "peer.0.net.fc.bias").unwrap().1.copy();
        let before = find(&engine);
        engine.step(batches, clock(0), None).unwrap();
        find(&engine) - before
    };
    let (left, right) = (bias(&[batch(0, 4)]), bias(&[batch(4, 8)]));
    let both = bias(&[batch(0, 4), batch(4, 8)]);
    let mean = (left + right) / 2;
    let error = (&both - mean).abs().max().double_value(&[]);
    assert!(error < 1e-7, "{error}");
}

#[test]
fn names_of_the_state_are_unique() {
    let mut names: Vec<String> = engine("baseline", "").state().into_iter().map(|(n, _)| n).collect();
    let count = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), count);
}
