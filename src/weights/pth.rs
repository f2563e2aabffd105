//! PyTorch's state dicts: reads what `torch.save` writes, in the zip format and the one before torch 1.6, and writes files that
//! `torch.load(path, weights_only=True)` opens.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::path::Path;
use std::rc::Rc;

use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::files::{Pending, tensor_bytes};
use crate::params::Named;
use crate::pickle::{self, Value};

const KINDS: &[(&str, Kind)] = &[
    ("FloatStorage", Kind::Float),
    ("DoubleStorage", Kind::Double),
    ("HalfStorage", Kind::Half),
    ("BFloat16Storage", Kind::BFloat16),
    ("LongStorage", Kind::Int64),
    ("IntStorage", Kind::Int),
    ("ShortStorage", Kind::Int16),
    ("CharStorage", Kind::Int8),
    ("ByteStorage", Kind::Uint8),
    ("BoolStorage", Kind::Bool),
];

/// Where checkpoints keep the state dict of their network.
const NESTS: [&str; 3] = ["state_dict", "net", "model"];

/// A fault without the file's name: `read` adds it.
type Fault<T> = std::result::Result<T, String>;

/// The bytes of a storage by its key.
type Storages<'a> = dyn Fn(&str) -> Fault<Rc<Vec<u8>>> + 'a;

/// Starts a file in the format before torch 1.6: a pickle of protocol 2 that holds this number.
const LEGACY_MAGIC: [u8; 10] = [0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19];

/// Whether a file that begins like this may be one of `torch.save`.
pub(super) fn looks_like(head: &[u8]) -> bool {
    is_zip(head) || head.starts_with(&[0x80, 2])
}

fn is_zip(head: &[u8]) -> bool {
    head.starts_with(b"PK\x03\x04")
}

/// The tensors of the state dict in a file, by name.
pub(super) fn read(path: &Path) -> Result<Named> {
    let mut file = File::open(path).map_err(Error::open(path))?;
    let mut head = [0; 4];
    let n = file.read(&mut head).map_err(Error::open(path))?;
    let named = if is_zip(&head[..n]) {
        File::open(path).map_err(Error::open(path)).map(read_zip)?
    } else {
        std::fs::read(path).map_err(Error::open(path)).map(|bytes| read_legacy(&bytes))?
    };
    named.map_err(|what| Error::file(path, what))
}

fn read_zip(file: File) -> Fault<Named> {
    let unreadable = |e: zip::result::ZipError| format!("no PyTorch archive, or cut short: {e}");
    let mut archive = zip::ZipArchive::new(file).map_err(unreadable)?;
    let names: Vec<String> = archive.file_names().map(str::to_string).collect();
    let root = names.iter().find_map(|name| name.strip_suffix("data.pkl").filter(|root| root.matches('/').count() == 1));
    let root = root.ok_or("a zip archive without data.pkl: torch.save did not write it")?.to_string();
    if names.iter().any(|name| name.starts_with(&format!("{root}code/"))) {
        return Err("a TorchScript module; its state_dict() is wanted".to_string());
    }
    let mut entry = |name: String| -> Fault<Vec<u8>> {
        let mut bytes = vec![];
        let mut entry = archive.by_name(&name).map_err(|e| format!("{name}: {e}"))?;
        entry.read_to_end(&mut bytes).map_err(|e| format!("{name}: {e}"))?;
        Ok(bytes)
    };
    if names.iter().any(|name| *name == format!("{root}byteorder")) && entry(format!("{root}byteorder"))? != b"little" {
        return Err("written on a big-endian machine, which is not supported".to_string());
    }
    let (value, _) = pickle::read(&entry(format!("{root}data.pkl"))?).map_err(|e| format!("data.pkl: {e}"))?;
    let loaded: RefCell<HashMap<String, Rc<Vec<u8>>>> = RefCell::default();
    let entry = RefCell::new(entry);
    let storages = |key: &str| {
        if let Some(bytes) = loaded.borrow().get(key) {
            return Ok(bytes.clone());
        }
        let bytes = Rc::new((entry.borrow_mut())(format!("{root}data/{key}"))?);
        loaded.borrow_mut().insert(key.to_string(), bytes.clone());
        Ok(bytes)
    };
    state_dict(&value, &storages)
}

