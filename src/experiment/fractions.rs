//! `mcl-eval few-shot --fractions`: the paper's few-shot. Every method is pre-trained on every part of the training set, then its networks
//! are tested on the whole test split.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use serde_json::Value;

use super::plan::{Group, Item, Plan, Setting};
use super::runner::{Event, Programs, Runner, device_flag, flags};
use crate::error::{Error, Result};
use crate::eval::Common;
use crate::eval::measures::few_shot::Args;
use crate::eval::record::{self, Record};
use crate::files;
use crate::methods;
use crate::recipe::Recipe;
use crate::report::colours::Palette;
use crate::report::plot::{Lines, Series};
use crate::report::{Cell, Figure, Table};
use crate::run::RunFolder;
use crate::system::{machine, process};

/// Makes the runs that are not finished, then shows accuracy against fraction.
pub fn run(args: &Args, common: &Common) -> Result<()> {
    let plan = plan(args)?;
    let folder = args.networks.out.clone().unwrap_or_else(|| PathBuf::from("runs/few-shot"));
    let items = plan.items(&folder)?;
    // Every run's folder is looked at before the first run starts.
    items.iter().try_for_each(|item| item.summary(FOLDER_FLAG).map(drop))?;
    let stop = process::watch_signals()?;
    let eval = process::own_program()?;
    // Of every finished run by its name.
    let measured: Mutex<BTreeMap<String, Vec<Record>>> = Mutex::default();
    let runner = Runner {
        items: &items,
        side_by_side: 1,
        programs: Programs { train: eval.with_file_name("mcl-train"), eval },
        flags: flags(common.data.as_deref(), &device_flag(common.device), common.threads, common.quiet),
        folder_flag: FOLDER_FLAG,
        stop: &stop,
        tell: &|place, event| {
            if let (Event::Begun, Some(run)) = (event, items[place].run()) {
                common.say(format!("{} on {} of {}", run.recipe.method_name(), run.recipe.data.fraction, run.recipe.data.name));
            }
        },
        finish: &|item, _| {
            measured.lock().expect("no worker panicked").insert(item.name.clone(), rows(item)?);
            Ok(())
        },
    };
    let outcome = runner.run((0..items.len()).collect())?;
    if outcome.stopped {
        return outcome.end();
    }
    let measured = measured.into_inner().expect("no worker panicked");
    let mut records = vec![];
    let mut shown = Table::new("", &["method", "networks", "fraction", "training images", "top-1 (mean of networks)"]);
    for item in &items {
        let (Some(run), Some(own)) = (item.run(), measured.get(&item.name)) else { continue };
        shown.push(vec![
            Cell::text(run.recipe.method_name()),
            Cell::text(run.recipe.cohort.archs.join(", ")),
            Cell::Score(run.recipe.data.fraction, 2),
            Cell::Count(own[0].n_train as i64),
            Cell::Score(own.iter().map(|r| r.value).sum::<f64>() / own.len() as f64, 2),
        ]);
        records.extend(own.iter().cloned());
    }
    if records.is_empty() {
        return outcome.end();
    }
    keep(&folder, &records)?;
    let figure = figure(&records);
    let path = folder.join(format!("{}.svg", figure.name));
    files::write(&path, figure.file().as_bytes())?;
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
    outcome.end()
}

const FOLDER_FLAG: &str = "--out";

/// A setting for each method and part.
fn plan(args: &Args) -> Result<Plan> {
    let recipe =
        args.recipe.clone().ok_or_else(|| Error::input("few-shot --fractions needs --recipe FILE: what is trained on the parts"))?;
    if let Some(bad) = args.fractions.iter().find(|f| !(**f > 0.0 && **f <= 1.0)) {
        return Err(Error::input(format!("--fractions {bad}: accepted: above 0, up to 1")));
    }
    let methods: Vec<Option<&str>> =
        if args.methods.is_empty() { vec![None] } else { args.methods.iter().map(|m| Some(m.as_str())).collect() };
    let (mut settings, mut seeds) = (vec![], vec![]);
    for method in &methods {
        for &fraction in &args.fractions {
            let mut set = args.how.sets.clone();
            set.push(format!("data.fraction={fraction:?}"));
            set.extend(method.map(|m| format!("method.name={m}")));
            let read = Recipe::read(&recipe, &set, &methods::names())?;
            settings.push(Setting { name: format!("{}-{fraction}", read.method_name()), set });
            seeds = vec![read.train.seed];
        }
    }
    let group = Group { title: "Parts of the training set".into(), seeds, settings, ..Group::default() };
    Ok(Plan { origin: recipe.clone(), recipe, evaluate: vec!["accuracy".into()], groups: vec![group], ..Plan::default() })
}

/// What was measured of a run's networks, as rows of this command: the images they were trained on are what varies.
fn rows(item: &Item) -> Result<Vec<Record>> {
    let known = item.folder.read_environment()?;
    let fraction = item.run().map_or(f64::NAN, |run| run.recipe.data.fraction);
    let row = |r: Record| Record {
        command: "few-shot".into(),
        variant: format!("fraction={fraction}"),
        n_train: known["train_images"].as_u64().unwrap_or(0) as usize,
        split_hash: known["train_split_hash"].as_str().unwrap_or_default().to_string(),
        argv: machine::command(),
        detail: Value::Null,
        ..r
    };
    // The ensemble is no network.
    Ok(item.records()?.into_iter().filter(|r| r.peer.is_some()).map(row).collect())
}

/// Adds the rows that are not there yet: the same command may be given again.
fn keep(folder: &Path, records: &[Record]) -> Result<()> {
    let before = record::read(folder)?;
    let there = |r: &Record| before.iter().any(|b| b.id == r.id && b.subject == r.subject && b.weights_hash == r.weights_hash);
    let new: Vec<Record> = records.iter().filter(|r| !there(r)).cloned().collect();
    record::append(folder, &new)
}

/// Accuracy against fraction, a line a method: the paper's figure.
fn figure(records: &[Record]) -> Figure {
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
    let palette = Palette::of(lines.iter().map(|l| &l.name));
    let drawn = Lines {
        title: "Accuracy with parts of the training set",
        x: "training images kept (%)",
        y: "top-1 (%)",
        series: &lines,
        palette: &palette,
        band: "",
    };
    drawn.figure("few-shot-fractions", "Mean over the networks of a run; the test split is whole")
}
