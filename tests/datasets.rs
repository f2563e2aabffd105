//! Datasets in their official layouts, written small by the tests, and what is said of broken ones.

use std::fs;
use std::path::{Path, PathBuf};

use mcl::data::{Dataset, Options, Request, Task, check, find, open};
use mcl::error::Result;
use tch::{Device, Kind, Tensor};

/// Opens from `root` alone, whatever the machine has elsewhere.
fn open_in(name: &str, root: &Path) -> Result<Dataset> {
    let spec = find(name)?;
    (spec.open)(&Request { spec, roots: vec![(root.to_path_buf(), "--data")], options: &Options::default() })
}

/// The error of a broken set: one line, the user's to mend.
fn fault(name: &str, root: &Path) -> String {
    let error = open_in(name, root).err().expect("the set is broken");
    assert_eq!(error.exit_code(), 2, "{error}");
    assert_eq!(error.to_string().lines().count(), 1);
    error.to_string()
}

/// Three planes of 32 x 32, none like another.
fn planes(image: usize) -> Vec<u8> {
    (0..3072).map(|i| ((i * 7 + i / 1024 * 50 + image * 13) % 256) as u8).collect()
}

/// A binary file: the label bytes of each record, then its planes.
fn binary(labels: &[&[u8]]) -> Vec<u8> {
    labels.iter().enumerate().flat_map(|(i, label)| [label.to_vec(), planes(i)].concat()).collect()
}

/// A pickle with the opcodes of the official ones: protocol 2, written by Python 2 and numpy 1.
fn pickle(label_key: &str, labels: &[u8]) -> Vec<u8> {
    let mut out = b"\x80\x02}q\x01(".to_vec();
    let text = |out: &mut Vec<u8>, s: &str| {
        out.push(b'U');
        out.push(s.len() as u8);
        out.extend(s.as_bytes());
    };
    text(&mut out, label_key);
    out.extend(b"]q\x02(");
    labels.iter().for_each(|&label| out.extend([b'K', label]));
    out.push(b'e');
    text(&mut out, "data");
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

fn pickled_names(key: &str, names: &[String]) -> Vec<u8> {
    let mut out = [b"\x80\x02}(U".to_vec(), vec![key.len() as u8], key.as_bytes().to_vec(), b"](".to_vec()].concat();
    names.iter().for_each(|name| out.extend([&[b'U', name.len() as u8], name.as_bytes()].concat()));
    out.extend(b"eu.");
    out
}

fn names(count: usize) -> Vec<String> {
    (0..count).map(|i| format!("class{i}")).collect()
}

fn write(path: PathBuf, content: impl AsRef<[u8]>) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}

/// CIFAR-100 with three training and two test images.
fn cifar100(dir: &Path) {
    write(dir.join("cifar-100-binary/train.bin"), binary(&[&[1, 99], &[2, 0], &[3, 7]]));
    write(dir.join("cifar-100-binary/test.bin"), binary(&[&[1, 5], &[2, 6]]));
    write(dir.join("cifar-100-binary/fine_label_names.txt"), names(100).join("\n") + "\n");
}

fn cifar100_pickles(dir: &Path) {
    write(dir.join("cifar-100-python/train"), pickle("fine_labels", &[99, 0, 7]));
    write(dir.join("cifar-100-python/test"), pickle("fine_labels", &[5, 6]));
    write(dir.join("cifar-100-python/meta"), pickled_names("fine_label_names", &names(100)));
}

