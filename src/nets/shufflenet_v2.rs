//! ShuffleNetV2, Ma et al., ECCV 2018. Two layouts: for 32 x 32 images as in the released L-MCL code (stem without stride, no
//! max-pooling, three stages), and for 224 x 224 as in torchvision, where the stem is a stage of its own.

use tch::Tensor;

use super::layers::{Chain, ConvBn, ConvBnRelu, ConvShape, Layer, Linear, MaxPool, Pass};
use super::{Arch, Released};
use crate::params::Scope;

/// Where it differs between the two sizes of images: strides, and what things are called.
#[derive(Clone, Copy, PartialEq)]
enum Layout {
    Cifar,
    ImageNet,
}

macro_rules! arch {
    ($name:literal, Layout::Cifar, $widths:expr) => {
        Arch {
            name: $name,
            image_size: 32,
            depth: 3,
            dim: NECK,
            classifier: "linear",
            released: Released { baseline: &[], lmcl: &[] },
            stage: |scope, l| match l {
                0 => Box::new(Chain(vec![stem(scope, Layout::Cifar), stage(scope, 0, Layout::Cifar, $widths)])),
                _ => stage(scope, l, Layout::Cifar, $widths),
            },
            neck: |scope| neck(scope.sub("conv2"), scope.sub("bn2"), $widths),
            branch: |scope, l| branch(scope, l, l + 1, false, Layout::Cifar, $widths),
            head: Linear::new,
            branch_head: Linear::new,
        }
    };
    ($name:literal, Layout::ImageNet, $widths:expr) => {
        Arch {
            name: $name,
            image_size: 224,
            depth: 4,
            dim: NECK,
            classifier: "fc",
            released: Released { baseline: RELEASED, lmcl: RELEASED },
            stage: |scope, l| match l {
                0 => Box::new(Chain(vec![stem(scope, Layout::ImageNet), Box::new(MaxPool)])),
                _ => stage(scope, l - 1, Layout::ImageNet, $widths),
            },
            neck: |scope| neck(scope.sub("conv5.0"), scope.sub("conv5.1"), $widths),
            // The branch of the stem has all three stages, each cut to two blocks.
            branch: |scope, l| branch(scope, l, l, l == 0, Layout::ImageNet, $widths),
            head: Linear::new,
            branch_head: Linear::new,
        }
    };
}

pub const ARCHS: &[Arch] = &[
    arch!("shufflenet_v2_x0_5_cifar", Layout::Cifar, X0_5),
    arch!("shufflenet_v2_x1_0_cifar", Layout::Cifar, X1_0),
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

/// Concatenation and channel shuffle with two groups: channel 2i of the result is channel i of the first half, 2i + 1 of the second.
fn interleave(halves: &[Tensor; 2]) -> Tensor {
    Tensor::stack(halves, 2).flatten(1, 2)
}

/// Stage l of `n` blocks.
fn blocks(scope: Scope, l: usize, n: usize, layout: Layout, widths: [i64; 3]) -> Box<dyn Layer> {
    let c_in = if l == 0 { STEM } else { widths[l - 1] };
    let block = |i: usize| -> Box<dyn Layer> {
        Box::new(Block::new(scope.sub(i), if i == 0 { c_in } else { widths[l] }, widths[l], i == 0, layout))
    };
    Box::new(Chain((0..n).map(block).collect()))
}

fn stem(scope: &Scope, layout: Layout) -> Box<dyn Layer> {
    Box::new(ConvBnRelu(match layout {
        Layout::Cifar => conv_bn(scope.sub("conv1"), scope.sub("bn1"), ConvShape::new(3, STEM, 3, 1)),
        Layout::ImageNet => conv_bn(scope.sub("conv1.0"), scope.sub("conv1.1"), ConvShape::new(3, STEM, 3, 2)),
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
