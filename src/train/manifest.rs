//! The manifest of a checkpoint: the recipe, where the run stands, and a checksum for every other file. It ends in a checksum of itself,
//! so that no byte of it can change unnoticed.
//!
//! A manifest says which `format` it has. A change that a reader of `FORMAT` would misunderstand counts it up, and `read` goes on reading
//! every format there ever was; keys that are only added have defaults instead. Format 1 had no checksum of itself: what it says is held
//! against itself, as far as it says things twice.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::files;
use crate::run::{Best, CheckpointFolder, Row};
use crate::train::metrics::MeterState;

/// The format of manifests written now.
pub const FORMAT: u32 = 2;

/// What stands between the content of a manifest and the checksum of that content.
const SEAL: &str = ",\n  \"sha256\": \"";
/// What stands after the checksum.
const END: &str = "\"\n}\n";

/// Where a run stands: everything but the tensors.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Progress {
    /// Optimizer steps taken.
    pub step: usize,
    /// The epoch the next step belongs to, from 0.
    pub epoch: usize,
    /// The next step within its epoch, from 0.
    pub batch: usize,
    /// One row for each finished epoch.
    pub rows: Vec<Row>,
    /// Sums of the epoch under way.
    pub meter: MeterState,
    /// Sums since the last row inside an epoch; none where no such rows are asked for.
    #[serde(default, skip_serializing_if = "MeterState::is_empty")]
    pub window: MeterState,
    /// Seconds of training so far, over all sittings.
    pub seconds: f64,
    /// What the held-out images chose so far.
    pub best: Option<Best>,
}

/// Which images a run uses: names and hashes of their places in the dataset, and of their classes.
pub type Splits = BTreeMap<String, String>;

/// What a checkpoint says of itself.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Of the manifest.
    pub format: u32,
    /// The text of the recipe.
    pub recipe: String,
    /// Its hash.
    pub recipe_hash: String,
    /// None in format 1.
    #[serde(default)]
    pub splits: Splits,
    /// Where the run stood.
    pub progress: Progress,
    /// Every other file of the checkpoint.
    pub files: BTreeMap<String, FileEntry>,
}

/// A file of a checkpoint.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Its length.
    pub bytes: u64,
    /// Of its content.
    pub sha256: String,
}

impl FileEntry {
    /// Of this content.
    pub fn of(bytes: &[u8]) -> FileEntry {
        FileEntry { bytes: bytes.len() as u64, sha256: files::sha256(bytes) }
    }

    /// Is this the file that was written? Says what differs.
    pub fn check(&self, bytes: &[u8]) -> Result<(), String> {
        if bytes.len() as u64 != self.bytes {
            return Err(format!("has {} bytes, the manifest says {}", bytes.len(), self.bytes));
        }
        let found = files::sha256(bytes);
        if found != self.sha256 {
            return Err(format!("damaged: sha256 {}..., the manifest says {}...", beginning(&found), beginning(&self.sha256)));
        }
        Ok(())
    }
}

/// As much of a hash as a message needs.
fn beginning(hash: &str) -> String {
    hash.chars().take(12).collect()
}

/// The text of a manifest, which ends in the checksum of what stands before it.
pub fn write(manifest: &Manifest) -> Result<String, serde_json::Error> {
    let text = serde_json::to_string_pretty(manifest)?;
    let content = text.strip_suffix("\n}").unwrap_or(&text);
    Ok(format!("{content}{SEAL}{}{END}", files::sha256(content.as_bytes())))
}

/// A manifest of any format, as the newest one would say it.
pub fn read(text: &str) -> Result<Manifest, String> {
    let foreign = |e: serde_json::Error| format!("not a manifest of ours: {e}");
    let mut value: Value = serde_json::from_str(text).map_err(foreign)?;
    match value["format"].as_u64() {
        // A manifest with a checksum does not lose it by saying that it is an old one.
        Some(1) if value.get("sha256").is_some() || value.get("splits").is_some() => {
            return Err("damaged: format 1 had neither a checksum nor splits, and this manifest has".into());
        }
        Some(1) => {}
        Some(2) => {
            check_seal(text)?;
            value.as_object_mut().and_then(|object| object.remove("sha256"));
        }
        Some(other) => return Err(format!("format {other}; this version reads 1 to {FORMAT}")),
        None => return Err("not a manifest of ours: it does not say its format".into()),
    }
    let manifest: Manifest = serde_json::from_value(value).map_err(foreign)?;
    manifest.progress.check().map_err(|what| format!("damaged: {what}"))?;
    if !manifest.files.contains_key(CheckpointFolder::STATE) {
        return Err(format!("damaged: it lists no {}", CheckpointFolder::STATE));
    }
    if let Some(name) = manifest.files.keys().find(|name| name.contains(['/', '\\']) || name.starts_with('.')) {
        return Err(format!("damaged: it lists `{name}`, which is no file of a checkpoint"));
    }
    Ok(manifest)
}

