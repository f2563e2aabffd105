//! Networks that teach and do not learn (`[cohort] frozen`): what the methods make of their logits, and runs with a teacher from a file.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use mcl::losses::terms::Terms;
use mcl::methods::{self, Frozen, METHODS, Method, Task};
use mcl::nets::Outputs;
use mcl::nets::layers::Mode;
use mcl::train::step::Engine;
use support::method_tests::*;
use support::{assert_refused, recipe, text, train};
use tch::{Kind, Tensor};

/// A method for so many networks of resnet8 that learn and so many that do not, in double precision.
fn taught(name: &str, options: &str, count: usize, frozen: usize) -> mcl::error::Result<Box<dyn Method>> {
    tch::set_num_threads(1);
    let archs = archs(&vec!["resnet8"; count]);
    (methods::find(name).unwrap().build)(&Task { frozen, ..task(&archs, &labels(), Kind::Double, 1) }, options.parse().unwrap())
}

/// Its losses where the first networks of the example learn and the rest teach.
fn losses(name: &str, options: &str, z: &[Tensor], y: &Tensor, learn: usize) -> Terms {
    let mut method = taught(name, options, learn, z.len() - learn).unwrap();
    method.taught_by(z[learn..].iter().map(Tensor::shallow_clone).collect());
    let outs: Vec<Outputs> = z[..learn].iter().map(answer).collect();
    method.losses(&outs, &labelled(y), clock(0, 0)).unwrap()
}

#[test]
fn a_single_student_learns_from_its_frozen_teacher() {
    let (z, y) = example();
    // torch.nn.functional.kl_div in float64 from the second network's logits to the first's, times T^2.
    for (t, forth) in [(1.0, 0.2981140681), (2.0, 0.3044571900), (3.0, 0.3013942399)] {
        let terms = losses("dml", &format!("temperature = {t:?}"), &z[..2], &y, 1);
        close(value(row(&terms, "mutual", Some(0))), forth, 1e-9);
        assert!(terms.rows.iter().all(|row| row.peer == Some(0)), "a network that does not learn has no rows");
        assert!(!reaches(row(&terms, "mutual", Some(0)), &z[1]), "nothing flows into a teacher");
    }
}

/// A frozen network counts as a peer with the same answers would; it only has no rows of its own.
#[test]
fn a_frozen_network_teaches_as_a_peer_does() {
    let (z, y) = example();
    for (name, options, term) in [
        ("dml", "", "mutual"),
        ("kdcl", "teacher = 'naive'", "ens"),
        ("kdcl", "teacher = 'minlogit'", "ens"),
        ("kdcl", "teacher = 'linear'", "ens"),
        ("kdcl", "teacher = 'general'", "ens"),
    ] {
        let all = losses(name, options, &z, &y, 3);
        for learn in [1, 2] {
            let some = losses(name, options, &z, &y, learn);
            for m in 0..learn {
                for term in ["task", term] {
                    close(value(row(&some, term, Some(m))), value(row(&all, term, Some(m))), 1e-12);
                }
            }
            assert_eq!(some.rows.len(), 2 * learn, "{name} {options}");
        }
    }
}

/// L-MCL has its logits as one more ensemble: the sum of Eq. 21 grows by one divergence, written out here.
#[test]
fn l_mcl_adds_the_divergence_to_the_teacher() {
    let archs = archs(&["resnet8", "resnet8"]);
    let (labels, temperature) = (labels(), 3.0);
    let teacher = (Tensor::arange(8 * CLASSES, (Kind::Float, tch::Device::Cpu)) * 1.3).sin().view([8, CLASSES]);
    let terms_of = |frozen: usize| {
        let task = Task { frozen, ..task(&archs, &labels, Kind::Float, 1) };
        let method = (methods::find("l_mcl").unwrap().build)(&task, "temperature = 3.0".parse().unwrap()).unwrap();
        let mut engine = Engine::of(&task, method);
        let batch = batch_for(&engine, 0);
        engine.method.prepare(&batch, clock(0, 0)).unwrap();
        engine.method.taught_by((0..frozen).map(|_| teacher.shallow_clone()).collect());
        let outs = engine.cohort.forward(&batch, Mode::Eval);
        let terms = engine.method.losses(&outs, &batch, clock(0, 0)).unwrap();
        (outs, terms)
    };
    let ((outs, with), (_, without)) = (terms_of(1), terms_of(0));
    for (m, own) in outs.iter().enumerate() {
        let (p, q) = ((&teacher / temperature).softmax(-1, Kind::Double), (own.logit() / temperature).softmax(-1, Kind::Double));
        let divergence = (&p * (p.log() - q.log())).sum(None) / 8.0 * temperature * temperature;
        let more = value(row(&with, "ens", Some(m))) - value(row(&without, "ens", Some(m)));
        close(more, value(&divergence), 1e-5);
        assert!(value(&divergence) > 0.01);
    }
}

#[test]
fn options_that_leave_a_teacher_nothing_to_say_are_refused() {
    for (name, options, why) in [
        ("kdcl", "weight = 0.0", "method.weight = 0"),
        ("mcl", "logit = 'none'", "method.logit = \"none\""),
        ("l_mcl", "terms = { ens = 0.0 }", "method.terms.ens = 0"),
    ] {
        let message = taught(name, options, 2, 1).err().unwrap_or_else(|| panic!("{name} took it")).to_string();
        assert!(message.contains(why) && message.contains("[cohort] frozen"), "{message}");
    }
    // Losses without the teacher's answer would be others than the recipe's.
    let (z, y) = example();
    let outs = [answer(&z[0])];
    assert!(taught("dml", "", 1, 1).unwrap().losses(&outs, &labelled(&y), clock(0, 0)).is_err());
}

