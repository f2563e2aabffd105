//! Every architecture of the registry: shapes, gradients, modes of BatchNorm, starting values, names. A new architecture needs no edit here:
//! what cannot be known from the registry says in its assertion what to add. Numbers of the released classes are in nets/released.rs.

#[path = "nets/released.rs"]
mod released;

use mcl::nets::layers::{Mode, Pass};
use mcl::nets::{self, Arch, Branch, Network, Norm, Outputs};
use mcl::params::{Params, Scope};
use tch::{Device, Kind, Tensor};

/// Tests run side by side: more threads inside each would only wait for one another.
fn one_thread() {
    tch::set_num_threads(1);
}

struct Built {
    net: Network,
    branches: Vec<Branch>,
    params: Params,
    aux: Params,
}

fn build(arch: &Arch, classes: i64, kind: Kind) -> Built {
    let (net, params) = Network::build(arch, classes, 7, Device::Cpu, kind);
    let scope = Scope::root(8, Device::Cpu, kind);
    let branches = Branch::all(arch, &scope, classes);
    Built { net, branches, params, aux: scope.params() }
}

fn all_outputs(built: &Built, images: &Tensor, pass: Pass) -> Outputs {
    built.net.answer(built.net.maps(images, pass), &built.branches, pass)
}

fn wave(batch: i64, side: i64) -> Tensor {
    let values: Vec<f64> = (0..batch * 3 * side * side).map(|j| (0.01 * j as f64).sin()).collect();
    Tensor::from_slice(&values).view([batch, 3, side, side])
}

/// What the paper and torchvision have: the map after each stage of one image of the usual size, (channels, side), the pooled width last.
/// An architecture that is not listed is held to what it says of itself (`Arch::maps`), as these are too.
#[rustfmt::skip]
const TAPS: &[(&str, &[(i64, i64)], i64)] = &[
    ("resnet8", &[(16, 32), (32, 16), (64, 8)], 64),
    ("resnet20", &[(16, 32), (32, 16), (64, 8)], 64),
    ("resnet32", &[(16, 32), (32, 16), (64, 8)], 64),
    ("resnet56", &[(16, 32), (32, 16), (64, 8)], 64),
    ("resnet110", &[(64, 32), (128, 16), (256, 8)], 256),
    ("wrn_16_2", &[(32, 32), (64, 16), (128, 8)], 128),
    ("wrn_40_2", &[(32, 32), (64, 16), (128, 8)], 128),
    ("wrn_28_4", &[(64, 32), (128, 16), (256, 8)], 256),
    ("shufflenet_v2_x0_5_cifar", &[(48, 16), (96, 8), (192, 4)], 1024),
    ("shufflenet_v2_x1_0_cifar", &[(116, 16), (232, 8), (464, 4)], 1024),
    ("shufflenet_v2_x0_5", &[(24, 56), (48, 28), (96, 14), (192, 7)], 1024),
    ("shufflenet_v2_x1_0", &[(24, 56), (116, 28), (232, 14), (464, 7)], 1024),
    ("hcgnet_a1", &[(60, 16), (126, 8), (414, 8)], 414),
    ("hcgnet_a2", &[(120, 16), (204, 8), (716, 8)], 716),
    ("resnet18", &[(64, 56), (128, 28), (256, 14), (512, 7)], 512),
    ("resnet34", &[(64, 56), (128, 28), (256, 14), (512, 7)], 512),
    ("resnet50", &[(256, 56), (512, 28), (1024, 14), (2048, 7)], 2048),
    ("swin_t", &[(96, 56), (192, 28), (384, 14), (768, 7)], 768),
    ("swin_s", &[(96, 56), (192, 28), (384, 14), (768, 7)], 768),
    ("resnet110_basic", &[(16, 32), (32, 16), (64, 8)], 64),
    ("resnet32x4", &[(64, 32), (128, 16), (256, 8)], 256),
    ("wrn_40_1", &[(16, 32), (32, 16), (64, 8)], 64),
    ("vgg13", &[(128, 16), (256, 8), (512, 4), (512, 4)], 512),
    ("mobile_half", &[(12, 16), (16, 8), (48, 4), (160, 2)], 1280),
    ("shuffle_v1", &[(240, 16), (480, 8), (960, 4)], 960),
    ("shuffle_v2", &[(116, 16), (232, 8), (464, 4)], 1024),
];

