//! What can go wrong with a run: each fault is one clear line, and nothing that was there is lost.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use support::disk::{TINY, bits_of_difference};
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

/// A NaN is refused when it is read (tests/inputs.rs); these weights are finite, and what they compute is not.
#[test]
fn weights_that_overflow_stop_the_run_before_a_step() {
    let folder = tempfile::tempdir().unwrap();
    let (recipe, out) = finished(folder.path());
    let mut weights = tch::Tensor::read_safetensors(out.join("networks/peer-0.safetensors")).unwrap();
    let (_, poisoned) = weights.iter_mut().find(|(n, _)| n == "layer2.0.conv1.weight").unwrap();
    let _ = poisoned.fill_(3e38);
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
    assert!(said.contains("code 1") && said.contains(": No space left on device\n") && !said.contains("IoError"), "{said}");
    assert!(said.contains("again 0"), "the checkpoint before the full disk no longer resumes: {said}");
    assert!(!said.split("again").next().unwrap().contains(".tmp"), "litter: {said}");
    assert!(said.contains("readonly 1") && said.contains("Read-only"), "{said}");
}

/// What `head -1` does: reads a line and leaves.
fn read_a_line_and_leave(mut command: Command) -> std::process::ExitStatus {
    let (reader, writer) = std::io::pipe().unwrap();
    command.stdout(writer.try_clone().unwrap()).stderr(writer);
    let mut child = command.spawn().unwrap();
    drop(command); // its copies of the writing end
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(reader), &mut line).unwrap();
    assert!(!line.is_empty());
    child.wait().unwrap()
}

#[test]
fn a_reader_that_leaves_ends_no_training() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), TINY);
    let (whole, piped, closed) = (folder.path().join("whole"), folder.path().join("piped"), folder.path().join("closed"));
    assert!(train(&recipe, &whole, &["--quiet"]).output().unwrap().status.success());
    // `mcl-train run ... 2>&1 | head -1`
    assert_eq!(read_a_line_and_leave(train(&recipe, &piped, &[])).code(), Some(0));
    assert_eq!(bits_of_difference(&whole, &piped), 0);
    let log = fs::read_to_string(piped.join("log.txt")).unwrap();
    assert!(log.contains("epoch 2/2") && log.contains("finished"), "{log}");
    // `mcl-train run ... >&- 2>&-`
    let line = format!("exec {} run {} --out {} --threads 1 >&- 2>&-", support::TRAIN, recipe.display(), closed.display());
    assert_eq!(Command::new("sh").args(["-c", &line]).status().unwrap().code(), Some(0));
    assert_eq!(bits_of_difference(&whole, &closed), 0);
}

#[test]
fn programs_that_only_print_end_quietly_when_nobody_reads() {
    for line in [
        format!("{} list archs", support::TRAIN),
        format!("{} list measures", support::EVAL),
        format!("{} --help", support::EVAL),
        format!("{} data list", support::EVAL),
    ] {
        // The reader is gone before the first byte.
        let shell = format!("({line}; echo code $? >&2) | true");
        let output = Command::new("sh").args(["-c", &shell]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stderr), "code 0\n", "{line}");
    }
    // A disk that is full is not a reader that has left.
    let output = Command::new("sh").args(["-c", &format!("{} list archs > /dev/full", support::TRAIN)]).output().unwrap();
    assert_refused(&output, 1, &["standard output", "No space left"]);
}

