//! HCGNet, Yang et al., AAAI 2020: hybrid blocks of densely connected gated modules (SMG) with gated transitions between them, in the
//! variant of the released L-MCL code for 32 x 32 images.

use tch::Tensor;

use super::graph::{self, Body, Module as Graph, Place, Pointwise, Tree, Value};
use super::layers::{BatchNorm, BnRelu, Chain, Conv, ConvBn, ConvShape, Layer, Linear, Pass};
use super::{Arch, Elsewhere, GOLDEN_SMALL, Norm, Released};
use crate::params::Scope;

/// New channels per module in the three hybrid blocks.
type Growth = [i64; 3];

macro_rules! arch {
    ($name:literal, $growth:expr) => {
        Arch {
            name: $name,
            family: "hcgnet",
            image_size: 32,
            depth: 3,
            maps: &[(entry($growth, 1), 2), (entry($growth, 2), 4), (width($growth, 2), 4)],
            dim: width($growth, 2),
            classifier: "classifier",
            norm: Norm::Batch,
            released: Released { baseline: BASELINE, lmcl: &[] },
            elsewhere: Elsewhere::NOWHERE,
            golden: GOLDEN_SMALL,
            stage: |scope, l| stage(scope, l, $growth),
            neck: |scope| Box::new(BnRelu(BatchNorm::new(scope.sub("norm5"), width($growth, 2)))),
            branch: |scope, l| branch(scope, l, $growth),
            twins,
            head: Linear::new,
            branch_head: Linear::new,
            graph,
        }
    };
}

pub const ARCHS: &[Arch] = &[arch!("hcgnet_a1", [12, 24, 36]), arch!("hcgnet_a2", [24, 36, 64])];

/// The released baseline keeps everything but the classifier in `features`, the L-MCL class only `conv0`.
const BASELINE: &[(&str, &str)] = &[
    ("HybridBlock1", "features.HybridBlock1"),
    ("Transition1", "features.Transition1"),
    ("HybridBlock2", "features.HybridBlock2"),
    ("Transition2", "features.Transition2"),
    ("HybridBlock3", "features.HybridBlock3"),
    ("norm5", "features.norm5"),
];

/// Modules per hybrid block.
const MODULES: usize = 8;
const BOTTLENECK: i64 = 4;

/// Channels into the l-th hybrid block: twice the first growth, then half of what the block before gave (theta = 0.5).
const fn entry(growth: Growth, l: usize) -> i64 {
    if l == 0 { 2 * growth[0] } else { width(growth, l - 1) / 2 }
}

/// Channels out of the l-th hybrid block.
const fn width(growth: Growth, l: usize) -> i64 {
    entry(growth, l) + MODULES as i64 * growth[l]
}

fn conv(scope: Scope, shape: ConvShape) -> Conv {
    Conv::new(scope, shape, shape.default_init())
}

fn point(scope: Scope, c_in: i64, c_out: i64) -> Conv {
    let shape = ConvShape::new(c_in, c_out, 1, 1);
    Conv::biased(scope, shape, shape.default_init())
}

/// BatchNorm, ReLU, convolution.
struct Unit {
    norm: BatchNorm,
    conv: Conv,
}

impl Unit {
    fn new(scope: Scope, shape: ConvShape) -> Unit {
        Unit { norm: BatchNorm::new(scope.sub("norm"), shape.c_in), conv: conv(scope.sub("conv"), shape) }
    }
}

impl Layer for Unit {
    fn forward(&self, xs: &Tensor, pass: Pass) -> Tensor {
        self.conv.forward(&self.norm.relu(xs, pass), pass)
    }
}

/// Attention pooling: a softmax over the positions weighs them. [B, c, h, w] -> [B, c, 1, 1]
struct ContextPool(Conv);

impl Layer for ContextPool {
    fn forward(&self, xs: &Tensor, pass: Pass) -> Tensor {
        let weights = self.0.forward(xs, pass).flatten(1, -1).softmax(1, None).unsqueeze(-1); // [B, hw, 1]
        xs.flatten(2, -1).matmul(&weights).unsqueeze(-1)
    }
}

