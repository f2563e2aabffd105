//! ShuffleNet, Zhang et al., CVPR 2018, with three groups for 32 x 32 images, as in the distillation zoo (`ShuffleV1` of RepDistiller, Tian et al.,
//! ICLR 2020, and of mdistiller): a 1 x 1 stem, no max-pooling, three stages.

use tch::Tensor;

use super::graph::{self, Module, Place, Tree, Window};
use super::layers::{Chain, ConvBn, ConvBnRelu, ConvShape, Identity, Layer, Linear, Pass};
use super::{Arch, Elsewhere, GOLDEN_SMALL, Norm, Released};
use crate::params::Scope;

pub const ARCHS: &[Arch] = &[Arch {
    name: "shuffle_v1",
    family: "shufflenet_v1",
    image_size: 32,
    depth: 3,
    maps: &[(WIDTHS[0], 2), (WIDTHS[1], 4), (WIDTHS[2], 8)],
    dim: WIDTHS[2],
    classifier: "linear",
    norm: Norm::Batch,
    released: Released { baseline: &[], lmcl: &[] },
    elsewhere: Elsewhere::NOWHERE,
    golden: GOLDEN_SMALL,
    stage,
    neck: |_| Box::new(Identity),
    branch,
    twins,
    head: Linear::new,
    branch_head: Linear::new,
    graph,
}];

const STEM: i64 = 24;
const WIDTHS: [i64; 3] = [240, 480, 960];
/// Blocks per stage, the first of which halves the map.
const BLOCKS: [usize; 3] = [4, 8, 4];
const GROUPS: i64 = 3;

struct Block {
    /// 1x1 in groups, depthwise, 1x1 in groups.
    reduce: ConvBn,
    depthwise: ConvBn,
    expand: ConvBn,
    /// Of the first convolution, whose channels are shuffled.
    groups: i64,
    /// Beside its input, averaged to half the side, instead of added to it.
    halves: bool,
}

/// Channels of a block's middle, and how many of its output are new.
fn inner(c_in: i64, c_out: i64, halves: bool) -> (i64, i64) {
    let new = if halves { c_out - c_in } else { c_out };
    (new / 4, new)
}

/// The 24 channels of the stem are not divided.
fn first_groups(c_in: i64) -> i64 {
    if c_in == STEM { 1 } else { GROUPS }
}

impl Block {
    fn new(scope: Scope, c_in: i64, c_out: i64, halves: bool) -> Block {
        let conv = |i: usize, shape: ConvShape| {
            ConvBn::new(scope.sub(format!("conv{i}")), scope.sub(format!("bn{i}")), shape, shape.default_init())
        };
        let (middle, new) = inner(c_in, c_out, halves);
        let groups = first_groups(c_in);
        Block {
            reduce: conv(1, ConvShape { groups, ..ConvShape::new(c_in, middle, 1, 1) }),
            depthwise: conv(2, ConvShape::depthwise(middle, 3, if halves { 2 } else { 1 })),
            expand: conv(3, ConvShape { groups: GROUPS, ..ConvShape::new(middle, new, 1, 1) }),
            groups,
            halves,
        }
    }
}

impl Layer for Block {
    fn forward(&self, xs: &Tensor, pass: Pass) -> Tensor {
        let ys = shuffle(&self.reduce.relu(xs, pass), self.groups);
        let ys = self.depthwise.relu(&ys, pass);
        if self.halves {
            let beside = xs.avg_pool2d([3, 3], [2, 2], [1, 1], false, true, None::<i64>);
            return Tensor::cat(&[self.expand.forward(&ys, pass), beside], 1).relu_();
        }
        self.expand.add_relu(&ys, xs, pass)
    }
}

/// Channel i of group g comes to place i * groups + g.
fn shuffle(xs: &Tensor, groups: i64) -> Tensor {
    if groups == 1 {
        return xs.shallow_clone();
    }
    let size = xs.size();
    xs.reshape([size[0], groups, size[1] / groups, size[2], size[3]]).transpose(1, 2).reshape(size)
}

