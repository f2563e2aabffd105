//! What was measured, one row each in results.csv and results.jsonl, with everything needed to measure it again. Several processes may
//! append at once.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Common;
use super::dataset::TargetDataset;
use super::network::TrainedNetwork;
use super::protocol::Protocol;
use super::score::Score;
use crate::error::{Error, Result};
use crate::files;
use crate::report::{Cell, Table};
use crate::run::{self, RunFolder};
use crate::system::machine;

/// What rows of results.jsonl are written as. Rows that do not say were written before there was a number, and are read as they are.
pub const SCHEMA: u32 = 1;

/// One measurement.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Record {
    /// The form of the row; 0 where it was written before there was a number.
    pub schema: u32,
    /// What the experiment that asked for it calls it; empty where a person did.
    pub id: String,
    /// When it was made.
    pub time: String,
    /// The measurement that made it.
    pub command: String,
    /// What varies inside a command: `k=20`, `shots=5 try=3`.
    pub variant: String,
    /// The name of the protocol, as it was asked for.
    pub protocol: String,
    /// Changes when any key of the protocol does.
    pub protocol_hash: String,
    /// What it was measured on.
    pub dataset: String,
    /// What `value` is: `top1` unless another is named.
    pub metric: String,
    /// The number.
    pub value: f64,
    /// The lower end of its 95 % interval.
    pub ci_low: Option<f64>,
    /// The upper end.
    pub ci_high: Option<f64>,
    /// In percent, where there is one.
    pub top5: Option<f64>,
    /// The seed of the measurement, not of the training.
    pub seed: Option<u64>,
    /// Training images that were used.
    pub n_train: usize,
    /// Test images that were used.
    pub n_test: usize,
    /// Of the training part that was used and of the test part.
    pub split_hash: String,
    /// The name of the network.
    pub subject: String,
    /// The folder of its run.
    pub run: String,
    /// How it was pre-trained.
    pub method: String,
    /// Its architecture.
    pub arch: String,
    /// Its place in the cohort; none for what is measured of the cohort as a whole.
    pub peer: Option<usize>,
    /// What it was pre-trained on.
    pub pretrained_on: String,
    /// The epoch it is of.
    pub epoch: Option<usize>,
    /// Its file.
    pub weights: String,
    /// Of all its weights and buffers.
    pub weights_hash: String,
    /// Of the recipe it was trained by.
    pub recipe_hash: String,
    /// Side of the images.
    pub image_size: usize,
    /// What images were normalised with.
    pub mean: [f64; 3],
    /// Standard deviations, likewise.
    pub std: [f64; 3],
    /// What it was measured on: CPU or GPU.
    pub device: String,
    /// How many threads.
    pub threads: usize,
    /// How long it took, without the extraction of features.
    pub seconds: f64,
    /// Of this program.
    pub version: String,
    /// What this program was built from.
    pub commit: String,
    /// The command line.
    pub argv: String,
    /// What makes the number doubtful.
    pub warnings: Vec<String>,
    /// The resolved protocol. Not in the CSV.
    pub options: Value,
    /// Per-class accuracy, confusion matrix, what was chosen. Not in the CSV.
    pub detail: Value,
    /// The folder it is written to or was read from; not a part of the row.
    #[serde(skip)]
    pub folder: PathBuf,
}

impl Record {
    /// What is known before anything is measured: the network and the program. A measurement adds where (`on`), how (`protocol`) and how
    /// good (`score`), and changes the fields that only it knows.
    pub(crate) fn new(command: &str, network: &TrainedNetwork, common: &Common) -> Record {
        Record {
            schema: SCHEMA,
            id: common.id.clone().unwrap_or_default(),
            time: chrono::Local::now().to_rfc3339(),
            command: command.into(),
            metric: "top1".into(),
            subject: network.name.clone(),
            run: network.run.as_ref().map_or(String::new(), |r| r.display().to_string()),
            method: network.method.clone(),
            arch: network.architecture().into(),
            peer: network.peer,
            pretrained_on: network.meta.dataset.clone().unwrap_or_default(),
            epoch: network.meta.epoch,
            weights: network.file.display().to_string(),
            weights_hash: network.hash.clone(),
            recipe_hash: network.meta.recipe.clone(),
            mean: network.meta.mean,
            std: network.meta.std,
            device: format!("{:?}", common.device),
            threads: common.threads,
            version: env!("CARGO_PKG_VERSION").into(),
            commit: common.commit.into(),
            argv: std::env::args().collect::<Vec<_>>().join(" "),
            folder: network.out.clone(),
            ..Record::default()
        }
    }

