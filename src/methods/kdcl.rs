//! KDCL: Online Knowledge Distillation via Collaborative Learning, Guo et al., CVPR 2020. Each network sees its own augmentation of
//! the images; all learn from one teacher put together from their logits.

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::parts::frozen::Said;
use super::{
    Batches, Clock, Frozen, Method, MethodSpec, Needs, Reported, Start, Task, Views, at_least, positive, read_options, resolved, task_rows,
    weights,
};
use crate::cohort::Cohort;
use crate::data::Batch;
use crate::error::{Error, Result};
use crate::losses::logit;
use crate::losses::terms::Terms;
use crate::nets::Outputs;
use crate::nets::layers::Mode;
use crate::params::Named;
use crate::system::arrival;
use crate::system::device::Precision;

pub(super) const SPEC: MethodSpec = MethodSpec {
    name: "kdcl",
    about: "Online Knowledge Distillation via Collaborative Learning (Guo et al. 2020)",
    needs: "independent networks, M >= 2, or one and a frozen one, a view each; the default teacher is general with data.holdout, linear without; ships all",
    reported: Reported::All,
    frozen: Frozen::Teach("as one more candidate for the teacher"),
    presets: &[],
    build,
};

/// How the teacher is put together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Teacher {
    /// The network with the lowest cross-entropy, sample by sample.
    Naive,
    /// The smallest margin over the true class, logit by logit.
    Minlogit,
    /// The convex combination with the lowest cross-entropy on the batch.
    Linear,
    /// The combination that minimises the generalisation error on held-out images, found anew each epoch.
    General,
}

#[derive(Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    /// The L-MCL paper describes the general one, which is also the original's best on CIFAR-100; it needs held-out images. Without them,
    /// and where a recipe does not say, the linear one: with minlogit the original's best on ImageNet.
    teacher: Option<Teacher>,
    temperature: f64,
    /// Of the divergences from the teacher (lambda).
    weight: f64,
    /// The general teacher's weights may be negative; this cuts them at 0 and scales them to sum to 1.
    clip_nonneg: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options { teacher: None, temperature: 2.0, weight: 1.0, clip_nonneg: false }
    }
}

struct Kdcl {
    /// With the teacher resolved.
    options: Options,
    teacher: Teacher,
    /// w of the general teacher on the CPU, [M + F]: networks that learn, then those that do not.
    mixture: Tensor,
    smoothing: f64,
    frozen: Said,
}

fn build(task: &Task, options: toml::Table) -> Result<Box<dyn Method>> {
    let mut options: Options = read_options(&SPEC, options)?;
    let teacher = *options.teacher.get_or_insert(if task.holdout > 0 { Teacher::General } else { Teacher::Linear });
    positive("temperature", options.temperature)?;
    weights(&[("weight", options.weight)])?;
    let candidates = task.archs.len() + task.frozen;
    at_least("kdcl", 2, candidates, "the teacher is put together from several networks, of which [cohort] frozen may be one")?;
    if task.frozen > 0 && options.weight == 0.0 {
        return Err(Error::input("kdcl with method.weight = 0 leaves networks of [cohort] frozen nothing to teach by; accepted: above 0"));
    }
    if teacher == Teacher::General && task.holdout == 0 {
        return Err(Error::input(
            "kdcl with method.teacher = general weighs its networks by their errors on held-out images, and data.holdout = 0; set data.holdout=20, or leave the teacher out, which then is linear",
        ));
    }
    let mixture = uniform(candidates as i64);
    Ok(Box::new(Kdcl { options, teacher, mixture, smoothing: task.label_smoothing, frozen: Said::by(task.frozen) }))
}

fn uniform(count: i64) -> Tensor {
    Tensor::full([count], 1.0 / count as f64, (Kind::Double, Device::Cpu)) // on the CPU: M numbers
}

