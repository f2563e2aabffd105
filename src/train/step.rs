//! One training step: forward, losses, one backward pass (one more for each group stepped apart), the check that everything is finite,
//! the optimizers, the method's own work. The trainer and the benches call this and nothing else.

use std::time::Instant;

use tch::{Device, Kind, Tensor};

pub use super::report::{StepReport, TermValue};
use super::watch::{Known, OVERFLOW, Unseen, Watch, gradient_of, put_back, term_is};

use crate::cohort::{Cohort, Peer};
use crate::data::{Batch, Mix, Placed};
use crate::error::{Error, Result};
use crate::extractor::Extractor;
use crate::losses::terms::{Term, Terms};
use crate::methods::{Batches, Clock, Group, Method, Outcome, Start, Stepped, Task};
use crate::nets::layers::Mode;
use crate::nets::{LossScale, Outputs};
use crate::optim::{Optimizer, Rule, grads, grads_keeping_graph, lists};
use crate::params::{self, Named, Params};
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
    /// The memory of all of them, one tensor for each kind of number.
    all_statistics: Vec<Tensor>,
    /// What is in host memory and counts or is drawn from: other handles onto some of `state`.
    counters: Named,
    /// On a device that is not waited for.
    watch: Option<Watch>,
    /// The batches of the step that was not finite.
    faulty: Vec<Batch>,
    /// Which step that was and what was not finite, once a device has said so: from then on nothing moves there.
    stopped: Option<(usize, String)>,
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
        let (statistics, all_statistics, counters, watch) = (vec![], vec![], vec![], None);
        let mut engine = Engine {
            cohort,
            method,
            theta,
            optimizer,
            groups,
            mix: None,
            loss_scale: None,
            statistics,
            all_statistics,
            counters,
            watch,
            faulty: vec![],
            stopped: None,
        };
        let running = |name: &str| name.ends_with("running_mean") || name.ends_with("running_var");
        let state = engine.state();
        engine.statistics = state.iter().filter(|(name, _)| running(name)).map(|(_, t)| t.shallow_clone()).collect();
        engine.all_statistics = params::in_one_piece(&mut engine.statistics);
        let trained = |t: &Tensor| t.requires_grad();
        let counts = |(name, t): &&(String, Tensor)| t.device() == Device::Cpu && t.kind() == Kind::Int64 && !trained(t) && !running(name);
        engine.counters = state.iter().filter(counts).map(|(n, t)| (n.clone(), t.shallow_clone())).collect();
        engine
    }

    /// The processes that train together.
    pub fn ranks(&self) -> Ranks {
        self.cohort.ranks
    }

    /// Where the networks compute.
    fn device(&self) -> Device {
        self.theta.vars.first().map_or(Device::Cpu, |(_, t)| t.device()) // on the CPU: where nothing is trained
    }

    /// Does a step wait until it is known to be finite? On the CPU that costs nothing; over several ranks, and where f16 may overflow,
    /// the host must know.
    fn waits(&self) -> bool {
        !self.device().is_cuda() || self.ranks().count() > 1 || self.loss_scale.is_some()
    }

    /// One step on `batches` (several: gradient accumulation, the mean of their gradients). The weights are touched only when every
    /// term and every gradient are finite. `clip` bounds the norm of the whole gradient, and that of a group stepped apart.
    ///
    /// Batches may be in host memory. Steps on a CUDA device are not waited for: an error may be of a step a few calls before, since when
    /// nothing has moved; `confirm` waits.
    pub fn step(&mut self, batches: &[Batch], clock: Clock, clip: Option<f64>) -> Result<StepReport> {
        let device = self.device();
        self.step_placed(batches.iter().map(|batch| Placed::on(device, batch)).collect(), clock, clip)
    }

    /// The same on batches that are where the networks are.
    pub(super) fn step_placed(&mut self, placed: Vec<Placed>, clock: Clock, clip: Option<f64>) -> Result<StepReport> {
        self.hear(false)?;
        let waits = self.waits();
        let (counters, statistics) = self.before_step();
        let together = self.groups.iter().filter(|(g, _)| !g.apart).flat_map(|(g, _)| g.params.tensors());
        let vars: Vec<Tensor> = self.theta.tensors().into_iter().chain(together).collect();
        let share = 1.0 / placed.len() as f64;
        let scale = self.loss_scale.as_ref().map_or(1.0, LossScale::scale);
        let (mut rows, mut notes): (Vec<Term>, _) = (vec![], vec![]);
        let mut gradient: Vec<Tensor> = vec![];
        // Of the groups stepped apart, in the order of the groups; empty for the others and where a step has no row for the group.
        let mut apart: Vec<Vec<Tensor>> = self.groups.iter().map(|_| vec![]).collect();
        let mut total: Option<Tensor> = None;
        let mut outs: Vec<Outputs> = vec![];
        for (i, Placed { batch, labels, index }) in placed.iter().enumerate() {
            let drawn_by = Batch { labels: labels.shallow_clone(), index: index.shallow_clone(), ..batch.shallow_clone() };
            self.method.prepare(&drawn_by, clock)?;
            let terms;
            (outs, terms) = match self.mix {
                None => {
                    self.ask_frozen(batch);
                    let outs = self.cohort.forward(batch, Mode::Train);
                    let terms = self.method.losses(&outs, batch, clock)?;
                    (outs, terms)
                }
                Some(mix) => self.mixed_losses(mix, batch, clock, i as u64)?,
            };
            notes.extend(told_right(&outs, &batch.labels));
            let loss = times(terms.total(), share);
            let mut value = loss.detach();
            for ((group, _), sum) in self.groups.iter().zip(&mut apart).filter(|((g, _), _)| g.apart) {
                if let Some(own) = terms.total_apart(group.name) {
                    let own = times(own, share);
                    accumulate(sum, grads_keeping_graph(&times(own.shallow_clone(), scale), &group.params.tensors()));
                    value = value + own.detach();
                }
            }
            accumulate(&mut gradient, grads(&times(loss, scale), &vars, false));
            total = Some(total.map_or(value.shallow_clone(), |sum| sum + value));
            rows.extend(terms.rows.into_iter().map(|row| Term { value: times(row.value.detach(), share), ..row }));
            notes.extend(terms.notes);
            self.method.after_batch(&outs, &drawn_by, clock)?;
        }
        let mut total = total.ok_or_else(|| Error::failed("a step needs at least one batch"))?;
        let fault =
            if self.ranks().count() > 1 { self.over_ranks(&mut gradient, &mut apart, &mut rows, &mut notes, &mut total) } else { None };
        if scale != 1.0 {
            apart.iter_mut().chain([&mut gradient]).flatten().for_each(|g| drop(g.g_mul_scalar_(1.0 / scale)));
        }
        let norms = lists::norms(&gradient);
        let grad_norm = norms.norm();
        let apart_norms: Vec<Option<(Tensor, Tensor)>> = apart.iter().map(|g| (!g.is_empty()).then(|| lists::norms(g))).map(both).collect();
        let check = apart_norms.iter().flatten().fold(&total + &grad_norm, |sum, (_, norm)| sum + norm);
        let mut skip = false;
        if waits {
            let finite = check.isfinite().int64_value(&[]) != 0;
            if let Some(loss_scale) = &mut self.loss_scale {
                notes.push(("loss_scale".into(), Tensor::from(scale)));
                // A gradient beyond f16's range is the scale's business as long as the terms are finite and the scale can fall.
                skip = !finite && scale > 1.0 && total.isfinite().int64_value(&[]) != 0;
                loss_scale.update(finite);
            }
            if !finite && !skip {
                put_back(counters);
                self.put_statistics_back(&statistics, None);
                self.method.settle(Outcome::Undone);
                self.faulty = batches(&placed);
                return Err(self.diverged(&rows, &gradient, &apart, fault, clock));
            }
            self.method.settle(Outcome::Stands);
        } else {
            let watch = self.watch.get_or_insert_with(|| Watch::new(&check));
            watch.take_in(&check);
            let stopped = watch.stopped.shallow_clone();
            self.put_statistics_back(&statistics, Some(&stopped));
            self.method.settle(Outcome::UndoneWhere(&stopped));
            let parts: Vec<&Tensor> = [&norms].into_iter().chain(apart_norms.iter().flatten().map(|(each, _)| each)).collect();
            let known = Known::of(&check, &rows, &parts, self.variables(&apart));
            let unseen = Unseen { step: clock.step, known, host: counters, batches: batches(&placed) };
            self.watch.as_mut().expect("made above").remember(unseen);
        }
        if let Some(clip) = clip {
            clip_to(&mut gradient, &grad_norm, clip);
            apart.iter_mut().zip(&apart_norms).for_each(|(g, norm)| {
                if let Some((_, norm)) = norm {
                    clip_to(g, norm, clip)
                }
            });
        }
        let stopped = self.watch.as_ref().filter(|_| !waits).map(|watch| watch.stopped.shallow_clone());
        if !skip {
            self.move_weights(&gradient, &apart, stopped.as_ref(), clock);
        }
        let batch = &placed.last().expect("there is a batch").batch;
        let meta = self.method.meta_due(clock);
        if meta {
            self.confirm()?;
        }
        let started = Instant::now();
        let (cohort, theta) = (&mut self.cohort, &self.theta);
        let after = self.method.after_step(Stepped { cohort, theta, batch, outs: &outs, clock, skip: stopped.as_ref() });
        if let Err(error) = after {
            self.faulty = batches(&placed);
            return Err(match error {
                Error::Diverged { step, what } => {
                    let moved = if skip { UNCHANGED } else { "the networks had already taken this step" };
                    Error::Diverged { step, what: format!("{what}; {moved}") }
                }
                other => other,
            });
        }
        let meta_seconds = meta.then(|| started.elapsed().as_secs_f64());
        self.average_statistics();
        let terms = rows.into_iter().map(|Term { name, peer, weight, value, .. }| TermValue { name, peer, weight, value }).collect();
        let report = StepReport { terms, notes, grad_norm: (!skip).then_some(grad_norm), meta_seconds, packed: None };
        Ok(if waits { report } else { report.packed() })
    }

    /// What a step changes before it is known to be finite, as it is now: counters in host memory, and running statistics.
    fn before_step(&self) -> (Vec<(Tensor, Tensor)>, Vec<Tensor>) {
        let _guard = tch::no_grad_guard();
        let counters = self.counters.iter().map(|(_, t)| (t.shallow_clone(), t.copy())).collect();
        (counters, self.all_statistics.iter().map(Tensor::copy).collect())
    }

    /// Running statistics become what they were; given a scalar on their device, only where it is 1.
    fn put_statistics_back(&mut self, before: &[Tensor], stopped: Option<&Tensor>) {
        let _guard = tch::no_grad_guard();
        let stopped = stopped.filter(|_| !before.is_empty()).map(|flag| flag.to_kind(Kind::Bool));
        for (live, before) in self.all_statistics.iter_mut().zip(before) {
            match &stopped {
                Some(stopped) => drop(before.where_self_out(live, stopped, live)),
                None => live.copy_(before),
            }
        }
    }

    /// The optimizers' steps; nothing moves where `stopped` is 1.
    fn move_weights(&mut self, gradient: &[Tensor], apart: &[Vec<Tensor>], stopped: Option<&Tensor>, clock: Clock) {
        let mut rest = gradient;
        let mut take = |count: usize| {
            let (head, tail) = rest.split_at(count);
            rest = tail;
            head
        };
        self.optimizer.step_unless(stopped, &self.theta, take(self.theta.vars.len()), clock.lr);
        for ((group, optimizer), own) in self.groups.iter_mut().zip(apart) {
            if !group.apart {
                optimizer.step_unless(stopped, &group.params, take(group.params.vars.len()), group.rate.at(clock));
            } else if !own.is_empty() {
                optimizer.step_unless(stopped, &group.params, own, group.rate.at(clock));
            }
        }
    }

    /// Waits until every step taken is known to be finite. To be called before anything is saved, evaluated or shipped.
    pub fn confirm(&mut self) -> Result<()> {
        self.hear(true)
    }

    /// What the device has said of steps before; where one was not finite, what is in host memory becomes what it was before it, as
    /// everything on the device is already.
    fn hear(&mut self, wait: bool) -> Result<()> {
        if let Some(Unseen { step, known, host, batches }) = self.watch.as_mut().and_then(|watch| watch.heard(wait)) {
            put_back(host);
            self.faulty = batches;
            self.stopped = Some((step, format!("{}; {UNCHANGED}", known.fault())));
        }
        match &self.stopped {
            None => Ok(()),
            Some((step, what)) => Err(Error::Diverged { step: *step, what: what.clone() }),
        }
    }

    /// The batches of the step that `step` or `confirm` called not finite.
    pub fn faulty_batches(&self) -> &[Batch] {
        &self.faulty
    }

    /// The names of the gradients: of the main backward pass, then of the groups stepped apart that have one.
    fn variables(&self, apart: &[Vec<Tensor>]) -> Vec<String> {
        let own = |g: &Group| g.params.vars.iter().map(|(n, _)| format!("{}.{n}", g.name)).collect::<Vec<_>>();
        let names = self.theta.vars.iter().map(|(n, _)| n.clone());
        let together = self.groups.iter().filter(|(g, _)| !g.apart).flat_map(|(g, _)| own(g));
        let alone = self.groups.iter().zip(apart).filter(|(_, gradient)| !gradient.is_empty()).flat_map(|((g, _), _)| own(g));
        names.chain(together).chain(alone).collect()
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

    /// The losses on mixed views. The unmixed ones are run first, where the method asks about them: else they would cost a pass and move
    /// running statistics for nothing.
    fn mixed_losses(&mut self, mix: Mix, batch: &Batch, clock: Clock, i: u64) -> Result<(Vec<Outputs>, Terms)> {
        let unmixed = self.method.asks_unmixed().then(|| self.cohort.forward(batch, Mode::Train));
        let mut rng = rng::stream(clock.seed, "mix", &[clock.step as u64, i]);
        let mixed = mix.apply(&batch.views, &batch.labels, &mut rng)?;
        let batch_of_mixed = Batch {
            views: mixed.views.iter().map(Tensor::shallow_clone).collect(),
            labels: batch.labels.shallow_clone(),
            index: batch.index.shallow_clone(),
            noise: rng::derive(batch.noise, "mixed", 0),
        };
        self.ask_frozen(&batch_of_mixed);
        let answers = self.cohort.forward(&batch_of_mixed, Mode::Train);
        let targets = mixed.targets(&batch.labels, answers[0].logit().size()[1]);
        let terms = self.method.mixed_losses(unmixed.as_deref().unwrap_or(&answers), &answers, &targets, batch, clock)?;
        Ok((unmixed.unwrap_or(answers), terms))
    }

    /// The method hears what the networks that do not learn say of the images its losses are about to see.
    fn ask_frozen(&mut self, batch: &Batch) {
        if !self.cohort.frozen.is_empty() {
            self.method.taught_by(self.cohort.frozen_logits(batch, self.cohort.precision));
        }
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
        let at = |what: String| Error::Diverged { step: clock.step, what: format!("{what}; {UNCHANGED}") };
        if self.ranks().count() > 1 {
            if let Some((rank, what)) = self.ranks().first_message(fault) {
                return at(format!("on rank {rank}, {what}"));
            }
        } else if let Some(what) = faulty(rows) {
            return at(what);
        }
        match self.variables(apart).iter().zip(gradient.iter().chain(apart.iter().flatten())).find(|(_, g)| !finite(g)) {
            Some((name, _)) => at(gradient_of(name)),
            None => at(OVERFLOW.into()),
        }
    }
}

