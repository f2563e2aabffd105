//! Plans for the paper's tables and figures: recipes down, settings across, a run for each cell and seed. A table plan resolves to a plan
//! that the one runner makes, at the paper's size or cut down to a night on two cores; what the cut is stands in the plan.

use std::path::Path;

use serde::Deserialize;

use super::plan::{Group, Item, Plan, Setting};
use super::runner::make_below;
use crate::error::{Error, Result, counted};
use crate::eval::Common;
use crate::methods;
use crate::recipe::{Recipe, shipped};
use crate::registry;
use crate::report::paper::{Printed, printed};
use crate::report::plot::file_stem;

/// A plan of protocols/plans/paper.
pub struct ShippedPlan {
    /// The file's name without its ending.
    pub name: &'static str,
    text: &'static str,
}

macro_rules! shipped_plans {
    ($($name:literal,)*) => {
        &[$(ShippedPlan { name: $name, text: include_str!(concat!("../../protocols/plans/paper/", $name, ".toml")) },)*]
    };
}

/// The paper's tables and figures, in its order.
pub const PLANS: &[ShippedPlan] = shipped_plans![
    "cifar100-same",
    "cifar100-different",
    "cifar100-three",
    "few-shot",
    "transfer-linear",
    "imagenet-same",
    "imagenet-different",
    "imagenet-swin",
    "transfer-coco",
    "ablation-terms",
    "ablation-levels",
    "ablation-matching",
    "lambda",
    "mining",
    "ablation-dim",
    "alpha-beta",
    "tsne",
    "cost",
];

/// The plan of this name, or an error that lists those there are.
pub fn find(name: &str) -> Result<TablePlan> {
    let found = registry::find("plan", name.strip_suffix(".toml").unwrap_or(name), PLANS, |plan| plan.name)?;
    TablePlan::parse(found.name, found.text)
}

/// How much of a table is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Scale {
    /// What the plan cuts it down to: a night on two cores.
    Small,
    /// As the paper ran it.
    Paper,
}

/// A table of the paper: recipes down, settings across.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TablePlan {
    /// The form of the file.
    schema: u32,
    /// The file's name without its ending.
    #[serde(skip)]
    pub name: String,
    /// What it is, in one line.
    pub title: String,
    /// What the paper calls it: "Table 1", "Figure 7".
    pub label: String,
    /// What the reader must know before the numbers.
    pub about: String,
    /// The numbers of protocols/paper that stand beside ours; none where the paper prints none.
    #[serde(default)]
    pub printed: Option<String>,
    /// The numbers of protocols/paper that the paper gives in its text.
    #[serde(default)]
    pub text: Option<String>,
    /// The measurement whose rows are the table's numbers; without one they are the networks' test accuracies.
    #[serde(default)]
    pub shows: Option<String>,
    /// What is still to be done by hand with every run for the table's numbers, as command lines with RUN for its folder.
    #[serde(default)]
    pub then: Vec<String>,
    seeds: Vec<u64>,
    /// Measurements of every run, as lines of `mcl-eval` without `--run`.
    #[serde(default)]
    evaluate: Vec<String>,
    #[serde(rename = "row")]
    rows: Vec<RowSpec>,
    #[serde(rename = "column")]
    columns: Vec<ColumnSpec>,
    small: Cut,
}

/// A row: the networks and what they are trained on.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct RowSpec {
    /// The recipe's name.
    recipe: String,
    /// Where one recipe has several rows.
    #[serde(default)]
    name: Option<String>,
    /// Overrides of the recipe.
    #[serde(default)]
    set: Vec<String>,
}

impl RowSpec {
    fn name(&self) -> &str {
        self.name.as_deref().unwrap_or(&self.recipe)
    }
}

/// A column: the method, or what is varied.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct ColumnSpec {
    /// As the numbers of protocols/paper call it, e.g. `l_mcl:dim=32`.
    name: String,
    set: Vec<String>,
}

/// What is left at the small scale.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Cut {
    /// What the cut is and what it can show.
    about: String,
    seeds: Vec<u64>,
    /// Names of the rows that stay; all where there are none.
    #[serde(default)]
    rows: Vec<String>,
    /// Names of the columns that stay; all where there are none.
    #[serde(default)]
    columns: Vec<String>,
    /// Overrides for all runs, after the others.
    set: Vec<String>,
    /// In place of the measurements of the whole.
    #[serde(default)]
    evaluate: Option<Vec<String>>,
}

