//! The `[method]` table of L-MCL: every key, its default with the section it is from, and what is refused.

use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize};

use super::super::parts::mode::Mode;
use super::super::{below_one, contrast_limits, positive, read_options, weights};
use crate::error::{Error, Result};
use crate::limits;
use crate::losses::contrast::SoftTerms;
use crate::optim::Rule;
use crate::optim::reverse_hg::Hvp;

/// Sets of values for keys that a recipe leaves out, as every method has them. L-MCL's are the paper's numbers on its two datasets:
/// "cifar" (section 5.1, the defaults below, and what "paper" stands for) and "imagenet" (section 5.3).
pub(super) const PRESETS: &[(&str, &str)] =
    &[("cifar", "preset = 'cifar'"), ("imagenet", "preset = 'imagenet'\ntau = 0.07\nmining = 'memory'\nmeta_every = 500")];

/// The names of `PRESETS`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Preset {
    /// The paper's numbers for CIFAR-100.
    Cifar,
    /// The paper's numbers for ImageNet.
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
    /// lambda from the meta-network (Eq. 17).
    Weighted,
}

/// Where contrast samples come from (section 4.5).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mining {
    /// The other images of the batch, which is drawn in pairs of one class.
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
    /// Cross-entropy of every stage's classifier (Eq. 14).
    #[serde(deserialize_with = "weight")]
    pub task: f64,
    /// Cross-entropy of the gated ensemble of a network's stages (Eq. 18).
    #[serde(deserialize_with = "weight")]
    pub task_gate: f64,
    /// Distillation from the ensembles of the other networks (Eq. 21).
    #[serde(deserialize_with = "weight")]
    pub ens: f64,
    /// Eq. 2 within L_MCL.
    #[serde(deserialize_with = "weight")]
    pub vcl: f64,
    /// Eq. 5 within L_MCL.
    #[serde(deserialize_with = "weight")]
    pub icl: f64,
    /// Eq. 8 within L_MCL.
    #[serde(deserialize_with = "weight")]
    pub soft_vcl: f64,
    /// Eq. 9 within L_MCL.
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

/// The `[method]` table. The defaults are the paper's numbers for CIFAR-100.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// The paper's text or the released code, where they differ.
    pub mode: Mode,
    /// Which of the `PRESETS` filled what the recipe leaves out. Other methods do not write their preset's name among the resolved
    /// options; this one does since its first runs, whose recipes must keep their hash.
    pub preset: Preset,
    /// Weight of the hard contrastive terms (Eq. 10): 0.1; 0.01 in the released ImageNet script.
    pub alpha: Option<f64>,
    /// Weight of the soft contrastive terms (Eq. 10).
    pub beta: f64,
    /// Temperature of similarities: 0.1 on CIFAR (section 5.1), 0.07 on ImageNet (section 5.3).
    pub tau: f64,
    /// T of the logit distillation (Eq. 21); the released code uses it for the soft contrastive terms too (`Options::soft_terms`).
    pub temperature: f64,
    /// d, the width of embeddings.
    pub dim: i64,
    /// Which layers of two networks meet.
    pub matching: Matching,
    /// Factors on the terms.
    pub terms: TermWeights,
    /// Where contrast samples come from: the batch on CIFAR, a memory bank on ImageNet.
    pub mining: Mining,
    /// K of memory mining: contrast samples of other classes.
    pub negatives: usize,
    /// How many recent images the queue holds.
    pub queue_length: usize,
    /// A meta step follows every so many batches of an epoch, the first included: 50 on CIFAR, 500 on ImageNet. The count starts anew with
    /// each epoch: one of fewer batches has one meta step, after its first batch.
    pub meta_every: usize,
    /// K of Eq. 16, the inner steps on L_MCL.
    pub meta_steps: usize,
    /// How the meta step takes Hessian-vector products.
    pub hvp: Hvp,
    /// Momentum of the inner steps: none in the paper; 0.9 in the released code.
    pub inner_momentum: Option<f64>,
    /// Weight decay of the inner steps: none in the paper; that of the networks in the released code.
    pub inner_weight_decay: Option<f64>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            mode: Mode::Paper,
            preset: Preset::Cifar,
            alpha: None,
            beta: 1.0,
            tau: 0.1,
            temperature: 3.0,
            dim: 128,
            matching: Matching::Weighted,
            terms: TermWeights::default(),
            mining: Mining::Batch,
            negatives: 8192,
            queue_length: 16384,
            meta_every: 50,
            meta_steps: 2,
            hvp: Hvp::Exact,
            inner_momentum: None,
            inner_weight_decay: None,
        }
    }
}

impl Options {
    /// The options a recipe gives, over the preset it names, over the defaults.
    pub fn read(table: toml::Table) -> Result<Options> {
        read_options(&super::SPEC, table)
    }

