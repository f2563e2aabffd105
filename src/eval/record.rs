//! What was measured, one row each in results.csv and results.jsonl, with everything needed to measure it again. Several processes may
//! append at once.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::network::Subject;
use super::{Common, protocol::Protocol};
use crate::error::{Error, Result};
use crate::system::machine;

/// One measurement.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Record {
    /// What the experiment that asked for it calls it; empty where a person did.
    pub id: String,
    pub time: String,
    pub command: String,
    /// What varies inside a command: `k=20`, `shots=5 try=3`.
    pub variant: String,
    pub protocol: String,
    pub protocol_hash: String,
    pub dataset: String,
    pub metric: String,
    pub value: f64,
    pub ci_low: Option<f64>,
    pub ci_high: Option<f64>,
    pub top5: Option<f64>,
    pub seed: Option<u64>,
    pub n_train: usize,
    pub n_test: usize,
    /// Of the training part that was used and of the test part.
    pub split_hash: String,
    pub subject: String,
    pub run: String,
    pub method: String,
    pub arch: String,
    pub peer: Option<usize>,
    pub pretrained_on: String,
    pub epoch: Option<usize>,
    pub weights: String,
    pub weights_hash: String,
    pub recipe_hash: String,
    pub image_size: usize,
    pub mean: [f64; 3],
    pub std: [f64; 3],
    pub device: String,
    pub threads: usize,
    pub seconds: f64,
    pub version: String,
    pub commit: String,
    pub argv: String,
    pub warnings: Vec<String>,
    /// The resolved protocol. Not in the CSV.
    pub options: Value,
    /// Per-class accuracy, confusion matrix, what was chosen. Not in the CSV.
    pub detail: Value,
}

impl Record {
    pub fn new(command: &str, subject: &Subject, common: &Common) -> Record {
        Record {
            id: common.id.clone().unwrap_or_default(),
            time: chrono::Local::now().to_rfc3339(),
            command: command.into(),
            metric: "top1".into(),
            subject: subject.name.clone(),
            run: subject.run.as_ref().map_or(String::new(), |r| r.display().to_string()),
            method: subject.method.clone(),
            arch: subject.arch.name.into(),
            peer: subject.peer,
            pretrained_on: subject.meta.dataset.clone().unwrap_or_default(),
            epoch: subject.meta.epoch,
            weights: subject.file.display().to_string(),
            weights_hash: subject.hash.clone(),
            recipe_hash: subject.meta.recipe.clone(),
            mean: subject.meta.mean,
            std: subject.meta.std,
            device: format!("{:?}", common.device),
            threads: common.threads,
            version: env!("CARGO_PKG_VERSION").into(),
            commit: common.commit.into(),
            argv: std::env::args().collect::<Vec<_>>().join(" "),
            ..Record::default()
        }
    }

    pub fn protocol(mut self, protocol: &Protocol) -> Record {
        self.protocol = protocol.name.clone();
        self.protocol_hash = protocol.hash();
        self.options = protocol.json();
        self
    }

    fn csv_cells(&self) -> Vec<String> {
        let Value::Object(map) = serde_json::to_value(self).expect("plain values serialise") else { unreachable!("a struct is an object") };
        COLUMNS
            .iter()
            .map(|column| match &map[*column] {
                Value::Null => String::new(),
                Value::String(text) => text.clone(),
                other => other.to_string(),
            })
            .collect()
    }
}

/// The columns of results.csv: every plain field.
const COLUMNS: [&str; 34] = [
    "time",
    "command",
    "variant",
    "protocol",
    "protocol_hash",
    "dataset",
    "metric",
    "value",
    "ci_low",
    "ci_high",
    "top5",
    "seed",
    "n_train",
    "n_test",
    "split_hash",
    "subject",
    "run",
    "method",
    "arch",
    "peer",
    "pretrained_on",
    "epoch",
    "weights",
    "weights_hash",
    "recipe_hash",
    "image_size",
    "mean",
    "std",
    "device",
    "threads",
    "seconds",
    "version",
    "commit",
    "argv",
];

