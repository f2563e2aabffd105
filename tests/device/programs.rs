//! The two programs on the device: runs that change devices, run out of memory or diverge, every measurement, every export, selftest, doctor.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use mcl::eval::measures::MEASURES;
use mcl::nets::{self, Network};
use mcl::weights::{self, Meta};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use crate::support::{EVAL, SMALL, assert_refused, recipe, text};
use crate::{SHORT, cuda, device, finish, manifest, state, stop_in_the_first_epoch, train};

fn eval(library: &Path, root: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(EVAL);
    command.args(args).args(["--threads", "1"]).current_dir(root).env("MCL_CACHE", root.join("cache")).env_remove("MCL_DATA");
    command.env("FAKE_CUDA_TF32", "1");
    cuda::preload(&mut command, library);
    command
}

fn tensors(file: &Path) -> BTreeMap<String, Tensor> {
    Tensor::read_safetensors(file).unwrap().into_iter().collect()
}

/// How far two networks are apart: the norm of the difference over the norm of the weights. A bias that starts at 0 has no scale of its own.
fn networks_apart(got: &Path, wanted: &Path) -> f64 {
    let (got, wanted) = (tensors(&got.join("networks/peer-0.safetensors")), tensors(&wanted.join("networks/peer-0.safetensors")));
    assert_eq!(got.keys().collect::<Vec<_>>(), wanted.keys().collect::<Vec<_>>());
    let norm = |sum: f64, t: Tensor| sum + t.to_kind(Kind::Double).square().sum(None).double_value(&[]);
    let counted = |name: &&String| !name.contains("tracked");
    let difference = got.keys().filter(counted).map(|name| &got[name] - &wanted[name]).fold(0.0, norm);
    (difference / wanted.keys().filter(counted).map(|name| wanted[name].shallow_clone()).fold(0.0, norm)).sqrt()
}

/// The line of fake_cuda.cpp about a program, as numbers by name.
fn counted(output: &Output) -> BTreeMap<String, i64> {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let line = said.lines().find_map(|l| l.strip_prefix("fake-cuda ")).unwrap_or_else(|| panic!("no counts: {said}")).to_string();
    let words: Vec<&str> = line.split(' ').collect();
    words.chunks(2).map(|pair| (pair[0].to_string(), pair[1].parse().unwrap())).collect()
}

#[test]
fn a_checkpoint_goes_from_the_cpu_to_the_device_and_back() {
    let Some(library) = device() else { return };
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), SMALL);
    // Three steps an epoch, small ones: rounding stays rounding.
    let set = ["--set", "train.batch=128", "--set", "train.lr=0.001", "--set", "train.schedule=constant", "--set", "method.hvp=difference"];
    let (stays, moves) = (folder.path().join("stays"), folder.path().join("moves"));
    finish(train(&library, "cpu", &recipe, &stays, &[&set[..], &["--set", "train.epochs=3"]].concat()));
    for (device, epochs) in [("cpu", "train.epochs=1"), ("cuda:1", "train.epochs=2"), ("cpu", "train.epochs=3")] {
        let output = finish(train(&library, device, &recipe, &moves, &[&set[..], &["--resume", "--set", epochs]].concat()));
        assert_eq!(counted(&output)["launches"] > 0, device != "cpu", "{device}: {}", text(&output));
    }
    let error = networks_apart(&moves, &stays);
    assert!(error < 1e-5, "{error}");
    println!("| a run that went from the CPU to cuda:1 and back | weights apart by {error:.0e} |");
}

