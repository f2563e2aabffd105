//! The subcommands of `mcl-eval`, and what is neither training nor measuring.

pub mod data;
pub mod doctor;
pub mod embed;
pub mod list;
pub mod report;
pub mod selftest;

use clap::Subcommand;

use crate::error::Result;
use crate::eval::Common;
use crate::eval::measures::{accuracy, cohort, compare, few_shot, knn, linear_probe, tsne};
use crate::experiment::{evidence, fractions};
use crate::export;

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
            Command::FewShot(args) if !args.fractions.is_empty() => fractions::run(args, common),
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
