//! Running the built binaries on a small recipe.
#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

pub const TRAIN: &str = env!("CARGO_BIN_EXE_mcl-train");
pub const EVAL: &str = env!("CARGO_BIN_EXE_mcl-eval");

/// Two ResNet-8 on a tenth of the synthetic images at half their size: steps of some 20 ms, and a meta step after every third batch.
pub const SMALL: &str = r#"
[data]
name = "synthetic"
fraction = 0.1
holdout = 2
image_size = 16
[cohort]
archs = ["resnet8", "resnet8"]
[train]
batch = 16
epochs = 3
lr = 0.05
[method]
name = "l_mcl"
[method.l_mcl]
meta_every = 3
"#;

pub fn recipe(folder: &Path, text: &str) -> PathBuf {
    let path = folder.join("recipe.toml");
    std::fs::write(&path, text).unwrap();
    path
}

/// `mcl-train run` on one thread: one seed and one thread count give bit-equal runs.
pub fn train(recipe: &Path, out: &Path, more: &[&str]) -> Command {
    let mut command = Command::new(TRAIN);
    command.arg("run").arg(recipe).arg("--out").arg(out).args(["--threads", "1", "--device", "cpu"]).args(more);
    command
}

pub fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// One line on stderr that holds all of `parts`, and exit code 2 (or as given).
pub fn assert_refused(output: &Output, code: i32, parts: &[&str]) {
    let message = String::from_utf8_lossy(&output.stderr).trim().to_string();
    assert_eq!(output.status.code(), Some(code), "{message}");
    let last = message.lines().last().unwrap_or_default();
    for part in parts {
        assert!(last.contains(part), "`{part}` is not in: {message}");
    }
}
