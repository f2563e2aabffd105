//! The commands of `mcl-eval`: wrong input gets one clear line, the registry drives flags, lists and protocols, and the report needs nothing
//! from outside.

mod support;

use std::fs;
use std::path::Path;

use mcl::eval::measures::{self, MEASURES};
use mcl::eval::probe;
use mcl::eval::protocol::Protocol;
use mcl::eval::record;
use mcl::weights;
use support::trained::{done, eval, run_folder, stderr};

#[test]
fn wrong_input_gets_one_line_and_exit_code_2() {
    let root = tempfile::tempdir().unwrap();
    run_folder(root.path(), "one", 1);
    fs::create_dir_all(root.path().join("runs/empty")).unwrap();
    let probe = ["linear-probe", "--run", "runs/one", "--dataset", "synthetic"];
    let with = |extra: &[&'static str]| [&probe[..], extra].concat();
    let cases: Vec<(Vec<&str>, &str)> = vec![
        (
            vec!["linear-probe", "--run", "runs/one", "--dataset", "cifar1000"],
            "unknown dataset `cifar1000` (did you mean `cifar100`?); known:",
        ),
        (vec!["knn", "--run", "runs/none", "--dataset", "synthetic"], "no run at runs/none"),
        (vec!["knn", "--dataset", "synthetic"], "no run at runs/latest; train one"),
        (vec!["accuracy", "--run", "runs/empty"], "runs/empty is no run: it has no recipe.toml; accepted: a folder"),
        (with(&["--peer", "2"]), "--peer 2: runs/one has 2 networks, 0 to 1"),
        (with(&["--peer", "best"]), "--peer best: runs/one chose none"),
        (with(&["--protocol", "papper"]), "unknown protocol `papper` (did you mean `paper`?); known: paper, sweep, lbfgs"),
        (with(&["--set", "epoch=3"]), "--set epoch=3: unknown key `epoch` (did you mean `epochs`?); known:"),
        (with(&["--set", "epochs=0"]), "epochs = 0; accepted: 1 to 1000000"),
        (with(&["--set", "lr=fast"]), "invalid type: string \"fast\", accepted: a number"),
        (with(&["--set", "milestones=[0.5,1.5]"]), "milestones = [0.5,1.5]; accepted: parts of all epochs between 0 and 1, or whole"),
        (with(&["--set", "seeds=[one]"]), "`[one]` is no list: texts in a list stand in quotes, as in 'seeds=[\"one\"]'"),
        (vec!["few-shot", "--run", "runs/one", "--dataset", "synthetic", "--shots", "100000"], "--shots 100000: class 0 has"),
        (vec!["knn", "--weights", "runs/one/networks/none.safetensors", "--dataset", "synthetic"], "none.safetensors"),
        (vec!["report", "--run", "runs/empty"], "is not a run"),
        (vec!["report", "--run", "runs/none"], "no run at runs/none"),
        (vec!["compare", "runs/one"], "required arguments were not provided: <B>"),
        (vec!["compare", "runs/one,runs/one", "runs/one"], "2 on the left, 1 on the right"),
        (vec!["compare", "runs/one,runs/../runs/one", "runs/one,runs/two"], "one run is one draw"),
        (with(&["--seeds", "1,2,1"]), "seeds = [1,2,1]; accepted: at least one, each once"),
        (vec!["knn", "--run", "runs/one", "--dataset", "synthetic", "--k", "5,5"], "ks = [5,5]; accepted: numbers from 1, each once"),
        (vec!["compare", "runs/one", "runs/one", "--dataset", "synthetic", "--protocol", "knn"], "unknown protocol `knn`; known: paper"),
        (vec!["compare", "runs/one", "runs/one", "--protocol", "sweep"], "required arguments were not provided: --dataset"),
        (vec!["tsne", "--run", "runs/one", "--set", "perplexity=5000"], "perplexity 5000"),
        (vec!["knn", "--run", "runs/one", "--datset", "synthetic"], "unexpected argument '--datset' found"),
        (vec!["knn", "--run", "runs/one"], "required arguments were not provided: --dataset"),
        (with(&["--peer", "first"]), "peer `first`; accepted: a number from 0, best, all"),
        (vec!["knn", "--run", "runs/one", "--dataset", "synthetic", "--k", "few"], "'few' for '--k <K>': accepted: a whole number, 0 or"),
        (vec!["kn", "--run", "runs/one"], "unrecognized subcommand 'kn' (did you mean `knn`?)"),
    ];
    for (args, expected) in cases {
        let output = eval(root.path(), &args);
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {message}");
        let last = message.lines().last().unwrap_or_default();
        assert!(last.starts_with("mcl-eval: ") && last.contains(expected), "{args:?}: {message}");
    }
}

#[test]
fn every_shipped_protocol_is_followed_and_takes_only_its_own_keys() {
    let all = MEASURES.iter().map(|m| m.protocols).chain([mcl::export::PROTOCOLS]);
    for (shipped, name) in all.flat_map(|ps| ps.iter().map(move |p| (ps, p.name))) {
        let protocol = Protocol::read(name, shipped).unwrap();
        assert_eq!(protocol.kind(), name);
        assert!(
            protocol.json()["kind"] == name && shipped.iter().any(|p| p.name == name && p.text.contains(&format!("\nkind = \"{name}\"")))
        );
        let key = if name == "export-coco" { "tolerance=1e-4" } else { "image_size=48" };
        let mut changed = protocol.clone();
        changed.change(key).unwrap();
        assert_ne!(protocol.hash(), changed.hash(), "{name}");
        assert!(changed.change("no_such_key=1").is_err());
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mine.toml");
    fs::write(&path, "kind = \"lbfgs\"\ncs = [1.0]\n").unwrap();
    let mine = Protocol::read(path.to_str().unwrap(), probe::PROTOCOLS).unwrap();
    assert_eq!((mine.kind(), mine.json()["cs"].to_string().as_str(), mine.json()["holdout"].as_f64()), ("lbfgs", "[1.0]", Some(0.1)));
}

#[test]
fn a_line_of_a_plan_is_refused_as_the_command_would() {
    for line in [
        "accuracy",
        "linear-probe --dataset stl10 --protocol lbfgs --seeds 1,2",
        "linear-probe --dataset synthetic --set epochs=3",
        "knn --dataset cifar100 --k 1,20 --peer all",
        "centroid --dataset cifar100 --set distances=[\"cosine\"]",
        "few-shot --dataset stl10 --shots 1,5 --tries 3",
        "fine-tune --dataset stl10 --images all --seeds 1,2,3 --set epochs=100",
        "fine-tune --peer all --dataset tiny_imagenet --layers last --set images=500",
        "tsne --peer 0 --dataset stl10 --set samples=1500",
        "cohort",
        "compare a b --dataset stl10 --protocol sweep",
    ] {
        measures::check_line(line).unwrap_or_else(|e| panic!("{line}: {e}"));
    }
    for (line, expected) in [
        ("", "names no measurement; known: accuracy, "),
        ("nn --dataset stl10", "unknown measurement `nn` (did you mean `knn`?); known: accuracy, "),
        ("knn", "--dataset"),
        ("knn --dataset stl11", "unknown dataset `stl11`"),
        ("knn --dataset stl10 --k 0", "ks = [0]; accepted: numbers from 1"),
        ("knn --dataset stl10 --datset x", "unexpected argument '--datset'"),
        ("knn --dataset stl10 --protocol paper", "unknown protocol `paper`; known: knn"),
        ("knn --dataset stl10 --weights w.pth --arch resnet9", "unknown architecture `resnet9`"),
        ("linear-probe --dataset stl10 --set epochs=0", "epochs = 0; accepted: 1 to 1000000"),
        ("linear-probe --dataset stl10 --protocol sweep --set lrs=[2.0,1.0]", "in rising order"),
        ("linear-probe --dataset stl10 --protocol lbfgs --set cs=[0.0]", "cs = [0.0]; accepted: numbers above 0"),
        ("centroid --dataset stl10 --set distances=[]", "distances = []; accepted: cosine, euclidean or both"),
        ("few-shot --fractions 0.5 --recipe r.toml", "--fractions trains runs of its own"),
        ("few-shot --dataset stl10 --tries 0", "tries = 0; accepted: 1 to 1000000"),
        ("fine-tune --dataset stl10 --torchscript net.pt", "a TorchScript file is frozen as it was traced"),
        ("fine-tune --dataset stl10 --set images=0", "images = 0; accepted: a number from 4, or \"all\""),
        ("tsne --engine fast", "fast"),
        ("compare a,b c", "2 on the left, 1 on the right"),
    ] {
        let message = measures::check_line(line).expect_err(line).to_string();
        assert!(message.contains(expected) && !message.contains('\n'), "{line}: {message}");
    }
}

#[test]
fn the_lists_and_help_texts_follow_the_registry() {
    let root = tempfile::tempdir().unwrap();
    let listed = String::from_utf8(done(eval(root.path(), &["list", "measures"])).stdout).unwrap();
    let protocols = String::from_utf8(done(eval(root.path(), &["list", "protocols"])).stdout).unwrap();
    for measure in MEASURES {
        let line = listed.lines().find(|l| l.split_whitespace().next() == Some(measure.name)).expect(measure.name);
        assert!(line.contains(measure.about), "{line}");
        let help = String::from_utf8(done(eval(root.path(), &[measure.name, "--help"])).stdout).unwrap();
        for protocol in measure.protocols {
            assert!(line.contains(protocol.name) && protocols.contains(protocol.name) && help.contains(protocol.name), "{}", protocol.name);
        }
    }
}

/// The newest run, the data that are there and the commands for them; for one that trains, how far it is.
#[test]
fn without_a_command_it_says_what_can_be_done_with_what_is_here() {
    let root = tempfile::tempdir().unwrap();
    let said = |args: &[&str]| String::from_utf8(done(eval(root.path(), args)).stdout).unwrap();
    let nothing = said(&[]);
    assert!(nothing.contains("none in runs/") && nothing.contains("mcl-train run quickstart") && nothing.contains("--help"), "{nothing}");
    let run = run_folder(root.path(), "one", 1);
    std::os::unix::fs::symlink("one", root.path().join("runs/latest")).unwrap();
    let synthetic = said(&[]);
    assert!(synthetic.contains("one: resnet8 and resnet8 on synthetic, baseline, 1 epoch, test top-1 5.50 %"), "{synthetic}");
    assert!(synthetic.contains("mcl-eval linear-probe --dataset synthetic") && synthetic.contains("mcl-eval report"), "{synthetic}");
    // Data that are there are proposed, and where they are looked for is part of the command.
    support::write_colours(&root.path().join("data"));
    let colours = said(&[]);
    assert!(
        colours.contains("data/cifar-10-batches-bin") && colours.contains("linear-probe --dataset cifar10 --protocol lbfgs"),
        "{colours}"
    );
    support::write_colours(&root.path().join("elsewhere"));
    assert!(said(&["--data", "elsewhere"]).contains("linear-probe --dataset cifar10 --protocol lbfgs --data elsewhere"));
    let json: serde_json::Value = serde_json::from_str(&said(&["--json"])).unwrap();
    assert_eq!((&json["datasets"][0]["name"], json["next"].as_array().unwrap().len()), (&"cifar10".into(), 3));

    // Without networks: stopped, or, while somebody holds its lock, still training.
    fs::rename(run.join("networks"), run.join("moved")).unwrap();
    let refused = |expected: &str| {
        let output = eval(root.path(), &["accuracy"]);
        assert_eq!(output.status.code(), Some(2));
        assert!(stderr(&output).contains(expected), "{}", stderr(&output));
    };
    refused("runs/latest (one) was stopped after 1 epoch; its command with --out runs/one --resume finishes it");
    let resume = "mcl-train run runs/one/recipe.toml --out runs/one --resume";
    assert!(said(&[]).contains(resume), "{}", said(&[]));
    // Without a folder it would begin another run.
    let output =
        std::process::Command::new(support::TRAIN).args(["run", "quickstart", "--resume"]).current_dir(root.path()).output().unwrap();
    assert_eq!((output.status.code(), stderr(&output).contains("e.g. --out runs/one")), (Some(2), true), "{}", stderr(&output));
    let lock = fs::File::create(run.join("lock")).unwrap();
    lock.lock().unwrap();
    refused("runs/latest (one) is still training; done so far: 1 epoch");
    assert!(said(&[]).contains("is still training"));
}

/// Scripts for shells and manual pages have every measurement, and names where names are asked for. bash itself completes with its script.
#[test]
fn completions_and_manual_pages_follow_the_registries() {
    let root = tempfile::tempdir().unwrap();
    let said = |program: &str, args: &[&str]| {
        let output = std::process::Command::new(program).args(args).current_dir(root.path()).output().unwrap();
        String::from_utf8(done(output).stdout).unwrap()
    };
    for shell in ["bash", "zsh", "fish"] {
        let script = said(support::EVAL, &["completions", shell]);
        assert!(MEASURES.iter().all(|m| script.contains(m.name)) && script.contains("tiny_imagenet"), "{shell}");
        // fish is told of flags' values only, and a recipe is no flag.
        assert!(shell == "fish" || said(support::TRAIN, &["completions", shell]).contains("cifar100-resnet32-x3"), "{shell}");
    }
    for (program, words, expected) in [
        (support::EVAL, "mcl-eval kn", "knn"),
        (support::EVAL, "mcl-eval knn --dataset tiny", "tiny_imagenet"),
        (support::EVAL, "mcl-eval linear-probe --protocol l", "lbfgs"),
        (support::EVAL, "mcl-eval table lam", "lambda"),
        (support::EVAL, "mcl-eval data fetch fash", "fashion_mnist"),
        (support::EVAL, "mcl-eval transfer --to tiny", "tiny_imagenet"),
        (support::EVAL, "mcl-eval export --to mm", "mmdet"),
        (support::EVAL, "mcl-eval knn --device cu", "cuda:0"),
        // Flags that help does not show.
        (support::EVAL, "mcl-eval knn --i", "--image-size"),
        (support::TRAIN, "mcl-train run quick", "quickstart"),
    ] {
        let name = words.split(' ').next().unwrap();
        fs::write(root.path().join(name), said(program, &["completions", "bash"])).unwrap();
        let words: Vec<&str> = words.split(' ').collect();
        let (last, before) = (words[words.len() - 1], words[words.len() - 2]);
        let ask = format!(
            "source ./{name}; COMP_WORDS=({}); COMP_CWORD={}; _{} {name} {last} {before}; echo \"${{COMPREPLY[@]}}\"",
            words.join(" "),
            words.len() - 1,
            name.replace('-', "__")
        );
        assert_eq!(said("bash", &["-c", ask.as_str()]).trim(), expected, "{words:?}");
    }
    assert!(said(support::EVAL, &["man"]).contains(".TH mcl-eval 1"));
    said(support::EVAL, &["man", "--out", "pages"]);
    for measure in MEASURES {
        let page = fs::read_to_string(root.path().join(format!("pages/mcl-eval-{}.1", measure.name))).expect(measure.name);
        assert!(page.contains(".SH SYNOPSIS"), "{}", measure.name);
    }
}

#[test]
fn networks_given_by_file_have_the_same_flags_everywhere() {
    let root = tempfile::tempdir().unwrap();
    let run = run_folder(root.path(), "one", 1);
    let mut tensors = weights::read(&run.join("networks/peer-0.safetensors")).unwrap().tensors;
    tensors.iter_mut().for_each(|(name, _)| *name = format!("encoder.{name}"));
    weights::save_pth(&root.path().join("w.pth"), &tensors).unwrap();
    fs::create_dir_all(root.path().join("pictures")).unwrap();
    image::RgbImage::from_pixel(32, 32, image::Rgb([9, 99, 199])).save(root.path().join("pictures/a.png")).unwrap();
    let file = ["--weights", "w.pth", "--arch", "resnet8", "--strip", "encoder."];
    let commands = [
        vec!["knn", "--dataset", "synthetic", "--k", "1"],
        vec!["embed", "--images", "pictures", "--out", "features.safetensors"],
        vec!["export", "--to", "safetensors", "--out", "exported"],
    ];
    for command in &commands {
        let with = |extra: &[&str]| eval(root.path(), &[command, &file[..], extra].concat());
        let output = with(&[]);
        assert_eq!(output.status.code(), Some(2), "{command:?}");
        assert!(stderr(&output).contains("normalised with; add --normalisation imagenet"), "{command:?}: {}", stderr(&output));
        for (std, shown) in [("0.2,0,0.2", "0"), ("0.2,nan,0.2", "NaN"), ("0.2,-1,0.2", "-1")] {
            let output = with(&["--mean", "0.5,0.5,0.5", "--std", std]);
            assert_eq!(output.status.code(), Some(2), "{command:?} {std}: {}", stderr(&output));
            let message = format!("channel standard deviation {shown}; accepted: finite numbers above 0");
            assert!(stderr(&output).contains(&message), "{command:?} {std}: {}", stderr(&output));
        }
        done(with(&["--normalisation", "imagenet"]));
        done(with(&["--mean", "-0.1,0.5,0.5", "--std", "0.2,0.2,0.2"]));
    }
    // A part of a network is measured only where that is asked for, and said.
    tensors.retain(|(name, _)| !name.starts_with("encoder.conv1"));
    weights::save_pth(&root.path().join("w.pth"), &tensors).unwrap();
    for command in &commands {
        let with = |extra: &[&str]| eval(root.path(), &[command, &file[..], &["--normalisation", "none"], extra].concat());
        assert!(stderr(&with(&[])).contains("does not fit resnet8"), "{command:?}");
        assert!(stderr(&done(with(&["--allow-partial"]))).contains("missing 1 (conv1.weight)"), "{command:?}");
    }
}

/// As TensorBoard reads it: a row of numbers and a row of words an image, and a file for each network.
fn projector(folder: &Path) {
    let config = fs::read_to_string(folder.join("projector_config.pbtxt")).unwrap();
    let named = |key: &str| {
        let lines = config.lines().filter_map(|l| l.trim().strip_prefix(key)).map(|l| l.trim_matches('"').to_string());
        lines.collect::<Vec<String>>()
    };
    let (tensors, metadata) = (named("tensor_path: "), named("metadata_path: "));
    assert!(tensors.len() == 4 && metadata.iter().all(|m| m == "metadata.tsv"), "{config}");
    let words = fs::read_to_string(folder.join("metadata.tsv")).unwrap();
    assert!(words.starts_with("class\timage\t"), "{words}");
    for file in tensors {
        let text = fs::read_to_string(folder.join(file)).unwrap();
        let widths: Vec<usize> = text.lines().map(|l| l.split('\t').filter(|v| v.parse::<f32>().is_ok()).count()).collect();
        assert_eq!(widths.len(), words.lines().count() - 1, "a line of words an image, under a head");
        assert!(widths.iter().all(|w| *w == widths[0] && *w > 2), "{widths:?}");
    }
}

#[test]
fn every_command_runs_and_the_report_needs_nothing_from_outside() {
    let root = tempfile::tempdir().unwrap();
    let run = run_folder(root.path(), "one", 1);
    run_folder(root.path(), "two", 5);
    let evaluate = |args: &[&str]| done(eval(root.path(), args));
    evaluate(&["accuracy", "--run", "runs/one"]);
    evaluate(&["centroid", "--run", "runs/one", "--dataset", "synthetic"]);
    let variants =
        |command: &str| record::read(&run).unwrap().into_iter().filter(|r| r.command == command).map(|r| r.variant).collect::<Vec<_>>();
    assert_eq!(variants("centroid"), ["cosine", "euclidean", "cosine", "euclidean"]);
    evaluate(&["few-shot", "--run", "runs/one", "--dataset", "synthetic", "--shots", "1,2", "--tries", "2"]);
    evaluate(&[
        "tsne",
        "--run",
        "runs/one",
        "--run",
        "runs/two",
        "--set",
        "samples=120",
        "--set",
        "iterations=60",
        "--set",
        "perplexity=10.0",
        "--projector",
    ]);
    evaluate(&["cohort", "--run", "runs/one"]);
    let compared = evaluate(&["compare", "runs/one,runs/two", "runs/two,runs/one", "--peer", "1", "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&compared.stdout).expect("one JSON object on stdout");
    // Swapped sides give the same difference with the other sign.
    let values: Vec<f64> = json["results"].as_array().unwrap().iter().map(|r| r["value"].as_f64().unwrap()).collect();
    assert_eq!(values[0], -values[1]);
    let probes = ["--dataset", "synthetic", "--protocol", "sweep", "--set", "epochs=2", "--seeds", "3,4,5", "--peer", "0", "--json"];
    let compared = evaluate(&[&["compare", "runs/one", "runs/two"], &probes[..]].concat());
    let json: serde_json::Value = serde_json::from_slice(&compared.stdout).expect("one JSON object on stdout");
    let seeds: Vec<u64> = json["results"].as_array().unwrap().iter().map(|r| r["seed"].as_u64().unwrap()).collect();
    assert_eq!((seeds, &json["results"][0]["options"]["kind"]), (vec![3, 4, 5], &"sweep".into()));
    // Three probe seeds of one pair of runs are one draw: there is a mean, and no interval over runs.
    assert_eq!((&json["over_runs"]["runs"], &json["over_runs"]["half_width_95"]), (&1.into(), &serde_json::Value::Null));
    // The same measurement again: a report counts it once.
    evaluate(&["accuracy", "--run", "runs/one"]);
    assert_eq!(fs::read_dir(run.join("draws")).unwrap().count(), 4);
    let figures: Vec<String> = fs::read_dir(run.join("figures")).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    for ending in ["svg", "png", "csv", "json", "projector"] {
        assert!(figures.iter().any(|f| f.starts_with("tsne-synthetic") && f.ends_with(ending)), "{figures:?}");
    }
    projector(&run.join("figures").join(figures.iter().find(|f| f.ends_with("projector")).unwrap()));
    evaluate(&["report", "--run", "runs/one", "--run", "runs/two", "--out", "shown", "--thumbnails"]);
    let shown = fs::read_to_string(root.path().join("shown/report.html")).unwrap();
    assert!(
        shown.contains("class=\"sprite\"") && shown.contains("class=\"shots\"") && shown.contains("data:image/jpeg"),
        "pictures were asked for"
    );
    evaluate(&["report", "--run", "runs/one", "--run", "runs/two", "--out", "out"]);
    let html = fs::read_to_string(root.path().join("out/report.html")).unwrap();
    assert!(!html.contains("data:image/jpeg"), "pictures of the user's images were not asked for");
    assert!(html.contains("data-map=") && html.contains(" leads on "), "a map that answers, and who leads");
    assert_eq!(html.matches("src=").count(), html.matches("src=\"data:image/svg+xml;base64,").count(), "pictures are inside the page");
    for outside in ["@import", "url(", "href=\"http", "fetch(", "XMLHttp"] {
        assert!(!html.contains(outside), "{outside}");
    }
    // The policy, and the name by which browsers know SVG.
    assert_eq!(html.matches("http").count(), html.matches("http://www.w3.org/2000/svg").count() + html.matches("http-equiv").count());
    assert!(html.contains("n = 3<") && !html.contains("n = 2<"), "a repeated measurement is not a second seed");
    for part in ["Pre-training", "Training curves", "Layer matching", "Few-shot", "Where the numbers come from", "<svg"] {
        assert!(html.contains(part), "{part}");
    }
    let rows = csv::Reader::from_path(root.path().join("out/results.csv")).unwrap().into_records().count();
    assert_eq!(rows, record::read(&run).unwrap().len() + record::read(&root.path().join("runs/two")).unwrap().len());
}
