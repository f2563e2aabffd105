//! Every registered method through the trainer, on noisy images of ten colours with ResNet-8: it learns, resumes to the bit, ships
//! plain networks.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use mcl::data::Loader;
use mcl::error::Error;
use mcl::methods::METHODS;
use mcl::nets::layers::Pass;
use mcl::nets::{self, Network};
use mcl::recipe::Recipe;
use mcl::train::{self, Job, Summary};
use mcl::weights::{self, LoadOptions};
use rand::{Rng, SeedableRng};
use tch::{Device, Kind};

/// 32 noisy images of each of ten colours for training and 10 for testing, in CIFAR-10's binary format.
fn write_colours(folder: &Path) {
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

fn recipe(method: &str, count: usize, options: &str) -> Recipe {
    let names: Vec<&str> = METHODS.iter().map(|m| m.name).collect();
    let archs = vec!["\"resnet8\""; count].join(", ");
    let text = format!(
        "[data]\nname = \"cifar10\"\nholdout = 2\nimage_size = 16\n[cohort]\narchs = [{archs}]\n[train]\nbatch = 16\nepochs = 2\nlr = 0.05\n[method]\nname = \"{method}\"\n{options}"
    );
    Recipe::parse(&text, method, &[], &names).unwrap()
}

fn run(recipe: &Recipe, data: &Path, out: &Path, stop: bool) -> mcl::error::Result<Summary> {
    tch::set_num_threads(1);
    let stop = AtomicBool::new(stop);
    train::run(Job {
        recipe: recipe.clone(),
        out: out.into(),
        data: Some(data.into()),
        device: Device::Cpu,
        threads: 1,
        resume: true,
        from: None,
        init: None,
        quiet: true,
        stop: &stop,
    })
}

/// The method's tables of sizes: okddip needs three.
fn sizes(method: &str) -> &'static [usize] {
    if method == "okddip" { &[3] } else { &[2, 3] }
}

fn learns_resumes_and_ships(method: &str, count: usize) {
    let options = if method == "l_mcl" { "meta_every = 20\nhvp = \"difference\"" } else { "" };
    let recipe = recipe(method, count, options);
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path();
    write_colours(data);
    let (whole, broken) = (folder.path().join("whole"), folder.path().join("broken"));
    let summary = run(&recipe, data, &whole, false).unwrap();

    let best = summary.networks.iter().map(|n| n.last).fold(0.0, f64::max);
    assert!(best > 30.0, "{method} x {count}: {best} % after two epochs, and chance is 10");
    assert_eq!(summary.epochs, if method == "ckd_mkt" { 4 } else { 2 });
    assert_eq!(summary.networks.len(), if method == "ffsd" { 1 } else { count }, "{method}: networks shipped");

    // Stopped after the first step, three times: each sitting goes on where the last one was.
    for _ in 0..3 {
        assert!(matches!(run(&recipe, data, &broken, true), Err(Error::Interrupted(_))));
    }
    run(&recipe, data, &broken, false).unwrap();
    let state = |run: &Path| std::fs::read(run.join("checkpoints/last/state.safetensors")).unwrap();
    assert!(state(&whole) == state(&broken), "{method} x {count}: a resumed run ends elsewhere");

    // What ships is the plain architecture, and it answers as it did when it was measured.
    let dataset = mcl::data::open("cifar10", Some(data), &mcl::data::Options::default()).unwrap().resized(16).unwrap();
    let (best, file) = (summary.best.unwrap(), &summary.shipped[0]);
    let arch = nets::find("resnet8").unwrap();
    let (net, params) = Network::build(arch, 10, 99, Device::Cpu, Kind::Float);
    weights::load_into(&params, &weights::read(file).unwrap(), arch, &LoadOptions::default()).unwrap();
    let (mut right, mut all) = (0, 0);
    for batch in Loader::eval(&dataset.test, 100, dataset.test_transform()) {
        let batch = batch.unwrap();
        let answers = tch::no_grad(|| net.forward(&batch.views[0], Pass::EVAL)).logit().argmax(-1, false);
        right += answers.eq_tensor(&batch.labels).sum(Kind::Int64).int64_value(&[]);
        all += batch.labels.size()[0];
    }
    let rows = std::fs::read_to_string(whole.join("metrics.csv")).unwrap();
    let mut reader = csv::Reader::from_reader(rows.as_bytes());
    let column = reader.headers().unwrap().iter().position(|h| h == "test.peer0.top1").unwrap();
    let measured: f64 = reader.records().nth(best.epoch - 1).unwrap().unwrap()[column].parse().unwrap();
    assert!(
        (100.0 * right as f64 / all as f64 - measured).abs() < 1e-6,
        "{method} x {count}: shipped {right} of {all}, measured {measured} %"
    );
}

#[test]
fn every_method_learns_resumes_and_ships() {
    for spec in METHODS {
        for &count in sizes(spec.name) {
            let began = std::time::Instant::now();
            learns_resumes_and_ships(spec.name, count);
            eprintln!("{} x {count}: {:.1} s", spec.name, began.elapsed().as_secs_f64());
        }
    }
}
