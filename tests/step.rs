//! The training step: what it does to weights, what it refuses, what it reports.

mod support;

use mcl::data::Batch;
use mcl::error::Error;
use mcl::methods::Clock;
use mcl::nets::{self, LossScale};
use mcl::system::device::Precision;
use mcl::train::step::Engine;
use support::{batch_of, engine_of};
use tch::{Kind, Tensor};

fn engine(method: &str, options: &str) -> Engine {
    engine_of(&["resnet8", "resnet8"], method, options)
}

fn batch(from: i64, to: i64) -> Batch {
    batch_of(16, from, to)
}

fn clock(step: usize) -> Clock {
    Clock { epoch: 0, batch: step, step, lr: 0.05, seed: 7 }
}

fn total(report: &mcl::train::step::StepReport) -> f64 {
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
        Err(Error::Diverged { step: 1, what }) => {
            assert_eq!(what, "the term `task` of network 1 is NaN; no weight was changed by this step")
        }
        other => panic!("expected a divergence, got {:?}", other.map(|_| ())),
    }
    let after: std::collections::HashMap<String, Tensor> = engine.state().into_iter().collect();
    for (name, old) in before {
        assert!(old.isclose(&after[&name], 0.0, 0.0, true).all().int64_value(&[]) != 0, "{name} moved");
    }
}

