//! `mcl-eval report`: runs and results gathered into one folder: report.md, report.html, results.csv, figures.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use clap::Args as ClapArgs;

use crate::error::{Error, Result};
use crate::eval::Common;
use crate::eval::figures::{by_epoch, gate_figure, lambda_figures};
use crate::eval::record::{self, Record};
use crate::eval::rows::{newest, protocol_of};
use crate::files;
use crate::report::plot::{Heat, Lines, Series};
use crate::report::{Cell, Figure, Report, Section, Table, paper, table};
use crate::run::{FOUR_WAYS, FOUR_WAYS_NOTE, Run, RunFolder};

pub const ABOUT: &str = "Gather runs and results into one report (Markdown, CSV, one HTML file)";

#[derive(Debug, Clone, ClapArgs)]
pub struct Args {
    /// Run folder; may be repeated [default: every finished run under ./runs]
    #[arg(long = "run", value_name = "DIR")]
    pub runs: Vec<PathBuf>,
    /// Folder with results of --weights subjects; may be repeated
    #[arg(long = "results", value_name = "DIR")]
    pub results: Vec<PathBuf>,
    /// Where the report is written [default: reports/ and the run's name, or the date for several runs]
    #[arg(long)]
    pub out: Option<PathBuf>,
    #[arg(long, default_value = "")]
    pub title: String,
}

pub fn run(args: &Args, common: &Common) -> Result<()> {
    let paths = if args.runs.is_empty() && args.results.is_empty() { finished_runs()? } else { args.runs.clone() };
    let mut runs = paths.iter().map(|p| Run::read(p)).collect::<Result<Vec<_>>>()?;
    let mut records = vec![];
    for run in &runs {
        records.extend(record::read(run.folder.path())?);
    }
    for (i, name) in runs.iter().map(|r| r.name.clone()).collect::<Vec<_>>().iter().enumerate() {
        if runs[..i].iter().any(|r| r.name == *name) {
            runs[i].name = runs[i].folder.path().display().to_string();
        }
    }
    for folder in &args.results {
        let own = record::read(folder)?;
        if own.is_empty() {
            return Err(Error::input(format!("--results {}: no results.jsonl with rows there", folder.display())));
        }
        records.extend(own);
    }
    let name = match &runs[..] {
        [one] => one.name.clone(),
        _ => chrono::Local::now().format("%Y-%m-%d-%H%M%S").to_string(),
    };
    let out = args.out.clone().unwrap_or_else(|| Path::new("reports").join(&name));
    let title = if args.title.is_empty() { format!("Report: {name}") } else { args.title.clone() };
    let report = build(&title, &runs, &records)?;
    let mut written = report.write(&out)?;
    written.push(out.join("results.csv"));
    files::write(&out.join("results.csv"), record::csv(&records)?.as_bytes())?;
    copy_inputs(&runs, &out)?;
    if common.json {
        common.print_json(&serde_json::json!({ "folder": out, "files": written, "runs": runs.len(), "results": records.len() }));
    } else {
        println!("{} runs, {} results -> {}", runs.len(), records.len(), out.join("report.html").display());
    }
    Ok(())
}

/// Every folder under ./runs that has a finished epoch.
fn finished_runs() -> Result<Vec<PathBuf>> {
    let root = Path::new("runs");
    let entries = fs::read_dir(root)
        .map_err(|e| Error::input(format!("no --run given and ./runs cannot be listed ({e}); name a run with --run DIR")))?;
    let mut found = vec![];
    for entry in entries {
        let path = entry.map_err(Error::io("cannot list", root))?.path();
        let filled = fs::metadata(RunFolder::at(&path).metrics_jsonl()).is_ok_and(|m| m.len() > 0);
        if filled && !path.is_symlink() {
            found.push(path);
        }
    }
    found.sort();
    if found.is_empty() {
        return Err(Error::input("no --run given and no run under ./runs has a finished epoch"));
    }
    Ok(found)
}

