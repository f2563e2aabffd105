//! What is kept of a step that gave numbers which are not finite: the batches, for replay.

use tch::{Device, Tensor};

use crate::data::Batch;
use crate::error::disk_fault;
use crate::run::RunFolder;
use crate::system::ranks::Ranks;

/// Writes the batches of the step and says where they are, or why they are not.
pub fn keep_batches(folder: &RunFolder, step: usize, ranks: Ranks, batches: &[Batch]) -> String {
    let of_rank = (ranks.count() > 1).then(|| ranks.rank());
    let path = folder.diverged_batch(step, of_rank);
    let mut tensors = vec![];
    for (i, batch) in batches.iter().enumerate() {
        let batch = batch.to_device(Device::Cpu);
        tensors.extend(batch.views.iter().enumerate().map(|(v, t)| (format!("batch.{i}.view.{v}"), t.contiguous())));
        tensors.push((format!("batch.{i}.labels"), batch.labels.shallow_clone()));
        tensors.push((format!("batch.{i}.index"), batch.index.shallow_clone()));
    }
    let whose = if of_rank.is_none() { "" } else { " of this rank (the others' beside it)" };
    match Tensor::write_safetensors(&tensors, &path) {
        Ok(()) => format!("the batch{whose} is in {}", path.display()),
        Err(e) => format!("the batch could not be written to {}: {}", path.display(), disk_fault(&e)),
    }
}
