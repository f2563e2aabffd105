//! Reverse-HG against golden numbers and finite differences, and what a meta step leaves behind.

mod support;

use mcl::commands::selftest::hypergradient_error;
use mcl::data::Batch;
use mcl::methods::l_mcl::{LMcl, Options, Setting, Shape};
use mcl::methods::{Clock, Method};
use mcl::optim::reverse_hg::{Adjoint, Buffers, Constants, Hvp, Unroll, hypergradient};
use mcl::params::Params;
use mcl::system::ranks::Ranks;
use mcl::train::step::Engine;
use support::{RULE, batch_of, engine_of};
use tch::{Device, Kind, Tensor};

/// v = (1, 2), pi = 0.5; inner 0.5 pi (v1 - 3)^2 + 0.5 (v2 + pi)^2 + 0.1 pi (v1 v2)^2; outer 0.5 (v1^2 + 2 v2^2).
struct Toy {
    theta: Params,
    pi: Tensor,
}

impl Toy {
    fn new() -> Toy {
        let leaf = |values: &[f64]| Tensor::from_slice(values).set_requires_grad(true);
        Toy { theta: Params { vars: vec![("v".into(), leaf(&[1.0, 2.0]))], buffers: vec![] }, pi: leaf(&[0.5]) }
    }

    fn objective(&self, k: usize) -> Tensor {
        let v = &self.theta.vars[0].1;
        let (v1, v2) = (v.get(0), v.get(1));
        if k >= 2 {
            return (v1.square() + v2.square() * 2.0) * 0.5;
        }
        let pi = self.pi.get(0);
        &pi * (&v1 - 3.0).square() * 0.5 + (&v2 + &pi).square() * 0.5 + &pi * (v1 * v2).square() * 0.1
    }

    /// d pi, by these products and adjoints.
    fn gradient(&self, momentum: f64, weight_decay: f64, hvp: Hvp, adjoint: Adjoint) -> f64 {
        let unroll = Unroll { steps: 3, lr: 0.1, momentum, weight_decay, hvp, adjoint, buffers: Buffers::Restored, ranks: Ranks::ALONE };
        hypergradient(&self.theta, &[self.pi.shallow_clone()], unroll, &mut |k, _| Ok(self.objective(k))).unwrap()[0].double_value(&[0])
    }

    /// theta_3 and the outer objective there, by hand.
    fn outer(pi: f64, momentum: f64, weight_decay: f64) -> ([f64; 2], f64) {
        let (mut v, mut velocity) = ([1.0f64, 2.0], [0.0f64; 2]);
        for k in 0..3 {
            let g = if k == 2 {
                [v[0], 2.0 * v[1]]
            } else {
                [pi * (v[0] - 3.0) + 0.2 * pi * v[0] * v[1] * v[1], v[1] + pi + 0.2 * pi * v[0] * v[0] * v[1]]
            };
            for i in 0..2 {
                velocity[i] = momentum * velocity[i] + g[i] + weight_decay * v[i];
            }
            for i in 0..2 {
                v[i] -= 0.1 * velocity[i];
            }
        }
        (v, 0.5 * (v[0] * v[0] + 2.0 * v[1] * v[1]))
    }
}

/// momentum, weight decay, theta_3, task(theta_3), d pi of the released code, d pi. From running the released optimizer in float64;
/// the last column from the right adjoint, which finite differences confirm below.
const TOY: [(f64, f64, [f64; 2], f64, f64, f64); 5] = [
    (0.0, 0.0, [1.012747734, 1.190049376], 1.929046503679, -0.285423048560, -0.285423048560),
    (0.0, 0.01, [1.0099091171, 1.1857901538], 1.916056501329, -0.283173038518, -0.283173038518),
    (0.9, 0.0, [1.168695468, 0.558754924], 0.995131613556, 0.012988684563, 0.011529971533),
    (0.9, 0.01, [1.1633685036, 0.5503584813], 0.979607595519, 0.020025958243, 0.018734350891),
    (0.9, 5e-4, [1.1684289105, 0.5583346949], 0.994350691043, 0.013341522504, 0.011891245927),
];

#[test]
fn golden_toy_with_both_adjoints() {
    for (momentum, weight_decay, theta, task, released, exact) in TOY {
        let toy = Toy::new();
        let near = |actual: f64, expected: f64, tolerance: f64, what: &str| {
            assert!(
                (actual - expected).abs() < tolerance,
                "momentum {momentum}, weight decay {weight_decay}: {what} is {actual}, not {expected}"
            )
        };
        let (v, value) = Toy::outer(0.5, momentum, weight_decay);
        near(v[0], theta[0], 1e-9, "theta_3[0]");
        near(v[1], theta[1], 1e-9, "theta_3[1]");
        near(value, task, 1e-11, "task(theta_3)");
        near(toy.gradient(momentum, weight_decay, Hvp::Exact, Adjoint::Exact), exact, 1e-11, "d pi");
        near(toy.gradient(momentum, weight_decay, Hvp::Exact, Adjoint::Released), released, 1e-11, "the released d pi");
        let h = 1e-4;
        let slope = (Toy::outer(0.5 + h, momentum, weight_decay).1 - Toy::outer(0.5 - h, momentum, weight_decay).1) / (2.0 * h);
        near(exact, slope, 1e-7, "the golden d pi by finite differences");
        // A long step on a polynomial of degree four: the central difference errs by the third derivative.
        near(toy.gradient(momentum, weight_decay, Hvp::Difference, Adjoint::Exact), exact, 2e-3, "d pi by differences");
        assert_eq!(Vec::<f64>::try_from(&toy.theta.vars[0].1).unwrap(), [1.0, 2.0], "theta is left as found");
    }
}

