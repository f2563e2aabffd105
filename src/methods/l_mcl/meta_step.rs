//! The meta step (Eq. 16, Algorithm 1): how pi, the meta-network behind lambda, is trained by what its lambda does to the task.

use tch::Tensor;

use super::super::parts::mode::Mode;
use super::super::{Clock, Outcome, Stepped};
use super::LMcl;
use super::contrastive::{Lambda, SoftTargets};
use crate::cohort::Cohort;
use crate::data::Batch;
use crate::error::{Error, Result};
use crate::losses::logit;
use crate::nets::layers::Mode as NetMode;
use crate::optim::reverse_hg::{Adjoint, Buffers, Constants, Hvp, Unroll, hypergradient};
use crate::params::Params;
use crate::system::device::Precision;

impl LMcl {
    /// Algorithm 1: K steps on L_MCL and one on the task from the present weights, then d pi of the task, and a step of pi.
    pub(super) fn meta_step(&mut self, stepped: Stepped<'_>) -> Result<()> {
        let Stepped { cohort, theta, batch, clock, .. } = stepped;
        let gradient = self.meta_gradient(cohort, theta, batch, clock, self.options.hvp)?;
        let finite = Tensor::stack(&gradient.iter().map(|g| g.isfinite().all()).collect::<Vec<_>>(), 0).all();
        if finite.int64_value(&[]) == 0 {
            return Err(Error::Diverged {
                step: clock.step,
                what: "the meta step's gradient for pi is not finite, and pi was not changed".into(),
            });
        }
        self.meta_optimizer.step(&self.meta_params, &gradient, clock.lr);
        Ok(())
    }

    /// d pi of Eq. 16 at the present weights. In paper mode nothing moves but for the length of the call.
    pub fn meta_gradient(&mut self, cohort: &mut Cohort, theta: &Params, batch: &Batch, clock: Clock, hvp: Hvp) -> Result<Vec<Tensor>> {
        let reference = self.options.mode == Mode::Reference;
        let inner = self.options.meta_steps;
        let unroll = Unroll {
            steps: inner + 1,
            lr: clock.lr,
            momentum: self.options.inner_momentum.expect("resolved when the method was made"),
            weight_decay: self.options.inner_weight_decay.expect("resolved when the method was made"),
            hvp,
            adjoint: if reference { Adjoint::Released } else { Adjoint::Exact },
            buffers: if reference { Buffers::OneUpdateKept } else { Buffers::Restored },
            ranks: self.ranks,
        };
        let theta = theta.chain(&self.head_params.prefixed("heads."));
        let mut remembered: Vec<Option<SoftTargets>> = (0..inner).map(|_| None).collect();
        let mut first: Option<Vec<Tensor>> = None;
        // Second derivatives and differences of gradients drown in the rounding of half the bits.
        let precision = std::mem::replace(&mut cohort.precision, Precision::F32);
        let gradient = hypergradient(&theta, &self.meta_params.tensors(), unroll, &mut |k, constants| {
            let outs = cohort.forward(batch, NetMode::Train);
            if k >= inner {
                let rows: Vec<Tensor> = outs.iter().map(|own| logit::task(&own.logits, &batch.labels, self.smoothing)).collect();
                return Ok(Tensor::stack(&rows, 0).sum(None));
            }
            let seen = self.contrast_batch(&outs, batch);
            if k == 0 && first.is_none() {
                first = Some((0..outs.len()).map(|m| seen.embeds[self.last(m)].detach()).collect());
            }
            let fixed = if constants == Constants::Remembered { remembered[k].as_ref() } else { None };
            let evaluated = self.l_mcl(&seen, Lambda::Learns, fixed)?;
            let rows: Vec<Tensor> = self.weighted(&evaluated.parts).map(|(_, weight, value)| value * weight).collect();
            if constants == Constants::Fresh {
                remembered[k] = Some(evaluated.targets);
            }
            Ok(Tensor::stack(&rows, 0).sum(None))
        });
        cohort.precision = precision;
        let gradient = gradient?;
        // The released code's last evaluation after its rollback also updates the bank once more.
        if let (true, Some(bank), Some(embeds)) = (reference, &mut self.bank, first) {
            bank.update(&embeds, &batch.labels, &batch.index);
            bank.settle(Outcome::Stands);
        }
        Ok(gradient)
    }
}
