//! The kinds of input: what an undamaged one is, which of its files are damaged, and who reads it, in this process and as a program.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use mcl::error::Result;
use mcl::run::RunFolder;
use rand::seq::SliceRandom;
use rand::{Rng as _, SeedableRng};
use rand_chacha::ChaCha8Rng as Rng;

use super::{formats, mutate, readers as by};

/// Files by their path below the case's folder.
pub type Tree = BTreeMap<String, Vec<u8>>;
/// What was damaged: the new content of a file, or none for one that is gone.
pub type Changes = Vec<(String, Option<Vec<u8>>)>;

pub struct Kind {
    pub name: &'static str,
    /// The parts of paths that are damaged; all files where empty.
    targets: &'static [&'static str],
    /// The seed it starts from; several kinds share one.
    pub seed: &'static str,
    /// Reads the damaged input in this process; given the case's folder and the path of the first damaged file.
    pub read: fn(&Path, &str) -> Result<()>,
    /// The program that reads it.
    pub command: fn(&Path, &str) -> Command,
    /// What it may write to, below the case's folder.
    pub writes: &'static [&'static str],
    /// What reading the undamaged input ends with, where a damaged one that is not refused must end with the same.
    pub ends: Option<fn(&Path) -> String>,
    /// A run may take long where a damaged number asks for it; it then stops when it is told to.
    pub may_last: bool,
}

const NO_KIND: Kind =
    Kind { name: "", targets: &[], seed: "", read: by::nothing, command: by::report, writes: &[], ends: None, may_last: false };

