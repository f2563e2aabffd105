//! Layer-wise Mutual Contrastive Learning: the paper this package is built on, in its own words (`mode = "paper"`) and as its authors'
//! released code does it (`mode = "reference"`). Every stage of every network has an embedding and a classifier; embeddings of
//! different networks teach each other in all layer pairs, weighted by a meta-network that a bilevel scheme trains.

use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::parts::gate::Gate;
use super::parts::information::{self, Samples};
use super::parts::memory_bank::{Draw, Ground, MemoryBank};
use super::parts::meta_network::MetaNetwork;
use super::parts::projector::{Norm, Projector};
use super::{Clock, Group, Method, MethodSpec, Needs, Stepped, Task, paired_classes};
use crate::cohort::Cohort;
use crate::data::{Batch, Sampling};
use crate::error::{Error, Result};
use crate::losses::contrast::{self, Contrast, MemoryTargets, Mimicry, Pairs, Parts, Recall, Targets};
use crate::losses::logit;
use crate::losses::terms::Terms;
use crate::nets::Outputs;
use crate::nets::layers::Mode as NetMode;
use crate::optim::reverse_hg::{Adjoint, Held, Hvp, Leave, Unroll, hypergradient};
use crate::optim::{Optimizer, Rule};
use crate::params::{Named, Params, Scope};
use crate::rng;
use crate::system::device::Precision;
use crate::system::ranks::Ranks;

pub const SPEC: MethodSpec = MethodSpec {
    name: "l_mcl",
    about: "Layer-wise Mutual Contrastive Learning (Yang et al. 2023)",
    needs: "independent networks, M >= 2, branches; ships any network",
    build,
};

/// Whose word counts where the paper's text and its released code differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    Paper,
    Reference,
}

/// The paper's numbers for its two datasets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Preset {
    Cifar,
    Imagenet,
}

/// Which layers of two networks meet (section 5.5).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Matching {
    /// Eq. 24: stages of one number, lambda 1. Stages beyond the shorter network's are left out.
    OneToOne,
    /// lambda 1 everywhere.
    AllToAll,
    /// lambda from the meta-network.
    Weighted,
}

/// Where contrast samples come from (section 4.5).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mining {
    Batch,
    /// A bank with a slot for every training image.
    Memory,
    /// A first-in, first-out queue of recent images.
    Queue,
}

/// Factors on the terms (the ablations of section 5.5): a number, or true/false for 1/0. alpha and beta come on top.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TermWeights {
    #[serde(deserialize_with = "weight")]
    pub task: f64,
    #[serde(deserialize_with = "weight")]
    pub task_gate: f64,
    #[serde(deserialize_with = "weight")]
    pub ens: f64,
    #[serde(deserialize_with = "weight")]
    pub vcl: f64,
    #[serde(deserialize_with = "weight")]
    pub icl: f64,
    #[serde(deserialize_with = "weight")]
    pub soft_vcl: f64,
    #[serde(deserialize_with = "weight")]
    pub soft_icl: f64,
    /// Without the gate, z^ens is the mean of the stages' logits and has no task of its own.
    pub gate: bool,
}

impl Default for TermWeights {
    fn default() -> TermWeights {
        TermWeights { task: 1.0, task_gate: 1.0, ens: 1.0, vcl: 1.0, icl: 1.0, soft_vcl: 1.0, soft_icl: 1.0, gate: true }
    }
}

fn weight<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<f64, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "a number of at least 0, or true or false")]
    enum Given {
        Switch(bool),
        Number(f64),
    }
    match Given::deserialize(from)? {
        Given::Switch(on) => Ok(if on { 1.0 } else { 0.0 }),
        Given::Number(w) if w >= 0.0 && w.is_finite() => Ok(w),
        Given::Number(w) => Err(de::Error::custom(format!("{w} is no weight; accepted: a number of at least 0, or true or false"))),
    }
}