/// The networks step, then the meta step fails: the message says so, and it is so.
#[test]
fn a_meta_step_that_diverges_says_that_the_networks_had_moved() {
    let mut engine = engine("l_mcl", "meta_every = 1");
    let before: Vec<Tensor> = engine.theta.tensors().iter().map(Tensor::copy).collect();
    let pi: Vec<(String, Tensor)> =
        engine.state().into_iter().filter(|(n, _)| n.starts_with("method.")).map(|(n, t)| (n, t.copy())).collect();
    assert!(!pi.is_empty());
    // The step itself is finite; K steps of this length from there are not.
    match engine.step(&[batch(0, 8)], Clock { lr: 1e30, ..clock(0) }, None) {
        Err(Error::Diverged { step: 0, what }) => assert_eq!(
            what,
            "the meta step's gradient for pi is not finite, and pi was not changed; the networks had already taken this step"
        ),
        other => panic!("expected a divergence, got {:?}", other.map(|_| ())),
    }
    assert!(engine.theta.tensors().iter().zip(&before).any(|(now, old)| now != old));
    let after: std::collections::HashMap<String, Tensor> = engine.state().into_iter().collect();
    for (name, old) in pi {
        assert_eq!(old, after[&name], "{name} moved");
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

/// Two steps, the first with a meta step: every weight of every network moves and stays finite, and a lambda is noted for every pair of
/// layers of different networks, inside the sigmoid of a cosine.
fn two_steps(archs: &[&str], side: i64, options: &str) {
    let mut engine = engine_of(archs, "l_mcl", options);
    let before: Vec<Tensor> = engine.theta.tensors().iter().map(|t| t.detach().copy()).collect();
    let pi =
        |e: &Engine| -> Vec<Tensor> { e.method.state().into_iter().filter(|(n, _)| n.starts_with("pi.")).map(|(_, t)| t.copy()).collect() };
    let pi_before = pi(&engine);
    for step in 0..2 {
        let report = engine.step(&[batch_of(side, 0, 8)], clock(step), None).unwrap();
        assert!(total(&report).is_finite() && report.grad_norm.as_ref().unwrap().double_value(&[]) > 0.0);
        assert_eq!(report.meta_seconds.is_some(), step == 0);
        let lambdas: Vec<f64> = report.notes.iter().filter(|(n, _)| n.starts_with("lambda.")).map(|(_, t)| t.double_value(&[])).collect();
        let depths: Vec<usize> = archs.iter().map(|name| nets::find(name).unwrap().depth).collect();
        let pairs: usize =
            (0..depths.len()).flat_map(|a| (a + 1..depths.len()).map(move |b| (a, b))).map(|(a, b)| depths[a] * depths[b]).sum();
        assert_eq!(lambdas.len(), pairs);
        let (low, high) = (1.0 / (1.0 + 1f64.exp()), 1.0 / (1.0 + (-1f64).exp()));
        assert!(lambdas.iter().all(|l| (low..=high).contains(l)), "{lambdas:?}");
    }
    for ((name, now), old) in engine.theta.vars.iter().zip(before) {
        assert!(now.isfinite().all().int64_value(&[]) != 0, "{name} is not finite");
        assert!((now.detach() - old).abs().max().double_value(&[]) > 0.0, "{name} stood still");
    }
    assert!(!pi_before.is_empty() && pi(&engine).iter().zip(&pi_before).any(|(now, old)| now != old), "the meta-network stood still");
}

#[test]
fn shufflenet_learns_with_resnet110() {
    two_steps(&["shufflenet_v2_x1_0_cifar", "resnet110"], 32, "hvp = \"difference\"");
}

#[test]
fn wide_resnet_learns_with_resnet20() {
    two_steps(&["wrn_16_2", "resnet20"], 32, "");
}

#[test]
fn three_networks_learn_together() {
    two_steps(&["resnet8", "resnet20", "wrn_16_2"], 32, "hvp = \"difference\"");
}

#[test]
fn two_swin_t_learn_on_small_images() {
    two_steps(&["swin_t", "swin_t"], 32, "hvp = \"difference\"");
}

/// The change of every weight in one step, as one vector; and the loss.
fn one_step(precision: Precision) -> (Tensor, f64) {
    let mut engine = engine("l_mcl", "");
    engine.cohort.precision = precision;
    // Small enough that nothing overflows at once.
    engine.loss_scale = (precision == Precision::F16).then(|| LossScale { state: Tensor::from_slice(&[128f64, 0.0]) });
    let flat = |e: &Engine| Tensor::cat(&e.theta.tensors().iter().map(|t| t.detach().flatten(0, -1).copy()).collect::<Vec<_>>(), 0);
    let before = flat(&engine);
    let report = engine.step(&[batch(0, 8)], clock(1), None).unwrap();
    (flat(&engine) - before, total(&report))
}

#[test]
fn half_the_bits_step_in_the_same_direction() {
    let (whole, loss) = one_step(Precision::F32);
    for (precision, near) in [(Precision::Bf16, 0.05), (Precision::F16, 0.01)] {
        let (step, rounded) = one_step(precision);
        assert_ne!(rounded, loss, "{precision:?} changed nothing");
        assert!((rounded / loss - 1.0).abs() < near, "{precision:?}: loss {rounded} instead of {loss}");
        let cosine = ((&step * &whole).sum(None) / (step.norm() * whole.norm())).double_value(&[]);
        assert!(cosine > 0.95, "{precision:?}: cosine {cosine}");
        assert_eq!(step.kind(), Kind::Float);
    }
}

#[test]
fn an_overflow_in_f16_skips_the_step_and_halves_the_scale() {
    let mut engine = engine("baseline", "");
    engine.cohort.precision = Precision::F16;
    engine.loss_scale = Some(LossScale::default());
    let weights = |e: &Engine| -> Vec<Tensor> { e.theta.tensors().iter().map(|t| t.detach().copy()).collect() };
    engine.loss_scale.as_mut().unwrap().state.copy_(&Tensor::from_slice(&[1e30f64, 7.0]));
    let before = weights(&engine);
    let report = engine.step(&[batch(0, 8)], clock(1), None).unwrap();
    assert!(report.grad_norm.is_none() && total(&report).is_finite());
    assert_eq!(weights(&engine), before);
    let (_, kept) = engine.state().into_iter().find(|(name, _)| name == "loss_scale").unwrap();
    assert_eq!(Vec::<f64>::try_from(&kept).unwrap(), [5e29, 0.0]);
    kept.shallow_clone().copy_(&Tensor::from_slice(&[1024f64, 1999.0]));
    assert!(engine.step(&[batch(0, 8)], clock(1), None).unwrap().grad_norm.is_some());
    assert_ne!(weights(&engine), before);
    assert_eq!(engine.loss_scale.as_ref().unwrap().scale(), 2048.0, "doubled after 2000 good steps");
}

/// Mixed images alone are run where no term asks about the unmixed ones: running statistics move once a step, not twice.
#[test]
fn mixing_costs_a_second_pass_only_where_a_method_asks_for_it() {
    for (method, options, passes) in [("baseline", "", 1), ("dml", "", 1), ("mcl", "", 2), ("l_mcl", "meta_every = 9", 2)] {
        let mut engine = engine(method, options);
        engine.mix = Some(mcl::data::Mix { mixup: 0.8, cutmix: 0.0 });
        // Not the first batch of an epoch, which a meta step follows.
        engine.step(&[batch(0, 8)], clock(1), None).unwrap();
        let counted: Vec<i64> =
            engine.state().iter().filter(|(name, _)| name.ends_with("num_batches_tracked")).map(|(_, t)| t.int64_value(&[])).collect();
        assert!(!counted.is_empty() && counted.iter().all(|n| *n == passes), "{method}: {counted:?}");
    }
}
