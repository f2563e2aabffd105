//! What networks answer with the classifier they were trained with: alone, and several together.

use tch::{Kind, Tensor};

use super::Common;
use super::dataset::TargetDataset;
use super::features::Prepared;
use super::network::TrainedNetwork;
use super::score::Score;
use crate::data::Loader;
use crate::error::{Error, Result};

const BATCH: usize = 256;

/// Logits of a network's own classifier on a test split, [N, C] on the CPU. `image_size` 0 means the network's own.
pub(crate) fn logits(network: &TrainedNetwork, target: &TargetDataset, image_size: i64, common: &Common) -> Result<Tensor> {
    let classes = target.dataset.classes.len();
    if network.meta.classes.len() != classes {
        return Err(Error::input(format!(
            "{} answers with {} classes and {} has {classes}: its classifier was made for another dataset; `mcl-eval linear-probe` trains one for this",
            network.name,
            network.meta.classes.len(),
            target.dataset.name
        )));
    }
    let prepared = Prepared::new(&target.dataset, network, network.image_size(image_size))?;
    let mut extractor = network.extractor(common)?;
    let progress = common.progress(format!("{}: answers", network.name), prepared.dataset.test.len(), "images");
    let mut parts = vec![];
    for batch in Loader::eval(&prepared.dataset.test, BATCH, prepared.transform) {
        let logits = extractor.extract(&batch?.views[0], false)?.logit().shallow_clone();
        progress.add(logits.size()[0] as usize);
        parts.push(logits);
    }
    drop((extractor, progress));
    network.check_unchanged()?;
    Ok(Tensor::cat(&parts, 0))
}

/// The answer of several networks together: the mean of their probabilities, as the trainer's ensemble.
pub(crate) fn ensemble(logits: &[Tensor], labels: &[i64]) -> Score {
    let probabilities: Vec<Tensor> = logits.iter().map(|z| z.softmax(-1, Kind::Float)).collect();
    Score::new(&Tensor::stack(&probabilities, 0).mean_dim(0, false, None), labels)
}

/// The dataset asked for, or the one a network was trained on.
pub(crate) fn own_dataset<'a>(asked: Option<&'a str>, network: &'a TrainedNetwork) -> Result<&'a str> {
    asked.or(network.meta.dataset.as_deref()).ok_or_else(|| {
        Error::input(format!("{} does not say what it was trained on, and no dataset is named (--dataset)", network.file.display()))
    })
}