/// Magic number, protocol, system, the object, the keys of its storages, then each storage: its length and its numbers.
fn read_legacy(bytes: &[u8]) -> Fault<Named> {
    let mut at = 0;
    let mut next = || {
        let (value, used) = pickle::read(&bytes[at..]).map_err(|e| format!("no PyTorch file: {e}"))?;
        at += used;
        Ok::<(Value, usize), String>((value, at))
    };
    let is_magic = matches!(next()?.0, Value::Long(number) if number.starts_with(&LEGACY_MAGIC));
    if !is_magic {
        return Err("a pickle that torch.save did not write".to_string());
    }
    next()?;
    next()?;
    let (value, _) = next()?;
    let (keys, mut at) = next()?;
    let mut widths = HashMap::new();
    collect_widths(&value, &mut widths);
    let mut loaded = HashMap::new();
    for key in keys.as_slice().unwrap_or_default().iter().filter_map(Value::as_str) {
        let cut = || format!("storage {key}: cut short");
        let count = bytes.get(at..at + 8).ok_or_else(cut)?;
        let count = u64::from_le_bytes(count.try_into().expect("eight bytes")) as usize;
        let width = *widths.get(key).ok_or_else(|| format!("storage {key}: of no known type"))?;
        let end = count.checked_mul(width).and_then(|n| n.checked_add(at + 8)).ok_or_else(cut)?;
        loaded.insert(key.to_string(), Rc::new(bytes.get(at + 8..end).ok_or_else(cut)?.to_vec()));
        at = end;
    }
    state_dict(&value, &|key| loaded.get(key).cloned().ok_or_else(|| format!("storage {key} is not in the file")))
}

/// The bytes per number of every storage that the object refers to.
fn collect_widths(value: &Value, widths: &mut HashMap<String, usize>) {
    match value {
        Value::Persistent(id) => {
            if let Ok((kind, key)) = storage(id) {
                widths.insert(key.to_string(), kind.elt_size_in_bytes());
            }
        }
        Value::List(items) | Value::Tuple(items) => items.iter().for_each(|item| collect_widths(item, widths)),
        Value::Dict(pairs) => pairs.iter().for_each(|(_, item)| collect_widths(item, widths)),
        Value::Reduce { args, .. } => collect_widths(args, widths),
        _ => {}
    }
}

/// The dict of tensors: the object itself, or what it keeps under one of the usual names.
fn state_dict(value: &Value, storages: &Storages) -> Fault<Named> {
    let mut value = value;
    loop {
        let pairs = value.as_dict().ok_or("holds no state dict: a dict of tensors is wanted")?;
        let mut named = vec![];
        for (key, entry) in pairs {
            if let (Some(key), Some(parts)) = (key.as_str(), tensor_parts(entry)) {
                named.push((key.to_string(), rebuild(parts, storages).map_err(|e| format!("{key}: {e}"))?));
            }
        }
        if !named.is_empty() {
            return Ok(named);
        }
        value = NESTS.iter().find_map(|nest| value.get(nest).filter(|v| v.as_dict().is_some())).ok_or_else(|| {
            let keys: Vec<&str> = pairs.iter().filter_map(|(key, _)| key.as_str()).take(8).collect();
            format!("holds no tensors, neither itself nor under {}; its keys: {}", NESTS.join(", "), keys.join(", "))
        })?;
    }
}

/// The arguments of `_rebuild_tensor_v2`, directly or inside a Parameter.
fn tensor_parts(value: &Value) -> Option<&[Value]> {
    let Value::Reduce { callable, args, .. } = value else { return None };
    let args = args.as_slice()?;
    if callable.is_global("torch._utils", "_rebuild_tensor_v2") {
        return Some(args);
    }
    let is_parameter = callable.is_global("torch._utils", "_rebuild_parameter");
    args.first().filter(|_| is_parameter).and_then(tensor_parts)
}

/// Type and key of ('storage', torch.FloatStorage, key, location, count).
fn storage(id: &Value) -> Fault<(Kind, &str)> {
    match id.as_slice() {
        Some([_, Value::Global { module, name }, key, ..]) if module == "torch" => {
            let kind = KINDS.iter().find(|(storage, _)| storage == name).ok_or_else(|| format!("a {module}.{name} is not supported"))?.1;
            Ok((kind, key.as_str().ok_or("a storage without a key")?))
        }
        _ => Err("a storage of no known form".to_string()),
    }
}

