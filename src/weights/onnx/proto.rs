//! The part of onnx.proto that networks need, to bytes and back. Protocol buffers are a list of numbered fields, each a number or a
//! length and bytes; field numbers below are those of onnx.proto3.

use std::path::Path;

use tch::{Kind, Tensor};

use super::OPSET;
use crate::error::{Error, Result};
use crate::files;
use crate::params::Named;

/// The format of files that came with opset 17.
const IR_VERSION: u64 = 8;

/// A property of a node.
#[derive(Debug, Clone, PartialEq)]
pub enum Attribute {
    /// One whole number.
    Int(i64),
    /// Several.
    Ints(Vec<i64>),
    /// A number.
    Float(f32),
}

/// One operation.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// What it does, `Conv`.
    pub op: String,
    /// Its own name.
    pub name: String,
    /// What it reads: outputs of other nodes, tensors, the input. An empty name is an input left out.
    pub inputs: Vec<String>,
    /// What it gives.
    pub outputs: Vec<String>,
    /// Its properties.
    pub attributes: Vec<(String, Attribute)>,
}

impl Node {
    /// The property of this name.
    pub fn attribute(&self, name: &str) -> Option<&Attribute> {
        self.attributes.iter().find(|(n, _)| n == name).map(|(_, value)| value)
    }
}

/// An input or an output: a name, and for each dimension its size or what it is called.
#[derive(Debug, Clone, PartialEq)]
pub struct Port {
    /// Its name.
    pub name: String,
    /// `Ok` for a size, `Err` for a name.
    pub dims: Vec<std::result::Result<i64, String>>,
}

/// A file's content.
#[derive(Debug)]
pub struct Model {
    /// What the graph is called.
    pub name: String,
    /// Operations, each after those it reads from.
    pub nodes: Vec<Node>,
    /// Tensors of the network and constants.
    pub tensors: Named,
    /// What it is given.
    pub inputs: Vec<Port>,
    /// What it answers.
    pub outputs: Vec<Port>,
    /// What one must know to use it.
    pub metadata: Vec<(String, String)>,
}

#[derive(Default)]
struct Writer(Vec<u8>);

impl Writer {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn number(&mut self, field: u64, value: u64) {
        self.varint(field << 3);
        self.varint(value);
    }

    fn bytes(&mut self, field: u64, bytes: &[u8]) {
        self.varint(field << 3 | 2);
        self.varint(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }

    fn text(&mut self, field: u64, text: &str) {
        self.bytes(field, text.as_bytes());
    }

    fn message(&mut self, field: u64, work: impl FnOnce(&mut Writer)) {
        let mut inner = Writer::default();
        work(&mut inner);
        self.bytes(field, &inner.0);
    }
}

/// onnx.proto's number of a type.
const TYPES: &[(Kind, u64)] = &[(Kind::Float, 1), (Kind::Int64, 7)];

fn write_node(out: &mut Writer, node: &Node) {
    node.inputs.iter().for_each(|name| out.text(1, name));
    node.outputs.iter().for_each(|name| out.text(2, name));
    out.text(3, &node.name);
    out.text(4, &node.op);
    for (name, value) in &node.attributes {
        out.message(5, |out| {
            out.text(1, name);
            match value {
                Attribute::Float(value) => {
                    out.varint(2 << 3 | 5);
                    out.0.extend_from_slice(&value.to_le_bytes());
                    out.number(20, 1);
                }
                Attribute::Int(value) => {
                    out.number(3, *value as u64);
                    out.number(20, 2);
                }
                Attribute::Ints(values) => {
                    values.iter().for_each(|value| out.number(8, *value as u64));
                    out.number(20, 7);
                }
            }
        });
    }
}

fn write_port(out: &mut Writer, port: &Port) {
    out.text(1, &port.name);
    out.message(2, |out| {
        out.message(1, |out| {
            out.number(1, 1); // float
            out.message(2, |out| {
                for dim in &port.dims {
                    out.message(1, |out| match dim {
                        Ok(size) => out.number(1, *size as u64),
                        Err(name) => out.text(2, name),
                    });
                }
            });
        });
    });
}

impl Model {
    /// Writes the file.
    pub fn save(&self, path: &Path) -> Result<()> {
        let mut tensors = vec![];
        for (name, tensor) in &self.tensors {
            let (_, kind) = TYPES
                .iter()
                .find(|(kind, _)| *kind == tensor.kind())
                .ok_or_else(|| Error::failed(format!("`{name}` is of type {:?}, which is not written as ONNX", tensor.kind())))?;
            tensors.push((name, tensor.size(), *kind, files::tensor_bytes(tensor)));
        }
        let mut out = Writer::default();
        out.number(1, IR_VERSION);
        out.text(2, "mcl");
        out.text(3, env!("CARGO_PKG_VERSION"));
        out.message(7, |out| {
            self.nodes.iter().for_each(|node| out.message(1, |out| write_node(out, node)));
            out.text(2, &self.name);
            for (name, size, kind, bytes) in &tensors {
                out.message(5, |out| {
                    size.iter().for_each(|dim| out.number(1, *dim as u64));
                    out.number(2, *kind);
                    out.text(8, name);
                    out.bytes(9, bytes);
                });
            }
            self.inputs.iter().for_each(|port| out.message(11, |out| write_port(out, port)));
            self.outputs.iter().for_each(|port| out.message(12, |out| write_port(out, port)));
        });
        out.message(8, |out| out.number(2, OPSET as u64));
        for (key, value) in &self.metadata {
            out.message(14, |out| {
                out.text(1, key);
                out.text(2, value);
            });
        }
        files::write(path, &out.0)
    }

