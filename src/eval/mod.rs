//! What `mcl-eval` does, one file a command.

pub mod data;
pub mod doctor;
pub mod embed;
pub mod features;
pub mod selftest;

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
}

impl Common {
    /// A line for the person watching.
    pub fn say(&self, line: impl AsRef<str>) {
        if !self.quiet {
            eprintln!("{}", line.as_ref());
        }
    }
}
