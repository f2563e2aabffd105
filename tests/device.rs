//! Everything that trains, measures or exports, on a CUDA device that is not there (tests/cuda): against the CPU's values. Programs run as
//! they are, with the device preloaded; checks of the library run in a copy of this test program with it. Tables of what was compared are
//! printed: `cargo test --release --test device -- --nocapture`.

mod cuda;
mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;
use support::{SMALL, TRAIN, recipe, text};

/// The device, or a line that says why this cannot run here.
fn device() -> Option<PathBuf> {
    cuda::library().map_err(|why| support::skip(&why)).ok()
}

/// A test whose body runs where the device is.
macro_rules! on_device {
    ($(#[$what:meta])* fn $name:ident() $body:block) => {
        on_device! { $(#[$what])* [] fn $name() $body }
    };
    ($(#[$what:meta])* [$($variable:expr),*] fn $name:ident() $body:block) => {
        $(#[$what])*
        #[test]
        fn $name() {
            cuda::in_child(concat!(module_path!(), "::", stringify!($name)), &[$($variable),*], support::skip, || $body)
        }
    };
}

#[path = "device/itself.rs"]
mod itself;
#[path = "device/methods.rs"]
mod methods;
#[path = "device/networks.rs"]
mod networks;
#[path = "device/programs.rs"]
mod programs;

/// The longer checks: set by CI.
fn long() -> bool {
    std::env::var_os("MCL_TEST_LONG").is_some_and(|v| v == "1")
}

/// A tensor that is 0 but for roundings (the mean of a channel that sums to nothing)
/// has no scale of its own: it gets this one.
const SCALE: f64 = 1e-6;

/// The largest difference over the largest expected value.
fn apart(got: &tch::Tensor, wanted: &tch::Tensor) -> f64 {
    let home = |t: &tch::Tensor| t.detach().to_device(tch::Device::Cpu).to_kind(tch::Kind::Double);
    let (got, wanted) = (home(got), home(wanted));
    assert_eq!(got.size(), wanted.size());
    if wanted.numel() == 0 {
        return 0.0;
    }
    let difference = (got - &wanted).abs().max().double_value(&[]);
    let error = difference / wanted.abs().max().double_value(&[]).max(SCALE);
    if error.is_nan() { f64::INFINITY } else { error }
}

/// `mcl-train run` on a device, one thread.
fn train(library: &Path, device: &str, recipe: &Path, out: &Path, more: &[&str]) -> Command {
    let mut command = Command::new(TRAIN);
    command.arg("run").arg(recipe).arg("--out").arg(out).args(["--threads", "1", "--quiet", "--device", device]).args(more);
    command.env("FAKE_CUDA_STATS", "1").env("FAKE_CUDA_TF32", "1");
    cuda::preload(&mut command, library);
    command
}

#[track_caller]
fn finish(mut command: Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    output
}

/// Six steps an epoch.
const SHORT: &[&str] = &["--set", "train.batch=64", "--set", "train.epochs=2", "--set", "method.l_mcl.meta_every=4"];

fn manifest(run: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(run.join("checkpoints/last/manifest.json")).unwrap()).unwrap()
}

fn state(run: &Path) -> Vec<u8> {
    fs::read(run.join("checkpoints/last/state.safetensors")).unwrap()
}

/// Sends SIGTERM when the run has said that it begins: the first step is finished, saved, and the program ends with 75.
fn stop_in_the_first_epoch(mut command: Command, out: &Path) {
    let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while fs::read_to_string(out.join("log.txt")).unwrap_or_default().is_empty() {
        assert!(Instant::now() < deadline, "the run did not begin");
        sleep(Duration::from_millis(5));
    }
    // SAFETY: our own child, which has not been waited for.
    unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(75), "{}", text(&output));
    let batch = manifest(out)["progress"]["batch"].as_u64().unwrap();
    assert!((1..6).contains(&batch), "it stopped after batch {batch} of 6, not inside the epoch");
}

#[test]
fn a_run_stopped_in_an_epoch_resumes_to_the_bit() {
    let Some(library) = device() else { return };
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), SMALL);
    let (whole, halves) = (folder.path().join("whole"), folder.path().join("halves"));
    finish(train(&library, "cuda:0", &recipe, &whole, SHORT));
    stop_in_the_first_epoch(train(&library, "cuda:0", &recipe, &halves, SHORT), &halves);
    finish(train(&library, "cuda:0", &recipe, &halves, &[SHORT, &["--resume"]].concat()));
    assert!(state(&whole) == state(&halves), "the tensors differ");
    let rows = |run: &Path| {
        let mut rows = manifest(run)["progress"]["rows"].clone();
        let timed = |key: &str| key.starts_with("seconds") || key == "images_per_second" || key.ends_with("peak_mb");
        rows.as_array_mut().unwrap().iter_mut().for_each(|row| row.as_object_mut().unwrap().retain(|key, _| !timed(key)));
        rows
    };
    assert_eq!(rows(&whole), rows(&halves));
}
