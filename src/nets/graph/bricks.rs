//! The modules that networks share, with torch's names and defaults.

use super::super::layers::ConvShape;
use super::{Module, Place, Window};

/// Children 0, 1, ... one after another.
pub(crate) fn sequential(modules: Vec<Module>) -> Module {
    named_sequential(modules.into_iter().enumerate().map(|(i, m)| (i.to_string(), m)).collect())
}

/// As `sequential`, under names of their own.
pub(crate) fn named_sequential(modules: Vec<(String, Module)>) -> Module {
    let sequence = Module::new("Sequential", |g, x| g.calls(modules.iter().map(|(name, _)| name), x));
    Module { children: modules, ..sequence }
}

/// The input as it is.
pub(crate) fn identity(class: &str) -> Module {
    Module::new(class, |_, x| x)
}

/// `torch.nn.Conv2d`, with a bias where the network has one.
pub(crate) fn conv(place: &Place, shape: ConvShape) -> Module {
    let bias = place.find("bias");
    let conv = Module::new("Conv2d", |g, x| g.conv(x, shape, bias.is_some()));
    conv.parameter("weight", Some(place.tensor("weight"))).parameter("bias", bias)
}

/// k x k with "same" padding; the weight knows the rest.
pub(crate) fn plain_conv(place: &Place, stride: i64) -> Module {
    let size = place.tensor("weight").size();
    conv(place, ConvShape::new(size[1], size[0], size[2], stride))
}

/// Batch statistics in training, running ones in evaluation, as torch.nn.BatchNorm2d with its defaults.
pub(crate) fn batch_norm(place: &Place) -> Module {
    let norm = Module::new("BatchNorm2d", |g, x| g.batch_norm(x));
    let norm = ["weight", "bias"].iter().fold(norm, |norm, name| norm.parameter(name, Some(place.tensor(name))));
    let buffers = ["running_mean", "running_var", "num_batches_tracked"];
    buffers.iter().fold(norm, |norm, name| norm.buffer(name, place.tensor(name)))
}

/// `torch.nn.LayerNorm` over the last dimension.
pub(crate) fn layer_norm(place: &Place, eps: f64) -> Module {
    let weight = place.tensor("weight");
    let norm = Module::new("LayerNorm", |g, x| g.layer_norm(x, weight.size()[0], eps));
    norm.parameter("weight", Some(weight)).parameter("bias", Some(place.tensor("bias")))
}

/// `torch.nn.Linear`, with a bias where the network has one.
pub(crate) fn linear(place: &Place) -> Module {
    linear_on(place, false)
}

/// The same on vectors [B, d].
pub(crate) fn classifier(place: &Place) -> Module {
    linear_on(place, true)
}

fn linear_on(place: &Place, vectors: bool) -> Module {
    let bias = place.find("bias");
    let linear = Module::new("Linear", |g, x| g.linear(x, bias.is_some(), vectors));
    linear.parameter("weight", Some(place.tensor("weight"))).parameter("bias", bias)
}

/// In place: what comes before needs its input to go backward, not its output.
pub(crate) fn relu() -> Module {
    Module::new("ReLU", |g, x| g.relu(x))
}

/// 3 x 3 with stride 2, as after the stems for large images.
pub(crate) fn max_pool() -> Module {
    Module::new("MaxPool2d", |g, x| g.max_pool(x, Window { kernel: 3, stride: 2, padding: 1 }))
}

/// Global: [B, c, h, w] -> [B, c, 1, 1].
pub(crate) fn avg_pool() -> Module {
    Module::new("AdaptiveAvgPool2d", |g, x| g.mean(x))
}
