//! Reads Python pickles (protocols 0 to 5) as plain values. Nothing is executed: what a pickle would call is returned as data
//! (`Value::Global`, `Value::Reduce`), and it is for the caller to know the few callables it understands.

use std::borrow::Cow;
use std::collections::HashMap;

/// A fault of the pickle, without its file: callers add the path.
pub type Result<T> = std::result::Result<T, String>;

#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    None,
    Bool(bool),
    Int(i64),
    /// An integer that needs more than 64 bits: two's complement, little endian.
    Long(Vec<u8>),
    Float(f64),
    Str(String),
    /// Also Python 2's `str`, which may be text: see `as_str`.
    Bytes(Vec<u8>),
    List(Vec<Value>),
    Tuple(Vec<Value>),
    /// In the order of insertion. An OrderedDict too; attributes set on one (PyTorch's `_metadata`) are left out.
    Dict(Vec<(Value, Value)>),
    Set(Vec<Value>),
    Global {
        module: String,
        name: String,
    },
    /// What `callable(*args)` would have made, with what was set on it afterwards: its state, and items (of a list: under the key None).
    Reduce {
        callable: Box<Value>,
        args: Box<Value>,
        state: Option<Box<Value>>,
        items: Vec<(Value, Value)>,
    },
    /// An object kept outside the pickle, by its id: the tensors of a PyTorch file.
    Persistent(Box<Value>),
}

/// A numpy array; `data` in C order.
#[derive(Debug)]
pub struct Array<'a> {
    pub shape: Vec<usize>,
    /// Kind and width without the byte order: `u1`, `f4`.
    pub dtype: String,
    pub data: Cow<'a, [u8]>,
}

impl Value {
    /// Text: `str`, and Python 2's `str` where it is UTF-8.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::Str(text) => Some(text),
            Value::Bytes(bytes) => std::str::from_utf8(bytes).ok(),
            _ => None,
        }
    }

    /// Bytes, however the writer's protocol spelled them: Python 3 writes `_codecs.encode(text, 'latin1')` below protocol 3.
    pub fn as_bytes(&self) -> Option<Cow<'_, [u8]>> {
        match self {
            Value::Bytes(bytes) => Some(Cow::Borrowed(bytes)),
            Value::Reduce { callable, args, .. } if callable.is_global("_codecs", "encode") => match args.as_slice()? {
                [Value::Str(text), ..] => text.chars().map(|c| u8::try_from(c as u32).ok()).collect::<Option<Vec<u8>>>().map(Cow::Owned),
                _ => None,
            },
            Value::Reduce { callable, args, .. } if callable.is_builtin("bytearray") || callable.is_builtin("bytes") => {
                match args.as_slice()? {
                    [] => Some(Cow::Borrowed(&[])),
                    [bytes, ..] => bytes.as_bytes(),
                }
            }
            _ => None,
        }
    }

    pub fn as_int(&self) -> Option<i64> {
        match self {
            Value::Int(i) => Some(*i),
            Value::Bool(b) => Some(*b as i64),
            _ => None,
        }
    }

    /// The elements of a list or tuple.
    pub fn as_slice(&self) -> Option<&[Value]> {
        match self {
            Value::List(items) | Value::Tuple(items) => Some(items),
            _ => None,
        }
    }

    pub fn as_dict(&self) -> Option<&[(Value, Value)]> {
        match self {
            Value::Dict(pairs) => Some(pairs),
            _ => None,
        }
    }

    /// The entry of a dict under a text key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.as_dict()?.iter().find(|(k, _)| k.as_str() == Some(key)).map(|(_, v)| v)
    }

    pub fn is_global(&self, of_module: &str, called: &str) -> bool {
        matches!(self, Value::Global { module, name } if module == of_module && name == called)
    }

    fn is_builtin(&self, called: &str) -> bool {
        self.is_global("builtins", called) || self.is_global("__builtin__", called)
    }

    /// A numpy array of numbers, in the forms numpy 1 and 2 pickle it.
    pub fn as_array(&self) -> Result<Array<'_>> {
        let Value::Reduce { callable, args, state, .. } = self else { return Err("no numpy array".to_string()) };
        let Value::Global { module, name } = callable.as_ref() else { return Err("no numpy array".to_string()) };
        let numpy = module.starts_with("numpy.core.") || module.starts_with("numpy._core.");
        let (shape, dtype, fortran, data) = match (numpy, name.as_str(), args.as_slice(), state.as_deref().and_then(Value::as_slice)) {
            // BUILD with (version, shape, dtype, is_fortran, data)
            (true, "_reconstruct", _, Some([_, shape, dtype, fortran, data])) => (shape, dtype, fortran == &Value::Bool(true), data),
            // _frombuffer(data, dtype, shape, order)
            (true, "_frombuffer", Some([data, dtype, shape, order]), _) => (shape, dtype, order.as_str() != Some("C"), data),
            _ => return Err(format!("{module}.{name} is no numpy array")),
        };
        let shape: Option<Vec<usize>> =
            shape.as_slice().and_then(|dims| dims.iter().map(|d| d.as_int().and_then(|d| usize::try_from(d).ok())).collect());
        let shape = shape.ok_or("an array without a shape")?;
        let code = match dtype {
            Value::Reduce { callable, args, .. } if callable.is_global("numpy", "dtype") => {
                args.as_slice().and_then(|a| a.first()?.as_str())
            }
            _ => None,
        };
        let dtype = code.ok_or("an array without a dtype")?.trim_start_matches(['<', '>', '|', '=']).to_string();
        if fortran && shape.len() > 1 {
            return Err("an array in Fortran order".to_string());
        }
        let data = data.as_bytes().ok_or("an array without data")?;
        let width: usize =
            dtype.trim_start_matches(|c: char| c.is_ascii_alphabetic()).parse().map_err(|_| format!("an array of dtype {dtype}"))?;
        let want = shape.iter().try_fold(width, |n, &d| n.checked_mul(d)).ok_or("an array too large")?;
        if data.len() != want {
            return Err(format!("an array of shape {shape:?} and dtype {dtype} with {} bytes instead of {want}", data.len()));
        }
        Ok(Array { shape, dtype, data })
    }
}

