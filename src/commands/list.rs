//! What `mcl-train list` prints, straight from the registries.

use std::path::Path;

use crate::error::{Error, Result};
use crate::{data, methods, nets};

/// Text columns, each as wide as its widest cell.
pub fn columns(rows: &[Vec<String>]) -> String {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> =
        (0..count).map(|c| rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0)).collect();
    let line = |row: &Vec<String>| {
        row.iter().zip(&widths).map(|(cell, &w)| format!("{cell:<w$}")).collect::<Vec<_>>().join("  ").trim_end().to_string() + "\n"
    };
    rows.iter().map(line).collect()
}

fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let header = header.iter().map(|s| s.to_string()).collect();
    columns(&std::iter::once(header).chain(rows).collect::<Vec<_>>())
}

pub fn archs() -> String {
    let row = |arch: &'static nets::Arch| {
        let classes = if arch.image_size == 32 { 100 } else { 1000 };
        let d = nets::describe(arch, classes);
        vec![
            d.name.into(),
            d.parameters.to_string(),
            d.macs.to_string(),
            d.stages.to_string(),
            d.dim.to_string(),
            format!("{0} x {0}", d.image_size),
            classes.to_string(),
        ]
    };
    table(&["name", "parameters", "multiply-adds", "stages", "feature", "images", "classes"], nets::archs().map(row))
}

pub fn methods() -> String {
    let row = |m: &methods::MethodSpec| {
        let presets: Vec<&str> = m.presets().collect();
        vec![m.name.into(), m.about.into(), presets.join(", "), m.needs.into()]
    };
    table(&["name", "paper", "presets", "needs and ships"], methods::METHODS.iter().map(row))
}

pub fn datasets() -> String {
    table(&["name", "what it is"], data::DATASETS.iter().map(|d| vec![d.name.into(), d.about.into()]))
}

/// The recipes below ./protocols/pretrain with the first line of their headers.
pub fn protocols() -> Result<String> {
    let folder = Path::new("protocols/pretrain");
    let entries = std::fs::read_dir(folder)
        .map_err(|e| Error::file(folder, format!("cannot be listed: {e}; recipes are found relative to the current folder")))?;
    let mut rows = vec![];
    for entry in entries {
        let path = entry.map_err(Error::io("cannot list", folder))?.path();
        if path.extension().is_some_and(|e| e == "toml") {
            let text = std::fs::read_to_string(&path).map_err(Error::open(&path))?;
            rows.push(vec![path.display().to_string(), text.lines().next().unwrap_or_default().trim_start_matches("# ").to_string()]);
        }
    }
    rows.sort();
    Ok(table(&["recipe", "what it is"], rows))
}
