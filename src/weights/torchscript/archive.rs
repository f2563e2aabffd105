//! A look at a TorchScript archive before libtorch opens it, which compares no checksums, unpacks whatever is packed, and goes on with running
//! statistics that are no numbers.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use tch::{Kind, Tensor};
use zip::{CompressionMethod, ZipArchive};

use super::super::pth::{kind_of, place, tensor_parts};
use crate::error::{Error, Result};
use crate::pickle::{self, Value};

/// A fault without the file's name.
type Fault<T> = std::result::Result<T, String>;

/// Bytes of packed entries, unpacked: the code and what a debugger wants to know of it, some megabytes for the largest networks.
const MOST_PACKED: u64 = 256 << 20;

/// Types of storages that a state dict of ours does not have, and the bytes of a number.
const MORE_WIDTHS: &[(&str, usize)] =
    &[("ComplexFloatStorage", 8), ("ComplexDoubleStorage", 16), ("QInt8Storage", 1), ("QUInt8Storage", 1), ("QInt32Storage", 4)];

/// Refuses an archive that is damaged or promises more than it holds, and a tensor of it that is no number: its code would go on with it. None of
/// its code is run.
pub fn check(path: &Path) -> Result<()> {
    let file = File::open(path).map_err(Error::open(path))?;
    let length = file.metadata().map_err(Error::open(path))?.len();
    looked_at(file, length).map_err(|what| Error::file(path, what))
}

fn looked_at(file: File, length: u64) -> Fault<()> {
    let mut archive = ZipArchive::new(file).map_err(|e| format!("no TorchScript module, or cut short: {e}"))?;
    let root = archive.file_names().find_map(|name| name.strip_suffix("data.pkl").filter(|root| root.matches('/').count() == 1));
    let root = root.ok_or("no TorchScript module: an archive without data.pkl")?.to_string();
    let sizes = intact(&mut archive, length)?;
    for part in ["data", "constants"] {
        let name = format!("{root}{part}.pkl");
        if !sizes.contains_key(&name) {
            continue;
        }
        let mut bytes = vec![];
        archive.by_name(&name).map_err(|e| e.to_string())?.read_to_end(&mut bytes).map_err(|e| format!("{name}: {e}"))?;
        let (value, _) = pickle::read(&bytes).map_err(|e| format!("{part}.pkl: {e}"))?;
        let mut tensors = vec![];
        gather(&value, String::new(), &mut tensors);
        let folder = format!("{root}{part}/");
        let mut used: BTreeMap<&str, Used> = BTreeMap::new();
        for (tensor, parts) in &tensors {
            let (key, new) = inside(&sizes, &folder, tensor, parts).map_err(|e| format!("{tensor}: {e}"))?;
            if let Some(new) = new {
                used.entry(key).and_modify(|used| used.join(&new)).or_insert(new);
            }
        }
        for (key, used) in used {
            let entry = archive.by_name(&format!("{folder}{key}")).map_err(|e| e.to_string())?;
            used.check(entry).map_err(|e| format!("{}: {e}", used.name))?;
        }
    }
    Ok(())
}

/// Reads every entry to its end, which compares its checksum. Says how many bytes each has.
fn intact(archive: &mut ZipArchive<File>, length: u64) -> Fault<HashMap<String, u64>> {
    let (mut stored, mut packed) = (length, MOST_PACKED);
    let mut sizes = HashMap::new();
    for i in 0..archive.len() {
        let mut entry = archive.by_index(i).map_err(|e| format!("entry {i}: {e}"))?;
        let name = entry.name().to_string();
        // Stored entries are together no larger than the file, unless they share bytes.
        let left = if entry.compression() == CompressionMethod::Stored { &mut stored } else { &mut packed };
        let read = io::copy(&mut entry.by_ref().take(*left + 1), &mut io::sink()).map_err(|e| format!("{name}: {e}"))?;
        *left = left.checked_sub(read).ok_or_else(|| format!("{name}: holds more bytes than a network of this file's size has"))?;
        if sizes.insert(name.clone(), read).is_some() {
            return Err(format!("{name}: two entries of this name"));
        }
    }
    Ok(sizes)
}

