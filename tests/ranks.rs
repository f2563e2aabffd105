//! Several ranks: they compute what one rank with all images computes, stay equal to the bit, and end together. Needs `mpirun`:
//! `cargo test --release --features mpi --test ranks`. The ranks of the first tests are this test program itself, started again on the
//! ignored test `one_rank`.
#![cfg(feature = "mpi")]

mod cuda;
mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Mutex;
use std::thread::sleep;
use std::time::{Duration, Instant};

use mcl::data::Batch;
use mcl::error::Error;
use mcl::methods::{self, Clock, Task};
use mcl::nets;
use mcl::recipe::{Recipe, Train};
use mcl::system::ranks::{self, Ranks};
use mcl::train::step::Engine;
use support::{SMALL, TRAIN, recipe, text};
use tch::{Device, Kind, Tensor};

/// One test at a time: two ranks fill two cores, and one test measures seconds.
static ALONE: Mutex<()> = Mutex::new(());

/// Eight classes, two images each.
const IMAGES: i64 = 16;

fn mpirun(count: usize) -> Command {
    let mut command = Command::new("mpirun");
    command.args(["-n", &count.to_string(), "--oversubscribe", "--bind-to", "none"]);
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    command
}

/// `one_rank` on this many ranks, with a task to do and a folder to leave its answer in.
fn ranks_do(count: usize, task: &str, folder: &Path) {
    let exe = std::env::current_exe().unwrap();
    let output = mpirun(count)
        .arg(exe)
        .args(["--ignored", "--exact", "one_rank", "--nocapture", "--test-threads", "1"])
        .env("MCL_TASK", task)
        .env("MCL_FOLDER", folder)
        .output()
        .expect("mpirun is there: it came with the MPI this was built with");
    assert!(output.status.success(), "{task} on {count} ranks: {}", text(&output));
}

#[test]
#[ignore = "a rank of the other tests"]
fn one_rank() {
    tch::set_num_threads(1);
    let ranks = ranks::join(false).unwrap();
    let task = std::env::var("MCL_TASK").unwrap();
    let folder = std::env::var("MCL_FOLDER").unwrap();
    let words: Vec<&str> = task.split(' ').collect();
    match words[..] {
        ["train", method, kind, steps, options] => {
            let kind = if kind == "f64" { Kind::Double } else { Kind::Float };
            let mut engine = engine(method, &options.replace(';', "\n"), kind, ranks.sharing(true, true));
            for step in 0..steps.parse().unwrap() {
                engine.step(&[batch(step, kind, ranks)], clock(step), None).unwrap();
            }
            ranks.check_same_state(&engine.state(), 0).unwrap();
            if ranks.leads() {
                let name = format!("{}.safetensors", ranks.count());
                Tensor::write_safetensors(&engine.state(), Path::new(&folder).join(name)).unwrap();
            }
        }
        ["sums"] => sums(ranks),
        ["diverge"] => {
            let mut engine = engine("baseline", "", Kind::Float, ranks);
            let mut own = batch(0, Kind::Float, ranks);
            if ranks.rank() == 1 {
                own.views[0] = &own.views[0] * f64::NAN;
            }
            match engine.step(&[own], clock(3), None) {
                Err(Error::Diverged { step: 3, what }) => {
                    assert_eq!(what, "on rank 1, the term `task` of network 0 is NaN; no weight was changed by this step")
                }
                other => panic!("expected a divergence, got {:?}", other.map(|_| ())),
            }
        }
        ["apart"] => {
            let engine = engine("baseline", "", Kind::Float, ranks);
            ranks.check_same_state(&engine.state(), 5).unwrap();
            if ranks.rank() == 1 {
                let (_, weight) = &engine.theta.vars[2];
                let _ = tch::no_grad(|| weight.shallow_clone().g_add_scalar_(1e-6));
            }
            let message = ranks.check_same_state(&engine.state(), 5).unwrap_err().to_string();
            assert!(message.contains(&engine.theta.vars[2].0) && message.contains("of rank 1"), "{message}");
        }
        _ => panic!("no such task: {task}"),
    }
    ranks.leave();
}

