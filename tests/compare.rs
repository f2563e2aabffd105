//! `mcl-train compare`: one table of several methods and seeds; killed half-way, it goes on where it was.

mod support;

use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use support::{TRAIN, text, write_colours};

const RECIPE: &str = r#"
[data]
name = "cifar10"
fraction = 0.5
[cohort]
archs = ["resnet8", "resnet8"]
[train]
batch = 16
epochs = 1
lr = 0.05
seed = 3
[method]
name = "baseline"
[method.dml]
temperature = 1.0
"#;

fn compare(folder: &Path, methods: &str, more: &[&str]) -> Command {
    let mut command = Command::new(TRAIN);
    let recipe = folder.join("recipe.toml");
    command.arg("compare").arg(recipe).args([
        "--methods",
        methods,
        "--seeds",
        "2",
        "--threads",
        "1",
        "--device",
        "cpu",
        "--quiet",
        "--out",
    ]);
    command.arg(folder.join("out")).arg("--data").arg(folder).args(more);
    command
}

fn prepared() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    write_colours(folder.path());
    std::fs::write(folder.path().join("recipe.toml"), RECIPE).unwrap();
    folder
}

fn finished(folder: &Path) -> Vec<String> {
    let mut found = vec![];
    for method in ["baseline", "dml", "one", "mcl"] {
        for seed in [3, 4] {
            if folder.join("out").join(method).join(format!("seed-{seed}/summary.json")).exists() {
                found.push(format!("{method} {seed}"));
            }
        }
    }
    found
}

fn started(output: &Output) -> Vec<String> {
    String::from_utf8_lossy(&output.stderr)
        .lines()
        .filter(|l| l.starts_with("compare: ") && !l.ends_with("is finished"))
        .map(str::to_string)
        .collect()
}

#[test]
fn four_methods_and_two_seeds_end_in_one_table_even_when_killed_half_way() {
    let folder = prepared();
    let (methods, home) = ("baseline,dml,one,mcl", folder.path());
    let mut child = compare(home, methods, &[]).stderr(std::process::Stdio::null()).stdout(std::process::Stdio::null()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(600);
    while finished(home).len() < 3 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let before = finished(home);
    assert!(before.len() >= 3 && before.len() < 8, "{before:?}");
    // The run that was under way gets a moment to save and let go of its folder.
    std::thread::sleep(Duration::from_secs(3));

    let output = compare(home, methods, &[]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert!(started(&output).len() <= 8 - before.len(), "what was finished is not run again: {:?}", started(&output));
    assert_eq!(finished(home).len(), 8);
    let table = std::fs::read_to_string(home.join("out/comparison.csv")).unwrap();
    let rows: Vec<csv::StringRecord> = csv::Reader::from_reader(table.as_bytes()).records().map(|r| r.unwrap()).collect();
    let keys: Vec<(&str, &str)> = rows.iter().map(|r| (r.get(0).unwrap(), r.get(1).unwrap())).collect();
    let wanted: Vec<(&str, &str)> =
        ["baseline", "dml", "one", "mcl"].into_iter().flat_map(|m| [(m, "0: resnet8"), (m, "1: resnet8")]).collect();
    assert_eq!(keys, wanted);
    // The mean over the two seeds, from the runs' own summaries.
    let last = |seed: u64| -> f64 {
        let text = std::fs::read_to_string(home.join(format!("out/dml/seed-{seed}/summary.json"))).unwrap();
        serde_json::from_str::<serde_json::Value>(&text).unwrap()["networks"][1]["last"].as_f64().unwrap()
    };
    assert!(rows[3][2].starts_with(&format!("{:.2} ± ", (last(3) + last(4)) / 2.0)) && rows[3][2].contains("n = 2"), "{:?}", rows[3]);
    assert!(rows.iter().all(|r| r[6].parse::<f64>().unwrap() > 0.0 && r[7].parse::<f64>().unwrap() > 0.0), "seconds and memory: {table}");
    assert!(rows[3][3].starts_with(['+', '-']), "{:?}", rows[3]);
    assert!(String::from_utf8_lossy(&output.stdout).contains("over baseline"), "{}", text(&output));
    let recipe = std::fs::read_to_string(home.join("out/dml/seed-4/recipe.toml")).unwrap();
    assert!(recipe.contains("temperature = 1.0") && recipe.contains("seed = 4"), "options of [method.dml] and the second seed: {recipe}");

    // Everything is there: nothing runs. Another recipe in the same folder is refused.
    let again = compare(home, methods, &[]).output().unwrap();
    assert!(again.status.success() && started(&again).is_empty(), "{}", text(&again));
    let other = compare(home, "dml", &["--set", "train.lr=0.1"]).output().unwrap();
    support::assert_refused(&other, 2, &["was begun with another recipe", "choose another --out"]);
}

#[test]
fn refusals_come_before_the_first_run() {
    let folder = prepared();
    let output = compare(folder.path(), "baseline,okddip", &[]).output().unwrap();
    support::assert_refused(&output, 2, &["okddip needs 3 networks or more"]);
    assert!(!folder.path().join("out/baseline").exists());
    let output = compare(folder.path(), "baseline,best", &[]).output().unwrap();
    support::assert_refused(&output, 2, &["unknown method `best`; known: baseline, dml"]);
    let output = compare(folder.path(), "dml,dml", &[]).output().unwrap();
    support::assert_refused(&output, 2, &["--methods names dml twice"]);
}
