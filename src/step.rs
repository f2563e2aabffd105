//! One training step: forward, losses, one backward pass, the check that everything is finite, the optimizers, the method's own work.
//! The trainer and the benches call this and nothing else.

use std::time::Instant;

use tch::Tensor;

use crate::cohort::Cohort;
use crate::data::Batch;
use crate::error::{Error, Result};
use crate::losses::terms::Term;
use crate::methods::{Clock, Group, Method, Stepped};
use crate::nets::Outputs;
use crate::nets::layers::Mode;
use crate::optim::{Optimizer, Rule, grads};
use crate::params::{Named, Params};

/// Everything that changes while a cohort trains.
pub struct Engine {
    pub cohort: Cohort,
    pub method: Box<dyn Method>,
    /// The cohort's parameters, in the order of `optimizer`.
    pub theta: Params,
    pub optimizer: Optimizer,
    /// The method's own modules, each with its optimizer.
    pub groups: Vec<(Group, Optimizer)>,
}

/// One row of the loss table, without its graph.
pub struct TermValue {
    pub name: &'static str,
    pub peer: Option<usize>,
    pub weight: f64,
    /// A detached scalar; reading it waits for the device.
    pub value: Tensor,
}

/// What one step leaves for the log. Tensors are detached scalars that nobody has waited for.
pub struct StepReport {
    /// Rows of one name add up.
    pub terms: Vec<TermValue>,
    pub notes: Vec<(String, Tensor)>,
    /// The norm of the whole gradient, before clipping.
    pub grad_norm: Tensor,
    /// What `after_step` reported.
    pub extra: Vec<(String, f64)>,
    /// Seconds of the meta step, when this step had one.
    pub meta_seconds: Option<f64>,
}

impl Engine {
    pub fn new(cohort: Cohort, method: Box<dyn Method>, rule: Rule) -> Engine {
        let theta = cohort.params();
        let optimizer = Optimizer::new(rule, &theta);
        let groups = method.groups().into_iter().map(|group| { let optimizer = Optimizer::new(group.rule, &group.params); (group, optimizer) }).collect();
        Engine { cohort, method, theta, optimizer, groups }
    }

    /// One step on `batches` (several: gradient accumulation, the mean of their gradients). The weights are touched only when every
    /// term and the gradient are finite. `clip` bounds the norm of the whole gradient.
    pub fn step(&mut self, batches: &[Batch], clock: Clock, clip: Option<f64>) -> Result<StepReport> {
        let vars: Vec<Tensor> = self.theta.tensors().into_iter().chain(self.groups.iter().flat_map(|(g, _)| g.params.tensors())).collect();
        let share = 1.0 / batches.len() as f64;
        let (mut rows, mut notes): (Vec<Term>, _) = (vec![], vec![]);
        let mut gradient: Vec<Tensor> = vec![];
        let mut total: Option<Tensor> = None;
        let mut outs: Vec<Outputs> = vec![];
        for batch in batches {
            self.method.prepare(batch, clock)?;
            outs = self.cohort.forward(batch, Mode::Train);
            let terms = self.method.losses(&outs, batch, clock)?;
            let loss = terms.total() * share;
            let part = grads(&loss, &vars, false);
            gradient = if gradient.is_empty() { part } else { gradient.iter().zip(part).map(|(a, b)| a + b).collect() };
            total = Some(total.map_or(loss.detach(), |sum| sum + loss.detach()));
            rows.extend(terms.rows.into_iter().map(|row| Term { value: row.value.detach() * share, ..row }));
            notes.extend(terms.notes);
            self.method.after_batch(&outs, batch, clock)?;
        }
        let total = total.ok_or_else(|| Error::failed("a step needs at least one batch"))?;
        let grad_norm = norm(&gradient);
        if (&total + &grad_norm).isfinite().int64_value(&[]) == 0 {
            return Err(self.diverged(&rows, &gradient, clock));
        }
        if let Some(clip) = clip {
            // As torch's clip_grad_norm_: nothing is read, so nothing waits.
            let factor = (clip / (&grad_norm + 1e-6)).clamp_max(1.0);
            gradient.iter_mut().for_each(|g| drop(g.g_mul_(&factor)));
        }
        let mut rest = &gradient[..];
        let mut take = |count: usize| { let (head, tail) = rest.split_at(count); rest = tail; head };
        self.optimizer.step(&self.theta, take(self.theta.vars.len()), clock.lr);
        for (group, optimizer) in &mut self.groups {
            optimizer.step(&group.params, take(group.params.vars.len()), clock.lr);
        }
        let batch = batches.last().expect("there is a batch");
        let started = Instant::now();
        let meta = self.method.meta_due(clock);
        let extra = self.method.after_step(Stepped { cohort: &mut self.cohort, theta: &self.theta, batch, outs: &outs, clock })?;
        let meta_seconds = meta.then(|| started.elapsed().as_secs_f64());
        let terms = rows.into_iter().map(|Term { name, peer, weight, value }| TermValue { name, peer, weight, value }).collect();
        Ok(StepReport { terms, notes, grad_norm, extra, meta_seconds })
    }

    /// Every tensor a checkpoint must hold, under unique names: saving reads these handles, resuming writes through them.
    pub fn state(&self) -> Named {
        let prefixed = |prefix: String, named: Named| named.into_iter().map(move |(name, t)| (format!("{prefix}{name}"), t));
        let mut state = self.theta.named();
        state.extend(prefixed("optimizer.".into(), self.optimizer.state()));
        for (group, optimizer) in &self.groups {
            state.extend(prefixed(format!("group.{}.", group.name), group.params.named()));
            state.extend(prefixed(format!("group.{}.optimizer.", group.name), optimizer.state()));
        }
        state.extend(prefixed("method.".into(), self.method.state()));
        state
    }

    /// Names the term, or the variable, that is not finite. Only here are terms read one by one.
    fn diverged(&self, rows: &[Term], gradient: &[Tensor], clock: Clock) -> Error {
        let finite = |t: &Tensor| t.isfinite().all().int64_value(&[]) != 0;
        let at = |what: String| Error::Diverged { step: clock.step, what };
        if let Some(row) = rows.iter().find(|row| !finite(&row.value)) {
            let of = row.peer.map_or(String::new(), |m| format!(" of network {m}"));
            return at(format!("the term `{}`{of} is {}", row.name, row.value.double_value(&[])));
        }
        let names = self.theta.vars.iter().map(|(n, _)| n.clone());
        let names = names.chain(self.groups.iter().flat_map(|(g, _)| g.params.vars.iter().map(|(n, _)| format!("{}.{n}", g.name))));
        match names.zip(gradient).find(|(_, g)| !finite(g)) {
            Some((name, _)) => at(format!("every term is finite but the gradient of `{name}` is not")),
            None => at("terms and gradients are finite but their sums overflow".into()),
        }
    }
}

/// The norm of a list of tensors taken as one vector.
fn norm(tensors: &[Tensor]) -> Tensor {
    let norms: Vec<Tensor> = tensors.iter().map(|t| t.norm()).collect();
    Tensor::stack(&norms, 0).norm()
}
