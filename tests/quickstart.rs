//! The first thing a newcomer runs: `make pretrain` learns something on the embedded images.

mod support;

use support::{TRAIN, text};

/// 32 classes: chance is 3.125 %. The network that ships must come above five times that.
#[test]
fn the_quickstart_comes_above_five_times_chance() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    let output = std::process::Command::new(TRAIN)
        .args(["run", "protocols/pretrain/quickstart.toml", "--device", "cpu", "--quiet", "--out"])
        .arg(&out)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("Run folder") && said.contains("mcl-eval linear-probe"), "{said}");
    let metrics = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let last: serde_json::Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
    let best = (0..2).map(|peer| last[format!("test.peer{peer}.top1")].as_f64().unwrap()).fold(0.0, f64::max);
    assert!(best > 5.0 * 100.0 / 32.0, "{best} %");
    // What is shown to a newcomer as contrastive learning is no collapse: one point for all images has a likeness of 1 and a bound below 0.
    let number = |name: &str| last[name].as_f64().unwrap();
    assert!(number("likeness.0") < 0.99 && number("likeness.1") < 0.99, "{last}");
    assert!(number("mutual_information.0.1") > 0.0 && number("mutual_information.1.0") > 0.0, "{last}");
}
