//! The same settings with fewer training images: accuracy against the part that was kept, as in the paper's few-shot figure.

use super::{Results, paper_table};
use crate::error::Result;
use crate::experiment::plan::{Group, PlannedRun};
use crate::experiment::rows::Question;
use crate::report::plot::{Lines, Series};
use crate::report::{Cell, Figure, Section, Table};

/// Settings that differ in nothing but the part of the training images.
struct Family<'a> {
    /// As the setting with the most images is called.
    name: &'a str,
    /// Setting and part in percent of the largest, from the smallest.
    members: Vec<(&'a str, f64)>,
}

impl<'a> Results<'a> {
    /// Families in the order of the plan. One with a single part is none.
    fn families(&self) -> Vec<Family<'a>> {
        let alike = |run: &PlannedRun| {
            let mut keys = run.recipe.flat();
            keys.remove("data.fraction");
            keys.remove("train.seed");
            keys
        };
        let mut found: Vec<(_, Vec<(&'a str, f64)>)> = vec![];
        for run in self.items.iter().filter_map(|item| item.run()) {
            let (keys, member) = (alike(run), (run.setting.as_str(), run.recipe.data.fraction));
            match found.iter_mut().find(|(k, _)| *k == keys) {
                Some((_, members)) if members.iter().any(|(name, _)| *name == member.0) => {}
                Some((_, members)) => members.push(member),
                None => found.push((keys, vec![member])),
            }
        }
        let family = |mut members: Vec<(&'a str, f64)>| {
            members.sort_by(|a, b| a.1.total_cmp(&b.1));
            let &(name, most) = members.last().filter(|_| members.len() > 1)?;
            members.iter_mut().for_each(|(_, part)| *part *= 100.0 / most);
            Some(Family { name, members })
        };
        found.into_iter().filter_map(|(_, members)| family(members)).collect()
    }

    /// Is a group nothing but smaller parts of settings that stand elsewhere?
    pub(super) fn is_fewer(&self, group: &Group) -> bool {
        let families = self.families();
        let smaller = |name: &str| families.iter().any(|f| f.name != name && f.members.iter().any(|(member, _)| *member == name));
        group.settings.iter().all(|s| smaller(&s.name))
    }

    /// All families in one table and one figure a question.
    pub(super) fn fewer_images(&self) -> Result<Section> {
        let mut section = Section::new("Fewer training images");
        let families = self.families();
        let groups = self.plan.groups.iter().filter(|g| self.is_fewer(g));
        let seeds: Vec<u64> = groups.flat_map(|g| g.seeds.iter().copied()).collect();
        let [first, others @ ..] = &families[..] else { return Ok(section) };
        let gains: Vec<String> = others.iter().map(|f| format!("{} - {}", f.name, first.name)).collect();
        let mut names = vec!["measured", "images kept (%)"];
        names.extend(gains.iter().map(String::as_str).chain(families.iter().map(|f| f.name)));
        let (mut table, mut figures) = (Table::new("", &names), vec![]);
        // Those that the paper prints: the others would fill a page.
        for question in self.questions().iter().filter(|q| paper_table(q).is_some()) {
            let value = |setting: &str| {
                let own: Vec<f64> = self.values(setting, question).into_iter().filter(|(s, _)| seeds.contains(s)).map(|v| v.1).collect();
                (!own.is_empty()).then(|| own.iter().sum::<f64>() / own.len() as f64)
            };
            for &(setting, part) in &first.members {
                let at = |family: &Family<'a>| family.members.iter().find(|m| m.1 == part).map(|m| m.0);
                let mut row = vec![Cell::text(question.shown()), Cell::Score(part, 0)];
                for family in others {
                    let pair = at(family).map(|other| self.pair_on(question, setting, other, &|s| seeds.contains(&s))).transpose()?;
                    row.push(pair.flatten().map_or(Cell::Empty, |p| Cell::difference(p.difference, p.over_images)));
                }
                row.extend(families.iter().map(|f| Cell::score(at(f).and_then(value))));
                if row[2..].iter().any(|c| *c != Cell::Empty) {
                    table.push(row);
                }
            }
            figures.extend(self.parts_figure(&families, question, &value));
        }
        // Before a smaller part is there, this would repeat the main table.
        let smaller = |f: &Family| f.members.iter().any(|(name, _)| *name != f.name && !self.runs(name).is_empty());
        if families.iter().any(smaller) {
            section.table(table).figures(figures);
            let seeds = self.seeds_shown(&seeds);
            section.text(format!("Seed {seeds} only; epochs stay, so fewer images are fewer steps. Differences in points, with the 95 % interval over test images. It says nothing about other seeds, whose spread is in the main table. Nothing here was among the hypotheses: exploration."));
        }
        Ok(section)
    }

    fn seeds_shown(&self, seeds: &[u64]) -> String {
        let mut seeds = seeds.to_vec();
        seeds.sort_unstable();
        seeds.dedup();
        seeds.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")
    }

    fn parts_figure(&self, families: &[Family], question: &Question, value: &dyn Fn(&str) -> Option<f64>) -> Option<Figure> {
        let line = |family: &Family| Series {
            name: family.name.to_string(),
            points: family.members.iter().filter_map(|(name, part)| Some((*part, value(name)?))).collect(),
            ..Series::default()
        };
        let series: Vec<Series> = families.iter().map(line).filter(|s| s.points.len() > 1).collect();
        let title = format!("{} with fewer training images", question.shown());
        let lines =
            Lines { title: &title, x: "training images kept (%)", y: "top-1 (%)", series: &series, palette: &self.palette, band: "" };
        let name = format!("fewer-images-{}", question.dataset);
        (!series.is_empty()).then(|| lines.figure(name, "Mean over the networks of a run; the test split is whole."))
    }
}
