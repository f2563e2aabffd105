//! CKD-MKT: Collaborative Knowledge Distillation via Multi-knowledge Transfer, Gou et al., TNNLS 2022 (arXiv 2101.08471). Networks
//! learn from the predictions and the relations of their peers and from frozen copies of themselves that a first phase trained alone.
//!
//! No code was released and the weights are not published: the defaults below give every part the magnitude of a cross-entropy.

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Reduction, Tensor};

use super::{
    Batches, Clock, Frozen, Method, MethodSpec, Needs, Reported, Start, Task, at_least, count, positive, read_options, resolved, weights,
};
use crate::cohort::{Cohort, CohortOptions};
use crate::data::Batch;
use crate::error::{Error, Result};
use crate::losses::logit;
use crate::losses::terms::Terms;
use crate::losses::unit::Norm;
use crate::nets::layers::Mode;
use crate::nets::{Arch, Outputs};
use crate::params::Named;
use crate::rng;

pub(super) const SPEC: MethodSpec = MethodSpec {
    name: "ckd_mkt",
    about: "Collaborative Knowledge Distillation via Multi-knowledge Transfer (Gou et al. 2022)",
    needs: "independent networks, M >= 2; a first phase of as many epochs trains self-teachers; ships all",
    reported: Reported::All,
    frozen: Frozen::Refused("a peer also teaches by relations between features, and its self-teachers are those of its own first phase"),
    presets: &[],
    build,
};

#[derive(Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    /// Of the cross-entropy.
    alpha: f64,
    /// Of what is learnt from peers: distances + beta1 angles + beta2 predictions.
    beta: f64,
    beta1: f64,
    beta2: f64,
    /// Of what is learnt from the self-teacher, at `temperature`.
    gamma: f64,
    temperature: f64,
    /// Epochs of the first phase; by default as many as the recipe's, with the same schedule.
    pretrain_epochs: Option<usize>,
    /// Angles are taken between this many samples of a batch, its first: their number grows with the cube.
    angle_samples: usize,
}

impl Default for Options {
    fn default() -> Options {
        Options { alpha: 1.0, beta: 1.0, beta1: 2.0, beta2: 1.0, gamma: 1.0, temperature: 3.0, pretrain_epochs: None, angle_samples: 128 }
    }
}

struct CkdMkt {
    options: Options,
    pretrain: usize,
    archs: Vec<&'static Arch>,
    classes: i64,
    device: Device,
    kind: Kind,
    seed: u64,
    smoothing: f64,
    /// The networks at the end of the first phase.
    teachers: Cohort,
    /// Their logits on the batch under way.
    targets: Vec<Tensor>,
}

fn build(task: &Task, options: toml::Table) -> Result<Box<dyn Method>> {
    let mut options: Options = read_options(&SPEC, options)?;
    let pretrain = *options.pretrain_epochs.get_or_insert(task.epochs);
    positive("temperature", options.temperature)?;
    let Options { alpha, beta, beta1, beta2, gamma, .. } = options;
    weights(&[("alpha", alpha), ("beta", beta), ("beta1", beta1), ("beta2", beta2), ("gamma", gamma)])?;
    at_least("ckd_mkt", 2, task.archs.len(), "a network learns from its peers")?;
    if pretrain == 0 && gamma > 0.0 {
        return Err(Error::input(
            "[method] pretrain_epochs = 0 leaves self-teachers that know nothing; accepted: 1 or more, or gamma = 0 for none",
        ));
    }
    count("angle_samples", options.angle_samples as i64, 2)?;
    let teachers = task.cohort(Needs::default());
    let (archs, classes, device, kind, seed, smoothing) =
        (task.archs.to_vec(), task.classes, task.device, task.kind, task.seed, task.label_smoothing);
    Ok(Box::new(CkdMkt { options, pretrain, archs, classes, device, kind, seed, smoothing, teachers, targets: vec![] }))
}

/// psi_D: distances between all features of a batch over their mean (RKD, Park et al. 2019). [N, D] -> [N, N].
pub fn distances(feats: &Tensor) -> Tensor {
    let squares = feats.square().sum_dim_intlist(-1i64, true, None);
    let own = Tensor::eye(feats.size()[0], (Kind::Bool, feats.device()));
    let table = (&squares + squares.tr() - feats.matmul(&feats.tr()) * 2.0).clamp_min(1e-12).sqrt().masked_fill(&own, 0.0);
    let others = own.logical_not().to_kind(table.kind()).sum(None);
    &table / (table.sum(None) / others)
}