/// Adds the records to both files of the folder. The lock is held from the first byte to the last, so that rows of two processes never mix;
/// half a line left by a process that was killed is cut off first.
pub fn append(folder: &Path, records: &[Record]) -> Result<()> {
    if records.is_empty() {
        return Ok(());
    }
    fs::create_dir_all(folder).map_err(Error::io("cannot make", folder))?;
    let lock_path = folder.join("results.lock");
    let lock =
        OpenOptions::new().create(true).truncate(false).write(true).open(&lock_path).map_err(Error::io("cannot write", &lock_path))?;
    lock.lock().map_err(Error::io("cannot lock", &lock_path))?;

    let jsonl: String = records.iter().map(|r| format!("{}\n", serde_json::to_string(r).expect("plain values serialise"))).collect();
    extend(&folder.join("results.jsonl"), "", &jsonl)?;
    extend(
        &folder.join("results.csv"),
        &rows(&[COLUMNS.map(String::from).to_vec()])?,
        &rows(&records.iter().map(Record::csv_cells).collect::<Vec<_>>())?,
    )
}

fn rows(rows: &[Vec<String>]) -> Result<String> {
    let mut out = csv::Writer::from_writer(vec![]);
    for row in rows {
        out.write_record(row).map_err(|e| Error::failed(format!("cannot write a row of results: {e}")))?;
    }
    let bytes = out.into_inner().map_err(|e| Error::failed(format!("cannot write a row of results: {e}")))?;
    Ok(String::from_utf8(bytes).expect("cells are text"))
}

/// All records as one CSV.
pub fn csv(records: &[Record]) -> Result<String> {
    let header = COLUMNS.map(String::from).to_vec();
    rows(&std::iter::once(header).chain(records.iter().map(Record::csv_cells)).collect::<Vec<_>>())
}

fn extend(path: &Path, header: &str, text: &str) -> Result<()> {
    let fault = || Error::io("cannot write", path);
    let mut file = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path).map_err(fault())?;
    let whole = whole_lines(&mut file).map_err(fault())?;
    file.set_len(whole).map_err(fault())?;
    file.seek(SeekFrom::End(0)).map_err(fault())?;
    let header = if whole == 0 { header } else { "" };
    file.write_all(format!("{header}{text}").as_bytes()).map_err(fault())?;
    file.sync_all().map_err(fault())
}

/// Bytes up to and with the last line end.
fn whole_lines(file: &mut File) -> std::io::Result<u64> {
    let mut end = file.seek(SeekFrom::End(0))?;
    let mut block = [0u8; 4096];
    while end > 0 {
        let start = end.saturating_sub(block.len() as u64);
        file.seek(SeekFrom::Start(start))?;
        let part = &mut block[..(end - start) as usize];
        file.read_exact(part)?;
        if let Some(at) = part.iter().rposition(|b| *b == b'\n') {
            return Ok(start + at as u64 + 1);
        }
        end = start;
    }
    Ok(0)
}

/// All records of a folder; none where nothing was measured yet.
pub fn read(folder: &Path) -> Result<Vec<Record>> {
    let path = folder.join("results.jsonl");
    if !path.exists() {
        return Ok(vec![]);
    }
    let text = fs::read_to_string(&path).map_err(Error::open(&path))?;
    let parse = |(i, line): (usize, &str)| serde_json::from_str(line).map_err(|e| Error::file(&path, format!("line {}: {e}", i + 1)));
    text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).map(parse).collect()
}

/// Writes records to the folders of their subjects and says where.
pub fn keep(records: &[Record], subjects: &[Subject], common: &Common) -> Result<()> {
    let mut folders: Vec<&Path> = subjects.iter().map(|s| s.out.as_path()).collect();
    folders.dedup();
    for folder in folders {
        let own: Vec<Record> =
            records.iter().filter(|r| subjects.iter().any(|s| s.out == folder && s.name == r.subject)).cloned().collect();
        append(folder, &own)?;
        common.say(format!("{} rows -> {}", own.len(), folder.join("results.csv").display()));
    }
    Ok(())
}

/// What `--json` prints: the records and where they were made.
pub fn json(records: &[Record], common: &Common) -> Value {
    serde_json::json!({ "environment": machine::environment(common.device, common.threads, common.commit), "results": records })
}
