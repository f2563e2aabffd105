//! `mcl-eval linear-probe`: a linear classifier on frozen features of another dataset. How it is trained stands in `eval/probe/`.

use super::Measurement;
use crate::data;
use crate::error::Result;
use crate::eval::Common;
use crate::eval::dataset::TargetDataset;
use crate::eval::network::{NetworkArgs, PeerChoice, TrainedNetwork};
use crate::eval::probe::{self, ProbeProtocol, Seeded};
use crate::eval::protocol::{HowArgs, Shipped};
use crate::eval::record::{self, Record};
use crate::report::{Cell, Table, table};

/// The flags of the command.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    networks: NetworkArgs,
    /// The dataset the classifier is trained and tested on
    #[arg(long)]
    dataset: String,
    /// Seeds to repeat with, e.g. 1,2,3 [default: the protocol's]
    #[arg(long, value_delimiter = ',')]
    seeds: Vec<u64>,
    #[command(flatten)]
    how: HowArgs,
}

impl Measurement for Args {
    const NAME: &'static str = "linear-probe";
    const ABOUT: &'static str = "Train a linear classifier on frozen features of another dataset";
    const PROTOCOLS: &'static [Shipped] = probe::PROTOCOLS;

    fn check(&self) -> Result<()> {
        self.networks.check()?;
        data::find(&self.dataset)?;
        self.protocol().map(drop)
    }

    fn run(&self, common: &Common) -> Result<()> {
        let protocol = self.protocol()?;
        let networks = self.networks.open(common, PeerChoice::Best)?;
        let target = TargetDataset::open(&self.dataset, common)?;
        let mut records = vec![];
        for network in &networks {
            let own = self.measure(network, &target, &protocol, common)?;
            // Kept at once: a later network that fails does not take these with it.
            record::keep(&own, common)?;
            records.extend(own);
        }
        if common.json {
            common.print_json(&record::json(&records, common));
            return Ok(());
        }
        println!("linear probe -> {}, split {}", target.counted(), &target.hash[..16]);
        print!("{}", tabulate(&records)?.plain());
        Ok(())
    }
}

impl Args {
    fn protocol(&self) -> Result<ProbeProtocol> {
        ProbeProtocol::asked(&self.how, Self::DEFAULT_PROTOCOL, &self.seeds)
    }

    /// All seeds of one network, one record each.
    fn measure(&self, network: &TrainedNetwork, target: &TargetDataset, protocol: &ProbeProtocol, common: &Common) -> Result<Vec<Record>> {
        let mut records = vec![];
        for Seeded { probe, seed, side, seconds } in probe::probes(network, target, protocol, !self.how.no_cache, common)? {
            let record = Record::new(Self::NAME, network, common).on(target, side).trained_on(target).protocol(&protocol.protocol);
            let record = Record { seed: Some(seed), seconds, warnings: probe.warnings, ..record };
            let mut record = record.score(&probe.score, seed, &target.dataset.classes);
            record.detail["chosen"] = probe.chosen;
            common.say(format!(
                "{}: seed {seed}: top-1 {:.2} ({}), top-5 {:.2}, {seconds:.1} s",
                network.name,
                record.value,
                record.interval().shown(),
                probe.score.top5()
            ));
            records.push(record);
        }
        Ok(records)
    }
}

fn tabulate(records: &[Record]) -> Result<Table> {
    let mut shown = Table::new("", &["network", "method", "top-1", "95 % interval", "top-5", "seeds", "mean ± std"]);
    let measured: Vec<(Vec<String>, f64)> = records.iter().map(|r| (vec![r.subject.clone()], r.value)).collect();
    for group in table::group(&measured)? {
        let own: Vec<&Record> = records.iter().filter(|r| r.subject == group.keys[0]).collect();
        let first = own[0];
        shown.push(vec![
            Cell::text(&first.subject),
            Cell::text(&first.method),
            Cell::Score(first.value, 2),
            first.interval(),
            Cell::score(first.top5),
            Cell::Count(own.len() as i64),
            Cell::text(group.cell().shown()),
        ]);
    }
    Ok(shown)
}
