//! What is kept of a plan's finished items, small enough for git and free of paths: results.csv with all rows, and a folder an item
//! (units/NAME) with its resolved recipe, metrics, predictions and what it was made on. The report is made of these alone.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tch::{Kind, Tensor};

use super::plan::Item;
use super::runner::Progress;
use crate::error::{Error, Result};
use crate::eval::record::Record;
use crate::eval::rows::protocol_of;
use crate::files;
use crate::run::{RunFolder, network_name};
use crate::weights::safetensors::{self, Reader, Texts};

/// One measurement: a row of results.csv.
#[derive(Debug, Clone)]
pub struct Row {
    /// The item of the plan it belongs to, and that item's hash.
    pub item: String,
    /// Of the item as the plan asked for it then.
    pub hash: String,
    /// What was measured, as far as results.csv holds it.
    pub record: Record,
}

/// What results.csv holds of a record, in this order, after the item (`unit`) and its hash.
const COLUMNS: [&str; 22] = [
    "method",
    "arch",
    "peer",
    "command",
    "dataset",
    "protocol",
    "variant",
    "metric",
    "value",
    "ci_low",
    "ci_high",
    "top5",
    "n_train",
    "n_test",
    "split_hash",
    "recipe_hash",
    "protocol_hash",
    "weights_hash",
    "seconds",
    "commit",
    "warnings",
    "id",
];

/// Several warnings are one cell.
const BETWEEN_WARNINGS: &str = "; ";

impl Row {
    fn new(item: &Item, r: &Record) -> Row {
        let short = |hash: &str| hash.chars().take(16).collect::<String>();
        let record = Record {
            // With the keys that differ from what ships under its name.
            protocol: protocol_of(r),
            split_hash: short(&r.split_hash),
            weights_hash: short(&r.weights_hash),
            seconds: (r.seconds * 100.0).round() / 100.0,
            options: Value::Null,
            detail: Value::Null,
            ..r.clone()
        };
        Row { item: item.name.clone(), hash: item.hash.clone(), record }
    }

    /// From the cells of a row by column. A file made before a column was there lacks it.
    fn read(cell: impl Fn(&str) -> Option<String>) -> std::result::Result<Row, String> {
        let Ok(Value::Object(mut known)) = serde_json::to_value(Record::default()) else { unreachable!("a record is an object") };
        for column in COLUMNS {
            let Some(text) = cell(column) else { continue };
            known[column] = match &known[column] {
                Value::String(_) => Value::String(text),
                Value::Array(_) => text.split(BETWEEN_WARNINGS).filter(|part| !part.is_empty()).collect(),
                _ if text.is_empty() => Value::Null,
                _ => serde_json::from_str(&text).map_err(|e| format!("{column} = {text}: {e}"))?,
            };
        }
        let record = serde_json::from_value(Value::Object(known)).map_err(|e| e.to_string())?;
        Ok(Row { item: cell("unit").unwrap_or_default(), hash: cell("hash").unwrap_or_default(), record })
    }

    fn cells(&self) -> Vec<String> {
        let known = serde_json::to_value(&self.record).expect("plain values serialise");
        let cell = |column: &&str| match &known[*column] {
            Value::Null => String::new(),
            Value::String(text) => text.clone(),
            Value::Array(parts) => parts.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(BETWEEN_WARNINGS),
            number => number.to_string(),
        };
        [self.item.clone(), self.hash.clone()].into_iter().chain(COLUMNS.iter().map(cell)).collect()
    }

    /// What was measured, for all networks alike.
    pub(crate) fn question(&self) -> Question {
        let Record { command, dataset, protocol, variant, .. } = &self.record;
        // A stage is another network than the one that ends in it.
        let variant = self.record.stage().map_or(variant.clone(), |stage| format!("{variant} stage={stage}").trim_start().to_string());
        Question { command: command.clone(), dataset: dataset.clone(), protocol: protocol.clone(), variant }
    }
}

/// A question put to every network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// Which measurement.
    pub command: String,
    /// On what.
    pub dataset: String,
    /// By which protocol, with the keys that differ from what ships under its name; empty where a measurement has none.
    pub protocol: String,
    /// What varies inside a measurement: `k=20`, `shots=5`.
    pub variant: String,
}

