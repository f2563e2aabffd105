//! The bricks every family is built from: convolution, normalisation, linear, pooling, with PyTorch's defaults and names.

use std::cell::{Cell, RefCell};

use tch::{Kind, Tensor};

use super::kernels::conv_norm;
use super::kernels::convolution::convolution;
use super::kernels::fused::{Fused, Then};
use super::kernels::norm;
use crate::params::{Init, Scope};
use crate::system::device::Precision;
use crate::system::ranks::Ranks;

/// A part of a network: one tensor in, one tensor out. Not tch's `ModuleT`, because a pass is more than train or eval (see `Pass`).
pub trait Layer: Send {
    /// The answer to a batch.
    fn forward(&self, xs: &Tensor, pass: Pass) -> Tensor;
}

/// Which statistics norms take, and whether they move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Batch statistics, running statistics move.
    Train,
    /// Running statistics.
    Eval,
    /// Eval of weights that will not change again while this network lives: BatchNorm is folded into the convolution before it, once.
    Frozen,
}

/// What a forward pass needs to know beyond its input. `noise` seeds what a layer draws in training (drop-path), so that a forward
/// depends on nothing global and gives the same result on any thread.
#[derive(Debug, Clone, Copy)]
pub struct Pass {
    /// Training or not.
    pub mode: Mode,
    /// Seeds what layers draw.
    pub noise: u64,
    /// Whether residual branches are dropped at the rates of the architecture (Swin); only `Mode::Train` ever drops.
    pub drop_path: bool,
    /// What a peer's pass is autocast to; layers of their own derivatives leave all but f32 to libtorch's, which casts.
    pub precision: Precision,
    /// Who else sees images of this batch: with `train.sync_bn`, BatchNorm takes the statistics of all of them.
    pub ranks: Ranks,
}

impl Pass {
    /// Evaluation.
    pub const EVAL: Pass = Pass { mode: Mode::Eval, noise: 0, drop_path: false, precision: Precision::F32, ranks: Ranks::ALONE };
    /// Evaluation of weights that will not change again.
    pub const FROZEN: Pass = Pass { mode: Mode::Frozen, ..Pass::EVAL };

    /// Training without drop-path.
    pub fn train(noise: u64) -> Pass {
        Pass { mode: Mode::Train, noise, ..Pass::EVAL }
    }
}

thread_local! {
    static MACS: Cell<i64> = const { Cell::new(0) };
}

fn count_macs(outputs: &Tensor, fan_in: i64) {
    MACS.set(MACS.get() + outputs.numel() as i64 * fan_in);
}

/// Multiply-adds of the convolutions and linear layers that `work` runs on this thread.
pub fn macs(work: impl FnOnce()) -> i64 {
    let before = MACS.get();
    work();
    MACS.get() - before
}

/// Layers one after another.
pub(crate) struct Chain(pub Vec<Box<dyn Layer>>);

impl Layer for Chain {
    fn forward(&self, xs: &Tensor, pass: Pass) -> Tensor {
        self.0.iter().fold(xs.shallow_clone(), |xs, layer| layer.forward(&xs, pass))
    }
}

/// The map as it is.
pub(crate) struct Identity;

impl Layer for Identity {
    fn forward(&self, xs: &Tensor, _: Pass) -> Tensor {
        xs.shallow_clone()
    }
}

/// The geometry of a convolution, the same in both directions.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConvShape {
    /// Channels of its input.
    pub c_in: i64,
    /// Channels of its output.
    pub c_out: i64,
    /// Side of its window.
    pub kernel: i64,
    /// Steps of the window.
    pub stride: i64,
    /// Zeros around the input.
    pub padding: i64,
    /// Distance between the window's places.
    pub dilation: i64,
    /// Into how many groups the channels fall.
    pub groups: i64,
}

impl ConvShape {
    /// k x k with "same" padding.
    pub const fn new(c_in: i64, c_out: i64, kernel: i64, stride: i64) -> ConvShape {
        ConvShape { c_in, c_out, kernel, stride, padding: kernel / 2, dilation: 1, groups: 1 }
    }

