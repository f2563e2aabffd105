//! Looking a name up in one of the visible lists (architectures, methods, datasets, formats).

use crate::error::{Error, Result};

/// The entry called `name`, or the "unknown X; known: ..." error.
pub(crate) fn find<'a, T>(
    kind: &'static str,
    name: &str,
    entries: impl IntoIterator<Item = &'a T>,
    name_of: fn(&T) -> &'static str,
) -> Result<&'a T> {
    let mut known = vec![];
    for entry in entries {
        if name_of(entry) == name {
            return Ok(entry);
        }
        known.push(name_of(entry));
    }
    Err(Error::Unknown { kind, name: name.to_string(), known: known.join(", ") })
}
