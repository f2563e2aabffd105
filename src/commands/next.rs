//! What to do next with what is here: after a run, and where `mcl-eval` is started without a command.

use std::path::{Path, PathBuf};

use serde_json::json;

use crate::data::check;
use crate::error::{Result, counted};
use crate::eval::Common;
use crate::run::{Run, RunFolder};
use crate::system::output;

/// A command to type, and what it answers.
pub struct Proposal {
    /// The whole command.
    pub command: String,
    /// What it is good for.
    pub why: String,
}

impl Proposal {
    fn new(command: impl Into<String>, why: impl Into<String>) -> Proposal {
        Proposal { command: command.into(), why: why.into() }
    }
}

/// Datasets whose files are here.
fn datasets_here(data: Option<&Path>) -> Vec<(&'static str, PathBuf)> {
    check::list(data).into_iter().filter_map(|set| Some((set.name, set.home?))).collect()
}

/// What to measure of a finished run that was trained on `dataset`: on images that are here, and that it does not know.
pub fn after_run(run: &Path, dataset: &str, data: Option<&Path>) -> Vec<Proposal> {
    // The newest run is where commands look by themselves.
    let real = |path: &Path| path.canonicalize().ok();
    let newest = real(Path::new(LATEST)).is_some_and(|latest| Some(latest) == real(run));
    let of_run = if newest { String::new() } else { format!(" --run {}", run.display()) };
    let with_data = data.map_or(String::new(), |data| format!(" --data {}", data.display()));
    // A folder of the user's own is asked for by name; of the others the smallest task first.
    let foreign = datasets_here(data).into_iter().filter(|(name, _)| *name != dataset && *name != "image_folder");
    let target = foreign.map(|(name, _)| name).min_by_key(|name| TRANSFER.iter().position(|t| t == name).unwrap_or(TRANSFER.len()));
    let probe = match target {
        Some(target) => Proposal::new(
            format!("mcl-eval linear-probe{of_run} --dataset {target} --protocol lbfgs{with_data}"),
            format!("do its features suit {target}?"),
        ),
        None => Proposal::new(
            format!("mcl-eval linear-probe{of_run} --dataset synthetic --protocol lbfgs"),
            "do its features suit other classes?",
        ),
    };
    vec![
        probe,
        Proposal::new(format!("mcl-eval cohort{of_run}{with_data}"), "do its networks differ?"),
        Proposal::new(format!("mcl-eval report{of_run}"), "one page of everything measured"),
    ]
}

/// What the paper transfers to, then what is quick.
const TRANSFER: &[&str] = &["stl10", "tiny_imagenet", "cifar10", "cifar100", "fashion_mnist"];
/// The link to the newest run.
const LATEST: &str = "runs/latest";
/// What `Next` and the space after it take.
const HEADING: usize = 13;

/// Proposals as lines: commands in one column, why in the next where both fit the terminal beside their heading, or 100 columns.
pub fn lines(proposals: &[Proposal]) -> Vec<String> {
    let width = proposals.iter().map(|p| p.command.len()).max().unwrap_or(0);
    let most = output::width().map_or(100, |terminal| terminal.saturating_sub(HEADING));
    let fits = |p: &Proposal| width + 3 + p.why.len() <= most;
    let line = |p: &Proposal| if fits(p) { format!("{:<width$}   {}", p.command, p.why) } else { p.command.clone() };
    proposals.iter().map(line).collect()
}

/// `mcl-eval` without a command: the newest run, the data that are here, and what can be done with them.
pub fn overview(common: &Common) -> Result<()> {
    let data = common.data.as_deref();
    let (state, proposals) = newest_run(data);
    let here = datasets_here(data);
    if common.json {
        let commands: Vec<_> = proposals.iter().map(|p| json!({ "command": p.command, "why": p.why })).collect();
        let sets: Vec<_> = here.iter().map(|(name, home)| json!({ "name": name, "home": home })).collect();
        common.print_json(&json!({ "run": state, "datasets": sets, "next": commands }));
        return Ok(());
    }
    println!("Newest run   {state}");
    match here.is_empty() {
        true => println!("Data here    none but synthetic, which needs no files; `mcl-eval data list` says how the others come"),
        false => here.iter().enumerate().for_each(|(i, (name, home))| {
            println!("{:<12} {name:<14} {}", if i == 0 { "Data here" } else { "" }, home.display());
        }),
    }
    println!();
    for (i, line) in lines(&proposals).iter().enumerate() {
        println!("{:<12} {line}", if i == 0 { "Next" } else { "" });
    }
    println!("\nAll commands: mcl-eval --help");
    Ok(())
}

/// The folder that the newest run has by its own name.
pub fn newest() -> Option<PathBuf> {
    let latest = Path::new(LATEST);
    RunFolder::at(latest).name().ok().map(|name| latest.with_file_name(name))
}

/// How the newest run stands, in words, and what can be done with it.
fn newest_run(data: Option<&Path>) -> (String, Vec<Proposal>) {
    let start = || {
        let first = Proposal::new("mcl-train run quickstart", "two small networks on synthetic images, under a minute");
        vec![
            first,
            Proposal::new("mcl-train list recipes", "what else can be trained"),
            Proposal::new("mcl-eval doctor", "is the set-up right?"),
        ]
    };
    let folder = RunFolder::at(LATEST);
    if !folder.path().exists() {
        return (format!("none in {}", Path::new(LATEST).with_file_name("").display()), start());
    }
    if folder.shipped().is_empty() {
        let mut proposals = vec![Proposal::new("mcl-eval doctor", "is the set-up right?")];
        if let (false, Some(run)) = (folder.is_training(), newest()) {
            let (recipe, run) = (RunFolder::at(&run).recipe(), run.display());
            proposals.insert(0, Proposal::new(format!("mcl-train run {} --out {run} --resume", recipe.display()), "finish it"));
        }
        return (folder.unfinished(), proposals);
    }
    let run = match Run::read(folder.path()) {
        Ok(run) => run,
        Err(e) => return (e.line(), start()),
    };
    let archs = run.archs();
    let best = (0..archs.len()).filter_map(|m| Some(run.accuracy(m)?.last)).fold(f64::NAN, f64::max);
    let state = format!(
        "{}: {} on {}, {}, {}, test top-1 {best:.2} % (best network, last epoch)",
        run.name,
        archs.join(" and "),
        run.dataset(),
        run.method(),
        counted(run.metrics.len(), "epoch")
    );
    (state, after_run(folder.path(), run.dataset(), data))
}