/// What every fault of a step is told with but those of what comes after it.
const UNCHANGED: &str = "no weight was changed by this step";

fn batches(placed: &[Placed]) -> Vec<Batch> {
    placed.iter().map(|placed| placed.batch.shallow_clone()).collect()
}

fn finite(t: &Tensor) -> bool {
    t.isfinite().all().int64_value(&[]) != 0
}

/// The first term that is not finite, in words.
fn faulty(rows: &[Term]) -> Option<String> {
    rows.iter().find(|row| !finite(&row.value)).map(|row| term_is(row.name, row.peer, row.value.double_value(&[])))
}

/// The share of a batch that each network tells right while it trains, in percent: one comparison for all of them.
fn told_right(outs: &[Outputs], labels: &Tensor) -> Vec<(String, Tensor)> {
    let _guard = tch::no_grad_guard();
    let logits: Vec<Tensor> = outs.iter().map(|out| out.logit().detach()).collect();
    let right = Tensor::stack(&logits, 0).argmax(-1, false).eq_tensor(&labels.unsqueeze(0)); // [M, B]
    let shares = right.mean_dim(1i64, false, Kind::Float) * 100.0;
    (0..outs.len()).map(|m| (format!("train.peer{m}.top1"), shares.get(m as i64))).collect()
}

/// A number times a factor that is mostly 1.
fn times(value: Tensor, factor: f64) -> Tensor {
    if factor == 1.0 { value } else { value * factor }
}

/// Norms of single tensors, and of all of them taken as one vector.
fn both(norms: Option<Tensor>) -> Option<(Tensor, Tensor)> {
    norms.map(|each| {
        let all = each.norm();
        (each, all)
    })
}

fn accumulate(sum: &mut Vec<Tensor>, part: Vec<Tensor>) {
    *sum = if sum.is_empty() { part } else { lists::sums(std::mem::take(sum), part) };
}

/// As torch's clip_grad_norm_: nothing is read, so nothing waits.
fn clip_to(gradient: &mut [Tensor], norm: &Tensor, clip: f64) {
    let factor = (clip / (norm + 1e-6)).clamp_max(1.0);
    lists::scale(gradient, &factor);
}
