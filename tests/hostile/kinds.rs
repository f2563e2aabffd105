//! The kinds of input: what an undamaged one is, which of its files are damaged, and who reads it, in this process and as a program.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;

use mcl::data::{self, Archive, Loader, Options, Split, Transform};
use mcl::error::{Error, Result};
use mcl::eval::{measures, record};
use mcl::extractor::Extractor;
use mcl::methods::{self, Task};
use mcl::nets::{self, Network};
use mcl::recipe::Recipe;
use mcl::run::{Run, RunFolder};
use mcl::system::ranks::Ranks;
use mcl::train::{self, Job};
use mcl::weights::{self, Classifier, LoadOptions, Meta};
use md5::{Digest, Md5};
use rand::seq::SliceRandom;
use rand::{Rng as _, SeedableRng};
use rand_chacha::ChaCha8Rng as Rng;
use tch::{Device, Kind as Type, Tensor};

use super::mutate;

pub const TRAIN: &str = env!("CARGO_BIN_EXE_mcl-train");
pub const EVAL: &str = env!("CARGO_BIN_EXE_mcl-eval");

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
    /// A run may take long where a damaged number asks for it; it then stops when it is told to.
    pub may_last: bool,
}

#[rustfmt::skip]
pub const KINDS: &[Kind] = &[
    Kind { name: "recipe", targets: &["recipe.toml"], seed: "recipe", read: read_recipe, command: train_recipe, writes: &["out"], may_last: true },
    Kind { name: "protocol", targets: &["protocols/"], seed: "protocol", read: read_protocol, command: run_protocol, writes: &["out", "cache"], may_last: true },
    Kind { name: "checkpoint", targets: &["step-", "run/recipe.toml", "run/metrics.jsonl", "run/environment.json"], seed: "run", read: resume, command: resume_command, writes: &["run"], may_last: true },
    Kind { name: "safetensors", targets: &["weights.safetensors"], seed: "weights", read: read_weights, command: embed, writes: &["out"], may_last: false },
    Kind { name: "pth zip", targets: &["weights.pth"], seed: "weights", read: read_weights, command: embed, writes: &["out"], may_last: false },
    Kind { name: "pth legacy", targets: &["legacy.pth"], seed: "weights", read: read_weights, command: embed, writes: &["out"], may_last: false },
    Kind { name: "torchscript pt", targets: &["script.pt"], seed: "weights", read: read_weights, command: embed, writes: &["out"], may_last: false },
    Kind { name: "images to embed", targets: &["images.safetensors"], seed: "weights", read: read_images, command: embed_images, writes: &["out"], may_last: false },
    Kind { name: "cifar binary", targets: &["-bin"], seed: "cifar", read: |r, _| read_sets(r, "bin", &["cifar10", "cifar100"]), command: |r, f| check(r, "bin", if f.contains("100") { "cifar100" } else { "cifar10" }), writes: &[], may_last: false },
    Kind { name: "cifar pickle", targets: &["-python", "-py"], seed: "cifar", read: |r, _| read_sets(r, "py", &["cifar10", "cifar100"]), command: |r, f| check(r, "py", if f.contains("100") { "cifar100" } else { "cifar10" }), writes: &[], may_last: false },
    Kind { name: "stl10", targets: &[], seed: "stl10", read: |r, _| read_sets(r, "", &["stl10"]), command: |r, _| check(r, "", "stl10"), writes: &[], may_last: false },
    Kind { name: "fashion_mnist", targets: &[], seed: "fashion", read: |r, f| read_sets(r, f.split('/').next().unwrap(), &["fashion_mnist"]), command: |r, f| check(r, f.split('/').next().unwrap(), "fashion_mnist"), writes: &[], may_last: false },
    Kind { name: "tiny_imagenet", targets: &[], seed: "tiny", read: |r, _| read_sets(r, "", &["tiny_imagenet"]), command: |r, _| check(r, "", "tiny_imagenet"), writes: &[], may_last: false },
    Kind { name: "image folder", targets: &[], seed: "folder", read: |r, _| read_sets(r, "image_folder", &["image_folder"]), command: |r, _| check(r, "image_folder", "image_folder"), writes: &[], may_last: false },
    Kind { name: "imagenet", targets: &[], seed: "imagenet", read: |r, _| read_sets(r, "", &["imagenet"]), command: |r, _| check(r, "", "imagenet"), writes: &[], may_last: false },
    Kind { name: "archive tar.gz", targets: &["set.tar.gz"], seed: "archives", read: fetch, command: fetch_command, writes: &["data"], may_last: false },
    Kind { name: "archive zip", targets: &["set.zip"], seed: "archives", read: fetch, command: fetch_command, writes: &["data"], may_last: false },
    Kind { name: "results", targets: &["run/results.jsonl", "run/results.csv"], seed: "finished", read: read_results, command: report, writes: &["report"], may_last: false },
    Kind { name: "metrics", targets: &["run/metrics.jsonl", "run/summary.json", "run/environment.json", "run/recipe.toml"], seed: "finished", read: read_metrics, command: report, writes: &["report"], may_last: false },
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
            mutate::records(&mut data, rng, if path.contains("100") { 3074 } else { 3073 })
        }
        "train_X.bin" | "test_X.bin" => mutate::records(&mut data, rng, 96 * 96 * 3),
        "train_y.bin" | "test_y.bin" => mutate::records(&mut data, rng, 1),
        _ if path.contains("-python") || path.contains("-py/") => mutate::pickle(&mut data, rng),
        "legacy.pth" => mutate::pickle(&mut data, rng),
        _ if name.ends_with(".pth") || name.ends_with(".pt") => mutate::zip(&mut data, rng, mutate::torch_entry),
        _ if name.ends_with(".zip") => mutate::zip(&mut data, rng, |_, data, rng| mutate::bytes(data, rng)),
        _ if name.ends_with(".tar.gz") => mutate::tar_gz(&mut data, rng),
        _ if name.contains("ubyte") => mutate::idx(&mut data, rng),
        _ if name.ends_with(".png") || name.ends_with(".JPEG") || name.ends_with(".jpg") => mutate::png(&mut data, rng),
        _ if name.ends_with(".toml") => mutate::toml(&mut data, rng),
        _ if name.ends_with(".jsonl") => mutate::json_lines(&mut data, rng),
        _ if name.ends_with(".json") => mutate::json(&mut data, rng),
        _ if name.ends_with(".safetensors") => mutate::safetensors(&mut data, rng),
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

