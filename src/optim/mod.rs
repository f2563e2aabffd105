//! Gradients as values, and the rules that step parameters with them.

pub(crate) mod lists;
pub mod reverse_hg;
pub mod rule;
pub mod schedule;

use tch::Tensor;

pub use rule::{Optimizer, Rule};
pub use schedule::Schedule;

/// The gradient of `loss` for each of `vars`, zeros where the loss does not reach (`run_backward` gives undefined tensors there).
pub fn grads(loss: &Tensor, vars: &[Tensor], create_graph: bool) -> Vec<Tensor> {
    defined(Tensor::run_backward(&[loss], vars, create_graph, create_graph), vars)
}

/// The same, leaving the graph for another backward pass.
pub fn grads_keeping_graph(loss: &Tensor, vars: &[Tensor]) -> Vec<Tensor> {
    defined(Tensor::run_backward(&[loss], vars, true, false), vars)
}

fn defined(raw: Vec<Tensor>, vars: &[Tensor]) -> Vec<Tensor> {
    raw.into_iter().zip(vars).map(|(g, v)| if g.defined() { g } else { v.zeros_like() }).collect()
}
