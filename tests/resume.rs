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
    // The saved cadence differs on purpose between the runs that are compared.
    manifest.as_object_mut().unwrap().remove("recipe");
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
