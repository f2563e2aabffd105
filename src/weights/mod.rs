//! Weights in and out of files: safetensors with what one must know to use a network, and PyTorch state dicts. A load accounts for
//! every tensor: it says what matched and refuses what does not fit.

pub mod frameworks;
mod pth;
pub mod safetensors;
pub mod torchscript;

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::nets::{self, Arch, BACKBONE, Network};
use crate::params::{Named, Params, Scope};
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
    pub std: [f64; 3],
    /// How images are resized: `bilinear`.
    pub interpolation: String,
    /// The run it comes from, and the hash of its resolved recipe.
    pub run: String,
    #[serde(rename = "recipe_hash")]
    pub recipe: String,
    /// Its place in the cohort.
    pub peer: Option<usize>,
    pub dataset: Option<String>,
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
    pub path: PathBuf,
    pub tensors: Named,
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
    #[default]
    Required,
    /// A file may lack it: features need none.
    Optional,
}

#[derive(Debug, Clone, Default)]
pub struct LoadOptions {
    /// Load what matches and leave the rest as it was.
    pub allow_partial: bool,
    pub classifier: Classifier,
    /// What stands before the network's names in the file; None: found out.
    pub strip: Option<String>,
}

/// What a load found.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadReport {
    /// Tensors of the network, buffers included, and how many of them the file gave.
    pub wanted: usize,
    pub matched: usize,
    /// Names of the network that the file lacks, and names of the file that the network lacks.
    pub missing: Vec<String>,
    pub unexpected: Vec<String>,
    /// Names whose shape in the file (second) is not the network's (third).
    pub misshapen: Vec<(String, Vec<i64>, Vec<i64>)>,
    /// What stood before the names, e.g. `module_list.0.backbone.`, and how many tensors of the file do not begin so.
    pub prefix: String,
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

/// What stands before a network's names in the state dicts of a data-parallel wrapper, the released cohorts and others.
fn prefix_of(name: &str) -> &str {
    let mut rest = name;
    let after = |rest: &str, part: &str| -> Option<usize> {
        // `part` with a number in place of `#`.
        let (word, tail) = part.split_once('#').unwrap_or((part, ""));
        let after_word = rest.strip_prefix(word)?;
        let digits = after_word.len() - after_word.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let counted = part.contains('#');
        (counted == (digits > 0) && after_word[digits..].starts_with(tail)).then_some(word.len() + digits + tail.len())
    };
    for part in ["module.", "net#.", "module_list.#.", BACKBONE] {
        if let Some(length) = after(rest, part) {
            rest = &rest[length..];
        }
    }
    &name[..name.len() - rest.len()]
}

/// A network without these still has them: counters that only cumulative averages read, and a table that follows from the window size.
fn is_implied(name: &str) -> bool {
    name.ends_with("num_batches_tracked") || name.ends_with("relative_position_index")
}

/// The file's name of each of the network's, for one way of naming and one prefix.
struct Naming<'a> {
    prefix: &'a str,
    rows: &'static [(&'static str, &'static str)],
}

impl Naming<'_> {
    fn of(&self, ours: &str) -> String {
        format!("{}{}", self.prefix, nets::rename(ours, self.rows))
    }
}

/// Copies the tensors of a file into a network's parameters. Anything short of all of them is an error unless the options say otherwise.
pub fn load_into(params: &Params, weights: &Weights, arch: &Arch, options: &LoadOptions) -> Result<LoadReport> {
    if let Some(meta) = weights.meta.as_ref().filter(|meta| meta.arch != arch.name) {
        return Err(Error::file(&weights.path, format!("holds a {}, not a {}", meta.arch, arch.name)));
    }
    let (report, found) = compare(params, weights, arch, options)?;
    let complete = report.missing.is_empty() && report.unexpected.is_empty() && report.misshapen.is_empty();
    let headless = !report.classifier && options.classifier == Classifier::Required;
    if (!complete || headless) && !options.allow_partial {
        return Err(Error::file(&weights.path, format!("does not fit {}: {report}; --allow-partial loads what matches", arch.name)));
    }
    if report.matched == 0 {
        return Err(Error::file(&weights.path, format!("holds nothing of {}", arch.name)));
    }
    let _guard = tch::no_grad_guard();
    for (live, saved) in found {
        live.shallow_clone().f_copy_(saved)?;
    }
    Ok(report)
}

