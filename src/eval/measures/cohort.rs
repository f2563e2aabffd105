//! `mcl-eval cohort`: what the networks of a run have become to each other: agreement, similarity of features (linear CKA), the ensemble
//! against the best, layer-matching weights and gates over time, and which network to ship.

use std::path::PathBuf;

use clap::Args as ClapArgs;
use serde_json::json;
use tch::Tensor;

use crate::error::{Error, Result};
use crate::eval::Common;
use crate::eval::dataset::Target;
use crate::eval::features::{self, Prepared};
use crate::eval::figures::{gate_figure, lambda_figures};
use crate::eval::measures::accuracy::{self, own_dataset};
use crate::eval::network::{PeerChoice, Subject, SubjectArgs};
use crate::eval::record::{self, Record};
use crate::eval::score::Score;
use crate::eval::stats;
use crate::files;
use crate::report::plot::Heat;
use crate::report::{Cell, Figure, Table};
use crate::run::Run;

pub const ABOUT: &str = "Look at a cohort: agreement, similarity, layer matching, which network to ship";

#[derive(Debug, Clone, ClapArgs)]
pub struct Args {
    /// Run folder; may be repeated
    #[arg(long = "run", value_name = "DIR", default_value = "runs/latest")]
    pub runs: Vec<PathBuf>,
    /// Do not keep or use extracted features
    #[arg(long)]
    pub no_cache: bool,
}

/// Two networks that agree this often although they are wrong more often than that allows have stopped being different.
const COLLAPSED: f64 = 97.0;

pub fn run(args: &Args, common: &Common) -> Result<()> {
    let mut outputs = vec![];
    for folder in &args.runs {
        let run = Run::read(folder)?;
        let subjects =
            SubjectArgs { runs: vec![folder.clone()], peer: Some(PeerChoice::All), ..Default::default() }.open(common, PeerChoice::All)?;
        outputs.push(one(&run, &subjects, args, common)?);
    }
    if common.json {
        common.print_json(&json!({ "cohorts": outputs }));
    }
    Ok(())
}

