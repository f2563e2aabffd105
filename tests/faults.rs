//! What can go wrong with a run: each fault is one clear line, and nothing that was there is lost.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use support::{SMALL, assert_refused, recipe, text, train};

const ONE_EPOCH: &[&str] = &["--quiet", "--set", "train.epochs=1"];

/// A finished small run of two epochs, so that there are two checkpoints.
fn finished(folder: &Path) -> (PathBuf, PathBuf) {
    let (recipe, out) = (recipe(folder, SMALL), folder.join("run"));
    let output = train(&recipe, &out, &["--quiet", "--set", "train.epochs=2"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    (recipe, out)
}

#[test]
fn a_flipped_byte_is_found_and_the_previous_checkpoint_offered() {
    let folder = tempfile::tempdir().unwrap();
    let (recipe, out) = finished(folder.path());
    let last = out.join("checkpoints/last/state.safetensors");
    let mut bytes = fs::read(&last).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x10;
    fs::write(&last, bytes).unwrap();
    let output = train(&recipe, &out, &["--quiet", "--resume"]).output().unwrap();
    assert_refused(&output, 2, &["state.safetensors", "damaged", "--from step-"]);
    let message = String::from_utf8_lossy(&output.stderr).to_string();
    let offered = message.split("--from ").nth(1).unwrap().trim();
    let output = train(&recipe, &out, &["--quiet", "--resume", "--from", offered]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
}

#[test]
fn a_missing_manifest_and_a_foreign_checkpoint_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (recipe, out) = finished(folder.path());
    fs::remove_file(out.join("checkpoints/last/manifest.json")).unwrap();
    assert_refused(&train(&recipe, &out, &["--quiet", "--resume"]).output().unwrap(), 2, &["manifest", "--from step-"]);

    let other = folder.path().join("other");
    let output = train(&recipe, &other, &["--quiet", "--set", "train.epochs=1", "--set", "cohort.archs=[\"resnet8\", \"resnet20\"]"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert_refused(&train(&recipe, &other, &["--quiet", "--resume"]).output().unwrap(), 2, &["cohort.archs", "resnet20"]);
}

#[test]
fn a_second_run_into_the_folder_and_a_second_process_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (recipe, out) = finished(folder.path());
    assert_refused(&train(&recipe, &out, &["--quiet"]).output().unwrap(), 2, &["already holds a run", "--resume"]);

    let busy = folder.path().join("busy");
    let mut child = train(&recipe, &busy, &["--quiet", "--set", "train.epochs=100"]).stdout(Stdio::null()).spawn().unwrap();
    while !busy.join("recipe.toml").exists() {
        sleep(Duration::from_millis(5));
    }
    let output = train(&recipe, &busy, &["--quiet", "--resume", "--set", "train.epochs=100"]).output().unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_refused(&output, 2, &["another process", "busy"]);
}

#[test]
fn a_weight_that_is_not_a_number_stops_the_run_before_a_step() {
    let folder = tempfile::tempdir().unwrap();
    let (recipe, out) = finished(folder.path());
    let mut weights = tch::Tensor::read_safetensors(out.join("networks/peer-0.safetensors")).unwrap();
    let (_, poisoned) = weights.iter_mut().find(|(n, _)| n == "layer2.0.conv1.weight").unwrap();
    let _ = poisoned.get(0).get(0).get(0).get(0).fill_(f64::NAN);
    let file = folder.path().join("poisoned.safetensors");
    tch::Tensor::write_safetensors(&weights, &file).unwrap();
    let next = folder.path().join("next");
    let output = train(&recipe, &next, &["--quiet", "--init", file.to_str().unwrap()]).output().unwrap();
    assert_refused(&output, 1, &["step 0", "task", "network 0", "diverged-step-0.safetensors"]);
    let replay = tch::Tensor::read_safetensors(next.join("diverged-step-0.safetensors")).unwrap();
    let images = &replay.iter().find(|(n, _)| n == "batch.0.view.0").unwrap().1;
    assert_eq!(images.size(), [16, 3, 16, 16]);
}

#[test]
fn bad_input_is_one_line_and_exit_2() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let path = recipe(folder.path(), SMALL);
    let cases: &[(&[&str], &[&str])] = &[
        (&["--set", "train.bacth=3"], &["train.bacth=3", "`bacth`", "`batch`"]),
        (&["--set", "train.batch=15"], &["15", "even"]),
        (&["--set", "cohort.archs=[\"resnet9\"]"], &["resnet9", "resnet8"]),
        (&["--set", "data.name=cifar1000"], &["cifar1000", "cifar100"]),
        (&["--set", "method.name=lmcl"], &["lmcl", "l_mcl"]),
        (&["--set", "method.tua=0.1"], &["tua", "tau"]),
        (&["--set", "data.holdout=100000"], &["100000"]),
        (&["--set", "data.holdout=0", "--set", "data.fraction=0.0001"], &["class 0 has one training image", "two of each class"]),
        (&["--init", "nowhere.safetensors"], &["nowhere.safetensors"]),
        (&["--set", "data.name=cifar100", "--data", "nowhere"], &["nowhere", "data fetch cifar100"]),
    ];
    for (more, parts) in cases {
        let output = train(&path, &out, &[&["--quiet"], *more].concat()).output().unwrap();
        assert_refused(&output, 2, parts);
    }
    let missing = folder.path().join("missing.toml");
    assert_refused(&train(&missing, &out, ONE_EPOCH).output().unwrap(), 2, &["missing.toml"]);
    let device = Command::new(support::TRAIN).args(["run", path.to_str().unwrap(), "--device", "cuda:7"]).output().unwrap();
    assert_eq!(device.status.code(), Some(2), "{}", text(&device));
}

/// Runs a shell script where a small disk can be mounted: as root in a mount namespace of its own, or in a user namespace.
fn with_mounts(script: &str) -> std::process::Output {
    let root = unsafe { libc::geteuid() } == 0;
    Command::new("unshare").args(if root { vec!["-m"] } else { vec!["-rm"] }).args(["sh", "-c", script]).output().unwrap()
}

#[test]
fn a_full_disk_and_a_read_only_folder_cost_no_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let (recipe, out) = finished(folder.path());
    let probe = with_mounts("mount -t tmpfs -o size=1m none /mnt");
    if !probe.status.success() {
        return support::skip(&format!("a full disk: no right to mount here: {}", text(&probe)));
    }
    // The finished run on a disk with room for the metrics but not for another checkpoint.
    let state = fs::metadata(out.join("checkpoints/last/state.safetensors")).unwrap().len() / 1024;
    let (disk, from, bin) = (folder.path().join("disk"), out.display(), support::TRAIN);
    fs::create_dir(&disk).unwrap();
    let (disk, recipe) = (disk.display(), recipe.display());
    let script = format!(
        "mount -t tmpfs -o size=64m none {disk} && cp -a {from} {disk}/run && \
         mount -o remount,size=$(( $(df -k {disk} | awk 'NR==2 {{print $3}}') + {state} / 2 ))k {disk}; \
         {bin} run {recipe} --out {disk}/run --threads 1 --quiet --resume --set train.epochs=3; echo code $?; ls {disk}/run/checkpoints; \
         mount -o remount,size=64m {disk} && {bin} run {recipe} --out {disk}/run --threads 1 --quiet --resume --set train.epochs=3 > /dev/null; echo again $?; \
         mount -o remount,ro {disk}; {bin} run {recipe} --out {disk}/run --threads 1 --quiet --resume --set train.epochs=4; echo readonly $?"
    );
    let output = with_mounts(&script);
    let said = text(&output);
    assert!(said.contains("code 1") && said.contains("No space left"), "{said}");
    assert!(said.contains("again 0"), "the checkpoint before the full disk no longer resumes: {said}");
    assert!(!said.split("again").next().unwrap().contains(".tmp"), "litter: {said}");
    assert!(said.contains("readonly 1") && said.contains("Read-only"), "{said}");
}
