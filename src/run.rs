//! The run folder: the only place that spells the names of the files in it, and the one definition of each number a run is told by.
//!
//! ```text
//! recipe.toml  asked.toml            what was asked for, resolved and as given
//! environment.json                   machine, versions, command, hashes of the splits
//! metrics.csv  metrics.jsonl         one row an epoch; metrics-steps.jsonl where rows inside an epoch were asked for
//! train-indices.csv  holdout-indices.csv  log.txt  lock  events.out.tfevents.*
//! checkpoints/step-N  last  best     everything needed to go on, to the bit
//! networks/peer-M.safetensors        what ships; best.safetensors points at the one chosen on held-out images
//! networks/peer-M-stage-L.safetensors  stage L of network M as a network of its own (methods with branches)
//! summary.json                       how a finished run came out
//! results.csv  results.jsonl         what was measured of it later, with figures/, draws/ and export/
//! ```

mod accuracy;
mod checkpoints;
mod events;
mod names;
mod state;
mod steps;
mod sweep;

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

pub use accuracy::{Best, FOUR_WAYS, FOUR_WAYS_NOTE, FourWays, StageChoice};
pub use checkpoints::{BEST, CheckpointFolder, LAST, checkpoint_name, checkpoint_step};
pub use names::{network_file, network_name, network_number, stage_file};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
pub use steps::StepRows;

use crate::error::{Error, Result};
use crate::files;

/// One epoch of metrics: name and value, in the order they are written.
pub type Row = Map<String, Value>;

/// Where everything of a run lies. Making one touches no file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunFolder {
    path: PathBuf,
}

impl RunFolder {
    /// The folder at `path`, which need not be there yet.
    pub fn at(path: impl Into<PathBuf>) -> RunFolder {
        RunFolder { path: path.into() }
    }

    /// The folder itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its last part, with links followed: `runs/latest` is called what it points at.
    pub fn name(&self) -> Result<String> {
        let full = self.path.canonicalize().map_err(Error::open(&self.path))?;
        Ok(full.file_name().unwrap_or_default().to_string_lossy().into_owned())
    }

    /// The recipe with every key resolved.
    pub fn recipe(&self) -> PathBuf {
        self.path.join("recipe.toml")
    }

    /// The recipe as an experiment asked for it, before the method filled in its defaults.
    pub fn asked(&self) -> PathBuf {
        self.path.join("asked.toml")
    }

    /// Machine, versions, command and hashes of the splits.
    pub fn environment(&self) -> PathBuf {
        self.path.join("environment.json")
    }

    /// Which training images were used, where not all were.
    pub fn train_indices(&self) -> PathBuf {
        self.path.join("train-indices.csv")
    }

    /// Which training images were held out.
    pub fn holdout_indices(&self) -> PathBuf {
        self.path.join("holdout-indices.csv")
    }

    /// One row an epoch, for spreadsheets.
    pub fn metrics_csv(&self) -> PathBuf {
        self.path.join("metrics.csv")
    }

    /// One row an epoch, for programs.
    pub fn metrics_jsonl(&self) -> PathBuf {
        self.path.join("metrics.jsonl")
    }

    /// What was said while training.
    pub fn log(&self) -> PathBuf {
        self.path.join("log.txt")
    }

    /// Held by the process that trains here.
    pub fn lock(&self) -> PathBuf {
        self.path.join("lock")
    }

    /// Everything needed to go on.
    pub fn checkpoints(&self) -> PathBuf {
        self.path.join("checkpoints")
    }

    /// The networks that ship.
    pub fn networks(&self) -> PathBuf {
        self.path.join("networks")
    }

    /// The m-th network that ships.
    pub fn network(&self, m: usize) -> PathBuf {
        self.networks().join(network_file(m))
    }

    /// Stage `l` (from 1) of the m-th network, where it ships as a network of its own.
    pub fn stage(&self, m: usize, l: usize) -> PathBuf {
        self.networks().join(stage_file(m, l))
    }

    /// A link to the network that was chosen on held-out images.
    pub fn best_network(&self) -> PathBuf {
        self.networks().join("best.safetensors")
    }

    /// How a finished run came out.
    pub fn summary(&self) -> PathBuf {
        self.path.join("summary.json")
    }

    /// Measurements, for spreadsheets.
    pub fn results_csv(&self) -> PathBuf {
        self.path.join("results.csv")
    }

    /// Measurements, for programs.
    pub fn results_jsonl(&self) -> PathBuf {
        self.path.join("results.jsonl")
    }

    /// Held by the process that adds measurements.
    pub fn results_lock(&self) -> PathBuf {
        self.path.join("results.lock")
    }

    /// Pictures that measurements drew.
    pub fn figures(&self) -> PathBuf {
        self.path.join("figures")
    }

    /// Which images each draw of a few-shot measurement took.
    pub fn draws(&self) -> PathBuf {
        self.path.join("draws")
    }

    /// Exported networks.
    pub fn exports(&self) -> PathBuf {
        self.path.join("export")
    }