fn entry(l: usize, i: usize) -> i64 {
    match (l, i) {
        (0, 0) => STEM,
        (_, 0) => WIDTHS[l - 1],
        _ => WIDTHS[l],
    }
}

fn blocks(scope: Scope, l: usize) -> Box<dyn Layer> {
    let block = |i: usize| -> Box<dyn Layer> { Box::new(Block::new(scope.sub(i), entry(l, i), WIDTHS[l], i == 0)) };
    Box::new(Chain((0..BLOCKS[l]).map(block).collect()))
}

fn stage(scope: &Scope, l: usize) -> Box<dyn Layer> {
    let body = blocks(scope.sub(format!("layer{}", l + 1)), l);
    if l > 0 {
        return body;
    }
    let shape = ConvShape::new(3, STEM, 1, 1);
    let stem = ConvBnRelu(ConvBn::new(scope.sub("conv1"), scope.sub("bn1"), shape, shape.default_init()));
    Box::new(Chain(vec![Box::new(stem), body]))
}

/// The remaining stages at full depth with fresh weights: `block_extractor{l}.{stage}`.
fn branch(scope: &Scope, l: usize) -> Box<dyn Layer> {
    let scope = scope.sub(format!("block_extractor{}", l + 1));
    Box::new(Chain((l + 1..3).map(|next| blocks(scope.sub(next - l - 1), next)).collect()))
}

fn twins(l: usize) -> Vec<(String, String)> {
    (l + 1..3).map(|next| (format!("block_extractor{}.{}", l + 1, next - l - 1), format!("layer{}", next + 1))).collect()
}

fn graph_block(place: &Place, c_in: i64, c_out: i64, halves: bool) -> Module {
    let (middle, new) = inner(c_in, c_out, halves);
    let (groups, stride) = (first_groups(c_in), if halves { 2 } else { 1 });
    let block = Module::new("Bottleneck", |g, x| {
        let y = g.calls(["conv1", "bn1"], x);
        let active = g.relu(y);
        let shuffled = if groups > 1 { g.shuffle(active, groups) } else { active };
        let y = g.calls(["conv2", "bn2"], shuffled);
        let y = g.relu(y);
        let y = g.calls(["conv3", "bn3"], y);
        let y = match halves {
            true => {
                let pooled = g.avg_pool(x, Window { kernel: 3, stride: 2, padding: 1 });
                g.concat(&[y, pooled], 1)
            }
            false => g.add(y, x),
        };
        g.relu(y)
    });
    let shapes = [
        ConvShape { groups, ..ConvShape::new(c_in, middle, 1, 1) },
        ConvShape::depthwise(middle, 3, stride),
        ConvShape { groups: GROUPS, ..ConvShape::new(middle, new, 1, 1) },
    ];
    (1..=3).zip(shapes).fold(block, |block, (i, shape)| {
        let (conv, norm) = (format!("conv{i}"), format!("bn{i}"));
        let (conv_at, norm_at) = (place.sub(&conv), place.sub(&norm));
        block.child(conv, graph::conv(&conv_at, shape)).child(norm, graph::batch_norm(&norm_at))
    })
}

fn graph(place: &Place) -> Tree {
    let tree = Tree::default().step("conv1", graph::plain_conv(&place.sub("conv1"), 1)).step("bn1", graph::batch_norm(&place.sub("bn1")));
    let stage = |tree: Tree, l: usize| {
        let name = format!("layer{}", l + 1);
        let at = place.sub(&name);
        let block = |i: usize| graph_block(&at.sub(i), entry(l, i), WIDTHS[l], i == 0);
        tree.step(&name, graph::sequential((0..BLOCKS[l]).map(block).collect())).map()
    };
    (0..3).fold(tree.step("relu", graph::relu()), stage).tail(|g, x| g.mean(x))
}
