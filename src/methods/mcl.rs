//! MCL: Mutual Contrastive Learning for Visual Representation Learning, Yang et al., AAAI 2022 (section 3 of the L-MCL paper).
//! Networks contrast the embeddings of their last features with each other's, in the batch or from memory banks.

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::parts::information::{self, Samples};
use super::parts::memory_bank::{Draw, Ground, MemoryBank};
use super::parts::projector::{Norm, Projector};
use super::{
    Clock, Group, Method, MethodSpec, Needs, Task, at_least, mutual_rows, one_architecture, paired_classes, positive, read_options,
    resolved, task_rows, weights,
};
use crate::cohort::Cohort;
use crate::data::{Batch, Sampling};
use crate::error::{Error, Result};
use crate::losses::contrast::{self, Contrast, Mimicry, Recall};
use crate::losses::logit;
use crate::losses::terms::Terms;
use crate::nets::Outputs;
use crate::optim::Rule;
use crate::params::{Named, Params, Scope};
use crate::rng;
use crate::system::ranks::Ranks;

pub const SPEC: MethodSpec = MethodSpec {
    name: "mcl",
    about: "Mutual Contrastive Learning (Yang et al. 2022)",
    needs: "independent networks (branch = true: one architecture, all stages but the last two shared), M >= 2, class pairs or a memory bank; ships all",
    build,
};

/// The released code; its trunk, shared where M is not 2, is `branch = true`.
const PRESETS: &[(&str, &str)] = &[("original", "mode = 'reference'")];

/// Whose word counts where the text and the released code differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Mode {
    /// Soft terms compare plain distributions over the contrast samples.
    Paper,
    /// Soft terms at T = 3 over whole rows; two positives in a bank.
    Reference,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Mining {
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
    /// The paper's rows may include logit distillation (the released numbers without are lower): both can be run.
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
    drawn: Option<Draw>,
    rule: Rule,
    shared_stages: usize,
    smoothing: f64,
    ranks: Ranks,
}

fn build(task: &Task, options: toml::Table) -> Result<Box<dyn Method>> {
    let mut options: Options = read_options(options, PRESETS)?;
    let tau = *options.tau.get_or_insert(if options.mining == Mining::Batch { 0.1 } else { 0.07 });
    positive("tau", tau)?;
    positive("temperature", options.temperature)?;
    weights(&[("alpha", options.alpha), ("beta", options.beta)])?;
    for (key, value) in [("dim", options.dim), ("negatives", options.negatives as i64)] {
        if value < 1 {
            return Err(Error::input(format!("[method] {key} = {value}; accepted: 1 or more")));
        }
    }
    at_least("mcl", 2, task.archs, "networks contrast their embeddings with each other's")?;
    let depth = task.archs[0].depth;
    if options.branch {
        one_architecture(
            "mcl with branch = true",
            task.archs,
            "they are branches of one trunk; set method.branch=false for independent networks",
        )?;
    }
    let scope = Scope::root(rng::derive(task.seed, "heads", 0), task.device, task.kind);
    let norm = if options.mode == Mode::Paper { Norm::Guarded } else { Norm::Bare };
    let heads = task.archs.iter().enumerate().map(|(m, arch)| Projector::new(scope.sub(m), arch.dim, options.dim, norm)).collect();
    let bank = match options.mining {
        Mining::Batch => {
            paired_classes(task.train_labels)?;
            None
        }
        Mining::Memory => Some(MemoryBank::index(Ground {
            networks: task.archs.len(),
            dim: options.dim,
            negatives: options.negatives,
            recall: recall(options.mode),
            labels: task.train_labels,
            device: task.device,
            kind: task.kind,
            seed: task.seed,
            ranks: task.ranks,
        })?),
    };
    let shared_stages = if options.branch { depth.saturating_sub(2).max(1) } else { 0 };
    Ok(Box::new(Mcl {
        options,
        tau,
        heads,
        head_params: scope.params(),
        bank,
        drawn: None,
        rule: task.rule,
        shared_stages,
        smoothing: task.label_smoothing,
        ranks: task.ranks,
    }))
}

fn recall(mode: Mode) -> Recall {
    if mode == Mode::Paper { Recall::Paper } else { Recall::Released }
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
        if let Some(bank) = &self.bank {
            let mut rng = rng::stream(clock.seed, "contrast", &[clock.step as u64, batch.noise]);
            self.drawn = Some(bank.draw(&batch.labels, &batch.index, &mut rng)?);
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
        let mut terms = Terms::default();
        task_rows(&mut terms, mixed, targets, self.smoothing);
        let Options { alpha, beta, mode, temperature, .. } = self.options;
        let mimicry = if mode == Mode::Paper { Mimicry::PAPER } else { Mimicry::RELEASED };
        let embeds = Tensor::stack(&self.embed(outs), 0);
        let parts = match (&self.bank, &self.drawn) {
            (None, _) => {
                let (embeds, labels) = (self.ranks.for_contrast(&embeds, 1), self.ranks.for_contrast(&batch.labels, 0));
                let in_batch = Contrast::in_batch(&labels, self.tau, embeds.kind());
                information::note(&mut terms, &embeds.unbind(0).iter().collect::<Vec<_>>(), &Samples::Batch(&in_batch));
                contrast::mcl(&embeds, &in_batch, mimicry)
            }
            (Some(bank), Some(drawn)) => {
                let (banks, negatives, tau, recall) = (bank.recalled(drawn), self.options.negatives, self.tau, recall(mode));
                let samples = Samples::Memory { banks: &banks, negatives, tau, recall };
                information::note(&mut terms, &embeds.unbind(0).iter().collect::<Vec<_>>(), &samples);
                contrast::mcl_memory(&embeds, &banks, tau, mimicry, recall)
            }
            (Some(_), None) => return Err(Error::failed("mcl: losses were asked for before `prepare` drew contrast samples")),
        };
        for (name, weight, value) in
            [("vcl", alpha, parts.vcl), ("icl", alpha, parts.icl), ("soft_vcl", beta, parts.soft_vcl), ("soft_icl", beta, parts.soft_icl)]
        {
            terms.add(name, weight, value);
        }
        match self.options.logit {
            Logit::None => {}
            Logit::Dml => mutual_rows(&mut terms, mixed, temperature),
            Logit::Ensemble => {
                let mean = logit::mean(&mixed.iter().map(|o| o.logit().detach()).collect::<Vec<_>>());
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

    fn remarks(&self, means: &[(String, f64)]) -> Vec<String> {
        information::remark(means).into_iter().collect()
    }

    fn state(&self) -> Named {
        self.bank.as_ref().map_or(vec![], MemoryBank::state)
    }
}