/// The resolved recipes and the rows of metrics a report rests on.
fn copy_inputs(runs: &[Run], out: &Path) -> Result<()> {
    for run in runs {
        let to = out.join("inputs").join(crate::report::plot::file_stem(&run.name));
        fs::create_dir_all(&to).map_err(Error::io("cannot make", &to))?;
        for from in [run.folder.recipe(), run.folder.metrics_csv(), run.folder.environment()] {
            if from.exists() {
                files::write(&to.join(from.file_name().unwrap_or_default()), &fs::read(&from).map_err(Error::open(&from))?)?;
            }
        }
    }
    Ok(())
}

fn build(title: &str, runs: &[Run], records: &[Record]) -> Result<Report> {
    let records: Vec<&Record> = records.iter().collect();
    let when = chrono::Local::now().format("%Y-%m-%d %H:%M");
    let mut report = Report {
        title: title.into(),
        about: format!(
            "{} runs, {} measurements; made {when} by mcl {}. Accuracies in percent.",
            runs.len(),
            records.len(),
            env!("CARGO_PKG_VERSION")
        ),
        sections: vec![],
    };
    let current = newest(&records)?;
    report.push(pretraining(runs));
    report.push(against_paper(runs, &current)?);
    report.push(measurements(&current)?);
    report.push(few_shot(&current)?);
    report.push(curves(runs));
    report.push(lambda_maps(runs));
    report.push(pictures(&records)?);
    report.push(confusion(&records));
    report.push(cost(runs));
    report.push(provenance(runs, &records));
    Ok(report)
}

/// Test accuracy of every network, told four ways.
fn pretraining(runs: &[Run]) -> Section {
    let mut section = Section::new("Pre-training");
    let columns = [&["run", "method", "dataset", "network"], &FOUR_WAYS[..], &["ensemble", "epochs", "seed"]].concat();
    let mut shown = Table::new("", &columns);
    for run in runs {
        for (m, arch) in run.archs().iter().enumerate() {
            let mut row =
                vec![Cell::text(&run.name), Cell::text(run.method()), Cell::text(run.dataset()), Cell::text(format!("{m}: {arch}"))];
            row.extend(run.accuracy(m).map_or(vec![Cell::Empty; 4], |a| a.cells().to_vec()));
            row.extend([
                Cell::score(run.last("test.ensemble.top1")),
                Cell::Count(run.metrics.len() as i64),
                Cell::text(run.setting("train", "seed")),
            ]);
            shown.push(row);
        }
    }
    section.table(shown);
    if !runs.is_empty() {
        section.text(FOUR_WAYS_NOTE);
    }
    section
}

