//! MCL: Mutual Contrastive Learning for Visual Representation Learning, Yang et al., AAAI 2022 (section 3 of the L-MCL paper).
//! Networks contrast the embeddings of their last features with each other's, in the batch or from memory banks.

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::parts::frozen::Said;
use super::parts::information::{self, Samples};
use super::parts::memory_bank::{BankSetup, MemoryBank};
use super::parts::mode::Mode;
use super::parts::projector::Projector;
use super::{
    Clock, EpochMeans, Frozen, Group, Method, MethodSpec, Needs, Outcome, Reported, Task, at_least, contrast_limits, mutual_rows,
    paired_classes, positive, projector_memory, read_options, resolved, shared_trunk, task_rows, weights,
};
use crate::cohort::Cohort;
use crate::data::{Batch, Sampling};
use crate::error::{Error, Result};
use crate::losses::contrast::{self, Contrast, Pairs, SoftTerms};
use crate::losses::logit;
use crate::losses::terms::Terms;
use crate::nets::Outputs;
use crate::optim::Rule;
use crate::params::{Named, Params, Scope};
use crate::rng;
use crate::system::ranks::Ranks;

pub(super) const SPEC: MethodSpec = MethodSpec {
    name: "mcl",
    about: "Mutual Contrastive Learning (Yang et al. 2022)",
    needs: "independent networks (branch = true: one architecture, all stages but the last two shared), M >= 2, class pairs or a memory bank; ships all",
    reported: Reported::All,
    frozen: Frozen::Teach("as one more peer of the logit level (method.logit = \"dml\" or \"ensemble\")"),
    presets: PRESETS,
    build,
};

/// The released code; its trunk, shared where M is not 2, is `branch = true`.
const PRESETS: &[(&str, &str)] = &[("original", "mode = 'reference'")];

/// Where contrast samples come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Mining {
    /// The other images of the batch, which is drawn in pairs of one class.
    Batch,
    /// A bank with a slot for every training image.
    Memory,
}

/// What the networks learn from each other's logits beside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Logit {
    None,
    /// The mean of all networks' logits teaches them (`--logit-distill` of the released code).
    Ensemble,
    /// Every network teaches every other (Deep Mutual Learning).
    Dml,
}

#[derive(Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    mode: Mode,
    mining: Mining,
    /// Weight of VCL and ICL (Eq. 10).
    alpha: f64,
    /// Weight of the soft terms.
    beta: f64,
    /// Temperature of similarities: by default 0.1 in the batch (CIFAR), 0.07 with a bank (ImageNet).
    tau: Option<f64>,
    /// d, the width of embeddings.
    dim: i64,
    /// Contrast samples of other classes drawn from a bank.
    negatives: usize,
    branch: bool,
    /// None in the paper's text, which calls logit distillation new in L-MCL; protocols/paper/README.md says what speaks against it.
    logit: Logit,
    /// T of the logit level.
    temperature: f64,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            mode: Mode::Paper,
            mining: Mining::Batch,
            alpha: 0.1,
            beta: 1.0,
            tau: None,
            dim: 128,
            negatives: 8192,
            branch: false,
            logit: Logit::None,
            temperature: 3.0,
        }
    }
}

struct Mcl {
    options: Options,
    tau: f64,
    /// zeta, one for each network.
    heads: Vec<Projector>,
    head_params: Params,
    bank: Option<MemoryBank>,
    /// Where the embeddings are: made once, so that no step brings them there.
    pairs: Pairs,
    rule: Rule,
    shared_stages: usize,
    smoothing: f64,
    ranks: Ranks,
    frozen: Said,
}

fn build(task: &Task, options: toml::Table) -> Result<Box<dyn Method>> {
    let mut options: Options = read_options(&SPEC, options)?;
    let tau = *options.tau.get_or_insert(if options.mining == Mining::Batch { 0.1 } else { 0.07 });
    positive("tau", tau)?;
    positive("temperature", options.temperature)?;
    weights(&[("alpha", options.alpha), ("beta", options.beta)])?;
    contrast_limits(options.dim, options.negatives, 1)?;
    at_least("mcl", 2, task.archs.len(), "networks contrast their embeddings with each other's")?;
    if task.frozen > 0 && options.logit == Logit::None {
        return Err(Error::input(
            "mcl with method.logit = \"none\" leaves networks of [cohort] frozen nothing to teach by: embeddings are compared between heads that learn; set method.logit=\"dml\" or \"ensemble\"",
        ));
    }
    let shared_stages = shared_trunk("mcl", task.archs, options.branch, 2)?;
    projector_memory(options.dim, task.archs.iter().map(|arch| arch.dim), 0)?;
    let scope = Scope::root(rng::derive(task.seed, "heads", 0), task.device, task.kind);
    let norm = options.mode.norm();
    let heads = task.archs.iter().enumerate().map(|(m, arch)| Projector::new(scope.sub(m), arch.dim, options.dim, norm)).collect();
    let bank = match options.mining {
        Mining::Batch => {
            paired_classes(task.train_labels)?;
            None
        }
        Mining::Memory => Some(MemoryBank::index(BankSetup {
            networks: task.archs.len(),
            dim: options.dim,
            negatives: options.negatives,
            batch: task.batch,
            layout: options.mode.bank_layout(),
            labels: task.train_labels,
            device: task.device,
            kind: task.kind,
            seed: task.seed,
            ranks: task.ranks,
        })?),
    };
    Ok(Box::new(Mcl {
        options,
        tau,
        heads,
        head_params: scope.params(),
        bank,
        pairs: Pairs::of_networks(task.archs.len(), &Tensor::zeros([0], (task.kind, task.device))),
        rule: task.rule,
        shared_stages,
        smoothing: task.label_smoothing,
        ranks: task.ranks,
        frozen: Said::by(task.frozen),
    }))
}

