//! What several test files use: the built binaries on a small recipe, and the engine of a training step without them.
#![allow(dead_code)]

pub mod chromium;
pub mod disk;
pub mod method_tests;
pub mod trained;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use mcl::data::Batch;
use mcl::methods::{self, Task};
use mcl::nets;
use mcl::optim::Rule;
use mcl::recipe::{Recipe, Train};
use mcl::train::step::Engine;
use rand::{Rng, SeedableRng};
use tch::{Device, Kind, Tensor};

pub const TRAIN: &str = env!("CARGO_BIN_EXE_mcl-train");
pub const EVAL: &str = env!("CARGO_BIN_EXE_mcl-eval");

/// Two ResNet-8 on a tenth of the synthetic images at half their size: steps of some 20 ms, and a meta step after every third batch.
pub const SMALL: &str = r#"
[data]
name = "synthetic"
fraction = 0.1
holdout = 2
image_size = 16
[cohort]
archs = ["resnet8", "resnet8"]
[train]
batch = 16
epochs = 3
lr = 0.05
[method]
name = "l_mcl"
[method.l_mcl]
meta_every = 3
"#;

pub fn recipe(folder: &Path, text: &str) -> PathBuf {
    let path = folder.join("recipe.toml");
    std::fs::write(&path, text).unwrap();
    path
}

/// `mcl-train run` on one thread: one seed and one thread count give bit-equal runs.
pub fn train(recipe: &Path, out: &Path, more: &[&str]) -> Command {
    let mut command = Command::new(TRAIN);
    command.arg("run").arg(recipe).arg("--out").arg(out).args(["--threads", "1", "--device", "cpu"]).args(more);
    command
}

pub fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// One line on stderr that holds all of `parts`, and exit code 2 (or as given).
pub fn assert_refused(output: &Output, code: i32, parts: &[&str]) {
    let message = String::from_utf8_lossy(&output.stderr).trim().to_string();
    assert_eq!(output.status.code(), Some(code), "{message}");
    let last = message.lines().last().unwrap_or_default();
    for part in parts {
        assert!(last.contains(part), "`{part}` is not in: {message}");
    }
}

/// 32 noisy images of each of ten colours for training and 10 for testing, in CIFAR-10's binary format.
pub fn write_colours(folder: &Path) {
    let home = folder.join("cifar-10-batches-bin");
    std::fs::create_dir_all(&home).unwrap();
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(1);
    let mut record = |class: u8| {
        let turn = class as f64 / 10.0 * std::f64::consts::TAU;
        let plane = |shift: f64| 128.0 + 60.0 * (turn + shift).cos();
        let mut bytes = vec![class];
        for base in [0.0, 2.1, 4.2].map(plane) {
            bytes.extend((0..32 * 32).map(|_| (base + rng.gen_range(-50.0..50.0)) as u8));
        }
        bytes
    };
    for i in 1..=5 {
        let images: Vec<u8> = (0..64).flat_map(|j| record(((i * 64 + j) % 10) as u8)).collect();
        std::fs::write(home.join(format!("data_batch_{i}.bin")), images).unwrap();
    }
    std::fs::write(home.join("test_batch.bin"), (0..100).flat_map(|j| record((j % 10) as u8)).collect::<Vec<u8>>()).unwrap();
    std::fs::write(home.join("batches.meta.txt"), (0..10).map(|c| format!("colour{c}\n")).collect::<String>()).unwrap();
}

pub const RULE: Rule = Rule::Sgd { momentum: 0.9, weight_decay: 5e-4, nesterov: true };

/// A cohort and its method on four classes, batches of eight.
pub fn engine_of(archs: &[&str], method: &str, options: &str) -> Engine {
    tch::set_num_threads(1);
    let archs: Vec<_> = archs.iter().map(|name| nets::find(name).unwrap()).collect();
    let labels: Vec<i64> = (0..40).map(|i| i % 4).collect();
    let recipe = Recipe { train: Train { batch: 8, epochs: 2, seed: 7, ..Train::default() }, ..Recipe::default() };
    let task = Task::new(&recipe, &archs, 4, &labels, Device::Cpu);
    let method = (methods::find(method).unwrap().build)(&task, options.parse().unwrap()).unwrap();
    Engine::of(&task, method)
}

/// Rows `from..to` of a batch of two images of each of four classes.
pub fn batch_of(side: i64, from: i64, to: i64) -> Batch {
    let images = (Tensor::arange(8 * 3 * side * side, (Kind::Float, Device::Cpu)) * 0.37).sin().view([8, 3, side, side]);
    let labels = Tensor::from_slice(&[0i64, 0, 1, 1, 2, 2, 3, 3]);
    let index = Tensor::from_slice(&[0i64, 4, 1, 5, 2, 6, 3, 7]);
    let rows = |t: &Tensor| t.slice(0, from, to, 1);
    Batch { views: vec![rows(&images)], labels: rows(&labels), index: rows(&index), noise: 1 }
}

/// Says that a test cannot run here, past the test runner, which swallows what passing tests print: CI counts these lines.
pub fn skip(why: &str) {
    use std::io::Write;
    std::io::stderr().write_all(format!("skipped: {}\n", why.trim().replace('\n', " ")).as_bytes()).unwrap();
}
