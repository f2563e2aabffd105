//! What a map leaves: picture, points for reports and other tools, and on request the features for TensorBoard's projector.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde_json::json;
use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::eval::Common;
use crate::eval::record::{self, Record};
use crate::files;
use crate::report::map::Map;
use crate::report::plot::file_stem;
use crate::report::{Figure, Table};

/// SVG, PNG, the points as CSV for other tools and as JSON for reports, in this order.
pub(super) fn write(folder: &Path, figure: &Figure, map: &Map) -> Result<Vec<PathBuf>> {
    write_all(folder, figure, &[("csv", map.table().csv()?), ("json", map.file())])
}

/// SVG and PNG of a figure, and what else is known of it, by the endings of its files. Returns where they are, in this order.
pub(super) fn write_all(folder: &Path, figure: &Figure, more: &[(&str, String)]) -> Result<Vec<PathBuf>> {
    std::fs::create_dir_all(folder).map_err(Error::io("cannot make", folder))?;
    let path = |ending: &str| folder.join(format!("{}.{ending}", figure.name));
    files::write(&path("svg"), figure.file().as_bytes())?;
    files::write(&path("png"), &figure.png(2.0)?)?;
    for (ending, text) in more {
        files::write(&path(ending), text.as_bytes())?;
    }
    ["svg", "png"].into_iter().chain(more.iter().map(|(ending, _)| *ending)).map(|ending| full(&path(ending))).collect()
}

/// Keeps the rows of a map, with its picture, and shows them and where its files are.
pub(super) fn finish(mut records: Vec<Record>, figure: &Figure, written: &[PathBuf], shown: &Table, common: &Common) -> Result<()> {
    for record in &mut records {
        record.detail = json!({ "figures": [{ "svg": written[0], "caption": figure.caption }] });
    }
    record::keep(&records, common)?;
    if common.json {
        let mut json = record::json(&records, common);
        json["files"] = json!(written);
        common.print_json(&json);
    } else {
        print!("{}", shown.plain());
        written.iter().for_each(|path| println!("{}", path.display()));
    }
    Ok(())
}

fn full(path: &Path) -> Result<PathBuf> {
    path.canonicalize().map_err(Error::io("cannot find", path))
}

/// A folder that `tensorboard --logdir` shows in its projector: the features of every network, and what each image is.
pub(super) fn projector(folder: &Path, name: &str, map: &Map, sets: &[Tensor]) -> Result<PathBuf> {
    let home = folder.join(format!("{name}-projector"));
    std::fs::create_dir_all(&home).map_err(Error::io("cannot make", &home))?;
    // A tab or a line end would begin another cell.
    let plain = |text: &str| text.replace(['\t', '\n', '\r'], " ");
    let answers: String = map.panels.iter().map(|p| format!("\t{} answer", plain(&p.name))).collect();
    let mut rows = format!("class\timage{answers}\n");
    for (i, (image, label)) in map.images.iter().zip(&map.labels).enumerate() {
        let answers: String = map.panels.iter().map(|p| format!("\t{}", plain(&map.classes[p.answers[i]]))).collect();
        let _ = writeln!(rows, "{}\t{image}{answers}", plain(&map.classes[*label]));
    }
    files::write(&home.join("metadata.tsv"), rows.as_bytes())?;
    let mut config = String::new();
    for (panel, x) in map.panels.iter().zip(sets) {
        let file = format!("{}.tsv", file_stem(&panel.name));
        let flat = Vec::<f32>::try_from(x.to_kind(Kind::Float).contiguous().view(-1)).expect("a vector of floats");
        let line = |row: &[f32]| row.iter().map(f32::to_string).collect::<Vec<_>>().join("\t") + "\n";
        let vectors: String = flat.chunks_exact(x.size()[1] as usize).map(line).collect();
        files::write(&home.join(&file), vectors.as_bytes())?;
        let quoted = serde_json::to_string(&panel.name).expect("a text serialises");
        let _ =
            writeln!(config, "embeddings {{\n  tensor_name: {quoted}\n  tensor_path: \"{file}\"\n  metadata_path: \"metadata.tsv\"\n}}");
    }
    // The plugin looks for this name.
    files::write(&home.join("projector_config.pbtxt"), config.as_bytes())?;
    full(&home)
}
