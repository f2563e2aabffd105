//! Networks of any origin as subjects: TorchScript files, layers, checkpoints of runs that are not finished, features as files, and `transfer`.

mod support;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use mcl::eval::record;
use mcl::nets;
use mcl::nets::graph::{self, Answer};
use mcl::weights::safetensors::Reader;
use mcl::weights::{self, LoadOptions};
use support::EVAL;
use support::trained::{done, eval, run_folder, stderr};
use tch::{Device, Tensor};

const NORMALISED: [&str; 2] = ["--normalisation", "0.5,0.5,0.5/0.25,0.25,0.25"];

/// The first network of a run as somebody's TorchScript, which gives its maps by name or its logits.
fn scripted(run: &Path, to: &Path, answer: Answer) {
    let file = run.join("networks/peer-0.safetensors");
    let opened = weights::open(&file, None, Device::Cpu, &LoadOptions::default()).unwrap();
    weights::torchscript::save(to, &graph::module(opened.arch, &opened.params, answer)).unwrap();
}

fn tensor(file: &Path, name: &str) -> Tensor {
    Reader::open(file).unwrap().tensor(name).unwrap()
}

fn close(a: &Tensor, b: &Tensor) -> bool {
    a.size() == b.size() && ((a - b).abs().max() / b.abs().max()).double_value(&[]) < 1e-4
}

#[test]
fn a_torchscript_file_is_measured_as_the_network_it_was_made_of() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    let run = run_folder(root.path(), "one", 1);
    scripted(&run, &at("maps.pt"), Answer::Maps);
    scripted(&run, &at("logits.pt"), Answer::Logits);
    let knn = |network: &[&str]| {
        let fixed = ["knn", "--dataset", "synthetic", "--k", "5", "--image-size", "32", "--out", "results", "--json"];
        let output = done(eval(root.path(), &[&fixed[..], network].concat()));
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()["results"][0].clone()
    };
    let ours = knn(&["--weights", "runs/one/networks/peer-0.safetensors"]);
    let by_flags = knn(&[&["--torchscript", "maps.pt", "--output", "2", "--pool", "mean"], &NORMALISED[..]].concat());
    assert!((ours["value"].as_f64().unwrap() - by_flags["value"].as_f64().unwrap()).abs() < 0.3, "{ours} {by_flags}");
    assert_eq!((&by_flags["subject"], &by_flags["arch"], &by_flags["image_size"]), (&"maps".into(), &"torchscript".into(), &32.into()));
    // The same by a JSON beside the file; the features are those of our own forward pass.
    fs::write(
        at("maps.json"),
        r#"{"name": "theirs", "image_size": 32, "mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25], "output": "2"}"#,
    )
    .unwrap();
    assert_eq!(knn(&["--torchscript", "maps.pt"])["arch"], "theirs");
    let embed =
        |network: &[&str], out: &str| done(eval(root.path(), &[&["embed", "--dataset", "synthetic", "--out", out], network].concat()));
    embed(&["--run", "runs/one", "--peer", "0"], "ours.safetensors");
    embed(&["--torchscript", "maps.pt"], "theirs.safetensors");
    let (ours, theirs) = (at("ours.safetensors"), at("theirs.safetensors"));
    assert!(close(&tensor(&theirs, "features"), &tensor(&ours, "features")));
    assert_eq!(tensor(&theirs, "labels"), tensor(&ours, "labels"));
    // Its logits are an output like any other, and with the names of classes its accuracy is measured.
    let classes: Vec<String> = (0..32).map(|c| c.to_string()).collect();
    let beside =
        serde_json::json!({ "image_size": 32, "mean": vec![0.5; 3], "std": vec![0.25; 3], "classes": classes, "dataset": "synthetic" });
    fs::write(at("logits.json"), beside.to_string()).unwrap();
    let accuracy = |network: &[&str]| {
        let output = done(eval(root.path(), &[&["accuracy", "--out", "results", "--dataset", "synthetic", "--json"], network].concat()));
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()["results"][0]["value"].as_f64().unwrap()
    };
    let (own, theirs) = (accuracy(&["--weights", "runs/one/networks/peer-0.safetensors"]), accuracy(&["--torchscript", "logits.pt"]));
    assert!((own - theirs).abs() < 0.3, "{own} {theirs}");

    fs::remove_file(at("maps.json")).unwrap();
    fs::write(at("text.pt"), "no module\n").unwrap();
    fs::write(at("logits.json"), "{\"image_size\": 0}").unwrap();
    let refused = |network: &[&str], expected: &str| {
        let output = eval(root.path(), &[&["knn", "--dataset", "synthetic"], network].concat());
        assert_eq!(output.status.code(), Some(2), "{network:?}: {}", stderr(&output));
        assert!(stderr(&output).lines().last().unwrap_or_default().contains(expected), "{network:?}: {}", stderr(&output));
    };
    refused(&["--torchscript", "maps.pt"], "maps.json, as protocols/import/trace.py writes it");
    let with = |more: &[&'static str]| [&["--torchscript", "maps.pt"], &NORMALISED[..], more].concat();
    refused(&with(&[]), "gives several tensors; choose one by --output: 0 [");
    refused(&with(&["--output", "3"]), "has no output 3; known: 0 [");
    refused(&with(&["--output", "2", "--pool", "cls"]), "which has no first token");
    refused(&with(&["--layers", "1"]), "needs one of our architectures");
    refused(&["--torchscript", "text.pt", "--normalisation", "none"], "text.pt: no TorchScript module");
    refused(&["--torchscript", "logits.pt", "--normalisation", "none"], "logits.json: image_size");
    refused(&["--run", "runs/one", "--pool", "mean"], "--pool is of networks given by file; add --torchscript FILE");
    let output = eval(root.path(), &[&["export", "--to", "safetensors"], &with(&["--output", "2"])[..]].concat());
    assert!(stderr(&output).contains("export needs one of our architectures"), "{}", stderr(&output));
}