/// The `[method]` table. What is not given follows `mode` and `preset`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    pub mode: Mode,
    pub preset: Preset,
    /// Weight of the hard contrastive terms (Eq. 10): 0.1; 0.01 in the released ImageNet script.
    pub alpha: Option<f64>,
    /// Weight of the soft contrastive terms (Eq. 10).
    pub beta: f64,
    /// Temperature of similarities: 0.1 on CIFAR (section 5.1), 0.07 on ImageNet (section 5.3).
    pub tau: Option<f64>,
    /// T of the logit distillation (Eq. 21); the released code uses it for the soft contrastive terms too.
    pub temperature: f64,
    /// d, the width of embeddings.
    pub dim: i64,
    pub matching: Matching,
    pub terms: TermWeights,
    /// Batch on CIFAR, memory on ImageNet.
    pub mining: Option<Mining>,
    /// K of memory mining.
    pub negatives: usize,
    pub queue_length: usize,
    /// A meta step follows every so many batches of an epoch, the first included: 50 on CIFAR, 500 on ImageNet.
    pub meta_every: Option<usize>,
    /// K of Eq. 16, the inner steps on L_MCL.
    pub meta_steps: usize,
    pub hvp: Hvp,
    /// Momentum and weight decay of the inner steps: none in the paper; 0.9 and the networks' own in the released code.
    pub inner_momentum: Option<f64>,
    pub inner_weight_decay: Option<f64>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            mode: Mode::Paper,
            preset: Preset::Cifar,
            alpha: None,
            beta: 1.0,
            tau: None,
            temperature: 3.0,
            dim: 128,
            matching: Matching::Weighted,
            terms: TermWeights::default(),
            mining: None,
            negatives: 8192,
            queue_length: 16384,
            meta_every: None,
            meta_steps: 2,
            hvp: Hvp::Exact,
            inner_momentum: None,
            inner_weight_decay: None,
        }
    }
}

impl Options {
    fn alpha(&self) -> f64 {
        self.alpha.unwrap_or(if self.mode == Mode::Reference && self.preset == Preset::Imagenet { 0.01 } else { 0.1 })
    }

    fn tau(&self) -> f64 {
        self.tau.unwrap_or(if self.preset == Preset::Imagenet { 0.07 } else { 0.1 })
    }

    fn mining(&self) -> Mining {
        self.mining.unwrap_or(if self.preset == Preset::Imagenet { Mining::Memory } else { Mining::Batch })
    }

    fn meta_every(&self) -> usize {
        self.meta_every.unwrap_or(if self.preset == Preset::Imagenet { 500 } else { 50 })
    }

    fn check(&self) -> Result<()> {
        let refuse = |key: &str, value: String, accepted: &str| Err(Error::input(format!("[method] {key} = {value}: need {accepted}")));
        for (key, value) in [("tau", self.tau()), ("temperature", self.temperature)] {
            if value <= 0.0 || !value.is_finite() {
                return refuse(key, value.to_string(), "a number above 0");
            }
        }
        for (key, value) in [("alpha", self.alpha()), ("beta", self.beta), ("inner_weight_decay", self.inner_weight_decay.unwrap_or(0.0))] {
            if value < 0.0 || !value.is_finite() {
                return refuse(key, value.to_string(), "a number of at least 0");
            }
        }
        let momentum = self.inner_momentum.unwrap_or(0.0);
        if !(0.0..1.0).contains(&momentum) {
            return refuse("inner_momentum", momentum.to_string(), "a number from 0 to below 1");
        }
        if self.dim < 1 {
            return refuse("dim", self.dim.to_string(), "at least 1");
        }
        for (key, value) in [("negatives", self.negatives), ("meta_every", self.meta_every()), ("meta_steps", self.meta_steps)] {
            if value < 1 {
                return refuse(key, value.to_string(), "at least 1");
            }
        }
        if self.mode == Mode::Reference && self.mining() == Mining::Queue {
            return refuse("mining", "queue".into(), "`batch` or `memory` with mode = \"reference\": the released code has no queue");
        }
        Ok(())
    }
}