#[rustfmt::skip]
pub const KINDS: &[Kind] = &[
    Kind { name: "recipe", targets: &["recipe.toml"], seed: "recipe", read: by::read_recipe, command: by::train_recipe, writes: &["out"], may_last: true, ..NO_KIND },
    Kind { name: "protocol", targets: &["protocols/"], seed: "protocol", read: by::read_protocol, command: by::run_protocol, writes: &["out", "cache"], may_last: true, ..NO_KIND },
    Kind { name: "plan", targets: &["plan.toml"], seed: "plan", read: by::read_plan, command: by::report_plan, writes: &["out"], ..NO_KIND },
    Kind { name: "checkpoint", targets: &["step-", "run/recipe.toml", "run/metrics.jsonl", "run/environment.json", "run/events"], seed: "run", read: by::resume, command: by::resume_command, writes: &["run"], ends: Some(state_of), may_last: true },
    Kind { name: "safetensors", targets: &["weights.safetensors"], seed: "weights", read: by::read_weights, command: by::embed, writes: &["out"], ..NO_KIND },
    Kind { name: "pth zip", targets: &["weights.pth"], seed: "weights", read: by::read_weights, command: by::embed, writes: &["out"], ..NO_KIND },
    Kind { name: "pth nested", targets: &["nested.pth"], seed: "weights", read: by::read_weights, command: by::embed, writes: &["out"], ..NO_KIND },
    Kind { name: "pth legacy", targets: &["legacy.pth"], seed: "weights", read: by::read_weights, command: by::embed, writes: &["out"], ..NO_KIND },
    Kind { name: "torchscript pt", targets: &["script.pt"], seed: "weights", read: by::read_weights, command: by::embed, writes: &["out"], ..NO_KIND },
    Kind { name: "torchscript network", targets: &["script.pt"], seed: "script", read: by::read_script, command: by::embed_script, writes: &["out"], may_last: true, ..NO_KIND },
    Kind { name: "beside torchscript", targets: &["script.json"], seed: "script", read: by::read_script, command: by::embed_script, writes: &["out"], ..NO_KIND },
    Kind { name: "frozen network", targets: &["teacher.", "recipe.toml"], seed: "frozen", read: by::train_with_frozen, command: by::train_recipe, writes: &["out"], may_last: true, ..NO_KIND },
    Kind { name: "images to embed", targets: &["images.safetensors"], seed: "weights", read: by::read_images, command: by::embed_images, writes: &["out"], ..NO_KIND },
    Kind { name: "kept features", targets: &["cache/"], seed: "features", read: by::measure_kept, command: by::measure_kept_command, writes: &["out", "cache"], ends: Some(measured), ..NO_KIND },
    Kind { name: "cifar binary", targets: &["-bin"], seed: "cifar", read: |r, _| by::read_sets(r, "bin", &["cifar10", "cifar100"]), command: |r, f| by::check(r, "bin", if f.contains("100") { "cifar100" } else { "cifar10" }), ..NO_KIND },
    Kind { name: "cifar pickle", targets: &["-python", "-py"], seed: "cifar", read: |r, _| by::read_sets(r, "py", &["cifar10", "cifar100"]), command: |r, f| by::check(r, "py", if f.contains("100") { "cifar100" } else { "cifar10" }), ..NO_KIND },
    Kind { name: "stl10", seed: "stl10", read: |r, _| by::read_sets(r, "", &["stl10"]), command: |r, _| by::check(r, "", "stl10"), ..NO_KIND },
    Kind { name: "fashion_mnist", seed: "fashion", read: |r, f| by::read_sets(r, f.split('/').next().unwrap(), &["fashion_mnist"]), command: |r, f| by::check(r, f.split('/').next().unwrap(), "fashion_mnist"), ..NO_KIND },
    Kind { name: "tiny_imagenet", seed: "tiny", read: |r, _| by::read_sets(r, "", &["tiny_imagenet"]), command: |r, _| by::check(r, "", "tiny_imagenet"), ..NO_KIND },
    Kind { name: "image folder", seed: "folder", read: |r, _| by::read_sets(r, "image_folder", &["image_folder"]), command: |r, _| by::check(r, "image_folder", "image_folder"), ..NO_KIND },
    Kind { name: "imagenet", seed: "imagenet", read: |r, _| by::read_sets(r, "", &["imagenet"]), command: |r, _| by::check(r, "", "imagenet"), ..NO_KIND },
    Kind { name: "archive tar.gz", targets: &["set.tar.gz"], seed: "archives", read: by::fetch, command: by::fetch_command, writes: &["data"], ..NO_KIND },
    Kind { name: "archive zip", targets: &["set.zip"], seed: "archives", read: by::fetch, command: by::fetch_command, writes: &["data"], ..NO_KIND },
    Kind { name: "results", targets: &["run/results.jsonl", "run/results.csv"], seed: "finished", read: by::read_results, command: by::report, writes: &["report"], ..NO_KIND },
    Kind { name: "map of a figure", targets: &["run/figures/"], seed: "finished", read: by::read_map, command: by::report, writes: &["report"], ..NO_KIND },
    Kind { name: "metrics", targets: &["run/metrics.jsonl", "run/summary.json", "run/environment.json", "run/recipe.toml"], seed: "finished", read: by::read_metrics, command: by::report, writes: &["report"], ..NO_KIND },
];

impl Kind {
    /// Is this one of the files that are damaged?
    pub fn hits(&self, path: &str) -> bool {
        self.targets.is_empty() || self.targets.iter().any(|part| path.contains(part))
    }
}

