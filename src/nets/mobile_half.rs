//! MobileNetV2, Sandler et al., CVPR 2018, at half width for 32 x 32 images, as in the distillation zoo (`mobile_half` of RepDistiller, Tian et
//! al., ICLR 2020; `MobileNetV2` of mdistiller). It has ReLU instead of ReLU6, and an expansion in every block. The maps are those the zoo distils.

use tch::Tensor;

use super::graph::{self, Module, Place, Tree};
use super::layers::{Chain, ConvBn, ConvBnRelu, ConvShape, Layer, Linear, Pass};
use super::{Arch, Elsewhere, GOLDEN_SMALL, Norm, Released};
use crate::params::{Init, Scope};

pub const ARCHS: &[Arch] = &[Arch {
    name: "mobile_half",
    family: "mobile_half",
    image_size: 32,
    depth: 4,
    maps: &[(GROUPS[1].c_out, 2), (GROUPS[2].c_out, 4), (GROUPS[4].c_out, 8), (GROUPS[6].c_out, 16)],
    dim: NECK,
    classifier: "classifier",
    norm: Norm::Batch,
    // The released classifier is the only layer of a sequence.
    released: Released { baseline: &[("classifier", "classifier.0")], lmcl: &[] },
    elsewhere: Elsewhere::NOWHERE,
    golden: GOLDEN_SMALL,
    stage,
    neck: |scope| neck(scope.sub("conv2")),
    branch,
    twins,
    head,
    branch_head: head,
    graph,
}];

/// Blocks of one width: how much they expand, what they give, how many there are, the stride of the first.
struct Group {
    expand: i64,
    c_out: i64,
    n: usize,
    stride: i64,
}

const fn group(expand: i64, c_out: i64, n: usize, stride: i64) -> Group {
    Group { expand, c_out, n, stride }
}

/// The table of the paper, every width halved; the second group keeps the map's size.
const GROUPS: [Group; 7] = [
    group(1, 8, 1, 1),
    group(6, 12, 2, 1),
    group(6, 16, 3, 2),
    group(6, 32, 4, 2),
    group(6, 48, 3, 1),
    group(6, 80, 3, 2),
    group(6, 160, 1, 1),
];
const STEM: i64 = 16;
const NECK: i64 = 1280;
/// Which groups each stage has.
const STAGES: [std::ops::Range<usize>; 4] = [0..2, 2..3, 3..5, 5..7];

/// As the released classes start it.
fn head(scope: Scope, d_in: i64, d_out: i64) -> Linear {
    Linear::with_init(scope, d_in, d_out, Init::Normal(0.01), Some(Init::Const(0.0)))
}

/// A convolution and its norm, two places of a sequence.
fn conv_bn(scope: &Scope, place: usize, shape: ConvShape) -> ConvBn {
    ConvBn::new(scope.sub(place), scope.sub(place + 1), shape, shape.fan_out_init())
}

struct Block {
    expand: ConvBn,
    depthwise: ConvBn,
    project: ConvBn,
    /// Does it add its input?
    residual: bool,
}

impl Block {
    fn new(scope: Scope, c_in: i64, c_out: i64, stride: i64, expand: i64) -> Block {
        let (scope, wide) = (scope.sub("conv"), c_in * expand);
        Block {
            expand: conv_bn(&scope, 0, ConvShape::new(c_in, wide, 1, 1)),
            depthwise: conv_bn(&scope, 3, ConvShape::depthwise(wide, 3, stride)),
            project: conv_bn(&scope, 6, ConvShape::new(wide, c_out, 1, 1)),
            residual: stride == 1 && c_in == c_out,
        }
    }
}

impl Layer for Block {
    fn forward(&self, xs: &Tensor, pass: Pass) -> Tensor {
        let ys = self.project.forward(&self.depthwise.relu(&self.expand.relu(xs, pass), pass), pass);
        if self.residual { xs + ys } else { ys }
    }
}

/// Channels into group g, and the stride of its i-th block.
fn entry(g: usize, i: usize) -> (i64, i64) {
    match (g, i) {
        (0, 0) => (STEM, GROUPS[0].stride),
        (_, 0) => (GROUPS[g - 1].c_out, GROUPS[g].stride),
        _ => (GROUPS[g].c_out, 1),
    }
}