/// All tensors of a module, by the attributes that lead there.
fn gather<'a>(value: &'a Value, path: String, found: &mut Vec<(String, &'a [Value])>) {
    let below = |name: &str| if path.is_empty() { name.to_string() } else { format!("{path}.{name}") };
    let named = |pairs: &'a [(Value, Value)], found: &mut Vec<(String, &'a [Value])>| {
        for (i, (key, value)) in pairs.iter().enumerate() {
            gather(value, below(key.as_str().unwrap_or(&i.to_string())), found);
        }
    };
    match value {
        _ if tensor_parts(value).is_some() => found.extend(tensor_parts(value).map(|parts| (path, parts))),
        Value::List(items) | Value::Tuple(items) | Value::Set(items) => {
            items.iter().enumerate().for_each(|(i, item)| gather(item, below(&i.to_string()), found));
        }
        Value::Dict(pairs) => named(pairs, found),
        Value::Reduce { args, state, items, .. } => {
            // A tensor of another form (quantised) has its storage among its arguments, as the plain ones have.
            match args.as_slice() {
                Some(parts @ [Value::Persistent(_), ..]) => found.push((path.clone(), parts)),
                _ => gather(args, path.clone(), found),
            }
            if let Some(state) = state {
                gather(state, path.clone(), found);
            }
            named(items, found);
        }
        _ => {}
    }
}

/// What the tensors in a storage of floats use of it. However many they are, it is read once.
struct Used<'a> {
    /// The first of them.
    name: &'a str,
    kind: Kind,
    first: usize,
    last: usize,
    /// Masks may hold infinities, running statistics may not.
    statistic: bool,
}

impl Used<'_> {
    fn join(&mut self, other: &Used) {
        (self.first, self.last) = (self.first.min(other.first), self.last.max(other.last));
        self.statistic |= other.statistic;
    }

    /// Is it made of numbers?
    fn check(&self, mut storage: impl Read) -> Fault<()> {
        let (width, count) = (self.kind.elt_size_in_bytes(), self.last - self.first + 1);
        let mut bytes = vec![];
        storage.read_to_end(&mut bytes).map_err(|e| e.to_string())?;
        let part = bytes.get(self.first * width..(self.last + 1) * width).ok_or("its storage was another one before")?;
        let numbers = Tensor::f_from_data_size(part, &[count as i64], self.kind).map_err(|e| e.to_string())?;
        let bad = if self.statistic { numbers.isfinite().logical_not() } else { numbers.isnan() };
        match bad.sum(Kind::Int64).int64_value(&[]) {
            0 => Ok(()),
            bad => Err(format!("{bad} of its {count} numbers are not finite")),
        }
    }
}

/// Does a tensor lie inside its storage? Says which one, and what it uses of it where that holds floats.
fn inside<'a>(sizes: &HashMap<String, u64>, folder: &str, name: &'a str, parts: &'a [Value]) -> Fault<(&'a str, Option<Used<'a>>)> {
    let place = place(parts, |storage, key| {
        let more = MORE_WIDTHS.iter().find(|(name, _)| *name == storage).map(|(_, width)| *width);
        let width = more.map_or_else(|| kind_of(storage).map(|kind| kind.elt_size_in_bytes()), Ok)?;
        let size = sizes.get(&format!("{folder}{key}")).ok_or_else(|| format!("storage {key} is not in the file"))?;
        Ok(*size as usize / width)
    })?;
    let float = kind_of(place.storage).ok().filter(|kind| matches!(kind, Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16));
    let statistic = name.ends_with("running_mean") || name.ends_with("running_var");
    let used = float.zip(place.span).map(|(kind, (first, last))| Used { name, kind, first, last, statistic });
    Ok((place.key, used))
}