/// The logits of the network with the lowest cross-entropy, the first of equals. `logits` [M, B, C], `labels` `[B]` -> [B, C].
pub fn naive(logits: &Tensor, labels: &Tensor) -> Tensor {
    let labels = labels.unsqueeze(0).unsqueeze(-1).expand([logits.size()[0], -1, -1], false);
    let truth = logits.log_softmax(-1, None).gather(-1, &labels, false).squeeze_dim(-1); // [M, B]
    // `max` may return any of equal places; here it is the first.
    let best = truth.eq_tensor(&truth.amax(0i64, true)).to_kind(Kind::Int64); // [M, B]
    let first = (best.cumsum(0, None) * &best).eq(1).to_kind(logits.kind());
    (first.unsqueeze(-1) * logits).sum_dim_intlist(0i64, false, None)
}

/// min over networks of the logits relative to the true class: never worse than the best network. [M, B, C] -> [B, C].
pub fn minlogit(logits: &Tensor, labels: &Tensor) -> Tensor {
    let labels = labels.unsqueeze(0).unsqueeze(-1).expand([logits.size()[0], -1, -1], false);
    (logits - logits.gather(-1, &labels, false)).amin(0i64, false)
}

/// The weights on the simplex with the lowest cross-entropy of the mixed logits over the batch: a convex problem, 50 steps of
/// projected gradient. [M, B, C] -> `[M]`.
pub fn linear(logits: &Tensor, labels: &Tensor) -> Tensor {
    let _guard = tch::no_grad_guard();
    let (count, size) = (logits.size()[0], logits.size());
    let truth = labels.one_hot(size[2]).to_kind(logits.kind()); // [B, C]
    // On the simplex only differences between networks move the mixture: the smaller they are, the larger a step is safe.
    let mean = logits.mean_dim(0i64, false, None);
    let spread = logits - &mean;
    let centred = &spread - spread.mean_dim(-1i64, true, None);
    let steepness = centred.square().sum(None) * (0.5 / size[1] as f64) + 1e-12;
    let mut alpha = Tensor::full([count], 1.0 / count as f64, (logits.kind(), logits.device()));
    for _ in 0..50 {
        let mixed = &mean + (alpha.view([-1, 1, 1]) * &spread).sum_dim_intlist(0i64, false, None);
        let residual = (mixed.softmax(-1, None) - &truth) / size[1] as f64;
        let slope = (&spread * residual).sum_dim_intlist([1i64, 2].as_slice(), false, None);
        alpha = onto_simplex(&(alpha - slope / &steepness));
    }
    alpha
}

/// The nearest point with entries of 0 or more that sum to 1 (Duchi et al. 2008). [M] -> [M].
fn onto_simplex(point: &Tensor) -> Tensor {
    let (sorted, _) = point.sort(0, true);
    let rank = Tensor::arange_start(1, point.size()[0] + 1, (point.kind(), point.device()));
    let excess = (sorted.cumsum(0, None) - 1.0) / &rank;
    // One entry at least is kept, but for logits that are not finite: those are the loss's to name.
    let kept = (sorted.gt_tensor(&excess).sum(Kind::Int64) - 1).clamp_min(0);
    (point - excess.gather(0, &kept.view([1]), false)).clamp_min(0.0)
}

/// w = C^-1 1 / (1' C^-1 1): the weights that sum to 1 with the smallest w' C w. `errors` C [M, M]; a ridge of 1e-6 of its mean
/// diagonal keeps equal networks apart, and makes their weights equal.
pub fn general(errors: &Tensor) -> Tensor {
    let count = errors.size()[0];
    let ridge = Tensor::eye(count, (errors.kind(), errors.device())) * (errors.trace() * (1e-6 / count as f64) + f64::MIN_POSITIVE);
    let raw = Tensor::linalg_solve(&(errors + ridge), &Tensor::ones([count], (errors.kind(), errors.device())), true);
    &raw / raw.sum(None)
}

