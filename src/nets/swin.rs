//! Swin Transformer, Liu et al., ICCV 2021, with torchvision's layout and names. Inside a stage maps are [B, h, w, c]; outside they are
//! views of the same memory as [B, c, h, w]. The paper gives no branches for it: like the ImageNet ResNets, a branch here has one unit
//! per remaining stage, a patch merging and a pair of blocks (plain and shifted windows).

mod graph;

use std::cell::RefCell;

use tch::{Device, Kind, Tensor};

use super::drop_path::DropPath;
use super::layers::{Chain, Conv, ConvShape, Layer, Linear, Pass};
use super::{Arch, Elsewhere, Mmdet, Norm, Released, Timm, Torchvision, TorchvisionMaps};
use crate::params::{Init, Scope};

macro_rules! arch {
    ($name:literal, $timm:literal, $size:expr) => {
        Arch {
            name: $name,
            family: "swin",
            image_size: 224,
            depth: 4,
            maps: &[(width(0), PATCH), (width(1), 2 * PATCH), (width(2), 4 * PATCH), (width(3), 8 * PATCH)],
            dim: width(3),
            classifier: "head",
            norm: Norm::Layer,
            released: Released { baseline: &[], lmcl: &[] },
            elsewhere: Elsewhere {
                torchvision: Some(Torchvision { maps: TorchvisionMaps::Features, norm_layer: false }),
                timm: Some(Timm { name: $timm, first_conv: "patch_embed.proj", classifier: "head.fc", swin: true }),
                mmdet: Some($size.mmdet()),
                detectron2: None,
            },
            golden: GOLDEN,
            stage: |scope, l| stage(scope, l, $size),
            neck: |scope| Box::new(ChannelsLast(vec![Box::new(LayerNorm::new(scope.sub("norm"), width(3)))])),
            branch: |scope, l| branch(scope, l, $size),
            twins: |_| vec![], // two blocks a stage: shorter than the network
            head: linear,
            branch_head: linear,
            graph: |place| graph::graph(place, $size),
        }
    };
}

pub const ARCHS: &[Arch] = &[
    arch!("swin_t", "swin_tiny_patch4_window7_224", Size { blocks: [2, 2, 6, 2], drop_path: 0.2 }),
    arch!("swin_s", "swin_small_patch4_window7_224", Size { blocks: [2, 2, 18, 2], drop_path: 0.3 }),
];

#[derive(Clone, Copy)]
struct Size {
    /// Blocks per stage.
    blocks: [usize; 4],
    /// How often the last block's residual branches are dropped; the rate grows linearly from 0 at the first block.
    drop_path: f64,
}

/// The maps of the first are all larger than a window, because MMDetection shifts windows in smaller ones too, where torchvision and the
/// original do not.
const GOLDEN: [[i64; 3]; 2] = [[1, 256, 288], [2, 96, 160]];

const PATCH: i64 = 4;
const WINDOW: i64 = 7;
const HEADS: [i64; 4] = [3, 6, 12, 24];
const MLP_RATIO: i64 = 4;
const NORM_EPS: f64 = 1e-5;
/// Every linear layer and the position tables start as a normal of this deviation, biases at 0.
const INIT: Init = Init::TruncNormal(0.02);

impl Size {
    const fn mmdet(self) -> Mmdet {
        Mmdet::SwinTransformer {
            embed_dims: width(0),
            depths: self.blocks,
            num_heads: HEADS,
            window_size: WINDOW,
            mlp_ratio: MLP_RATIO,
            drop_path_rate: self.drop_path,
        }
    }

    /// The rate of drop-path of block `at` of stage l.
    fn drop_path(self, l: usize, at: usize) -> f64 {
        let before: usize = self.blocks[..l].iter().sum();
        let last = self.blocks.iter().sum::<usize>() - 1;
        self.drop_path * (before + at) as f64 / last as f64
    }
}

/// By how much a block shifts its windows, by its place in the stage: odd ones by half a window.
fn shift(at: usize) -> i64 {
    if at % 2 == 1 { WINDOW / 2 } else { 0 }
}

const fn width(l: usize) -> i64 {
    96 << l
}

fn linear(scope: Scope, d_in: i64, d_out: i64) -> Linear {
    Linear::with_init(scope, d_in, d_out, INIT, Some(Init::Const(0.0)))
}

