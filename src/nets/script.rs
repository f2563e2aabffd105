//! Networks as trees of TorchScript modules: the tensors, the children by torchvision's names and order, the source of `forward`. Each
//! family describes itself with these bricks beside its layers; `weights::torchscript` makes a file of the tree.
//!
//! So an architecture is described twice, as layers that compute and as modules that are written down. A `Layer` is a closed box (it may fold,
//! fuse or choose a kernel, see `kernels`), and what a file must hold is the opposite: plain operations under torchvision's names. A list of
//! operations that both are made from would end that, and pays when a third reader (ONNX) wants it; until then tests/export.rs holds every
//! architecture's two descriptions to the same maps and logits.

use std::collections::HashMap;
use std::fmt::Display;

use tch::Tensor;

use super::Arch;
use super::layers::ConvShape;
use crate::params::{Named, Params};

/// One TorchScript module.
pub struct Module {
    /// The name of its class, as torch calls the same thing.
    pub class: String,
    /// Its methods, `def forward(self, x: Tensor) -> Tensor: ...`.
    pub source: String,
    /// Tensors that are trained, by their names in this module.
    pub parameters: Named,
    /// Tensors that are not.
    pub buffers: Named,
    /// Plain numbers that Python code looks for.
    pub ints: Vec<(String, i64)>,
    /// In the order in which torchvision registers them: its layer getter walks them one after another.
    pub children: Vec<(String, Module)>,
}

impl Module {
    /// A module without tensors; `body` are the lines of `forward(self, x: Tensor) -> Tensor`.
    pub fn new(class: &str, body: &str) -> Module {
        let mut source = "def forward(self, x: Tensor) -> Tensor:\n".to_string();
        body.trim_matches('\n').lines().for_each(|line| source += &format!("    {line}\n"));
        Module { class: class.into(), source, parameters: vec![], buffers: vec![], ints: vec![], children: vec![] }
    }

    /// With one more child, after those it has.
    pub fn child(mut self, name: impl Display, module: Module) -> Module {
        self.children.push((name.to_string(), module));
        self
    }

    fn parameter(mut self, name: &str, tensor: Option<Tensor>) -> Module {
        self.parameters.extend(tensor.map(|t| (name.to_string(), t)));
        self
    }
}

/// Where the tensors of a network are taken from, by the names that lead there.
pub struct Place<'a> {
    tensors: &'a HashMap<&'a str, &'a Tensor>,
    prefix: String,
}

impl Place<'_> {
    /// One part of a dotted name further down.
    pub fn sub(&self, name: impl Display) -> Place<'_> {
        Place { tensors: self.tensors, prefix: format!("{}{name}.", self.prefix) }
    }

    fn find(&self, name: &str) -> Option<Tensor> {
        self.tensors.get(format!("{}{name}", self.prefix).as_str()).map(|t| t.shallow_clone())
    }

    /// The tensor of this name here; a family that asks for one it did not make is a bug of ours.
    pub fn tensor(&self, name: &str) -> Tensor {
        self.find(name).unwrap_or_else(|| panic!("the network has no {}{name}", self.prefix))
    }
}

/// A network as it is described: what is called one after another, where its maps are, and what follows the last of them.
#[derive(Default)]
pub struct Tree {
    children: Vec<(String, Module)>,
    /// Children and lines of what lies between the last map and the classifier; left out of a backbone.
    neck: Vec<(String, Module)>,
    body: Vec<String>,
    tail: Vec<String>,
    maps: usize,
    /// The children in order, and which map each one gives.
    layers: Vec<(String, Option<usize>)>,
    /// How a map is made [B, c, h, w].
    as_map: &'static str,
    /// See `Module::ints`.
    pub ints: Vec<(String, i64)>,
}

impl Tree {
    /// A child that is called with the map so far.
    pub fn step(self, name: &str, module: Module) -> Tree {
        self.holder(name, module).call(&format!("self.{name}.forward(x)"))
    }