/// `[cohort] frozen`: teachers are read to the device, teach there, and a run that was stopped among them goes on to the bit.
#[test]
fn a_run_with_a_teacher_that_does_not_learn_resumes_to_the_bit() {
    let Some(library) = device() else { return };
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), SMALL);
    let teacher = folder.path().join("teacher");
    finish(train(&library, "cpu", &recipe, &teacher, &[SHORT, &["--set", "train.epochs=1", "--set", "method.name=baseline"]].concat()));
    let frozen = format!("cohort.frozen=[\"{}\"]", teacher.join("networks/peer-0.safetensors").display());
    let set = [SHORT, &["--set", &frozen, "--set", "train.lr=0.001"]].concat();
    let [here, whole, halves] = ["here", "whole", "halves"].map(|name| folder.path().join(name));
    finish(train(&library, "cpu", &recipe, &here, &set));
    finish(train(&library, "cuda:0", &recipe, &whole, &set));
    stop_in_the_first_epoch(train(&library, "cuda:0", &recipe, &halves, &set), &halves);
    finish(train(&library, "cuda:0", &recipe, &halves, &[&set[..], &["--resume"]].concat()));
    assert!(state(&whole) == state(&halves), "the tensors differ");
    let known = |run: &Path| {
        let log = fs::read_to_string(run.join("log.txt")).unwrap();
        log.lines()
            .find_map(|l| l.split_once("test top-1 "))
            .map(|(_, top1)| top1.to_string())
            .unwrap_or_else(|| panic!("no teacher in: {log}"))
    };
    assert_eq!(known(&whole), known(&here), "the teacher knows other things on the device");
    let error = networks_apart(&whole, &here);
    assert!(error < 1e-4, "{error}");
    println!("| l_mcl with a frozen teacher, 12 steps on cuda:0 | resumed to the bit | weights apart by {error:.0e} |");
}

/// Evaluation reads once a split, however many images that has: the numbers of an epoch come home in a few copies.
#[test]
fn evaluation_reads_once_a_split() {
    let Some(library) = device() else { return };
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), SMALL);
    // As many images to learn from, twice as many to be tested on.
    let seen = [("120", "0.1"), ("240", "0.05"), ("480", "0.025")].map(|(per_class, fraction)| {
        let set = [format!("data.per_class={per_class}"), format!("data.fraction={fraction}")];
        let base =
            ["--set", &set[0], "--set", &set[1], "--set", "train.batch=192", "--set", "train.epochs=1", "--set", "method.name=baseline"];
        let output = finish(train(&library, "cuda:0", &recipe, &folder.path().join(per_class), &base));
        let counts = counted(&output);
        (counts["reads"], counts["to_host"])
    });
    println!("| numbers read and copies to the host of a run of one epoch, 1280, 2560 and 5120 test images | {seen:?} |");
    assert!(seen[0] == seen[1] && seen[1] == seen[2], "what is read grows with the split: {seen:?}");
}

#[test]
fn numbers_of_f32_stay_so_unless_tf32_is_asked_for() {
    let Some(library) = device() else { return };
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), SMALL);
    let base = ["--set", "train.batch=192", "--set", "train.epochs=1", "--set", "train.lr=0.001", "--set", "method.name=baseline"];
    let run = |name: &str, device: &str, more: &[&str]| {
        let out = folder.path().join(name);
        let output = finish(train(&library, device, &recipe, &out, &[&base[..], more].concat()));
        let seen = counted(&output);
        (out, ["tf32_matmul", "tf32_cudnn", "deterministic", "autotuner"].map(|key| seen[key]))
    };
    let (cpu, _) = run("cpu", "cpu", &[]);
    let (plain, set) = run("plain", "cuda:0", &[]);
    assert_eq!(set, [0, 0, 1, 0]);
    let (fast, set) = run("fast", "cuda:0", &["--set", "train.tf32=true", "--set", "train.deterministic=false"]);
    assert_eq!(set, [1, 1, 0, 1]);
    let (near, far) = (networks_apart(&plain, &cpu), networks_apart(&fast, &cpu));
    assert!(near < 1e-5 && far > 3.0 * near, "f32 is apart from the CPU by {near:e}, TF32 by {far:e}");
    println!("| after two steps apart from the CPU | f32 {near:.0e} | TF32 {far:.0e} |");
    let refused =
        train(&library, "cuda:0", &recipe, &plain, &[&base[..], &["--resume", "--set", "train.tf32=true"]].concat()).output().unwrap();
    assert_refused_line(&refused, 2, &["train.tf32 is false there and true now"]);
}

/// As `assert_refused`, for programs that the device says its counts after.
#[track_caller]
fn assert_refused_line(output: &Output, code: i32, parts: &[&str]) {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let own: Vec<&str> = said.lines().filter(|l| !l.starts_with("fake-cuda ")).collect();
    assert_eq!(own.len(), 1, "not one line: {said}");
    assert_refused(&Output { stderr: own[0].as_bytes().to_vec(), ..output.clone() }, code, parts);
}

