//! A finished run made by hand, and `mcl-eval` on it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use mcl::nets::{self, Network};
use mcl::weights::{self, Meta};
use tch::{Device, Kind};

/// A finished run of two untrained ResNet-8, made by hand.
pub fn run_folder(root: &Path, name: &str, seed: u64) -> PathBuf {
    let run = root.join("runs").join(name);
    fs::create_dir_all(run.join("networks")).unwrap();
    let arch = nets::find("resnet8").unwrap();
    for peer in 0..2 {
        let (_, params) = Network::build(arch, 32, seed + peer as u64, Device::Cpu, Kind::Float);
        let meta = Meta {
            arch: arch.name.into(),
            classes: (0..32).map(|c| format!("class {c}")).collect(),
            image_size: 32,
            mean: [0.5; 3],
            std: [0.25; 3],
            interpolation: "bilinear".into(),
            run: name.into(),
            recipe: "0123456789abcdef".into(),
            peer: Some(peer),
            dataset: Some("synthetic".into()),
            epoch: Some(1),
        };
        weights::save_safetensors(&run.join(format!("networks/peer-{peer}.safetensors")), &params.named(), &meta).unwrap();
    }
    fs::write(
        run.join("recipe.toml"),
        "[data]\nname = \"synthetic\"\n[cohort]\narchs = [\"resnet8\", \"resnet8\"]\n[train]\nseed = 1\n[method]\nname = \"baseline\"\n",
    )
    .unwrap();
    let metrics = r#"{"epoch":1,"step":10,"test.peer0.top1":4.5,"test.peer1.top1":5.5,"test.ensemble.top1":5.0,"loss":3.2,"weighted.task":3.2,"lambda.0.1.0.0":0.5,"lambda.0.1.0.1":0.6,"gate.0.0":0.4,"images_per_second":100.0}"#;
    fs::write(run.join("metrics.jsonl"), format!("{metrics}\n")).unwrap();
    run
}

/// `mcl-eval` in a folder, with a cache and data of its own.
pub fn eval(root: &Path, args: &[&str]) -> Output {
    Command::new(super::EVAL).args(args).current_dir(root).env("MCL_CACHE", root.join("cache")).env_remove("MCL_DATA").output().unwrap()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// What a command that must succeed printed.
pub fn done(output: Output) -> Output {
    assert!(output.status.success(), "{}", stderr(&output));
    output
}
