//! VGG with BatchNorm for 32 x 32 images, Simonyan and Zisserman, ICLR 2015, as in the distillation zoo (RepDistiller, Tian et al., ICLR
//! 2020; mdistiller): five blocks of 3 x 3 convolutions with a bias, max-pooling between the first four, one linear layer. The maps are those the
//! zoo distils, after blocks 1 to 4. Its classes pool once more before the last block for images of side 64 and no others; ours never do.

use super::graph::{self, Module, Place, Tree, Window};
use super::layers::{Chain, Conv, ConvBn, ConvBnRelu, ConvShape, Identity, Layer, Linear, MaxPool2};
use super::{Arch, Elsewhere, GOLDEN_SMALL, Norm, Released};
use crate::params::{Init, Scope};

macro_rules! arch {
    ($name:literal, $convs:literal) => {
        Arch {
            name: $name,
            family: "vgg_cifar",
            image_size: 32,
            depth: 4,
            maps: &[(WIDTHS[1], 2), (WIDTHS[2], 4), (WIDTHS[3], 8), (WIDTHS[4], 8)],
            dim: WIDTHS[4],
            classifier: "classifier",
            norm: Norm::Batch,
            released: Released { baseline: &[], lmcl: &[] },
            elsewhere: Elsewhere::NOWHERE,
            golden: GOLDEN_SMALL,
            stage: |scope, l| stage(scope, l, $convs),
            neck: |_| Box::new(Identity),
            branch: |scope, l| branch(scope, l, $convs),
            twins,
            head,
            branch_head: head,
            graph: |place| graph(place, $convs),
        }
    };
}

pub const ARCHS: &[Arch] = &[arch!("vgg8", 1), arch!("vgg13", 2)];

/// Channels of the five blocks.
const WIDTHS: [i64; 5] = [64, 128, 256, 512, 512];

/// As the released classes start it.
fn head(scope: Scope, d_in: i64, d_out: i64) -> Linear {
    Linear::with_init(scope, d_in, d_out, Init::Normal(0.01), Some(Init::Const(0.0)))
}

/// Is the map halved before block b?
fn halves(b: usize) -> bool {
    (1..4).contains(&b)
}

/// Block b of `n` convolutions, numbered with their norms and ReLUs, and the pooling before it.
fn block(scope: Scope, b: usize, n: usize) -> Vec<Box<dyn Layer>> {
    let mut layers: Vec<Box<dyn Layer>> = vec![];
    if halves(b) {
        layers.push(Box::new(MaxPool2));
    }
    for i in 0..n {
        let c_in = match (b, i) {
            (0, 0) => 3,
            (_, 0) => WIDTHS[b - 1],
            _ => WIDTHS[b],
        };
        let shape = ConvShape::new(c_in, WIDTHS[b], 3, 1);
        let conv = Conv::with_bias(scope.sub(3 * i), shape, shape.fan_out_init(), Init::Const(0.0));
        layers.push(Box::new(ConvBnRelu(ConvBn::of(conv, scope.sub(3 * i + 1)))));
    }
    layers
}

/// The first stage has the first two blocks.
fn stage(scope: &Scope, l: usize, n: usize) -> Box<dyn Layer> {
    let blocks = if l == 0 { 0..2 } else { l + 1..l + 2 };
    Box::new(Chain(blocks.flat_map(|b| block(scope.sub(format!("block{b}")), b, n)).collect()))
}

/// The remaining blocks with fresh weights: `block_extractor{l}.{block}`.
fn branch(scope: &Scope, l: usize, n: usize) -> Box<dyn Layer> {
    let scope = scope.sub(format!("block_extractor{}", l + 1));
    Box::new(Chain((l + 2..5).flat_map(|b| block(scope.sub(b - l - 2), b, n)).collect()))
}

fn twins(l: usize) -> Vec<(String, String)> {
    (l + 2..5).map(|b| (format!("block_extractor{}.{}", l + 1, b - l - 2), format!("block{b}"))).collect()
}

/// A block without its last ReLU, as the released classes keep it.
fn graph_block(place: &Place, n: usize) -> Module {
    let mut modules = vec![];
    for i in 0..n {
        if i > 0 {
            modules.push(graph::relu());
        }
        modules.push(graph::plain_conv(&place.sub(3 * i), 1));
        modules.push(graph::batch_norm(&place.sub(3 * i + 1)));
    }
    graph::sequential(modules)
}

fn graph(place: &Place, n: usize) -> Tree {
    let tree = (0..5).fold(Tree::default(), |tree, b| {
        let tree = if halves(b) { tree.then(|g, x| g.max_pool(x, Window { kernel: 2, stride: 2, padding: 0 })) } else { tree };
        let name = format!("block{b}");
        let tree = tree.holder(&name, graph_block(&place.sub(&name), n)).call(&name).then(|g, x| g.relu(x));
        if b > 0 { tree.map() } else { tree }
    });
    tree.tail(|g, x| g.mean(x))
}
