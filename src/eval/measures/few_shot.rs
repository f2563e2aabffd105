//! `mcl-eval few-shot`: a few labelled images a class (--shots). The paper's few-shot, pre-training on a part of the training set
//! (--fractions) with the test split untouched, is an experiment: experiment::fractions.

use std::path::PathBuf;
use std::time::Instant;

use rand::seq::SliceRandom;
use serde::Deserialize;
use serde_json::json;

use super::Measurement;
use crate::data::{self, sampler};
use crate::error::{Error, Result};
use crate::eval::network::NetworkArgs;
use crate::eval::probe::logreg::{self, Options as FitOptions};
use crate::eval::protocol::{HowArgs, Protocol, Shipped, all_different, require};
use crate::eval::record::{self, Record};
use crate::eval::score::Score;
use crate::eval::target::Subjects;
use crate::eval::{Common, stats};
use crate::limits;
use crate::report::{Cell, Table};
use crate::rng;
use crate::run::RunFolder;

/// The flags of the command.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub(crate) networks: NetworkArgs,
    /// The dataset the few images are drawn from (needed with --shots)
    #[arg(long)]
    dataset: Option<String>,
    /// Images a class, e.g. 1,5,10 [default: the protocol's]
    #[arg(long, value_delimiter = ',')]
    shots: Vec<i64>,
    /// Draws for each number of shots [default: the protocol's]
    #[arg(long)]
    tries: Option<i64>,
    /// The paper's few-shot: pre-train on these parts of the training set, e.g. 0.25,0.5,0.75,1; runs go to --out [runs/few-shot]
    #[arg(long, value_delimiter = ',', requires = "recipe", conflicts_with_all = ["shots", "tries", "runs", "weights"])]
    pub(crate) fractions: Vec<f64>,
    /// The recipe --fractions trains, e.g. protocols/pretrain/cifar100-wrn_40_2.toml; --set changes its keys, e.g. train.epochs=3
    #[arg(long, requires = "fractions")]
    pub(crate) recipe: Option<PathBuf>,
    /// The methods --fractions compares [default: the recipe's]
    #[arg(long, value_delimiter = ',', requires = "fractions")]
    pub(crate) methods: Vec<String>,
    #[command(flatten)]
    pub(crate) how: HowArgs,
}

/// The keys of the protocol.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FewShot {
    image_size: i64,
    shots: Vec<usize>,
    tries: usize,
    c: f64,
    tolerance: f64,
    max_iterations: usize,
    seed: u64,
}

impl Args {
    fn protocol(&self) -> Result<(Protocol, FewShot)> {
        let mut protocol = self.how.protocol(Self::PROTOCOLS, Self::DEFAULT_PROTOCOL)?;
        if !self.shots.is_empty() {
            protocol.set("shots", self.shots.clone());
        }
        if let Some(tries) = self.tries {
            protocol.set("tries", tries);
        }
        let p: FewShot = protocol.options()?;
        require(
            !p.shots.is_empty() && p.shots.iter().all(|s| *s > 0) && all_different(&p.shots),
            "shots",
            &p.shots,
            "numbers from 1, each once",
        )?;
        limits::count("protocol: tries", p.tries, 1, limits::MOST_ROUNDS)?;
        limits::count("protocol: max_iterations", p.max_iterations, 1, limits::MOST_ROUNDS)?;
        require(
            p.c > 0.0 && p.tolerance > 0.0 && p.max_iterations > 0,
            "c, tolerance, max_iterations",
            (p.c, p.tolerance, p.max_iterations),
            "above 0",
        )?;
        Ok((protocol, p))
    }

    /// The dataset the images are drawn from.
    fn dataset(&self) -> Result<&str> {
        self.dataset.as_deref().ok_or_else(|| Error::input("few-shot needs --dataset NAME (or --fractions and --recipe)"))
    }
}

impl Measurement for Args {
    const NAME: &'static str = "few-shot";
    const ABOUT: &'static str = "Measure with few labelled images a class, or pre-train on parts of a training set";
    const PROTOCOLS: &'static [Shipped] =
        &[Shipped { name: "few-shot", text: include_str!("../../../protocols/eval/few-shot.toml"), repeats: &["shots"] }];

    fn check(&self) -> Result<()> {
        if !self.fractions.is_empty() {
            return Err(Error::input("--fractions trains runs of its own, and measures none that is there"));
        }
        self.networks.check()?;
        data::find(self.dataset()?)?;
        self.protocol().map(drop)
    }

