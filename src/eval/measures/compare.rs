//! `mcl-eval compare A B`: two runs on the same test images: the difference with its interval, and McNemar's test.

use std::path::PathBuf;

use serde_json::json;

use super::Measurement;
use crate::data;
use crate::error::{Error, Result};
use crate::eval::Common;
use crate::eval::answers::{logits, own_dataset};
use crate::eval::dataset::TargetDataset;
use crate::eval::network::{NetworkArgs, PeerChoice, TrainedNetwork};
use crate::eval::probe::{self, ProbeProtocol};
use crate::eval::protocol::{HowArgs, Shipped};
use crate::eval::record::{self, Record};
use crate::eval::score::{RESAMPLES, Score};
use crate::eval::stats::{self, Pairs};
use crate::report::{Cell, Table};
use crate::rng;

/// The flags of the command.
#[derive(Debug, Clone, clap::Args)]
#[command(mut_arg("protocol", |argument| argument.requires("dataset")))]
pub struct Args {
    /// Run folder, or several with a comma between them (seeds of one setting)
    #[arg(value_delimiter = ',', num_args = 1, required = true)]
    a: Vec<PathBuf>,
    /// As many run folders to compare with
    #[arg(value_delimiter = ',', num_args = 1, required = true)]
    b: Vec<PathBuf>,
    /// Which networks: a number from 0, `best` or `all` (in pairs) [default: best where both chose one, else all]
    #[arg(long, value_name = "N|best|all")]
    peer: Option<PeerChoice>,
    /// Compare linear probes on this dataset instead of the networks' own classifiers
    #[arg(long)]
    dataset: Option<String>,
    /// Seeds of the probes, paired one by one, e.g. 1,2,3 [default: the protocol's]
    #[arg(long, value_delimiter = ',', requires = "dataset")]
    seeds: Vec<u64>,
    #[command(flatten)]
    how: HowArgs,
}

/// The answers of one network: its own classifier's, or those of a probe for each seed.
struct Answers {
    seed: Option<u64>,
    side: usize,
    score: Score,
}

impl Args {
    /// The protocol of the probes; none where the networks' own classifiers are compared.
    fn probe(&self) -> Result<Option<ProbeProtocol>> {
        if self.a.len() != self.b.len() {
            return Err(Error::input(format!(
                "compare pairs runs: {} on the left, {} on the right; accepted: as many on both sides",
                self.a.len(),
                self.b.len()
            )));
        }
        if self.dataset.is_none() && (!self.how.sets.is_empty() || self.how.image_size.is_some()) {
            return Err(Error::input("--set and --image-size change probes, and without --dataset there are none; add --dataset NAME"));
        }
        self.dataset.as_ref().map(|_| ProbeProtocol::asked(&self.how, Self::DEFAULT_PROTOCOL, &self.seeds)).transpose()
    }

    fn answers(
        &self,
        network: &TrainedNetwork,
        target: &TargetDataset,
        probe: Option<&ProbeProtocol>,
        common: &Common,
    ) -> Result<Vec<Answers>> {
        let Some(protocol) = probe else {
            let score = Score::new(&logits(network, target, 0, common)?, &target.dataset.test.labels);
            return Ok(vec![Answers { seed: None, side: network.image_size(0), score }]);
        };
        let probes = probe::probes(network, target, protocol, !self.how.no_cache, common)?;
        for probe in probes.iter().map(|p| &p.probe) {
            probe.warnings.iter().cloned().chain(probe.score.doubt()).for_each(|w| common.warn(format!("{}: {w}", network.name)));
        }
        Ok(probes.into_iter().map(|p| Answers { seed: Some(p.seed), side: p.side, score: p.probe.score }).collect())
    }
}

impl Measurement for Args {
    const NAME: &'static str = "compare";
    const ABOUT: &'static str = "Compare two runs image by image: difference, interval, McNemar's p";
    const PROTOCOLS: &'static [Shipped] = probe::PROTOCOLS;
    const DEFAULT_PROTOCOL: &'static str = "lbfgs";

    fn check(&self) -> Result<()> {
        self.dataset.as_deref().map(data::find).transpose()?;
        self.probe().map(drop)
    }