// ---- seeds ----

const RECIPE: &str = r#"
[data]
name = "synthetic"
fraction = 0.5
holdout = 2
image_size = 8
per_class = 6
seed = 0
[cohort]
archs = ["resnet8", "resnet8"]
[train]
batch = 16
epochs = 2
lr = 0.05
lr_for_batch = 16
schedule = "cosine"
warmup = 1
optimizer = "sgd"
momentum = 0.9
nesterov = true
weight_decay = 5e-4
seed = 1
accumulate = 1
clip = 0.0
peer_threads = 1
label_smoothing = 0.0
random_erasing = 0.0
mixup = 0.0
cutmix = 0.0
[method]
name = "l_mcl"
[method.l_mcl]
tau = 0.1
temperature = 3.0
dim = 32
mining = "queue"
negatives = 16
queue_length = 64
meta_every = 3
meta_steps = 2
[save]
every_minutes = 10.0
every_epochs = 1
"#;

fn file(root: &Path, path: &str, data: impl AsRef<[u8]>) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, data).unwrap();
}

fn planes(image: usize) -> Vec<u8> {
    (0..3072).map(|i| ((i * 7 + i / 1024 * 50 + image * 13) % 256) as u8).collect()
}

/// With the opcodes of the official files, as Python 2 wrote them.
fn cifar_pickle(label_key: &str, labels: &[u8]) -> Vec<u8> {
    let text = |s: &str| [&[b'U', s.len() as u8], s.as_bytes()].concat();
    let mut out = [&b"\x80\x02}q\x01("[..], &text(label_key), b"]q\x02("].concat();
    labels.iter().for_each(|&label| out.extend([b'K', label]));
    out.extend([&b"e"[..], &text("data")].concat());
    out.extend(b"cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87Rq\x05(K\x01J");
    out.extend((labels.len() as u32).to_le_bytes());
    out.extend(
        b"M\x00\x0c\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T",
    );
    out.extend((labels.len() as u32 * 3072).to_le_bytes());
    (0..labels.len()).for_each(|i| out.extend(planes(i)));
    out.extend(b"tbu.");
    out
}

