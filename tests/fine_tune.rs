//! `mcl-eval fine-tune`: its steps are PyTorch's, it learns what frozen features do not hold, no test image chooses anything, the same seed
//! gives the same bits, and what it cannot train it refuses.

mod support;

use std::fs;
use std::path::Path;

use mcl::data::Batch;
use mcl::eval::measures::fine_tune::training::{Tuned, factor};
use mcl::eval::record::{self, Record};
use mcl::nets::layers::Pass;
use mcl::nets::{self, Network};
use mcl::optim::Rule;
use mcl::params::Params;
use mcl::weights;
use serde_json::Value;
use support::trained::{done, eval, run_folder, stderr};
use support::write_colours;
use tch::{Device, Kind, Tensor};

const RULE: Rule = Rule::Sgd { momentum: 0.9, weight_decay: 1e-4, nesterov: false };

/// Weights and statistics by formula, the same as in tests/golden/fine_tune.py.
fn fill(params: &Params) {
    let _guard = tch::no_grad_guard();
    let named = params.named().into_iter().filter(|(name, _)| !name.contains("tracked"));
    for (place, (name, mut value)) in named.enumerate() {
        let wave = (Tensor::arange(value.numel() as i64, (Kind::Double, Device::Cpu)) * 0.7 + place as f64).sin() * 0.1;
        let norm = name.contains("bn") || name.contains("downsample.1");
        let one = if name.ends_with("running_var") || (norm && name.ends_with("weight")) { 1.0 } else { 0.0 };
        value.copy_(&(wave + one).view(value.size().as_slice()));
    }
}

fn apart(got: f64, wanted: f64) -> f64 {
    (got - wanted).abs() / wanted.abs().max(0.1)
}

/// Golden numbers of tests/golden/fine_tune.py: PyTorch in f64. Ten steps of all weights, of BatchNorm's statistics and of the rate.
#[test]
fn ten_steps_are_those_of_pytorch() {
    const RATES: [f64; 10] = [
        0.016666666666666666,
        0.03333333333333333,
        0.05,
        0.05,
        0.04752422169756048,
        0.040587245046468344,
        0.030563023348907863,
        0.019436976651092144,
        0.009412754953531664,
        0.002475778302439524,
    ];
    const LOSSES: [f64; 10] = [
        1.618740455303845,
        1.5911310749260823,
        1.5401637171396683,
        1.4848122706005198,
        1.4286647757380753,
        1.3906306105529642,
        1.3174579671565751,
        1.2612655585136157,
        1.20784006338745,
        1.1878610923139947,
    ];
    // First and last number, and the norm of all.
    const AFTER: [(&str, [f64; 3]); 7] = [
        ("conv1.weight", [-0.06972905337369649, -0.08264070723343751, 1.4791966626434263]),
        ("layer2.0.bn2.bias", [0.0843927987792919, -0.09318890063446107, 0.40173066641072136]),
        ("layer3.0.downsample.0.weight", [-0.09846098134331892, -0.1057839618385209, 3.2351297211034136]),
        ("bn1.running_mean", [0.028880068127698996, -0.031106153223049295, 0.10315796741416229]),
        ("layer3.0.bn1.running_var", [2.695278869743005, 6.617630213321764, 57.47586724881973]),
        ("fc.weight", [-0.03426585945624113, -0.012768271955280517, 1.3685781121552596]),
        ("fc.bias", [-0.06217025353724459, 0.06867374088302311, 0.12109852889832141]),
    ];
    tch::set_num_threads(1);
    let arch = nets::find("resnet8").unwrap();
    let (_, trained) = Network::build(arch, 5, 1, Device::Cpu, Kind::Float);
    fill(&trained);
    let mut tuned = Tuned::new(arch, &trained, 5, RULE, 2, Device::Cpu);
    fill(&tuned.params); // the classifier too: PyTorch has no fresh one of ours
    let images = (Tensor::arange(6 * 3 * 16 * 16, (Kind::Double, Device::Cpu)) * 0.37).sin().view([6, 3, 16, 16]).to_kind(Kind::Float);
    let labels = Tensor::from_slice(&[0i64, 1, 2, 3, 4, 0]);
    let batch = Batch { views: vec![images], index: labels.shallow_clone(), labels, noise: 1 };
    for (step, (rate, loss)) in RATES.into_iter().zip(LOSSES).enumerate() {
        let lr = 0.05 * factor(step, 10, 0.3);
        assert!((lr - rate).abs() < 1e-15, "step {step}: rate {lr}, PyTorch's {rate}");
        let got = tuned.step(&batch, lr).double_value(&[]);
        assert!(apart(got, loss) < 1e-4, "step {step}: loss {got}, PyTorch's {loss}");
    }
    for (name, wanted) in AFTER {
        let (_, value) = tuned.params.all().find(|(n, _)| n == name).unwrap();
        let flat = value.to_kind(Kind::Double).reshape([-1]);
        let got = [flat.double_value(&[0]), flat.double_value(&[-1]), flat.norm().double_value(&[])];
        assert!(got.iter().zip(wanted).all(|(g, w)| apart(*g, w) < 1e-3), "{name}: {got:?}, PyTorch's {wanted:?}");
    }
}

