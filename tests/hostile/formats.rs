//! Damage to files with lengths and checksums: what comes out is well-formed where a reader looks first, and wrong where it looks later.

use std::io::{Cursor, Read, Write};

use rand::Rng as _;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng as Rng;
use serde_json::Value as Json;

use super::mutate::{bytes, code, json_value, number, text};

/// A safetensors file with another header, whose length is right, or with other numbers.
pub fn safetensors(data: &mut Vec<u8>, rng: &mut Rng) {
    let length = data.get(..8).map(|n| u64::from_le_bytes(n.try_into().unwrap()) as usize).unwrap_or(usize::MAX);
    let Some(Ok(mut header)) = data.get(8..length.saturating_add(8)).map(serde_json::from_slice::<Json>) else { return bytes(data, rng) };
    let mut body = data[8 + length..].to_vec();
    let names: Vec<String> = header.as_object().unwrap().keys().filter(|k| *k != "__metadata__").cloned().collect();
    let Some(name) = names.choose(rng).cloned() else { return bytes(data, rng) };
    match rng.gen_range(0..10) {
        // A number that is none, where the network would meet it.
        0 | 1 if body.len() >= 4 => {
            let at = rng.gen_range(0..body.len() / 4) * 4;
            let value = *[f32::NAN, f32::INFINITY, f32::MAX, -1.0, 0.0].choose(rng).unwrap();
            body[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        2 => {
            let gone = header.as_object_mut().unwrap().remove(&name).unwrap();
            header[format!("{name}{}", text(rng))] = gone;
        }
        3 => drop(header.as_object_mut().unwrap().remove(&name)),
        // The same bytes in another shape.
        4 => {
            let n: i64 = header[&name]["shape"].as_array().map_or(1, |s| s.iter().filter_map(Json::as_i64).product());
            header[&name]["shape"] = match rng.gen_range(0..4) {
                0 => serde_json::json!([n]),
                1 => serde_json::json!([1, n, 1]),
                2 => serde_json::json!([0, i64::MAX]),
                _ => serde_json::json!([n, 1, 1, 1, 1, 1, 1, 1]),
            };
        }
        5 => header[&name]["dtype"] = (*["F16", "BF16", "F64", "I8", "U64", "BOOL", "F8_E4M3", "X"].choose(rng).unwrap()).into(),
        6 => json_value(&mut header[&name]["data_offsets"], rng, 1),
        7 if header.get("__metadata__").is_some() => {
            json_value(&mut header["__metadata__"], rng, 0);
            // Texts alone are allowed there: others are refused at once.
            if let Some(map) = header["__metadata__"].as_object_mut() {
                map.values_mut().filter(|v| !v.is_string()).for_each(|v| *v = v.to_string().into());
            }
        }
        _ => json_value(&mut header, rng, 0),
    }
    let mut header = serde_json::to_vec(&header).unwrap();
    header.resize(header.len().next_multiple_of(8), b' ');
    *data = [&(header.len() as u64).to_le_bytes()[..], &header, &body].concat();
}

/// The opcodes of a pickle: where each begins. Stops where it is none.
fn opcodes(data: &[u8]) -> Vec<usize> {
    let mut starts = vec![];
    let mut at = 0;
    let line = |at: usize| data[at.min(data.len())..].iter().position(|b| *b == b'\n').map_or(data.len(), |n| n + 1);
    while at < data.len() {
        starts.push(at);
        let le =
            |n: usize| data.get(at + 1..at + 1 + n).map_or(0, |b| b.iter().rev().fold(0usize, |v, b| v.wrapping_mul(256) + *b as usize));
        let argument = match data[at] {
            0x80 | b'K' | b'h' | b'q' => 1,
            b'M' => 2,
            b'J' | b'j' | b'r' => 4,
            b'G' | 0x95 => 8,
            b'U' | b'C' | 0x8c | 0x8a => 1 + le(1),
            b'T' | b'B' | b'X' | 0x8b => 4usize.saturating_add(le(4)),
            0x8d | 0x8e | 0x96 => 8usize.saturating_add(le(8)),
            b'I' | b'L' | b'F' | b'S' | b'V' | b'P' | b'p' | b'g' => line(at + 1),
            b'c' | b'i' => line(at + 1) + line(at + 1 + line(at + 1)),
            _ => 0,
        };
        at = at.saturating_add(1).saturating_add(argument);
    }
    starts
}

/// A pickle with whole opcodes changed, doubled, lost or moved, up to `end`; what is behind is left.
pub fn pickle(data: &mut Vec<u8>, rng: &mut Rng) {
    for _ in 0..rng.gen_range(1..4) {
        let starts = opcodes(data);
        if starts.len() < 3 {
            return bytes(data, rng);
        }
        let i = rng.gen_range(0..starts.len() - 1);
        let (from, to) = (starts[i], starts[i + 1].min(data.len()));
        let op = data[from..to].to_vec();
        let new: Vec<u8> = match (rng.gen_range(0..10), op[0]) {
            (0..=4, b'K' | b'M' | b'J' | 0x8a) => {
                let n = number(rng);
                match rng.gen_range(0..3) {
                    0 => [&b"J"[..], &(n as i32).to_le_bytes()].concat(),
                    1 => [&[0x8a, 8][..], &n.to_le_bytes()].concat(),
                    _ => vec![b'K', n as u8],
                }
            }
            (0..=2, b'X') => {
                let t = text(rng);
                [&b"X"[..], &(t.len() as u32).to_le_bytes(), t.as_bytes()].concat()
            }
            (5, _) => vec![],
            (6, _) => op.repeat(rng.gen_range(2..400)),
            (7, _) => {
                let other = rng.gen_range(0..starts.len() - 1);
                [&op[..], &data[starts[other]..starts[other + 1].min(data.len())]].concat()
            }
            // What a bomb is made of: one object named again and again, put into containers.
            (8, _) => {
                let bomb: &[u8] =
                    [&b"h\x00h\x00\x86"[..], b"(h\x01h\x01h\x01t", b"2\x862\x862\x86", b"cbuiltins\nset\n(h\x02tR"][rng.gen_range(0..4)];
                [&op[..], &bomb.repeat(rng.gen_range(1..2000))].concat()
            }
            _ => vec![*b"N0().2]}tRbQueas\x85\x86\x87\x88\x89\x93\x94\x81".choose(rng).unwrap()],
        };
        data.splice(from..to, new);
    }
}

/// A zip archive written again with its checksums, one entry changed by `content`, or packed, renamed, lost.
pub fn zip(data: &mut Vec<u8>, rng: &mut Rng, content: fn(&str, &mut Vec<u8>, &mut Rng)) {
    let Ok(mut archive) = zip::ZipArchive::new(Cursor::new(&data[..])) else { return bytes(data, rng) };
    let mut entries = vec![];
    for i in 0..archive.len() {
        let Ok(mut entry) = archive.by_index(i) else { return bytes(data, rng) };
        let mut bytes = vec![];
        let _ = entry.read_to_end(&mut bytes);
        entries.push((entry.name().to_string(), bytes));
    }
    if entries.is_empty() {
        return bytes(data, rng);
    }
    let at = rng.gen_range(0..entries.len());
    let mut packed = false;
    match rng.gen_range(0..12) {
        0 => drop(entries.remove(at)),
        1 => entries[at].0 = text(rng),
        2 => {
            let copy = (format!("{}2", entries[at].0), entries[at].1.clone());
            entries.push(copy);
        }
        3 => {
            packed = true;
            let n = rng.gen_range(0..4_000_000);
            entries[at].1.extend(std::iter::repeat_n(0u8, n));
        }
        4 => entries[at].0 = format!("../{}", entries[at].0),
        5 => entries[at].0 = format!("/tmp/{}", entries[at].0),
        // The pickle is where most can go wrong.
        6..=8 => {
            let at = entries.iter().position(|(name, _)| name.ends_with(".pkl")).unwrap_or(at);
            let (name, bytes) = &mut entries[at];
            content(&name.clone(), bytes, rng)
        }
        _ => {
            let (name, bytes) = &mut entries[at];
            content(&name.clone(), bytes, rng)
        }
    }
    let mut out = zip::ZipWriter::new(Cursor::new(vec![]));
    let method = if packed { zip::CompressionMethod::Deflated } else { zip::CompressionMethod::Stored };
    for (name, bytes) in entries {
        let mode = if rng.gen_bool(0.02) { 0o120_777 } else { 0o644 };
        let options = zip::write::FileOptions::default().compression_method(method).unix_permissions(mode);
        if out.start_file(name, options).is_ok() {
            let _ = out.write_all(&bytes);
        }
    }
    if let Ok(whole) = out.finish() {
        *data = whole.into_inner();
    }
}

/// What may be inside a PyTorch archive.
pub fn torch_entry(name: &str, data: &mut Vec<u8>, rng: &mut Rng) {
    match name.rsplit('.').next() {
        Some("pkl") => pickle(data, rng),
        Some("py") => code(data, rng),
        _ => bytes(data, rng),
    }
}

/// A PNG with one chunk changed and its checksum made anew.
pub fn png(data: &mut Vec<u8>, rng: &mut Rng) {
    if !data.starts_with(b"\x89PNG") {
        return bytes(data, rng);
    }
    let mut chunks: Vec<(Vec<u8>, Vec<u8>)> = vec![];
    let mut at = 8;
    while let Some(head) = data.get(at..at + 8) {
        let n = u32::from_be_bytes(head[..4].try_into().unwrap()) as usize;
        let Some(body) = data.get(at + 8..at + 8 + n) else { break };
        chunks.push((head[4..].to_vec(), body.to_vec()));
        at += 12 + n;
    }
    if chunks.is_empty() {
        return bytes(data, rng);
    }
    match rng.gen_range(0..6) {
        // Sides, depth, colours: the header alone decides what is allocated.
        0..=2 => {
            let sides = [1u32, 2, 7, 32, 65535, 1 << 20, u32::MAX >> 1, u32::MAX];
            for side in 0..2 {
                if rng.gen_bool(0.7) && chunks[0].1.len() >= 8 {
                    chunks[0].1[side * 4..side * 4 + 4].copy_from_slice(&sides.choose(rng).unwrap().to_be_bytes());
                }
            }
            if rng.gen_bool(0.3) && chunks[0].1.len() > 9 {
                chunks[0].1[8] = *[1, 2, 4, 8, 16].choose(rng).unwrap();
                chunks[0].1[9] = rng.gen_range(0..8);
            }
        }
        3 => {
            let at = rng.gen_range(0..chunks.len());
            chunks.remove(at);
        }
        4 => {
            let at = rng.gen_range(0..chunks.len());
            let copy = chunks[at].clone();
            chunks.insert(at, copy);
        }
        _ => {
            let at = rng.gen_range(0..chunks.len());
            bytes(&mut chunks[at].1, rng);
        }
    }
    let mut out = data[..8].to_vec();
    for (kind, body) in chunks {
        out.extend((body.len() as u32).to_be_bytes());
        let whole = [kind, body].concat();
        out.extend(&whole);
        out.extend(crc(&whole).to_be_bytes());
    }
    *data = out;
}

/// CRC-32 as PNG and zip have it.
fn crc(data: &[u8]) -> u32 {
    let mut crc = flate2::Crc::new();
    crc.update(data);
    crc.sum()
}

/// Records of a fixed size, whole ones lost or doubled, their first bytes (labels) changed.
pub fn records(data: &mut Vec<u8>, rng: &mut Rng, size: usize) {
    let mut all: Vec<Vec<u8>> = data.chunks(size).map(<[u8]>::to_vec).collect();
    if all.is_empty() {
        return bytes(data, rng);
    }
    let at = rng.gen_range(0..all.len());
    match rng.gen_range(0..4) {
        0 => drop(all.remove(at)),
        1 => {
            let copy = all[at].clone();
            all.insert(at, copy);
        }
        _ => {
            let byte = rng.gen_range(0..2.min(all[at].len()));
            all[at][byte] = rng.r#gen();
        }
    }
    *data = all.concat();
}

/// An IDX file: its header's numbers changed, and often the length made to fit.
pub fn idx(data: &mut Vec<u8>, rng: &mut Rng) {
    let packed = data.starts_with(&[0x1f, 0x8b]);
    let mut plain = vec![];
    if packed {
        let _ = flate2::read::GzDecoder::new(&data[..]).read_to_end(&mut plain);
    } else {
        plain = data.clone();
    }
    if plain.len() < 8 {
        return bytes(data, rng);
    }
    let dimensions = (plain[3] as usize).clamp(1, 3);
    let which = rng.gen_range(0..=dimensions);
    if which == 0 {
        plain[rng.gen_range(0..4)] = rng.r#gen();
    } else {
        let n = if rng.gen_bool(0.5) { rng.gen_range(0..6u32) } else { number(rng) as u32 };
        plain[4 * which..4 * which + 4].copy_from_slice(&n.to_be_bytes());
        let start = 4 + 4 * dimensions;
        let want: usize = (1..=dimensions)
            .map(|d| plain.get(4 * d..4 * d + 4).map_or(0, |n| u32::from_be_bytes(n.try_into().unwrap()) as usize))
            .try_fold(1usize, usize::checked_mul)
            .unwrap_or(usize::MAX);
        if want < 50_000_000 && rng.gen_bool(0.6) {
            plain.resize(start + want, 0);
        }
    }
    *data = if packed { gzip(&plain) } else { plain };
}

pub fn gzip(data: &[u8]) -> Vec<u8> {
    let mut out = flate2::write::GzEncoder::new(vec![], flate2::Compression::fast());
    out.write_all(data).unwrap();
    out.finish().unwrap()
}

/// A .tar.gz whose headers are changed with their checksums made anew.
pub fn tar_gz(data: &mut Vec<u8>, rng: &mut Rng) {
    let mut plain = vec![];
    if flate2::read::GzDecoder::new(&data[..]).read_to_end(&mut plain).is_err() || plain.len() < 512 {
        return bytes(data, rng);
    }
    // Where headers begin: each is followed by its content in blocks of 512.
    let mut headers = vec![];
    let mut at = 0;
    while at + 512 <= plain.len() && plain[at] != 0 {
        headers.push(at);
        let size = String::from_utf8_lossy(&plain[at + 124..at + 135]).trim_matches(['\0', ' ']).to_string();
        at += 512 + usize::from_str_radix(&size, 8).unwrap_or(0).next_multiple_of(512);
    }
    let Some(&at) = headers.choose(rng) else { return bytes(data, rng) };
    let header = &mut plain[at..at + 512];
    match rng.gen_range(0..6) {
        0 => {
            let name =
                [&b"../outside"[..], b"/tmp/outside", b"a/../../outside", b"", b"set-1/x", b"\xff\xfe"].choose(rng).unwrap().to_vec();
            header[..100].fill(0);
            header[..name.len()].copy_from_slice(&name);
        }
        1 => header[156] = *b"01234567LKxgDS\0".choose(rng).unwrap(),
        2 => {
            let size = format!("{:011o}", (number(rng) as u64) & 0o77_777_777_777);
            header[124..135].copy_from_slice(&size.as_bytes()[..11]);
        }
        3 => {
            header[156] = b'2';
            header[157..257].fill(0);
            header[157..157 + 9].copy_from_slice(b"../../out");
        }
        4 => header[rng.gen_range(0..512)] = rng.r#gen(),
        _ => {
            let n = rng.gen_range(1..40_000_000);
            plain.truncate(at);
            plain.extend(std::iter::repeat_n(*[0u8, b'a'].choose(rng).unwrap(), n));
        }
    }
    if let Some(header) = plain.get_mut(at..at + 512) {
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().map(|b| u32::from(*b)).sum();
        header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    }
    *data = gzip(&plain);
}