#[test]
fn maps_features_and_logits_have_the_shapes_of_the_paper() {
    one_thread();
    let _guard = tch::no_grad_guard();
    for (name, taps, dim) in TAPS {
        let arch = nets::find(name).unwrap();
        let said: Vec<(i64, i64)> = arch.maps.iter().map(|(channels, stride)| (*channels, arch.image_size / stride)).collect();
        assert_eq!((said.as_slice(), arch.dim), (*taps, *dim), "{name}");
    }
    for arch in nets::archs() {
        let (scope, aux) = (Scope::blank(Device::Cpu, Kind::Float), Scope::blank(Device::Cpu, Kind::Float));
        let (net, branches) = (Network::new(arch, &scope, 7), Branch::all(arch, &aux, 7));
        let image = Tensor::zeros([1, 3, arch.image_size, arch.image_size], (Kind::Float, Device::Cpu));
        let outs = net.answer(net.maps(&image, Pass::EVAL), &branches, Pass::EVAL);
        let maps: Vec<Vec<i64>> = outs.maps.iter().map(|m| m.size()).collect();
        let said: Vec<Vec<i64>> =
            arch.maps.iter().map(|(c, stride)| vec![1, *c, arch.image_size / stride, arch.image_size / stride]).collect();
        assert_eq!(maps, said, "{}: `maps` in its file of src/nets should say what its stages give", arch.name);
        assert_eq!(arch.depth, arch.maps.len(), "{}", arch.name);
        let side = said[arch.depth - 1][2];
        assert_eq!(outs.pre_pool.size(), [1, arch.dim, side, side], "{}", arch.name);
        assert!(outs.feats.len() == arch.depth && outs.feats.iter().all(|f| f.size() == [1, arch.dim]), "{}", arch.name);
        assert!(outs.logits.len() == arch.depth && outs.logits.iter().all(|z| z.size() == [1, 7]), "{}", arch.name);
    }
}

#[test]
fn other_image_sizes_work() {
    one_thread();
    let _guard = tch::no_grad_guard();
    for (name, size) in [
        ("resnet20", 40),
        ("wrn_16_2", 64),
        ("shufflenet_v2_x0_5_cifar", 48),
        ("hcgnet_a1", 24),
        ("resnet18", 96),
        ("shufflenet_v2_x0_5", 160),
        ("swin_t", 104),
        ("vgg8", 48),
        ("mobile_half", 96),
        ("shuffle_v1", 40),
    ] {
        let arch = nets::find(name).unwrap();
        let built = build(arch, 3, Kind::Float);
        let outs = all_outputs(&built, &Tensor::ones([2, 3, size, size], (Kind::Float, Device::Cpu)), Pass::EVAL);
        for (feat, logits) in outs.feats.iter().zip(&outs.logits) {
            assert_eq!((feat.size(), logits.size()), (vec![2, arch.dim], vec![2, 3]), "{name} at {size}");
        }
    }
}

#[test]
fn every_trained_variable_gets_a_gradient() {
    one_thread();
    for arch in nets::archs() {
        let built = build(arch, 5, Kind::Float);
        let side = if arch.image_size == 32 { 16 } else { 64 };
        let images = wave(4, side).to_kind(Kind::Float) + Tensor::arange(4, (Kind::Float, Device::Cpu)).view([4, 1, 1, 1]).sin();
        let labels = Tensor::from_slice(&[0i64, 1, 2, 3]);
        let outs = all_outputs(&built, &images, Pass::train(1));
        let loss = outs.logits.iter().map(|z| z.cross_entropy_for_logits(&labels)).reduce(|a, b| a + b).unwrap();
        loss.backward();
        // A shift before a BatchNorm or a softmax over positions changes nothing: these biases of HCGNet and VGG have no slope to find.
        let flat = |name: &str| {
            let before: &[&str] = match arch.family {
                "hcgnet" => &["fc1.", "fcall.", "global_"],
                "vgg_cifar" => &[".0.bias", ".3.bias"],
                _ => &[],
            };
            name.ends_with(".bias") && before.iter().any(|part| name.contains(part))
        };
        for (name, var) in built.params.vars.iter().chain(&built.aux.vars) {
            let grad = var.grad();
            assert!(grad.defined(), "{} {name} has no gradient", arch.name);
            let size = grad.abs().max().double_value(&[]);
            assert!(size.is_finite() && (size > 0.0 || flat(name)), "{} {name}: largest gradient {size}", arch.name);
        }
    }
}

