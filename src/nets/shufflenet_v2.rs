//! ShuffleNetV2, Ma et al., ECCV 2018. Two layouts: for 32 x 32 images as in the released L-MCL code (stem without stride, no
//! max-pooling, three stages), and for 224 x 224 as in torchvision, where the stem is a stage of its own.

use tch::Tensor;

use super::layers::{Chain, ConvBn, ConvBnRelu, ConvShape, Layer, Linear, MaxPool, Pass};
use super::script::{self, Module, Place, Tree};
use super::{Arch, Elsewhere, GOLDEN_LARGE, GOLDEN_SMALL, Norm, Released, Torchvision, TorchvisionMaps};
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
                0 => Box::new(Chain(vec![stem(scope, Layout::Cifar), stage(scope, 0, Layout::Cifar, $widths)])),
                _ => stage(scope, l, Layout::Cifar, $widths),
            },
            neck: |scope| neck(scope.sub("conv2"), scope.sub("bn2"), $widths),
            branch: |scope, l| branch(scope, l, l + 1, false, Layout::Cifar, $widths),
            head: Linear::new,
            branch_head: Linear::new,
            script: |place| script_cifar(place),
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
                0 => Box::new(Chain(vec![stem(scope, Layout::ImageNet), Box::new(MaxPool)])),
                _ => stage(scope, l - 1, Layout::ImageNet, $widths),
            },
            neck: |scope| neck(scope.sub("conv5.0"), scope.sub("conv5.1"), $widths),
            // The branch of the stem has all three stages, each cut to two blocks.
            branch: |scope, l| branch(scope, l, l, l == 0, Layout::ImageNet, $widths),
            head: Linear::new,
            branch_head: Linear::new,
            script: |place| script_imagenet(place),
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

/// Depthwise 3 x 3.
fn script_depthwise(place: &Place, stride: i64) -> Module {
    script::conv(place, ConvShape::depthwise(place.tensor("weight").size()[0], 3, stride))
}

/// The first half of the channels as it is, or both halves made from all of them; then the shuffle. `left` and `right` are expressions.
fn script_forward(halves: bool, left: &str, right: &str) -> String {
    let split = if halves { "a, b = x, x" } else { "half = x.size(1) // 2\na, b = x[:, :half], x[:, half:]" };
    format!("{split}\nreturn torch.flatten(torch.stack([{left}, {right}], 2), 1, 2)")
}

/// torchvision's block, two sequences.
fn script_imagenet_block(place: &Place, halves: bool) -> Module {
    let stride = if halves { 2 } else { 1 };
    let (left, right) = (place.sub("branch1"), place.sub("branch2"));
    let norm = |place: &Place, i: usize| script::batch_norm(&place.sub(i));
    let point = |place: &Place, i: usize| script::plain_conv(&place.sub(i), 1);
    let branch1 = match halves {
        true => vec![script_depthwise(&left.sub(0), stride), norm(&left, 1), point(&left, 2), norm(&left, 3), script::relu()],
        false => vec![],
    };
    let branch2 = vec![
        point(&right, 0),
        norm(&right, 1),
        script::relu(),
        script_depthwise(&right.sub(3), stride),
        norm(&right, 4),
        point(&right, 5),
        norm(&right, 6),
        script::relu(),
    ];
    let body = script_forward(halves, if halves { "self.branch1.forward(a)" } else { "a" }, "self.branch2.forward(b)");
    let block = Module::new("InvertedResidual", &body);
    block.child("branch1", script::sequential(branch1)).child("branch2", script::sequential(branch2))
}

/// The released block: convolutions and norms numbered through, the left path first where there is one.
fn script_cifar_block(place: &Place, halves: bool) -> Module {
    let (stride, first) = if halves { (2, 3) } else { (1, 1) };
    let right = format!(
        "torch.relu_(self.bn{c}.forward(self.conv{c}.forward(self.bn{b}.forward(self.conv{b}.forward(torch.relu_(self.bn{a}.forward(self.conv{a}.forward(b))))))))",
        a = first,
        b = first + 1,
        c = first + 2
    );
    let left = if halves { "torch.relu_(self.bn2.forward(self.conv2.forward(self.bn1.forward(self.conv1.forward(a)))))" } else { "a" };
    let depthwise = if halves { &[1, 4][..] } else { &[2] };
    let convs = 1..first + 3;
    convs.fold(Module::new("Block", &script_forward(halves, left, &right)), |block, i| {
        let at = place.sub(format!("conv{i}"));
        let conv = if depthwise.contains(&i) { script_depthwise(&at, stride) } else { script::plain_conv(&at, 1) };
        block.child(format!("conv{i}"), conv).child(format!("bn{i}"), script::batch_norm(&place.sub(format!("bn{i}"))))
    })
}

fn script_stage(place: &Place, l: usize, block: fn(&Place, bool) -> Module) -> Module {
    script::sequential((0..BLOCKS[l]).map(|i| block(&place.sub(i), i == 0)).collect())
}

fn script_imagenet(place: &Place) -> Tree {
    let conv_bn_relu = |name: &str, stride: i64| {
        let at = place.sub(name);
        script::sequential(vec![script::plain_conv(&at.sub(0), stride), script::batch_norm(&at.sub(1)), script::relu()])
    };
    let stem = Tree::default().step("conv1", conv_bn_relu("conv1", 2)).step("maxpool", script::max_pool()).map();
    let stage = |tree: Tree, l: usize| {
        let name = format!("stage{}", l + 2);
        tree.step(&name, script_stage(&place.sub(&name), l, script_imagenet_block)).map()
    };
    let tree = (0..BLOCKS.len()).fold(stem, stage).neck("conv5", conv_bn_relu("conv5", 1));
    tree.tail("self.conv5.forward(x)").tail("torch.mean(x, [2, 3])")
}

fn script_cifar(place: &Place) -> Tree {
    let norm = |name: &str| script::batch_norm(&place.sub(name));
    let conv = |name: &str| script::plain_conv(&place.sub(name), 1);
    let stem = Tree::default().step("conv1", conv("conv1")).step("bn1", norm("bn1")).step("relu", script::relu());
    let stage = |tree: Tree, l: usize| {
        let name = format!("layer{}", l + 1);
        tree.step(&name, script_stage(&place.sub(&name), l, script_cifar_block)).map()
    };
    let tree = (0..BLOCKS.len()).fold(stem, stage).neck("conv2", conv("conv2")).neck("bn2", norm("bn2"));
    tree.tail("torch.relu_(self.bn2.forward(self.conv2.forward(x)))").tail("torch.mean(x, [2, 3])")
}
