//! `mcl-eval export` and the TorchScript archives: what libtorch reads back, what the files are called inside, what is refused.

mod support;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output};

use mcl::eval::network::Normalisation;
use mcl::nets::layers::Pass;
use mcl::nets::script::{self, Answer};
use mcl::nets::{self, Network};
use mcl::params::Params;
use mcl::pickle;
use mcl::weights::{self, Meta, frameworks, torchscript};
use support::{EVAL, assert_refused, text};
use tch::{CModule, Device, Kind, Tensor};

/// A network whose running statistics are not what they start as.
fn network(arch: &str, classes: i64) -> (Network, Params) {
    network_in(Kind::Float, arch, classes)
}

fn network_in(kind: Kind, arch: &str, classes: i64) -> (Network, Params) {
    let (net, params) = Network::build(nets::find(arch).unwrap(), classes, 3, Device::Cpu, kind);
    let _guard = tch::no_grad_guard();
    for (i, (name, t)) in params.buffers.iter().enumerate() {
        let mut t = t.shallow_clone();
        match name.rsplit('.').next() {
            Some("running_mean") => drop(t.fill_(0.05 * (i as f64).sin())),
            Some("running_var") => drop(t.fill_(2.0 + 0.5 * (i as f64).cos())),
            _ => {}
        }
    }
    (net, params)
}

fn images(n: i64, h: i64, w: i64) -> Tensor {
    (Tensor::arange(n * 3 * h * w, (Kind::Float, Device::Cpu)) * 0.37).sin().view([n, 3, h, w])
}

/// The largest difference relative to the larger of 1 and the largest value.
fn off(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.size(), b.size());
    ((a - b).abs().max() / b.abs().max().clamp_min(1.0)).double_value(&[])
}

#[test]
fn every_architecture_is_the_same_network_after_a_reload() {
    let folder = tempfile::tempdir().unwrap();
    let _guard = tch::no_grad_guard();
    for arch in nets::archs() {
        let (net, params) = network(arch.name, 7);
        let path = folder.path().join("body.pt");
        torchscript::save(&path, &script::module(arch, &params, Answer::Maps)).unwrap();
        let body = CModule::load(&path).unwrap();
        let sizes = if arch.image_size == 32 { [(2, 32, 48), (1, 40, 24)] } else { [(2, 64, 96), (1, 160, 224)] };
        for (n, h, w) in sizes {
            let x = images(n, h, w);
            let want = net.forward(&x, Pass::EVAL);
            let got = torchscript::forward(&body, &x).unwrap();
            assert_eq!(got.len(), arch.depth);
            for (l, (got, want)) in got.iter().zip(&want.maps).enumerate() {
                assert!(off(got, want) <= 1e-6, "{} map {l} at {w} x {h}: {:.1e}", arch.name, off(got, want));
            }
        }
        torchscript::save(&path, &script::module(arch, &params, Answer::Logits)).unwrap();
        let x = images(sizes[0].0, sizes[0].1, sizes[0].2);
        let logits = CModule::load(&path).unwrap().forward_ts(&[&x]).unwrap();
        assert_eq!(logits.size(), [sizes[0].0, 7]);
        assert!(off(&logits, net.forward(&x, Pass::EVAL).logit()) <= 1e-6, "{} logits", arch.name);
    }
}

