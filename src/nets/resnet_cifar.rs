//! ResNets for 32 x 32 images, He et al., CVPR 2016, as in the released L-MCL code: three stages (of 16, 32 and 64 planes), 1x1
//! convolutions with BatchNorm on the shortcuts that change shape. ResNet-110 has bottlenecks: 9n + 2 layers with n = 12
//! (1.17 M parameters, as the paper's tables print; basic blocks would give 1.74 M).

use super::graph::{self, Place, Tree};
use super::layers::{Chain, ConvBnRelu, ConvShape, Identity, Layer, Linear};
use super::residual::{self, Kind, conv_bn};
use super::{Arch, Elsewhere, GOLDEN_SMALL, Norm, Released};
use crate::params::Scope;

macro_rules! arch {
    ($name:literal, $kind:expr, $blocks:literal, $planes:expr) => {
        Arch {
            name: $name,
            family: "resnet_cifar",
            image_size: 32,
            depth: 3,
            maps: &[($planes[1] * $kind.expansion(), 1), ($planes[2] * $kind.expansion(), 2), ($planes[3] * $kind.expansion(), 4)],
            dim: $planes[3] * $kind.expansion(),
            classifier: "fc",
            norm: Norm::Batch,
            released: Released { baseline: &[("fc", "classifier")], lmcl: &[] },
            elsewhere: Elsewhere::NOWHERE,
            golden: GOLDEN_SMALL,
            stage: |scope, l| stage(scope, l, $kind, $blocks, $planes),
            neck: |_| Box::new(Identity),
            branch: |scope, l| branch(scope, l, $kind, $blocks, $planes),
            twins,
            head: Linear::new,
            branch_head: Linear::zero_bias,
            graph: |place| graph(place, $kind, $blocks, $planes),
        }
    };
}

pub const ARCHS: &[Arch] = &[
    arch!("resnet8", Kind::Basic, 1, PLANES),
    arch!("resnet20", Kind::Basic, 3, PLANES),
    arch!("resnet32", Kind::Basic, 5, PLANES),
    arch!("resnet56", Kind::Basic, 9, PLANES),
    arch!("resnet110", Kind::Bottleneck, 12, PLANES),
    // Of the distillation zoo (RepDistiller, Tian et al., ICLR 2020; mdistiller). What that zoo calls resnet110 has basic blocks.
    arch!("resnet14", Kind::Basic, 2, PLANES),
    arch!("resnet44", Kind::Basic, 7, PLANES),
    arch!("resnet110_basic", Kind::Basic, 18, PLANES),
    arch!("resnet8x4", Kind::Basic, 1, WIDE),
    arch!("resnet32x4", Kind::Basic, 5, WIDE),
];

/// The channels of the stem, then the planes of the three stages.
type Planes = [i64; 4];
/// Of the paper's networks.
const PLANES: Planes = [16, 16, 32, 64];
/// Of the zoo's wide ones.
const WIDE: Planes = [32, 64, 128, 256];

/// `n` blocks of stage l; the first changes width and, but for stage 0, halves the map.
fn blocks(scope: Scope, l: usize, kind: Kind, n: usize, planes: Planes) -> Box<dyn Layer> {
    let (c_in, stride) = if l == 0 { (planes[0], 1) } else { (planes[l] * kind.expansion(), 2) };
    residual::blocks(scope, kind, c_in, planes[l + 1], stride, n)
}

fn stage(scope: &Scope, l: usize, kind: Kind, n: usize, planes: Planes) -> Box<dyn Layer> {
    let body = blocks(scope.sub(format!("layer{}", l + 1)), l, kind, n, planes);
    if l > 0 {
        return body;
    }
    let stem = ConvBnRelu(conv_bn(scope.sub("conv1"), scope.sub("bn1"), ConvShape::new(3, planes[0], 3, 1)));
    Box::new(Chain(vec![Box::new(stem), body]))
}

/// The remaining stages at full depth with fresh weights: `block_extractor{l}.{stage}`.
fn branch(scope: &Scope, l: usize, kind: Kind, n: usize, planes: Planes) -> Box<dyn Layer> {
    let scope = scope.sub(format!("block_extractor{}", l + 1));
    Box::new(Chain((l + 1..3).map(|next| blocks(scope.sub(next - l - 1), next, kind, n, planes)).collect()))
}

fn twins(l: usize) -> Vec<(String, String)> {
    (l + 1..3).map(|next| (format!("block_extractor{}.{}", l + 1, next - l - 1), format!("layer{}", next + 1))).collect()
}

fn graph(place: &Place, kind: Kind, n: usize, planes: Planes) -> Tree {
    let tree = Tree::default().step("conv1", graph::plain_conv(&place.sub("conv1"), 1)).step("bn1", graph::batch_norm(&place.sub("bn1")));
    let stage = |tree: Tree, l: usize| {
        let name = format!("layer{}", l + 1);
        let (stride, changes) = if l == 0 { (1, planes[0] != planes[1] * kind.expansion()) } else { (2, true) };
        tree.step(&name, residual::graph_blocks(&place.sub(&name), kind, stride, changes, n)).map()
    };
    let tree = (0..3).fold(tree.step("relu", graph::relu()), stage);
    tree.neck("avgpool", graph::avg_pool()).tail(|g, x| g.call("avgpool", x))
}
