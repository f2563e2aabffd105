//! Whether every step was finite, learnt without waiting for a device. A flag lives there: it is set by the first step that is not
//! finite, from then on nothing moves, and the host hears of it a few steps later or when it asks.

use std::collections::VecDeque;

use tch::{Device, Kind, Tensor};

use crate::data::Batch;
use crate::losses::terms::Term;
use crate::system::arrival::Arrival;

/// Steps between two questions to the device. Their batches are kept until it has answered.
const ASK_EVERY: usize = 4;

/// Everything that tells whether a step was finite, and what was not.
pub(super) struct Known {
    /// Name and network of each term.
    terms: Vec<(&'static str, Option<usize>)>,
    /// Of the gradients, in the order of `numbers`.
    variables: Vec<String>,
    /// The sum of everything, the terms, the norm of each gradient.
    numbers: Tensor,
}

impl Known {
    /// Of a step: the sum of everything, its terms, the norms of its gradients and whose they are.
    pub fn of(check: &Tensor, rows: &[Term], norms: &[&Tensor], variables: Vec<String>) -> Known {
        let terms = rows.iter().map(|row| (row.name, row.peer)).collect();
        let scalars = [check].into_iter().chain(rows.iter().map(|row| &row.value)).map(|t| t.view([1]));
        let all: Vec<Tensor> = scalars.chain(norms.iter().map(|t| t.shallow_clone())).collect();
        Known { terms, variables, numbers: Tensor::cat(&all, 0) }
    }
    fn values(&self) -> Vec<f64> {
        let home = self.numbers.to_kind(Kind::Double).to_device(Device::Cpu); // waits
        Vec::<f64>::try_from(home).expect("a vector of f64")
    }

    /// Was everything finite?
    pub fn finite(&self) -> bool {
        self.values()[0].is_finite()
    }

    /// What was not, in words.
    pub fn fault(&self) -> String {
        let values = self.values();
        let (terms, norms) = values[1..].split_at(self.terms.len());
        if let Some(((name, peer), value)) = self.terms.iter().zip(terms).find(|(_, value)| !value.is_finite()) {
            return term_is(name, *peer, *value);
        }
        match self.variables.iter().zip(norms).find(|(_, norm)| !norm.is_finite()) {
            Some((name, _)) => gradient_of(name),
            None => OVERFLOW.into(),
        }
    }
}

/// A step whose outcome is not known yet.
pub(super) struct Unseen {
    /// Its number.
    pub step: usize,
    /// What it computed.
    pub known: Known,
    /// What is in host memory and changed with the step: live handles, and values before it.
    pub host: Vec<(Tensor, Tensor)>,
    /// What it was computed from.
    pub batches: Vec<Batch>,
}

/// The flag of one device and the steps it may yet be set for.
pub(super) struct Watch {
    /// 1 from the first step on that was not finite, else 0; f32.
    pub stopped: Tensor,
    unseen: VecDeque<Unseen>,
    /// The flag on its way here, and how many of the unseen steps it speaks for.
    asked: Option<(Arrival, usize)>,
}

impl Watch {
    /// Nothing has happened yet where `like` lives.
    pub fn new(like: &Tensor) -> Watch {
        Watch { stopped: Tensor::zeros([], (Kind::Float, like.device())), unseen: VecDeque::new(), asked: None }
    }

    /// Takes in the sum of everything a step must have finite.
    pub fn take_in(&mut self, check: &Tensor) {
        // A finite number times 0 is 0; infinity and NaN give NaN, which is not 0.
        let _ = self.stopped.logical_or_(&(check * 0.0).ne(0.0));
    }

    /// Remembers a step until its outcome is known; asks the device now and then.
    pub fn remember(&mut self, unseen: Unseen) {
        self.unseen.push_back(unseen);
        if self.asked.is_none() && self.unseen.len() >= ASK_EVERY {
            self.asked = Some((Arrival::of(&self.stopped), self.unseen.len()));
        }
    }

    /// What the device has said since: the first step that was not finite, if it spoke of one. `wait`: until it has spoken of all.
    pub fn heard(&mut self, wait: bool) -> Option<Unseen> {
        let said = match &self.asked {
            _ if self.unseen.is_empty() => None,
            _ if wait => Some((self.stopped.double_value(&[]), self.unseen.len())),
            Some((arrival, count)) => arrival.value().map(|flag| (flag, *count)),
            None => None,
        };
        let (flag, count) = said?;
        self.asked = None;
        if flag == 0.0 {
            self.unseen.drain(..count);
            return None;
        }
        let steps = std::mem::take(&mut self.unseen);
        steps.into_iter().find(|unseen| !unseen.known.finite())
    }
}

/// Writes values back through live handles.
pub(super) fn put_back(host: Vec<(Tensor, Tensor)>) {
    let _guard = tch::no_grad_guard();
    host.into_iter().for_each(|(mut live, before)| live.copy_(&before));
}

/// What is said where only sums are not finite.
pub(super) const OVERFLOW: &str = "terms and gradients are finite but their sums overflow";

/// What is said of a term.
pub(super) fn term_is(name: &str, peer: Option<usize>, value: f64) -> String {
    let of = peer.map_or(String::new(), |m| format!(" of network {m}"));
    format!("the term `{name}`{of} is {value}")
}

/// What is said of a gradient.
pub(super) fn gradient_of(name: &str) -> String {
    format!("every term is finite but the gradient of `{name}` is not")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(terms: [f32; 2], norms: [f32; 2]) -> Known {
        let sum: f32 = terms.iter().chain(&norms).sum();
        let numbers = Tensor::from_slice(&[sum, terms[0], terms[1], norms[0], norms[1]]);
        Known { terms: vec![("task", Some(0)), ("vcl", None)], variables: vec!["a".into(), "b".into()], numbers }
    }

    #[test]
    fn what_is_not_finite_is_named() {
        assert!(known([1.0, 2.0], [3.0, 4.0]).finite());
        let fault = |terms, norms| {
            let known = known(terms, norms);
            assert!(!known.finite());
            known.fault()
        };
        assert_eq!(fault([f32::NAN, 2.0], [f32::NAN, 4.0]), "the term `task` of network 0 is NaN");
        assert_eq!(fault([1.0, f32::INFINITY], [3.0, 4.0]), "the term `vcl` is inf");
        assert_eq!(fault([1.0, 2.0], [3.0, f32::NAN]), "every term is finite but the gradient of `b` is not");
        assert_eq!(fault([3e38, 3e38], [3.0, 4.0]), OVERFLOW);
    }
}
