//! Our numbers beside the paper's: runs that agree with a row in everything the paper fixes, and apart from them the others, with what
//! differs.

use crate::commands::beside::{NOTE, Ours, beside, of_records, of_run};
use crate::data;
use crate::error::Result;
use crate::eval::record::Record;
use crate::eval::rows::protocol_of;
use crate::experiment::paper::{Beside, Paper, Place};
use crate::experiment::table;
use crate::report::{Cell, Section, Table};
use crate::run::Run;

/// Differences that are told of a run; more are counted.
const TOLD: usize = 4;

/// A table for each of the paper's that a run belongs to, and a list of the others.
pub(super) fn section(runs: &[Run], records: &[&Record]) -> Result<Section> {
    let mut section = Section::new("Beside the paper");
    let paper = Paper::read()?;
    let mut others = Table::new("Other runs", &["run", "method", "networks", "nearest row of the paper", "what differs"]);
    // Our numbers by the plan of their table.
    let mut found: Vec<(&'static str, Ours)> = vec![];
    for run in runs {
        let name = |place: &Place| format!("{}: {}, {}", place.plan, place.row, place.column);
        match paper.beside(run)? {
            Beside::Cells(places) => {
                for place in places {
                    found.extend(of_cell(run, &place, records)?.into_iter().map(|ours| (place.plan, ours)));
                }
            }
            Beside::Other(place, differs) => {
                let more = differs.len().saturating_sub(TOLD);
                let mut told = differs[..differs.len().min(TOLD)].join("; ");
                if more > 0 {
                    told += &format!("; and {more} more");
                }
                let networks = run.archs().join(", ");
                others.push([&run.name, run.method(), &networks, &name(&place), &told].map(Cell::text).to_vec());
            }
            Beside::Nowhere => {}
        }
    }
    for plan in table::PLANS.iter().map(|shipped| shipped.name) {
        let own: Vec<Ours> = found.iter().filter(|(of, _)| *of == plan).map(|(_, ours)| ours.clone()).collect();
        if own.is_empty() {
            continue;
        }
        let plan = table::find(plan)?;
        // Only what was run: a row of empty columns tells nothing.
        let columns: Vec<&str> = plan.axes(table::Scale::Paper).1.into_iter().filter(|c| own.iter().any(|o| o.column == *c)).collect();
        section.table(beside(&format!("{}: {}", plan.label, plan.title), &columns, &own, &plan.printed_rows()?, false)?);
    }
    if !section.parts.is_empty() {
        section.text(NOTE);
    }
    if !others.rows.is_empty() {
        section.table(others);
        section.text(
            "These runs have networks, data and method of the paper, but not all of its settings: their numbers are not set beside its.",
        );
    }
    Ok(section)
}

/// What a run gives to one cell: its test accuracy, or what was measured of its networks where the table is about transfer.
fn of_cell(run: &Run, place: &Place, records: &[&Record]) -> Result<Vec<Ours>> {
    let of_run_alone = |r: &&&Record| std::path::Path::new(&r.run).canonicalize().ok() == run.folder.path().canonicalize().ok();
    let whole = |r: &Record| {
        data::find(&r.dataset).is_ok_and(|spec| spec.images.is_none_or(|(train, test)| (train, test) == (r.n_train, r.n_test)))
    };
    Ok(match place.plan {
        // The paper's probe with none of its keys changed, on the whole of the dataset.
        "transfer-linear" => {
            let asked = |r: &&&Record| r.command == "linear-probe" && protocol_of(r) == "paper" && whole(r);
            of_records(records.iter().filter(of_run_alone).filter(asked).copied(), &place.column)
        }
        "transfer-coco" => {
            let asked = |r: &&&Record| r.command == "detect" && r.dataset == "coco" && r.variant.is_empty();
            of_records(records.iter().filter(of_run_alone).filter(asked).copied(), &place.column)
        }
        _ => of_run(run, &place.column)?,
    })
}
