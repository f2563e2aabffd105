//! One training step: forward, losses, one backward pass (one more for each group stepped apart), the check that everything is finite,
//! the optimizers, the method's own work. The trainer and the benches call this and nothing else.

use std::time::Instant;

use tch::Tensor;

use crate::cohort::{Cohort, Peer};
use crate::data::{Batch, Mix};
use crate::error::{Error, Result};
use crate::extractor::Extractor;
use crate::losses::terms::{Term, Terms};
use crate::methods::{Batches, Clock, Group, Method, Start, Stepped, Task};
use crate::nets::layers::Mode;
use crate::nets::{LossScale, Outputs};
use crate::optim::{Optimizer, Rule, grads, grads_keeping_graph};
use crate::params::{Named, Params};
use crate::rng;
use crate::system::ranks::Ranks;

/// Everything that changes while a cohort trains.
pub struct Engine {
    /// The networks.
    pub cohort: Cohort,
    /// What they minimise.
    pub method: Box<dyn Method>,
    /// The cohort's parameters, in the order of `optimizer`.
    pub theta: Params,
    /// Of the networks and their branches.
    pub optimizer: Optimizer,
    /// The method's own modules, each with its optimizer.
    pub groups: Vec<(Group, Optimizer)>,
    /// Mixup and CutMix; none unless the recipe asks.
    pub mix: Option<Mix>,
    /// With networks that train in f16.
    pub loss_scale: Option<LossScale>,
    /// Running statistics of every BatchNorm, averaged over ranks after each step.
    pub statistics: Vec<Tensor>,
}

/// One row of the loss table, without its graph.
pub struct TermValue {
    /// As in the metrics.
    pub name: &'static str,
    /// The network it belongs to; none where it is of all.
    pub peer: Option<usize>,
    /// Its factor in the loss.
    pub weight: f64,
    /// A detached scalar; reading it waits for the device.
    pub value: Tensor,
}

/// What one step leaves for the log. Tensors are detached scalars that nobody has waited for.
pub struct StepReport {
    /// Rows of one name add up.
    pub terms: Vec<TermValue>,
    /// Numbers a method wants logged beside its terms.
    pub notes: Vec<(String, Tensor)>,
    /// The norm of the whole gradient (of that from the main backward pass), before clipping; none where f16 overflowed and the step
    /// was skipped.
    pub grad_norm: Option<Tensor>,
    /// Seconds of the meta step, when this step had one.
    pub meta_seconds: Option<f64>,
}

impl Engine {
    /// The method of a task with a fresh cohort as it needs it.
    pub fn of(task: &Task, method: Box<dyn Method>) -> Engine {
        Engine::new(task.cohort(method.needs()), method, task.rule)
    }

    /// `rule` steps the networks; what the method adds to them has rules of its own.
    pub fn new(cohort: Cohort, method: Box<dyn Method>, rule: Rule) -> Engine {
        let theta = cohort.params();
        let optimizer = Optimizer::new(rule, &theta);
        let groups = method
            .groups(&cohort)
            .into_iter()
            .map(|group| {
                let optimizer = Optimizer::new(group.rule, &group.params);
                (group, optimizer)
            })
            .collect();
        let mut engine = Engine { cohort, method, theta, optimizer, groups, mix: None, loss_scale: None, statistics: vec![] };
        if engine.ranks().count() > 1 {
            let running = |name: &str| name.ends_with("running_mean") || name.ends_with("running_var");
            engine.statistics = engine.state().into_iter().filter(|(name, _)| running(name)).map(|(_, t)| t).collect();
        }
        engine
    }

    /// The processes that train together.
    pub fn ranks(&self) -> Ranks {
        self.cohort.ranks
    }

