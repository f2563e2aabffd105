//! The machine that a pickle is a program for, without the calls.

use std::collections::HashMap;

use super::budget::Budget;
use super::literal::{unescape, unquote};
use super::{Result, Value};

/// The value of the first pickle in `bytes`, and how many bytes it took (PyTorch's old format writes several one after another).
pub fn read(bytes: &[u8]) -> Result<(Value, usize)> {
    let budget = Budget::of_file(bytes.len(), EXPANSION);
    let mut machine = Machine { bytes, at: 0, nodes: vec![], stack: vec![], marks: vec![], memo: HashMap::new(), budget };
    let root = machine.run()?;
    let used = machine.at;
    let mut budget = machine.budget;
    Ok((machine.value(root, 0, &mut budget)?, used))
}

/// Bytes of memory for each byte of the file: an opcode of one byte makes one object at most.
const EXPANSION: usize = 4 * (size_of::<Node>() + size_of::<Value>());
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
    budget: Budget,
}

impl<'a> Machine<'a> {
    fn run(&mut self) -> Result<usize> {
        loop {
            let start = self.at;
            let op = self.take(1)?[0];
            // Room for what one opcode makes at most: a few objects, and its places on the stack and in the memo.
            self.budget.charge(size_of::<Node>() + size_of::<[usize; 4]>()).map_err(|what| format!("{what} (byte {start})"))?;
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
            Node::Leaf(Value::Str(text)) => {
                self.budget.charge(text.len())?;
                Ok(text.clone())
            }
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
        // A list that becomes a dict or a set is copied: paid for first, because one list may be named again and again.
        if let Node::Tuple(args) = &self.nodes[args]
            && let Some(Node::List(items)) = args.first().map(|&first| &self.nodes[first])
        {
            self.budget.charge(items.len() * size_of::<(usize, usize)>())?;
        }
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
    fn value(&self, id: usize, depth: usize, budget: &mut Budget) -> Result<Value> {
        if depth > MAX_DEPTH {
            return Err(format!("objects nested more than {MAX_DEPTH} deep, or one that holds itself"));
        }
        let node = &self.nodes[id];
        // A container pays for its elements when they are made; room for them is asked for here.
        let held = match node {
            Node::Raw(range) => range.len(),
            Node::Leaf(Value::Str(text)) => text.len(),
            Node::Leaf(Value::Bytes(bytes) | Value::Long(bytes)) => bytes.len(),
            Node::Leaf(Value::Global { module, name }) => module.len() + name.len(),
            Node::Reduce { .. } => 3 * size_of::<Value>(),
            _ => 0,
        };
        budget.charge(size_of::<Value>() + held)?;
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
