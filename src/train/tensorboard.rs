//! TensorBoard event files: scalars only. A TFRecord is length, masked CRC-32C of the length, data, masked CRC-32C of the data; the
//! data is an `Event` protocol buffer.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::error::{Error, Result};
use crate::files;
use crate::run::{Row, RunFolder};

/// Writes one event file.
pub struct EventWriter {
    file: File,
    path: PathBuf,
}

impl EventWriter {
    /// One file per process: TensorBoard reads all event files of a folder. A run goes on after `step` steps: what earlier processes
    /// wrote of later ones is taken out of their files, since it comes again.
    pub fn create(folder: &RunFolder, step: u64) -> Result<EventWriter> {
        for earlier in folder.event_files()? {
            forget_after(&earlier, step)?;
        }
        let path = folder.events(now() as u64, std::process::id());
        let file = OpenOptions::new().create(true).append(true).open(&path).map_err(Error::io("cannot write", &path))?;
        let mut writer = EventWriter { file, path };
        let mut event = vec![];
        double(&mut event, 1, now());
        bytes(&mut event, 3, b"brain.Event:2");
        writer.record(&event)?;
        if step > 0 {
            // A SessionLog with status START: a TensorBoard that has the folder open forgets what it read of this step and later ones.
            let mut event = vec![];
            double(&mut event, 1, now());
            key(&mut event, 2, 0);
            varint(&mut event, step + 1);
            bytes(&mut event, 7, &[0x08, 1]);
            writer.record(&event)?;
        }
        Ok(writer)
    }

    /// One event with all numbers of an epoch's row; the part of a name before its first dot is the group they are shown in.
    pub fn row(&mut self, step: u64, row: &Row) -> Result<()> {
        let scalars: Vec<(String, f64)> = row.iter().filter_map(|(k, v)| Some((k.replacen('.', "/", 1), v.as_f64()?))).collect();
        self.scalars(step, &scalars)
    }

    /// One event with these scalars.
    fn scalars(&mut self, step: u64, values: &[(String, f64)]) -> Result<()> {
        let mut summary = vec![];
        for (tag, value) in values.iter().filter(|(_, v)| v.is_finite()) {
            let mut one = vec![];
            bytes(&mut one, 1, tag.as_bytes());
            key(&mut one, 2, 5);
            one.extend((*value as f32).to_le_bytes());
            bytes(&mut summary, 1, &one);
        }
        let mut event = vec![];
        double(&mut event, 1, now());
        key(&mut event, 2, 0);
        varint(&mut event, step);
        bytes(&mut event, 5, &summary);
        self.record(&event)
    }

    fn record(&mut self, data: &[u8]) -> Result<()> {
        let length = (data.len() as u64).to_le_bytes();
        let mut record = length.to_vec();
        record.extend(masked_crc(&length).to_le_bytes());
        record.extend(data);
        record.extend(masked_crc(data).to_le_bytes());
        self.file.write_all(&record).and_then(|_| self.file.flush()).map_err(Error::io("cannot write", &self.path))
    }
}

/// Keeps the records of a file up to `step`; a record cut short by a kill goes too. A file that needs no change is not touched.
fn forget_after(path: &Path, step: u64) -> Result<()> {
    let content = std::fs::read(path).map_err(Error::io("cannot read", path))?;
    let (mut kept, mut rest) = (Vec::with_capacity(content.len()), &content[..]);
    while let Some((record, after)) = whole_record(rest) {
        if step_of(&record[12..record.len() - 4]).is_some_and(|at| at <= step) {
            kept.extend(record);
        }
        rest = after;
    }
    if kept == content { Ok(()) } else { files::write(path, &kept) }
}

/// The first record and what comes after it; none where the rest is no whole record.
fn whole_record(content: &[u8]) -> Option<(&[u8], &[u8])> {
    let length = u64::from_le_bytes(content.get(..8)?.try_into().ok()?);
    let end = usize::try_from(length).ok()?.checked_add(16)?;
    let record = content.get(..end)?;
    let said = |at: usize| u32::from_le_bytes([record[at], record[at + 1], record[at + 2], record[at + 3]]);
    let intact = said(8) == masked_crc(&record[..8]) && said(end - 4) == masked_crc(&record[12..end - 4]);
    intact.then_some((record, &content[end..]))
}

