//! What the runs cost.

use crate::report::{Cell, Section, Table};
use crate::run::Run;

/// Time, memory and machine of every run.
pub(super) fn section(runs: &[Run]) -> Section {
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
