//! Networks that teach and do not learn (`[cohort] frozen`): their files are opened once, held against the run, and never written.

use std::path::Path;

use tch::{Device, Kind, Tensor};

use super::{Job, Trainer};
use crate::cohort::FrozenPeer;
use crate::data::Dataset;
use crate::error::{Error, Result};
use crate::extractor::Answer;
use crate::files;
use crate::nets;
use crate::recipe::FrozenFile;
use crate::system::device::Precision;
use crate::system::ranks::Ranks;
use crate::weights::{self, LoadOptions, Meta, Opened};

/// Opens every file. The recipe gets what was found out of each, its sha256 first: with another file no run is resumed.
pub(super) fn open(job: &mut Job, dataset: &Dataset) -> Result<Vec<FrozenPeer>> {
    let asked = job.recipe.data.image_size > 0;
    let mut peers = vec![];
    for entry in &mut job.recipe.cohort.frozen {
        let refuse = |what: String| Error::input(format!("[cohort] frozen {}: {what}", entry.file));
        let path = Path::new(&entry.file);
        let sha256 = files::read(path).map(|bytes| files::sha256(&bytes)).map_err(|e| refuse(without_path(e)))?;
        if let Some(said) = entry.sha256.as_ref().filter(|said| **said != sha256) {
            return Err(refuse(format!("another file: its sha256 is {sha256}, and the recipe says {said}")));
        }
        let opened = load(entry, path, job.device).map_err(|e| refuse(without_path(e)))?;
        check_classes(&opened, dataset).map_err(refuse)?;
        let (made_for, side) = (opened.meta.as_ref().map_or(opened.arch.image_size, |m| m.image_size), dataset.image_size as i64);
        if made_for != side && !asked {
            return Err(refuse(format!(
                "{} was made for images of side {made_for} and {} has {side}: set data.image_size={side} to show it those, or another network",
                opened.arch.name, dataset.name
            )));
        }
        let (mean, std) = normalisation(entry, opened.meta.as_ref(), dataset);
        let input = conversion((dataset.mean, dataset.std), (mean, std), job.device);
        if let Some(bad) = mean.iter().chain(&std).zip(0..).find(|(v, i)| !v.is_finite() || (*i > 2 && **v <= 0.0)).map(|(v, _)| v) {
            return Err(refuse(format!("its images were normalised with {bad}; accepted: finite means, and deviations above 0")));
        }
        let Opened { arch, net, params, .. } = opened;
        let file = std::path::absolute(path).map_or(entry.file.clone(), |path| path.display().to_string());
        *entry = FrozenFile {
            file,
            arch: Some(arch.name.into()),
            strip: entry.strip.take(),
            mean: Some(mean),
            std: Some(std),
            sha256: Some(sha256),
        };
        peers.push(FrozenPeer { arch, net, params, input });
    }
    same_on_all_ranks(&job.recipe.cohort.frozen, job.ranks)?;
    Ok(peers)
}

/// Every rank reads the files itself; all must have read the same.
fn same_on_all_ranks(frozen: &[FrozenFile], ranks: Ranks) -> Result<()> {
    let own: Vec<&str> = frozen.iter().filter_map(|entry| entry.sha256.as_deref()).collect();
    if ranks.count() < 2 || own.is_empty() {
        return Ok(());
    }
    let first = ranks.broadcast_text(0, &own.join(" "));
    match frozen.iter().zip(first.split(' ')).find(|(entry, first)| entry.sha256.as_deref() != Some(first)) {
        None => Ok(()),
        Some((entry, first)) => Err(Error::input(format!(
            "[cohort] frozen {}: rank 0 read another file (sha256 {first} there, {} here)",
            entry.file,
            entry.sha256.as_deref().unwrap_or_default()
        ))),
    }
}

fn load(entry: &FrozenFile, path: &Path, device: Device) -> Result<Opened> {
    let arch = entry.arch.as_deref().map(nets::find).transpose()?;
    weights::open(path, arch, device, &LoadOptions { strip: entry.strip.clone(), ..LoadOptions::default() })
}

/// What is wrong with a file, where the message names it already. Values are said as a recipe says them; a teacher is whole.
fn without_path(e: Error) -> String {
    match e {
        Error::File { what, .. } => what,
        Error::Value { what, .. } => what.replace(weights::PARTLY, "").replace("{arch}", "frozen = [{ file = \"...\", arch = \"...\" }]"),
        other => other.to_string(),
    }
}