/// Layers that work on [B, h, w, c], for a map [B, c, h, w].
struct ChannelsLast(Vec<Box<dyn Layer>>);

impl Layer for ChannelsLast {
    fn forward(&self, xs: &Tensor, pass: Pass) -> Tensor {
        let xs = xs.permute([0, 2, 3, 1]);
        self.0.iter().fold(xs, |xs, layer| layer.forward(&xs, pass)).permute([0, 3, 1, 2])
    }
}

struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
}

impl LayerNorm {
    fn new(scope: Scope, channels: i64) -> LayerNorm {
        LayerNorm { weight: scope.var("weight", &[channels], Init::Const(1.0)), bias: scope.var("bias", &[channels], Init::Const(0.0)) }
    }
}

impl Layer for LayerNorm {
    fn forward(&self, xs: &Tensor, _: Pass) -> Tensor {
        xs.layer_norm(self.weight.size(), Some(&self.weight), Some(&self.bias), NORM_EPS, true)
    }
}

/// Zeros to the right of and below a map [B, h, w, c].
fn pad(xs: &Tensor, below: i64, right: i64) -> Tensor {
    if below == 0 && right == 0 { xs.shallow_clone() } else { xs.constant_pad_nd([0, 0, 0, right, 0, below]) }
}

/// Four neighbours become one position of twice the width.
struct PatchMerging {
    norm: LayerNorm,
    reduction: Linear,
}

impl PatchMerging {
    fn new(scope: Scope, c: i64) -> PatchMerging {
        PatchMerging {
            norm: LayerNorm::new(scope.sub("norm"), 4 * c),
            reduction: Linear::with_init(scope.sub("reduction"), 4 * c, 2 * c, INIT, None),
        }
    }
}

impl Layer for PatchMerging {
    fn forward(&self, xs: &Tensor, pass: Pass) -> Tensor {
        let (_, h, w, _) = xs.size4().expect("maps have four dimensions");
        let xs = pad(xs, h % 2, w % 2);
        let corner = |y: i64, x: i64| xs.slice(1, y, None, 2).slice(2, x, None, 2);
        let xs = Tensor::cat(&[corner(0, 0), corner(1, 0), corner(0, 1), corner(1, 1)], 3);
        self.reduction.forward(&self.norm.forward(&xs, pass), pass)
    }
}

/// Multi-head attention within windows, shifted or not, with a learned bias for every offset between two positions.
struct Attention {
    qkv: Linear,
    proj: Linear,
    bias_table: Tensor,
    bias_index: Tensor,
    heads: i64,
    shift: i64,
    /// The mask of the last size of map, which is mostly the next one's too.
    mask: RefCell<Option<Mask>>,
}

/// A mask and what it was made for: height, width and shift of the map, and where and in what it is.
struct Mask {
    made_for: (i64, i64, [i64; 2], Device, Kind),
    values: Tensor,
}

impl Attention {
    fn new(scope: Scope, c: i64, heads: i64, shift: i64) -> Attention {
        let offsets = 2 * WINDOW - 1;
        Attention {
            qkv: linear(scope.sub("qkv"), c, 3 * c),
            proj: linear(scope.sub("proj"), c, c),
            bias_table: scope.var("relative_position_bias_table", &[offsets * offsets, heads], INIT),
            bias_index: scope.buffer("relative_position_index", relative_position_index()),
            heads,
            shift,
            mask: RefCell::new(None),
        }
    }

    /// `shift_mask`, made once for maps of one size.
    fn mask(&self, h: i64, w: i64, shift: [i64; 2], like: &Tensor) -> Tensor {
        let made_for = (h, w, shift, like.device(), like.kind());
        let mut last = self.mask.borrow_mut();
        if last.as_ref().is_none_or(|mask| mask.made_for != made_for) {
            *last = Some(Mask { made_for, values: tch::no_grad(|| shift_mask(h, w, shift, like)) });
        }
        last.as_ref().expect("made above").values.shallow_clone()
    }

    /// [1, heads, n, n] for the n positions of a window.
    fn bias(&self) -> Tensor {
        let n = WINDOW * WINDOW;
        self.bias_table.index_select(0, &self.bias_index).view([n, n, -1]).permute([2, 0, 1]).unsqueeze(0)
    }
}

