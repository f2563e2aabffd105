//! What a step leaves for the log.

use tch::Tensor;

/// One row of the loss table, without its graph.
pub struct TermValue {
    /// As in the metrics.
    pub name: &'static str,
    /// The network it belongs to; none where it is of all.
    pub peer: Option<usize>,
    /// Its factor in the loss.
    pub weight: f64,
    /// A detached scalar; reading it waits for the device.
    pub value: Tensor,
}

/// What one step leaves for the log. Tensors are detached scalars that nobody has waited for.
pub struct StepReport {
    /// Rows of one name add up.
    pub terms: Vec<TermValue>,
    /// Numbers a method wants logged beside its terms.
    pub notes: Vec<(String, Tensor)>,
    /// The norm of the whole gradient (of that from the main backward pass), before clipping; none where f16 overflowed and the step
    /// was skipped.
    pub grad_norm: Option<Tensor>,
    /// Seconds of the meta step, when this step had one.
    pub meta_seconds: Option<f64>,
    /// On a device, the vector that terms, notes and the norm are read from, all in one.
    pub(super) packed: Option<Tensor>,
}

impl StepReport {
    /// The same numbers in one vector on their device, so that they are read at once; those in host memory stay there.
    pub(super) fn packed(mut self) -> StepReport {
        let notes = self.notes.iter_mut().map(|(_, value)| value);
        let mut places: Vec<&mut Tensor> = self.terms.iter_mut().map(|t| &mut t.value).chain(notes).chain(&mut self.grad_norm).collect();
        places.retain(|t| t.device().is_cuda());
        let vector = Tensor::cat(&places.iter().map(|t| t.view([1])).collect::<Vec<_>>(), 0);
        places.iter_mut().enumerate().for_each(|(i, place)| **place = vector.get(i as i64));
        self.packed = Some(vector);
        self
    }
}