/// A closed form: L = sum over ranks r of mean(r) x total^2 with total = sum of all x, on x_r = [r + 1, 2]; and what is gathered.
fn sums(ranks: Ranks) {
    let own = Tensor::from_slice(&[ranks.rank() as f64 + 1.0, 2.0]).set_requires_grad(true);
    let (count, r) = (ranks.count() as f64, ranks.rank() as f64);
    let total = count * (count + 1.0) / 2.0 + 2.0 * count;
    // Every rank's loss is w_r (sum x)^2 with w_r = r + 1: the derivative after any x is 2 (sum of w) total, the second 2 (sum of w).
    let weights = count * (count + 1.0) / 2.0;
    let loss = ranks.sum_live(&own.sum(None)).square() * (r + 1.0);
    let first = Tensor::run_backward(&[&loss], &[&own], true, true);
    assert_eq!(Vec::<f64>::try_from(&first[0]).unwrap(), [2.0 * weights * total; 2]);
    // Of the sum of all ranks' first derivatives (two numbers each).
    let second = Tensor::run_backward(&[&first[0].sum(None)], &[&own], false, false);
    assert_eq!(Vec::<f64>::try_from(&second[0]).unwrap(), [4.0 * weights * count; 2]);
    let all = ranks.gather(&own.detach(), 0);
    let expected: Vec<f64> = (0..ranks.count()).flat_map(|r| [r as f64 + 1.0, 2.0]).collect();
    assert_eq!(Vec::<f64>::try_from(&all).unwrap(), expected);
    let means = ranks.mean(vec![own.detach(), Tensor::from(r as f32), Tensor::from_slice(&[4f32; 3])]);
    assert_eq!(means[0].double_value(&[0]), (count + 1.0) / 2.0);
    assert_eq!(means[1].double_value(&[]), (count - 1.0) / 2.0);
    assert_eq!(Vec::<f32>::try_from(&means[2]).unwrap(), [4.0; 3]);
    assert_eq!(ranks.broadcast_text(ranks.count() - 1, &format!("rank {}", ranks.rank())), format!("rank {}", ranks.count() - 1));
    assert_eq!(ranks.any([ranks.rank() == 1, false]), [true, false]);
}

fn engine(method: &str, options: &str, kind: Kind, ranks: Ranks) -> Engine {
    let archs = [nets::find("resnet8").unwrap(), nets::find("resnet8").unwrap()];
    let labels: Vec<i64> = (0..80).map(|i| i / 10).collect();
    let train = Train { batch: IMAGES as usize, epochs: 2, seed: 7, ..Train::default() };
    let recipe = Recipe { train, ..Recipe::default() };
    let task = Task { kind, ranks, ..Task::new(&recipe, &archs, 8, &labels, Device::Cpu) };
    let method = (methods::find(method).unwrap().build)(&task, options.parse().unwrap()).unwrap();
    Engine::of(&task, method)
}

/// This rank's part of a batch: other images every step.
fn batch(step: usize, kind: Kind, ranks: Ranks) -> Batch {
    let side = 16;
    let numbers = Tensor::arange(IMAGES * 3 * side * side, (Kind::Double, Device::Cpu));
    let images = (numbers * (0.37 + 0.01 * step as f64)).sin().view([IMAGES, 3, side, side]).to_kind(kind);
    let labels: Vec<i64> = (0..IMAGES).map(|i| i / 2).collect();
    let index: Vec<i64> = (0..IMAGES).map(|i| i / 2 * 10 + i % 2 + step as i64 % 5).collect();
    let part = ranks.part(IMAGES as usize);
    let rows = |t: Tensor| t.narrow(0, part.start as i64, part.len() as i64);
    Batch { views: vec![rows(images)], labels: rows(Tensor::from_slice(&labels)), index: rows(Tensor::from_slice(&index)), noise: 1 }
}

