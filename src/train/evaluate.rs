//! How well networks tell a split, while a run goes on.

use tch::Tensor;

use super::metrics::CohortAccuracy;
use super::{EVAL_BATCH, EVAL_BATCH_ON_DEVICE, Trainer};
use crate::data::{Loader, Split};
use crate::error::Result;
use crate::extractor::Answer;
use crate::system::progress::Progress as Watched;

impl Trainer<'_> {
    /// The networks that would ship, on a split.
    pub(super) fn evaluate(&self, split: &Split) -> Result<CohortAccuracy> {
        let mut networks = self.engine.frozen(self.data.dataset.classes.len() as i64, tch::get_num_threads() as usize);
        let who = format!("epoch {}/{}", self.progress.epoch + 1, self.epochs);
        let accuracy = self.answered(split, &who, |images| networks.iter_mut().map(|n| n.extract_there(images)).collect())?;
        // On a device nobody has looked at the answers before.
        match networks.iter().zip(&accuracy.not_finite).find(|(_, images)| **images > 0) {
            None => Ok(accuracy),
            Some((network, images)) => Err(network.answers_badly(&format!("{images} images of a split"))),
        }
    }

    /// The accuracy of what is answered about a split, of which every rank takes its part. `who` is shown meanwhile.
    pub(super) fn answered(&self, split: &Split, who: &str, mut ask: impl FnMut(&Tensor) -> Result<Vec<Answer>>) -> Result<CohortAccuracy> {
        let mut accuracy = CohortAccuracy::default();
        let (rank, count) = (self.job.ranks.rank(), self.job.ranks.count());
        let own = split.subset(&(rank * split.len() / count..(rank + 1) * split.len() / count).collect::<Vec<_>>());
        let device = self.job.device;
        let images = if device.is_cuda() { EVAL_BATCH_ON_DEVICE } else { EVAL_BATCH };
        let quiet = self.job.quiet || !self.job.ranks.leads();
        let shown = Watched::new(quiet, format!("{who}: answers"), own.len(), "images");
        for batch in Loader::eval(&own, images, self.data.test_transform.clone()) {
            let batch = batch?.to_device(device);
            shown.add(batch.labels.size()[0] as usize);
            accuracy.add(&ask(&batch.views[0])?, &batch.labels);
        }
        accuracy.finish();
        accuracy.over_ranks(self.job.ranks);
        Ok(accuracy)
    }
}
