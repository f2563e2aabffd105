//! `mcl-eval evidence`: what is finished is not made again, on this machine or from what is kept alone; what is killed goes on; the
//! tables come from what is kept; and the numbers in the guide are those of reports/evidence.

mod support;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use mcl::experiment::report::{Results, Verdict};
use mcl::experiment::{Item, Plan, Rows, Work};
use support::{EVAL, text};

const RECIPE: &str = r#"
[data]
name = "synthetic"
fraction = 0.05
image_size = 16
[cohort]
archs = ["resnet8", "resnet8"]
[train]
batch = 16
epochs = 2
lr = 0.05
[method]
name = "baseline"
"#;

const PLAN: &str = r#"
title = "Small"
about = "Synthetic images."
recipe = "recipe.toml"
evaluate = [
  "accuracy",
  "linear-probe --peer all --dataset synthetic --protocol lbfgs --set cs=[0.1,1.0] --set max_iterations=20",
]
[[group]]
title = "Methods"
seeds = [1, 2]
against = ["baseline"]
setting = [{ name = "baseline", set = [] }, { name = "dml", set = ["method.name=dml"] }]
[[group]]
title = "Changes"
seeds = [1]
against = ["dml"]
setting = [{ name = "warm", set = ["method.name=dml", "method.temperature=2.0"] }]
[[group]]
title = "Layers"
seeds = [1, 2]
against = ["dml"]
setting = [{ name = "layers", set = ["method.name=l_mcl"] }]
[[group]]
title = "Half"
seeds = [1]
against = ["baseline_half"]
setting = [
  { name = "baseline_half", set = ["data.fraction=0.025"] },
  { name = "dml_half", set = ["method.name=dml", "data.fraction=0.025"] },
]
[[together]]
name = "map"
settings = ["baseline", "dml"]
seed = 1
evaluate = "tsne --peer 0 --dataset synthetic --set samples=60 --set iterations=60 --set perplexity=5.0"
"#;

fn prepared() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("recipe.toml"), RECIPE).unwrap();
    std::fs::write(folder.path().join("plan.toml"), PLAN).unwrap();
    folder
}

fn evidence(home: &Path, more: &[&str]) -> Command {
    let mut command = Command::new(EVAL);
    command.current_dir(home).env("MCL_CACHE", home.join("cache")).env_remove("MCL_DATA");
    command.args(["evidence", "plan.toml", "--out", "kept", "--runs", "runs", "--threads", "1", "--device", "cpu"]).args(more);
    command
}

fn begun(output: &Output) -> usize {
    String::from_utf8_lossy(&output.stderr).lines().filter(|l| l.ends_with(": begun")).count()
}

