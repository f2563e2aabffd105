//! What a device computes against the CPU: the bricks of networks one by one, then networks, then training that stops and goes on. The
//! CPU's numbers are taken in f64, so that the error is the device's own.

use std::rc::Rc;
use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use super::{Check, relative};
use crate::data::{Batch, Loader, Mix, Pixels, Raw, Resident, Split, Transform};
use crate::error::Result;
use crate::extractor::Extractor;
use crate::methods::{self, Clock, Task};
use crate::nets::{self, Network, autocast};
use crate::optim::grads;
use crate::params::Scope;
use crate::recipe::{Recipe, Train};
use crate::rng;
use crate::system::device::Precision;
use crate::system::ranks::Ranks;
use crate::train::step::Engine;

/// f32 on the device against f64 on the CPU. TF32, which rounds factors to 1e-3, is far above it.
const LAYER_TOLERANCE: f64 = 1e-5;
/// Sums of a whole network in f32.
const NETWORK_TOLERANCE: f64 = 1e-4;
/// bf16 has 8 bits, f16 has 11.
const AUTOCAST: [(Precision, Kind, &str, f64); 2] =
    [(Precision::Bf16, Kind::BFloat16, "bf16", 2e-2), (Precision::F16, Kind::Half, "f16", 4e-3)];
/// Two steps of training, the first with a meta step, in f64: in f32 two right devices are 1e-2 apart after them, because BatchNorm on
/// batches of eight amplifies rounding.
const TRAINED_TOLERANCE: f64 = 1e-7;

/// Every check of a device that is not the CPU.
pub(super) fn checks(device: Device) -> Result<Vec<Check>> {
    let mut found = vec![];
    let mut add = |source: &str, precision: &'static str, term: &str, error: f64, tolerance: f64| {
        found.push(Check { source: source.into(), mode: "cpu".into(), precision, term: term.into(), error, tolerance });
    };
    for (name, brick) in bricks() {
        for (term, error) in brick.errors(device) {
            add("layer", "f32", &format!("{name}, {term}"), error, LAYER_TOLERANCE);
        }
    }
    for (precision, kind, name, tolerance) in AUTOCAST {
        let brick = Brick { inputs: vec![wave(&[4, 16, 9, 9], 0.9), wave(&[32, 16, 3, 3], 0.7)], work: convolution(1, 1) };
        let wanted = (brick.work)(&brick.inputs);
        let scope = autocast(precision, device);
        let inputs: Vec<Tensor> = brick.inputs.iter().map(|t| t.to_kind(Kind::Float).to_device(device)).collect();
        let got = (brick.work)(&inputs);
        drop(scope);
        let error = if got.kind() == kind { relative(&got, &wanted) } else { f64::INFINITY };
        add("autocast", name, "convolution", error, tolerance);
    }
    for (term, error) in mixed(device)? {
        add("augmentation", "f32", &term, error, LAYER_TOLERANCE);
    }
    if let Some(error) = drawn(device)? {
        add("augmentation", "f32", "crop, flip, erasing and normalisation", error, LAYER_TOLERANCE);
    }
    for (term, error) in extracted(device)? {
        add("extractor", "f32", &term, error, NETWORK_TOLERANCE);
    }
    // MPS has no f64.
    if device != Device::Mps {
        add("training", "f64", "two steps", trained(device, Kind::Double)?.from_cpu, TRAINED_TOLERANCE);
    }
    add("training", "f32", "stopped after one step and resumed", trained(device, Kind::Float)?.resumed, NETWORK_TOLERANCE);
    Ok(found)
}

/// Numbers without a pattern, in f64 on the CPU.
fn wave(size: &[i64], pace: f64) -> Tensor {
    let count: i64 = size.iter().product();
    ((Tensor::arange(count, (Kind::Double, Device::Cpu)) + 1.0) * pace).sin().view(size)
}

type Work = Box<dyn Fn(&[Tensor]) -> Tensor>;

/// Inputs, and what is computed from them.
struct Brick {
    inputs: Vec<Tensor>,
    work: Work,
}

impl Brick {
    /// The answer and the gradient of every input.
    fn all(&self, device: Device, kind: Kind) -> Vec<Tensor> {
        let place = |t: &Tensor| t.to_kind(kind).to_device(device).detach().set_requires_grad(true);
        let inputs: Vec<Tensor> = self.inputs.iter().map(place).collect();
        let answer = (self.work)(&inputs);
        let weights = wave(&answer.size(), 1.3).to_kind(kind).to_device(device);
        let mut all = grads(&(&answer * weights).sum(None), &inputs, false);
        all.insert(0, answer);
        all
    }