fn rebuild(parts: &[Value], storages: &Storages) -> Fault<Tensor> {
    let [Value::Persistent(id), offset, size, stride, ..] = parts else { return Err("a tensor of no known form".to_string()) };
    let (kind, key) = storage(id)?;
    let counts = |value: &Value| -> Option<Vec<i64>> { value.as_slice()?.iter().map(|d| d.as_int().filter(|d| *d >= 0)).collect() };
    let (offset, size, stride) = (offset.as_int().filter(|o| *o >= 0), counts(size), counts(stride));
    let (Some(offset), Some(size), Some(stride)) = (offset, size, stride) else { return Err("a tensor without a shape".to_string()) };
    let data = storages(key)?;
    let held = data.len() / kind.elt_size_in_bytes();
    // The place of the last number, if there is any.
    let last = size.iter().zip(&stride).try_fold(offset, |at, (d, s)| (d - 1).max(0).checked_mul(*s)?.checked_add(at));
    let empty = size.contains(&0);
    if size.len() != stride.len() || !(empty || last.is_some_and(|last| (last as u64) < held as u64)) {
        return Err(format!("shape {size:?} with strides {stride:?} from {offset} on needs more than the {held} numbers of its storage"));
    }
    if empty {
        return Tensor::f_zeros(&size, (kind, tch::Device::Cpu)).map_err(|e| e.to_string());
    }
    let flat = Tensor::f_from_data_size(&data, &[held as i64], kind).map_err(|e| e.to_string())?;
    flat.f_as_strided(&size, &stride, offset).and_then(|t| t.f_contiguous()).map_err(|e| e.to_string())
}

/// Writes a state dict in the zip format.
pub(super) fn write(path: &Path, tensors: &Named) -> Result<()> {
    // The program's writes fail as the machine's do; the zip crate has its own error.
    let failed = |e: zip::result::ZipError| Error::Io { what: "cannot write", path: path.to_path_buf(), source: e.into() };
    let mut pending = Pending::create(path)?;
    let mut archive = zip::ZipWriter::new(BufWriter::new(pending.file()));
    // Stored and aligned as torch.save does, so that torch can map the file; a fixed time, so that the same weights give the same bytes.
    let options =
        zip::write::FileOptions::default().compression_method(zip::CompressionMethod::Stored).last_modified_time(zip::DateTime::default());
    let mut entry = |name: String, bytes: &[u8]| -> Result<()> {
        let options = options.large_file(bytes.len() > u32::MAX as usize);
        archive.start_file_aligned(format!("archive/{name}"), options, 64).map_err(failed)?;
        archive.write_all(bytes).map_err(Error::io("cannot write", path))
    };
    entry("data.pkl".to_string(), &pickled(tensors)?)?;
    entry("byteorder".to_string(), b"little")?;
    for (key, (_, tensor)) in tensors.iter().enumerate() {
        entry(format!("data/{key}"), &tensor_bytes(tensor))?;
    }
    entry("version".to_string(), b"3\n")?;
    archive.finish().map_err(failed)?.flush().map_err(Error::io("cannot write", path))?;
    drop(archive);
    pending.commit()
}

/// The OrderedDict of `_rebuild_tensor_v2(storage, 0, size, stride, False, OrderedDict())` that torch.save pickles, protocol 2.
fn pickled(tensors: &Named) -> Result<Vec<u8>> {
    let mut out = pickle::Writer::new(2);
    fn ordered_dict(out: &mut pickle::Writer) -> &mut pickle::Writer {
        out.global("collections", "OrderedDict").ops(b")R")
    }
    ordered_dict(&mut out).ops(b"(");
    for (key, (name, tensor)) in tensors.iter().enumerate() {
        let known = KINDS.iter().find(|(_, kind)| *kind == tensor.kind());
        let (storage, _) =
            known.ok_or_else(|| Error::failed(format!("`{name}` is of type {:?}, which has no torch storage", tensor.kind())))?;
        out.text(name).global("torch._utils", "_rebuild_tensor_v2").ops(b"((");
        out.text("storage").global("torch", storage).text(&key.to_string()).text("cpu").int(tensor.numel() as i64).ops(b"tQ");
        let size = tensor.size();
        out.int(0).ints(&size).ints(&row_major(&size)).ops(&[0x89]);
        ordered_dict(&mut out).ops(b"tR");
    }
    out.ops(b"u");
    Ok(out.finish())
}

/// The strides of a contiguous tensor of this size.
fn row_major(size: &[i64]) -> Vec<i64> {
    let mut strides: Vec<i64> = size
        .iter()
        .rev()
        .scan(1, |step, d| {
            let now = *step;
            *step *= d.max(&1);
            Some(now)
        })
        .collect();
    strides.reverse();
    strides
}
