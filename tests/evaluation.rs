//! The promises of `mcl-eval`: the backbone stays as it was, no test image chooses anything, the cache is never stale, no row is lost.

mod support;

use std::fs;
use std::process::Command;

use mcl::error::Error;
use mcl::eval::Common;
use mcl::eval::features::Features;
use mcl::eval::measures::{self, few_shot};
use mcl::eval::network::{NetworkArgs, PeerChoice};
use mcl::eval::probe::{self, lbfgs::Lbfgs, sweep::Sweep};
use mcl::eval::protocol::Protocol;
use mcl::eval::record::{self, Record};
use mcl::extractor::Extractor;
use mcl::nets::layers::Pass;
use mcl::nets::{self, Branch, Network};
use mcl::params::Scope;
use support::trained::{done, eval, run_folder, stderr};
use tch::{Device, Kind, Tensor};

fn common() -> Common {
    Common { data: None, device: Device::Cpu, threads: 1, json: false, quiet: true, commit: "test", id: None }
}

#[test]
fn a_changed_backbone_is_an_error() {
    let root = tempfile::tempdir().unwrap();
    let run = run_folder(root.path(), "one", 1);
    let subjects = NetworkArgs { runs: vec![run], ..Default::default() }.open(&common(), PeerChoice::Best).unwrap();
    assert_eq!(subjects.len(), 2, "without a chosen network all are measured");
    subjects[0].check_unchanged().unwrap();
    // What a probe with BatchNorm in training mode would do.
    let (name, buffer) = subjects[0].params.buffers.iter().find(|(n, _)| n.ends_with("running_mean")).unwrap();
    let _ = buffer.shallow_clone().g_add_scalar_(1e-3);
    let message = subjects[0].check_unchanged().unwrap_err().to_string();
    assert!(message.contains("changed while it was measured"), "{name}: {message}");
}

#[test]
fn probes_leave_files_and_networks_alone() {
    let root = tempfile::tempdir().unwrap();
    let run = run_folder(root.path(), "one", 1);
    let before = fs::read(run.join("networks/peer-0.safetensors")).unwrap();
    for protocol in
        [&["--protocol", "lbfgs", "--set", "cs=[0.01, 1.0]"][..], &["--protocol", "sweep", "--set", "epochs=1"], &["--set", "epochs=1"]]
    {
        let args = [&["linear-probe", "--run", "runs/one", "--peer", "0", "--dataset", "synthetic"], protocol].concat();
        done(eval(root.path(), &args));
    }
    assert_eq!(fs::read(run.join("networks/peer-0.safetensors")).unwrap(), before);
    let rows = record::read(&run).unwrap();
    assert_eq!(rows.iter().map(|r| r.options["kind"].as_str().unwrap()).collect::<Vec<_>>(), ["lbfgs", "sweep", "paper"]);
    for row in rows {
        assert!(row.value >= 0.0 && row.value <= 100.0 && row.ci_low.unwrap() <= row.value && row.value <= row.ci_high.unwrap());
        assert_eq!(row.detail["confusion"].as_array().unwrap().len(), 16);
        assert_eq!((row.mean, row.n_test), ([0.5; 3], 640), "normalised as the network was trained");
    }
}

/// Features of three classes that a line can tell apart, by formula.
fn features(count: usize, shift: f64) -> Features {
    let x: Vec<f32> = (0..count)
        .flat_map(|i| (0..4).map(move |j| ((1.3 * i as f64 + j as f64 + shift).sin() + if i % 3 == j { 1.5 } else { 0.0 }) as f32))
        .collect();
    Features { x: Tensor::from_slice(&x).view([-1, 4]), y: (0..count).map(|i| (i % 3) as i64).collect() }
}

