//! `mcl-eval compare A B`: two runs on the same test images: the difference with its interval, and McNemar's test.

use std::path::PathBuf;

use clap::Args as ClapArgs;
use serde_json::json;

use super::Common;
use super::accuracy::{self, own_dataset};
use super::cache::{self, Prepared};
use super::linear_probe::{self, Lbfgs};
use super::protocol::Protocol;
use super::results::{self, Record};
use super::score::{RESAMPLES, Score};
use super::stats::{self, Pairs};
use super::subject::{PeerChoice, Subject, SubjectArgs};
use super::target::Target;
use crate::error::{Error, Result};
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
    /// Compare probes (lbfgs) on this dataset instead of the networks' own classifiers
    #[arg(long)]
    pub dataset: Option<String>,
    /// Do not keep or use extracted features
    #[arg(long)]
    pub no_cache: bool,
}

/// Predictions of one subject.
fn predict(subject: &Subject, target: &Target, args: &Args, common: &Common) -> Result<Score> {
    if args.dataset.is_none() {
        return Ok(Score::new(&accuracy::logits(subject, target, 0, common)?, &target.dataset.test.labels));
    }
    let p: Lbfgs = Protocol::read("lbfgs", &["lbfgs"], &[])?.options()?;
    let prepared = Prepared::new(&target.dataset, subject, subject.image_size(p.image_size))?;
    let features = |split| cache::features(subject, split, &prepared.transform, !args.no_cache, common);
    let (train, test) = (features(&prepared.dataset.train)?, features(&prepared.dataset.test)?);
    let probe = linear_probe::lbfgs(&p, &train, &test, target.dataset.classes.len() as i64, p.seeds[0])?;
    subject.check_unchanged()?;
    Ok(probe.score)
}

pub fn run(args: &Args, common: &Common) -> Result<()> {
    if args.a.len() != args.b.len() {
        return Err(Error::input(format!(
            "compare pairs runs: {} on the left, {} on the right; accepted: as many on both sides",
            args.a.len(),
            args.b.len()
        )));
    }
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
        Table::new("", &["A", "B", "A top-1", "B top-1", "B - A", "95 % interval", "only A right", "only B right", "McNemar p"]);
    let (mut records, mut differences) = (vec![], vec![]);
    let mut all: Option<Pairs> = None;
    for (i, (a, b)) in left.iter().zip(&right).enumerate() {
        let (sa, sb) = (predict(a, &target, args, common)?, predict(b, &target, args, common)?);
        let pairs = Pairs::new(&sa.right(), &sb.right());
        let (low, high) = pairs.bootstrap(RESAMPLES, &mut rng::stream(1, "paired", &[i as u64]));
        let (p, difference) = (pairs.mcnemar(), 100.0 * pairs.difference());
        differences.push(difference);
        all = Some(all.map_or(pairs, |s| Pairs {
            only_a: s.only_a + pairs.only_a,
            only_b: s.only_b + pairs.only_b,
            count: s.count + pairs.count,
        }));
        shown.push(vec![
            Cell::text(format!("{} ({})", a.name, a.method)),
            Cell::text(format!("{} ({})", b.name, b.method)),
            Cell::Score(sa.top1(), 2),
            Cell::Score(sb.top1(), 2),
            Cell::Score(difference, 2),
            Cell::text(format!("{:+.2} to {:+.2}", 100.0 * low, 100.0 * high)),
            Cell::Count(pairs.only_a as i64),
            Cell::Count(pairs.only_b as i64),
            Cell::text(format!("{p:.2e}")),
        ]);
        records.push(Record {
            variant: format!("against {}", a.name),
            dataset: target.dataset.name.into(),
            metric: "difference".into(),
            value: difference,
            ci_low: Some(100.0 * low),
            ci_high: Some(100.0 * high),
            n_test: sa.labels.len(),
            split_hash: target.hash.clone(),
            image_size: b.image_size(0),
            detail: json!({ "a": a.name, "a_weights": a.hash, "a_top1": sa.top1(), "b_top1": sb.top1(), "only_a": pairs.only_a, "only_b": pairs.only_b, "mcnemar_p": p,
                "by": if args.dataset.is_some() { "lbfgs probe" } else { "own classifier" } }),
            ..Record::new("compare", b, common)
        });
    }
    results::keep(&records, &right, common)?;
    let over = (differences.len() > 1).then(|| stats::mean_interval(&differences));
    if common.json {
        let mut json = results::json(&records, common);
        json["over_pairs"] = json!(over.map(|(mean, half)| json!({ "mean": mean, "half_width_95": half, "pairs": differences.len() })));
        common.print_json(&json);
        return Ok(());
    }
    println!("{} test images of {}, the same for both", target.dataset.test.len(), target.dataset.name);
    print!("{}", shown.plain());
    if let (Some((mean, Some(half))), Some(all)) = (over, all) {
        println!(
            "over {} pairs: B - A = {mean:+.2} ± {half:.2} (95 %, Student's t over pairs); all images together McNemar p = {:.2e}",
            differences.len(),
            all.mcnemar()
        );
    }
    Ok(())
}