/// What is trained starts as the network that was measured, but for its classifier; and it is a copy.
#[test]
fn a_copy_starts_where_the_network_ended() {
    let images = (Tensor::arange(4 * 3 * 32 * 32, (Kind::Float, Device::Cpu)) * 0.37).sin().view([4, 3, 32, 32]);
    let labels = Tensor::from_slice(&[0i64, 1, 2, 0]);
    for name in ["resnet8", "wrn_16_1", "shufflenet_v2_x0_5_cifar", "hcgnet_a1", "vgg8", "mobile_half", "shuffle_v1"] {
        let arch = nets::find(name).unwrap();
        let (net, params) = Network::build(arch, 7, 1, Device::Cpu, Kind::Float);
        let statistics: Vec<&(String, Tensor)> = params.buffers.iter().filter(|(n, _)| n.ends_with("running_mean")).collect();
        tch::no_grad(|| statistics.iter().for_each(|(_, t)| drop(t.shallow_clone().fill_(0.01))));
        let answer = || tch::no_grad(|| net.forward(&images, Pass::EVAL).feat().copy());
        let before = answer();
        let mut tuned = Tuned::new(arch, &params, 3, RULE, 5, Device::Cpu);
        let classifier = format!("{}.", arch.classifier);
        for ((name, own), (of, theirs)) in params.all().zip(tuned.params.all()) {
            assert_eq!(name, of);
            assert!(name.starts_with(&classifier) || own == theirs, "{name}");
        }
        let batch = Batch { views: vec![images.shallow_clone()], labels: labels.shallow_clone(), index: labels.shallow_clone(), noise: 1 };
        let losses: Vec<f64> = (0..3).map(|_| tuned.step(&batch, 0.001).double_value(&[])).collect();
        assert!(losses.iter().all(|l| l.is_finite()), "{name}: {losses:?}");
        let moved = params.vars.iter().zip(&tuned.params.vars).filter(|((n, a), (_, b))| !n.starts_with(&classifier) && a != b).count();
        let all = params.vars.iter().filter(|(n, _)| !n.starts_with(&classifier)).count();
        assert!(moved == all, "{name}: {moved} of {all} weights moved");
        assert_eq!(answer(), before, "{name}: the network itself moved");
    }
}

/// Few passes over few small images.
const SHORT: &[&str] =
    &["--image-size", "16", "--set", "batch=16", "--set", "epochs=8", "--set", "lrs=[0.02,0.1]", "--threads", "1", "--json"];

fn tuned(root: &Path, args: &[&str]) -> Vec<Record> {
    let output = done(eval(root, &[&["fine-tune", "--run", "runs/one", "--peer", "0"], args, SHORT].concat()));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    serde_json::from_value(json["results"].clone()).unwrap()
}

