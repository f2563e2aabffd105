//! `mcl-eval table NAME`: makes a table or figure of the paper: its runs by the one runner, then the paper's layout with the paper's numbers
//! beside ours.

use std::path::PathBuf;

use clap::Args as ClapArgs;

use super::beside::{NOTE, NOTE_MEASURED, Ours, Who, beside, of_records, of_run};
use super::curve;
use super::report;
use super::report::found::{Contender, leads};
use crate::error::{Error, Result};
use crate::eval::Common;
use crate::eval::record::{self, Record};
use crate::eval::rows::newest;
use crate::experiment::Plan;
use crate::experiment::table::{self, Scale, TablePlan};
use crate::report::paper::{Printed, in_text};
use crate::report::table::signed;
use crate::report::{Cell, Report, Section, Table};
use crate::run::Run;

/// What the command does.
pub const ABOUT: &str = "Make a table or figure of the paper: run what is missing, end in its layout";

/// The flags of the command.
#[derive(Debug, Clone, ClapArgs)]
pub struct Args {
    /// Which one; `mcl-train list plans` shows them
    plan: String,
    /// How much of it: `paper` is the paper's own size
    #[arg(long, value_enum, default_value_t = Scale::Small)]
    scale: Scale,
    /// Where runs and the report go [default: runs/table-PLAN-SCALE]
    #[arg(long)]
    out: Option<PathBuf>,
    /// Runs made side by side; with --threads 1 as many as there are cores is quickest for small networks
    #[arg(long, default_value_t = 1)]
    jobs: usize,
    /// Override a recipe key of all runs, e.g. --set train.epochs=1 (may be repeated); said in the report
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    sets: Vec<String>,
    /// Make nothing, write the report from what is there
    #[arg(long)]
    report_only: bool,
}

/// As `--scale` takes it.
fn scale(args: &Args) -> &'static str {
    match args.scale {
        Scale::Small => "small",
        Scale::Paper => "paper",
    }
}

/// Makes what is missing, then writes the report.
pub fn run(args: &Args, common: &Common) -> Result<()> {
    let table = table::find(&args.plan)?;
    let out = args.out.clone().unwrap_or_else(|| PathBuf::from("runs").join(format!("table-{}-{}", table.name, scale(args))));
    let plan = table.plan(args.scale, &args.sets)?;
    let items = plan.items(&out)?;
    let made = match args.report_only {
        true => Ok(()),
        false => table::make(&items, &out, args.jobs, common),
    };
    let finished = write(&table, &plan, args, &out, common)?;
    if common.json {
        common.print_json(&serde_json::json!({ "folder": out, "finished": finished, "planned": items.len() }));
    } else {
        println!("{finished} of {} runs finished -> {}", items.len(), out.join("report.html").display());
    }
    made
}

/// Who leads in the first row that has two columns, in how many rows, and how far that is from the paper.
fn found(ours: &[Ours], theirs: &[Printed], finished: usize, planned: usize) -> Vec<String> {
    let mut rows: Vec<(&str, &Who)> = vec![];
    for o in ours {
        if !rows.contains(&(o.dataset.as_str(), &o.network)) {
            rows.push((&o.dataset, &o.network));
        }
    }
    let mut lines = vec![];
    let mut leaders: Vec<String> = vec![];
    for (dataset, network) in rows {
        let mut contenders: Vec<Contender> = vec![];
        for o in ours.iter().filter(|o| o.dataset == dataset && o.network == *network) {
            match contenders.iter_mut().find(|c| c.name == o.column) {
                Some(contender) => contender.values.push(o.value),
                None => contenders.push(Contender { name: o.column.clone(), values: vec![o.value], by_image: None }),
            }
        }
        if contenders.len() > 1 {
            let mean = |c: &Contender| c.values.iter().sum::<f64>() / c.values.len() as f64;
            leaders.extend(contenders.iter().reduce(|a, b| if mean(b) > mean(a) { b } else { a }).map(|c| c.name.clone()));
            if lines.is_empty() {
                lines.extend(leads(&format!("{dataset}, {}", network.shown()), contenders));
            }
        }
    }
    let counted = |name: &String| leaders.iter().filter(|l| *l == name).count();
    if let Some(most) = leaders.iter().max_by_key(|name| counted(name)) {
        lines.push(format!("{most} leads in {} of {} rows that have two or more columns.", counted(most), leaders.len()));
    }
    let gap = |o: &Ours| {
        theirs.iter().find(|p| p.dataset == o.dataset && Who::of(p) == o.network && p.method == o.column).map(|p| o.value - p.value)
    };
    let gaps: Vec<f64> = ours.iter().filter_map(gap).collect();
    if !gaps.is_empty() {
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        lines.push(format!("On average {} points from the paper's numbers, over {} of ours.", signed(mean), gaps.len()));
    }
    lines.push(format!("{finished} of {planned} planned runs are finished."));
    lines
}

