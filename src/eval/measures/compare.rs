//! `mcl-eval compare A B`: two runs on the same test images: the difference with its interval, and McNemar's test.

use std::path::PathBuf;

use serde::Serialize;
use serde_json::json;

use super::Measurement;
use crate::data;
use crate::error::{Error, Result};
use crate::eval::Common;
use crate::eval::answers::{logits, own_dataset};
use crate::eval::dataset::TargetDataset;
use crate::eval::network::{NetworkArgs, Normalisation, PeerChoice, TrainedNetwork};
use crate::eval::probe::{self, ProbeProtocol, Seeded};
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
    /// Run folder, file of weights or TorchScript file, or several with a comma between them (seeds of one setting)
    #[arg(value_parser = RunList::parse)]
    a: RunList,
    /// As many to compare with
    #[arg(value_parser = RunList::parse)]
    b: RunList,
    /// Which networks: a number from 0, `best` or `all` (in pairs) [default: best where both chose one, else all]
    #[arg(long, value_name = "N|best|all")]
    peer: Option<PeerChoice>,
    /// A stage of the networks instead of their own classifier, from 1, on both sides or one for each: 1,3
    #[arg(long, value_delimiter = ',', num_args = 1, value_name = "L|L,L")]
    stage: Vec<usize>,
    /// What images for files are normalised with, where they do not say: imagenet, none or R,G,B/R,G,B
    #[arg(long, value_name = "imagenet|none|MEAN/STD")]
    normalisation: Option<Normalisation>,
    /// Compare linear probes on this dataset instead of the networks' own classifiers
    #[arg(long)]
    dataset: Option<String>,
    /// Seeds of the probes, paired one by one, e.g. 1,2,3 [default: the protocol's]
    #[arg(long, value_delimiter = ',', requires = "dataset")]
    seeds: Vec<u64>,
    #[command(flatten)]
    how: HowArgs,
}

/// Run folders of one side. One argument, so that a missing one is named right.
#[derive(Debug, Clone)]
struct RunList(Vec<PathBuf>);

impl RunList {
    fn parse(text: &str) -> Result<RunList, String> {
        let runs: Vec<PathBuf> = text.split(',').map(PathBuf::from).collect();
        let named = runs.iter().all(|run| !run.as_os_str().is_empty());
        named.then_some(RunList(runs)).ok_or_else(|| "accepted: run folders with commas between them".to_string())
    }
}

impl std::ops::Deref for RunList {
    type Target = [PathBuf];