    fn run(&self, common: &Common) -> Result<()> {
        let probe = self.probe()?;
        let open = |runs: &[PathBuf]| NetworkArgs::of_runs(runs, self.peer).open(common, PeerChoice::Best);
        let (left, right) = (open(&self.a)?, open(&self.b)?);
        if left.len() != right.len() {
            return Err(Error::input(format!(
                "compare pairs networks: {} on the left, {} on the right; --peer N names one of each",
                left.len(),
                right.len()
            )));
        }
        let name = own_dataset(self.dataset.as_deref(), &left[0])?.to_string();
        let target =
            if self.dataset.is_some() { TargetDataset::open(&name, common)? } else { TargetDataset::source(&name, &left[0], common)? };
        if let Some(other) = right.iter().chain(&left).find(|n| self.dataset.is_none() && n.meta.dataset.as_deref() != Some(name.as_str()))
        {
            let own = other.meta.dataset.as_deref().unwrap_or("unknown data");
            return Err(Error::input(format!(
                "{} was trained on {own} and {} on {name}: their classifiers answer different questions; --dataset D compares probes",
                other.name, left[0].name
            )));
        }
        let mut shown = Table::new(
            "",
            &["A", "B", "seed", "A top-1", "B top-1", "B - A", "95 % interval", "only A right", "only B right", "McNemar p"],
        );
        let (mut records, mut differences) = (vec![], vec![]);
        for (a, b) in left.iter().zip(&right) {
            let (of_a, of_b) = (self.answers(a, &target, probe.as_ref(), common)?, self.answers(b, &target, probe.as_ref(), common)?);
            for (Answers { seed, side, score: sb }, Answers { score: sa, .. }) in of_b.into_iter().zip(of_a) {
                let pairs = Pairs::new(&sa.right(), &sb.right());
                let (low, high) = pairs.bootstrap(RESAMPLES, &mut rng::stream(1, "paired", &[differences.len() as u64]));
                let (p, difference) = (pairs.mcnemar(), 100.0 * pairs.difference());
                differences.push(difference);
                shown.push(vec![
                    Cell::text(format!("{} ({})", a.name, a.method)),
                    Cell::text(format!("{} ({})", b.name, b.method)),
                    seed.map_or(Cell::Empty, |s| Cell::text(s.to_string())),
                    Cell::Score(sa.top1(), 2),
                    Cell::Score(sb.top1(), 2),
                    Cell::Score(difference, 2),
                    Cell::text(format!("{:+.2} to {:+.2}", 100.0 * low, 100.0 * high)),
                    Cell::Count(pairs.only_a as i64),
                    Cell::Count(pairs.only_b as i64),
                    Cell::text(format!("{p:.2e}")),
                ]);
                let by = probe.as_ref().map_or("own classifier".to_string(), |p| format!("{} probe", p.protocol.kind()));
                let record = Record::new(Self::NAME, b, common).on(&target, side).variant(format!("against {}", a.name));
                let record = match &probe {
                    Some(probe) => record.trained_on(&target).protocol(&probe.protocol),
                    None => record,
                };
                records.push(Record {
                    metric: "difference".into(),
                    value: difference,
                    ci_low: Some(100.0 * low),
                    ci_high: Some(100.0 * high),
                    seed,
                    detail: json!({ "a": a.name, "a_weights": a.hash, "a_top1": sa.top1(), "b_top1": sb.top1(), "only_a": pairs.only_a,
                        "only_b": pairs.only_b, "mcnemar_p": p, "by": by }),
                    ..record
                });
            }
        }
        record::keep(&records, common)?;
        let over = (differences.len() > 1).then(|| stats::mean_interval(&differences));
        if common.json {
            let mut json = record::json(&records, common);
            json["over_pairs"] = json!(over.map(|(mean, half)| json!({ "mean": mean, "half_width_95": half, "pairs": differences.len() })));
            common.print_json(&json);
            return Ok(());
        }
        println!("{} test images of {}, the same for both", target.dataset.test.len(), target.dataset.name);
        print!("{}", shown.plain());
        if let Some((mean, Some(half))) = over {
            println!("over {} pairs: B - A = {mean:+.2} ± {half:.2} (95 %, Student's t over pairs)", differences.len());
        }
        Ok(())
    }
}