#[test]
fn features_are_written_with_labels_names_and_split_and_of_any_layers() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    run_folder(root.path(), "one", 1);
    let embed = |more: &[&str]| done(eval(root.path(), &[&["embed", "--run", "runs/one", "--peer", "1"], more].concat()));
    embed(&["--dataset", "synthetic", "--out", "f.safetensors"]);
    embed(&["--dataset", "synthetic", "--out", "f.npz"]);
    let output = eval(root.path(), &["embed", "--run", "runs/one", "--peer", "1", "--dataset", "synthetic", "--out", "f.csv"]);
    assert!(output.status.code() == Some(2) && stderr(&output).contains("accepted: .safetensors, .npz"), "{}", stderr(&output));
    let file = at("f.safetensors");
    let (features, labels, split, names) =
        (tensor(&file, "features"), tensor(&file, "labels"), tensor(&file, "split"), tensor(&file, "names"));
    let n = features.size()[0];
    assert_eq!((features.size()[1], labels.size(), split.size(), names.size()[0]), (64, vec![n], vec![n], n));
    let texts = Reader::open(&file).unwrap().texts();
    assert_eq!(
        (texts["dataset"].as_str(), texts["parts"].as_str(), texts["architecture"].as_str()),
        ("synthetic", "train,test", "resnet8")
    );
    let test = split.eq(1).sum(None).int64_value(&[]);
    assert!(test > 0 && test < n);
    let name = |row: i64| {
        let bytes = Vec::<u8>::try_from(names.get(row)).unwrap();
        String::from_utf8(bytes).unwrap().trim_end_matches('\0').to_string()
    };
    assert_eq!((name(0), name(n - test)), ("train/0".to_string(), "test/0".to_string()));
    // numpy's archive holds the same numbers.
    let mut archive = zip::ZipArchive::new(fs::File::open(at("f.npz")).unwrap()).unwrap();
    let mut bytes = vec![];
    std::io::copy(&mut archive.by_name("features.npy").unwrap(), &mut bytes).unwrap();
    let header = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    assert!(String::from_utf8_lossy(&bytes[..header]).contains(&format!("'descr': '<f4', 'fortran_order': False, 'shape': ({n}, 64")));
    assert_eq!(Tensor::from_data_size(&bytes[header..], &[n, 64], tch::Kind::Float), features);
    assert!(archive.file_names().any(|name| name == "names.npy"));
    // What is kept in the cache carries the same.
    let kept: Vec<_> = fs::read_dir(root.path().join("cache/features")).unwrap().map(|e| e.unwrap().path()).collect();
    assert!(kept.len() == 2 && kept.iter().all(|file| Reader::open(file).unwrap().names().len() == 4), "{kept:?}");

    // Two layers side by side are the stage's map, averaged by hand, and the network's own feature.
    let values: Vec<f32> = (0..2 * 3 * 32 * 32).map(|j| (0.37 * f64::from(j)).sin() as f32).collect();
    let images = Tensor::from_slice(&values).view([2, 3, 32, 32]);
    weights::safetensors::save(&at("x.safetensors"), &vec![("images".to_string(), images)], &Default::default()).unwrap();
    embed(&["--images", "x.safetensors", "--stages", "--out", "plain.safetensors"]);
    embed(&["--images", "x.safetensors", "--layers", "1,last", "--out", "two.safetensors"]);
    let plain = at("plain.safetensors");
    let first = tensor(&plain, "stage.1").mean_dim([2i64, 3].as_slice(), false, None);
    let by_hand = Tensor::cat(&[first, tensor(&plain, "features")], 1);
    let two = tensor(&at("two.safetensors"), "features");
    assert!(two.size() == [2, 80] && close(&two, &by_hand), "{:?}", two.size());
    // Rows of another layer are another subject's.
    done(eval(root.path(), &["knn", "--run", "runs/one", "--peer", "1", "--dataset", "synthetic", "--k", "1", "--layers", "2"]));
    let rows = record::read(&at("runs/one")).unwrap();
    assert_eq!(rows.iter().map(|r| r.subject.as_str()).collect::<Vec<_>>(), ["one/peer-1 layers 2"]);
    for (layers, expected) in [("4", "--layers 4: resnet8 has 3 stages; accepted: 1 to 3, last"), ("1,1", "--layers names 1 twice")] {
        let output = eval(root.path(), &["knn", "--run", "runs/one", "--dataset", "synthetic", "--layers", layers]);
        assert!(output.status.code() == Some(2) && stderr(&output).contains(expected), "{}", stderr(&output));
    }
}