fn pickled_names(key: &str, count: usize) -> Vec<u8> {
    let mut out = [&b"\x80\x02}(U"[..], &[key.len() as u8], key.as_bytes(), b"]("].concat();
    (0..count).for_each(|i| out.extend([&[b'U', format!("class{i}").len() as u8][..], format!("class{i}").as_bytes()].concat()));
    out.extend(b"eu.");
    out
}

fn picture(root: &Path, path: &str, side: u32, shade: u8) {
    fs::create_dir_all(root.join(path).parent().unwrap()).unwrap();
    image::RgbImage::from_fn(side, side, |x, y| image::Rgb([shade, (x * 7) as u8, (y * 5) as u8])).save(root.join(path)).unwrap();
}

/// Writes every seed below `root`.
pub fn write_seeds(root: &Path) {
    file(&root.join("recipe"), "recipe.toml", RECIPE);
    let labels: Vec<u8> = (0..6).map(|i| i % 3).collect();

    let cifar = root.join("cifar");
    for i in 1..=5 {
        let records: Vec<u8> = (0..2).flat_map(|j| [vec![(i + j) as u8], planes(j)].concat()).collect();
        file(&cifar, &format!("bin/cifar-10-batches-bin/data_batch_{i}.bin"), records);
        file(&cifar, &format!("py/cifar-10-batches-py/data_batch_{i}"), cifar_pickle("labels", &labels[..2]));
    }
    file(&cifar, "bin/cifar-10-batches-bin/test_batch.bin", [vec![9], planes(0)].concat());
    file(&cifar, "bin/cifar-10-batches-bin/batches.meta.txt", (0..10).map(|i| format!("class{i}\n")).collect::<String>());
    file(&cifar, "py/cifar-10-batches-py/test_batch", cifar_pickle("labels", &labels));
    file(&cifar, "py/cifar-10-batches-py/batches.meta", pickled_names("label_names", 10));
    let records = |n: usize| (0..n).flat_map(|j| [vec![1, j as u8], planes(j)].concat()).collect::<Vec<u8>>();
    file(&cifar, "bin/cifar-100-binary/train.bin", records(3));
    file(&cifar, "bin/cifar-100-binary/test.bin", records(2));
    file(&cifar, "bin/cifar-100-binary/fine_label_names.txt", (0..100).map(|i| format!("class{i}\n")).collect::<String>());
    file(&cifar, "py/cifar-100-python/train", cifar_pickle("fine_labels", &labels));
    file(&cifar, "py/cifar-100-python/test", cifar_pickle("fine_labels", &labels[..2]));
    file(&cifar, "py/cifar-100-python/meta", pickled_names("fine_label_names", 100));

    let stl = root.join("stl10");
    for (part, n) in [("train", 3), ("test", 2)] {
        file(&stl, &format!("stl10_binary/{part}_X.bin"), (0..n * 96 * 96 * 3).map(|i| (i % 251) as u8).collect::<Vec<u8>>());
        file(&stl, &format!("stl10_binary/{part}_y.bin"), (0..n).map(|i| i as u8 + 1).collect::<Vec<u8>>());
    }
    file(&stl, "stl10_binary/class_names.txt", (0..10).map(|i| format!("class{i}\n")).collect::<String>());

    let fashion = root.join("fashion");
    for (part, n) in [("train", 4u32), ("t10k", 2)] {
        let header =
            |sizes: &[u32]| [&[0, 0, 8, sizes.len() as u8][..], &sizes.iter().flat_map(|s| s.to_be_bytes()).collect::<Vec<u8>>()].concat();
        let images = [header(&[n, 28, 28]), (0..n * 784).map(|i| i as u8).collect()].concat();
        let labels = [header(&[n]), (0..n as u8).collect()].concat();
        file(&fashion, &format!("plain/FashionMNIST/raw/{part}-images-idx3-ubyte"), &images);
        file(&fashion, &format!("plain/FashionMNIST/raw/{part}-labels-idx1-ubyte"), &labels);
        file(&fashion, &format!("packed/fashion-mnist/{part}-images-idx3-ubyte.gz"), mutate::gzip(&images));
        file(&fashion, &format!("packed/fashion-mnist/{part}-labels-idx1-ubyte.gz"), mutate::gzip(&labels));
    }

    let tiny = root.join("tiny");
    file(&tiny, "tiny-imagenet-200/wnids.txt", "n01\nn02\n");
    file(&tiny, "tiny-imagenet-200/words.txt", "n01\tgoldfish, fish\nn02\tfrog\n");
    file(&tiny, "tiny-imagenet-200/val/val_annotations.txt", "val_0.png\tn01\t0\t0\t9\t9\nval_1.JPEG\tn02\t0\t0\t9\t9\n");
    for (i, name) in
        ["val/images/val_0.png", "val/images/val_1.JPEG", "train/n01/images/a.JPEG", "train/n02/images/b.png"].iter().enumerate()
    {
        picture(&tiny, &format!("tiny-imagenet-200/{name}"), 64, i as u8 * 40);
    }
    let (folder, imagenet) = (root.join("folder"), root.join("imagenet"));
    for class in ["cat", "dog"] {
        for i in 0..3 {
            picture(&folder, &format!("image_folder/{class}/{i}.{}", if i == 0 { "jpg" } else { "png" }), 12 + i, 30 * i as u8);
        }
        for part in ["train", "val"] {
            picture(&imagenet, &format!("imagenet/{part}/{class}/a.png"), 20, 60);
            picture(&imagenet, &format!("imagenet/{part}/{class}/b.jpg"), 16, 90);
        }
    }

    write_archives(&root.join("archives"));
    write_weights(&root.join("weights"));
    write_protocols(&root.join("protocol"));
    write_runs(root);
}

