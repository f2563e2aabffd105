//! Architectures against the released classes and torchvision: counts, names, forward passes. The numbers were read off those classes, filled
//! by the rule of `fill`. An architecture that neither has needs no row here; what it says of itself is held by tests/nets.rs.

use mcl::nets::layers::{self, Pass};
use mcl::nets::{self, AUXILIARY, BACKBONE, Branch, Network};
use mcl::params::{Named, Params, Scope};
use tch::{Device, Kind, Tensor};

use super::{one_thread, wave};

fn count(params: &Params, prefix: &str) -> i64 {
    params.vars.iter().filter(|(name, _)| name.starts_with(prefix)).map(|(_, t)| t.numel() as i64).sum()
}

fn close(got: f64, want: f64, tolerance: f64) -> bool {
    (got - want).abs() <= tolerance * want.abs()
}

struct Counts {
    name: &'static str,
    params: i64,
    buffers: i64,
    macs: i64,
    aux: i64,
    extractors: &'static [i64],
    macs_with_branches: i64,
}

const fn counts(
    name: &'static str,
    params: i64,
    buffers: i64,
    macs: i64,
    aux: i64,
    extractors: &'static [i64],
    macs_with_branches: i64,
) -> Counts {
    Counts { name, params, buffers, macs, aux, extractors, macs_with_branches }
}

/// Counted on the released classes (100 classes for CIFAR, 1000 for ImageNet).
#[rustfmt::skip]
const COUNTS: &[Counts] = &[
    counts("resnet32", 472_756, 2_497, 69_130_496, 809_096, &[442_432, 353_664], 136_776_448),
    counts("resnet56", 861_620, 4_313, 125_753_600, 1_475_208, &[812_608, 649_600], 250_022_656),
    counts("resnet110", 1_170_868, 17_168, 167_453_696, 2_011_080, &[1_089_792, 869_888], 337_374_208),
    counts("wrn_16_2", 703_284, 1_837, 101_118_464, 1_208_200, &[656_704, 525_184], 201_807_360),
    counts("wrn_40_2", 2_255_156, 5_445, 327_610_880, 3_867_528, &[2_134_336, 1_706_880], 654_792_192),
    counts("wrn_28_4", 5_872_180, 7_225, 845_620_224, 10_089_032, &[5_576_320, 4_460_288], 1_701_309_440),
    counts("shufflenet_v2_x0_5_cifar", 444_292, 8_008, 10_994_176, 827_768, &[334_160, 288_608], 24_365_568),
    counts("shufflenet_v2_x1_0_cifar", 1_356_104, 16_236, 45_094_272, 2_406_252, &[1_222_716, 978_536], 99_330_944),
    counts("hcgnet_a1", 1_102_651, 19_341, 154_269_036, 1_478_429, &[943_425, 452_004], 270_434_664),
    counts("hcgnet_a2", 3_133_679, 33_415, 488_668_216, 4_114_546, &[2_606_810, 1_364_336], 806_793_600),
    counts("resnet18", 11_689_512, 9_620, 1_814_073_344, 14_626_488, &[4_822_272, 4_592_128, 3_673_088], 2_894_594_048),
    counts("resnet34", 21_797_672, 17_060, 3_663_761_408, 14_626_488, &[4_822_272, 4_592_128, 3_673_088], 4_744_282_112),
    counts("resnet50", 25_557_032, 53_173, 4_089_184_256, 27_669_944, &[7_931_392, 7_552_000, 6_039_552], 6_330_368_000),
    counts("shufflenet_v2_x1_0", 2_278_604, 16_236, 144_907_992, 6_119_796, &[843_544, 1_222_716, 978_536], 394_209_696),
];