impl Question {
    /// For tables and figures.
    pub(crate) fn shown(&self) -> String {
        let name = self.protocol.split(", ").next().unwrap_or_default();
        // A shorter probe is said to be one.
        let epochs = self.protocol.split(", ").find_map(|part| part.strip_prefix("epochs="));
        let protocol = epochs.map_or(name.to_string(), |epochs| format!("{name}, {epochs} epochs"));
        let what = match (self.command.as_str(), self.variant.split_once('=')) {
            ("accuracy", _) => "own classifier".to_string(),
            ("linear-probe", _) => format!("linear probe ({protocol})"),
            ("knn", Some((_, k))) => format!("{k} nearest neighbour{}", if k == "1" { "" } else { "s" }),
            ("few-shot", Some((_, shots))) => format!("{shots} labelled image{} a class", if shots == "1" { "" } else { "s" }),
            ("fine-tune", Some((_, images))) => format!("fine-tuned on {images} images"),
            (other, _) => format!("{other} {}", self.variant),
        };
        format!("{}: {what}", self.dataset)
    }

    /// The name of a network's answers in the file of predictions.
    fn tensor(&self, peer: usize) -> String {
        self.tensor_by(&self.protocol, peer)
    }

    /// As files made before have it: without the keys that differ, so that two probes of one protocol had one name.
    fn tensor_before(&self, peer: usize) -> String {
        self.tensor_by(self.protocol.split(", ").next().unwrap_or_default(), peer)
    }

    fn tensor_by(&self, protocol: &str, peer: usize) -> String {
        let parts: Vec<&str> = [&self.command, &self.dataset, protocol, &self.variant].into_iter().filter(|p| !p.is_empty()).collect();
        format!("{}/{}", parts.join("/"), network_name(peer))
    }

    /// `synthetic` is two tasks: a network's own labels and those it transfers to.
    fn labels(&self) -> String {
        format!("labels/{}{}", self.dataset, if self.command == "accuracy" { "" } else { "/transfer" })
    }
}

/// What an item was made on and how long it took: unit.json.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct ItemFacts {
    #[serde(rename = "unit")]
    item: String,
    hash: String,
    setting: String,
    seed: Option<u64>,
    evaluate: Vec<String>,
    /// mcl, commit, libtorch, device, threads, cpu, cores, memory_mb, os, arch.
    pub(crate) machine: BTreeMap<String, Value>,
    /// Items that were made at the same time.
    #[serde(rename = "jobs")]
    pub(crate) side_by_side: usize,
    pub(crate) train_images: u64,
    pub(crate) train_split_hash: String,
    pub(crate) steps: usize,
    /// Epochs of a first phase, which trained something else than what ships.
    #[serde(default)]
    pub(crate) extra_epochs: u64,
    seconds_per_step: f64,
    pub(crate) peak_mb: f64,
    /// Of training and of the measurements, by the clock and of the processor.
    pub(crate) train_seconds: f64,
    pub(crate) train_cpu_seconds: f64,
    pub(crate) evaluate_seconds: f64,
    pub(crate) evaluate_cpu_seconds: f64,
    /// Pictures the measurements drew: file and caption.
    pub(crate) figures: Vec<(String, String)>,
}

impl ItemFacts {
    /// `here` is the environment of this process: a measurement over several runs has none of its own.
    pub(crate) fn new(item: &Item, progress: &Progress, side_by_side: usize, here: &Value) -> Result<ItemFacts> {
        let mut facts = ItemFacts {
            item: item.name.clone(),
            hash: item.hash.clone(),
            evaluate: item.measurements.iter().map(|m| m.line.clone()).collect(),
            machine: machine(here),
            side_by_side,
            train_cpu_seconds: progress.train_cpu_seconds.round(),
            evaluate_seconds: progress.evaluate_seconds.round(),
            evaluate_cpu_seconds: progress.evaluate_cpu_seconds.round(),
            ..ItemFacts::default()
        };
        if let Some(run) = item.run() {
            let missing = || Error::failed(format!("{} has no summary", item.folder.path().display()));
            let (summary, there) = (item.folder.read_summary()?.ok_or_else(missing)?, item.folder.read_environment()?);
            (facts.setting, facts.seed, facts.train_seconds) = (run.setting.clone(), Some(run.seed), summary.seconds.round());
            (facts.steps, facts.seconds_per_step, facts.peak_mb) = (summary.steps, summary.seconds_per_step, summary.peak_mb);
            facts.train_images = there["train_images"].as_u64().unwrap_or(0);
            facts.extra_epochs = there["extra_epochs"].as_u64().unwrap_or(0);
            facts.train_split_hash = there["train_split_hash"].as_str().unwrap_or_default().to_string();
            facts.machine = machine(&there);
        }
        Ok(facts)
    }
}

