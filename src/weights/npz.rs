//! numpy's .npz archives, written: arrays of numbers, and of texts of one width.

use std::io::{BufWriter, Write};
use std::path::Path;

use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::files::{Pending, tensor_bytes};

/// One array of an archive.
pub enum Array<'a> {
    /// Numbers, in the type they have.
    Numbers(&'a Tensor),
    /// Texts in UTF-8, as numpy's bytes (`S`) of the longest one's width; `names.astype(str)` makes them texts in Python.
    Texts(&'a [String]),
}

/// numpy's names of the types that are written.
const DTYPES: &[(Kind, &str)] = &[
    (Kind::Float, "<f4"),
    (Kind::Double, "<f8"),
    (Kind::Half, "<f2"),
    (Kind::Int64, "<i8"),
    (Kind::Int, "<i4"),
    (Kind::Uint8, "|u1"),
    (Kind::Bool, "|b1"),
];

/// Writes an archive that `numpy.load` opens.
pub fn save(path: &Path, arrays: &[(&str, Array)]) -> Result<()> {
    let failed = |e: zip::result::ZipError| Error::Io { what: "cannot write", path: path.to_path_buf(), source: e.into() };
    let mut pending = Pending::create(path)?;
    let mut archive = zip::ZipWriter::new(BufWriter::new(pending.file()));
    // Stored, as numpy.savez does; a fixed time, so that the same arrays give the same bytes.
    let options =
        zip::write::FileOptions::default().compression_method(zip::CompressionMethod::Stored).last_modified_time(zip::DateTime::default());
    for (name, array) in arrays {
        let (header, bytes) = encoded(name, array)?;
        let options = options.large_file(header.len() + bytes.len() > u32::MAX as usize);
        archive.start_file(format!("{name}.npy"), options).map_err(failed)?;
        archive.write_all(&header).and_then(|()| archive.write_all(&bytes)).map_err(Error::io("cannot write", path))?;
    }
    archive.finish().map_err(failed)?.flush().map_err(Error::io("cannot write", path))?;
    drop(archive);
    pending.commit()
}

/// The header of the .npy format, version 1, and the data in C order.
fn encoded(name: &str, array: &Array) -> Result<(Vec<u8>, Vec<u8>)> {
    let (dtype, shape, bytes) = match array {
        Array::Numbers(tensor) => {
            let known = DTYPES.iter().find(|(kind, _)| *kind == tensor.kind());
            let (_, dtype) =
                known.ok_or_else(|| Error::failed(format!("`{name}` is of type {:?}, which is not written as npz", tensor.kind())))?;
            (dtype.to_string(), tensor.size(), tensor_bytes(tensor))
        }
        Array::Texts(texts) => {
            let bytes = padded(texts);
            (format!("|S{}", bytes.len() / texts.len().max(1)), vec![texts.len() as i64], bytes)
        }
    };
    let shape: String = shape.iter().map(|d| format!("{d}, ")).collect();
    let mut text = format!("{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({}), }}", shape.trim_end_matches(' '));
    // Magic, version and length are ten bytes; the data begin at a multiple of 64.
    let length = (text.len() + 11).next_multiple_of(64) - 10;
    text += &" ".repeat(length - 1 - text.len());
    text.push('\n');
    let mut header = b"\x93NUMPY\x01\x00".to_vec();
    header.extend((length as u16).to_le_bytes());
    header.extend(text.bytes());
    Ok((header, bytes))
}

/// Texts one after another, each filled up with zeros to the width of the longest (1 at least).
pub fn padded(texts: &[String]) -> Vec<u8> {
    let width = texts.iter().map(String::len).max().unwrap_or(0).max(1);
    texts.iter().flat_map(|text| text.bytes().chain(std::iter::repeat_n(0, width - text.len()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As numpy 2 writes `np.arange(3, dtype='i8')` and `np.array([b'a', b'bc'])`.
    #[test]
    fn headers_are_numpys() {
        let text = |header: &[u8]| String::from_utf8(header[10..].to_vec()).unwrap();
        let (header, bytes) = encoded("x", &Array::Numbers(&Tensor::from_slice(&[0i64, 1, 2]))).unwrap();
        assert_eq!(header[..10], *b"\x93NUMPY\x01\x00\x76\x00");
        assert_eq!(header.len() % 64, 0);
        assert_eq!(text(&header).trim_end(), "{'descr': '<i8', 'fortran_order': False, 'shape': (3,), }");
        assert!(text(&header).ends_with(" \n"));
        assert_eq!(bytes[8..16], [1, 0, 0, 0, 0, 0, 0, 0]);
        let (header, bytes) = encoded("s", &Array::Texts(&["a".to_string(), "bc".to_string()])).unwrap();
        assert!(text(&header).starts_with("{'descr': '|S2', 'fortran_order': False, 'shape': (2,), }"));
        assert_eq!(bytes, b"a\0bc");
        let (header, _) = encoded("x", &Array::Numbers(&Tensor::zeros([2, 3], (Kind::Float, tch::Device::Cpu)))).unwrap();
        assert!(text(&header).contains("'shape': (2, 3,), }") || text(&header).contains("'shape': (2, 3), }"));
    }
}
