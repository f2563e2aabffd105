//! `mcl-eval cohort`: what the networks of a run have become to each other: agreement, similarity of features (linear CKA), the ensemble
//! against the best, layer-matching weights and gates over time, and which network to ship.

use std::path::PathBuf;

use serde_json::json;
use tch::Tensor;

use super::Measurement;
use crate::error::{Error, Result};
use crate::eval::Common;
use crate::eval::answers::{ensemble, logits, own_dataset};
use crate::eval::dataset::TargetDataset;
use crate::eval::feature_file::Part;
use crate::eval::features::{self, Prepared};
use crate::eval::figures::{gate_figure, lambda_figures};
use crate::eval::network::{NetworkArgs, PeerChoice, TrainedNetwork};
use crate::eval::record::{self, Record};
use crate::eval::score::Score;
use crate::eval::stats;
use crate::files;
use crate::report::plot::Heat;
use crate::report::{Cell, Table};
use crate::run::{Run, RunFolder};

/// The flags of the command.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Run folder; may be repeated
    #[arg(long = "run", value_name = "DIR", default_value = "runs/latest")]
    runs: Vec<PathBuf>,
    /// A stage of the networks instead of their own classifier, from 1
    #[arg(long, value_name = "L")]
    stage: Option<usize>,
    /// Do not keep or use extracted features
    #[arg(long)]
    no_cache: bool,
}

/// Two networks that agree this often although they are wrong more often than that allows have stopped being different.
const COLLAPSED: f64 = 97.0;

impl Measurement for Args {
    const NAME: &'static str = "cohort";
    const ABOUT: &'static str = "Look at a cohort: agreement, similarity, layer matching, which network to ship";

    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn run(&self, common: &Common) -> Result<()> {
        let mut outputs = vec![];
        for folder in &self.runs {
            let run = Run::read(folder)?;
            let all = Some(PeerChoice::All);
            let networks = NetworkArgs::of_runs(std::slice::from_ref(folder), all, self.stage).open(common, PeerChoice::All)?;
            outputs.push(one(&run, &networks, self, common)?);
        }
        if common.json {
            common.print_json(&json!({ "cohorts": outputs }));
        }
        Ok(())
    }
}

