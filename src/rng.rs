//! Named random streams. There is no global generator: whoever draws asks for `stream(seed, name, position)`, so a run resumed at
//! any position draws what the uninterrupted run drew, on any number of threads.

use rand::{RngCore, SeedableRng};
use sha2::{Digest, Sha256};

/// A generator whose numbers are the same on every platform.
pub type Rng = rand_chacha::ChaCha8Rng;

/// The stream `name` of a run at a position, e.g. `stream(seed, "augment", &[epoch, batch])`. Streams are independent of each other.
pub fn stream(seed: u64, name: &str, position: &[u64]) -> Rng {
    let mut hash = Sha256::new();
    hash.update(seed.to_le_bytes());
    hash.update((name.len() as u64).to_le_bytes());
    hash.update(name.as_bytes());
    for p in position {
        hash.update(p.to_le_bytes());
    }
    Rng::from_seed(hash.finalize().into())
}

/// A seed for something that draws streams of its own (a peer, a batch's noise).
pub fn derive(seed: u64, name: &str, position: u64) -> u64 {
    stream(seed, name, &[position]).next_u64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_differ_by_seed_name_and_position_and_repeat() {
        let draw = |seed, name: &str, at: &[u64]| stream(seed, name, at).next_u64();
        let base = draw(1, "augment", &[0]);
        assert_eq!(base, draw(1, "augment", &[0]));
        let others = [
            draw(2, "augment", &[0]),
            draw(1, "order", &[0]),
            draw(1, "augment", &[1]),
            draw(1, "augment", &[0, 0]),
            draw(1, "augment", &[]),
        ];
        assert!(others.iter().all(|&o| o != base), "{base} {others:?}");
    }
}
