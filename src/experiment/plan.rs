//! The plan of an experiment: settings and seeds around one recipe, what is measured of each run, and what is measured of several runs
//! together. It resolves to items, each with a hash of everything that decides its numbers. A plan is a TOML file (protocols/plans/), or is
//! made of flags.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use tch::Device;

use crate::error::{Error, Result};
use crate::eval::measures;
use crate::files;
use crate::methods::{self, Task};
use crate::nets;
use crate::recipe::{self, Recipe, shipped};
use crate::run::RunFolder;

/// The newest form of plan files. Those without a `schema` were made before there was one and have the same keys.
pub(super) const SCHEMA: u32 = 1;

/// An experiment: one recipe, settings and seeds around it, measurements.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    #[serde(default)]
    pub(crate) schema: u32,
    pub(crate) title: String,
    /// What the reader must know before the numbers: the scale, the machine's budget.
    pub(crate) about: String,
    /// The recipe of all runs. In a file it is named relative to the plan.
    pub(crate) recipe: PathBuf,
    /// Measurements of every run, as lines of `mcl-eval` without `--run`.
    pub(crate) evaluate: Vec<String>,
    /// The first is the main one.
    #[serde(rename = "group")]
    pub(crate) groups: Vec<Group>,
    #[serde(default)]
    pub(crate) together: Vec<Together>,
    /// What was expected before the first run. The first is the primary one.
    #[serde(default, rename = "hypothesis")]
    pub(crate) hypotheses: Vec<Hypothesis>,
    /// What a fault is blamed on.
    #[serde(skip)]
    pub(crate) origin: PathBuf,
    #[serde(skip)]
    pub(crate) layout: Layout,
}

/// Where the runs of a plan lie, below one folder.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) enum Layout {
    /// `SETTING-seedN`.
    #[default]
    SideBySide,
    /// `SETTING/seed-N`.
    BySetting,
}

/// Settings that belong into one table. Their runs are made seed by seed, so that what is there can be compared at any time.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Group {
    pub(crate) title: String,
    /// What the names of its settings mean, for those who read the tables.
    #[serde(default)]
    pub(crate) about: String,
    /// The recipe of its runs, where it is another than the plan's.
    #[serde(skip)]
    pub(crate) recipe: Option<PathBuf>,
    pub(crate) seeds: Vec<u64>,
    /// Settings, here or in groups before, that those which come after them are compared with.
    pub(crate) against: Vec<String>,
    #[serde(rename = "setting")]
    pub(crate) settings: Vec<Setting>,
}

impl Group {
    /// Settings of other groups that it is compared with.
    pub(crate) fn outside(&self) -> impl Iterator<Item = &str> {
        let own = |name: &str| self.settings.iter().any(|s| s.name == name);
        self.against.iter().map(String::as_str).filter(move |name| !own(name))
    }

    /// What its tables and curves show: the settings of other groups that it is compared with, then its own.
    pub(crate) fn shown(&self) -> impl Iterator<Item = &str> {
        self.outside().chain(self.settings.iter().map(|s| s.name.as_str()))
    }
}

/// What is changed in the recipe.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Setting {
    pub(crate) name: String,
    /// As `--set` of `mcl-train run`.
    pub(crate) set: Vec<String>,
}

/// A difference that was expected before anything was run. The report gives the verdict.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Hypothesis {
    /// In a sentence.
    pub(crate) says: String,
    /// The setting that leads...
    pub(crate) more: String,
    /// ... this one.
    pub(crate) less: String,
    /// On the measurement whose name in tables begins so.
    pub(crate) question: String,
}

/// One measurement over the runs of several settings.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Together {
    name: String,
    settings: Vec<String>,
    seed: u64,
    evaluate: String,
}

/// What is made or skipped as a whole: a run with its measurements, or a measurement over several runs.
pub struct Item {
    /// `SETTING-seedN`, or what the plan calls a measurement over several runs.
    pub name: String,
    /// Changes when anything that decides its numbers does: what the recipe asks for, and the measurements.
    pub hash: String,
    /// What there is to do.
    pub work: Work,
    pub(crate) measurements: Vec<Measurement>,
    /// Where the run goes, or the results of a measurement over several.
    pub(crate) folder: RunFolder,
}