#[test]
fn running_out_of_memory_is_one_line_and_costs_no_checkpoint() {
    let Some(library) = device() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (recipe, out) = (recipe(folder.path(), SMALL), folder.path().join("run"));
    let set = ["--set", "train.batch=128", "--set", "train.epochs=1", "--set", "method.name=baseline"];
    let with = |more: &[&str], megabytes: &str| {
        let mut command = train(&library, "cuda:0", &recipe, &out, &[&set[..], more].concat());
        command.env("FAKE_CUDA_MEMORY_MB", megabytes).output().unwrap()
    };
    let advice = ["no memory left on cuda:0", "CUDA out of memory. Tried to allocate", "train.batch below 128", "train.accumulate", "bf16"];
    assert_refused_line(&with(&[], "14"), 1, &[&advice[..], &["there was no checkpoint yet"]].concat());
    assert!(with(&["--resume"], "4000").status.success());
    let longer = ["--resume", "--set", "train.epochs=2"];
    let before = state(&out);
    assert_refused_line(&with(&longer, "14"), 1, &[&advice[..], &["the last checkpoint is good"]].concat());
    assert!(state(&out) == before);
    let output = with(&longer, "4000");
    assert!(output.status.success(), "{}", text(&output));
    // What a run held on the device is in its rows and its summary.
    let summary: Value = serde_json::from_str(&fs::read_to_string(out.join("summary.json")).unwrap()).unwrap();
    let rows = manifest(&out)["progress"]["rows"].clone();
    let held: Vec<f64> = rows.as_array().unwrap().iter().map(|row| row["device_peak_mb"].as_f64().unwrap()).collect();
    assert!(held.len() == 2 && held.iter().all(|&mb| mb > 14.0 && mb < 4000.0), "{held:?}");
    assert_eq!(summary["device_peak_mb"].as_f64().unwrap(), held.into_iter().fold(0.0, f64::max));
    // Measurements say it too, and what would help them.
    let mut command = eval(&library, folder.path(), &["accuracy", "--run", "run", "--device", "cuda:0", "--quiet"]);
    let output = command.env("FAKE_CUDA_MEMORY_MB", "2").output().unwrap();
    assert_refused_line(&output, 1, &["CUDA out of memory", "--device cpu"]);
}

#[test]
fn weights_that_overflow_stop_a_run_on_the_device() {
    let Some(library) = device() else { return };
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), SMALL);
    let (_, params) = Network::build(nets::find("resnet8").unwrap(), 32, 1, Device::Cpu, Kind::Float);
    let named = params.named();
    let (_, poisoned) = named.iter().find(|(n, _)| n == "layer2.0.conv1.weight").unwrap();
    let _ = tch::no_grad(|| poisoned.shallow_clone().fill_(3e38)); // finite, and what they compute is not
    let file = folder.path().join("poisoned.safetensors");
    weights::save_safetensors(&file, &named, &meta("resnet8", 16)).unwrap();
    let out = folder.path().join("run");
    let output = train(&library, "cuda:0", &recipe, &out, &["--init", file.to_str().unwrap()]).output().unwrap();
    assert_refused_line(&output, 1, &["step 0", "task", "network 0", "diverged-step-0.safetensors"]);
    assert_eq!(tensors(&out.join("diverged-step-0.safetensors"))["batch.0.view.0"].size(), [16, 3, 16, 16]);
}

fn meta(arch: &str, image_size: i64) -> Meta {
    Meta {
        arch: arch.into(),
        classes: (0..32).map(|c| format!("class {c}")).collect(),
        image_size,
        mean: [0.5; 3],
        std: [0.25; 3],
        interpolation: "bilinear".into(),
        run: "made by hand".into(),
        recipe: "0123456789abcdef".into(),
        peer: None,
        dataset: Some("synthetic".into()),
        epoch: Some(1),
    }
}