/// The report of what is finished; says how many runs are.
fn write(table: &TablePlan, plan: &Plan, args: &Args, out: &std::path::Path, common: &Common) -> Result<usize> {
    let (mut ours, mut runs, mut records, mut next) = (vec![], vec![], vec![], vec![]);
    for cell in table.cells(args.scale)? {
        for seed in table.seeds(args.scale) {
            let folder = out.join(format!("{}-seed{seed}", cell.setting));
            if !crate::run::RunFolder::at(&folder).summary().exists() {
                continue;
            }
            let (run, measured) = (Run::read(&folder)?, record::read(&folder)?);
            let own = match &table.shows {
                Some(measurement) => of_records(measured.iter().filter(|r| r.command == *measurement), &cell.column),
                None => of_run(&run, &cell.column)?,
            };
            if own.is_empty() {
                next.extend(table.then.iter().map(|line| line.replace("RUN", &folder.display().to_string())));
            }
            runs.push(run);
            records.extend(measured);
            // Rows of one recipe are told apart by their names.
            let row = |o: Ours| match cell.named {
                true => Ours { network: Who { row: Some(cell.row.clone()), ..o.network }, ..o },
                false => o,
            };
            ours.extend(own.into_iter().map(row));
        }
    }
    let (_, columns) = table.axes(args.scale);
    let mut section = Section::new(&table.label);
    section.text(table.about.trim());
    if let Some(cut) = table.cut(args.scale) {
        section.text(format!("Small scale: {cut} The paper's numbers are of its own size: a gap here says nothing about a fault."));
    }
    if !args.sets.is_empty() {
        section.text(format!("All runs were changed by: {}.", args.sets.join(", ")));
    }
    section.table(beside("", &columns, &ours, &table.printed_rows()?, true)?);
    section.text(if table.shows.is_some() { NOTE_MEASURED } else { NOTE });
    section.figures(curve::figures(&table.name, &table.title, &ours));
    if let Some(name) = &table.text {
        let mut said = Table::new("What the paper's text says", &["network", "method", "what", "value"]);
        in_text(name)?.into_iter().for_each(|row| said.push(row.map(Cell::text).to_vec()));
        section.table(said);
    }
    if !next.is_empty() {
        section.text("What is still to be done for the numbers of this table, run by run:");
        section.code(next.join("\n"));
    }
    let sets: String = args.sets.iter().map(|set| format!(" --set '{set}'")).collect();
    section.code(format!("mcl-eval table {} --scale {}{sets}", table.name, scale(args)));
    let finished = runs.len();
    let mut report = Report {
        title: format!("{}: {}", table.label, table.title),
        about: format!(
            "{finished} finished runs of the plan {}; made by mcl {}. Accuracies are in percent, differences in points.",
            plan.title,
            env!("CARGO_PKG_VERSION")
        ),
        found: found(&ours, &table.printed_rows()?, finished, plan.items(out)?.len()),
        sections: vec![],
    };
    let current: Vec<&Record> = records.iter().collect();
    let current = newest(&current)?;
    report.push(section);
    report.push(report::matching_numbers(&current));
    report.push(report::pictures(&current, common)?);
    report.push(report::cost(&runs)?);
    std::fs::create_dir_all(out).map_err(Error::io("cannot make", out))?;
    report.write(out)?;
    Ok(finished)
}
