//! Every registered method through the trainer, on noisy images of ten colours with ResNet-8: it learns, resumes to the bit, ships
//! plain networks.

mod support;

use std::path::Path;
use std::sync::atomic::AtomicBool;

use mcl::data::Loader;
use mcl::error::Error;
use mcl::methods::METHODS;
use mcl::nets::layers::Pass;
use mcl::nets::{self, Network};
use mcl::recipe::Recipe;
use mcl::run::Summary;
use mcl::train::{self, Job};
use mcl::weights::{self, LoadOptions};
use support::write_colours;
use tch::{Device, Kind};

fn recipe(method: &str, count: usize, options: &str) -> Recipe {
    let names = mcl::methods::names();
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
        commit: "test",
        ranks: mcl::system::ranks::Ranks::ALONE,
        stop: &stop,
    })
}

fn learns_and_ships(method: &str, count: usize, resumed: bool) {
    let options = if method == "l_mcl" { "meta_every = 20\nhvp = \"difference\"" } else { "" };
    let recipe = recipe(method, count, options);
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path();
    write_colours(data);
    let (whole, broken) = (folder.path().join("whole"), folder.path().join("broken"));
    let summary = run(&recipe, data, &whole, false).unwrap();

    let best = summary.networks.iter().map(|n| n.accuracy.last).fold(0.0, f64::max);
    assert!(best > 30.0, "{method} x {count}: {best} % after two epochs, and chance is 10");
    assert_eq!(summary.epochs, if method == "ckd_mkt" { 4 } else { 2 });
    assert_eq!(summary.networks.len(), if method == "ffsd" { 1 } else { count }, "{method}: networks shipped");

    if resumed {
        // Stopped after its first step, twice: each sitting goes on where the last one was.
        for _ in 0..2 {
            assert!(matches!(run(&recipe, data, &broken, true), Err(Error::Interrupted(_))));
        }
        run(&recipe, data, &broken, false).unwrap();
        let state = |run: &Path| std::fs::read(run.join("checkpoints/last/state.safetensors")).unwrap();
        assert!(state(&whole) == state(&broken), "{method} x {count}: a resumed run ends elsewhere");
    }

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

/// The smallest cohort each allows.
#[test]
fn every_method_learns_resumes_and_ships() {
    for spec in METHODS {
        learns_and_ships(spec.name, if spec.name == "okddip" { 3 } else { 2 }, true);
    }
}

#[test]
fn every_method_takes_three_networks() {
    for spec in METHODS.iter().filter(|m| m.name != "okddip") {
        learns_and_ships(spec.name, 3, false);
    }
}
