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

/// Where checkpoints keep the state dict of their network, the likeliest first.
const NESTS: [&str; 6] = ["state_dict", "net", "model", "student", "model_state_dict", "student_state_dict"];
/// How deep dicts lie in one another.
const DEPTH: usize = 5;

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
        let length = file.metadata().map_err(Error::open(path))?.len();
        File::open(path).map_err(Error::open(path)).map(|file| read_zip(file, length))?
    } else {
        std::fs::read(path).map_err(Error::open(path)).map(|bytes| read_legacy(&bytes))?
    };
    named.map_err(|what| Error::file(path, what))
}

fn read_zip(file: File, length: u64) -> Fault<Named> {
    let unreadable = |e: zip::result::ZipError| format!("no PyTorch archive, or cut short: {e}");
    let mut archive = zip::ZipArchive::new(file).map_err(unreadable)?;
    let names: Vec<String> = archive.file_names().map(str::to_string).collect();
    let root = names.iter().find_map(|name| name.strip_suffix("data.pkl").filter(|root| root.matches('/').count() == 1));
    let root = root.ok_or("a zip archive without data.pkl: torch.save did not write it")?.to_string();
    if names.iter().any(|name| name.starts_with(&format!("{root}code/"))) {
        return Err("a TorchScript module; its state_dict() is wanted".to_string());
    }
    // All entries together are no larger than the file: more is promised only where entries share bytes or are packed.
    let mut left = length;
    let mut entry = |name: String| -> Fault<Vec<u8>> {
        let mut entry = archive.by_name(&name).map_err(|e| format!("{name}: {e}"))?;
        if entry.compression() != zip::CompressionMethod::Stored {
            return Err(format!("{name}: a compressed entry; torch.save stores them as they are"));
        }
        let promised = entry.size().max(entry.compressed_size());
        left = left.checked_sub(promised).ok_or_else(|| format!("{name}: promises {promised} bytes, more than the file has left"))?;
        let mut bytes = vec![];
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
    state_dict(&value, &storages, length as usize)
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
    state_dict(&value, &|key| loaded.get(key).cloned().ok_or_else(|| format!("storage {key} is not in the file")), bytes.len())
}

/// The bytes per number of every storage that the object refers to.
fn collect_widths(value: &Value, widths: &mut HashMap<String, usize>) {
    match value {
        Value::Persistent(id) => {
            if let Ok((name, key)) = storage(id)
                && let Ok(kind) = kind_of(name)
            {
                widths.insert(key.to_string(), kind.elt_size_in_bytes());
            }
        }
        Value::List(items) | Value::Tuple(items) => items.iter().for_each(|item| collect_widths(item, widths)),
        Value::Dict(pairs) => pairs.iter().for_each(|(_, item)| collect_widths(item, widths)),
        Value::Reduce { args, .. } => collect_widths(args, widths),
        _ => {}
    }
}

/// How often the tensors of a file may repeat its numbers: those that share a storage (tied weights) are copied apart.
const COPIES: usize = 8;

/// The tensors of a checkpoint, however its dicts lie in one another. One of the usual names leads on where it holds more tensors than stand beside
/// it (RepDistiller keeps `best_acc` there); dicts under other names are all read, each name with the path before it. `length` is the file's.
fn state_dict(value: &Value, storages: &Storages, length: usize) -> Fault<Named> {
    if value.as_dict().is_none() {
        return Err("holds no state dict: a dict of tensors is wanted".to_string());
    }
    let mut found = vec![];
    gather(usual(value, DEPTH), String::new(), DEPTH, &mut found);
    if found.is_empty() {
        let keys: Vec<&str> = value.as_dict().into_iter().flatten().filter_map(|(key, _)| key.as_str()).take(8).collect();
        return Err(format!("holds no tensors, neither itself nor under {}; its keys: {}", NESTS.join(", "), keys.join(", ")));
    }
    let mut left = length.saturating_mul(COPIES);
    let rebuilt = |(name, parts): (String, &[Value])| match rebuild(parts, storages, &mut left) {
        Ok(tensor) => Ok((name, tensor)),
        Err(e) => Err(format!("{name}: {e}")),
    };
    found.into_iter().map(rebuilt).collect()
}

/// How many tensors a dict holds itself.
fn held(value: &Value) -> usize {
    value.as_dict().map_or(0, |pairs| pairs.iter().filter(|(_, entry)| tensor_parts(entry).is_some()).count())
}

/// The dict that the usual names lead to.
fn usual(value: &Value, depth: usize) -> &Value {
    let own = held(value);
    let nested = NESTS.iter().filter_map(|nest| value.get(nest).filter(|v| v.as_dict().is_some()));
    let best = nested.map(|nested| usual(nested, depth.saturating_sub(1))).find(|nested| held(nested) > own);
    best.filter(|_| depth > 0).unwrap_or(value)
}

/// All tensors below a dict, by the keys that lead there; what has a key that is no text (an optimizer's state) is no network's.
fn gather<'a>(value: &'a Value, path: String, depth: usize, found: &mut Vec<(String, &'a [Value])>) {
    for (key, entry) in value.as_dict().into_iter().flatten() {
        let Some(key) = key.as_str() else { continue };
        let name = format!("{path}{key}");
        match tensor_parts(entry) {
            Some(parts) => found.push((name, parts)),
            None if depth > 0 => gather(entry, format!("{name}."), depth - 1, found),
            None => {}
        }
    }
}

/// The arguments of `_rebuild_tensor_v2`, directly or inside a Parameter.
pub(super) fn tensor_parts(value: &Value) -> Option<&[Value]> {
    let Value::Reduce { callable, args, .. } = value else { return None };
    let args = args.as_slice()?;
    if callable.is_global("torch._utils", "_rebuild_tensor_v2") {
        return Some(args);
    }
    let is_parameter = callable.is_global("torch._utils", "_rebuild_parameter");
    args.first().filter(|_| is_parameter).and_then(tensor_parts)
}

/// Type and key of ('storage', torch.FloatStorage, key, location, count).
fn storage(id: &Value) -> Fault<(&str, &str)> {
    match id.as_slice() {
        Some([_, Value::Global { module, name }, key, ..]) if module == "torch" => {
            Ok((name, key.as_str().ok_or("a storage without a key")?))
        }
        _ => Err("a storage of no known form".to_string()),
    }
}

/// What the numbers of a storage are.
pub(super) fn kind_of(storage: &str) -> Fault<Kind> {
    let known = KINDS.iter().find(|(name, _)| *name == storage);
    known.map(|(_, kind)| *kind).ok_or_else(|| format!("a torch.{storage} is not supported"))
}

/// Where a tensor lies in its storage.
pub(super) struct Place<'a> {
    /// torch's name of the storage's type, and its key.
    pub(super) storage: &'a str,
    pub(super) key: &'a str,
    size: Vec<i64>,
    stride: Vec<i64>,
    /// The places of its first and last number; none where it has no numbers.
    pub(super) span: Option<(usize, usize)>,
}