#[test]
fn counts_are_those_of_the_released_classes() {
    one_thread();
    let _guard = tch::no_grad_guard();
    for want in COUNTS {
        let arch = nets::find(want.name).unwrap();
        let described = nets::describe(arch, arch.usual_classes());
        assert_eq!((described.parameters, described.macs), (want.params, want.macs), "{}", want.name);
        assert_eq!((described.stages, described.dim), (arch.depth, arch.dim), "{}", want.name);
        let scope = Scope::blank(Device::Cpu, Kind::Float);
        let net = Network::new(arch, &scope, arch.usual_classes());
        let buffers: usize = scope.params().buffers.iter().map(|(_, t)| t.numel()).sum();
        assert_eq!(buffers as i64, want.buffers, "{}", want.name);
        let aux = Scope::blank(Device::Cpu, Kind::Float);
        let branches = Branch::all(arch, &aux, arch.usual_classes());
        let aux = aux.params();
        assert_eq!(aux.count(), want.aux, "{} branches", want.name);
        for (l, extractor) in want.extractors.iter().enumerate() {
            assert_eq!(count(&aux, &format!("block_extractor{}.", l + 1)), *extractor, "{} extractor {}", want.name, l + 1);
        }
        let image = Tensor::zeros([1, 3, arch.image_size, arch.image_size], (Kind::Float, Device::Cpu));
        let macs = layers::macs(|| drop(net.answer(net.maps(&image, Pass::EVAL), &branches, Pass::EVAL)));
        assert_eq!(macs, want.macs_with_branches, "{} with branches", want.name);
    }
}

#[test]
fn counts_of_networks_outside_the_released_tables() {
    one_thread();
    // torchvision's own counts; branches of Swin: patch merging and a pair of blocks per remaining stage, LayerNorm, linear layer.
    for (name, params) in [("shufflenet_v2_x0_5", 1_366_792), ("swin_t", 28_288_354), ("swin_s", 49_606_258)] {
        assert_eq!(nets::describe(nets::find(name).unwrap(), 1000).parameters, params, "{name}");
    }
    assert_eq!(nets::describe(nets::find("shufflenet_v2_x0_5").unwrap(), 1000).macs, 40_476_448);
    for name in ["swin_t", "swin_s"] {
        let scope = Scope::blank(Device::Cpu, Kind::Float);
        Branch::all(nets::find(name).unwrap(), &scope, 1000);
        let aux = scope.params();
        let extractors = [1, 2, 3].map(|l| count(&aux, &format!("block_extractor{l}.")));
        assert_eq!(extractors, [20_183_796, 19_217_544, 15_368_112], "{name}");
        assert_eq!(aux.count(), 57_076_452, "{name}");
    }
    // 6n + 2 layers: n = 1 and 3 of the blocks counted above, 2 * (9 c^2 * 2 + 4 c) parameters each.
    for (name, n) in [("resnet8", 1), ("resnet20", 3)] {
        let block = |c: i64| 2 * (9 * c * c + 2 * c);
        let down = |c: i64| block(c) - 9 * c * c / 2 + c * c / 2 + 2 * c;
        let stages = n * block(16) + (n - 1) * (block(32) + block(64)) + down(32) + down(64);
        assert_eq!(nets::describe(nets::find(name).unwrap(), 100).parameters, 3 * 9 * 16 + 32 + stages + 6500, "{name}");
    }
}

/// sin(0.7 j + 0.3 h) over the flat index j, h from the letters of the released name: the rule all goldens are filled by.
fn fill(named: &Named, released: impl Fn(&str) -> String) {
    fill_with(named, 0.3, released);
}

/// The same with norms around this weight.
fn fill_with(named: &Named, norm: f64, released: impl Fn(&str) -> String) {
    let _guard = tch::no_grad_guard();
    let is_norm = |name: &str| {
        let owner = &name[..name.rfind('.').map_or(0, |dot| dot + 1)];
        named.iter().any(|(n, _)| *n == format!("{owner}running_mean")) || owner.contains("norm") || owner.ends_with("features.0.2.")
    };
    for (name, tensor) in named.iter().filter(|(_, t)| t.is_floating_point()) {
        let letters: u64 = released(name).bytes().map(u64::from).sum();
        let h = (letters % 97) as f64;
        let count = tensor.numel();
        let s = (0..count).map(|j| (0.7 * j as f64 + 0.3 * h).sin());
        let values: Vec<f64> = match name.rsplit('.').next() {
            Some("running_mean") => vec![0.0; count],
            Some("running_var") => vec![1.0; count],
            Some("weight") if is_norm(name) => s.map(|s| norm + 0.03 * s).collect(),
            _ if tensor.dim() == 1 => s.map(|s| 0.1 * s).collect(),
            _ => {
                let slice = (count as i64 / tensor.size()[0]) as f64;
                s.map(|s| s / slice.sqrt()).collect()
            }
        };
        tensor.shallow_clone().copy_(&Tensor::from_slice(&values).view(tensor.size().as_slice()));
    }
}

