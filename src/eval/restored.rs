//! A cohort and its method as a checkpoint left them: what ships is a part of it, and some measurements ask about the rest.

use std::collections::BTreeMap;
use std::path::Path;

use tch::Tensor;

use super::Common;
use crate::cohort::Cohort;
use crate::data::{self, Dataset, Loader, Split, sampler};
use crate::error::{Error, Result};
use crate::methods::{self, Method, Task};
use crate::nets::layers::Pass;
use crate::nets::{self, Outputs};
use crate::params::{Named, check_finite};
use crate::recipe::Recipe;
use crate::run::RunFolder;

const BATCH: usize = 250;

/// Networks, branches, heads and whatever else a method trained, and the images it saw.
pub(crate) struct Restored {
    /// How it was trained.
    pub(crate) recipe: Recipe,
    /// What it was trained on, at the side it was trained at.
    pub(crate) dataset: Dataset,
    /// The training images that were used.
    pub(crate) train: Split,
    /// The networks with their branches.
    pub(crate) cohort: Cohort,
    /// With its modules.
    pub(crate) method: Box<dyn Method>,
}

impl Restored {
    /// The run in `folder` at a checkpoint: `last`, `best` or `step-N`.
    pub(crate) fn read(folder: &Path, checkpoint: &str, common: &Common) -> Result<Restored> {
        let run = RunFolder::at(folder);
        let recipe = Recipe::read(&run.recipe(), &[], &methods::names())?;
        let path = run.checkpoint(checkpoint).state();
        if !path.exists() {
            return Err(Error::input(format!("{} has no checkpoint `{checkpoint}` ({} is missing)", folder.display(), path.display())));
        }
        let archs = recipe.cohort.archs.iter().map(|name| nets::find(name)).collect::<Result<Vec<_>>>()?;
        let size = (recipe.data.image_size > 0).then_some(recipe.data.image_size);
        let options = data::Options { size, own: recipe.data.options.clone(), ..Default::default() };
        let mut dataset = data::open(&recipe.data.name, common.data.as_deref(), &options)?;
        if let Some(side) = size.filter(|side| *side != dataset.image_size) {
            dataset = dataset.resized(side)?;
        }
        let (train, _) = sampler::for_run(&dataset.train, recipe.data.fraction, recipe.data.holdout, recipe.train.seed)?;
        let task = Task::new(&recipe, &archs, dataset.classes.len() as i64, &train.labels, common.device);
        let method = (methods::find(recipe.method_name())?.build)(&task, recipe.method_options())?;
        let cohort = task.cohort(method.needs());

        let prefixed = |prefix: String, named: Named| named.into_iter().map(move |(name, t)| (format!("{prefix}{name}"), t));
        let mut live = cohort.params().named();
        for group in method.groups(&cohort).iter().filter(|group| !group.apart) {
            live.extend(prefixed(format!("group.{}.", group.name), group.params.named()));
        }
        live.extend(prefixed("method.".into(), method.state()));
        let saved: Named = Tensor::read_safetensors(&path).map_err(|e| Error::file(&path, e.to_string()))?;
        check_finite(&saved).map_err(|what| Error::file(&path, what.to_string()))?;
        let saved: BTreeMap<String, Tensor> = saved.into_iter().collect();
        let _guard = tch::no_grad_guard();
        for (name, live) in &mut live {
            let found = saved.get(name).filter(|t| t.size() == live.size());
            live.copy_(found.ok_or_else(|| Error::file(&path, format!("it has no `{name}` of shape {:?}", live.size())))?);
        }
        Ok(Restored { recipe, dataset, train, cohort, method })
    }

    /// Asks all networks about the images of a split, without augmentation, batch by batch.
    pub(crate) fn each_batch(&self, split: &Split, common: &Common, mut with: impl FnMut(&[Outputs])) -> Result<()> {
        let _guard = tch::no_grad_guard();
        let progress = common.progress("asking all networks", split.len(), "images");
        for batch in Loader::eval(split, BATCH, self.dataset.test_transform()) {
            let batch = batch?.to_device(common.device);
            let outs: Vec<Outputs> = self.cohort.peers.iter().map(|peer| peer.forward(&batch.views[0], Pass::EVAL)).collect();
            with(&outs);
            progress.add(batch.labels.size()[0] as usize);
        }
        Ok(())
    }
}
