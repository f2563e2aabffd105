//! What lies beside an exported network: golden.npz, README.md, check.py, export.json; and the comparison that lets it be written at all.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use rand_distr::{Distribution, StandardNormal};
use serde_json::{Value, json};
use tch::Tensor;

use super::format::{self, Form, TORCHVISION, Target};
use crate::error::{Error, Result};
use crate::eval::network::TrainedNetwork;
use crate::files;
use crate::nets::{Arch, script};
use crate::rng;

/// What an export turned out to be.
pub struct Facts {
    pub file: PathBuf,
    pub tensors: usize,
    /// The largest difference after reading it back, relative to the larger of 1 and the largest value, at both sizes.
    pub difference: f64,
    about: Value,
}

impl Facts {
    pub fn json(&self, folder: &Path) -> Value {
        let mut about = self.about.clone();
        about["folder"] = folder.display().to_string().into();
        about
    }
}

/// Batch, height and width of the golden input and of the second look, not square. A Swin's golden maps are all larger than a window,
/// because MMDetection shifts windows in smaller ones too, where torchvision and the original do not.
fn sizes(arch: &Arch) -> [[i64; 3]; 2] {
    match arch.image_size {
        ..=64 => [[2, 32, 48], [3, 40, 24]],
        _ if format::is_swin(arch) => [[1, 256, 288], [2, 96, 160]],
        _ => [[2, 96, 128], [1, 256, 160]],
    }
}

/// Standard normal numbers, the same everywhere.
fn images([n, h, w]: [i64; 3]) -> Tensor {
    let mut rng = rng::stream(1, "golden images", &[n as u64, h as u64, w as u64]);
    let values: Vec<f32> = (0..n * 3 * h * w).map(|_| StandardNormal.sample(&mut rng)).collect();
    Tensor::from_slice(&values).view([n, 3, h, w])
}

/// The largest difference relative to the larger of 1 and the largest value; infinite where shapes differ or a number is not one.
fn difference(got: &[Tensor], want: &[Tensor]) -> f64 {
    if got.len() != want.len() {
        return f64::INFINITY;
    }
    let one = |(got, want): (&Tensor, &Tensor)| {
        if got.size() != want.size() {
            return f64::INFINITY;
        }
        let off = (got - want).abs().max().double_value(&[]) / want.abs().max().double_value(&[]).max(1.0);
        if off.is_finite() { off } else { f64::INFINITY }
    };
    got.iter().zip(want).map(one).fold(0.0, f64::max)
}