    /// How far an experiment has come with this run.
    pub fn experiment_progress(&self) -> PathBuf {
        self.path.join("evidence.json")
    }

    /// The batch that made a step fail; with several ranks each keeps its own.
    pub fn diverged_batch(&self, step: usize, rank: Option<usize>) -> PathBuf {
        let of_rank = rank.map_or(String::new(), |rank| format!("-rank-{rank}"));
        self.path.join(format!("diverged-step-{step}{of_rank}.safetensors"))
    }

    /// The networks that shipped, in order; none before the run is finished.
    pub fn shipped(&self) -> Vec<PathBuf> {
        (0..).map(|m| self.network(m)).take_while(|file| file.exists()).collect()
    }

    /// The resolved recipe as a table.
    pub fn read_recipe(&self) -> Result<toml::Table> {
        let path = self.recipe();
        let text = fs::read_to_string(&path)
            .map_err(|e| Error::input(format!("{} is not a run: {} cannot be read ({e})", self.path.display(), path.display())))?;
        text.parse().map_err(|e: toml::de::Error| Error::file(&path, e.message()))
    }

    /// What the run was made with; null where an old run did not say.
    pub fn read_environment(&self) -> Result<Value> {
        let path = self.environment();
        if path.exists() { files::read_json(&path) } else { Ok(Value::Null) }
    }

    /// Writes both metrics files anew. A column that appears later is empty in earlier rows.
    pub fn write_metrics(&self, rows: &[Row]) -> Result<()> {
        let csv_path = self.metrics_csv();
        let fault = |e: String| Error::failed(format!("cannot write {}: {e}", csv_path.display()));
        let columns = columns(rows);
        let mut csv = csv::Writer::from_writer(vec![]);
        csv.write_record(&columns).map_err(|e| fault(e.to_string()))?;
        for row in rows {
            let cell = |column: &&str| match row.get(*column) {
                None | Some(Value::Null) => String::new(),
                Some(Value::String(s)) => s.clone(),
                Some(other) => other.to_string(),
            };
            csv.write_record(columns.iter().map(cell)).map_err(|e| fault(e.to_string()))?;
        }
        files::write(&csv_path, &csv.into_inner().map_err(|e| fault(e.to_string()))?)?;
        let lines: String = rows.iter().map(|row| format!("{}\n", Value::Object(row.clone()))).collect();
        files::write(&self.metrics_jsonl(), lines.as_bytes())
    }

    /// All finished epochs; none where there is no metrics file yet.
    pub fn read_metrics(&self) -> Result<Vec<Row>> {
        let path = self.metrics_jsonl();
        let text = if path.exists() { fs::read_to_string(&path).map_err(Error::open(&path))? } else { String::new() };
        let parse = |(i, line): (usize, &str)| serde_json::from_str(line).map_err(|e| Error::file(&path, format!("line {}: {e}", i + 1)));
        text.lines().enumerate().map(parse).collect()
    }

    /// Writes how the run came out.
    pub fn write_summary(&self, summary: &Summary) -> Result<()> {
        files::write_json(&self.summary(), summary)
    }

    /// How the run came out; none before it is finished.
    pub fn read_summary(&self) -> Result<Option<Summary>> {
        let path = self.summary();
        if path.exists() { files::read_json(&path).map(Some) } else { Ok(None) }
    }

    /// Makes the folder and keeps every other trainer out of it.
    pub fn open(&self) -> Result<OpenRun> {
        fs::create_dir_all(&self.path).map_err(Error::io("cannot make the run folder", &self.path))?;
        let lock = files::try_lock(&self.lock())?.ok_or_else(|| {
            Error::input(format!("another process is training in {}; choose another folder or wait for it", self.path.display()))
        })?;
        self.sweep()?;
        let path = self.log();
        let log = fs::OpenOptions::new().create(true).append(true).open(&path).map_err(Error::io("cannot write", &path))?;
        Ok(OpenRun { folder: self.clone(), log, _lock: lock })
    }
}

/// A run folder that this process writes to; the lock goes with the process.
pub struct OpenRun {
    /// Where everything lies.
    pub folder: RunFolder,
    log: File,
    _lock: File,
}

impl OpenRun {
    /// Appends a line to the log with the time in front.
    pub fn log(&mut self, line: &str) -> Result<()> {
        let stamp = chrono::Local::now().format("%Y-%m-%d %H:%M:%S");
        writeln!(self.log, "{stamp} {line}").map_err(Error::io("cannot write", self.folder.log()))
    }

    /// `latest` beside the run, where the run stands in a folder called `runs`.
    pub fn point_latest(&self) -> Result<()> {
        let path = self.folder.path();
        let full = path.canonicalize().map_err(Error::io("cannot find", path))?;
        match (full.parent(), full.file_name()) {
            (Some(parent), Some(name)) if parent.file_name().is_some_and(|p| p == "runs") => {
                files::point(&parent.join("latest"), &name.to_string_lossy())
            }
            _ => Ok(()),
        }
    }
}

