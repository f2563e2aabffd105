//! `mcl-eval export`: networks as detection frameworks load them, each beside a golden input, a recipe for loading it and a check.

mod format;
mod package;

use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args as ClapArgs;
use serde::Deserialize;
use tch::Device;

use crate::data::imagenet;
use crate::error::{Error, Result};
use crate::eval::Common;
use crate::eval::network::{PeerChoice, Subject, SubjectArgs};
use crate::eval::protocol::{Protocol, require};
use crate::registry;
use crate::report::{Cell, Table};
use format::{TARGETS, Target};

pub const ABOUT: &str = "Export backbones for torchvision, MMDetection, Detectron2, TorchScript, safetensors, with a proof beside each";

#[derive(Debug, Clone, ClapArgs)]
pub struct Args {
    #[command(flatten)]
    pub subjects: SubjectArgs,
    /// torchscript, torchvision, mmdet, detectron2 or safetensors; may be repeated [default: the protocol's]
    #[arg(long, value_name = "TARGET")]
    pub to: Vec<String>,
    /// The whole network, which answers with logits, instead of the backbone, which answers with its maps
    #[arg(long)]
    pub with_classifier: bool,
    /// What images are normalised with: imagenet, none or R,G,B/R,G,B (means/deviations) [default: what the weights say]
    #[arg(long, value_name = "imagenet|none|MEAN/STD", conflicts_with_all = ["mean", "std"])]
    pub normalisation: Option<Normalisation>,
    /// export-coco or a TOML file
    #[arg(long, default_value = "export-coco")]
    pub protocol: String,
    /// Change a key of the protocol (may be repeated)
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Normalisation {
    pub mean: [f64; 3],
    pub std: [f64; 3],
}

impl FromStr for Normalisation {
    type Err = Error;

    fn from_str(text: &str) -> Result<Normalisation> {
        let three = |text: &str| -> Option<[f64; 3]> {
            let numbers: Option<Vec<f64>> = text.split(',').map(|n| n.trim().parse().ok().filter(|n: &f64| n.is_finite())).collect();
            numbers?.try_into().ok()
        };
        match text {
            "imagenet" => Ok(Normalisation { mean: imagenet::MEAN, std: imagenet::STD }),
            "none" => Ok(Normalisation { mean: [0.0; 3], std: [1.0; 3] }),
            _ => text
                .split_once('/')
                .and_then(|(mean, std)| Some(Normalisation { mean: three(mean)?, std: three(std)? }))
                .filter(|n| n.std.iter().all(|s| *s > 0.0))
                .ok_or_else(|| {
                    Error::input(format!(
                        "normalisation `{text}`; accepted: imagenet, none, or means and deviations, e.g. 0.485,0.456,0.406/0.229,0.224,0.225"
                    ))
                }),
        }
    }
}

/// The keys of the protocol that the export reads; `mask_rcnn` is for protocols/coco.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Options {
    targets: Vec<String>,
    tolerance: f64,
    #[serde(rename = "mask_rcnn")]
    _mask_rcnn: toml::Table,
}

pub fn run(args: &Args, common: &Common) -> Result<()> {
    let protocol = Protocol::read(&args.protocol, &["export-coco"], &args.sets)?;
    let options: Options = protocol.options()?;
    require(options.tolerance > 0.0, "tolerance", options.tolerance, "more than 0")?;
    let names = if args.to.is_empty() { &options.targets } else { &args.to };
    let mut targets: Vec<&Target> = vec![];
    for name in names {
        let target = registry::find("export target", name, TARGETS, |t| t.name)?;
        if !targets.iter().any(|t| t.name == target.name) {
            targets.push(target);
        }
    }
    require(!targets.is_empty(), "targets", names, "one or more")?;

    // On the CPU whatever the device: files hold no device, and two devices round differently.
    let here = Common {
        data: common.data.clone(),
        device: Device::Cpu,
        threads: common.threads,
        json: common.json,
        quiet: common.quiet,
        commit: common.commit,
        id: None,
    };
    let mut subject_args = args.subjects.clone();
    if let (Some(n), false) = (args.normalisation, args.subjects.weights.is_empty()) {
        (subject_args.mean, subject_args.std) = (n.mean.into(), n.std.into());
    }
    let mut subjects = subject_args.open(&here, PeerChoice::Best)?;
    for subject in &mut subjects {
        if let Some(n) = args.normalisation {
            (subject.meta.mean, subject.meta.std) = (n.mean, n.std);
        }
        for target in &targets {
            target.accepts(subject, args.with_classifier)?;
        }
    }

    let mut shown = Table::new("", &["network", "target", "file", "tensors", "largest difference after reload"]);
    let mut made = vec![];
    for subject in &subjects {
        for target in &targets {
            let folder = folder(args, subject, subjects.len()).join(target.name);
            let facts = package::write(target, subject, args.with_classifier, &folder, options.tolerance, common.commit)?;
            shown.push(vec![
                Cell::text(&subject.name),
                Cell::text(target.name),
                Cell::text(facts.file.display().to_string()),
                Cell::Count(facts.tensors as i64),
                Cell::text(format!("{:.1e}", facts.difference)),
            ]);
            made.push(facts.json(&folder));
        }
        subject.check_unchanged()?;
    }
    if common.json {
        common.print_json(&serde_json::json!({ "exports": made }));
    } else {
        print!("{}", shown.plain());
        common.say("each folder has README.md, golden.npz and check.py");
    }
    Ok(())
}

/// `--out` itself for one network, a folder in it for each of several; without it `export/` in the run's folder or in results/.
fn folder(args: &Args, subject: &Subject, subjects: usize) -> PathBuf {
    let name = subject.name.replace('/', "-");
    match &args.subjects.out {
        Some(out) if subjects == 1 => out.clone(),
        Some(out) => out.join(name),
        None => {
            let own = subject.peer.filter(|_| subject.run.is_some()).map_or(name, |m| format!("peer-{m}"));
            subject.out.join(Path::new("export")).join(own)
        }
    }
}