/// A network that says the same of every image: its last norms have no weight.
fn say_nothing(file: &Path) {
    let arch = nets::find("resnet8").unwrap();
    let (_, params) = Network::build(arch, 32, 1, Device::Cpu, Kind::Float);
    let _guard = tch::no_grad_guard();
    for (name, value) in &params.vars {
        match name.as_str() {
            "layer3.0.bn2.weight" | "layer3.0.downsample.1.weight" => drop(value.shallow_clone().zero_()),
            "layer3.0.bn2.bias" => drop(value.shallow_clone().fill_(0.1)),
            _ => {}
        }
    }
    let meta = weights::open(file, None, Device::Cpu, &Default::default()).unwrap().meta.unwrap();
    weights::save_safetensors(file, &params.named(), &meta).unwrap();
}

#[test]
fn it_learns_where_frozen_features_say_nothing_and_the_same_again_with_the_same_seed() {
    let root = tempfile::tempdir().unwrap();
    let run = run_folder(root.path(), "one", 1);
    let file = run.join("networks/peer-0.safetensors");
    say_nothing(&file);
    write_colours(&root.path().join("data"));
    let before = fs::read(&file).unwrap();
    let on = ["--dataset", "cifar10", "--data", "data"];
    let rows = tuned(root.path(), &[&on[..], &["--images", "200", "--seeds", "1,2"]].concat());
    let again = tuned(root.path(), &[&on[..], &["--images", "200", "--seeds", "2"]].concat());
    assert_eq!(rows.len(), 2);
    for row in &rows {
        assert_eq!((row.command.as_str(), row.variant.as_str(), row.n_train, row.n_test), ("fine-tune", "images=200", 200, 100));
        assert_eq!((row.image_size, row.mean, row.protocol.as_str()), (16, [0.5; 3], "fine-tune"));
        let chosen = &row.detail["chosen"];
        let tried: Vec<f64> = serde_json::from_value(chosen["holdout_top1"].clone()).unwrap();
        // 40 images chose.
        assert!(chosen["held_out"] == 40 && tried.len() == 2 && tried.iter().all(|t| (t / 2.5).fract() == 0.0), "{chosen}");
        let best = if tried[1] > tried[0] { 0.1 } else { 0.02 };
        assert_eq!(chosen["lr"].as_f64(), Some(best), "{chosen}");
        let draw = fs::read_to_string(root.path().join(chosen["draw"]["file"].as_str().unwrap())).unwrap();
        assert!(draw.lines().count() == 201 && draw.contains(chosen["draw"]["sha256"].as_str().unwrap()));
    }
    assert_ne!(rows[0].detail["chosen"]["draw"]["sha256"], rows[1].detail["chosen"]["draw"]["sha256"], "every seed draws its own");
    assert_eq!((rows[1].value, &rows[1].detail), (again[0].value, &again[0].detail), "the same seed");
    assert_eq!(fs::read(&file).unwrap(), before);
    assert_eq!(record::read(&run).unwrap().len(), 3);
    // Of ten classes a classifier on features that are all the same can know one.
    let probe = ["linear-probe", "--run", "runs/one", "--peer", "0", "--protocol", "lbfgs", "--image-size", "16"];
    done(eval(root.path(), &[&probe[..], &on[..]].concat()));
    let frozen = record::read(&run).unwrap().pop().unwrap();
    println!("fine-tuned on 200 images {:.2} and {:.2}, frozen on 320 {:.2}", rows[0].value, rows[1].value, frozen.value);
    assert!(
        frozen.value == 10.0 && rows.iter().all(|row| row.value > 60.0),
        "{} {}, frozen {}",
        rows[0].value,
        rows[1].value,
        frozen.value
    );
}

#[test]
fn no_test_image_chooses_anything() {
    let root = tempfile::tempdir().unwrap();
    run_folder(root.path(), "one", 1);
    let asked = ["--dataset", "cifar10", "--data", "data", "--images", "all"];
    let data = root.path().join("data");
    write_colours(&data);
    let honest = tuned(root.path(), &asked).remove(0);
    // Test images whose labels are all wrong: whoever peeked would choose something else.
    let file = data.join("cifar-10-batches-bin/test_batch.bin");
    let mut bytes = fs::read(&file).unwrap();
    bytes.chunks_exact_mut(1 + 3 * 32 * 32).for_each(|image| image[0] = (image[0] + 1) % 10);
    fs::write(&file, bytes).unwrap();
    let lied = tuned(root.path(), &asked).remove(0);
    assert_eq!(honest.detail["chosen"], lied.detail["chosen"]);
    assert_eq!(honest.detail["predicted"], lied.detail["predicted"]);
    assert_eq!((honest.n_train, honest.variant.as_str()), (320, "images=320"));
    assert!(honest.value > 80.0 && lied.value < 20.0, "{} {}", honest.value, lied.value);
}

