//! `mcl-train compare`: methods and seeds of one protocol, a run each, one after another in one folder, ending in one table. Every
//! run is a process of its own, so that its peak memory is its own.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tch::{Device, Kind};

use crate::error::{Error, Result};
use crate::files;
use crate::methods::{self, METHODS, Task};
use crate::nets;
use crate::recipe::Recipe;
use crate::report::{Cell, Table, paper, table};
use crate::train::{self, Summary};

/// The recipe a run was asked for with, before the method filled in its defaults.
const ASKED: &str = "asked.toml";

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

/// One run of the comparison.
struct Planned {
    method: String,
    sets: Vec<String>,
    recipe: Recipe,
    out: PathBuf,
}

/// Runs what is not finished, then tabulates: a row for each method and network it ships. Methods that failed are named last.
pub fn run(comparison: &Comparison) -> Result<(Table, Vec<String>)> {
    let plan = plan(comparison)?;
    let (mut failed, mut finished) = (vec![], vec![]);
    for (i, run) in plan.iter().enumerate() {
        let place = format!("{} of {}: {} seed {}", i + 1, plan.len(), run.method, run.recipe.train.seed);
        if let Some(summary) = summary_of(run)? {
            eprintln!("compare: {place} is finished");
            finished.push((run, summary));
            continue;
        }
        eprintln!("compare: {place}");
        std::fs::create_dir_all(&run.out).map_err(Error::io("cannot make", &run.out))?;
        files::write(&run.out.join(ASKED), run.recipe.to_toml().as_bytes())?;
        let code = wait(start(comparison, run)?, comparison)?;
        if comparison.stop.load(Ordering::Relaxed) {
            return Err(interrupted(run));
        }
        match code {
            Some(0) => finished.extend(summary_of(run)?.map(|summary| (run, summary))),
            Some(75) | None => return Err(interrupted(run)),
            Some(code) => {
                failed.push(format!("{} seed {} (exit code {code}; see {})", run.method, run.recipe.train.seed, run.out.display()))
            }
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
    let names: Vec<&str> = METHODS.iter().map(|m| m.name).collect();
    let mut plan: Vec<Planned> = vec![];
    for (i, method) in comparison.methods.iter().enumerate() {
        methods::find(method)?;
        if comparison.methods[..i].contains(method) {
            return Err(Error::input(format!("--methods names {method} twice")));
        }
        let mut sets = comparison.sets.to_vec();
        sets.push(format!("method.name={method}"));
        let first = Recipe::read(comparison.protocol, &sets, &names)?;
        accepts(&first)?;
        for k in 0..comparison.seeds {
            let seed = first.train.seed + k as u64;
            let mut sets = sets.clone();
            sets.push(format!("train.seed={seed}"));
            let recipe = Recipe::read(comparison.protocol, &sets, &names)?;
            plan.push(Planned { method: method.clone(), sets, recipe, out: comparison.out.join(method).join(format!("seed-{seed}")) });
        }
    }
    Ok(plan)
}

/// Does the method take this cohort and these options? Asked with ten classes of two images: the data are opened by the run.
fn accepts(recipe: &Recipe) -> Result<()> {
    let archs = recipe.cohort.archs.iter().map(|name| nets::find(name)).collect::<Result<Vec<_>>>()?;
    let labels: Vec<i64> = (0..20).map(|i| i % 10).collect();
    let t = &recipe.train;
    let task = Task {
        archs: &archs,
        classes: 10,
        train_labels: &labels,
        batch: t.batch,
        rule: t.rule(),
        label_smoothing: t.label_smoothing,
        holdout: recipe.data.holdout,
        epochs: t.epochs,
        device: Device::Cpu,
        kind: Kind::Float,
        seed: t.seed,
    };
    (methods::find(recipe.method_name())?.build)(&task, recipe.method_options()).map(drop)
}

/// How a run came out, if it is finished; refused where its folder holds a run of another recipe.
fn summary_of(run: &Planned) -> Result<Option<Summary>> {
    let (asked, path) = (run.out.join(ASKED), run.out.join(train::SUMMARY));
    if asked.exists() {
        let before = std::fs::read_to_string(&asked).map_err(Error::open(&asked))?;
        if before != run.recipe.to_toml() {
            return Err(Error::input(format!(
                "{} was begun with another recipe (compare it with {}); choose another --out",
                run.out.display(),
                asked.display()
            )));
        }
    }
    if !path.exists() {
        return Ok(None);
    }
    let text = std::fs::read_to_string(&path).map_err(Error::open(&path))?;
    serde_json::from_str(&text).map(Some).map_err(|e| Error::file(&path, format!("is no summary of a run: {e}")))
}

fn interrupted(run: &Planned) -> Error {
    Error::Interrupted(format!("stopped in {}; the same command goes on with it", run.out.display()))
}

fn start(comparison: &Comparison, run: &Planned) -> Result<Child> {
    let mut command = Command::new(comparison.program);
    command.arg("run").arg(comparison.protocol).arg("--out").arg(&run.out).arg("--resume").args(comparison.flags);
    for set in &run.sets {
        command.args(["--set", set]);
    }
    // What a run prints at its end is for a run alone: here the table is the end.
    command.stdout(Stdio::null());
    die_with_parent(&mut command);
    command.spawn().map_err(Error::io("cannot start", comparison.program))
}

/// Its exit code; none where a signal ended it.
fn wait(mut child: Child, comparison: &Comparison) -> Result<Option<i32>> {
    let mut told = false;
    loop {
        if let Some(status) = child.try_wait().map_err(Error::io("cannot wait for", comparison.program))? {
            return Ok(status.code());
        }
        if !told && comparison.stop.load(Ordering::Relaxed) {
            // SAFETY: the child has not been waited for, so the number is still its own.
            unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGTERM) };
            told = true;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A run whose comparison was killed saves and stops too, so that the next call finds its folder free.
#[cfg(target_os = "linux")]
fn die_with_parent(command: &mut Command) {
    use std::os::unix::process::CommandExt;
    // SAFETY: prctl may be called between fork and exec.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
            Ok(())
        });
    }
}

#[cfg(not(target_os = "linux"))]
fn die_with_parent(_: &mut Command) {}

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
            add(&run.method, name.clone(), "last", network.last);
            add(&run.method, name.clone(), "best", network.best_test.0);
            add(&run.method, name.clone(), "seconds", summary.seconds_per_step);
            add(&run.method, name.clone(), "memory", summary.peak_mb);
            if let Some((held, _)) = network.by_holdout {
                add(&run.method, name, "held", held);
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