fn one(run: &Run, networks: &[TrainedNetwork], args: &Args, common: &Common) -> Result<serde_json::Value> {
    let name = own_dataset(None, &networks[0])?;
    let target = TargetDataset::source(name, &networks[0], common)?;
    let labels = &target.dataset.test.labels;
    let mut all_logits: Vec<Tensor> = vec![];
    let mut features = vec![];
    for network in networks {
        all_logits.push(logits(network, &target, 0, common)?);
        let prepared = Prepared::new(&target.dataset, network, network.image_size(0))?;
        features.push(features::features(network, &prepared, Part::Test, !args.no_cache, common)?);
        network.check_unchanged()?;
    }
    let scores: Vec<Score> = all_logits.iter().map(|z| Score::new(z, labels)).collect();
    let together = ensemble(&all_logits, labels);
    let count = networks.len();
    let matrix =
        |value: &dyn Fn(usize, usize) -> f64| (0..count).map(|a| (0..count).map(|b| value(a, b)).collect()).collect::<Vec<Vec<f64>>>();
    let agreement = matrix(&|a, b| scores[a].agreement(&scores[b]));
    let cka = matrix(&|a, b| stats::linear_cka(&features[a].x, &features[b].x));
    let best = (0..count).rev().max_by(|&a, &b| scores[a].top1().total_cmp(&scores[b].top1())).expect("a cohort has networks");

    let mut shown = Table::new("", &["network", "architecture", "test top-1", "held-out top-1", "million parameters"]);
    let held: Vec<f64> = (0..count)
        .map(|m| run.column(&format!("holdout.peer{m}.top1")).into_iter().filter(|v| v.is_finite()).fold(f64::NAN, f64::max))
        .collect();
    for (m, network) in networks.iter().enumerate() {
        shown.push(vec![
            Cell::text(&network.name),
            Cell::text(network.arch.name),
            Cell::Score(scores[m].top1(), 2),
            Cell::score(Some(held[m])),
            Cell::Score(network.params.count() as f64 / 1e6, 2),
        ]);
    }
    shown.push(vec![Cell::text(format!("ensemble of {count}")), Cell::Empty, Cell::Score(together.top1(), 2), Cell::Empty, Cell::Empty]);
    let ship = if !run.folder.best_network().exists() && held.iter().all(|h| h.is_finite()) {
        "the last epoch ships (train.choose = \"last\"); the held-out images chose nothing".to_string()
    } else if held.iter().all(|h| h.is_finite()) {
        let chosen = (0..count).rev().max_by(|&a, &b| held[a].total_cmp(&held[b])).expect("a cohort has networks");
        format!(
            "ship network {chosen} ({}): best on the held-out images, {:.2}; {}",
            networks[chosen].arch.name,
            held[chosen],
            run.folder.best_network().display()
        )
    } else {
        "no images were held out, so nothing honest can choose: set data.holdout and train again, or ship any".to_string()
    };
    let mut warnings = vec![];
    for a in 0..count {
        for b in a + 1..count {
            let wrong = 100.0 - scores[a].top1().max(scores[b].top1());
            if agreement[a][b] >= COLLAPSED && wrong > 100.0 - COLLAPSED {
                warnings.push(format!("networks {a} and {b} give the same answer on {:.1} % of the images and are wrong on {wrong:.1} %: they no longer differ, and the ensemble adds nothing", agreement[a][b]));
            }
        }
    }
    warnings.iter().for_each(|w| common.warn(w));

    let names: Vec<String> = networks.iter().enumerate().map(|(m, n)| format!("{m}: {}", n.arch.name)).collect();
    let mut figures = vec![];
    if count > 1 {
        let heat = |title: &str, values: &[Vec<f64>], high: f64, decimals, unit: &str, name: String, caption: &str| {
            let (columns, rows, limits) = (&names, &names, Some((0.0, high)));
            Heat { title, x: "", y: "", columns, rows, values, limits, decimals, unit, root: false }.figure(name, caption)
        };
        let (title, similar) = (format!("{}: same answer (%)", run.name), format!("{}: linear CKA of features", run.name));
        let same = "How often two networks name the same class on the test images";
        figures.push(heat(&title, &agreement, 100.0, 1, "% of test images", format!("{}-agreement", run.name), same));
        let alike = "1 means the same features up to rotation and scale";
        figures.push(heat(&similar, &cka, 1.0, 3, "linear CKA", format!("{}-cka", run.name), alike));
    }
    let drawn_by_training = [lambda_figures(run), gate_figure(run).into_iter().collect()].concat();
    let folder = RunFolder::at(&networks[0].out).figures();
    std::fs::create_dir_all(&folder).map_err(Error::io("cannot make", &folder))?;
    let folder = folder.canonicalize().map_err(Error::io("cannot find", &folder))?;
    let mut kept = vec![];
    for figure in figures.iter().chain(&drawn_by_training) {
        let path = folder.join(format!("{}.svg", figure.name));
        files::write(&path, figure.file().as_bytes())?;
        kept.push((path, figure.caption.clone()));
    }
    // The report draws lambda and gates itself, from the metrics.
    let listed: Vec<_> = kept.iter().take(figures.len()).map(|(path, caption)| json!({ "svg": path, "caption": caption })).collect();
    let measured = |metric: &str, variant: String, value: f64| {
        let record = Record::new(Args::NAME, &networks[0], common).of_cohort(&networks[0]).on(&target, networks[0].image_size(0));
        let detail = json!({ "figures": listed });
        Record { metric: metric.into(), variant, value, detail, warnings: warnings.clone(), ..record }
    };
    let mut records = vec![measured("ensemble_gain", format!("over network {best}"), together.top1() - scores[best].top1())];
    for a in 0..count {
        for b in a + 1..count {
            records.push(measured("agreement", format!("networks {a} and {b}"), agreement[a][b]));
            records.push(measured("linear_cka", format!("networks {a} and {b}"), cka[a][b]));
        }
    }
    record::append(&networks[0].out, &records)?;
    if !common.json {
        println!("{} ({}), {} test images of {}", run.name, run.method(), labels.len(), target.dataset.name);
        print!("{}", shown.plain());
        for r in &records {
            let unit = match r.metric.as_str() {
                "ensemble_gain" => " points",
                "agreement" => " %",
                _ => "",
            };
            println!("{} {}: {:.3}{unit}", r.metric.replace('_', " "), r.variant, r.value);
        }
        println!("{ship}");
        kept.iter().for_each(|(path, _)| println!("{}", path.display()));
    }
    Ok(json!({
        "run": run.name, "networks": networks.iter().zip(&scores).map(|(n, score)| json!({ "name": n.name, "top1": score.top1() })).collect::<Vec<_>>(),
        "ensemble_top1": together.top1(), "agreement": agreement, "linear_cka": cka, "ship": ship, "warnings": warnings,
        "figures": kept.iter().map(|(p, _)| p).collect::<Vec<_>>(),
    }))
}