/// The children are those of torchvision 0.28 (`[n for n, _ in resnet18().named_children()]` and so on), of the released classes elsewhere.
#[test]
fn archives_have_the_right_names() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("module.pt");
    let children: &[(&str, &str, &str)] = &[
        ("resnet18", "conv1 bn1 relu maxpool layer1 layer2 layer3 layer4", "avgpool fc"),
        ("shufflenet_v2_x1_0", "conv1 maxpool stage2 stage3 stage4", "conv5 fc"),
        ("swin_t", "features", "norm avgpool head"),
        ("resnet56", "conv1 bn1 relu layer1 layer2 layer3", "avgpool fc"),
        ("wrn_16_2", "conv1 block1 block2 block3", "bn1 avgpool fc"),
        ("shufflenet_v2_x0_5_cifar", "conv1 bn1 relu layer1 layer2 layer3", "conv2 bn2 linear"),
        ("hcgnet_a1", "features HybridBlock1 Transition1 HybridBlock2 Transition2 HybridBlock3", "norm5 classifier"),
    ];
    for (arch, body, neck) in children {
        let (_, params) = network(arch, 5);
        let arch = nets::find(arch).unwrap();
        for answer in [Answer::Maps, Answer::Logits] {
            torchscript::save(&path, &script::module(arch, &params, answer)).unwrap();
            let names = torchscript::names(&path).unwrap();
            let top: Vec<&str> = names.children.iter().map(String::as_str).filter(|n| !n.contains('.')).collect();
            let neck = if answer == Answer::Logits { neck } else { "" };
            assert_eq!(top.join(" "), format!("{body} {neck}").trim(), "{}", arch.name);
            // All of the network, or all but what hangs from the neck.
            let kept = |name: &str| answer == Answer::Logits || body.split(' ').any(|child| name.starts_with(&format!("{child}.")));
            let set = |names: &mut dyn Iterator<Item = String>| names.collect::<BTreeSet<String>>();
            let ours = |named: &mcl::params::Named| set(&mut named.iter().map(|(n, _)| n.clone()).filter(|n| kept(n)));
            assert_eq!(set(&mut names.parameters.into_iter()), ours(&params.vars), "{}", arch.name);
            assert_eq!(set(&mut names.buffers.into_iter()), ours(&params.buffers), "{}", arch.name);
        }
    }
    let (_, params) = network("resnet18", 5);
    torchscript::save(&path, &script::module(nets::find("resnet18").unwrap(), &params, Answer::Maps)).unwrap();
    let names = torchscript::names(&path).unwrap();
    // torchvision's ResNet-18 without fc: 20 convolutions, 20 norms with two parameters and three buffers each.
    assert_eq!((names.parameters.len(), names.buffers.len()), (60, 60));
    let block: Vec<&str> = names.children.iter().filter_map(|n| n.strip_prefix("layer2.0.")).collect();
    assert_eq!(block.join(" "), "conv1 bn1 relu conv2 bn2 downsample downsample.0 downsample.1");
}

/// Training mode takes the batch's statistics and moves the running ones, evaluation stops both; every parameter has a gradient.
#[test]
fn archives_train() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("body.pt");
    for arch in ["resnet8", "resnet18", "shufflenet_v2_x0_5"] {
        // In f64: batch statistics of a few numbers amplify the last digits of f32.
        let (net, params) = network_in(Kind::Double, arch, 5);
        torchscript::save(&path, &script::module(nets::find(arch).unwrap(), &params, Answer::Maps)).unwrap();
        let mut body = CModule::load(&path).unwrap();
        let x = images(4, 64, 64).to_kind(Kind::Double);
        let before = torchscript::forward(&body, &x).unwrap();
        body.set_train();
        let trained = torchscript::forward(&body, &x).unwrap();
        let want = net.forward(&x, Pass::train(0));
        body.set_eval();
        let (after, again) = (torchscript::forward(&body, &x).unwrap(), torchscript::forward(&body, &x).unwrap());
        let moved = net.forward(&x, Pass::EVAL);
        let last = before.len() - 1;
        assert!(off(&trained[last], &want.maps[last]) <= 1e-10, "{arch} in training: {}", off(&trained[last], &want.maps[last]));
        assert!(off(&after[last], &moved.maps[last]) <= 1e-10, "{arch} after one batch");
        assert!(off(&after[last], &before[last]) > 1e-3, "{arch}: the running statistics have moved");
        assert_eq!(after[last], again[last], "{arch}: they stay in evaluation");

        // With batch statistics: the running ones above leave some ReLUs without a single positive input.
        body.set_train();
        let loss: Tensor = torchscript::forward(&body, &x).unwrap().iter().map(|map| map.square().mean(Kind::Float)).sum();
        loss.backward();
        let named = body.named_parameters().unwrap();
        assert!(!named.is_empty());
        for (name, parameter) in named {
            assert!(parameter.grad().defined() && parameter.grad().abs().sum(Kind::Float).double_value(&[]) > 0.0, "{arch} {name}");
        }
    }
}