    /// Measured on the test images of `target`, brought to a side.
    pub(crate) fn on(self, target: &TargetDataset, side: usize) -> Record {
        Record {
            dataset: target.dataset.name.into(),
            n_test: target.dataset.test.len(),
            split_hash: target.hash.clone(),
            image_size: side,
            ..self
        }
    }

    /// What was learned from the training images of `target`.
    pub(crate) fn trained_on(self, target: &TargetDataset) -> Record {
        Record { n_train: target.dataset.train.len(), ..self }
    }

    /// Measured as `protocol` says.
    pub(crate) fn protocol(self, protocol: &Protocol) -> Record {
        Record { protocol: protocol.name.clone(), protocol_hash: protocol.hash(), options: protocol.json(), ..self }
    }

    /// Top-1 with its interval (resampled with `seed`), top-5, a warning where it is no better than guessing, and the answers themselves.
    pub(crate) fn score(mut self, score: &Score, seed: u64, classes: &[String]) -> Record {
        let (low, high) = score.interval(seed);
        self.warnings.extend(score.doubt());
        Record {
            value: score.top1(),
            ci_low: Some(low),
            ci_high: Some(high),
            top5: Some(score.top5()),
            detail: score.detail(classes),
            ..self
        }
    }

    /// Of all networks of a run together, under the run's name.
    pub(crate) fn of_cohort(self, network: &TrainedNetwork) -> Record {
        Record { subject: network.cohort().to_string(), peer: None, ..self }
    }

    /// What varies inside the command.
    pub(crate) fn variant(self, variant: impl Into<String>) -> Record {
        Record { variant: variant.into(), ..self }
    }

    /// The stage the network ends at, from 1, where it is an auxiliary branch shipped as a network of its own.
    pub fn stage(&self) -> Option<usize> {
        run::network_number(Path::new(&self.subject))?.1
    }

    /// The interval as tables show it.
    pub(crate) fn interval(&self) -> Cell {
        Cell::text(format!("{:.2} to {:.2}", self.ci_low.unwrap_or(f64::NAN), self.ci_high.unwrap_or(f64::NAN)))
    }

