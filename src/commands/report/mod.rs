//! `mcl-eval report`: runs and results gathered into one folder: report.md, report.html, results.csv, figures. One file a section.

mod cost;
mod curves;
mod few_shot;
mod measurements;
mod paper;
mod per_class;
mod pictures;
mod pretraining;
mod provenance;

use std::fs;
use std::path::{Path, PathBuf};

use clap::Args as ClapArgs;

use crate::error::{Error, Result};
use crate::eval::Common;
use crate::eval::record::{self, Record};
use crate::eval::rows::newest;
use crate::files;
use crate::report::Report;
use crate::report::plot::file_stem;
use crate::run::{Run, RunFolder};

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
    #[arg(long, default_value = "")]
    pub title: String,
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
    let report = build(&title, &runs, &records)?;
    let mut written = report.write(&out)?;
    let rows = RunFolder::at(&out).results_csv();
    files::write(&rows, record::csv(&records)?.as_bytes())?;
    written.push(rows);
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
    report.push(pretraining::section(runs));
    report.push(paper::section(runs, &current)?);
    report.push(measurements::section(&current)?);
    report.push(few_shot::section(&current)?);
    report.push(curves::section(runs));
    report.push(curves::matching(runs));
    report.push(pictures::section(&records));
    report.push(per_class::section(&records)?);
    report.push(cost::section(runs));
    report.push(provenance::section(runs, &records)?);
    Ok(report)
}
