//! Where the numbers come from.

use crate::error::Result;
use crate::eval::record::Record;
use crate::report::{Section, table};
use crate::run::Run;

/// The commands and hashes behind each number.
pub(super) fn section(runs: &[Run], records: &[&Record]) -> Result<Section> {
    let mut section = Section::new("Where the numbers come from");
    let mut lines = vec![];
    for run in runs {
        let of = |key: &str| run.environment[key].as_str().unwrap_or("unknown").to_string();
        lines.push(format!(
            "{}\n  {}\n  recipe {}  training split {}  mcl {} ({})  libtorch {}",
            run.name,
            of("command"),
            of("recipe_hash"),
            of("train_split_hash"),
            of("mcl"),
            of("commit"),
            of("libtorch")
        ));
    }
    let short = |hash: &str| hash.chars().take(16).collect::<String>();
    let line = |r: &Record| {
        format!(
            "{}\n  weights {}  protocol {}  split {}  seed {}  ({})",
            r.argv,
            short(&r.weights_hash),
            r.protocol_hash,
            short(&r.split_hash),
            r.seed.map_or("-".into(), |s| s.to_string()),
            r.subject
        )
    };
    // One command may have made many rows.
    lines.extend(table::together(records, |r| vec![line(r)])?.iter().map(|own| line(own[0])));
    if !lines.is_empty() {
        section.code(lines.join("\n\n"));
    }
    Ok(section)
}