fn one(run: &Run, subjects: &[Subject], args: &Args, common: &Common) -> Result<serde_json::Value> {
    let name = own_dataset(None, &subjects[0])?;
    let target = Target::source(name, common)?;
    let labels = &target.dataset.test.labels;
    let mut logits: Vec<Tensor> = vec![];
    let mut features = vec![];
    for subject in subjects {
        logits.push(accuracy::logits(subject, &target, 0, common)?);
        let prepared = Prepared::new(&target.dataset, subject, subject.image_size(0))?;
        features.push(features::features(subject, &prepared.dataset.test, &prepared.transform, !args.no_cache, common)?);
        subject.check_unchanged()?;
    }
    let scores: Vec<Score> = logits.iter().map(|z| Score::new(z, labels)).collect();
    let together = accuracy::ensemble(&logits, labels);
    let count = subjects.len();
    let matrix =
        |value: &dyn Fn(usize, usize) -> f64| (0..count).map(|a| (0..count).map(|b| value(a, b)).collect()).collect::<Vec<Vec<f64>>>();
    let agreement = matrix(&|a, b| scores[a].agreement(&scores[b]));
    let cka = matrix(&|a, b| stats::linear_cka(&features[a].x, &features[b].x));
    let best = (0..count).rev().max_by(|&a, &b| scores[a].top1().total_cmp(&scores[b].top1())).expect("a cohort has networks");

    let mut shown = Table::new("", &["network", "architecture", "test top-1", "held-out top-1", "million parameters"]);
    let held: Vec<f64> = (0..count)
        .map(|m| run.column(&format!("holdout.peer{m}.top1")).into_iter().filter(|v| v.is_finite()).fold(f64::NAN, f64::max))
        .collect();
    for (m, subject) in subjects.iter().enumerate() {
        shown.push(vec![
            Cell::text(&subject.name),
            Cell::text(subject.arch.name),
            Cell::Score(scores[m].top1(), 2),
            Cell::score(Some(held[m])),
            Cell::Score(subject.params.count() as f64 / 1e6, 2),
        ]);
    }
    shown.push(vec![Cell::text(format!("ensemble of {count}")), Cell::Empty, Cell::Score(together.top1(), 2), Cell::Empty, Cell::Empty]);
    let ship = if held.iter().all(|h| h.is_finite()) {
        let chosen = (0..count).rev().max_by(|&a, &b| held[a].total_cmp(&held[b])).expect("a cohort has networks");
        format!(
            "ship network {chosen} ({}): best on the held-out images, {:.2}; networks/best.safetensors",
            subjects[chosen].arch.name, held[chosen]
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

    let names: Vec<String> = subjects.iter().enumerate().map(|(m, s)| format!("{m}: {}", s.arch.name)).collect();
    let mut figures = vec![];
    if count > 1 {
        let heat = |title: &str, values: &[Vec<f64>], limits, decimals| {
            Heat { title, x: "", y: "", columns: &names, rows: &names, values, limits: Some(limits), decimals }.draw()
        };
        let (title, similar) = (format!("{}: same answer (%)", run.name), format!("{}: linear CKA of features", run.name));
        figures.push(Figure::new(
            format!("{}-agreement", run.name),
            "How often two networks name the same class on the test images",
            heat(&title, &agreement, (0.0, 100.0), 1),
        ));
        figures.push(Figure::new(
            format!("{}-cka", run.name),
            "1 means the same features up to rotation and scale",
            heat(&similar, &cka, (0.0, 1.0), 3),
        ));
    }
    let drawn_by_training = [lambda_figures(run), gate_figure(run).into_iter().collect()].concat();
    let folder = subjects[0].out.join("figures");
    std::fs::create_dir_all(&folder).map_err(Error::io("cannot make", &folder))?;
    let folder = folder.canonicalize().map_err(Error::io("cannot find", &folder))?;
    let mut kept = vec![];
    for figure in figures.iter().chain(&drawn_by_training) {
        let path = folder.join(format!("{}.svg", figure.name));
        files::write(&path, figure.svg.as_bytes())?;
        kept.push((path, figure.caption.clone()));
    }
    // The report draws lambda and gates itself, from the metrics.
    let listed: Vec<_> = kept.iter().take(figures.len()).map(|(path, caption)| json!({ "svg": path, "caption": caption })).collect();
    let measured = |metric: &str, variant: String, value: f64| Record {
        variant,
        dataset: target.dataset.name.into(),
        metric: metric.into(),
        value,
        n_test: labels.len(),
        split_hash: target.hash.clone(),
        image_size: subjects[0].image_size(0),
        detail: json!({ "figures": listed }),
        warnings: warnings.clone(),
        subject: subjects[0].cohort().to_string(),
        peer: None,
        ..Record::new("cohort", &subjects[0], common)
    };
    let mut records = vec![measured("ensemble_gain", format!("over network {best}"), together.top1() - scores[best].top1())];
    for a in 0..count {
        for b in a + 1..count {
            records.push(measured("agreement", format!("networks {a} and {b}"), agreement[a][b]));
            records.push(measured("linear_cka", format!("networks {a} and {b}"), cka[a][b]));
        }
    }
    record::append(&subjects[0].out, &records)?;
    if !common.json {
        println!("{} ({}), {} test images of {}", run.name, run.method(), labels.len(), target.dataset.name);
        print!("{}", shown.plain());
        for r in &records {
            println!("{} {}: {:.3}", r.metric.replace('_', " "), r.variant, r.value);
        }
        println!("{ship}");
        kept.iter().for_each(|(path, _)| println!("{}", path.display()));
    }
    Ok(json!({
        "run": run.name, "networks": subjects.iter().zip(&scores).map(|(s, score)| json!({ "name": s.name, "top1": score.top1() })).collect::<Vec<_>>(),
        "ensemble_top1": together.top1(), "agreement": agreement, "linear_cka": cka, "ship": ship, "warnings": warnings,
        "figures": kept.iter().map(|(p, _)| p).collect::<Vec<_>>(),
    }))
}
