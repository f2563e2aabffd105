//! Figures that measurements drew.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::thumbnails::{MOST, Thumbnails};
use crate::error::Result;
use crate::eval::record::Record;
use crate::report::map::Map;
use crate::report::{Cell, Figure, Section, Table};

/// The largest file that is taken into a page, in bytes; a map of 10,000 points has about one million.
const LARGEST: u64 = 32 << 20;

/// The file at `path`, if it lies in one of the folders that are reported on: a row is text that anybody may have written, and a report is
/// given to others. A picture that was cleaned away is no fault of the report.
fn inside(path: &Path, ending: &str, homes: &BTreeSet<PathBuf>) -> Option<String> {
    let real = path.canonicalize().ok()?;
    let named = real.extension().is_some_and(|e| e == ending);
    let small = fs::metadata(&real).is_ok_and(|m| m.is_file() && m.len() <= LARGEST);
    (homes.iter().any(|home| real.starts_with(home)) && named && small).then(|| fs::read_to_string(&real).ok())?
}

/// Figures other commands drew and recorded under `detail.figures`; of equal names the newest.
pub(super) fn section(records: &[&Record], images: &mut Thumbnails) -> Result<Section> {
    let mut section = Section::new("Maps and cohorts");
    let mut found: BTreeMap<String, Figure> = BTreeMap::new();
    let homes: BTreeSet<PathBuf> = records.iter().filter_map(|r| r.folder.canonicalize().ok()).collect();
    for r in records {
        for figure in r.detail["figures"].as_array().into_iter().flatten() {
            let (Some(path), Some(caption)) = (figure["svg"].as_str(), figure["caption"].as_str()) else { continue };
            if found.contains_key(path) {
                continue;
            }
            if let Some(svg) = inside(Path::new(path), "svg", &homes) {
                let name = Path::new(path).file_stem().unwrap_or_default().to_string_lossy().into_owned();
                let points = inside(&Path::new(path).with_extension("json"), "json", &homes);
                let map = points.and_then(|text| Map::read(&text)).map(|map| with_answers(map, r, records));
                let map = map.map(|map| with_pictures(map, r, images)).transpose()?;
                let beside = || inside(&Path::new(path).with_extension("csv"), "csv", &homes).and_then(|text| points_beside(&text));
                let numbers = map.as_ref().map(Map::table).or_else(beside);
                found.insert(path.to_string(), Figure { map, numbers, ..Figure::foreign(name, caption, svg) });
            }
        }
    }
    let (wide, small): (Vec<Figure>, Vec<Figure>) = found.into_values().partition(|f| f.is_wide() || f.map.is_some());
    for figure in wide {
        section.figures(vec![figure]);
    }
    section.figures(small);
    Ok(section)
}

/// The numbers that lie beside a picture as CSV, as they are written there; none where the text is no table.
fn points_beside(text: &str) -> Option<Table> {
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let mut table = Table::new("points", &reader.headers().ok()?.iter().collect::<Vec<_>>());
    for row in reader.records() {
        table.rows.push(row.ok()?.iter().map(Cell::text).collect());
    }
    Some(table)
}

/// What the networks of a map answered to its images, where one measurement has the answers of all of them: the newest one.
fn with_answers(map: Map, of: &Record, records: &[&Record]) -> Map {
    let answers = |r: &Record| -> Option<Vec<usize>> {
        let read = |key: &str| serde_json::from_value::<Vec<usize>>(r.detail[key].clone()).ok();
        let (classes, labels, predicted) = (r.detail["classes"].as_array()?, read("labels")?, read("predicted")?);
        let named = classes.len() == map.classes.len() && classes.iter().zip(&map.classes).all(|(a, b)| a.as_str() == Some(b));
        let same = named && map.images.iter().zip(&map.labels).all(|(i, l)| labels.get(*i) == Some(l));
        let answer = |i: &usize| predicted.get(*i).copied().filter(|a| *a < map.classes.len());
        same.then(|| map.images.iter().map(answer).collect::<Option<Vec<usize>>>())?
    };
    let how = |r: &Record| (r.command.clone(), r.protocol.clone(), r.variant.clone());
    for newest in records.iter().rev().filter(|r| r.dataset == of.dataset && r.peer.is_some()) {
        let of_panel = |name: &str| {
            let asked = |r: &&&Record| r.subject == name && r.dataset == of.dataset && how(r) == how(newest) && r.seed == newest.seed;
            records.iter().rev().find(asked).and_then(|r| answers(r))
        };
        if let Some(all) = map.panels.iter().map(|p| of_panel(&p.name)).collect::<Option<Vec<_>>>() {
            let by = [newest.command.as_str(), &newest.protocol, &newest.variant];
            let mut map = map;
            map.answered_by = by.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(", ");
            map.panels.iter_mut().zip(all).for_each(|(panel, answers)| panel.answers = answers);
            return map;
        }
    }
    map
}

fn with_pictures(map: Map, of: &Record, images: &mut Thumbnails) -> Result<Map> {
    if map.images.len() > MOST {
        return Ok(map);
    }
    let split = images.split(of, &map.classes, &map.images, &map.labels)?;
    let pictures = split.map(|split| images.jpeg(&split, &map.images)).transpose()?;
    Ok(Map { pictures, ..map })
}