/// Every damage to the manifest that can be thought of, and then some: none is resumed from.
#[test]
fn a_damaged_manifest_is_named_and_never_resumed_from() {
    let folder = tempfile::tempdir().unwrap();
    let (recipe, out) = (recipe(folder.path(), TINY), folder.path().join("run"));
    assert!(train(&recipe, &out, &["--quiet"]).output().unwrap().status.success());
    let path = out.join("checkpoints/last/manifest.json");
    let good = fs::read_to_string(&path).unwrap();
    let seen: serde_json::Value = serde_json::from_str(&good).unwrap();
    let edit = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut value = seen.clone();
        change(&mut value);
        serde_json::to_string_pretty(&value).unwrap()
    };
    let row = |value: &mut serde_json::Value, name: &str, to: f64| value["progress"]["rows"][1][name] = to.into();
    let cases: Vec<(&str, String)> = vec![
        ("an accuracy", edit(&|v| row(v, "test.peer0.top1", 99.0))),
        ("an epoch more", edit(&|v| v["progress"]["epoch"] = 3.into())),
        ("an epoch less", edit(&|v| v["progress"]["epoch"] = 1.into())),
        ("no rows", edit(&|v| v["progress"]["rows"] = serde_json::json!([]))),
        ("empty rows", edit(&|v| v["progress"]["rows"] = serde_json::json!([{}, {}]))),
        ("a step", edit(&|v| v["progress"]["step"] = 7.into())),
        ("what was chosen", edit(&|v| v["progress"]["best"] = serde_json::Value::Null)),
        ("the seconds", edit(&|v| v["progress"]["seconds"] = 1e9.into())),
        ("a short hash", edit(&|v| v["files"]["state.safetensors"]["sha256"] = "ab".into())),
        ("a file of another folder", edit(&|v| v["files"]["../step-7/state.safetensors"] = v["files"]["state.safetensors"].clone())),
        (
            "no checksum, an old format",
            edit(&|v| {
                v["format"] = 1.into();
                row(v, "test.peer0.top1", 99.0);
            }),
        ),
        (
            "an old format that contradicts itself",
            edit(&|v| {
                v["format"] = 1.into();
                v.as_object_mut().unwrap().retain(|key, _| key != "sha256" && key != "splits");
                v["progress"]["epoch"] = 1.into();
            }),
        ),
        ("a digit", good.replacen("\"step\": 4", "\"step\": 5", 1)),
        ("white space", good.replacen(": ", ":  ", 1)),
        ("something after its end", format!("{good} ")),
        ("half of it", good[..good.len() / 2].to_string()),
        ("nothing", String::new()),
    ];
    for (what, damaged) in cases {
        assert_ne!(damaged, good, "{what}");
        fs::write(&path, damaged).unwrap();
        let output = train(&recipe, &out, &["--quiet", "--resume", "--set", "train.epochs=3"]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stderr).lines().count(), 1, "{what}: {}", text(&output));
        assert_refused(&output, 2, &["manifest.json", "--from step-7"]);
    }
    fs::write(&path, &good).unwrap();
    assert!(train(&recipe, &out, &["--quiet", "--resume"]).output().unwrap().status.success());
}

/// The networks that ship are read from the checkpoint that was chosen: a damaged one does not ship.
#[test]
fn a_damaged_network_of_the_chosen_checkpoint_does_not_ship() {
    let folder = tempfile::tempdir().unwrap();
    let (recipe, out) = (recipe(folder.path(), TINY), folder.path().join("run"));
    let three = ["--quiet", "--resume", "--set", "train.epochs=3"];
    assert!(train(&recipe, &out, &three).output().unwrap().status.success());
    let target = |link: &str| fs::read_link(out.join("checkpoints").join(link)).unwrap();
    assert_ne!(target("best"), target("last"));
    let network = out.join("checkpoints/best/peer-1.safetensors");
    let mut bytes = fs::read(&network).unwrap();
    *bytes.last_mut().unwrap() ^= 0x40;
    fs::write(&network, bytes).unwrap();
    let shipped = fs::read(out.join("networks/peer-1.safetensors")).unwrap();
    let output = train(&recipe, &out, &three).output().unwrap();
    assert_refused(&output, 2, &["peer-1.safetensors", "damaged"]);
    assert!(fs::read(out.join("networks/peer-1.safetensors")).unwrap() == shipped);
}