impl Mcl {
    fn embed(&self, outs: &[Outputs]) -> Vec<Tensor> {
        outs.iter().zip(&self.heads).map(|(o, head)| head.forward(o.feat())).collect()
    }
}

impl Method for Mcl {
    fn needs(&self) -> Needs {
        let sampling = if self.options.mining == Mining::Batch { Sampling::ClassPairs } else { Sampling::Shuffled };
        Needs { sampling, shared_stages: self.shared_stages, ..Needs::default() }
    }

    fn options(&self) -> toml::Table {
        resolved(&self.options)
    }

    fn prepare(&mut self, batch: &Batch, clock: Clock) -> Result<()> {
        self.bank.as_mut().map_or(Ok(()), |bank| bank.prepare(batch, clock))
    }

    fn mixes(&self) -> bool {
        true
    }

    fn asks_unmixed(&self) -> bool {
        true
    }

    fn taught_by(&mut self, frozen: Vec<Tensor>) {
        self.frozen.hear(frozen);
    }

    fn mixed_losses(&self, outs: &[Outputs], mixed: &[Outputs], targets: &Tensor, batch: &Batch, _: Clock) -> Result<Terms> {
        let mut terms = Terms::default();
        task_rows(&mut terms, mixed, targets, self.smoothing);
        let Options { alpha, beta, mode, temperature, .. } = self.options;
        let soft_terms = if mode == Mode::Paper { SoftTerms::PAPER } else { SoftTerms::RELEASED };
        let embeds = Tensor::stack(&self.embed(outs), 0);
        let parts = match &self.bank {
            None => {
                let (embeds, labels) = (self.ranks.for_contrast(&embeds, 1), self.ranks.for_contrast(&batch.labels, 0));
                let in_batch = Contrast::in_batch(&labels, self.tau, embeds.kind());
                information::note(&mut terms, &embeds.unbind(0).iter().collect::<Vec<_>>(), &Samples::Batch(&in_batch));
                contrast::mcl(&embeds, &self.pairs, &in_batch, soft_terms)
            }
            Some(bank) => {
                let (banks, negatives, tau, layout) = (bank.samples()?, self.options.negatives, self.tau, mode.bank_layout());
                let samples = Samples::Memory { banks: &banks, negatives, tau, layout };
                information::note(&mut terms, &embeds.unbind(0).iter().collect::<Vec<_>>(), &samples);
                contrast::mcl_memory(&embeds, &banks, tau, soft_terms, layout)
            }
        };
        for ((name, value), weight) in parts.named().into_iter().zip([alpha, alpha, beta, beta]) {
            terms.add(name, weight, value.shallow_clone());
        }
        let frozen = self.frozen.logits()?;
        match self.options.logit {
            Logit::None => {}
            Logit::Dml => mutual_rows(&mut terms, mixed, frozen, temperature),
            Logit::Ensemble => {
                let all = mixed.iter().map(|o| o.logit().detach()).chain(frozen.iter().map(Tensor::shallow_clone));
                let mean = logit::mean(&all.collect::<Vec<_>>());
                // The released code teaches both of two networks, and of more only the last.
                let first = if mode == Mode::Reference && mixed.len() > 2 { mixed.len() - 1 } else { 0 };
                for (m, own) in mixed.iter().enumerate().skip(first) {
                    terms.add_for(m, "ens", 1.0, logit::kl(&mean, own.logit(), temperature));
                }
            }
        }
        Ok(terms)
    }

    fn groups(&self, _: &Cohort) -> Vec<Group> {
        vec![Group::new("heads", self.head_params.shallow_clone(), self.rule)]
    }

    fn settle(&mut self, outcome: Outcome<'_>) {
        if let Some(bank) = &mut self.bank {
            bank.settle(outcome);
        }
    }

    fn after_batch(&mut self, outs: &[Outputs], batch: &Batch, _: Clock) -> Result<()> {
        if self.bank.is_some() {
            let _guard = tch::no_grad_guard();
            let embeds = self.embed(outs);
            if let Some(bank) = &mut self.bank {
                bank.update(&embeds, &batch.labels, &batch.index);
            }
        }
        Ok(())
    }

    fn remarks(&self, epochs: &[EpochMeans]) -> Vec<String> {
        information::remark(epochs).into_iter().collect()
    }

    fn last_embeddings(&self, outs: &[Outputs]) -> Option<Vec<Tensor>> {
        Some(self.embed(outs))
    }

    fn state(&self) -> Named {
        self.bank.as_ref().map_or(vec![], MemoryBank::state)
    }
}