    /// One step on `batches` (several: gradient accumulation, the mean of their gradients). The weights are touched only when every
    /// term and every gradient are finite. `clip` bounds the norm of the whole gradient, and that of a group stepped apart.
    pub fn step(&mut self, batches: &[Batch], clock: Clock, clip: Option<f64>) -> Result<StepReport> {
        let together = self.groups.iter().filter(|(g, _)| !g.apart).flat_map(|(g, _)| g.params.tensors());
        let vars: Vec<Tensor> = self.theta.tensors().into_iter().chain(together).collect();
        let share = 1.0 / batches.len() as f64;
        let scale = self.loss_scale.as_ref().map_or(1.0, LossScale::scale);
        let (mut rows, mut notes): (Vec<Term>, _) = (vec![], vec![]);
        let mut gradient: Vec<Tensor> = vec![];
        // Of the groups stepped apart, in the order of the groups; empty for the others and where a step has no row for the group.
        let mut apart: Vec<Vec<Tensor>> = self.groups.iter().map(|_| vec![]).collect();
        let mut total: Option<Tensor> = None;
        let mut outs: Vec<Outputs> = vec![];
        for (i, batch) in batches.iter().enumerate() {
            self.method.prepare(batch, clock)?;
            outs = self.cohort.forward(batch, Mode::Train);
            let terms = match self.mix {
                None => self.method.losses(&outs, batch, clock)?,
                Some(mix) => self.mixed_losses(mix, &outs, batch, clock, i as u64)?,
            };
            let loss = terms.total() * share;
            let mut value = loss.detach();
            for ((group, _), sum) in self.groups.iter().zip(&mut apart).filter(|((g, _), _)| g.apart) {
                if let Some(own) = terms.total_apart(group.name) {
                    let own = own * share;
                    accumulate(sum, grads_keeping_graph(&(&own * scale), &group.params.tensors()));
                    value = value + own.detach();
                }
            }
            accumulate(&mut gradient, grads(&(loss * scale), &vars, false));
            total = Some(total.map_or(value.shallow_clone(), |sum| sum + value));
            rows.extend(terms.rows.into_iter().map(|row| Term { value: row.value.detach() * share, ..row }));
            notes.extend(terms.notes);
            self.method.after_batch(&outs, batch, clock)?;
        }
        let mut total = total.ok_or_else(|| Error::failed("a step needs at least one batch"))?;
        let fault =
            if self.ranks().count() > 1 { self.over_ranks(&mut gradient, &mut apart, &mut rows, &mut notes, &mut total) } else { None };
        if scale != 1.0 {
            apart.iter_mut().chain([&mut gradient]).flatten().for_each(|g| drop(g.g_mul_scalar_(1.0 / scale)));
        }
        let grad_norm = norm(&gradient);
        let apart_norms: Vec<Option<Tensor>> = apart.iter().map(|g| (!g.is_empty()).then(|| norm(g))).collect();
        let check = apart_norms.iter().flatten().fold(&total + &grad_norm, |sum, norm| sum + norm);
        let finite = check.isfinite().int64_value(&[]) != 0;
        let mut skip = false;
        if let Some(loss_scale) = &mut self.loss_scale {
            notes.push(("loss_scale".into(), Tensor::from(scale)));
            // A gradient beyond f16's range is the scale's business as long as the terms are finite and the scale can fall.
            skip = !finite && scale > 1.0 && total.isfinite().int64_value(&[]) != 0;
            loss_scale.update(finite);
        }
        if !finite && !skip {
            return Err(self.diverged(&rows, &gradient, &apart, fault, clock));
        }
        if let Some(clip) = clip {
            clip_to(&mut gradient, &grad_norm, clip);
            apart.iter_mut().zip(&apart_norms).for_each(|(g, norm)| {
                if let Some(norm) = norm {
                    clip_to(g, norm, clip)
                }
            });
        }
        let mut rest = &gradient[..];
        let mut take = |count: usize| {
            let (head, tail) = rest.split_at(count);
            rest = tail;
            head
        };
        if !skip {
            self.optimizer.step(&self.theta, take(self.theta.vars.len()), clock.lr);
            for ((group, optimizer), own) in self.groups.iter_mut().zip(&apart) {
                if !group.apart {
                    optimizer.step(&group.params, take(group.params.vars.len()), group.rate.at(clock));
                } else if !own.is_empty() {
                    optimizer.step(&group.params, own, group.rate.at(clock));
                }
            }
        }
        let batch = batches.last().expect("there is a batch");
        let started = Instant::now();
        let meta = self.method.meta_due(clock);
        self.method.after_step(Stepped { cohort: &mut self.cohort, theta: &self.theta, batch, outs: &outs, clock })?;
        let meta_seconds = meta.then(|| started.elapsed().as_secs_f64());
        self.average_statistics();
        let terms = rows.into_iter().map(|Term { name, peer, weight, value, .. }| TermValue { name, peer, weight, value }).collect();
        Ok(StepReport { terms, notes, grad_norm: (!skip).then_some(grad_norm), meta_seconds })
    }