fn rows(home: &Path) -> Vec<csv::StringRecord> {
    let path = home.join("kept/results.csv");
    if !path.exists() {
        return vec![];
    }
    csv::Reader::from_path(path).unwrap().records().map(|r| r.unwrap()).collect()
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(|e| e.unwrap()) {
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// All files below a folder with their bytes.
fn content(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = vec![];
    for entry in std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()) {
        if entry.is_dir() {
            found.extend(content(&entry));
        } else {
            found.push((entry.clone(), std::fs::read(&entry).unwrap()));
        }
    }
    found.sort();
    found
}

#[test]
fn what_is_finished_is_kept_and_what_is_stopped_goes_on() {
    let folder = prepared();
    let home = folder.path();
    // Stopped as soon as something is kept: the units under way are told to save.
    let mut child = evidence(home, &["--jobs", "2"]).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(300);
    while rows(home).is_empty() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
    }
    // SAFETY: the child has not been waited for.
    unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGTERM) };
    assert_eq!(child.wait().unwrap().code(), Some(75));
    let units = |rows: &[csv::StringRecord]| rows.iter().map(|r| r[0].to_string()).collect::<std::collections::BTreeSet<_>>();
    let before = units(&rows(home));
    let wanted = [
        "baseline-seed1",
        "baseline-seed2",
        "baseline_half-seed1",
        "dml-seed1",
        "dml-seed2",
        "dml_half-seed1",
        "layers-seed1",
        "layers-seed2",
        "map",
        "warm-seed1",
    ];
    assert!(!before.is_empty() && before.len() < wanted.len(), "{before:?}");

    let output = evidence(home, &["--jobs", "2"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(begun(&output), wanted.len() - before.len(), "{}", text(&output));
    let all = rows(home);
    assert_eq!(units(&all).into_iter().collect::<Vec<_>>(), wanted);
    // Two networks and their ensemble, two probes.
    assert_eq!(all.iter().filter(|r| &r[0] == "dml-seed2").count(), 5, "{all:?}");
    for unit in wanted.iter().filter(|u| **u != "map") {
        for file in ["recipe.toml", "metrics.csv", "predictions.safetensors", "unit.json"] {
            assert!(home.join("kept/units").join(unit).join(file).exists(), "{unit}/{file}");
        }
    }
    // Nothing that says where it was made.
    let place = home.display().to_string();
    for (path, bytes) in content(&home.join("kept")) {
        assert!(!String::from_utf8_lossy(&bytes).contains(&place), "{} holds a path", path.display());
    }

    // Again: nothing is made, and every byte stays.
    let first = content(&home.join("kept"));
    let again = evidence(home, &[]).output().unwrap();
    assert!(again.status.success() && begun(&again) == 0, "{}", text(&again));
    assert_eq!(first, content(&home.join("kept")));

    // A fresh clone has neither runs nor data, only what is kept.
    let clone = prepared();
    copy(&home.join("kept"), &clone.path().join("kept"));
    let there = evidence(clone.path(), &["--data", "nowhere"]).output().unwrap();
    assert!(there.status.success() && begun(&there) == 0, "{}", text(&there));
    assert!(!clone.path().join("runs").exists());
    let report = |at: &Path| std::fs::read_to_string(at.join("kept/report.md")).unwrap();
    assert_eq!(report(home), report(clone.path()));
    the_page_shows_what_is_kept(&report(home), &all, home);

    // A seed made on several kinds of processor: said before the rest of it is made, and on the page.
    let facts = clone.path().join("kept/units/dml-seed1/unit.json");
    let mut told: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&facts).unwrap()).unwrap();
    let here = told["machine"]["cpu"].as_str().unwrap().to_string();
    told["machine"]["cpu"] = "Another Kind".into();
    std::fs::write(&facts, told.to_string()).unwrap();
    let kept = clone.path().join("kept/results.csv");
    let fewer: String = std::fs::read_to_string(&kept).unwrap().split_inclusive('\n').filter(|l| !l.starts_with("warm-seed1,")).collect();
    std::fs::write(&kept, fewer).unwrap();
    // Only what is asked for is made: here nothing, because the others are finished.
    let others = evidence(clone.path(), &["--settings", "dml,layers"]).output().unwrap();
    assert!(others.status.success() && begun(&others) == 0, "{}", text(&others));
    assert!(text(&others).lines().any(|l| l == "missing: warm-seed1"), "{}", text(&others));
    assert!(report(clone.path()).contains("finished; missing: warm-seed1."), "{}", report(clone.path()));
    let mixed = evidence(clone.path(), &["--settings", "warm", "--seeds", "1"]).output().unwrap();
    assert!(mixed.status.success() && begun(&mixed) == 1, "{}", text(&mixed));
    let warned = format!("warning: seed 1: dml on Another Kind; what is missing of it is made on {here}, where roundings may differ");
    assert!(text(&mixed).lines().any(|l| l == warned), "{warned}: {}", text(&mixed));
    let line = format!(
        "seed 1 were made on 2 kinds of processor: baseline, warm, layers, baseline_half, dml_half on {here}; dml on Another Kind."
    );
    assert!(report(clone.path()).contains(&line), "{line}: {}", report(clone.path()));
    assert!(!report(home).contains("kinds of processor"));

    // The main table goes where it is asked for.
    let shown = home.join("shown.md");
    std::fs::write(&shown, "a\n<!-- evidence -->\nold\n<!-- /evidence -->\nb\n").unwrap();
    let output = evidence(home, &["--report-only", "--readme", "shown.md"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let table = std::fs::read_to_string(&shown).unwrap();
    assert!(
        table.starts_with("a\n<!-- evidence -->\n\n| top-1") && table.ends_with("|\n\n<!-- /evidence -->\nb\n") && !table.contains("old"),
        "{table}"
    );

    // Another recipe means other units, and a run folder of the old one is not gone on with.
    let changed = RECIPE.replace("lr = 0.05", "lr = 0.02");
    std::fs::write(home.join("recipe.toml"), changed).unwrap();
    let other = evidence(home, &[]).output().unwrap();
    support::assert_refused(&other, 1, &["was begun with another recipe", "choose another --runs"]);
}

/// Every section of the page, held to results.csv and to the metrics of each run.
fn the_page_shows_what_is_kept(report: &str, all: &[csv::StringRecord], home: &Path) {
    let section = |title: &str| {
        let rest = report.split_once(&format!("\n## {title}\n")).unwrap_or_else(|| panic!("no `{title}` in {report}")).1;
        rest.split("\n## ").next().unwrap().to_string()
    };
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let accuracy = |unit: &str| {
        let own = all.iter().filter(|r| &r[0] == unit && &r[5] == "accuracy" && !r[4].is_empty());
        mean(&own.map(|r| r[10].parse().unwrap()).collect::<Vec<f64>>())
    };

    // The lead of the main table is the mean over seeds of the difference of each.
    let lead = [1, 2].map(|seed| accuracy(&format!("dml-seed{seed}")) - accuracy(&format!("baseline-seed{seed}")));
    assert!(section("Methods").contains(&format!("{:+.2} [", mean(&lead))), "{lead:?}: {report}");

    // The trainer's test accuracy of the last epoch is what `mcl-eval accuracy` measures of the networks it saved.
    let pair = ["dml-seed1", "dml-seed2"].map(accuracy);
    let deviation = (pair[0] - pair[1]).abs() / 2f64.sqrt();
    let wanted = format!("| dml | {:.2} ± {deviation:.2} (n = 2) |", mean(&pair));
    assert!(section("Accuracy by every convention").contains(&wanted), "{wanted}: {report}");

    // The first box tells the leader of the first group, and who is above it elsewhere: a part or a rival with the same seeds.
    let of_two = |setting: &str| mean(&[1, 2].map(|seed| accuracy(&format!("{setting}-seed{seed}"))));
    let (best, layers) = (of_two("baseline").max(of_two("dml")), of_two("layers"));
    assert!(report.contains(&format!("has the highest mean on synthetic, own classifier: {best:.2} %")), "{best}: {report}");
    let still = report.lines().find(|l| l.contains("Higher still is "));
    let wanted = format!("Higher still is layers: {layers:.2} %, {:+.2} points to ", layers - best);
    assert!(still.map_or(layers <= best, |l| layers > best && l.contains(&wanted)), "{layers} and {best}: {report}");

    // Parts of the training images are one table, not a section each; the whole set is that of the same seed.
    let fewer = section("Fewer training images");
    for (part, first, second) in [(50, "baseline_half-seed1", "dml_half-seed1"), (100, "baseline-seed1", "dml-seed1")] {
        let (a, b) = (accuracy(first), accuracy(second));
        let row = fewer.lines().find(|l| l.starts_with(&format!("| synthetic: own classifier | {part} |"))).expect("a row a part");
        assert!(row.contains(&format!("| {:+.2} [", b - a)) && row.ends_with(&format!("| {a:.2} | {b:.2} |")), "{row}");
    }
    assert!(!report.contains("## Half"), "{report}");

    // A group that is compared with a setting of another one shows it, in its table and in a figure.
    let layers = section("Layers");
    assert!(layers.contains("| top-1 (%) | dml | layers | test images |"), "{layers}");
    let bars = std::fs::read_to_string(home.join("kept/figures/gains-2-dml.csv")).unwrap();
    let lead = mean(&[1, 2].map(|seed| accuracy(&format!("layers-seed{seed}")) - accuracy(&format!("dml-seed{seed}"))));
    let bar = bars.lines().find(|l| l.starts_with("synthetic: own classifier")).unwrap_or_else(|| panic!("{bars}"));
    let drawn = bar.split(',').filter_map(|cell| cell.parse::<f64>().ok()).any(|v| (v - lead).abs() < 1e-6);
    assert!(drawn, "{lead}: {bars}");

    // A doubtful number says so. Of two values of C one is always at an edge of the sweep.
    let doubtful: Vec<&csv::StringRecord> = all.iter().filter(|r| r.iter().any(|cell| cell.contains("at the edge of the sweep"))).collect();
    assert!(!doubtful.is_empty());
    let told = section("Where the numbers come from");
    for row in doubtful {
        let network = format!("{}/peer-{}", &row[0], &row[4]);
        assert!(told.lines().any(|l| l.contains("at the edge of the sweep") && l.contains(&network)), "{network}: {told}");
    }

    // Likeness of a stage is the mean over seeds of the mean over the networks of what each logged in its last epoch.
    let logged = |seed: usize, names: &[String]| {
        let mut reader = csv::Reader::from_path(home.join(format!("kept/units/layers-seed{seed}/metrics.csv"))).unwrap();
        let columns = reader.headers().unwrap().clone();
        let last = reader.records().last().unwrap().unwrap();
        mean(&names.iter().map(|n| last[columns.iter().position(|c| c == n).unwrap()].parse().unwrap()).collect::<Vec<f64>>())
    };
    let mut row = "| layers |".to_string();
    for of in [|m: usize, l: usize| format!("likeness.{m}.{l}"), |m, l| format!("mutual_information.{m}.{}.{l}.{l}", 1 - m)] {
        for l in 0..3 {
            let [a, b] = [1, 2].map(|seed| logged(seed, &[of(0, l), of(1, l)]));
            row += &format!(" {:.2} ± {:.2} (n = 2) |", (a + b) / 2.0, (a - b).abs() / 2f64.sqrt());
        }
    }
    assert!(section("Embeddings by stage").contains(&row), "{row}: {report}");
}

#[test]
fn refusals_come_before_the_first_run() {
    let refused = |change: (&str, &str), parts: &[&str]| {
        let folder = prepared();
        let plan = PLAN.replace(change.0, change.1);
        assert_ne!(plan, PLAN);
        std::fs::write(folder.path().join("plan.toml"), plan).unwrap();
        support::assert_refused(&evidence(folder.path(), &[]).output().unwrap(), 2, parts);
        assert!(!folder.path().join("runs").exists());
    };
    refused(("against = [\"dml\"]", "against = [\"dmx\"]"), &["compared with `dmx`", "known there: baseline, dml"]);
    refused(("\"accuracy\"", "\"acuracy\""), &["acuracy"]);
    refused(("--set cs=[0.1,1.0]", "--set cs=[]"), &["cs = []"]);
    refused(("method.temperature=2.0", "method.heat=2.0"), &["heat"]);
    refused(("seeds = [1, 2]", "seeds = [1, 1]"), &["names seed 1 twice", "one seed is one draw"]);
    refused(("name = \"warm\"", "name = \"../../warm\""), &["`../../warm` would be a folder"]);
    refused(("name = \"map\"", "name = \"/tmp/map\""), &["`/tmp/map` would be a folder"]);
    refused(("name = \"warm\"", "name = \"dml\""), &["two settings are called `dml`"]);
    refused(("tsne --peer 0", "tsne --pear 0"), &["--pear"]);
    refused(("iterations=60", "iteration=60"), &["unknown key `iteration`"]);
    refused(("\"accuracy\"", "\"few-shot --fractions 0.5 --recipe recipe.toml\""), &["--fractions trains runs of its own"]);
    refused(("title = \"Small\"", "schema = 2\ntitle = \"Small\""), &["schema = 2; accepted: up to 1"]);

    let slip = |flags: &[&str], part: &str| {
        let folder = prepared();
        support::assert_refused(&evidence(folder.path(), flags).output().unwrap(), 2, &[part]);
        assert!(!folder.path().join("runs").exists());
    };
    slip(&["--seeds", "1,3"], "--seeds 3: the runs of plan.toml have 1, 2");
    slip(&["--settings", "dml,dmx"], "--settings dmx: the runs of plan.toml have baseline, baseline_half, dml, dml_half, layers, warm");
}

/// A measurement's rows are its own, whatever else was measured of the run: `epochs=3` is not `epochs=30`.
#[test]
fn rows_are_found_by_the_id_of_their_measurement() {
    let folder = prepared();
    let home = folder.path();
    let probe = |epochs: usize| format!("linear-probe --peer 0 --dataset synthetic --protocol paper --set epochs={epochs}");
    let measured = |out: &str, lines: &[String]| {
        let (before, rest) = PLAN.split_once("evaluate = [").unwrap();
        let group = rest.split("[[group]]").nth(1).unwrap().replace("[1, 2]", "[1]");
        let group = group.replace(", { name = \"dml\", set = [\"method.name=dml\"] }", "");
        let lines: Vec<String> = lines.iter().map(|line| format!("\"{line}\"")).collect();
        std::fs::write(home.join("plan.toml"), format!("schema = 1\n{before}evaluate = [{}]\n[[group]]{group}", lines.join(", "))).unwrap();
        let output = evidence(home, &[]).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        std::fs::rename(home.join("kept"), home.join(out)).unwrap();
        let mut reader = csv::Reader::from_path(home.join(out).join("results.csv")).unwrap();
        let names = reader.headers().unwrap().clone();
        let at = |name: &str| names.iter().position(|n| n == name).unwrap();
        let (unit, protocol, id) = (at("unit"), at("protocol"), at("id"));
        reader.records().map(|r| r.unwrap()).map(|r| [r[unit].to_string(), r[protocol].to_string(), r[id].to_string()]).collect::<Vec<_>>()
    };
    // One network of one run each time, the second time of the same run.
    let (long, short) = (measured("long", &[probe(30)]), measured("short", &[probe(3)]));
    for (rows, epochs) in [(&long, "30"), (&short, "3")] {
        assert_eq!(rows.len(), 1, "{rows:?}");
        assert!(rows.iter().all(|r| r[1].split(", ").any(|key| key == format!("epochs={epochs}"))), "{rows:?}");
        assert!(rows.iter().all(|r| r[2].starts_with(&format!("{}-", r[0]))), "the run's own: {rows:?}");
    }
    // A plan with both finds both, and makes neither again.
    let both = measured("both", &[probe(3), probe(30)]);
    let ids = |rows: &[[String; 3]]| rows.iter().map(|r| r[2].clone()).collect::<std::collections::BTreeSet<_>>();
    assert_eq!(both.len(), 2, "{both:?}");
    assert_eq!(ids(&both), ids(&[long, short].concat()));
    assert_eq!(ids(&both).len(), 2);
    let lines = std::fs::read_to_string(home.join("runs/baseline-seed1/results.jsonl")).unwrap();
    assert_eq!(lines.lines().count(), 2);
}

fn committed() -> (Plan, Vec<Item>, Rows) {
    let path = Path::new("protocols/plans/evidence.toml");
    let plan = Plan::read(path).unwrap();
    let items = plan.items(Path::new("runs/evidence")).unwrap();
    (plan, items, Rows::read(Path::new("reports/evidence")).unwrap())
}

/// The tables in the guide are those that results.csv gives, and every hypothesis of the plan is judged in them.
#[test]
fn the_readme_shows_the_numbers_of_the_report() {
    let (plan, items, rows) = committed();
    let results = Results::new(&plan, &items, &rows);
    let main = results.main_table().unwrap().markdown();
    let verdicts = results.verdicts().unwrap().markdown();
    assert_eq!(verdicts.lines().count(), 2 + 13, "a line a hypothesis:\n{verdicts}");
    let (guide, report) = ("src/experiment/README.md", "reports/evidence/report.md");
    for (file, table) in [("README.md", &verdicts), (guide, &verdicts), (guide, &main), (report, &verdicts), (report, &main)] {
        let text = std::fs::read_to_string(file).unwrap();
        assert!(text.contains(table), "{file} should hold this table:\n{table}");
    }
}

/// `make evidence` makes nothing on any clone, and every hypothesis has a verdict from all of its seeds.
#[test]
fn the_evidence_is_finished() {
    let (plan, items, rows) = committed();
    let missing: Vec<&str> = items.iter().filter(|item| !rows.has(item)).map(|item| item.name.as_str()).collect();
    assert!(missing.is_empty(), "not made: {missing:?}");
    for judged in Results::new(&plan, &items, &rows).judged().unwrap() {
        assert_ne!(judged.verdict, Verdict::Open, "{}", judged.says);
        let pair = judged.pair.expect(&judged.says);
        assert_eq!((pair.seeds.len(), judged.seeds), (3, 3), "{}", judged.says);
        assert!(pair.over_seeds.is_some() && pair.over_images.is_some() && judged.p.is_some(), "{}", judged.says);
    }
}

/// The page and its figures are what the kept rows give, byte by byte, on a clone that has nothing else.
#[test]
fn a_clone_makes_the_committed_page() {
    let folder = tempfile::tempdir().unwrap();
    let kept = folder.path().join("kept");
    copy(Path::new("reports/evidence"), &kept);
    for made in ["report.md", "report.html"] {
        std::fs::remove_file(kept.join(made)).unwrap();
    }
    std::fs::remove_dir_all(kept.join("figures")).unwrap();
    let mut command = Command::new(EVAL);
    command.args(["evidence", "protocols/plans/evidence.toml", "--report-only", "--device", "cpu", "--out"]).arg(&kept);
    let output = command.arg("--runs").arg(folder.path().join("runs")).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let files =
        |at: &Path| content(at).into_iter().map(|(path, bytes)| (path.strip_prefix(at).unwrap().to_path_buf(), bytes)).collect::<Vec<_>>();
    let (committed, made) = (files(Path::new("reports/evidence")), files(&kept));
    assert_eq!(committed.iter().map(|f| &f.0).collect::<Vec<_>>(), made.iter().map(|f| &f.0).collect::<Vec<_>>());
    for ((name, committed), (_, made)) in committed.iter().zip(&made) {
        assert!(
            committed == made,
            "{} is not what results.csv and units/ give: `make evidence ARGS=--report-only` makes it",
            name.display()
        );
    }
}

/// Two networks can be had without training: they are those that the rows of seed 1 were measured of, and their card shows these rows.
#[test]
fn the_shipped_networks_are_those_of_the_rows() {
    let card = std::fs::read_to_string("reports/evidence/networks/README.md").unwrap();
    let (plan, items, rows) = committed();
    let questions = Results::new(&plan, &items, &rows).main_table().unwrap().rows;
    type Row = std::collections::BTreeMap<String, String>;
    let read = |path: &Path| -> Vec<Row> { csv::Reader::from_path(path).unwrap().deserialize().map(|row| row.unwrap()).collect() };
    let all = read(Path::new("reports/evidence/results.csv"));
    let of = |setting: &str| {
        let first = |row: &&Row| row["unit"] == format!("{setting}-seed1") && row["peer"] == "0" && row["metric"] == "top1";
        all.iter().filter(first).collect::<Vec<_>>()
    };
    let (alone, taught) = (of("baseline"), of("l_mcl"));
    assert_eq!((alone.len(), taught.len()), (questions.len(), questions.len()));
    for ((question, a), b) in questions.iter().zip(&alone).zip(&taught) {
        let [a, b] = [a, b].map(|row| row["value"].parse::<f64>().unwrap());
        let line = format!("| {} | {a:.2} | {b:.2} |", question[0].shown());
        assert!(card.contains(&line), "the card should hold: {line}");
    }
    for (setting, own) in [("baseline", alone), ("l_mcl", taught)] {
        let file = format!("reports/evidence/networks/{setting}.safetensors");
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new(EVAL);
        command
            .args(["centroid", "--dataset", "synthetic", "--weights", &file, "--no-cache", "--device", "cpu", "--out"])
            .arg(folder.path());
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        let measured = read(&folder.path().join("results.csv"));
        // results.csv of an experiment has the first digits of the hash.
        assert!(measured[0]["weights_hash"].starts_with(&own[0]["weights_hash"]), "{file} holds other weights than the rows are of");
    }
}

/// The table of the first evidence, which no command makes any more, is that of its rows: mean and deviation over three seeds of the mean
/// over two networks.
#[test]
fn the_first_evidence_shows_its_rows() {
    let readme = std::fs::read_to_string("reports/evidence/first/README.md").unwrap();
    let mut reader = csv::Reader::from_path("reports/evidence/first/results.csv").unwrap();
    let names = reader.headers().unwrap().clone();
    let all: Vec<csv::StringRecord> = reader.records().map(|r| r.unwrap()).collect();
    let cell = |row: &csv::StringRecord, column: &str| row[names.iter().position(|n| n == column).unwrap()].to_string();
    let mut checked = 0;
    for line in readme.lines().filter(|l| l.contains("(n = 3)")) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let (dataset, what) = cells[1].split_once(": ").unwrap();
        let asked = |row: &&csv::StringRecord| {
            let (command, protocol, variant) = (cell(row, "command"), cell(row, "protocol"), cell(row, "variant"));
            let fits = match what.split_once(" (") {
                Some((_, kind)) => command == "linear-probe" && protocol.starts_with(kind.split([',', ')']).next().unwrap()),
                None if what == "own classifier" => command == "accuracy",
                None if what.contains("neighbours") => command == "knn" && variant == "k=20",
                None => command == "few-shot" && variant == "shots=5",
            };
            fits && cell(row, "dataset") == dataset && cell(row, "metric") == "top1" && !cell(row, "peer").is_empty()
        };
        for (at, setting) in ["baseline", "dml", "mcl", "l_mcl"].into_iter().enumerate() {
            let seed = |seed: usize| {
                let unit = format!("{setting}-seed{seed}");
                let own = all.iter().filter(asked).filter(|row| cell(row, "unit") == unit);
                let values: Vec<f64> = own.map(|row| cell(row, "value").parse().unwrap()).collect();
                assert_eq!(values.len(), 2, "{unit}: {line}");
                values.iter().sum::<f64>() / 2.0
            };
            let seeds = [seed(1), seed(2), seed(3)];
            let mean = seeds.iter().sum::<f64>() / 3.0;
            let deviation = (seeds.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / 2.0).sqrt();
            assert_eq!(cells[3 + at], format!("{mean:.2} ± {deviation:.2} (n = 3)"), "{setting}: {line}");
            checked += 1;
        }
    }
    assert_eq!(checked, 9 * 4);
}

