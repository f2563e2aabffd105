//! Weights in and out of files: safetensors with what one must know to use a network, and PyTorch state dicts. A load accounts for
//! every tensor: it says what matched and refuses what does not fit.

pub mod frameworks;
pub mod npz;
pub mod onnx;
mod pth;
pub mod safetensors;
pub mod torchscript;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::files;
use crate::nets::{self, Arch, Network};
use crate::params::{Named, Params, Scope, check_finite};
use safetensors::{Reader, Texts};

/// What a deployable network says about itself, each field a text in the safetensors header.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Meta {
    /// A name of `mcl-train list archs`.
    #[serde(rename = "architecture")]
    pub arch: String,
    /// The names of the classes, in the order of the logits.
    pub classes: Vec<String>,
    /// Side of the square images it takes.
    pub image_size: i64,
    /// What channels are normalised with.
    pub mean: [f64; 3],
    /// Likewise.
    pub std: [f64; 3],
    /// How images are resized: `bilinear`.
    pub interpolation: String,
    /// The run it comes from, and the hash of its resolved recipe.
    pub run: String,
    /// See `run`.
    #[serde(rename = "recipe_hash")]
    pub recipe: String,
    /// Its place in the cohort.
    pub peer: Option<usize>,
    /// What it was trained on.
    pub dataset: Option<String>,
    /// The epoch it was saved after, from 0.
    pub epoch: Option<usize>,
}

impl Meta {
    fn texts(&self) -> Texts {
        let serde_json::Value::Object(fields) = serde_json::to_value(self).expect("texts and numbers") else { unreachable!("a struct") };
        let fields = fields.into_iter().filter(|(_, value)| !value.is_null());
        let texts = fields.map(|(key, value)| (key, value.as_str().map_or_else(|| value.to_string(), str::to_string)));
        // Tools of the Hugging Face family look for this key.
        texts.chain([("format".to_string(), "pt".to_string())]).collect()
    }

    /// None where the file names no architecture: another program wrote it.
    fn from_texts(texts: &Texts) -> std::result::Result<Option<Meta>, String> {
        if !texts.contains_key("architecture") {
            return Ok(None);
        }
        let plain = ["architecture", "interpolation", "run", "recipe_hash", "dataset"];
        let value = |key: &str, text: &str| match serde_json::from_str(text) {
            Ok(value) if !plain.contains(&key) => value,
            _ => serde_json::Value::from(text),
        };
        let fields: serde_json::Map<_, _> = texts.iter().map(|(key, text)| (key.clone(), value(key, text))).collect();
        serde_json::from_value(fields.into()).map(Some).map_err(|e| format!("its metadata: {e}"))
    }
}

/// The tensors of a file.
pub struct Weights {
    /// The file.
    pub path: PathBuf,
    /// Its tensors under the names they have there.
    pub tensors: Named,
    /// What it says about itself, where it does.
    pub meta: Option<Meta>,
}

/// Writes a network's file, tensors in the types they have.
pub fn save_safetensors(path: &Path, tensors: &Named, meta: &Meta) -> Result<()> {
    safetensors::save(path, tensors, &meta.texts())
}

/// Writes a state dict that `torch.load(path, weights_only=True)` opens.
pub fn save_pth(path: &Path, tensors: &Named) -> Result<()> {
    pth::write(path, tensors)
}

/// Reads a safetensors file or a PyTorch state dict, by what it contains, not by its name.
pub fn read(path: &Path) -> Result<Weights> {
    files::fits(path)?;
    let mut head = [0; 9];
    let n = std::fs::File::open(path).and_then(|mut file| file.read(&mut head)).map_err(Error::open(path))?;
    let path = path.to_path_buf();
    if pth::looks_like(&head[..n]) {
        return Ok(Weights { tensors: pth::read(&path)?, meta: None, path });
    }
    if head[8] != b'{' {
        return Err(Error::file(path, "neither a safetensors file nor a PyTorch state dict (.pt, .pth)"));
    }
    let mut reader = Reader::open(&path)?;
    let meta = Meta::from_texts(&reader.texts()).map_err(|what| Error::file(&path, what))?;
    let tensors = reader.names().into_iter().map(|name| reader.tensor(&name).map(|t| (name, t))).collect::<Result<Named>>()?;
    Ok(Weights { path, tensors, meta })
}

/// Whether the last linear layer must come from the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Classifier {
    /// A file without it is refused.
    #[default]
    Required,
    /// A file may lack it: features need none.
    Optional,
}