/// The value of the first pickle in `bytes`, and how many bytes it took (PyTorch's old format writes several one after another).
pub fn read(bytes: &[u8]) -> Result<(Value, usize)> {
    let mut machine = Machine { bytes, at: 0, nodes: vec![], stack: vec![], marks: vec![], memo: HashMap::new() };
    let root = machine.run()?;
    let used = machine.at;
    let mut budget = EXPANSION.saturating_mul(bytes.len()).saturating_add(1 << 16);
    Ok((machine.value(root, 0, &mut budget)?, used))
}

/// A pickle may name one object many times; the tree may hold this many values and bytes for each byte of the file, and no more.
const EXPANSION: usize = 16;
const MAX_DEPTH: usize = 256;

/// Objects while the pickle is read: containers are filled after they were put into the memo, so they are named by their place.
enum Node {
    Leaf(Value),
    /// Bytes of the file itself: copied once, at the end.
    Raw(std::ops::Range<usize>),
    List(Vec<usize>),
    Tuple(Vec<usize>),
    Dict(Vec<(usize, usize)>),
    Set(Vec<usize>),
    Reduce {
        callable: usize,
        args: usize,
        state: Option<usize>,
        items: Vec<(usize, usize)>,
    },
    Persistent(usize),
}

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    nodes: Vec<Node>,
    stack: Vec<usize>,
    marks: Vec<usize>,
    memo: HashMap<u64, usize>,
}

impl<'a> Machine<'a> {
    fn run(&mut self) -> Result<usize> {
        loop {
            let start = self.at;
            let op = self.take(1)?[0];
            let more = self.step(op).map_err(|what| format!("{what} (byte {start}, opcode {:?})", op as char))?;
            if !more {
                return self.pop();
            }
        }
    }

