//! Safetensors files, read and written piece by piece, so that a file may be larger than memory. The header is written in a fixed
//! order: the same tensors give the same bytes.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::Metadata;
use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::files::{Pending, tensor_bytes};
use crate::params::Named;

/// The header's free text, e.g. what a network was trained on.
pub type Texts = BTreeMap<String, String>;

const KINDS: &[(Dtype, Kind)] = &[
    (Dtype::F64, Kind::Double),
    (Dtype::I64, Kind::Int64),
    (Dtype::F32, Kind::Float),
    (Dtype::I32, Kind::Int),
    (Dtype::F16, Kind::Half),
    (Dtype::BF16, Kind::BFloat16),
    (Dtype::I16, Kind::Int16),
    (Dtype::I8, Kind::Int8),
    (Dtype::U8, Kind::Uint8),
    (Dtype::BOOL, Kind::Bool),
];

/// A safetensors file whose header is read and whose data are not yet.
pub struct Reader {
    file: File,
    path: PathBuf,
    header: Metadata,
    /// Where the data begin.
    start: u64,
}

impl Reader {
    /// Reads and checks the header.
    pub fn open(path: &Path) -> Result<Reader> {
        let mut file = File::open(path).map_err(Error::open(path))?;
        let length = file.metadata().map_err(Error::open(path))?.len();
        let mut size = [0; 8];
        if length < 8 {
            return Err(Error::file(path, format!("no safetensors file: {length} bytes long")));
        }
        file.read_exact(&mut size).map_err(Error::open(path))?;
        let size = u64::from_le_bytes(size);
        if size > length - 8 {
            return Err(Error::file(
                path,
                format!("no safetensors file, or cut short: {length} bytes, its header alone would have {size}"),
            ));
        }
        let mut header = vec![0; size as usize];
        file.read_exact(&mut header).map_err(Error::open(path))?;
        let header: Metadata = serde_json::from_slice(&header).map_err(|e| Error::file(path, format!("no safetensors header: {e}")))?;
        let (start, end) = (8 + size, 8 + size + header.data_len() as u64);
        if end != length {
            return Err(Error::file(path, format!("cut short or overlong: {length} bytes where its header promises {end}")));
        }
        Ok(Reader { file, path: path.to_path_buf(), header, start })
    }

    /// The header's free text.
    pub fn texts(&self) -> Texts {
        self.header.metadata().iter().flatten().map(|(k, v)| (k.clone(), v.clone())).collect()
    }

    /// In the order they lie in the file.
    pub fn names(&self) -> Vec<String> {
        self.header.offset_keys()
    }

    /// The sizes of a tensor; none where the file does not hold it.
    pub fn shape(&self, name: &str) -> Option<Vec<i64>> {
        self.header.info(name).map(|info| info.shape.iter().map(|&d| d as i64).collect())
    }

    /// The type of a tensor.
    pub fn kind(&self, name: &str) -> Result<Kind> {
        let info = self.header.info(name).ok_or_else(|| Error::file(&self.path, format!("holds no tensor `{name}`")))?;
        let known = KINDS.iter().find(|(dtype, _)| *dtype == info.dtype);
        known
            .map(|(_, kind)| *kind)
            .ok_or_else(|| Error::file(&self.path, format!("`{name}` is of type {}, which is not supported", info.dtype)))
    }

    /// A whole tensor.
    pub fn tensor(&mut self, name: &str) -> Result<Tensor> {
        let kind = self.kind(name)?;
        let info = self.header.info(name).expect("it has a kind").clone();
        let shape: Vec<i64> = info.shape.iter().map(|&d| d as i64).collect();
        self.part(info.data_offsets.0, info.data_offsets.1, &shape, kind)
    }

    /// `count` slices of a tensor along its first dimension.
    pub fn rows(&mut self, name: &str, first: usize, count: usize) -> Result<Tensor> {
        let kind = self.kind(name)?;
        let info = self.header.info(name).expect("it has a kind").clone();
        let rows = *info.shape.first().ok_or_else(|| Error::file(&self.path, format!("`{name}` is a single number")))?;
        assert!(first + count <= rows, "rows {first}..{} of {rows}", first + count);
        let row = (info.data_offsets.1 - info.data_offsets.0).checked_div(rows).unwrap_or(0);
        let shape: Vec<i64> = std::iter::once(count).chain(info.shape[1..].iter().copied()).map(|d| d as i64).collect();
        let from = info.data_offsets.0 + first * row;
        self.part(from, from + count * row, &shape, kind)
    }

