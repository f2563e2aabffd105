//! Reverse-HG (Franceschi et al., ICML 2017): the gradient of an outer objective for parameters that act only through the steps of an
//! inner optimizer (Eq. 16). Knows no networks and no losses: it moves the values of leaf tensors and asks for objectives at them.

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::grads;
use crate::error::Result;
use crate::params::Params;
use crate::system::ranks::Ranks;

/// How Hessian-vector products are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hvp {
    /// A second backward pass through the first.
    Exact,
    /// A central difference of gradients, with the objective's constants as they were remembered (`Constants::Remembered`).
    Difference,
}

/// The adjoint of SGD's momentum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Adjoint {
    /// As the chain rule has it.
    Exact,
    /// The released code lacks the weight decay's factor on the momentum's adjoint, which matters when both are in use.
    Released,
}

/// What becomes of buffers (running statistics) when the hypergradient is known. Variables are always as before, to the bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Buffers {
    /// They too are as before, to the bit.
    Restored,
    /// The released code evaluates the first objective once more after its rollback, so buffers keep one update from it.
    OneUpdateKept,
}

/// The inner optimizer, plain SGD from an empty momentum, and how to differentiate through it.
#[derive(Debug, Clone, Copy)]
pub struct Unroll {
    /// Inner steps on objectives 0 .. steps; objective(steps) is the outer one.
    pub steps: usize,
    /// The learning rate of the inner steps.
    pub lr: f64,
    /// Momentum of the inner steps.
    pub momentum: f64,
    /// Weight decay of the inner steps, added to the gradient.
    pub weight_decay: f64,
    /// How Hessian-vector products are taken.
    pub hvp: Hvp,
    /// The adjoint of the momentum.
    pub adjoint: Adjoint,
    /// What becomes of buffers.
    pub buffers: Buffers,
    /// Over which gradients and products are averaged.
    pub ranks: Ranks,
}

/// Where an objective takes the quantities from that it holds constant while it is differentiated (soft targets).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Constants {
    /// They are taken at the present theta and remembered for this step.
    Fresh,
    /// They are those remembered for this step. With `Hvp::Exact` these evaluations, and no others, are differentiated twice.
    Remembered,
}

/// An objective's value at the present theta: which step it belongs to, and where its constants come from.
pub type Objective<'a> = dyn FnMut(usize, Constants) -> Result<Tensor> + 'a;

/// Length of the difference's step as a part of theta's. Not small: a network of ReLUs has kinks, whose error grows as the step shrinks.
const REACH: f64 = 0.02;

/// d pi of objective(steps) after `steps` SGD steps of theta on objective(0), objective(1), ... (Eq. 16). Momentum and weight decay
/// are differentiated through. Values of theta and its buffers move during the call; no graph outlives a move. Over several ranks every
/// gradient and every product is averaged, so that theta moves alike on all of them.
pub fn hypergradient(theta: &Params, pi: &[Tensor], unroll: Unroll, objective: &mut Objective) -> Result<Vec<Tensor>> {
    let vars = theta.tensors();
    let start = theta.snapshot();
    let result = run(theta, &vars, pi, unroll, objective);
    theta.restore(&start);
    let (dpi, buffers) = result?;
    if unroll.buffers == Buffers::OneUpdateKept {
        let _guard = tch::no_grad_guard();
        for ((_, live), seen) in theta.buffers.iter().zip(&buffers) {
            live.shallow_clone().copy_(seen);
        }
    }
    Ok(dpi)
}

/// d pi, and the buffers as the first objective left them.
fn run(theta: &Params, vars: &[Tensor], pi: &[Tensor], unroll: Unroll, objective: &mut Objective) -> Result<(Vec<Tensor>, Vec<Tensor>)> {
    let Unroll { steps, lr, momentum, weight_decay, hvp, adjoint, ranks, .. } = unroll;
    let mut trail: Vec<Vec<Tensor>> = Vec::with_capacity(steps); // theta_k
    let mut velocity: Option<Vec<Tensor>> = None;
    let mut buffers = vec![];
    for k in 0..steps {
        let gradient = ranks.mean(grads(&objective(k, Constants::Fresh)?, vars, false));
        let _guard = tch::no_grad_guard();
        if k == 0 {
            buffers = theta.buffers.iter().map(|(_, t)| t.copy()).collect();
        }
        trail.push(vars.iter().map(Tensor::copy).collect());
        let mut update: Vec<Tensor> =
            gradient.into_iter().zip(vars).map(|(g, v)| if weight_decay == 0.0 { g } else { g + v * weight_decay }).collect();
        if let Some(old) = velocity {
            update = old.into_iter().zip(update).map(|(v, g)| v * momentum + g).collect();
        }
        for (var, d) in vars.iter().zip(&update) {
            let _ = var.shallow_clone().g_sub_(&(d * lr));
        }
        velocity = (momentum != 0.0).then_some(update);
    }
    // u and s: the adjoints of theta_k and of the velocity.
    let mut u = ranks.mean(grads(&objective(steps, Constants::Fresh)?, vars, false));
    let mut s: Vec<Tensor> = u.iter().map(Tensor::zeros_like).collect();
    let mut dpi: Vec<Tensor> = pi.iter().map(Tensor::zeros_like).collect();
    for k in (0..steps).rev() {
        let c: Vec<Tensor> = s.iter().zip(&u).map(|(s, u)| s - u * lr).collect();
        put(vars, &trail[k]);
        // The first step's theta_0 is given: nothing asks for its adjoint, so the dearest product is left out.
        let products = match hvp {
            Hvp::Exact => exact(k, vars, pi, &c, k > 0, ranks, objective)?,
            Hvp::Difference => difference(k, vars, pi, &trail[k], &c, k > 0, ranks, objective)?,
        };
        let _guard = tch::no_grad_guard();
        dpi = dpi.into_iter().zip(products.pi).map(|(sum, d)| sum + d).collect();
        if k == 0 {
            break;
        }
        // theta_{k+1} = theta_k - lr v_{k+1}, v_{k+1} = momentum v_k + g + weight_decay theta_k.
        u = match adjoint {
            Adjoint::Exact => u.iter().zip(&c).zip(products.theta).map(|((u, c), h)| u + c * weight_decay + h).collect(),
            Adjoint::Released => u.iter().zip(&s).zip(products.theta).map(|((u, s), h)| u * (1.0 - lr * weight_decay) + s + h).collect(),
        };
        s = if momentum == 0.0 { s } else { c.iter().map(|c| c * momentum).collect() };
    }
    Ok((dpi, buffers))
}

