//! Writes the opcodes that weight files need, by the letters of Python's pickletools.

/// A pickle that grows. What is written is for the caller to order as a pickle's reader takes it: arguments first, then the call.
pub(crate) struct Writer(Vec<u8>);

impl Writer {
    /// Protocol 2 is what `torch.save` writes; 3 is the first with bytes.
    pub fn new(protocol: u8) -> Writer {
        Writer(vec![0x80, protocol])
    }

    /// Opcodes as they are.
    pub fn ops(&mut self, ops: &[u8]) -> &mut Writer {
        self.0.extend(ops);
        self
    }

    /// A class or function, by where it is imported from.
    pub fn global(&mut self, module: &str, name: &str) -> &mut Writer {
        self.ops(format!("c{module}\n{name}\n").as_bytes())
    }

    /// A `str`.
    pub fn text(&mut self, text: &str) -> &mut Writer {
        self.ops(b"X").ops(&(text.len() as u32).to_le_bytes()).ops(text.as_bytes())
    }

    /// An `int`, in four bytes where it fits.
    pub fn int(&mut self, value: i64) -> &mut Writer {
        match i32::try_from(value) {
            Ok(value) => self.ops(b"J").ops(&value.to_le_bytes()),
            Err(_) => self.ops(&[0x8a, 8]).ops(&value.to_le_bytes()),
        }
    }

    /// A tuple of `int`.
    pub fn ints(&mut self, values: &[i64]) -> &mut Writer {
        self.ops(b"(");
        values.iter().fold(self, |out, value| out.int(*value)).ops(b"t")
    }

    /// `bytes`, from protocol 3 on; false where they are too many for it.
    #[must_use]
    pub fn bytes(&mut self, bytes: &[u8]) -> bool {
        let Ok(length) = u32::try_from(bytes.len()) else { return false };
        self.ops(b"B").ops(&length.to_le_bytes()).ops(bytes);
        true
    }

    /// The whole pickle, with its end.
    pub fn finish(mut self) -> Vec<u8> {
        self.0.push(b'.');
        self.0
    }
}
