//! Recipes: defaults, overrides, refusals, resuming.

use std::path::Path;

use mcl::recipe::Recipe;

const METHODS: &[&str] = &["baseline", "l_mcl"];

fn parse(text: &str, sets: &[&str]) -> Result<Recipe, String> {
    let sets: Vec<String> = sets.iter().map(|s| s.to_string()).collect();
    Recipe::parse(text, "test.toml", &sets, METHODS).map_err(|e| {
        assert_eq!(e.exit_code(), 2);
        e.to_string()
    })
}

/// The CIFAR-100 protocol of section 4.1.
#[test]
fn defaults_are_the_papers() {
    let recipe = parse("", &[]).unwrap();
    let t = &recipe.train;
    assert_eq!((t.batch, t.epochs, t.lr, t.momentum, t.weight_decay, t.nesterov), (128, 300, 0.1, 0.9, 5e-4, true));
    assert_eq!(recipe.data.name, "cifar100");
    assert_eq!(recipe.method_name(), "l_mcl");
}

#[test]
fn overrides_go_through_the_same_check() {
    let recipe =
        parse("[train]\nbatch = 64", &["train.batch=32", "data.name=synthetic", "train.schedule={ steps = [3, 5] }", "method.tau=0.07"])
            .unwrap();
    assert_eq!(recipe.train.batch, 32);
    assert_eq!(recipe.data.name, "synthetic");
    assert_eq!(recipe.method_options()["tau"].as_float(), Some(0.07));
    let error = parse("", &["train.bacth=32"]).unwrap_err();
    assert!(error.contains("--set train.bacth=32") && error.contains("unknown field `bacth`") && error.contains("`batch`"), "{error}");
    let error = parse("", &["train.batch=many"]).unwrap_err();
    assert!(error.contains("--set train.batch=many") && error.contains("[train]"), "{error}");
    for malformed in ["train.batch", "batch=3", ".=3"] {
        let error = parse("", &[malformed]).unwrap_err();
        assert!(error.contains(malformed) && error.contains("section.key=value"), "{error}");
    }
}

#[test]
fn faults_name_the_file_the_place_and_what_is_accepted() {
    let error = parse("[train]\nbatch = 64\nepoch = 3\n", &[]).unwrap_err();
    assert!(error.contains("test.toml") && error.contains("[train]") && error.contains("`epoch`") && error.contains("`epochs`"), "{error}");
    let error = parse("[trian]\nbatch = 64\n", &[]).unwrap_err();
    assert!(error.contains("[trian]") && error.contains("[train]"), "{error}");
    let error = parse("[train]\nbatch = = 3\n", &[]).unwrap_err();
    assert!(error.contains("line 2"), "{error}");
    let error = parse("[method]\nname = \"dmll\"", &[]).unwrap_err();
    assert!(error.contains("`dmll`") && error.contains("baseline"), "{error}");
    for (text, named) in [
        ("[data]\nfraction = 0.0", "fraction"),
        ("[data]\nfraction = 1.5", "fraction"),
        ("[train]\nlr = -1.0", "lr"),
        ("[train]\nbatch = 0", "batch"),
        ("[train]\nepochs = 5\nwarmup = 5", "warmup"),
        ("[cohort]\narchs = []", "archs"),
        ("[train]\nlr_for_batch = 0", "lr_for_batch"),
        ("[train]\nprecision = \"f8\"", "f8"),
    ] {
        let error = parse(text, &[]).unwrap_err();
        assert!(error.contains(named), "{text}: {error}");
    }
}

#[test]
fn options_of_other_methods_are_left_out() {
    let text = "[method]\nname = \"l_mcl\"\n[method.l_mcl]\ntau = 0.07\n[method.baseline]\nnothing = 1\n";
    assert_eq!(parse(text, &[]).unwrap().method_options().keys().collect::<Vec<_>>(), ["tau"]);
    assert_eq!(parse(text, &["method.name=baseline"]).unwrap().method_options().keys().collect::<Vec<_>>(), ["nothing"]);
    // What is said for the run itself wins over the table of the method.
    assert_eq!(parse(text, &["method.tau=0.2"]).unwrap().method_options()["tau"].as_float(), Some(0.2));
}