/// Our numbers in the paper's layout: networks down, methods across, the paper's under ours and the gap.
fn against_paper(runs: &[Run], records: &[&Record]) -> Result<Section> {
    let paper = paper::printed()?;
    // (table, dataset, network with its peer, method) -> our values.
    let mut ours: Vec<(Vec<String>, f64)> = vec![];
    for run in runs {
        let Some(name) = paper::table_of(run.dataset(), &run.archs()) else { continue };
        let same = run.archs().windows(2).all(|w| w[0] == w[1]);
        for (m, arch) in run.archs().iter().enumerate() {
            let network = if same { arch.clone() } else { format!("{arch} (net {})", m + 1) };
            if let Some(value) = run.accuracy(m).map(|a| a.last) {
                ours.push((vec![name.clone(), run.dataset().to_string(), network, run.method().to_string()], value));
            }
        }
    }
    for r in records.iter().filter(|r| r.command == "linear-probe" && r.pretrained_on == "cifar100") {
        if r.options["kind"] == "paper" && ["stl10", "tiny_imagenet"].contains(&r.dataset.as_str()) {
            let changed = protocol_of(r).split_once(", ").map_or(String::new(), |(_, keys)| format!(", {keys}"));
            ours.push((vec!["transfer-linear".into(), r.dataset.clone(), format!("{}{changed}", r.arch), r.method.clone()], r.value));
        }
    }
    for r in records.iter().filter(|r| r.command == "detect" && r.dataset == "coco") {
        // What is not as in the paper is said: `coco box_map, pre-trained on synthetic, limit=20`.
        let mut measured = format!("{} {}", r.dataset, r.metric);
        if r.pretrained_on != "imagenet" {
            measured += &format!(", pre-trained on {}", if r.pretrained_on.is_empty() { "unknown" } else { &r.pretrained_on });
        }
        if !r.variant.is_empty() {
            measured += &format!(", {}", r.variant);
        }
        ours.push((vec!["transfer-coco".into(), measured, r.arch.clone(), r.method.clone()], r.value));
    }
    let groups = table::group(&ours)?;
    let mut section = Section::new("Beside the paper");
    let mut names: Vec<&String> = groups.iter().map(|g| &g.keys[0]).collect();
    names.dedup();
    let mut seen = vec![];
    for name in names {
        if seen.contains(name) {
            continue;
        }
        seen.push(name.clone());
        let own: Vec<&table::Group> = groups.iter().filter(|g| g.keys[0] == *name).collect();
        let printed: Vec<&paper::Printed> = paper.iter().filter(|p| p.table == *name).collect();
        let mut methods: Vec<&str> = vec![];
        for method in printed.iter().map(|p| p.method.as_str()).chain(own.iter().map(|g| g.keys[3].as_str())) {
            if !methods.contains(&method) {
                methods.push(method);
            }
        }
        let mut shown = Table::new(name.clone(), &[&["dataset", "network", ""], &methods[..]].concat());
        let mut networks: Vec<&[String]> = own.iter().map(|g| &g.keys[1..3]).collect();
        networks.sort();
        networks.dedup();
        for network in networks {
            let (arch, peer) = match network[1].split_once(" (net ") {
                Some((arch, rest)) => (arch, rest.trim_end_matches(')').parse::<usize>().ok()),
                None => (network[1].split(',').next().unwrap_or_default(), None),
            };
            let ours = |m: &str| own.iter().find(|g| g.keys[1..3] == *network && g.keys[3] == m);
            let theirs = |m: &str| {
                printed.iter().find(|p| {
                    Some(p.dataset.as_str()) == network[0].split(", ").next() && p.network == arch && p.peer == peer && p.method == m
                })
            };
            let mut row = |what: &str, cell: &dyn Fn(&str) -> Cell| {
                let cells: Vec<Cell> = methods.iter().map(|m| cell(m)).collect();
                if cells.iter().any(|c| *c != Cell::Empty) {
                    shown.push([vec![Cell::text(&network[0]), Cell::text(&network[1]), Cell::text(what)], cells].concat());
                }
            };
            row("ours", &|m| ours(m).map_or(Cell::Empty, |g| g.cell()));
            row("paper", &|m| theirs(m).map_or(Cell::Empty, |p| Cell::Spread { mean: p.value, std: p.std, n: 0 }));
            row("gap", &|m| Cell::score(ours(m).zip(theirs(m)).map(|(g, p)| g.mean - p.value)));
        }
        section.table(shown);
    }
    if !seen.is_empty() {
        section.text("Ours: the last epoch, mean ± standard deviation over networks and seeds of a setting. The paper trains 300 epochs on CIFAR-100 and says neither which epoch nor which network its numbers are of; short runs are not expected to reach them.");
    }
    Ok(section)
}

