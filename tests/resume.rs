//! A run that is killed and resumed ends as the run that was not: all tensors, counters and rows, to the bit. Timings excepted.

mod support;

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rand::{Rng, SeedableRng};
use serde_json::Value;
use support::{SMALL, recipe, text, train};

/// Saves about every third of a second, so that kills land inside saves too.
const OFTEN: &[&str] = &["--set", "save.every_minutes=0.005", "--quiet"];

/// The manifest without what depends on the clock.
fn manifest(run: &Path) -> Value {
    fn strip(value: &mut Value) {
        if let Value::Object(map) = value {
            map.retain(|key, _| !(key.starts_with("seconds") || key == "images_per_second" || key == "peak_mb"));
            map.values_mut().for_each(strip);
        }
        if let Value::Array(items) = value {
            items.iter_mut().for_each(strip);
        }
    }
    let text = fs::read_to_string(run.join("checkpoints/last/manifest.json")).unwrap();
    let mut manifest: Value = serde_json::from_str(&text).unwrap();
    strip(&mut manifest);
    // The saved cadence differs on purpose between the runs that are compared, and the checksum is over what was stripped, too.
    manifest.as_object_mut().unwrap().retain(|key, _| key != "recipe" && key != "sha256");
    manifest["files"].as_object_mut().unwrap().retain(|name, _| name == "state.safetensors");
    manifest
}

fn assert_same_end(expected: &Path, found: &Path) {
    let state = |run: &Path| fs::read(run.join("checkpoints/last/state.safetensors")).unwrap();
    assert!(state(expected) == state(found), "the tensors differ");
    assert_eq!(manifest(expected), manifest(found));
    for peer in ["peer-0.safetensors", "peer-1.safetensors"] {
        let weights = |run: &Path| {
            let named = tch::Tensor::read_safetensors(run.join("networks").join(peer)).unwrap();
            named
                .into_iter()
                .map(|(n, t)| (n, format!("{:?}", t.flatten(0, -1).to_kind(tch::Kind::Double).sum(None).double_value(&[]).to_bits())))
                .collect::<std::collections::BTreeMap<_, _>>()
        };
        assert_eq!(weights(expected), weights(found));
    }
}

/// The uninterrupted run, with the cadence of saves that is the default.
fn whole(folder: &Path) -> std::path::PathBuf {
    let out = folder.join("whole");
    let output = train(&recipe(folder, SMALL), &out, &["--quiet"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    out
}

#[test]
fn twenty_five_kills_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (recipe, expected) = (recipe(folder.path(), SMALL), whole(folder.path()));
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(25);
    let (mut kills, mut round, mut finished) = (0, 0, 0);
    while kills < 25 || finished == 0 {
        let out = folder.path().join(format!("killed-{round}"));
        let mut child = train(&recipe, &out, OFTEN).arg("--resume").stdout(Stdio::null()).spawn().unwrap();
        // Anywhere from start-up to several saves later; now and then exactly while a checkpoint is being written.
        let deadline = Instant::now() + Duration::from_millis(rng.gen_range(200..2500));
        let in_a_save = rng.gen_bool(0.3);
        let writing = || {
            fs::read_dir(out.join("checkpoints"))
                .is_ok_and(|mut d| d.any(|e| e.is_ok_and(|e| e.file_name().to_string_lossy().contains(".tmp"))))
        };
        let done = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break Some(status);
            }
            if (in_a_save && kills > 2 && writing()) || Instant::now() > deadline {
                break None;
            }
            sleep(Duration::from_millis(1));
        };
        match done {
            Some(status) => {
                assert!(status.success(), "{status}");
                assert_same_end(&expected, &out);
                finished += 1;
                round += 1;
            }
            None if kills < 25 => {
                child.kill().unwrap();
                child.wait().unwrap();
                kills += 1;
            }
            // Enough kills: this one may end.
            None => {
                assert!(child.wait().unwrap().success());
                assert_same_end(&expected, &out);
                finished += 1;
            }
        }
    }
}

#[test]
fn sigterm_saves_says_where_and_exits_75() {
    let folder = tempfile::tempdir().unwrap();
    let (recipe, expected) = (recipe(folder.path(), SMALL), whole(folder.path()));
    let out = folder.path().join("stopped");
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(15);
    let mut stops = 0;
    loop {
        let child = train(&recipe, &out, &["--resume", "--quiet"]).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        if stops < 8 {
            // Once it trains (its log says so), at any moment.
            let log = || fs::read_to_string(out.join("log.txt")).unwrap_or_default();
            let lines = log().lines().count();
            while log().lines().count() == lines && !log().contains("finished") {
                sleep(Duration::from_millis(2));
            }
            sleep(Duration::from_millis(rng.gen_range(0..700)));
            // Safe: our own child, which has not been waited for.
            unsafe { libc::kill(child.id() as i32, if stops % 2 == 0 { libc::SIGTERM } else { libc::SIGINT }) };
        }
        let output = child.wait_with_output().unwrap();
        if output.status.code() != Some(75) {
            assert!(output.status.success(), "{}", text(&output));
            break;
        }
        stops += 1;
        let message = text(&output);
        assert!(message.contains("--resume") && message.contains("checkpoints/step-"), "{message}");
    }
    assert!(stops >= 4, "only {stops} stops landed before the end");
    assert_same_end(&expected, &out);
}