    /// One opcode, by the letters of Python's pickletools; false at the end of the pickle.
    fn step(&mut self, op: u8) -> Result<bool> {
        match op {
            b'.' => return Ok(false),
            0x80 => {
                let version = self.take(1)?[0];
                if version > 5 {
                    return Err(format!("protocol {version}; 0 to 5 are known"));
                }
            }
            0x95 => drop(self.take(8)?), // FRAME: a hint for readers of streams
            b'(' => self.marks.push(self.stack.len()),
            b'0' => drop(self.pop()?),
            b'1' => drop(self.pop_mark()?),
            b'2' => {
                let top = self.top()?;
                self.stack.push(top)
            }
            b'N' => self.leaf(Value::None),
            0x88 => self.leaf(Value::Bool(true)),
            0x89 => self.leaf(Value::Bool(false)),
            b'I' => {
                let value = match self.line()? {
                    "00" => Value::Bool(false),
                    "01" => Value::Bool(true),
                    digits => Value::Int(digits.trim().parse().map_err(|_| format!("integer {digits:?}"))?),
                };
                self.leaf(value)
            }
            b'L' => {
                let digits = self.line()?.trim().trim_end_matches('L');
                let value = digits.parse().map_err(|_| format!("integer {digits:?} beyond 64 bits"))?;
                self.leaf(Value::Int(value))
            }
            b'J' => {
                let v = i32::from_le_bytes(self.array()?);
                self.leaf(Value::Int(v.into()))
            }
            b'K' => {
                let v = self.take(1)?[0];
                self.leaf(Value::Int(v.into()))
            }
            b'M' => {
                let v = u16::from_le_bytes(self.array()?);
                self.leaf(Value::Int(v.into()))
            }
            0x8a => {
                let n = self.take(1)?[0].into();
                self.long(n)?
            }
            0x8b => {
                let n = self.size4()?;
                self.long(n)?
            }
            b'F' => {
                let digits = self.line()?;
                let value = digits.trim().parse().map_err(|_| format!("number {digits:?}"))?;
                self.leaf(Value::Float(value))
            }
            b'G' => {
                let v = f64::from_be_bytes(self.array()?);
                self.leaf(Value::Float(v))
            }
            b'S' => {
                let v = unquote(self.line()?)?;
                self.leaf(Value::Bytes(v))
            }
            b'U' | b'C' => {
                let n = self.take(1)?[0].into();
                self.raw(n)?
            }
            b'T' | b'B' => {
                let n = self.size4()?;
                self.raw(n)?
            }
            0x8e | 0x96 => {
                let n = self.size8()?;
                self.raw(n)?
            }
            b'V' => {
                let v = unescape(self.raw_line()?)?;
                self.leaf(Value::Str(v))
            }
            0x8c => {
                let n = self.take(1)?[0].into();
                self.text(n)?
            }
            b'X' => {
                let n = self.size4()?;
                self.text(n)?
            }
            0x8d => {
                let n = self.size8()?;
                self.text(n)?
            }
            b']' => self.push(Node::List(vec![])),
            b'l' => {
                let items = self.pop_mark()?;
                self.push(Node::List(items))
            }
            b')' => self.push(Node::Tuple(vec![])),
            b't' => {
                let items = self.pop_mark()?;
                self.push(Node::Tuple(items))
            }
            0x85..=0x87 => {
                let from = self.stack.len().checked_sub((op - 0x84) as usize).filter(|&f| f >= self.floor()).ok_or("an empty stack")?;
                let items = self.stack.split_off(from);
                self.push(Node::Tuple(items))
            }
            b'}' => self.push(Node::Dict(vec![])),
            b'd' => {
                let items = pairs(self.pop_mark()?)?;
                self.push(Node::Dict(items))
            }
            0x8f => self.push(Node::Set(vec![])),
            0x91 => {
                let items = self.pop_mark()?;
                self.push(Node::Set(items))
            }
            b'a' => {
                let item = self.pop()?;
                self.append(vec![item])?
            }
            b'e' | 0x90 => {
                let items = self.pop_mark()?;
                self.append(items)?
            }
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.set_items(vec![(key, value)])?
            }
            b'u' => {
                let items = pairs(self.pop_mark()?)?;
                self.set_items(items)?
            }
            b'g' => {
                let key = self.memo_line()?;
                self.recall(key)?
            }
            b'h' => {
                let key = self.take(1)?[0].into();
                self.recall(key)?
            }
            b'j' => {
                let key = self.size4()? as u64;
                self.recall(key)?
            }
            b'p' => {
                let key = self.memo_line()?;
                self.keep(key)?
            }
            b'q' => {
                let key = self.take(1)?[0].into();
                self.keep(key)?
            }
            b'r' => {
                let key = self.size4()? as u64;
                self.keep(key)?
            }
            0x94 => {
                let key = self.memo.len() as u64;
                self.keep(key)?
            }
            b'c' => {
                let (module, name) = (self.line()?.to_string(), self.line()?.to_string());
                self.leaf(Value::Global { module, name })
            }
            0x93 => {
                let (name, module) = (self.pop_text()?, self.pop_text()?);
                self.leaf(Value::Global { module, name })
            }
            b'R' | 0x81 => {
                let (args, callable) = (self.pop()?, self.pop()?);
                self.reduce(callable, args)?
            }
            0x92 => {
                let (_kwargs, args, class) = (self.pop()?, self.pop()?, self.pop()?);
                self.reduce(class, args)?
            }
            b'i' => {
                let (module, name) = (self.line()?.to_string(), self.line()?.to_string());
                let args = self.pop_mark()?;
                let (class, args) = (self.add(Node::Leaf(Value::Global { module, name })), self.add(Node::Tuple(args)));
                self.reduce(class, args)?
            }
            b'o' => {
                let mut args = self.pop_mark()?.into_iter();
                let class = args.next().ok_or("an object without a class")?;
                let args = self.add(Node::Tuple(args.collect()));
                self.reduce(class, args)?
            }
            b'b' => {
                let (with, top) = (self.pop()?, self.top()?);
                if let Node::Reduce { state, .. } = &mut self.nodes[top] {
                    *state = Some(with);
                }
            }
            b'P' => {
                let id = self.line()?.to_string();
                let id = self.add(Node::Leaf(Value::Str(id)));
                self.push(Node::Persistent(id))
            }
            b'Q' => {
                let id = self.pop()?;
                self.push(Node::Persistent(id))
            }
            0x82..=0x84 => return Err("an extension code, which only the writer's own registry can resolve".to_string()),
            0x97 | 0x98 => return Err("a buffer kept outside the pickle".to_string()),
            _ => return Err("no pickle opcode".to_string()),
        }
        Ok(true)
    }

    fn take(&mut self, n: usize) -> Result<&'a [u8]> {
        let end = self.at.checked_add(n).filter(|&end| end <= self.bytes.len());
        let end = end.ok_or_else(|| format!("the pickle ends at byte {} where {n} more are needed", self.bytes.len()))?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        Ok(self.take(N)?.try_into().expect("N bytes were taken"))
    }

    fn size4(&mut self) -> Result<usize> {
        Ok(u32::from_le_bytes(self.array()?) as usize)
    }

    fn size8(&mut self) -> Result<usize> {
        let size = u64::from_le_bytes(self.array()?);
        usize::try_from(size).map_err(|_| format!("an object of {size} bytes"))
    }

    /// Up to the next newline, which is taken but not returned.
    fn raw_line(&mut self) -> Result<&'a [u8]> {
        let rest = &self.bytes[self.at..];
        let n = rest.iter().position(|&b| b == b'\n').ok_or("a line without an end")?;
        self.at += n + 1;
        Ok(rest[..n].strip_suffix(b"\r").unwrap_or(&rest[..n]))
    }

    fn line(&mut self) -> Result<&'a str> {
        std::str::from_utf8(self.raw_line()?).map_err(|_| "a line that is no text".to_string())
    }

    fn memo_line(&mut self) -> Result<u64> {
        let line = self.line()?;
        line.trim().parse().map_err(|_| format!("memo key {line:?}"))
    }

    fn add(&mut self, node: Node) -> usize {
        self.nodes.push(node);
        self.nodes.len() - 1
    }

    fn push(&mut self, node: Node) {
        let id = self.add(node);
        self.stack.push(id);
    }

    fn leaf(&mut self, value: Value) {
        self.push(Node::Leaf(value));
    }

    fn raw(&mut self, n: usize) -> Result<()> {
        let from = self.at;
        self.take(n)?;
        self.push(Node::Raw(from..from + n));
        Ok(())
    }

    fn text(&mut self, n: usize) -> Result<()> {
        // Lone surrogates, which Python may write, become replacement characters.
        let text = String::from_utf8_lossy(self.take(n)?).into_owned();
        self.leaf(Value::Str(text));
        Ok(())
    }

    fn long(&mut self, n: usize) -> Result<()> {
        let bytes = self.take(n)?;
        let value = if n <= 8 {
            let mut wide = [if bytes.last().is_some_and(|b| b & 0x80 != 0) { 0xff } else { 0 }; 8];
            wide[..n].copy_from_slice(bytes);
            Value::Int(i64::from_le_bytes(wide))
        } else {
            Value::Long(bytes.to_vec())
        };
        self.leaf(value);
        Ok(())
    }

    /// What lies below the last mark is out of reach.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn top(&self) -> Result<usize> {
        if self.stack.len() <= self.floor() {
            return Err("an empty stack".to_string());
        }
        self.stack.last().copied().ok_or_else(|| "an empty stack".to_string())
    }

    fn pop(&mut self) -> Result<usize> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    fn pop_mark(&mut self) -> Result<Vec<usize>> {
        let mark = self.marks.pop().ok_or("a mark is missing")?;
        Ok(self.stack.split_off(mark))
    }

    fn pop_text(&mut self) -> Result<String> {
        let id = self.pop()?;
        match &self.nodes[id] {
            Node::Leaf(Value::Str(text)) => Ok(text.clone()),
            _ => Err("a global whose name is no text".to_string()),
        }
    }

    fn recall(&mut self, key: u64) -> Result<()> {
        let id = *self.memo.get(&key).ok_or_else(|| format!("memo {key} was never stored"))?;
        self.stack.push(id);
        Ok(())
    }

    fn keep(&mut self, key: u64) -> Result<()> {
        let top = self.top()?;
        self.memo.insert(key, top);
        Ok(())
    }

    fn append(&mut self, values: Vec<usize>) -> Result<()> {
        let none = self.add(Node::Leaf(Value::None));
        let top = self.top()?;
        match &mut self.nodes[top] {
            Node::List(items) | Node::Set(items) => items.extend(values),
            Node::Reduce { items, .. } => items.extend(values.into_iter().map(|v| (none, v))),
            _ => return Err("appends to something that is no list".to_string()),
        }
        Ok(())
    }

    fn set_items(&mut self, new: Vec<(usize, usize)>) -> Result<()> {
        let top = self.top()?;
        match &mut self.nodes[top] {
            Node::Dict(items) | Node::Reduce { items, .. } => items.extend(new),
            _ => return Err("sets items of something that is no dict".to_string()),
        }
        Ok(())
    }

    /// The containers every pickle may hold become containers; all else stays a description.
    fn reduce(&mut self, callable: usize, args: usize) -> Result<()> {
        let node = match (&self.nodes[callable], &self.nodes[args]) {
            (Node::Leaf(global), Node::Tuple(args)) if global.is_global("collections", "OrderedDict") || global.is_builtin("dict") => {
                match args.first().map(|&first| &self.nodes[first]) {
                    None => Some(Node::Dict(vec![])),
                    // Python 2: OrderedDict([[key, value], ...])
                    Some(Node::List(rows)) => {
                        let pair = |&row: &usize| match &self.nodes[row] {
                            Node::List(pair) | Node::Tuple(pair) if pair.len() == 2 => Ok((pair[0], pair[1])),
                            _ => Err("a dict of something else than pairs".to_string()),
                        };
                        Some(Node::Dict(rows.iter().map(pair).collect::<Result<_>>()?))
                    }
                    Some(_) => None,
                }
            }
            (Node::Leaf(global), Node::Tuple(args)) if global.is_builtin("set") || global.is_builtin("frozenset") => {
                match args.first().map(|&first| &self.nodes[first]) {
                    None => Some(Node::Set(vec![])),
                    Some(Node::List(items)) => Some(Node::Set(items.clone())),
                    Some(_) => None,
                }
            }
            _ => None,
        };
        self.push(node.unwrap_or(Node::Reduce { callable, args, state: None, items: vec![] }));
        Ok(())
    }

    /// The tree below a node. An object that holds itself runs into the depth, one that doubles itself again and again into the budget.
    fn value(&self, id: usize, depth: usize, budget: &mut usize) -> Result<Value> {
        let mut spend = |n: usize| {
            *budget = budget.checked_sub(n).ok_or("objects that repeat each other beyond measure")?;
            Ok::<(), String>(())
        };
        if depth > MAX_DEPTH {
            return Err(format!("objects nested more than {MAX_DEPTH} deep, or one that holds itself"));
        }
        let node = &self.nodes[id];
        spend(
            1 + match node {
                Node::Raw(range) => range.len(),
                Node::Leaf(Value::Str(text)) => text.len(),
                Node::Leaf(Value::Bytes(bytes) | Value::Long(bytes)) => bytes.len(),
                _ => 0,
            },
        )?;
        let mut below = |id: usize| self.value(id, depth + 1, budget);
        Ok(match node {
            Node::Leaf(value) => value.clone(),
            Node::Raw(range) => Value::Bytes(self.bytes[range.clone()].to_vec()),
            Node::List(items) => Value::List(items.iter().map(|&i| below(i)).collect::<Result<_>>()?),
            Node::Tuple(items) => Value::Tuple(items.iter().map(|&i| below(i)).collect::<Result<_>>()?),
            Node::Set(items) => Value::Set(items.iter().map(|&i| below(i)).collect::<Result<_>>()?),
            Node::Dict(items) => Value::Dict(items.iter().map(|&(k, v)| Ok((below(k)?, below(v)?))).collect::<Result<_>>()?),
            Node::Reduce { callable, args, state, items } => Value::Reduce {
                callable: Box::new(below(*callable)?),
                args: Box::new(below(*args)?),
                state: state.map(|s| below(s).map(Box::new)).transpose()?,
                items: items.iter().map(|&(k, v)| Ok((below(k)?, below(v)?))).collect::<Result<_>>()?,
            },
            Node::Persistent(id) => Value::Persistent(Box::new(below(*id)?)),
        })
    }
}