fn blocks(scope: Scope, g: usize) -> Box<dyn Layer> {
    let block = |i: usize| -> Box<dyn Layer> {
        let (c_in, stride) = entry(g, i);
        Box::new(Block::new(scope.sub(i), c_in, GROUPS[g].c_out, stride, GROUPS[g].expand))
    };
    Box::new(Chain((0..GROUPS[g].n).map(block).collect()))
}

fn stage(scope: &Scope, l: usize) -> Box<dyn Layer> {
    let mut layers: Vec<Box<dyn Layer>> = vec![];
    if l == 0 {
        layers.push(Box::new(ConvBnRelu(conv_bn(&scope.sub("conv1"), 0, ConvShape::new(3, STEM, 3, 2)))));
    }
    layers.extend(STAGES[l].clone().map(|g| blocks(scope.sub("blocks").sub(g), g)));
    Box::new(Chain(layers))
}

fn neck(scope: Scope) -> Box<dyn Layer> {
    Box::new(ConvBnRelu(conv_bn(&scope, 0, ConvShape::new(GROUPS[6].c_out, NECK, 1, 1))))
}

/// The remaining groups with fresh weights, then the neck, numbered through.
fn branch(scope: &Scope, l: usize) -> Box<dyn Layer> {
    let scope = scope.sub(format!("block_extractor{}", l + 1));
    let first = STAGES[l].end;
    let mut layers: Vec<Box<dyn Layer>> = (first..GROUPS.len()).map(|g| blocks(scope.sub(g - first), g)).collect();
    layers.push(neck(scope.sub(GROUPS.len() - first)));
    Box::new(Chain(layers))
}

fn twins(l: usize) -> Vec<(String, String)> {
    let names = (STAGES[l].end..GROUPS.len()).map(|g| format!("blocks.{g}")).chain(["conv2".to_string()]);
    names.enumerate().map(|(part, name)| (format!("block_extractor{}.{part}", l + 1), name)).collect()
}

fn graph_block(place: &Place, stride: i64, residual: bool) -> Module {
    let at = place.sub("conv");
    let point = |i: usize| graph::plain_conv(&at.sub(i), 1);
    let norm = |i: usize| graph::batch_norm(&at.sub(i));
    let wide = at.sub(3).tensor("weight").size()[0];
    let conv = graph::sequential(vec![
        point(0),
        norm(1),
        graph::relu(),
        graph::conv(&at.sub(3), ConvShape::depthwise(wide, 3, stride)),
        norm(4),
        graph::relu(),
        point(6),
        norm(7),
    ]);
    let block = Module::new("InvertedResidual", |g, x| {
        let y = g.call("conv", x);
        if residual { g.add(x, y) } else { y }
    });
    block.child("conv", conv)
}

fn graph(place: &Place) -> Tree {
    let conv_bn_relu = |name: &str, stride: i64| {
        let at = place.sub(name);
        graph::sequential(vec![graph::plain_conv(&at.sub(0), stride), graph::batch_norm(&at.sub(1)), graph::relu()])
    };
    let at = place.sub("blocks");
    let group = |g: usize| {
        let block = |i: usize| {
            let (c_in, stride) = entry(g, i);
            graph_block(&at.sub(g).sub(i), stride, stride == 1 && c_in == GROUPS[g].c_out)
        };
        graph::sequential((0..GROUPS[g].n).map(block).collect())
    };
    let tree = Tree::default().step("conv1", conv_bn_relu("conv1", 2));
    // One child holds all groups; the maps lie inside it.
    let mut tree = tree.holder("blocks", graph::sequential((0..GROUPS.len()).map(group).collect()));
    for g in 0..GROUPS.len() {
        tree = tree.call(&format!("blocks.{g}"));
        if STAGES.iter().any(|stage| stage.end == g + 1) {
            tree = tree.map();
        }
    }
    tree.neck("conv2", conv_bn_relu("conv2", 1)).tail(|g, x| {
        let y = g.call("conv2", x);
        g.mean(y)
    })
}