#[test]
fn no_test_image_chooses_anything() {
    let protocol: Lbfgs = Protocol::read("lbfgs", probe::PROTOCOLS).unwrap().options().unwrap();
    let train = features(120, 0.0);
    let honest = protocol.probe(&train, &features(60, 7.0), 3, 1, &common()).unwrap();
    // A test split whose labels are all wrong: whoever peeked would choose something else.
    let mut lying = features(60, 7.0);
    lying.y.iter_mut().for_each(|y| *y = (*y + 1) % 3);
    let lied = protocol.probe(&train, &lying, 3, 1, &common()).unwrap();
    assert_eq!(honest.chosen, lied.chosen);
    assert_eq!(honest.score.predicted, lied.score.predicted);
    assert!(honest.score.top1() > 80.0 && lied.score.top1() < 20.0, "{} {}", honest.score.top1(), lied.score.top1());

    let mut protocol = Protocol::read("sweep", probe::PROTOCOLS).unwrap();
    protocol.change("epochs=10").unwrap();
    let protocol: Sweep = protocol.options().unwrap();
    let honest = protocol.probe(&train, &features(60, 7.0), 3, 1, &common()).unwrap();
    let lied = protocol.probe(&train, &lying, 3, 1, &common()).unwrap();
    assert_eq!(honest.chosen, lied.chosen);
    assert_eq!(honest.score.predicted, lied.score.predicted);
    assert!(honest.score.top1() > 80.0 && lied.score.top1() < 20.0, "{} {}", honest.score.top1(), lied.score.top1());
}

/// The frozen network on threads of its own (folded BatchNorm, direct convolutions) against libtorch's operations one by one.
#[test]
fn extracted_features_are_those_of_the_plain_network() {
    let _guard = tch::no_grad_guard();
    let threads = tch::get_num_threads();
    let images = (Tensor::arange(37 * 3 * 32 * 32, (Kind::Float, Device::Cpu)) * 0.37).sin().view([37, 3, 32, 32]);
    for name in ["resnet8", "wrn_16_2", "shufflenet_v2_x0_5_cifar", "hcgnet_a1"] {
        let arch = nets::find(name).unwrap();
        let (net, params) = Network::build(arch, 7, 1, Device::Cpu, Kind::Float);
        let scope = Scope::root(2, Device::Cpu, Kind::Float);
        let branches = Branch::all(arch, &scope, 7);
        let aux = scope.params();
        // Statistics that are not those of a new network, or folding them would change nothing.
        for (name, buffer) in params.buffers.iter().chain(&aux.buffers).filter(|(n, _)| n.contains("running")) {
            let wave = (Tensor::arange(buffer.numel() as i64, (Kind::Float, Device::Cpu)) * 0.7).sin() * 0.2;
            let (mut buffer, shift) = (buffer.shallow_clone(), if name.ends_with("var") { 1.0 } else { 0.0 });
            buffer.copy_(&(wave + shift));
        }
        let plain = net.answer(net.maps(&images, Pass::EVAL), &branches, Pass::EVAL);
        for threads in [1, 3] {
            let alone = Extractor::new(arch, &params, None, 7, threads).extract(&images, true).unwrap();
            let whole = Extractor::new(arch, &params, Some(&aux), 7, threads).extract(&images, false).unwrap();
            assert_eq!((alone.logits.len(), whole.logits.len()), (1, arch.depth), "{name}");
            let maps = alone.stages.iter().zip(&plain.maps);
            let branches = whole.logits.iter().zip(&plain.logits);
            for (got, want) in maps.chain(branches).chain([(&alone.features, plain.feat()), (alone.logit(), plain.logit())]) {
                assert_eq!(got.size(), want.size(), "{name}");
                let difference = ((got - want).abs().max() / want.abs().max()).double_value(&[]);
                assert!(difference < 1e-4, "{name} on {threads} threads: {difference}");
            }
        }
    }
    assert_eq!(tch::get_num_threads(), threads);
}

