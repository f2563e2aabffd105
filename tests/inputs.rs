//! Files and numbers that ask for more than there is, or for nonsense: each is one clear line with the right exit code, in little memory.
//! The commands are those of the review that found them.

mod support;

use std::fs;
use std::io::{Cursor, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use mcl::nets::{self, Network};
use mcl::params::Params;
use mcl::weights::{self, LoadOptions, Meta};
use support::{EVAL, SMALL, assert_refused, recipe, text, train};
use tch::{Device, Kind, Tensor};

/// Runs under a limit of 6 GB of address space, of which libtorch maps more than one: a bomb that goes off ends in an abort.
fn limited(command: Command) -> Output {
    limited_to(command, 6 << 30)
}

fn limited_to(mut command: Command, bytes: u64) -> Output {
    // SAFETY: setrlimit may be called between fork and exec.
    unsafe {
        command.pre_exec(move || {
            let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
            libc::setrlimit(libc::RLIMIT_AS, &limit);
            Ok(())
        });
    }
    command.output().unwrap()
}

fn eval(folder: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(EVAL);
    command
        .current_dir(folder)
        .env("MCL_CACHE", folder.join("cache"))
        .env_remove("MCL_DATA")
        .args(["--threads", "1", "--quiet"])
        .args(args);
    limited(command)
}

fn network() -> (Params, Meta) {
    network_of(3)
}

fn network_of(classes: i64) -> (Params, Meta) {
    let (_, params) = Network::build(nets::find("resnet8").unwrap(), classes, 1, Device::Cpu, Kind::Float);
    let meta = Meta {
        arch: "resnet8".into(),
        classes: (0..classes).map(|c| format!("class {c}")).collect(),
        image_size: 16,
        mean: [0.5; 3],
        std: [0.25; 3],
        interpolation: "bilinear".into(),
        run: "by hand".into(),
        recipe: "0123456789abcdef".into(),
        peer: None,
        dataset: None,
        epoch: None,
    };
    (params, meta)
}

/// A folder with a network and four images as tensors.
fn bench() -> tempfile::TempDir {
    tch::set_num_threads(1);
    let folder = tempfile::tempdir().unwrap();
    let (params, meta) = network();
    weights::save_safetensors(&folder.path().join("good.safetensors"), &params.named(), &meta).unwrap();
    let images = (Tensor::arange(4 * 3 * 16 * 16, (Kind::Float, Device::Cpu)) * 0.37).sin().view([4, 3, 16, 16]);
    Tensor::write_safetensors(&[("images", images)], folder.path().join("images.safetensors")).unwrap();
    folder
}

fn embed(folder: &Path, weights: &str) -> Output {
    eval(folder, &["embed", "--weights", weights, "--arch", "resnet8", "--images", "images.safetensors", "--out", "answer.safetensors"])
}

// ---- C3: a NaN is named, never turned into a number ----

#[test]
fn weights_and_statistics_that_are_not_finite_are_refused_by_name() {
    let folder = bench();
    let (params, meta) = network();
    for (name, poison) in [("layer2.0.bn1.running_var", f64::NAN), ("layer1.0.conv1.weight", f64::INFINITY)] {
        let (_, tensor) = params.named().into_iter().find(|(n, _)| n == name).unwrap();
        let before = tensor.copy();
        let _ = tch::no_grad(|| tensor.view(-1).get(0).fill_(poison));
        weights::save_safetensors(&folder.path().join("bad.safetensors"), &params.named(), &meta).unwrap();
        weights::save_pth(&folder.path().join("bad.pth"), &params.named()).unwrap();
        for file in ["bad.safetensors", "bad.pth"] {
            assert_refused(&embed(folder.path(), file), 2, &[file, name, "not finite", "1 of its"]);
        }
        assert!(!folder.path().join("answer.safetensors").exists());
        tch::no_grad(|| tensor.shallow_clone().copy_(&before));
    }
    let (params, meta) = network_of(32);
    let _ = tch::no_grad(|| params.vars[3].1.view(-1).get(0).fill_(f64::NAN));
    weights::save_safetensors(&folder.path().join("bad.safetensors"), &params.named(), &meta).unwrap();
    let out = folder.path().join("run");
    let path = recipe(folder.path(), SMALL);
    let refused = train(&path, &out, &["--quiet", "--init", folder.path().join("bad.safetensors").to_str().unwrap()]).output().unwrap();
    assert_refused(&refused, 2, &["bad.safetensors", &params.vars[3].0, "not finite"]);
}

#[test]
fn an_answer_that_is_not_finite_is_an_error_and_not_chance_level() {
    let folder = bench();
    let (params, meta) = network();
    // Finite, but its square root is not: only the answer tells.
    let (_, variance) = params.named().into_iter().find(|(n, _)| n == "layer2.0.bn1.running_var").unwrap();
    let _ = tch::no_grad(|| variance.shallow_clone().fill_(-1.0));
    weights::save_safetensors(&folder.path().join("bad.safetensors"), &params.named(), &meta).unwrap();
    assert_refused(&embed(folder.path(), "bad.safetensors"), 1, &["image 0", "not finite"]);

    let images = Tensor::read_safetensors(folder.path().join("images.safetensors")).unwrap();
    let _ = images[0].1.view(-1).get(5).fill_(f64::NAN);
    Tensor::write_safetensors(&images, folder.path().join("images.safetensors")).unwrap();
    assert_refused(&embed(folder.path(), "good.safetensors"), 2, &["images.safetensors", "not finite"]);
}

// ---- C8: memory bombs ----

/// A pickle that names one list of `items` again and again, each time as a set.
fn pickle_bomb(items: usize, times: usize) -> Vec<u8> {
    let mut out = b"\x80\x02](".to_vec();
    out.extend(b"N".repeat(items));
    out.extend(b"eq\x010");
    out.extend(b"(");
    out.extend(b"cbuiltins\nset\nq\x020");
    (0..times).for_each(|_| out.extend(b"h\x02h\x01\x85R0"));
    out.extend(b"].");
    out
}

#[test]
fn a_small_pickle_does_not_take_gigabytes() {
    // 99 kB x 16,000: 12 GB of places in lists.
    let bomb = pickle_bomb(99_000, 16_000);
    assert!(bomb.len() < 220_000);
    assert!(mcl::pickle::read(&bomb).unwrap_err().contains("beyond measure"));
    // A long name, looked up again and again: 98 kB x 20,000 x 2.
    let mut names = b"\x80\x04X".to_vec();
    names.extend(98_000u32.to_le_bytes());
    names.extend(b"n".repeat(98_000));
    names.extend(b"q\x000");
    (0..20_000).for_each(|_| names.extend(b"h\x00h\x00\x930"));
    names.extend(b"N.");
    assert!(mcl::pickle::read(&names).unwrap_err().contains("beyond measure"));
    // As a dataset on the command line.
    let folder = tempfile::tempdir().unwrap();
    let home = folder.path().join("cifar-100-python");
    fs::create_dir(&home).unwrap();
    for file in ["train", "test", "meta"] {
        fs::write(home.join(file), &bomb).unwrap();
    }
    assert_refused(&eval(folder.path(), &["data", "check", "cifar100", "--data", "."]), 2, &["meta", "beyond measure"]);
}

/// A state dict with one tensor of this size and these strides in a storage of one number.
fn expanded(path: &Path, size: &[i64], stride: &[i64], method: zip::CompressionMethod, content: &[u8]) {
    let int = |n: i64| [&[0x8a, 8][..], &n.to_le_bytes()].concat();
    let ints = |all: &[i64]| [&b"("[..], &all.iter().flat_map(|n| int(*n)).collect::<Vec<u8>>(), b"t"].concat();
    let mut pickle =
        b"\x80\x02}(U\x01wctorch._utils\n_rebuild_tensor_v2\n((U\x07storagectorch\nFloatStorage\nU\x010U\x03cpuK\x01tQK\x00".to_vec();
    pickle.extend([ints(size), ints(stride)].concat());
    pickle.extend(b"\x89NtRu.");
    let mut archive = zip::ZipWriter::new(Cursor::new(vec![]));
    let options = zip::write::FileOptions::default().compression_method(method);
    for (name, data) in [("a/data.pkl", &pickle[..]), ("a/data/0", content)] {
        archive.start_file(name, options).unwrap();
        archive.write_all(data).unwrap();
    }
    fs::write(path, archive.finish().unwrap().into_inner()).unwrap();
}

#[test]
fn stride_zero_and_packed_entries_are_refused_before_they_grow() {
    let folder = bench();
    let bomb = folder.path().join("bomb.pth");
    expanded(&bomb, &[100_000, 1_000_000], &[0, 0], zip::CompressionMethod::Stored, &[0; 4]);
    assert!(fs::metadata(&bomb).unwrap().len() < 1400);
    assert_refused(&embed(folder.path(), "bomb.pth"), 2, &["bomb.pth", "100000000000 numbers", "storage 1", "contiguous()"]);

    expanded(&bomb, &[1], &[1], zip::CompressionMethod::Deflated, &vec![0; 400 << 20]);
    assert!(fs::metadata(&bomb).unwrap().len() < 1 << 20);
    assert_refused(&embed(folder.path(), "bomb.pth"), 2, &["data.pkl", "compressed"]);
}

#[test]
fn tensors_that_share_a_storage_are_copied_a_few_times_at_most() {
    let folder = bench();
    let (params, _) = network();
    // What torch.save writes of tied weights is read as ever.
    let weight = params.vars[0].1.detach();
    let tied = vec![("a".to_string(), weight.shallow_clone()), ("b".to_string(), weight)];
    let path = folder.path().join("tied.pth");
    weights::save_pth(&path, &tied).unwrap();
    assert_eq!(weights::read(&path).unwrap().tensors.len(), 2);
    // One storage of 40 kB, named 1000 times.
    let mut pickle = b"\x80\x02}(".to_vec();
    for i in 0..1000u32 {
        pickle.extend([&b"X"[..], &4u32.to_le_bytes(), format!("{i:04}").as_bytes()].concat());
        pickle.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((U\x07storagectorch\nFloatStorage\nU\x010U\x03cpuK\x01tQK\x00M\x10\x27\x85K\x01\x85\x89NtR");
    }
    pickle.extend(b"u.");
    let mut archive = zip::ZipWriter::new(Cursor::new(vec![]));
    let options = zip::write::FileOptions::default().compression_method(zip::CompressionMethod::Stored);
    for (name, data) in [("a/data.pkl", pickle), ("a/data/0", vec![0; 40_000])] {
        archive.start_file(name, options).unwrap();
        archive.write_all(&data).unwrap();
    }
    fs::write(&path, archive.finish().unwrap().into_inner()).unwrap();
    let refused = weights::open(&path, nets::find("resnet8").ok(), Device::Cpu, &LoadOptions::default()).err().unwrap();
    assert!(refused.to_string().contains("more than 8 times"), "{refused}");
}

/// A PNG of one colour whose header says these sides, 8 bits grey.
fn png(width: u32, height: u32) -> Vec<u8> {
    let mut packed = flate2::write::ZlibEncoder::new(vec![], flate2::Compression::best());
    for _ in 0..height {
        packed.write_all(&vec![0; 1 + width as usize]).unwrap();
    }
    let chunk = |kind: &[u8], body: &[u8]| {
        let whole = [kind, body].concat();
        let mut crc = flate2::Crc::new();
        crc.update(&whole);
        [&(body.len() as u32).to_be_bytes()[..], &whole, &crc.sum().to_be_bytes()].concat()
    };
    let header = [&width.to_be_bytes()[..], &height.to_be_bytes(), &[8, 0, 0, 0, 0]].concat();
    [&b"\x89PNG\r\n\x1a\n"[..], &chunk(b"IHDR", &header), &chunk(b"IDAT", &packed.finish().unwrap()), &chunk(b"IEND", b"")].concat()
}

#[test]
fn an_image_as_wide_as_a_street_is_refused_by_its_sides() {
    let folder = bench();
    let images = folder.path().join("images");
    fs::create_dir(&images).unwrap();
    fs::write(images.join("street.png"), png(65535, 1)).unwrap();
    let weights = ["embed", "--weights", "good.safetensors", "--images", "images", "--out", "answer.safetensors"];
    let refused = eval(folder.path(), &[&weights[..], &["--size", "224"]].concat());
    assert_refused(&refused, 2, &["street.png", "65535 x 1", "16776960 x 256", "12.9 GB"]);
    // A plain one beside it is read as ever.
    fs::write(images.join("street.png"), png(40, 30)).unwrap();
    let read = eval(folder.path(), &[&weights[..], &["--size", "224"]].concat());
    assert!(read.status.success(), "{}", text(&read));
}

#[test]
fn packed_images_and_archives_do_not_unpack_without_end() {
    let folder = tempfile::tempdir().unwrap();
    let home = folder.path().join("fashion-mnist");
    fs::create_dir(&home).unwrap();
    let mut packed = flate2::write::GzEncoder::new(vec![], flate2::Compression::best());
    (0..600).for_each(|_| packed.write_all(&vec![0; 1 << 20]).unwrap());
    fs::write(home.join("train-images-idx3-ubyte.gz"), packed.finish().unwrap()).unwrap();
    let refused = eval(folder.path(), &["data", "check", "fashion_mnist", "--data", "."]);
    assert_refused(&refused, 2, &["train-images-idx3-ubyte.gz", "64 times its size"]);
}

/// A file with a hole: a terabyte that takes no room on the disk.
fn hole(path: &Path, head: &[u8], length: u64) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, head).unwrap();
    fs::OpenOptions::new().write(true).open(path).unwrap().set_len(length).unwrap();
}

#[test]
fn a_file_larger_than_memory_is_refused_by_its_size() {
    let folder = bench();
    let root = folder.path();
    let header = br#"{"w":{"dtype":"U8","shape":[1099511627776],"data_offsets":[0,1099511627776]}}"#;
    let header = [&(header.len() as u64).to_le_bytes()[..], header].concat();
    hole(&root.join("large.safetensors"), &header, header.len() as u64 + (1 << 40));
    assert_refused(&embed(root, "large.safetensors"), 2, &["large.safetensors", "1099.5 GB"]);
    hole(&root.join("large.pth"), b"\x80\x02", 1 << 40);
    assert_refused(&embed(root, "large.pth"), 2, &["large.pth", "1099.5 GB"]);

    fs::create_dir(root.join("stl10_binary")).unwrap();
    fs::write(root.join("stl10_binary/class_names.txt"), "a b c d e f g h i j").unwrap();
    hole(&root.join("stl10_binary/train_X.bin"), b"", 27648 << 26);
    assert_refused(&eval(root, &["data", "check", "stl10", "--data", "."]), 2, &["train_X.bin", "1855.4 GB"]);
    hole(&root.join("cifar-100-binary/train.bin"), b"", 3074 << 28);
    fs::write(root.join("cifar-100-binary/fine_label_names.txt"), (0..100).map(|i| format!("{i}\n")).collect::<String>()).unwrap();
    assert_refused(&eval(root, &["data", "check", "cifar100", "--data", "."]), 2, &["train.bin", "825.2 GB"]);
    let output = train(Path::new("/dev/zero"), &root.join("out"), &[]).output().unwrap();
    assert_refused(&output, 2, &["/dev/zero", "longer than"]);
    assert_refused(&eval(root, &["evidence", "/dev/zero", "--out", "out"]), 2, &["/dev/zero", "longer than"]);
    hole(&root.join("stl10_binary/class_names.txt"), b"", 1 << 40);
    assert_refused(&eval(root, &["data", "check", "stl10", "--data", "."]), 2, &["class_names.txt", "longer than"]);
    fs::copy(root.join("good.safetensors"), root.join("script.pt")).unwrap();
    hole(&root.join("script.json"), b"{", 1 << 40);
    assert_refused(&eval(root, &["knn", "--torchscript", "script.pt", "--dataset", "synthetic"]), 2, &["script.json", "1099.5 GB"]);
}

/// The archive again with right checksums, its entries as `change` leaves them.
fn rewritten(from: &Path, to: &Path, method: zip::CompressionMethod, change: impl Fn(&str, &mut Vec<u8>)) {
    let mut archive = zip::ZipArchive::new(fs::File::open(from).unwrap()).unwrap();
    let mut out = zip::ZipWriter::new(fs::File::create(to).unwrap());
    for i in 0..archive.len() {
        let mut entry = archive.by_index(i).unwrap();
        let mut bytes = vec![];
        std::io::Read::read_to_end(&mut entry, &mut bytes).unwrap();
        change(entry.name(), &mut bytes);
        out.start_file(entry.name(), zip::write::FileOptions::default().compression_method(method)).unwrap();
        out.write_all(&bytes).unwrap();
    }
    out.finish().unwrap();
}

/// libtorch believes what it reads of such a file: one that is damaged is refused before it gets it.
#[test]
fn a_damaged_torchscript_file_is_refused_before_libtorch_opens_it() {
    let folder = bench();
    let root = folder.path();
    let save = |file: &str, params: &Params| {
        let module = nets::graph::module(nets::find("resnet8").unwrap(), params, nets::graph::Answer::Logits);
        weights::torchscript::save(&root.join(file), &module).unwrap();
    };
    let measure =
        |file: &str| eval(root, &["embed", "--torchscript", file, "--images", "images.safetensors", "--out", "answer.safetensors"]);
    let (params, _) = network();
    save("good.pt", &params);
    assert!(measure("good.pt").status.success());
    fs::remove_file(root.join("answer.safetensors")).unwrap();
    // One bit of the last weight, which stays a number.
    let mut bytes = fs::read(root.join("good.pt")).unwrap();
    let weight = Vec::<f32>::try_from(params.named().iter().find(|(n, _)| n == "conv1.weight").unwrap().1.contiguous().view(-1)).unwrap();
    let weight: Vec<u8> = weight[..8].iter().flat_map(|w| w.to_le_bytes()).collect();
    let at = bytes.windows(weight.len()).position(|part| part == weight).unwrap();
    bytes[at] ^= 1;
    fs::write(root.join("bit.pt"), bytes).unwrap();
    assert_refused(&measure("bit.pt"), 2, &["bit.pt", "checksum"]);
    // A shape larger than its storage.
    let stored = zip::CompressionMethod::Stored;
    rewritten(&root.join("good.pt"), &root.join("shape.pt"), stored, |name, bytes| {
        let (from, to) = (b"(K\x10K\x03K\x03K\x03t", b"(M\xff\x7fK\x03K\x03K\x03t");
        if name.ends_with("data.pkl") {
            let at = bytes.windows(from.len()).position(|part| part == from).expect("the first convolution");
            bytes.splice(at..at + from.len(), to.iter().copied());
        }
    });
    assert_refused(&measure("shape.pt"), 2, &["shape.pt", "conv1.weight", "32767", "432 numbers of its storage"]);
    // 400 MB of nothing in 0.4.
    rewritten(&root.join("good.pt"), &root.join("bomb.pt"), zip::CompressionMethod::Deflated, |name, bytes| {
        if name.ends_with(".py") {
            bytes.extend(vec![b' '; 400 << 20]);
        }
    });
    assert_refused(&measure("bomb.pt"), 2, &["bomb.pt", "holds more bytes"]);
    // A running statistic is no parameter, and is looked at all the same.
    let (_, variance) = params.named().into_iter().find(|(n, _)| n == "layer2.0.bn1.running_var").unwrap();
    let _ = tch::no_grad(|| variance.view(-1).get(3).fill_(f64::NAN));
    save("nan.pt", &params);
    assert_refused(&measure("nan.pt"), 2, &["nan.pt", "layer2.0.bn1.running_var", "1 of its 32 numbers"]);
    assert!(!root.join("answer.safetensors").exists());
}

/// A network that teaches is read as carefully as one that is measured.
#[test]
fn a_teacher_that_cannot_answer_is_named() {
    let folder = bench();
    let teach = |file: &str| {
        let frozen = format!("[\"resnet8\"]\nfrozen = [\"{file}\"]\n");
        let text = SMALL.replace("[\"resnet8\", \"resnet8\"]\n", &frozen).replace("\"l_mcl\"", "\"dml\"");
        assert_ne!(text, SMALL);
        let path = recipe(folder.path(), &text);
        let more = ["--quiet", "--set", "data.image_size=16", "--set", "train.epochs=1"];
        train(&path, &folder.path().join("taught"), &more).current_dir(folder.path()).output().unwrap()
    };
    let (params, meta) = network_of(32);
    let meta = Meta { classes: (0..32).map(|c| c.to_string()).collect(), ..meta };
    let save = |file: &str, meta: &Meta| weights::save_safetensors(&folder.path().join(file), &params.named(), meta).unwrap();
    save("flat.safetensors", &Meta { std: [0.25, 0.0, 0.25], ..meta.clone() });
    assert_refused(&teach("flat.safetensors"), 2, &["flat.safetensors", "normalised with 0", "above 0"]);
    let (_, variance) = params.named().into_iter().find(|(n, _)| n == "layer2.0.bn1.running_var").unwrap();
    let _ = tch::no_grad(|| variance.shallow_clone().fill_(-1.0));
    save("root.safetensors", &meta);
    assert_refused(&teach("root.safetensors"), 1, &["root.safetensors", "not finite"]);
}

// ---- C9: limits ----

#[test]
fn numbers_beyond_any_machine_are_refused_before_anything_is_allocated() {
    let folder = tempfile::tempdir().unwrap();
    let (path, out) = (recipe(folder.path(), SMALL), folder.path().join("out"));
    let cases: &[(&[&str], &[&str])] = &[
        (&["--set", "data.image_size=1000000"], &["image_size = 1000000", "8 to 8192"]),
        (&["--set", "data.image_size=2"], &["image_size = 2", "8 to 8192"]),
        (&["--set", "data.image_size=8000"], &["GB of memory"]),
        (&["--set", "data.per_class=900000"], &["900000 images a class", "GB"]),
        (&["--set", "method.dim=1000000000"], &["dim = 1000000000", "65536"]),
        (&["--set", "method.dim=65536"], &["dim = 65536", "GB of memory"]),
        (&["--set", "method.mining=memory", "--set", "method.negatives=100000000"], &["negatives = 100000000", "GB of memory"]),
        (&["--set", "method.negatives=9000000000000"], &["negatives = 9000000000000"]),
        (&["--set", "method.mining=queue", "--set", "method.queue_length=200000000"], &["tables of 200000000", "GB of memory"]),
        (&["--set", "method.queue_length=9000000000000"], &["queue_length = 9000000000000"]),
        (&["--set", "train.batch=100000000"], &["batch = 100000000", "1048576"]),
        (&["--set", "train.epochs=9000000000000000000"], &["epochs = 9000000000000000000"]),
        (&["--set", "train.accumulate=9000000000000000000"], &["accumulate = 9000000000000000000"]),
        (&["--set", "train.peer_threads=100000"], &["peer_threads = 100000"]),
        (&["--threads", "1000000"], &["--threads = 1000000", "cores"]),
    ];
    for (more, parts) in cases {
        let mut command = Command::new(support::TRAIN);
        command.arg("run").arg(&path).arg("--out").arg(&out).args(["--device", "cpu", "--quiet"]).args(*more);
        // Little more than the program itself maps.
        let output = limited_to(command, 2 << 30);
        assert_refused(&output, 2, parts);
        assert_eq!(String::from_utf8_lossy(&output.stderr).lines().count(), 1, "{more:?}");
        assert!(!out.exists(), "{more:?} wrote something");
    }
}

#[test]
fn measurements_refuse_sides_and_threads_that_cannot_be() {
    let folder = bench();
    let w = ["--weights", "good.safetensors", "--dataset", "synthetic"];
    let cases: &[(&[&str], &[&str])] = &[
        (&["knn", "--image-size", "2"], &["image_size = 2", "8 to 8192"]),
        (&["knn", "--set", "image_size=-5"], &["image_size = -5"]),
        (&["knn", "--image-size", "100000"], &["image_size = 100000"]),
        (&["knn", "--image-size", "8000"], &["8000 x 8000", "GB of memory"]),
        (&["linear-probe", "--protocol", "sweep", "--set", "epochs=9000000000000"], &["epochs = 9000000000000"]),
        (&["few-shot", "--tries", "9000000000000"], &["tries = 9000000000000"]),
        (&["accuracy", "--image-size", "1000000"], &["--image-size = 1000000"]),
    ];
    for (args, parts) in cases {
        let output = eval(folder.path(), &[*args, &w[..]].concat());
        assert_refused(&output, 2, parts);
        assert_eq!(String::from_utf8_lossy(&output.stderr).lines().count(), 1, "{args:?}: {}", text(&output));
    }
    let mut command = Command::new(EVAL);
    command.args(["doctor", "--threads", "1000000"]);
    assert_refused(&limited(command), 2, &["--threads = 1000000"]);
    // A Swin on images of two pixels, in training and in measuring.
    let path = recipe(folder.path(), &SMALL.replace("\"resnet8\", \"resnet8\"", "\"swin_t\", \"swin_t\""));
    let output = train(&path, &folder.path().join("out"), &["--quiet", "--set", "data.image_size=2"]).output().unwrap();
    assert_refused(&output, 2, &["image_size = 2"]);
}

/// What libtorch refuses is one line: here a batch that passes the lower bound of what it needs, and then needs more than there is.
#[test]
fn libtorch_out_of_memory_is_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let (path, out) = (recipe(folder.path(), SMALL), folder.path().join("out"));
    let mut command = Command::new(support::TRAIN);
    command.arg("run").arg(&path).arg("--out").arg(&out).args(["--device", "cpu", "--quiet", "--threads", "1"]);
    command.args(["--set", "data.image_size=96", "--set", "data.fraction=1.0", "--set", "train.batch=512", "--set", "data.per_class=20"]);
    let output = limited_to(command, 4 << 30);
    let said = String::from_utf8_lossy(&output.stderr).to_string();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.lines().count() == 1 && said.contains("no memory left on cpu: not enough memory: a tensor of "), "{said}");
}

