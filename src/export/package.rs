//! What lies beside an exported network: golden.npz, README.md, check.py, export.json; and the comparison that lets it be written at all.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, UndefinedBehavior};
use rand_distr::{Distribution, StandardNormal};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use super::format::Format;
use super::{Source, answers};
use crate::error::{Error, Result};
use crate::files;
use crate::nets::Network;
use crate::nets::graph;
use crate::nets::layers::Pass;
use crate::params::Scope;
use crate::rng;

/// What an export turned out to be.
pub(super) struct Facts {
    /// The network's file.
    pub file: PathBuf,
    /// How many tensors it holds.
    pub tensors: usize,
    /// The largest difference after reading it back, relative to the larger of 1 and the largest value, at both sizes.
    pub difference: f64,
    about: Value,
}

impl Facts {
    /// For programs, with the folder it went to.
    pub fn json(&self, folder: &Path) -> Value {
        let mut about = self.about.clone();
        about["folder"] = folder.display().to_string().into();
        about
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

/// Two ways of computing a network in f32 differ by no more of its own rounding: each rounds once, and not alike.
const ROUNDINGS: f64 = 4.0;

/// What the network answers in f64.
fn exact(source: &Source, images: &Tensor) -> Vec<Tensor> {
    let network = source.network;
    let scope = Scope::blank(Device::Cpu, Kind::Double);
    let net = Network::new(network.arch, &scope, network.meta.classes.len().max(1) as i64);
    scope.params().copy_from(&network.params);
    answers(&net.forward(&images.to_kind(Kind::Double), Pass::EVAL), source.with_classifier)
}

/// Writes the folder. The network's file gets its name only once it has been read back and gives the same.
pub(super) fn write(format: &dyn Format, source: &Source, folder: &Path, tolerance: f64, commit: &str) -> Result<Facts> {
    let _guard = tch::no_grad_guard();
    let (network, arch) = (source.network, source.network.arch);
    fs::create_dir_all(folder).map_err(Error::io("cannot make", folder))?;
    let name = format.file(arch);
    let file = folder.join(&name);
    let tensors = format.tensors(source.tensors(&format.names(source)), arch)?;
    let run = |images: &Tensor| answers(&network.net.forward(images, Pass::EVAL), source.with_classifier);
    let mut worst = 0.0;
    files::write_with(&file, |temporary| {
        format.write(temporary, source, &tensors)?;
        let reloaded = format.open(temporary, source)?;
        for size in format.golden(arch) {
            let images = images(size);
            let expected = |all| format.expected(all, source.with_classifier);
            let ours = expected(run(&images));
            let off = difference(&reloaded(&images)?, &ours);
            // Where the network itself rounds by more, as very deep ones do, its file may too.
            if off > tolerance && off > ROUNDINGS * difference(&ours, &expected(exact(source, &images))) {
                let [n, h, w] = size;
                return Err(Error::failed(format!(
                    "{}: read back, it differs from {} by {off:.1e} on {n} images of {w} x {h}; {tolerance:.0e} is allowed; not exported",
                    file.display(),
                    network.name
                )));
            }
            worst = f64::max(worst, off);
        }
        Ok(())
    })?;

    let input = images(format.golden(arch)[0]);
    let mut golden = vec![("input".to_string(), input.shallow_clone())];
    golden.extend(run(&input).iter().enumerate().map(|(l, map)| {
        let name = if l < arch.depth { l.to_string() } else { "logits".to_string() };
        (name, map.contiguous())
    }));
    files::write_with(&folder.join("golden.npz"), |temporary| Ok(Tensor::write_npz(&golden, temporary)?))?;

    let (channels, strides): (Vec<i64>, Vec<i64>) = arch.maps.iter().copied().unzip();
    let layers: serde_json::Map<String, Value> = layers(source).into_iter().map(|(name, l)| (name, l.into())).collect();
    let hashes: BTreeMap<&str, String> = tensors.iter().map(|(name, t)| (name.as_str(), files::sha256(&files::tensor_bytes(t)))).collect();
    let meta = &network.meta;
    let mut about = json!({
        "target": format.name(), "file": name, "arch": arch.name, "with_classifier": source.with_classifier,
        "classes": if source.with_classifier { meta.classes.len() } else { 0 },
        "channels": channels, "strides": strides, "layers": layers, "mean": meta.mean, "std": meta.std,
        "subject": network.name, "run": network.run.as_ref().map(|run| run.display().to_string()), "method": network.method, "peer": network.peer,
        "pretrained_on": meta.dataset, "epoch": meta.epoch, "weights": network.file.display().to_string(),
        "weights_hash": network.hash, "recipe_hash": meta.recipe, "difference": worst, "version": env!("CARGO_PKG_VERSION"),
        "commit": commit, "tensors": hashes,
    });
    let facts = facts(format, source, &name, worst)?;
    files::write(&folder.join("README.md"), render("README.md", format.readme(), &facts)?.as_bytes())?;
    files::write(&folder.join("check.py"), render("check.py", format.check(arch), &facts)?.as_bytes())?;
    for (name, template) in format.extras() {
        files::write(&folder.join(name), render(&format!("{name} of {}", format.name()), template, &facts)?.as_bytes())?;
    }
    files::write(&folder.join("export.json"), format!("{about:#}\n").as_bytes())?;
    about.as_object_mut().expect("an object").remove("tensors"); // hundreds of hashes: for the file only
    Ok(Facts { file, tensors: tensors.len(), difference: worst, about })
}

/// Which child gives which map: what IntermediateLayerGetter is told.
fn layers(source: &Source) -> Vec<(String, String)> {
    let layers = graph::layers(source.network.arch, &source.network.params).into_iter();
    layers.filter_map(|(name, map)| map.map(|l| (name, l.to_string()))).collect()
}

/// The beginnings of the names of all that the first map is made by: the stem and the first stage.
fn up_to_first_map(source: &Source) -> Vec<String> {
    let (arch, params) = (source.network.arch, &source.network.params);
    let scope = Scope::blank(Device::Cpu, Kind::Float);
    (arch.stage)(&scope, 0);
    let first = scope.params();
    let is_first = |name: &str| first.vars.iter().any(|(n, _)| n == name);
    let mut beginnings: Vec<String> = vec![];
    for (name, _) in &first.vars {
        // The shortest beginning that nothing of the later stages has.
        let ends = name.match_indices('.').map(|(at, _)| &name[..=at]);
        let mut alone = ends.filter(|beginning| params.vars.iter().all(|(n, _)| !n.starts_with(beginning) || is_first(n)));
        let beginning = alone.next().unwrap_or(name).to_string();
        if !beginnings.contains(&beginning) {
            beginnings.push(beginning);
        }
    }
    beginnings
}

/// What the whole network has and the backbone has not, as beginnings of names.
fn absent(source: &Source) -> Vec<String> {
    let kept = graph::backbone_names(source.network.arch, &source.network.params);
    let mut names: Vec<String> = vec![];
    for (name, _) in source.network.params.all().filter(|(name, _)| !kept.contains(name)) {
        let first = format!("{}.", name.split('.').next().unwrap_or_default());
        if !names.contains(&first) {
            names.push(first);
        }
    }
    names
}

/// What the templates are filled with.
fn facts(format: &dyn Format, source: &Source, file: &str, difference: f64) -> Result<Value> {
    let (network, arch, meta) = (source.network, source.network.arch, &source.network.meta);
    let of_255 = |values: [f64; 3]| values.map(|v| (v * 255.0 * 1e6).round() / 1e6);
    let layers = layers(source);
    Ok(json!({
        "format": format.name(), "own": format.facts(source)?, "framework": format.framework(), "needs": format.needs(arch), "file": file,
        "arch": arch.name, "image_size": arch.image_size, "norm": arch.norm, "maps": arch.maps,
        "channels": arch.maps.iter().map(|(channels, _)| *channels).collect::<Vec<_>>(),
        "torchvision": arch.elsewhere.torchvision, "timm": arch.elsewhere.timm, "mmdet": arch.elsewhere.mmdet, "detectron2": arch.elsewhere.detectron2,
        "with_classifier": source.with_classifier, "classes": meta.classes.len(),
        "mean": meta.mean, "std": meta.std, "mean255": of_255(meta.mean), "std255": of_255(meta.std),
        "origin": { "network": network.name, "dataset": meta.dataset, "method": network.method, "file": network.file.display().to_string() },
        "version": env!("CARGO_PKG_VERSION"), "difference": format!("{difference:.1e}"),
        // A network whose maps all come out of one child cannot be cut by children.
        "layers_are_children": layers.len() == arch.depth, "layers": layers,
        "up_to_first_map": up_to_first_map(source), "absent": absent(source),
    }))
}

/// Fills a template. A fact that it asks for and that is not there is an error, as is a mistake in the template.
fn render(name: &str, template: &str, facts: &Value) -> Result<String> {
    let rendered = || -> std::result::Result<String, minijinja::Error> {
        let mut environment = Environment::new();
        environment.set_undefined_behavior(UndefinedBehavior::Strict);
        // Lines that hold a block alone leave nothing behind.
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).keep_trailing_newline(true).build()?);
        environment.add_filter("tuple", tuple);
        environment.add_filter("dict", dict);
        environment.add_template("common.md", include_str!("templates/common.md"))?;
        environment.add_template("hashes.py", include_str!("templates/hashes.py"))?;
        environment.render_named_str(name, template, Serde(facts))
    };
    rendered().map_err(|e| Error::failed(format!("the template of {name}: {e:#}")))
}

/// As Python writes a tuple of texts.
fn tuple(names: Vec<String>) -> String {
    let quoted: Vec<String> = names.iter().map(|n| format!("\"{n}\"")).collect();
    format!("({}{})", quoted.join(", "), if names.len() == 1 { "," } else { "" })
}

/// As Python writes a dict of texts, in the order of the pairs.
fn dict(pairs: Vec<Vec<String>>) -> String {
    let pairs: Vec<String> =
        pairs.iter().map(|pair| pair.iter().map(|text| format!("\"{text}\"")).collect::<Vec<_>>().join(": ")).collect();
    format!("{{{}}}", pairs.join(", "))
}
