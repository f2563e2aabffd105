//! The first thing a newcomer runs: `make pretrain` shows the method at work on the embedded images.

mod support;

use std::path::Path;

use serde_json::Value;
use support::{text, train};

/// The rows of the quickstart by a method with a seed, and what it printed.
fn quickstart(folder: &Path, method: &str, seed: u64) -> (Vec<Value>, String) {
    let out = folder.join(format!("{method}-{seed}"));
    let sets = [format!("method.name={method}"), format!("train.seed={seed}")];
    let output = train(Path::new("protocols/pretrain/quickstart.toml"), &out, &["--set", &sets[0], "--set", &sets[1]]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let metrics = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    (metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect(), text(&output))
}

fn number(row: &Value, name: &str) -> f64 {
    row[name].as_f64().unwrap_or_else(|| panic!("no {name} in {row}"))
}

/// The mean over both networks of their own classifiers, in percent.
fn accuracy(row: &Value) -> f64 {
    (number(row, "test.peer0.top1") + number(row, "test.peer1.top1")) / 2.0
}

/// Likeness falls, the information bound rises, and what is learnt is far above chance (3.125 %): true of every seed. That L-MCL is ahead
/// of networks trained alone is held on average.
#[test]
fn the_quickstart_shows_the_method_at_work() {
    let folder = tempfile::tempdir().unwrap();
    let seed = |seed: u64| {
        let (rows, said) = quickstart(folder.path(), "l_mcl", seed);
        let (first, last) = (&rows[0], &rows[rows.len() - 1]);
        for m in 0..2 {
            let [before, after] = [first, last].map(|row| number(row, &format!("likeness.{m}")));
            assert!(after < before - 0.3, "seed {seed}: likeness of network {m} was {before} and is {after}");
            let [before, after] = [first, last].map(|row| number(row, &format!("mutual_information.{m}.{}", 1 - m)));
            assert!(before < 0.1 && after > 1.0, "seed {seed}: bound of network {m} was {before} and is {after}");
        }
        assert!(accuracy(last) > 50.0, "seed {seed}: {}", accuracy(last));
        assert!(said.contains("Run folder") && said.contains("mcl-eval linear-probe"), "{said}");
        assert!(!said.contains("nearly the same"), "a newcomer's first run ends in no warning: {said}");
        let (alone, _) = quickstart(folder.path(), "baseline", seed);
        accuracy(last) - accuracy(&alone[alone.len() - 1])
    };
    let seed = &seed;
    let leads: Vec<f64> = std::thread::scope(|scope| {
        let runs: Vec<_> = (1..=3).map(|s| scope.spawn(move || seed(s))).collect();
        runs.into_iter().map(|run| run.join().unwrap()).collect()
    });
    let mean = leads.iter().sum::<f64>() / leads.len() as f64;
    assert!(mean > 8.0, "L-MCL leads by {mean:.2} points on average: {leads:?}");
}

/// The note about likeness comes once, when embeddings stay one point for longer than a run usually takes to part them, and a run that
/// goes on does not say it again. Without hard terms nothing parts them.
#[test]
fn embeddings_that_stay_one_point_are_said_once() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    // Eight steps an epoch: epoch 38 ends at step 304, the first beyond 300.
    let run = |epochs: usize, resume: bool| {
        let recipe = support::recipe(
            folder.path(),
            "[data]\nname = \"synthetic\"\nper_class = 4\nimage_size = 8\n[cohort]\narchs = [\"resnet8\", \"resnet8\"]\n\
             [train]\nbatch = 16\nlr = 0.05\n[method]\nname = \"l_mcl\"\nmatching = \"one_to_one\"\nalpha = 0.0\nbeta = 20.0\n",
        );
        let epochs = format!("train.epochs={epochs}");
        let more = [
            &["--set", &epochs, "--set", "save.every_epochs=50", "--set", "save.every_minutes=0"][..],
            if resume { &["--resume"] } else { &[] },
        ]
        .concat();
        let output = train(&recipe, &out, &more).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        text(&output)
    };
    let said = run(40, false);
    let lines: Vec<&str> = said.lines().collect();
    let notes: Vec<usize> = (0..lines.len()).filter(|&i| lines[i].contains("nearly the same")).collect();
    assert_eq!(notes.len(), 1, "{said}");
    assert!(lines[..notes[0]].iter().rev().find(|l| l.starts_with("epoch ")).unwrap().starts_with("epoch 38/40: loss"), "{said}");
    assert!(lines[notes[0]].contains("after 304 steps"), "{said}");
    assert!(!run(42, true).contains("nearly the same"));
}
