//! What the networks of a run are called.

use std::path::Path;

/// What the m-th network is called: `run/peer-0`.
pub fn network_name(m: usize) -> String {
    format!("peer-{m}")
}

/// The file name of the m-th network, in `networks/` and in checkpoints.
pub fn network_file(m: usize) -> String {
    format!("{}.safetensors", network_name(m))
}

/// The file name of stage `l` (from 1) of the m-th network.
pub fn stage_file(m: usize, l: usize) -> String {
    format!("{}-stage-{l}.safetensors", network_name(m))
}

/// The number in a network's file name or name, and the stage (from 1) where it is one.
pub fn network_number(file: &Path) -> Option<(usize, Option<usize>)> {
    let name = file.file_stem()?.to_string_lossy();
    // `run/peer-0 at step-5`
    let rest = name.split(' ').next()?.strip_prefix("peer-")?;
    match rest.split_once("-stage-") {
        None => Some((rest.parse().ok()?, None)),
        Some((m, l)) => Some((m.parse().ok()?, Some(l.parse().ok()?))),
    }
}