/// Rows inside an epoch and points for TensorBoard after kills are those of the run that was not killed; and the guide lists every column.
#[test]
fn metrics_by_step_survive_kills_and_are_all_in_the_guide() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), SMALL);
    let every = ["--quiet", "--set", "save.metrics_every=2", "--set", "save.every_minutes=0.002"];
    let (whole, killed) = (folder.path().join("whole"), folder.path().join("killed"));
    let output = train(&recipe, &whole, &every).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let rows = |run: &Path| -> Vec<Value> {
        let text = fs::read_to_string(run.join("metrics-steps.jsonl")).unwrap_or_default();
        let timed = |name: &str| name.starts_with("seconds");
        let row = |line: &str| -> Value {
            let mut row: Value = serde_json::from_str(line).unwrap();
            row.as_object_mut().unwrap().retain(|name, _| !timed(name));
            row
        };
        text.lines().map(row).collect()
    };
    let mut kills = 0;
    loop {
        let mut child = train(&recipe, &killed, &every).arg("--resume").stdout(Stdio::null()).spawn().unwrap();
        let before = rows(&killed).len();
        while kills < 3 && child.try_wait().unwrap().is_none() && rows_written(&killed) < before + 3 {
            sleep(Duration::from_millis(5));
        }
        if kills < 3 && child.try_wait().unwrap().is_none() {
            child.kill().unwrap();
            kills += 1;
        }
        if child.wait().unwrap().success() {
            break;
        }
    }
    assert!(kills > 0);
    let (expected, found) = (rows(&whole), rows(&killed));
    assert_eq!(expected, found);
    // Means over two steps each.
    let steps: Vec<u64> = expected.iter().map(|row| row["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, (1..=steps.len() as u64).map(|i| 2 * i).collect::<Vec<_>>());
    let of_epochs: Vec<Value> =
        fs::read_to_string(whole.join("metrics.jsonl")).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let per_epoch = of_epochs[0]["step"].as_u64().unwrap();
    assert_eq!(per_epoch % 2, 0, "an epoch is a whole number of rows");
    let first: Vec<f64> = expected.iter().filter(|row| row["epoch"] == 1).map(|row| row["loss"].as_f64().unwrap()).collect();
    let mean = first.iter().sum::<f64>() / first.len() as f64;
    assert!((mean - of_epochs[0]["loss"].as_f64().unwrap()).abs() < 1e-9 * mean, "{mean} {}", of_epochs[0]["loss"]);

    let guide = fs::read_to_string("src/train/metrics.md").unwrap();
    let listed: Vec<&str> = guide.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
    let timed = fs::read_to_string(whole.join("metrics-steps.jsonl")).unwrap();
    let timed: Value = serde_json::from_str(timed.lines().next().unwrap()).unwrap();
    for column in of_epochs.iter().chain([&timed]).flat_map(|row| row.as_object().unwrap().keys()) {
        assert!(listed.iter().any(|pattern| names(pattern, column)), "src/train/metrics.md has no line for the column {column}");
    }
}

/// Lines so far, a last one that is being written included.
fn rows_written(run: &Path) -> usize {
    fs::read_to_string(run.join("metrics-steps.jsonl")).map_or(0, |text| text.lines().count())
}

/// Is `column` one of those that the guide calls `pattern`? A capital letter stands for a number, NAME for a word.
fn names(pattern: &str, column: &str) -> bool {
    let (a, b): (Vec<&str>, Vec<&str>) = (pattern.split('.').collect(), column.split('.').collect());
    let part = |(pattern, found): (&&str, &&str)| match pattern.strip_suffix(['A', 'B', 'J', 'K', 'L', 'M']) {
        _ if *pattern == "NAME" => !found.is_empty(),
        Some(begin) => found.strip_prefix(begin).is_some_and(|number| number.parse::<usize>().is_ok()),
        None => pattern == found,
    };
    a.len() == b.len() && a.iter().zip(&b).all(part)
}

/// The first command stays in environment.json, and those that went on are added; other epochs than before are said.
#[test]
fn a_run_that_goes_on_remembers_how_it_began() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), &SMALL.replace("epochs = 3", "epochs = 1"));
    let out = folder.path().join("run");
    let environment = || -> Value { serde_json::from_str(&fs::read_to_string(out.join("environment.json")).unwrap()).unwrap() };
    assert!(train(&recipe, &out, &["--quiet"]).output().unwrap().status.success());
    let began = environment();
    assert!(began["command"].as_str().unwrap().ends_with("--quiet") && began.get("resumed").is_none(), "{began}");
    let more = train(&recipe, &out, &["--resume", "--set", "train.epochs=2"]).output().unwrap();
    assert!(more.status.success() && text(&more).contains("train.epochs was 1 and is 2 now"), "{}", text(&more));
    let now = environment();
    assert_eq!((&now["command"], &now["started"]), (&began["command"], &began["started"]));
    let resumed = now["resumed"].as_array().unwrap();
    assert!(resumed.len() == 1 && resumed[0]["command"].as_str().unwrap().contains("--resume"), "{now}");
    assert!(resumed[0]["step"].as_u64().unwrap() > 0 && now["recipe_hash"] != began["recipe_hash"], "{now}");
}

/// More epochs than the first time; a finished run resumed does nothing.
#[test]
fn a_finished_run_can_be_prolonged() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), &SMALL.replace("epochs = 3", "epochs = 1\nschedule = \"constant\""));
    let (split, straight) = (folder.path().join("split"), folder.path().join("straight"));
    for more in [vec!["--quiet"], vec!["--quiet", "--resume"], vec!["--quiet", "--resume", "--set", "train.epochs=2"]] {
        let output = train(&recipe, &split, &more).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
    }
    let output = train(&recipe, &straight, &["--quiet", "--set", "train.epochs=2"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert_same_end(&straight, &split);
}