fn clock(step: usize) -> Clock {
    Clock { epoch: 0, batch: step, step, lr: 0.05, seed: 7 }
}

/// The largest difference over the largest expected value, of the tensor where it is largest.
fn apart(folder: &Path) -> (f64, String) {
    let read = |count: usize| -> BTreeMap<String, Tensor> {
        Tensor::read_safetensors(folder.join(format!("{count}.safetensors"))).unwrap().into_iter().collect()
    };
    let (one, two) = (read(1), read(2));
    assert_eq!(one.keys().collect::<Vec<_>>(), two.keys().collect::<Vec<_>>());
    // In f32 the gradient of pi at the start is mostly rounding: one rank's is 0.28 (relative) from one rank's in f64. It is compared in f64.
    let f32 = one.values().any(|t| t.kind() == Kind::Float);
    let difference = |(name, want): (&String, &Tensor)| {
        let (want, got) = (want.to_kind(Kind::Double), two[name].to_kind(Kind::Double));
        let scale = want.abs().max().double_value(&[]);
        ((got - want).abs().max().double_value(&[]) / scale.max(1e-30), name.clone())
    };
    one.iter().filter(|(name, _)| !(f32 && name.starts_with("method.pi."))).map(difference).max_by(|a, b| a.0.total_cmp(&b.0)).unwrap()
}

#[test]
fn two_ranks_equal_one_rank_with_the_whole_batch() {
    let _alone = ALONE.lock();
    for (kind, steps, tolerance) in [("f64", 20, 1e-8), ("f32", 1, 1e-5)] {
        for options in ["hvp='difference';meta_every=10", "hvp='exact';meta_every=10", "hvp='exact';mode='reference';meta_every=10"] {
            let folder = tempfile::tempdir().unwrap();
            for count in [1, 2] {
                ranks_do(count, &format!("train l_mcl {kind} {steps} {options}"), folder.path());
            }
            let (error, name) = apart(folder.path());
            assert!(error < tolerance, "{kind}, {options}, after {steps} steps: `{name}` is apart by {error}");
        }
    }
}

#[test]
fn mcl_on_two_ranks_equals_one_rank_too() {
    let _alone = ALONE.lock();
    let folder = tempfile::tempdir().unwrap();
    for count in [1, 2] {
        ranks_do(count, "train mcl f64 10 alpha=0.1", folder.path());
    }
    let (error, name) = apart(folder.path());
    assert!(error < 1e-8, "`{name}` is apart by {error}");
}

#[test]
fn sums_over_ranks_and_their_derivatives_are_the_closed_form() {
    let _alone = ALONE.lock();
    let folder = tempfile::tempdir().unwrap();
    for count in [2, 3] {
        ranks_do(count, "sums", folder.path());
    }
}

#[test]
fn a_rank_that_diverges_or_drifts_is_named() {
    let _alone = ALONE.lock();
    let folder = tempfile::tempdir().unwrap();
    ranks_do(2, "diverge", folder.path());
    ranks_do(2, "apart", folder.path());
}

/// `mcl-train run` on so many ranks: 12 steps an epoch, with one meta step.
fn train(count: usize, recipe: &Path, out: &Path, more: &[&str]) -> Command {
    let mut command = mpirun(count);
    command.arg(TRAIN).arg("run").arg(recipe).arg("--out").arg(out).args(["--threads", "1", "--device", "cpu", "--quiet"]);
    command.args(["--set", "train.batch=32", "--set", "method.l_mcl.meta_every=12"]).args(more);
    command.stdin(Stdio::null());
    command
}

fn finish(mut command: Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    output
}

fn state(run: &Path) -> Vec<u8> {
    fs::read(run.join("checkpoints/last/state.safetensors")).unwrap()
}

/// Waits for the first checkpoint of a run under way.
fn started(run: &Path, child: &mut Child) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !run.join("checkpoints/last").exists() {
        assert!(child.try_wait().unwrap().is_none() && Instant::now() < deadline, "the run ended, or never saved");
        sleep(Duration::from_millis(20));
    }
}

