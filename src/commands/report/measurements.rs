//! What `mcl-eval` measured.

use crate::error::Result;
use crate::eval::probe::chosen_in_words;
use crate::eval::record::Record;
use crate::eval::rows::protocol_of;
use crate::report::{Cell, Section, Table, table};

/// What the probes of all seeds were trained with; each choice once.
fn trained_with(seeds: &[&Record]) -> Cell {
    let mut all: Vec<String> = seeds.iter().filter_map(|r| chosen_in_words(&r.detail["chosen"])).collect();
    all.dedup();
    Cell::text(all.join(", "))
}

/// A metric with its unit; one that is not known here keeps its name.
pub(super) fn in_words(metric: &str) -> String {
    let known = match metric {
        "top1" => "top-1 (%)",
        "difference" => "difference (points)",
        "ensemble_gain" => "ensemble over best network (points)",
        "agreement" => "same answer (%)",
        "linear_cka" => "linear CKA (0 to 1)",
        "kl" => "KL divergence (nats)",
        "neighbours_kept" => "neighbours kept (%)",
        "across_in_class" => "nearest of another network in class (%)",
        "box_map" => "box mAP (%)",
        "mask_map" => "mask mAP (%)",
        other => other,
    };
    known.to_string()
}

/// Everything measured by `mcl-eval`, seeds grouped.
pub(super) fn section(records: &[&Record]) -> Result<Section> {
    let mut section = Section::new("Transfer and evaluation");
    // Rows of one key differ in their seed alone.
    let key = |r: &Record| {
        let what = [r.dataset.clone(), r.subject.clone(), protocol_of(r), r.variant.clone(), r.metric.clone()];
        [what.to_vec(), vec![r.run.clone(), r.weights_hash.clone(), r.image_size.to_string()]].concat()
    };
    // Weights between layers and maps have a table of their own, with the decimals they need.
    let records: Vec<&Record> = records.iter().copied().filter(|r| !super::MATCHING.contains(&r.command.as_str())).collect();
    for own in table::together(&records, |r| vec![r.command.clone()])? {
        // One metric stands in the head, several in a column.
        let metric = in_words(&own[0].metric);
        let alike = own.iter().all(|r| r.metric == own[0].metric);
        let value = if alike { metric.as_str() } else { "value" };
        let mut shown = Table::new(
            &own[0].command,
            &[
                "network",
                value,
                "95 % interval",
                "metric",
                "dataset",
                "variant",
                "top-5 (%)",
                "test images",
                "trained with",
                "method",
                "protocol",
                "notes",
            ],
        );
        for seeds in table::together(&own, key)? {
            let r = seeds[seeds.len() - 1];
            let replaced =
                own.iter().rev().find(|o| (&o.subject, &o.run) == (&r.subject, &r.run)).is_some_and(|o| o.weights_hash != r.weights_hash);
            let notes = r.warnings.iter().cloned().chain(replaced.then(|| "of weights that were replaced since".to_string()));
            let interval = r.ci_low.zip(r.ci_high).map_or(Cell::Empty, |(low, high)| Cell::text(format!("{low:.2} to {high:.2}")));
            shown.push(vec![
                Cell::text(&r.subject),
                table::spread(&seeds.iter().map(|r| r.value).collect::<Vec<_>>()),
                interval,
                if alike { Cell::Empty } else { Cell::text(in_words(&r.metric)) },
                Cell::text(&r.dataset),
                Cell::text(&r.variant),
                Cell::score(r.top5),
                Cell::Count(r.n_test as i64),
                trained_with(&seeds),
                Cell::text(&r.method),
                Cell::text(protocol_of(r)),
                Cell::text(notes.collect::<Vec<_>>().join("; ")),
            ]);
        }
        section.table(shown.without_empty_columns());
    }
    if !section.parts.is_empty() {
        section.text("± is the standard deviation over seeds of one network: of its probe, or of its fine-tuning, which draws other images with each. The 95 % interval is over test images (bootstrap, of the last seed), for few-shot over draws of the labelled images (Student's t). Neither says how another training run would come out.");
    }
    Ok(section)
}
