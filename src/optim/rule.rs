//! SGD, Adam and AdamW whose state can be saved and resumed to the bit, which tch's own optimizers cannot.

use tch::Tensor;

use super::lists::{self, Step};
use crate::params::{Named, Params};

/// PyTorch's update rules.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rule {
    /// Weight decay is added to the gradient, for every parameter.
    Sgd {
        /// The share of the last update that stays.
        momentum: f64,
        /// The factor on a parameter that is added to its gradient.
        weight_decay: f64,
        /// Look ahead by one momentum step, as torch does it.
        nesterov: bool,
    },
    /// Weight decay is coupled (added to the gradient), as `torch.optim.Adam`.
    Adam {
        /// Decay of the first and the second moment.
        betas: (f64, f64),
        /// Added to the denominator.
        eps: f64,
        /// The factor on a parameter that is added to its gradient.
        weight_decay: f64,
    },
    /// Weight decay is decoupled, and left out for vectors and tables of positions (`decays`), as Swin is trained.
    AdamW {
        /// Decay of the first and the second moment.
        betas: (f64, f64),
        /// Added to the denominator.
        eps: f64,
        /// Times the learning rate, the share of a parameter that each step takes off.
        weight_decay: f64,
    },
}

/// Does AdamW's weight decay reach this variable? Not norms, biases and relative position tables.
fn decays(name: &str, var: &Tensor) -> bool {
    var.dim() > 1 && !name.ends_with("relative_position_bias_table")
}

/// The gradient with its variable's strides where the two differ only in dimensions of one entry, as those of 1 x 1 convolutions may:
/// the memory is the same, but fused kernels ask for the same numbers.
fn laid_like(grad: &Tensor, var: &Tensor) -> Tensor {
    let (size, own, wanted) = (grad.size(), grad.stride(), var.stride());
    let same = size.iter().zip(own.iter().zip(&wanted)).all(|(&n, (a, b))| n == 1 || a == b);
    if own != wanted && same { grad.as_strided(&size, &wanted, None) } else { grad.shallow_clone() }
}

/// A rule and its state for one list of parameters, in their order.
pub struct Optimizer {
    rule: Rule,
    names: Vec<String>,
    decayed: Vec<bool>,
    /// Momentum buffers, or Adam's first moments.
    first: Vec<Tensor>,
    /// Adam's second moments; empty for SGD.
    second: Vec<Tensor>,
    /// Steps taken, a tensor so that it is saved and restored like the rest.
    steps: Tensor,
}

impl Optimizer {
    /// No step taken yet; `params` are what `step` will be given.
    pub fn new(rule: Rule, params: &Params) -> Optimizer {
        let _guard = tch::no_grad_guard();
        let zeros = || params.vars.iter().map(|(_, t)| t.zeros_like()).collect();
        let (first, second) = match rule {
            Rule::Sgd { momentum: 0.0, .. } => (vec![], vec![]),
            Rule::Sgd { .. } => (zeros(), vec![]),
            Rule::Adam { .. } | Rule::AdamW { .. } => (zeros(), zeros()),
        };
        Optimizer {
            rule,
            names: params.vars.iter().map(|(n, _)| n.clone()).collect(),
            decayed: params.vars.iter().map(|(n, t)| decays(n, t)).collect(),
            first,
            second,
            steps: Tensor::from(0i64),
        }
    }

    /// One step on the variables this was made for, with gradients in the same order.
    pub fn step(&mut self, params: &Params, grads: &[Tensor], lr: f64) {
        self.step_unless(None, params, grads, lr)
    }

    /// The same for variables on a device, where `skip` is a scalar there: where it is 1, neither a variable nor a moment changes.
    pub(crate) fn step_unless(&mut self, skip: Option<&Tensor>, params: &Params, grads: &[Tensor], lr: f64) {
        assert_eq!(
            (params.vars.len(), grads.len()),
            (self.names.len(), self.names.len()),
            "an optimizer steps the variables it was made for"
        );
        let _guard = tch::no_grad_guard();
        let _ = self.steps.g_add_scalar_(1);
        if params.vars.first().is_some_and(|(_, var)| var.device().is_cuda()) {
            return self.at_once(skip, params, grads, lr);
        }
        assert!(skip.is_none(), "on the CPU whoever steps knows whether to step");
        match self.rule {
            Rule::Sgd { momentum, weight_decay, nesterov } => self.sgd(params, grads, lr, momentum, weight_decay, nesterov),
            Rule::Adam { betas, eps, weight_decay } => self.adam(params, grads, lr, betas, eps, weight_decay, false),
            Rule::AdamW { betas, eps, weight_decay } => self.adam(params, grads, lr, betas, eps, weight_decay, true),
        }
    }