/// A network teaches class by class: as many as the run's, and in its order as far as both have names.
fn check_classes(opened: &Opened, dataset: &Dataset) -> Result<(), String> {
    let here = &dataset.classes;
    let count = opened.classes.unwrap_or(0);
    if count != here.len() as i64 {
        return Err(format!("its classifier has {count} classes and {} has {}; accepted: as many", dataset.name, here.len()));
    }
    let numbered = |names: &[String]| names.iter().all(|name| name.parse::<u64>().is_ok());
    let there = opened.meta.as_ref().map_or(&[][..], |meta| &meta.classes);
    if there.len() != here.len() || numbered(there) || numbered(here) {
        return Ok(());
    }
    match there.iter().zip(here).position(|(there, here)| there != here) {
        None => Ok(()),
        Some(c) => Err(format!(
            "class {c} is `{}` there and `{}` in {}; accepted: the same classes in the same order",
            there[c], here[c], dataset.name
        )),
    }
}

/// What its images are normalised with: as the recipe says, else as its file says, else as the run's.
fn normalisation(entry: &FrozenFile, meta: Option<&Meta>, dataset: &Dataset) -> ([f64; 3], [f64; 3]) {
    let given = entry.mean.zip(entry.std);
    given.or_else(|| meta.map(|meta| (meta.mean, meta.std))).unwrap_or((dataset.mean, dataset.std))
}

/// Factor and summand, [1, 3, 1, 1], from images normalised with `(mean, std)` of the first pair to those of the second; none where they
/// are the same. (x s + m - m') / s' = x (s / s') + (m - m') / s'.
fn conversion(from: ([f64; 3], [f64; 3]), to: ([f64; 3], [f64; 3]), device: Device) -> Option<(Tensor, Tensor)> {
    let ((mean, std), (own_mean, own_std)) = (from, to);
    let by_channel =
        |of: &dyn Fn(usize) -> f64| Tensor::from_slice(&[of(0), of(1), of(2)]).view([1, 3, 1, 1]).to_kind(Kind::Float).to_device(device);
    (from != to).then(|| (by_channel(&|c| std[c] / own_std[c]), by_channel(&|c| (mean[c] - own_mean[c]) / own_std[c])))
}

impl Trainer<'_> {
    /// What the networks that do not learn know: a teacher in the wrong normalisation, or of other classes, shows here.
    pub(super) fn present_frozen(&mut self) -> Result<()> {
        if self.engine.cohort.frozen.is_empty() {
            return Ok(());
        }
        let frozen = &self.engine.cohort.frozen;
        let answers = |images: &Tensor| {
            let answer = |(peer, entry): (&FrozenPeer, &FrozenFile)| {
                let logits = peer.logits(images, Precision::F32);
                if !bool::try_from(logits.isfinite().all()).unwrap_or(false) {
                    return Err(Error::failed(format!("[cohort] frozen {}: it answers with numbers that are not finite", entry.file)));
                }
                Ok(Answer { features: logits.shallow_clone(), logits: vec![logits], stages: vec![] })
            };
            frozen.iter().zip(&self.job.recipe.cohort.frozen).map(answer).collect()
        };
        let known = self.answered(&self.data.dataset.test, "frozen networks", answers)?.networks();
        let lines: Vec<String> = self
            .job
            .recipe
            .cohort
            .frozen
            .iter()
            .zip(&known)
            .enumerate()
            .map(|(f, (entry, known))| {
                format!("frozen {f}: {} of {}, test top-1 {:.2}", entry.arch.as_deref().unwrap_or_default(), entry.file, known.top1())
            })
            .collect();
        lines.iter().try_for_each(|line| self.say(line))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pixel of value 0.6 in all channels, normalised in both ways by hand.
    #[test]
    fn images_are_turned_into_those_the_network_was_trained_on() {
        let (from, to) = (([0.5, 0.4, 0.3], [0.2, 0.25, 0.5]), ([0.1, 0.2, 0.6], [0.5, 0.1, 0.3]));
        let (factor, summand) = conversion(from, to, Device::Cpu).unwrap();
        let image = Tensor::from_slice(&[0.5f32, 0.8, 0.6]).view([1, 3, 1, 1]);
        let own = Vec::<f32>::try_from((image * factor + summand).view(-1)).unwrap();
        for (got, wanted) in own.iter().zip([1.0f32, 4.0, 0.0]) {
            assert!((got - wanted).abs() < 1e-6, "{own:?}");
        }
        assert!(conversion(from, from, Device::Cpu).is_none());
    }
}