/// 63 of 64 images and then one: HCGNet's gates have one number a channel and image, and shipped NaN.
#[test]
fn a_last_batch_of_one_image_leaves_no_statistic_of_one_value() {
    let folder = tempfile::tempdir().unwrap();
    let toml = TINY
        .replace("per_class = 3\nholdout = 1\nimage_size = 8", "per_class = 2\nimage_size = 16")
        .replace("[\"resnet8\", \"resnet8\"]", "[\"hcgnet_a1\"]")
        .replace("batch = 16\nepochs = 2", "batch = 63\nepochs = 1")
        .replace("\"dml\"", "\"baseline\"");
    let (recipe, out) = (recipe(folder.path(), &toml), folder.path().join("run"));
    let output = train(&recipe, &out, &["--quiet"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let network = tch::Tensor::read_safetensors(out.join("networks/peer-0.safetensors")).unwrap();
    let faulty: Vec<&String> =
        network.iter().filter(|(_, t)| t.is_floating_point() && t.isfinite().all().int64_value(&[]) == 0).map(|(name, _)| name).collect();
    assert!(faulty.is_empty(), "{} of {} tensors are not finite: {:?}", faulty.len(), network.len(), &faulty[..1]);
    let metrics = fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    assert!(metrics.contains("\"step\":1,"), "{metrics}");
    // A batch of one by request cannot be joined to anything.
    let output = train(&recipe, &folder.path().join("one"), &["--quiet", "--set", "train.batch=1"]).output().unwrap();
    assert_refused(&output, 2, &["train.batch=1", "BatchNorm", "at least two images"]);
    assert!(!folder.path().join("one").exists());
}

/// A run of an earlier version, whose epochs had the image that was left as a batch of its own: its manifest has no checksum, and a step
/// more than an epoch has now.
#[test]
fn an_old_run_whose_epochs_ended_in_one_image_goes_on_and_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let toml = TINY.replace("per_class = 3\nholdout = 1", "per_class = 1").replace("batch = 16\nepochs = 2", "batch = 31\nepochs = 1");
    let (recipe, out) = (recipe(folder.path(), &toml), folder.path().join("run"));
    assert!(train(&recipe, &out, &["--quiet"]).output().unwrap().status.success());
    let checkpoints = out.join("checkpoints");
    fs::rename(checkpoints.join("step-1"), checkpoints.join("step-2")).unwrap();
    for link in ["last", "best"] {
        fs::remove_file(checkpoints.join(link)).unwrap();
        std::os::unix::fs::symlink("step-2", checkpoints.join(link)).unwrap();
    }
    let path = checkpoints.join("last/manifest.json");
    let mut manifest: serde_json::Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    manifest.as_object_mut().unwrap().retain(|key, _| key != "sha256" && key != "splits");
    manifest["format"] = 1.into();
    manifest["progress"]["step"] = 2.into();
    manifest["progress"]["rows"][0]["step"] = 2.into();
    fs::write(&path, manifest.to_string()).unwrap();
    let output = train(&recipe, &out, &["--resume", "--set", "train.epochs=2"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert!(text(&output).contains("note: the last batch of an epoch had one image"), "{}", text(&output));
    assert!(text(&output).contains("2 epochs, 3 steps"), "{}", text(&output));
}

/// A step so large that weights overflow: its terms and gradients were finite, what would be saved is not.
#[test]
fn a_weight_that_is_not_finite_is_named_and_not_saved() {
    let folder = tempfile::tempdir().unwrap();
    let (recipe, out) = (recipe(folder.path(), TINY), folder.path().join("run"));
    let huge = ["--quiet", "--set", "train.batch=64", "--set", "train.lr=1e39"];
    let output = train(&recipe, &out, &huge).output().unwrap();
    assert_refused(&output, 1, &["peer-0 (resnet8)", "not finite", "nothing was saved"]);
    assert!(!out.join("checkpoints").exists() && !out.join("networks").exists());
}

/// The same places in a dataset that has other images there.
#[test]
fn a_dataset_that_changed_is_not_trained_on_with() {
    let folder = tempfile::tempdir().unwrap();
    support::write_colours(folder.path());
    let toml = "[data]\nname = \"cifar10\"\nfraction = 0.2\nimage_size = 32\n[cohort]\narchs = [\"resnet8\"]\n[train]\nbatch = 16\nepochs = 1\n[method]\nname = \"baseline\"\n";
    let (recipe, out) = (recipe(folder.path(), toml), folder.path().join("run"));
    let data = ["--quiet", "--resume", "--data", folder.path().to_str().unwrap()];
    assert!(train(&recipe, &out, &data).output().unwrap().status.success());
    let batch = folder.path().join("cifar-10-batches-bin/data_batch_1.bin");
    let mut bytes = fs::read(&batch).unwrap();
    bytes.chunks_exact_mut(3073).for_each(|record| record[0] = (record[0] + 1) % 10);
    fs::write(&batch, bytes).unwrap();
    let output = train(&recipe, &out, &[&data[..], &["--set", "train.epochs=2"]].concat()).output().unwrap();
    assert_refused(&output, 2, &["cannot resume", "cifar10", "train"]);
}

#[test]
fn a_full_disk_is_one_line_for_torchscript_too() {
    let folder = tempfile::tempdir().unwrap();
    let (recipe, out) = (recipe(folder.path(), TINY), folder.path().join("run"));
    assert!(train(&recipe, &out, &["--quiet"]).output().unwrap().status.success());
    let disk = folder.path().join("disk");
    fs::create_dir(&disk).unwrap();
    let script = format!(
        "mount -t tmpfs -o size=200k none {disk} || exit 9; {bin} export --weights {out}/networks/peer-0.safetensors --to torchscript --out {disk}/export --quiet; \
         echo code $?; find {disk} -type f",
        disk = disk.display(),
        bin = support::EVAL,
        out = out.display()
    );
    let output = with_mounts(&script);
    if output.status.code() == Some(9) {
        return support::skip(&format!("a full disk: no right to mount here: {}", text(&output)));
    }
    assert_eq!(String::from_utf8_lossy(&output.stdout), "code 1\n", "{}", text(&output));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.lines().count() == 1 && said.contains("No space left"), "{said}");
}

#[test]
fn a_results_line_that_cannot_be_read_is_named_and_the_report_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let (recipe, out) = (recipe(folder.path(), TINY), folder.path().join("run"));
    assert!(train(&recipe, &out, &["--quiet"]).output().unwrap().status.success());
    let home = folder.path().display().to_string();
    let eval = |more: &[&str]| {
        let mut command = Command::new(support::EVAL);
        command.env("MCL_CACHE", folder.path().join("cache")).args(more).args(["--threads", "1", "--device", "cpu", "--quiet"]);
        command.output().unwrap()
    };
    let run = out.to_str().unwrap();
    let measured = eval(&["accuracy", "--run", run]);
    assert!(measured.status.success(), "{}", text(&measured));
    let path = out.join("results.jsonl");
    let good = fs::read_to_string(&path).unwrap();
    let first = good.lines().next().unwrap();
    let value: serde_json::Value = serde_json::from_str(first).unwrap();
    let null = first.replacen(&format!("\"value\":{}", value["value"]), "\"value\":null", 1);
    let nan = null.replacen("\"value\":null", "\"value\":NaN", 1);
    assert!(null.contains("\"value\":null") && nan.contains("NaN"));
    // More rows of a confusion matrix than classes.
    let mut wide = value.clone();
    wide["detail"] = serde_json::json!({ "classes": ["a"], "confusion": [[1, 2, 3], [4, 5, 6]] });
    fs::write(&path, format!("{good}{null}\n{nan}\n{wide}\n{}", &first[..first.len() / 2])).unwrap();
    let lines = good.lines().count();
    let report = eval(&["report", "--run", run, "--out", &format!("{home}/report")]);
    let said = String::from_utf8_lossy(&report.stderr).into_owned();
    assert!(report.status.success(), "{said}");
    for line in [lines + 1, lines + 2, lines + 4] {
        assert!(said.contains(&format!("results.jsonl, line {line}: left out")), "{said}");
    }
    assert_eq!(said.lines().count(), 3, "{said}");
    let cohort = eval(&["cohort", "--run", run]);
    assert!(cohort.status.success(), "{}", text(&cohort));
}