fn save(folder: &Path, arch: &str, classes: usize) -> (Network, Params, std::path::PathBuf) {
    let (net, params) = network(arch, classes as i64);
    let meta = Meta {
        arch: arch.to_string(),
        classes: (0..classes).map(|c| c.to_string()).collect(),
        image_size: 32,
        mean: [0.5, 0.4, 0.3],
        std: [0.2, 0.25, 0.3],
        interpolation: "bilinear".to_string(),
        run: "run".to_string(),
        recipe: String::new(),
        peer: None,
        dataset: Some("synthetic".to_string()),
        epoch: None,
    };
    let file = folder.join(format!("{arch}.safetensors"));
    weights::save_safetensors(&file, &params.named(), &meta).unwrap();
    (net, params, file)
}

fn export(file: &Path, out: &Path, more: &[&str]) -> Output {
    let mut command = Command::new(EVAL);
    command.arg("export").arg("--weights").arg(file).arg("--out").arg(out).args(more).args(["--device", "cpu"]);
    command.output().unwrap()
}

fn golden(folder: &Path) -> Vec<(String, Tensor)> {
    Tensor::read_npz(folder.join("golden.npz")).unwrap()
}

#[test]
fn one_network_goes_to_every_framework() {
    let folder = tempfile::tempdir().unwrap();
    let (net, params, file) = save(folder.path(), "resnet18", 5);
    let out = folder.path().join("out");
    let targets = ["torchscript", "torchvision", "mmdet", "detectron2", "safetensors"];
    let asked: Vec<&str> = targets.iter().flat_map(|t| ["--to", t]).collect();
    let output = export(&file, &out, &asked);
    assert!(output.status.success(), "{}", text(&output));
    let files = ["resnet18.pt", "resnet18.pth", "resnet18.pth", "resnet18.pkl", "resnet18.safetensors"];
    for (target, name) in targets.iter().zip(files) {
        let folder = out.join(target);
        let mut held: Vec<String> = std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        held.sort();
        let mut want = vec!["README.md", "check.py", "export.json", "golden.npz", name];
        want.sort();
        assert_eq!(held, want);
        let texts = ["README.md", "check.py"].map(|n| std::fs::read_to_string(folder.join(n)).unwrap());
        assert!(texts.iter().all(|t| !t.contains("{{") && !t.contains("{%")), "{target}: the template was not filled in");
        assert!(texts[0].contains(name) && texts[0].contains("RGB") && texts[0].contains("0.25"), "{}", texts[0]);
        let facts: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(folder.join("export.json")).unwrap()).unwrap();
        assert_eq!(facts["channels"], serde_json::json!([64, 128, 256, 512]));
        assert_eq!(facts["strides"], serde_json::json!([4, 8, 16, 32]));
        assert_eq!(facts["layers"], serde_json::json!({"layer1": "0", "layer2": "1", "layer3": "2", "layer4": "3"}));
    }

    // The golden maps are the network's, and the archive's.
    let golden = golden(&out.join("torchscript"));
    let find = |name: &str| &golden.iter().find(|(n, _)| n == name).unwrap_or_else(|| panic!("no {name}")).1;
    let want = tch::no_grad(|| net.forward(find("input"), Pass::EVAL));
    let body = CModule::load(out.join("torchscript/resnet18.pt")).unwrap();
    let got = tch::no_grad(|| torchscript::forward(&body, find("input")).unwrap());
    for l in 0..4 {
        assert!(off(find(&l.to_string()), &want.maps[l]) <= 1e-6);
        assert!(off(&got[l], find(&l.to_string())) <= 1e-6);
    }

    // torchvision and mmdet: the same names as torchvision's own, but for fc.
    let expected: BTreeSet<String> = params.all().map(|(n, _)| n.clone()).filter(|n| !n.starts_with("fc.")).collect();
    for target in ["torchvision", "mmdet"] {
        let read = weights::read(&out.join(target).join("resnet18.pth")).unwrap();
        assert_eq!(read.tensors.iter().map(|(n, _)| n.clone()).collect::<BTreeSet<_>>(), expected);
        let (_, first) = read.tensors.iter().find(|(n, _)| n == "conv1.weight").unwrap();
        assert_eq!(*first, params.vars.iter().find(|(n, _)| n == "conv1.weight").unwrap().1);
    }

    // Detectron2: its pickle, arrays under its names.
    let bytes = std::fs::read(out.join("detectron2/resnet18.pkl")).unwrap();
    let (value, used) = pickle::read(&bytes).unwrap();
    assert_eq!(used, bytes.len());
    assert_eq!(value.get("matching_heuristics"), Some(&pickle::Value::Bool(true)));
    assert!(value.get("__author__").is_some());
    let model = value.get("model").unwrap().as_dict().unwrap();
    let names: BTreeSet<&str> = model.iter().filter_map(|(n, _)| n.as_str()).collect();
    assert_eq!(names.len(), expected.len());
    for name in
        ["stem.conv1.weight", "stem.conv1.norm.running_var", "res2.0.conv1.weight", "res3.0.shortcut.norm.bias", "res5.1.conv2.norm.weight"]
    {
        assert!(names.contains(name), "no {name}");
    }
    let array = value.get("model").unwrap().get("res3.0.shortcut.weight").unwrap().as_array().unwrap();
    assert_eq!((array.shape.as_slice(), array.dtype.as_str()), (&[128, 64, 1, 1][..], "f4"));

    // safetensors: with what one must know to use it.
    let read = weights::read(&out.join("safetensors/resnet18.safetensors")).unwrap();
    let meta = read.meta.unwrap();
    assert_eq!((meta.arch.as_str(), meta.mean, meta.classes.len()), ("resnet18", [0.5, 0.4, 0.3], 0));
}