#[test]
fn a_wrong_flag_is_one_line_of_either_program() {
    for program in [support::TRAIN, EVAL] {
        let output = Command::new(program).args(["run", "--nonsense"]).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert_eq!(String::from_utf8_lossy(&output.stderr).lines().count(), 1, "{}", text(&output));
    }
}

// ---- C11: accepted in silence ----

#[test]
fn a_deviation_of_zero_or_nan_is_refused() {
    let folder = bench();
    let (params, _) = network();
    weights::save_pth(&folder.path().join("plain.pth"), &params.named()).unwrap();
    for (std, shown) in [("0,1,1", "deviation 0"), ("NaN,1,1", "deviation NaN"), ("-1,1,1", "deviation -1"), ("inf,1,1", "deviation inf")] {
        let args = ["knn", "--weights", "plain.pth", "--arch", "resnet8", "--dataset", "synthetic", "--mean", "0.5,0.5,0.5", "--std", std];
        assert_refused(&eval(folder.path(), &args), 2, &[shown, "above 0"]);
    }
}

fn pictures(root: &Path, classes: &[&str]) -> PathBuf {
    for class in classes {
        fs::create_dir_all(root.join(class)).unwrap();
        for i in 0..3u8 {
            fs::write(root.join(class).join(format!("{i}.png")), png(20, 20)).unwrap();
        }
    }
    root.to_path_buf()
}

