//! `[cohort] frozen`: files of networks that teach and do not learn.

use std::path::Path;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use toml::Value;

/// A network that teaches and does not learn: in a recipe its path alone, or a table. A run writes every key that it found out.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrozenFile {
    /// Any file that `mcl-eval --weights` reads: looked for in the current folder, then beside the recipe.
    pub file: String,
    /// Its architecture, where neither the file nor the names and shapes of its tensors say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arch: Option<String>,
    /// What stands before the names in the file; found out unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub strip: Option<String>,
    /// Channel means that its images were normalised with. Left out: what the file says, else those of the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mean: Option<[f64; 3]>,
    /// Standard deviations, likewise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub std: Option<[f64; 3]>,
    /// Of the file. Where it is given, another file is refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
}

/// What the key may be, in messages.
const ACCEPTED: &str = "a list of paths, or of tables such as { file = \"teacher.pth\", arch = \"resnet110\" }";

/// The list of a recipe; one path or table stands for a list of one.
pub(super) fn list<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<FrozenFile>, D::Error> {
    let one = |value: Value| match value {
        Value::String(file) => Ok(FrozenFile { file, ..FrozenFile::default() }),
        table @ Value::Table(_) => {
            table.try_into().map_err(|e: toml::de::Error| D::Error::custom(format!("frozen: {}", e.to_string().trim().replace('\n', " "))))
        }
        other => Err(D::Error::custom(format!("frozen holds {other}; accepted: {ACCEPTED}"))),
    };
    match Value::deserialize(from)? {
        Value::Array(values) => values.into_iter().map(one).collect(),
        value @ (Value::String(_) | Value::Table(_)) => Ok(vec![one(value)?]),
        other => Err(D::Error::custom(format!("frozen = {other}; accepted: {ACCEPTED}"))),
    }
}

impl FrozenFile {
    /// Values that parse but make no sense.
    pub(super) fn check(&self) -> Result<(), String> {
        let FrozenFile { file, mean, std, sha256, .. } = self;
        let refuse = |what: String| Err(format!("[cohort] frozen {file:?}: {what}"));
        if file.is_empty() {
            return refuse(format!("names no file; accepted: {ACCEPTED}"));
        }
        if mean.is_some() != std.is_some() {
            return refuse("mean and std belong together; accepted: both, or none".into());
        }
        if let Some(bad) = mean.iter().flatten().find(|m| !m.is_finite()) {
            return refuse(format!("mean {bad}; accepted: finite numbers"));
        }
        if let Some(bad) = std.iter().flatten().find(|s| !(**s > 0.0 && s.is_finite())) {
            return refuse(format!("std {bad}; accepted: finite numbers above 0"));
        }
        match sha256.as_ref().filter(|hash| hash.len() != 64 || !hash.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))) {
            Some(hash) => refuse(format!("sha256 = {hash:?}; accepted: 64 hexadecimal digits, lower case")),
            None => Ok(()),
        }
    }

    /// A path that leads nowhere from the current folder is meant from the recipe's.
    pub(super) fn look_beside(&mut self, recipe: &Path) {
        let beside = recipe.parent().map(|folder| folder.join(&self.file));
        if let Some(beside) = beside.filter(|beside| !Path::new(&self.file).exists() && beside.exists()) {
            self.file = beside.display().to_string();
        }
    }
}

/// Is it the key of where a file lies? What the file is decides the numbers of a run, and that its sha256 says.
pub(super) fn is_a_place(key: &str) -> bool {
    key.starts_with("cohort.frozen.") && key.ends_with(".file")
}