    /// A child whose own children are called by `call`.
    pub fn holder(mut self, name: &str, module: Module) -> Tree {
        self.layers.push((name.into(), None));
        self.children.push((name.into(), module));
        self
    }

    /// `x` becomes the value of this expression.
    pub fn call(mut self, expression: &str) -> Tree {
        self.body.push(format!("x = {expression}"));
        self
    }

    /// Maps so far have the channels last.
    pub fn channels_last(mut self) -> Tree {
        self.as_map = ".permute([0, 3, 1, 2])";
        self
    }

    /// What was called last gives the next of the maps.
    pub fn map(mut self) -> Tree {
        self.body.push(format!("map{} = x{}", self.maps, self.as_map));
        self.layers.last_mut().expect("a map comes out of a child").1 = Some(self.maps);
        self.maps += 1;
        self
    }

    /// A child that only the classifier needs; `tail` calls it.
    pub fn neck(mut self, name: &str, module: Module) -> Tree {
        self.neck.push((name.into(), module));
        self
    }

    /// A line after the last map; `x` is what was called last.
    pub fn tail(mut self, expression: &str) -> Tree {
        self.tail.push(format!("x = {expression}"));
        self
    }
}

/// What `forward` of the whole module gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The map after each stage, "0" on; nothing that only the classifier needs is there.
    Maps,
    /// [B, classes]
    Logits,
}

fn with_place<T>(params: &Params, work: impl FnOnce(Place) -> T) -> T {
    let tensors: HashMap<&str, &Tensor> = params.all().map(|(name, t)| (name.as_str(), t)).collect();
    work(Place { tensors: &tensors, prefix: String::new() })
}

/// The children of a backbone in the order they are called, and which map each one gives.
pub(crate) fn layers(arch: &Arch, params: &Params) -> Vec<(String, Option<usize>)> {
    with_place(params, |place| (arch.script)(&place).layers)
}

/// The module of a network with these tensors.
pub fn module(arch: &Arch, params: &Params, answer: Answer) -> Module {
    with_place(params, |place| module_at(arch, &place, answer))
}

fn module_at(arch: &Arch, place: &Place, answer: Answer) -> Module {
    let tree = (arch.script)(place);
    assert_eq!(tree.maps, arch.depth, "{}: a map for every stage", arch.name);
    let (gives, tail) = match answer {
        Answer::Maps => {
            let maps: Vec<String> = (0..tree.maps).map(|l| format!("\"{l}\": map{l}")).collect();
            ("Dict[str, Tensor]", vec![format!("return {{{}}}", maps.join(", "))])
        }
        Answer::Logits => {
            let last = format!("return self.{}.forward(torch.flatten(x, 1))", arch.classifier);
            ("Tensor", tree.tail.iter().cloned().chain([last]).collect())
        }
    };
    let lines: Vec<String> = tree.body.iter().chain(&tail).map(|line| format!("    {line}\n")).collect();
    let mut children = tree.children;
    if answer == Answer::Logits {
        children.extend(tree.neck);
        children.push((arch.classifier.to_string(), linear(&place.sub(arch.classifier))));
    }
    Module {
        class: class_name(arch),
        source: format!("def forward(self, x: Tensor) -> {gives}:\n{}", lines.concat()),
        parameters: vec![],
        buffers: vec![],
        ints: tree.ints,
        children,
    }
}

/// The names of the tensors that the maps depend on: a backbone's state dict.
pub(crate) fn backbone_names(arch: &Arch, params: &Params) -> Vec<String> {
    fn collect(module: &Module, prefix: &str, names: &mut Vec<String>) {
        names.extend(module.parameters.iter().chain(&module.buffers).map(|(name, _)| format!("{prefix}{name}")));
        module.children.iter().for_each(|(name, child)| collect(child, &format!("{prefix}{name}."), names));
    }
    let mut names = vec![];
    collect(&module(arch, params, Answer::Maps), "", &mut names);
    names
}

