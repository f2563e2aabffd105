//! `mode`: whether MCL and L-MCL follow the paper's text or the authors' released code where the two differ.

use serde::{Deserialize, Serialize};

use crate::losses::contrast::BankLayout;
use crate::losses::unit::Norm;

/// Whose word counts where the paper's text and its released code differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// The text. Soft terms compare plain distributions over the contrast samples; a bank gives one positive.
    Paper,
    /// The released code. Soft terms compare whole rows at the temperature of the logits; a bank gives two positives.
    Reference,
}

impl Mode {
    /// How embeddings are brought to length 1.
    pub(crate) fn norm(self) -> Norm {
        match self {
            Mode::Paper => Norm::Guarded,
            Mode::Reference => Norm::Bare,
        }
    }

    /// What a memory bank gives each anchor.
    pub(crate) fn bank_layout(self) -> BankLayout {
        match self {
            Mode::Paper => BankLayout::Paper,
            Mode::Reference => BankLayout::Released,
        }
    }
}