/// A squeeze, tanh(BN(W x)), on a pooled vector [B, c, 1, 1]. The norm is a BatchNorm1d over [B, c]: the same numbers.
fn squeeze(conv: Scope, bn: Scope, c_in: i64, c_out: i64) -> ConvBn {
    let shape = ConvShape::new(c_in, c_out, 1, 1);
    ConvBn::of(Conv::biased(conv, shape, shape.default_init()), bn)
}

/// The gated unit of modules and transitions: y = u * g + (m3 * c3 + m5 * c5). The released code has replaced the two maps by their
/// pooled vectors c3, c5 before mixing them, so the second term is a constant per channel.
struct Gated {
    reduce: BatchNorm,
    /// `conv1_1x1.conv` and `conv2_3x3.norm` after it.
    first: ConvBn,
    second: Conv,
    forget: ContextPool,
    forget_squeeze: ConvBn,
    forget_gate: Conv,
    narrow: Unit,
    wide: Unit,
    narrow_pool: ContextPool,
    wide_pool: ContextPool,
    mix_squeeze: ConvBn,
    narrow_mix: Conv,
    wide_mix: Conv,
}

impl Gated {
    /// 1x1 to `middle` channels, then the convolution `second`; rho and phi are both `factor`.
    fn new(scope: &Scope, c_in: i64, second: ConvShape, factor: i64) -> Gated {
        let c = second.c_out;
        let depthwise = ConvShape::depthwise(c, 3, 1);
        let first = ConvShape::new(c_in, second.c_in, 1, 1);
        let at = |name: &str| scope.sub(name);
        Gated {
            reduce: BatchNorm::new(at("conv1_1x1.norm"), c_in),
            first: ConvBn::new(at("conv1_1x1.conv"), at("conv2_3x3.norm"), first, first.default_init()),
            second: conv(at("conv2_3x3.conv"), second),
            forget: ContextPool(point(at("global_forget_context"), c, 1)),
            forget_squeeze: squeeze(at("fc1"), at("bn_forget"), c, c / factor),
            forget_gate: point(at("fc2"), c / factor, c),
            narrow: Unit::new(at("conv_3x3"), depthwise),
            wide: Unit::new(at("conv_5x5"), ConvShape { padding: 2, dilation: 2, ..depthwise }),
            narrow_pool: ContextPool(point(at("global_context3x3"), c, 1)),
            wide_pool: ContextPool(point(at("global_context5x5"), c, 1)),
            mix_squeeze: squeeze(at("fcall"), at("bn_attention"), 2 * c, 2 * c / factor),
            narrow_mix: point(at("fc3x3"), 2 * c / factor, c),
            wide_mix: point(at("fc5x5"), 2 * c / factor, c),
        }
    }
}

impl Layer for Gated {
    fn forward(&self, xs: &Tensor, pass: Pass) -> Tensor {
        let us = self.second.forward(&self.first.relu(&self.reduce.relu(xs, pass), pass), pass);
        let gate = self.forget_gate.forward(&self.forget_squeeze.forward(&self.forget.forward(&us, pass), pass).tanh(), pass).sigmoid();
        let c3 = self.narrow_pool.forward(&self.narrow.forward(&us, pass), pass);
        let c5 = self.wide_pool.forward(&self.wide.forward(&us, pass), pass);
        let mix = self.mix_squeeze.forward(&Tensor::cat(&[&c3, &c5], 1), pass).tanh();
        let weights = Tensor::stack(&[self.narrow_mix.forward(&mix, pass), self.wide_mix.forward(&mix, pass)], 0).softmax(0, None);
        us * gate + (weights.get(0) * c3 + weights.get(1) * c5)
    }
}

/// An SMG: its input and the new channels beside it.
struct Module(Gated);

impl Layer for Module {
    fn forward(&self, xs: &Tensor, pass: Pass) -> Tensor {
        Tensor::cat(&[xs, &self.0.forward(xs, pass)], 1)
    }
}