#[test]
fn swin_goes_to_mmdet_and_small_networks_with_their_classifier() {
    let folder = tempfile::tempdir().unwrap();
    let (_, params, file) = save(folder.path(), "swin_t", 5);
    let out = folder.path().join("swin");
    let output = export(&file, &out, &["--to", "mmdet", "--to", "torchvision", "--normalisation", "imagenet"]);
    assert!(output.status.success(), "{}", text(&output));
    let tensors = weights::read(&out.join("mmdet/swin_t.pth")).unwrap().tensors;
    let index = &tensors.iter().find(|(n, _)| n == "backbone.stages.0.blocks.1.attn.w_msa.relative_position_index").unwrap().1;
    assert_eq!(index.size(), [49, 49]);
    assert!(tensors.iter().all(|(n, _)| n.starts_with("backbone.")));
    let kept = params.all().filter(|(n, _)| n.starts_with("features.")).count();
    assert_eq!(tensors.len(), kept);
    assert!(std::fs::read_to_string(out.join("mmdet/README.md")).unwrap().contains("123.675"));

    let (net, _, file) = save(folder.path(), "wrn_16_2", 5);
    let out = folder.path().join("wrn");
    let output = export(&file, &out, &["--to", "torchscript", "--to", "safetensors", "--with-classifier"]);
    assert!(output.status.success(), "{}", text(&output));
    let golden = golden(&out.join("torchscript"));
    let find = |name: &str| &golden.iter().find(|(n, _)| n == name).unwrap().1;
    let module = CModule::load(out.join("torchscript/wrn_16_2.pt")).unwrap();
    let logits = tch::no_grad(|| module.forward_ts(&[find("input")]).unwrap());
    assert!(off(&logits, find("logits")) <= 1e-6);
    assert!(off(&logits, tch::no_grad(|| net.forward(find("input"), Pass::EVAL)).logit()) <= 1e-6);
    assert_eq!(weights::read(&out.join("safetensors/wrn_16_2.safetensors")).unwrap().meta.unwrap().classes.len(), 5);
}