#[test]
fn batches_are_answered_in_their_order_and_an_error_leaves_no_answer_behind() {
    let images = (Tensor::arange(20 * 3 * 32 * 32, (Kind::Float, Device::Cpu)) * 0.37).sin().view([20, 3, 32, 32]);
    let arch = nets::find("resnet8").unwrap();
    let (_, params) = Network::build(arch, 7, 1, Device::Cpu, Kind::Float);
    let mut extractor = Extractor::new(arch, &params, None, 7, 2);
    let want = extractor.extract(&images, false).unwrap().features;
    let batches = || images.split(3, 0).into_iter().enumerate().map(|(i, images)| Ok((images, i)));
    let (mut got, mut order) = (vec![], vec![]);
    let each = extractor.each(batches(), |answer, i| {
        got.push(answer.features);
        order.push(i);
        Ok(())
    });
    each.unwrap();
    assert_eq!(order, (0..7).collect::<Vec<_>>());
    assert!(Tensor::cat(&got, 0).allclose(&want, 1e-5, 1e-6, false));
    // One answer is refused, and one batch cannot be made: what was under way is not the answer to the next question.
    let stopped = extractor.each(batches(), |_, i| if i == 2 { Err(Error::failed("enough")) } else { Ok(()) });
    assert_eq!(stopped.unwrap_err().to_string(), "enough");
    let broken = batches().take(4).chain([Err(Error::failed("no such image"))]);
    assert_eq!(extractor.each(broken, |_, _| Ok(())).unwrap_err().to_string(), "no such image");
    assert!(extractor.extract(&images, false).unwrap().features.equal(&want));
}

#[test]
fn draws_have_k_of_every_class_and_follow_the_seed() {
    let labels: Vec<i64> = (0..60).map(|i| i % 3).collect();
    let drawn = few_shot::draw(&labels, 3, 5, 1, 0).unwrap();
    for class in 0..3 {
        assert_eq!(drawn.iter().filter(|&&i| labels[i] == class).count(), 5);
    }
    assert_eq!(drawn, few_shot::draw(&labels, 3, 5, 1, 0).unwrap());
    assert_ne!(drawn, few_shot::draw(&labels, 3, 5, 1, 1).unwrap());
    assert!(few_shot::draw(&labels, 3, 21, 1, 0).unwrap_err().to_string().contains("class 0 has 20 training images"));
}

#[test]
fn cached_features_are_used_only_while_nothing_changed() {
    let root = tempfile::tempdir().unwrap();
    let run = run_folder(root.path(), "one", 1);
    let knn = |extra: &[&str]| {
        stderr(&done(eval(
            root.path(),
            &[&["knn", "--run", "runs/one", "--peer", "0", "--dataset", "synthetic", "--k", "5"], extra].concat(),
        )))
    };
    let fresh = |log: &str| (log.matches("extracted and kept").count(), log.matches("from the cache").count());
    assert_eq!(fresh(&knn(&[])), (2, 0));
    assert_eq!(fresh(&knn(&[])), (0, 2));
    // One bit of one number, which stays a number: without a checksum it would be measured in silence.
    let kept = fs::read_dir(root.path().join("cache/features")).unwrap().next().unwrap().unwrap().path();
    let mut bytes = fs::read(&kept).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let known: serde_json::Value = serde_json::from_slice(&bytes[8..header]).unwrap();
    bytes[header + known["features"]["data_offsets"][0].as_u64().unwrap() as usize + 2] ^= 1;
    fs::write(&kept, &bytes).unwrap();
    assert_eq!(fresh(&knn(&[])), (1, 1), "a damaged file");
    assert_eq!(fresh(&knn(&["--image-size", "24"])), (2, 0), "another size");
    assert_eq!(fresh(&knn(&["--no-cache"])), (0, 0));
    let file = run.join("networks/peer-0.safetensors");
    let path = file.to_str().unwrap();
    let foreign = |mean: &str| {
        stderr(&done(eval(
            root.path(),
            &["knn", "--weights", path, "--mean", mean, "--std", "0.25,0.25,0.25", "--dataset", "synthetic", "--k", "5"],
        )))
    };
    assert_eq!(fresh(&foreign("0.5,0.5,0.5")), (0, 2), "the same network by another door");
    assert_eq!(fresh(&foreign("0.5,0.5,0.4")), (2, 0), "another normalisation");
    run_folder(root.path(), "one", 9);
    assert_eq!(fresh(&knn(&[])), (2, 0), "other weights under the same name");
    let values: Vec<f64> = record::read(&run).unwrap().iter().map(|r| r.value).collect();
    // A dataset whose pictures change under the same names, with the same labels.
    let paint = |shift: u32| {
        for (class, level) in [("cat", 40), ("dog", 200)] {
            let folder = root.path().join("pictures").join(class);
            fs::create_dir_all(&folder).unwrap();
            for i in 0..6 {
                let picture = image::RgbImage::from_fn(40, 40, |x, y| image::Rgb([level, (x * 5 + i * 7 + shift) as u8, (y * 6) as u8]));
                picture.save(folder.join(format!("{i}.png"))).unwrap();
            }
        }
    };
    let pictures = || {
        let args = ["knn", "--run", "runs/one", "--peer", "0", "--dataset", "image_folder", "--data", "pictures", "--k", "1"];
        stderr(&done(eval(root.path(), &args)))
    };
    paint(0);
    assert_eq!(fresh(&pictures()), (2, 0));
    assert_eq!(fresh(&pictures()), (0, 2));
    paint(1);
    assert_eq!(fresh(&pictures()), (2, 0), "other pictures under the same names");
    let same = [values[1], values[2], values[4]];
    assert_eq!(same, [values[0]; 3], "cached, made anew and uncached features give the same number: {values:?}");
}