    /// All variables in one fused kernel, or in two where weight decay does not reach all of them.
    fn at_once(&mut self, skip: Option<&Tensor>, params: &Params, grads: &[Tensor], lr: f64) {
        let laid: Vec<Tensor> = grads.iter().zip(&params.vars).map(|(grad, (_, var))| laid_like(grad, var)).collect();
        let all = |keep: &dyn Fn(usize) -> bool| Step {
            vars: params.vars.iter().enumerate().filter(|(i, _)| keep(*i)).map(|(_, (_, var))| var).collect(),
            grads: laid.iter().enumerate().filter(|(i, _)| keep(*i)).map(|(_, grad)| grad).collect(),
            lr,
            skip,
        };
        let steps = self.steps.int64_value(&[]); // in host memory
        let adam = |keep: &dyn Fn(usize) -> bool, betas, eps, weight_decay, decoupled| {
            let of = |moments: &'_ [Tensor]| -> Vec<Tensor> {
                moments.iter().enumerate().filter(|(i, _)| keep(*i)).map(|(_, m)| m.shallow_clone()).collect()
            };
            let (first, second) = (of(&self.first), of(&self.second));
            let (first, second): (Vec<&Tensor>, Vec<&Tensor>) = (first.iter().collect(), second.iter().collect());
            lists::adam(&all(keep), &first, &second, steps, betas, eps, weight_decay, decoupled);
        };
        match self.rule {
            Rule::Sgd { momentum, weight_decay, nesterov } => lists::sgd(&all(&|_| true), &self.first, momentum, weight_decay, nesterov),
            Rule::Adam { betas, eps, weight_decay } => adam(&|_| true, betas, eps, weight_decay, false),
            Rule::AdamW { betas, eps, weight_decay } => {
                adam(&|i| self.decayed[i], betas, eps, weight_decay, true);
                adam(&|i| !self.decayed[i], betas, eps, 0.0, true);
            }
        }
    }

    fn sgd(&mut self, params: &Params, grads: &[Tensor], lr: f64, momentum: f64, weight_decay: f64, nesterov: bool) {
        for (i, ((_, var), grad)) in params.vars.iter().zip(grads).enumerate() {
            let decayed = if weight_decay == 0.0 { grad.shallow_clone() } else { grad + var * weight_decay };
            let update = match self.first.get_mut(i) {
                None => decayed,
                Some(buffer) => {
                    // A buffer of zeros gives torch's first step too: there the buffer starts as the gradient.
                    let _ = buffer.g_mul_scalar_(momentum).g_add_(&decayed);
                    if nesterov { decayed + &*buffer * momentum } else { buffer.shallow_clone() }
                }
            };
            let _ = var.shallow_clone().g_sub_(&(update * lr));
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn adam(&mut self, params: &Params, grads: &[Tensor], lr: f64, betas: (f64, f64), eps: f64, weight_decay: f64, decoupled: bool) {
        let steps = self.steps.int64_value(&[]) as i32;
        let (bias1, bias2) = (1.0 - betas.0.powi(steps), 1.0 - betas.1.powi(steps));
        for (i, ((_, var), grad)) in params.vars.iter().zip(grads).enumerate() {
            let mut var = var.shallow_clone();
            let mut grad = grad.shallow_clone();
            if weight_decay != 0.0 {
                if !decoupled {
                    grad = grad + &var * weight_decay;
                } else if self.decayed[i] {
                    let _ = var.g_mul_scalar_(1.0 - lr * weight_decay);
                }
            }
            let (m, v) = (&mut self.first[i], &mut self.second[i]);
            let _ = m.g_mul_scalar_(betas.0).g_add_(&(&grad * (1.0 - betas.0)));
            let _ = v.g_mul_scalar_(betas.1).g_add_(&(&grad * &grad * (1.0 - betas.1)));
            let denominator = (&*v / bias2).sqrt() + eps;
            let _ = var.g_sub_(&(&*m / denominator * (lr / bias1)));
        }
    }

    /// As if no step had been taken.
    pub(crate) fn reset(&mut self) {
        let _guard = tch::no_grad_guard();
        let _ = self.steps.zero_();
        self.first.iter_mut().chain(&mut self.second).for_each(|t| drop(t.zero_()));
    }

    /// Handles onto the state: saving reads them, resuming writes through them.
    pub fn state(&self) -> Named {
        let mut state: Named = vec![("steps".to_string(), self.steps.shallow_clone())];
        for (kind, tensors) in [("first", &self.first), ("second", &self.second)] {
            state.extend(self.names.iter().zip(tensors).map(|(name, t)| (format!("{kind}.{name}"), t.shallow_clone())));
        }
        state
    }
}
