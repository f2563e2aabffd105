//! Accuracy with few labelled images.

use crate::error::Result;
use crate::eval::record::Record;
use crate::report::colours::Palette;
use crate::report::plot::{Lines, Series};
use crate::report::{Figure, Section, table};

/// Accuracy against the number of labelled images, or the share of the training set.
pub(super) fn section(records: &[&Record]) -> Result<Section> {
    let mut section = Section::new("Few-shot");
    let mut figures = vec![];
    for (key, x) in [("shots=", "labelled images a class"), ("fraction=", "training images kept (%)")] {
        let own: Vec<&Record> = records.iter().copied().filter(|r| r.command == "few-shot" && number(r, key).is_some()).collect();
        for of_dataset in table::together(&own, |r| vec![r.dataset.clone()])? {
            figures.push(figure(&of_dataset, key, x)?);
        }
    }
    section.figures(figures);
    Ok(section)
}

/// Where a measurement stands on the lower axis.
fn number(r: &Record, key: &str) -> Option<f64> {
    let found = r.variant.split(' ').find_map(|part| part.strip_prefix(key)?.parse::<f64>().ok());
    found.map(|v| if key == "fraction=" { 100.0 * v } else { v })
}

/// The measurements of one dataset.
fn figure(records: &[&Record], key: &str, x: &str) -> Result<Figure> {
    let of_parts = key == "fraction=";
    // Several networks of a run share a line.
    let name = |r: &Record| if of_parts { format!("{} {}", r.method, r.arch) } else { r.subject.clone() };
    let at = |r: &Record| number(r, key).unwrap_or(f64::NAN);
    let mean = |records: &[&Record], of: &dyn Fn(&Record) -> f64| records.iter().map(|r| of(r)).sum::<f64>() / records.len() as f64;
    let mut sorted = records.to_vec();
    sorted.sort_by(|a, b| name(a).cmp(&name(b)).then(at(a).total_cmp(&at(b))));
    let mut series = vec![];
    for line in table::together(&sorted, |r| vec![name(r)])? {
        let mut own = Series { name: name(line[0]), ..Series::default() };
        for point in table::together(&line, |r| vec![at(r).to_string()])? {
            own.points.push((at(point[0]), mean(&point, &|r| r.value)));
            own.band.push((mean(&point, &|r| r.ci_low.unwrap_or(r.value)), mean(&point, &|r| r.ci_high.unwrap_or(r.value))));
        }
        series.push(own);
    }
    let dataset = &records[0].dataset;
    let title = format!("Few-shot on {dataset}");
    let method = |line: &Series| records.iter().find(|r| name(r) == line.name).map_or(String::new(), |r| r.method.clone());
    let palette = Palette::by_method(series.iter().map(|line| (line.name.clone(), method(line))));
    let (caption, band) = if of_parts {
        ("Mean over networks.", "mean of their 95 % intervals over test images")
    } else {
        ("Mean over draws of the labelled images.", "95 % interval over draws")
    };
    let lines = Lines { title: &title, x, y: "top-1 (%)", series: &series, palette: &palette, band };
    Ok(lines.figure(format!("few-shot-{}-{dataset}", key.trim_end_matches('=')), caption))
}
