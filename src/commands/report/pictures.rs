//! Figures that measurements drew.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::eval::record::Record;
use crate::report::{Figure, Section};

/// Figures other commands drew and recorded under `detail.figures`; of equal names the newest.
pub(super) fn section(records: &[&Record]) -> Section {
    let mut section = Section::new("Maps and cohorts");
    let mut found: BTreeMap<String, Figure> = BTreeMap::new();
    for r in records {
        for figure in r.detail["figures"].as_array().into_iter().flatten() {
            let (Some(path), Some(caption)) = (figure["svg"].as_str(), figure["caption"].as_str()) else { continue };
            // A picture that was cleaned away is no fault of the report.
            if let Ok(svg) = fs::read_to_string(path) {
                let name = Path::new(path).file_stem().unwrap_or_default().to_string_lossy().into_owned();
                found.insert(path.to_string(), Figure::new(name, caption, svg));
            }
        }
    }
    let (wide, small): (Vec<Figure>, Vec<Figure>) = found.into_values().partition(Figure::is_wide);
    for figure in wide {
        section.figures(vec![figure]);
    }
    section.figures(small);
    section
}