    fn deref(&self) -> &[PathBuf] {
        &self.0
    }
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
        for side in [&self.a, &self.b] {
            let real = |run: &PathBuf| run.canonicalize().unwrap_or_else(|_| run.clone());
            if let Some((i, run)) = side.iter().enumerate().find(|(i, run)| side[..*i].iter().any(|other| real(other) == real(run))) {
                return Err(Error::input(format!("{} stands twice, as run {} too: one run is one draw", run.display(), i + 1)));
            }
        }
        if self.dataset.is_none() && (!self.how.sets.is_empty() || self.how.image_size.is_some()) {
            return Err(Error::input("--set and --image-size change probes, and without --dataset there are none; add --dataset NAME"));
        }
        self.dataset.as_ref().map(|_| ProbeProtocol::asked(&self.how, Self::DEFAULT_PROTOCOL, &self.seeds)).transpose()
    }

    /// The stage of either side; none for the networks' own classifiers.
    fn stages(&self) -> Result<[Option<usize>; 2]> {
        match self.stage[..] {
            [] => Ok([None, None]),
            [both] => Ok([Some(both), Some(both)]),
            [left, right] => Ok([Some(left), Some(right)]),
            _ => Err(Error::input(format!("--stage has {} numbers; accepted: one, or one for each side", self.stage.len()))),
        }
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
        for Seeded { probe, seed, .. } in &probes {
            if let Some(chosen) = probe::chosen_in_words(&probe.chosen) {
                common.say(format!("{}: seed {seed}: {chosen}", network.name));
            }
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
        self.stages()?;
        self.probe().map(drop)
    }

    fn run(&self, common: &Common) -> Result<()> {
        let probe = self.probe()?;
        let open = |paths: &[PathBuf], stage| -> Result<Vec<TrainedNetwork>> {
            let mut flags = NetworkArgs::of_runs(&[], self.peer, stage);
            flags.by_file.normalisation = self.normalisation;
            let opened = paths.iter().map(|path| NetworkArgs::at(path, &flags).open(common, PeerChoice::Best));
            Ok(opened.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
        };
        let [left_stage, right_stage] = self.stages()?;
        let (left, right) = (open(&self.a, left_stage)?, open(&self.b, right_stage)?);
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
            &["A", "B", "seed", "A top-1", "B top-1", "B - A", "95 % over images", "only A right", "only B right", "McNemar p"],
        );
        let mut records = vec![];
        let mut by_run: Vec<Vec<f64>> = vec![vec![]; self.a.len()];
        for (a, b) in left.iter().zip(&right) {
            let run = run_of(a, &self.a);
            if run != run_of(b, &self.b) {
                return Err(Error::input(format!(
                    "compare pairs networks run by run, and {} meets {}: their runs have different numbers of networks; --peer N names one of each",
                    a.name, b.name
                )));
            }
            let (of_a, of_b) = (self.answers(a, &target, probe.as_ref(), common)?, self.answers(b, &target, probe.as_ref(), common)?);
            for (Answers { seed, side, score: sb }, Answers { score: sa, .. }) in of_b.into_iter().zip(of_a) {
                let pairs = Pairs::new(&sa.right(), &sb.right());
                let (low, high) = pairs.bootstrap(RESAMPLES, &mut rng::stream(1, "paired", &[records.len() as u64]));
                let (p, difference) = (pairs.mcnemar(), 100.0 * pairs.difference());
                by_run[run].push(difference);
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
                    Cell::text(stats::shown_p(p)),
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
        let over = OverRuns::new(&by_run);
        if common.json {
            let mut json = record::json(&records, common);
            json["over_runs"] = json!(over);
            common.print_json(&json);
            return Ok(());
        }
        println!("{} test images of {}, the same for both", target.dataset.test.len(), target.dataset.name);
        print!("{}", shown.plain());
        if records.len() > 1 {
            println!("{}", over.line());
        }
        Ok(())
    }
}

/// The place of a network's run among those that were named. Networks of a run stand together, so that a place is enough.
fn run_of(network: &TrainedNetwork, runs: &[PathBuf]) -> usize {
    let from = |path: &PathBuf| network.run.as_deref() == Some(path) || network.file == *path;
    runs.iter().position(from).expect("networks were opened from these")
}

/// The difference over runs. One run is one draw: its networks learned from each other and the seeds of a probe see the same features, so
/// they are averaged first, and the interval is over runs alone.
#[derive(Debug, PartialEq, Serialize)]
struct OverRuns {
    /// Of B - A, run by run.
    mean: f64,
    /// Of its 95 % interval (Student's t); none for one run.
    half_width_95: Option<f64>,
    runs: usize,
    /// Networks and probe seeds behind the mean of a run.
    comparisons_a_run: usize,
}

impl OverRuns {
    fn new(by_run: &[Vec<f64>]) -> OverRuns {
        let means: Vec<f64> = by_run.iter().map(|own| own.iter().sum::<f64>() / own.len() as f64).collect();
        let (mean, half_width_95) = stats::mean_interval(&means);
        OverRuns { mean, half_width_95, runs: by_run.len(), comparisons_a_run: by_run[0].len() }
    }

    fn line(&self) -> String {
        let OverRuns { mean, runs, comparisons_a_run, .. } = self;
        let inside = match comparisons_a_run {
            1 => String::new(),
            n => format!(", each the mean of {n} comparisons of its networks and probe seeds"),
        };
        match self.half_width_95 {
            Some(half) => format!("over {runs} pairs of runs{inside}: B - A = {mean:+.2} ± {half:.2} (95 %, Student's t over runs)"),
            None => format!(
                "mean of {comparisons_a_run} comparisons: B - A = {mean:+.2}; one pair of runs is one draw, so there is no interval over runs"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_and_probe_seeds_of_one_run_are_one_draw() {
        // By hand: the runs' means are 2, 3 and 7; their mean is 4, their deviation 2.6457513, t(2) = 4.3026527, so the half width 6.5724130.
        let over = OverRuns::new(&[vec![1.0, 3.0], vec![3.0, 3.0], vec![6.0, 8.0]]);
        assert_eq!((over.mean, over.runs, over.comparisons_a_run), (4.0, 3, 2));
        assert!((over.half_width_95.unwrap() - 6.572_413).abs() < 1e-5, "{over:?}");
        // As six independent differences the interval would be 2.6 wide.
        assert!(over.line().starts_with("over 3 pairs of runs, each the mean of 2 comparisons"), "{}", over.line());
        let one = OverRuns::new(&[vec![1.0, 3.0]]);
        assert_eq!(one.half_width_95, None);
        assert!(one.line().contains("one pair of runs is one draw"), "{}", one.line());
    }

    #[test]
    fn a_p_is_shown_as_it_is_read() {
        assert_eq!([0.44, 0.0032, 0.00041, 1.0].map(stats::shown_p), ["0.440", "0.003", "4.1e-4", "1.000"]);
    }
}