#[test]
fn what_cannot_be_exported_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let (_, params, file) = save(folder.path(), "resnet8", 5);
    for target in ["torchvision", "mmdet", "detectron2"] {
        assert_refused(&export(&file, &out, &["--to", target]), 2, &[target, "resnet8", "resnet50", "torchscript"]);
    }
    assert_refused(&export(&file, &out, &["--to", "onnx"]), 2, &["`onnx`", "torchscript", "detectron2"]);
    assert_refused(&export(&file, &out, &["--to", "torchscript", "--set", "tolerance=0"]), 2, &["tolerance", "more than 0"]);
    let (_, _, large) = save(folder.path(), "shufflenet_v2_x0_5", 5);
    assert_refused(&export(&large, &out, &["--to", "mmdet"]), 2, &["mmdet", "shufflenet_v2_x0_5", "swin_t"]);
    let (_, _, resnet) = save(folder.path(), "resnet18", 5);
    assert_refused(&export(&resnet, &out, &["--to", "detectron2", "--with-classifier"]), 2, &["--with-classifier", "Detectron2"]);

    // One tensor short, another architecture, no weights at all, a TorchScript archive.
    let mut tensors = params.named();
    tensors.retain(|(name, _)| name != "layer2.0.conv1.weight");
    let short = folder.path().join("short.pth");
    weights::save_pth(&short, &tensors).unwrap();
    let as_resnet8 = ["--to", "torchscript", "--arch", "resnet8", "--normalisation", "none"];
    assert_refused(&export(&short, &out, &as_resnet8), 2, &["short.pth", "layer2.0.conv1.weight"]);
    let whole = folder.path().join("whole.pth");
    weights::save_pth(&whole, &params.named()).unwrap();
    let as_resnet20 = ["--to", "torchscript", "--arch", "resnet20", "--normalisation", "none"];
    assert_refused(&export(&whole, &out, &as_resnet20), 2, &["whole.pth", "resnet20"]);
    let noise = folder.path().join("noise.pth");
    std::fs::write(&noise, [7u8; 400]).unwrap();
    assert_refused(&export(&noise, &out, &as_resnet8), 2, &["noise.pth"]);
    let archive = folder.path().join("archive.pt");
    torchscript::save(&archive, &script::module(nets::find("resnet8").unwrap(), &params, Answer::Maps)).unwrap();
    assert_refused(&export(&archive, &out, &as_resnet8), 2, &["archive.pt", "TorchScript"]);
    assert!(!out.exists(), "nothing was written");
    assert!(torchscript::names(&noise).unwrap_err().to_string().contains("noise.pth"));

    // And whole it goes.
    assert!(export(&whole, &out, &as_resnet8).status.success());
}

#[test]
fn detections_stand_beside_the_papers() {
    let folder = tempfile::tempdir().unwrap();
    let row = |metric: &str, value: f64, variant: &str| {
        serde_json::json!({
            "command": "detect", "dataset": "coco", "metric": metric, "value": value, "variant": variant, "method": "l_mcl", "arch": "resnet18",
            "subject": "run/peer-0", "pretrained_on": "imagenet", "protocol": "export-coco", "n_test": 5000,
        })
    };
    let rows = [row("box_map", 34.5, ""), row("mask_map", 32.4, ""), row("box_map", 1.25, "limit=20")];
    std::fs::write(folder.path().join("results.jsonl"), rows.map(|r| format!("{r}\n")).concat()).unwrap();
    let out = folder.path().join("report");
    let output = Command::new(EVAL).arg("report").arg("--results").arg(folder.path()).arg("--out").arg(&out).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let report = std::fs::read_to_string(out.join("report.md")).unwrap();
    // The paper: boxes 35.0, masks 32.1.
    for (what, values) in [
        ("coco box_map ", ["34.50", "35.00", "-0.50"]),
        ("coco mask_map ", ["32.40", "32.10", "0.30"]),
        ("limit=20", ["1.25", "35.00", "-33.75"]),
    ] {
        for (row, value) in ["| ours |", "| paper |", "| gap |"].iter().zip(values) {
            let found = report.lines().any(|line| line.contains(what) && line.contains(row) && line.ends_with(&format!(" {value} |")));
            assert!(found, "{what}, {row} {value} in no row of\n{report}");
        }
    }
}

