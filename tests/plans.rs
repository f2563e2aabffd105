//! Every plan of the paper is started once, at a size that takes seconds: what would fail after a day fails here. Every cell is checked at
//! both scales, and with MCL_TEST_LONG=1, as in CI, every kind of cell is trained, too.

mod support;

use std::path::Path;
use std::process::Command;
use std::sync::atomic::AtomicBool;

use mcl::data::sampler;
use mcl::experiment::table::{self, PLANS, Scale};
use mcl::methods::{self, Task};
use mcl::nets;
use mcl::recipe::Recipe;
use mcl::train::{self, Job};
use support::{EVAL, text};
use tch::Device;

/// The networks of a cell become ResNet-8, a second architecture WRN-16-2, on eight drawn images a class, for one epoch.
fn tiny(recipe: &Recipe, out: &Path) -> Recipe {
    let mut tiny = recipe.clone();
    let own = &recipe.cohort.archs;
    let archs: Vec<&str> = own.iter().map(|arch| if *arch == own[0] { "\"resnet8\"" } else { "\"wrn_16_2\"" }).collect();
    let archs = archs.join(", ");
    let mut sets = vec![
        "data.name=synthetic".to_string(),
        "data.per_class=8".into(),
        "data.fraction=1".into(),
        "data.image_size=16".into(),
        format!("data.holdout={}", recipe.data.holdout.min(2)),
        format!("cohort.archs=[{archs}]"),
        "train.batch=32".into(),
        "train.epochs=1".into(),
        "train.warmup=0".into(),
        "train.schedule=cosine".into(),
        "train.accumulate=1".into(),
    ];
    if ["mcl", "l_mcl"].contains(&recipe.method_name()) {
        sets.push("method.negatives=16".into());
    }
    tiny.save.every_minutes = 0.0;
    Recipe::parse(&tiny.to_toml(), &out.display().to_string(), &sets, &mcl::methods::names()).unwrap()
}

#[test]
fn every_plan_starts() {
    tch::set_num_threads(1);
    let folder = tempfile::tempdir().unwrap();
    // What differs between cells once they are tiny: a baseline of one plan is that of another.
    let mut started: Vec<String> = vec![];
    for shipped in PLANS {
        let plan = table::find(shipped.name).unwrap();
        let mut cells = plan.cells(Scale::Small).unwrap();
        if std::env::var_os("MCL_TEST_LONG").is_some_and(|v| v == "1") {
            cells.extend(plan.cells(Scale::Paper).unwrap());
        } else {
            // The first column and the last: the baseline where there is one, and L-MCL or the strongest variation.
            let last = cells.pop();
            cells.truncate(1);
            cells.extend(last);
        }
        for cell in &cells {
            let out = folder.path().join(format!("{}-{}", shipped.name, started.len()));
            let recipe = tiny(&cell.recipe, &out);
            if started.contains(&recipe.hash()) {
                continue;
            }
            started.push(recipe.hash());
            println!("{}: {}, {} on {}", shipped.name, cell.column, cell.row, recipe.cohort.archs.join(", "));
            let stop = AtomicBool::new(false);
            let job = Job {
                recipe,
                out: out.clone(),
                data: None,
                device: Device::Cpu,
                threads: 1,
                resume: false,
                from: None,
                init: None,
                quiet: true,
                commit: "test",
                ranks: mcl::system::ranks::Ranks::ALONE,
                stop: &stop,
            };
            let summary = train::run(job).unwrap_or_else(|e| panic!("plan {}, {}: {e}", shipped.name, cell.column));
            assert!(summary.networks.iter().all(|n| n.accuracy.last.is_finite()), "{}", shipped.name);
        }
    }
    assert!(started.len() > PLANS.len() / 2, "{}", started.len());
}

/// Classes, training images of each and side of the official datasets.
fn official(name: &str) -> (usize, usize, usize) {
    match name {
        "cifar10" => (10, 5000, 32),
        "cifar100" => (100, 500, 32),
        "tiny_imagenet" => (200, 500, 64),
        "imagenet" => (1000, 732, 224), // the smallest class; the largest have 1,300
        other => panic!("{other} is in a plan now: say here how large it is"),
    }
}

/// Of every cell of every plan, at both scales: what is refused before the first step, without the data.
#[test]
fn every_cell_passes_the_checks_before_training() {
    let mut checked = 0;
    for shipped in PLANS {
        for scale in [Scale::Small, Scale::Paper] {
            for cell in table::find(shipped.name).unwrap().cells(scale).unwrap() {
                let (recipe, here) = (&cell.recipe, format!("{} {scale:?}, {}, {}", shipped.name, cell.row, cell.column));
                let (classes, of_each, side) = official(&recipe.data.name);
                let archs: Vec<_> = recipe.cohort.archs.iter().map(|name| nets::find(name).unwrap()).collect();
                if recipe.data.image_size == 0 {
                    assert!(archs.iter().all(|arch| arch.image_size == side as i64), "{here}: set data.image_size");
                }
                let kept = (of_each as f64 * recipe.data.fraction) as usize - recipe.data.holdout;
                // Some images of each class are enough to draw batches, two of them at least, and to build memory banks.
                let some = (2 * recipe.train.batch).div_ceil(classes).max(10);
                let labels: Vec<i64> = (0..classes * kept.min(some)).map(|i| (i % classes) as i64).collect();
                let task = Task::new(recipe, &archs, classes as i64, &labels, Device::Cpu);
                let method = (methods::find(recipe.method_name()).unwrap().build)(&task, recipe.method_options());
                let method = method.unwrap_or_else(|e| panic!("{here}: {e}"));
                let mixed = recipe.train.mixup > 0.0 || recipe.train.cutmix > 0.0;
                assert!(method.mixes() || !mixed, "{here}: the method learns from unmixed images only");
                let order = sampler::epoch(&labels, method.needs().sampling, recipe.train.batch, 1, 0);
                assert!(!order.unwrap_or_else(|e| panic!("{here}: {e}")).is_empty(), "{here}");
                checked += 1;
            }
        }
    }
    assert!(checked > 400, "{checked} cells");
}

/// A figure's plan from its command to its report: runs, measurements, pictures, cost, cells that were not run.
#[test]
fn the_figure_of_lambda_is_made_by_one_command() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("lambda");
    let sets = [
        "data.name=synthetic",
        "data.per_class=8",
        "data.fraction=1",
        "data.image_size=16",
        "cohort.archs=[\"resnet8\",\"resnet8\"]",
        "train.batch=32",
        "train.epochs=1",
    ];
    let mut command = Command::new(EVAL);
    command.args(["--threads", "1", "--device", "cpu", "table", "lambda", "--scale", "small", "--out"]).arg(&out);
    for set in sets {
        command.args(["--set", set]);
    }
    let made = command.output().unwrap();
    assert!(made.status.success(), "{}", text(&made));
    let report = std::fs::read_to_string(out.join("report.md")).unwrap();
    for part in [
        "same level gain",
        "networks 0 and 1, layers 1 and 3",
        "| l_mcl | resnet8, resnet8 | pi |",
        "All runs were changed by: data.name=synthetic",
    ] {
        assert!(report.contains(part), "`{part}` is not in {report}");
    }
}
