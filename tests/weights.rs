//! Weights in and out of files, and what `mcl-eval embed` makes of them.

mod support;

use std::path::Path;
use std::process::{Command, Output};

use mcl::error::Error;
use mcl::nets::layers::Pass;
use mcl::nets::{self, Network};
use mcl::params::{Named, Params, Scope};
use mcl::weights::safetensors::{Reader, Texts};
use mcl::weights::{self, Classifier, LoadOptions, Meta, safetensors};
use support::{EVAL, assert_refused, text};
use tch::{Device, Kind, Tensor};

fn meta(arch: &str, classes: usize) -> Meta {
    Meta {
        arch: arch.to_string(),
        classes: (0..classes).map(|c| format!("class \"{c}\"")).collect(),
        image_size: 32,
        mean: [0.5071, 0.4867, 0.4408],
        std: [0.2675, 0.2565, 0.2761],
        interpolation: "bilinear".to_string(),
        run: "2024".to_string(),
        recipe: "0123abcd".to_string(),
        peer: Some(1),
        dataset: Some("cifar100".to_string()),
        epoch: None,
    }
}

/// A network whose buffers are not what they start as.
fn trained(arch: &str, classes: i64) -> (Network, Params) {
    let (net, params) = Network::build(nets::find(arch).unwrap(), classes, 5, Device::Cpu, Kind::Float);
    let _guard = tch::no_grad_guard();
    for (i, (name, t)) in params.buffers.iter().enumerate() {
        let mut t = t.shallow_clone();
        match name.rsplit('.').next() {
            Some("num_batches_tracked") => drop(t.fill_(12_345_678_901 + i as i64)),
            Some("running_mean") => drop(t.fill_(0.05 * (i as f64).sin())),
            Some("running_var") => drop(t.fill_(2.0 + 0.5 * (i as f64).cos())),
            _ => {}
        }
    }
    (net, params)
}

fn blank(arch: &str, classes: i64) -> Params {
    let scope = Scope::blank(Device::Cpu, Kind::Float);
    Network::new(nets::find(arch).unwrap(), &scope, classes);
    scope.params()
}

fn same(a: &Named, b: &Named) {
    assert_eq!(a.len(), b.len());
    for ((name, a), (other, b)) in a.iter().zip(b) {
        assert_eq!((name, a.kind(), a.size()), (other, b.kind(), b.size()));
        assert_eq!(a, b, "{name}");
    }
}

fn sorted(mut named: Named) -> Named {
    named.sort_by(|a, b| a.0.cmp(&b.0));
    named
}

#[test]
fn a_state_comes_back_to_the_bit_through_both_formats() {
    let folder = tempfile::tempdir().unwrap();
    let (st, pth) = (folder.path().join("w.safetensors"), folder.path().join("w.pth"));
    for arch in nets::archs().filter(|arch| !["resnet34", "swin_s"].contains(&arch.name)) {
        let (_, params) = trained(arch.name, 10);
        let meta = meta(arch.name, 10);
        weights::save_safetensors(&st, &params.named(), &meta).unwrap();
        weights::save_pth(&pth, &params.named()).unwrap();
        for (path, kept) in [(&st, Some(&meta)), (&pth, None)] {
            let read = weights::read(path).unwrap();
            assert_eq!(read.meta.as_ref(), kept, "{}", arch.name);
            same(&sorted(read.tensors.iter().map(|(n, t)| (n.clone(), t.shallow_clone())).collect()), &params.named());
            let loaded = blank(arch.name, 10);
            let report = weights::load_into(&loaded, &read, arch, &LoadOptions::default()).unwrap();
            same(&loaded.named(), &params.named());
            assert_eq!((report.matched, report.wanted), (params.named().len(), params.named().len()), "{}", arch.name);
            assert!(report.missing.is_empty() && report.unexpected.is_empty() && report.classifier && report.prefix.is_empty());
        }
    }
    // The same tensors give the same bytes, and nothing is left beside them.
    let (_, params) = trained("resnet8", 10);
    let again = folder.path().join("again.pth");
    weights::save_pth(&pth, &params.named()).unwrap();
    weights::save_pth(&again, &params.named()).unwrap();
    assert_eq!(std::fs::read(&pth).unwrap(), std::fs::read(&again).unwrap());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 3);
}

