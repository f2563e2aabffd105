//! Recipes: one TOML file a run, checked once, written back resolved. Defaults are the paper's CIFAR-100 protocol (section 4.1).

mod choices;
mod frozen;
mod save;
pub mod shipped;

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use toml::{Table, Value};

pub use choices::{Choose, OnDevice};
pub use frozen::FrozenFile;

use crate::data;
use crate::error::{Error, Result, did_you_mean, in_words};
use crate::files;
use crate::limits;
use crate::optim::{Rule, Schedule};
use crate::settings::Setting;
use crate::system::device::Precision;
pub use save::Save;

/// A run, resolved.
#[derive(Debug, Clone)]
pub struct Recipe {
    /// What is learnt from.
    pub data: Data,
    /// Who learns.
    pub cohort: CohortTable,
    /// How.
    pub train: Train,
    /// `name`, and the options of that method alone.
    pub method: Table,
    /// When checkpoints are written.
    pub save: Save,
}

impl Default for Recipe {
    /// The paper's CIFAR-100 protocol (section 4.1) with L-MCL.
    fn default() -> Recipe {
        let method = Table::from_iter([("name".to_string(), DEFAULT_METHOD.into())]);
        Recipe { data: Data::default(), cohort: CohortTable::default(), train: Train::default(), method, save: Save::default() }
    }
}

/// The `[data]` table.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default)]
pub struct Data {
    /// A registered dataset.
    pub name: String,
    /// Stratified part of the training split, the same for all methods of one seed.
    pub fraction: f64,
    /// Images per class taken out of the training split by seed; they choose the network and epoch that ship.
    pub holdout: usize,
    /// Side the images are brought to; 0 means the dataset's own.
    pub image_size: usize,
    /// Do the training images live on a CUDA device, as bytes, and are they augmented there? "auto": where they fit.
    #[serde(skip_serializing_if = "OnDevice::is_auto")]
    pub on_device: OnDevice,
    /// Options of that dataset alone; what it does not take is refused when the recipe is read.
    #[serde(flatten)]
    pub options: Table,
}

impl Default for Data {
    fn default() -> Data {
        Data { name: "cifar100".into(), fraction: 1.0, holdout: 0, image_size: 0, on_device: OnDevice::default(), options: Table::new() }
    }
}

impl Data {
    /// Keys of every `[data]` table.
    const KEYS: [&str; 5] = ["name", "fraction", "holdout", "image_size", "on_device"];

    /// Refuses keys that neither every dataset has nor this one takes (`taken`).
    fn check_options(&self, taken: &[&str]) -> Result<(), String> {
        match self.options.keys().find(|key| !taken.contains(&key.as_str())) {
            None => Ok(()),
            Some(key) => {
                let known: Vec<String> = Data::KEYS.iter().chain(taken).map(|known| format!("`{known}`")).collect();
                let hint = did_you_mean(key, Data::KEYS.iter().chain(taken).copied());
                Err(format!("[data] unknown field `{key}`{hint}, expected one of {}", known.join(", ")))
            }
        }
    }
}

/// The `[cohort]` table.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CohortTable {
    /// A registered architecture for each network.
    pub archs: Vec<String>,
    /// Networks of anybody's that teach them and do not learn.
    #[serde(deserialize_with = "frozen::list", skip_serializing_if = "Vec::is_empty")]
    pub frozen: Vec<FrozenFile>,
}

impl Default for CohortTable {
    fn default() -> CohortTable {
        CohortTable { archs: vec!["resnet32".into(), "resnet32".into()], frozen: vec![] }
    }
}

/// How the networks are stepped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerName {
    /// With momentum.
    Sgd,
    /// Adam with decoupled weight decay.
    Adamw,
}