fn first_three(logits: &Tensor) -> [f64; 3] {
    [0, 1, 2].map(|c| logits.double_value(&[0, c]))
}

fn total(tensor: &Tensor) -> f64 {
    tensor.sum(Kind::Double).double_value(&[])
}

/// (ours, first logits of the first image, sum of logits, sum of the pooled feature), from the released baseline classes in f64.
#[rustfmt::skip]
const BASELINE: &[(&str, [f64; 3], f64, Option<f64>)] = &[
    ("resnet32", [0.284365089, 0.378190316, 0.247958775], 0.265843786, Some(17.158865)),
    ("resnet56", [-0.162346843, -0.640305169, -0.698425295], 0.250406033, Some(35.3628294)),
    ("resnet110", [0.182055834, 0.477424775, -0.802657973], 1.53367559, Some(206.732686)),
    ("wrn_16_2", [0.0325025288, -0.311627314, -0.061826592], -0.150572959, Some(10.2948757)),
    ("wrn_40_2", [0.0200571187, -0.350567965, -0.0443528198], -0.146378064, Some(29.7439149)),
    ("wrn_28_4", [0.0465861381, -0.12790168, 0.0597626414], -0.0732051845, Some(25.1867259)),
    ("shufflenet_v2_x0_5_cifar", [-0.348733304, -0.696111955, -0.862139126], -3.28501206, Some(65.5063049)),
    ("shufflenet_v2_x1_0_cifar", [-0.349942606, -0.696692999, -0.861940106], -3.28844096, Some(65.9392598)),
    ("hcgnet_a1", [-0.0155219486, -0.327358186, -0.443750648], -1.34867691, Some(26.1574234)),
    ("hcgnet_a2", [-0.0492918663, 0.723184465, 0.337235872], -0.172284886, Some(45.8905158)),
    ("resnet18", [-0.807436921, -0.675366833, -0.481501695], -1.9968607, None),
    ("resnet34", [-1.31628351, -1.21564646, -1.01732951], -3.68507006, None),
    ("resnet50", [0.296710627, -0.775177948, -1.11111326], -1.71052658, None),
    ("shufflenet_v2_x1_0", [-0.349950593, -0.696697586, -0.861940094], -2.12579186, None),
];

#[test]
fn forward_equals_the_released_baseline_classes() {
    one_thread();
    let _guard = tch::no_grad_guard();
    for (name, logits, sum, feature) in BASELINE {
        let arch = nets::find(name).unwrap();
        let scope = Scope::blank(Device::Cpu, Kind::Double);
        let net = Network::new(arch, &scope, arch.usual_classes());
        fill(&scope.params().named(), |ours| nets::rename(ours, arch.released.baseline));
        let images = wave(if arch.image_size == 32 { 2 } else { 1 }, arch.image_size);
        for pass in [Pass::EVAL, Pass::FROZEN] {
            let outs = net.forward(&images, pass);
            for (got, want) in first_three(outs.logit()).iter().zip(logits) {
                assert!(close(*got, *want, 1e-6), "{name} {pass:?}: logit {got}, released {want}");
            }
            assert!(close(total(outs.logit()), *sum, 1e-6), "{name} {pass:?}: sum of logits {}, released {sum}", total(outs.logit()));
            if let Some(feature) = feature {
                assert!(
                    close(total(outs.feat()), *feature, 1e-6),
                    "{name} {pass:?}: sum of features {}, released {feature}",
                    total(outs.feat())
                );
            }
        }
    }
}