#[test]
fn cifar_binaries_and_pickles_are_the_same_images() {
    let dir = tempfile::tempdir().unwrap();
    let (bin, py) = (dir.path().join("bin"), dir.path().join("py"));
    cifar100(&bin);
    cifar100_pickles(&py);
    // Under the root, or the folder itself.
    let sets = [bin.clone(), bin.join("cifar-100-binary"), py.clone(), py.join("cifar-100-python")]
        .map(|root| open_in("cifar100", &root).unwrap());
    for set in &sets {
        assert_eq!((set.train.labels.as_slice(), set.test.labels.as_slice()), (&[99, 0, 7][..], &[5, 6][..]));
        assert_eq!((set.classes.len(), set.classes[99].as_str()), (100, "class99"));
        for i in 0..3 {
            let (image, planes) = (set.train.image(i).unwrap(), planes(i));
            assert_eq!((image.height, image.width), (32, 32));
            for (at, pixel) in image.data.chunks_exact(3).enumerate() {
                assert_eq!(pixel, [planes[at], planes[1024 + at], planes[2048 + at]], "image {i} pixel {at}");
            }
        }
    }
}

#[test]
fn cifar10_has_five_training_files() {
    let dir = tempfile::tempdir().unwrap();
    let (bin, py) = (dir.path().join("cifar-10-batches-bin"), dir.path().join("py/cifar-10-batches-py"));
    for i in 1..=5u8 {
        write(bin.join(format!("data_batch_{i}.bin")), binary(&[&[i], &[0]]));
        write(py.join(format!("data_batch_{i}")), pickle("labels", &[i, 0]));
    }
    write(bin.join("test_batch.bin"), binary(&[&[9]]));
    write(py.join("test_batch"), pickle("labels", &[9]));
    write(bin.join("batches.meta.txt"), names(10).join("\n") + "\n\n");
    write(py.join("batches.meta"), pickled_names("label_names", &names(10)));
    for root in [dir.path().to_path_buf(), dir.path().join("py")] {
        let set = open_in("cifar10", &root).unwrap();
        assert_eq!(set.train.labels.as_slice(), [1, 0, 2, 0, 3, 0, 4, 0, 5, 0]);
        assert_eq!(set.test.labels.as_slice(), [9]);
        assert_eq!(set.classes, names(10));
    }
}

#[test]
fn broken_cifar_files_are_named_with_their_numbers() {
    let dir = tempfile::tempdir().unwrap();
    cifar100(dir.path());
    let home = dir.path().join("cifar-100-binary");
    let whole = fs::read(home.join("train.bin")).unwrap();
    fs::write(home.join("train.bin"), &whole[..whole.len() - 1]).unwrap();
    let text = fault("cifar100", dir.path());
    assert!(text.ends_with("train.bin: 9221 bytes are no whole number of 3074-byte records (2 and a part): truncated?"), "{text}");

    let mut wrong = whole.clone();
    wrong[3075] = 100; // the fine label of the second record
    fs::write(home.join("train.bin"), wrong).unwrap();
    let text = fault("cifar100", dir.path());
    assert!(text.ends_with("train.bin: label 100 of image 1; 0 to 99 are expected"), "{text}");

    fs::write(home.join("train.bin"), &whole).unwrap();
    fs::remove_file(home.join("test.bin")).unwrap();
    assert!(fault("cifar100", dir.path()).contains("test.bin: cannot be read"));

    let py = dir.path().join("py");
    cifar100_pickles(&py);
    let train = py.join("cifar-100-python/train");
    fs::write(&train, &pickle("fine_labels", &[1, 2])[..3000]).unwrap();
    assert!(fault("cifar100", &py).contains("train: no pickle that can be read: the pickle ends at byte 3000"));
    fs::write(&train, pickle("labels", &[1, 2])).unwrap();
    assert!(fault("cifar100", &py).ends_with("train: no list `fine_labels` in it"));
}

