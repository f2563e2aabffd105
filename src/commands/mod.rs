//! The subcommands of `mcl-eval`: every measurement of the registry, and what is neither training nor measuring.

mod beside;
mod curve;
pub mod data;
pub mod doctor;
pub mod embed;
pub mod list;
pub mod next;
mod report;
pub mod selftest;
pub mod shell;
mod table;

use clap::{ArgMatches, FromArgMatches, Subcommand};

use crate::error::{Error, Result};
use crate::eval::Common;
use crate::eval::measures::{MEASURES, Measure, Measurement, few_shot, one_line};
use crate::experiment::{evidence, fractions, transfer};
use crate::export;
use crate::report::{Cell, Table};

/// Every subcommand of `mcl-eval`: arguments and what runs them.
#[derive(Subcommand)]
pub enum EvalCommand {
    /// Check libtorch, devices, datasets, disk
    Doctor,
    /// One of the registry of measurements.
    #[command(flatten)]
    Measure(MeasureCommand),
    /// Networks for other frameworks.
    #[command(about = export::ABOUT)]
    Export(export::Args),
    /// One report of runs and results.
    #[command(about = report::ABOUT)]
    Report(report::Args),
    /// A whole experiment.
    #[command(about = evidence::ABOUT)]
    Evidence(evidence::Args),
    /// Many networks on other datasets.
    #[command(about = transfer::ABOUT)]
    Transfer(transfer::Args),
    /// A table or figure of the paper.
    #[command(about = table::ABOUT)]
    Table(table::Args),
    /// Check that this build computes the objective, its gradients and the hypergradient right
    Selftest(selftest::SelftestArgs),
    /// Features, logits and stage maps of images
    Embed(embed::EmbedArgs),
    /// List, check or fetch datasets
    #[command(subcommand)]
    Data(data::DataCommand),
    /// What can be measured, and by which protocols
    #[command(subcommand)]
    List(Listed),
}

impl EvalCommand {
    /// Does what was asked.
    pub fn run(&self, common: &Common) -> Result<()> {
        match self {
            EvalCommand::Doctor => doctor::run(common),
            EvalCommand::Measure(command) => command.run(common),
            EvalCommand::Export(args) => export::run(args, common),
            EvalCommand::Report(args) => report::run(args, common),
            EvalCommand::Evidence(args) => evidence::run(args, common),
            EvalCommand::Transfer(args) => transfer::run(args, common),
            EvalCommand::Table(args) => table::run(args, common),
            EvalCommand::Selftest(args) => selftest::run(args, common),
            EvalCommand::Embed(args) => embed::run(args, common),
            EvalCommand::Data(command) => data::run(command, common),
            EvalCommand::List(listed) => {
                print!("{}", listed.table().plain());
                Ok(())
            }
        }
    }
}

/// A measurement of the registry with the arguments it was given.
#[derive(Debug)]
pub struct MeasureCommand {
    measure: &'static Measure,
    arguments: ArgMatches,
}

impl MeasureCommand {
    fn run(&self, common: &Common) -> Result<()> {
        // The paper's few-shot trains the runs that it measures.
        if self.measure.name == few_shot::Args::NAME {
            let args = few_shot::Args::from_arg_matches(&self.arguments).map_err(|e| Error::input(one_line(&e)))?;
            if !args.fractions.is_empty() {
                return fractions::run(&args, common);
            }
        }
        self.measure.run(&self.arguments, common)
    }
}

impl FromArgMatches for MeasureCommand {
    fn from_arg_matches(matches: &ArgMatches) -> Result<MeasureCommand, clap::Error> {
        let found = matches.subcommand().and_then(|(name, arguments)| {
            let measure = MEASURES.iter().find(|m| m.name == name)?;
            Some(MeasureCommand { measure, arguments: arguments.clone() })
        });
        found.ok_or_else(|| clap::Error::new(clap::error::ErrorKind::InvalidSubcommand))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = MeasureCommand::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Subcommand for MeasureCommand {
    fn augment_subcommands(command: clap::Command) -> clap::Command {
        command.subcommands(MEASURES.iter().map(Measure::command))
    }

    fn augment_subcommands_for_update(command: clap::Command) -> clap::Command {
        MeasureCommand::augment_subcommands(command)
    }

    fn has_subcommand(name: &str) -> bool {
        MEASURES.iter().any(|m| m.name == name)
    }
}

/// What `mcl-eval list` can list.
#[derive(Debug, Clone, Subcommand)]
pub enum Listed {
    /// Every measurement and the protocols it can follow
    Measures,
    /// Every protocol that ships, and who follows it
    Protocols,
}

impl Listed {
    fn table(&self) -> Table {
        match self {
            Listed::Measures => {
                let mut table = Table::new("", &["measurement", "what it does", "protocols"]);
                for m in MEASURES {
                    let names: Vec<&str> = m.protocols.iter().map(|p| p.name).collect();
                    table.push(vec![Cell::text(m.name), Cell::text(m.about), Cell::text(names.join(", "))]);
                }
                table
            }
            Listed::Protocols => {
                let mut table = Table::new("", &["protocol", "followed by", "what it is"]);
                let mut seen: Vec<&str> = vec![];
                for protocol in MEASURES.iter().flat_map(|m| m.protocols) {
                    if !seen.contains(&protocol.name) {
                        seen.push(protocol.name);
                        let follows = |m: &&Measure| m.protocols.iter().any(|p| p.name == protocol.name);
                        let by: Vec<&str> = MEASURES.iter().filter(follows).map(|m| m.name).collect();
                        table.push(vec![Cell::text(protocol.name), Cell::text(by.join(", ")), Cell::text(protocol.about())]);
                    }
                }
                table
            }
        }
    }
}
