//! Disks that fail, and what a run must have left in spite of them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// Two ResNet-8 on 64 images of 8 pixels: four steps an epoch, a save after each.
pub const TINY: &str = r#"
[data]
name = "synthetic"
per_class = 3
holdout = 1
image_size = 8
[cohort]
archs = ["resnet8", "resnet8"]
[train]
batch = 16
epochs = 2
lr = 0.05
[method]
name = "dml"
[save]
every_minutes = 0.00001
"#;

/// `shim.c`, compiled into `folder`: what LD_PRELOAD names.
pub fn shim(folder: &Path) -> PathBuf {
    let library = folder.join("shim.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support/shim.c");
    let built = Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(source).arg("-ldl").output().unwrap();
    assert!(built.status.success(), "{}", super::text(&built));
    library
}

/// What is said twice in a folder of runs, and must be the same to the bit: every tensor, row and result, without what the clock says.
pub fn content(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    gather(folder, folder, &mut found);
    assert!(!found.is_empty(), "nothing in {}", folder.display());
    found
}

fn gather(root: &Path, folder: &Path, found: &mut BTreeMap<String, Vec<u8>>) {
    for path in fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()) {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let key = path.strip_prefix(root).unwrap().display().to_string();
        assert!(!name.ends_with(".tmp") && !name.ends_with(".replaced"), "litter: {key}");
        if path.is_symlink() {
            continue; // `latest` is whichever began last
        }
        if name == "checkpoints" {
            let last = path.join("last");
            found.insert(format!("{key}/state"), fs::read(last.join("state.safetensors")).unwrap());
            let mut manifest: Value = serde_json::from_str(&fs::read_to_string(last.join("manifest.json")).unwrap()).unwrap();
            strip(&mut manifest);
            // The recipe may say another cadence of saves; the checksum is over what was taken out.
            manifest.as_object_mut().unwrap().retain(|k, _| ["progress", "splits", "format"].contains(&k.as_str()));
            found.insert(format!("{key}/manifest"), manifest.to_string().into_bytes());
        } else if path.is_dir() {
            gather(root, &path, found);
        } else if name == "metrics.jsonl" || name == "results.jsonl" {
            let mut rows = vec![];
            for line in fs::read_to_string(&path).unwrap().lines() {
                let mut row: Value = serde_json::from_str(line).unwrap();
                strip(&mut row);
                rows.push(format!("{row}\n"));
            }
            // Killed after its row and before it was known to be done, a measurement is made again: the same row twice.
            rows.dedup();
            found.insert(key, rows.concat().into_bytes());
        } else if name.starts_with("peer-") || name == "predictions.safetensors" {
            found.insert(key, tensors(&path));
        }
    }
}

/// Names and bytes of the tensors; what a network's file says about itself names the run folder.
fn tensors(path: &Path) -> Vec<u8> {
    let bytes = fs::read(path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut about: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    about.as_object_mut().unwrap().remove("__metadata__");
    [about.to_string().as_bytes(), &bytes[8 + header..]].concat()
}

/// Takes out what depends on the clock or on the place.
fn strip(value: &mut Value) {
    const OF_THE_CLOCK: [&str; 8] = ["images_per_second", "peak_mb", "time", "argv", "run", "weights", "subject", "commit"];
    match value {
        Value::Object(map) => {
            map.retain(|key, _| !key.starts_with("seconds") && !OF_THE_CLOCK.contains(&key.as_str()));
            map.values_mut().for_each(strip);
        }
        Value::Array(items) => items.iter_mut().for_each(strip),
        _ => {}
    }
}

/// In how many bits two folders differ; what is in one alone counts whole.
pub fn bits_of_difference(a: &Path, b: &Path) -> usize {
    let (a, b) = (content(a), content(b));
    let mut bits = 0;
    for name in a.keys().chain(b.keys().filter(|name| !a.contains_key(*name))) {
        let empty = vec![];
        let (x, y) = (a.get(name).unwrap_or(&empty), b.get(name).unwrap_or(&empty));
        bits += 8 * x.len().abs_diff(y.len()) + x.iter().zip(y).map(|(x, y)| (x ^ y).count_ones() as usize).sum::<usize>();
    }
    bits
}

/// Copies a folder with its links as they are.
pub fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-a").arg(from).arg(to).output().unwrap();
    assert!(copied.status.success(), "{}", super::text(&copied));
}