/// How many stages a network has, and how wide its pooled features are.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub stages: usize,
    pub width: i64,
}

/// What surrounds the method's own modules.
pub struct Setting<'a> {
    pub shapes: &'a [Shape],
    pub train_labels: &'a [i64],
    pub batch: usize,
    pub rule: Rule,
    pub device: Device,
    pub kind: Kind,
    pub seed: u64,
    pub ranks: Ranks,
}

/// The method with its modules. Embeddings of all networks and stages stand in one list, network by network.
pub struct LMcl {
    pub options: Options,
    /// (network, stage) of each embedding.
    places: Vec<(usize, usize)>,
    pairs: Pairs,
    /// zeta, one for each embedding.
    pub heads: Vec<Projector>,
    head_params: Params,
    /// G, one for each network; none without the gate.
    pub gates: Vec<Gate>,
    gate_params: Params,
    /// pi, for weighted matching.
    pub meta: Option<MetaNetwork>,
    meta_params: Params,
    meta_optimizer: Optimizer,
    bank: Option<MemoryBank>,
    drawn: Option<Draw>,
    rule: Rule,
    /// Label smoothing of the task terms.
    smoothing: f64,
    ranks: Ranks,
}

fn build(task: &Task, options: toml::Table) -> Result<Box<dyn Method>> {
    let options: Options = options.try_into().map_err(Error::options("method"))?;
    let shapes: Vec<Shape> = task.archs.iter().map(|arch| Shape { stages: arch.depth, width: arch.dim }).collect();
    let setting = Setting {
        shapes: &shapes,
        train_labels: task.train_labels,
        batch: task.batch,
        rule: task.rule,
        device: task.device,
        kind: task.kind,
        seed: task.seed,
        ranks: task.ranks,
    };
    Ok(Box::new(LMcl { smoothing: task.label_smoothing, ..LMcl::new(options, &setting)? }))
}

/// The soft targets of one evaluation.
enum Frozen {
    Batch(Targets),
    Memory(MemoryTargets),
}

/// What the contrastive terms see of a batch: of this rank, or of all ranks where they gather contrast samples.
struct Seen {
    /// v of all networks and stages, N x [B, d].
    embeds: Vec<Tensor>,
    /// The features the meta-network reads in reference mode, N x [B, width]; empty where nobody reads them.
    feats: Vec<Tensor>,
    labels: Tensor,
}

/// L_MCL evaluated: its parts, lambda [P, B], and what it held constant.
struct Evaluated {
    parts: Parts,
    lambda: Tensor,
    frozen: Frozen,
}