/// The `[train]` table.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Train {
    /// Images of a batch over all ranks.
    pub batch: usize,
    /// Those a method trains before (`Method::extra_epochs`) come on top.
    pub epochs: usize,
    /// The peak learning rate.
    pub lr: f64,
    /// The batch `lr` was made for: it is multiplied by batch x accumulate over this (the linear scaling rule of Goyal et al. 2017).
    /// Left out, `lr` is used as it is.
    pub lr_for_batch: Option<usize>,
    /// How the learning rate falls.
    pub schedule: Schedule,
    /// Epochs of linear warm-up.
    pub warmup: usize,
    /// How the networks are stepped.
    pub optimizer: OptimizerName,
    /// Of SGD.
    pub momentum: f64,
    /// The text does not say; every released CIFAR script has it on.
    pub nesterov: bool,
    /// Added to the gradient by SGD, taken off the weights by AdamW.
    pub weight_decay: f64,
    /// Of everything drawn: start values, batches, augmentation, splits.
    pub seed: u64,
    /// Batches whose gradients are averaged into one step.
    pub accumulate: usize,
    /// Largest norm of the whole gradient; 0 is off.
    pub clip: f64,
    /// What the held-out images choose among: the networks' own classifiers, or any stage that ships as a network of its own.
    #[serde(skip_serializing_if = "Choose::is_own")]
    pub choose: Choose,
    /// What networks train in; the meta step and every evaluation are in f32.
    pub precision: Precision,
    /// On a GPU: convolutions and matrix products of f32 may round their factors to ten bits (TF32), which is faster.
    pub tf32: bool,
    /// On a GPU: cuDNN takes its deterministic algorithms. Without it cuDNN tries all it has and takes the fastest.
    pub deterministic: bool,
    /// Threads the peers of a cohort run on; 1 runs them one after another.
    pub peer_threads: usize,
    /// The share of a label that is spread over all classes.
    pub label_smoothing: f64,
    /// Stochastic depth, for architectures that have it (Swin).
    pub drop_path: bool,
    /// Probability of erasing a rectangle.
    pub random_erasing: f64,
    /// RandAugment (Cubuk et al. 2020).
    pub rand_augment: bool,
    /// Beta parameter of mixup; 0 is off. The contrastive terms see the unmixed view.
    pub mixup: f64,
    /// Beta parameter of CutMix; 0 is off. The contrastive terms see the unmixed view.
    pub cutmix: f64,
    /// Over several ranks: BatchNorm takes the statistics of all ranks' images. Without it each rank normalises by its own, as the
    /// paper's GPUs did, and running statistics are averaged.
    pub sync_bn: bool,
    /// Over several ranks: contrastive terms see all ranks' embeddings, so K grows with them.
    pub gather_negatives: bool,
}

impl Default for Train {
    fn default() -> Train {
        Train {
            batch: 128,
            epochs: 300,
            lr: 0.1,
            lr_for_batch: None,
            schedule: Schedule::Cosine,
            warmup: 0,
            optimizer: OptimizerName::Sgd,
            momentum: 0.9,
            nesterov: true,
            weight_decay: 5e-4,
            seed: 1,
            accumulate: 1,
            clip: 0.0,
            choose: Choose::Own,
            precision: Precision::F32,
            tf32: false,
            deterministic: true,
            peer_threads: 1,
            label_smoothing: 0.0,
            drop_path: false,
            random_erasing: 0.0,
            rand_augment: false,
            mixup: 0.0,
            cutmix: 0.0,
            sync_bn: false,
            gather_negatives: false,
        }
    }
}

impl Train {
    /// The peak learning rate.
    pub fn rate(&self) -> f64 {
        self.lr_for_batch.map_or(self.lr, |made_for| self.lr * (self.batch * self.accumulate) as f64 / made_for as f64)
    }

    /// The optimizer of the networks.
    pub fn rule(&self) -> Rule {
        match self.optimizer {
            OptimizerName::Sgd => {
                Rule::Sgd { momentum: self.momentum, weight_decay: self.weight_decay, nesterov: self.nesterov && self.momentum > 0.0 }
            }
            OptimizerName::Adamw => Rule::AdamW { betas: (0.9, 0.999), eps: 1e-8, weight_decay: self.weight_decay },
        }
    }
}