    /// A window for every channel alone.
    pub const fn depthwise(channels: i64, kernel: i64, stride: i64) -> ConvShape {
        ConvShape { groups: channels, ..ConvShape::new(channels, channels, kernel, stride) }
    }

    /// Numbers that one number of the output is made from.
    pub fn fan_in(self) -> i64 {
        self.c_in / self.groups * self.kernel * self.kernel
    }

    /// torch's default for convolutions and linear layers: uniform within 1/sqrt(fan_in).
    pub fn default_init(self) -> Init {
        Init::Uniform(1.0 / (self.fan_in() as f64).sqrt())
    }

    /// Kaiming normal over the fan-out (torch counts all output channels, whatever the groups), as the released CIFAR and
    /// torchvision's ImageNet ResNets start.
    pub fn fan_out_init(self) -> Init {
        Init::Normal((2.0 / (self.kernel * self.kernel * self.c_out) as f64).sqrt())
    }
}

/// A convolution, without bias unless made by `biased`.
pub(crate) struct Conv {
    /// [c_out, c_in / groups, kernel, kernel]
    pub weight: Tensor,
    /// [c_out], for the few that have one.
    pub bias: Option<Tensor>,
    /// Its geometry.
    pub shape: ConvShape,
}

impl Conv {
    /// Without a bias.
    pub fn new(scope: Scope, shape: ConvShape, init: Init) -> Conv {
        let weight = scope.var("weight", &[shape.c_out, shape.c_in / shape.groups, shape.kernel, shape.kernel], init);
        Conv { weight, bias: None, shape }
    }

    /// With a bias, as torch starts it.
    pub fn biased(scope: Scope, shape: ConvShape, init: Init) -> Conv {
        Conv::with_bias(scope, shape, init, shape.default_init())
    }

    /// With a bias started as asked.
    pub fn with_bias(scope: Scope, shape: ConvShape, init: Init, bias: Init) -> Conv {
        let bias = scope.var("bias", &[shape.c_out], bias);
        Conv { bias: Some(bias), ..Conv::new(scope, shape, init) }
    }

    fn apply(&self, xs: &Tensor, weight: &Tensor, bias: Option<&Tensor>, pass: Pass) -> Tensor {
        let ConvShape { stride: s, padding: p, dilation: d, groups, .. } = self.shape;
        let ours = bias.is_none() && weight.requires_grad() && !xs.device().is_cuda() && pass.precision == Precision::F32;
        let ys = if ours { convolution(xs, weight, self.shape) } else { xs.conv2d(weight, bias, [s, s], [p, p], [d, d], groups) };
        count_macs(&ys, self.shape.fan_in());
        ys
    }
}

impl Layer for Conv {
    fn forward(&self, xs: &Tensor, pass: Pass) -> Tensor {
        self.apply(xs, &self.weight, self.bias.as_ref(), pass)
    }
}

/// BatchNorm with PyTorch's defaults: weight 1 (tch draws it at random), bias 0, eps 1e-5, momentum 0.1.
pub(crate) struct BatchNorm {
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    batches: Tensor,
}

/// What is added to a variance before the root.
pub const BN_EPS: f64 = 1e-5;
/// How far running statistics move towards those of a batch.
pub const BN_MOMENTUM: f64 = 0.1;

impl BatchNorm {
    /// Weight 1, bias 0, running mean 0 and variance 1.
    pub fn new(scope: Scope, channels: i64) -> BatchNorm {
        let cpu = |kind| (kind, tch::Device::Cpu); // on the CPU: the scope moves them
        BatchNorm {
            weight: scope.var("weight", &[channels], Init::Const(1.0)),
            bias: scope.var("bias", &[channels], Init::Const(0.0)),
            mean: scope.buffer("running_mean", Tensor::zeros([channels], cpu(Kind::Float))),
            var: scope.buffer("running_var", Tensor::ones([channels], cpu(Kind::Float))),
            batches: scope.counter("num_batches_tracked"),
        }
    }

