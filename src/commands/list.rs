//! What `mcl-train list` prints, straight from the registries and the folder of recipes.

use std::path::Path;

use crate::error::{Error, Result};
use crate::report::{Cell, Table};
use crate::{data, methods, nets};

/// Every architecture, with its size at the number of classes it is most used with.
pub fn archs() -> String {
    let mut table = Table::new("", &["name", "parameters", "multiply-adds", "stages", "feature", "images", "classes"]);
    for arch in nets::archs() {
        let classes = if arch.image_size == 32 { 100 } else { 1000 };
        let about = nets::describe(arch, classes);
        table.push(vec![
            Cell::text(about.name),
            Cell::Count(about.parameters),
            Cell::Count(about.macs),
            Cell::Count(about.stages as i64),
            Cell::Count(about.dim),
            Cell::text(format!("{0} x {0}", about.image_size)),
            Cell::Count(classes),
        ]);
    }
    table.plain()
}

/// Every method, with the paper it is from.
pub fn methods() -> String {
    let mut table = Table::new("", &["name", "paper", "presets", "needs and ships"]);
    for method in methods::METHODS {
        let presets = method.presets().collect::<Vec<_>>().join(", ");
        table.push([method.name, method.about, &presets, method.needs].map(Cell::text).to_vec());
    }
    table.plain()
}

/// Every dataset.
pub fn datasets() -> String {
    let mut table = Table::new("", &["name", "what it is"]);
    data::DATASETS.iter().for_each(|d| table.push(vec![Cell::text(d.name), Cell::text(d.about)]));
    table.plain()
}

/// The recipes below ./protocols/pretrain with the first line of their headers.
pub fn recipes() -> Result<String> {
    let folder = Path::new("protocols/pretrain");
    let entries = std::fs::read_dir(folder)
        .map_err(|e| Error::file(folder, format!("cannot be listed: {e}; recipes are found relative to the current folder")))?;
    let mut found = vec![];
    for entry in entries {
        let path = entry.map_err(Error::io("cannot list", folder))?.path();
        if path.extension().is_some_and(|e| e == "toml") {
            let text = std::fs::read_to_string(&path).map_err(Error::open(&path))?;
            found.push((path.display().to_string(), text.lines().next().unwrap_or_default().trim_start_matches("# ").to_string()));
        }
    }
    found.sort();
    let mut table = Table::new("", &["recipe", "what it is"]);
    found.into_iter().for_each(|(path, about)| table.push(vec![Cell::text(path), Cell::text(about)]));
    Ok(table.plain())
}