/// What a recipe trains with where it does not say.
const DEFAULT_METHOD: &str = "l_mcl";
/// Keys that recipes got later, at the value that they were trained with before: the hashes of recipes stay what they were.
const CHANGES_NOTHING: &[(&str, &str)] = &[("train.deterministic", "true"), ("train.tf32", "false")];
const SECTIONS: [&str; 5] = ["data", "cohort", "train", "method", "save"];

impl Recipe {
    /// Reads a recipe file, or one that ships by its name, then applies `a.b=value` overrides; both go through the same checks. `methods` are the registered names:
    /// a table `[method.NAME]` holds options that count only when that method runs.
    pub fn read(path: &Path, sets: &[String], methods: &[&str]) -> Result<Recipe> {
        let text = shipped::open(path)?;
        let mut recipe = Recipe::parse(&text, &path.display().to_string(), sets, methods)?;
        recipe.cohort.frozen.iter_mut().for_each(|frozen| frozen.look_beside(path));
        Ok(recipe)
    }

    /// The same from text; `origin` says where it is from, in messages.
    pub fn parse(text: &str, origin: &str, sets: &[String], methods: &[&str]) -> Result<Recipe> {
        let mut table = read_table(text, origin)?;
        // The file alone first, so that a fault is blamed on the right place.
        Recipe::from_table(table.clone(), methods).map_err(|e| Error::input(format!("recipe {origin}: {e}")))?;
        for set in sets {
            apply(&mut table, set)?;
            Recipe::from_table(table.clone(), methods).map_err(|e| Error::input(format!("--set {set}: {e}")))?;
        }
        let recipe = Recipe::from_table(table, methods).map_err(|e| Error::input(format!("recipe {origin}: {e}")))?;
        recipe.check().map_err(|e| Error::input(format!("recipe {origin}{}: {e}", if sets.is_empty() { "" } else { " with --set" })))?;
        Ok(recipe)
    }

    fn from_table(mut table: Table, methods: &[&str]) -> Result<Recipe, String> {
        if let Some(unknown) = table.keys().find(|key| !SECTIONS.contains(&key.as_str())) {
            let hint = did_you_mean(unknown, SECTIONS);
            return Err(format!("unknown section [{unknown}]{hint}; known: {}", SECTIONS.map(|s| format!("[{s}]")).join(", ")));
        }
        fn section<T: serde::de::DeserializeOwned + Default>(table: &mut Table, name: &str) -> Result<T, String> {
            match table.remove(name) {
                None => Ok(T::default()),
                Some(value) => value.try_into().map_err(|e: toml::de::Error| format!("[{name}] {}", in_words(&e.to_string()))),
            }
        }
        let mut method: Table = section(&mut table, "method")?;
        method.entry("name").or_insert_with(|| DEFAULT_METHOD.into());
        let name = method["name"]
            .as_str()
            .ok_or_else(|| format!("[method] name = {}; accepted: {}", method["name"], methods.join(", ")))?
            .to_string();
        if !methods.contains(&name.as_str()) {
            let hint = did_you_mean(&name, methods.iter().copied());
            return Err(format!("[method] unknown method `{name}`{hint}; known: {}", methods.join(", ")));
        }
        keep_own_options(&mut method, &name, methods);
        let data: Data = section(&mut table, "data")?;
        // An unknown dataset is refused by name when it is opened.
        data.check_options(data::find(&data.name).map_or(&[][..], |found| found.options.keys()))?;
        Ok(Recipe {
            data,
            cohort: section(&mut table, "cohort")?,
            train: section(&mut table, "train")?,
            method,
            save: section(&mut table, "save")?,
        })
    }