/// Sum over samples of the inner products of the networks' errors: softmax minus one-hot. [M, B, C] -> [M, M] in f64 on the CPU.
pub fn error_products(logits: &Tensor, labels: &Tensor) -> Tensor {
    let errors = logits.softmax(-1, None) - labels.one_hot(logits.size()[2]).to_kind(logits.kind());
    let rows = errors.flatten(1, 2).to_kind(Kind::Double).to_device(Device::Cpu); // on the CPU: solved there
    rows.matmul(&rows.tr())
}

/// The logits of all candidates for the teacher, [M + F, B, C].
fn stacked(outs: &[Outputs], frozen: &[Tensor]) -> Tensor {
    let all = outs.iter().map(|o| o.logit().detach()).chain(frozen.iter().map(Tensor::shallow_clone));
    Tensor::stack(&all.collect::<Vec<_>>(), 0)
}

impl Method for Kdcl {
    fn needs(&self) -> Needs {
        Needs { views: Views::PerPeer, ..Needs::default() }
    }

    fn options(&self) -> toml::Table {
        resolved(&self.options)
    }

    fn epoch_start(&mut self, cohort: &mut Cohort, holdout: Option<&mut Batches>, clock: Clock) -> Result<Start> {
        // Networks that have learnt nothing yet count the same.
        if self.teacher != Teacher::General || clock.epoch == 0 {
            return Ok(Start::Continued);
        }
        let _guard = tch::no_grad_guard();
        let count = (cohort.peers.len() + cohort.frozen.len()) as i64;
        let mut products = Tensor::zeros([count, count], (Kind::Double, Device::Cpu)); // on the CPU: M numbers
        let mut images = 0;
        for batch in holdout.ok_or_else(|| Error::failed("kdcl was not given the held-out images"))? {
            let mut batch = batch?;
            let device = cohort.peers[0].net.classifier.weight.device();
            batch.views.iter_mut().for_each(|v| *v = v.to_device(device));
            batch.labels = batch.labels.to_device(device);
            let frozen = cohort.frozen_logits(&batch, Precision::F32);
            products += error_products(&stacked(&cohort.forward(&batch, Mode::Eval), &frozen), &batch.labels);
            images += batch.labels.size()[0];
        }
        let mut mixture = general(&(products / images as f64));
        if self.options.clip_nonneg {
            mixture = mixture.clamp_min(0.0);
            mixture = &mixture / mixture.sum(None);
        }
        self.mixture.copy_(&mixture);
        Ok(Start::Continued)
    }

    fn taught_by(&mut self, frozen: Vec<Tensor>) {
        self.frozen.hear(frozen);
    }

    fn losses(&self, outs: &[Outputs], batch: &Batch, _: Clock) -> Result<Terms> {
        let mut terms = Terms::default();
        task_rows(&mut terms, outs, &batch.labels, self.smoothing);
        let logits = stacked(outs, self.frozen.logits()?);
        let mixed = |w: &Tensor| {
            (arrival::send(&w.to_kind(logits.kind()), logits.device()).view([-1, 1, 1]) * &logits).sum_dim_intlist(0i64, false, None)
        };
        let (teacher, mixture) = match self.teacher {
            Teacher::Naive => (naive(&logits, &batch.labels), None),
            Teacher::Minlogit => (minlogit(&logits, &batch.labels), None),
            Teacher::Linear => {
                let w = linear(&logits, &batch.labels);
                (mixed(&w), Some(w))
            }
            Teacher::General => (mixed(&self.mixture), Some(self.mixture.shallow_clone())),
        };
        for (m, own) in outs.iter().enumerate() {
            terms.add_for(m, "ens", self.options.weight, logit::kl(&teacher, own.logit(), self.options.temperature));
        }
        for (m, weight) in mixture.iter().flat_map(|w| w.unbind(0)).enumerate() {
            let name = if m < outs.len() { format!("teacher.peer{m}") } else { format!("teacher.frozen{}", m - outs.len()) };
            terms.note(name, &weight);
        }
        Ok(terms)
    }

    fn state(&self) -> Named {
        vec![("mixture".into(), self.mixture.shallow_clone())]
    }
}