#[test]
fn batchnorm_moves_in_training_only() {
    one_thread();
    for name in [
        "resnet8",
        "wrn_16_2",
        "shufflenet_v2_x0_5_cifar",
        "hcgnet_a1",
        "resnet18",
        "shufflenet_v2_x0_5",
        "vgg8",
        "mobile_half",
        "shuffle_v1",
    ] {
        let arch = nets::find(name).unwrap();
        let (net, params) = Network::build(arch, 5, 3, Device::Cpu, Kind::Float);
        let images = wave(2, 32).to_kind(Kind::Float) + Tensor::from_slice(&[1f32, -0.5]).view([2, 1, 1, 1]);
        let _guard = tch::no_grad_guard();
        let before = params.buffers.iter().map(|(_, t)| t.copy()).collect::<Vec<_>>();
        for (pass, moves) in [(Pass::EVAL, false), (Pass::FROZEN, false), (Pass::train(0), true)] {
            net.forward(&images, pass);
            for ((name, now), before) in params.buffers.iter().zip(&before) {
                if name.ends_with("num_batches_tracked") {
                    assert_eq!(now.int64_value(&[]) == 1, moves, "{} {name} after {pass:?}", arch.name);
                } else if !moves {
                    assert_eq!(now, before, "{} {name} after {pass:?}", arch.name);
                } else {
                    assert_ne!(now, before, "{} {name} after {pass:?}", arch.name);
                }
            }
        }
    }
}

#[test]
fn folding_batchnorm_changes_nothing_but_rounding() {
    one_thread();
    let _guard = tch::no_grad_guard();
    for arch in nets::archs().filter(|arch| !["resnet50", "resnet34", "swin_s"].contains(&arch.name)) {
        let (net, params) = Network::build(arch, 5, 3, Device::Cpu, Kind::Float);
        // Statistics as far from 0 and 1 as training leaves them.
        for (name, t) in params.all() {
            let n = t.numel();
            let values = |f: fn(f32) -> f32| Tensor::from_slice(&(0..n).map(|i| f(i as f32)).collect::<Vec<_>>());
            let mut t = t.shallow_clone();
            if name.ends_with("running_mean") {
                t.copy_(&values(|i| 0.2 * (1.3 * i).sin()));
            } else if name.ends_with("running_var") {
                t.copy_(&values(|i| 0.8 + 0.4 * (0.9 * i).cos()));
            }
        }
        let side = arch.image_size.min(96);
        let images = wave(3, side).to_kind(Kind::Float);
        let (eval, frozen) = (net.forward(&images, Pass::EVAL), net.forward(&images, Pass { mode: Mode::Frozen, ..Pass::EVAL }));
        for (a, b) in
            eval.maps.iter().chain(&eval.feats).chain(&eval.logits).zip(frozen.maps.iter().chain(&frozen.feats).chain(&frozen.logits))
        {
            let difference = ((a - b).abs().max() / a.abs().max()).double_value(&[]);
            assert!(difference < 1e-5, "{}: {difference}", arch.name);
        }
    }
}

