//! Layer-wise Mutual Contrastive Learning: the paper this package is built on, in its own words (`mode = "paper"`) and as its authors'
//! released code does it (`mode = "reference"`). Every stage of every network has an embedding and a classifier; embeddings of
//! different networks teach each other in all layer pairs, weighted by a meta-network that a bilevel scheme trains.
//!
//! Where to find what:
//! - every option, its default, and the temperature of the soft terms (`Options::soft_terms`): options.rs
//! - L_MCL, Eq. 13: embeddings, lambda, the four contrastive terms and their weights: contrastive.rs, over losses/contrast.rs
//! - the task, the gate and the distillation of logits, Eq. 14 and 18-21: logits.rs, over losses/logit.rs and parts/gate.rs
//! - lambda itself, Eq. 17: parts/meta_network.rs; the meta step that trains it, Eq. 16: meta_step.rs, over optim/reverse_hg.rs
//! - what is logged beside the losses: notes.rs
//! - this file: how the modules are made, and the method as the trainer sees it.

mod contrastive;
mod logits;
mod meta_step;
mod notes;
mod options;

use tch::{Device, Kind, Tensor};

use self::contrastive::{Evaluated, Lambda};
pub use self::notes::LayerPair;
pub use self::options::{Matching, Mining, Options, Preset, TermWeights};
use super::parts::frozen::Said;
use super::parts::gate::Gate;
use super::parts::information;
use super::parts::memory_bank::{BankSetup, MemoryBank};
use super::parts::meta_network::MetaNetwork;
pub use super::parts::mode::Mode;
use super::parts::projector::Projector;
use super::{
    Clock, EpochMeans, Frozen, Group, Method, MethodSpec, Needs, Outcome, Reported, Stepped, Task, at_least, paired_classes,
    projector_memory, resolved,
};
use crate::cohort::Cohort;
use crate::data::{Batch, Sampling};
use crate::error::{Error, Result};
use crate::losses::contrast::{BankLayout, Pairs};
use crate::losses::terms::Terms;
use crate::nets::Outputs;
use crate::optim::{Optimizer, Rule};
use crate::params::{Named, Params, Scope};
use crate::rng;
use crate::system::ranks::Ranks;

pub(super) const SPEC: MethodSpec = MethodSpec {
    name: "l_mcl",
    about: "Layer-wise Mutual Contrastive Learning (Yang et al. 2023)",
    needs: "independent networks, M >= 2, branches; ships any network",
    reported: Reported::All,
    frozen: Frozen::Teach("as one more ensemble of the logit level"),
    presets: options::PRESETS,
    build,
};

/// How many stages a network has, and how wide its pooled features are.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// How many stages have an embedding and a classifier.
    pub stages: usize,
    /// The width of a pooled feature, the same for all stages.
    pub width: i64,
}

/// What the method's modules are made for: of a `Task`, what L-MCL reads.
pub struct Setting<'a> {
    /// Of each network.
    pub shapes: &'a [Shape],
    /// The labels of the training split, in its order.
    pub train_labels: &'a [i64],
    /// Images in a batch.
    pub batch: usize,
    /// The optimizer of the networks.
    pub rule: Rule,
    /// Where the modules live.
    pub device: Device,
    /// The precision of their weights.
    pub kind: Kind,
    /// Decides their starting values.
    pub seed: u64,
    /// Who trains with us.
    pub ranks: Ranks,
}

/// The method with its modules. Embeddings of all networks and stages stand in one list, network by network.
pub struct LMcl {
    /// As resolved.
    options: Options,
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
    rule: Rule,
    /// Label smoothing of the task terms.
    smoothing: f64,
    ranks: Ranks,
    /// What teachers of the logit level that do not learn say.
    frozen: Said,
}

fn build(task: &Task, options: toml::Table) -> Result<Box<dyn Method>> {
    let options = Options::read(options)?;
    if task.frozen > 0 && options.terms.ens == 0.0 {
        return Err(Error::input(
            "l_mcl with method.terms.ens = 0 leaves networks of [cohort] frozen nothing to teach by: they have neither branches nor heads; accepted: above 0",
        ));
    }
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
    Ok(Box::new(LMcl { smoothing: task.label_smoothing, frozen: Said::by(task.frozen), ..LMcl::new(options, &setting)? }))
}