    /// Everything a step computed becomes the mean over ranks, in one go. Returns what is wrong with this rank's own terms, if anything.
    fn over_ranks(
        &self,
        gradient: &mut [Tensor],
        apart: &mut [Vec<Tensor>],
        rows: &mut [Term],
        notes: &mut [(String, Tensor)],
        total: &mut Tensor,
    ) -> Option<String> {
        // Read before the mean makes it everybody's. Waits for the device, as the check of the whole step does.
        let fault = (total.isfinite().int64_value(&[]) == 0).then(|| faulty(rows)).flatten();
        let own = gradient.iter().chain(apart.iter().flatten()).map(Tensor::shallow_clone);
        let scalars = rows.iter().map(|r| &r.value).chain(notes.iter().map(|n| &n.1)).chain([&*total]).map(Tensor::shallow_clone);
        let mut means = self.ranks().mean(own.chain(scalars).collect()).into_iter();
        let places = gradient.iter_mut().chain(apart.iter_mut().flatten());
        let scalars = rows.iter_mut().map(|r| &mut r.value).chain(notes.iter_mut().map(|n| &mut n.1)).chain([total]);
        places.chain(scalars).zip(&mut means).for_each(|(place, mean)| *place = mean);
        fault
    }

    /// Without `train.sync_bn` every rank saw other images: what is saved and evaluated is the mean of what they saw.
    fn average_statistics(&mut self) {
        if self.ranks().count() > 1 && !self.ranks().sync_norms() {
            let _guard = tch::no_grad_guard();
            let means = self.ranks().mean(self.statistics.iter().map(Tensor::shallow_clone).collect());
            self.statistics.iter_mut().zip(&means).for_each(|(live, mean)| live.copy_(mean));
        }
    }

    /// The losses with a second forward pass on the mixed views.
    fn mixed_losses(&mut self, mix: Mix, outs: &[Outputs], batch: &Batch, clock: Clock, i: u64) -> Result<Terms> {
        let mut rng = rng::stream(clock.seed, "mix", &[clock.step as u64, i]);
        let mixed = mix.apply(&batch.views, &batch.labels, &mut rng)?;
        let targets = mixed.targets(&batch.labels, outs[0].logit().size()[1]);
        let batch_of_mixed = Batch {
            views: mixed.views,
            labels: batch.labels.shallow_clone(),
            index: batch.index.shallow_clone(),
            noise: rng::derive(batch.noise, "mixed", 0),
        };
        let answers = self.cohort.forward(&batch_of_mixed, Mode::Train);
        self.method.mixed_losses(outs, &answers, &targets, batch, clock)
    }

    /// To be called before the first batch of each epoch, not when an epoch is resumed in its middle. `holdout`: the held-out part, if any.
    pub fn epoch_start(&mut self, holdout: Option<&mut Batches>, clock: Clock) -> Result<()> {
        if self.method.epoch_start(&mut self.cohort, holdout, clock)? == Start::Anew {
            self.optimizer.reset();
            self.groups.iter_mut().for_each(|(_, optimizer)| optimizer.reset());
        }
        Ok(())
    }

    /// The networks that are evaluated and saved.
    pub fn shipped(&self) -> Vec<&Peer> {
        self.method.shipped(&self.cohort)
    }