impl LMcl {
    pub fn new(options: Options, setting: &Setting) -> Result<LMcl> {
        options.check()?;
        let shapes = setting.shapes;
        if shapes.len() < 2 {
            return Err(Error::input(format!(
                "method l_mcl needs at least two networks to learn from each other; [cohort] archs lists {}",
                shapes.len()
            )));
        }
        let places: Vec<(usize, usize)> = shapes.iter().enumerate().flat_map(|(m, shape)| (0..shape.stages).map(move |l| (m, l))).collect();
        let meet = |&(i, j): &(usize, usize)| {
            let ((a, k), (b, z)) = (places[i], places[j]);
            a != b && (options.matching != Matching::OneToOne || k == z)
        };
        let list = (0..places.len()).flat_map(|i| (i + 1..places.len()).map(move |j| (i, j))).filter(meet).collect();
        let like = Tensor::zeros([0], (setting.kind, setting.device));
        let pairs = Pairs::new(list, places.len(), &like);

        let root = |name: &str| Scope::root(rng::derive(setting.seed, name, 0), setting.device, setting.kind);
        let norm = if options.mode == Mode::Paper { Norm::Guarded } else { Norm::Bare };
        let (head_scope, gate_scope, meta_scope) = (root("heads"), root("gates"), root("meta"));
        let of = |scope: &Scope, (m, l): (usize, usize)| scope.sub(m).sub(l);
        let heads = places.iter().map(|&p| Projector::new(of(&head_scope, p), shapes[p.0].width, options.dim, norm)).collect();
        let gated = options.terms.gate && (options.terms.task_gate > 0.0 || options.terms.ens > 0.0);
        let gates =
            shapes.iter().enumerate().filter(|_| gated).map(|(m, s)| Gate::new(gate_scope.sub(m), s.stages as i64, s.width)).collect();
        let meta = (options.matching == Matching::Weighted).then(|| {
            let scopes = places.iter().map(|&p| of(&meta_scope, p)).collect();
            match options.mode {
                Mode::Paper => MetaNetwork::on_embeddings(scopes, options.dim, norm),
                Mode::Reference => {
                    let widths: Vec<i64> = places.iter().map(|p| shapes[p.0].width).collect();
                    MetaNetwork::on_features(scopes, &widths, options.dim, norm)
                }
            }
        });
        let meta_params = meta_scope.params();
        // The paper says nothing of pi's optimizer; the released code steps it as the networks, with SGD.
        let meta_rule = match setting.rule {
            Rule::Sgd { weight_decay, .. } => Rule::Sgd { momentum: 0.9, weight_decay, nesterov: true },
            other => other,
        };
        let ground = |recall| Ground {
            networks: shapes.len(),
            dim: options.dim,
            negatives: options.negatives,
            recall,
            labels: setting.train_labels,
            device: setting.device,
            kind: setting.kind,
            seed: setting.seed,
            ranks: setting.ranks,
        };
        let bank = match options.mining() {
            Mining::Batch => {
                paired_classes(setting.train_labels)?;
                None
            }
            Mining::Memory => Some(MemoryBank::index(ground(recall(options.mode)))?),
            Mining::Queue => Some(MemoryBank::queue(ground(Recall::Paper), options.queue_length, setting.batch)?),
        };
        Ok(LMcl {
            places,
            pairs,
            heads,
            head_params: head_scope.params(),
            gates,
            gate_params: gate_scope.params(),
            meta,
            meta_optimizer: Optimizer::new(meta_rule, &meta_params),
            meta_params,
            bank,
            drawn: None,
            rule: setting.rule,
            smoothing: 0.0,
            ranks: setting.ranks,
            options,
        })
    }

    fn contrastive(&self) -> bool {
        let t = &self.options.terms;
        self.options.alpha() * (t.vcl + t.icl) + self.options.beta * (t.soft_vcl + t.soft_icl) > 0.0
    }

    fn mimicry(&self) -> Mimicry {
        match self.options.mode {
            Mode::Paper => Mimicry::PAPER,
            Mode::Reference => Mimicry { temperature: self.options.temperature, diagonal: true },
        }
    }

    /// v of all networks and stages (Eq. 12), N x [B, d].
    pub fn embed(&self, outs: &[Outputs]) -> Vec<Tensor> {
        self.places.iter().zip(&self.heads).map(|(&(m, l), head)| head.forward(&outs[m].feats[l])).collect()
    }

    /// Where in the list network m's last embedding stands.
    fn last(&self, m: usize) -> usize {
        self.places.iter().rposition(|&(net, _)| net == m).expect("a network has stages")
    }

    fn see(&self, outs: &[Outputs], batch: &Batch) -> Seen {
        let own = Seen { embeds: self.embed(outs), feats: self.meta_feats(outs), labels: batch.labels.shallow_clone() };
        // A bank holds all ranks' images already.
        if self.bank.is_some() || !self.ranks.gather_negatives() {
            return own;
        }
        // The embeddings are of one width, the features are not: one exchange each.
        let embeds = self.ranks.for_contrast(&Tensor::stack(&own.embeds, 0), 1).unbind(0);
        let widths: Vec<i64> = own.feats.iter().map(|f| f.size()[1]).collect();
        let feats = match own.feats.is_empty() {
            true => vec![],
            false => self.ranks.for_contrast(&Tensor::cat(&own.feats, 1), 0).split_with_sizes(&widths, 1),
        };
        Seen { embeds, feats, labels: self.ranks.for_contrast(&own.labels, 0) }
    }