#[test]
fn safetensors_files_are_what_the_reference_crate_expects() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w.safetensors");
    let tensors: Named = vec![
        ("b".to_string(), Tensor::from_slice(&[1.5f32, -2.0])),
        ("a".to_string(), Tensor::from_slice(&[3i64])),
        ("half".to_string(), Tensor::from_slice(&[1f32, 2.0, 3.0]).to_kind(Kind::Half)),
        ("flag".to_string(), Tensor::from_slice(&[true, false])),
        ("turned".to_string(), Tensor::from_slice(&[1f64, 2.0, 3.0, 4.0]).view([2, 2]).tr()),
        ("none".to_string(), Tensor::zeros([0, 4], (Kind::Float, Device::Cpu))),
    ];
    let texts: Texts = [("architecture".to_string(), "x".to_string())].into();
    safetensors::save(&path, &tensors, &texts).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let file = ::safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.len(), 6);
    let view = file.tensor("turned").unwrap();
    let numbers: Vec<f64> = view.data().chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!((view.dtype(), view.shape(), numbers), (::safetensors::Dtype::F64, &[2, 2][..], vec![1.0, 3.0, 2.0, 4.0]));
    assert_eq!(file.tensor("b").unwrap().data(), [1.5f32.to_le_bytes(), (-2f32).to_le_bytes()].concat());
    let (_, header) = ::safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(header.metadata().as_ref().unwrap()["architecture"], "x");
    assert_eq!(bytes.len() % 2, 0);
    let mut reader = Reader::open(&path).unwrap();
    assert_eq!(reader.rows("turned", 1, 1).unwrap(), Tensor::from_slice(&[2f64, 4.0]).view([1, 2]));
    assert_eq!(reader.shape("none"), Some(vec![0, 4]));
}

#[test]
fn state_dicts_of_torch_are_read_whatever_their_types_and_strides() {
    for name in ["mixed.pth", "legacy.pth"] {
        let read = weights::read(&Path::new("tests/golden").join(name)).unwrap();
        assert!(read.meta.is_none());
        let get = |key: &str| read.tensors.iter().find(|(n, _)| n == key).map(|(_, t)| t).unwrap_or_else(|| panic!("{name}: no {key}"));
        assert_eq!(read.tensors.len(), 17, "{name}");
        let kinds = [
            ("float", Kind::Float, vec![2, 3]),
            ("double", Kind::Double, vec![3]),
            ("half", Kind::Half, vec![4]),
            ("bfloat16", Kind::BFloat16, vec![4]),
            ("long", Kind::Int64, vec![2, 2]),
            ("int", Kind::Int, vec![2]),
            ("short", Kind::Int16, vec![3]),
            ("char", Kind::Int8, vec![3]),
            ("scalar", Kind::Int64, vec![]),
            ("transposed", Kind::Float, vec![2, 3]),
            ("sliced", Kind::Float, vec![2, 2]),
            ("empty", Kind::Float, vec![0, 3]),
            ("parameter", Kind::Float, vec![2]),
        ];
        for (key, kind, size) in kinds {
            let t = get(key);
            assert_eq!((t.kind(), t.size()), (kind, size), "{name}: {key}");
            let numbers = Vec::<f64>::try_from(t.to_kind(Kind::Double).reshape([-1])).unwrap();
            assert!(numbers.iter().enumerate().all(|(j, x)| *x == j as f64 - 2.0), "{name}: {key} {numbers:?}");
        }
        assert_eq!(get("byte"), &Tensor::from_slice(&[0u8, 1, 2]), "{name}");
        assert_eq!(get("flag"), &Tensor::from_slice(&[false, true, false]), "{name}");
        assert_eq!(get("offset"), &Tensor::from_slice(&[2f32, 3.0, 4.0, 5.0]), "{name}");
        assert_eq!(get("tail"), &Tensor::from_slice(&[2f32, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]), "{name}");
    }
}