/// Everything measured by `mcl-eval`, seeds grouped.
fn measurements(records: &[&Record]) -> Result<Section> {
    let mut section = Section::new("Transfer and evaluation");
    let mut commands: Vec<&str> = vec![];
    records.iter().for_each(|r| {
        if !commands.contains(&r.command.as_str()) {
            commands.push(&r.command)
        }
    });
    for command in commands {
        let own: Vec<&&Record> = records.iter().filter(|r| r.command == command).collect();
        let key = |r: &Record| {
            let what = [r.dataset.clone(), r.subject.clone(), protocol_of(r), r.variant.clone(), r.metric.clone()];
            [what.to_vec(), vec![r.run.clone(), r.weights_hash.clone(), r.image_size.to_string()]].concat()
        };
        let measured: Vec<(Vec<String>, f64)> = own.iter().map(|r| (key(r), r.value)).collect();
        let mut shown = Table::new(
            command,
            &["dataset", "network", "variant", "metric", "value", "95 % interval", "top-5", "images", "method", "protocol", "notes"],
        );
        for group in table::group(&measured)? {
            let Some(r) = own.iter().rev().find(|r| key(r) == group.keys) else { continue };
            let replaced =
                own.iter().rev().find(|o| (&o.subject, &o.run) == (&r.subject, &r.run)).is_some_and(|o| o.weights_hash != r.weights_hash);
            let notes = r.warnings.iter().cloned().chain(replaced.then(|| "of weights that were replaced since".to_string()));
            let interval = r.ci_low.zip(r.ci_high).map_or(Cell::Empty, |(low, high)| Cell::text(format!("{low:.2} to {high:.2}")));
            shown.push(vec![
                Cell::text(&r.dataset),
                Cell::text(&r.subject),
                Cell::text(&r.variant),
                Cell::text(&r.metric),
                group.cell(),
                interval,
                Cell::score(r.top5),
                Cell::Count(r.n_test as i64),
                Cell::text(&r.method),
                Cell::text(protocol_of(r)),
                Cell::text(notes.collect::<Vec<_>>().join("; ")),
            ]);
        }
        section.table(shown.without_empty_columns());
    }
    if !section.parts.is_empty() {
        section.text("± is over seeds or draws; the 95 % interval is over test images (bootstrap, of the last measurement): two different questions.");
    }
    Ok(section)
}

/// Accuracy against the number of labelled images, or the share of the training set.
fn few_shot(records: &[&Record]) -> Result<Section> {
    let mut section = Section::new("Few-shot");
    let mut figures = vec![];
    let own: Vec<&Record> = records.iter().copied().filter(|r| r.command == "few-shot").collect();
    let number = |r: &Record, key: &str| {
        let found = r.variant.split(' ').find_map(|part| part.strip_prefix(key)?.parse::<f64>().ok());
        found.map(|v| if key == "fraction=" { 100.0 * v } else { v })
    };
    for (key, x) in [("shots=", "labelled images a class"), ("fraction=", "training images kept (%)")] {
        let mut datasets: Vec<&str> = vec![];
        own.iter().filter(|r| number(r, key).is_some()).for_each(|r| {
            if !datasets.contains(&r.dataset.as_str()) {
                datasets.push(&r.dataset)
            }
        });
        for dataset in datasets {
            let of_parts = key == "fraction=";
            // Several networks of a run share a line.
            let mut series: BTreeMap<String, BTreeMap<u64, Vec<&Record>>> = BTreeMap::new();
            for r in own.iter().filter(|r| r.dataset == dataset) {
                if let Some(at) = number(r, key) {
                    let name = if of_parts { format!("{} {}", r.method, r.arch) } else { r.subject.clone() };
                    series.entry(name).or_default().entry(at.to_bits()).or_default().push(r);
                }
            }
            let mean = |records: &[&Record], of: &dyn Fn(&Record) -> f64| records.iter().map(|r| of(r)).sum::<f64>() / records.len() as f64;
            let lines: Vec<Series> = series
                .into_iter()
                .map(|(name, points)| Series {
                    name,
                    band: points
                        .values()
                        .map(|all| (mean(all, &|r| r.ci_low.unwrap_or(r.value)), mean(all, &|r| r.ci_high.unwrap_or(r.value))))
                        .collect(),
                    points: points.iter().map(|(at, all)| (f64::from_bits(*at), mean(all, &|r| r.value))).collect(),
                })
                .collect();
            let title = format!("Few-shot on {dataset}");
            let svg = Lines { title: &title, x, y: "top-1 (%)", series: &lines, dots: true }.draw();
            figures.push(Figure::new(
                format!("few-shot-{}{dataset}", key.trim_end_matches('=')),
                if of_parts {
                    "Mean over networks; the band is the mean of their 95 % intervals over test images."
                } else {
                    "Mean over draws; the band is its 95 % interval."
                },
                svg,
            ));
        }
    }
    section.figures(figures);
    Ok(section)
}