    fn meta_feats(&self, outs: &[Outputs]) -> Vec<Tensor> {
        let read = self.meta.is_some() && self.options.mode == Mode::Reference;
        self.places.iter().filter(|_| read).map(|&(m, l)| outs[m].feats[l].shallow_clone()).collect()
    }

    /// lambda of every pair and sample, [P, B].
    fn lambda(&self, embeds: &[Tensor], feats: &[Tensor]) -> Tensor {
        match &self.meta {
            None => Tensor::ones([self.pairs.list.len() as i64, embeds[0].size()[0]], (embeds[0].kind(), embeds[0].device())),
            Some(meta) => meta.lambda(if self.options.mode == Mode::Paper { embeds } else { feats }, &self.pairs),
        }
    }

    fn recalled(&self) -> Result<Vec<Tensor>> {
        match (&self.bank, &self.drawn) {
            (Some(bank), Some(drawn)) => Ok(bank.recalled(drawn)),
            _ => Err(Error::failed("l_mcl: losses were asked for before `prepare` drew contrast samples")),
        }
    }

    /// L_MCL, Eq. 13. With `learn`, lambda carries its graph (the meta step); without, it is a constant (the main step).
    fn l_mcl(&self, seen: &Seen, learn: bool, frozen: Option<&Frozen>) -> Result<Evaluated> {
        let lambda = || self.lambda(&seen.embeds, &seen.feats);
        let lambda = if learn { lambda() } else { tch::no_grad(lambda) };
        let stacked = Tensor::stack(&seen.embeds, 0);
        let (tau, mimicry) = (self.options.tau(), self.mimicry());
        if self.bank.is_none() {
            let contrast = Contrast::in_batch(&seen.labels, tau, stacked.kind());
            let held = frozen.and_then(|f| if let Frozen::Batch(t) = f { Some(t) } else { None });
            let (parts, targets) = contrast::l_mcl(&stacked, &self.pairs, &lambda, &contrast, mimicry, held);
            return Ok(Evaluated { parts, lambda, frozen: Frozen::Batch(targets) });
        }
        let nets: Vec<usize> = self.places.iter().map(|p| p.0).collect();
        let weight = match self.drawn.as_ref().and_then(|d| d.usable.as_ref()) {
            Some(usable) => &lambda * usable,
            None => lambda.shallow_clone(),
        };
        let held = frozen.and_then(|f| if let Frozen::Memory(t) = f { Some(t) } else { None });
        let (parts, targets) =
            contrast::l_mcl_memory(&stacked, &nets, &self.pairs, &weight, &self.recalled()?, tau, mimicry, recall(self.options.mode), held);
        Ok(Evaluated { parts, lambda, frozen: Frozen::Memory(targets) })
    }

