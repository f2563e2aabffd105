//! What `mcl-eval` measured.

use crate::error::Result;
use crate::eval::record::Record;
use crate::eval::rows::protocol_of;
use crate::report::{Cell, Section, Table, table};

/// Everything measured by `mcl-eval`, seeds grouped.
pub(super) fn section(records: &[&Record]) -> Result<Section> {
    let mut section = Section::new("Transfer and evaluation");
    // Rows of one key differ in their seed alone.
    let key = |r: &Record| {
        let what = [r.dataset.clone(), r.subject.clone(), protocol_of(r), r.variant.clone(), r.metric.clone()];
        [what.to_vec(), vec![r.run.clone(), r.weights_hash.clone(), r.image_size.to_string()]].concat()
    };
    for own in table::together(records, |r| vec![r.command.clone()])? {
        let mut shown = Table::new(
            &own[0].command,
            &["dataset", "network", "variant", "metric", "value", "95 % interval", "top-5", "images", "method", "protocol", "notes"],
        );
        for seeds in table::together(&own, key)? {
            let r = seeds[seeds.len() - 1];
            let replaced =
                own.iter().rev().find(|o| (&o.subject, &o.run) == (&r.subject, &r.run)).is_some_and(|o| o.weights_hash != r.weights_hash);
            let notes = r.warnings.iter().cloned().chain(replaced.then(|| "of weights that were replaced since".to_string()));
            let interval = r.ci_low.zip(r.ci_high).map_or(Cell::Empty, |(low, high)| Cell::text(format!("{low:.2} to {high:.2}")));
            shown.push(vec![
                Cell::text(&r.dataset),
                Cell::text(&r.subject),
                Cell::text(&r.variant),
                Cell::text(&r.metric),
                table::spread(&seeds.iter().map(|r| r.value).collect::<Vec<_>>()),
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