/// One cell of a table, resolved.
pub struct Cell {
    /// The row's name in the plan.
    pub row: String,
    /// Was the row given a name of its own, because one recipe has several?
    pub named: bool,
    /// The column's name, as the paper's numbers call it.
    pub column: String,
    /// The recipe of its runs, with the first seed.
    pub recipe: Recipe,
    /// What the runs of it are called, without the seed.
    pub setting: String,
    recipe_name: String,
    sets: Vec<String>,
}

impl TablePlan {
    fn parse(name: &str, text: &str) -> Result<TablePlan> {
        let plan: TablePlan = toml::from_str(text).map_err(|e| Error::input(format!("plan {name}: {}", e.message())))?;
        if plan.schema != SCHEMA {
            return Err(Error::input(format!("plan {name}: schema = {}; accepted: {SCHEMA}", plan.schema)));
        }
        Ok(TablePlan { name: name.to_string(), ..plan })
    }

    /// What the cut is, at the small scale.
    pub fn cut(&self, scale: Scale) -> Option<&str> {
        (scale == Scale::Small).then_some(self.small.about.trim())
    }

    /// The seeds of every cell.
    pub fn seeds(&self, scale: Scale) -> &[u64] {
        match scale {
            Scale::Small => &self.small.seeds,
            Scale::Paper => &self.seeds,
        }
    }

    fn evaluate(&self, scale: Scale) -> &[String] {
        match (&self.small.evaluate, scale) {
            (Some(lines), Scale::Small) => lines,
            _ => &self.evaluate,
        }
    }

    /// The names of rows and columns that are run.
    pub fn axes(&self, scale: Scale) -> (Vec<&str>, Vec<&str>) {
        let kept = |asked: &[String], name: &str| scale == Scale::Paper || asked.is_empty() || asked.iter().any(|a| a == name);
        let rows = self.rows.iter().map(RowSpec::name).filter(|name| kept(&self.small.rows, name)).collect();
        let columns = self.columns.iter().map(|c| c.name.as_str()).filter(|name| kept(&self.small.columns, name)).collect();
        (rows, columns)
    }

    /// Every cell that the paper's table has; where the paper prints no numbers, every cell.
    pub fn cells(&self, scale: Scale) -> Result<Vec<Cell>> {
        let (rows, columns) = self.axes(scale);
        for (asked, known) in [
            (&self.small.rows, self.rows.iter().map(|r| r.name().to_string()).collect::<Vec<_>>()),
            (&self.small.columns, self.columns.iter().map(|c| c.name.clone()).collect()),
        ] {
            if let Some(unknown) = asked.iter().find(|name| !known.contains(name)) {
                return Err(Error::input(format!("plan {}: [small] names `{unknown}`; known: {}", self.name, known.join(", "))));
            }
        }
        let printed = self.printed_rows()?;
        let mut cells = vec![];
        for row in self.rows.iter().filter(|r| rows.contains(&r.name())) {
            let file = shipped::find(&row.recipe).ok_or_else(|| {
                Error::input(format!("plan {}: no recipe `{}` ships; `mcl-train list recipes` shows them", self.name, row.recipe))
            })?;
            for column in self.columns.iter().filter(|c| columns.contains(&c.name.as_str())) {
                let small: &[String] = if scale == Scale::Small { &self.small.set } else { &[] };
                let whole = [&row.set[..], &column.set].concat();
                let origin = format!("{} ({})", row.recipe, column.name);
                // The cell is looked up by the networks of the paper, whatever the cut changes.
                let theirs = Recipe::parse(file.text, &origin, &whole, &methods::names())?;
                if !printed.is_empty() && !self.has(&printed, &theirs, &column.name) {
                    continue;
                }
                let sets = [&whole[..], small].concat();
                let recipe = Recipe::parse(file.text, &origin, &sets, &methods::names())?;
                cells.push(Cell {
                    row: row.name().to_string(),
                    named: row.name.is_some(),
                    column: column.name.clone(),
                    recipe,
                    setting: file_stem(&format!("{}-{}", row.name(), column.name)),
                    recipe_name: row.recipe.clone(),
                    sets,
                });
            }
        }
        Ok(cells)
    }