impl Place<'_> {
    fn numel(&self) -> i64 {
        self.size.iter().try_fold(1i64, |n, d| n.checked_mul(*d)).unwrap_or(i64::MAX)
    }
}

/// Reads the arguments of `_rebuild_tensor_v2` and holds them against the storage, of which `held` says how many numbers it has.
pub(super) fn place<'a>(parts: &'a [Value], held: impl FnOnce(&str, &str) -> Fault<usize>) -> Fault<Place<'a>> {
    let [Value::Persistent(id), offset, size, stride, ..] = parts else { return Err("a tensor of no known form".to_string()) };
    let (storage, key) = storage(id)?;
    let counts = |value: &Value| -> Option<Vec<i64>> { value.as_slice()?.iter().map(|d| d.as_int().filter(|d| *d >= 0)).collect() };
    let (offset, size, stride) = (offset.as_int().filter(|o| *o >= 0), counts(size), counts(stride));
    let (Some(offset), Some(size), Some(stride)) = (offset, size, stride) else { return Err("a tensor without a shape".to_string()) };
    let held = held(storage, key)?;
    // The place of the last number, if there is any.
    let last = size.iter().zip(&stride).try_fold(offset, |at, (d, s)| (d - 1).max(0).checked_mul(*s)?.checked_add(at));
    let last = last.filter(|last| (*last as u64) < held as u64);
    let empty = size.contains(&0);
    if size.len() != stride.len() || !(empty || last.is_some()) {
        return Err(format!("shape {size:?} with strides {stride:?} from {offset} on needs more than the {held} numbers of its storage"));
    }
    let span = last.filter(|_| !empty).map(|last| (offset as usize, last as usize));
    Ok(Place { storage, key, size, stride, span })
}

/// Pays from `left` before it copies anything.
fn rebuild(parts: &[Value], storages: &Storages, left: &mut usize) -> Fault<Tensor> {
    let mut data = Rc::default();
    let mut held = 0;
    let place = place(parts, |storage, key| {
        let width = kind_of(storage)?.elt_size_in_bytes();
        data = storages(key)?;
        held = data.len() / width;
        Ok(held)
    })?;
    let kind = kind_of(place.storage)?;
    let (size, numel) = (&place.size, place.numel());
    let Some((first, last)) = place.span else {
        return Tensor::f_zeros(size, (kind, tch::Device::Cpu)).map_err(|e| e.to_string());
    };
    // An expanded tensor (stride 0) names one number many times: what it would grow to has no bound.
    if numel as u64 > held as u64 {
        return Err(format!("shape {size:?} has {numel} numbers and its storage {held}: an expanded tensor; save a contiguous() one"));
    }
    let width = kind.elt_size_in_bytes();
    // From the first number of the tensor to the last: a storage that many tensors share is not copied whole for each.
    let copied = (last - first + 1).max(numel as usize) * width;
    *left = left.checked_sub(copied).ok_or_else(|| format!("its tensors repeat the file's bytes more than {COPIES} times"))?;
    let part = &data[first * width..(last + 1) * width];
    let flat = Tensor::f_from_data_size(part, &[(last - first + 1) as i64], kind).map_err(|e| e.to_string())?;
    flat.f_as_strided(size, &place.stride, 0).and_then(|t| t.f_contiguous()).map_err(|e| e.to_string())
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