/// Written by golden/make_state_dicts.py.
#[test]
fn state_dicts_are_found_however_checkpoints_nest_them() {
    let small = ["conv.weight", "fc.bias"];
    let under = |prefixes: &[&str]| prefixes.iter().flat_map(|p| small.map(|name| format!("{p}{name}"))).collect::<Vec<_>>();
    for (form, mut wanted) in [
        ("student", under(&[""])),
        ("teacher", under(&[""])),
        ("distiller", under(&["module.student.", "module.teacher."])),
        ("deep", [under(&["checkpoint.snet."]), vec!["checkpoint.acc".to_string()]].concat()),
        ("pair", [under(&["model_s.", "model_t."]), vec!["acc".to_string()]].concat()),
    ] {
        let read = weights::read(Path::new(&format!("tests/golden/form-{form}.pth"))).unwrap();
        let tensors = sorted(read.tensors);
        wanted.sort();
        assert_eq!(tensors.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>(), wanted, "{form}");
        for (name, tensor) in tensors.iter().filter(|(name, _)| name.ends_with("conv.weight")) {
            assert_eq!(*tensor, Tensor::from_slice2(&[[-2f32, -1.0, 0.0], [1.0, 2.0, 3.0]]), "{form} {name}");
        }
    }
}

#[test]
fn students_are_found_beside_teachers_and_architectures_by_their_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("w.pth");
    let (_, student) = trained("resnet8x4", 10);
    let (_, teacher) = trained("resnet32x4", 10);
    // Every name of the student is among the teacher's, with the same shape.
    let mut both = renamed(&student, |ours| format!("module.student.{ours}"));
    both.extend(renamed(&teacher, |ours| format!("module.teacher.{ours}")));
    both.push(("best_acc".to_string(), Tensor::from(71.5)));
    weights::save_pth(&file, &both).unwrap();
    for (name, prefix, params) in [("resnet8x4", "module.student.", &student), ("resnet32x4", "module.teacher.", &teacher)] {
        let opened = weights::open(&file, Some(nets::find(name).unwrap()), Device::Cpu, &LoadOptions::default()).unwrap();
        assert_eq!((opened.report.prefix.as_str(), opened.report.others.len(), opened.classes), (prefix, 0, Some(10)), "{}", opened.report);
        same(&opened.params.named(), &params.named());
    }
    // Names and shapes tell the architecture where nothing else does, and that the one that is named is wrong.
    for arch in ["resnet110_basic", "mobile_half", "shuffle_v2", "vgg8"] {
        let found = nets::find(arch).unwrap();
        let (_, params) = trained(arch, 10);
        let released = renamed(&params, |ours| format!("module.{}", nets::rename(ours, found.released.baseline)));
        weights::save_pth(&file, &released).unwrap();
        let opened = weights::open(&file, None, Device::Cpu, &LoadOptions::default()).unwrap();
        assert_eq!((opened.arch.name, opened.classes), (arch, Some(10)));
        same(&opened.params.named(), &params.named());
    }
    let wrong = weights::open(&file, Some(nets::find("vgg13").unwrap()), Device::Cpu, &LoadOptions::default());
    let message = wrong.err().unwrap().to_string();
    assert!(message.ends_with("w.pth: holds a vgg8, not a vgg13, by the names and shapes of its tensors"), "{message}");
}

fn weights_of(tensors: Named) -> weights::Weights {
    weights::Weights { path: "some/file.pth".into(), tensors, meta: None }
}

fn renamed(params: &Params, name: impl Fn(&str) -> String) -> Named {
    params.named().into_iter().map(|(n, t)| (name(&n), t)).collect()
}