#[test]
fn a_missing_set_says_where_was_looked_and_what_brings_it() {
    let spec = find("cifar100").unwrap();
    let roots = vec![(PathBuf::from("/nowhere/a"), "given"), (PathBuf::from("/nowhere/b"), "MCL_DATA")];
    let error = (spec.open)(&Request { spec, roots, options: &Options::default() }).err().unwrap();
    assert_eq!(
        error.line_in_flags(),
        "dataset cifar100: no cifar-100-binary/train.bin or cifar-100-python/train in /nowhere/a (given), /nowhere/b (MCL_DATA); \
         `mcl-eval data fetch cifar100` brings it, or point --data or MCL_DATA to it"
    );
    assert_eq!(error.exit_code(), 2);
    let unknown = open("cifar1000", None, &Options::default()).err().unwrap();
    assert!(
        unknown.to_string().starts_with("unknown dataset `cifar1000` (did you mean `cifar100`?); known: cifar10, cifar100, stl10"),
        "{unknown}"
    );
    // What the user names comes first, what is in the working directory last.
    let places = mcl::data::roots(Some(Path::new("/mine")));
    assert_eq!(places[0], (PathBuf::from("/mine"), "given"));
    assert_eq!(places[places.len() - 1], (PathBuf::from("data"), "./data"));
}

/// Two images; plane c, column x, row y (Matlab's order) holds x + 2 y + 70 c + i.
fn stl10(dir: &Path) {
    let image =
        |i: usize| (0..3).flat_map(move |c| (0..96).flat_map(move |x| (0..96).map(move |y| ((x + 2 * y + 70 * c + i) % 256) as u8)));
    for part in ["train", "test"] {
        write(dir.join(format!("stl10_binary/{part}_X.bin")), (0..2).flat_map(image).collect::<Vec<u8>>());
        write(dir.join(format!("stl10_binary/{part}_y.bin")), [10, 1]);
    }
    write(dir.join("stl10_binary/class_names.txt"), names(10).join("\n"));
}

#[test]
fn stl10_stands_upright_and_its_labels_must_fit() {
    let dir = tempfile::tempdir().unwrap();
    stl10(dir.path());
    let set = open_in("stl10", dir.path()).unwrap();
    assert_eq!(set.train.labels.as_slice(), [9, 0]);
    let image = set.train.image(1).unwrap();
    for (y, x, c) in [(0, 0, 0), (0, 95, 1), (95, 0, 2), (20, 60, 1)] {
        assert_eq!(image.data[(y * 96 + x) * 3 + c], ((x + 2 * y + 70 * c + 1) % 256) as u8, "pixel {y}, {x}, {c}");
    }
    assert_eq!(set.resized(32).unwrap().test.image(0).unwrap().data.len(), 32 * 32 * 3);

    let home = dir.path().join("stl10_binary");
    fs::write(home.join("train_y.bin"), [1, 2, 3]).unwrap();
    assert!(fault("stl10", dir.path()).contains("train_y.bin: 3 labels for the 2 images of"));
    fs::write(home.join("train_y.bin"), [0, 2]).unwrap();
    assert!(fault("stl10", dir.path()).ends_with("train_y.bin: label 0 of image 0; 1 to 10 are expected"));
    fs::write(home.join("train_X.bin"), [0; 100]).unwrap();
    assert!(fault("stl10", dir.path()).contains("train_X.bin: 100 bytes are no whole number of 27648-byte images"));
}

/// An IDX file of bytes: its dimensions, then what it holds.
fn idx(sizes: &[u32], content: &[u8]) -> Vec<u8> {
    let sizes: Vec<u8> = sizes.iter().flat_map(|size| size.to_be_bytes()).collect();
    [&[0, 0, 8, (sizes.len() / 4) as u8], sizes.as_slice(), content].concat()
}