fn pairs(flat: Vec<usize>) -> Result<Vec<(usize, usize)>> {
    if !flat.len().is_multiple_of(2) {
        return Err("a dict with a key and no value".to_string());
    }
    Ok(flat.chunks_exact(2).map(|kv| (kv[0], kv[1])).collect())
}

/// The bytes of a Python 2 string literal, as protocol 0 writes it.
fn unquote(line: &str) -> Result<Vec<u8>> {
    let fault = || format!("string literal {line:?}");
    let text = line.trim_end();
    let quote = text.chars().next().filter(|c| matches!(c, '\'' | '"')).ok_or_else(fault)?;
    let inner = text[1..].strip_suffix(quote).ok_or_else(fault)?;
    let mut out = vec![];
    let mut rest = inner.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'\\' {
            out.push(byte);
            continue;
        }
        out.push(match rest.next().ok_or_else(fault)? {
            b'n' => b'\n',
            b't' => b'\t',
            b'r' => b'\r',
            b'x' => {
                let digit = |b: Option<u8>| b.and_then(|b| (b as char).to_digit(16)).ok_or_else(fault);
                (digit(rest.next())? * 16 + digit(rest.next())?) as u8
            }
            other @ (b'\\' | b'\'' | b'"') => other,
            _ => return Err(fault()),
        });
    }
    Ok(out)
}

