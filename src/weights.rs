//! Weights in and out: safetensors with metadata.

use std::path::Path;

use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::error::{Error, Result};
use crate::nets::Arch;
use crate::params::{Named, Params};

/// What a deployable network says about itself.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Meta {
    pub arch: String,
    pub classes: Vec<String>,
    pub image_size: i64,
    pub mean: [f64; 3],
    pub std: [f64; 3],
    pub interpolation: String,
    pub run: String,
    pub recipe: String,
    pub peer: Option<usize>,
    pub dataset: Option<String>,
    pub epoch: Option<usize>,
}

pub struct Weights {
    pub tensors: Named,
    pub meta: Option<Meta>,
}

#[derive(Default)]
pub struct LoadOptions {
    pub allow_partial: bool,
}

pub fn save_safetensors(path: &Path, tensors: &Named, _meta: &Meta) -> Result<()> {
    let plain: Vec<(String, Tensor)> = tensors.iter().map(|(n, t)| (n.clone(), t.detach().contiguous())).collect();
    Tensor::write_safetensors(&plain, path).map_err(|e| Error::failed(format!("cannot write {}: {e}", path.display())))
}

pub fn read(path: &Path) -> Result<Weights> {
    let tensors = Tensor::read_safetensors(path).map_err(|e| Error::file(path, e.to_string()))?;
    Ok(Weights { tensors, meta: None })
}

pub fn load_into(params: &Params, weights: &Weights, _arch: &Arch, _options: &LoadOptions) -> Result<String> {
    let _guard = tch::no_grad_guard();
    for (name, live) in params.all() {
        let (_, saved) = weights.tensors.iter().find(|(n, _)| n == name).ok_or_else(|| Error::input(format!("no `{name}` in the weights")))?;
        live.shallow_clone().copy_(saved);
    }
    Ok(format!("{} tensors", weights.tensors.len()))
}