fn hybrid_block(scope: Scope, l: usize, growth: Growth) -> Box<dyn Layer> {
    let k = growth[l];
    let module = |i: usize| -> Box<dyn Layer> {
        let second = ConvShape { groups: 4, ..ConvShape::new(BOTTLENECK * k, k, 3, 1) };
        Box::new(Module(Gated::new(&scope.sub(format!("SMG{}", i + 1)), entry(growth, l) + i as i64 * k, second, 2)))
    };
    Box::new(Chain((0..MODULES).map(module).collect()))
}

/// After the l-th hybrid block: half the channels, half the side.
fn transition(scope: Scope, l: usize, growth: Growth) -> Box<dyn Layer> {
    let (c_in, c_out) = (width(growth, l), entry(growth, l + 1));
    Box::new(Gated::new(&scope, c_in, ConvShape::new(c_in - (c_in - c_out) / 2, c_out, 3, 2), 4))
}

/// The taps of L-MCL lie after the transitions.
fn stage(scope: &Scope, l: usize, growth: Growth) -> Box<dyn Layer> {
    let mut layers: Vec<Box<dyn Layer>> = vec![];
    if l == 0 {
        layers.push(Box::new(conv(scope.sub("features.conv0"), ConvShape::new(3, 2 * growth[0], 3, 1))));
    }
    layers.push(hybrid_block(scope.sub(format!("HybridBlock{}", l + 1)), l, growth));
    if l < 2 {
        layers.push(transition(scope.sub(format!("Transition{}", l + 1)), l, growth));
    }
    Box::new(Chain(layers))
}

/// What follows the tap with fresh weights, numbered through: hybrid blocks, the transition between them, BatchNorm.
fn branch(scope: &Scope, l: usize, growth: Growth) -> Box<dyn Layer> {
    let scope = scope.sub(format!("block_extractor{}", l + 1));
    let mut layers: Vec<Box<dyn Layer>> = vec![];
    for next in l + 1..3 {
        layers.push(hybrid_block(scope.sub(layers.len()), next, growth));
        if next < 2 {
            layers.push(transition(scope.sub(layers.len()), next, growth));
        }
    }
    layers.push(Box::new(BnRelu(BatchNorm::new(scope.sub(layers.len()), width(growth, 2)))));
    Box::new(Chain(layers))
}

fn twins(l: usize) -> Vec<(String, String)> {
    let names = ["HybridBlock2", "Transition2", "HybridBlock3", "norm5"];
    names[2 * l..].iter().enumerate().map(|(part, name)| (format!("block_extractor{}.{part}", l + 1), name.to_string())).collect()
}

/// Attention pooling with the 1 x 1 convolution `context`: [B, c, h, w] -> [B, c, 1, 1].
fn graph_pool(g: &mut Body, context: &str, x: Value, c: i64) -> Value {
    let b = g.size(x, 0);
    let scores = g.call(context, x);
    let scores = g.flatten(scores);
    let weights = g.softmax(scores, 1);
    let weights = g.reshape(weights, [b, (-1).into(), 1.into()]);
    let flat = g.reshape(x, [b, c.into(), (-1).into()]);
    let pooled = g.matmul(flat, weights);
    g.reshape(pooled, [b, c.into(), 1.into(), 1.into()])
}

/// A squeeze, tanh(BN(W x)).
fn graph_squeeze(g: &mut Body, conv: &str, norm: &str, x: Value) -> Value {
    let y = g.calls([conv, norm], x);
    g.point(Pointwise::Tanh, y)
}