    fn errors(&self, device: Device) -> Vec<(String, f64)> {
        let (wanted, got) = (self.all(Device::Cpu, Kind::Double), self.all(device, Kind::Float));
        let term = |i: usize| if i == 0 { "forward".to_string() } else { format!("gradient {i}") };
        wanted.iter().zip(&got).enumerate().map(|(i, (wanted, got))| (term(i), relative(got, wanted))).collect()
    }
}

fn convolution(stride: i64, groups: i64) -> Work {
    Box::new(move |x| {
        let padding = x[1].size()[2] / 2;
        x[0].conv2d(&x[1], None::<Tensor>, [stride; 2], [padding; 2], [1, 1], groups)
    })
}

fn bricks() -> Vec<(&'static str, Brick)> {
    let conv = |c_in: i64, c_out: i64, kernel: i64, stride: i64, groups: i64| Brick {
        inputs: vec![wave(&[4, c_in, 9, 9], 0.9), wave(&[c_out, c_in / groups, kernel, kernel], 0.7)],
        work: convolution(stride, groups),
    };
    let channels = || vec![wave(&[4, 8, 5, 5], 0.9), wave(&[8], 0.7), wave(&[8], 0.4)];
    let batch_norm: Work = Box::new(|x| {
        let (mean, var) = (x[1].detach().zeros_like(), x[1].detach().ones_like());
        let normed = x[0].batch_norm(Some(&x[1]), Some(&x[2]), Some(&mean), Some(&var), true, 0.1, 1e-5, true);
        // The running statistics are compared with the answer.
        normed + (mean + var).view([1, -1, 1, 1])
    });
    let layer_norm: Work = Box::new(|x| x[0].layer_norm([8], Some(&x[1]), Some(&x[2]), 1e-5, true));
    let matmul: Work = Box::new(|x| (x[0].matmul(&x[1]) / 16).softmax(-1, None)); // as attention divides by a root
    let pool: Work = Box::new(|x| x[0].avg_pool2d([2, 2], [2, 2], [0, 0], false, true, None::<i64>) + x[0].adaptive_avg_pool2d([1, 1]));
    vec![
        ("convolution 3x3", conv(16, 32, 3, 1, 1)),
        ("convolution 3x3 of stride 2", conv(16, 32, 3, 2, 1)),
        ("convolution 1x1", conv(16, 32, 1, 1, 1)),
        ("convolution in 4 groups", conv(16, 32, 3, 1, 4)),
        ("depthwise convolution", conv(16, 16, 3, 1, 16)),
        ("BatchNorm", Brick { inputs: channels(), work: batch_norm }),
        ("LayerNorm", Brick { inputs: vec![wave(&[6, 8], 0.9), wave(&[8], 0.7), wave(&[8], 0.4)], work: layer_norm }),
        ("matrix product and softmax", Brick { inputs: vec![wave(&[64, 256], 0.9), wave(&[256, 64], 0.7)], work: matmul }),
        ("pooling", Brick { inputs: vec![wave(&[4, 8, 4, 4], 0.9)], work: pool }),
    ]
}

/// Mixup and CutMix, in the same draws.
fn mixed(device: Device) -> Result<Vec<(String, f64)>> {
    let images = wave(&[6, 3, 8, 8], 0.9).to_kind(Kind::Float);
    let labels = Tensor::from_slice(&[0i64, 0, 1, 1, 2, 2]);
    let mut errors = vec![];
    for (name, mix) in [("mixup", Mix { mixup: 0.8, cutmix: 0.0 }), ("CutMix", Mix { mixup: 0.0, cutmix: 1.0 })] {
        let on = |device: Device| -> Result<Tensor> {
            let (images, labels) = (images.to_device(device), labels.to_device(device));
            let mixed = mix.apply(&[images], &labels, &mut rng::stream(1, "selftest", &[]))?;
            let targets = mixed.targets(&labels, 3);
            Ok(Tensor::cat(&[mixed.views[0].flatten(0, -1), targets.flatten(0, -1)], 0))
        };
        errors.push((name.to_string(), relative(&on(device)?, &on(Device::Cpu)?)));
    }
    Ok(errors)
}