/// An identifier: `swin_t` becomes `SwinT`.
fn class_name(arch: &Arch) -> String {
    let capital = |part: &str| part[..1].to_uppercase() + &part[1..];
    arch.name.split('_').filter(|part| !part.is_empty()).map(capital).collect()
}

/// Children 0, 1, ... one after another.
pub(crate) fn sequential(modules: Vec<Module>) -> Module {
    named_sequential(modules.into_iter().enumerate().map(|(i, m)| (i.to_string(), m)).collect())
}

/// As `sequential`, under names of their own.
pub(crate) fn named_sequential(modules: Vec<(String, Module)>) -> Module {
    let calls: Vec<String> = modules.iter().map(|(name, _)| format!("x = getattr(self, \"{name}\").forward(x)\n")).collect();
    Module { children: modules, ..Module::new("Sequential", &format!("{}return x", calls.concat())) }
}

/// `torch.nn.Conv2d`, with a bias where the network has one.
pub(crate) fn conv(place: &Place, shape: ConvShape) -> Module {
    let ConvShape { stride: s, padding: p, dilation: d, groups, .. } = shape;
    let bias = place.find("bias");
    let given = if bias.is_some() { "self.bias" } else { "None" };
    let body = format!("return torch.conv2d(x, self.weight, {given}, [{s}, {s}], [{p}, {p}], [{d}, {d}], {groups})");
    Module::new("Conv2d", &body).parameter("weight", Some(place.tensor("weight"))).parameter("bias", bias)
}

/// k x k with "same" padding; the weight knows the rest.
pub(crate) fn plain_conv(place: &Place, stride: i64) -> Module {
    let size = place.tensor("weight").size();
    conv(place, ConvShape::new(size[1], size[0], size[2], stride))
}

/// Batch statistics in training, running ones in evaluation, as torch.nn.BatchNorm2d with its defaults.
pub(crate) fn batch_norm(place: &Place) -> Module {
    let body = format!(
        "
if self.training:
    self.num_batches_tracked.add_(1)
return torch.batch_norm(x, self.weight, self.bias, self.running_mean, self.running_var, self.training, {momentum}, {eps}, True)
",
        momentum = super::layers::BN_MOMENTUM,
        eps = super::layers::BN_EPS
    );
    let buffer = |name: &str| (name.to_string(), place.tensor(name));
    let norm = Module::new("BatchNorm2d", &body);
    let norm = norm.parameter("weight", Some(place.tensor("weight"))).parameter("bias", Some(place.tensor("bias")));
    Module { buffers: ["running_mean", "running_var", "num_batches_tracked"].map(buffer).into(), ..norm }
}

/// `torch.nn.LayerNorm` over the last dimension.
pub(crate) fn layer_norm(place: &Place, eps: f64) -> Module {
    let weight = place.tensor("weight");
    let body = format!("return torch.layer_norm(x, [{}], self.weight, self.bias, {eps})", weight.size()[0]);
    Module::new("LayerNorm", &body).parameter("weight", Some(weight)).parameter("bias", Some(place.tensor("bias")))
}

/// `torch.nn.Linear`, with a bias where the network has one.
pub(crate) fn linear(place: &Place) -> Module {
    let bias = place.find("bias");
    let body = format!("return torch.linear(x, self.weight, {})", if bias.is_some() { "self.bias" } else { "None" });
    Module::new("Linear", &body).parameter("weight", Some(place.tensor("weight"))).parameter("bias", bias)
}

/// In place: what comes before needs its input to go backward, not its output.
pub(crate) fn relu() -> Module {
    Module::new("ReLU", "return torch.relu_(x)")
}

/// 3 x 3 with stride 2, as after the stems for large images.
pub(crate) fn max_pool() -> Module {
    Module::new("MaxPool2d", "return torch.max_pool2d(x, [3, 3], [2, 2], [1, 1], [1, 1], False)")
}

/// Global: [B, c, h, w] -> [B, c, 1, 1].
pub(crate) fn avg_pool() -> Module {
    Module::new("AdaptiveAvgPool2d", "return torch.mean(x, [2, 3], True)")
}