#[test]
fn fashion_mnist_gets_a_border_and_three_channels() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("FashionMNIST/raw");
    let shade = |i: usize| (i % 251 + 1) as u8;
    for part in ["train", "t10k"] {
        write(home.join(format!("{part}-images-idx3-ubyte")), idx(&[2, 28, 28], &(0..2 * 784).map(shade).collect::<Vec<u8>>()));
        write(home.join(format!("{part}-labels-idx1-ubyte")), idx(&[2], &[9, 0]));
    }
    let set = open_in("fashion_mnist", dir.path()).unwrap();
    assert_eq!((set.train.labels.as_slice(), set.classes[9].as_str(), set.image_size), (&[9, 0][..], "Ankle boot", 32));
    let image = set.test.image(1).unwrap();
    for (y, x) in [(0, 0), (1, 31), (2, 2), (2, 29), (20, 7), (29, 29), (30, 5), (9, 30)] {
        let inside = (2..30).contains(&y) && (2..30).contains(&x);
        let want = if inside { shade(784 + (y - 2) * 28 + x - 2) } else { 0 };
        assert_eq!(image.data[(y * 32 + x) * 3..][..3], [want; 3], "pixel {y}, {x}");
    }
    // The same files elsewhere may be another set's: the folder's name decides.
    assert!(fault("fashion_mnist", &dir.path().join("FashionMNIST")).contains("no FashionMNIST/raw/train-images-idx3-ubyte"));
    assert!(open_in("fashion_mnist", &home).is_ok());

    write(home.join("train-labels-idx1-ubyte"), idx(&[2], &[10, 0]));
    assert!(fault("fashion_mnist", dir.path()).ends_with("train-labels-idx1-ubyte: label 10 of image 0; 0 to 9 are expected"));
    write(home.join("train-labels-idx1-ubyte"), idx(&[3], &[1, 0, 0]));
    assert!(fault("fashion_mnist", dir.path()).contains("train-labels-idx1-ubyte: 3 labels for the 2 images of"));
    write(home.join("train-labels-idx1-ubyte"), idx(&[3], &[1, 0]));
    assert!(fault("fashion_mnist", dir.path()).ends_with("10 bytes where its header promises 11: truncated?"));
    write(home.join("train-images-idx3-ubyte"), [0; 20]);
    assert!(fault("fashion_mnist", dir.path()).contains("no IDX file of bytes whose entries have shape [28, 28]"));
}

fn jpeg(path: PathBuf, side: u32, shade: u8) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    image::RgbImage::from_pixel(side, side, image::Rgb([shade; 3])).save_with_format(path, image::ImageFormat::Jpeg).unwrap();
}

fn tiny_imagenet(dir: &Path) -> PathBuf {
    let home = dir.join("tiny-imagenet-200");
    write(home.join("wnids.txt"), "n02\nn01\n");
    write(home.join("words.txt"), "n01\tgoldfish, Carassius auratus\nn77\tentity\n");
    for (id, shade) in [("n01", 10), ("n02", 200)] {
        (0..3).for_each(|i| jpeg(home.join(format!("train/{id}/images/{id}_{i}.JPEG")), 64, shade));
        write(home.join(format!("train/{id}/{id}_boxes.txt")), "");
    }
    jpeg(home.join("val/images/val_0.JPEG"), 64, 200);
    jpeg(home.join("val/images/val_1.JPEG"), 64, 10);
    write(home.join("val/val_annotations.txt"), "val_0.JPEG\tn02\t0\t0\t1\t1\nval_1.JPEG\tn01\t0\t0\t1\t1\n");
    home
}

#[test]
fn tiny_imagenet_takes_its_labels_from_folders_and_annotations() {
    let dir = tempfile::tempdir().unwrap();
    let home = tiny_imagenet(dir.path());
    let set = open_in("tiny_imagenet", dir.path()).unwrap();
    assert_eq!(set.train.labels.as_slice(), [0, 0, 0, 1, 1, 1]);
    assert_eq!(set.test.labels.as_slice(), [1, 0]);
    assert_eq!(set.classes, ["n01 goldfish", "n02"]);
    assert!(set.test.image(0).unwrap().data.iter().all(|v| v.abs_diff(200) < 3));

    write(home.join("val/val_annotations.txt"), "val_0.JPEG\tn99\t0\t0\t1\t1\n");
    assert!(fault("tiny_imagenet", dir.path()).ends_with("val_annotations.txt: line 1: class n99 is not in wnids.txt"));
    write(home.join("val/val_annotations.txt"), "val_7.JPEG\tn01\t0\t0\t1\t1\n");
    assert!(fault("tiny_imagenet", dir.path()).contains("val_annotations.txt: line 1:"));
    fs::remove_file(home.join("val/val_annotations.txt")).unwrap();
    assert!(fault("tiny_imagenet", dir.path()).contains("val_annotations.txt: cannot be read"));
}