#[test]
fn normalisations() {
    let parse = |text: &str| text.parse::<Normalisation>();
    assert_eq!(parse("imagenet").unwrap().std, [0.229, 0.224, 0.225]);
    assert_eq!(parse("0.5,0.4,0.3/1,2,3").unwrap(), Normalisation { mean: [0.5, 0.4, 0.3], std: [1.0, 2.0, 3.0] });
    for wrong in ["", "cifar", "1,2/3,4", "0,0,0/1,1,0", "0,0,0/1,1,nan", "1,2,3"] {
        let message = parse(wrong).unwrap_err().to_string();
        assert!(message.contains(&format!("`{wrong}`")) && message.contains("imagenet"), "{message}");
    }
}

/// Against unfolding itself: [B, h, w, c] cut into 2 x 2 patches, as `nn.Unfold` numbers their entries (channel, row, column).
#[test]
fn mmdets_mergings_follow_the_order_of_unfold() {
    let (c, out) = (3i64, 5i64);
    let x = Tensor::arange(4 * 6 * c, (Kind::Float, Device::Cpu)).view([1, 4, 6, c]).sin();
    let weight = Tensor::arange(out * 4 * c, (Kind::Float, Device::Cpu)).view([out, 4 * c]).cos();
    let ours = vec![("features.2.reduction.weight".to_string(), weight.shallow_clone())];
    let theirs = frameworks::to_mmdet_swin(&ours).unwrap();
    // torchvision's order of the four neighbours: left column first.
    let corner = |y: i64, x_: i64| x.slice(1, y, None, 2).slice(2, x_, None, 2);
    let merged = Tensor::cat(&[corner(0, 0), corner(1, 0), corner(0, 1), corner(1, 1)], 3).matmul(&weight.transpose(0, 1));
    let unfolded = x.permute([0, 3, 1, 2]).im2col([2, 2], [1, 1], [0, 0], [2, 2]).transpose(1, 2);
    let by_unfold = unfolded.matmul(&theirs[0].1.transpose(0, 1)).view([1, 2, 3, out]);
    assert!(off(&by_unfold, &merged) < 1e-6);
    assert_eq!(frameworks::from_mmdet_swin(&theirs), ours);
}

/// As the converters of both frameworks rename torchvision's and the original Swin's keys.
#[test]
fn documented_names_of_mmdet_and_detectron2() {
    let mmdet = [
        ("features.0.0.weight", "backbone.patch_embed.projection.weight"),
        ("features.0.2.bias", "backbone.patch_embed.norm.bias"),
        ("features.1.0.norm1.weight", "backbone.stages.0.blocks.0.norm1.weight"),
        ("features.1.1.attn.relative_position_bias_table", "backbone.stages.0.blocks.1.attn.w_msa.relative_position_bias_table"),
        ("features.3.0.attn.qkv.weight", "backbone.stages.1.blocks.0.attn.w_msa.qkv.weight"),
        ("features.5.4.mlp.0.bias", "backbone.stages.2.blocks.4.ffn.layers.0.0.bias"),
        ("features.7.1.mlp.3.weight", "backbone.stages.3.blocks.1.ffn.layers.1.weight"),
        ("features.2.reduction.weight", "backbone.stages.0.downsample.reduction.weight"),
        ("features.6.norm.bias", "backbone.stages.2.downsample.norm.bias"),
    ];
    for (ours, theirs) in mmdet {
        assert_eq!(frameworks::mmdet_swin_name(ours).as_deref(), Some(theirs));
        assert_eq!(frameworks::our_swin_name(theirs).as_deref(), Some(ours));
    }
    let detectron2 = [
        ("conv1.weight", "stem.conv1.weight"),
        ("bn1.running_var", "stem.conv1.norm.running_var"),
        ("layer1.0.conv1.weight", "res2.0.conv1.weight"),
        ("layer2.3.bn3.bias", "res3.3.conv3.norm.bias"),
        ("layer4.0.downsample.0.weight", "res5.0.shortcut.weight"),
        ("layer4.0.downsample.1.running_mean", "res5.0.shortcut.norm.running_mean"),
    ];
    for (ours, theirs) in detectron2 {
        assert_eq!(frameworks::detectron2_name(ours), theirs);
        assert_eq!(frameworks::from_detectron2_name(theirs), ours);
    }
}