#[test]
fn rows_of_several_writers_are_all_there_and_whole() {
    let folder = tempfile::tempdir().unwrap();
    // What a killed process leaves behind.
    fs::write(folder.path().join("results.jsonl"), "{\"command\":\"knn\",\"val").unwrap();
    std::thread::scope(|scope| {
        for writer in 0..4 {
            let folder = folder.path();
            scope.spawn(move || {
                for i in 0..25 {
                    let record = Record {
                        command: "test".into(),
                        variant: format!("{writer}-{i}, \"quoted\""),
                        value: i as f64,
                        ..Default::default()
                    };
                    record::append(folder, &[record]).unwrap();
                }
            });
        }
    });
    let rows = record::read(folder.path()).unwrap();
    assert_eq!(rows.len(), 100);
    for writer in 0..4 {
        let own: Vec<f64> = rows.iter().filter(|r| r.variant.starts_with(&format!("{writer}-"))).map(|r| r.value).collect();
        assert_eq!(own, (0..25).map(f64::from).collect::<Vec<_>>(), "writer {writer}");
    }
    let mut csv = csv::Reader::from_path(folder.path().join("results.csv")).unwrap();
    assert_eq!(csv.records().map(Result::unwrap).filter(|r| r[1] == *"test" && r[2].ends_with("\"quoted\"")).count(), 100);
}

#[test]
fn several_processes_append_to_one_run() {
    let root = tempfile::tempdir().unwrap();
    let run = run_folder(root.path(), "one", 1);
    let start = |_| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_mcl-eval"));
        command
            .args(["accuracy", "--run", "runs/one", "--threads", "1", "--quiet"])
            .current_dir(root.path())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap()
    };
    let children: Vec<_> = (0..3).map(start).collect();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    // Two networks and the ensemble, three times.
    let rows = record::read(&run).unwrap();
    assert_eq!(rows.len(), 9);
    assert!(rows.iter().all(|r| r.value == rows.iter().find(|o| (o.peer, &o.variant) == (r.peer, &r.variant)).unwrap().value));
}

