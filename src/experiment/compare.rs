//! `mcl-train compare`: methods and seeds of one protocol, a run each, one after another in one folder, ending in one table.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};
use crate::experiment::jobs::{self, Planned};
use crate::files;
use crate::methods;
use crate::recipe::Recipe;
use crate::report::{Cell, Table, paper, table};
use crate::run::Summary;

/// What is compared, and how the runs are started.
pub struct Comparison<'a> {
    pub protocol: &'a Path,
    pub methods: &'a [String],
    /// Seeds are the recipe's and those after it.
    pub seeds: usize,
    pub out: &'a Path,
    pub sets: &'a [String],
    /// The binary that runs (`mcl-train` itself) and flags to hand on to it (`--data`, `--device`, `--threads`, `--quiet`).
    pub program: &'a Path,
    pub flags: &'a [String],
    /// Set from outside (a signal): the run under way is told to save and stop.
    pub stop: &'a AtomicBool,
}

/// Runs what is not finished, then tabulates: a row for each method and network it ships. Methods that failed are named last.
pub fn run(comparison: &Comparison) -> Result<(Table, Vec<String>)> {
    let plan = plan(comparison)?;
    let (mut failed, mut finished) = (vec![], vec![]);
    for (i, run) in plan.iter().enumerate() {
        let named = format!("{} seed {}", run.recipe.method_name(), run.recipe.train.seed);
        let place = format!("{} of {}: {named}", i + 1, plan.len());
        if let Some(summary) = run.summary("--out")? {
            eprintln!("compare: {place} is finished");
            finished.push((run, summary));
            continue;
        }
        eprintln!("compare: {place}");
        let ended = jobs::run(run.command(comparison.program, comparison.protocol, comparison.flags)?, comparison.stop)?;
        if comparison.stop.load(Ordering::Relaxed) {
            return Err(interrupted(run));
        }
        match ended.code {
            Some(0) => finished.extend(run.summary("--out")?.map(|summary| (run, summary))),
            Some(75) | None => return Err(interrupted(run)),
            Some(code) => failed.push(format!("{named} (exit code {code}; see {})", run.out.display())),
        }
    }
    let table = tabulate(&plan[0].recipe, &finished)?;
    files::write(&comparison.out.join("comparison.csv"), table.csv()?.as_bytes())?;
    files::write(&comparison.out.join("comparison.md"), table.markdown().as_bytes())?;
    Ok((table, failed))
}

/// Every run's recipe, read and offered to its method before the first one starts: a refusal should not come after days.
fn plan(comparison: &Comparison) -> Result<Vec<Planned>> {
    if comparison.methods.is_empty() || comparison.seeds == 0 {
        return Err(Error::input("compare needs at least one method (--methods) and one seed (--seeds)"));
    }
    let names = methods::names();
    let mut plan: Vec<Planned> = vec![];
    for (i, method) in comparison.methods.iter().enumerate() {
        methods::find(method)?;
        if comparison.methods[..i].contains(method) {
            return Err(Error::input(format!("--methods names {method} twice")));
        }
        let mut sets = comparison.sets.to_vec();
        sets.push(format!("method.name={method}"));
        let first = Recipe::read(comparison.protocol, &sets, &names)?;
        jobs::accepts(&first)?;
        for k in 0..comparison.seeds {
            let seed = first.train.seed + k as u64;
            let mut sets = sets.clone();
            sets.push(format!("train.seed={seed}"));
            let recipe = Recipe::read(comparison.protocol, &sets, &names)?;
            plan.push(Planned { sets, recipe, out: comparison.out.join(method).join(format!("seed-{seed}")) });
        }
    }
    Ok(plan)
}

fn interrupted(run: &Planned) -> Error {
    Error::Interrupted(format!("stopped in {}; the same command goes on with it", run.out.display()))
}

/// Mean and standard deviation over seeds, by method and network.
fn tabulate(recipe: &Recipe, runs: &[(&Planned, Summary)]) -> Result<Table> {
    let mut table = Table::new(
        "comparison",
        &["method", "network", "last epoch", "over baseline", "by held-out part", "best test epoch", "s/step", "peak MB", "paper"],
    );
    let mut keyed: Vec<(Vec<String>, f64)> = vec![];
    let mut add =
        |method: &str, network: String, measure: &str, value: f64| keyed.push((vec![method.into(), network, measure.into()], value));
    for (run, summary) in runs {
        for (m, network) in summary.networks.iter().enumerate() {
            let name = format!("{m}: {}", network.arch);
            add(run.recipe.method_name(), name.clone(), "last", network.accuracy.last);
            add(run.recipe.method_name(), name.clone(), "best", network.accuracy.best_epoch.0);
            add(run.recipe.method_name(), name.clone(), "seconds", summary.seconds_per_step);
            add(run.recipe.method_name(), name.clone(), "memory", summary.peak_mb);
            if let Some((held, _)) = network.accuracy.by_holdout {
                add(run.recipe.method_name(), name, "held", held);
            }
        }
    }
    let groups = table::group(&keyed)?;
    let of = |method: &str, network: &str, measure: &str| groups.iter().find(|g| g.keys == [method, network, measure]);
    // Networks are compared with the baseline's of their architecture, wherever they stand in its list.
    let baseline = |arch: &str| {
        let same: Vec<f64> = groups
            .iter()
            .filter(|g| g.keys[0] == "baseline" && g.keys[2] == "last" && g.keys[1].ends_with(&format!(": {arch}")))
            .map(|g| g.mean)
            .collect();
        (!same.is_empty()).then(|| same.iter().sum::<f64>() / same.len() as f64)
    };
    let printed = paper::printed()?;
    let (name, different) =
        (paper::table_of(&recipe.data.name, &recipe.cohort.archs), recipe.cohort.archs.windows(2).any(|w| w[0] != w[1]));
    for last in groups.iter().filter(|g| g.keys[2] == "last") {
        let (method, network) = (&last.keys[0], &last.keys[1]);
        let (place, arch) = network.split_once(": ").expect("a place and an architecture");
        let peer = if different { place.parse::<usize>().ok().map(|m| m + 1) } else { None };
        let beside = printed.iter().find(|p| Some(&p.table) == name.as_ref() && p.network == arch && p.method == *method && p.peer == peer);
        let cell = |measure: &str| of(method, network, measure).map_or(Cell::Empty, table::Group::cell);
        let mean = |measure: &str, decimals| of(method, network, measure).map_or(Cell::Empty, |g| Cell::Score(g.mean, decimals));
        table.push(vec![
            Cell::text(method),
            Cell::text(network),
            last.cell(),
            baseline(arch).map_or(Cell::Empty, |b| Cell::text(format!("{:+.2}", last.mean - b))),
            cell("held"),
            cell("best"),
            mean("seconds", 3),
            mean("memory", 0),
            beside.map_or(Cell::Empty, |p| Cell::text(p.shown())),
        ]);
    }
    Ok(table)
}
