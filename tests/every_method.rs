//! What every method must do, tried on small cohorts: step with finite terms, resume to the bit, take its own resolved options, and
//! refuse what it cannot do with the reason.

mod support;

use mcl::data::Batch;
use mcl::methods::{self, Clock, METHODS, Task};
use mcl::optim::schedule::ramp;
use mcl::train::step::StepReport;
use support::method_tests::*;
use tch::{Kind, Tensor};

#[test]
fn every_method_has_a_trial() {
    for spec in METHODS {
        assert!(
            TRIALS.iter().any(|(name, ..)| *name == spec.name),
            "method {0} has no trial: add a line (\"{0}\", its options, the sizes of cohort it takes) to TRIALS in tests/support/method_tests.rs",
            spec.name
        );
    }
    for (name, ..) in TRIALS {
        assert!(
            METHODS.iter().any(|m| m.name == *name),
            "TRIALS in tests/support/method_tests.rs tries {name}, which is no method: delete its line"
        );
    }
}

#[test]
fn every_method_steps_with_finite_terms_and_lowers_the_loss_of_the_networks() {
    for (name, options, sizes) in TRIALS {
        for &count in *sizes {
            let mut engine = engine(name, options, count, 3);
            begin(&mut engine, 0, 0);
            let task_of = |report: &StepReport| report.terms.iter().filter(|t| t.name == "task").map(|t| value(&t.value)).sum::<f64>();
            let batch = batch_for(&engine, 0);
            let mut last = f64::NAN;
            let mut first = f64::NAN;
            for i in 0..15 {
                let report = engine
                    .step(
                        &[Batch { views: batch.views.iter().map(Tensor::shallow_clone).collect(), ..labelled(&batch.labels) }],
                        Clock { lr: 0.02, ..clock(0, i) },
                        None,
                    )
                    .unwrap();
                assert!(report.terms.iter().all(|t| value(&t.value).is_finite()), "{name} {options} M={count}");
                last = task_of(&report);
                if i == 0 {
                    first = last;
                }
            }
            assert!(last < 0.7 * first, "{name} {options} M={count}: task went from {first} to {last}");
        }
    }
}

#[test]
fn a_saved_state_restored_elsewhere_steps_to_the_same_bits() {
    for (name, options, sizes) in TRIALS {
        for &count in *sizes {
            let mut one = engine(name, options, count, 3);
            begin(&mut one, 0, 0);
            step(&mut one, 0, 0);
            begin(&mut one, 1, 1);
            step(&mut one, 1, 1);
            let saved = copies(&one);
            // Another seed: nothing may come from anywhere but the state.
            let mut two = engine(name, options, count, 4);
            let live = two.state();
            assert_eq!(live.len(), saved.len(), "{name} {options}: names of the state are not unique, or depend on the seed");
            tch::no_grad(|| live.iter().for_each(|(n, t)| t.shallow_clone().copy_(&saved[n])));
            let (a, b) = (step(&mut one, 1, 2), step(&mut two, 1, 2));
            for (x, y) in a.terms.iter().zip(&b.terms) {
                assert!(x.name == y.name && same(&x.value, &y.value), "{name} {options} M={count}: {} differs", x.name);
            }
            let (a, b) = (copies(&one), copies(&two));
            for (n, t) in &a {
                assert!(same(t, &b[n]), "{name} {options} M={count}: {n} differs after the step");
            }
        }
    }
}

#[test]
fn resolved_options_build_the_same_method() {
    for (name, options, sizes) in TRIALS {
        let archs = archs(&vec!["resnet8"; sizes[0]]);
        let first = try_build(name, options, &archs, Kind::Float, 1).unwrap().options();
        let again = try_build(name, &first.to_string(), &archs, Kind::Float, 1).unwrap().options();
        assert_eq!(first, again, "{name}");
        for key in options.parse::<toml::Table>().unwrap().keys() {
            assert!(first.contains_key(key), "{name}: {key} is not among its resolved options");
        }
    }
}