/// How a file is loaded.
#[derive(Debug, Clone, Default)]
pub struct LoadOptions {
    /// Load what matches and leave the rest as it was.
    pub allow_partial: bool,
    /// What a file without a classifier means.
    pub classifier: Classifier,
    /// What stands before the network's names in the file; None: found out.
    pub strip: Option<String>,
}

/// What a load found.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadReport {
    /// Tensors of the network, buffers included, and how many of them the file gave.
    pub wanted: usize,
    /// See `wanted`.
    pub matched: usize,
    /// Names of the network that the file lacks, and names of the file that the network lacks.
    pub missing: Vec<String>,
    /// See `missing`.
    pub unexpected: Vec<String>,
    /// Names whose shape in the file (second) is not the network's (third).
    pub misshapen: Vec<(String, Vec<i64>, Vec<i64>)>,
    /// What stood before the names, e.g. `module_list.0.backbone.`, and how many tensors of the file do not begin so.
    pub prefix: String,
    /// See `prefix`.
    pub beside: usize,
    /// Other prefixes under which the file holds the same network.
    pub others: Vec<String>,
    /// Whether the classifier was loaded: without it there are no logits.
    pub classifier: bool,
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} of {} tensors matched", self.matched, self.wanted)?;
        if !self.prefix.is_empty() {
            write!(f, " under `{}` ({} others beside it)", self.prefix, self.beside)?;
        }
        if !self.others.is_empty() {
            write!(f, "; the file also holds it under {}", self.others.join(", "))?;
        }
        let list = |names: &[String]| {
            let more = if names.len() > 4 { ", ..." } else { "" };
            format!("{} ({}{more})", names.len(), names.iter().take(4).cloned().collect::<Vec<_>>().join(", "))
        };
        if !self.missing.is_empty() {
            write!(f, "; missing {}", list(&self.missing))?;
        }
        if !self.unexpected.is_empty() {
            write!(f, "; unexpected {}", list(&self.unexpected))?;
        }
        if !self.misshapen.is_empty() {
            let shapes: Vec<String> =
                self.misshapen.iter().map(|(n, file, net)| format!("{n}: {file:?} in the file, {net:?} in the network")).collect();
            write!(f, "; other shapes {}", list(&shapes))?;
        }
        if !self.classifier {
            write!(f, "; no classifier, so no logits")?;
        }
        Ok(())
    }
}

/// A network without these still has them: counters that only cumulative averages read, and a table that follows from the window size.
fn is_implied(name: &str) -> bool {
    name.ends_with("num_batches_tracked") || name.ends_with("relative_position_index")
}

/// The file's name of each of the network's, for one way of naming and one prefix.
struct Naming<'a> {
    prefix: &'a str,
    rows: &'static [(&'static str, &'static str)],
    /// How many tensors under the prefix are none of the network's.
    surplus: usize,
}

impl Naming<'_> {
    fn of(&self, ours: &str) -> String {
        format!("{}{}", self.prefix, nets::rename(ours, self.rows))
    }
}

/// Under which prefixes a file holds names of the network, and how many: the one with the most first, of equals the one with the least beside them,
/// then students before their teachers. A name of the file that ends in one of ours tells what stands before it: `module.`, `module_list.0.backbone.`,
/// `module.student.`, or whatever a wrapper calls itself.
fn namings<'a>(params: &Params, file: &HashMap<&'a str, &Tensor>, arch: &Arch, strip: Option<&'a str>) -> Vec<(usize, Naming<'a>)> {
    // In the order of preference; the tables of a family often agree.
    let ways = [&[], arch.released.lmcl, arch.released.baseline];
    let ours = ways.map(|rows| params.all().map(|(name, _)| nets::rename(name, rows)).collect::<HashSet<String>>());
    let parts = ours.iter().flatten().map(|name| name.matches('.').count() + 1).max().unwrap_or(1);
    // How many names each way finds under a prefix.
    let mut counts: BTreeMap<&str, [usize; 3]> = [("", [0; 3])].into();
    for name in file.keys() {
        let ends = name.rmatch_indices('.').map(|(dot, _)| dot + 1).take(parts).chain([0]);
        for (prefix, rest) in ends.map(|end| name.split_at(end)) {
            for (way, _) in ours.iter().enumerate().filter(|(_, ours)| ours.contains(rest)) {
                counts.entry(prefix).or_default()[way] += 1;
            }
        }
    }
    if let Some(prefix) = strip {
        counts = [(prefix, counts.get(prefix).copied().unwrap_or_default())].into();
    }
    let most = counts.values().flatten().copied().max().unwrap_or(0);
    let naming = |(prefix, counts): (&'a str, [usize; 3])| {
        // The first of equals.
        let way = (0..ways.len()).rev().max_by_key(|&way| counts[way]).expect("there are ways");
        // Only those that may be taken are worth the count.
        let under = if counts[way] == most { file.keys().filter(|name| name.starts_with(prefix)).count() } else { 0 };
        (counts[way], Naming { prefix, rows: ways[way], surplus: under.saturating_sub(counts[way]) })
    };
    let mut namings: Vec<(usize, Naming)> = counts.into_iter().map(naming).collect();
    let teaches = |prefix: &str| ["teacher", "ema"].iter().any(|word| prefix.contains(word));
    namings.sort_by_key(|(found, naming)| (std::cmp::Reverse(*found), naming.surplus, teaches(naming.prefix)));
    namings
}