/// The derivative of <gradient of the objective for theta, c>, for pi and (if asked) for theta.
struct Products {
    pi: Vec<Tensor>,
    theta: Vec<Tensor>,
}

fn exact(
    k: usize,
    vars: &[Tensor],
    pi: &[Tensor],
    c: &[Tensor],
    for_theta: bool,
    ranks: Ranks,
    objective: &mut Objective,
) -> Result<Products> {
    let loss = objective(k, Constants::Remembered)?;
    let raw = Tensor::run_backward(&[&loss], vars, true, true);
    // What the loss does not reach has no gradient to differentiate again.
    let dots: Vec<Tensor> = raw.iter().zip(c).filter(|(g, _)| g.defined() && g.requires_grad()).map(|(g, c)| (g * c).sum(None)).collect();
    if dots.is_empty() {
        return Ok(Products { pi: pi.iter().map(Tensor::zeros_like).collect(), theta: c.iter().map(Tensor::zeros_like).collect() });
    }
    let dot = Tensor::stack(&dots, 0).sum(None);
    let inputs: Vec<Tensor> = pi.iter().chain(vars.iter().filter(|_| for_theta)).map(Tensor::shallow_clone).collect();
    // <gradient, c> is linear in the gradient: the mean of the ranks' products is the product with the mean gradient.
    let mut both = ranks.mean(grads(&dot, &inputs, false));
    let theta = both.split_off(pi.len());
    Ok(Products { pi: both, theta })
}

/// The gradients at theta_k + eps c and theta_k - eps c, whose difference is the product, for pi as for theta: the objective with its
/// constants held is a function, so its mixed derivatives may be taken in either order.
#[allow(clippy::too_many_arguments)]
fn difference(
    k: usize,
    vars: &[Tensor],
    pi: &[Tensor],
    at: &[Tensor],
    c: &[Tensor],
    for_theta: bool,
    ranks: Ranks,
    objective: &mut Objective,
) -> Result<Products> {
    let length = |ts: &[Tensor]| Tensor::stack(&ts.iter().map(|t| t.norm()).collect::<Vec<_>>(), 0).norm().double_value(&[]);
    let (reach, size) = (REACH * length(at), length(c));
    if size == 0.0 {
        return Ok(Products { pi: pi.iter().map(Tensor::zeros_like).collect(), theta: c.iter().map(Tensor::zeros_like).collect() });
    }
    let eps = reach / size;
    let inputs: Vec<Tensor> = pi.iter().chain(vars.iter().filter(|_| for_theta)).map(Tensor::shallow_clone).collect();
    let mut side = |eps: f64| -> Result<Vec<Tensor>> {
        tch::no_grad(|| vars.iter().zip(at.iter().zip(c)).for_each(|(var, (at, c))| var.shallow_clone().copy_(&(at + c * eps))));
        let loss = objective(k, Constants::Remembered)?;
        // An objective that pi does not enter, with nothing else asked for.
        if !loss.requires_grad() {
            Ok(inputs.iter().map(Tensor::zeros_like).collect())
        } else {
            Ok(ranks.mean(grads(&loss, &inputs, false)))
        }
    };
    // Where only pi is asked for, theta is a constant: the passes need no backward through the networks and keep nothing for one.
    let track = |on: bool| vars.iter().filter(|_| !for_theta).for_each(|var| drop(var.set_requires_grad(on)));
    track(false);
    let sides = side(eps).and_then(|ahead| Ok((ahead, side(-eps)?)));
    track(true);
    let (ahead, behind) = sides?;
    let mut both: Vec<Tensor> = ahead.into_iter().zip(behind).map(|(a, b)| (a - b) / (2.0 * eps)).collect();
    let theta = both.split_off(pi.len());
    Ok(Products { pi: both, theta })
}

fn put(vars: &[Tensor], values: &[Tensor]) {
    let _guard = tch::no_grad_guard();
    for (var, value) in vars.iter().zip(values) {
        var.shallow_clone().copy_(value);
    }
}