/// (ours, parameters, first logits of the first image, sum of logits, sum of the pooled feature) of the distillation zoo's networks in f64, made
/// by golden/zoo.py. `mobile_half` has its own names there; the others have ours.
#[rustfmt::skip]
const ZOO: &[(&str, i64, [f64; 3], f64, f64)] = &[
    ("resnet8", 83_892, [-0.0499291386, 0.0446040092, 0.104149524], -0.213195565, 10.0951423),
    ("resnet14", 181_108, [-0.122656024, 0.277014032, 0.494766354], -0.259439573, 358.491711),
    ("resnet20", 278_324, [2.39762616, 11.1791632, 12.8864211], -0.619892038, 14543.7446),
    ("resnet32", 472_756, [2101.05972, 7292.62956, 7873.777], -185.971456, 8377690.96),
    ("resnet44", 667_188, [3267750.76, 5972639.87, 4901613.6], 259603.488, 5.39776175e+09),
    ("resnet56", 861_620, [4.79539331e+09, 5.20393256e+09, 2.3225348e+09], 720513663.0, 3.46617706e+12),
    ("resnet110_basic", 1_736_564, [3.11895713e+21, 1.08646029e+22, 1.17416241e+22], -2.85145577e+20, 3.85663261e+24),
    ("resnet8x4", 1_233_540, [-0.12702043, -0.00745189572, -0.00552194764], -0.227921219, 286.808078),
    ("resnet32x4", 7_433_860, [2488282.87, -2213549.23, 1901906.14], 665319.309, 5.11767027e+09),
    ("wrn_16_1", 180_916, [-0.0164378484, -0.149863347, -0.195333811], -0.178593406, 177.860367),
    ("wrn_40_1", 569_780, [9328.14917, 6996.13796, 241.146954], 3445.14129, 24543170.5),
    ("wrn_16_2", 703_284, [0.586725899, -0.524027375, -0.588622983], 0.0121490052, 6288.89007),
    ("wrn_40_2", 2_255_156, [14288883.9, -13270580.1, -12575269.1], 5009825.51, 5.82666021e+10),
    ("vgg8", 3_965_028, [-0.535983896, -0.777043601, -1.00400655], -4.35815637, 1199.04064),
    ("vgg13", 9_462_180, [3.00516535, 2.54961564, 1.88720923], 13.3195932, 8066.6596),
    ("mobile_half", 812_836, [-0.0828588247, -0.336135271, 0.890902503], -1.18148674, 504.715911),
    ("shuffle_v1", 949_258, [-0.875092911, -1.24179211, -1.4979], -1.54969886, 712.370871),
    ("shuffle_v2", 1_355_528, [-0.350868418, -0.695860917, -0.859567524], -3.28529556, 71.0938987),
];

#[test]
fn forward_equals_the_distillation_zoo() {
    one_thread();
    let _guard = tch::no_grad_guard();
    for (name, count, logits, sum, feature) in ZOO {
        let arch = nets::find(name).unwrap();
        assert_eq!(nets::describe(arch, 100).parameters, *count, "{name}");
        let scope = Scope::blank(Device::Cpu, Kind::Double);
        let net = Network::new(arch, &scope, 100);
        let rows = if *name == "mobile_half" { arch.released.baseline } else { &[] };
        fill_with(&scope.params().named(), 1.0, |ours| nets::rename(ours, rows));
        for pass in [Pass::EVAL, Pass::FROZEN] {
            let outs = net.forward(&wave(2, 32), pass);
            let got = first_three(outs.logit()).into_iter().chain([total(outs.logit()), total(outs.feat())]);
            for (i, (got, want)) in got.zip(logits.iter().chain([sum, feature])).enumerate() {
                assert!(close(got, *want, 1e-6), "{name} {pass:?}, number {i}: {got}, zoo {want}");
            }
        }
    }
}

