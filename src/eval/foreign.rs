//! Networks of anybody's as TorchScript: what a JSON beside the file says of them, flags first.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use tch::{Device, Kind};

use super::Common;
use super::network::{Meta, TrainedNetwork, WeightsArgs, hash};
use crate::error::{Error, Result};
use crate::extractor::foreign::{Choice, Foreign, Pool};
use crate::files;
use crate::limits;
use crate::nets::{FOREIGN, Network};
use crate::params::{Params, Scope, check_finite};
use crate::weights::torchscript;

/// What protocols/import/trace.py writes beside a file; every key may be left out, and others are not looked at.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Beside {
    /// What the network is called where it comes from.
    name: Option<String>,
    image_size: Option<i64>,
    mean: Option<[f64; 3]>,
    std: Option<[f64; 3]>,
    output: Option<String>,
    pool: Option<Pool>,
    /// The names of the classes, where its output is logits.
    classes: Vec<String>,
    /// What it was trained on.
    dataset: Option<String>,
}

/// What is known of a TorchScript network besides its parameters.
#[derive(Debug, Clone)]
pub struct Script {
    /// The name beside the file, or `torchscript`.
    pub(super) name: String,
    choice: Choice,
    /// sha256 of the file: its code and constants decide what it answers as its parameters do.
    pub(super) file_hash: String,
}

impl Script {
    pub(super) fn open(&self, file: &Path, device: Device) -> Result<Foreign> {
        Foreign::open(file, device, self.choice.clone())
    }

    /// What is taken of its answer.
    pub(super) fn described(&self) -> String {
        format!(" output {:?} pool {:?}", self.choice.output, self.choice.pool)
    }
}

/// Side of the images where nothing says another: what most networks of others were trained on.
const USUAL_SIDE: i64 = 224;

/// Opens a TorchScript file as a network to be measured.
pub(super) fn open(args: &WeightsArgs, file: &Path, out: PathBuf, common: &Common) -> Result<TrainedNetwork> {
    files::fits(file)?;
    let beside_file = file.with_extension("json");
    let beside: Beside = if beside_file.exists() { files::read_json(&beside_file)? } else { Beside::default() };
    let choice = Choice { output: args.output.clone().or(beside.output), pool: args.pool.or(beside.pool) };
    let bytes = std::fs::read(file).map_err(Error::open(file))?;
    let stem = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let script = Script { name: beside.name.unwrap_or_else(|| "torchscript".to_string()), choice, file_hash: files::sha256(&bytes) };
    drop(bytes);
    let normalisation = args.normalised(beside.mean, beside.std, file).map_err(|e| {
        Error::input(format!("{e}; or `mean` and `std` in {}, as protocols/import/trace.py writes it", beside_file.display()))
    })?;
    let image_size = beside.image_size.unwrap_or(USUAL_SIDE);
    limits::side("image_size", image_size).map_err(|e| Error::file(&beside_file, e.to_string()))?;
    torchscript::check(file)?;
    let module = script.open(file, common.device)?;
    let params = Params { vars: module.parameters()?, buffers: vec![] };
    check_finite(params.all()).map_err(|found| Error::file(file, found.to_string()))?;
    let meta = Meta {
        classes: beside.classes,
        image_size,
        mean: normalisation.mean,
        std: normalisation.std,
        dataset: beside.dataset,
        recipe: String::new(),
        epoch: None,
        interpolation: "bilinear".to_string(),
    };
    let scope = Scope::blank(Device::Cpu, Kind::Float);
    Ok(TrainedNetwork {
        name: stem,
        run: None,
        peer: None,
        stage: None,
        method: String::new(),
        arch: &FOREIGN,
        file: file.to_path_buf(),
        meta,
        net: Network::new(&FOREIGN, &scope, 1),
        hash: hash(&params, Some(&script)),
        params,
        out,
        taps: vec![],
        script: Some(script),
        loaded: None,
    })
}
