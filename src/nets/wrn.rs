//! Wide ResNets for 32 x 32 images, Zagoruyko and Komodakis, BMVC 2016: pre-activation blocks, n = (depth - 4) / 6 per stage, no
//! dropout. A shortcut that changes width is a bare 1x1 convolution of the activated input.

use tch::Tensor;

use super::graph::{self, Module, Place, Tree};
use super::layers::{BatchNorm, BnRelu, Chain, Conv, ConvBn, ConvShape, Layer, Linear, Pass};
use super::{Arch, Elsewhere, GOLDEN_SMALL, Norm, Released};
use crate::params::Scope;

macro_rules! arch {
    ($name:literal, $depth:literal, $widen:literal) => {
        Arch {
            name: $name,
            family: "wrn",
            image_size: 32,
            depth: 3,
            maps: &[(16 * $widen, 1), (32 * $widen, 2), (64 * $widen, 4)],
            dim: 64 * $widen,
            classifier: "fc",
            norm: Norm::Batch,
            released: Released { baseline: &[], lmcl: &[] },
            elsewhere: Elsewhere::NOWHERE,
            golden: GOLDEN_SMALL,
            stage: |scope, l| stage(scope, l, $widen, ($depth - 4) / 6),
            neck: |scope| Box::new(BnRelu(BatchNorm::new(scope.sub("bn1"), 64 * $widen))),
            branch: |scope, l| branch(scope, l, $widen, ($depth - 4) / 6),
            twins,
            head: Linear::zero_bias,
            branch_head: Linear::zero_bias,
            graph: |place| graph(place, $widen, ($depth - 4) / 6),
        }
    };
}

pub const ARCHS: &[Arch] =
    &[arch!("wrn_16_1", 16, 1), arch!("wrn_40_1", 40, 1), arch!("wrn_16_2", 16, 2), arch!("wrn_40_2", 40, 2), arch!("wrn_28_4", 28, 4)];

const STEM: i64 = 16;

struct Block {
    norm: BatchNorm,
    /// `conv1` and the `bn2` after it.
    first: ConvBn,
    second: Conv,
    shortcut: Option<Conv>,
}

impl Block {
    fn new(scope: Scope, c_in: i64, c_out: i64, stride: i64) -> Block {
        let conv = |name, shape: ConvShape| Conv::new(scope.sub(name), shape, shape.fan_out_init());
        let first = ConvShape::new(c_in, c_out, 3, stride);
        Block {
            norm: BatchNorm::new(scope.sub("bn1"), c_in),
            first: ConvBn::new(scope.sub("conv1"), scope.sub("bn2"), first, first.fan_out_init()),
            second: conv("conv2", ConvShape::new(c_out, c_out, 3, 1)),
            shortcut: (c_in != c_out).then(|| conv("convShortcut", ConvShape::new(c_in, c_out, 1, stride))),
        }
    }
}

impl Layer for Block {
    fn forward(&self, xs: &Tensor, pass: Pass) -> Tensor {
        let active = self.norm.relu(xs, pass);
        let ys = self.second.forward(&self.first.relu(&active, pass), pass);
        match &self.shortcut {
            Some(conv) => ys + conv.forward(&active, pass),
            None => ys + xs,
        }
    }
}

/// `n` blocks of stage l, under `layer.{i}`; the first changes width and, but for stage 0, halves the map.
fn blocks(scope: Scope, l: usize, widen: i64, n: usize) -> Box<dyn Layer> {
    let width = (16 << l) * widen;
    let block = |i: usize| -> Box<dyn Layer> {
        let (c_in, stride) = match (l, i) {
            (0, 0) => (STEM, 1),
            (_, 0) => (width / 2, 2),
            _ => (width, 1),
        };
        Box::new(Block::new(scope.sub("layer").sub(i), c_in, width, stride))
    };
    Box::new(Chain((0..n).map(block).collect()))
}

fn stage(scope: &Scope, l: usize, widen: i64, n: usize) -> Box<dyn Layer> {
    let body = blocks(scope.sub(format!("block{}", l + 1)), l, widen, n);
    if l > 0 {
        return body;
    }
    let stem = ConvShape::new(3, STEM, 3, 1);
    Box::new(Chain(vec![Box::new(Conv::new(scope.sub("conv1"), stem, stem.fan_out_init())), body]))
}

/// The remaining stages at full depth with fresh weights, then a BatchNorm of its own, `bn{l}` beside `block_extractor{l}`.
fn branch(scope: &Scope, l: usize, widen: i64, n: usize) -> Box<dyn Layer> {
    let body = scope.sub(format!("block_extractor{}", l + 1));
    let norm = BatchNorm::new(scope.sub(format!("bn{}", l + 1)), 64 * widen);
    let mut layers: Vec<Box<dyn Layer>> = (l + 1..3).map(|next| blocks(body.sub(next - l - 1), next, widen, n)).collect();
    layers.push(Box::new(BnRelu(norm)));
    Box::new(Chain(layers))
}

fn twins(l: usize) -> Vec<(String, String)> {
    let blocks = (l + 1..3).map(|next| (format!("block_extractor{}.{}", l + 1, next - l - 1), format!("block{}", next + 1)));
    blocks.chain([(format!("bn{}", l + 1), "bn1".to_string())]).collect()
}

fn graph_block(place: &Place, stride: i64, changes: bool) -> Module {
    let norm = |name: &str| graph::batch_norm(&place.sub(name));
    let conv = |name: &str, stride: i64| graph::plain_conv(&place.sub(name), stride);
    let block = Module::new("BasicBlock", |g, x| {
        let norm = g.call("bn1", x);
        let active = g.relu(norm);
        let y = g.calls(["conv1", "bn2"], active);
        let y = g.relu(y);
        let y = g.call("conv2", y);
        let shortcut = if changes { g.call("convShortcut", active) } else { x };
        g.add(y, shortcut)
    });
    let block = block.child("bn1", norm("bn1")).child("conv1", conv("conv1", stride));
    let block = block.child("bn2", norm("bn2")).child("conv2", conv("conv2", 1));
    if changes { block.child("convShortcut", conv("convShortcut", stride)) } else { block }
}

fn graph(place: &Place, widen: i64, n: usize) -> Tree {
    let stage = |tree: Tree, l: usize| {
        let name = format!("block{}", l + 1);
        let at = place.sub(&name);
        let blocks = at.sub("layer");
        // A first stage of the stem's width changes nothing.
        let changes = |i: usize| i == 0 && (l > 0 || widen > 1);
        let block = |i: usize| graph_block(&blocks.sub(i), if l > 0 && i == 0 { 2 } else { 1 }, changes(i));
        let blocks = graph::sequential((0..n).map(block).collect());
        tree.step(&name, Module::new("NetworkBlock", |g, x| g.call("layer", x)).child("layer", blocks)).map()
    };
    let tree = (0..3).fold(Tree::default().step("conv1", graph::plain_conv(&place.sub("conv1"), 1)), stage);
    let tree = tree.neck("bn1", graph::batch_norm(&place.sub("bn1"))).neck("avgpool", graph::avg_pool());
    tree.tail(|g, x| {
        let norm = g.call("bn1", x);
        let active = g.relu(norm);
        g.call("avgpool", active)
    })
}