/// Writes the folder. The network's file gets its name only once it has been read back and gives the same.
pub fn write(
    target: &Target,
    subject: &TrainedNetwork,
    with_classifier: bool,
    folder: &Path,
    tolerance: f64,
    commit: &str,
) -> Result<Facts> {
    let _guard = tch::no_grad_guard();
    fs::create_dir_all(folder).map_err(Error::io("cannot make", folder))?;
    let name = format!("{}.{}", subject.arch.name, target.extension);
    let file = folder.join(&name);
    let sizes = sizes(subject.arch);
    let (mut tensors, mut worst) = (0, 0.0);
    files::write_with(&file, |temporary| {
        tensors = target.write(temporary, subject, with_classifier)?;
        let reloaded = target.open(temporary, subject, with_classifier)?;
        for size in sizes {
            let images = images(size);
            let off = difference(&reloaded(&images)?, &target.reference(subject, &images, with_classifier));
            if off > tolerance {
                let [n, h, w] = size;
                return Err(Error::failed(format!(
                    "{}: read back, it differs from {} by {off:.1e} on {n} images of {w} x {h}; {tolerance:.0e} is allowed; not exported",
                    file.display(),
                    subject.name
                )));
            }
            worst = f64::max(worst, off);
        }
        Ok(())
    })?;

    let input = images(sizes[0]);
    let answers = format::answers(&subject.net.forward(&input, crate::nets::layers::Pass::EVAL), with_classifier);
    let maps: Vec<&Tensor> = answers.iter().take(subject.arch.depth).collect();
    let mut golden = vec![("input".to_string(), input.shallow_clone())];
    golden.extend(answers.iter().enumerate().map(|(l, map)| {
        let name = if l < subject.arch.depth { l.to_string() } else { "logits".to_string() };
        (name, map.contiguous())
    }));
    files::write_with(&folder.join("golden.npz"), |temporary| Ok(Tensor::write_npz(&golden, temporary)?))?;

    let channels: Vec<i64> = maps.iter().map(|map| map.size()[1]).collect();
    let strides: Vec<i64> = maps.iter().map(|map| sizes[0][1] / map.size()[2]).collect();
    let hashes: BTreeMap<String, String> =
        target.tensors(subject, with_classifier)?.iter().map(|(name, t)| Ok((name.clone(), tensor_hash(t)?))).collect::<Result<_>>()?;
    let about = json!({
        "target": target.name, "file": name, "arch": subject.arch.name, "with_classifier": with_classifier,
        "classes": if with_classifier { subject.meta.classes.len() } else { 0 },
        "channels": channels, "strides": strides, "layers": layers(subject), "mean": subject.meta.mean, "std": subject.meta.std,
        "subject": subject.name, "run": subject.run.as_ref().map(|run| run.display().to_string()), "method": subject.method, "peer": subject.peer,
        "pretrained_on": subject.meta.dataset, "epoch": subject.meta.epoch, "weights": subject.file.display().to_string(),
        "weights_hash": subject.hash, "recipe_hash": subject.meta.recipe, "difference": worst, "version": env!("CARGO_PKG_VERSION"),
        "commit": commit, "tensors": hashes,
    });
    let marks = marks(target, subject, with_classifier, &name, &channels, &strides, worst);
    files::write(&folder.join("README.md"), fill(&readme(target, subject, with_classifier), &marks).as_bytes())?;
    files::write(&folder.join("check.py"), fill(check(target, subject), &marks).as_bytes())?;
    files::write(&folder.join("export.json"), format!("{about:#}\n").as_bytes())?;
    let mut about = about;
    about.as_object_mut().expect("an object").remove("tensors"); // hundreds of hashes: for the file only
    Ok(Facts { file, tensors, difference: worst, about })
}

/// Of the numbers in C order.
fn tensor_hash(tensor: &Tensor) -> Result<String> {
    let tensor = tensor.f_detach()?.f_contiguous()?;
    let mut bytes = vec![0; tensor.numel() * tensor.kind().elt_size_in_bytes()];
    tensor.f_copy_data_u8(&mut bytes, tensor.numel())?;
    Ok(files::sha256(&bytes))
}

/// Which child gives which map: what IntermediateLayerGetter is told.
fn layers(subject: &TrainedNetwork) -> serde_json::Map<String, Value> {
    let layers = script::layers(subject.arch, &subject.params).into_iter();
    layers.filter_map(|(name, map)| map.map(|l| (name, l.to_string().into()))).collect()
}

/// The beginnings of the names of the stem and the first stage.
fn first_stage(subject: &TrainedNetwork) -> Vec<String> {
    if format::is_swin(subject.arch) {
        return vec!["features.0.".to_string(), "features.1.".to_string()];
    }
    let layers = script::layers(subject.arch, &subject.params);
    let first = layers.iter().position(|(_, map)| *map == Some(0)).expect("the first map comes from a child");
    let names = layers[..=first].iter().map(|(name, _)| format!("{name}."));
    names.filter(|name| subject.params.vars.iter().any(|(n, _)| n.starts_with(name))).collect()
}

/// What the whole network has and the backbone has not, as beginnings of names.
fn absent(subject: &TrainedNetwork) -> Vec<String> {
    let kept = script::backbone_names(subject.arch, &subject.params);
    let mut names: Vec<String> = vec![];
    for (name, _) in subject.params.all().filter(|(name, _)| !kept.contains(name)) {
        let first = format!("{}.", name.split('.').next().unwrap_or_default());
        if !names.contains(&first) {
            names.push(first);
        }
    }
    names
}