/// A gated unit; `concat` for a module, which passes its input on beside the new channels.
fn graph_gated(place: &Place, stride: i64, concat: bool) -> Graph {
    let size = place.sub("conv2_3x3").sub("conv").tensor("weight").size();
    let c = size[0];
    let second = ConvShape { groups: if concat { 4 } else { 1 }, ..ConvShape::new(size[1], c, 3, stride) };
    let unit = |name: &str, shape: ConvShape| {
        let at = place.sub(name);
        let unit = Graph::new("NormReluConv", |g, x| {
            let norm = g.call("norm", x);
            let active = g.relu(norm);
            g.call("conv", active)
        });
        unit.child("norm", graph::batch_norm(&at.sub("norm"))).child("conv", graph::conv(&at.sub("conv"), shape))
    };
    let norm = |name: &str| graph::batch_norm(&place.sub(name));
    let point = |name: &str| graph::plain_conv(&place.sub(name), 1);
    let depthwise = ConvShape::depthwise(c, 3, 1);
    let first = ConvShape::new(1, 1, 1, 1); // a 1 x 1 convolution: the weight knows the rest
    let gated = Graph::new(if concat { "SMG" } else { "Transition" }, |g, x| {
        let u = g.calls(["conv1_1x1", "conv2_3x3"], x);
        let pooled = graph_pool(g, "global_forget_context", u, c);
        let squeezed = graph_squeeze(g, "fc1", "bn_forget", pooled);
        let gate = g.call("fc2", squeezed);
        let gate = g.point(Pointwise::Sigmoid, gate);
        let [c3, c5] = [("conv_3x3", "global_context3x3"), ("conv_5x5", "global_context5x5")].map(|(conv, context)| {
            let y = g.call(conv, u);
            graph_pool(g, context, y, c)
        });
        let both = g.concat(&[c3, c5], 1);
        let mix = graph_squeeze(g, "fcall", "bn_attention", both);
        let weights = ["fc3x3", "fc5x5"].map(|name| g.call(name, mix));
        let weights = g.concat(&weights, 2); // [B, c, 2, 1]: a pair for every channel
        let weights = g.softmax(weights, 2);
        let [m3, m5] = [(0, c3), (1, c5)].map(|(i, pooled)| {
            let weight = g.slice(weights, 2, i, Some((i + 1).into()), 1);
            g.mul(weight, pooled)
        });
        let (kept, mixed) = (g.mul(u, gate), g.add(m3, m5));
        let y = g.add(kept, mixed);
        if concat { g.concat(&[x, y], 1) } else { y }
    });
    gated
        .child("conv1_1x1", unit("conv1_1x1", first))
        .child("conv2_3x3", unit("conv2_3x3", second))
        .child("conv_3x3", unit("conv_3x3", depthwise))
        .child("conv_5x5", unit("conv_5x5", ConvShape { padding: 2, dilation: 2, ..depthwise }))
        .child("global_context3x3", point("global_context3x3"))
        .child("global_context5x5", point("global_context5x5"))
        .child("fcall", point("fcall"))
        .child("bn_attention", norm("bn_attention"))
        .child("fc3x3", point("fc3x3"))
        .child("fc5x5", point("fc5x5"))
        .child("global_forget_context", point("global_forget_context"))
        .child("bn_forget", norm("bn_forget"))
        .child("fc1", point("fc1"))
        .child("fc2", point("fc2"))
}

fn graph(place: &Place) -> Tree {
    let conv0 = graph::plain_conv(&place.sub("features").sub("conv0"), 1);
    let mut tree = Tree::default().step("features", graph::named_sequential(vec![("conv0".to_string(), conv0)]));
    for l in 1..=3 {
        let block = format!("HybridBlock{l}");
        let at = place.sub(&block);
        let modules = (1..=MODULES).map(|i| format!("SMG{i}")).map(|name| (name.clone(), graph_gated(&at.sub(&name), 1, true)));
        tree = tree.step(&block, graph::named_sequential(modules.collect()));
        if l < 3 {
            let transition = format!("Transition{l}");
            tree = tree.step(&transition, graph_gated(&place.sub(&transition), 2, false));
        }
        tree = tree.map();
    }
    tree.neck("norm5", graph::batch_norm(&place.sub("norm5"))).tail(|g, x| {
        let norm = g.call("norm5", x);
        let active = g.relu(norm);
        g.mean(active)
    })
}
