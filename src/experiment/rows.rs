//! What is kept of finished units, small enough for git and free of paths: results.csv with all rows, and a folder a unit with its
//! resolved recipe, metrics, predictions and what it was made on. The report is made of these alone.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tch::{Kind, Tensor};

use super::plan::{Unit, Work};
use crate::error::{Error, Result};
use crate::eval::record::{self, Record};
use crate::eval::rows::{newest, protocol_of};
use crate::files;
use crate::weights::safetensors::{self, Reader, Texts};

/// One measurement: a row of results.csv.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Row {
    pub unit: String,
    pub hash: String,
    pub method: String,
    pub arch: String,
    /// None for what is measured of the cohort as a whole.
    pub peer: Option<usize>,
    pub command: String,
    pub dataset: String,
    /// With the keys that differ from what ships under its name.
    pub protocol: String,
    pub variant: String,
    pub metric: String,
    pub value: f64,
    pub ci_low: Option<f64>,
    pub ci_high: Option<f64>,
    pub top5: Option<f64>,
    pub n_train: usize,
    pub n_test: usize,
    pub split_hash: String,
    pub recipe_hash: String,
    pub protocol_hash: String,
    pub weights_hash: String,
    pub seconds: f64,
    pub commit: String,
    pub warnings: String,
}

impl Row {
    fn new(unit: &Unit, r: &Record) -> Row {
        let short = |hash: &str| hash.chars().take(16).collect::<String>();
        Row {
            unit: unit.name.clone(),
            hash: unit.hash.clone(),
            method: r.method.clone(),
            arch: r.arch.clone(),
            peer: r.peer,
            command: r.command.clone(),
            dataset: r.dataset.clone(),
            protocol: protocol_of(r),
            variant: r.variant.clone(),
            metric: r.metric.clone(),
            value: r.value,
            ci_low: r.ci_low,
            ci_high: r.ci_high,
            top5: r.top5,
            n_train: r.n_train,
            n_test: r.n_test,
            split_hash: short(&r.split_hash),
            recipe_hash: r.recipe_hash.clone(),
            protocol_hash: r.protocol_hash.clone(),
            weights_hash: short(&r.weights_hash),
            seconds: (r.seconds * 100.0).round() / 100.0,
            commit: r.commit.clone(),
            warnings: r.warnings.join("; "),
        }
    }

    /// What was measured, for all networks alike.
    pub fn measure(&self) -> Measure {
        Measure {
            command: self.command.clone(),
            dataset: self.dataset.clone(),
            protocol: self.protocol.clone(),
            variant: self.variant.clone(),
        }
    }
}

/// A question put to every network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Measure {
    pub command: String,
    pub dataset: String,
    pub protocol: String,
    pub variant: String,
}

impl Measure {
    pub fn shown(&self) -> String {
        let name = self.protocol.split(", ").next().unwrap_or_default();
        // A shorter probe is said to be one.
        let epochs = self.protocol.split(", ").find_map(|part| part.strip_prefix("epochs="));
        let protocol = epochs.map_or(name.to_string(), |epochs| format!("{name}, {epochs} epochs"));
        let what = match (self.command.as_str(), self.variant.split_once('=')) {
            ("accuracy", _) => "own classifier".to_string(),
            ("linear-probe", _) => format!("linear probe ({protocol})"),
            ("knn", Some((_, k))) => format!("{k} nearest neighbours"),
            ("few-shot", Some((_, shots))) => format!("{shots} labelled image{} a class", if shots == "1" { "" } else { "s" }),
            (other, _) => format!("{other} {}", self.variant),
        };
        format!("{}: {what}", self.dataset)
    }

    /// The name of a network's answers in the file of predictions.
    fn tensor(&self, peer: usize) -> String {
        let parts = [&self.command, &self.dataset, &self.protocol.split(", ").next().unwrap_or_default().to_string(), &self.variant];
        let parts: Vec<&str> = parts.into_iter().map(String::as_str).filter(|p| !p.is_empty()).collect();
        format!("{}/peer-{peer}", parts.join("/"))
    }

    /// `synthetic` is two tasks: a network's own labels and those it transfers to.
    fn labels(&self) -> String {
        format!("labels/{}{}", self.dataset, if self.command == "accuracy" { "" } else { "/transfer" })
    }
}

/// What a unit was made on and how long it took.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Made {
    pub unit: String,
    pub hash: String,
    pub setting: String,
    pub seed: Option<u64>,
    pub evaluate: Vec<String>,
    /// mcl, commit, libtorch, device, threads, cpu, cores, memory_mb, os, arch.
    pub machine: BTreeMap<String, Value>,
    /// Units that ran side by side.
    pub jobs: usize,
    pub train_images: u64,
    pub train_split_hash: String,
    pub steps: usize,
    pub seconds_per_step: f64,
    pub peak_mb: f64,
    /// Of training and of the measurements, by the clock and of the processor.
    pub train_seconds: f64,
    pub train_cpu_seconds: f64,
    pub evaluate_seconds: f64,
    pub evaluate_cpu_seconds: f64,
    /// Pictures the measurements drew: file and caption.
    pub figures: Vec<(String, String)>,
}

/// The kept part of an experiment.
pub struct Kept {
    folder: PathBuf,
    pub rows: Vec<Row>,
}

impl Kept {
    pub fn read(folder: &Path) -> Result<Kept> {
        let path = folder.join("results.csv");
        let mut rows = vec![];
        if path.exists() {
            let mut reader = csv::Reader::from_path(&path).map_err(|e| Error::file(&path, e.to_string()))?;
            for row in reader.deserialize() {
                rows.push(row.map_err(|e| Error::file(&path, e.to_string()))?);
            }
        }
        Ok(Kept { folder: folder.to_path_buf(), rows })
    }