/// The step of an event as we write it: the time, then the step where it has one (0 otherwise). None where it is no such event.
fn step_of(event: &[u8]) -> Option<u64> {
    let after = event.get(9..).filter(|_| event[0] == 0x09)?;
    let Some((0x10, number)) = after.split_first() else { return Some(0) };
    let mut step = 0;
    for (i, byte) in number.iter().take(10).enumerate() {
        step |= u64::from(byte & 0x7f).checked_shl(7 * i as u32)?;
        if byte & 0x80 == 0 {
            return Some(step);
        }
    }
    None
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn key(out: &mut Vec<u8>, field: u64, wire: u64) {
    varint(out, field << 3 | wire);
}

fn double(out: &mut Vec<u8>, field: u64, value: f64) {
    key(out, field, 1);
    out.extend(value.to_le_bytes());
}

fn bytes(out: &mut Vec<u8>, field: u64, value: &[u8]) {
    key(out, field, 2);
    varint(out, value.len() as u64);
    out.extend(value);
}

fn masked_crc(data: &[u8]) -> u32 {
    crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

fn crc32c(data: &[u8]) -> u32 {
    let mut crc = !0u32;
    for &byte in data {
        crc ^= byte as u32;
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
        }
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Check values of RFC 3720, appendix B.4.
    #[test]
    fn crc32c_of_the_standard() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
    }

    #[test]
    fn an_event_is_the_protocol_buffer_tensorboard_expects() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = EventWriter::create(&RunFolder::at(dir.path()), 0).unwrap();
        writer.scalars(300, &[("a/b".into(), 0.5), ("gone".into(), f64::NAN)]).unwrap();
        let file = std::fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap().path();
        let bytes = std::fs::read(file).unwrap();
        let first = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let second = &bytes[8 + 4 + first + 4..];
        let length = u64::from_le_bytes(second[..8].try_into().unwrap()) as usize;
        let event = &second[12..12 + length];
        // wall_time, then step 300 as a varint, then one Value { tag "a/b", simple_value 0.5 }.
        assert_eq!(event[0], 0x09);
        assert_eq!(&event[9..], [&[0x10, 0xac, 0x02, 0x2a, 12, 0x0a, 10, 0x0a, 3], b"a/b".as_slice(), &[0x15, 0, 0, 0, 0x3f]].concat());
    }

    /// The steps of all records in a file.
    fn steps(path: &Path) -> Vec<u64> {
        let content = std::fs::read(path).unwrap();
        let (mut steps, mut rest) = (vec![], &content[..]);
        while let Some((record, after)) = whole_record(rest) {
            steps.push(step_of(&record[12..record.len() - 4]).unwrap());
            rest = after;
        }
        assert!(rest.is_empty(), "{} bytes that are no record", rest.len());
        steps
    }

    #[test]
    fn what_comes_again_after_a_kill_is_taken_out() {
        let dir = tempfile::tempdir().unwrap();
        let folder = RunFolder::at(dir.path());
        let earlier = folder.events(5, 1);
        let mut writer = EventWriter { file: File::create(&earlier).unwrap(), path: earlier.clone() };
        for step in [60, 120, 180] {
            writer.scalars(step, &[("a/b".into(), step as f64)]).unwrap();
        }
        // Killed inside a record.
        let mut content = std::fs::read(&earlier).unwrap();
        content.truncate(content.len() - 3);
        std::fs::write(&earlier, &content).unwrap();
        let whole = content.len();
        EventWriter::create(&folder, 120).unwrap();
        assert_eq!(steps(&earlier), [60, 120]);
        // SessionLog { status: START } at the first step to come: field 7, length 2, status = 1.
        let newest = folder.event_files().unwrap().into_iter().find(|path| *path != earlier).unwrap();
        let content = std::fs::read(newest).unwrap();
        let (_, rest) = whole_record(&content).unwrap();
        let (record, _) = whole_record(rest).unwrap();
        assert_eq!(&record[12 + 9..record.len() - 4], [0x10, 121, 0x3a, 2, 0x08, 1]);
        EventWriter::create(&folder, 60).unwrap();
        assert_eq!(steps(&earlier), [60]);
        assert!(std::fs::read(&earlier).unwrap().len() < whole);
    }
}
