//! `mcl-eval few-shot`: a few labelled images a class (--shots), or, as in the paper, pre-training on a part of the training set
//! (--fractions) with the test split untouched.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use rand::seq::SliceRandom;
use serde::Deserialize;
use serde_json::json;

use super::Measurement;
use crate::data::{self, sampler};
use crate::error::{Error, Result};
use crate::eval::answers::{logits, own_dataset};
use crate::eval::dataset::TargetDataset;
use crate::eval::features;
use crate::eval::network::{NetworkArgs, PeerChoice, TrainedNetwork};
use crate::eval::probe::logreg::{self, Options as FitOptions};
use crate::eval::protocol::{HowArgs, Protocol, Shipped, require};
use crate::eval::record::{self, Record};
use crate::eval::score::Score;
use crate::eval::{Common, stats};
use crate::methods;
use crate::recipe::Recipe;
use crate::report::plot::{Lines, Series};
use crate::report::{Cell, Figure, Table};
use crate::run::RunFolder;
use crate::system::ranks::Ranks;
use crate::train::{self, Job};
use crate::{files, rng};

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
        require(!p.shots.is_empty() && p.shots.iter().all(|s| *s > 0), "shots", &p.shots, "numbers from 1")?;
        require(p.tries > 0, "tries", p.tries, "1 or more")?;
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
    let networks = args.networks.open(common, PeerChoice::Best)?;
    let target = TargetDataset::open(name, common)?;
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
    let mut shown = Table::new("", &["network", "method", "shots", "top-1", "± (95 %)", "lowest", "highest", "draws"]);
    let mut records = vec![];
    for network in &networks {
        let side = network.image_size(p.image_size);
        let (train, test) = features::of_dataset(network, &target, side, !args.how.no_cache, common)?;
        let folder = RunFolder::at(&network.out).draws();
        std::fs::create_dir_all(&folder).map_err(Error::io("cannot make", &folder))?;
        let mut own = vec![];
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
            }
            network.check_unchanged()?;
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
            let record = Record::new(Args::NAME, network, common).on(&target, side).protocol(&protocol);
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
        record::keep(&own, common)?;
        records.extend(own);
    }
    if common.json {
        common.print_json(&record::json(&records, common));
    } else {
        println!(
            "few-shot -> {}, {} test images; mean over draws and its 95 % interval (Student's t)",
            target.dataset.name,
            target.dataset.test.len()
        );
        print!("{}", shown.plain());
    }
    Ok(())
}

