//! How the runs came out.

use crate::report::{Cell, Section, Table};
use crate::run::{FOUR_WAYS, FOUR_WAYS_NOTE, Run};

/// Test accuracy of every network, told four ways.
pub(super) fn section(runs: &[Run]) -> Section {
    let mut section = Section::new("Pre-training");
    let ways = FOUR_WAYS.map(|way| format!("{way} (%)"));
    let ways: Vec<&str> = ways.iter().map(String::as_str).collect();
    let columns = [&["network"], &ways[..], &["ensemble (%)", "run", "method", "dataset", "epochs", "seed"]].concat();
    let mut shown = Table::new("Test accuracy", &columns);
    for run in runs {
        for (m, arch) in run.archs().iter().enumerate() {
            let name = if runs.len() > 1 { format!("{}, {m}: {arch}", run.name) } else { format!("{m}: {arch}") };
            let mut row = vec![Cell::text(name)];
            row.extend(run.accuracy(m).map_or(vec![Cell::Empty; 4], |a| a.cells().to_vec()));
            row.extend([
                Cell::score(run.last("test.ensemble.top1")),
                Cell::text(&run.name),
                Cell::text(run.method()),
                Cell::text(run.dataset()),
                Cell::Count(run.metrics.len() as i64),
                Cell::text(run.setting("train", "seed")),
            ]);
            shown.push(row);
        }
    }
    section.table(shown.without_empty_columns());
    if !runs.is_empty() {
        section.text(FOUR_WAYS_NOTE);
    }
    let chosen = chosen_stages(runs);
    if !chosen.rows.is_empty() {
        section.table(chosen);
        section.text("Held-out images may choose among a network's stages as honestly as among its epochs (train.choose = \"any\"). A stage of a CIFAR network has the network's own architecture and ships as a network of its own; `--stage L` measures it.");
    }
    section
}

/// What held-out images would choose among all stages of a network, beside what they choose of its own classifier.
fn chosen_stages(runs: &[Run]) -> Table {
    let mut shown = Table::new(
        "Stages chosen on held-out images",
        &["run", "network", "own classifier (%)", "any stage (%)", "stage", "epoch", "gain (points)"],
    );
    for run in runs {
        for (m, arch) in run.archs().iter().enumerate() {
            let own = run.accuracy(m).and_then(|a| a.by_holdout);
            let (Some((own, _)), Some(any)) = (own, run.stage_choice(m)) else { continue };
            shown.push(vec![
                Cell::text(&run.name),
                Cell::text(format!("{m}: {arch}")),
                Cell::Score(own, 2),
                Cell::Score(any.test, 2),
                Cell::Count(any.stage as i64),
                Cell::Count(any.epoch as i64),
                Cell::Score(any.test - own, 2),
            ]);
        }
    }
    shown
}