/// The work of an item.
pub enum Work {
    /// A pre-training run, then its measurements.
    Run(Box<PlannedRun>),
    /// A measurement over the runs of the items with these names.
    Joint(Vec<String>),
    /// Measurements of a network that is there, by the flags that name it.
    Network(Vec<String>),
}

/// A pre-training run to be made.
pub struct PlannedRun {
    /// Its recipe, resolved.
    pub recipe: Recipe,
    pub(crate) setting: String,
    /// The recipe's file or name.
    pub(crate) from: PathBuf,
    pub(crate) seed: u64,
    /// The overrides that ask for it.
    pub(crate) sets: Vec<String>,
}

/// A measurement to be made.
pub(crate) struct Measurement {
    /// The run's id and a hash of the line; its rows carry it and are found by it.
    pub(crate) id: String,
    /// As the plan has it.
    pub(crate) line: String,
}

impl Measurement {
    /// `of` is the id of what is measured: another line or another run is another measurement.
    pub(super) fn new(of: &str, line: &str) -> Measurement {
        let words: Vec<&str> = line.split_whitespace().collect();
        Measurement { id: format!("{of}/{}", hash(&[words.join(" ")])), line: line.to_string() }
    }
}

impl Item {
    /// What the rows of its measurements carry.
    pub fn measurement_ids(&self) -> impl Iterator<Item = &str> {
        self.measurements.iter().map(|m| m.id.as_str())
    }

    /// The run, unless it is a measurement over several.
    pub(crate) fn run(&self) -> Option<&PlannedRun> {
        match &self.work {
            Work::Run(run) => Some(run),
            Work::Joint(_) | Work::Network(_) => None,
        }
    }
}

impl Plan {
    /// Reads a plan file.
    pub fn read(path: &Path) -> Result<Plan> {
        let text = files::read_text(path)?;
        let mut plan: Plan = toml::from_str(&text).map_err(|e| Error::file(path, e.to_string().trim_end()))?;
        plan.recipe = path.parent().unwrap_or(Path::new(".")).join(&plan.recipe);
        plan.origin = path.to_path_buf();
        Ok(plan)
    }

    pub(crate) fn settings(&self) -> impl Iterator<Item = (&Group, &Setting)> {
        self.groups.iter().flat_map(|g| g.settings.iter().map(move |s| (g, s)))
    }

    /// Does it make sense? Every line of it is looked at: what is refused should not be found out after an hour of training.
    fn check(&self) -> std::result::Result<(), String> {
        if self.schema > SCHEMA {
            return Err(format!("schema = {}; accepted: up to {SCHEMA}", self.schema));
        }
        let mut names: Vec<&str> = vec![];
        for group in &self.groups {
            if group.seeds.is_empty() || group.settings.is_empty() {
                return Err(format!("group `{}` needs at least one seed and one setting", group.title));
            }
            if let Some(seed) = group.seeds.iter().enumerate().find_map(|(i, s)| group.seeds[..i].contains(s).then_some(s)) {
                return Err(format!("group `{}` names seed {seed} twice; one seed is one draw", group.title));
            }
            for setting in &group.settings {
                if names.contains(&setting.name.as_str()) {
                    return Err(format!("two settings are called `{}`", setting.name));
                }
                names.push(&setting.name);
            }
            if let Some(other) = group.against.iter().find(|a| !names.contains(&a.as_str())) {
                return Err(format!("group `{}` is compared with `{other}`; known there: {}", group.title, names.join(", ")));
            }
        }
        // Each is the name of a folder: another one would be outside of where runs go.
        let plain = |name: &str| !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0']);
        if let Some(name) = names.iter().copied().chain(self.together.iter().map(|t| t.name.as_str())).find(|name| !plain(name)) {
            return Err(format!("`{name}` would be a folder; accepted: a name without slashes that does not begin with a dot"));
        }
        if self.groups.is_empty() {
            return Err("no [[group]]: nothing to run".into());
        }
        for one in &self.together {
            if let Some(other) = one.settings.iter().find(|s| !names.contains(&s.as_str())) {
                return Err(format!("[[together]] `{}` names `{other}`; known: {}", one.name, names.join(", ")));
            }
        }
        for one in &self.hypotheses {
            if let Some(other) = [&one.more, &one.less].into_iter().find(|s| !names.contains(&s.as_str())) {
                return Err(format!("[[hypothesis]] `{}` names `{other}`; known: {}", one.says, names.join(", ")));
            }
            if one.more == one.less {
                return Err(format!("[[hypothesis]] `{}` compares `{}` with itself", one.says, one.more));
            }
        }
        for line in self.evaluate.iter().chain(self.together.iter().map(|t| &t.evaluate)) {
            measures::check_line(line).map_err(|e| format!("`{line}`: {e}"))?;
        }
        Ok(())
    }