    /// Reads a file, of ours or of others as far as they use the same fields.
    pub fn read(path: &Path) -> Result<Model> {
        let data = std::fs::read(path).map_err(Error::open(path))?;
        read_model(&data).map_err(|what| Error::file(path, format!("no ONNX file that we read: {what}")))
    }
}

type Parsed<T> = std::result::Result<T, String>;

/// What a field holds.
enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    Four([u8; 4]),
}

impl<'a> Field<'a> {
    fn number(&self) -> Parsed<u64> {
        if let Field::Number(number) = self { Ok(*number) } else { Err("a field is no number".to_string()) }
    }

    fn bytes(&self) -> Parsed<&'a [u8]> {
        if let Field::Bytes(bytes) = self { Ok(bytes) } else { Err("a field is no text".to_string()) }
    }

    fn text(&self) -> Parsed<String> {
        String::from_utf8(self.bytes()?.to_vec()).map_err(|_| "a text is not UTF-8".to_string())
    }

    /// Numbers are written one by one, or as bytes of many.
    fn numbers(&self, into: &mut Vec<i64>) -> Parsed<()> {
        match self {
            &Field::Bytes(mut bytes) => {
                while !bytes.is_empty() {
                    into.push(varint(&mut bytes)? as i64);
                }
            }
            _ => into.push(self.number()? as i64),
        }
        Ok(())
    }
}

fn varint(data: &mut &[u8]) -> Parsed<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (first, rest) = data.split_first().ok_or("it ends within a number")?;
        *data = rest;
        value |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err("a number of more than ten bytes".to_string())
}

fn take<'a>(data: &mut &'a [u8], n: u64) -> Parsed<&'a [u8]> {
    let n = usize::try_from(n).ok().filter(|n| *n <= data.len()).ok_or("it ends within a field")?;
    let (first, rest) = data.split_at(n);
    *data = rest;
    Ok(first)
}

/// Calls `work` with every field and its number.
fn fields<'a>(mut data: &'a [u8], mut work: impl FnMut(u64, Field<'a>) -> Parsed<()>) -> Parsed<()> {
    while !data.is_empty() {
        let key = varint(&mut data)?;
        let field = match key & 7 {
            0 => Field::Number(varint(&mut data)?),
            1 => Field::Bytes(take(&mut data, 8)?),
            2 => {
                let n = varint(&mut data)?;
                Field::Bytes(take(&mut data, n)?)
            }
            5 => Field::Four(take(&mut data, 4)?.try_into().expect("four bytes")),
            other => return Err(format!("a field of kind {other}")),
        };
        work(key >> 3, field)?;
    }
    Ok(())
}

fn read_node(data: &[u8]) -> Parsed<Node> {
    let mut node = Node { op: String::new(), name: String::new(), inputs: vec![], outputs: vec![], attributes: vec![] };
    fields(data, |number, field| {
        match number {
            1 => node.inputs.push(field.text()?),
            2 => node.outputs.push(field.text()?),
            3 => node.name = field.text()?,
            4 => node.op = field.text()?,
            5 => node.attributes.extend(read_attribute(field.bytes()?)?),
            _ => {}
        }
        Ok(())
    })?;
    Ok(node)
}

