//! `mcl-eval linear-probe`: a linear classifier on frozen features of another dataset. How it is trained stands in `eval/probe/`.

use super::Measurement;
use crate::error::Result;
use crate::eval::network::TrainedNetwork;
use crate::eval::probe::{self, ProbeProtocol, Seeded};
use crate::eval::protocol::Shipped;
use crate::eval::record::Record;
use crate::eval::target::{Subjects, TargetArgs};
use crate::eval::{Common, seeds};

/// The flags of the command.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    on: TargetArgs,
    /// Seeds to repeat with, e.g. 1,2,3 [default: the protocol's]
    #[arg(long, value_delimiter = ',')]
    seeds: Vec<u64>,
}

impl Measurement for Args {
    const NAME: &'static str = "linear-probe";
    const ABOUT: &'static str = "Train a linear classifier on frozen features of another dataset";
    const PROTOCOLS: &'static [Shipped] = probe::PROTOCOLS;

    fn check(&self) -> Result<()> {
        self.on.check()?;
        self.protocol().map(drop)
    }

    fn run(&self, common: &Common) -> Result<()> {
        let protocol = self.protocol()?;
        let subjects = self.on.open(common)?;
        let records = subjects.each(common, |network| measure(network, &subjects, &protocol, common))?;
        let heading = format!("linear probe -> {}, split {}", subjects.target.counted(), &subjects.target.hash[..16]);
        seeds::show(&records, &heading, "probe", common)
    }
}

impl Args {
    fn protocol(&self) -> Result<ProbeProtocol> {
        ProbeProtocol::asked(&self.on.how, Self::DEFAULT_PROTOCOL, &self.seeds)
    }
}

/// All seeds of one network, one record each.
fn measure(network: &TrainedNetwork, subjects: &Subjects, protocol: &ProbeProtocol, common: &Common) -> Result<Vec<Record>> {
    let target = &subjects.target;
    let mut records = vec![];
    for Seeded { probe, seed, side, seconds } in probe::probes(network, target, protocol, subjects.cached(), common)? {
        let record = subjects.record(Args::NAME, network, side, &protocol.protocol, common);
        let record = Record { seed: Some(seed), seconds, warnings: probe.warnings, ..record };
        let mut record = record.score(&probe.score, seed, &target.dataset.classes);
        record.detail["chosen"] = probe.chosen;
        seeds::say(&record, common);
        records.push(record);
    }
    Ok(records)
}