#[test]
fn check_counts_and_names_every_undecodable_file() {
    let dir = tempfile::tempdir().unwrap();
    let home = tiny_imagenet(dir.path());
    let found = check::check("tiny_imagenet", Some(dir.path()), &Options::default()).unwrap();
    found.verdict().unwrap();
    assert!(found.is_subset());
    let text = found.to_string();
    assert!(text.contains("2 classes, a subset of the official set"), "{text}");
    assert!(text.contains("train 6 images of 100000, 3 a class, 64 x 64 pixels"), "{text}");

    let zeros = home.join("train/n02/images/n02_1.JPEG");
    fs::write(&zeros, vec![0; 2000]).unwrap();
    let found = check::check("tiny_imagenet", Some(dir.path()), &Options::default()).unwrap();
    assert!(found.to_string().contains(&format!("{}: neither a JPEG nor a PNG file", zeros.display())));
    let verdict = found.verdict().unwrap_err();
    assert_eq!(verdict.to_string(), format!("{}: neither a JPEG nor a PNG file", zeros.display()));
    assert_eq!(verdict.exit_code(), 2);
}

#[test]
fn check_compares_with_published_checksums() {
    let dir = tempfile::tempdir().unwrap();
    cifar100_pickles(dir.path());
    let found = check::check("cifar100", Some(dir.path()), &Options::default()).unwrap();
    assert_eq!(found.hashes.len(), 3);
    assert!(found.to_string().contains("not the published file (this is a subset)"));
    found.verdict().unwrap();
    let listed = check::list(Some(dir.path()));
    let cifar100 = listed.iter().find(|set| set.name == "cifar100").unwrap();
    assert_eq!(cifar100.home.as_deref(), Some(dir.path().join("cifar-100-python").as_path()));
    assert_eq!(listed.len(), mcl::data::DATASETS.len());
}

#[test]
fn check_compares_the_two_layouts_of_cifar_where_both_are_there() {
    let dir = tempfile::tempdir().unwrap();
    cifar100(dir.path());
    write(dir.path().join("cifar-100-python/test"), pickle("fine_labels", &[5, 6]));
    let text = check::check("cifar100", Some(dir.path()), &Options::default()).unwrap().to_string();
    assert!(text.contains("cifar-100-python: 2 test images, each the same as here"), "{text}");
    for labels in [&[5, 7][..], &[5, 6, 6], &[5]] {
        write(dir.path().join("cifar-100-python/test"), pickle("fine_labels", labels));
        let error = check::check("cifar100", Some(dir.path()), &Options::default()).err().unwrap();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("of its test split is not the one in"), "{error}");
    }
}

#[test]
fn folders_of_classes_with_and_without_a_split() {
    let dir = tempfile::tempdir().unwrap();
    let plain = dir.path().join("plain");
    for (class, n) in [("cat", 10), ("dog", 5)] {
        // Some of them a folder deeper, as Tiny-ImageNet keeps all of its own.
        (0..n).for_each(|i| jpeg(plain.join(format!("{class}/{}{i:02}.jpg", if i % 2 == 0 { "images/" } else { "" })), 8, 50));
    }
    write(plain.join("cat/notes.txt"), "no image");
    write(plain.join("cat/._00.jpg"), "what macOS leaves");
    let set = open_in("image_folder", &plain).unwrap();
    assert_eq!(set.classes, ["cat", "dog"]);
    assert_eq!((set.train.counts(2), set.test.counts(2)), (vec![8, 4], vec![2, 1]));
    let again = open_in("image_folder", &plain).unwrap();
    assert_eq!(set.test.rows, again.test.rows);

    let split = dir.path().join("split");
    jpeg(split.join("train/cat/a.JPG"), 8, 50);
    jpeg(split.join("train/dog/a.jpg"), 8, 50);
    jpeg(split.join("test/dog/b.jpeg"), 8, 50);
    let set = open_in("image_folder", &split).unwrap();
    assert_eq!((set.train.labels.as_slice(), set.test.labels.as_slice()), (&[0, 1][..], &[1][..]));
    assert_eq!(set.test.path(0), Some(split.join("test/dog/b.jpeg").as_path()));

    jpeg(split.join("test/bird/b.jpeg"), 8, 50);
    assert!(fault("image_folder", &split).contains("bird: a class that"));
    fs::remove_dir_all(split.join("test")).unwrap();
    assert!(fault("image_folder", &split).ends_with("a train folder without a val or test folder beside it"));
    let lonely = dir.path().join("lonely");
    jpeg(lonely.join("cat/a.jpg"), 8, 50);
    assert!(fault("image_folder", &lonely).contains("cat: 1 image(s); a class needs at least 2"));
}

