//! `mcl-eval report`: runs and results gathered into one folder: report.md, report.html, results.csv, figures. One file a section.

mod cost;
mod curves;
mod few_shot;
pub(super) mod found;
mod measurements;
mod paper;
mod per_class;
mod pictures;
mod pretraining;
mod provenance;
mod thumbnails;

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use clap::Args as ClapArgs;

use crate::error::{Error, Result, counted};
use crate::eval::Common;
use crate::eval::record::{self, Record};
use crate::eval::rows::newest;
use crate::files;
use crate::report::plot::file_stem;
use crate::report::{Cell, Report, Section, Table};
use crate::run::{Run, RunFolder};
use thumbnails::Thumbnails;

/// What the help says of it.
pub const ABOUT: &str = "Gather runs and results into one report (Markdown, CSV, one HTML file)";

/// The flags of `mcl-eval report`.
#[derive(Debug, Clone, ClapArgs)]
pub struct Args {
    /// Run folder; may be repeated [default: every finished run under ./runs]
    #[arg(long = "run", value_name = "DIR")]
    pub runs: Vec<PathBuf>,
    /// Folder with results of networks given by --weights; may be repeated
    #[arg(long = "results", value_name = "DIR")]
    pub results: Vec<PathBuf>,
    /// Where the report is written [default: reports/ and the run's name, or the date for several runs]
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// The heading [default: Report, and the run's name]
    #[arg(long, default_value = "", hide_default_value = true)]
    pub title: String,
    /// Show small pictures of your own images, in maps and beside mistakes; they become part of the page
    #[arg(long)]
    pub thumbnails: bool,
}

/// Writes the report and says where.
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
            let file = RunFolder::at(folder).results_jsonl();
            return Err(Error::input(format!("--results {}: {} is missing or has no rows", folder.display(), file.display())));
        }
        records.extend(own);
    }
    let name = match &runs[..] {
        [one] => one.name.clone(),
        _ => chrono::Local::now().format("%Y-%m-%d-%H%M%S").to_string(),
    };
    let out = args.out.clone().unwrap_or_else(|| Path::new("reports").join(&name));
    let title = if args.title.is_empty() { format!("Report: {name}") } else { args.title.clone() };
    let report = build(&title, &runs, &records, &mut Thumbnails::new(args.thumbnails, common))?;
    let mut written = report.write(&out)?;
    let rows = RunFolder::at(&out).results_csv();
    files::write(&rows, record::csv(&records)?.as_bytes())?;
    written.push(rows);
    copy_inputs(&runs, &out)?;
    if common.json {
        common.print_json(&serde_json::json!({ "folder": out, "files": written, "runs": runs.len(), "results": records.len() }));
    } else {
        let (runs, results) = (counted(runs.len(), "run"), counted(records.len(), "result"));
        println!("{runs}, {results} -> {}", out.join("report.html").display());
    }
    Ok(())
}

/// Every folder under ./runs that has a finished epoch.
fn finished_runs() -> Result<Vec<PathBuf>> {
    let root = Path::new("runs");
    let entries = fs::read_dir(root).map_err(|e| match e.kind() {
        ErrorKind::NotFound => Error::input("no --run given and no folder ./runs here; `mcl-train run quickstart` makes a first run"),
        _ => Error::input(format!("no --run given and ./runs cannot be listed ({e}); name a run with --run DIR")),
    })?;
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
        let to = out.join("inputs").join(file_stem(&run.name));
        fs::create_dir_all(&to).map_err(Error::io("cannot make", &to))?;
        for from in [run.folder.recipe(), run.folder.metrics_csv(), run.folder.environment()] {
            if from.exists() {
                files::write(&to.join(from.file_name().unwrap_or_default()), &fs::read(&from).map_err(Error::open(&from))?)?;
            }
        }
    }
    Ok(())
}

/// Figures that measurements drew, for other reports.
pub(super) fn pictures(records: &[&Record], common: &Common) -> Result<Section> {
    pictures::section(records, &mut Thumbnails::new(false, common))
}

/// What runs cost and what their methods add in training, for other reports.
pub(super) fn cost(runs: &[Run]) -> Result<Section> {
    cost::section(runs)
}

/// Measurements whose numbers are no accuracies.
const MATCHING: [&str; 2] = ["lambda", "tsne"];

/// The numbers of measurements that are no accuracies: weights between layers, maps.
pub(super) fn matching_numbers(records: &[&Record]) -> Section {
    let mut section = Section::new("Layers and maps in numbers");
    let mut shown = Table::new("", &["run", "what", "of", "value", "95 % over images", "dataset", "images"]);
    for r in records.iter().filter(|r| MATCHING.contains(&r.command.as_str())) {
        let interval = if r.ci_low.is_some() {
            Cell::text(format!("{:.4} to {:.4}", r.ci_low.unwrap_or(f64::NAN), r.ci_high.unwrap_or(f64::NAN)))
        } else {
            Cell::Empty
        };
        shown.push(vec![
            Cell::text(&r.subject),
            Cell::text(measurements::in_words(&r.metric).replace('_', " ")),
            Cell::text(&r.variant),
            Cell::Score(r.value, 4),
            interval,
            Cell::text(&r.dataset),
            Cell::Count(r.n_train.max(r.n_test) as i64),
        ]);
    }
    if !shown.rows.is_empty() {
        section.table(shown);
    }
    section
}

fn build(title: &str, runs: &[Run], records: &[Record], images: &mut Thumbnails) -> Result<Report> {
    let records: Vec<&Record> = records.iter().collect();
    let current = newest(&records)?;
    let when = chrono::Local::now().format("%Y-%m-%d %H:%M");
    let mut report = Report {
        title: title.into(),
        about: format!(
            "{}, {}; made {when} by mcl {}. Accuracies are in percent, differences in points.",
            counted(runs.len(), "run"),
            counted(records.len(), "measurement"),
            env!("CARGO_PKG_VERSION")
        ),
        found: found::lines(runs, &current)?,
        sections: vec![],
    };
    report.push(pretraining::section(runs));
    report.push(paper::section(runs, &current)?);
    report.push(measurements::section(&current)?);
    report.push(few_shot::section(&current)?);
    report.push(curves::section(runs));
    report.push(curves::matching(runs));
    report.push(matching_numbers(&current));
    report.push(pictures::section(&records, images)?);
    report.push(per_class::section(&current, images)?);
    report.push(cost::section(runs)?);
    report.push(provenance::section(runs, &records)?);
    Ok(report)
}