    /// All items in the order they are made, each looked at first: a refusal should not come after days. Runs go below `runs`.
    pub fn items(&self, runs: &Path) -> Result<Vec<Item>> {
        self.check().map_err(|what| Error::file(&self.origin, what))?;
        let names = methods::names();
        let mut items: Vec<Item> = vec![];
        // The id of every run, for measurements over several.
        let mut ids: Vec<String> = vec![];
        for group in &self.groups {
            let from = group.recipe.as_ref().unwrap_or(&self.recipe);
            let (text, origin) = (shipped::open(from)?, from.display().to_string());
            for &seed in &group.seeds {
                for setting in &group.settings {
                    let mut sets = setting.set.clone();
                    sets.push(format!("train.seed={seed}"));
                    let recipe = Recipe::parse(&text, &origin, &sets, &names)?;
                    // What a method takes does not depend on the seed.
                    if Some(&seed) == group.seeds.first() {
                        accepts(&recipe)?;
                    }
                    let asked = recipe::asked(&text, &origin, &sets, &names)?;
                    let mut lines: Vec<String> = asked.iter().map(|(k, v)| format!("{k}={v}")).collect();
                    let name = run_name(&setting.name, seed);
                    let id = format!("{name}-{}", hash(&lines));
                    lines.extend(self.evaluate.iter().cloned());
                    let place = match self.layout {
                        Layout::SideBySide => PathBuf::from(&name),
                        Layout::BySetting => Path::new(&setting.name).join(format!("seed-{seed}")),
                    };
                    items.push(Item {
                        hash: hash(&lines),
                        work: Work::Run(Box::new(PlannedRun { setting: setting.name.clone(), from: from.clone(), seed, sets, recipe })),
                        measurements: self.evaluate.iter().map(|line| Measurement::new(&id, line)).collect(),
                        folder: RunFolder::at(runs.join(place)),
                        name,
                    });
                    ids.push(id);
                }
            }
        }
        for one in &self.together {
            let members: Vec<String> = one.settings.iter().map(|s| run_name(s, one.seed)).collect();
            let (mut lines, mut measured) = (vec![one.evaluate.clone()], vec![]);
            for member in &members {
                let place = items.iter().position(|item| item.name == *member).ok_or_else(|| {
                    Error::file(&self.origin, format!("[[together]] `{}`: no run {member}; its seed is none of its group's", one.name))
                })?;
                lines.push(items[place].hash.clone());
                measured.push(ids[place].clone());
            }
            items.push(Item {
                name: one.name.clone(),
                hash: hash(&lines),
                work: Work::Joint(members),
                measurements: vec![Measurement::new(&format!("{}-{}", one.name, hash(&measured)), &one.evaluate)],
                folder: RunFolder::at(runs.join(&one.name)),
            });
        }
        Ok(items)
    }
}

fn run_name(setting: &str, seed: u64) -> String {
    format!("{setting}-seed{seed}")
}

pub(super) fn hash(lines: &[String]) -> String {
    files::sha256(lines.join("\n").as_bytes())[..16].to_string()
}

/// Does the method take this cohort and these options? Asked with ten classes of two images: the data are opened by the run.
fn accepts(recipe: &Recipe) -> Result<()> {
    let archs = recipe.cohort.archs.iter().map(|name| nets::find(name)).collect::<Result<Vec<_>>>()?;
    let labels: Vec<i64> = (0..20).map(|i| i % 10).collect();
    let task = Task::new(recipe, &archs, 10, &labels, Device::Cpu);
    let spec = methods::find(recipe.method_name())?;
    spec.check_frozen(task.frozen)?;
    (spec.build)(&task, recipe.method_options()).map(drop)
}