/// What is said where a file does not fit.
pub(crate) const PARTLY: &str = "; {allow_partial} loads what matches";

/// Copies the tensors of a file into a network's parameters. Anything short of all of them is an error unless the options say otherwise.
pub fn load_into(params: &Params, weights: &Weights, arch: &Arch, options: &LoadOptions) -> Result<LoadReport> {
    if let Some(meta) = weights.meta.as_ref().filter(|meta| meta.arch != arch.name) {
        return Err(Error::file(&weights.path, format!("holds a {}, not a {}", meta.arch, arch.name)));
    }
    let (report, found) = compare(params, weights, arch, options)?;
    let complete = report.missing.is_empty() && report.unexpected.is_empty() && report.misshapen.is_empty();
    let headless = !report.classifier && options.classifier == Classifier::Required;
    if (!complete || headless) && !options.allow_partial {
        return Err(Error::value_for(&weights.path, &["allow_partial"], format!("does not fit {}: {report}{PARTLY}", arch.name)));
    }
    if report.matched == 0 {
        return Err(Error::file(&weights.path, format!("holds nothing of {}", arch.name)));
    }
    let _guard = tch::no_grad_guard();
    for (live, saved) in found {
        live.shallow_clone().f_copy_(saved)?;
    }
    // After the copy: a number of a wider type may be infinite in the network's.
    check_finite(params.all()).map_err(|found| Error::file(&weights.path, found.to_string()))?;
    Ok(report)
}

type Found<'a> = Vec<(&'a Tensor, &'a Tensor)>;

fn compare<'a>(params: &'a Params, weights: &'a Weights, arch: &Arch, options: &LoadOptions) -> Result<(LoadReport, Found<'a>)> {
    let file: HashMap<&str, &Tensor> = weights.tensors.iter().map(|(n, t)| (n.as_str(), t)).collect();
    let namings = namings(params, &file, arch, options.strip.as_deref());
    let (found, naming) = &namings[0];
    let same = |(n, other): &&(usize, Naming)| (n, other.surplus) == (found, naming.surplus) && *n > 0;
    let others = namings[1..].iter().filter(same).map(|(_, other)| format!("`{}`", other.prefix)).collect();

    let of_classifier = |ours: &str| is_part(ours, arch.classifier);
    let mut report = LoadReport {
        wanted: 0,
        matched: 0,
        missing: vec![],
        unexpected: vec![],
        misshapen: vec![],
        prefix: naming.prefix.to_string(),
        beside: file.keys().filter(|name| !name.starts_with(naming.prefix)).count(),
        others,
        classifier: true,
    };
    let mut found = vec![];
    let mut used = BTreeSet::new();
    for (name, live) in params.all() {
        let theirs = naming.of(name);
        let saved = file.get_key_value(theirs.as_str());
        used.extend(saved.map(|(key, _)| *key));
        match saved {
            Some((_, saved)) if saved.size() == live.size() => {
                report.matched += 1;
                found.push((live, *saved));
            }
            Some((_, saved)) => report.misshapen.push((name.clone(), saved.size(), live.size())),
            None if is_implied(name) => continue,
            None if of_classifier(name) => {
                report.classifier = false;
                if options.classifier == Classifier::Optional {
                    continue;
                }
                report.missing.push(name.clone());
            }
            None => report.missing.push(name.clone()),
        }
        report.wanted += 1;
    }
    report.unexpected =
        file.keys().filter(|name| name.starts_with(naming.prefix) && !used.contains(*name)).map(|name| name.to_string()).collect();
    report.unexpected.sort();
    Ok((report, found))
}

