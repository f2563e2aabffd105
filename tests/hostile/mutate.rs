//! How inputs are damaged: blindly, byte by byte, or as the texts they are (TOML, JSON, code). What has lengths and checksums is in `formats`.

use rand::Rng as _;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng as Rng;
use serde_json::Value as Json;

/// Numbers that are at the edge of something.
const NUMBERS: &[i64] = &[
    0,
    1,
    -1,
    2,
    3,
    7,
    8,
    127,
    128,
    255,
    256,
    65535,
    65536,
    100_000,
    1 << 24,
    i32::MAX as i64,
    i32::MIN as i64,
    1 << 32,
    1 << 40,
    1 << 53,
    1 << 62,
    i64::MAX,
    i64::MIN,
];
const FLOATS: &[f64] = &[0.0, -0.0, 0.5, 1.0, -1.0, 1e-300, 1e-12, 1e12, 1e300, f64::MAX, f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
const TEXTS: &[&str] = &[
    "",
    "x",
    "..",
    "../../x",
    "/etc/passwd",
    "nan",
    "\u{0}",
    "\u{1b}[2J",
    "<script>alert(1)</script>",
    "a\nb",
    "l_mcl",
    "resnet8",
    "synthetic",
    "\u{fffd}\u{1f600}",
];

pub fn number(rng: &mut Rng) -> i64 {
    match rng.gen_range(0..4) {
        0 => rng.r#gen(),
        1 => rng.gen_range(-3..300),
        _ => *NUMBERS.choose(rng).unwrap(),
    }
}

fn float(rng: &mut Rng) -> f64 {
    if rng.gen_bool(0.3) { f64::from_bits(rng.r#gen()) } else { *FLOATS.choose(rng).unwrap() }
}

pub fn text(rng: &mut Rng) -> String {
    if rng.gen_bool(0.1) { "y".repeat(rng.gen_range(1..20_000)) } else { TEXTS.choose(rng).unwrap().to_string() }
}

/// Blind damage: bits, bytes, whole stretches.
pub fn bytes(data: &mut Vec<u8>, rng: &mut Rng) {
    for _ in 0..*[1, 1, 1, 2, 4, 16].choose(rng).unwrap() {
        if data.is_empty() {
            data.extend((0..rng.gen_range(1..64)).map(|_| rng.r#gen::<u8>()));
            continue;
        }
        let at = rng.gen_range(0..data.len());
        let end = (at + rng.gen_range(1..=64)).min(data.len());
        match rng.gen_range(0..9) {
            0 => data[at] ^= 1 << rng.gen_range(0..8),
            1 => data[at] = rng.r#gen(),
            2 => data.truncate(at),
            3 => drop(data.drain(at..end)),
            4 => {
                let copy = data[at..end].to_vec();
                data.splice(at..at, copy);
            }
            5 => data[at..end].fill(*[0, 0xff, b'0'].choose(rng).unwrap()),
            6 => {
                let value = number(rng).to_le_bytes();
                let n = *[2, 4, 8].choose(rng).unwrap();
                data[at..].iter_mut().zip(&value[..n]).for_each(|(to, from)| *to = *from);
            }
            7 => data.extend((0..rng.gen_range(1..100)).map(|_| rng.r#gen::<u8>())),
            _ => {
                let from = rng.gen_range(0..data.len());
                let n = (data.len() - from.max(at)).min(32);
                data.copy_within(from..from + n, at);
            }
        }
    }
}

/// A TOML file with one or two values changed, keys removed, or sections swapped.
pub fn toml(data: &mut Vec<u8>, rng: &mut Rng) {
    let Ok(mut table) = String::from_utf8_lossy(data).parse::<toml::Table>() else { return bytes(data, rng) };
    for _ in 0..rng.gen_range(1..3) {
        toml_table(&mut table, rng);
    }
    *data = toml::to_string(&table).unwrap_or_default().into_bytes();
}

fn toml_table(table: &mut toml::Table, rng: &mut Rng) {
    let keys: Vec<String> = table.keys().cloned().collect();
    let Some(key) = keys.choose(rng) else { return };
    match table.get_mut(key) {
        Some(toml::Value::Table(inner)) if rng.gen_bool(0.93) && !inner.is_empty() => toml_table(inner, rng),
        _ if rng.gen_bool(0.08) => drop(table.remove(key)),
        _ if rng.gen_bool(0.05) => {
            let value = table[key].clone();
            table.insert(text(rng), value);
        }
        Some(toml::Value::Array(items)) if rng.gen_bool(0.7) && !items.is_empty() => {
            let at = rng.gen_range(0..items.len());
            match rng.gen_range(0..3) {
                0 => items[at] = toml_value(rng, Some(&items[at].clone())),
                1 => drop(items.remove(at)),
                _ => {
                    let item = items[at].clone();
                    items.extend(std::iter::repeat_n(item, rng.gen_range(1..200)));
                }
            }
        }
        Some(value) => *value = toml_value(rng, Some(&value.clone())),
        None => {}
    }
}

/// Mostly of the same type: a wrong type is found at once.
fn toml_value(rng: &mut Rng, like: Option<&toml::Value>) -> toml::Value {
    match like {
        Some(toml::Value::Integer(_)) if rng.gen_bool(0.85) => number(rng).into(),
        Some(toml::Value::Float(_)) if rng.gen_bool(0.85) => float(rng).into(),
        Some(toml::Value::Boolean(b)) if rng.gen_bool(0.7) => (!b).into(),
        _ => match rng.gen_range(0..5) {
            0 => number(rng).into(),
            1 => float(rng).into(),
            2 => text(rng).into(),
            3 => toml::Value::Array((0..rng.gen_range(0..4)).map(|_| number(rng).into()).collect()),
            _ => toml::Value::Table(toml::Table::new()),
        },
    }
}

/// A JSON text with a value somewhere in it changed.
pub fn json(data: &mut Vec<u8>, rng: &mut Rng) {
    let Ok(mut value) = serde_json::from_slice::<Json>(data) else { return bytes(data, rng) };
    for _ in 0..rng.gen_range(1..3) {
        json_value(&mut value, rng, 0);
    }
    *data = serde_json::to_vec(&value).unwrap();
}

/// A file of JSON lines: one line changed, lost, doubled, torn, or made of other bytes.
pub fn json_lines(data: &mut Vec<u8>, rng: &mut Rng) {
    let mut lines: Vec<Vec<u8>> = data.split(|b| *b == b'\n').map(<[u8]>::to_vec).collect();
    lines.pop_if(|last| last.is_empty());
    if lines.is_empty() {
        return bytes(data, rng);
    }
    let at = rng.gen_range(0..lines.len());
    match rng.gen_range(0..8) {
        0 => drop(lines.remove(at)),
        1 => {
            let copy = lines[at].clone();
            lines.insert(at, copy);
        }
        2 => {
            let keep = rng.gen_range(0..=lines[at].len());
            lines[at].truncate(keep);
        }
        3 => lines.shuffle(rng),
        _ => json(&mut lines[at], rng),
    }
    *data = lines.join(&b'\n');
    if rng.gen_bool(0.9) {
        data.push(b'\n');
    }
}

pub fn json_value(value: &mut Json, rng: &mut Rng, depth: usize) {
    match value {
        Json::Object(map) if !map.is_empty() && (depth == 0 || rng.gen_bool(0.9)) => {
            let keys: Vec<String> = map.keys().cloned().collect();
            let key = keys.choose(rng).unwrap();
            match rng.gen_range(0..12) {
                0 => drop(map.remove(key)),
                1 => {
                    let moved = map[key].clone();
                    map.insert(text(rng), moved);
                }
                _ => json_value(&mut map[key], rng, depth + 1),
            }
        }
        Json::Array(items) if !items.is_empty() && rng.gen_bool(0.85) => {
            let at = rng.gen_range(0..items.len());
            match rng.gen_range(0..6) {
                0 => drop(items.remove(at)),
                1 => {
                    let copy = items[at].clone();
                    items.push(copy);
                }
                2 => items.clear(),
                _ => json_value(&mut items[at], rng, depth + 1),
            }
        }
        Json::Number(_) if rng.gen_bool(0.8) => *value = if rng.gen_bool(0.6) { number(rng).into() } else { float(rng).into() },
        Json::String(_) if rng.gen_bool(0.7) => *value = text(rng).into(),
        _ => {
            *value = match rng.gen_range(0..6) {
                0 => Json::Null,
                1 => number(rng).into(),
                2 => float(rng).into(), // null where JSON has no such number
                3 => text(rng).into(),
                4 => Json::Array(vec![]),
                _ => Json::Object(Default::default()),
            }
        }
    }
}

/// The code of a TorchScript module: a number, a line or a name changed. No loops are added: what such a file's code does is not for a reader to
/// judge.
pub fn code(data: &mut Vec<u8>, rng: &mut Rng) {
    let mut lines: Vec<String> = String::from_utf8_lossy(data).lines().map(str::to_string).collect();
    if lines.is_empty() {
        return bytes(data, rng);
    }
    let at = rng.gen_range(0..lines.len());
    match rng.gen_range(0..6) {
        0 => drop(lines.remove(at)),
        1 => {
            let copy = lines[at].clone();
            lines.insert(at, copy);
        }
        2 => {
            let other = rng.gen_range(0..lines.len());
            lines.swap(at, other);
        }
        _ => {
            // A whole number or a name, in a line that has one.
            let digits = rng.gen_bool(0.7);
            let belongs = |c: char| if digits { c.is_ascii_digit() } else { c.is_ascii_alphabetic() };
            let Some(line) = lines.iter_mut().skip(at).find(|line| line.contains(belongs)) else { return bytes(data, rng) };
            let starts: Vec<usize> = line.char_indices().filter(|(_, c)| belongs(*c)).map(|(i, _)| i).collect();
            let start = *starts.choose(rng).unwrap();
            let end = line[start..].find(|c| !belongs(c)).map_or(line.len(), |n| start + n);
            let names = ["self", "x", "Tensor", "relu", "int", "None", "forward", "torch"];
            let new = if digits { number(rng).to_string() } else { names.choose(rng).unwrap().to_string() };
            line.replace_range(start..end, &new);
        }
    }
    *data = lines.join("\n").into_bytes();
    data.push(b'\n');
}