    /// The shipped networks as they are now, with their branches, ready to be asked. To be dropped before the next step.
    pub fn frozen(&self, classes: i64, threads: usize) -> Vec<Extractor> {
        let freeze = |peer: &Peer| {
            let aux = (!peer.branches.is_empty()).then_some(&peer.aux);
            Extractor::new(peer.arch, &peer.params, aux, classes, threads)
        };
        self.shipped().into_iter().map(freeze).collect()
    }

    /// Every tensor a checkpoint must hold, under unique names: saving reads these handles, resuming writes through them.
    pub fn state(&self) -> Named {
        let prefixed = |prefix: String, named: Named| named.into_iter().map(move |(name, t)| (format!("{prefix}{name}"), t));
        let mut state = self.theta.named();
        state.extend(prefixed("optimizer.".into(), self.optimizer.state()));
        for (group, optimizer) in &self.groups {
            // A group stepped apart may hold variables of the networks: those are in `theta`.
            let own = group
                .params
                .named()
                .into_iter()
                .filter(|(_, t)| !group.apart || !self.theta.vars.iter().any(|(_, v)| v.data_ptr() == t.data_ptr()));
            state.extend(prefixed(format!("group.{}.", group.name), own.collect()));
            state.extend(prefixed(format!("group.{}.optimizer.", group.name), optimizer.state()));
        }
        state.extend(self.loss_scale.iter().map(|scale| ("loss_scale".to_string(), scale.state.shallow_clone())));
        state.extend(prefixed("method.".into(), self.method.state()));
        state
    }

    /// Names the term, or the variable, that is not finite. Only here are terms read one by one. `fault`: of this rank, where there are
    /// several; the first rank that has one is named.
    fn diverged(&self, rows: &[Term], gradient: &[Tensor], apart: &[Vec<Tensor>], fault: Option<String>, clock: Clock) -> Error {
        let at = |what: String| Error::Diverged { step: clock.step, what };
        if self.ranks().count() > 1 {
            if let Some((rank, what)) = self.ranks().first_message(fault) {
                return at(format!("on rank {rank}, {what}"));
            }
        } else if let Some(what) = faulty(rows) {
            return at(what);
        }
        let names = self.theta.vars.iter().map(|(n, _)| n.clone());
        let own = |g: &Group| g.params.vars.iter().map(|(n, _)| format!("{}.{n}", g.name)).collect::<Vec<_>>();
        let names = names.chain(self.groups.iter().filter(|(g, _)| !g.apart).flat_map(|(g, _)| own(g)));
        let apart = self.groups.iter().zip(apart).flat_map(|((g, _), gradient)| own(g).into_iter().zip(gradient));
        match names.zip(gradient).chain(apart).find(|(_, g)| !finite(g)) {
            Some((name, _)) => at(format!("every term is finite but the gradient of `{name}` is not")),
            None => at("terms and gradients are finite but their sums overflow".into()),
        }
    }
}

fn finite(t: &Tensor) -> bool {
    t.isfinite().all().int64_value(&[]) != 0
}

/// The first term that is not finite, in words.
fn faulty(rows: &[Term]) -> Option<String> {
    rows.iter().find(|row| !finite(&row.value)).map(|row| {
        let of = row.peer.map_or(String::new(), |m| format!(" of network {m}"));
        format!("the term `{}`{of} is {}", row.name, row.value.double_value(&[]))
    })
}

fn accumulate(sum: &mut Vec<Tensor>, part: Vec<Tensor>) {
    *sum = if sum.is_empty() { part } else { sum.iter().zip(part).map(|(a, b)| a + b).collect() };
}

/// As torch's clip_grad_norm_: nothing is read, so nothing waits.
fn clip_to(gradient: &mut [Tensor], norm: &Tensor, clip: f64) {
    let factor = (clip / (norm + 1e-6)).clamp_max(1.0);
    gradient.iter_mut().for_each(|g| drop(g.g_mul_(&factor)));
}

/// The norm of a list of tensors taken as one vector.
fn norm(tensors: &[Tensor]) -> Tensor {
    let norms: Vec<Tensor> = tensors.iter().map(|t| t.norm()).collect();
    Tensor::stack(&norms, 0).norm()
}
