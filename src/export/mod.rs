//! `mcl-eval export`: networks as detection frameworks load them, each beside a golden input, a recipe for loading it and a check.

mod format;
mod package;

use std::path::{Path, PathBuf};

use clap::Args as ClapArgs;
use serde::Deserialize;
use tch::Device;

use crate::commands::list;
use crate::error::Result;
use crate::eval::Common;
use crate::eval::network::{NetworkArgs, PeerChoice, TrainedNetwork};
use crate::eval::protocol::{Protocol, Shipped, apply_sets, require};
use crate::registry;
use format::{TARGETS, Target};

pub const ABOUT: &str = "Export backbones for torchvision, MMDetection, Detectron2, TorchScript, safetensors, with a proof beside each";

/// The protocols an export can follow.
pub const PROTOCOLS: &[Shipped] =
    &[Shipped { name: "export-coco", text: include_str!("../../protocols/eval/export-coco.toml"), repeats: &[] }];

#[derive(Debug, Clone, ClapArgs)]
pub struct Args {
    #[command(flatten)]
    pub subjects: NetworkArgs,
    /// torchscript, torchvision, mmdet, detectron2 or safetensors; may be repeated [default: the protocol's]
    #[arg(long, value_name = "TARGET")]
    pub to: Vec<String>,
    /// The whole network, which answers with logits, instead of the backbone, which answers with its maps
    #[arg(long)]
    pub with_classifier: bool,
    /// export-coco or a TOML file
    #[arg(long, default_value = "export-coco")]
    pub protocol: String,
    /// Change a key of the protocol (may be repeated)
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
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
    let mut protocol = Protocol::read(&args.protocol, PROTOCOLS)?;
    apply_sets(&mut protocol, &args.sets)?;
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
    let subjects = args.subjects.open(&here, PeerChoice::Best)?;
    for subject in &subjects {
        for target in &targets {
            target.accepts(subject, args.with_classifier)?;
        }
    }

    let mut rows = vec![];
    let mut made = vec![];
    for subject in &subjects {
        for target in &targets {
            let folder = folder(args, subject, subjects.len()).join(target.name);
            let facts = package::write(target, subject, args.with_classifier, &folder, options.tolerance, common.commit)?;
            rows.push(vec![
                subject.name.clone(),
                target.name.to_string(),
                facts.file.display().to_string(),
                facts.tensors.to_string(),
                format!("{:.1e}", facts.difference),
            ]);
            made.push(facts.json(&folder));
        }
        subject.check_unchanged()?;
    }
    if common.json {
        common.print_json(&serde_json::json!({ "exports": made }));
    } else {
        let header = ["network", "target", "file", "tensors", "largest difference after reload"].map(String::from).to_vec();
        print!("{}", list::columns(&std::iter::once(header).chain(rows).collect::<Vec<_>>()));
        common.say("each folder has README.md, golden.npz and check.py");
    }
    Ok(())
}

/// `--out` itself for one network, a folder in it for each of several; without it `export/` in the run's folder or in results/.
fn folder(args: &Args, subject: &TrainedNetwork, subjects: usize) -> PathBuf {
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