fn curves(runs: &[Run]) -> Section {
    let mut section = Section::new("Training curves");
    for run in runs {
        let columns = run.columns();
        let mut accuracy: Vec<Series> = (0..run.archs().len())
            .map(|m| by_epoch(format!("network {m}: {}", run.archs()[m]), &run.column(&format!("test.peer{m}.top1"))))
            .collect();
        if run.archs().len() > 1 {
            accuracy.push(by_epoch("ensemble".into(), &run.column("test.ensemble.top1")));
        }
        accuracy.extend(
            (0..run.archs().len())
                .filter(|m| columns.contains(&format!("holdout.peer{m}.top1").as_str()))
                .map(|m| by_epoch(format!("network {m}, held out"), &run.column(&format!("holdout.peer{m}.top1")))),
        );
        let terms: Vec<Series> = std::iter::once("loss")
            .chain(columns.iter().copied().filter(|c| c.starts_with("weighted.")))
            .map(|c| by_epoch(c.trim_start_matches("weighted.").into(), &run.column(c)))
            .collect();
        let title = format!("{}: test accuracy", run.name);
        let loss_title = format!("{}: loss and its weighted terms", run.name);
        section.figures(vec![
            Figure::new(
                format!("{}-accuracy", run.name),
                format!("{} on {}, by epoch", run.method(), run.dataset()),
                Lines { title: &title, x: "epoch", y: "top-1 (%)", series: &accuracy, dots: false }.draw(),
            ),
            Figure::new(
                format!("{}-loss", run.name),
                "Mean over the epoch's steps",
                Lines { title: &loss_title, x: "epoch", y: "loss", series: &terms, dots: false }.draw(),
            ),
        ]);
    }
    section
}

fn lambda_maps(runs: &[Run]) -> Section {
    let mut section = Section::new("Layer matching");
    for run in runs {
        section.figures([lambda_figures(run), gate_figure(run).into_iter().collect()].concat());
    }
    section
}

/// Figures other commands drew and recorded under `detail.figures`; of equal names the newest.
fn pictures(records: &[&Record]) -> Result<Section> {
    let mut section = Section::new("Maps and cohorts");
    let mut found: BTreeMap<String, Figure> = BTreeMap::new();
    for r in records {
        for figure in r.detail["figures"].as_array().into_iter().flatten() {
            let (Some(path), Some(caption)) = (figure["svg"].as_str(), figure["caption"].as_str()) else { continue };
            // A picture that was cleaned away is no fault of the report.
            if let Ok(svg) = fs::read_to_string(path) {
                let name = Path::new(path).file_stem().unwrap_or_default().to_string_lossy().into_owned();
                found.insert(path.to_string(), Figure::new(name, caption, svg));
            }
        }
    }
    let (wide, small): (Vec<Figure>, Vec<Figure>) = found.into_values().partition(Figure::is_wide);
    for figure in wide {
        section.figures(vec![figure]);
    }
    section.figures(small);
    Ok(section)
}