#[test]
fn runs_that_are_not_finished_are_measured_by_their_checkpoints() {
    let root = tempfile::tempdir().unwrap();
    let finished = run_folder(root.path(), "old", 1);
    let under_way = run_folder(root.path(), "new", 5);
    let runs = root.path().join("runs");
    fs::create_dir_all(under_way.join("checkpoints")).unwrap();
    fs::rename(under_way.join("networks"), under_way.join("checkpoints/step-7")).unwrap();
    std::os::unix::fs::symlink("step-7", under_way.join("checkpoints/last")).unwrap();
    std::os::unix::fs::symlink("new", runs.join("latest")).unwrap();
    let knn = |more: &[&str]| eval(root.path(), &[&["knn", "--dataset", "synthetic", "--k", "1", "--peer", "0"], more].concat());
    // Nobody named a run: the newest that can be measured is, and it is said.
    let said = stderr(&done(knn(&[])));
    let line = said.lines().find(|line| line.starts_with("measuring runs/old, the newest that can be measured: "));
    assert!(line.is_some_and(|line| line.contains("runs/") && line.ends_with("--checkpoint last measures how far it is")), "{said}");
    assert_eq!(record::read(&finished).unwrap()[0].subject, "old/peer-0");
    for checkpoint in ["last", "step-7"] {
        done(knn(&["--checkpoint", checkpoint]));
    }
    let rows = record::read(&under_way).unwrap();
    assert_eq!(rows.iter().map(|r| r.subject.as_str()).collect::<Vec<_>>(), ["new/peer-0 at step-7"; 2]);
    for (more, expected) in [
        (&["--run", "runs/new"][..], "; --checkpoint last measures how far it is"),
        (&["--run", "runs/new", "--checkpoint", "step-8"], "has no networks at checkpoint step-8; it has step-7"),
        (&["--run", "runs/old", "--checkpoint", "best"], "has no networks at checkpoint best; it has none yet"),
        (&["--run", "runs/new", "--checkpoint", "newest"], "checkpoint `newest`; accepted: last, best, or step-N"),
    ] {
        let output = knn(more);
        assert!(output.status.code() == Some(2) && stderr(&output).contains(expected), "{more:?}: {}", stderr(&output));
    }
}

