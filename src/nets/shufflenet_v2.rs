//! ShuffleNetV2, Ma et al., ECCV 2018. Two layouts: for 32 x 32 images as in the released L-MCL code (stem without stride, no
//! max-pooling, three stages), and for 224 x 224 as in torchvision, where the stem is a stage of its own.

use tch::Tensor;

use super::graph::{self, Body, Module, Place, Tree, Value};
use super::layers::{Chain, ConvBn, ConvBnRelu, ConvShape, Layer, Linear, MaxPool, Pass};
use super::{Arch, Elsewhere, GOLDEN_LARGE, GOLDEN_SMALL, Norm, Released, Torchvision, TorchvisionMaps};
use crate::params::Scope;

/// Where it differs between the two sizes of images: strides, and what things are called.
#[derive(Clone, Copy, PartialEq)]
enum Layout {
    Cifar,
    ImageNet,
}

macro_rules! arch {
    ($name:literal, Layout::Cifar, $kernel:literal, $widths:expr) => {
        Arch {
            name: $name,
            family: "shufflenet_v2",
            image_size: 32,
            depth: 3,
            maps: &[($widths[0], 2), ($widths[1], 4), ($widths[2], 8)],
            dim: NECK,
            classifier: "linear",
            norm: Norm::Batch,
            released: Released { baseline: &[], lmcl: &[] },
            elsewhere: Elsewhere::NOWHERE,
            golden: GOLDEN_SMALL,
            stage: |scope, l| match l {
                0 => Box::new(Chain(vec![stem(scope, Layout::Cifar, $kernel), stage(scope, 0, Layout::Cifar, $widths)])),
                _ => stage(scope, l, Layout::Cifar, $widths),
            },
            neck: |scope| neck(scope.sub("conv2"), scope.sub("bn2"), $widths),
            branch: |scope, l| branch(scope, l, l + 1, false, Layout::Cifar, $widths),
            twins: |l| twins(l, l + 1, |next| format!("layer{}", next + 1), ["conv2", "bn2"]),
            head: Linear::new,
            branch_head: Linear::new,
            graph: |place| graph_cifar(place),
        }
    };
    ($name:literal, Layout::ImageNet, $widths:expr) => {
        Arch {
            name: $name,
            family: "shufflenet_v2",
            image_size: 224,
            depth: 4,
            maps: &[(STEM, 4), ($widths[0], 8), ($widths[1], 16), ($widths[2], 32)],
            dim: NECK,
            classifier: "fc",
            norm: Norm::Batch,
            released: Released { baseline: RELEASED, lmcl: RELEASED },
            elsewhere: Elsewhere {
                torchvision: Some(Torchvision { maps: TorchvisionMaps::Children, norm_layer: false }),
                ..Elsewhere::NOWHERE
            },
            golden: GOLDEN_LARGE,
            stage: |scope, l| match l {
                0 => Box::new(Chain(vec![stem(scope, Layout::ImageNet, 3), Box::new(MaxPool)])),
                _ => stage(scope, l - 1, Layout::ImageNet, $widths),
            },
            neck: |scope| neck(scope.sub("conv5.0"), scope.sub("conv5.1"), $widths),
            // The branch of the stem has all three stages, each cut to two blocks.
            branch: |scope, l| branch(scope, l, l, l == 0, Layout::ImageNet, $widths),
            // That of the stem is shorter than the network.
            twins: |l| if l == 0 { vec![] } else { twins(l, l, |next| format!("stage{}", next + 2), ["conv5.0", "conv5.1"]) },
            head: Linear::new,
            branch_head: Linear::new,
            graph: |place| graph_imagenet(place),
        }
    };
}

pub const ARCHS: &[Arch] = &[
    arch!("shufflenet_v2_x0_5_cifar", Layout::Cifar, 3, X0_5),
    arch!("shufflenet_v2_x1_0_cifar", Layout::Cifar, 3, X1_0),
    // `ShuffleV2` of the distillation zoo (RepDistiller, Tian et al., ICLR 2020; mdistiller): its stem is a 1 x 1 convolution.
    arch!("shuffle_v2", Layout::Cifar, 1, X1_0),
    arch!("shufflenet_v2_x0_5", Layout::ImageNet, X0_5),
    arch!("shufflenet_v2_x1_0", Layout::ImageNet, X1_0),
];