#[test]
fn smooth_cohort_agrees_with_finite_differences() {
    tch::set_num_threads(1);
    for beta in [0.0, 1.0] {
        for (momentum, weight_decay) in [(0.0, 0.0), (0.0, 5e-3), (0.9, 0.0), (0.9, 5e-3)] {
            let error = hypergradient_error(Device::Cpu, beta, momentum, weight_decay).unwrap();
            assert!(error < 1e-6, "beta {beta}, momentum {momentum}, weight decay {weight_decay}: relative error {error:.1e}");
        }
    }
}

#[test]
fn an_objective_that_fails_leaves_theta_as_found() {
    let toy = Toy::new();
    let unroll = Unroll {
        steps: 3,
        lr: 0.1,
        momentum: 0.0,
        weight_decay: 0.0,
        hvp: Hvp::Exact,
        adjoint: Adjoint::Exact,
        buffers: Buffers::Restored,
        ranks: Ranks::ALONE,
    };
    let result = hypergradient(&toy.theta, &[toy.pi.shallow_clone()], unroll, &mut |k, constants| {
        if k == 1 && constants == Constants::Fresh { Err(mcl::error::Error::failed("no")) } else { Ok(toy.objective(k)) }
    });
    assert!(result.is_err());
    assert_eq!(Vec::<f64>::try_from(&toy.theta.vars[0].1).unwrap(), [1.0, 2.0]);
}

fn batch() -> Batch {
    batch_of(16, 0, 8)
}

fn engine(options: &str) -> Engine {
    engine_of(&["resnet8", "resnet8"], "l_mcl", options)
}

fn copies(engine: &Engine) -> Vec<(String, Tensor)> {
    engine.state().into_iter().map(|(n, t)| (n, t.copy())).collect()
}

fn clock(batch: usize) -> Clock {
    Clock { epoch: 0, batch, step: batch, lr: 0.05, seed: 7 }
}

/// The names that differ after a step with a meta step from those after the same step without.
fn moved_by_the_meta_step(options: &str) -> Vec<String> {
    let run = |position: usize| {
        let mut engine = engine(options);
        // Batch 1 has no meta step, batch 0 has; clock.step and the learning rate do not enter the rest.
        let report = engine.step(&[batch()], Clock { batch: position, ..clock(0) }, None).unwrap();
        assert_eq!(report.meta_seconds.is_some(), position == 0);
        copies(&engine)
    };
    let (with, without) = (run(0), run(1));
    with.into_iter().zip(without).filter(|((_, a), (_, b))| !a.equal(b)).map(|((n, _), _)| n).collect()
}

#[test]
fn a_meta_step_moves_pi_and_nothing_else_in_paper_mode() {
    for options in [
        "hvp = \"exact\"",
        "hvp = \"difference\"",
        "inner_momentum = 0.9\ninner_weight_decay = 5e-4",
        "mining = \"memory\"\nnegatives = 5",
        "mining = \"queue\"\nqueue_length = 20\nnegatives = 5",
    ] {
        let moved = moved_by_the_meta_step(options);
        assert!(!moved.is_empty(), "{options}: pi did not move");
        assert!(moved.iter().all(|n| n.starts_with("method.pi.")), "{options}: {moved:?}");
        assert!(moved.iter().any(|n| n == "method.pi.0.2.weight") && moved.iter().any(|n| n == "method.pi.optimizer.steps"), "{moved:?}");
    }
}

#[test]
fn reference_mode_keeps_one_update_of_batchnorm_and_bank() {
    let moved = moved_by_the_meta_step("mode = \"reference\"\nmining = \"memory\"\nnegatives = 5");
    let others: Vec<&String> = moved.iter().filter(|n| !n.starts_with("method.pi.")).collect();
    assert!(
        others.iter().all(|n| n.contains("running_") || n.contains("num_batches_tracked") || n.starts_with("method.bank.")),
        "{others:?}"
    );
    for kind in ["running_mean", "running_var", "num_batches_tracked", "method.bank.0", "method.bank.1"] {
        assert!(others.iter().any(|n| n.contains(kind)), "{kind} is not in {others:?}");
    }
    // One main update and exactly one more.
    let mut engine = engine("mode = \"reference\"");
    engine.step(&[batch()], clock(0), None).unwrap();
    let counts: Vec<i64> =
        engine.state().iter().filter(|(n, _)| n.ends_with("num_batches_tracked")).map(|(_, t)| t.int64_value(&[])).collect();
    assert!(!counts.is_empty() && counts.iter().all(|&c| c == 2), "{counts:?}");
}

#[test]
fn pi_stays_when_lambda_cannot_matter() {
    // Without contrastive terms, or with fixed matching, there is no meta step at all.
    for options in ["matching = \"all_to_all\"", "matching = \"one_to_one\"", "alpha = 0\nbeta = 0"] {
        let mut engine = engine(options);
        assert!(engine.step(&[batch()], clock(0), None).unwrap().meta_seconds.is_none(), "{options}");
    }
}

#[test]
fn meta_steps_come_every_so_many_batches() {
    let shapes = [Shape { stages: 2, width: 4 }; 2];
    let setting = Setting {
        shapes: &shapes,
        train_labels: &[0, 0, 1, 1],
        batch: 4,
        rule: RULE,
        device: Device::Cpu,
        kind: Kind::Float,
        seed: 0,
        ranks: Ranks::ALONE,
    };
    let method = LMcl::new(Options { meta_every: 3, ..Options::default() }, &setting).unwrap();
    let due: Vec<usize> = (0..8).filter(|&i| method.meta_due(clock(i))).collect();
    assert_eq!(due, [0, 3, 6]);
}