#[test]
fn imagenet_is_train_and_val_of_class_folders() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("imagenet");
    for id in ["n01", "n02"] {
        jpeg(home.join(format!("train/{id}/{id}_1.JPEG")), 40, 50);
    }
    fs::create_dir_all(home.join("val")).unwrap();
    assert!(fault("imagenet", dir.path()).contains("val: no class folders in it"));
    jpeg(home.join("val/n02/val_1.JPEG"), 40, 50);
    let set = open_in("imagenet", dir.path()).unwrap();
    assert_eq!((set.classes.len(), set.test.labels.as_slice(), set.image_size), (2, &[1][..], 224));
    let batch = mcl::data::Loader::eval(&set.test, 4, set.test_transform()).next().unwrap().unwrap();
    assert_eq!(batch.views[0].size(), [1, 3, 224, 224]);
}

fn synthetic(task: Task, size: usize, per_class: usize, seed: u64) -> Dataset {
    open("synthetic", None, &Options { task, size: Some(size), own: own(&format!("per_class = {per_class}\nseed = {seed}")) }).unwrap()
}

fn own(text: &str) -> toml::Table {
    text.parse().unwrap()
}

#[test]
fn a_dataset_reads_keys_of_its_own_and_refuses_others() {
    let refused = |name: &str, text: &str| {
        let error = open(name, None, &Options { own: own(text), ..Options::default() }).err().unwrap();
        assert_eq!((error.exit_code(), error.to_string().lines().count()), (2, 1), "{error}");
        error.to_string()
    };
    assert_eq!(
        refused("synthetic", "per_clas = 3"),
        "dataset synthetic: unknown key `per_clas` in [data]; keys of its own: per_class, seed"
    );
    assert_eq!(refused("cifar100", "seed = 3"), "dataset cifar100: unknown key `seed` in [data]; keys of its own: none");
    let text = refused("synthetic", "seed = \"x\"");
    assert!(text.starts_with("dataset synthetic: [data]: ") && text.contains("seed"), "{text}");
    for spec in mcl::data::DATASETS {
        spec.options.check(spec.name, &toml::Table::new()).unwrap_or_else(|e| panic!("{}: its keys need defaults: {e}", spec.name));
    }

    let dir = tempfile::tempdir().unwrap();
    (0..10).for_each(|i| jpeg(dir.path().join(format!("cat/{i}.jpg")), 8, 50));
    let folder = |text: &str| open("image_folder", Some(dir.path()), &Options { own: own(text), ..Options::default() });
    assert_eq!(folder("").unwrap().test.len(), 2);
    let half = folder("test_share = 0.5").unwrap();
    assert_eq!((half.train.len(), half.test.len()), (5, 5));
    assert_ne!(half.test.rows, folder("test_share = 0.5\nseed = 1").unwrap().test.rows);
    assert!(folder("test_share = 1.0").err().unwrap().to_string().contains("test_share = 1; accepted: more than 0 and less than 1"));
}

