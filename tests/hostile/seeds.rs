//! The undamaged inputs: one folder a seed.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use mcl::nets::{self, Network};
use mcl::weights::{self, Meta};
use tch::{Device, Kind as Type, Tensor};

use super::formats;
use super::readers::{EVAL, embed_script, measure_kept_command, program, report, report_plan, resume_command, train_recipe};

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
pub fn write(root: &Path) {
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
        file(&fashion, &format!("packed/fashion-mnist/{part}-images-idx3-ubyte.gz"), formats::gzip(&images));
        file(&fashion, &format!("packed/fashion-mnist/{part}-labels-idx1-ubyte.gz"), formats::gzip(&labels));
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
    write_scripts(&root.join("script"));
    write_frozen(&root.join("frozen"));
    write_features(&root.join("features"));
    file(&root.join("plan"), "plan.toml", PLAN);
    file(&root.join("plan"), "recipe.toml", RECIPE);
    works(&root.join("plan"), report_plan(&root.join("plan"), ""), "out");
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
    file(root, "set.tar.gz", formats::gzip(&tar.into_inner().unwrap()));
    file(root, "set.zip", zip.finish().unwrap().into_inner());
}

fn meta() -> Meta {
    Meta {
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
    }
}

fn write_weights(root: &Path) {
    tch::set_num_threads(1);
    let arch = nets::find("resnet8").unwrap();
    let (_, params) = Network::build(arch, 3, 1, Device::Cpu, Type::Float);
    let meta = meta();
    fs::create_dir_all(root).unwrap();
    weights::save_safetensors(&root.join("weights.safetensors"), &params.named(), &meta).unwrap();
    weights::save_safetensors(&root.join("good.safetensors"), &params.named(), &meta).unwrap();
    weights::save_pth(&root.join("weights.pth"), &params.named()).unwrap();
    file(root, "legacy.pth", legacy(&params.named()));
    file(root, "nested.pth", nested(&root.join("weights.pth")));
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

/// The state dict of a .pth where RepDistiller keeps it: under `model`, beside an epoch, a best accuracy that is a tensor, and an optimizer's state.
fn nested(plain: &Path) -> Vec<u8> {
    let mut from = zip::ZipArchive::new(fs::File::open(plain).unwrap()).unwrap();
    let mut to = zip::ZipWriter::new(std::io::Cursor::new(vec![]));
    let options = zip::write::FileOptions::default().compression_method(zip::CompressionMethod::Stored);
    let text = |s: &str| [&b"X"[..], &(s.len() as u32).to_le_bytes(), s.as_bytes()].concat();
    let best = b"ctorch._utils\n_rebuild_tensor_v2\n((U\x07storagectorch\nFloatStorage\nU\x04bestU\x03cpuK\x01tQK\x00))\x89NtR";
    for i in 0..from.len() {
        let mut entry = from.by_index(i).unwrap();
        let mut bytes = vec![];
        entry.read_to_end(&mut bytes).unwrap();
        if entry.name().ends_with("data.pkl") {
            let dict = &bytes[2..bytes.len() - 1];
            let state = [&b"}(K\x00}("[..], &text("momentum_buffer"), best, b"uu"].concat();
            let optimizer = [&b"}("[..], &text("state"), &state, &text("param_groups"), b"]u"].concat();
            let parts = [text("epoch"), b"K\x07".to_vec(), text("model"), dict.to_vec(), text("best_acc"), best.to_vec()].concat();
            bytes = [&b"\x80\x02}("[..], &parts, &text("optimizer"), &optimizer, b"u."].concat();
        }
        to.start_file(entry.name().to_string(), options).unwrap();
        to.write_all(&bytes).unwrap();
    }
    to.start_file("archive/data/best", options).unwrap();
    to.write_all(&97.5f32.to_le_bytes()).unwrap();
    to.finish().unwrap().into_inner()
}

/// A TorchScript network of somebody's, with what trace.py writes beside it, and images as files.
fn write_scripts(root: &Path) {
    let weights = root.with_file_name("weights");
    for name in ["script.pt", "images.safetensors"] {
        file(root, name, fs::read(weights.join(name)).unwrap());
    }
    let beside = serde_json::json!({ "name": "theirs", "image_size": 16, "mean": [0.5, 0.4, 0.3], "std": [0.25, 0.2, 0.3],
        "output": null, "pool": null, "classes": ["a", "b", "c"], "dataset": "synthetic", "torch": "2.13.0" });
    file(root, "script.json", beside.to_string());
    for i in 0..3u8 {
        picture(root, &format!("images/{i}.png"), 20, 50 * i);
    }
    fs::create_dir(root.join("out")).unwrap();
    works(root, embed_script(root, ""), "out");
}

/// A recipe whose networks learn from two that do not.
fn write_frozen(root: &Path) {
    let arch = nets::find("resnet8").unwrap();
    let (_, params) = Network::build(arch, 32, 5, Device::Cpu, Type::Float);
    let classes: Vec<String> = (0..32).map(|c| c.to_string()).collect();
    fs::create_dir_all(root).unwrap();
    let meta = Meta { classes, image_size: 8, ..meta() };
    weights::save_safetensors(&root.join("teacher.safetensors"), &params.named(), &meta).unwrap();
    weights::save_pth(&root.join("teacher.pth"), &params.named()).unwrap();
    let frozen =
        r#"frozen = ["teacher.safetensors", { file = "teacher.pth", arch = "resnet8", mean = [0.5, 0.5, 0.5], std = [0.2, 0.2, 0.2] }]"#;
    let recipe = RECIPE.replace("archs = [\"resnet8\", \"resnet8\"]", &format!("archs = [\"resnet8\"]\n{frozen}"));
    let (recipe, _) = recipe.split_once("[method]").unwrap();
    let recipe = recipe.replace("epochs = 2", "epochs = 1").replace("warmup = 1", "warmup = 0");
    file(root, "recipe.toml", format!("{recipe}\n[method]\nname = \"dml\"\n"));
    works(root, train_recipe(root, ""), "out");
}

/// A network whose features of a dataset are in the cache.
fn write_features(root: &Path) {
    copy_tree(&root.with_file_name("protocol"), root);
    works(root, measure_kept_command(root, ""), "out");
    assert_eq!(fs::read_dir(root.join("cache/features")).unwrap().count(), 2, "training and test images");
}

const PLAN: &str = r#"
schema = 1
title = "Small"
about = "Synthetic images."
recipe = "recipe.toml"
evaluate = ["accuracy", "linear-probe --peer all --dataset synthetic --protocol lbfgs --set cs=[0.1,1.0]", "knn --dataset synthetic --k 5"]
[[group]]
title = "Methods"
seeds = [1, 2]
against = ["baseline"]
setting = [{ name = "baseline", set = ["method.name=baseline"] }, { name = "dml", set = ["method.name=dml"] }]
[[together]]
name = "map"
settings = ["baseline", "dml"]
seed = 1
evaluate = "tsne --peer 0 --dataset synthetic --set samples=60"
[[hypothesis]]
says = "DML leads."
more = "dml"
less = "baseline"
question = "own"
"#;

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
    let maps = ["tsne", "--set", "samples=60", "--set", "iterations=30", "--set", "perplexity=5.0", "--dataset", "synthetic"];
    let mapped = program(EVAL, &whole).args(maps).args(["--threads", "1", "--quiet", "--run"]).arg(&run).output().unwrap();
    assert!(mapped.status.success(), "the seed cannot be mapped: {}", String::from_utf8_lossy(&mapped.stderr));
    fs::remove_dir_all(run.join("checkpoints")).unwrap();
    works(&whole, report(&whole, ""), "report");
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
        // Its name has the time in it.
        if entry.to_string_lossy().contains("events.out") {
            fs::rename(&entry, entry.with_file_name("events.out.tfevents.1.seed")).unwrap();
        }
    }
}

/// Does the program read what is not damaged? Otherwise damage would say nothing. What it wrote is no part of the seed.
fn works(root: &Path, mut command: Command, wrote: &str) {
    let done = command.output().unwrap();
    assert!(done.status.success(), "{command:?} refuses the seed: {}", String::from_utf8_lossy(&done.stderr));
    fs::remove_dir_all(root.join(wrote)).unwrap();
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