    /// Every key with its value: what is not given follows `mode`, `preset` and the networks' optimizer. Refuses what cannot be.
    pub(super) fn resolve(mut self, rule: Rule) -> Result<Options> {
        let reference = self.mode == Mode::Reference;
        let (momentum, weight_decay) = match rule {
            Rule::Sgd { weight_decay, .. } if reference => (0.9, weight_decay),
            _ => (0.0, 0.0),
        };
        let alpha = *self.alpha.get_or_insert(if reference && self.preset == Preset::Imagenet { 0.01 } else { 0.1 });
        let inner_momentum = *self.inner_momentum.get_or_insert(momentum);
        let inner_weight_decay = *self.inner_weight_decay.get_or_insert(weight_decay);
        positive("tau", self.tau)?;
        positive("temperature", self.temperature)?;
        weights(&[("alpha", alpha), ("beta", self.beta), ("inner_weight_decay", inner_weight_decay)])?;
        below_one("inner_momentum", inner_momentum)?;
        contrast_limits(self.dim, self.negatives, self.queue_length)?;
        for (key, value) in [("meta_every", self.meta_every), ("meta_steps", self.meta_steps)] {
            limits::count(&format!("[method] {key}"), value, 1, limits::MOST_ROUNDS)?;
        }
        if reference && self.mining == Mining::Queue {
            return Err(Error::input(
                "[method] mining = \"queue\" with mode = \"reference\"; accepted: \"batch\" or \"memory\", as the released code has no queue",
            ));
        }
        Ok(self)
    }

    /// alpha as resolved.
    pub(super) fn alpha(&self) -> f64 {
        self.alpha.expect("resolved when the method was made")
    }

    /// The temperature of the soft contrastive terms, and what they run over: T = 1 over the contrast samples in the paper (Eq. 1 and 4),
    /// `temperature` over whole rows in the released code.
    pub(super) fn soft_terms(&self) -> SoftTerms {
        match self.mode {
            Mode::Paper => SoftTerms::PAPER,
            Mode::Reference => SoftTerms { temperature: self.temperature, diagonal: true },
        }
    }

    /// Is any contrastive term in use?
    pub(super) fn contrastive(&self) -> bool {
        let t = &self.terms;
        self.alpha() * (t.vcl + t.icl) + self.beta * (t.soft_vcl + t.soft_icl) > 0.0
    }

    /// The weights of the terms of L_MCL, in the order of `Parts::named`: alpha (VCL, ICL), then beta (soft VCL, soft ICL).
    pub(super) fn weights(&self) -> [f64; 4] {
        let (t, alpha, beta) = (&self.terms, self.alpha(), self.beta);
        [alpha * t.vcl, alpha * t.icl, beta * t.soft_vcl, beta * t.soft_icl]
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::resolved;
    use super::*;

    const RULE: Rule = Rule::Sgd { momentum: 0.9, weight_decay: 5e-4, nesterov: true };

    fn table(text: &str) -> toml::Table {
        let options = Options::read(text.parse().unwrap()).unwrap().resolve(RULE).unwrap();
        resolved(&options)
    }

    /// What runs made before presets were shared wrote into their recipe: keys, values and so the hash of a recipe must stay.
    #[test]
    fn resolved_options_are_those_of_earlier_runs() {
        let cifar = "mode = \"paper\"\npreset = \"cifar\"\nalpha = 0.1\nbeta = 1.0\ntau = 0.1\ntemperature = 3.0\ndim = 128\n\
            matching = \"weighted\"\nmining = \"batch\"\nnegatives = 8192\nqueue_length = 16384\nmeta_every = 50\nmeta_steps = 2\n\
            hvp = \"exact\"\ninner_momentum = 0.0\ninner_weight_decay = 0.0\n[terms]\ntask = 1.0\ntask_gate = 1.0\nens = 1.0\nvcl = 1.0\n\
            icl = 1.0\nsoft_vcl = 1.0\nsoft_icl = 1.0\ngate = true\n";
        let expected = |changes: &str| {
            let mut table: toml::Table = cifar.parse().unwrap();
            table.extend(changes.parse::<toml::Table>().unwrap());
            table
        };
        assert_eq!(table(""), expected(""));
        assert_eq!(table("preset = \"cifar\""), expected(""));
        assert_eq!(table("preset = \"paper\""), expected(""), "what every method calls the numbers of the paper's tables");
        assert_eq!(table(cifar), expected(""), "a finished run's recipe gives itself");
        let imagenet = "preset = \"imagenet\"\ntau = 0.07\nmining = \"memory\"\nmeta_every = 500";
        assert_eq!(table("preset = \"imagenet\""), expected(imagenet));
        assert_eq!(table("preset = \"imagenet\"\ntau = 0.2"), expected(&format!("{}\n", imagenet.replace("0.07", "0.2"))));
        let reference = "mode = \"reference\"\ninner_momentum = 0.9\ninner_weight_decay = 5e-4";
        assert_eq!(table("mode = \"reference\""), expected(reference));
        assert_eq!(
            table("mode = \"reference\"\npreset = \"imagenet\""),
            expected(&format!("{reference}\n{imagenet}\nalpha = 0.01")),
            "the released ImageNet script has another alpha"
        );
        assert_eq!(table(&table("preset = \"imagenet\"").to_string()), table("preset = \"imagenet\""));
    }

    #[test]
    fn an_unknown_preset_is_refused_with_those_there_are() {
        let error = Options::read("preset = \"original\"".parse().unwrap()).unwrap_err().to_string();
        assert_eq!(error, "[method] preset = \"original\"; accepted: \"paper\", \"cifar\", \"imagenet\"");
    }
}