/// (ours, sum of features per stage, sum of logits per stage), from the released L-MCL classes in f64, one image.
#[rustfmt::skip]
const LMCL: &[(&str, &[f64], &[f64])] = &[
    ("resnet32", &[13.2666799, 12.6903231, 10.0884895], &[3.18303606e-05, -0.00448957641, 0.0642475848]),
    ("resnet110", &[121.70881, 98.0571582, 86.0847203], &[-0.340028219, -0.437299715, -0.129294049]),
    ("wrn_16_2", &[5.05270542, 5.14343736, 5.46046723], &[0.0125828441, -0.0248125661, -0.0333475859]),
    ("shufflenet_v2_x1_0_cifar", &[32.789959, 32.7890145, 32.9621844], &[-0.850157516, -1.39091577, -1.60912227]),
    ("hcgnet_a1", &[13.1834488, 13.2690922, 13.1654756], &[-0.587105345, -1.04167821, 1.00210191]),
    ("resnet18", &[37.8888608, 37.4980492, 33.4100999, 35.4547398], &[0.231805327, 1.02862212, 1.68281767, 0.510454357]),
    ("resnet50", &[330.975199, 357.986763, 886.506696, 1010.84212], &[3.41201682, 4.14026999, 5.75427581, 1.69146416]),
    ("shufflenet_v2_x1_0", &[32.6746866, 33.024027, 33.0239834, 32.9628111], &[-0.74146599, -1.44297375, -2.00863536, -1.80359525]),
];

#[test]
fn branches_equal_the_released_lmcl_classes() {
    one_thread();
    let _guard = tch::no_grad_guard();
    for (name, feats, logits) in LMCL {
        let arch = nets::find(name).unwrap();
        let (scope, aux) = (Scope::blank(Device::Cpu, Kind::Double), Scope::blank(Device::Cpu, Kind::Double));
        let (net, branches) = (Network::new(arch, &scope, arch.usual_classes()), Branch::all(arch, &aux, arch.usual_classes()));
        let released = |part: &'static str| move |ours: &str| format!("module_list.0.{part}{}", nets::rename(ours, arch.released.lmcl));
        fill(&scope.params().named(), released(BACKBONE));
        fill(&aux.params().named(), released(AUXILIARY));
        let images = wave(1, arch.image_size);
        let outs = net.answer(net.maps(&images, Pass::EVAL), &branches, Pass::EVAL);
        for (l, (feat, logit)) in outs.feats.iter().zip(&outs.logits).enumerate() {
            assert!(close(total(feat), feats[l], 1e-6), "{name} stage {l}: sum of features {}, released {}", total(feat), feats[l]);
            assert!(close(total(logit), logits[l], 1e-6), "{name} stage {l}: sum of logits {}, released {}", total(logit), logits[l]);
        }
    }
}

/// (name, side, first logits, sum of logits, sum of the pooled feature, sum of each stage's map) from torchvision 0.28 in f64, one
/// image, filled by the same rule (LayerNorm as BatchNorm). At 160 the maps are no multiples of Swin's windows.
#[rustfmt::skip]
const TORCHVISION: &[(&str, i64, [f64; 3], f64, f64, [f64; 4])] = &[
    ("swin_t", 224, [1.37334862, -1.503999, 1.74800471], 1.60984691, 0.897859921, [3157.49349, 795.858215, 2135.35284, -118.465471]),
    ("swin_t", 160, [1.3731659, -1.50382129, 1.74785838], 1.60970119, 0.897352573, [1509.73942, 408.602234, 1087.90732, -60.9620863]),
    ("swin_s", 224, [1.37035754, -1.50145746, 1.74628989], 1.60779491, 0.889609072, [3157.49349, 795.858215, 3826.76202, -116.211523]),
    ("shufflenet_v2_x0_5", 224, [-0.650366325, -0.810563127, -0.750221694], -2.29806226, 32.6080386, [30731.0092, 1202.43689, 838.323995, 499.570802]),
];

#[test]
fn forward_equals_torchvision_where_nothing_is_released() {
    one_thread();
    let _guard = tch::no_grad_guard();
    for (name, side, logits, sum, feature, maps) in TORCHVISION {
        let scope = Scope::blank(Device::Cpu, Kind::Double);
        let net = Network::new(nets::find(name).unwrap(), &scope, 1000);
        fill(&scope.params().named(), str::to_string);
        let outs = net.forward(&wave(1, *side), Pass::EVAL);
        let got = first_three(outs.logit()).into_iter().chain([total(outs.logit()), total(outs.feat())]).chain(outs.maps.iter().map(total));
        let want = logits.iter().chain([sum, feature]).chain(maps);
        for (i, (got, want)) in got.zip(want).enumerate() {
            assert!(close(got, *want, 1e-6), "{name} at {side}, number {i}: {got}, torchvision {want}");
        }
    }
}