/// Damages a tree: half of the time knowing the format.
pub fn damage(kind: &Kind, tree: &Tree, rng: &mut Rng) -> (Changes, bool) {
    let left_out = |path: &str| path.ends_with("manifest.json") && !sealed(tree);
    let paths: Vec<&String> = tree.keys().filter(|path| kind.hits(path) && !left_out(path)).collect();
    let path = (*paths.choose(rng).expect("a kind has files")).clone();
    let mut data = tree[&path].clone();
    let aware = rng.gen_bool(0.5);
    if !aware {
        if rng.gen_bool(0.02) {
            return (vec![(path, None)], false);
        }
        mutate::bytes(&mut data, rng);
        return (vec![(path, Some(data))], false);
    }
    let name = path.rsplit('/').next().unwrap();
    match name {
        _ if path.contains("-bin") && name.ends_with(".bin") => {
            formats::records(&mut data, rng, if path.contains("100") { 3074 } else { 3073 })
        }
        "train_X.bin" | "test_X.bin" => formats::records(&mut data, rng, 96 * 96 * 3),
        "train_y.bin" | "test_y.bin" => formats::records(&mut data, rng, 1),
        _ if path.contains("-python") || path.contains("-py/") => formats::pickle(&mut data, rng),
        "legacy.pth" => formats::pickle(&mut data, rng),
        _ if name.ends_with(".pth") || name.ends_with(".pt") => formats::zip(&mut data, rng, formats::torch_entry),
        _ if name.ends_with(".zip") => formats::zip(&mut data, rng, |_, data, rng| mutate::bytes(data, rng)),
        _ if name.ends_with(".tar.gz") => formats::tar_gz(&mut data, rng),
        _ if name.contains("ubyte") => formats::idx(&mut data, rng),
        _ if name.ends_with(".png") || name.ends_with(".JPEG") || name.ends_with(".jpg") => formats::png(&mut data, rng),
        _ if name.ends_with(".toml") => mutate::toml(&mut data, rng),
        _ if name.ends_with(".jsonl") => mutate::json_lines(&mut data, rng),
        _ if name.ends_with(".json") => mutate::json(&mut data, rng),
        _ if name.ends_with(".safetensors") => formats::safetensors(&mut data, rng),
        _ => mutate::bytes(&mut data, rng),
    }
    let mut changes = vec![(path.clone(), Some(data.clone()))];
    // The manifest tells the damaged file's new checksum; what seals the manifest itself does not know of it.
    let manifest = format!("{}/manifest.json", path.rsplit_once('/').map_or("", |(folder, _)| folder));
    if kind.name == "checkpoint" && path.contains("step-") && name != "manifest.json" && tree.contains_key(&manifest) {
        let mut value: serde_json::Value = serde_json::from_slice(&tree[&manifest]).unwrap();
        value["files"][name] = serde_json::json!({ "bytes": data.len(), "sha256": mcl::files::sha256(&data) });
        changes.push((manifest, Some(serde_json::to_vec(&value).unwrap())));
    }
    (changes, true)
}

/// Is the manifest of a checkpoint sealed by a checksum of its own? One that is not cannot be told from another one when it is damaged: it
/// is left alone, and a resume from a state whose checksum was made anew is not compared.
pub fn sealed(tree: &Tree) -> bool {
    let manifest = tree.iter().find(|(path, _)| path.ends_with("manifest.json")).map(|(_, data)| data);
    manifest.and_then(|data| serde_json::from_slice::<serde_json::Value>(data).ok()).is_some_and(|m| m["format"] != 1)
}

/// What a finished run is: its last checkpoint, what ships, and the rows of its epochs without times and memory.
pub fn state_of(root: &Path) -> String {
    let run = RunFolder::at(root.join("run"));
    let mut all = fs::read(run.checkpoint(mcl::run::LAST).state()).unwrap_or_default();
    for file in run.shipped() {
        all.extend(fs::read(file).unwrap_or_default());
    }
    for mut row in run.read_metrics().unwrap_or_default() {
        row.retain(|key, _| !key.contains("second") && key != "peak_mb");
        all.extend(serde_json::to_vec(&row).unwrap());
    }
    mcl::files::sha256(&all)
}

/// The numbers that a measurement wrote.
fn measured(root: &Path) -> String {
    let rows = mcl::eval::record::read(&root.join("out")).unwrap_or_default();
    rows.iter().map(|row| format!("{} {} {:?}\n", row.variant, row.value, row.top5)).collect()
}

/// The generator of one input.
pub fn generator(seed: u64, kind: &str, input: u64) -> Rng {
    let name = mcl::files::sha256(format!("{seed} {kind} {input}").as_bytes());
    Rng::seed_from_u64(u64::from_str_radix(&name[..16], 16).unwrap())
}
