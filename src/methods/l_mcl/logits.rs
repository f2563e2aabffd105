//! The part of the objective on class logits: the task of every stage (Eq. 14), the gate that makes an ensemble of a network's stages
//! (Eq. 18-19), and distillation from the ensembles of the other networks (Eq. 21).

use tch::Tensor;

use super::super::parts::mode::Mode;
use super::LMcl;
use crate::error::Result;
use crate::losses::logit;
use crate::losses::terms::Terms;
use crate::nets::Outputs;

impl LMcl {
    /// The rows `task`, `task_gate` and `ens`. `targets`: class indices `[B]` or probabilities [B, C].
    pub(super) fn logit_rows(&self, terms: &mut Terms, outs: &[Outputs], targets: &Tensor) -> Result<()> {
        let weights = &self.options.terms;
        for (m, own) in outs.iter().enumerate().filter(|_| weights.task > 0.0) {
            terms.add_for(m, "task", weights.task, logit::task(&own.logits, targets, self.smoothing));
        }
        let gated = weights.task_gate > 0.0 && !self.gates.is_empty();
        if !gated && weights.ens <= 0.0 {
            return Ok(());
        }
        let ensembles = self.ensembles(outs, terms);
        for (m, ensemble) in ensembles.iter().enumerate().filter(|_| gated) {
            terms.add_for(m, "task_gate", weights.task_gate, logit::smooth_ce(ensemble, targets, self.smoothing));
        }
        let frozen = self.frozen.logits()?;
        for (a, own) in outs.iter().enumerate().filter(|_| weights.ens > 0.0) {
            // Eq. 21 has the other networks for teachers; the released loop lets b = a in.
            let teachers = ensembles.iter().enumerate().filter(|(b, _)| *b != a || self.options.mode == Mode::Reference);
            // A network that does not learn has no branches to gate: its own logits are its ensemble.
            let teachers = teachers.map(|(_, teacher)| teacher).chain(frozen);
            let rows: Vec<Tensor> = teachers.map(|teacher| logit::kl(teacher, own.logit(), self.options.temperature)).collect();
            terms.add_for(a, "ens", weights.ens, Tensor::stack(&rows, 0).sum(None));
        }
        Ok(())
    }

    /// z^ens of every network (Eq. 18), with the gate's weights (Eq. 19) noted.
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
}