/// torchvision's names and those of the released ImageNet classes. The block that halves the map numbers its right path from 3.
const RELEASED: &[(&str, &str)] = &[
    ("conv1.0", "conv1"),
    ("conv1.1", "bn1"),
    ("conv5.0", "conv2"),
    ("conv5.1", "bn2"),
    ("fc", "linear"),
    ("stage2", "layer1"),
    ("stage3", "layer2"),
    ("stage4", "layer3"),
    ("branch1.0", "conv1"),
    ("branch1.1", "bn1"),
    ("branch1.2", "conv2"),
    ("branch1.3", "bn2"),
    ("0.branch2.0", "0.conv3"),
    ("0.branch2.1", "0.bn3"),
    ("0.branch2.3", "0.conv4"),
    ("0.branch2.4", "0.bn4"),
    ("0.branch2.5", "0.conv5"),
    ("0.branch2.6", "0.bn5"),
    ("branch2.0", "conv1"),
    ("branch2.1", "bn1"),
    ("branch2.3", "conv2"),
    ("branch2.4", "bn2"),
    ("branch2.5", "conv3"),
    ("branch2.6", "bn3"),
];

const STEM: i64 = 24;
const NECK: i64 = 1024;
const X0_5: [i64; 3] = [48, 96, 192];
const X1_0: [i64; 3] = [116, 232, 464];
/// Blocks per stage, the first of which halves the map.
const BLOCKS: [usize; 3] = [4, 8, 4];

fn conv_bn(conv: Scope, bn: Scope, shape: ConvShape) -> ConvBn {
    ConvBn::new(conv, bn, shape, shape.default_init())
}

struct Block {
    /// Depthwise and 1x1, in the block that halves the map; otherwise this half of the channels passes as it is.
    left: Option<[ConvBn; 2]>,
    /// 1x1, depthwise, 1x1.
    right: [ConvBn; 3],
}

impl Block {
    fn new(scope: Scope, c_in: i64, c_out: i64, halves: bool, layout: Layout) -> Block {
        let half = c_out / 2;
        // The i-th convolution of the released block, or its place in torchvision's two sequences.
        let named = |i: usize, shape: ConvShape| match layout {
            Layout::Cifar => conv_bn(scope.sub(format!("conv{i}")), scope.sub(format!("bn{i}")), shape),
            Layout::ImageNet => {
                let (path, at) = match (halves, i) {
                    (true, 1..=2) => ("branch1", [0, 2][i - 1]),
                    (true, _) => ("branch2", [0, 3, 5][i - 3]),
                    (false, _) => ("branch2", [0, 3, 5][i - 1]),
                };
                conv_bn(scope.sub(path).sub(at), scope.sub(path).sub(at + 1), shape)
            }
        };
        let right = |first: usize, c_in: i64, stride: i64| {
            [
                named(first, ConvShape::new(c_in, half, 1, 1)),
                named(first + 1, ConvShape::depthwise(half, 3, stride)),
                named(first + 2, ConvShape::new(half, half, 1, 1)),
            ]
        };
        if halves {
            let left = [named(1, ConvShape::depthwise(c_in, 3, 2)), named(2, ConvShape::new(c_in, half, 1, 1))];
            Block { left: Some(left), right: right(3, c_in, 2) }
        } else {
            Block { left: None, right: right(1, half, 1) }
        }
    }
}

impl Layer for Block {
    fn forward(&self, xs: &Tensor, pass: Pass) -> Tensor {
        let right = |xs: &Tensor| {
            let ys = self.right[1].forward(&self.right[0].relu(xs, pass), pass);
            self.right[2].relu(&ys, pass)
        };
        let halves = match &self.left {
            Some([depthwise, point]) => [point.relu(&depthwise.forward(xs, pass), pass), right(xs)],
            None => {
                let half = xs.size()[1] / 2;
                [xs.narrow(1, 0, half), right(&xs.narrow(1, half, half))]
            }
        };
        interleave(&halves)
    }
}

