//! `mcl-train compare`: methods and seeds of one recipe, a run each, one after another in one folder, ending in one table.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use super::plan::{Group, Item, Layout, Plan, Setting};
use super::runner::{Event, Programs, Runner, flags};
use crate::error::{Error, Result};
use crate::files;
use crate::methods;
use crate::recipe::Recipe;
use crate::report::{Cell, Table, paper, table};
use crate::run::Summary;
use crate::system::process;

/// What is compared, and how the runs are started.
pub struct Comparison<'a> {
    /// The recipe of all runs.
    pub recipe: &'a Path,
    /// One run each and seed.
    pub methods: &'a [String],
    /// How many: the recipe's and those after it.
    pub seeds: usize,
    /// The folder of all runs and the table.
    pub out: &'a Path,
    /// Overrides of the recipe for all runs.
    pub sets: &'a [String],
    /// Where datasets are looked for first.
    pub data: Option<&'a Path>,
    /// As `--device` takes it.
    pub device: &'a str,
    /// Of each run; 0 means one per core.
    pub threads: usize,
    /// Say only which run is under way.
    pub quiet: bool,
    /// Set from outside (a signal): the run under way is told to save and stop.
    pub stop: &'a AtomicBool,
}

/// Runs what is not finished, then tabulates: a row for each method and network it ships. Runs that failed are named last.
pub fn run(comparison: &Comparison) -> Result<(Table, Vec<String>)> {
    let plan = plan(comparison)?;
    let items = plan.items(comparison.out)?;
    let named = |place: usize| format!("{} of {}: {}", place + 1, items.len(), items[place].name);
    let mut pending = vec![];
    for (place, item) in items.iter().enumerate() {
        match item.summary(FOLDER_FLAG)? {
            Some(_) => eprintln!("compare: {} is finished", named(place)),
            None => pending.push(place),
        }
    }
    let train = process::own_program()?;
    let runner = Runner {
        items: &items,
        side_by_side: 1,
        programs: Programs { eval: train.with_file_name("mcl-eval"), train },
        flags: flags(comparison.data, comparison.device, comparison.threads, comparison.quiet),
        folder_flag: FOLDER_FLAG,
        stop: comparison.stop,
        tell: &|place, event| {
            if let Event::Begun = event {
                eprintln!("compare: {}", named(place));
            }
        },
        finish: &|_, _| Ok(()),
    };
    let outcome = runner.run(pending)?;
    if outcome.stopped {
        outcome.end()?;
    }
    let mut finished = vec![];
    for item in &items {
        finished.extend(item.summary(FOLDER_FLAG)?.map(|summary| (item, summary)));
    }
    let table = tabulate(&items, &finished)?;
    let [csv, markdown] = ["comparison.csv", "comparison.md"].map(|name| comparison.out.join(name));
    files::sweep(comparison.out, |target| *target == csv || *target == markdown)?;
    files::write(&csv, table.csv()?.as_bytes())?;
    files::write(&markdown, table.markdown().as_bytes())?;
    Ok((table, outcome.failed))
}

const FOLDER_FLAG: &str = "--out";

/// A group for each method, so that the runs of one stand together.
fn plan(comparison: &Comparison) -> Result<Plan> {
    if comparison.methods.is_empty() || comparison.seeds == 0 {
        return Err(Error::input("compare needs at least one method (--methods) and one seed (--seeds)"));
    }
    let mut groups = vec![];
    for (i, method) in comparison.methods.iter().enumerate() {
        methods::find(method)?;
        if comparison.methods[..i].contains(method) {
            return Err(Error::input(format!("--methods names {method} twice")));
        }
        let mut set = comparison.sets.to_vec();
        set.push(format!("method.name={method}"));
        let first = Recipe::read(comparison.recipe, &set, &methods::names())?.train.seed;
        groups.push(Group {
            title: method.clone(),
            seeds: (first..).take(comparison.seeds).collect(),
            settings: vec![Setting { name: method.clone(), set }],
            ..Group::default()
        });
    }
    let recipe = comparison.recipe.to_path_buf();
    Ok(Plan { origin: recipe.clone(), recipe, groups, layout: Layout::BySetting, ..Plan::default() })
}

/// Mean and standard deviation over seeds, by method and network.
fn tabulate(items: &[Item], finished: &[(&Item, Summary)]) -> Result<Table> {
    let mut table = Table::new(
        "comparison",
        &["method", "network", "last epoch", "over baseline", "by held-out part", "best test epoch", "s/step", "peak MB", "paper"],
    );
    let mut keyed: Vec<(Vec<String>, f64)> = vec![];
    let mut add =
        |method: &str, network: String, measure: &str, value: f64| keyed.push((vec![method.into(), network, measure.into()], value));
    for (item, summary) in finished {
        let Some(run) = item.run() else { continue };
        let method = run.recipe.method_name();
        for (m, network) in summary.networks.iter().enumerate() {
            let name = format!("{m}: {}", network.arch);
            add(method, name.clone(), "last", network.accuracy.last);
            add(method, name.clone(), "best", network.accuracy.best_epoch.0);
            add(method, name.clone(), "seconds", summary.seconds_per_step);
            add(method, name.clone(), "memory", summary.peak_mb);
            if let Some((held, _)) = network.accuracy.by_holdout {
                add(method, name, "held", held);
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
    let (name, different) = items.first().and_then(Item::run).map_or((None, false), |run| {
        let archs = &run.recipe.cohort.archs;
        (paper::table_of(&run.recipe.data.name, archs), archs.windows(2).any(|w| w[0] != w[1]))
    });
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
