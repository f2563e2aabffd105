//! What `mcl-train list` prints, straight from the registries.

use crate::error::Result;
use crate::experiment::table::{PLANS, Scale};
use crate::experiment::{self, cost};
use crate::recipe::Recipe;
use crate::recipe::shipped::RECIPES;
use crate::report::{Cell, Table};
use crate::{data, methods, nets};

/// Every architecture, with its size at the number of classes it is most used with.
pub fn archs() -> String {
    let mut table = Table::new("", &["name", "parameters", "multiply-adds", "stages", "feature", "images", "classes"]);
    for arch in nets::archs() {
        let classes = if arch.image_size == 32 { 100 } else { 1000 };
        let about = nets::describe(arch, classes);
        table.push(vec![
            Cell::text(about.name),
            Cell::Count(about.parameters),
            Cell::Count(about.macs),
            Cell::Count(about.stages as i64),
            Cell::Count(about.dim),
            Cell::text(format!("{0} x {0}", about.image_size)),
            Cell::Count(classes),
        ]);
    }
    table.plain()
}

/// Every method, with the paper it is from.
pub fn methods() -> String {
    let mut table = Table::new("", &["name", "paper", "presets", "counts in tables", "takes frozen networks", "needs and ships"]);
    for method in methods::METHODS {
        let presets = method.presets().collect::<Vec<_>>().join(", ");
        let frozen = method.frozen.words();
        table.push([method.name, method.about, &presets, method.reported.words(), &frozen, method.needs].map(Cell::text).to_vec());
    }
    table.plain()
}

/// Every dataset.
pub fn datasets() -> String {
    let mut table = Table::new("", &["name", "what it is"]);
    data::DATASETS.iter().for_each(|d| table.push(vec![Cell::text(d.name), Cell::text(d.about)]));
    table.plain()
}

/// The plans of the paper's tables and figures: what each is, how many runs, and what they would take on this machine.
pub fn plans() -> Result<String> {
    let mut table = Table::new("", &["plan", "in the paper", "what it is", "runs, small", "takes here", "runs, paper", "takes here"]);
    let (speed, mut counter) = (cost::speed()?, cost::Counter::default());
    for shipped in PLANS {
        let plan = experiment::table::find(shipped.name)?;
        let mut row = vec![Cell::text(shipped.name), Cell::text(&plan.label), Cell::text(&plan.title)];
        for scale in [Scale::Small, Scale::Paper] {
            let (cells, seeds) = (plan.cells(scale)?, plan.seeds(scale).len());
            let mut macs = 0.0;
            for cell in &cells {
                macs += cost::multiply_adds(&cell.recipe, &mut counter)?;
            }
            row.extend([Cell::Count((cells.len() * seeds) as i64), Cell::text(cost::in_words(macs * seeds as f64 / speed))]);
        }
        table.push(row);
    }
    Ok(format!("{}{ESTIMATED} `mcl-eval table PLAN --scale small|paper` runs one.\n", table.plain()))
}

/// The recipes that ship.
pub fn recipes() -> Result<String> {
    let mut table = Table::new("", &["recipe", "what it is", "takes here"]);
    let (speed, mut counter) = (cost::speed()?, cost::Counter::default());
    for shipped in RECIPES {
        let recipe = Recipe::parse(shipped.text, shipped.name, &[], &methods::names())?;
        let seconds = cost::multiply_adds(&recipe, &mut counter)? / speed;
        table.push(vec![Cell::text(shipped.name), Cell::text(shipped.about()), Cell::text(cost::in_words(seconds))]);
    }
    Ok(format!("{}{ESTIMATED}\n", table.plain()))
}

/// How times in lists come about.
const ESTIMATED: &str = "Training alone, on the CPU, estimated from multiply-adds and a training pass of a ResNet-20 timed just now on all cores, so a busy machine says more; networks with depthwise convolutions take longer.";
