//! ONNX: one graph for ONNX Runtime, TensorRT, OpenVINO and the like. Batch and image size are open.

use std::path::Path;

use tch::Tensor;

use super::Source;
use super::format::{Format, Reloaded};
use crate::error::Result;
use crate::nets::Arch;
use crate::nets::graph::Answer;
use crate::params::Named;
use crate::weights::onnx;

pub(super) struct Onnx;

impl Format for Onnx {
    fn name(&self) -> &'static str {
        "onnx"
    }

    fn framework(&self) -> &'static str {
        "ONNX"
    }

    fn extension(&self) -> &'static str {
        "onnx"
    }

    /// A graph for inference has no place for counters of training batches.
    fn tensors(&self, ours: Named, _: &Arch) -> Result<Named> {
        Ok(ours.into_iter().filter(|(name, _)| !name.ends_with("num_batches_tracked")).collect())
    }

    fn write(&self, path: &Path, source: &Source, _: &Named) -> Result<()> {
        let answer = if source.with_classifier { Answer::Logits } else { Answer::Maps };
        let (network, meta) = (source.network, &source.network.meta);
        let json = |value: serde_json::Value| value.to_string();
        let mut metadata = vec![
            ("architecture".to_string(), network.arch.name.to_string()),
            ("mean".to_string(), json(meta.mean.to_vec().into())),
            ("std".to_string(), json(meta.std.to_vec().into())),
            ("image_size".to_string(), meta.image_size.to_string()),
            ("interpolation".to_string(), meta.interpolation.clone()),
        ];
        if source.with_classifier {
            metadata.push(("classes".to_string(), json(meta.classes.clone().into())));
        }
        onnx::model(network.arch, &network.params, answer, metadata).save(path)
    }

    /// The file answers itself.
    fn open(&self, path: &Path, _: &Source) -> Result<Reloaded> {
        let model = onnx::Model::read(path)?;
        Ok(Box::new(move |images| model.run(images)))
    }

    /// A graph has one kind of answer: maps, or logits alone.
    fn expected(&self, all: Vec<Tensor>, with_classifier: bool) -> Vec<Tensor> {
        if with_classifier { all.into_iter().last().into_iter().collect() } else { all }
    }

    fn facts(&self, _: &Source) -> Result<serde_json::Value> {
        Ok(serde_json::json!({ "opset": onnx::OPSET }))
    }

    fn readme(&self) -> &'static str {
        include_str!("templates/onnx.md")
    }

    fn check(&self, _: &Arch) -> &'static str {
        include_str!("templates/onnx.py")
    }

    fn needs(&self, _: &Arch) -> &'static str {
        "onnx and onnxruntime"
    }
}
