//! Python pickles: read (protocols 0 to 5) as plain values, and written as far as weights need it. Nothing is executed: what a pickle would
//! call is returned as data (`Value::Global`, `Value::Reduce`), and it is for the caller to know the few callables it understands.

mod budget;
mod literal;
mod read;
mod write;

use std::borrow::Cow;

pub use read::read;
pub(crate) use write::Writer;

/// A fault of the pickle, without its file: callers add the path.
pub type Result<T> = std::result::Result<T, String>;

/// A Python object as data.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// `None`
    None,
    /// `True` or `False`
    Bool(bool),
    /// An integer of up to 64 bits.
    Int(i64),
    /// An integer that needs more than 64 bits: two's complement, little endian.
    Long(Vec<u8>),
    /// A float.
    Float(f64),
    /// A text.
    Str(String),
    /// Also Python 2's `str`, which may be text: see `as_str`.
    Bytes(Vec<u8>),
    /// A list.
    List(Vec<Value>),
    /// A tuple.
    Tuple(Vec<Value>),
    /// In the order of insertion. An OrderedDict too; attributes set on one (PyTorch's `_metadata`) are left out.
    Dict(Vec<(Value, Value)>),
    /// A set or frozenset.
    Set(Vec<Value>),
    /// A class or function, by where Python would import it from.
    Global {
        /// The module it is imported from.
        module: String,
        /// Its name there.
        name: String,
    },
    /// What `callable(*args)` would have made, with what was set on it afterwards: its state, and items (of a list: under the key None).
    Reduce {
        /// What would be called, a `Global` as a rule.
        callable: Box<Value>,
        /// The tuple it would be called with.
        args: Box<Value>,
        /// What `__setstate__` would be given.
        state: Option<Box<Value>>,
        /// What would be set or appended.
        items: Vec<(Value, Value)>,
    },
    /// An object kept outside the pickle, by its id: the tensors of a PyTorch file.
    Persistent(Box<Value>),
}

/// A numpy array; `data` in C order.
#[derive(Debug)]
pub struct Array<'a> {
    /// Its sizes.
    pub shape: Vec<usize>,
    /// Kind and width without the byte order: `u1`, `f4`.
    pub dtype: String,
    /// Its numbers, little endian.
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

    /// An integer; Python's truth values are integers too.
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

    /// The pairs of a dict, in the order of insertion.
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

    /// Is it this class or function?
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
