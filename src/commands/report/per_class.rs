//! Which classes are known, and what the others are taken for.

use crate::error::Result;
use crate::eval::record::Record;
use crate::report::plot::Heat;
use crate::report::{Cell, Figure, Section, Table, table};

/// The newest probe of each dataset in full.
pub(super) fn section(records: &[&Record]) -> Result<Section> {
    let mut section = Section::new("Per class");
    let mut own: Vec<&Record> = records.iter().copied().filter(|r| r.detail["confusion"].is_array()).collect();
    own.sort_by(|a, b| a.dataset.cmp(&b.dataset));
    for of_dataset in table::together(&own, |r| vec![r.dataset.clone()])? {
        let r = of_dataset[of_dataset.len() - 1];
        let dataset = &r.dataset;
        let names: Vec<String> = serde_json::from_value(r.detail["classes"].clone()).unwrap_or_default();
        let counts: Vec<Vec<f64>> = serde_json::from_value(r.detail["confusion"].clone()).unwrap_or_default();
        let share = |row: &Vec<f64>| {
            let all: f64 = row.iter().sum();
            row.iter().map(|c| if all > 0.0 { 100.0 * c / all } else { f64::NAN }).collect::<Vec<f64>>()
        };
        let values: Vec<Vec<f64>> = counts.iter().map(share).collect();
        let how = if r.protocol.is_empty() { r.command.clone() } else { format!("{}, {}", r.command, r.protocol) };
        let title = format!("{dataset}: {} ({how})", r.subject);
        let heat = Heat {
            title: &title,
            x: "predicted",
            y: "true",
            columns: &names,
            rows: &names,
            values: &values,
            limits: Some((0.0, 100.0)),
            decimals: 0,
        };
        section.figures(vec![Figure::new(format!("confusion-{dataset}"), "Confusion matrix, percent of each true class", heat.draw())]);
        let mut shown = Table::new(format!("{dataset}: accuracy by class"), &["class", "top-1", "images", "most often taken for"]);
        for (c, row) in counts.iter().enumerate() {
            let wrong = (0..row.len()).filter(|&k| k != c && row[k] > 0.0).max_by(|&a, &b| row[a].total_cmp(&row[b]));
            let wrong =
                wrong.map_or(Cell::Empty, |k| Cell::text(format!("{} ({:.0} %)", names.get(k).map_or("", String::as_str), values[c][k])));
            shown.push(vec![
                Cell::text(names.get(c).cloned().unwrap_or_default()),
                Cell::score(values[c].get(c).copied()),
                Cell::Count(row.iter().sum::<f64>() as i64),
                wrong,
            ]);
        }
        section.table(shown);
    }
    Ok(section)
}