    /// alpha (VCL + ICL) + beta (soft VCL + soft ICL), by name.
    fn weighted<'a>(&self, parts: &'a Parts) -> [(&'static str, f64, &'a Tensor); 4] {
        let (t, alpha, beta) = (&self.options.terms, self.options.alpha(), self.options.beta);
        [
            ("vcl", alpha * t.vcl, &parts.vcl),
            ("icl", alpha * t.icl, &parts.icl),
            ("soft_vcl", beta * t.soft_vcl, &parts.soft_vcl),
            ("soft_icl", beta * t.soft_icl, &parts.soft_icl),
        ]
    }

    /// lambda by layer pair, and what the networks' last embeddings know of each other.
    fn note(&self, terms: &mut Terms, seen: &Seen, lambda: &Tensor) -> Result<()> {
        let _guard = tch::no_grad_guard();
        let embeds = &seen.embeds;
        if self.meta.is_some() {
            let means = lambda.mean_dim(1i64, false, None);
            for (p, &(i, j)) in self.pairs.list.iter().enumerate() {
                let ((a, k), (b, z)) = (self.places[i], self.places[j]);
                terms.note(format!("lambda.{a}.{b}.{k}.{z}"), &means.get(p as i64));
            }
        }
        let (tau, networks) = (self.options.tau(), self.places.last().map_or(0, |p| p.0 + 1));
        let last: Vec<&Tensor> = (0..networks).map(|m| &embeds[self.last(m)]).collect();
        if self.bank.is_some() {
            let (banks, negatives, recall) = (self.recalled()?, self.options.negatives, recall(self.options.mode));
            information::note(terms, &last, &Samples::Memory { banks: &banks, negatives, tau, recall });
        } else {
            information::note(terms, &last, &Samples::Batch(&Contrast::in_batch(&seen.labels, tau, last[0].kind())));
        }
        Ok(())
    }

    /// z^ens of every network (Eq. 18).
    fn ensembles(&self, outs: &[Outputs], terms: &mut Terms) -> Vec<Tensor> {
        if self.gates.is_empty() {
            return outs.iter().map(|own| logit::mean(&own.logits)).collect();
        }
        let mut ensembles = vec![];
        for (m, (gate, own)) in self.gates.iter().zip(outs).enumerate() {
            let weights = gate.forward(&own.feats);
            let means = weights.detach().mean_dim(0i64, false, None);
            for l in 0..own.feats.len() {
                terms.note(format!("gate.{m}.{l}"), &means.get(l as i64));
            }
            ensembles.push(logit::ensemble(&weights, &own.logits));
        }
        ensembles
    }

    /// The meta step, Algorithm 1: K steps on L_MCL and one on the task from the present weights, then d pi of the task.
    fn meta_step(&mut self, stepped: Stepped<'_>) -> Result<()> {
        let Stepped { cohort, theta, batch, clock, .. } = stepped;
        let gradient = self.meta_gradient(cohort, theta, batch, clock, self.options.hvp)?;
        let finite = Tensor::stack(&gradient.iter().map(|g| g.isfinite().all()).collect::<Vec<_>>(), 0).all();
        if finite.int64_value(&[]) == 0 {
            return Err(Error::Diverged { step: clock.step, what: "the meta step's gradient for pi is not finite".into() });
        }
        self.meta_optimizer.step(&self.meta_params, &gradient, clock.lr);
        Ok(())
    }

    /// Momentum and weight decay of the inner steps.
    fn inner(&self) -> (f64, f64) {
        let (momentum, weight_decay) = match self.rule {
            Rule::Sgd { weight_decay, .. } if self.options.mode == Mode::Reference => (0.9, weight_decay),
            _ => (0.0, 0.0),
        };
        (self.options.inner_momentum.unwrap_or(momentum), self.options.inner_weight_decay.unwrap_or(weight_decay))
    }

    /// d pi of Eq. 16 at the present weights. In paper mode nothing moves but for the length of the call.
    pub fn meta_gradient(&mut self, cohort: &mut Cohort, theta: &Params, batch: &Batch, clock: Clock, hvp: Hvp) -> Result<Vec<Tensor>> {
        let reference = self.options.mode == Mode::Reference;
        let (momentum, weight_decay) = self.inner();
        let inner = self.options.meta_steps;
        let unroll = Unroll {
            steps: inner + 1,
            lr: clock.lr,
            momentum,
            weight_decay,
            hvp,
            adjoint: if reference { Adjoint::Released } else { Adjoint::Exact },
            leave: if reference { Leave::OneUpdate } else { Leave::Nothing },
            ranks: self.ranks,
        };
        let theta = theta.chain(&self.head_params.prefixed("heads."));
        let mut held: Vec<Option<Frozen>> = (0..inner).map(|_| None).collect();
        let mut first: Option<Vec<Tensor>> = None;
        // Second derivatives and differences of gradients drown in the rounding of half the bits.
        let precision = std::mem::replace(&mut cohort.precision, Precision::F32);
        let gradient = hypergradient(&theta, &self.meta_params.tensors(), unroll, &mut |k, how| {
            let outs = cohort.forward(batch, NetMode::Train);
            if k >= inner {
                let rows: Vec<Tensor> = outs.iter().map(|own| logit::task(&own.logits, &batch.labels, self.smoothing)).collect();
                return Ok(Tensor::stack(&rows, 0).sum(None));
            }
            let seen = self.see(&outs, batch);
            if k == 0 && first.is_none() {
                first = Some((0..outs.len()).map(|m| seen.embeds[self.last(m)].detach()).collect());
            }
            let constants = if how == Held::Remembered { held[k].as_ref() } else { None };
            let evaluated = self.l_mcl(&seen, true, constants)?;
            let rows: Vec<Tensor> =
                self.weighted(&evaluated.parts).iter().filter(|(_, w, _)| *w > 0.0).map(|(_, w, value)| *value * *w).collect();
            if how == Held::Fresh {
                held[k] = Some(evaluated.frozen);
            }
            Ok(Tensor::stack(&rows, 0).sum(None))
        });
        cohort.precision = precision;
        let gradient = gradient?;
        // The released code's last evaluation after its rollback also updates the bank once more.
        if let (true, Some(bank), Some(embeds)) = (reference, &mut self.bank, first) {
            bank.update(&embeds, &batch.labels, &batch.index);
        }
        Ok(gradient)
    }

    /// lambda of each ordered pair of embeddings: (a, b, la, lb) and `[B]`.
    pub fn lambdas(&self, outs: &[Outputs]) -> Vec<((usize, usize, usize, usize), Tensor)> {
        let _guard = tch::no_grad_guard();
        let lambda = self.lambda(&self.embed(outs), &self.meta_feats(outs));
        let mut rows = vec![];
        for (p, &(i, j)) in self.pairs.list.iter().enumerate() {
            let ((a, k), (b, z)) = (self.places[i], self.places[j]);
            rows.push(((a, b, k, z), lambda.get(p as i64)));
            rows.push(((b, a, z, k), lambda.get(p as i64)));
        }
        rows
    }
}

