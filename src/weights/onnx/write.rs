//! The operations of a network as ONNX's: children are put in the place of their calls, whole numbers are tensors of one number.

use std::collections::{HashMap, HashSet};

use tch::{Device, Kind, Tensor};

use super::{Attribute, INPUT, LOGITS, Model, Node, Port, feature};
use crate::nets::Arch;
use crate::nets::graph::{self, Answer, Arithmetic, Gives, Int, Module, Op, Pointwise, Value, Window};
use crate::nets::layers::BN_EPS;
use crate::params::{Named, Params};

/// A network with these tensors; `metadata` goes into the file as it is.
pub fn model(arch: &Arch, params: &Params, answer: Answer, metadata: Vec<(String, String)>) -> Model {
    let root = graph::module(arch, params, answer);
    let mut writer = Writer::default();
    let answers = writer.module(&root, "", INPUT.to_string());
    let open = |name: &str| Err(name.to_string());
    let port = |name: String, dims: Vec<std::result::Result<i64, String>>| Port { name, dims };
    let outputs: Vec<Port> = match answer {
        Answer::Logits => {
            let weight = root.find(arch.classifier).parameters.iter().find(|(name, _)| name == "weight");
            vec![port(LOGITS.to_string(), vec![open("batch"), Ok(weight.map_or(0, |(_, t)| t.size()[0]))])]
        }
        Answer::Maps => {
            let sides = |l: usize| [open(&format!("height_{l}")), open(&format!("width_{l}"))];
            let map = |(l, (channels, _)): (usize, &(i64, i64))| {
                port(feature(l), [vec![open("batch"), Ok(*channels)], sides(l).to_vec()].concat())
            };
            arch.maps.iter().enumerate().map(map).collect()
        }
    };
    let named: HashMap<&str, &str> = answers.iter().zip(&outputs).map(|(inner, port)| (inner.as_str(), port.name.as_str())).collect();
    for name in writer.nodes.iter_mut().flat_map(|node| node.inputs.iter_mut().chain(&mut node.outputs)) {
        if let Some(new) = named.get(name.as_str()) {
            *name = new.to_string();
        }
    }
    // A classifier has no use for the views that its maps would be.
    let mut read: HashSet<String> = outputs.iter().map(|port| port.name.clone()).collect();
    let mut nodes: Vec<Node> = vec![];
    for node in writer.nodes.into_iter().rev() {
        if node.outputs.iter().any(|name| read.contains(name)) {
            read.extend(node.inputs.iter().cloned());
            nodes.push(node);
        }
    }
    nodes.reverse();
    Model {
        name: arch.name.to_string(),
        nodes,
        tensors: writer.tensors.into_iter().filter(|(name, _)| read.contains(name)).collect(),
        inputs: vec![port(INPUT.to_string(), vec![open("batch"), Ok(3), open("height"), open("width")])],
        outputs,
        metadata,
    }
}

#[derive(Default)]
struct Writer {
    nodes: Vec<Node>,
    tensors: Named,
    /// How often a name was given.
    used: HashMap<String, usize>,
}

/// What the operations of one module are written with: the module's place, its tensors, and the names of what they gave.
struct Here<'a> {
    module: &'a Module,
    path: &'a str,
    values: Vec<String>,
}

impl Here<'_> {
    fn name(&self, value: Value) -> String {
        self.values[value.0].clone()
    }
}

fn int(value: i64) -> Attribute {
    Attribute::Int(value)
}

fn pooling(window: &Window) -> Vec<(&'static str, Attribute)> {
    vec![
        ("kernel_shape", Attribute::Ints(vec![window.kernel; 2])),
        ("pads", Attribute::Ints(vec![window.padding; 4])),
        ("strides", Attribute::Ints(vec![window.stride; 2])),
    ]
}

impl Writer {
    /// What the module makes of the value of this name.
    fn module(&mut self, module: &Module, path: &str, input: String) -> Vec<String> {
        let mut here = Here { module, path, values: vec![input] };
        for op in module.body.ops.iter().skip(1) {
            let name = self.op(op, &here);
            here.values.push(name);
        }
        match &module.body.gives {
            Gives::One(value) => vec![here.name(*value)],
            Gives::Maps(maps) => maps.iter().map(|map| here.name(*map)).collect(),
        }
    }

    /// A node with one output, whose name is given back.
    fn node(&mut self, here: &Here, op: &str, inputs: Vec<String>, attributes: Vec<(&str, Attribute)>) -> String {
        let name = format!("/{}{}{op}", here.path.replace('.', "/"), if here.path.is_empty() { "" } else { "/" });
        let count = self.used.entry(name.clone()).or_default();
        *count += 1;
        let name = if *count == 1 { name } else { format!("{name}_{}", *count - 1) };
        let output = format!("{name}_output_0");
        let attributes = attributes.into_iter().map(|(name, value)| (name.to_string(), value)).collect();
        self.nodes.push(Node { op: op.to_string(), name, inputs, outputs: vec![output.clone()], attributes });
        output
    }