fn write_archives(root: &Path) {
    let mut tar = tar::Builder::new(vec![]);
    let mut zip = zip::ZipWriter::new(std::io::Cursor::new(vec![]));
    for (name, n) in [("set-1/a.bin", 700), ("set-1/deep/b.txt", 90), ("set-1/c", 0)] {
        let data: Vec<u8> = (0..n).map(|i| (i * i) as u8).collect();
        let mut header = tar::Header::new_gnu();
        header.set_size(data.len() as u64);
        header.set_mode(0o644);
        tar.append_data(&mut header, name, &data[..]).unwrap();
        zip.start_file(name, zip::write::FileOptions::default()).unwrap();
        zip.write_all(&data).unwrap();
    }
    file(root, "set.tar.gz", mutate::gzip(&tar.into_inner().unwrap()));
    file(root, "set.zip", zip.finish().unwrap().into_inner());
}

fn write_weights(root: &Path) {
    tch::set_num_threads(1);
    let arch = nets::find("resnet8").unwrap();
    let (_, params) = Network::build(arch, 3, 1, Device::Cpu, Type::Float);
    let meta = Meta {
        arch: "resnet8".into(),
        classes: vec!["a".into(), "b".into(), "c".into()],
        image_size: 16,
        mean: [0.5; 3],
        std: [0.25; 3],
        interpolation: "bilinear".into(),
        run: "seed".into(),
        recipe: "0011223344556677".into(),
        peer: Some(0),
        dataset: Some("synthetic".into()),
        epoch: Some(2),
    };
    fs::create_dir_all(root).unwrap();
    weights::save_safetensors(&root.join("weights.safetensors"), &params.named(), &meta).unwrap();
    weights::save_safetensors(&root.join("good.safetensors"), &params.named(), &meta).unwrap();
    weights::save_pth(&root.join("weights.pth"), &params.named()).unwrap();
    file(root, "legacy.pth", legacy(&params.named()));
    let module = nets::graph::module(arch, &params, nets::graph::Answer::Logits);
    weights::torchscript::save(&root.join("script.pt"), &module).unwrap();
    let images = (Tensor::arange(4 * 3 * 16 * 16, (Type::Float, Device::Cpu)) * 0.37).sin().view([4, 3, 16, 16]);
    Tensor::write_safetensors(&[("images", images)], root.join("images.safetensors")).unwrap();
}

