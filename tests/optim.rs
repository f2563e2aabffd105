//! Optimizers and schedules against torch.optim (torch 2.13, f64, three steps from the same start).
//!
//! ```python
//! p = torch.tensor([[1., -2.], [.5, 3.]]); b = torch.tensor([.3, -.7])
//! loss = (p**2 * torch.tensor([[1., 2.], [3., 4.]])).sum() + (b**3).sum() + (p.sum(0) * b).sum()
//! ```

use mcl::optim::{Optimizer, Rule, Schedule, grads};
use mcl::params::Params;
use tch::{Kind, Tensor};

fn three_steps(rule: Rule) -> Vec<f64> {
    let p = Tensor::from_slice(&[1.0f64, -2.0, 0.5, 3.0]).view([2, 2]).set_requires_grad(true);
    let b = Tensor::from_slice(&[0.3f64, -0.7]).set_requires_grad(true);
    let scale = Tensor::from_slice(&[1.0f64, 2.0, 3.0, 4.0]).view([2, 2]);
    let params = Params { vars: vec![("a.weight".into(), p.shallow_clone()), ("b.bias".into(), b.shallow_clone())], buffers: vec![] };
    let mut optimizer = Optimizer::new(rule, &params);
    for _ in 0..3 {
        let loss = (p.square() * &scale).sum(Kind::Double)
            + b.pow_tensor_scalar(3).sum(Kind::Double)
            + (p.sum_dim_intlist(0, false, Kind::Double) * &b).sum(Kind::Double);
        optimizer.step(&params, &grads(&loss, &params.tensors(), false), 0.1);
    }
    let all = Tensor::cat(&[p.detach().view([-1]), b.detach()], 0);
    Vec::<f64>::try_from(all).unwrap()
}

fn assert_close(found: &[f64], expected: &[f64]) {
    for (f, e) in found.iter().zip(expected) {
        assert!((f - e).abs() < 1e-11, "{found:?}\n{expected:?}");
    }
}

#[test]
fn sgd_with_nesterov_momentum_and_weight_decay() {
    let found = three_steps(Rule::Sgd { momentum: 0.9, weight_decay: 5e-4, nesterov: true });
    assert_close(&found, &[-0.100875684844, 1.387961313452, -0.091883907573, 0.145139296482, -0.453532218736, -4.034747347411]);
}

#[test]
fn sgd_with_plain_momentum_and_without() {
    let found = three_steps(Rule::Sgd { momentum: 0.9, weight_decay: 0.01, nesterov: false });
    assert_close(&found, &[-0.0087146323, 1.4595901227, -0.4534883318, -2.5190414823, -0.388191076986, -2.199533705309]);
    let found = three_steps(Rule::Sgd { momentum: 0.0, weight_decay: 0.0, nesterov: false });
    assert_close(&found, &[0.48051387, -0.23297573, 0.01983387, 0.16274427, -0.041658206559, -1.545282675947]);
}

#[test]
fn adam_couples_the_decay_and_adamw_spares_vectors() {
    let found = three_steps(Rule::Adam { betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.1 });
    assert_close(&found, &[0.702334147782, -1.700401688074, 0.20541376301, 2.700453527475, 0.004371857478, -1.000328183853]);
    let found = three_steps(Rule::AdamW { betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.05 });
    assert_close(&found, &[0.689061027591, -1.672106064484, 0.199651310755, 2.657249265274, 0.004437034913, -1.000341850346]);
}

/// The cosine of the released code: 0.05 (1 + cos(pi e / 300)) for a start of 0.1; its last epoch is 2.7415e-6, never 0.
#[test]
fn schedules() {
    let lr = |schedule: &Schedule, epoch, epochs| schedule.lr(0.1, 0, epoch, epochs, 0, 390);
    assert_eq!(lr(&Schedule::Cosine, 0, 300), 0.1);
    assert!((lr(&Schedule::Cosine, 150, 300) - 0.05).abs() < 1e-15);
    assert!((lr(&Schedule::Cosine, 299, 300) - 2.7415e-6).abs() < 1e-10);
    let steps = Schedule::Steps(vec![30, 60]);
    for (epoch, expected) in [(0, 0.1), (29, 0.1), (30, 0.01), (59, 0.01), (60, 0.001), (89, 0.001)] {
        assert!((lr(&steps, epoch, 90) - expected).abs() < 1e-15, "epoch {epoch}");
    }
    // Warm-up: linear by batch to the base, then the schedule from its start.
    assert!((Schedule::Cosine.lr(1.0, 2, 0, 10, 0, 4) - 0.125).abs() < 1e-15);
    assert!((Schedule::Cosine.lr(1.0, 2, 1, 10, 3, 4) - 1.0).abs() < 1e-15);
    assert_eq!(Schedule::Cosine.lr(1.0, 2, 2, 10, 0, 4), 1.0);
}