#[test]
fn a_folder_with_train_x_bin_is_not_stl10_for_that() {
    let dir = tempfile::tempdir().unwrap();
    let found = |root: &Path| check::list(Some(root)).into_iter().find(|set| set.name == "stl10").unwrap().home;
    let other = dir.path().join("other");
    write(other.join("train_X.bin"), [0; 5000]);
    assert!(found(&other).is_none_or(|home| home != other), "5000 bytes and no class names");
    stl10(dir.path());
    fs::rename(dir.path().join("stl10_binary"), dir.path().join("mine")).unwrap();
    assert_eq!(found(&dir.path().join("mine")), Some(dir.path().join("mine")), "under another name, it still is one");
}

#[test]
fn synthetic_is_drawn_by_seed_at_any_size_in_two_tasks() {
    let [source, same, other] = [1, 1, 2].map(|seed| synthetic(Task::Source, 24, 4, seed));
    let transfer = synthetic(Task::Transfer, 48, 4, 1);
    assert_eq!((source.classes.len(), transfer.classes.len()), (32, 16));
    assert!(transfer.classes.iter().all(|class| !source.classes.contains(class)));
    assert_eq!((source.train.len(), source.test.len(), transfer.train.len()), (128, 32, 64));
    assert!((0..128).all(|i| source.train.image(i).unwrap() == same.train.image(i).unwrap()));
    assert!((0..128).all(|i| source.train.image(i).unwrap() != other.train.image(i).unwrap()));
    assert!((0..32).all(|i| source.train.image(i).unwrap() != source.test.image(i).unwrap()));
    assert_eq!(transfer.train.image(0).unwrap().data.len(), 48 * 48 * 3);
    let refused = open("synthetic", None, &Options { size: Some(3), ..Options::default() }).err().unwrap();
    assert_eq!(refused.exit_code(), 2);
}

/// All pixels of a split, centred, and its labels.
fn pixels(set: &Dataset, test: bool) -> (Tensor, Tensor) {
    let split = if test { &set.test } else { &set.train };
    let batch = mcl::data::Loader::eval(split, split.len(), set.test_transform()).next().unwrap().unwrap();
    (batch.views[0].contiguous().flatten(1, -1), batch.labels)
}

fn accuracy(scores: &Tensor, labels: &Tensor) -> f64 {
    scores.argmax(1, false).eq_tensor(labels).to_kind(Kind::Float).mean(Kind::Float).double_value(&[])
}

#[test]
fn a_linear_model_on_synthetic_pixels_stays_below_twice_chance() {
    for task in [Task::Source, Task::Transfer] {
        let set = open("synthetic", None, &Options { task, ..Options::default() }).unwrap();
        let classes = set.classes.len() as i64;
        let ((x, y), (test_x, test_y)) = (pixels(&set, false), pixels(&set, true));
        let twice_chance = 2.0 / classes as f64;

        let target = y.onehot(classes) - 1.0 / classes as f64;
        let (gram, cross) = (x.tr().matmul(&x), x.tr().matmul(&target));
        for strength in [1e3, 1e5] {
            let ridge = Tensor::linalg_solve(&(&gram + Tensor::eye(gram.size()[0], (Kind::Float, Device::Cpu)) * strength), &cross, true);
            let found = accuracy(&test_x.matmul(&ridge), &test_y);
            assert!(found < twice_chance, "{task:?}, ridge {strength}: {found}");
        }

        let weights = Tensor::zeros([x.size()[1], classes], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let mut velocity = weights.zeros_like();
        for _ in 0..60 {
            let loss = x.matmul(&weights).cross_entropy_for_logits(&y);
            let grad = Tensor::run_backward(&[&loss], &[&weights], false, false).remove(0);
            let _guard = tch::no_grad_guard();
            velocity = velocity * 0.9 + grad;
            let _ = weights.shallow_clone().g_sub_(&(&velocity * 0.004));
        }
        // It did fit: what it learned is of no use, not absent.
        let fitted = accuracy(&x.matmul(&weights), &y);
        assert!(fitted > 2.0 * twice_chance, "{task:?}: the logistic model did not even fit its training images: {fitted}");
        let found = accuracy(&test_x.matmul(&weights), &test_y);
        assert!(found < twice_chance, "{task:?}, logistic: {found}");
    }
}