/// A network made from a file.
pub struct Opened {
    /// Its architecture.
    pub arch: &'static Arch,
    /// The network.
    pub net: Network,
    /// Its parameters and buffers.
    pub params: Params,
    /// None where the file has no classifier: the logits mean nothing.
    pub classes: Option<i64>,
    /// What the file says about itself, where it does.
    pub meta: Option<Meta>,
    /// What matched.
    pub report: LoadReport,
}

fn blank(arch: &Arch, classes: i64, device: Device) -> (Network, Params) {
    let scope = Scope::blank(device, Kind::Float);
    let net = Network::new(arch, &scope, classes);
    (net, scope.params())
}

/// The architecture whose names and shapes are those of a file, all of them and no others.
fn identify(weights: &Weights, options: &LoadOptions) -> Result<Option<&'static Arch>> {
    let options = LoadOptions { classifier: Classifier::Optional, ..options.clone() };
    let mut there: HashMap<Vec<i64>, usize> = HashMap::new();
    weights.tensors.iter().for_each(|(_, tensor)| *there.entry(tensor.size()).or_default() += 1);
    for (arch, shapes) in all_shapes() {
        // Most are told apart without being built.
        if shapes.iter().any(|(shape, count)| there.get(shape).is_none_or(|there| there < count)) {
            continue;
        }
        let (_, params) = blank(arch, 1, Device::Cpu); // on the CPU: only names and shapes are asked for
        let (report, _) = compare(&params, weights, arch, &options)?;
        let of_classifier = |(name, ..): &(String, Vec<i64>, Vec<i64>)| is_part(name, arch.classifier);
        if report.missing.is_empty() && report.unexpected.is_empty() && report.misshapen.iter().all(of_classifier) {
            return Ok(Some(arch));
        }
    }
    Ok(None)
}

/// How often each shape occurs in an architecture, its classifier and what may be left out of a file aside.
type Shapes = (&'static Arch, HashMap<Vec<i64>, usize>);

/// Of every architecture, counted once in a process.
fn all_shapes() -> &'static [Shapes] {
    static ALL: OnceLock<Vec<Shapes>> = OnceLock::new();
    ALL.get_or_init(|| {
        let of = |arch: &'static Arch| {
            let (_, params) = blank(arch, 1, Device::Cpu); // on the CPU: only shapes are asked for
            let mut shapes: HashMap<Vec<i64>, usize> = HashMap::new();
            let needed = params.all().filter(|(name, _)| !is_part(name, arch.classifier) && !is_implied(name));
            needed.for_each(|(_, tensor)| *shapes.entry(tensor.size()).or_default() += 1);
            (arch, shapes)
        };
        nets::archs().map(of).collect()
    })
}

/// Is it a tensor of this layer?
fn is_part(name: &str, layer: &str) -> bool {
    name.strip_prefix(layer).is_some_and(|rest| rest.starts_with('.'))
}

/// Builds the network a file holds, with as many classes as its classifier has. `arch` may be left out where the metadata name it, or where the
/// file's names and shapes are those of one of ours.
pub fn open(path: &Path, arch: Option<&'static Arch>, device: Device, options: &LoadOptions) -> Result<Opened> {
    let weights = read(path)?;
    let arch = match (arch, &weights.meta) {
        (Some(arch), _) => arch,
        (None, Some(meta)) => nets::find(&meta.arch)?,
        (None, None) => identify(&weights, options)?.ok_or_else(|| {
            Error::value_for(
                path,
                &["arch"],
                "names no architecture, its tensors are of none of ours (`mcl-train list archs`), and none was given ({arch})",
            )
        })?,
    };
    let (mut net, mut params) = blank(arch, 1, device);
    // With one class the classifier's weight is found, and misshapen: the file tells how many it has.
    let (first, found) = compare(&params, &weights, arch, options)?;
    drop(found);
    let of_weight = |name: &str| name == format!("{}.weight", arch.classifier);
    let classes = match first.misshapen.iter().find(|(name, ..)| of_weight(name)) {
        Some((_, file, _)) => file.first().copied(),
        None => first.classifier.then_some(1),
    };
    if let Some(classes) = classes.filter(|classes| *classes > 1) {
        (net, params) = blank(arch, classes, device);
    }
    let report = load_into(&params, &weights, arch, options).or_else(|misfit| match identify(&weights, options)? {
        Some(other) if other.name != arch.name => {
            Err(Error::file(path, format!("holds a {}, not a {}, by the names and shapes of its tensors", other.name, arch.name)))
        }
        _ => Err(misfit),
    })?;
    Ok(Opened { arch, net, params, classes: classes.filter(|_| report.classifier), meta: weights.meta, report })
}
