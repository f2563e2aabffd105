//! `mcl-eval linear-probe`: a linear classifier on frozen features of another dataset. How it is trained stands in `eval/probe/`.

use super::Measurement;
use crate::error::Result;
use crate::eval::network::TrainedNetwork;
use crate::eval::probe::{self, ProbeProtocol, Seeded};
use crate::eval::protocol::Shipped;
use crate::eval::record::{self, Record};
use crate::eval::target::{Subjects, TargetArgs};
use crate::eval::{Common, stats};
use crate::report::{Cell, Table, table};

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
        if common.json {
            common.print_json(&record::json(&records, common));
            return Ok(());
        }
        println!("linear probe -> {}, split {}", subjects.target.counted(), &subjects.target.hash[..16]);
        print!("{}", tabulate(&records).plain());
        over_seeds(&records)?.iter().for_each(|line| println!("{line}"));
        Ok(())
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
        common.say(format!(
            "{}: seed {seed}: {}top-1 {:.2} ({}), top-5 {:.2}, {seconds:.1} s",
            network.name,
            probe::chosen_in_words(&record.detail["chosen"]).map_or(String::new(), |chosen| format!("{chosen}, ")),
            record.value,
            record.interval().shown(),
            probe.score.top5()
        ));
        records.push(record);
    }
    Ok(records)
}

/// One row a seed.
fn tabulate(records: &[Record]) -> Table {
    let mut shown = Table::new("", &["network", "method", "seed", "top-1", "95 % over images", "top-5", "trained with"]);
    for r in records {
        shown.push(vec![
            Cell::text(&r.subject),
            Cell::text(&r.method),
            r.seed.map_or(Cell::Empty, |seed| Cell::text(seed.to_string())),
            Cell::Score(r.value, 2),
            r.interval(),
            Cell::score(r.top5),
            probe::chosen_in_words(&r.detail["chosen"]).map_or(Cell::Empty, Cell::text),
        ]);
    }
    shown
}

/// For networks that were probed with several seeds: the mean, and how much of it is the probe's own chance.
fn over_seeds(records: &[Record]) -> Result<Vec<String>> {
    let all: Vec<&Record> = records.iter().collect();
    let mut lines = vec![];
    for own in table::together(&all, |r| vec![r.subject.clone()])? {
        if let (mean, Some(half)) = stats::mean_interval(&own.iter().map(|r| r.value).collect::<Vec<_>>()) {
            lines.push(format!(
                "{}: mean of {} probe seeds {mean:.2}, 95 % interval over probe seeds {:.2} to {:.2} (Student's t); the network is one draw",
                own[0].subject,
                own.len(),
                mean - half,
                mean + half
            ));
        }
    }
    Ok(lines)
}