#[test]
fn prefixes_and_released_names_are_found_out() {
    for (arch, prefix) in [
        ("resnet8", ""),
        ("resnet8", "module."),
        ("resnet8", "backbone."),
        ("wrn_16_2", "module_list.0.backbone."),
        ("hcgnet_a1", "module.module_list.3.backbone."),
        ("shufflenet_v2_x0_5", "net1.module_list.0.backbone."),
    ] {
        let arch = nets::find(arch).unwrap();
        let (_, params) = trained(arch.name, 6);
        for rows in [&[][..], arch.released.baseline, arch.released.lmcl] {
            let mut tensors = renamed(&params, |ours| format!("{prefix}{}", nets::rename(ours, rows)));
            if !prefix.is_empty() {
                tensors.push(("module_list.0.auxiliary_classifier.fc1.bias".to_string(), Tensor::zeros([6], (Kind::Float, Device::Cpu))));
            }
            let loaded = blank(arch.name, 6);
            let report = weights::load_into(&loaded, &weights_of(tensors), arch, &LoadOptions::default()).unwrap();
            assert_eq!((report.prefix.as_str(), report.beside), (prefix, usize::from(!prefix.is_empty())), "{}", arch.name);
            assert!(report.missing.is_empty() && report.matched == params.named().len(), "{}: {report}", arch.name);
            same(&loaded.named(), &params.named());
        }
    }
    // Two networks in one file: the first is taken and the other named; `strip` chooses.
    let arch = nets::find("resnet8").unwrap();
    let (_, params) = trained("resnet8", 6);
    let other = blank("resnet8", 6);
    let both = || {
        [(0, &params), (1, &other)]
            .iter()
            .flat_map(|(m, p)| renamed(p, |ours| format!("module_list.{m}.backbone.{ours}")))
            .collect::<Named>()
    };
    let loaded = blank("resnet8", 6);
    let report = weights::load_into(&loaded, &weights_of(both()), arch, &LoadOptions::default()).unwrap();
    assert_eq!((report.prefix.as_str(), report.others), ("module_list.0.backbone.", vec!["`module_list.1.backbone.`".to_string()]));
    same(&loaded.named(), &params.named());
    let chosen = LoadOptions { strip: Some("module_list.1.backbone.".to_string()), ..LoadOptions::default() };
    weights::load_into(&loaded, &weights_of(both()), arch, &chosen).unwrap();
    same(&loaded.named(), &other.named());
}

fn refusal(result: mcl::error::Result<weights::LoadReport>) -> String {
    let error = result.unwrap_err();
    assert!(matches!(error, Error::File { .. } | Error::Value { .. }), "{error}");
    assert_eq!(error.exit_code(), 2, "{error}");
    let message = error.to_string();
    assert!(message.starts_with("some/file.pth: ") && !message.contains('\n'), "{message}");
    message
}

#[test]
fn a_load_says_what_is_missing_unexpected_or_of_another_shape() {
    let small = nets::find("resnet8").unwrap();
    let strict = LoadOptions::default();
    let (_, params) = trained("resnet20", 6);
    // Every name of resnet8 is in a resnet20, with the same shape: the surplus is what tells them apart.
    let message = refusal(weights::load_into(&blank("resnet8", 6), &weights_of(params.named()), small, &strict));
    assert!(message.contains("does not fit resnet8: 56 of 56 tensors matched; unexpected 72 (layer1.1.bn1.bias, "), "{message}");
    let message = refusal(weights::load_into(&blank("resnet32", 6), &weights_of(params.named()), nets::find("resnet32").unwrap(), &strict));
    assert!(message.contains("missing 60 (layer1.3.bn1.bias, "), "{message}");
    let message = refusal(weights::load_into(&blank("resnet20", 7), &weights_of(params.named()), nets::find("resnet20").unwrap(), &strict));
    assert!(message.contains("other shapes 2 (fc.bias: [6] in the file, [7] in the network, "), "{message}");
    let message = refusal(weights::load_into(&blank("wrn_16_2", 6), &weights_of(params.named()), nets::find("wrn_16_2").unwrap(), &strict));
    assert!(message.contains("does not fit wrn_16_2"), "{message}");

    // In part, when that is wanted: what matches is loaded and the rest stays.
    let loaded = blank("resnet20", 7);
    let partial = LoadOptions { allow_partial: true, ..LoadOptions::default() };
    let report = weights::load_into(&loaded, &weights_of(params.named()), nets::find("resnet20").unwrap(), &partial).unwrap();
    assert_eq!((report.matched, report.misshapen.len()), (report.wanted - 2, 2));
    for ((name, loaded), (_, saved)) in loaded.named().iter().zip(params.named()) {
        if name.starts_with("fc.") { assert_eq!(loaded, &loaded.zeros_like()) } else { assert_eq!(loaded, &saved, "{name}") }
    }

    // Metadata that name another architecture settle it.
    let mut weights = weights_of(params.named());
    weights.meta = Some(meta("resnet20", 6));
    let message = refusal(weights::load_into(&blank("resnet8", 6), &weights, small, &strict));
    assert!(message.contains("holds a resnet20, not a resnet8"), "{message}");
}