    /// y = xs * scale + shift in eval mode, both [channels].
    fn affine(&self) -> (Tensor, Tensor) {
        let _guard = tch::no_grad_guard();
        let scale = &self.weight / (&self.var + BN_EPS).sqrt();
        let shift = &self.bias - &self.mean * &scale;
        (scale, shift)
    }

    /// With a ReLU.
    pub fn relu(&self, xs: &Tensor, pass: Pass) -> Tensor {
        self.run(xs, Then::Relu, pass)
    }

    /// In training: one more batch was seen.
    fn count(&self) {
        let _guard = tch::no_grad_guard();
        let _ = self.batches.shallow_clone().g_add_scalar_(1);
    }

    /// Statistics of this rank alone, and numbers in f32: what kernels of ours are for.
    fn is_plain(&self, pass: Pass) -> bool {
        !pass.ranks.sync_norms() && pass.precision == Precision::F32
    }

    fn state(&self) -> norm::State<'_> {
        norm::State { weight: &self.weight, bias: &self.bias, mean: &self.mean, var: &self.var }
    }

    fn run(&self, xs: &Tensor, then: Then, pass: Pass) -> Tensor {
        let train = pass.mode == Mode::Train;
        if train {
            self.count();
        }
        if train && pass.ranks.sync_norms() {
            return then.after(self.over_ranks(xs, pass.ranks));
        }
        if train && self.is_plain(pass) && norm::serves(xs) {
            let (residual, relu) = then.parts();
            return norm::train(xs, self.state(), residual, relu, BN_MOMENTUM, BN_EPS);
        }
        let (weight, bias, mean, var) = (Some(&self.weight), Some(&self.bias), Some(&self.mean), Some(&self.var));
        then.after(xs.batch_norm(weight, bias, mean, var, train, BN_MOMENTUM, BN_EPS, true))
    }

    /// Training with the statistics of all ranks' images (`train.sync_bn`): every rank's means and variances are gathered, and the
    /// variance of the whole is the mean of the ranks' and of their means' squared distances.
    fn over_ranks(&self, xs: &Tensor, ranks: Ranks) -> Tensor {
        let kind = xs.kind();
        let xs = xs.to_kind(self.weight.kind());
        let size = xs.size();
        let others: Vec<i64> = (0..size.len() as i64).filter(|&d| d != 1).collect();
        let by_channel = |t: &Tensor| t.view([&[1, -1], vec![1; size.len() - 2].as_slice()].concat().as_slice());
        let own_mean = xs.mean_dim(others.as_slice(), false, None);
        let own_var = (&xs - by_channel(&own_mean)).square().mean_dim(others.as_slice(), false, None);
        let all = ranks.gather(&Tensor::stack(&[own_mean, own_var], 0).unsqueeze(0), 0); // [ranks, 2, C]
        let (means, vars) = (all.select(1, 0), all.select(1, 1));
        let mean = means.mean_dim(0i64, false, None);
        let var = (vars + (means - &mean).square()).mean_dim(0i64, false, None);
        tch::no_grad(|| {
            let n = (ranks.count() * xs.numel()) as f64 / size[1] as f64;
            let _ = self.mean.shallow_clone().g_mul_scalar_(1.0 - BN_MOMENTUM).g_add_(&(mean.detach() * BN_MOMENTUM));
            let unbiased = var.detach() * (n / (n - 1.0).max(1.0));
            let _ = self.var.shallow_clone().g_mul_scalar_(1.0 - BN_MOMENTUM).g_add_(&(unbiased * BN_MOMENTUM));
        });
        let scale = &self.weight * (var + BN_EPS).rsqrt();
        ((xs - by_channel(&mean)) * by_channel(&scale) + by_channel(&self.bias)).to_kind(kind)
    }
}

impl Layer for BatchNorm {
    fn forward(&self, xs: &Tensor, pass: Pass) -> Tensor {
        self.run(xs, Then::Nothing, pass)
    }
}