/// The processes of `mcl-train` that work in this run folder, mpirun's own excepted.
fn processes(run: &Path) -> Vec<i32> {
    let (mut found, run) = (vec![], run.display().to_string());
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<i32>() else { continue };
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let words: Vec<String> = line.split(|&b| b == 0).map(|w| String::from_utf8_lossy(w).into_owned()).collect();
        if words.first().is_some_and(|w| w == TRAIN) && words.contains(&run) {
            found.push(pid);
        }
    }
    found.sort_unstable();
    found
}

/// Long enough to be interrupted, with a checkpoint about every third of a second.
const LONG: &[&str] = &["--set", "train.epochs=40", "--set", "save.every_minutes=0.005"];

#[test]
fn when_a_rank_is_killed_all_end_and_the_run_goes_on_with_two_or_one() {
    let _alone = ALONE.lock();
    let folder = tempfile::tempdir().unwrap();
    let (recipe, out) = (recipe(folder.path(), SMALL), folder.path().join("run"));
    let mut child = train(2, &recipe, &out, LONG).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    started(&out, &mut child);
    let ranks = processes(&out);
    assert_eq!(ranks.len(), 2);
    let killed = Instant::now();
    // SAFETY: sends a signal.
    unsafe { libc::kill(ranks[1], libc::SIGKILL) };
    let output = child.wait_with_output().unwrap();
    assert!(killed.elapsed() < Duration::from_secs(10), "{:?}", killed.elapsed());
    assert!(!output.status.success());
    assert!(text(&output).contains("signal 9"), "{}", text(&output));
    let deadline = killed + Duration::from_secs(10);
    while !processes(&out).is_empty() {
        assert!(Instant::now() < deadline, "a rank lives on");
        sleep(Duration::from_millis(50));
    }
    let rest = |count: usize, name: &str| {
        let copy = folder.path().join(name);
        assert!(Command::new("cp").arg("-a").arg(&out).arg(&copy).status().unwrap().success());
        finish(train(count, &recipe, &copy, &["--resume", "--set", "train.epochs=2"]));
        assert!(copy.join("networks/peer-1.safetensors").exists());
    };
    rest(2, "on-two");
    rest(1, "on-one");
}

#[test]
fn a_stop_saves_once_ends_all_with_75_and_resumes_to_the_bit() {
    let _alone = ALONE.lock();
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), SMALL);
    let (whole, halves) = (folder.path().join("whole"), folder.path().join("halves"));
    let epochs = ["--set", "train.epochs=4"];
    finish(train(2, &recipe, &whole, &epochs));
    let mut child = train(2, &recipe, &halves, &epochs).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    started(&halves, &mut child);
    // To mpirun, which hands it on.
    unsafe { libc::kill(child.id() as i32, libc::SIGUSR1) };
    let output = child.wait_with_output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(75), "{message}");
    assert_eq!(message.matches("stopped after").count(), 1, "{message}");
    assert!(!halves.join("networks").exists(), "the run was over before it could be stopped");
    finish(train(2, &recipe, &halves, &["--set", "train.epochs=4", "--resume"]));
    assert!(state(&whole) == state(&halves), "the tensors differ");
}

#[test]
fn every_method_takes_two_steps_on_two_ranks() {
    let _alone = ALONE.lock();
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), SMALL);
    for method in methods::METHODS {
        let out = folder.path().join(method.name);
        // Two batches of each epoch. OKDDip wants three networks, AFD maps of 3 x 3.
        let archs = "cohort.archs=['resnet8', 'resnet8', 'resnet8']";
        let set = ["--set", "train.epochs=1", "--set", "train.batch=128", "--set", "data.image_size=32", "--set", archs];
        let name = format!("method.name={}", method.name);
        // The ranks compare their states at every save: a method whose ranks drift apart fails here.
        finish(train(2, &recipe, &out, &[&set[..], &["--set", &name]].concat()));
        let steps = fs::read_to_string(out.join("summary.json")).unwrap();
        let summary: serde_json::Value = serde_json::from_str(&steps).unwrap();
        assert!(summary["steps"].as_u64().unwrap() >= 2, "{}: {summary}", method.name);
    }
}