    /// Cells by the names of their columns; empty under a name that is none of ours.
    fn csv_cells<S: AsRef<str>>(&self, columns: &[S]) -> Vec<String> {
        let row = serde_json::to_value(self).expect("plain values serialise");
        let cell = |column: &S| match &row[column.as_ref()] {
            Value::Null => String::new(),
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        columns.iter().map(cell).collect()
    }
}

/// The columns of a new results.csv: every plain field. A file that is there keeps the columns it has.
const COLUMNS: [&str; 35] = [
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
    "id",
];

/// Adds the records to both files of the folder. The lock is held from the first byte to the last, so that rows of two processes never mix;
/// half a line left by a process that was killed is cut off first.
pub fn append(folder: &Path, records: &[Record]) -> Result<()> {
    if records.is_empty() {
        return Ok(());
    }
    fs::create_dir_all(folder).map_err(Error::io("cannot make", folder))?;
    let folder = RunFolder::at(folder);
    let _lock = files::lock(&folder.results_lock())?;

    let line = |r: &Record| {
        let stamped = Record { schema: SCHEMA, ..r.clone() };
        format!("{}\n", serde_json::to_string(&stamped).expect("plain values serialise"))
    };
    extend(&folder.results_jsonl(), &records.iter().map(line).collect::<String>())?;
    let path = folder.results_csv();
    let text = match header(&path)? {
        Some(columns) => rows(records.iter().map(|r| r.csv_cells(&columns)))?,
        None => csv(records)?,
    };
    extend(&path, &text)
}

/// The columns of a results.csv that is there; none where it has no whole first line.
fn header(path: &Path) -> Result<Option<Vec<String>>> {
    let mut first = String::new();
    if path.exists() {
        let file = File::open(path).map_err(Error::open(path))?;
        BufReader::new(file).read_line(&mut first).map_err(Error::open(path))?;
    }
    if !first.ends_with('\n') {
        return Ok(None);
    }
    let mut reader = csv::Reader::from_reader(first.as_bytes());
    let columns = reader.headers().map_err(|e| Error::file(path, format!("its first line: {e}")))?;
    Ok(Some(columns.iter().map(String::from).collect()))
}

fn rows(rows: impl Iterator<Item = Vec<String>>) -> Result<String> {
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
    rows(std::iter::once(header).chain(records.iter().map(|r| r.csv_cells(&COLUMNS))))
}

fn extend(path: &Path, text: &str) -> Result<()> {
    let fault = || Error::io("cannot write", path);
    let mut file = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path).map_err(fault())?;
    let whole = whole_lines(&mut file).map_err(fault())?;
    file.set_len(whole).map_err(fault())?;
    file.seek(SeekFrom::End(0)).map_err(fault())?;
    file.write_all(text.as_bytes()).map_err(fault())?;
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

/// All records of a folder; none where nothing was measured yet. A line that cannot be read (cut short by a kill, or a number that is
/// none) is named and left out: the others are still what was measured.
pub fn read(folder: &Path) -> Result<Vec<Record>> {
    let path = RunFolder::at(folder).results_jsonl();
    if !path.exists() {
        return Ok(vec![]);
    }
    let bytes = fs::read(&path).map_err(Error::open(&path))?;
    let mut records = vec![];
    for (i, line) in bytes.split(|byte| *byte == b'\n').enumerate().filter(|(_, line)| !line.trim_ascii().is_empty()) {
        match serde_json::from_slice(line) {
            Ok(record) => records.push(Record { folder: folder.to_path_buf(), ..record }),
            Err(e) => eprintln!("warning: {}, line {}: left out: {e}", path.display(), i + 1),
        }
    }
    Ok(records)
}

/// Writes records to their folders, says where, and says what makes them doubtful.
pub(crate) fn keep(records: &[Record], common: &Common) -> Result<()> {
    for r in records {
        let name = if r.variant.is_empty() { r.subject.clone() } else { format!("{} {}", r.subject, r.variant) };
        r.warnings.iter().for_each(|w| common.warn(format!("{name}: {w}")));
    }
    let mut folders: Vec<&Path> = records.iter().map(|r| r.folder.as_path()).collect();
    folders.sort();
    folders.dedup();
    for folder in folders {
        let own: Vec<Record> = records.iter().filter(|r| r.folder == folder).cloned().collect();
        append(folder, &own)?;
        let rows = if own.len() == 1 { "1 row".to_string() } else { format!("{} rows", own.len()) };
        common.say(format!("{rows} -> {}", RunFolder::at(folder).results_csv().display()));
    }
    Ok(())
}

/// What `--json` prints: the records and where they were made.
pub(crate) fn json(records: &[Record], common: &Common) -> Value {
    serde_json::json!({ "environment": machine::environment(common.device, common.threads, common.commit), "results": records })
}

/// Shows records that hold a score each: as JSON, or as a table under `heading`, with what varies in a column of its own.
pub(crate) fn show(records: &[Record], heading: &str, varies: &str, common: &Common) {
    if common.json {
        return common.print_json(&json(records, common));
    }
    let mut shown = Table::new("", &["network", "method", varies, "top-1", "95 % over images", "top-5"]);
    for r in records {
        shown.push(vec![
            Cell::text(&r.subject),
            Cell::text(&r.method),
            Cell::text(r.variant.split_once('=').map_or(r.variant.as_str(), |(_, value)| value)),
            Cell::Score(r.value, 2),
            r.interval(),
            Cell::score(r.top5),
        ]);
    }
    println!("{heading}");
    print!("{}", shown.plain());
}
