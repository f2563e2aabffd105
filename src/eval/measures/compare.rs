//! `mcl-eval compare A B`: two runs on the same test images: the difference with its interval, and McNemar's test.

use std::path::PathBuf;

use clap::Args as ClapArgs;
use serde_json::json;

use crate::error::{Error, Result};
use crate::eval::Common;
use crate::eval::dataset::Target;
use crate::eval::measures::accuracy::{self, own_dataset};
use crate::eval::measures::linear_probe;
use crate::eval::network::{PeerChoice, Subject, SubjectArgs};
use crate::eval::protocol::{HowArgs, Protocol};
use crate::eval::record::{self, Record};
use crate::eval::score::{RESAMPLES, Score};
use crate::eval::stats::{self, Pairs};
use crate::report::{Cell, Table};
use crate::rng;

pub const ABOUT: &str = "Compare two runs image by image: difference, interval, McNemar's p";

#[derive(Debug, Clone, ClapArgs)]
pub struct Args {
    /// Run folder, or several with a comma between them (seeds of one setting)
    #[arg(value_delimiter = ',', num_args = 1, required = true)]
    pub a: Vec<PathBuf>,
    /// As many run folders to compare with
    #[arg(value_delimiter = ',', num_args = 1, required = true)]
    pub b: Vec<PathBuf>,
    /// Which networks: a number from 0, `best` or `all` (in pairs) [default: best where both chose one, else all]
    #[arg(long, value_name = "N|best|all")]
    pub peer: Option<PeerChoice>,
    /// Compare linear probes on this dataset instead of the networks' own classifiers
    #[arg(long)]
    pub dataset: Option<String>,
    /// The probes' protocol: paper, sweep, lbfgs or a TOML file [default: lbfgs]
    #[arg(long, requires = "dataset")]
    pub protocol: Option<String>,
    /// Seeds of the probes, paired one by one, e.g. 1,2,3 [default: the protocol's]
    #[arg(long, value_delimiter = ',', requires = "dataset")]
    pub seeds: Vec<u64>,
    #[command(flatten)]
    pub how: HowArgs,
}

/// The answers of one subject: its own classifier's, or those of a probe for each seed.
struct Answers {
    seed: Option<u64>,
    side: usize,
    score: Score,
}

fn answers(subject: &Subject, target: &Target, probe: Option<&Protocol>, args: &Args, common: &Common) -> Result<Vec<Answers>> {
    let Some(protocol) = probe else {
        let score = Score::new(&accuracy::logits(subject, target, 0, common)?, &target.dataset.test.labels);
        return Ok(vec![Answers { seed: None, side: subject.image_size(0), score }]);
    };
    common.say(format!("{}: {} on {} ({} protocol)", subject.name, subject.arch.name, target.dataset.name, protocol.kind));
    let probes = linear_probe::probes(subject, target, protocol, !args.how.no_cache, common)?;
    Ok(probes.into_iter().map(|p| Answers { seed: Some(p.seed), side: p.side, score: p.probe.score }).collect())
}

pub fn run(args: &Args, common: &Common) -> Result<()> {
    if args.a.len() != args.b.len() {
        return Err(Error::input(format!(
            "compare pairs runs: {} on the left, {} on the right; accepted: as many on both sides",
            args.a.len(),
            args.b.len()
        )));
    }
    if args.dataset.is_none() && (!args.how.sets.is_empty() || args.how.image_size.is_some()) {
        return Err(Error::input("--set and --image-size change probes, and without --dataset there are none; add --dataset NAME"));
    }
    let protocol = args.protocol.as_deref().unwrap_or("lbfgs");
    let probe = args.dataset.as_ref().map(|_| linear_probe::protocol(protocol, &args.how, &args.seeds)).transpose()?;
    let open = |runs: &[PathBuf]| SubjectArgs { runs: runs.to_vec(), peer: args.peer, ..Default::default() }.open(common, PeerChoice::Best);
    let (left, right) = (open(&args.a)?, open(&args.b)?);
    if left.len() != right.len() {
        return Err(Error::input(format!(
            "compare pairs networks: {} on the left, {} on the right; --peer N names one of each",
            left.len(),
            right.len()
        )));
    }
    let name = own_dataset(args.dataset.as_deref(), &left[0])?.to_string();
    let target = if args.dataset.is_some() { Target::open(&name, common)? } else { Target::source(&name, common)? };
    if let Some(other) = right.iter().chain(&left).find(|s| args.dataset.is_none() && s.meta.dataset.as_deref() != Some(name.as_str())) {
        let own = other.meta.dataset.as_deref().unwrap_or("unknown data");
        return Err(Error::input(format!(
            "{} was trained on {own} and {} on {name}: their classifiers answer different questions; --dataset D compares probes",
            other.name, left[0].name
        )));
    }
    let mut shown =
        Table::new("", &["A", "B", "seed", "A top-1", "B top-1", "B - A", "95 % interval", "only A right", "only B right", "McNemar p"]);
    let (mut records, mut differences) = (vec![], vec![]);
    for (a, b) in left.iter().zip(&right) {
        let (of_a, of_b) = (answers(a, &target, probe.as_ref(), args, common)?, answers(b, &target, probe.as_ref(), args, common)?);
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
            let by = probe.as_ref().map_or("own classifier".to_string(), |p| format!("{} probe", p.kind));
            let record = Record::new("compare", b, common);
            records.push(Record {
                variant: format!("against {}", a.name),
                dataset: target.dataset.name.into(),
                metric: "difference".into(),
                value: difference,
                ci_low: Some(100.0 * low),
                ci_high: Some(100.0 * high),
                seed,
                n_train: if probe.is_some() { target.dataset.train.len() } else { 0 },
                n_test: sa.labels.len(),
                split_hash: target.hash.clone(),
                image_size: side,
                detail: json!({ "a": a.name, "a_weights": a.hash, "a_top1": sa.top1(), "b_top1": sb.top1(), "only_a": pairs.only_a,
                    "only_b": pairs.only_b, "mcnemar_p": p, "by": by }),
                ..probe.iter().fold(record, |record, protocol| record.protocol(protocol))
            });
        }
    }
    record::keep(&records, &right, common)?;
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