/// SHA-256 over the lines "name [shape]\n" of torchvision 0.28's state dicts, sorted by name.
#[rustfmt::skip]
const TORCHVISION_NAMES: &[(&str, &str)] = &[
    ("resnet18", "6cb439dd8789c9fec30db85cd20f9566cb04693ea278e4348cdd110fa0388db6"),
    ("resnet34", "306c4e9d557830ce13b79a2bd03e436c69d7fb702e8e488289a1ffeeae3bda3f"),
    ("resnet50", "98fcefba1b06f509a0fbf50757db13659d4fb3dc3b1f43aef4ed2da77b133fbe"),
    ("shufflenet_v2_x0_5", "6d0508c17fa57b97c2d8be41730bd55d1e85ad78c86f9106e1d4269c9c8e6d10"),
    ("shufflenet_v2_x1_0", "3085dc2c6d7bb62fc23fe22b40da74e8aec3ac297749ccc39db4149ee08a0d2b"),
    ("swin_t", "0cfb04fd13e72065e2d4f626d4db74e3b262ec3bf34040abc8706320bc23c289"),
    ("swin_s", "18ca1e1199a5d0904d8c5b0260c954fd216064009d920096a8d4f25486105bfc"),
];

#[test]
fn imagenet_networks_have_the_names_and_shapes_of_torchvision() {
    one_thread();
    let mut here = nets::archs().filter(|arch| arch.elsewhere.torchvision.is_some());
    if let Some(arch) = here.find(|arch| TORCHVISION_NAMES.iter().all(|(name, _)| *name != arch.name)) {
        panic!("{} says that torchvision has it: add the hash of its names to TORCHVISION_NAMES in tests/nets/released.rs", arch.name);
    }
    for (name, want) in TORCHVISION_NAMES {
        let scope = Scope::blank(Device::Cpu, Kind::Float);
        Network::new(nets::find(name).unwrap(), &scope, 1000);
        let lines: String = scope.params().named().iter().map(|(n, t)| format!("{n} {:?}\n", t.size())).collect();
        let got = mcl::files::sha256(lines.as_bytes());
        assert_eq!(got, *want, "{name}");
    }
}

#[test]
fn released_names_follow_the_tables() {
    one_thread();
    let shuffle = nets::find("shufflenet_v2_x1_0").unwrap().released.lmcl;
    for (ours, theirs) in [
        ("conv1.0.weight", "conv1.weight"),
        ("conv1.1.running_var", "bn1.running_var"),
        ("stage2.0.branch1.2.weight", "layer1.0.conv2.weight"),
        ("stage3.0.branch2.4.bias", "layer2.0.bn4.bias"),
        ("stage4.3.branch2.5.weight", "layer3.3.conv3.weight"),
        ("conv5.1.num_batches_tracked", "bn2.num_batches_tracked"),
        ("fc.weight", "linear.weight"),
        ("block_extractor1.0.0.branch2.0.weight", "block_extractor1.0.0.conv3.weight"),
        ("block_extractor1.0.1.branch2.0.weight", "block_extractor1.0.1.conv1.weight"),
        ("block_extractor1.4.running_mean", "block_extractor1.4.running_mean"),
        ("fc1.bias", "fc1.bias"),
    ] {
        assert_eq!(nets::rename(ours, shuffle), theirs);
    }
    let hcg = nets::find("hcgnet_a1").unwrap().released.baseline;
    assert_eq!(nets::rename("HybridBlock2.SMG3.fc1.weight", hcg), "features.HybridBlock2.SMG3.fc1.weight");
    assert_eq!(nets::rename("features.conv0.weight", hcg), "features.conv0.weight");
    assert_eq!(nets::rename("classifier.bias", hcg), "classifier.bias");
    assert_eq!(nets::rename("fc.bias", nets::find("resnet56").unwrap().released.baseline), "classifier.bias");
}