#[test]
fn a_missing_classifier_or_counter_is_no_fault_where_features_are_wanted() {
    let arch = nets::find("resnet8").unwrap();
    let (_, params) = trained("resnet8", 6);
    let without = |part: &str| params.named().into_iter().filter(|(n, _)| !n.contains(part)).collect::<Named>();
    let message = refusal(weights::load_into(&blank("resnet8", 6), &weights_of(without("fc.")), arch, &LoadOptions::default()));
    assert!(message.contains("missing 2 (fc.bias, fc.weight)"), "{message}");
    let optional = LoadOptions { classifier: Classifier::Optional, ..LoadOptions::default() };
    let report = weights::load_into(&blank("resnet8", 6), &weights_of(without("fc.")), arch, &optional).unwrap();
    assert!(
        !report.classifier && report.matched == report.wanted && report.to_string().ends_with("; no classifier, so no logits"),
        "{report}"
    );
    let report =
        weights::load_into(&blank("resnet8", 6), &weights_of(without("num_batches_tracked")), arch, &LoadOptions::default()).unwrap();
    assert!(report.classifier && report.matched == report.wanted && report.missing.is_empty(), "{report}");
}

fn embed(folder: &Path, args: &[&str]) -> Output {
    Command::new(EVAL).current_dir(folder).arg("embed").args(args).args(["--device", "cpu", "--threads", "2"]).output().unwrap()
}

/// Images that differ from one another, in f32.
fn images(n: i64, side: i64) -> Tensor {
    let values: Vec<f32> = (0..n * 3 * side * side).map(|j| ((0.37 * j as f64).sin() + (0.001 * j as f64).cos()) as f32).collect();
    Tensor::from_slice(&values).view([n, 3, side, side])
}

fn save(path: &Path, name: &str, tensor: Tensor) {
    safetensors::save(path, &vec![(name.to_string(), tensor)], &Texts::new()).unwrap();
}

#[test]
fn embed_gives_the_numbers_of_the_plain_forward() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let _guard = tch::no_grad_guard();
    for (arch, n, side) in [
        ("resnet56", 37, 32),
        ("resnet110", 3, 32),
        ("wrn_16_2", 5, 32),
        ("shufflenet_v2_x0_5_cifar", 5, 32),
        ("hcgnet_a1", 3, 32),
        ("resnet18", 3, 64),
        ("swin_t", 2, 64),
    ] {
        let (net, params) = trained(arch, 10);
        let images = images(n, side);
        weights::save_pth(&at("w.pth"), &params.named()).unwrap();
        save(&at("x.safetensors"), "images", images.shallow_clone());
        let output = embed(
            folder.path(),
            &["--arch", arch, "--weights", "w.pth", "--images", "x.safetensors", "--out", "y.safetensors", "--stages", "--json"],
        );
        assert!(output.status.success(), "{}", text(&output));
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(
            report["images"] == n && report["matched"] == report["wanted"] && report["images_per_second"].as_f64().unwrap() > 0.0,
            "{report}"
        );
        let plain = net.forward(&images, Pass::EVAL);
        let mut reader = Reader::open(&at("y.safetensors")).unwrap();
        let mut names = reader.names();
        names.sort();
        let stages = (1..=plain.maps.len()).map(|l| format!("stage.{l}"));
        assert_eq!(names, ["features".to_string(), "logits".to_string()].into_iter().chain(stages).collect::<Vec<_>>(), "{arch}");
        let wanted = [("features".to_string(), plain.feat()), ("logits".to_string(), plain.logit())];
        for (name, want) in wanted.into_iter().chain(plain.maps.iter().enumerate().map(|(l, map)| (format!("stage.{}", l + 1), map))) {
            let got = reader.tensor(&name).unwrap();
            assert_eq!(got.size(), want.size(), "{arch} {name}");
            let difference = ((&got - want).abs().max() / want.abs().max()).double_value(&[]);
            assert!(difference < 1e-4, "{arch} {name}: {difference}");
        }
    }
}