/// How each measurement is tried, and how far its numbers (points) may be from the CPU's: an image that stands on the border may fall to
/// the other side. Every measurement of the registry has a line at least.
const MEASURED: &[(&str, &[&str], f64)] = &[
    ("accuracy", &["--run", "one"], 0.2),
    (
        "linear-probe",
        &["--run", "one", "--dataset", "synthetic", "--protocol", "paper", "--set", "epochs=1", "--set", "image_size=16"],
        1.0,
    ),
    ("linear-probe", &["--run", "one", "--dataset", "synthetic", "--protocol", "lbfgs", "--set", "cs=[0.1,1.0]"], 0.5),
    ("linear-probe", &["--run", "one", "--dataset", "synthetic", "--protocol", "sweep", "--set", "epochs=2"], 1.0),
    ("knn", &["--run", "one", "--dataset", "synthetic"], 0.5),
    ("centroid", &["--run", "one", "--dataset", "synthetic"], 0.3),
    ("few-shot", &["--run", "one", "--dataset", "synthetic", "--shots", "1", "--tries", "2"], 0.5),
    ("fine-tune", &["--run", "one", "--dataset", "synthetic", "--images", "96", "--set", "epochs=1", "--set", "lrs=[0.001,0.002]"], 1.0),
    ("tsne", &["--run", "one", "--set", "samples=120", "--set", "iterations=60", "--set", "perplexity=10.0"], 10.0),
    ("cohort", &["--run", "one"], 0.5),
    ("lambda", &["--run", "one"], 0.5),
    ("compare", &["one", "two", "--peer", "0"], 0.5),
    // Somebody's network, of which only a TorchScript file is known.
    (
        "knn",
        &[
            "--torchscript",
            "traced/torchscript/resnet8.pt",
            "--output",
            "2",
            "--pool",
            "mean",
            "--normalisation",
            "imagenet",
            "--image-size",
            "16",
            "--dataset",
            "synthetic",
        ],
        0.5,
    ),
];

/// All numbers in a JSON value, in order.
fn numbers(value: &Value) -> Vec<f64> {
    match value {
        Value::Number(n) => vec![n.as_f64().unwrap()],
        Value::Array(items) => items.iter().flat_map(numbers).collect(),
        Value::Object(fields) => fields.values().flat_map(numbers).collect(),
        _ => vec![],
    }
}

#[test]
fn every_measurement_gives_the_numbers_of_the_cpu() {
    for measure in MEASURES {
        let tried = MEASURED.iter().any(|(name, ..)| *name == measure.name);
        assert!(tried, "measurement {} is not tried on a device: add a line to MEASURED in tests/device/programs.rs", measure.name);
    }
    let Some(library) = device() else { return };
    let root = tempfile::tempdir().unwrap();
    let recipe = recipe(root.path(), SMALL);
    for (name, seed) in [("one", "train.seed=1"), ("two", "train.seed=2")] {
        finish(train(&library, "cuda:0", &recipe, &root.path().join(name), &[SHORT, &["--set", "train.epochs=1", "--set", seed]].concat()));
    }
    finish(eval(&library, root.path(), &["export", "--run", "one", "--peer", "0", "--to", "torchscript", "--out", "traced"]));
    println!("| measurement | numbers | largest difference to the CPU |");
    println!("| --- | --- | --- |");
    for (name, args, tolerance) in MEASURED {
        let values = |device: &str| -> Vec<f64> {
            let output = finish(eval(&library, root.path(), &[&[*name][..], args, &["--json", "--device", device]].concat()));
            let json: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{name}: {e}: {}", text(&output)));
            match json["results"].as_array() {
                Some(rows) => rows.iter().map(|row| row["value"].as_f64().unwrap()).collect(),
                // The cohort measurement tells of networks together, in numbers of its own.
                None => numbers(&json["cohorts"]),
            }
        };
        let (here, there) = (values("cpu"), values("cuda:0"));
        assert!(!here.is_empty() && here.len() == there.len(), "{name}: {here:?} {there:?}");
        let worst = here.iter().zip(&there).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(worst <= *tolerance, "{name} {args:?}: {there:?}, on the CPU {here:?}");
        let protocol = args.iter().skip_while(|a| !["--protocol", "--torchscript"].contains(a)).nth(1).copied().unwrap_or_default();
        println!("| {name} {protocol} | {} | {worst:.2} |", here.len());
    }
    // Features of the CPU are not taken for the device's, and the device's own are.
    let knn = |device: &str| {
        let output =
            finish(eval(&library, root.path(), &["knn", "--run", "two", "--dataset", "synthetic", "--peer", "1", "--device", device]));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (said.matches("extracted and kept").count(), said.matches("from the cache").count())
    };
    assert_eq!([knn("cpu"), knn("cuda:0"), knn("cuda:1"), knn("cpu")], [(2, 0), (2, 0), (0, 2), (0, 2)]);
}

