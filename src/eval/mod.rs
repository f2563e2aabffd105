//! What `mcl-eval` does, one file a command. Measurements: linear_probe, accuracy, knn, few_shot, tsne, cohort, compare; `report` gathers
//! them. What they share: subject (the networks), cache (their features), protocol (how), score and stats (how good), results (the rows).

pub mod cache;
pub mod doctor;
pub mod embedding;
pub mod heads;
pub mod linear_probe;
pub mod logreg;
pub mod protocol;
pub mod report;
pub mod results;
pub mod score;
pub mod stats;
pub mod subject;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use clap::Subcommand;
use tch::Device;

use crate::data::{self, Dataset, sampler};
use crate::error::{Error, Result};

/// What every command is told: the flags all of them share.
pub struct Common {
    pub data: Option<PathBuf>,
    pub device: Device,
    pub threads: usize,
    /// One JSON object on stdout.
    pub json: bool,
    pub quiet: bool,
}

impl Common {
    /// A line for the person watching.
    pub fn say(&self, line: impl AsRef<str>) {
        if !self.quiet {
            eprintln!("{}", line.as_ref());
        }
    }

    /// Said even when quiet: a number that must not be taken at face value.
    pub fn warn(&self, line: impl AsRef<str>) {
        eprintln!("warning: {}", line.as_ref());
    }

    /// A counter on a terminal, a line every tenth elsewhere.
    pub fn progress(&self, done: usize, all: usize, what: &str) {
        if self.quiet {
            return;
        }
        if std::io::stderr().is_terminal() {
            eprint!("\r{what} {done}/{all}{}", if done == all { "\n" } else { "" });
        } else if done == all || done % all.div_ceil(10).max(1) == 0 {
            eprintln!("{what} {done}/{all}");
        }
    }

    pub fn print_json(&self, value: &serde_json::Value) {
        println!("{value}");
    }
}

/// Every measuring command: arguments and what runs them.
#[derive(Debug, Subcommand)]
pub enum Command {
    #[command(about = linear_probe::ABOUT)]
    LinearProbe(linear_probe::Args),
    #[command(about = report::ABOUT)]
    Report(report::Args),
}

impl Command {
    pub fn run(&self, common: &Common) -> Result<()> {
        match self {
            Command::LinearProbe(args) => linear_probe::run(args, common),
            Command::Report(args) => report::run(args, common),
        }
    }
}

/// A dataset networks are measured on.
pub struct Target {
    pub dataset: Dataset,
    /// Of the places of its training and test images.
    pub hash: String,
}

impl Target {
    /// Opens a dataset to transfer to; `synthetic` means its transfer task.
    pub fn open(name: &str, common: &Common) -> Result<Target> {
        Target::with_task(name, data::Task::Transfer, common)
    }

    /// Opens the dataset networks were pre-trained on.
    pub fn source(name: &str, common: &Common) -> Result<Target> {
        Target::with_task(name, data::Task::Source, common)
    }

    fn with_task(name: &str, task: data::Task, common: &Common) -> Result<Target> {
        let dataset = data::open(name, common.data.as_deref(), &data::Options { task, ..Default::default() })?;
        if dataset.train.is_empty() || dataset.test.is_empty() {
            return Err(Error::input(format!("dataset {name} has {} training and {} test images; both are needed", dataset.train.len(), dataset.test.len())));
        }
        let rows = |split: &data::Split| split.rows.iter().zip(split.labels.iter()).map(|(&r, &l)| r as usize * 100_000 + l as usize).collect::<Vec<_>>();
        let hash = sampler::hash(&[rows(&dataset.train), rows(&dataset.test)].concat());
        Ok(Target { dataset, hash })
    }
}

/// The method a run was trained with.
pub fn run_method(run: &Path) -> Result<String> {
    let path = run.join("recipe.toml");
    let text = std::fs::read_to_string(&path).map_err(Error::open(&path))?;
    let table: toml::Table = text.parse().map_err(|e: toml::de::Error| Error::file(&path, e.message()))?;
    let name = table.get("method").and_then(|m| m.get("name")).and_then(|n| n.as_str());
    name.map(String::from).ok_or_else(|| Error::file(&path, "names no method"))
}
