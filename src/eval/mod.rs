//! What `mcl-eval` does, one file a command. Measurements: linear_probe, accuracy, knn, few_shot, tsne, cohort, compare; `report` gathers
//! them, `evidence` makes a whole experiment of them, `export` hands networks on. What they share: subject (the networks), cache (their features), protocol (how), score and stats (how good), results (the rows).

pub mod dataset;
pub mod embedding;
pub mod features;
pub mod figures;
pub mod measures;
pub mod network;
pub mod probe;
pub mod protocol;
pub mod record;
pub(crate) mod rows;
pub mod score;
pub mod stats;

use std::io::IsTerminal;
use std::path::PathBuf;

use tch::Device;

/// What every command is told: the flags all of them share.
pub struct Common {
    pub data: Option<PathBuf>,
    pub device: Device,
    pub threads: usize,
    /// One JSON object on stdout.
    pub json: bool,
    pub quiet: bool,
    /// What the program was built from.
    pub commit: &'static str,
    /// What an experiment calls this measurement: its rows carry it and are found by it.
    pub id: Option<String>,
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