#[test]
fn every_export_is_written_where_a_device_is() {
    let Some(library) = device() else { return };
    let root = tempfile::tempdir().unwrap();
    let help = text(&eval(&library, root.path(), &["export", "--help"]).output().unwrap());
    let list = help.split("One of ").nth(1).and_then(|rest| rest.split(';').next()).unwrap_or_else(|| panic!("no formats in: {help}"));
    let formats: Vec<String> = list.split(',').map(|name| name.split_whitespace().collect()).collect();
    assert!(formats.len() >= 5, "{formats:?}");
    let (_, params) = Network::build(nets::find("resnet18").unwrap(), 32, 1, Device::Cpu, Kind::Float);
    let file = root.path().join("resnet18.safetensors");
    weights::save_safetensors(&file, &params.named(), &meta("resnet18", 64)).unwrap();
    for format in &formats {
        let made = ["cpu", "cuda:0"].map(|device| {
            let out = PathBuf::from(format!("{format}-{}", &device[..2]));
            let args = ["export", "--weights", "resnet18.safetensors", "--to", format, "--out", out.to_str().unwrap()];
            let output = finish(eval(&library, root.path(), &[&args[..], &["--json", "--device", device]].concat()));
            let json: Value = serde_json::from_slice(&output.stdout).unwrap();
            assert_eq!(json["exports"].as_array().unwrap().len(), 1, "{json}");
            // Not its bytes: an archive knows when it was written.
            let golden = Tensor::read_npz(root.path().join(&out).join(format).join("golden.npz")).unwrap();
            (json["exports"][0]["difference"].clone(), golden)
        });
        assert!(made[0] == made[1], "{format}: asked for with a device, the export is another");
        println!("| export {format} | the same as without a device |");
    }
}

#[test]
fn selftest_compares_the_device_with_the_cpu_and_doctor_knows_its_memory() {
    let Some(library) = device() else { return };
    let root = tempfile::tempdir().unwrap();
    let output = finish(eval(&library, root.path(), &["selftest", "--device", "cuda:0", "--json"]));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["passed"], true, "{json}");
    let checks = json["checks"].as_array().unwrap();
    println!("| selftest of the device | terms | largest error | accepted |");
    for source in ["layer", "autocast", "augmentation", "extractor", "training"] {
        let own: Vec<&Value> = checks.iter().filter(|c| c["source"] == source).collect();
        assert!(!own.is_empty(), "{source} is not checked");
        let worst = own.iter().map(|c| c["error"].as_f64().unwrap()).fold(0.0, f64::max);
        let accepted = own.iter().map(|c| c["tolerance"].as_f64().unwrap()).fold(0.0, f64::max);
        println!("| {source} | {} | {worst:.0e} | {accepted:.0e} |", own.len());
    }
    // A device that deviates is found, and what deviates is said: this one computes convolutions of float with too few bits.
    let output = eval(&library, root.path(), &["selftest", "--device", "cuda:0"]).env("FAKE_CUDA_WRONG", "1").output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    let said = text(&output);
    assert!(said.contains("deviates: convolution 3x3, forward of layer (cpu, f32)"), "{said}");
    assert!(!said.contains("deviates: BatchNorm"), "{said}");

    let output = eval(&library, root.path(), &["doctor"]).env("FAKE_CUDA_MEMORY_MB", "8000").output().unwrap();
    assert!(
        text(&output).contains("2 devices, cuDNN missing, cuda:0 8000 MB free of 8000, cuda:1 8000 MB free of 8000"),
        "{}",
        text(&output)
    );
}