/// Of the kinds that we know.
fn read_attribute(data: &[u8]) -> Parsed<Option<(String, Attribute)>> {
    let (mut name, mut kind, mut float, mut int, mut ints) = (String::new(), 0, 0.0, 0, vec![]);
    fields(data, |number, field| {
        match (number, field) {
            (1, field) => name = field.text()?,
            (2, Field::Four(bytes)) => float = f32::from_le_bytes(bytes),
            (3, field) => int = field.number()? as i64,
            (8, field) => field.numbers(&mut ints)?,
            (20, field) => kind = field.number()?,
            _ => {}
        }
        Ok(())
    })?;
    let value = match kind {
        1 => Attribute::Float(float),
        2 => Attribute::Int(int),
        7 => Attribute::Ints(ints),
        _ => return Ok(None),
    };
    Ok(Some((name, value)))
}

fn read_tensor(data: &[u8]) -> Parsed<(String, Tensor)> {
    let (mut name, mut size, mut kind, mut bytes): (String, Vec<i64>, u64, &[u8]) = (String::new(), vec![], 0, &[]);
    fields(data, |number, field| {
        match number {
            1 => field.numbers(&mut size)?,
            2 => kind = field.number()?,
            8 => name = field.text()?,
            9 => bytes = field.bytes()?,
            _ => {}
        }
        Ok(())
    })?;
    let (kind, _) = TYPES.iter().find(|(_, number)| *number == kind).ok_or(format!("`{name}` is of type {kind}"))?;
    let numel = size.iter().try_fold(1i64, |n, dim| n.checked_mul(*dim).filter(|_| *dim >= 0));
    if numel.and_then(|n| n.checked_mul(kind.elt_size_in_bytes() as i64)) != Some(bytes.len() as i64) {
        return Err(format!("`{name}` of shape {size:?} has {} bytes", bytes.len()));
    }
    Ok((name, Tensor::f_from_data_size(bytes, &size, *kind).map_err(|e| e.to_string())?))
}

fn read_port(data: &[u8]) -> Parsed<Port> {
    let mut port = Port { name: String::new(), dims: vec![] };
    let dim = |data| {
        let mut dim = Err(String::new());
        fields(data, |number, field| {
            match number {
                1 => dim = Ok(field.number()? as i64),
                2 => dim = Err(field.text()?),
                _ => {}
            }
            Ok(())
        })?;
        Ok::<_, String>(dim)
    };
    // Below its type: the tensor's type, its shape, the dimensions.
    fn inside<'a>(field: Field<'a>, wanted: u64, work: &mut dyn FnMut(Field<'a>) -> Parsed<()>) -> Parsed<()> {
        fields(field.bytes()?, |number, field| if number == wanted { work(field) } else { Ok(()) })
    }
    fields(data, |number, field| match number {
        1 => {
            port.name = field.text()?;
            Ok(())
        }
        2 => inside(field, 1, &mut |field| {
            inside(field, 2, &mut |field| {
                inside(field, 1, &mut |field| {
                    port.dims.push(dim(field.bytes()?)?);
                    Ok(())
                })
            })
        }),
        _ => Ok(()),
    })?;
    Ok(port)
}

fn read_model(data: &[u8]) -> Parsed<Model> {
    let mut model = Model { name: String::new(), nodes: vec![], tensors: vec![], inputs: vec![], outputs: vec![], metadata: vec![] };
    let mut opset = 0;
    fields(data, |number, field| match number {
        7 => fields(field.bytes()?, |number, field| {
            match number {
                1 => model.nodes.push(read_node(field.bytes()?)?),
                2 => model.name = field.text()?,
                5 => model.tensors.push(read_tensor(field.bytes()?)?),
                11 => model.inputs.push(read_port(field.bytes()?)?),
                12 => model.outputs.push(read_port(field.bytes()?)?),
                _ => {}
            }
            Ok(())
        }),
        8 => fields(field.bytes()?, |number, field| {
            if number == 2 {
                opset = field.number()?;
            }
            Ok(())
        }),
        14 => {
            let mut pair = (String::new(), String::new());
            fields(field.bytes()?, |number, field| {
                match number {
                    1 => pair.0 = field.text()?,
                    2 => pair.1 = field.text()?,
                    _ => {}
                }
                Ok(())
            })?;
            model.metadata.push(pair);
            Ok(())
        }
        _ => Ok(()),
    })?;
    if opset != OPSET as u64 {
        return Err(format!("opset {opset}; {OPSET} is read"));
    }
    Ok(model)
}