    /// The name of a tensor, which is kept once.
    fn tensor(&mut self, name: String, tensor: &Tensor) -> String {
        if !self.tensors.iter().any(|(n, _)| *n == name) {
            let kind = if tensor.is_floating_point() { Kind::Float } else { Kind::Int64 };
            self.tensors.push((name.clone(), tensor.detach().to_device(Device::Cpu).to_kind(kind).contiguous()));
        }
        name
    }

    /// A tensor of the module itself.
    fn own(&mut self, here: &Here, name: &str) -> String {
        let held = here.module.parameters.iter().chain(&here.module.buffers).find(|(n, _)| n == name);
        let (_, tensor) = held.unwrap_or_else(|| panic!("{} has no {name}", here.path));
        let dot = if here.path.is_empty() { "" } else { "." };
        self.tensor(format!("{}{dot}{name}", here.path), tensor)
    }

    fn whole(&mut self, numbers: &[i64]) -> String {
        let text: Vec<String> = numbers.iter().map(i64::to_string).collect();
        self.tensor(format!("int_{}", text.join("_")), &Tensor::from_slice(numbers))
    }

    fn number(&mut self, number: f64) -> String {
        self.tensor(format!("float_{number}"), &Tensor::from(number as f32))
    }

    /// [1]
    fn int(&mut self, here: &Here, number: Int) -> String {
        match number {
            Int::Is(number) => self.whole(&[number]),
            Int::Of(value) => here.name(value),
        }
    }

    /// Whole numbers one after another.
    fn ints(&mut self, here: &Here, numbers: &[Int]) -> String {
        let known: Option<Vec<i64>> = numbers.iter().map(|n| if let Int::Is(n) = n { Some(*n) } else { None }).collect();
        if let Some(known) = known {
            return self.whole(&known);
        }
        let parts = numbers.iter().map(|n| self.int(here, *n)).collect();
        self.node(here, "Concat", parts, vec![("axis", int(0))])
    }

    fn cut(&mut self, here: &Here, x: String, dim: i64, from: Int, end: Option<Int>, step: i64) -> String {
        let (from, end) = (self.int(here, from), self.int(here, end.unwrap_or(Int::Is(i64::MAX))));
        let (axes, steps) = (self.whole(&[dim]), self.whole(&[step]));
        self.node(here, "Slice", vec![x, from, end, axes, steps], vec![])
    }

