//! `mcl-eval export` and the TorchScript archives: what libtorch reads back, what the files are called inside, what is refused.

mod support;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output};

use mcl::eval::network::Normalisation;
use mcl::nets::graph::{self, Answer};
use mcl::nets::layers::Pass;
use mcl::nets::{self, Network};
use mcl::params::Params;
use mcl::pickle;
use mcl::weights::{self, Meta, frameworks, onnx, torchscript};
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
        // In f64, so that which kernels computed it does not show.
        let ((_, params), (net, exact)) = (network(arch.name, 7), network_in(Kind::Double, arch.name, 7));
        exact.copy_from(&params);
        let path = folder.path().join("body.pt");
        torchscript::save(&path, &graph::module(arch, &params, Answer::Maps)).unwrap();
        let mut body = CModule::load(&path).unwrap();
        body.to(Device::Cpu, Kind::Double, false);
        let flat = onnx_of(arch, &params, Answer::Maps, &path);
        let sizes = if arch.image_size == 32 { [(2, 32, 48), (1, 40, 24)] } else { [(2, 64, 96), (1, 160, 224)] };
        for (n, h, w) in sizes {
            let x = images(n, h, w);
            let want = net.forward(&x.to_kind(Kind::Double), Pass::EVAL);
            let got = torchscript::forward(&body, &x.to_kind(Kind::Double)).unwrap();
            assert_eq!(got.len(), arch.depth);
            for (l, (got, want)) in got.iter().zip(&want.maps).enumerate() {
                assert!(off(got, want) <= 1e-9, "{} map {l} at {w} x {h}: {:.1e}", arch.name, off(got, want));
            }
            let got = flat.run(&x).unwrap();
            assert_eq!(got.len(), arch.depth);
            for (l, (got, want)) in got.iter().zip(&want.maps).enumerate() {
                assert!(off(got, want) <= 1e-5, "{} feature_{l} at {w} x {h}: {:.1e}", arch.name, off(got, want));
            }
        }
        torchscript::save(&path, &graph::module(arch, &params, Answer::Logits)).unwrap();
        let x = images(sizes[0].0, sizes[0].1, sizes[0].2);
        let mut whole = CModule::load(&path).unwrap();
        whole.to(Device::Cpu, Kind::Double, false);
        let logits = whole.forward_ts(&[&x.to_kind(Kind::Double)]).unwrap();
        assert_eq!(logits.size(), [sizes[0].0, 7]);
        assert!(off(&logits, net.forward(&x.to_kind(Kind::Double), Pass::EVAL).logit()) <= 1e-9, "{} logits", arch.name);
        let got = onnx_of(arch, &params, Answer::Logits, &path).run(&x).unwrap();
        assert_eq!(got.len(), 1);
        assert!(off(&got[0], &logits) <= 1e-5, "{} logits of ONNX: {:.1e}", arch.name, off(&got[0], &logits));
    }
}

