//! How much memory a pickle may take. A pickle may name one object many times, so that a small file describes a large one.

use super::Result;

/// No more than this and the file itself: no set of names and labels is that large.
const MOST: usize = 4 << 30;
/// What the smallest file may take.
const LEAST: usize = 1 << 16;

/// Memory that may still be taken. It is charged before anything is built, so that a bomb is refused, not survived.
#[derive(Clone, Copy)]
pub(super) struct Budget {
    left: usize,
}

impl Budget {
    /// `expansion` bytes for each of a file's, up to `MOST`.
    pub fn of_file(length: usize, expansion: usize) -> Budget {
        Budget { left: expansion.saturating_mul(length).min(MOST.saturating_add(length)).saturating_add(LEAST) }
    }

    /// Takes so many bytes, or refuses.
    pub fn charge(&mut self, bytes: usize) -> Result<()> {
        self.left = self.left.checked_sub(bytes).ok_or("objects that repeat each other beyond measure")?;
        Ok(())
    }
}