#[test]
fn a_link_that_leads_back_is_named_and_a_linked_class_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let root = pictures(&folder.path().join("set"), &["cat", "dog"]);
    std::os::unix::fs::symlink("..", root.join("cat/again")).unwrap();
    let refused = eval(folder.path(), &["data", "check", "image_folder", "--data", "set"]);
    assert_refused(&refused, 2, &["cat/again", "a loop"]);
    fs::remove_file(root.join("cat/again")).unwrap();
    // A class that lies elsewhere is what links are for.
    let elsewhere = pictures(&folder.path().join("elsewhere"), &["fox"]);
    std::os::unix::fs::symlink(elsewhere.join("fox"), root.join("fox")).unwrap();
    let read = eval(folder.path(), &["data", "check", "image_folder", "--data", "set"]);
    assert!(read.status.success() && text(&read).contains("3 classes"), "{}", text(&read));
}

#[test]
fn one_class_is_no_task() {
    let folder = bench();
    pictures(&folder.path().join("set"), &["cat"]);
    let args = ["knn", "--weights", "good.safetensors", "--dataset", "image_folder", "--data", "set"];
    assert_refused(&eval(folder.path(), &args), 2, &["one class (cat)", "at least two"]);
    let path = recipe(folder.path(), &SMALL.replace("synthetic", "image_folder").replace("holdout = 2", "holdout = 0"));
    let output =
        train(&path, &folder.path().join("out"), &["--quiet", "--data", folder.path().join("set").to_str().unwrap()]).output().unwrap();
    assert_refused(&output, 2, &["one class (cat)", "at least two"]);
}
