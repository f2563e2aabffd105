//! How measurements that train something, once a seed, are told: a line when a seed is done, a table, and the mean over seeds.

use super::probe::chosen_in_words;
use super::record::{self, Record};
use super::{Common, stats};
use crate::error::Result;
use crate::report::{Cell, Table, table};

/// A seed is done.
pub(crate) fn say(r: &Record, common: &Common) {
    common.say(format!(
        "{}: seed {}: {}top-1 {:.2} ({}), top-5 {:.2}, {:.1} s",
        r.subject,
        r.seed.unwrap_or_default(),
        chosen_in_words(&r.detail["chosen"]).map_or(String::new(), |chosen| format!("{chosen}, ")),
        r.value,
        r.interval().shown(),
        r.top5.unwrap_or(f64::NAN),
        r.seconds
    ));
}

/// All of them: as JSON, or as a table under `heading`. The seeds are those of a `what`.
pub(crate) fn show(records: &[Record], heading: &str, what: &str, common: &Common) -> Result<()> {
    if common.json {
        common.print_json(&record::json(records, common));
        return Ok(());
    }
    println!("{heading}");
    print!("{}", tabulate(records).plain());
    over_seeds(records, what)?.iter().for_each(|line| println!("{line}"));
    Ok(())
}

/// One row a seed.
fn tabulate(records: &[Record]) -> Table {
    let mut shown = Table::new("", &["network", "method", "seed", "top-1", "95 % over images", "top-5", "trained with"]);
    for r in records {
        shown.push(vec![
            Cell::text(&r.subject),
            Cell::text(&r.method),
            r.seed.map_or(Cell::Empty, |seed| Cell::text(seed.to_string())),
            Cell::Score(r.value, 2),
            r.interval(),
            Cell::score(r.top5),
            chosen_in_words(&r.detail["chosen"]).map_or(Cell::Empty, Cell::text),
        ]);
    }
    shown
}

/// For networks that were measured with several seeds: the mean, and how much of it is the measurement's own chance.
fn over_seeds(records: &[Record], what: &str) -> Result<Vec<String>> {
    let all: Vec<&Record> = records.iter().collect();
    let mut lines = vec![];
    for own in table::together(&all, |r| vec![r.subject.clone()])? {
        if let (mean, Some(half)) = stats::mean_interval(&own.iter().map(|r| r.value).collect::<Vec<_>>()) {
            lines.push(format!(
                "{}: mean of {} {what} seeds {mean:.2}, 95 % interval over {what} seeds {:.2} to {:.2} (Student's t); the network is one draw",
                own[0].subject,
                own.len(),
                mean - half,
                mean + half
            ));
        }
    }
    Ok(lines)
}