/// The row of the bias table for each ordered pair of positions in a window.
fn relative_position_index() -> Tensor {
    let n = WINDOW * WINDOW;
    let row = |a: i64, b: i64| {
        let (dy, dx) = (a / WINDOW - b / WINDOW, a % WINDOW - b % WINDOW);
        (dy + WINDOW - 1) * (2 * WINDOW - 1) + dx + WINDOW - 1
    };
    let index: Vec<i64> = (0..n * n).map(|pair| row(pair / n, pair % n)).collect();
    Tensor::from_slice(&index)
}

/// Which of the three strips a coordinate of a shifted map comes from; without a shift there is one.
fn strip(at: i64, side: i64, shift: i64) -> i64 {
    i64::from(shift > 0 && at >= side - WINDOW) + i64::from(shift > 0 && at >= side - shift)
}

/// -100 between positions that a cyclic shift has brought together from different sides of the map, else 0. [windows, 1, n, n]
fn shift_mask(h: i64, w: i64, shift: [i64; 2], like: &Tensor) -> Tensor {
    let mut region = vec![];
    for (top, left) in (0..h / WINDOW).flat_map(|y| (0..w / WINDOW).map(move |x| (y * WINDOW, x * WINDOW))) {
        for (y, x) in (0..WINDOW).flat_map(|y| (0..WINDOW).map(move |x| (top + y, left + x))) {
            region.push(3 * strip(y, h, shift[0]) + strip(x, w, shift[1]));
        }
    }
    let region = Tensor::from_slice(&region).view([-1, WINDOW * WINDOW]);
    let apart = region.unsqueeze(1).ne_tensor(&region.unsqueeze(2));
    (apart.to_kind(like.kind()) * -100.0).unsqueeze(1).to_device(like.device())
}

impl Layer for Attention {
    fn forward(&self, xs: &Tensor, pass: Pass) -> Tensor {
        let (b, h, w, c) = xs.size4().expect("maps have four dimensions");
        let (below, right) = ((WINDOW - h % WINDOW) % WINDOW, (WINDOW - w % WINDOW) % WINDOW);
        let mut xs = pad(xs, below, right);
        let (ph, pw) = (h + below, w + right);
        // A map of one window needs no shift.
        let shift = [ph, pw].map(|side| if side > WINDOW { self.shift } else { 0 });
        let shifted = shift != [0, 0];
        if shifted {
            xs = xs.roll([-shift[0], -shift[1]], [1, 2]);
        }
        let (rows, columns, n) = (ph / WINDOW, pw / WINDOW, WINDOW * WINDOW);
        let windows = rows * columns;
        let xs = xs.reshape([b, rows, WINDOW, columns, WINDOW, c]).permute([0, 1, 3, 2, 4, 5]).reshape([b * windows, n, c]);

        let qkv = self.qkv.forward(&xs, pass).reshape([b * windows, n, 3, self.heads, c / self.heads]).permute([2, 0, 3, 1, 4]);
        let (q, k, v) = (qkv.get(0) * ((c / self.heads) as f64).powf(-0.5), qkv.get(1), qkv.get(2));
        let mut scores = q.matmul(&k.transpose(-2, -1)) + self.bias(); // [B * windows, heads, n, n]
        if shifted {
            scores = (scores.view([b, windows, self.heads, n, n]) + self.mask(ph, pw, shift, &scores)).view([-1, self.heads, n, n]);
        }
        let xs = scores.softmax(-1, None).matmul(&v).transpose(1, 2).reshape([b * windows, n, c]);
        let xs = self.proj.forward(&xs, pass);

        let mut xs = xs.view([b, rows, columns, WINDOW, WINDOW, c]).permute([0, 1, 3, 2, 4, 5]).reshape([b, ph, pw, c]);
        if shifted {
            xs = xs.roll(shift, [1, 2]);
        }
        xs.narrow(1, 0, h).narrow(2, 0, w)
    }
}

struct Block {
    norm1: LayerNorm,
    attention: Attention,
    norm2: LayerNorm,
    expand: Linear,
    contract: Linear,
    /// Of the attention and of the perceptron.
    drop: [DropPath; 2],
}

impl Block {
    /// `at` is the block's place in its stage.
    fn new(scope: Scope, l: usize, at: usize, size: Size) -> Block {
        let c = width(l);
        Block {
            norm1: LayerNorm::new(scope.sub("norm1"), c),
            attention: Attention::new(scope.sub("attn"), c, HEADS[l], shift(at)),
            norm2: LayerNorm::new(scope.sub("norm2"), c),
            expand: linear(scope.sub("mlp.0"), c, MLP_RATIO * c),
            contract: linear(scope.sub("mlp.3"), MLP_RATIO * c, c),
            drop: [0, 1].map(|branch| DropPath::new(&scope, branch, size.drop_path(l, at))),
        }
    }
}