/// The file as it is read back. Nodes come after what they read, nothing is given twice or for nobody, and the weights are those of the state dict.
fn onnx_of(arch: &nets::Arch, params: &Params, answer: Answer, path: &Path) -> onnx::Model {
    onnx::model(arch, params, answer, vec![("architecture".to_string(), arch.name.to_string())]).save(path).unwrap();
    let model = onnx::Model::read(path).unwrap();
    assert_eq!(model.metadata, [("architecture".to_string(), arch.name.to_string())]);
    let mut known: BTreeSet<&str> = model.tensors.iter().map(|(name, _)| name.as_str()).chain([onnx::INPUT]).collect();
    let mut read: BTreeSet<&str> = model.outputs.iter().map(|port| port.name.as_str()).collect();
    for node in &model.nodes {
        for name in &node.inputs {
            assert!(known.contains(name.as_str()), "{}: {} reads {name} before it is there", arch.name, node.name);
            read.insert(name);
        }
        assert!(node.outputs.iter().all(|name| known.insert(name)), "{}: {} is given twice", arch.name, node.name);
    }
    let unread: Vec<&&str> = known.difference(&read).collect();
    assert!(unread.is_empty(), "{}: nobody reads {unread:?}", arch.name);
    assert_eq!(model.inputs[0].dims[1], Ok(3));
    assert!([0, 2, 3].iter().all(|&i| model.inputs[0].dims[i].is_err()), "batch and size are open");
    for (l, port) in model.outputs.iter().enumerate() {
        let (name, channels) = if answer == Answer::Maps { (format!("feature_{l}"), arch.maps[l].0) } else { ("logits".to_string(), 7) };
        assert_eq!((&port.name, &port.dims[1]), (&name, &Ok(channels)), "{}", arch.name);
    }
    let ours: Vec<&(String, Tensor)> = params.all().filter(|(name, _)| model.tensors.iter().any(|(n, _)| n == name)).collect();
    for (name, tensor) in &ours {
        assert_eq!(&model.tensors.iter().find(|(n, _)| n == name).unwrap().1, tensor, "{} {name}", arch.name);
    }
    let counters = params.all().filter(|(name, _)| name.ends_with("num_batches_tracked")).count();
    assert!(answer == Answer::Maps || ours.len() == params.all().count() - counters, "{}: a weight is missing", arch.name);
    model
}