#[test]
fn embed_reads_a_folder_as_the_metadata_say_and_names_the_rows() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let (_, params) = trained("resnet8", 6);
    weights::save_safetensors(&at("w.safetensors"), &params.named(), &meta("resnet8", 6)).unwrap();
    std::fs::create_dir_all(at("pictures/inside")).unwrap();
    // Twice the side: every pixel four times, so that halving gives it back.
    let pixel = |file: u32, x: u32, y: u32| image::Rgb([(40 * file + 3 * x) as u8, (5 * y) as u8, (7 * x + y) as u8]);
    for (file, name) in ["pictures/b.png", "pictures/a.png", "pictures/inside/c.png"].iter().enumerate() {
        image::RgbImage::from_fn(64, 64, |x, y| pixel(file as u32, x / 2, y / 2)).save(at(name)).unwrap();
    }
    let output = embed(folder.path(), &["--weights", "w.safetensors", "--images", "pictures", "--out", "y.safetensors"]);
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(std::fs::read_to_string(at("y.csv")).unwrap(), "row,file\n0,a.png\n1,b.png\n2,inside/c.png\n");
    // Pillow's triangle filter over a factor of two reaches one pixel beyond each pair, so only the size is checked exactly here;
    // the features are compared with those of the same pixels, resized by hand in the same way.
    let mut reader = Reader::open(&at("y.safetensors")).unwrap();
    assert_eq!(reader.shape("features"), Some(vec![3, 64]));
    assert_eq!(reader.shape("logits"), Some(vec![3, 6]));
    let small = folder.path().join("small");
    std::fs::create_dir_all(&small).unwrap();
    image::RgbImage::from_fn(32, 32, |x, y| pixel(0, x, y)).save(small.join("b.png")).unwrap();
    let output = embed(folder.path(), &["--weights", "w.safetensors", "--images", "small", "--out", "z.safetensors"]);
    assert!(output.status.success(), "{}", text(&output));
    let exact = Reader::open(&at("z.safetensors")).unwrap().tensor("features").unwrap();
    let meta = meta("resnet8", 6);
    let values: Vec<f32> = (0..3 * 32 * 32)
        .map(|j| {
            let (c, y, x) = (j / 1024, j / 32 % 32, j % 32);
            ((f64::from(pixel(0, x as u32, y as u32).0[c]) / 255.0 - meta.mean[c]) / meta.std[c]) as f32
        })
        .collect();
    save(&at("x.safetensors"), "images", Tensor::from_slice(&values).view([1, 3, 32, 32]));
    let output = embed(folder.path(), &["--weights", "w.safetensors", "--images", "x.safetensors", "--out", "v.safetensors"]);
    assert!(output.status.success(), "{}", text(&output));
    let by_hand = Reader::open(&at("v.safetensors")).unwrap().tensor("features").unwrap();
    assert!(((&exact - &by_hand).abs().max() / by_hand.abs().max()).double_value(&[]) < 1e-5);
    let _ = reader.tensor("features").unwrap();
}