/// A convolution whose output goes into one BatchNorm and nowhere else: frozen networks fold the second into the first.
pub(crate) struct ConvBn {
    conv: Conv,
    bn: BatchNorm,
    frozen: RefCell<Option<Frozen>>,
}

/// Convolution and BatchNorm as one convolution with a bias.
enum Frozen {
    /// With what follows it in one pass over memory.
    Fused(Fused),
    Folded {
        weight: Tensor,
        bias: Tensor,
    },
}

impl ConvBn {
    /// Two scopes, because the pair is named by the network (`conv1`/`bn1`, `downsample.0`/`.1`, WRN's `conv1`/`bn2`).
    pub fn new(conv: Scope, bn: Scope, shape: ConvShape, init: Init) -> ConvBn {
        ConvBn::of(Conv::new(conv, shape, init), bn)
    }

    /// Of a convolution that has a bias (HCGNet's gates, VGG).
    pub fn of(conv: Conv, bn: Scope) -> ConvBn {
        ConvBn { bn: BatchNorm::new(bn, conv.shape.c_out), conv, frozen: RefCell::new(None) }
    }

    /// With a ReLU in place.
    pub fn relu(&self, xs: &Tensor, pass: Pass) -> Tensor {
        self.run(xs, Then::Relu, pass)
    }

    /// ReLU(BN(conv(xs)) + shortcut), the end of a residual block; both in place.
    pub fn add_relu(&self, xs: &Tensor, shortcut: &Tensor, pass: Pass) -> Tensor {
        self.run(xs, Then::AddRelu(shortcut), pass)
    }

    fn run(&self, xs: &Tensor, then: Then, pass: Pass) -> Tensor {
        match pass.mode {
            Mode::Train if self.conv.bias.is_none() && self.bn.is_plain(pass) && conv_norm::serves(xs, self.conv.shape) => {
                self.bn.count();
                let (residual, relu) = then.parts();
                let ys = conv_norm::train(xs, &self.conv.weight, self.bn.state(), residual, relu, BN_MOMENTUM, BN_EPS);
                count_macs(&ys, self.conv.shape.fan_in());
                ys
            }
            Mode::Train | Mode::Eval => self.bn.run(&self.conv.forward(xs, pass), then, pass),
            Mode::Frozen => match self.frozen.borrow_mut().get_or_insert_with(|| self.freeze(xs)) {
                Frozen::Folded { weight, bias } => then.after(self.conv.apply(xs, weight, Some(bias), pass)),
                Frozen::Fused(fused) => {
                    let ys = fused.apply(xs, then);
                    count_macs(&ys, self.conv.shape.fan_in());
                    ys
                }
            },
        }
    }

    fn freeze(&self, xs: &Tensor) -> Frozen {
        let (scale, shift) = self.bn.affine();
        let bias = match &self.conv.bias {
            Some(bias) => bias.detach() * &scale + shift,
            None => shift,
        };
        let weight = self.conv.weight.detach() * scale.view([-1, 1, 1, 1]);
        match Fused::new(xs, &weight, &bias, self.conv.shape) {
            Some(fused) => Frozen::Fused(fused),
            None => Frozen::Folded { weight, bias },
        }
    }
}

impl Layer for ConvBn {
    fn forward(&self, xs: &Tensor, pass: Pass) -> Tensor {
        self.run(xs, Then::Nothing, pass)
    }
}

/// ConvBn and a ReLU.
pub(crate) struct ConvBnRelu(pub ConvBn);

impl Layer for ConvBnRelu {
    fn forward(&self, xs: &Tensor, pass: Pass) -> Tensor {
        self.0.relu(xs, pass)
    }
}

/// BatchNorm and a ReLU.
pub(crate) struct BnRelu(pub BatchNorm);

impl Layer for BnRelu {
    fn forward(&self, xs: &Tensor, pass: Pass) -> Tensor {
        self.0.relu(xs, pass)
    }
}

