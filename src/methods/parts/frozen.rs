//! Networks that teach and do not learn (`[cohort] frozen`), as methods see them: what a method makes of them, and what they said of a
//! batch.

use tch::Tensor;

use super::super::{METHODS, MethodSpec};
use crate::error::{Error, Result};

/// What a method makes of networks that do not learn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Frozen {
    /// They teach by their logits: how, in a few words.
    Teach(&'static str),
    /// It takes none, and why.
    Refused(&'static str),
}

impl Frozen {
    /// For lists.
    pub fn words(self) -> String {
        match self {
            Frozen::Teach(how) => format!("yes: {how}"),
            Frozen::Refused(_) => "no".into(),
        }
    }
}

impl MethodSpec {
    /// Refuses networks that do not learn where they could teach nothing.
    pub fn check_frozen(&self, count: usize) -> Result<()> {
        match self.frozen {
            Frozen::Refused(why) if count > 0 => {
                let takes = METHODS.iter().filter(|m| matches!(m.frozen, Frozen::Teach(_))).map(|m| m.name).collect::<Vec<_>>();
                Err(Error::input(format!(
                    "[cohort] frozen names {count} network{} that shall teach without learning, and {} takes none: {why}; accepted: method.name={}, or no frozen",
                    if count == 1 { "" } else { "s" },
                    self.name,
                    takes.join(", ")
                )))
            }
            _ => Ok(()),
        }
    }
}

/// What the networks that do not learn say of the images under way. A method that takes them holds one.
#[derive(Default)]
pub struct Said {
    count: usize,
    logits: Vec<Tensor>,
}

impl Said {
    /// By so many networks.
    pub fn by(count: usize) -> Said {
        Said { count, logits: vec![] }
    }

    /// Their logits, F x [B, C], in the place of those before.
    pub fn hear(&mut self, logits: Vec<Tensor>) {
        self.logits = logits;
    }

    /// Their logits, F x [B, C]. Losses without a teacher would be others than the recipe's, silently.
    pub fn logits(&self) -> Result<&[Tensor]> {
        if self.logits.len() == self.count {
            return Ok(&self.logits);
        }
        Err(Error::failed(format!("{} networks that do not learn shall teach, and {} were asked", self.count, self.logits.len())))
    }
}
