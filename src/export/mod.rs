//! `mcl-eval export`: networks as detection frameworks load them, each beside a golden input, a recipe for loading it and a check.
//!
//! A format is a file here that implements `format::Format`, and its line in `format::FORMATS`. It says
//! - its name, its framework's and how its files end; which architectures it takes (`takes` reads `Arch::elsewhere`: what a framework has of
//!   an architecture is said by the architecture, in its family's file) and whether it takes classifiers;
//! - how its file is written (`write`), what tensors are called in it (`tensors`), and how it is read back (`read`, or `open` where the file
//!   answers itself): a file that does not give back the network's maps never gets its name;
//! - its two texts in templates/: README.md, which begins with `common.md`, and check.py. They are minijinja templates over the facts of
//!   `package::facts`; a fact that is missing is an error.
//!
//! `package` writes what lies beside every network: golden.npz, README.md, check.py, export.json.
//!
#![doc = include_str!("README.md")]

mod detectron2;
mod format;
mod mmdet;
mod onnx;
mod package;
mod safetensors;
mod timm;
mod torchscript;
mod torchvision;

use std::path::PathBuf;

use clap::Args as ClapArgs;
use serde::Deserialize;
use tch::{Device, Tensor};

use crate::error::Result;
use crate::eval::Common;
use crate::eval::network::{NetworkArgs, PeerChoice, TrainedNetwork};
use crate::eval::protocol::{Protocol, Shipped, apply_sets, require};
use crate::nets::{Outputs, graph};
use crate::params::Named;
use crate::registry;
use crate::report::{Cell, Table};
use crate::run::RunFolder;
use format::{FORMATS, Format};

/// For `--help`.
pub const ABOUT: &str = "Export networks for other frameworks, each with a proof beside it";

/// The protocols an export can follow.
pub const PROTOCOLS: &[Shipped] =
    &[Shipped { name: "export-coco", text: include_str!("../../protocols/eval/export-coco.toml"), repeats: &[] }];

/// The flags of `mcl-eval export`.
#[derive(Debug, Clone, ClapArgs)]
pub struct Args {
    /// Which networks.
    #[command(flatten)]
    pub networks: NetworkArgs,
    /// Names of formats.
    #[arg(long, value_name = "FORMAT", help = to_help())]
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

/// From the list, so that a new format is in it.
fn to_help() -> String {
    let names: Vec<&str> = FORMATS.iter().map(|format| format.name()).collect();
    format!("One of {}; may be repeated [default: those of the protocol that take the network]", names.join(", "))
}

/// The keys of the protocol.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Options {
    targets: Vec<String>,
    tolerance: f64,
}

/// A network, and how much of it is exported.
struct Source<'a> {
    network: &'a TrainedNetwork,
    with_classifier: bool,
}

impl Source<'_> {
    /// Our names of the tensors that are exported: all, or those that the maps depend on.
    fn names(&self) -> Vec<String> {
        match self.with_classifier {
            true => self.network.params.all().map(|(name, _)| name.clone()).collect(),
            false => graph::backbone_names(self.network.arch, &self.network.params),
        }
    }

    /// The tensors of these names of ours.
    fn tensors(&self, wanted: &[String]) -> Named {
        self.network.params.named().into_iter().filter(|(name, _)| wanted.contains(name)).collect()
    }
}

/// A network's maps, then its logits where they are exported.
fn answers(outputs: &Outputs, with_classifier: bool) -> Vec<Tensor> {
    let logits = with_classifier.then(|| outputs.logit().shallow_clone());
    outputs.maps.iter().map(Tensor::shallow_clone).chain(logits).collect()
}

/// Every format, by its name for `--to`.
pub fn formats() -> Vec<&'static str> {
    FORMATS.iter().map(|format| format.name()).collect()
}

/// Exports every network that the flags name in every format that they name.
pub fn run(args: &Args, common: &Common) -> Result<()> {
    let mut protocol = Protocol::read(&args.protocol, PROTOCOLS)?;
    apply_sets(&mut protocol, &args.sets)?;
    let options: Options = protocol.options()?;
    require(options.tolerance > 0.0, "tolerance", options.tolerance, "more than 0")?;
    let names = if args.to.is_empty() { &options.targets } else { &args.to };
    let mut asked: Vec<&dyn Format> = vec![];
    for name in names {
        let format = *registry::find("export format", name, FORMATS, |f| f.name())?;
        if !asked.iter().any(|f| f.name() == format.name()) {
            asked.push(format);
        }
    }
    require(!asked.is_empty(), "targets", names, "one or more")?;

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
    let networks = args.networks.open(&here, PeerChoice::Best)?;
    networks.iter().try_for_each(|network| network.needs_ours("export"))?;
    // Formats that were named must take every network; of the protocol's, each network goes to those that take it.
    let mut plan: Vec<Vec<&dyn Format>> = vec![];
    for network in &networks {
        let source = Source { network, with_classifier: args.with_classifier };
        let taken = |format: &&dyn Format| format.takes(network.arch) && (format.takes_classifier() || !args.with_classifier);
        let named = !args.to.is_empty() || !asked.iter().any(taken);
        let (formats, others): (Vec<_>, Vec<_>) = asked.iter().copied().partition(|format| named || taken(format));
        for format in &formats {
            format::accepts(*format, &source)?;
        }
        for format in others {
            common.say(format!("{}: left out {}, which has no place for this {}", network.name, format.name(), network.arch.name));
        }
        plan.push(formats);
    }

    let mut shown = Table::new("", &["network", "format", "file", "tensors", "largest difference after reload"]);
    let mut made = vec![];
    let progress = common.progress("exporting", plan.iter().map(Vec::len).sum(), "files");
    for (network, formats) in networks.iter().zip(&plan) {
        let source = Source { network, with_classifier: args.with_classifier };
        for format in formats {
            let folder = folder(args, network, networks.len()).join(format.name());
            let facts = package::write(*format, &source, &folder, options.tolerance, common.commit)?;
            shown.push(vec![
                Cell::text(&network.name),
                Cell::text(format.name()),
                Cell::text(facts.file.display().to_string()),
                Cell::Count(facts.tensors as i64),
                Cell::text(format!("{:.1e}", facts.difference)),
            ]);
            made.push(facts.json(&folder));
            progress.add(1);
        }
        network.check_unchanged()?;
    }
    drop(progress);
    if common.json {
        common.print_json(&serde_json::json!({ "exports": made }));
    } else {
        print!("{}", shown.plain());
        common.say("each folder has README.md, golden.npz and check.py");
    }
    Ok(())
}

/// `--out` itself for one network, a folder in it for each of several; without it `export/` in the run's folder or in results/.
fn folder(args: &Args, network: &TrainedNetwork, networks: usize) -> PathBuf {
    let name = network.name.replace('/', "-");
    match &args.networks.out {
        Some(out) if networks == 1 => out.clone(),
        Some(out) => out.join(name),
        None => {
            let stem = || network.file.file_stem().map(|stem| stem.to_string_lossy().into_owned());
            let own = network.run.as_ref().and_then(|_| stem()).unwrap_or(name);
            RunFolder::at(&network.out).exports().join(own)
        }
    }
}
