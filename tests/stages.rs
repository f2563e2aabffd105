//! Stages of a network as networks of their own: what ships, what held-out images choose among, what measurements take, and the four
//! numbers a network is told by. Also the measurements that ask about more than what ships: lambda, and one map of all networks.

mod support;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use mcl::cohort::{Cohort, CohortOptions};
use mcl::data::Batch;
use mcl::nets::layers::{Mode, Pass};
use mcl::nets::{self, Network};
use mcl::params::Scope;
use mcl::system::ranks::Ranks;
use serde_json::Value;
use support::{EVAL, SMALL, assert_refused, recipe, text, train};
use tch::{Device, Kind, Tensor};

/// Trunk and branch, loaded as the plain architecture, answer as the branch did. One forward pass in training moves the running statistics
/// apart first: equal ones would hide a mistaken name.
#[test]
fn a_stage_is_the_plain_network_with_other_weights() {
    tch::set_num_threads(1);
    let mut shipping = vec![];
    for arch in nets::archs().filter(|arch| (0..arch.depth - 1).any(|l| !(arch.twins)(l).is_empty())) {
        let mut cohort = Cohort::new(&CohortOptions {
            archs: &[arch],
            classes: 5,
            branches: true,
            shared_stages: 0,
            device: Device::Cpu,
            kind: Kind::Double,
            seed: 3,
            ranks: Ranks::ALONE,
        });
        let side = if arch.image_size == 32 { 16 } else { 64 };
        let images = (Tensor::arange(4 * 3 * side * side, (Kind::Double, Device::Cpu)) * 0.37).sin().view([4, 3, side, side]);
        let batch = Batch {
            views: vec![images.copy()],
            labels: Tensor::zeros([4], (Kind::Int64, Device::Cpu)),
            index: Tensor::zeros([4], (Kind::Int64, Device::Cpu)),
            noise: 1,
        };
        let _guard = tch::no_grad_guard();
        drop(cohort.forward(&batch, Mode::Train));
        let peer = &cohort.peers[0];
        let answers = peer.net.answer(peer.net.maps(&images, Pass::EVAL), &peer.branches, Pass::EVAL);
        for l in 0..arch.depth - 1 {
            let Some(named) = peer.stage(l) else { continue };
            let scope = Scope::root(1, Device::Cpu, Kind::Double);
            let net = Network::new(arch, &scope, 5);
            let own = scope.params().named();
            assert_eq!(own.len(), named.len(), "{} stage {}", arch.name, l + 1);
            for ((name, live), (other, value)) in own.iter().zip(&named) {
                assert_eq!(name, other);
                live.shallow_clone().copy_(value);
            }
            let alone = net.forward(&images, Pass::EVAL);
            assert!((alone.logit() - &answers.logits[l]).abs().max().double_value(&[]) < 1e-9, "{} stage {}", arch.name, l + 1);
            assert!(
                (alone.logit() - answers.logits.last().unwrap()).abs().max().double_value(&[]) > 1e-3,
                "{}: the last stage again",
                arch.name
            );
            shipping.push((arch.name, l));
        }
        assert!(peer.stage(arch.depth - 1).is_none(), "the last stage is the network itself");
    }
    let cifar: usize = nets::archs().filter(|a| a.image_size == 32).map(|a| a.depth - 1).sum();
    assert_eq!(shipping.iter().filter(|(name, _)| nets::find(name).unwrap().image_size == 32).count(), cifar, "{shipping:?}");
}

/// A finished run of L-MCL whose held-out images may choose any stage.
fn run() -> &'static Path {
    static RUN: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, run) = RUN.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let file = recipe(folder.path(), SMALL);
        let out = folder.path().join("run");
        let made = train(&file, &out, &["--set", "train.choose=any"]).output().unwrap();
        assert!(made.status.success(), "{}", text(&made));
        assert!(text(&made).contains("note: a meta step follows after every 3 batches of an epoch, the first included"), "{}", text(&made));
        (folder, out)
    });
    run
}

fn eval(args: &[&str]) -> Output {
    Command::new(EVAL).args(["--threads", "1", "--device", "cpu"]).args(args).output().unwrap()
}