/// Images that live on the device as bytes, augmented there, in the draws of the host. None where images never live.
fn drawn(device: Device) -> Result<Option<f64>> {
    let (side, images) = (12, 20);
    let data: Vec<u8> = (0..images * side * side * 3).map(|i| (i * 37 % 251) as u8).collect();
    let pixels = Pixels::Memory(Arc::new(Raw { height: side, width: side, data }));
    let split = Split::new(pixels, (0..images as i64).map(|i| i % 4).collect());
    let transform = Transform { erase: 0.7, ..Transform::pad_crop(side, [0.5, 0.4, 0.3], [0.2, 0.3, 0.25]) };
    let Some(resident) = Resident::wanted(None, &split, &transform, device)?.map(Rc::new) else { return Ok(None) };
    let order: Vec<Vec<u32>> = (0..2).map(|b| (0..10).map(|i| (b * 10 + 7 * i) % images as u32).collect()).collect();
    let host = Loader::new(&split, order.clone(), transform.clone(), 2, 5, 1, 0);
    let mut there = Loader::of_rank(&split, order, transform, 2, 5, 1, 0, Ranks::ALONE, device, Some(resident));
    let mut worst = 0f64;
    for wanted in host {
        let (wanted, got) = (wanted?, there.next_on(device).transpose()?);
        let views = got.map(|placed| placed.batch.views).unwrap_or_default();
        let errors = wanted.views.iter().enumerate().map(|(v, wanted)| views.get(v).map_or(f64::INFINITY, |got| relative(got, wanted)));
        worst = errors.fold(worst, f64::max);
    }
    Ok(Some(worst))
}

/// Features and logits of small networks with plain and with grouped convolutions, as measurements take them.
fn extracted(device: Device) -> Result<Vec<(String, f64)>> {
    let mut errors = vec![];
    for name in ["resnet8", "shufflenet_v2_x1_0_cifar"] {
        let arch = nets::find(name)?;
        let images = wave(&[4, 3, 32, 32], 0.9);
        let answer = |device: Device, kind: Kind| -> Result<(Tensor, Tensor)> {
            let scope = Scope::root(5, device, kind);
            let _network = Network::new(arch, &scope, 10);
            let answer = Extractor::new(arch, &scope.params(), None, 10, 1).extract(&images, false)?;
            Ok((answer.features.shallow_clone(), answer.logit().shallow_clone()))
        };
        let ((wanted, wanted_logits), (got, logits)) = (answer(Device::Cpu, Kind::Float)?, answer(device, Kind::Float)?);
        errors.push((format!("{name}, features"), relative(&got, &wanted.to_kind(Kind::Double))));
        errors.push((format!("{name}, logits"), relative(&logits, &wanted_logits.to_kind(Kind::Double))));
    }
    Ok(errors)
}

struct Trained {
    /// The weights of the device after two steps against the CPU's.
    from_cpu: f64,
    /// A second step from a state that was saved and restored elsewhere, against the second step that was not interrupted.
    resumed: f64,
}

fn trained(device: Device, kind: Kind) -> Result<Trained> {
    let archs = [nets::find("resnet8")?, nets::find("resnet8")?];
    let labels: Vec<i64> = (0..40).map(|i| i % 4).collect();
    let engine = |device: Device, seed: u64| -> Result<Engine> {
        let recipe = Recipe { train: Train { batch: 8, seed, ..Train::default() }, ..Recipe::default() };
        let task = Task { kind, ..Task::new(&recipe, &archs, 4, &labels, device) };
        let method = (methods::find("l_mcl")?.build)(&task, toml::Table::new())?;
        Ok(Engine::of(&task, method))
    };
    let step = |engine: &mut Engine, device: Device, step: usize| -> Result<()> {
        let images = wave(&[8, 3, 16, 16], 0.37 + 0.11 * step as f64).to_kind(kind);
        let index = Tensor::from_slice(&[0i64, 4, 1, 5, 2, 6, 3, 7]);
        let batch = Batch { views: vec![images], labels: index.remainder(4), index, noise: step as u64 };
        engine.step(&[batch.to_device(device)], Clock { epoch: 0, batch: step, step, lr: 0.05, seed: 7 }, None).map(drop)
    };
    let state = |engine: &Engine| -> Vec<Tensor> {
        engine.state().iter().map(|(_, t)| t.detach().to_device(Device::Cpu).to_kind(Kind::Double)).collect()
    };
    let apart = |a: &[Tensor], b: &[Tensor]| a.iter().zip(b).map(|(a, b)| relative(a, b)).fold(0.0, f64::max);
    let (mut on_cpu, mut whole, mut resumed) = (engine(Device::Cpu, 1)?, engine(device, 1)?, engine(device, 2)?);
    step(&mut on_cpu, Device::Cpu, 0)?;
    step(&mut whole, device, 0)?;
    tch::no_grad(|| {
        for ((_, live), (_, saved)) in resumed.state().iter().zip(whole.state()) {
            live.shallow_clone().copy_(&saved.to_device(Device::Cpu));
        }
    });
    step(&mut on_cpu, Device::Cpu, 1)?;
    step(&mut whole, device, 1)?;
    step(&mut resumed, device, 1)?;
    let weights = |engine: &Engine| -> Vec<Tensor> {
        engine.theta.tensors().iter().map(|t| t.detach().to_device(Device::Cpu).to_kind(Kind::Double)).collect()
    };
    Ok(Trained { from_cpu: apart(&weights(&whole), &weights(&on_cpu)), resumed: apart(&state(&resumed), &state(&whole)) })
}