fn recall(mode: Mode) -> Recall {
    if mode == Mode::Paper { Recall::Paper } else { Recall::Released }
}

impl Method for LMcl {
    fn needs(&self) -> Needs {
        let sampling = if self.options.mining() == Mining::Batch { Sampling::ClassPairs } else { Sampling::Shuffled };
        Needs { sampling, branches: true, ..Needs::default() }
    }

    fn options(&self) -> toml::Table {
        let (inner_momentum, inner_weight_decay) = self.inner();
        let resolved = Options {
            alpha: Some(self.options.alpha()),
            tau: Some(self.options.tau()),
            mining: Some(self.options.mining()),
            meta_every: Some(self.options.meta_every()),
            inner_momentum: Some(inner_momentum),
            inner_weight_decay: Some(inner_weight_decay),
            ..self.options.clone()
        };
        toml::Table::try_from(resolved).expect("plain options serialise")
    }

    fn prepare(&mut self, batch: &Batch, clock: Clock) -> Result<()> {
        if let Some(bank) = &self.bank {
            let mut rng = rng::stream(clock.seed, "contrast", &[clock.step as u64, batch.noise]);
            self.drawn = Some(bank.draw(&batch.labels, &batch.index, &mut rng)?);
        } else if self.contrastive() {
            let labels = self.ranks.for_contrast(&batch.labels, 0);
            let mates = labels.unsqueeze(1).eq_tensor(&labels.unsqueeze(0)).sum_dim_intlist(1i64, false, Kind::Int64);
            if mates.min().int64_value(&[]) < 2 {
                return Err(Error::failed(
                    "l_mcl: a batch holds a class only once, so an anchor has no positive; it needs class-pair sampling",
                ));
            }
        }
        Ok(())
    }

    fn losses(&self, outs: &[Outputs], batch: &Batch, clock: Clock) -> Result<Terms> {
        self.mixed_losses(outs, outs, &batch.labels, batch, clock)
    }

