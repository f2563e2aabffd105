//! Measurements read back: which protocol a row followed, and which rows are not superseded.

use super::measures;
use super::record::Record;
use crate::error::Result;
use crate::report::table;

/// The protocol a record followed: its name, and the keys that differ from what ships under its kind, e.g. `paper, epochs=2`. Keys that
/// only say how many measurements were made do not count.
pub fn protocol_of(r: &Record) -> String {
    std::iter::once(r.protocol.clone()).chain(measures::changed_keys(&r.options)).collect::<Vec<_>>().join(", ")
}

/// Of measurements that were made more than once with the same weights, settings and seed, the last; in the order they were made.
pub fn newest<'a>(records: &[&'a Record]) -> Result<Vec<&'a Record>> {
    let key = |(_, r): (usize, &Record)| {
        let seed = r.seed.map_or(String::new(), |s| s.to_string());
        let of_run = [&r.command, &r.run, &r.subject, &r.weights_hash, &seed, &r.image_size.to_string()].map(String::clone);
        let how = [r.dataset.clone(), protocol_of(r), r.variant.clone(), r.metric.clone(), r.detail["a_weights"].to_string()];
        of_run.into_iter().chain(how).collect::<Vec<String>>()
    };
    let numbered: Vec<(usize, &'a Record)> = records.iter().copied().enumerate().collect();
    let mut last: Vec<(usize, &'a Record)> = table::together(&numbered, key)?.into_iter().filter_map(|own| own.last().copied()).collect();
    last.sort_unstable_by_key(|(i, _)| *i);
    Ok(last.into_iter().map(|(_, r)| r).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_equal_measurements_the_last_counts() {
        let row = |seed, value| Record { command: "knn".into(), dataset: "stl10".into(), seed: Some(seed), value, ..Record::default() };
        let rows = [row(1, 10.0), row(2, 20.0), row(1, 30.0)];
        let kept = newest(&rows.iter().collect::<Vec<_>>()).unwrap();
        assert_eq!(kept.iter().map(|r| r.value).collect::<Vec<_>>(), [20.0, 30.0]);
        assert!(newest(&[]).unwrap().is_empty());
    }
}