/// Is every byte what it was when the manifest was written?
fn check_seal(text: &str) -> Result<(), String> {
    let (content, rest) = text.rsplit_once(SEAL).ok_or("damaged: it has no checksum at its end")?;
    let said = rest.strip_suffix(END).ok_or("damaged: it does not end after its checksum")?;
    let found = files::sha256(content.as_bytes());
    if found == said {
        Ok(())
    } else {
        Err(format!("damaged: its content has sha256 {}..., its end says {}...", beginning(&found), beginning(said)))
    }
}

impl Progress {
    /// Does it agree with itself? Epochs, steps and what was chosen stand in the rows too.
    fn check(&self) -> Result<(), String> {
        if self.rows.len() != self.epoch {
            return Err(format!("{} epochs are finished and there are {} rows", self.epoch, self.rows.len()));
        }
        let mut steps = 0;
        for (i, row) in self.rows.iter().enumerate() {
            let number = |name: &str| row.get(name).and_then(Value::as_u64);
            if number("epoch") != Some(i as u64 + 1) {
                return Err(format!("the row of epoch {} says epoch {}", i + 1, row.get("epoch").unwrap_or(&Value::Null)));
            }
            steps = number("step").filter(|&step| step > steps).ok_or_else(|| {
                format!("epoch {} ended after {} steps, and the one before after {steps}", i + 1, row.get("step").unwrap_or(&Value::Null))
            })?;
            for (name, value) in row {
                let percent = name.ends_with(".top1") || name.ends_with(".top5");
                let fits = match value.as_f64() {
                    Some(value) => !percent || (0.0..=100.0).contains(&value),
                    None => value.is_null() && !percent,
                };
                if !fits {
                    return Err(format!("{name} of epoch {} is {value}", i + 1));
                }
            }
        }
        if self.step as u64 != steps + self.batch as u64 {
            return Err(format!("{} steps, of which {steps} in finished epochs and {} in the one under way", self.step, self.batch));
        }
        if (self.batch == 0) != self.meter.is_empty() {
            return Err(format!("{} steps in the epoch under way, and sums of {} numbers", self.batch, self.meter.len()));
        }
        if !(self.seconds >= 0.0 && self.seconds.is_finite()) {
            return Err(format!("{} seconds of training", self.seconds));
        }
        let Some(best) = self.best else { return Ok(()) };
        let row = best.epoch.checked_sub(1).and_then(|i| self.rows.get(i));
        let column = match best.stage {
            None => format!("holdout.peer{}.top1", best.peer),
            Some(stage) => format!("holdout.peer{}.stage{stage}.top1", best.peer),
        };
        let held = row.and_then(|row| row.get(&column)).and_then(Value::as_f64);
        let step = row.and_then(|row| row.get("step")).and_then(Value::as_u64);
        if held != Some(best.holdout_top1) || step != Some(best.step as u64) {
            return Err(format!(
                "network {} was chosen at epoch {}, step {}, with {} %, and no row says so",
                best.peer, best.epoch, best.step, best.holdout_top1
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As release 0.1.0 wrote it, shortened to one row and one column of metrics a split.
    const OF_0_1_0: &str = r#"{
  "format": 1,
  "recipe": "[data]\nname = \"synthetic\"\nfraction = 0.1\nholdout = 2\nimage_size = 16\n",
  "recipe_hash": "a0a1a2a3a4a5a6a7",
  "progress": {
    "step": 63,
    "epoch": 1,
    "batch": 3,
    "rows": [{ "epoch": 1, "step": 60, "test.peer0.top1": 12.5, "holdout.peer1.top1": 25.0 }],
    "meter": { "loss": [7.25, 3] },
    "seconds": 12.5,
    "best": { "epoch": 1, "step": 60, "peer": 1, "holdout_top1": 25.0 }
  },
  "files": { "state.safetensors": { "bytes": 8, "sha256": "00" } }
}"#;

    #[test]
    fn a_manifest_of_the_first_release_is_read() {
        let manifest = read(OF_0_1_0).unwrap();
        let progress = &manifest.progress;
        assert_eq!((manifest.format, progress.step, progress.epoch, progress.batch), (1, 63, 1, 3));
        assert_eq!(progress.rows[0]["test.peer0.top1"], 12.5);
        assert_eq!(progress.meter["loss"], (Some(7.25), 3));
        assert_eq!(progress.best, Some(Best { epoch: 1, step: 60, peer: 1, holdout_top1: 25.0, stage: None }));
        assert!(manifest.recipe.contains("synthetic") && manifest.splits.is_empty());
    }

    #[test]
    fn a_manifest_of_a_format_to_come_is_refused_by_its_number() {
        let newer = OF_0_1_0.replace("\"format\": 1", "\"format\": 3");
        assert_eq!(read(&newer).err().unwrap(), "format 3; this version reads 1 to 2");
        assert!(read("{}").err().unwrap().contains("does not say its format"));
    }

    /// Without a checksum only what stands there twice can be held against itself.
    #[test]
    fn an_old_manifest_that_contradicts_itself_is_refused() {
        for (from, to, said) in [
            ("\"epoch\": 1,\n", "\"epoch\": 2,\n", "2 epochs are finished and there are 1 rows"),
            ("\"step\": 63", "\"step\": 73", "73 steps"),
            ("\"batch\": 3", "\"batch\": 2", "63 steps"),
            (
                "\"rows\": [{ \"epoch\": 1, \"step\": 60, \"test.peer0.top1\": 12.5, \"holdout.peer1.top1\": 25.0 }]",
                "\"rows\": []",
                "0 rows",
            ),
            ("12.5, \"holdout", "1250, \"holdout", "test.peer0.top1 of epoch 1 is 1250"),
            ("\"best\"", "\"bezt\"", "bezt"),
            ("\"holdout_top1\": 25.0", "\"holdout_top1\": 35.0", "no row says so"),
            ("\"seconds\": 12.5", "\"seconds\": -12.5", "-12.5 seconds"),
            ("\"meter\": { \"loss\": [7.25, 3] }", "\"meter\": {}", "sums of 0 numbers"),
            ("state.safetensors", "state.safetensorz", "state.safetensors"),
        ] {
            assert!(OF_0_1_0.contains(from), "{from}");
            let message = read(&OF_0_1_0.replace(from, to)).err().unwrap_or_else(|| panic!("{to} was accepted"));
            assert!(message.contains(said), "{message}");
        }
    }

    /// A short hash was a panic.
    #[test]
    fn a_short_hash_is_a_message() {
        let entry = &read(OF_0_1_0).unwrap().files["state.safetensors"];
        assert!(entry.check(b"12345678").err().unwrap().ends_with("the manifest says 00..."));
        assert_eq!(entry.check(b"1234").err().unwrap(), "has 4 bytes, the manifest says 8");
    }

    /// Every byte changed to three others, every byte taken out, every end cut off.
    #[test]
    fn no_byte_of_a_manifest_changes_unnoticed() {
        let text = write(&Manifest { format: FORMAT, ..read(OF_0_1_0).unwrap() }).unwrap();
        assert!(read(&text).is_ok());
        let refused = |bytes: Vec<u8>, what: String| {
            if let Ok(text) = String::from_utf8(bytes) {
                assert!(read(&text).is_err(), "{what} was accepted: {text}");
            }
        };
        for at in 0..text.len() {
            for change in [|b: u8| b ^ 1, |b: u8| b ^ 2, |_: u8| b' ', |_: u8| b'1'] {
                let mut bytes = text.clone().into_bytes();
                bytes[at] = change(bytes[at]);
                if bytes[at] != text.as_bytes()[at] {
                    refused(bytes, format!("byte {at} changed"));
                }
            }
            let mut bytes = text.clone().into_bytes();
            bytes.remove(at);
            refused(bytes, format!("byte {at} taken out"));
            refused(text.as_bytes()[..at].to_vec(), format!("cut off at {at}"));
        }
    }
}