/// Concatenation and channel shuffle with two groups: channel 2i of the result is channel i of the first half, 2i + 1 of the second. The result
/// is channels_last as the halves are; stacked as [B, C, H, W] it would not be, and all that follows would be slower.
fn interleave(halves: &[Tensor; 2]) -> Tensor {
    let last = halves.each_ref().map(|half| half.permute([0, 2, 3, 1]));
    Tensor::stack(&last, 4).flatten(3, 4).permute([0, 3, 1, 2])
}

/// Stage l of `n` blocks.
fn blocks(scope: Scope, l: usize, n: usize, layout: Layout, widths: [i64; 3]) -> Box<dyn Layer> {
    let c_in = if l == 0 { STEM } else { widths[l - 1] };
    let block = |i: usize| -> Box<dyn Layer> {
        Box::new(Block::new(scope.sub(i), if i == 0 { c_in } else { widths[l] }, widths[l], i == 0, layout))
    };
    Box::new(Chain((0..n).map(block).collect()))
}

fn stem(scope: &Scope, layout: Layout, kernel: i64) -> Box<dyn Layer> {
    Box::new(ConvBnRelu(match layout {
        Layout::Cifar => conv_bn(scope.sub("conv1"), scope.sub("bn1"), ConvShape::new(3, STEM, kernel, 1)),
        Layout::ImageNet => conv_bn(scope.sub("conv1.0"), scope.sub("conv1.1"), ConvShape::new(3, STEM, kernel, 2)),
    }))
}

fn stage(scope: &Scope, l: usize, layout: Layout, widths: [i64; 3]) -> Box<dyn Layer> {
    let name = match layout {
        Layout::Cifar => format!("layer{}", l + 1),
        Layout::ImageNet => format!("stage{}", l + 2),
    };
    blocks(scope.sub(name), l, BLOCKS[l], layout, widths)
}

fn neck(conv: Scope, bn: Scope, widths: [i64; 3]) -> Box<dyn Layer> {
    Box::new(ConvBnRelu(conv_bn(conv, bn, ConvShape::new(widths[2], NECK, 1, 1))))
}

/// r^[l]: the stages from `first` on with fresh weights, then the neck, numbered through.
fn branch(scope: &Scope, l: usize, first: usize, short: bool, layout: Layout, widths: [i64; 3]) -> Box<dyn Layer> {
    let scope = scope.sub(format!("block_extractor{}", l + 1));
    let n = |stage: usize| if short { 2 } else { BLOCKS[stage] };
    let mut layers: Vec<Box<dyn Layer>> = (first..3).map(|next| blocks(scope.sub(next - first), next, n(next), layout, widths)).collect();
    layers.push(neck(scope.sub(3 - first), scope.sub(4 - first), widths));
    Box::new(Chain(layers))
}

/// The parts of such a branch, and of the network from stage `first` on.
fn twins(l: usize, first: usize, stage: fn(usize) -> String, neck: [&str; 2]) -> Vec<(String, String)> {
    let names = (first..3).map(stage).chain(neck.map(String::from));
    names.enumerate().map(|(part, name)| (format!("block_extractor{}.{part}", l + 1), name)).collect()
}

/// Depthwise 3 x 3.
fn graph_depthwise(place: &Place, stride: i64) -> Module {
    graph::conv(place, ConvShape::depthwise(place.tensor("weight").size()[0], 3, stride))
}

type Path<'a> = &'a dyn Fn(&mut Body, Value) -> Value;

/// Both paths made from all channels, or the first half of the channels (`half` of them) beside a path made from the others; then the shuffle.
fn graph_forward(class: &str, half: i64, left: Option<Path>, right: Path) -> Module {
    Module::new(class, |g, x| {
        let (a, b) = match left {
            Some(left) => (left(g, x), right(g, x)),
            None => {
                let (a, b) = (g.slice(x, 1, 0, Some(half.into()), 1), g.slice(x, 1, half, None, 1));
                (a, right(g, b))
            }
        };
        let both = g.concat(&[a, b], 1);
        g.shuffle(both, 2)
    })
}