/// Mean and deviation of each starting value against the distribution the released code or torchvision draws it from.
#[test]
fn starting_values_have_the_right_statistics() {
    one_thread();
    const KNOWN: &[&str] =
        &["resnet_cifar", "wrn", "shufflenet_v2", "hcgnet", "resnet_imagenet", "swin", "vgg_cifar", "mobile_half", "shufflenet_v1"];
    // resnet34 and swin_s start as their smaller kin: the same code, many more numbers to draw.
    for arch in nets::archs().filter(|arch| !["resnet34", "swin_s"].contains(&arch.name)) {
        let built = build(arch, 100, Kind::Float);
        assert!(
            KNOWN.contains(&arch.family),
            "{}: family {} is new here: say in `want` below how it starts (torch's defaults need no line) and add it to KNOWN",
            arch.name,
            arch.family
        );
        for (in_branch, name, var) in
            built.params.vars.iter().map(|(n, t)| (false, n, t)).chain(built.aux.vars.iter().map(|(n, t)| (true, n, t)))
        {
            let size = var.size();
            let n = var.numel() as f64;
            let fan_in = n / size[0] as f64;
            let is_norm = size.len() == 1 && {
                let owner = &name[..name.rfind('.').unwrap() + 1];
                let buffers = if in_branch { &built.aux.buffers } else { &built.params.buffers };
                buffers.iter().any(|(n, _)| *n == format!("{owner}running_mean"))
                    || (arch.norm == Norm::Layer
                        && (owner.contains("norm") || owner.ends_with("features.0.2.") || (in_branch && owner.matches('.').count() == 2)))
            };
            let leaf = name.rsplit('.').next().unwrap();
            // The layer whose bias this is has fan_in inputs.
            let owner_fan_in = || {
                let weight = format!("{}weight", &name[..name.rfind('.').unwrap() + 1]);
                let (_, w) = built.params.vars.iter().chain(&built.aux.vars).find(|(n, _)| *n == weight).unwrap();
                w.numel() as f64 / w.size()[0] as f64
            };
            enum Want {
                Exactly(f64),
                Normal(f64),
                Uniform(f64),
            }
            let want = match (arch.family, size.len(), leaf) {
                _ if is_norm => Want::Exactly(if leaf == "weight" { 1.0 } else { 0.0 }),
                ("wrn" | "vgg_cifar" | "mobile_half", 1, _) => Want::Exactly(0.0),
                ("vgg_cifar" | "mobile_half", 2, _) => Want::Normal(0.01),
                ("resnet_cifar", 1, _) if in_branch => Want::Exactly(0.0),
                ("swin", 1, _) if name != "features.0.0.bias" => Want::Exactly(0.0),
                (_, 1, _) => Want::Uniform(1.0 / owner_fan_in().sqrt()),
                ("swin", 2, _) => Want::Normal(0.02),
                ("resnet_cifar" | "resnet_imagenet" | "wrn" | "vgg_cifar" | "mobile_half", 4, _) => {
                    Want::Normal((2.0 / (size[2] * size[3] * size[0]) as f64).sqrt())
                }
                _ => Want::Uniform(1.0 / fan_in.sqrt()),
            };
            let var = var.detach().to_kind(Kind::Double);
            let mean = var.mean(Kind::Double).double_value(&[]);
            let deviation = (var.square().mean(Kind::Double)).double_value(&[]).sqrt();
            let largest = var.abs().max().double_value(&[]);
            let at = format!("{} {name} {size:?}: mean {mean}, deviation {deviation}, largest {largest}", arch.name);
            // Five deviations of the estimate: of a mean, sigma / sqrt(n); of a normal's deviation, sigma / sqrt(2 n), of a uniform's less.
            let fits =
                |sigma: f64| mean.abs() < 5.0 * sigma / n.sqrt() && (n < 50.0 || (deviation / sigma - 1.0).abs() < 5.0 / (2.0 * n).sqrt());
            match want {
                Want::Exactly(value) => assert!(var.eq(value).all().int64_value(&[]) == 1, "{at}, should be {value}"),
                Want::Normal(sigma) => assert!(fits(sigma) && (n < 1000.0 || largest > 2.5 * sigma), "{at}, should be normal {sigma}"),
                Want::Uniform(bound) => {
                    assert!(fits(bound / 3f64.sqrt()) && largest <= bound * 1.000001, "{at}, should be uniform {bound}")
                }
            }
        }
    }
}

#[test]
fn no_name_is_doubled_or_renamed() {
    one_thread();
    for arch in nets::archs() {
        let (scope, aux) = (Scope::blank(Device::Cpu, Kind::Float), Scope::blank(Device::Cpu, Kind::Float));
        Network::new(arch, &scope, 10);
        Branch::all(arch, &aux, 10);
        for named in [scope.params().named(), aux.params().named()] {
            let mut names: Vec<&str> = named.iter().map(|(n, _)| n.as_str()).collect();
            assert!(names.is_sorted() && names.iter().all(|n| !n.contains("__")), "{}", arch.name);
            names.dedup();
            assert_eq!(names.len(), named.len(), "{}", arch.name);
        }
        let classifier = format!("{}.weight", arch.classifier);
        assert!(scope.params().vars.iter().any(|(n, t)| *n == classifier && t.size() == [10, arch.dim]), "{}", arch.name);
    }
}