const TEACHER: &str = r#"
[data]
name = "synthetic"
fraction = 0.1
holdout = 2
image_size = 16
[cohort]
archs = ["resnet8"]
[train]
batch = 16
epochs = 2
lr = 0.05
[method]
name = "baseline"
"#;

fn done(output: Output) -> String {
    assert!(output.status.success(), "{}", text(&output));
    text(&output)
}

/// A run of one network, and the file that shipped.
fn teacher(folder: &Path) -> PathBuf {
    let out = folder.join("teacher");
    done(train(&recipe(folder, TEACHER), &out, &["--quiet"]).output().unwrap());
    out.join("networks/peer-0.safetensors")
}

#[test]
fn a_run_learns_from_a_file_that_stays_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let file = teacher(folder.path());
    let before = fs::read(&file).unwrap();
    let sha256 = mcl::files::sha256(&before);
    let text_of =
        |method: &str, frozen: &str| TEACHER.replace("baseline", method).replace("[train]", &format!("frozen = {frozen}\n[train]"));
    let run = |name: &str, method: &str, frozen: &str, more: &[&str]| {
        train(&recipe(folder.path(), &text_of(method, frozen)), &folder.path().join(name), more).output().unwrap()
    };
    // The path is meant from the recipe's folder where it leads nowhere from here.
    let said = done(run("dml", "dml", "['teacher/networks/peer-0.safetensors']", &[]));
    // What it knows is measured on the test images first: the same as its own run said of the epoch that shipped.
    let line = said.lines().find(|line| line.contains("frozen 0: resnet8 of ")).unwrap_or_else(|| panic!("{said}"));
    let summary: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(folder.path().join("teacher/summary.json")).unwrap()).unwrap();
    let known: f64 = line.rsplit(' ').next().unwrap().parse().unwrap();
    let shipped = summary["networks"][0]["by_holdout"][0].as_f64().unwrap();
    assert!((known - shipped).abs() < 0.006, "{known} {summary}");
    // Only what learns ships, and the recipe that was kept says which file taught.
    let networks = fs::read_dir(folder.path().join("dml/networks")).unwrap();
    assert!(networks.map(|e| e.unwrap().file_name()).all(|name| name != "peer-1.safetensors"));
    assert!(fs::read_to_string(folder.path().join("dml/recipe.toml")).unwrap().contains(&sha256));
    assert!(fs::read(&file).unwrap() == before, "the teacher's file changed");

    // Another file of the same name does not go on with the run.
    let again = |more: &[&str]| run("dml", "dml", "['teacher/networks/peer-0.safetensors']", more);
    done(again(&["--resume", "--set", "train.epochs=3", "--quiet"]));
    let mut other = tch::Tensor::read_safetensors(&file).unwrap();
    other.iter_mut().filter(|(name, _)| name == "fc.bias").for_each(|(_, t)| *t = &*t + 1.0);
    let moved = folder.path().join("teacher/other.safetensors");
    tch::Tensor::write_safetensors(&other, &moved).unwrap();
    let output = run("dml", "dml", "[{ file = 'teacher/other.safetensors', arch = 'resnet8' }]", &["--resume", "--set", "train.epochs=4"]);
    assert_refused(&output, 2, &["sha256"]);

    // Every method that takes one runs with one; the others say why not.
    for method in METHODS {
        let frozen = "['teacher/networks/peer-0.safetensors']";
        let two = ["--set", "cohort.archs=['resnet8', 'resnet8']", "--set", "train.epochs=1", "--quiet"];
        let more = match method.name {
            "mcl" => [&two[..], &["--set", "method.logit=dml"]].concat(),
            _ => two.to_vec(),
        };
        let output = run(&format!("all-{}", method.name), method.name, frozen, &more);
        match method.frozen {
            Frozen::Teach(_) => drop(done(output)),
            Frozen::Refused(why) => assert_refused(&output, 2, &["[cohort] frozen", method.name, why]),
        }
    }
    let refused = |frozen: &str, parts: &[&str]| assert_refused(&run("no", "dml", frozen, &[]), 2, parts);
    refused("['nothing.pth']", &["[cohort] frozen nothing.pth"]);
    refused("[3]", &["frozen holds 3", "a list of paths"]);
    refused("[{ file = 'teacher/networks/peer-0.safetensors', mean = [0, 0, 0] }]", &["mean and std belong together"]);
    refused("[{ file = 'teacher/networks/peer-0.safetensors', arch = 'resnet20' }]", &["[cohort] frozen", "resnet8"]);
    let fewer: Vec<(String, Tensor)> =
        other.iter().map(|(name, t)| (name.clone(), if name.starts_with("fc.") { t.narrow(0, 0, 5) } else { t.shallow_clone() })).collect();
    tch::Tensor::write_safetensors(&fewer, folder.path().join("teacher/fewer.safetensors")).unwrap();
    refused("['teacher/fewer.safetensors']", &["its classifier has 5 classes and synthetic has 32"]);
}