/// All column names, in the order they first appear.
pub fn columns(rows: &[Row]) -> Vec<&str> {
    let mut names: Vec<&str> = vec![];
    for row in rows {
        names.extend(row.keys().map(String::as_str).filter(|k| !names.contains(k)).collect::<Vec<_>>());
    }
    names
}

/// A column by epoch; not a number where an epoch lacks it.
pub fn column(rows: &[Row], name: &str) -> Vec<f64> {
    rows.iter().map(|row| row.get(name).and_then(Value::as_f64).unwrap_or(f64::NAN)).collect()
}

/// How a finished run came out.
#[derive(Debug, Serialize, Deserialize)]
pub struct Summary {
    /// The run folder.
    pub out: PathBuf,
    /// The networks that ship.
    pub networks: Vec<NetworkSummary>,
    /// Test accuracy of all networks together after the last epoch, in percent.
    pub ensemble_top1: f64,
    /// Without held-out images nothing was chosen.
    pub best: Option<Best>,
    /// All epochs, those of a first phase included.
    pub epochs: usize,
    /// Optimizer steps.
    pub steps: usize,
    /// By the clock, over all sittings.
    pub seconds: f64,
    /// Of the steps alone, meta steps included.
    pub seconds_per_step: f64,
    /// The most memory the process held, in MB; 0 where the system does not say.
    pub peak_mb: f64,
    /// The most memory its tensors held on a GPU, in MB; none on the CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_peak_mb: Option<f64>,
    /// The files in `networks/`.
    pub shipped: Vec<PathBuf>,
}

/// One network that ships.
#[derive(Debug, Serialize, Deserialize)]
pub struct NetworkSummary {
    /// Its architecture.
    pub arch: String,
    /// Its test accuracy.
    #[serde(flatten)]
    pub accuracy: FourWays,
}

/// A run folder, read: what reports and measurements need to know of a run.
pub struct Run {
    /// Unique among the runs of one command.
    pub name: String,
    /// Where it lies.
    pub folder: RunFolder,
    /// The resolved recipe.
    pub recipe: toml::Table,
    /// What it was made with; null where an old run did not say.
    pub environment: Value,
    /// One row an epoch.
    pub metrics: Vec<Row>,
}

impl Run {
    /// Reads a run with at least one finished epoch.
    pub fn read(path: &Path) -> Result<Run> {
        if !path.is_dir() {
            return Err(Error::input(format!("no run at {}; accepted: a folder `mcl-train run` made", path.display())));
        }
        let folder = RunFolder::at(path);
        let recipe = folder.read_recipe()?;
        let metrics = folder.read_metrics()?;
        if metrics.is_empty() {
            return Err(Error::input(format!("{} has no finished epoch to report on (metrics.jsonl is missing or empty)", path.display())));
        }
        Ok(Run { name: folder.name()?, recipe, environment: folder.read_environment()?, metrics, folder })
    }

    /// A value of the recipe that is text, or nothing.
    fn text(&self, section: &str, key: &str) -> &str {
        self.recipe.get(section).and_then(|s| s.get(key)).and_then(|v| v.as_str()).unwrap_or_default()
    }

    /// How it was trained.
    pub fn method(&self) -> &str {
        self.text("method", "name")
    }

    /// What it was trained on.
    pub fn dataset(&self) -> &str {
        self.text("data", "name")
    }

    /// The networks of its cohort.
    pub fn archs(&self) -> Vec<String> {
        let archs = self.recipe.get("cohort").and_then(|c| c.get("archs")).and_then(|a| a.as_array());
        archs.into_iter().flatten().filter_map(|a| a.as_str().map(String::from)).collect()
    }

    /// A value of the recipe as it is written there.
    pub fn setting(&self, section: &str, key: &str) -> String {
        self.recipe.get(section).and_then(|s| s.get(key)).map_or(String::new(), |v| v.to_string())
    }

    /// A column of the metrics by epoch.
    pub fn column(&self, name: &str) -> Vec<f64> {
        column(&self.metrics, name)
    }

    /// The names of all columns.
    pub fn columns(&self) -> Vec<&str> {
        columns(&self.metrics)
    }

    /// The value of the last epoch.
    pub fn last(&self, name: &str) -> Option<f64> {
        self.column(name).last().copied().filter(|v| v.is_finite())
    }

    /// Epochs of a method's first phase, which trained something else than what ships.
    fn skipped(&self) -> usize {
        self.environment["extra_epochs"].as_u64().unwrap_or(0) as usize
    }

    /// What the held-out images choose among network `m`'s stages; none without such images, or without branches.
    pub fn stage_choice(&self, m: usize) -> Option<StageChoice> {
        let branches = self.columns().iter().any(|c| c.starts_with(&format!("holdout.peer{m}.stage")));
        StageChoice::of(&self.metrics, m, self.skipped()).filter(|_| branches)
    }

    /// Test accuracy of network `m`.
    pub fn accuracy(&self, m: usize) -> Option<FourWays> {
        FourWays::of(&self.metrics, m, self.skipped())
    }
}