/// What reads our files back agrees with ONNX Runtime on every operator that we write, in a file that the onnx package wrote
/// (tests/golden/onnx_operators.py).
#[test]
fn onnx_operators_agree_with_onnx_runtime() {
    let file = |end: &str| format!("{}/tests/golden/onnx_operators.{end}", env!("CARGO_MANIFEST_DIR"));
    let model = onnx::Model::read(Path::new(&file("onnx"))).unwrap();
    let mut golden = Tensor::read_npz(file("npz")).unwrap();
    golden.sort_by(|(a, _), (b, _)| a.cmp(b));
    let at = golden.iter().position(|(name, _)| name == "input").unwrap();
    let (_, input) = golden.remove(at);
    let got = model.run(&input).unwrap();
    assert_eq!(got.len(), golden.len());
    for (got, (name, want)) in got.iter().zip(&golden) {
        assert!(off(got, want) <= 1e-6, "{name}: {:.1e}", off(got, want));
    }
    // Every operator of every architecture is among them.
    let tried: BTreeSet<&str> = model.nodes.iter().map(|node| node.op.as_str()).collect();
    for arch in nets::archs() {
        let (_, params) = network(arch.name, 3);
        let written = onnx::model(arch, &params, Answer::Logits, vec![]);
        let missing: Vec<&str> = written.nodes.iter().map(|node| node.op.as_str()).filter(|op| !tried.contains(op)).collect();
        assert!(missing.is_empty(), "{}: add {missing:?} to tests/golden/onnx_operators.py", arch.name);
    }
    // A file that is cut short is refused with its name.
    let folder = tempfile::tempdir().unwrap();
    let short = folder.path().join("short.onnx");
    std::fs::write(&short, &std::fs::read(file("onnx")).unwrap()[..3000]).unwrap();
    assert!(onnx::Model::read(&short).unwrap_err().to_string().contains("short.onnx"));
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
            torchscript::save(&path, &graph::module(arch, &params, answer)).unwrap();
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
    torchscript::save(&path, &graph::module(nets::find("resnet18").unwrap(), &params, Answer::Maps)).unwrap();
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
        torchscript::save(&path, &graph::module(nets::find(arch).unwrap(), &params, Answer::Maps)).unwrap();
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
    let targets = ["torchscript", "onnx", "timm", "torchvision", "mmdet", "detectron2", "safetensors"];
    let asked: Vec<&str> = targets.iter().flat_map(|t| ["--to", t]).collect();
    let output = export(&file, &out, &asked);
    assert!(output.status.success(), "{}", text(&output));
    let files =
        ["resnet18.pt", "resnet18.onnx", "model.safetensors", "resnet18.pth", "resnet18.pth", "resnet18.pkl", "resnet18.safetensors"];
    for (target, name) in targets.iter().zip(files) {
        let folder = out.join(target);
        let mut held: Vec<String> = std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        held.sort();
        let mut want = vec!["README.md", "check.py", "export.json", "golden.npz", name];
        want.extend(match *target {
            "timm" => Some("config.json"),
            "torchvision" => Some("export.py"),
            "mmdet" => Some("mask_rcnn.py"),
            _ => None,
        });
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

    // ONNX: the file answers as the network does, at another batch and size too, and says what its images are.
    let flat = onnx::Model::read(&out.join("onnx/resnet18.onnx")).unwrap();
    let x = images(3, 64, 96);
    let want = tch::no_grad(|| net.forward(&x, Pass::EVAL));
    for (got, want) in flat.run(&x).unwrap().iter().zip(&want.maps) {
        assert!(off(got, want) <= 1e-5);
    }
    assert!(flat.metadata.contains(&("std".to_string(), "[0.2,0.25,0.3]".to_string())), "{:?}", flat.metadata);

    // timm: what its create_model reads. Without a classifier there are no classes.
    let config: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(out.join("timm/config.json")).unwrap()).unwrap();
    assert_eq!((&config["architecture"], &config["num_classes"]), (&"resnet18".into(), &0.into()));
    assert_eq!(config["pretrained_cfg"]["std"], serde_json::json!([0.2, 0.25, 0.3]));
    assert_eq!(config["pretrained_cfg"]["input_size"], serde_json::json!([3, 32, 32]));

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
    let output = export(&file, &out, &["--to", "timm", "--with-classifier"]);
    assert!(output.status.success(), "{}", text(&output));
    let config: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(out.join("timm/config.json")).unwrap()).unwrap();
    assert_eq!(config["architecture"], "swin_tiny_patch4_window7_224");
    assert_eq!(config["label_names"], serde_json::json!(["0", "1", "2", "3", "4"]));
    let names: BTreeSet<String> = weights::read(&out.join("timm/model.safetensors")).unwrap().tensors.into_iter().map(|(n, _)| n).collect();
    // timm reckons the index of positions itself; all else is there.
    assert_eq!(names.len(), params.vars.len());
    assert!(names.contains("head.fc.weight") && names.contains("norm.weight") && names.contains("layers.1.downsample.reduction.weight"));

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
    for target in ["timm", "torchvision", "mmdet", "detectron2"] {
        assert_refused(&export(&file, &out, &["--to", target]), 2, &[target, "resnet8", "resnet50", "torchscript", "onnx"]);
    }
    assert_refused(&export(&file, &out, &["--to", "tflite"]), 2, &["`tflite`", "torchscript", "onnx", "detectron2"]);
    assert_refused(&export(&file, &out, &["--to", "torchscript", "--set", "tolerance=0"]), 2, &["tolerance", "more than 0"]);
    // No file is nearer to the network than the network is to itself in f64.
    let rounded = export(&file, &folder.path().join("rounded"), &["--to", "torchscript", "--to", "onnx", "--set", "tolerance=1e-12"]);
    assert!(rounded.status.success(), "{}", text(&rounded));
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
    torchscript::save(&archive, &graph::module(nets::find("resnet8").unwrap(), &params, Answer::Maps)).unwrap();
    assert_refused(&export(&archive, &out, &as_resnet8), 2, &["archive.pt", "TorchScript"]);
    assert!(!out.exists(), "nothing was written");
    assert!(torchscript::names(&noise).unwrap_err().to_string().contains("noise.pth"));

    // And whole it goes; without --to, to the formats that take it.
    assert!(export(&whole, &out, &as_resnet8).status.success());
    let output = export(&whole, &out, &["--arch", "resnet8", "--normalisation", "none"]);
    assert!(output.status.success() && text(&output).contains("left out torchvision"), "{}", text(&output));
    assert!(out.join("onnx/resnet8.onnx").exists() && !out.join("torchvision").exists());
    // What a network for small images cannot be is not promised beside it.
    let readme = std::fs::read_to_string(out.join("torchscript/README.md")).unwrap();
    assert!(!readme.contains("MaskRCNN") && !readme.contains("`torchvision`"), "{readme}");
}