/// What a reader needs to know of a machine, and nothing that says whose it is.
fn machine(environment: &Value) -> BTreeMap<String, Value> {
    let told = ["mcl", "commit", "libtorch", "device", "threads", "cpu", "cores", "memory_mb", "os", "arch"];
    told.iter().map(|key| (key.to_string(), environment[*key].clone())).collect()
}

/// The kept part of an experiment.
pub struct Rows {
    folder: PathBuf,
    pub(crate) all: Vec<Row>,
}

impl Rows {
    /// What is kept in `folder`; nothing where there is none yet.
    pub fn read(folder: &Path) -> Result<Rows> {
        let path = results(folder);
        let mut all = vec![];
        if path.exists() {
            let fault = |e: csv::Error| Error::file(&path, e.to_string());
            let mut reader = csv::Reader::from_path(&path).map_err(fault)?;
            let names = reader.headers().map_err(fault)?.clone();
            for (i, line) in reader.records().enumerate() {
                let line = line.map_err(fault)?;
                let cell = |column: &str| names.iter().position(|n| n == column).and_then(|at| line.get(at)).map(String::from);
                all.push(Row::read(cell).map_err(|e| Error::file(&path, format!("row {}: {e}", i + 1)))?);
            }
        }
        Ok(Rows { folder: folder.to_path_buf(), all })
    }

    /// Is it finished, as the plan asks for it now?
    pub fn has(&self, item: &Item) -> bool {
        self.all.iter().any(|r| r.item == item.name && r.hash == item.hash)
    }

    /// Where everything but the rows of an item is kept.
    pub fn item_folder(&self, name: &str) -> PathBuf {
        self.folder.join("units").join(name)
    }

    fn facts_file(&self, name: &str) -> PathBuf {
        self.item_folder(name).join("unit.json")
    }

    fn predictions_file(&self, name: &str) -> PathBuf {
        self.item_folder(name).join("predictions.safetensors")
    }

    pub(crate) fn facts(&self, name: &str) -> Result<ItemFacts> {
        files::read_json(&self.facts_file(name))
    }

    /// The kinds of processor that the finished runs of a seed were made on, with the settings made on each.
    pub(crate) fn processors(&self, items: &[Item], seed: u64) -> Result<Vec<(String, Vec<String>)>> {
        let mut kinds: Vec<(String, Vec<String>)> = vec![];
        for item in items.iter().filter(|i| self.has(i)) {
            let Some(run) = item.run().filter(|run| run.seed == seed) else { continue };
            let facts = self.facts(&item.name)?;
            let kind = facts.machine.get("cpu").and_then(Value::as_str).unwrap_or("unknown");
            match kinds.iter_mut().find(|(known, _)| known == kind) {
                Some((_, settings)) => settings.push(run.setting.clone()),
                None => kinds.push((kind.to_string(), vec![run.setting.clone()])),
            }
        }
        Ok(kinds)
    }

    /// Takes over what the measurements of an item left in its folder. The rows come last, with one rename: until they are there, the item
    /// is not finished. Rows stand in the order of `items`.
    pub(crate) fn add(&mut self, item: &Item, mut facts: ItemFacts, items: &[Item]) -> Result<()> {
        let records = item.records()?;
        let to = RunFolder::at(self.item_folder(&item.name));
        std::fs::create_dir_all(to.path()).map_err(Error::io("cannot make", to.path()))?;
        for (from, to) in [(item.folder.recipe(), to.recipe()), (item.folder.metrics_csv(), to.metrics_csv())] {
            if from.exists() {
                files::write(&to, &std::fs::read(&from).map_err(Error::open(&from))?)?;
            }
        }
        write_predictions(&self.predictions_file(&item.name), item, &records)?;
        // Those of one run alone say little; the report draws them for all together.
        if item.run().is_none() {
            facts.figures = copy_figures(&records, to.path())?;
        }
        let text = serde_json::to_string_pretty(&facts).expect("plain values serialise") + "\n";
        files::write(&self.facts_file(&item.name), text.as_bytes())?;
        self.all.retain(|r| r.item != item.name);
        self.all.extend(records.iter().map(|r| Row::new(item, r)));
        let place = |row: &Row| items.iter().position(|i| i.name == row.item).unwrap_or(items.len());
        self.all.sort_by_key(place);
        files::write(&results(&self.folder), self.csv()?.as_bytes())
    }