/// As torch.save wrote before 1.6: magic number, protocol, system, the dict, the keys of its storages, then each storage.
fn legacy(tensors: &[(String, Tensor)]) -> Vec<u8> {
    let text = |s: &str| [&b"X"[..], &(s.len() as u32).to_le_bytes(), s.as_bytes()].concat();
    let int = |n: i64| [&b"J"[..], &(n as i32).to_le_bytes()].concat();
    let ints = |all: &[i64]| [&b"("[..], &all.iter().flat_map(|n| int(*n)).collect::<Vec<u8>>(), b"t"].concat();
    let mut out = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.\x80\x02M\xe9\x03.\x80\x02}.".to_vec();
    out.extend(b"\x80\x02ccollections\nOrderedDict\nq\x00)Rq\x01(");
    for (key, (name, tensor)) in tensors.iter().enumerate() {
        let size = tensor.size();
        let strides: Vec<i64> = (0..size.len()).map(|d| size[d + 1..].iter().product()).collect();
        let storage = if tensor.kind() == Type::Int64 { "LongStorage" } else { "FloatStorage" };
        out.extend([text(name), b"ctorch._utils\n_rebuild_tensor_v2\nq\x02((".to_vec(), text("storage")].concat());
        out.extend([format!("ctorch\n{storage}\n").into_bytes(), text(&key.to_string()), text("cpu")].concat());
        out.extend([int(tensor.numel() as i64), b"NtQ".to_vec(), int(0), ints(&size), ints(&strides)].concat());
        out.extend(b"\x89ccollections\nOrderedDict\n)RtR");
    }
    out.extend(b"u.\x80\x02](");
    (0..tensors.len()).for_each(|key| out.extend(text(&key.to_string())));
    out.extend(b"e.");
    for (_, tensor) in tensors {
        out.extend((tensor.numel() as u64).to_le_bytes());
        out.extend(mcl::files::tensor_bytes(tensor));
    }
    out
}

/// Beside the protocols: a network and ten images to measure it on.
fn write_protocols(root: &Path) {
    file(root, "good.safetensors", fs::read(root.with_file_name("weights").join("good.safetensors")).unwrap());
    copy_tree(&root.with_file_name("cifar").join("bin"), &root.join("set"));
    for name in ["knn", "centroid", "few-shot", "tsne", "linear-paper", "linear-lbfgs", "linear-sweep"] {
        let from = fs::read_dir("protocols/eval").unwrap().map(|e| e.unwrap().path());
        let kind = name.trim_start_matches("linear-");
        let found = from.into_iter().find(|path| fs::read_to_string(path).unwrap().contains(&format!("kind = \"{kind}\"")));
        file(root, &format!("protocols/{name}.toml"), fs::read(found.unwrap()).unwrap());
    }
}

/// A run with one of its two epochs left, and the same run at its end, measured and ready for a report.
fn write_runs(root: &Path) {
    let (part, whole) = (root.join("run"), root.join("finished"));
    // Without meta steps, which take most of the time of so small a run.
    file(&part, "recipe.toml", RECIPE.replace("meta_every", "matching = \"one_to_one\"\nmeta_every"));
    let done = resume_command(&part, "").output().unwrap();
    assert!(done.status.success(), "the seed does not train: {}", String::from_utf8_lossy(&done.stderr));
    copy_tree(&part, &whole);
    let run = whole.join("run");
    let measured = program(EVAL, &whole).args(["accuracy", "--threads", "1", "--quiet", "--run"]).arg(&run).output().unwrap();
    assert!(measured.status.success(), "the seed cannot be measured: {}", String::from_utf8_lossy(&measured.stderr));
    fs::remove_dir_all(run.join("checkpoints")).unwrap();
    // Back to the end of the first epoch.
    let run = part.join("run");
    let mut steps: Vec<(usize, PathBuf)> = fs::read_dir(run.join("checkpoints"))
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter_map(|p| Some((mcl::run::checkpoint_step(p.file_name()?.to_str()?)?, p)))
        .collect();
    steps.sort();
    assert!(steps.len() == 2, "one checkpoint an epoch");
    fs::remove_dir_all(&steps[1].1).unwrap();
    for link in ["last", "best"] {
        let _ = fs::remove_file(run.join("checkpoints").join(link));
    }
    let _ = fs::remove_dir_all(run.join("networks"));
    let _ = fs::remove_file(run.join("summary.json"));
    for entry in fs::read_dir(&run).unwrap().map(|e| e.unwrap().path()) {
        if entry.to_string_lossy().contains("events.out") {
            fs::remove_file(entry).unwrap();
        }
    }
}