/// Python's raw-unicode-escape: latin-1, in which only \uXXXX and \UXXXXXXXX are escapes.
fn unescape(line: &[u8]) -> Result<String> {
    let mut out = String::new();
    let mut at = 0;
    while at < line.len() {
        let digits = match (line[at], line.get(at + 1)) {
            (b'\\', Some(b'u')) => 4,
            (b'\\', Some(b'U')) => 8,
            (other, _) => {
                out.push(other as char);
                at += 1;
                continue;
            }
        };
        let hex = line.get(at + 2..at + 2 + digits).and_then(|hex| std::str::from_utf8(hex).ok());
        let code = hex.and_then(|hex| u32::from_str_radix(hex, 16).ok()).ok_or("text with a broken escape")?;
        // Lone surrogates, which Python may write, become replacement characters.
        out.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER));
        at += 2 + digits;
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(hex: &str) -> Vec<u8> {
        (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect()
    }

    // python3: a = [1, -2, 300, 70000, 2**40, 1.5, None, True, False]
    //          {'a': a, 'b': (b'\x00\xffq', 'h\xe9\u20ac\n'), 'c': OrderedDict([('k', {1})]), 'e': [], 'again': a}
    const PROTOCOLS: [&str; 6] = [
        "286470300a56610a70310a286c70320a49310a61492d320a61493330300a614937303030300a614c313039393531313632373737364c0a6146312e350a614e614930310a614930300a617356620a70330a28635f636f646563730a656e636f64650a70340a28565c7530303030ff710a70350a566c6174696e310a70360a7470370a5270380a5668e95c75323061635c75303030610a70390a747031300a7356630a7031310a63636f6c6c656374696f6e730a4f726465726564446963740a7031320a2874527031330a566b0a7031340a635f5f6275696c74696e5f5f0a7365740a7031350a28286c7031360a49310a61747031370a527031380a737356650a7031390a286c7032300a7356616761696e0a7032310a67320a732e",
        "7d71002858010000006171015d7102284b014afeffffff4d2c014a701101004c313039393531313632373737364c0a473ff80000000000004e4930310a4930300a65580100000062710328635f636f646563730a656e636f64650a710428580400000000c3bf71710558060000006c6174696e317106747107527108580700000068c3a9e282ac0a710974710a580100000063710b63636f6c6c656374696f6e730a4f726465726564446963740a710c2952710d58010000006b710e635f5f6275696c74696e5f5f0a7365740a710f285d71104b01617471115271127358010000006571135d71145805000000616761696e71156802752e",
        "80027d71002858010000006171015d7102284b014afeffffff4d2c014a701101008a06000000000001473ff80000000000004e8889655801000000627103635f636f646563730a656e636f64650a7104580400000000c3bf71710558060000006c6174696e317106867107527108580700000068c3a9e282ac0a710986710a580100000063710b63636f6c6c656374696f6e730a4f726465726564446963740a710c2952710d58010000006b710e635f5f6275696c74696e5f5f0a7365740a710f5d71104b01618571115271127358010000006571135d71145805000000616761696e71156802752e",
        "80037d71002858010000006171015d7102284b014afeffffff4d2c014a701101008a06000000000001473ff80000000000004e8889655801000000627103430300ff717104580700000068c3a9e282ac0a7105867106580100000063710763636f6c6c656374696f6e730a4f726465726564446963740a71082952710958010000006b710a636275696c74696e730a7365740a710b5d710c4b016185710d52710e73580100000065710f5d71105805000000616761696e71116802752e",
        "80049586000000000000007d94288c0161945d94284b014afeffffff4d2c014a701101008a06000000000001473ff80000000000004e8889658c016294430300ff71948c0768c3a9e282ac0a9486948c0163948c0b636f6c6c656374696f6e73948c0b4f726465726564446963749493942952948c016b948f94284b0190738c0165945d948c05616761696e946802752e",
        "80059586000000000000007d94288c0161945d94284b014afeffffff4d2c014a701101008a06000000000001473ff80000000000004e8889658c016294430300ff71948c0768c3a9e282ac0a9486948c0163948c0b636f6c6c656374696f6e73948c0b4f726465726564446963749493942952948c016b948f94284b0190738c0165945d948c05616761696e946802752e",
    ];

    #[test]
    fn every_protocol_reads_the_same_object() {
        let a: Vec<Value> = [1, -2, 300, 70000, 1 << 40]
            .map(Value::Int)
            .into_iter()
            .chain([Value::Float(1.5), Value::None, Value::Bool(true), Value::Bool(false)])
            .collect();
        for (protocol, hex) in PROTOCOLS.iter().enumerate() {
            let mut file = bytes(hex);
            let whole = file.len();
            file.extend(b"what follows");
            let (value, used) = read(&file).unwrap();
            assert_eq!(used, whole, "protocol {protocol}");
            assert_eq!(value.get("a"), Some(&Value::List(a.clone())), "protocol {protocol}");
            assert_eq!(value.get("again"), value.get("a"), "protocol {protocol}");
            assert_eq!(value.get("e"), Some(&Value::List(vec![])));
            let b = value.get("b").unwrap().as_slice().unwrap();
            assert_eq!(b[0].as_bytes().unwrap().as_ref(), b"\x00\xffq", "protocol {protocol}");
            assert_eq!(b[1].as_str(), Some("h\u{e9}\u{20ac}\n"), "protocol {protocol}");
            let set = Value::Set(vec![Value::Int(1)]);
            assert_eq!(value.get("c"), Some(&Value::Dict(vec![(Value::Str("k".into()), set)])), "protocol {protocol}");
        }
    }

    #[test]
    fn numpy_arrays_of_both_generations() {
        // {'data': np.arange(6, dtype=np.uint8).reshape(2, 3)} by numpy 2.4, protocols 2 and 5
        let files = [
            "80027d71005804000000646174617101636e756d70792e5f636f72652e6d756c746961727261790a5f7265636f6e7374727563740a7102636e756d70790a6e6461727261790a71034b00857104635f636f646563730a656e636f64650a7105580100000062710658060000006c6174696e31710786710852710987710a52710b284b014b024b0386710c636e756d70790a64747970650a710d58020000007531710e898887710f527110284b0358010000007c71114e4e4e4affffffff4affffffff4b007471126289680558060000000001020304057113680786711452711574711662732e",
            "80059586000000000000007d948c0464617461948c136e756d70792e5f636f72652e6e756d65726963948c0b5f66726f6d62756666657294939428960600000000000000000102030405948c056e756d7079948c0564747970659493948c02753194898887945294284b038c017c944e4e4e4affffffff4affffffff4b007494624b024b0386948c01439474945294732e",
        ];
        for hex in files {
            let (value, _) = read(&bytes(hex)).unwrap();
            let array = value.get("data").unwrap().as_array().unwrap();
            assert_eq!((array.shape.as_slice(), array.dtype.as_str(), array.data.as_ref()), (&[2, 3][..], "u1", &[0, 1, 2, 3, 4, 5][..]));
        }
    }

    #[test]
    fn python_2_strings_and_the_magic_number_of_old_pytorch_files() {
        assert_eq!(read(b"S'a\\x41\\n\\''\np0\n.").unwrap().0, Value::Bytes(b"aA\n'".to_vec()));
        assert_eq!(read(b"\x80\x02U\x03dog.").unwrap().0.as_str(), Some("dog"));
        // pickle.dumps(0x1950a86a20f9469cfc6c, 2)
        let magic = [0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19];
        assert_eq!(read(&[b"\x80\x02\x8a\x0a".as_slice(), &magic, b"."].concat()).unwrap().0, Value::Long(magic.to_vec()));
    }

    #[test]
    fn nothing_is_called() {
        let (value, _) = read(b"cos\nsystem\n(S'echo hi'\ntR.").unwrap();
        let Value::Reduce { callable, args, .. } = value else { panic!("{value:?}") };
        assert!(callable.is_global("os", "system"));
        assert_eq!(*args, Value::Tuple(vec![Value::Bytes(b"echo hi".to_vec())]));
    }

    #[test]
    fn hostile_and_broken_pickles_are_errors() {
        let whole = bytes(PROTOCOLS[4]);
        for n in 0..whole.len() {
            assert!(read(&whole[..n]).is_err(), "cut at {n}");
        }
        // A list that holds itself: l = []; l.append(l)
        assert!(read(b"\x80\x02]q\x00h\x00a.").unwrap_err().contains("holds itself"));
        // Forty lists, each holding the one before twice.
        let laughs =
            [b"(lp0\n".to_vec(), (0..40).flat_map(|i| format!("0(g{i}\ng{i}\nlp{}\n", i + 1).into_bytes()).collect(), b".".to_vec()]
                .concat();
        assert!(read(&laughs).unwrap_err().contains("beyond measure"));
        // Four gigabytes announced, none there.
        assert!(read(b"\x80\x02T\xff\xff\xff\xff.").unwrap_err().contains("ends at byte"));
        for bad in [&b"a."[..], b"t.", b"0.", b".", b"(s.", b"h\x05.", b"\xff", b"\x82\x01."] {
            assert!(read(bad).is_err(), "{bad:?}");
        }
    }
}
