//! The residual blocks of He et al., CVPR 2016, that the CIFAR and the ImageNet ResNets are made of.

use tch::Tensor;

use super::graph::{self, Module, Place};
use super::layers::{Chain, ConvBn, ConvShape, Layer, Pass};
use crate::params::Scope;

#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    Basic,
    /// Stride on the 3 x 3 convolution, as in torchvision ("v1.5").
    Bottleneck,
}

impl Kind {
    /// Output channels per plane.
    pub const fn expansion(self) -> i64 {
        match self {
            Kind::Basic => 1,
            Kind::Bottleneck => 4,
        }
    }
}

/// A convolution and its BatchNorm, Kaiming normal over the fan-out.
pub fn conv_bn(conv: Scope, bn: Scope, shape: ConvShape) -> ConvBn {
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
            Kind::Bottleneck => {
                vec![ConvShape::new(c_in, planes, 1, 1), ConvShape::new(planes, planes, 3, stride), ConvShape::new(planes, c_out, 1, 1)]
            }
        };
        let named =
            |(i, shape): (usize, &ConvShape)| conv_bn(scope.sub(format!("conv{}", i + 1)), scope.sub(format!("bn{}", i + 1)), *shape);
        let changes = stride != 1 || c_in != c_out;
        Block {
            body: shapes.iter().enumerate().map(named).collect(),
            shortcut: changes
                .then(|| conv_bn(scope.sub("downsample.0"), scope.sub("downsample.1"), ConvShape::new(c_in, c_out, 1, stride))),
        }
    }
}

impl Layer for Block {
    fn forward(&self, xs: &Tensor, pass: Pass) -> Tensor {
        let (last, first) = self.body.split_last().expect("a block has convolutions");
        let ys = first.iter().fold(xs.shallow_clone(), |ys, conv| conv.relu(&ys, pass));
        match &self.shortcut {
            Some(shortcut) => last.add_relu(&ys, &shortcut.forward(xs, pass), pass),
            None => last.add_relu(&ys, xs, pass),
        }
    }
}

/// `n` blocks of one stage; the first takes `c_in` channels and has the stride.
pub fn blocks(scope: Scope, kind: Kind, c_in: i64, planes: i64, stride: i64, n: usize) -> Box<dyn Layer> {
    let block = |i: usize| -> Box<dyn Layer> {
        let (c_in, stride) = if i == 0 { (c_in, stride) } else { (planes * kind.expansion(), 1) };
        Box::new(Block::new(scope.sub(i), kind, c_in, planes, stride))
    };
    Box::new(Chain((0..n).map(block).collect()))
}

/// A block as a module, children in torchvision's order.
fn graph_block(place: &Place, kind: Kind, stride: i64, changes: bool) -> Module {
    let conv = |i: usize, stride: i64| graph::plain_conv(&place.sub(format!("conv{i}")), stride);
    let norm = |i: usize| graph::batch_norm(&place.sub(format!("bn{i}")));
    let (class, convs) = match kind {
        Kind::Basic => ("BasicBlock", 2),
        Kind::Bottleneck => ("Bottleneck", 3),
    };
    let block = Module::new(class, |g, x| {
        let mut y = x;
        for i in 1..=convs {
            y = g.calls([format!("conv{i}"), format!("bn{i}")], y);
            if i < convs {
                y = g.call("relu", y);
            }
        }
        let shortcut = if changes { g.call("downsample", x) } else { x };
        let sum = g.add(y, shortcut);
        g.call("relu", sum)
    });
    let block = match kind {
        Kind::Basic => {
            let block = block.child("conv1", conv(1, stride)).child("bn1", norm(1));
            block.child("relu", graph::relu()).child("conv2", conv(2, 1)).child("bn2", norm(2))
        }
        Kind::Bottleneck => {
            let block = block.child("conv1", conv(1, 1)).child("bn1", norm(1));
            let block = block.child("conv2", conv(2, stride)).child("bn2", norm(2));
            block.child("conv3", conv(3, 1)).child("bn3", norm(3)).child("relu", graph::relu())
        }
    };
    if !changes {
        return block;
    }
    let shortcut = place.sub("downsample");
    block.child("downsample", graph::sequential(vec![graph::plain_conv(&shortcut.sub(0), stride), graph::batch_norm(&shortcut.sub(1))]))
}

/// The `n` blocks of a stage; `changes` tells whether the first one alters the number of channels.
pub fn graph_blocks(place: &Place, kind: Kind, stride: i64, changes: bool, n: usize) -> Module {
    let block = |i: usize| {
        let (stride, changes) = if i == 0 { (stride, changes || stride != 1) } else { (1, false) };
        graph_block(&place.sub(i), kind, stride, changes)
    };
    graph::sequential((0..n).map(block).collect())
}