    /// The paper's numbers of this table.
    pub fn printed_rows(&self) -> Result<Vec<Printed>> {
        let Some(table) = &self.printed else { return Ok(vec![]) };
        Ok(printed()?.into_iter().filter(|p| p.table.split(':').next() == Some(table)).collect())
    }

    /// Does the paper's table have a number for these networks and this column?
    fn has(&self, printed: &[Printed], recipe: &Recipe, column: &str) -> bool {
        let archs = &recipe.cohort.archs;
        printed.iter().any(|p| p.method == column && archs.contains(&p.network) && p.pair().is_none_or(|pair| pair == archs.join("+")))
    }

    /// The plan that the runner makes; `sets` changes all recipes further.
    pub fn plan(&self, scale: Scale, sets: &[String]) -> Result<Plan> {
        let cells = self.cells(scale)?;
        let groups = cells.into_iter().map(|cell| Group {
            title: cell.setting.clone(),
            recipe: Some(cell.recipe_name.into()),
            seeds: self.seeds(scale).to_vec(),
            settings: vec![Setting { name: cell.setting, set: [&cell.sets[..], sets].concat() }],
            ..Group::default()
        });
        Ok(Plan {
            schema: super::plan::SCHEMA,
            title: self.title.clone(),
            about: self.about.clone(),
            evaluate: self.evaluate(scale).to_vec(),
            groups: groups.collect(),
            origin: format!("protocols/plans/paper/{}.toml", self.name).into(),
            ..Plan::default()
        })
    }
}

/// The form of table plans; those of plans for the evidence have a form of their own.
const SCHEMA: u32 = 1;

/// Makes the runs of a table that are not finished, below `folder`, and their measurements.
pub fn make(items: &[Item], folder: &Path, side_by_side: usize, common: &Common) -> Result<()> {
    if side_by_side == 0 {
        return Err(Error::input("--jobs 0; accepted: 1 or more"));
    }
    let mut pending = vec![];
    for (place, item) in items.iter().enumerate() {
        if !item.finished(FOLDER_FLAG)? {
            pending.push(place);
        }
    }
    common.say(format!("{}, {} finished", counted(items.len(), "run"), items.len() - pending.len()));
    if pending.is_empty() { Ok(()) } else { make_below(folder, FOLDER_FLAG, items, pending, side_by_side, &|_, _| Ok(()), common) }
}

const FOLDER_FLAG: &str = "--out";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_plan_of_the_folder_ships_and_resolves_at_both_scales() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("protocols/plans/paper");
        let mut files: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|e| e.unwrap().path())
            .filter(|path| path.extension().is_some_and(|e| e == "toml"))
            .map(|path| path.file_stem().unwrap().to_string_lossy().into_owned())
            .collect();
        files.sort();
        let mut names: Vec<&str> = PLANS.iter().map(|p| p.name).collect();
        names.sort();
        assert_eq!(names, files, "add the new file to PLANS");
        for shipped in PLANS {
            let table = find(shipped.name).unwrap();
            for scale in [Scale::Small, Scale::Paper] {
                // Every recipe and every line of a measurement is looked at.
                let items = table.plan(scale, &[]).unwrap().items(Path::new("runs")).unwrap_or_else(|e| panic!("{}: {e}", shipped.name));
                assert!(!items.is_empty(), "{} {scale:?}", shipped.name);
            }
        }
    }

    /// Every number that the paper prints of an accuracy or a precision has a cell of a plan.
    #[test]
    fn every_printed_number_has_a_cell() {
        let plans: Vec<TablePlan> = PLANS.iter().map(|p| find(p.name).unwrap()).collect();
        for row in printed().unwrap() {
            let table = row.table.split(':').next().unwrap_or_default();
            let plan = plans.iter().find(|p| p.printed.as_deref() == Some(table)).unwrap_or_else(|| panic!("no plan for {table}"));
            let cells = plan.cells(Scale::Paper).unwrap();
            let alike = |c: &&Cell| c.column == row.method && row.pair().is_none_or(|pair| pair == c.recipe.cohort.archs.join("+"));
            let found = cells.iter().filter(alike).any(|c| c.recipe.cohort.archs.contains(&row.network));
            assert!(found, "{}: {} by {}", row.table, row.network, row.method);
        }
    }
}
