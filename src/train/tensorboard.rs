//! TensorBoard event files: scalars only. A TFRecord is length, masked CRC-32C of the length, data, masked CRC-32C of the data; the
//! data is an `Event` protocol buffer.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::error::{Error, Result};
use crate::run::{Row, RunFolder};

/// Writes one event file.
pub struct EventWriter {
    file: File,
    path: PathBuf,
}

impl EventWriter {
    /// One file per process: TensorBoard reads all event files of a folder.
    pub fn create(folder: &RunFolder) -> Result<EventWriter> {
        let path = folder.events(now() as u64, std::process::id());
        let file = OpenOptions::new().create(true).append(true).open(&path).map_err(Error::io("cannot write", &path))?;
        let mut writer = EventWriter { file, path };
        let mut event = vec![];
        double(&mut event, 1, now());
        bytes(&mut event, 3, b"brain.Event:2");
        writer.record(&event)?;
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
        let mut writer = EventWriter::create(&RunFolder::at(dir.path())).unwrap();
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
}