/// Max-pooling 2 x 2 with stride 2, as between the blocks of VGG.
pub(crate) struct MaxPool2;

impl Layer for MaxPool2 {
    fn forward(&self, xs: &Tensor, _: Pass) -> Tensor {
        xs.max_pool2d([2, 2], [2, 2], [0, 0], [1, 1], false)
    }
}

/// Max-pooling 3 x 3 with stride 2, as after the stems for large images.
pub(crate) struct MaxPool;

impl Layer for MaxPool {
    fn forward(&self, xs: &Tensor, _: Pass) -> Tensor {
        xs.max_pool2d([3, 3], [2, 2], [1, 1], [1, 1], false)
    }
}

/// A linear layer.
pub struct Linear {
    /// [d_out, d_in]
    pub weight: Tensor,
    /// `[d_out]`, for those that have one.
    pub bias: Option<Tensor>,
}

impl Linear {
    /// torch's default start: weight and bias uniform within 1/sqrt(d_in).
    pub fn new(scope: Scope, d_in: i64, d_out: i64) -> Linear {
        let init = Init::Uniform(1.0 / (d_in as f64).sqrt());
        Linear::with_init(scope, d_in, d_out, init, Some(init))
    }

    /// torch's default weight, bias 0: how the released WRNs and the branches of the CIFAR ResNets start.
    pub fn zero_bias(scope: Scope, d_in: i64, d_out: i64) -> Linear {
        Linear::with_init(scope, d_in, d_out, Init::Uniform(1.0 / (d_in as f64).sqrt()), Some(Init::Const(0.0)))
    }

    /// Started as asked; without a bias where none is given.
    pub fn with_init(scope: Scope, d_in: i64, d_out: i64, weight: Init, bias: Option<Init>) -> Linear {
        Linear { weight: scope.var("weight", &[d_out, d_in], weight), bias: bias.map(|init| scope.var("bias", &[d_out], init)) }
    }
}

impl Linear {
    /// Linear layers of one output width, an input each: N x [B, d_in] -> [N, B, d_out]. On a device, layers of one shape are one batched
    /// product: starting a kernel costs more there than such small ones compute.
    pub(crate) fn each(layers: &[&Linear], xs: &[Tensor]) -> Tensor {
        let shape = |layer: &Linear| (layer.weight.size(), layer.bias.is_some());
        let alike = layers.windows(2).all(|two| shape(two[0]) == shape(two[1]));
        if !alike || !xs.first().is_some_and(|x| x.device().is_cuda()) {
            let ys: Vec<Tensor> = layers.iter().zip(xs).map(|(layer, x)| layer.forward(x, Pass::EVAL)).collect();
            return Tensor::stack(&ys, 0);
        }
        Linear::at_once(layers, &Tensor::stack(xs, 0))
    }

    /// Layers of one shape on one tensor of inputs, [N, B, d_in], as one batched product.
    pub(crate) fn at_once(layers: &[&Linear], xs: &Tensor) -> Tensor {
        let weights = Tensor::stack(&layers.iter().map(|layer| &layer.weight).collect::<Vec<_>>(), 0).transpose(1, 2);
        let biases: Vec<&Tensor> = layers.iter().filter_map(|layer| layer.bias.as_ref()).collect();
        let ys = if biases.is_empty() { xs.bmm(&weights) } else { Tensor::stack(&biases, 0).unsqueeze(1).baddbmm(xs, &weights, 1.0, 1.0) };
        count_macs(&ys, weights.size()[1]);
        ys
    }
}

impl Layer for Linear {
    fn forward(&self, xs: &Tensor, _: Pass) -> Tensor {
        let ys = xs.linear(&self.weight, self.bias.as_ref());
        count_macs(&ys, self.weight.size()[1]);
        ys
    }
}

/// Global average pooling: [B, C, H, W] -> [B, C].
pub(crate) fn pool(map: &Tensor) -> Tensor {
    map.mean_dim([2i64, 3].as_slice(), false, None)
}
