//! What the runs cost.

use crate::error::{Error, Result};
use crate::experiment::extras;
use crate::methods;
use crate::recipe::Recipe;
use crate::report::{Cell, Section, Table};
use crate::run::Run;

/// Time, memory and machine of every run.
pub(super) fn section(runs: &[Run]) -> Result<Section> {
    let mut section = Section::new("Cost");
    let mut shown = Table::new(
        "",
        &[
            "run",
            "step (s)",
            "meta step (s)",
            "speed (images/s)",
            "peak memory (MB)",
            "method",
            "networks",
            "device",
            "threads",
            "processor",
        ],
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
            mean("seconds.step"),
            mean("seconds.meta_step"),
            speed,
            run.last("peak_mb").map_or(Cell::Empty, |v| Cell::Count(v as i64)),
            Cell::text(run.method()),
            Cell::text(run.archs().join(", ")),
            Cell::text(of("device")),
            Cell::text(of("threads")),
            Cell::text(of("cpu")),
        ]);
    }
    section.table(shown.without_empty_columns());
    let (added, left_out) = added(runs)?;
    if !added.rows.is_empty() {
        section.table(added);
        section.text("In training all networks of a run are counted together, with the usual number of classes; runs that are alike in this stand once. Multiply-adds are of one image, forward; a part whose maps only the method knows has none. Nothing but the networks ships.");
    }
    for line in left_out {
        section.text(line);
    }
    Ok(section)
}

/// What each method adds to its networks, once for each method, its options and networks; and a line for every run where it cannot be counted.
fn added(runs: &[Run]) -> Result<(Table, Vec<String>)> {
    let mut shown = Table::new(
        "In training",
        &["run", "method", "networks", "part", "million parameters", "million multiply-adds", "% of the networks'"],
    );
    let (mut known, mut left_out): (Vec<Vec<Vec<Cell>>>, Vec<String>) = (vec![], vec![]);
    for run in runs {
        let path = run.folder.recipe();
        let text = std::fs::read_to_string(&path).map_err(Error::open(&path))?;
        let recipe = Recipe::parse(&text, &path.display().to_string(), &[], &methods::names())?;
        // Counted with other classes than the run's, a method may refuse its own options: no reason for no report.
        let parts = match extras::parts(&recipe) {
            Ok(parts) => parts,
            Err(e) => {
                left_out.push(format!("What {} adds in training is not counted: {}.", run.name, e.line()));
                continue;
            }
        };
        let of_networks = parts[0].macs.unwrap_or(0) as f64;
        let million = |count: i64| Cell::Score(count as f64 / 1e6, 2);
        let rows = parts.iter().map(|part| {
            vec![
                Cell::text(run.method()),
                Cell::text(run.archs().join(", ")),
                Cell::text(&part.name),
                million(part.parameters),
                part.macs.map_or(Cell::Empty, million),
                part.macs.map_or(Cell::Empty, |macs| Cell::Score(100.0 * macs as f64 / of_networks.max(1.0), 2)),
            ]
        });
        let rows: Vec<Vec<Cell>> = rows.collect();
        if !known.contains(&rows) {
            rows.iter().for_each(|row| shown.push([&[Cell::text(&run.name)], &row[..]].concat()));
            known.push(rows);
        }
    }
    Ok((shown, left_out))
}