fn readme(target: &Target, subject: &TrainedNetwork, with_classifier: bool) -> String {
    let detector = |text: &'static str| if with_classifier { "" } else { text };
    let swin = format::is_swin(subject.arch);
    let (body, section) = match target.form {
        Form::TorchScript => (include_str!("templates/torchscript.md"), detector(include_str!("templates/torchscript_detector.md"))),
        Form::Torchvision if swin => (include_str!("templates/torchvision.md"), detector(include_str!("templates/torchvision_swin.md"))),
        Form::Torchvision => (include_str!("templates/torchvision.md"), detector(include_str!("templates/torchvision_detector.md"))),
        Form::Mmdet if swin => (include_str!("templates/mmdet_swin.md"), ""),
        Form::Mmdet => (include_str!("templates/mmdet_resnet.md"), ""),
        Form::Detectron2 => (include_str!("templates/detectron2.md"), ""),
        Form::Safetensors => (include_str!("templates/safetensors.md"), ""),
    };
    format!("{}{}", include_str!("templates/common.md"), body.replace("@DETECTOR@\n", section))
}

fn check(target: &Target, subject: &TrainedNetwork) -> &'static str {
    match target.form {
        Form::TorchScript => include_str!("templates/torchscript.py"),
        Form::Torchvision => include_str!("templates/torchvision.py"),
        Form::Mmdet => include_str!("templates/mmdet.py"),
        Form::Detectron2 => include_str!("templates/detectron2.py"),
        Form::Safetensors if TORCHVISION.contains(&subject.arch.name) => include_str!("templates/torchvision.py"),
        Form::Safetensors => include_str!("templates/safetensors.py"),
    }
}