#[test]
fn transfer_ends_in_one_table_even_when_killed() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    let run = run_folder(root.path(), "one", 1);
    run_folder(root.path(), "two", 9);
    scripted(&run, &at("maps.pt"), Answer::Maps);
    fs::write(at("maps.json"), r#"{"image_size": 32, "mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25], "output": "1"}"#).unwrap();
    let (net, params) = nets::Network::build(nets::find("wrn_16_1").unwrap(), 10, 3, Device::Cpu, tch::Kind::Float);
    drop(net);
    weights::save_pth(&at("student.pth"), &params.prefixed("module.student.").named()).unwrap();
    let args = ["transfer", "runs/two", "student.pth", "maps.pt", "--peer", "0", "--to", "synthetic"];
    let lines = ["--evaluate", "knn --k 1", "--evaluate", "few-shot --shots 1 --tries 2", "--image-size", "32", "--out", "out"];
    let all = [&args[..], &NORMALISED[..], &lines[..]].concat();
    let mut command = Command::new(EVAL);
    command.args(&all).current_dir(root.path()).env("MCL_CACHE", at("cache")).env_remove("MCL_DATA");
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    // Killed as soon as the first measurement has left a row.
    let rows_of = |name: &str| {
        let folders = fs::read_dir(at("out")).into_iter().flatten().map(|e| e.unwrap().path());
        let own = folders.filter(|f| f.is_dir() && f.file_name().unwrap().to_string_lossy().starts_with(name));
        own.flat_map(|folder| record::read(&folder).unwrap()).collect::<Vec<_>>()
    };
    let until = Instant::now() + Duration::from_secs(120);
    while rows_of("two").is_empty() && child.try_wait().unwrap().is_none() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
    }
    let _ = child.kill();
    child.wait().unwrap();
    let first = rows_of("two").remove(0);
    let output = done(eval(root.path(), &all));
    let table = fs::read_to_string(at("out/transfer.csv")).unwrap();
    assert_eq!(table.lines().count(), 1 + 2 * 3, "{table}");
    for word in ["two/peer-0", "student", "maps", "1 nearest neighbour", "1 labelled image a class", "wrn_16_1"] {
        assert!(table.contains(word) && String::from_utf8_lossy(&output.stdout).contains(word), "{word}: {table}");
    }
    assert!(!table.contains("1 nearest neighbours"), "{table}");
    assert!(at("out/transfer.svg").exists() && at("out/transfer.md").exists());
    let again = rows_of("two");
    assert!(again.iter().any(|r| r.time == first.time && r.id == first.id), "what was measured is kept");
    fs::create_dir(at("empty")).unwrap();
    // Everything is there: nothing is measured again.
    let before = [rows_of("two").len(), rows_of("student").len(), rows_of("maps").len()];
    let output = done(eval(root.path(), &all));
    assert!(stderr(&output).contains("3 networks, 3 measured before"), "{}", stderr(&output));
    assert_eq!([rows_of("two").len(), rows_of("student").len(), rows_of("maps").len()], before);
    for (args, expected) in [
        (&["transfer", "runs/two", "--to", "stl11"][..], "unknown dataset `stl11`"),
        (&["transfer", "runs/two", "runs/two", "--peer", "0", "--to", "synthetic"], "runs/two stands twice"),
        (&["transfer", "runs/two", "--to", "synthetic", "--evaluate", "knn --k 0"], "`knn --k 0 --dataset synthetic`"),
        (&["transfer", "runs/none", "--to", "synthetic"], "no run at runs/none, and no file"),
        (&["transfer", "empty", "--to", "synthetic"], "empty is no run: there is no empty/recipe.toml"),
        // Said before anything is measured, by the image sizes of the lines.
        (
            &["transfer", "maps.pt", "--output", "7", "--to", "synthetic"],
            "`linear-probe --protocol paper --dataset synthetic`: maps.pt: has no output 7",
        ),
    ] {
        let output = eval(root.path(), args);
        assert!(output.status.code() == Some(2) && stderr(&output).contains(expected), "{args:?}: {}", stderr(&output));
    }
}