/// As the first release wrote it: no schema, no id.
const OLD_ROW: &str = r#"{"time":"2026-11-17T19:57:48.632675816+00:00","command":"linear-probe","variant":"","protocol":"lbfgs","protocol_hash":"a140df02a53a08d8","dataset":"synthetic","metric":"top1","value":6.40625,"ci_low":4.53125,"ci_high":8.285156249999979,"top5":33.90625,"seed":1,"n_train":1920,"n_test":640,"split_hash":"1620c9464ae547bf","subject":"full-l_mcl/peer-0","run":"full-l_mcl","method":"l_mcl","arch":"resnet8","peer":0,"pretrained_on":"synthetic","epoch":2,"weights":"networks/peer-0.safetensors","weights_hash":"6822a0eb940bb6f6","recipe_hash":"923f94ff215f63fb","image_size":16,"mean":[0.5,0.5,0.5],"std":[0.25,0.25,0.25],"device":"Cpu","threads":1,"seconds":0.201238603,"version":"0.1.0","commit":"a6a117d9249d","argv":"mcl-eval linear-probe","warnings":["at chance level: 6.41 % of 16 classes"],"options":{"cs":[0.0001,0.001,0.01,0.1,1.0,10.0,100.0,1000.0,10000.0],"engine":"own","holdout":0.1,"image_size":0,"max_iterations":1000,"precision":"f32","seeds":[1],"tolerance":0.00001,"kind":"lbfgs"},"detail":{"classes":["a","b"]}}"#;
const OLD_HEADER: &str = "time,command,variant,protocol,protocol_hash,dataset,metric,value,ci_low,ci_high,top5,seed,n_train,n_test,split_hash,subject,run,method,arch,peer,pretrained_on,epoch,weights,weights_hash,recipe_hash,image_size,mean,std,device,threads,seconds,version,commit,argv";

#[test]
fn rows_of_the_first_release_are_read_and_their_files_stay_rectangular() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("results.jsonl"), format!("{OLD_ROW}\n")).unwrap();
    let cells = OLD_HEADER.split(',').map(|column| format!("old {column}")).collect::<Vec<_>>().join(",");
    fs::write(folder.path().join("results.csv"), format!("{OLD_HEADER}\n{cells}\n")).unwrap();
    let old = record::read(folder.path()).unwrap().remove(0);
    assert_eq!((old.schema, old.id.as_str(), old.subject.as_str(), old.value), (0, "", "full-l_mcl/peer-0", 6.40625));
    // What it followed is what ships today, so that it is grouped with new rows.
    assert_eq!(measures::changed_keys(&old.options), [""; 0]);
    let mut other = old.options.clone();
    (other["seeds"], other["holdout"]) = (serde_json::json!([2, 3]), serde_json::json!(0.2));
    assert_eq!(measures::changed_keys(&other), ["holdout=0.2"], "other seeds are measured alike");
    let lbfgs = measures::shipped("lbfgs").unwrap().protocol();
    assert_eq!((lbfgs.hash(), lbfgs.json()), (old.protocol_hash.clone(), old.options.clone()));

    let new = Record { command: "knn".into(), variant: "k=1".into(), id: "run-1/knn".into(), argv: "a, b".into(), ..Default::default() };
    record::append(folder.path(), std::slice::from_ref(&new)).unwrap();
    let rows = record::read(folder.path()).unwrap();
    assert_eq!(rows.iter().map(|r| (r.schema, r.id.as_str())).collect::<Vec<_>>(), [(0, ""), (record::SCHEMA, "run-1/knn")]);
    let mut csv = csv::Reader::from_path(folder.path().join("results.csv")).unwrap();
    assert_eq!(csv.headers().unwrap(), &csv::StringRecord::from(OLD_HEADER.split(',').collect::<Vec<_>>()));
    let rows: Vec<csv::StringRecord> = csv.records().map(Result::unwrap).collect();
    assert_eq!((rows.len(), &rows[1][1], &rows[1][2], &rows[1][33]), (2, "knn", "k=1", "a, b"));

    // A new file has the column.
    let folder = tempfile::tempdir().unwrap();
    record::append(folder.path(), &[new]).unwrap();
    let mut csv = csv::Reader::from_path(folder.path().join("results.csv")).unwrap();
    let at = csv.headers().unwrap().iter().position(|c| c == "id").unwrap();
    assert_eq!(&csv.records().next().unwrap().unwrap()[at], "run-1/knn");
}