fn json(args: &[&str]) -> Value {
    let output = eval(&[&["--json"], args].concat());
    assert!(output.status.success(), "{}", text(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn metrics() -> Vec<Value> {
    let text = std::fs::read_to_string(run().join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn summary() -> Value {
    serde_json::from_slice(&std::fs::read(run().join("summary.json")).unwrap()).unwrap()
}

#[test]
fn held_out_images_choose_among_all_stages_and_what_they_chose_ships() {
    let best = summary()["best"].clone();
    let held = |row: &Value, m: usize, stage: usize| {
        let name = if stage == 3 { format!("holdout.peer{m}.top1") } else { format!("holdout.peer{m}.stage{stage}.top1") };
        row[name].as_f64().unwrap()
    };
    let most = metrics()
        .iter()
        .flat_map(|row| (0..2).flat_map(|m| (1..=3).map(move |l| (m, l))).map(|(m, l)| held(row, m, l)).collect::<Vec<_>>())
        .fold(0.0, f64::max);
    assert_eq!(best["holdout_top1"].as_f64().unwrap(), most, "{best}");
    let (m, epoch) = (best["peer"].as_u64().unwrap() as usize, best["epoch"].as_u64().unwrap() as usize);
    let stage = best["stage"].as_u64().unwrap_or(3) as usize;
    assert_eq!(held(&metrics()[epoch - 1], m, stage), most);
    let link = std::fs::read_link(run().join("networks/best.safetensors")).unwrap();
    let name = if stage == 3 { format!("peer-{m}.safetensors") } else { format!("peer-{m}-stage-{stage}.safetensors") };
    assert_eq!(link.to_string_lossy(), name);
    // Every stage ships with the epoch that was chosen, and answers as the trainer counted it there.
    let folder = run().display().to_string();
    for stage in 1..=3usize {
        let results = json(&["accuracy", "--run", &folder, "--peer", "all", "--stage", &stage.to_string()]);
        for m in 0..2 {
            let row = results["results"].as_array().unwrap().iter().find(|r| r["peer"].as_u64() == Some(m)).unwrap();
            let column = if stage == 3 { format!("test.peer{m}.top1") } else { format!("test.peer{m}.stage{stage}.top1") };
            let (measured, counted) = (row["value"].as_f64().unwrap(), metrics()[epoch - 1][&column].as_f64().unwrap());
            assert!((measured - counted).abs() < 1e-9, "{column}: {measured}, and the trainer counted {counted}");
            let subject = if stage == 3 { format!("run/peer-{m}") } else { format!("run/peer-{m}-stage-{stage}") };
            assert_eq!(row["subject"], subject);
        }
    }
    for (command, more) in [("knn", &["--dataset", "synthetic"][..]), ("centroid", &["--dataset", "synthetic"])] {
        let results = json(&[&[command, "--run", &folder, "--peer", "0", "--stage", "1", "--no-cache"], more].concat());
        assert_eq!(results["results"][0]["subject"], "run/peer-0-stage-1", "{command}");
    }
    let out = run().parent().unwrap().join("transfer").display().to_string();
    let knn = ["knn", "--dataset", "synthetic", "--run", &folder, "--peer", "0", "--stage", "1", "--no-cache", "--normalisation", "none"];
    let moved = ["transfer", &folder, "--to", "synthetic", "--evaluate", "knn --no-cache", "--normalisation", "none", "--out", &out];
    let rows = json(&[&moved[..], &["--peer", "0", "--stage", "1"]].concat());
    for key in ["subject", "value"] {
        assert_eq!(rows["results"][0][key], json(&knn)["results"][0][key], "{rows}");
    }
    assert_eq!(rows["results"][0]["subject"], "run/peer-0-stage-1");
    let compared = eval(&["compare", &folder, &folder, "--peer", "0", "--stage", "1,3"]);
    assert!(compared.status.success(), "{}", text(&compared));
    assert_refused(&eval(&["accuracy", "--run", &folder, "--stage", "4"]), 2, &["--stage 4", "accepted: 1, 2, 3"]);
    assert_refused(&eval(&["compare", &folder, &folder, "--stage", "1,2,3"]), 2, &["--stage has 3 numbers"]);
}

/// The trainer's rows, its summary and the report tell one story.
#[test]
fn the_four_numbers_agree_between_metrics_summary_and_report() {
    let out = run().parent().unwrap().join("report");
    let made = eval(&["report", "--run", &run().display().to_string(), "--out", &out.display().to_string()]);
    assert!(made.status.success(), "{}", text(&made));
    let report = std::fs::read_to_string(out.join("report.md")).unwrap();
    let (rows, summary) = (metrics(), summary());
    for m in 0..2 {
        let column = |name: &str| rows.iter().map(|row| row[format!("{name}.top1")].as_f64().unwrap()).collect::<Vec<_>>();
        let first_best = |values: &[f64]| {
            let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            values.iter().position(|v| *v == most).unwrap()
        };
        let (test, held) = (column(&format!("test.peer{m}")), column(&format!("holdout.peer{m}")));
        let stages = [column(&format!("test.peer{m}.stage1")), column(&format!("test.peer{m}.stage2")), test.clone()];
        let most = stages.iter().flatten().copied().fold(0.0, f64::max);
        let (by_holdout, own) = (first_best(&held), first_best(&test));
        let network = &summary["networks"][m];
        assert_eq!(network["last"].as_f64(), test.last().copied());
        assert_eq!(network["by_holdout"], serde_json::json!([test[by_holdout], by_holdout + 1]));
        assert_eq!(network["best_test"], serde_json::json!([test[own], own + 1]));
        assert_eq!(network["best_stage"][0].as_f64(), Some(most));
        let line = report.lines().find(|l| l.contains(&format!("{m}: resnet8")) && l.contains("l_mcl")).unwrap();
        let shown = [
            format!("{:.2}", test[test.len() - 1]),
            format!("{:.2} (epoch {})", test[by_holdout], by_holdout + 1),
            format!("{:.2} (epoch {})", test[own], own + 1),
            format!("{most:.2} (stage"),
        ];
        for part in shown {
            assert!(line.contains(&part), "`{part}` is not in: {line}");
        }
    }
    assert!(report.contains("the released code of the paper prints that one"), "which number the paper prints");
    assert!(report.contains("Stages chosen on held-out images") && report.contains("| l_mcl | resnet8, resnet8 | branches |"), "{report}");
}

#[test]
fn lambda_is_measured_over_all_training_images() {
    let folder = run().display().to_string();
    let measured = json(&["lambda", "--run", &folder, "--checkpoint", "last"]);
    let rows = measured["results"].as_array().unwrap();
    let lambdas: Vec<f64> = rows.iter().filter(|r| r["metric"] == "lambda").map(|r| r["value"].as_f64().unwrap()).collect();
    assert_eq!(lambdas.len(), 9);
    // The sigmoid of a cosine.
    assert!(lambdas.iter().all(|l| (0.2689..=0.7311).contains(l)), "{lambdas:?}");
    let gain = rows.iter().find(|r| r["metric"] == "same_level_gain").unwrap();
    let of = |same: bool| {
        let own: Vec<f64> = (0..9).filter(|i| (i / 3 == i % 3) == same).map(|i| lambdas[i]).collect();
        own.iter().sum::<f64>() / own.len() as f64
    };
    assert!((gain["value"].as_f64().unwrap() - (of(true) - of(false))).abs() < 1e-6);
    assert!(gain["ci_low"].as_f64().unwrap() <= gain["value"].as_f64().unwrap());
    // Twelve of 120 images of 32 classes, less two held out of each class first: a tenth of 118.
    let trained: Value = serde_json::from_slice(&std::fs::read(run().join("environment.json")).unwrap()).unwrap();
    assert_eq!(gain["n_train"], trained["train_images"]);
    assert!(run().join("figures").read_dir().unwrap().any(|f| f.unwrap().file_name().to_string_lossy().contains("lambda-all-0-1")));
    assert_refused(&eval(&["lambda", "--run", &folder, "--checkpoint", "newest"]), 2, &["--checkpoint newest", "best, last, step-N"]);
}

#[test]
fn all_networks_of_a_run_lie_in_one_map() {
    let folder = run().display().to_string();
    let measured = json(&[
        "tsne",
        "--joint",
        "--run",
        &folder,
        "--peer",
        "all",
        "--set",
        "samples=64",
        "--set",
        "perplexity=5",
        "--set",
        "iterations=60",
    ]);
    let across = measured["results"].as_array().unwrap().iter().find(|r| r["metric"] == "across_in_class").unwrap();
    assert_eq!(across["variant"], "joint map of embeddings");
    assert!((0.0..=100.0).contains(&across["value"].as_f64().unwrap()));
    let files: Vec<&str> = measured["files"].as_array().unwrap().iter().map(|f| f.as_str().unwrap()).collect();
    let svg = std::fs::read_to_string(files[0]).unwrap();
    assert!(svg.contains("network 0") && svg.contains("network 1"), "the legend tells networks apart");
    let csv = std::fs::read_to_string(files[2]).unwrap();
    assert_eq!(csv.lines().next().unwrap().split(',').count(), 3 + 4, "two coordinates for each network");
    assert_refused(&eval(&["tsne", "--joint", "--run", &folder, "--peer", "0"]), 2, &["--joint", "at least two"]);
}
