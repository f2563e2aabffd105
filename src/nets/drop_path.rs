//! Stochastic depth (Huang et al., ECCV 2016): residual branches dropped for some images in training. What all branches of a network drop
//! in one pass is one tensor, so that it comes to a device in one copy.

use std::sync::{Arc, Mutex, PoisonError};

use rand::Rng as _;
use tch::{Device, Kind, Tensor};

use super::layers::{Mode, Pass};
use crate::params::Scope;
use crate::rng;
use crate::system::arrival;

/// All branches of a network that may be dropped.
#[derive(Clone, Default)]
struct Branches(Arc<Mutex<Drawn>>);

#[derive(Default)]
struct Drawn {
    /// Name, number and rate of each branch.
    branches: Vec<(String, u64, f64)>,
    /// The factors of the pass under way, [branches, images], by what they were drawn for.
    factors: Vec<((u64, i64, Device, Kind), Tensor)>,
}

/// One residual branch of a network.
pub(super) struct DropPath {
    all: Branches,
    place: usize,
    /// How often it is dropped.
    pub rate: f64,
}

impl DropPath {
    /// Branch `number` of the block that `scope` is of.
    pub fn new(scope: &Scope, number: u64, rate: f64) -> DropPath {
        let all: Branches = scope.common();
        let mut drawn = all.0.lock().unwrap_or_else(PoisonError::into_inner);
        drawn.branches.push((scope.path().to_string(), number, rate));
        let place = drawn.branches.len() - 1;
        drop(drawn);
        DropPath { all, place, rate }
    }

    /// The branch `ys`, dropped for some images and scaled up for the others, so that its mean stays.
    pub fn apply(&self, ys: Tensor, pass: Pass) -> Tensor {
        if pass.mode != Mode::Train || !pass.drop_path || self.rate == 0.0 {
            return ys;
        }
        let of = (pass.noise, ys.size()[0], ys.device(), ys.kind());
        let mut drawn = self.all.0.lock().unwrap_or_else(PoisonError::into_inner);
        drawn.factors.retain(|((noise, ..), _)| *noise == pass.noise);
        if !drawn.factors.iter().any(|(made_for, _)| *made_for == of) {
            let factors = drawn.draw(of);
            drawn.factors.push((of, factors));
        }
        let (_, factors) = drawn.factors.iter().find(|(made_for, _)| *made_for == of).expect("drawn above");
        &ys * factors.get(self.place as i64).view([-1, 1, 1, 1])
    }
}

impl Drawn {
    /// A branch's draws depend on the pass and on its name alone.
    fn draw(&self, (noise, images, device, kind): (u64, i64, Device, Kind)) -> Tensor {
        let mut all: Vec<f64> = vec![];
        for (name, number, rate) in &self.branches {
            let mut rng = rng::stream(noise, &format!("drop_path {name}"), &[*number]);
            all.extend((0..images).map(|_| if rng.r#gen::<f64>() < *rate { 0.0 } else { 1.0 / (1.0 - rate) }));
        }
        arrival::send(&Tensor::from_slice(&all).view([-1, images]).to_kind(kind), device)
    }
}