    /// Values that parse but make no sense.
    fn check(&self) -> Result<(), String> {
        let Train { batch, epochs, lr, warmup, accumulate, clip, momentum, weight_decay, label_smoothing, random_erasing, .. } = self.train;
        let within = |what: &str, value: f64, low: f64, high: f64| {
            if value >= low && value <= high { Ok(()) } else { Err(format!("{what} = {value}; accepted: {low} to {high}")) }
        };
        if self.cohort.archs.is_empty() {
            return Err("[cohort] archs is empty; name at least one network".into());
        }
        if !(self.data.fraction > 0.0 && self.data.fraction <= 1.0) {
            return Err(format!("[data] fraction = {}; accepted: above 0, up to 1", self.data.fraction));
        }
        let said = |result: Result<()>| result.map_err(|e| e.to_string());
        said(limits::count("[train] batch", batch, 1, limits::MOST_BATCH))?;
        said(limits::count("[train] epochs", epochs, 1, limits::MOST_ROUNDS))?;
        said(limits::count("[train] accumulate", accumulate, 1, limits::MOST_ACCUMULATE))?;
        said(limits::count("[train] peer_threads", self.train.peer_threads, 1, limits::MOST_NETWORKS))?;
        said(limits::count("[cohort] archs, how many", self.cohort.archs.len(), 1, limits::MOST_NETWORKS))?;
        said(limits::count("[cohort] frozen, how many", self.cohort.frozen.len(), 0, limits::MOST_NETWORKS))?;
        self.cohort.frozen.iter().try_for_each(FrozenFile::check)?;
        self.save.check()?;
        if self.data.image_size > 0 {
            said(limits::side("[data] image_size", i64::try_from(self.data.image_size).unwrap_or(i64::MAX)).map(drop))?;
        }
        if warmup >= epochs && warmup > 0 {
            return Err(format!(
                "[train] warmup = {warmup} of {epochs} epochs; it must be shorter than the run, for example train.warmup = 0"
            ));
        }
        if !(lr > 0.0 && lr.is_finite()) {
            return Err(format!("[train] lr = {lr}; accepted: a number above 0"));
        }
        within("[train] momentum", momentum, 0.0, 0.9999)?;
        within("[train] weight_decay", weight_decay, 0.0, 10.0)?;
        within("[train] clip", clip, 0.0, f64::MAX)?;
        within("[train] label_smoothing", label_smoothing, 0.0, 0.999)?;
        within("[train] random_erasing", random_erasing, 0.0, 1.0)?;
        within("[train] mixup", self.train.mixup, 0.0, 100.0)?;
        within("[train] cutmix", self.train.cutmix, 0.0, 100.0)?;
        if self.train.lr_for_batch == Some(0) {
            return Err("[train] lr_for_batch = 0; accepted: 1 or more, or leave it out".into());
        }
        Ok(())
    }

    /// The method it trains with.
    pub fn method_name(&self) -> &str {
        self.method["name"].as_str().expect("checked when the recipe was read")
    }

    /// The method's own options: `[method]` without the name.
    pub fn method_options(&self) -> Table {
        let mut options = self.method.clone();
        options.remove("name");
        options
    }

    fn table(&self) -> Table {
        let value = |v: Result<Value, toml::ser::Error>| v.expect("plain structs serialise");
        let mut table = Table::new();
        table.insert("data".into(), value(Value::try_from(&self.data)));
        table.insert("cohort".into(), value(Value::try_from(&self.cohort)));
        table.insert("train".into(), value(Value::try_from(&self.train)));
        table.insert("method".into(), Value::Table(self.method.clone()));
        table.insert("save".into(), value(Value::try_from(&self.save)));
        table
    }

    /// As written to the run folder: every key with its value.
    pub fn to_toml(&self) -> String {
        toml::to_string(&self.table()).expect("a table of plain values serialises")
    }

    /// Every key with its value, `train.lr` to `0.1`.
    pub fn flat(&self) -> BTreeMap<String, String> {
        flat(self.table())
    }

    /// A hash of everything that decides the numbers: epochs too, save not.
    pub fn hash(&self) -> String {
        let nothing = |key: &str, value: &str| frozen::is_a_place(key) || CHANGES_NOTHING.contains(&(key, value));
        let counts = |(key, value): &(&String, &String)| decides(key) && !nothing(key, value);
        let lines: String = self.flat().iter().filter(counts).map(|(key, value)| format!("{key}={value}\n")).collect();
        files::sha256(lines.as_bytes())[..16].to_string()
    }

