//! What `mcl-eval` does, one file a command. Measurements: linear_probe, accuracy, knn, few_shot, tsne, cohort, compare; `report` gathers
//! them, `evidence` makes a whole experiment of them, `export` hands networks on. What they share: subject (the networks), cache (their features), protocol (how), score and stats (how good), results (the rows).

pub mod accuracy;
pub mod cache;
pub mod cohort;
pub mod compare;
pub mod data;
pub mod doctor;
pub mod embed;
pub mod embedding;
pub mod evidence;
pub mod export;
pub mod few_shot;
pub mod heads;
pub mod knn;
pub mod linear_probe;
pub mod logreg;
pub mod protocol;
pub mod report;
pub mod results;
pub mod score;
pub mod selftest;
pub mod stats;
pub mod subject;
pub mod target;
pub mod tsne;

use std::io::IsTerminal;
use std::path::PathBuf;

use clap::Subcommand;
use tch::Device;

use crate::error::Result;

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
        } else if done == all || done.is_multiple_of(all.div_ceil(10).max(1)) {
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
    #[command(about = accuracy::ABOUT)]
    Accuracy(accuracy::Args),
    #[command(about = knn::ABOUT)]
    Knn(knn::Args),
    #[command(about = few_shot::ABOUT)]
    FewShot(few_shot::Args),
    #[command(about = tsne::ABOUT)]
    Tsne(tsne::Args),
    #[command(about = compare::ABOUT)]
    Compare(compare::Args),
    #[command(about = cohort::ABOUT)]
    Cohort(cohort::Args),
    #[command(about = export::ABOUT)]
    Export(export::Args),
    #[command(about = report::ABOUT)]
    Report(report::Args),
    #[command(about = evidence::ABOUT)]
    Evidence(evidence::Args),
}

impl Command {
    pub fn run(&self, common: &Common) -> Result<()> {
        match self {
            Command::LinearProbe(args) => linear_probe::run(args, common),
            Command::Accuracy(args) => accuracy::run(args, common),
            Command::Knn(args) => knn::run(args, common),
            Command::FewShot(args) => few_shot::run(args, common),
            Command::Tsne(args) => tsne::run(args, common),
            Command::Compare(args) => compare::run(args, common),
            Command::Cohort(args) => cohort::run(args, common),
            Command::Export(args) => export::run(args, common),
            Command::Report(args) => report::run(args, common),
            Command::Evidence(args) => evidence::run(args, common),
        }
    }
}