#[test]
fn a_rate_that_diverges_is_not_chosen_and_none_left_is_said() {
    let root = tempfile::tempdir().unwrap();
    run_folder(root.path(), "one", 1);
    let tune = |lrs: &'static str| {
        let args = ["fine-tune", "--run", "runs/one", "--peer", "0", "--dataset", "synthetic", "--image-size", "16"];
        eval(root.path(), &[&args[..], &["--images", "64", "--set", "epochs=2", "--set", lrs, "--json"]].concat())
    };
    let output = done(tune("lrs=[0.01,1e25,1e30]"));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    let chosen = &json["results"][0]["detail"]["chosen"];
    assert!(chosen["lr"] == 0.01 && chosen["holdout_top1"][1].is_null() && chosen["holdout_top1"][2].is_null(), "{chosen}");
    assert!(stderr(&output).contains("learning rate 1e25: not finite any more in epoch 2, not chosen"), "{}", stderr(&output));
    for (lrs, with) in [("lrs=[1e25,1e30]", "any learning rate of [1e25, 1e30]"), ("lrs=[1e30]", "learning rate 1e30 on all images")] {
        let output = tune(lrs);
        let said = stderr(&output);
        let last = said.lines().last().unwrap_or_default();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(last.contains("one/peer-0: seed 1: fine-tuned with ") && last.contains(with) && last.contains("not finite"), "{said}");
    }
    assert_eq!(record::read(&root.path().join("runs/one")).unwrap().len(), 1);
}

#[test]
fn what_cannot_be_trained_is_refused() {
    let root = tempfile::tempdir().unwrap();
    run_folder(root.path(), "one", 1);
    let tune = ["fine-tune", "--run", "runs/one", "--dataset", "synthetic"];
    let with = |extra: &[&'static str]| [&tune[..], extra].concat();
    let cases: Vec<(Vec<&str>, &str)> = vec![
        (vec!["fine-tune", "--torchscript", "net.pt", "--dataset", "synthetic"], "--torchscript net.pt: fine-tune trains all weights"),
        (with(&["--layers", "1,last"]), "--layers 1: fine-tune trains the whole network"),
        (with(&["--images", "3"]), "images = 3; accepted: a number from 4, or \"all\""),
        (with(&["--set", "images=most"]), "images = \"most\"; accepted: a number from 4, or \"all\""),
        (with(&["--set", "batch=1"]), "batch = 1; accepted: 2 or more"),
        (with(&["--set", "epochs=0"]), "epochs = 0; accepted: 1 to 1000000"),
        (with(&["--set", "warmup=1.0"]), "warmup = 1.0; accepted: a part of all steps"),
        (with(&["--set", "lrs=[0.1,0.01]"]), "in rising order"),
        (with(&["--set", "lrs=[]"]), "lrs = []; accepted: numbers above 0"),
        (with(&["--set", "holdout=1.0"]), "holdout = 1.0; accepted: between 0 and 1"),
        (with(&["--set", "momentum=1.5"]), "momentum, weight_decay = [1.5,0.0001]"),
        (with(&["--seeds", "1,1"]), "seeds = [1,1]; accepted: at least one, each once"),
        (with(&["--set", "batch=1000000", "--image-size", "8192"]), "protocol: batch = 1000000: needs at least"),
        (with(&["--protocol", "lbfgs"]), "unknown protocol `lbfgs`; known: fine-tune"),
    ];
    for (args, expected) in cases {
        let output = eval(root.path(), &args);
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {message}");
        let last = message.lines().last().unwrap_or_default();
        assert!(last.starts_with("mcl-eval: ") && last.contains(expected), "{args:?}: {message}");
    }
}