/// Pre-trains every method on every part, then tests the networks on the whole test split. Finished runs are not trained again.
pub(crate) fn fractions(args: &Args, common: &Common) -> Result<()> {
    let recipe_path = args.recipe.as_deref().expect("clap asks for it");
    if let Some(bad) = args.fractions.iter().find(|f| !(**f > 0.0 && **f <= 1.0)) {
        return Err(Error::input(format!("--fractions {bad}: accepted: above 0, up to 1")));
    }
    let names = methods::names();
    let recipe_of = |method: Option<&str>, fraction: f64| {
        let mut sets = args.how.sets.clone();
        sets.push(format!("data.fraction={fraction:?}"));
        sets.extend(method.map(|m| format!("method.name={m}")));
        Recipe::read(recipe_path, &sets, &names)
    };
    let methods: Vec<Option<&str>> =
        if args.methods.is_empty() { vec![None] } else { args.methods.iter().map(|m| Some(m.as_str())).collect() };
    // All recipes are read before the first is trained.
    let mut jobs = vec![];
    for method in &methods {
        for &fraction in &args.fractions {
            jobs.push((fraction, recipe_of(*method, fraction)?));
        }
    }
    let folder = args.networks.out.clone().unwrap_or_else(|| PathBuf::from("runs/few-shot"));
    let stop = AtomicBool::new(false);
    let mut records = vec![];
    let mut shown = Table::new("", &["method", "networks", "fraction", "training images", "top-1 (mean of networks)"]);
    for (fraction, recipe) in jobs {
        let out = folder.join(format!("{}-{}-seed{}", recipe.method_name(), fraction, recipe.train.seed));
        let (method, archs) = (recipe.method_name().to_string(), recipe.cohort.archs.clone());
        common.say(format!("{method} on {fraction} of {}", recipe.data.name));
        // A run that is there already goes on from its last checkpoint, which may be its end; one of another recipe is refused.
        let job = Job {
            recipe,
            out: out.clone(),
            data: common.data.clone(),
            device: common.device,
            threads: common.threads,
            resume: true,
            from: None,
            init: None,
            quiet: common.quiet,
            commit: common.commit,
            ranks: Ranks::ALONE,
            stop: &stop,
        };
        train::run(job)?;
        let networks = NetworkArgs::of_runs(std::slice::from_ref(&out), Some(PeerChoice::All)).open(common, PeerChoice::All)?;
        let own = measure_fraction(&networks, fraction, common)?;
        let mean = own.iter().map(|r| r.value).sum::<f64>() / own.len() as f64;
        shown.push(vec![
            Cell::text(&method),
            Cell::text(archs.join(", ")),
            Cell::Score(fraction, 2),
            Cell::Count(own[0].n_train as i64),
            Cell::Score(mean, 2),
        ]);
        record::append(&folder, &own)?;
        records.extend(own);
    }
    let figure = fraction_figure(&records);
    let path = folder.join(format!("{}.svg", figure.name));
    files::write(&path, figure.svg.as_bytes())?;
    if common.json {
        common.print_json(&record::json(&records, common));
    } else {
        print!("{}", shown.plain());
        println!(
            "{}\n{} (`mcl-eval report --results {}` shows both)",
            path.display(),
            RunFolder::at(&folder).results_csv().display(),
            folder.display()
        );
    }
    Ok(())
}

fn measure_fraction(networks: &[TrainedNetwork], fraction: f64, common: &Common) -> Result<Vec<Record>> {
    let mut records = vec![];
    for network in networks {
        let target = TargetDataset::source(own_dataset(None, network)?, common)?;
        let score = Score::new(&logits(network, &target, 0, common)?, &target.dataset.test.labels);
        let known = RunFolder::at(network.run.as_deref().unwrap_or(Path::new("."))).read_environment()?;
        let record = Record::new(Args::NAME, network, common).on(&target, network.image_size(0)).score(&score, 1, &[]);
        records.push(Record {
            n_train: known["train_images"].as_u64().unwrap_or(0) as usize,
            split_hash: known["train_split_hash"].as_str().unwrap_or_default().to_string(),
            detail: serde_json::Value::Null,
            ..record.variant(format!("fraction={fraction}"))
        });
    }
    Ok(records)
}

/// Accuracy against fraction, a line a method: the paper's figure.
fn fraction_figure(records: &[Record]) -> Figure {
    let mut lines: Vec<Series> = vec![];
    for r in records {
        let fraction: f64 = r.variant.trim_start_matches("fraction=").parse().unwrap_or(f64::NAN);
        if !lines.iter().any(|l| l.name == r.method) {
            lines.push(Series { name: r.method.clone(), ..Default::default() });
        }
        let line = lines.iter_mut().find(|l| l.name == r.method).expect("just added");
        if !line.points.iter().any(|(x, _)| *x == 100.0 * fraction) {
            let own: Vec<f64> = records.iter().filter(|o| o.method == r.method && o.variant == r.variant).map(|o| o.value).collect();
            line.points.push((100.0 * fraction, own.iter().sum::<f64>() / own.len() as f64));
        }
    }
    lines.iter_mut().for_each(|l| l.points.sort_by(|a, b| a.0.total_cmp(&b.0)));
    let svg = Lines {
        title: "Accuracy with parts of the training set",
        x: "training images kept (%)",
        y: "top-1 (%)",
        series: &lines,
        dots: true,
    }
    .draw();
    Figure::new("few-shot-fractions", "Mean over the networks of a run; the test split is whole", svg)
}