#[track_caller]
fn refused(name: &str, options: &str, names: &[&str], message: &str) {
    let error =
        try_build(name, options, &archs(names), Kind::Float, 1).err().unwrap_or_else(|| panic!("{name} {options} {names:?} was accepted"));
    assert_eq!(error.exit_code(), 2);
    assert!(error.to_string().contains(message), "{error}");
}

#[test]
fn what_a_method_cannot_do_is_refused_with_the_reason() {
    refused("dml", "", &["resnet8"], "dml needs 2 networks or more and [cohort] archs has 1");
    refused("dml", "temperature = 0.0", &["resnet8", "resnet8"], "[method] temperature = 0; accepted: a number above 0");
    refused(
        "dml",
        "temprature = 2.0",
        &["resnet8", "resnet8"],
        "unknown field `temprature` (did you mean `temperature`?), expected `temperature`",
    );
    refused("dml", "preset = 'mine'", &["resnet8", "resnet8"], "[method] preset = \"mine\"; accepted: \"paper\", \"original\"");
    refused(
        "one",
        "",
        &["resnet8", "resnet20"],
        "one needs networks of one architecture and [cohort] archs has resnet8 and resnet20: they are branches of one trunk",
    );
    refused("one", "weight = -1.0", &["resnet8", "resnet8"], "[method] weight = -1; accepted: 0 or more");
    refused("okddip", "", &["resnet8", "resnet8"], "okddip needs 3 networks or more");
    refused("okddip", "", &["resnet8", "resnet8", "resnet20"], "set method.branch=false");
    refused("okddip", "branch = false", &["resnet8", "resnet110", "resnet8"], "resnet8 has 64 and resnet110 has 256");
    refused("kdcl", "teacher = 'best'", &["resnet8", "resnet8"], "unknown variant `best`");
    refused("afd", "adam_lr = -1.0", &["resnet8", "resnet8"], "[method] adam_lr = -1; accepted: a number above 0");
    refused("pcl", "branch = true", &["resnet8", "resnet20"], "set method.branch=false");
    refused("pcl", "momentum = 1.0", &["resnet8", "resnet8"], "[method] momentum = 1; accepted: 0 up to, but without, 1");
    refused("ffsd", "", &["resnet8", "resnet20"], "ffsd needs networks of one architecture");
    refused("mcl", "branch = true", &["resnet8", "resnet20"], "set method.branch=false");
    refused("mcl", "dim = 0", &["resnet8", "resnet8"], "[method] dim = 0; accepted: 1 to 65536");
    refused("ckd_mkt", "", &["resnet8"], "ckd_mkt needs 2 networks or more");
    refused("ckd_mkt", "pretrain_epochs = 0", &["resnet8", "resnet8"], "self-teachers that know nothing");
    let (nets, labels) = (archs(&["resnet8", "resnet8"]), labels());
    // Without held-out images kdcl takes a teacher that needs none; the general one is refused where it is asked for.
    let kdcl = |options: &str| {
        let task = Task { holdout: 0, ..task(&nets, &labels, Kind::Float, 1) };
        (methods::find("kdcl").unwrap().build)(&task, options.parse().unwrap())
    };
    assert_eq!(kdcl("").unwrap().options()["teacher"].as_str(), Some("linear"));
    let error = kdcl("teacher = 'general'").err().unwrap();
    assert!(error.exit_code() == 2 && error.to_string().contains("set data.holdout=20"), "{error}");
}

#[test]
fn the_ramp() {
    // exp(-5 (1 - e/80)^2) in float64 (Laine and Aila 2017).
    for (epoch, wanted) in [(0, 0.0067379470), (20, 0.0600546679), (40, 0.2865047969), (60, 0.7316156289), (80, 1.0), (200, 1.0)] {
        close(ramp(epoch, 80), wanted, 1e-10);
    }
    assert_eq!(ramp(0, 0), 1.0);
}