    /// The id of every row: the measurement that it came from.
    pub fn ids(&self) -> impl Iterator<Item = &str> {
        self.all.iter().map(|r| r.record.id.as_str())
    }

    /// The text of results.csv.
    pub fn csv(&self) -> Result<String> {
        let fault = |e: String| Error::failed(format!("cannot write {}: {e}", results(&self.folder).display()));
        let mut out = csv::Writer::from_writer(vec![]);
        out.write_record(["unit", "hash"].iter().chain(&COLUMNS)).map_err(|e| fault(e.to_string()))?;
        for row in &self.all {
            out.write_record(row.cells()).map_err(|e| fault(e.to_string()))?;
        }
        let bytes = out.into_inner().map_err(|e| fault(e.to_string()))?;
        Ok(String::from_utf8(bytes).expect("cells are text"))
    }

    /// Was each test image answered right? None where the answers were not kept.
    pub(crate) fn right(&self, name: &str, question: &Question, peer: usize) -> Result<Option<Vec<bool>>> {
        let path = self.predictions_file(name);
        if !path.exists() {
            return Ok(None);
        }
        let mut reader = Reader::open(&path)?;
        let there = reader.names();
        let Some(name) = [question.tensor(peer), question.tensor_before(peer)].into_iter().find(|name| there.contains(name)) else {
            return Ok(None);
        };
        let labels = question.labels();
        let mut numbers = |name: &str| -> Result<Vec<i64>> {
            Vec::try_from(reader.tensor(name)?.to_kind(Kind::Int64)).map_err(|e| Error::file(&path, format!("{name}: {e}")))
        };
        let (answers, labels) = (numbers(&name)?, numbers(&labels)?);
        Ok(Some(answers.iter().zip(&labels).map(|(a, l)| a == l).collect()))
    }
}

fn results(folder: &Path) -> PathBuf {
    RunFolder::at(folder).results_csv()
}

/// Labels and answers as small integers.
fn write_predictions(path: &Path, item: &Item, records: &[Record]) -> Result<()> {
    let mut tensors: Vec<(String, Tensor)> = vec![];
    for record in records {
        let Some(peer) = record.peer else { continue };
        let numbers = |key: &str| serde_json::from_value::<Vec<i64>>(record.detail[key].clone()).ok();
        let (Some(labels), Some(predicted)) = (numbers("labels"), numbers("predicted")) else { continue };
        let question = Row::new(item, record).question();
        let small = |values: &[i64]| {
            let kind = if values.iter().all(|v| (0..256).contains(v)) { Kind::Uint8 } else { Kind::Int16 };
            Tensor::from_slice(values).to_kind(kind)
        };
        if !tensors.iter().any(|(n, _)| *n == question.labels()) {
            tensors.push((question.labels(), small(&labels)));
        }
        tensors.push((question.tensor(peer), small(&predicted)));
    }
    if tensors.is_empty() {
        return Ok(());
    }
    safetensors::save(path, &tensors, &Texts::new())
}

fn copy_figures(records: &[Record], to: &Path) -> Result<Vec<(String, String)>> {
    let mut kept: Vec<(String, String)> = vec![];
    for record in records {
        for figure in record.detail["figures"].as_array().into_iter().flatten() {
            let (Some(svg), Some(caption)) = (figure["svg"].as_str(), figure["caption"].as_str()) else { continue };
            let name = Path::new(svg).file_name().unwrap_or_default().to_string_lossy().into_owned();
            if !kept.iter().any(|(n, _)| *n == name) {
                files::write(&to.join(&name), &std::fs::read(svg).map_err(Error::open(svg))?)?;
                // The points of a map lie beside its picture.
                let points = Path::new(svg).with_extension("json");
                if points.exists() {
                    files::write(&to.join(&name).with_extension("json"), &std::fs::read(&points).map_err(Error::open(&points))?)?;
                }
                kept.push((name, caption.to_string()));
            }
        }
    }
    Ok(kept)
}
