//! Texts as the old protocols spell them, in lines.

use super::Result;

/// The bytes of a Python 2 string literal, as protocol 0 writes it.
pub(super) fn unquote(line: &str) -> Result<Vec<u8>> {
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
pub(super) fn unescape(line: &[u8]) -> Result<String> {
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