    /// May a run begun with `saved` go on with this recipe? Only epochs and save may differ.
    pub fn check_resume(&self, saved: &Recipe, folder: &Path) -> Result<()> {
        let (now, then) = (self.flat(), saved.flat());
        let may_change = |key: &str| key == "train.epochs" || frozen::is_a_place(key) || !decides(key);
        let mut differences = vec![];
        for key in now.keys().chain(then.keys()).collect::<std::collections::BTreeSet<_>>() {
            let (new, old) = (now.get(key), then.get(key));
            if new != old && !may_change(key) {
                let show = |v: Option<&String>| v.cloned().unwrap_or_else(|| "absent".into());
                differences.push(format!("{key} is {} there and {} now", show(old), show(new)));
            }
        }
        if differences.is_empty() {
            return Ok(());
        }
        Err(Error::input(format!(
            "cannot resume {}: {}; only train.epochs, [save], data.on_device, threads and device may differ",
            folder.display(),
            differences.join("; ")
        )))
    }
}

/// What a recipe's text and overrides say about the numbers of a run, defaults left out: a key that recipes get later changes nothing here.
pub fn asked(text: &str, origin: &str, sets: &[String], methods: &[&str]) -> Result<BTreeMap<String, String>> {
    let name = Recipe::parse(text, origin, sets, methods)?.method_name().to_string();
    let mut table = read_table(text, origin)?;
    sets.iter().try_for_each(|set| apply(&mut table, set))?;
    if let Some(Value::Table(method)) = table.get_mut("method") {
        keep_own_options(method, &name, methods);
    }
    Ok(flat(table).into_iter().filter(|(key, _)| decides(key)).collect())
}

/// Does a key decide the numbers of a run?
fn decides(key: &str) -> bool {
    !key.starts_with("save.") && key != "data.on_device"
}

fn read_table(text: &str, origin: &str) -> Result<Table> {
    text.parse().map_err(|e: toml::de::Error| {
        let line = e.span().map_or(String::new(), |span| format!(", line {}", text[..span.start].matches('\n').count() + 1));
        Error::input(format!("recipe {origin}{line}: {}", e.message()))
    })
}

/// Options under [method.NAME] count for that method and are dropped for the others.
fn keep_own_options(method: &mut Table, name: &str, methods: &[&str]) {
    for other in methods {
        if let Some(Value::Table(own)) = method.get(*other).cloned() {
            method.remove(*other);
            if *other == name {
                for (key, value) in own {
                    method.entry(key).or_insert(value);
                }
            }
        }
    }
}

fn flat(table: Table) -> BTreeMap<String, String> {
    fn walk(prefix: &str, value: &Value, out: &mut BTreeMap<String, String>) {
        match value {
            Value::Table(table) => {
                table.iter().for_each(|(k, v)| walk(&format!("{prefix}{}{k}", if prefix.is_empty() { "" } else { "." }), v, out))
            }
            Value::Array(items) if items.first().is_some_and(Value::is_table) => {
                items.iter().enumerate().for_each(|(i, item)| walk(&format!("{prefix}.{i}"), item, out))
            }
            other => {
                out.insert(prefix.to_string(), other.to_string());
            }
        }
    }
    let mut out = BTreeMap::new();
    walk("", &Value::Table(table), &mut out);
    out
}

/// `section.key=value`.
fn apply(table: &mut Table, set: &str) -> Result<()> {
    let accepted = "section.key=value, for example train.epochs=3";
    let refuse = |what: String| Error::input(format!("--set {set}: {what}; accepted: {accepted}"));
    let setting = Setting::parse(set, accepted).map_err(|e| Error::input(format!("--set {set}: {e}")))?;
    if setting.path.len() < 2 {
        return Err(refuse(format!("`{}` is not section.key", setting.key())));
    }
    setting.apply(table).map_err(|key| refuse(format!("`{key}` is not a section")))
}
