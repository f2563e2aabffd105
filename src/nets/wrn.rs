//! Wide ResNets for 32 x 32 images, Zagoruyko and Komodakis, BMVC 2016: pre-activation blocks, n = (depth - 4) / 6 per stage, no
//! dropout. A shortcut that changes width is a bare 1x1 convolution of the activated input.

use tch::Tensor;

use super::layers::{BatchNorm, BnRelu, Chain, Conv, ConvBn, ConvShape, Layer, Linear, Pass};
use super::script::{self, Module, Place, Tree};
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
            head: Linear::zero_bias,
            branch_head: Linear::zero_bias,
            script: |place| script(place, ($depth - 4) / 6),
        }
    };
}

pub const ARCHS: &[Arch] = &[arch!("wrn_16_2", 16, 2), arch!("wrn_40_2", 40, 2), arch!("wrn_28_4", 28, 4)];

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

fn script_block(place: &Place, stride: i64, changes: bool) -> Module {
    let shortcut = if changes { "self.convShortcut.forward(active)" } else { "x" };
    let body = format!(
        "active = torch.relu_(self.bn1.forward(x))\ny = self.conv2.forward(torch.relu_(self.bn2.forward(self.conv1.forward(active))))\nreturn y + {shortcut}"
    );
    let norm = |name: &str| script::batch_norm(&place.sub(name));
    let block = Module::new("BasicBlock", &body).child("bn1", norm("bn1")).child("conv1", script::plain_conv(&place.sub("conv1"), stride));
    let block = block.child("bn2", norm("bn2")).child("conv2", script::plain_conv(&place.sub("conv2"), 1));
    if changes { block.child("convShortcut", script::plain_conv(&place.sub("convShortcut"), stride)) } else { block }
}

fn script(place: &Place, n: usize) -> Tree {
    let stage = |tree: Tree, l: usize| {
        let name = format!("block{}", l + 1);
        let at = place.sub(&name);
        let blocks = at.sub("layer");
        let block = |i: usize| script_block(&blocks.sub(i), if l > 0 && i == 0 { 2 } else { 1 }, i == 0);
        let stage =
            Module::new("NetworkBlock", "return self.layer.forward(x)").child("layer", script::sequential((0..n).map(block).collect()));
        tree.step(&name, stage).map()
    };
    let tree = (0..3).fold(Tree::default().step("conv1", script::plain_conv(&place.sub("conv1"), 1)), stage);
    let tree = tree.neck("bn1", script::batch_norm(&place.sub("bn1"))).neck("avgpool", script::avg_pool());
    tree.tail("torch.relu_(self.bn1.forward(x))").tail("self.avgpool.forward(x)")
}
