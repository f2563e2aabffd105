//! ResNets for 32 x 32 images, He et al., CVPR 2016, as in the released L-MCL code: three stages of 16, 32 and 64 planes, 1x1
//! convolutions with BatchNorm on the shortcuts that change shape. ResNet-110 has bottlenecks: 9n + 2 layers with n = 12
//! (1.17 M parameters, as the paper's tables print; basic blocks would give 1.74 M).

use tch::Tensor;

use super::Arch;
use super::layers::{Chain, ConvBn, ConvBnRelu, ConvShape, Identity, Layer, Linear, Pass};
use crate::params::{Init, Scope};

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Basic,
    Bottleneck,
}

impl Kind {
    const fn expansion(self) -> i64 {
        match self {
            Kind::Basic => 1,
            Kind::Bottleneck => 4,
        }
    }
}

macro_rules! arch {
    ($name:literal, $kind:expr, $blocks:literal) => {
        Arch {
            name: $name,
            image_size: 32,
            depth: 3,
            dim: 64 * $kind.expansion(),
            classifier: "fc",
            stage: |scope, l| stage(scope, l, $kind, $blocks),
            neck: |_| Box::new(Identity),
            branch: |scope, l| branch(scope, l, $kind, $blocks),
            head: Linear::new,
            // The released auxiliary classes start the classifier's bias at 0.
            branch_head: |scope, dim, classes| Linear::with_init(scope, dim, classes, Init::Uniform(1.0 / (dim as f64).sqrt()), Some(Init::Const(0.0))),
        }
    };
}

pub const ARCHS: &[Arch] = &[
    arch!("resnet8", Kind::Basic, 1),
    arch!("resnet20", Kind::Basic, 3),
    arch!("resnet32", Kind::Basic, 5),
    arch!("resnet56", Kind::Basic, 9),
    arch!("resnet110", Kind::Bottleneck, 12),
];

const PLANES: [i64; 3] = [16, 32, 64];

fn conv_bn(conv: Scope, bn: Scope, shape: ConvShape) -> ConvBn {
    ConvBn::new(conv, bn, shape, shape.fan_out_init())
}

struct Block {
    /// All but the last convolution are followed by a ReLU.
    body: Vec<ConvBn>,
    shortcut: Option<ConvBn>,
}

impl Block {
    fn new(scope: Scope, kind: Kind, c_in: i64, planes: i64, stride: i64) -> Block {
        let c_out = planes * kind.expansion();
        let shapes = match kind {
            Kind::Basic => vec![ConvShape::new(c_in, planes, 3, stride), ConvShape::new(planes, planes, 3, 1)],
            Kind::Bottleneck => vec![ConvShape::new(c_in, planes, 1, 1), ConvShape::new(planes, planes, 3, stride), ConvShape::new(planes, c_out, 1, 1)],
        };
        let named = |(i, shape): (usize, &ConvShape)| conv_bn(scope.sub(format!("conv{}", i + 1)), scope.sub(format!("bn{}", i + 1)), *shape);
        let changes = stride != 1 || c_in != c_out;
        Block {
            body: shapes.iter().enumerate().map(named).collect(),
            shortcut: changes.then(|| conv_bn(scope.sub("downsample.0"), scope.sub("downsample.1"), ConvShape::new(c_in, c_out, 1, stride))),
        }
    }
}

impl Layer for Block {
    fn forward(&self, xs: &Tensor, pass: Pass) -> Tensor {
        let (last, first) = self.body.split_last().expect("a block has convolutions");
        let mut ys = xs.shallow_clone();
        for conv in first {
            ys = conv.forward(&ys, pass).relu_();
        }
        let shortcut = self.shortcut.as_ref().map_or_else(|| xs.shallow_clone(), |s| s.forward(xs, pass));
        // In place, as BatchNorm's backward needs its input and not its output.
        last.forward(&ys, pass).g_add_(&shortcut).relu_()
    }
}

/// `blocks` blocks of stage l; the first changes width and, but for stage 0, halves the map.
fn blocks(scope: Scope, l: usize, kind: Kind, blocks: usize) -> Box<dyn Layer> {
    let c_in = if l == 0 { 16 } else { PLANES[l - 1] * kind.expansion() };
    let block = |i: usize| -> Box<dyn Layer> {
        let (c_in, stride) = if i == 0 { (c_in, if l == 0 { 1 } else { 2 }) } else { (PLANES[l] * kind.expansion(), 1) };
        Box::new(Block::new(scope.sub(i), kind, c_in, PLANES[l], stride))
    };
    Box::new(Chain((0..blocks).map(block).collect()))
}

fn stage(scope: &Scope, l: usize, kind: Kind, n: usize) -> Box<dyn Layer> {
    let body = blocks(scope.sub(format!("layer{}", l + 1)), l, kind, n);
    if l > 0 {
        return body;
    }
    let stem = ConvBnRelu(conv_bn(scope.sub("conv1"), scope.sub("bn1"), ConvShape::new(3, 16, 3, 1)));
    Box::new(Chain(vec![Box::new(stem), body]))
}

/// The remaining stages at full depth with fresh weights: `block_extractor{l}.{stage}`.
fn branch(scope: &Scope, l: usize, kind: Kind, n: usize) -> Box<dyn Layer> {
    let scope = scope.sub(format!("block_extractor{}", l + 1));
    Box::new(Chain((l + 1..3).map(|next| blocks(scope.sub(next - l - 1), next, kind, n)).collect()))
}