    fn mixes(&self) -> bool {
        true
    }

    fn mixed_losses(&self, outs: &[Outputs], mixed: &[Outputs], targets: &Tensor, batch: &Batch, _: Clock) -> Result<Terms> {
        let (mut terms, weights) = (Terms::default(), &self.options.terms);
        for (m, own) in mixed.iter().enumerate().filter(|_| weights.task > 0.0) {
            terms.add_for(m, "task", weights.task, logit::task(&own.logits, targets, self.smoothing));
        }
        if weights.ens > 0.0 || (weights.task_gate > 0.0 && !self.gates.is_empty()) {
            let ensembles = self.ensembles(mixed, &mut terms);
            for (m, ensemble) in ensembles.iter().enumerate().filter(|_| weights.task_gate > 0.0 && !self.gates.is_empty()) {
                terms.add_for(m, "task_gate", weights.task_gate, logit::smooth_ce(ensemble, targets, self.smoothing));
            }
            for (a, own) in mixed.iter().enumerate().filter(|_| weights.ens > 0.0) {
                // Eq. 21 has the other networks for teachers; the released loop lets b = a in.
                let teachers = ensembles.iter().enumerate().filter(|(b, _)| *b != a || self.options.mode == Mode::Reference);
                let rows: Vec<Tensor> = teachers.map(|(_, teacher)| logit::kl(teacher, own.logit(), self.options.temperature)).collect();
                terms.add_for(a, "ens", weights.ens, Tensor::stack(&rows, 0).sum(None));
            }
        }
        if self.contrastive() {
            let seen = self.see(outs, batch);
            let Evaluated { parts, lambda, .. } = self.l_mcl(&seen, false, None)?;
            for (name, weight, value) in self.weighted(&parts).into_iter().filter(|(_, w, _)| *w > 0.0) {
                terms.add(name, weight, value.shallow_clone());
            }
            self.note(&mut terms, &seen, &lambda)?;
        }
        if terms.rows.is_empty() {
            return Err(Error::input("[method] terms: all weights are 0, so there is nothing to minimise"));
        }
        Ok(terms)
    }

    fn groups(&self, _: &Cohort) -> Vec<Group> {
        let mut groups = vec![];
        if self.contrastive() {
            groups.push(Group::new("heads", self.head_params.shallow_clone(), self.rule));
        }
        if !self.gates.is_empty() {
            groups.push(Group::new("gates", self.gate_params.shallow_clone(), self.rule));
        }
        groups
    }

    fn after_batch(&mut self, outs: &[Outputs], batch: &Batch, _: Clock) -> Result<()> {
        if self.bank.is_some() {
            let _guard = tch::no_grad_guard();
            let embeds: Vec<Tensor> = (0..outs.len()).map(|m| self.heads[self.last(m)].forward(outs[m].feat())).collect();
            if let Some(bank) = &mut self.bank {
                bank.update(&embeds, &batch.labels, &batch.index);
            }
        }
        Ok(())
    }

    fn meta_due(&self, clock: Clock) -> bool {
        self.meta.is_some() && self.contrastive() && clock.batch.is_multiple_of(self.options.meta_every())
    }

    fn after_step(&mut self, stepped: Stepped<'_>) -> Result<()> {
        if self.meta_due(stepped.clock) {
            self.meta_step(stepped)?;
        }
        Ok(())
    }

    fn remarks(&self, means: &[(String, f64)]) -> Vec<String> {
        information::remark(means).into_iter().collect()
    }

    fn state(&self) -> Named {
        let prefixed = |prefix: &'static str, named: Named| named.into_iter().map(move |(name, t)| (format!("{prefix}{name}"), t));
        let mut state: Named = vec![];
        if self.meta.is_some() {
            state.extend(prefixed("pi.", self.meta_params.named()));
            state.extend(prefixed("pi.optimizer.", self.meta_optimizer.state()));
        }
        if let Some(bank) = &self.bank {
            state.extend(bank.state());
        }
        state
    }
}
