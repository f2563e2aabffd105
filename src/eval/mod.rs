//! What measurements share: networks, datasets, features, protocols, rows, scores and statistics, and the probes that are trained on
//! features. The measurements themselves stand in `measures`, one file each.
//!
#![doc = include_str!("README.md")]

mod answers;
pub mod dataset;
pub mod feature_file;
pub mod features;
pub mod figures;
pub mod foreign;
pub mod measures;
pub mod network;
mod normalisation;
pub mod probe;
pub mod protocol;
pub mod record;
mod restored;
pub(crate) mod rows;
pub mod runs;
pub mod score;
mod seeds;
pub mod stats;
pub mod target;

use std::path::PathBuf;

use tch::Device;

use crate::system::progress::Progress;

/// What every command is told: the flags all of them share.
pub struct Common {
    /// Where datasets are looked for first.
    pub data: Option<PathBuf>,
    /// Where networks run.
    pub device: Device,
    /// Of libtorch, and of extraction.
    pub threads: usize,
    /// One JSON object on stdout.
    pub json: bool,
    /// Results only.
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

    /// How far `what` has come with `total` things called `unit`, for the person watching.
    pub fn progress(&self, what: impl Into<String>, total: usize, unit: &'static str) -> Progress {
        Progress::new(self.quiet, what, total, unit)
    }

    /// The one JSON object of a command.
    pub fn print_json(&self, value: &serde_json::Value) {
        println!("{value}");
    }
}