    fn run(&self, common: &Common) -> Result<()> {
        shots(self, common)
    }
}

/// `shots` images of every class of a training split, the try's own; in the order of the split.
pub fn draw(labels: &[i64], classes: usize, shots: usize, seed: u64, attempt: u64) -> Result<Vec<usize>> {
    let mut drawn = vec![];
    for class in 0..classes as i64 {
        let mut members: Vec<usize> = (0..labels.len()).filter(|&i| labels[i] == class).collect();
        if members.len() < shots {
            return Err(Error::input(format!("class {class} has {} training images; {shots} are asked for", members.len())));
        }
        members.shuffle(&mut rng::stream(seed, "shots", &[attempt, class as u64]));
        drawn.extend(&members[..shots]);
    }
    drawn.sort_unstable();
    Ok(drawn)
}

fn shots(args: &Args, common: &Common) -> Result<()> {
    let (protocol, p) = args.protocol()?;
    let name = args.dataset()?;
    let subjects = Subjects::open(&args.networks, name, &args.how, common)?;
    let target = &subjects.target;
    let classes = target.dataset.classes.len();
    // Drawn before any network runs: too many shots are refused at once, and all networks get the same draws.
    let mut draws: Vec<(usize, usize, Vec<usize>)> = vec![];
    for &shots in &p.shots {
        for attempt in 0..p.tries {
            let drawn = draw(&target.dataset.train.labels, classes, shots, p.seed, attempt as u64)
                .map_err(|e| Error::input(format!("--shots {shots}: {e}")))?;
            draws.push((shots, attempt, drawn));
        }
    }
    let options = FitOptions { c: p.c, tolerance: p.tolerance, max_iterations: p.max_iterations };
    let mut shown = Table::new("", &["network", "method", "shots", "top-1", "± (95 % over draws)", "lowest", "highest", "draws"]);
    let records = subjects.each(common, |network| {
        let side = network.image_size(p.image_size);
        let (train, test) = subjects.features(network, side, common)?;
        let folder = RunFolder::at(&network.out).draws();
        std::fs::create_dir_all(&folder).map_err(Error::io("cannot make", &folder))?;
        let mut own = vec![];
        let progress = common.progress(format!("{}: few-shot", network.name), draws.len(), "fits");
        for &shots in &p.shots {
            let began = Instant::now();
            let mut values = vec![];
            let mut files = vec![];
            for (_, attempt, rows) in draws.iter().filter(|d| d.0 == shots) {
                let few = train.rows(rows);
                let fitted = logreg::fit(&few.x, &few.labels(), classes as i64, options, None)?;
                values.push(Score::new(&fitted.classifier.scores(&test.x), &test.y).top1());
                let path = folder.join(format!("{}-shots{shots}-seed{}-try{attempt}.txt", target.dataset.name, p.seed));
                let hash = sampler::write_index(&path, rows)?;
                files.push(json!({ "try": attempt, "file": path, "sha256": hash }));
                progress.add(1);
            }
            let (mean, half) = stats::mean_interval(&values);
            let half_width = half.unwrap_or(f64::NAN);
            let (low, high) =
                (values.iter().copied().fold(f64::INFINITY, f64::min), values.iter().copied().fold(f64::NEG_INFINITY, f64::max));
            shown.push(vec![
                Cell::text(&network.name),
                Cell::text(&network.method),
                Cell::Count(shots as i64),
                Cell::Score(mean, 2),
                Cell::score(half),
                Cell::Score(low, 2),
                Cell::Score(high, 2),
                Cell::Count(values.len() as i64),
            ]);
            let record = Record::new(Args::NAME, network, common).on(target, side).protocol(&protocol);
            own.push(Record {
                value: mean,
                ci_low: half.map(|_| mean - half_width),
                ci_high: half.map(|_| mean + half_width),
                seed: Some(p.seed),
                n_train: shots * classes,
                seconds: began.elapsed().as_secs_f64(),
                detail: json!({ "tries": values, "draws": files }),
                ..record.variant(format!("shots={shots}"))
            });
        }
        Ok(own)
    })?;
    if common.json {
        common.print_json(&record::json(&records, common));
    } else {
        println!(
            "few-shot -> {}, {} test images; logistic regression with C = {}; mean over draws and its 95 % interval (Student's t)",
            target.dataset.name,
            target.dataset.test.len(),
            p.c
        );
        print!("{}", shown.plain());
    }
    Ok(())
}