/// protocols/coco/detect.py appends to the tables that mcl-eval makes.
#[test]
fn detections_have_the_columns_of_all_measurements() {
    let script = std::fs::read_to_string("protocols/coco/detect.py").unwrap();
    let listed = script.split_once("COLUMNS = (").unwrap().1.split_once(").split()").unwrap().0.replace('"', " ");
    let columns: Vec<&str> = listed.split_whitespace().collect();
    assert_eq!(mcl::eval::record::csv(&[]).unwrap().trim(), columns.join(","));
}

#[test]
fn detections_stand_beside_the_papers() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    std::fs::create_dir(&run).unwrap();
    let row = |metric: &str, value: f64, variant: &str| {
        serde_json::json!({
            "command": "detect", "dataset": "coco", "metric": metric, "value": value, "variant": variant, "method": "l_mcl", "arch": "resnet18",
            "subject": "run/peer-0", "run": run, "pretrained_on": "imagenet", "protocol": "export-coco", "n_test": 5000,
        })
    };
    let rows = [row("box_map", 34.5, ""), row("mask_map", 32.4, ""), row("box_map", 1.25, "limit=20")];
    std::fs::write(run.join("results.jsonl"), rows.map(|r| format!("{r}\n")).concat()).unwrap();
    std::fs::write(run.join("metrics.jsonl"), "{\"epoch\":1,\"test.peer0.top1\":70.0,\"test.peer1.top1\":70.0}\n").unwrap();
    let report = |recipe: &str| {
        std::fs::write(run.join("recipe.toml"), recipe).unwrap();
        let out = folder.path().join("report");
        let output = Command::new(EVAL).arg("report").arg("--run").arg(&run).arg("--out").arg(&out).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        std::fs::read_to_string(out.join("report.md")).unwrap()
    };
    let papers = std::fs::read_to_string("protocols/pretrain/imagenet-resnet18.toml").unwrap();
    let said = report(&papers);
    // The paper: boxes 35.0, masks 32.1. What was measured on twenty images is not set beside them.
    for (what, values) in [("coco box_map", ["34.50", "35.00", "-0.50"]), ("coco mask_map", ["32.40", "32.10", "+0.30"])] {
        for (row, value) in ["ours", "paper", "gap"].iter().zip(values) {
            let line = format!("| resnet18 | {row} | {value} | {what} |");
            assert!(said.contains(&line), "{line} is not in\n{said}");
        }
    }
    assert!(!said.contains("| ours | 1.25"), "{said}");
    // Backbones of a shorter run are another experiment.
    let said = report(&papers.replace("epochs = 90", "epochs = 10"));
    assert!(!said.contains("| gap |") && said.contains("train.epochs is 10 here and 90 there"), "{said}");
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
fn documented_names_of_mmdet_timm_and_detectron2() {
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
    let timm = [
        ("features.0.0.weight", "patch_embed.proj.weight"),
        ("features.0.2.bias", "patch_embed.norm.bias"),
        ("features.1.1.attn.relative_position_bias_table", "layers.0.blocks.1.attn.relative_position_bias_table"),
        ("features.2.reduction.weight", "layers.1.downsample.reduction.weight"),
        ("features.5.4.mlp.0.bias", "layers.2.blocks.4.mlp.fc1.bias"),
        ("features.7.1.mlp.3.weight", "layers.3.blocks.1.mlp.fc2.weight"),
        ("norm.bias", "norm.bias"),
        ("head.weight", "head.fc.weight"),
    ];
    for (ours, theirs) in timm {
        assert_eq!(frameworks::timm_swin_name(ours).as_deref(), Some(theirs));
        assert_eq!(frameworks::from_timm_swin_name(theirs), ours);
    }
    assert_eq!(frameworks::timm_swin_name("features.1.0.attn.relative_position_index"), None);
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