#[test]
fn memory_banks_stay_equal_and_a_bad_batch_is_one_line() {
    let _alone = ALONE.lock();
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), SMALL);
    for mining in ["memory", "queue"] {
        let out = folder.path().join(mining);
        let mining = format!("method.mining={mining}");
        let set = ["--set", "train.epochs=1", "--set", "method.negatives=32", "--set", "method.queue_length=64", "--set", &mining];
        finish(train(2, &recipe, &out, &set));
    }
    for (count, batch, parts) in [(3, 16, ["does not divide", "train.batch"]), (2, 6, ["without a positive", "gather_negatives"])] {
        let batch = format!("train.batch={batch}");
        let output = train(count, &recipe, &folder.path().join("bad"), &["--set", &batch]).output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{message}");
        let ours: Vec<&str> = message.lines().filter(|line| line.starts_with("mcl-train:")).collect();
        assert!(ours.len() == 1 && parts.iter().all(|part| ours[0].contains(part)), "{message}");
    }
}

/// Two ranks on `cuda:0` and `cuda:1` that are not there. Their sums go through main memory, or MPI is handed the device's own: the same
/// bits. And near the CPU's.
#[test]
fn two_ranks_train_on_a_device_each() {
    let library = match cuda::library() {
        Ok(library) => library,
        Err(why) => return support::skip(&why),
    };
    let _alone = ALONE.lock();
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), SMALL);
    let run = |name: &str, device: &str, more: &[&str]| {
        let out = folder.path().join(name);
        let mut command = mpirun(2);
        // Into the ranks alone: mpirun itself has nothing to do with it.
        command.arg("env").arg(format!("LD_PRELOAD={}", library.display())).arg("FAKE_CUDA_STATS=1").arg(TRAIN).arg("run").arg(&recipe);
        command.arg("--out").arg(&out).args(["--threads", "1", "--quiet", "--device", device]).stdin(Stdio::null());
        command.args(["--set", "train.batch=192", "--set", "train.epochs=1", "--set", "train.lr=0.001", "--set", "train.sync_bn=true"]);
        let output = finish({
            command.args(more);
            command
        });
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        // Two processes write here at once: a line may begin inside another, numbers stay whole.
        let number = |part: &str| part.chars().take_while(char::is_ascii_digit).collect::<String>().parse().ok();
        let launches: Vec<i64> = said.split("fake-cuda launches ").skip(1).filter_map(number).collect();
        assert!(launches.len() == 2 && launches.iter().all(|&n| (n > 1000) == (device != "cpu")), "{device}: {said}");
        out
    };
    let (here, staged, direct) = (run("here", "cpu", &[]), run("staged", "cuda:0", &[]), run("direct", "cuda:0", &["--cuda-aware-mpi"]));
    assert!(state(&staged) == state(&direct), "what MPI reads from the device itself gives other tensors");
    let networks = |run: &Path| -> BTreeMap<String, Tensor> {
        Tensor::read_safetensors(run.join("networks/peer-0.safetensors")).unwrap().into_iter().collect()
    };
    let (wanted, got) = (networks(&here), networks(&staged));
    // One vector of all weights: a bias that starts at 0 has no scale of its own.
    let flat = |named: &BTreeMap<String, Tensor>| {
        let all: Vec<Tensor> = named.values().filter(|t| t.kind() == Kind::Float).map(|t| t.flatten(0, -1)).collect();
        Tensor::cat(&all, 0).to_kind(Kind::Double)
    };
    let error = ((flat(&got) - flat(&wanted)).norm() / flat(&wanted).norm()).double_value(&[]);
    assert!(error < 1e-5, "two devices are apart from two ranks on the CPU by {error:e}");
}
