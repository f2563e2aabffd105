//! Experiments made of flags, `mcl-train compare` and `mcl-eval few-shot --fractions`: killed or stopped half-way, they go on where they were.

mod support;

use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use support::{EVAL, TRAIN, text, write_colours};

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

fn fractions(folder: &Path, more: &[&str]) -> Command {
    let mut command = Command::new(EVAL);
    command.current_dir(folder).env("MCL_CACHE", folder.join("cache")).env_remove("MCL_DATA");
    command.args(["few-shot", "--fractions", "0.5,1", "--recipe", "recipe.toml", "--methods", "baseline,dml", "--out", "parts"]);
    command.args(["--data", ".", "--threads", "1", "--device", "cpu", "--set", "train.epochs=4"]).args(more);
    command
}

#[test]
fn fractions_that_were_stopped_go_on() {
    let folder = prepared();
    let home = folder.path();
    let run = |name: &str| home.join("parts").join(name);
    let mut child = fractions(home, &[]).stderr(std::process::Stdio::null()).stdout(std::process::Stdio::null()).spawn().unwrap();
    // Stopped in the second run, after its first epoch.
    let deadline = Instant::now() + Duration::from_secs(300);
    while !run("baseline-1-seed3/metrics.csv").exists() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    // SAFETY: the child has not been waited for.
    unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGTERM) };
    assert_eq!(child.wait().unwrap().code(), Some(75));
    assert!(run("baseline-0.5-seed3/summary.json").exists() && !run("dml-0.5-seed3").exists());
    let trained = |name: &str| std::fs::metadata(run(name).join("summary.json")).unwrap().modified().unwrap();
    let before = trained("baseline-0.5-seed3");

    let output = fractions(home, &["--json"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(trained("baseline-0.5-seed3"), before, "what was finished is not trained again");
    let log = std::fs::read_to_string(run("baseline-1-seed3/log.txt")).unwrap();
    assert!(log.contains("resumed from step-"), "{log}");
    let printed: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = printed["results"].as_array().unwrap();
    // Two networks of each method and part, tested on the whole test split.
    assert_eq!(rows.len(), 8, "{rows:?}");
    for row in rows {
        assert_eq!((&row["command"], &row["n_test"]), (&"few-shot".into(), &100.into()));
        let images = if row["variant"] == "fraction=0.5" { 160 } else { 320 };
        assert_eq!(row["n_train"], images, "{row}");
    }
    assert!(run("few-shot-fractions.svg").exists());

    // Given again, nothing runs and no row is added; another recipe in the same folder is refused.
    let lines = || std::fs::read_to_string(home.join("parts/results.jsonl")).unwrap().lines().count();
    assert_eq!(lines(), 8);
    let again = fractions(home, &[]).output().unwrap();
    assert!(again.status.success(), "{}", text(&again));
    assert_eq!(lines(), 8);
    let other = fractions(home, &["--set", "train.lr=0.1"]).output().unwrap();
    support::assert_refused(&other, 2, &["was begun with another recipe", "choose another --out"]);
}