    pub fn has(&self, unit: &Unit) -> bool {
        self.rows.iter().any(|r| r.unit == unit.name && r.hash == unit.hash)
    }

    pub fn unit_folder(&self, unit: &str) -> PathBuf {
        self.folder.join("units").join(unit)
    }

    pub fn made(&self, unit: &str) -> Result<Made> {
        let path = self.unit_folder(unit).join("unit.json");
        let text = std::fs::read_to_string(&path).map_err(Error::open(&path))?;
        serde_json::from_str(&text).map_err(|e| Error::file(&path, e.to_string()))
    }

    /// Takes over what the measurements of a unit left in `from`: its own run folder, or that of a measurement over several. The rows come
    /// last, with one rename: until they are there, the unit is not finished.
    pub fn add(&mut self, unit: &Unit, from: &Path, mut made: Made, order: &[String]) -> Result<()> {
        let records = record::read(from)?;
        // A run folder may hold what was measured of it on other occasions.
        let asked = |r: &&Record| unit.evaluate.iter().any(|line| r.argv.contains(&line.split_whitespace().collect::<Vec<_>>().join(" ")));
        let records = newest(&records.iter().filter(asked).collect::<Vec<_>>())?;
        if records.is_empty() {
            return Err(Error::failed(format!("unit {}: its measurements left no rows in {}", unit.name, from.display())));
        }
        let to = self.unit_folder(&unit.name);
        std::fs::create_dir_all(&to).map_err(Error::io("cannot make", &to))?;
        for name in ["recipe.toml", "metrics.csv"] {
            let file = from.join(name);
            if file.exists() {
                files::write(&to.join(name), &std::fs::read(&file).map_err(Error::open(&file))?)?;
            }
        }
        write_predictions(&to.join("predictions.safetensors"), unit, &records)?;
        // Those of one run alone say little; the report draws them for all together.
        if matches!(unit.work, Work::Over(_)) {
            made.figures = copy_figures(&records, &to)?;
        }
        let text = serde_json::to_string_pretty(&made).expect("plain values serialise") + "\n";
        files::write(&to.join("unit.json"), text.as_bytes())?;
        self.rows.retain(|r| r.unit != unit.name);
        self.rows.extend(records.iter().map(|r| Row::new(unit, r)));
        let place = |row: &Row| order.iter().position(|u| *u == row.unit).unwrap_or(order.len());
        self.rows.sort_by_key(place);
        self.write()
    }

    fn write(&self) -> Result<()> {
        let path = self.folder.join("results.csv");
        let fault = |e: String| Error::failed(format!("cannot write {}: {e}", path.display()));
        let mut out = csv::Writer::from_writer(vec![]);
        for row in &self.rows {
            out.serialize(row).map_err(|e| fault(e.to_string()))?;
        }
        files::write(&path, &out.into_inner().map_err(|e| fault(e.to_string()))?)
    }

    /// Was each test image answered right? None where the answers were not kept.
    pub fn right(&self, unit: &str, measure: &Measure, peer: usize) -> Result<Option<Vec<bool>>> {
        let path = self.unit_folder(unit).join("predictions.safetensors");
        if !path.exists() {
            return Ok(None);
        }
        let mut reader = Reader::open(&path)?;
        let (name, labels) = (measure.tensor(peer), measure.labels());
        if !reader.names().contains(&name) {
            return Ok(None);
        }
        let mut numbers = |name: &str| -> Result<Vec<i64>> {
            Vec::try_from(reader.tensor(name)?.to_kind(Kind::Int64)).map_err(|e| Error::file(&path, format!("{name}: {e}")))
        };
        let (answers, labels) = (numbers(&name)?, numbers(&labels)?);
        Ok(Some(answers.iter().zip(&labels).map(|(a, l)| a == l).collect()))
    }
}

/// Labels and answers as small integers.
fn write_predictions(path: &Path, unit: &Unit, records: &[&Record]) -> Result<()> {
    let mut tensors: Vec<(String, Tensor)> = vec![];
    for record in records {
        let Some(peer) = record.peer else { continue };
        let numbers = |key: &str| serde_json::from_value::<Vec<i64>>(record.detail[key].clone()).ok();
        let (Some(labels), Some(predicted)) = (numbers("labels"), numbers("predicted")) else { continue };
        let measure = Row::new(unit, record).measure();
        let small = |values: &[i64]| {
            let kind = if values.iter().all(|v| (0..256).contains(v)) { Kind::Uint8 } else { Kind::Int16 };
            Tensor::from_slice(values).to_kind(kind)
        };
        if !tensors.iter().any(|(n, _)| *n == measure.labels()) {
            tensors.push((measure.labels(), small(&labels)));
        }
        tensors.push((measure.tensor(peer), small(&predicted)));
    }
    if tensors.is_empty() {
        return Ok(());
    }
    safetensors::save(path, &tensors, &Texts::new())
}

fn copy_figures(records: &[&Record], to: &Path) -> Result<Vec<(String, String)>> {
    let mut kept: Vec<(String, String)> = vec![];
    for record in records {
        for figure in record.detail["figures"].as_array().into_iter().flatten() {
            let (Some(svg), Some(caption)) = (figure["svg"].as_str(), figure["caption"].as_str()) else { continue };
            let name = Path::new(svg).file_name().unwrap_or_default().to_string_lossy().into_owned();
            if !kept.iter().any(|(n, _)| *n == name) {
                files::write(&to.join(&name), &std::fs::read(svg).map_err(Error::open(svg))?)?;
                kept.push((name, caption.to_string()));
            }
        }
    }
    Ok(kept)
}