/// psi_A: the cosine of the angle at v between u and w, for all triples; 0 where two features coincide. [N, D] -> [N, N, N] as (v, u, w).
pub fn angles(feats: &Tensor) -> Tensor {
    let apart = feats.unsqueeze(0) - feats.unsqueeze(1); // (v, u): e_u - e_v
    let unit = Norm::GuardedSquare.apply(&apart);
    unit.bmm(&unit.transpose(1, 2))
}

/// The mean Huber loss between two tables of relations; the teacher's is detached.
pub fn relation(teacher: &Tensor, student: &Tensor) -> Tensor {
    student.smooth_l1_loss(&teacher.detach(), Reduction::Mean, 1.0)
}

impl Method for CkdMkt {
    fn options(&self) -> toml::Table {
        resolved(&self.options)
    }

    fn extra_epochs(&self) -> usize {
        self.pretrain
    }

    /// Between the phases: what the networks are becomes the self-teachers, and they start again from other weights.
    fn epoch_start(&mut self, cohort: &mut Cohort, _: Option<&mut Batches>, clock: Clock) -> Result<Start> {
        if clock.epoch != self.pretrain || self.pretrain == 0 {
            return Ok(Start::Continued);
        }
        self.teachers.params().copy_from(&cohort.params());
        let seed = rng::derive(self.seed, "second phase", 0);
        let fresh = Cohort::new(&CohortOptions {
            archs: &self.archs,
            classes: self.classes,
            branches: false,
            shared_stages: 0,
            device: self.device,
            kind: self.kind,
            seed,
            ranks: cohort.ranks,
        });
        cohort.params().copy_from(&fresh.params());
        Ok(Start::Anew)
    }

    fn prepare(&mut self, batch: &Batch, clock: Clock) -> Result<()> {
        if clock.epoch >= self.pretrain && self.options.gamma > 0.0 {
            let _guard = tch::no_grad_guard();
            self.targets = self.teachers.forward(batch, Mode::Eval).into_iter().map(|o| o.logit().shallow_clone()).collect();
        }
        Ok(())
    }

    fn losses(&self, outs: &[Outputs], batch: &Batch, clock: Clock) -> Result<Terms> {
        let mut terms = Terms::default();
        let first_phase = clock.epoch < self.pretrain;
        let Options { alpha, beta, beta1, beta2, gamma, temperature, .. } = self.options;
        for (k, own) in outs.iter().enumerate() {
            terms.add_for(k, "task", if first_phase { 1.0 } else { alpha }, logit::smooth_ce(own.logit(), &batch.labels, self.smoothing));
        }
        if first_phase {
            return Ok(terms);
        }
        let samples = (self.options.angle_samples as i64).min(batch.labels.size()[0]);
        let of =
            |weight: f64, psi: &dyn Fn(&Tensor) -> Tensor| if weight > 0.0 { outs.iter().map(|o| psi(o.feat())).collect() } else { vec![] };
        let (d, a): (Vec<Tensor>, Vec<Tensor>) = (of(beta, &distances), of(beta * beta1, &|feats| angles(&feats.narrow(0, 0, samples))));
        let logits: Vec<&Tensor> = outs.iter().map(Outputs::logit).collect();
        // The mean over the peers, so that the terms do not grow with the cohort.
        let mean = |k: usize, psi: &[Tensor]| {
            let rows = psi.iter().enumerate().filter(|(n, _)| *n != k).map(|(_, peer)| relation(peer, &psi[k]));
            rows.reduce(|sum, row| sum + row).expect("a peer to learn from") / (outs.len() - 1) as f64
        };
        for k in 0..outs.len() {
            if !d.is_empty() {
                terms.add_for(k, "distance", beta, mean(k, &d));
            }
            if !a.is_empty() {
                terms.add_for(k, "angle", beta * beta1, mean(k, &a));
            }
            terms.add_for(k, "mutual", beta * beta2, logit::mutual(&logits, k, 1.0));
            if let Some(teacher) = self.targets.get(k) {
                terms.add_for(k, "self", gamma, logit::kl(teacher, logits[k], temperature));
            }
        }
        Ok(terms)
    }

    fn state(&self) -> Named {
        self.teachers.params().prefixed("teacher.").named()
    }
}