    fn part(&mut self, from: usize, to: usize, shape: &[i64], kind: Kind) -> Result<Tensor> {
        let mut bytes = vec![0; to - from];
        self.file.seek(SeekFrom::Start(self.start + from as u64)).map_err(Error::open(&self.path))?;
        self.file.read_exact(&mut bytes).map_err(Error::open(&self.path))?;
        Ok(Tensor::f_from_data_size(&bytes, shape, kind)?)
    }
}

/// A safetensors file whose tensors are known by name, type and shape and come row by row.
pub struct Writer {
    file: Pending,
    start: u64,
    tensors: Vec<Place>,
}

struct Place {
    name: String,
    kind: Kind,
    shape: Vec<i64>,
    from: u64,
    bytes: u64,
}

impl Writer {
    /// Writes the header: what the file will hold, by name, type and shape.
    pub fn create(path: &Path, tensors: Vec<(String, Kind, Vec<i64>)>, texts: &Texts) -> Result<Writer> {
        let mut tensors: Vec<Place> = tensors
            .into_iter()
            .map(|(name, kind, shape)| Place {
                name,
                kind,
                from: 0,
                bytes: shape.iter().product::<i64>() as u64 * kind.elt_size_in_bytes() as u64,
                shape,
            })
            .collect();
        // Widest type first, so that every tensor is aligned.
        tensors.sort_by(|a, b| (b.kind.elt_size_in_bytes(), &a.name).cmp(&(a.kind.elt_size_in_bytes(), &b.name)));
        let mut header = serde_json::Map::new();
        if !texts.is_empty() {
            header.insert("__metadata__".to_string(), serde_json::json!(texts));
        }
        let mut end = 0;
        for place in &mut tensors {
            (place.from, end) = (end, end + place.bytes);
            let known = KINDS.iter().find(|(_, kind)| *kind == place.kind);
            let (dtype, _) = known
                .ok_or_else(|| Error::failed(format!("`{}` is of type {:?}, which safetensors cannot hold", place.name, place.kind)))?;
            header.insert(
                place.name.clone(),
                serde_json::json!({"dtype": dtype.to_string(), "shape": place.shape, "data_offsets": [place.from, end]}),
            );
        }
        let mut header = serde_json::to_vec(&header).expect("names and numbers");
        header.resize(header.len().next_multiple_of(8), b' ');
        let mut file = Pending::create(path)?;
        let mut begin = |bytes: &[u8]| file.file().write_all(bytes).map_err(Error::io("cannot write", path));
        begin(&(header.len() as u64).to_le_bytes())?;
        begin(&header)?;
        Ok(Writer { start: 8 + header.len() as u64, file, tensors })
    }

    /// Writes `rows` at their place from row `first` of the tensor `name` on.
    pub fn rows(&mut self, name: &str, first: usize, rows: &Tensor) -> Result<()> {
        let place = self.tensors.iter().find(|place| place.name == name).unwrap_or_else(|| panic!("{name} is in the header"));
        let size = rows.size();
        assert!(place.kind == rows.kind() && place.shape.get(1..) == size.get(1..), "{name}: {size:?} are rows of {:?}", place.shape);
        let row = place.bytes.checked_div(place.shape.first().map_or(1, |&n| n as u64)).unwrap_or(0);
        self.write(place.from + first as u64 * row, &tensor_bytes(rows))
    }

    fn write(&mut self, from: u64, bytes: &[u8]) -> Result<()> {
        let path = self.file.path().to_path_buf();
        let file = self.file.file();
        file.seek(SeekFrom::Start(self.start + from)).and_then(|_| file.write_all(bytes)).map_err(Error::io("cannot write", path))
    }

    /// The file appears under its name.
    pub fn finish(self) -> Result<()> {
        self.file.commit()
    }
}

/// Writes whole tensors.
pub fn save(path: &Path, tensors: &Named, texts: &Texts) -> Result<()> {
    let layout = tensors.iter().map(|(name, t)| (name.clone(), t.kind(), t.size())).collect();
    let mut writer = Writer::create(path, layout, texts)?;
    for (name, tensor) in tensors {
        let at = writer.tensors.iter().find(|place| place.name == *name).expect("all are in the header").from;
        writer.write(at, &tensor_bytes(tensor))?;
    }
    writer.finish()
}
