//! Which rows of the paper's tables a run may stand beside: those it agrees with in everything the paper fixes. A run of fewer epochs, of a
//! part of the images, of another dimension or weight is another experiment, however alike its name is.

use std::collections::BTreeMap;

use tch::Device;

use super::table::{self, Cell, PLANS, Scale};
use crate::error::Result;
use crate::methods::{self, Task};
use crate::nets;
use crate::recipe::Recipe;
use crate::run::Run;

/// A cell of a paper's table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The plan of the table.
    pub plan: &'static str,
    /// Its row there.
    pub row: String,
    /// Its column, as the paper's numbers call it.
    pub column: String,
}

/// How a run stands to the paper.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Beside {
    /// It is a run of these cells.
    Cells(Vec<Place>),
    /// The same networks on the same data by the same method as this cell, but for what differs: `train.epochs is 3 here and 300 there`.
    Other(Place, Vec<String>),
    /// The paper has no such networks, data and method.
    Nowhere,
}

/// What the paper does not fix: chance, how numbers are computed, and what is kept of a run.
const FREE: &[&str] = &[
    "train.seed",
    "train.choose",
    "train.peer_threads",
    "train.precision",
    "train.tf32",
    "train.deterministic",
    "data.on_device",
    "method.hvp",
    "method.preset", // the keys it fills are compared
];

fn fixed(key: &str) -> bool {
    !key.starts_with("save.") && !FREE.contains(&key)
}

/// The cells of the paper's tables at the paper's size.
pub struct Paper {
    cells: Vec<(&'static str, Cell)>,
}

impl Paper {
    /// All tables for which the paper prints numbers.
    pub fn read() -> Result<Paper> {
        let mut cells = vec![];
        for shipped in PLANS {
            let plan = table::find(shipped.name)?;
            if plan.printed.is_some() {
                cells.extend(plan.cells(Scale::Paper)?.into_iter().map(|cell| (shipped.name, cell)));
            }
        }
        Ok(Paper { cells })
    }

    /// Where a run stands.
    pub fn beside(&self, run: &Run) -> Result<Beside> {
        let path = run.folder.recipe();
        let text = std::fs::read_to_string(&path).map_err(crate::error::Error::open(&path))?;
        self.place(&Recipe::parse(&text, &path.display().to_string(), &[], &methods::names())?)
    }

    /// Where a run of this recipe stands.
    pub fn place(&self, recipe: &Recipe) -> Result<Beside> {
        let alike = |cell: &Cell| {
            let theirs = &cell.recipe;
            theirs.data.name == recipe.data.name
                && theirs.cohort.archs == recipe.cohort.archs
                && theirs.method_name() == recipe.method_name()
        };
        let ours = resolved(recipe)?;
        let (mut met, mut nearest): (Vec<Place>, Option<(Place, Vec<String>)>) = (vec![], None);
        for (plan, cell) in self.cells.iter().filter(|(_, cell)| alike(cell)) {
            let place = Place { plan, row: cell.row.clone(), column: cell.column.clone() };
            let differs = differences(&ours, &resolved(&cell.recipe)?);
            if differs.is_empty() {
                met.push(place);
            } else if nearest.as_ref().is_none_or(|(_, before)| differs.len() < before.len()) {
                nearest = Some((place, differs));
            }
        }
        Ok(match (met.is_empty(), nearest) {
            (false, _) => Beside::Cells(met),
            (true, Some((place, differs))) => Beside::Other(place, differs),
            (true, None) => Beside::Nowhere,
        })
    }
}

/// Every key with its value, the method's as the method itself resolves them.
fn resolved(recipe: &Recipe) -> Result<BTreeMap<String, String>> {
    let archs = recipe.cohort.archs.iter().map(|name| nets::find(name)).collect::<Result<Vec<_>>>()?;
    // Ten classes of two images: only the options are asked for.
    let labels: Vec<i64> = (0..20).map(|i| i % 10).collect();
    let task = Task::new(recipe, &archs, 10, &labels, Device::Cpu);
    let mut method = (methods::find(recipe.method_name())?.build)(&task, recipe.method_options())?.options();
    method.insert("name".into(), recipe.method_name().into());
    Ok(Recipe { method, ..recipe.clone() }.flat())
}

fn differences(ours: &BTreeMap<String, String>, theirs: &BTreeMap<String, String>) -> Vec<String> {
    let keys: std::collections::BTreeSet<&String> = ours.keys().chain(theirs.keys()).filter(|key| fixed(key)).collect();
    let show = |value: Option<&String>| value.map_or("absent", String::as_str).to_string();
    let differs = |key: &&&String| ours.get(**key) != theirs.get(**key);
    keys.iter().filter(differs).map(|key| format!("{key} is {} here and {} there", show(ours.get(*key)), show(theirs.get(*key)))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::shipped;

    fn place(name: &str, sets: &[&str]) -> Beside {
        let sets: Vec<String> = sets.iter().map(|s| s.to_string()).collect();
        let recipe = Recipe::parse(shipped::find(name).unwrap().text, name, &sets, &methods::names()).unwrap();
        Paper::read().unwrap().place(&recipe).unwrap()
    }

    fn cells(beside: Beside) -> Vec<(&'static str, String)> {
        match beside {
            Beside::Cells(places) => places.into_iter().map(|p| (p.plan, p.column)).collect(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_run_meets_a_row_only_if_everything_agrees() {
        let column = |plan, name: &str| (plan, name.to_string());
        assert_eq!(cells(place("cifar100-resnet32", &[])), [column("cifar100-same", "l_mcl")]);
        // What the paper does not fix may differ.
        assert_eq!(
            cells(place("cifar100-resnet32", &["train.seed=7", "method.hvp=difference", "save.every_epochs=10"])),
            [column("cifar100-same", "l_mcl")]
        );
        for (set, named) in [
            ("method.dim=32", "method.dim is 32 here and 128 there"),
            ("data.fraction=0.1", "data.fraction is 0.1 here and 1.0 there"),
            ("train.epochs=3", "train.epochs is 3 here and 300 there"),
            ("method.mode=reference", "method.mode is \"reference\" here and \"paper\" there"),
            ("data.holdout=20", "data.holdout is 20 here and 0 there"),
            ("method.terms.ens=0", "method.terms.ens is 0.0 here and 1.0 there"),
        ] {
            let Beside::Other(nearest, differs) = place("cifar100-resnet32", &[set]) else { panic!("{set} stands in the paper's row") };
            assert_eq!((nearest.plan, nearest.column.as_str()), ("cifar100-same", "l_mcl"), "{set}");
            assert!(differs.iter().any(|d| d == named), "{set}: {differs:?}");
        }
        assert_eq!(place("quickstart", &[]), Beside::Nowhere);
    }

    #[test]
    fn an_ablation_meets_its_own_row() {
        let column = |plan, name: &str| (plan, name.to_string());
        let dim = place("cifar100-resnet110", &["method.dim=32", "method.terms.task_gate=0", "method.terms.ens=0"]);
        assert_eq!(cells(dim), [column("ablation-dim", "l_mcl:dim=32")]);
        // The baseline is printed in several tables.
        let baseline = cells(place("cifar100-resnet110", &["method.name=baseline"]));
        for plan in ["cifar100-same", "ablation-terms", "ablation-levels"] {
            assert!(baseline.contains(&column(plan, "baseline")), "{plan}: {baseline:?}");
        }
    }
}
