//! The plan of an experiment: settings and seeds around one recipe, what is measured of each run, and what is looked at together. It
//! resolves to units, each with a hash of everything that decides its numbers.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::error::{Error, Result};
use crate::eval::measures;
use crate::experiment::jobs::{self, Planned};
use crate::files;
use crate::methods;
use crate::recipe::{self, Recipe};

/// A plan file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    pub title: String,
    /// What the reader must know before the numbers: the scale, the machine's budget.
    pub about: String,
    /// The recipe of all runs, beside the plan.
    pub recipe: PathBuf,
    /// Commands of `mcl-eval` made for every run, without `--run`.
    pub evaluate: Vec<String>,
    /// The first is the main one.
    #[serde(rename = "group")]
    pub groups: Vec<Group>,
    #[serde(default, rename = "together")]
    pub together: Vec<Together>,
}

/// Settings that belong into one table. Their runs are made seed by seed, so that what is there can be compared at any time.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    pub title: String,
    pub seeds: Vec<u64>,
    /// Settings, here or in groups before, that those which come after them are compared with.
    pub against: Vec<String>,
    #[serde(rename = "setting")]
    pub settings: Vec<Setting>,
}

impl Group {
    /// What its tables and curves show: the settings of other groups that it is compared with, then its own.
    pub fn shown(&self) -> impl Iterator<Item = &str> {
        let own = |name: &str| self.settings.iter().any(|s| s.name == name);
        let others = self.against.iter().map(String::as_str).filter(move |name| !own(name));
        others.chain(self.settings.iter().map(|s| s.name.as_str()))
    }
}

/// What is changed in the recipe.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Setting {
    pub name: String,
    /// As `--set` of `mcl-train run`.
    pub set: Vec<String>,
}

/// One command over the runs of several settings.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Together {
    pub name: String,
    pub settings: Vec<String>,
    pub seed: u64,
    pub evaluate: String,
}

/// What is made or skipped as a whole.
pub struct Unit {
    pub name: String,
    /// Changes when anything that decides its numbers does.
    pub hash: String,
    pub work: Work,
    pub evaluate: Vec<String>,
}

pub enum Work {
    /// A pre-training run, then its measurements.
    Run { setting: String, seed: u64, run: Box<Planned> },
    /// A measurement over the runs of these units.
    Over(Vec<String>),
}

impl Plan {
    pub fn read(path: &Path) -> Result<Plan> {
        let text = std::fs::read_to_string(path).map_err(Error::open(path))?;
        let plan: Plan = toml::from_str(&text).map_err(|e| Error::file(path, e.to_string().trim_end()))?;
        plan.check().map_err(|what| Error::file(path, what))?;
        Ok(plan)
    }

    pub fn settings(&self) -> impl Iterator<Item = (&Group, &Setting)> {
        self.groups.iter().flat_map(|g| g.settings.iter().map(move |s| (g, s)))
    }

    fn check(&self) -> std::result::Result<(), String> {
        let mut names: Vec<&str> = vec![];
        for group in &self.groups {
            if group.seeds.is_empty() || group.settings.is_empty() {
                return Err(format!("group `{}` needs at least one seed and one setting", group.title));
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
        if self.groups.is_empty() {
            return Err("no [[group]]: nothing to run".into());
        }
        for one in &self.together {
            if let Some(other) = one.settings.iter().find(|s| !names.contains(&s.as_str())) {
                return Err(format!("[[together]] `{}` names `{other}`; known: {}", one.name, names.join(", ")));
            }
        }
        let lines = self.evaluate.iter().chain(self.together.iter().map(|t| &t.evaluate));
        for line in lines {
            measures::check_line(line).map_err(|e| format!("`{line}`: {e}"))?;
        }
        Ok(())
    }

    /// All units in the order they are made. `file` is the plan's own path; runs go below `runs`.
    pub fn units(&self, file: &Path, runs: &Path) -> Result<Vec<Unit>> {
        let names = methods::names();
        let protocol = self.protocol(file);
        let text = std::fs::read_to_string(&protocol).map_err(Error::open(&protocol))?;
        let origin = protocol.display().to_string();
        let mut units: Vec<Unit> = vec![];
        for group in &self.groups {
            for &seed in &group.seeds {
                for setting in &group.settings {
                    let mut sets = setting.set.clone();
                    sets.push(format!("train.seed={seed}"));
                    let recipe = Recipe::parse(&text, &origin, &sets, &names)?;
                    jobs::accepts(&recipe)?;
                    let asked = recipe::asked(&text, &origin, &sets, &names)?;
                    let lines: Vec<String> = asked.iter().map(|(k, v)| format!("{k}={v}")).chain(self.evaluate.iter().cloned()).collect();
                    let name = unit_name(&setting.name, seed);
                    let run = Planned { sets, recipe, out: runs.join(&name) };
                    units.push(Unit {
                        hash: hash(&lines),
                        work: Work::Run { setting: setting.name.clone(), seed, run: Box::new(run) },
                        evaluate: self.evaluate.clone(),
                        name,
                    });
                }
            }
        }
        for one in &self.together {
            let members: Vec<String> = one.settings.iter().map(|s| unit_name(s, one.seed)).collect();
            let mut lines = vec![one.evaluate.clone()];
            for member in &members {
                let unit = units.iter().find(|u| u.name == *member).ok_or_else(|| {
                    Error::file(file, format!("[[together]] `{}`: no run {member}; its seed is none of its group's", one.name))
                })?;
                lines.push(unit.hash.clone());
            }
            units.push(Unit {
                name: one.name.clone(),
                hash: hash(&lines),
                work: Work::Over(members),
                evaluate: vec![one.evaluate.clone()],
            });
        }
        Ok(units)
    }

    pub fn protocol(&self, file: &Path) -> PathBuf {
        file.parent().unwrap_or(Path::new(".")).join(&self.recipe)
    }
}

pub fn unit_name(setting: &str, seed: u64) -> String {
    format!("{setting}-seed{seed}")
}

fn hash(lines: &[String]) -> String {
    files::sha256(lines.join("\n").as_bytes())[..16].to_string()
}
