//! Networks as operator graphs: a tree of modules with their tensors, the children by torchvision's names and order, and the operations
//! that each one does. Each family describes itself once with these bricks; the writers of files read the description:
//! `weights::torchscript` makes a module tree of it, `weights::onnx` one flat graph.
//!
//! A family has its layers beside it, because a `Layer` is a closed box (it may fold, fuse or choose a kernel, see `kernels`), and what a
//! file must hold is the opposite: plain operations under known names. tests/export.rs holds the two to the same maps and logits.

mod body;
pub(crate) mod bricks;

use std::collections::HashMap;
use std::fmt::Display;

use tch::Tensor;

use super::Arch;
use crate::params::{Named, Params};
pub use body::{Arithmetic, Body, Gives, Int, Op, Pointwise, Value, Window};
pub(crate) use bricks::*;

/// One module: its tensors, its children and what it does.
pub struct Module {
    /// The name of its class, as torch calls the same thing.
    pub class: String,
    /// What it makes of its input.
    pub body: Body,
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
    /// A module without tensors; `work` says what it does with its input.
    pub fn new(class: &str, work: impl FnOnce(&mut Body, Value) -> Value) -> Module {
        let body = Body::new(work);
        Module { class: class.into(), body, parameters: vec![], buffers: vec![], ints: vec![], children: vec![] }
    }

    /// With one more child, after those it has.
    pub fn child(mut self, name: impl Display, module: Module) -> Module {
        self.children.push((name.to_string(), module));
        self
    }

    /// The child of this dotted name. A body that calls one that is not there is a bug of ours.
    pub fn find(&self, path: &str) -> &Module {
        path.split('.').fold(self, |module, part| {
            let found = module.children.iter().find(|(name, _)| name == part);
            &found.unwrap_or_else(|| panic!("{} has no child {path}", self.class)).1
        })
    }

    /// With a trained tensor of this name, where there is one.
    pub(crate) fn parameter(mut self, name: &str, tensor: Option<Tensor>) -> Module {
        self.parameters.extend(tensor.map(|t| (name.to_string(), t)));
        self
    }

    /// With a tensor that is not trained.
    pub(crate) fn buffer(mut self, name: &str, tensor: Tensor) -> Module {
        self.buffers.push((name.to_string(), tensor));
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

    /// The tensor of this name here, if the network has one.
    pub fn find(&self, name: &str) -> Option<Tensor> {
        self.tensors.get(format!("{}{name}", self.prefix).as_str()).map(|t| t.shallow_clone())
    }

    /// The tensor of this name here; a family that asks for one it did not make is a bug of ours.
    pub fn tensor(&self, name: &str) -> Tensor {
        self.find(name).unwrap_or_else(|| panic!("the network has no {}{name}", self.prefix))
    }
}

type Tail = Box<dyn FnOnce(&mut Body, Value) -> Value>;

/// A network as it is described: what is called one after another, where its maps are, and what follows the last of them.
pub struct Tree {
    children: Vec<(String, Module)>,
    /// Children of what lies between the last map and the classifier; left out of a backbone.
    neck: Vec<(String, Module)>,
    tail: Option<Tail>,
    body: Body,
    /// What was called last.
    now: Value,
    maps: Vec<Value>,
    /// The children in order, and which map each one gives.
    layers: Vec<(String, Option<usize>)>,
    /// Are maps [B, h, w, c] inside?
    channels_last: bool,
    /// See `Module::ints`.
    pub ints: Vec<(String, i64)>,
}

impl Default for Tree {
    fn default() -> Tree {
        Tree {
            children: vec![],
            neck: vec![],
            tail: None,
            body: Body::new(|_, x| x),
            now: Value::INPUT,
            maps: vec![],
            layers: vec![],
            channels_last: false,
            ints: vec![],
        }
    }
}

impl Tree {
    /// A child that is called with the map so far.
    pub fn step(self, name: &str, module: Module) -> Tree {
        self.holder(name, module).call(name)
    }

    /// A child whose own children are called by `call`.
    pub fn holder(mut self, name: &str, module: Module) -> Tree {
        self.layers.push((name.into(), None));
        self.children.push((name.into(), module));
        self
    }

    /// The child of this dotted name is called with the map so far.
    pub fn call(self, path: &str) -> Tree {
        self.then(|g, x| g.call(path, x))
    }

    /// Operations on the map so far.
    pub fn then(mut self, work: impl FnOnce(&mut Body, Value) -> Value) -> Tree {
        self.now = work(&mut self.body, self.now);
        self
    }

    /// Maps so far have the channels last.
    pub fn channels_last(mut self) -> Tree {
        self.channels_last = true;
        self
    }

    /// What was called last gives the next of the maps.
    pub fn map(mut self) -> Tree {
        let map = if self.channels_last { self.body.permute(self.now, &[0, 3, 1, 2]) } else { self.now };
        self.layers.last_mut().expect("a map comes out of a child").1 = Some(self.maps.len());
        self.maps.push(map);
        self
    }

    /// A child that only the classifier needs; `tail` calls it.
    pub fn neck(mut self, name: &str, module: Module) -> Tree {
        self.neck.push((name.into(), module));
        self
    }

    /// From what was called last to what is pooled and flattened for the classifier.
    pub fn tail(mut self, work: impl FnOnce(&mut Body, Value) -> Value + 'static) -> Tree {
        self.tail = Some(Box::new(work));
        self
    }
}

/// What the whole module gives.
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
    with_place(params, |place| (arch.graph)(&place).layers)
}

/// The module of a network with these tensors.
pub fn module(arch: &Arch, params: &Params, answer: Answer) -> Module {
    with_place(params, |place| module_at(arch, &place, answer))
}

fn module_at(arch: &Arch, place: &Place, answer: Answer) -> Module {
    let Tree { mut children, neck, tail, mut body, now, maps, ints, .. } = (arch.graph)(place);
    assert_eq!(maps.len(), arch.depth, "{}: a map for every stage", arch.name);
    match answer {
        Answer::Maps => body.gives(Gives::Maps(maps)),
        Answer::Logits => {
            let pooled = tail.map_or(now, |work| work(&mut body, now));
            let flat = body.flatten(pooled);
            let logits = body.call(arch.classifier, flat);
            body.gives(Gives::One(logits));
            children.extend(neck);
            children.push((arch.classifier.to_string(), classifier(&place.sub(arch.classifier))));
        }
    }
    Module { class: class_name(arch), body, parameters: vec![], buffers: vec![], ints, children }
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
