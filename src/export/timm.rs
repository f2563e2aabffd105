//! timm and the Hugging Face hub: a folder of config.json, model.safetensors and a README that is the model's card.

use std::path::Path;

use serde_json::{Value, json};

use super::Source;
use super::format::Format;
use crate::error::Result;
use crate::eval::record;
use crate::eval::rows;
use crate::nets::Arch;
use crate::params::Named;
use crate::run::{Run, RunFolder};
use crate::weights::{self, frameworks};

pub(super) struct Timm;

impl Format for Timm {
    fn name(&self) -> &'static str {
        "timm"
    }

    fn framework(&self) -> &'static str {
        "timm"
    }

    fn extension(&self) -> &'static str {
        "safetensors"
    }

    /// What the hub calls every network's.
    fn file(&self, _: &Arch) -> String {
        "model.safetensors".to_string()
    }

    fn takes(&self, arch: &Arch) -> bool {
        arch.elsewhere.timm.is_some()
    }

    /// timm's network without classifier keeps what lies between the last map and the classifier.
    fn names(&self, source: &Source) -> Vec<String> {
        let (arch, params) = (source.network.arch, &source.network.params);
        let ours = params.all().map(|(name, _)| name.clone());
        let swin = arch.elsewhere.timm.is_some_and(|timm| timm.swin);
        let theirs = |name: &String| !swin || frameworks::timm_swin_name(name).is_some();
        let wanted = |name: &String| source.with_classifier || !name.starts_with(&format!("{}.", arch.classifier));
        ours.filter(|name| theirs(name) && wanted(name)).collect()
    }

    fn tensors(&self, ours: Named, arch: &Arch) -> Result<Named> {
        let swin = arch.elsewhere.timm.is_some_and(|timm| timm.swin);
        let rename = |name: String| if swin { frameworks::timm_swin_name(&name).unwrap_or(name) } else { name };
        Ok(ours.into_iter().map(|(name, tensor)| (rename(name), tensor)).collect())
    }

    fn write(&self, path: &Path, source: &Source, tensors: &Named) -> Result<()> {
        weights::save_safetensors(path, tensors, &super::safetensors::meta(source))
    }

    /// A ResNet has torchvision's names already.
    fn read(&self, path: &Path) -> Result<Named> {
        let read = weights::read(path)?.tensors.into_iter();
        Ok(read.map(|(name, tensor)| (frameworks::from_timm_swin_name(&name), tensor)).collect())
    }

    /// timm's Swin shifts a map before it pads it, torchvision after: they agree where every map is whole windows, at multiples of 224.
    fn golden(&self, arch: &Arch) -> [[i64; 3]; 2] {
        if arch.elsewhere.timm.is_some_and(|timm| timm.swin) { [[1, 224, 448], [2, 224, 224]] } else { arch.golden }
    }

    fn facts(&self, source: &Source) -> Result<Value> {
        Ok(json!({ "config": format!("{:#}", config(source)), "measurements": measurements(source)?, "accuracy": accuracy(source)? }))
    }

    fn extras(&self) -> &'static [(&'static str, &'static str)] {
        &[("config.json", "{{ own.config }}\n")]
    }

    fn readme(&self) -> &'static str {
        include_str!("templates/timm.md")
    }

    fn check(&self, _: &Arch) -> &'static str {
        include_str!("templates/timm.py")
    }

    fn needs(&self, _: &Arch) -> &'static str {
        "timm"
    }
}

/// What timm.create_model reads: which network, with which arguments, and how images are made for it.
fn config(source: &Source) -> Value {
    let (arch, meta) = (source.network.arch, &source.network.meta);
    let Some(timm) = arch.elsewhere.timm else { return Value::Null };
    let (side, stride) = (meta.image_size, arch.maps.last().map_or(32, |(_, stride)| *stride));
    let classes: &[String] = if source.with_classifier { &meta.classes } else { &[] };
    let mut config = json!({
        "architecture": timm.name,
        "num_classes": classes.len(),
        "num_features": arch.dim,
        "pretrained_cfg": {
            "tag": "mcl", "custom_load": false,
            "input_size": [3, side, side], "fixed_input_size": timm.swin, "pool_size": [side / stride, side / stride],
            "interpolation": meta.interpolation, "crop_pct": 0.875, "crop_mode": "center",
            "mean": meta.mean, "std": meta.std, "num_classes": classes.len(),
            "first_conv": timm.first_conv, "classifier": timm.classifier,
        },
    });
    if !classes.is_empty() {
        config["label_names"] = classes.into();
    }
    config
}

/// What was measured with exactly these weights, the newest of equals.
fn measurements(source: &Source) -> Result<Value> {
    let network = source.network;
    let folder = network.run.as_ref().unwrap_or(&network.out);
    if !RunFolder::at(folder).results_jsonl().exists() {
        return Ok(json!([]));
    }
    let records = record::read(folder)?;
    let own: Vec<&record::Record> = records.iter().filter(|r| r.weights_hash == network.hash).collect();
    let row = |r: &record::Record| {
        let interval = r.ci_low.zip(r.ci_high).map_or(String::new(), |(low, high)| format!("{low:.2} to {high:.2}"));
        let how = [rows::protocol_of(r), r.variant.clone()].into_iter().filter(|t| !t.is_empty()).collect::<Vec<_>>().join("; ");
        json!({
            "what": r.command, "how": how.replace('|', "/"), "dataset": r.dataset, "metric": r.metric, "value": format!("{:.2}", r.value),
            "interval": interval, "n_test": r.n_test,
        })
    };
    Ok(rows::newest(&own)?.into_iter().map(row).collect())
}

/// Its test accuracy after the last epoch of its run, in percent.
fn accuracy(source: &Source) -> Result<Option<String>> {
    let network = source.network;
    let (Some(run), Some(peer)) = (&network.run, network.peer) else { return Ok(None) };
    if !RunFolder::at(run).metrics_jsonl().exists() {
        return Ok(None);
    }
    Ok(Run::read(run)?.accuracy(peer).map(|accuracy| format!("{:.2}", accuracy.last)))
}