/// What is kept reads and writes to the same bytes. Every row is of a measurement that the plan asks for, and a run that has rows has those
/// of all its measurements.
#[test]
fn kept_rows_carry_the_ids_of_the_plan() {
    let (_, items, rows) = committed();
    let file = Path::new("reports/evidence/results.csv");
    assert_eq!(rows.csv().unwrap(), std::fs::read_to_string(file).unwrap());
    let kept: std::collections::BTreeSet<&str> = rows.ids().collect();
    assert!(!kept.is_empty());
    let asked: std::collections::BTreeSet<&str> = items.iter().filter(|item| rows.has(item)).flat_map(Item::measurement_ids).collect();
    assert_eq!(kept, asked);
}

/// A default that changed since would make `make evidence` mean something else than what is kept.
#[test]
fn kept_recipes_are_what_the_plan_still_asks_for() {
    let (_, items, rows) = committed();
    for item in items.iter().filter(|i| rows.has(i)) {
        let Work::Run(run) = &item.work else { continue };
        let path = rows.item_folder(&item.name).join("recipe.toml");
        let names = mcl::methods::names();
        let then = mcl::recipe::Recipe::read(&path, &[], &names).unwrap().flat();
        let text = std::fs::read_to_string(&path).unwrap();
        for (key, value) in run.recipe.flat() {
            // A key that recipes got later is not in the file.
            if text.contains(&format!("{} = ", key.rsplit('.').next().unwrap())) {
                let kept = then.get(&key).unwrap_or_else(|| panic!("{}: no {key}", item.name));
                // A plan may say 0 where the resolved recipe says 0.0.
                let number = |text: &str| text.parse::<f64>().ok();
                assert!(
                    *kept == value || number(kept).is_some_and(|n| number(&value) == Some(n)),
                    "{}: {key} is {kept}, not {value}",
                    item.name
                );
            }
        }
    }
}
