//! ResNets for 224 x 224 images, He et al., CVPR 2016, with torchvision's layout and names. The branches of L-MCL take one block per
//! remaining stage, whatever the depth of the network, as in the released code.

use super::graph::{self, Place, Tree};
use super::layers::{Chain, ConvBnRelu, ConvShape, Identity, Layer, Linear, MaxPool};
use super::residual::{self, Kind, conv_bn};
use super::{Arch, Detectron2, Elsewhere, GOLDEN_LARGE, Mmdet, Norm, Released, Timm, Torchvision, TorchvisionMaps};
use crate::params::Scope;

macro_rules! arch {
    ($name:literal, $depth:literal, $kind:expr, $blocks:expr) => {
        Arch {
            name: $name,
            family: "resnet_imagenet",
            image_size: 224,
            depth: 4,
            maps: &[
                (PLANES[0] * $kind.expansion(), 4),
                (PLANES[1] * $kind.expansion(), 8),
                (PLANES[2] * $kind.expansion(), 16),
                (PLANES[3] * $kind.expansion(), 32),
            ],
            dim: PLANES[3] * $kind.expansion(),
            classifier: "fc",
            norm: Norm::Batch,
            released: Released { baseline: &[], lmcl: &[] },
            elsewhere: Elsewhere {
                torchvision: Some(Torchvision { maps: TorchvisionMaps::Children, norm_layer: true }),
                timm: Some(Timm { name: $name, first_conv: "conv1", classifier: "fc", swin: false }),
                mmdet: Some(Mmdet::ResNet { depth: $depth }),
                detectron2: Some(Detectron2 { depth: $depth }),
            },
            golden: GOLDEN_LARGE,
            stage: |scope, l| stage(scope, l, $kind, $blocks[l]),
            neck: |_| Box::new(Identity),
            branch: |scope, l| branch(scope, l, $kind),
            twins: |_| vec![], // one block a stage: shorter than the network
            head: Linear::new,
            branch_head: Linear::new,
            graph: |place| graph(place, $kind, $blocks),
        }
    };
}

pub const ARCHS: &[Arch] = &[
    arch!("resnet18", 18, Kind::Basic, [2, 2, 2, 2]),
    arch!("resnet34", 34, Kind::Basic, [3, 4, 6, 3]),
    arch!("resnet50", 50, Kind::Bottleneck, [3, 4, 6, 3]),
];

const STEM: i64 = 64;
const PLANES: [i64; 4] = [64, 128, 256, 512];

fn blocks(scope: Scope, l: usize, kind: Kind, n: usize) -> Box<dyn Layer> {
    let (c_in, stride) = if l == 0 { (STEM, 1) } else { (PLANES[l - 1] * kind.expansion(), 2) };
    residual::blocks(scope, kind, c_in, PLANES[l], stride, n)
}

fn stage(scope: &Scope, l: usize, kind: Kind, n: usize) -> Box<dyn Layer> {
    let body = blocks(scope.sub(format!("layer{}", l + 1)), l, kind, n);
    if l > 0 {
        return body;
    }
    let stem = ConvBnRelu(conv_bn(scope.sub("conv1"), scope.sub("bn1"), ConvShape::new(3, STEM, 7, 2)));
    Box::new(Chain(vec![Box::new(stem), Box::new(MaxPool), body]))
}

/// One block for each remaining stage: `block_extractor{l}.{stage}.0`.
fn branch(scope: &Scope, l: usize, kind: Kind) -> Box<dyn Layer> {
    let scope = scope.sub(format!("block_extractor{}", l + 1));
    Box::new(Chain((l + 1..4).map(|next| blocks(scope.sub(next - l - 1), next, kind, 1)).collect()))
}

fn graph(place: &Place, kind: Kind, blocks: [usize; 4]) -> Tree {
    let tree = Tree::default().step("conv1", graph::plain_conv(&place.sub("conv1"), 2)).step("bn1", graph::batch_norm(&place.sub("bn1")));
    let tree = tree.step("relu", graph::relu()).step("maxpool", graph::max_pool());
    let stage = |tree: Tree, l: usize| {
        let name = format!("layer{}", l + 1);
        let (stride, changes) = if l == 0 { (1, kind.expansion() != 1) } else { (2, true) };
        tree.step(&name, residual::graph_blocks(&place.sub(&name), kind, stride, changes, blocks[l])).map()
    };
    let mut tree = (0..PLANES.len()).fold(tree, stage).neck("avgpool", graph::avg_pool()).tail(|g, x| g.call("avgpool", x));
    // torchvision's FPN extractor asks for it.
    tree.ints.push(("inplanes".to_string(), PLANES[3] * kind.expansion()));
    tree
}