impl Layer for Block {
    fn forward(&self, xs: &Tensor, pass: Pass) -> Tensor {
        let attended = self.attention.forward(&self.norm1.forward(xs, pass), pass);
        let xs = xs + self.drop[0].apply(attended, pass);
        let hidden = self.expand.forward(&self.norm2.forward(&xs, pass), pass).gelu("none");
        let ys = self.contract.forward(&hidden, pass);
        xs + self.drop[1].apply(ys, pass)
    }
}

/// The first `n` blocks of stage l.
fn blocks(scope: Scope, l: usize, n: usize, size: Size) -> Vec<Box<dyn Layer>> {
    (0..n).map(|i| -> Box<dyn Layer> { Box::new(Block::new(scope.sub(i), l, i, size)) }).collect()
}

/// `features.{2l}` is the patch embedding or merging, `features.{2l + 1}` the blocks.
fn stage(scope: &Scope, l: usize, size: Size) -> Box<dyn Layer> {
    let scope = scope.sub("features");
    let first = scope.sub(2 * l);
    let blocks = blocks(scope.sub(2 * l + 1), l, size.blocks[l], size);
    if l == 0 {
        let patches = ConvShape { padding: 0, ..ConvShape::new(3, width(0), PATCH, PATCH) };
        let embed = Conv::biased(first.sub(0), patches, patches.default_init());
        let mut layers: Vec<Box<dyn Layer>> = vec![Box::new(LayerNorm::new(first.sub(2), width(0)))];
        layers.extend(blocks);
        return Box::new(Chain(vec![Box::new(embed), Box::new(ChannelsLast(layers))]));
    }
    let mut layers: Vec<Box<dyn Layer>> = vec![Box::new(PatchMerging::new(first, width(l - 1)))];
    layers.extend(blocks);
    Box::new(ChannelsLast(layers))
}

/// One merging and one pair of blocks per remaining stage, numbered through as in `features`, then the norm.
fn branch(scope: &Scope, l: usize, size: Size) -> Box<dyn Layer> {
    let scope = scope.sub(format!("block_extractor{}", l + 1));
    let mut layers: Vec<Box<dyn Layer>> = vec![];
    for (unit, next) in (l + 1..4).enumerate() {
        layers.push(Box::new(PatchMerging::new(scope.sub(2 * unit), width(next - 1))));
        layers.extend(blocks(scope.sub(2 * unit + 1), next, 2, size));
    }
    layers.push(Box::new(LayerNorm::new(scope.sub(2 * (3 - l)), width(3))));
    Box::new(ChannelsLast(layers))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    #[test]
    fn drop_path_drops_at_its_rate_keeps_the_mean_and_is_off_by_default() {
        let size = Size { blocks: [2, 2, 6, 2], drop_path: 0.2 };
        let block = Block::new(Scope::blank(Device::Cpu, Kind::Float).sub("block"), 3, 1, size);
        assert_eq!(block.drop[0].rate, 0.2);
        let ones = || Tensor::ones([4000, 1, 1, 1], (Kind::Float, Device::Cpu));
        let on = |noise: u64| Pass { drop_path: true, ..Pass::train(noise) };
        let dropped = |half: usize, pass: Pass| block.drop[half].apply(ones(), pass);
        let kept = Vec::<f32>::try_from(dropped(0, on(5)).view(-1)).expect("a vector");
        assert!(kept.iter().all(|k| *k == 0.0 || (*k - 1.25).abs() < 1e-6));
        let count = kept.iter().filter(|k| **k == 0.0).count();
        assert!((700..=900).contains(&count), "{count} of 4000 at rate 0.2");
        assert_eq!(dropped(0, on(5)), dropped(0, on(5)));
        assert_ne!(dropped(0, on(5)), dropped(1, on(5)));
        assert_ne!(dropped(0, on(5)), dropped(0, on(6)));
        for pass in [Pass::train(5), Pass { drop_path: true, ..Pass::EVAL }] {
            assert_eq!(dropped(0, pass), ones());
        }
    }
}