impl LMcl {
    /// The modules, with starting values by the seed; refuses options that cannot be.
    pub fn new(options: Options, setting: &Setting) -> Result<LMcl> {
        let options = options.resolve(setting.rule)?;
        let shapes = setting.shapes;
        at_least("l_mcl", 2, shapes.len(), "networks learn from each other")?;
        let places: Vec<(usize, usize)> = shapes.iter().enumerate().flat_map(|(m, shape)| (0..shape.stages).map(move |l| (m, l))).collect();
        let meet = |&(i, j): &(usize, usize)| {
            let ((a, k), (b, z)) = (places[i], places[j]);
            a != b && (options.matching != Matching::OneToOne || k == z)
        };
        let list = (0..places.len()).flat_map(|i| (i + 1..places.len()).map(move |j| (i, j))).filter(meet).collect();
        let like = Tensor::zeros([0], (setting.kind, setting.device));
        let pairs = Pairs::new(list, places.len(), &like);

        let meta_matrices = if options.matching == Matching::Weighted { places.len() } else { 0 };
        projector_memory(options.dim, places.iter().map(|p| shapes[p.0].width), meta_matrices)?;
        let root = |name: &str| Scope::root(rng::derive(setting.seed, name, 0), setting.device, setting.kind);
        let norm = options.mode.norm();
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
        let setup = |layout| BankSetup {
            networks: shapes.len(),
            dim: options.dim,
            negatives: options.negatives,
            batch: setting.batch,
            layout,
            labels: setting.train_labels,
            device: setting.device,
            kind: setting.kind,
            seed: setting.seed,
            ranks: setting.ranks,
        };
        let bank = match options.mining {
            Mining::Batch => {
                paired_classes(setting.train_labels)?;
                None
            }
            Mining::Memory => Some(MemoryBank::index(setup(options.mode.bank_layout()))?),
            Mining::Queue => Some(MemoryBank::queue(setup(BankLayout::Paper), options.queue_length, setting.batch)?),
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
            rule: setting.rule,
            smoothing: 0.0,
            ranks: setting.ranks,
            frozen: Said::default(),
            options,
        })
    }
}

impl Method for LMcl {
    fn needs(&self) -> Needs {
        let sampling = if self.options.mining == Mining::Batch { Sampling::ClassPairs } else { Sampling::Shuffled };
        Needs { sampling, branches: true, ..Needs::default() }
    }

    fn options(&self) -> toml::Table {
        resolved(&self.options)
    }

    fn prepare(&mut self, batch: &Batch, clock: Clock) -> Result<()> {
        if let Some(bank) = &mut self.bank {
            bank.prepare(batch, clock)?;
        } else if self.options.contrastive() {
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

    fn mixes(&self) -> bool {
        true
    }

    fn asks_unmixed(&self) -> bool {
        self.options.contrastive()
    }

    fn taught_by(&mut self, frozen: Vec<Tensor>) {
        self.frozen.hear(frozen);
    }

    fn mixed_losses(&self, outs: &[Outputs], mixed: &[Outputs], targets: &Tensor, batch: &Batch, _: Clock) -> Result<Terms> {
        let mut terms = Terms::default();
        self.logit_rows(&mut terms, mixed, targets)?;
        if self.options.contrastive() {
            let seen = self.contrast_batch(outs, batch);
            let Evaluated { parts, lambda, .. } = self.l_mcl(&seen, Lambda::Constant, None)?;
            for (name, weight, value) in self.weighted(&parts) {
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
        if self.options.contrastive() {
            groups.push(Group::new("heads", self.head_params.shallow_clone(), self.rule));
        }
        if !self.gates.is_empty() {
            groups.push(Group::new("gates", self.gate_params.shallow_clone(), self.rule));
        }
        groups
    }

    fn settle(&mut self, outcome: Outcome<'_>) {
        if let Some(bank) = &mut self.bank {
            bank.settle(outcome);
        }
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
        self.meta.is_some() && self.options.contrastive() && clock.batch.is_multiple_of(self.options.meta_every)
    }

    fn after_step(&mut self, stepped: Stepped<'_>) -> Result<()> {
        if self.meta_due(stepped.clock) {
            self.meta_step(stepped)?;
        }
        Ok(())
    }

    fn announcements(&self, steps: usize) -> Vec<String> {
        let every = self.options.meta_every;
        if self.meta.is_none() || !self.options.contrastive() {
            return vec![];
        }
        let how_often = match steps <= every {
            true => format!("once an epoch, after its first batch (meta_every = {every}, and an epoch has {steps} batches)"),
            false => format!("after every {every} batches of an epoch, the first included"),
        };
        vec![format!("a meta step follows {how_often}; it takes as long as several steps")]
    }

    fn remarks(&self, epochs: &[EpochMeans]) -> Vec<String> {
        information::remark(epochs).into_iter().collect()
    }

    fn layer_weights(&self, outs: &[Outputs]) -> Vec<(LayerPair, Tensor)> {
        if self.meta.is_some() { self.lambdas(outs) } else { vec![] }
    }

    fn last_embeddings(&self, outs: &[Outputs]) -> Option<Vec<Tensor>> {
        let last = |m: usize| self.heads[self.last(m)].forward(outs[m].feat());
        self.options.contrastive().then(|| (0..outs.len()).map(last).collect())
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
