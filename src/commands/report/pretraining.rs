//! How the runs came out.

use crate::report::{Cell, Section, Table};
use crate::run::{FOUR_WAYS, FOUR_WAYS_NOTE, Run};

/// Test accuracy of every network, told four ways.
pub(super) fn section(runs: &[Run]) -> Section {
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