/// torchvision's block, two sequences.
fn graph_imagenet_block(place: &Place, halves: bool) -> Module {
    let stride = if halves { 2 } else { 1 };
    let (left, right) = (place.sub("branch1"), place.sub("branch2"));
    let norm = |place: &Place, i: usize| graph::batch_norm(&place.sub(i));
    let point = |place: &Place, i: usize| graph::plain_conv(&place.sub(i), 1);
    let branch1 = match halves {
        true => vec![graph_depthwise(&left.sub(0), stride), norm(&left, 1), point(&left, 2), norm(&left, 3), graph::relu()],
        false => vec![],
    };
    let branch2 = vec![
        point(&right, 0),
        norm(&right, 1),
        graph::relu(),
        graph_depthwise(&right.sub(3), stride),
        norm(&right, 4),
        point(&right, 5),
        norm(&right, 6),
        graph::relu(),
    ];
    let half = right.sub(0).tensor("weight").size()[1];
    let first: Path = &|g, x| g.call("branch1", x);
    let block = graph_forward("InvertedResidual", half, halves.then_some(first), &|g, x| g.call("branch2", x));
    block.child("branch1", graph::sequential(branch1)).child("branch2", graph::sequential(branch2))
}

/// The released block: convolutions and norms numbered through, the left path first where there is one.
fn graph_cifar_block(place: &Place, halves: bool) -> Module {
    let (stride, first) = if halves { (2, 3) } else { (1, 1) };
    let pair = |i: usize| [format!("conv{i}"), format!("bn{i}")];
    let left: Path = &|g, x| {
        let y = g.calls([pair(1), pair(2)].concat(), x);
        g.relu(y)
    };
    let right: Path = &|g, x| {
        let y = g.calls(pair(first), x);
        let y = g.relu(y);
        let y = g.calls([pair(first + 1), pair(first + 2)].concat(), y);
        g.relu(y)
    };
    let half = place.sub(format!("conv{first}")).tensor("weight").size()[1];
    let depthwise = if halves { &[1, 4][..] } else { &[2] };
    let convs = 1..first + 3;
    convs.fold(graph_forward("Block", half, halves.then_some(left), right), |block, i| {
        let at = place.sub(format!("conv{i}"));
        let conv = if depthwise.contains(&i) { graph_depthwise(&at, stride) } else { graph::plain_conv(&at, 1) };
        block.child(format!("conv{i}"), conv).child(format!("bn{i}"), graph::batch_norm(&place.sub(format!("bn{i}"))))
    })
}

fn graph_stage(place: &Place, l: usize, block: fn(&Place, bool) -> Module) -> Module {
    graph::sequential((0..BLOCKS[l]).map(|i| block(&place.sub(i), i == 0)).collect())
}

fn graph_imagenet(place: &Place) -> Tree {
    let conv_bn_relu = |name: &str, stride: i64| {
        let at = place.sub(name);
        graph::sequential(vec![graph::plain_conv(&at.sub(0), stride), graph::batch_norm(&at.sub(1)), graph::relu()])
    };
    let stem = Tree::default().step("conv1", conv_bn_relu("conv1", 2)).step("maxpool", graph::max_pool()).map();
    let stage = |tree: Tree, l: usize| {
        let name = format!("stage{}", l + 2);
        tree.step(&name, graph_stage(&place.sub(&name), l, graph_imagenet_block)).map()
    };
    let tree = (0..BLOCKS.len()).fold(stem, stage).neck("conv5", conv_bn_relu("conv5", 1));
    tree.tail(|g, x| {
        let y = g.call("conv5", x);
        g.mean(y)
    })
}

fn graph_cifar(place: &Place) -> Tree {
    let norm = |name: &str| graph::batch_norm(&place.sub(name));
    let conv = |name: &str| graph::plain_conv(&place.sub(name), 1);
    let stem = Tree::default().step("conv1", conv("conv1")).step("bn1", norm("bn1")).step("relu", graph::relu());
    let stage = |tree: Tree, l: usize| {
        let name = format!("layer{}", l + 1);
        tree.step(&name, graph_stage(&place.sub(&name), l, graph_cifar_block)).map()
    };
    let tree = (0..BLOCKS.len()).fold(stem, stage).neck("conv2", conv("conv2")).neck("bn2", norm("bn2"));
    tree.tail(|g, x| {
        let y = g.calls(["conv2", "bn2"], x);
        let y = g.relu(y);
        g.mean(y)
    })
}