fn copy_tree(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(|e| e.unwrap().path()) {
        let target = to.join(entry.file_name().unwrap());
        if entry.is_symlink() {
            std::os::unix::fs::symlink(fs::read_link(&entry).unwrap(), target).unwrap();
        } else if entry.is_dir() {
            copy_tree(&entry, &target);
        } else {
            fs::copy(entry, target).unwrap();
        }
    }
}

// ---- readers ----

fn read_recipe(root: &Path, _: &str) -> Result<()> {
    let recipe = Recipe::read(&root.join("recipe.toml"), &[], &methods::names())?;
    let archs = recipe.cohort.archs.iter().map(|name| nets::find(name)).collect::<Result<Vec<_>>>()?;
    let labels: Vec<i64> = (0..64).map(|i| i % 8).collect();
    let task = Task::new(&recipe, &archs, 8, &labels, Device::Cpu);
    (methods::find(recipe.method_name())?.build)(&task, recipe.method_options()).map(drop)
}

fn measure_of(file: &str) -> &str {
    let stem = file.rsplit('/').next().unwrap().trim_end_matches(".toml");
    if stem.starts_with("linear-") { "linear-probe" } else { stem }
}

fn read_protocol(root: &Path, file: &str) -> Result<()> {
    measures::check_line(&format!("{} --dataset cifar10 --protocol {}", measure_of(file), root.join(file).display()))
}

fn job<'a>(root: &Path, stop: &'a AtomicBool) -> Result<Job<'a>> {
    Ok(Job {
        recipe: Recipe::read(&root.join("recipe.toml"), &[], &methods::names())?,
        out: root.join("run"),
        data: None,
        device: Device::Cpu,
        threads: 1,
        resume: true,
        from: None,
        init: None,
        quiet: true,
        commit: "hostile",
        ranks: Ranks::ALONE,
        stop,
    })
}

fn resume(root: &Path, _: &str) -> Result<()> {
    tch::set_num_threads(1);
    train::run(job(root, &AtomicBool::new(false))?).map(drop)
}

fn read_weights(root: &Path, file: &str) -> Result<()> {
    let arch = nets::find("resnet8")?;
    let options = LoadOptions { classifier: Classifier::Optional, allow_partial: false, strip: None };
    let given = (file != "weights.safetensors").then_some(arch);
    let opened = weights::open(&root.join(file), given, Device::Cpu, &options)?;
    let images = Tensor::zeros([2, 3, 16, 16], (Type::Float, Device::Cpu));
    Extractor::new(opened.arch, &opened.params, None, opened.classes.unwrap_or(1), 1).extract(&images, true).map(drop)
}

fn read_images(root: &Path, file: &str) -> Result<()> {
    let mut reader = weights::safetensors::Reader::open(&root.join(file))?;
    for name in reader.names() {
        let _ = reader.tensor(&name)?;
    }
    Ok(())
}

fn read_sets(root: &Path, below: &str, names: &[&str]) -> Result<()> {
    for name in names {
        let set = data::open(name, Some(&root.join(below)), &Options::default())?;
        let transform = if set.one_size { set.test_transform() } else { Transform::centre(32, set.mean, set.std) };
        let look = |split: &Split| -> Result<()> {
            let few: Vec<usize> = (0..split.len().min(6)).collect();
            Loader::eval(&split.subset(&few), 4, transform.clone()).try_for_each(|batch| batch.map(drop))
        };
        look(&set.train)?;
        look(&set.test)?;
        set.train.subset(&[0]).resized(16)?;
    }
    Ok(())
}

/// Serves one file on loopback to whoever asks, as often as asked.
fn serve(content: Vec<u8>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = BufReader::new(stream.try_clone().unwrap()).lines().map_while(|l| l.ok()).take_while(|l| !l.is_empty()).count();
            let _ =
                stream.write_all(format!("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", content.len()).as_bytes());
            let _ = stream.write_all(&content);
        }
    });
    address
}