/// The newest probe of each dataset in full.
fn confusion(records: &[&Record]) -> Section {
    let mut section = Section::new("Per class");
    let mut newest: BTreeMap<&str, &Record> = BTreeMap::new();
    for r in records.iter().filter(|r| r.detail["confusion"].is_array()) {
        newest.insert(&r.dataset, r);
    }
    for (dataset, r) in newest {
        let names: Vec<String> = serde_json::from_value(r.detail["classes"].clone()).unwrap_or_default();
        let counts: Vec<Vec<f64>> = serde_json::from_value(r.detail["confusion"].clone()).unwrap_or_default();
        let share = |row: &Vec<f64>| {
            let all: f64 = row.iter().sum();
            row.iter().map(|c| if all > 0.0 { 100.0 * c / all } else { f64::NAN }).collect::<Vec<f64>>()
        };
        let values: Vec<Vec<f64>> = counts.iter().map(share).collect();
        let how = if r.protocol.is_empty() { r.command.clone() } else { format!("{}, {}", r.command, r.protocol) };
        let title = format!("{dataset}: {} ({how})", r.subject);
        let heat = Heat {
            title: &title,
            x: "predicted",
            y: "true",
            columns: &names,
            rows: &names,
            values: &values,
            limits: Some((0.0, 100.0)),
            decimals: 0,
        };
        section.figures(vec![Figure::new(format!("confusion-{dataset}"), "Confusion matrix, percent of each true class", heat.draw())]);
        let mut shown = Table::new(format!("{dataset}: accuracy by class"), &["class", "top-1", "images", "most often taken for"]);
        for (c, row) in counts.iter().enumerate() {
            let wrong = (0..row.len()).filter(|&k| k != c && row[k] > 0.0).max_by(|&a, &b| row[a].total_cmp(&row[b]));
            let wrong =
                wrong.map_or(Cell::Empty, |k| Cell::text(format!("{} ({:.0} %)", names.get(k).map_or("", String::as_str), values[c][k])));
            shown.push(vec![
                Cell::text(names.get(c).cloned().unwrap_or_default()),
                Cell::score(values[c].get(c).copied()),
                Cell::Count(row.iter().sum::<f64>() as i64),
                wrong,
            ]);
        }
        section.table(shown);
    }
    section
}

fn cost(runs: &[Run]) -> Section {
    let mut section = Section::new("Cost");
    let mut shown = Table::new(
        "",
        &["run", "method", "networks", "seconds a step", "seconds a meta step", "images/s", "peak MB", "device", "threads", "processor"],
    );
    for run in runs {
        let of = |key: &str| run.environment[key].as_str().map_or_else(|| run.environment[key].to_string(), String::from);
        let mean = |name: &str| {
            let values: Vec<f64> = run.column(name).into_iter().filter(|v| v.is_finite()).collect();
            if values.is_empty() { Cell::Empty } else { Cell::Score(values.iter().sum::<f64>() / values.len() as f64, 3) }
        };
        let speed = match mean("images_per_second") {
            Cell::Score(v, _) => Cell::Score(v, 0),
            other => other,
        };
        shown.push(vec![
            Cell::text(&run.name),
            Cell::text(run.method()),
            Cell::text(run.archs().join(", ")),
            mean("seconds.step"),
            mean("seconds.meta_step"),
            speed,
            run.last("peak_mb").map_or(Cell::Empty, |v| Cell::Count(v as i64)),
            Cell::text(of("device")),
            Cell::text(of("threads")),
            Cell::text(of("cpu")),
        ]);
    }
    section.table(shown);
    section
}

/// The commands and hashes behind each number.
fn provenance(runs: &[Run], records: &[&Record]) -> Section {
    let mut section = Section::new("Where the numbers come from");
    let mut lines = vec![];
    for run in runs {
        let of = |key: &str| run.environment[key].as_str().unwrap_or("unknown").to_string();
        lines.push(format!(
            "{}\n  {}\n  recipe {}  training split {}  mcl {} ({})  libtorch {}",
            run.name,
            of("command"),
            of("recipe_hash"),
            of("train_split_hash"),
            of("mcl"),
            of("commit"),
            of("libtorch")
        ));
    }
    let mut seen: Vec<String> = vec![];
    for r in records {
        let short = |hash: &str| hash.chars().take(16).collect::<String>();
        let line = format!(
            "{}\n  weights {}  protocol {}  split {}  seed {}  ({})",
            r.argv,
            short(&r.weights_hash),
            r.protocol_hash,
            short(&r.split_hash),
            r.seed.map_or("-".into(), |s| s.to_string()),
            r.subject
        );
        if !seen.contains(&line) {
            seen.push(line);
        }
    }
    lines.extend(seen);
    if !lines.is_empty() {
        section.code(lines.join("\n\n"));
    }
    section
}