type Found<'a> = Vec<(&'a Tensor, &'a Tensor)>;

fn compare<'a>(params: &'a Params, weights: &'a Weights, arch: &Arch, options: &LoadOptions) -> Result<(LoadReport, Found<'a>)> {
    let file: HashMap<&str, &Tensor> = weights.tensors.iter().map(|(n, t)| (n.as_str(), t)).collect();
    let prefixes: BTreeSet<&str> = match &options.strip {
        Some(prefix) => [prefix.as_str()].into(),
        None => file.keys().map(|name| prefix_of(name)).chain([""]).collect(),
    };
    // In the order of preference; the tables of a family often agree.
    let ways = [&[], arch.released.lmcl, arch.released.baseline];
    let matches = |naming: &Naming| params.all().filter(|(name, _)| file.contains_key(naming.of(name).as_str())).count();
    let mut namings: Vec<(usize, Naming)> = vec![];
    for prefix in prefixes {
        let best = ways
            .map(|rows| Naming { prefix, rows })
            .into_iter()
            .map(|naming| (matches(&naming), naming))
            .reduce(|a, b| if b.0 > a.0 { b } else { a });
        namings.extend(best);
    }
    let most = namings.iter().map(|(n, _)| *n).max().expect("the empty prefix at least");
    let mut best = namings.iter().filter(|(n, _)| *n == most).map(|(_, naming)| naming);
    let naming = best.next().expect("one has the most");
    let others = if most > 0 { best.map(|other| format!("`{}`", other.prefix)).collect() } else { vec![] };

    let of_classifier = |ours: &str| ours.strip_prefix(arch.classifier).is_some_and(|rest| rest.starts_with('.'));
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
    pub arch: &'static Arch,
    pub net: Network,
    pub params: Params,
    /// None where the file has no classifier: the logits mean nothing.
    pub classes: Option<i64>,
    pub meta: Option<Meta>,
    pub report: LoadReport,
}

/// Builds the network a file holds, with as many classes as its classifier has. `arch` may be left out where the metadata name it.
pub fn open(path: &Path, arch: Option<&'static Arch>, device: Device, options: &LoadOptions) -> Result<Opened> {
    let weights = read(path)?;
    let arch = match (arch, &weights.meta) {
        (Some(arch), _) => arch,
        (None, Some(meta)) => nets::find(&meta.arch)?,
        (None, None) => return Err(Error::file(path, "names no architecture; give it with --arch")),
    };
    let blank = |classes: i64| {
        let scope = Scope::blank(device, Kind::Float);
        let net = Network::new(arch, &scope, classes);
        (net, scope.params())
    };
    let (mut net, mut params) = blank(1);
    // With one class the classifier's weight is found, and misshapen: the file tells how many it has.
    let (first, found) = compare(&params, &weights, arch, options)?;
    drop(found);
    let of_weight = |name: &str| name == format!("{}.weight", arch.classifier);
    let classes = match first.misshapen.iter().find(|(name, ..)| of_weight(name)) {
        Some((_, file, _)) => file.first().copied(),
        None => first.classifier.then_some(1),
    };
    if let Some(classes) = classes.filter(|classes| *classes > 1) {
        (net, params) = blank(classes);
    }
    let report = load_into(&params, &weights, arch, options)?;
    Ok(Opened { arch, net, params, classes: classes.filter(|_| report.classifier), meta: weights.meta, report })
}