#[test]
fn embed_refuses_what_it_cannot_use_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let (_, params) = trained("resnet8", 6);
    weights::save_safetensors(&at("w.safetensors"), &params.named(), &meta("resnet8", 6)).unwrap();
    weights::save_pth(&at("w.pth"), &params.named()).unwrap();
    save(&at("x.safetensors"), "images", images(2, 32));
    for name in ["w.safetensors", "w.pth"] {
        let bytes = std::fs::read(at(name)).unwrap();
        std::fs::write(at(&format!("cut-{name}")), &bytes[..bytes.len() * 2 / 3]).unwrap();
    }
    std::fs::write(at("notes.txt"), "not weights\n").unwrap();
    std::fs::write(at("empty.pth"), "").unwrap();
    std::fs::write(at("list.pth"), b"\x80\x02]q\x00.").unwrap();
    save(&at("other.safetensors"), "pixels", images(2, 32));
    save(&at("flat.safetensors"), "images", images(2, 32).view([2, -1]));
    save(&at("tiny.safetensors"), "images", images(2, 4));
    save(&at("double.safetensors"), "images", images(2, 32).to_kind(Kind::Double));
    std::fs::create_dir(at("nothing")).unwrap();
    let refused = |weights: &str, arch: &str, images: &str, parts: &[&str]| {
        let arch = if arch.is_empty() { vec![] } else { vec!["--arch", arch] };
        let output = embed(folder.path(), &[&["--weights", weights, "--images", images, "--out", "y.safetensors"], &arch[..]].concat());
        assert_refused(&output, 2, parts);
        let message = String::from_utf8_lossy(&output.stderr).to_string();
        // What the load found may come before it.
        assert_eq!(message.lines().filter(|line| !line.starts_with(&format!("{weights}: "))).count(), 1, "{message}");
        assert!(!at("y.safetensors").exists(), "{weights} {images}");
    };
    refused("w.safetensors", "resnet20", "x.safetensors", &["w.safetensors", "resnet8", "not a resnet20"]);
    refused("w.pth", "resnet20", "x.safetensors", &["w.pth", "holds a resnet8, not a resnet20"]);
    weights::save_pth(&at("part.pth"), &params.named().into_iter().filter(|(name, _)| !name.starts_with("conv1")).collect()).unwrap();
    refused("part.pth", "resnet8", "x.safetensors", &["part.pth", "does not fit resnet8", "missing"]);
    refused("w.pth", "resnet9", "x.safetensors", &["unknown architecture `resnet9`", "resnet8"]);
    refused("part.pth", "", "x.safetensors", &["part.pth", "of none of ours", "--arch"]);
    refused("cut-w.safetensors", "resnet8", "x.safetensors", &["cut-w.safetensors", "cut short"]);
    refused("cut-w.pth", "resnet8", "x.safetensors", &["cut-w.pth", "cut short"]);
    refused("notes.txt", "resnet8", "x.safetensors", &["notes.txt", "neither a safetensors file nor a PyTorch state dict"]);
    refused("empty.pth", "resnet8", "x.safetensors", &["empty.pth", "neither"]);
    refused("list.pth", "resnet8", "x.safetensors", &["list.pth", "torch.save"]);
    refused("missing.pth", "resnet8", "x.safetensors", &["missing.pth", "cannot be read"]);
    refused("x.safetensors", "resnet8", "x.safetensors", &["x.safetensors", "does not fit resnet8: 0 of"]);
    refused("w.safetensors", "", "other.safetensors", &["other.safetensors", "`images`", "pixels"]);
    refused("w.safetensors", "", "flat.safetensors", &["flat.safetensors", "[2, 3072]", "[N, 3, H, W]"]);
    refused("w.safetensors", "", "tiny.safetensors", &["tiny.safetensors", "4 x 4", "8 x 8"]);
    refused("w.safetensors", "", "double.safetensors", &["double.safetensors", "f32"]);
    refused("w.safetensors", "", "nothing", &["nothing", "no images"]);
    refused("w.pth", "resnet8", "nothing", &["--mean"]);
    // The output folder does not exist: the machine's refusal, exit 1.
    let output = embed(folder.path(), &["--weights", "w.safetensors", "--images", "x.safetensors", "--out", "no/such/y.safetensors"]);
    assert_refused(&output, 1, &["cannot write", "no/such/y.safetensors"]);
}