type Marks = Vec<(&'static str, String)>;

fn fill(text: &str, marks: &Marks) -> String {
    let filled = marks.iter().fold(text.to_string(), |text, (mark, value)| text.replace(&format!("@{mark}@"), value));
    // Sections that fall away leave their empty lines.
    let mut lines: Vec<&str> = vec![];
    for line in filled.lines() {
        if !(line.is_empty() && lines.last().is_none_or(|last| last.is_empty())) || text.starts_with("\"\"\"") {
            lines.push(line);
        }
    }
    lines.join("\n").trim_end().to_string() + "\n"
}

/// As Python writes a tuple of texts.
fn tuple(names: &[String]) -> String {
    let quoted: Vec<String> = names.iter().map(|n| format!("\"{n}\"")).collect();
    format!("({}{})", quoted.join(", "), if names.len() == 1 { "," } else { "" })
}

fn dict(map: &serde_json::Map<String, Value>) -> String {
    let pairs: Vec<String> = map.iter().map(|(k, v)| format!("\"{k}\": {v}")).collect();
    format!("{{{}}}", pairs.join(", "))
}

fn list(values: &[f64]) -> String {
    format!("[{}]", values.iter().map(|v| v.to_string()).collect::<Vec<_>>().join(", "))
}

fn marks(
    target: &Target,
    subject: &TrainedNetwork,
    with_classifier: bool,
    file: &str,
    channels: &[i64],
    strides: &[i64],
    difference: f64,
) -> Marks {
    let (arch, meta) = (subject.arch, &subject.meta);
    let swin = format::is_swin(arch);
    let of_255 = |values: [f64; 3]| list(&values.map(|v| (v * 255.0 * 1e6).round() / 1e6));
    let maps: Vec<String> = (0..channels.len()).map(|l| format!("| \"{l}\" | {} | {} |", channels[l], strides[l])).collect();
    let absent = if with_classifier { vec![] } else { absent(subject) };
    let in_torchvision = TORCHVISION.contains(&arch.name);
    let layers = dict(&layers(subject));
    let pretrained = match &meta.dataset {
        Some(dataset) => format!(
            "{} pre-trained on {dataset}{}.",
            subject.name,
            if subject.method.is_empty() { String::new() } else { format!(" with {}", subject.method) }
        ),
        None => format!("From {}.", subject.file.display()),
    };
    let what = match with_classifier {
        true => format!("the whole network, {} classes", meta.classes.len()),
        false => {
            "the backbone, which gives a map after every stage; without classifier and without what only the classifier needs".to_string()
        }
    };
    let whole = match with_classifier {
        true => "model.load_state_dict(state)             # strict".to_string(),
        false => format!("model.load_state_dict(state, strict=False)   # missing: {} and nothing else", absent.join("*, ") + "*"),
    };
    let fpn = match swin {
        true => "",
        false => "\ntorchvision's own helper takes it too: `BackboneWithFPN(body, @LAYERS@, @CHANNELS@, 256)`.\n",
    };
    let given = format!("sys.argv[1] if len(sys.argv) > 1 else here / \"{file}\"");
    let (imports, read) = match target.form {
        Form::Safetensors => ("from safetensors.torch import load_file\n", format!("load_file({given})")),
        _ => ("", format!("torch.load({given}, weights_only=True)")),
    };
    let build = match swin {
        true => format!("SwinTransformer(embed_dims=96, depths={}, num_heads=[3, 6, 12, 24], window_size=7)", depths(arch.name)),
        false => format!("ResNet(depth={}, out_indices=(0, 1, 2, 3), style=\"pytorch\")", depth(arch.name)),
    };
    let norm = match swin {
        true => "Norms are LayerNorm (eps 1e-5); the maps come before the last one.",
        false => "Norms are BatchNorm (eps 1e-5, momentum 0.1), running statistics included.",
    };
    let needs = match target.form {
        Form::TorchScript => "torch and numpy",
        Form::Torchvision => "torchvision and numpy",
        Form::Mmdet => "mmdet",
        Form::Detectron2 => "detectron2",
        Form::Safetensors if in_torchvision => "safetensors and torchvision",
        Form::Safetensors => "safetensors and numpy",
    };
    let checks = match in_torchvision {
        true => "loads it strictly into torchvision's network and compares its maps",
        false => "compares every tensor with its hash in `export.json`; the maps in `golden.npz` are for an implementation of yours",
    };
    let frozen_norm = if depth(arch.name) > 0 { ", norm_layer=FrozenBatchNorm2d" } else { "" };
    let call = match with_classifier {
        true => "logits = body(images)",
        false => "maps = body(images)                      # {\"0\": ..., \"1\": ..., ...}, shallow to deep",
    };
    vec![
        ("FPN", fpn.to_string()), // first: it has marks of its own
        ("ARCH", arch.name.to_string()),
        ("FRAMEWORK", target.framework.to_string()),
        ("FILE", file.to_string()),
        ("WHAT", what),
        ("ORIGIN", pretrained),
        ("VERSION", env!("CARGO_PKG_VERSION").to_string()),
        ("MAPS", maps.join("\n")),
        ("MEAN255", of_255(meta.mean)),
        ("STD255", of_255(meta.std)),
        ("MEAN", list(&meta.mean)),
        ("STD", list(&meta.std)),
        ("NORM", norm.to_string()),
        ("DIFFERENCE", format!("{difference:.1e}")),
        ("NEEDS", needs.to_string()),
        ("CALL", call.to_string()),
        ("SIDE", arch.image_size.to_string()),
        ("CHANNELS", format!("{channels:?}")),
        ("FROZEN", tuple(&first_stage(subject))),
        ("LAYERS", layers),
        ("ABSENT", absent.join("*, ") + "*"),
        ("ABSENT_TUPLE", tuple(&absent)),
        ("NUM_CLASSES", if with_classifier { format!(", num_classes={}", meta.classes.len()) } else { String::new() }),
        ("CLASSES", meta.classes.len().max(1).to_string()),
        ("LOAD", whole),
        ("NORM_LAYER", frozen_norm.to_string()),
        ("IMPORTS", imports.to_string()),
        ("READ", read),
        ("BUILD", build),
        ("DEPTH", depth(arch.name).to_string()),
        ("DEPTHS", depths(arch.name)),
        ("DROP", if arch.name == "swin_s" { "0.3" } else { "0.2" }.to_string()),
        ("RES2", channels[0].to_string()),
        ("NAMES", if in_torchvision { "torchvision's" } else { "those of the released L-MCL classes" }.to_string()),
        ("CHECKS", checks.to_string()),
    ]
}

/// 18 of `resnet18`; 0 for networks that are not called by their depth.
fn depth(arch: &str) -> u32 {
    arch.strip_prefix("resnet").and_then(|n| n.parse().ok()).unwrap_or(0)
}

fn depths(arch: &str) -> String {
    format!("[2, 2, {}, 2]", if arch == "swin_s" { 18 } else { 6 })
}
