//! Measurements read back: which protocol a row followed, and which rows are not superseded.

use std::collections::BTreeMap;

use serde_json::Value;

use super::protocol::Protocol;
use super::record::Record;
use crate::error::Result;

/// The protocol a record followed: its name, and the keys that differ from what ships under its kind, e.g. `paper, epochs=2`. Keys that
/// only say how many measurements were made do not count.
pub(crate) fn protocol_of(r: &Record) -> String {
    let kind = r.options["kind"].as_str().unwrap_or_default();
    let shipped = Protocol::read(kind, &[kind], &[]).map(|p| p.json()).unwrap_or_default();
    let changed = |(key, value): (&String, &Value)| {
        let counts = !["kind", "seeds", "ks", "shots"].contains(&key.as_str()) && shipped.get(key).is_some_and(|s| s != value);
        counts.then(|| format!("{key}={value}"))
    };
    let changed = r.options.as_object().into_iter().flatten().filter_map(changed);
    std::iter::once(r.protocol.clone()).chain(changed).collect::<Vec<_>>().join(", ")
}

/// Of measurements that were made more than once with the same weights, settings and seed, the last.
pub(crate) fn newest<'a>(records: &[&'a Record]) -> Result<Vec<&'a Record>> {
    let key = |r: &Record| {
        let of_run = (r.command.clone(), r.run.clone(), r.subject.clone(), r.weights_hash.clone(), r.seed, r.image_size);
        (of_run, r.dataset.clone(), protocol_of(r), r.variant.clone(), r.metric.clone(), r.detail["a_weights"].to_string())
    };
    let last: BTreeMap<_, usize> = records.iter().enumerate().map(|(i, r)| (key(r), i)).collect();
    let mut kept: Vec<usize> = last.into_values().collect();
    kept.sort_unstable();
    Ok(kept.into_iter().map(|i| records[i]).collect())
}