    /// One operation; gives the name of what it gives.
    fn op(&mut self, op: &Op, here: &Here) -> String {
        let name = |value: &Value| here.name(*value);
        match op {
            Op::Input => INPUT.to_string(),
            Op::Call(child, x) => {
                let path = if here.path.is_empty() { child.clone() } else { format!("{}.{child}", here.path) };
                self.module(here.module.find(child), &path, name(x)).remove(0)
            }
            Op::Conv(x, [s, p, d, groups], biased) => {
                let mut inputs = vec![name(x), self.own(here, "weight")];
                if *biased {
                    inputs.push(self.own(here, "bias"));
                }
                let size = here.module.parameters[0].1.size();
                let attributes = vec![
                    ("dilations", Attribute::Ints(vec![*d; 2])),
                    ("group", int(*groups)),
                    ("kernel_shape", Attribute::Ints(size[2..].to_vec())),
                    ("pads", Attribute::Ints(vec![*p; 4])),
                    ("strides", Attribute::Ints(vec![*s; 2])),
                ];
                self.node(here, "Conv", inputs, attributes)
            }
            Op::BatchNorm(x) => {
                let own = ["weight", "bias", "running_mean", "running_var"].map(|tensor| self.own(here, tensor));
                let inputs = [name(x)].into_iter().chain(own).collect();
                self.node(here, "BatchNormalization", inputs, vec![("epsilon", Attribute::Float(BN_EPS as f32))])
            }
            Op::LayerNorm(x, _, eps) => {
                let inputs = vec![name(x), self.own(here, "weight"), self.own(here, "bias")];
                self.node(here, "LayerNormalization", inputs, vec![("axis", int(-1)), ("epsilon", Attribute::Float(*eps as f32))])
            }
            Op::Linear(x, biased, true) => {
                let mut inputs = vec![name(x), self.own(here, "weight")];
                if *biased {
                    inputs.push(self.own(here, "bias"));
                }
                self.node(here, "Gemm", inputs, vec![("transB", int(1))])
            }
            Op::Linear(x, biased, false) => {
                let weight = self.own(here, "weight");
                let weight = self.node(here, "Transpose", vec![weight], vec![("perm", Attribute::Ints(vec![1, 0]))]);
                let y = self.node(here, "MatMul", vec![name(x), weight], vec![]);
                if !*biased {
                    return y;
                }
                let bias = self.own(here, "bias");
                self.node(here, "Add", vec![y, bias], vec![])
            }
            Op::Point(Pointwise::Gelu, x) => {
                let (root, half, one) = (self.number(2f64.sqrt()), self.number(0.5), self.number(1.0));
                let y = self.node(here, "Div", vec![name(x), root], vec![]);
                let y = self.node(here, "Erf", vec![y], vec![]);
                let y = self.node(here, "Add", vec![y, one], vec![]);
                let y = self.node(here, "Mul", vec![name(x), y], vec![]);
                self.node(here, "Mul", vec![y, half], vec![])
            }
            Op::Point(what, x) => {
                let op = match what {
                    Pointwise::Relu => "Relu",
                    Pointwise::Tanh => "Tanh",
                    Pointwise::Sigmoid | Pointwise::Gelu => "Sigmoid",
                };
                self.node(here, op, vec![name(x)], vec![])
            }
            Op::Add(a, b) => self.node(here, "Add", vec![name(a), name(b)], vec![]),
            Op::Mul(a, b) => self.node(here, "Mul", vec![name(a), name(b)], vec![]),
            Op::Scale(x, by) => {
                let by = self.number(*by);
                self.node(here, "Mul", vec![name(x), by], vec![])
            }
            Op::MatMul(a, b) => self.node(here, "MatMul", vec![name(a), name(b)], vec![]),
            Op::Softmax(x, dim) => self.node(here, "Softmax", vec![name(x)], vec![("axis", int(*dim))]),
            Op::MaxPool(x, window) => self.node(here, "MaxPool", vec![name(x)], pooling(window)),
            Op::AvgPool(x, window) => {
                let attributes = pooling(window).into_iter().chain([("count_include_pad", int(1))]).collect();
                self.node(here, "AveragePool", vec![name(x)], attributes)
            }
            Op::Mean(x) => self.node(here, "GlobalAveragePool", vec![name(x)], vec![]),
            Op::Flatten(x) => self.node(here, "Flatten", vec![name(x)], vec![("axis", int(1))]),
            Op::Reshape(x, shape) => {
                let shape = self.ints(here, shape);
                self.node(here, "Reshape", vec![name(x), shape], vec![])
            }
            Op::Permute(x, dims) => self.node(here, "Transpose", vec![name(x)], vec![("perm", Attribute::Ints(dims.clone()))]),
            Op::Concat(parts, dim) => self.node(here, "Concat", parts.iter().map(name).collect(), vec![("axis", int(*dim))]),
            Op::Slice(x, dim, from, end, step) => self.cut(here, name(x), *dim, *from, *end, *step),
            Op::Select(x, dim, at) => {
                let at = self.tensor(format!("at_{at}"), &Tensor::from(*at));
                self.node(here, "Gather", vec![name(x), at], vec![("axis", int(*dim))])
            }
            Op::Pad(x, below, right) => {
                let none = Int::Is(0);
                let pads = self.ints(here, &[none, none, none, none, none, *below, *right, none]);
                self.node(here, "Pad", vec![name(x), pads], vec![])
            }
            Op::Rotate(x, first) => first.iter().fold(name(x), |x, (dim, first)| {
                let end = self.cut(here, x.clone(), *dim, *first, None, 1);
                let start = self.cut(here, x, *dim, Int::Is(0), Some(*first), 1);
                self.node(here, "Concat", vec![end, start], vec![("axis", int(*dim))])
            }),
            Op::Lookup(table, index) => {
                let inputs = vec![self.own(here, table), self.own(here, index)];
                self.node(here, "Gather", inputs, vec![("axis", int(0))])
            }
            Op::Steps(length, edges, _) => {
                let (length, zero, one) = (self.int(here, *length), Tensor::from(0i64), Tensor::from(1i64));
                let length = self.node(here, "Squeeze", vec![length], vec![]);
                let (zero, one) = (self.tensor("at_0".to_string(), &zero), self.tensor("at_1".to_string(), &one));
                let places = self.node(here, "Range", vec![zero, length, one], vec![]);
                let reached: Vec<String> = edges
                    .iter()
                    .map(|edge| {
                        let edge = self.int(here, *edge);
                        let reached = self.node(here, "GreaterOrEqual", vec![places.clone(), edge], vec![]);
                        self.node(here, "Cast", vec![reached], vec![("to", int(1))])
                    })
                    .collect();
                let mut reached = reached.into_iter();
                let first = reached.next().expect("an edge");
                reached.fold(first, |sum, next| self.node(here, "Add", vec![sum, next], vec![]))
            }
            Op::Differ(a, b) => {
                let same = self.node(here, "Equal", vec![name(a), name(b)], vec![]);
                let differ = self.node(here, "Not", vec![same], vec![]);
                self.node(here, "Cast", vec![differ], vec![("to", int(1))])
            }
            // Of training only.
            Op::Drop(x, _) => name(x),
            Op::Size(x, dim) => {
                let shape = self.node(here, "Shape", vec![name(x)], vec![]);
                let dim = self.whole(&[*dim]);
                self.node(here, "Gather", vec![shape, dim], vec![("axis", int(0))])
            }
            Op::Reckon(what, a, b) => {
                let op = match what {
                    Arithmetic::Plus => "Add",
                    Arithmetic::Minus => "Sub",
                    Arithmetic::Times => "Mul",
                    Arithmetic::Over => "Div",
                    Arithmetic::Least => "Min",
                };
                let inputs = vec![self.int(here, *a), self.int(here, *b)];
                self.node(here, op, inputs, vec![])
            }
        }
    }
}