fn fetch(root: &Path, name: &str) -> Result<()> {
    let content = fs::read(root.join(name)).map_err(Error::open(root.join(name)))?;
    let md5: String = Md5::digest(&content).iter().map(|b| format!("{b:02x}")).collect();
    let file = if name == "set.zip" { "set.zip" } else { "set.tar.gz" };
    // Like an official archive: its checksum is right.
    let archive = Archive { folder: "set-1", file, base: "", md5: md5.leak(), megabytes: 1 };
    data::fetch::bring(&archive, &root.join("data"), &serve(content), true).map(drop)
}

fn read_results(root: &Path, _: &str) -> Result<()> {
    record::read(&root.join("run")).map(drop)
}

fn read_metrics(root: &Path, _: &str) -> Result<()> {
    let run = Run::read(&root.join("run"))?;
    run.folder.read_summary()?;
    let _ = (0..3).map(|m| run.accuracy(m)).collect::<Vec<_>>();
    Ok(())
}

// ---- programs ----

/// The programs of this build, or those in the folder that `MCL_HOSTILE_PROGRAMS` names: an older build shows what the harness finds.
fn program(path: &str, root: &Path) -> Command {
    let other = std::env::var_os("MCL_HOSTILE_PROGRAMS").map(|folder| PathBuf::from(folder).join(Path::new(path).file_name().unwrap()));
    let mut command = Command::new(other.unwrap_or_else(|| path.into()));
    command.current_dir(root).env("MCL_CACHE", root.join("cache")).env_remove("MCL_DATA").env_remove("MCL_DATA_MIRROR");
    command
}

fn train_recipe(root: &Path, _: &str) -> Command {
    let mut command = program(TRAIN, root);
    command.args(["run", "recipe.toml", "--out", "out/run", "--threads", "1", "--device", "cpu", "--quiet"]);
    command
}

fn resume_command(root: &Path, _: &str) -> Command {
    let mut command = program(TRAIN, root);
    command.args(["run", "recipe.toml", "--out", "run", "--resume", "--threads", "1", "--device", "cpu", "--quiet"]);
    command
}

fn run_protocol(root: &Path, file: &str) -> Command {
    let mut command = program(EVAL, root);
    command.args([measure_of(file), "--dataset", "cifar10", "--data", "set", "--weights", "good.safetensors", "--out", "out"]);
    command.args(["--threads", "1", "--quiet", "--protocol", file]);
    command
}

fn embed(root: &Path, file: &str) -> Command {
    let mut command = program(EVAL, root);
    command.args([
        "embed",
        "--weights",
        file,
        "--images",
        "images.safetensors",
        "--out",
        "out/answer.safetensors",
        "--threads",
        "1",
        "--quiet",
    ]);
    if file != "weights.safetensors" {
        command.args(["--arch", "resnet8"]);
    }
    command
}

fn embed_images(root: &Path, file: &str) -> Command {
    let mut command = program(EVAL, root);
    command.args([
        "embed",
        "--weights",
        "good.safetensors",
        "--images",
        file,
        "--out",
        "out/answer.safetensors",
        "--threads",
        "1",
        "--quiet",
    ]);
    command
}

fn check(root: &Path, below: &str, name: &str) -> Command {
    let mut command = program(EVAL, root);
    command.args(["data", "check", name, "--quiet", "--data"]).arg(root.join(below));
    command
}

/// The program knows the official checksum alone: a damaged archive goes no further than that.
fn fetch_command(root: &Path, name: &str) -> Command {
    let mut command = program(EVAL, root);
    let mut content = vec![];
    let _ = fs::File::open(root.join(name)).and_then(|mut f| f.read_to_end(&mut content));
    let set = if name == "set.zip" { "tiny_imagenet" } else { "cifar100" };
    command.args(["data", "fetch", set, "--quiet", "--data", "data", "--mirror", &serve(content)]);
    command
}

fn report(root: &Path, _: &str) -> Command {
    let mut command = program(EVAL, root);
    command.args(["report", "--run", "run", "--out", "report", "--quiet"]);
    command
}

/// The generator of one input.
pub fn generator(seed: u64, kind: &str, input: u64) -> Rng {
    let name = mcl::files::sha256(format!("{seed} {kind} {input}").as_bytes());
    Rng::seed_from_u64(u64::from_str_radix(&name[..16], 16).unwrap())
}