#[test]
fn a_resolved_recipe_reads_back_to_itself() {
    let recipe = parse("[train]\nschedule = { steps = [30, 60] }\n[data]\nholdout = 20", &["method.tau=0.07"]).unwrap();
    let again = parse(&recipe.to_toml(), &[]).unwrap();
    assert_eq!(recipe.to_toml(), again.to_toml());
    assert_eq!(recipe.hash(), again.hash());
    assert_ne!(recipe.hash(), parse("", &[]).unwrap().hash());
}

/// The text and hash of a run folder that release 0.1.0 made: a run is known by this hash, so keys that recipes get later must not
/// change it.
#[test]
fn a_recipe_of_the_first_release_keeps_its_hash() {
    let text = r#"[cohort]
archs = ["resnet8", "resnet8"]
[data]
fraction = 0.3
holdout = 2
image_size = 16
name = "synthetic"
[method]
alpha = 0.1
beta = 1.0
dim = 128
hvp = "exact"
inner_momentum = 0.0
inner_weight_decay = 0.0
matching = "weighted"
meta_every = 7
meta_steps = 2
mining = "batch"
mode = "paper"
name = "l_mcl"
negatives = 8192
preset = "cifar"
queue_length = 16384
tau = 0.1
temperature = 3.0
[method.terms]
ens = 1.0
gate = true
icl = 1.0
soft_icl = 1.0
soft_vcl = 1.0
task = 1.0
task_gate = 1.0
vcl = 1.0
[train]
batch = 16
epochs = 4
lr = 0.05
"#;
    assert_eq!(parse(text, &[]).unwrap().hash(), "923f94ff215f63fb");
}

/// A dataset's own options are part of the recipe; a key that the dataset does not take is refused.
#[test]
fn keys_of_data_that_nobody_takes_are_refused() {
    for set in ["data.fractoin=0.5", "data.anything={ a = 1 }"] {
        let error = parse("", &[set]).unwrap_err();
        let key = set.split(['.', '=']).nth(1).unwrap();
        assert!(error.contains(&format!("--set {set}: [data] unknown field `{key}`")) && error.contains("`fraction`"), "{error}");
    }
    let error = parse("[data]\nfraction = \"half\"", &[]).unwrap_err();
    assert!(error.contains("[data]") && error.contains("half"), "{error}");
    let mut recipe = parse("", &[]).unwrap();
    let before = recipe.hash();
    recipe.data.options.insert("shapes".into(), 3.into());
    assert_eq!(recipe.flat()["data.shapes"], "3");
    assert!(recipe.to_toml().contains("shapes = 3") && recipe.hash() != before);
}

#[test]
fn only_epochs_and_save_may_differ_on_resume() {
    let saved = parse("[train]\nbatch = 64", &[]).unwrap();
    let folder = Path::new("runs/x");
    parse("[train]\nbatch = 64\nepochs = 500\n[save]\nevery_epochs = 5", &[]).unwrap().check_resume(&saved, folder).unwrap();
    let error = parse("[train]\nbatch = 32\nlr = 0.2", &[]).unwrap().check_resume(&saved, folder).unwrap_err().to_string();
    assert!(error.contains("train.batch is 64 there and 32 now") && error.contains("train.lr"), "{error}");
}

/// Every recipe we ship is read and refers to things that exist.
#[test]
fn shipped_recipes_are_valid() {
    let methods = mcl::methods::names();
    let mut count = 0;
    for entry in std::fs::read_dir("protocols/pretrain").unwrap() {
        let path = entry.unwrap().path();
        let recipe = Recipe::read(&path, &[], &methods).unwrap_or_else(|e| panic!("{e}"));
        for arch in &recipe.cohort.archs {
            assert!(mcl::nets::find(arch).is_ok(), "{}: {arch}", path.display());
        }
        assert!(mcl::data::DATASETS.iter().any(|d| d.name == recipe.data.name), "{}", path.display());
        count += 1;
    }
    assert!(count >= 30, "{count} recipes");
}

#[test]
fn the_rate_follows_the_batch_only_where_it_is_asked_to() {
    let rate = |text: &str| parse(text, &[]).unwrap().train.rate();
    assert_eq!(rate("[train]\nlr = 0.1\nbatch = 1024"), 0.1);
    // Goyal et al. 2017: 0.1 for 256 images is 0.8 for 2048.
    assert_eq!(rate("[train]\nlr = 0.1\nlr_for_batch = 256\nbatch = 1024\naccumulate = 2"), 0.8);
}
