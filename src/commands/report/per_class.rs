//! Which classes are known, and what the others are taken for.

use super::thumbnails::Thumbnails;
use crate::error::{Result, counted};
use crate::eval::record::Record;
use crate::eval::rows::protocol_of;
use crate::report::plot::Heat;
use crate::report::{Cell, Figure, Row, Section, Table, table};

/// A matrix of up to so many classes is shown whole, with numbers.
const READABLE: usize = 25;
/// Of more classes, those of the most confused pairs have a matrix with numbers.
const CHOSEN: usize = 20;
/// Up to so many classes the whole matrix is drawn too, without names.
const DRAWN: usize = 250;
/// Classes at either end of the list.
const ENDS: usize = 10;
/// Pairs in the table, and those whose images are shown.
const PAIRS: usize = 20;
const PICTURED: usize = 6;
/// Images of a pair.
const IMAGES: usize = 8;

/// One set of answers: names, counts [true][answered], and the images behind them.
struct Answers<'a> {
    record: &'a Record,
    names: Vec<String>,
    counts: Vec<Vec<f64>>,
}

/// A class that was taken for another.
struct Confused {
    truth: usize,
    answer: usize,
    count: f64,
}

/// Of each dataset the measurement with the highest accuracy.
pub(super) fn section(records: &[&Record], images: &mut Thumbnails) -> Result<Section> {
    let mut section = Section::new("Per class");
    let mut own: Vec<&Record> = records.iter().copied().filter(|r| r.detail["confusion"].is_array()).collect();
    own.sort_by(|a, b| a.dataset.cmp(&b.dataset));
    // `synthetic` is two tasks of other classes.
    for of_dataset in table::together(&own, |r| vec![r.dataset.clone(), r.detail["classes"].to_string()])? {
        let best = of_dataset.iter().copied().reduce(|a, b| if b.value > a.value { b } else { a }).expect("no group is empty");
        let Some(answers) = Answers::of(best) else { continue };
        let seed = best.seed.map_or(String::new(), |s| format!(", seed {s}"));
        section.text(format!(
            "{}: {} has the highest top-1 of {} ({}{seed}), {:.2} % of {} test images. The rest is about these answers.",
            best.dataset,
            best.subject,
            counted(of_dataset.len(), "measurement"),
            answers.how(),
            best.value,
            best.n_test
        ));
        section.figures(answers.figures());
        answers.ends(&mut section);
        let pairs = answers.confused();
        section.table(answers.pairs(&pairs));
        section.pictures(answers.pictures(&pairs, images)?);
    }
    Ok(section)
}

impl Answers<'_> {
    /// None where a file holds no square of counts with a name each.
    fn of(record: &Record) -> Option<Answers<'_>> {
        let names: Vec<String> = serde_json::from_value(record.detail["classes"].clone()).ok()?;
        let counts: Vec<Vec<f64>> = serde_json::from_value(record.detail["confusion"].clone()).ok()?;
        let sound = names.len() > 1 && counts.len() == names.len() && counts.iter().all(|row| row.len() == names.len());
        sound.then_some(Answers { record, names, counts })
    }

    fn how(&self) -> String {
        [self.record.command.clone(), protocol_of(self.record), self.record.variant.clone()]
            .into_iter()
            .filter(|part| !part.is_empty())
            .collect::<Vec<_>>()
            .join(", ")
    }

    fn images(&self, class: usize) -> f64 {
        self.counts[class].iter().sum()
    }

    /// In percent of the true class; not a number for a class without images.
    fn share(&self, truth: usize, answer: usize) -> f64 {
        100.0 * self.counts[truth][answer] / self.images(truth)
    }

    /// Pairs from the most confused on, by their share of the true class.
    fn confused(&self) -> Vec<Confused> {
        let mut all = vec![];
        for (truth, row) in self.counts.iter().enumerate() {
            let wrong = row.iter().enumerate().filter(|(answer, count)| *answer != truth && **count > 0.0);
            all.extend(wrong.map(|(answer, count)| Confused { truth, answer, count: *count }));
        }
        let share = |c: &Confused| self.share(c.truth, c.answer);
        all.sort_by(|a, b| share(b).total_cmp(&share(a)).then(b.count.total_cmp(&a.count)));
        all
    }

    fn figures(&self) -> Vec<Figure> {
        let dataset = &self.record.dataset;
        let title = format!("{dataset}: {} ({})", self.record.subject, self.how());
        let draw = |order: &[usize], rest: bool, name: String, caption: &str| {
            let names: Vec<String> = order.iter().map(|&c| self.names[c].clone()).collect();
            let mut columns = names.clone();
            let mut values: Vec<Vec<f64>> = order.iter().map(|&t| order.iter().map(|&a| self.share(t, a)).collect()).collect();
            if rest {
                columns.push("all others".into());
                values.iter_mut().for_each(|row| row.push((100.0 - row.iter().sum::<f64>()).max(0.0)));
            }
            let heat = Heat {
                title: &title,
                x: "answered",
                y: "true",
                columns: &columns,
                rows: &names,
                values: &values,
                limits: Some((0.0, 100.0)),
                decimals: 0,
                unit: "% of the true class",
                root: true,
            };
            heat.figure(name, caption)
        };
        let all: Vec<usize> = (0..self.names.len()).collect();
        if self.names.len() <= READABLE {
            return vec![draw(
                &all,
                false,
                format!("confusion-{dataset}"),
                "Confusion matrix. Colours follow the root, so that rare confusions show.",
            )];
        }
        let mut chosen: Vec<usize> = vec![];
        for pair in self.confused() {
            if chosen.len() + 2 > CHOSEN {
                break;
            }
            chosen.extend([pair.truth, pair.answer].into_iter().filter(|c| !chosen.contains(c)).collect::<Vec<_>>());
        }
        let caption =
            format!("The {} classes of the most confused pairs; classes that are taken for each other stand together.", chosen.len());
        let mut figures = vec![draw(&self.chain(&chosen), true, format!("confusion-{dataset}"), &caption)];
        if self.names.len() <= DRAWN {
            let caption = "All classes, those that are taken for each other side by side. Point at a cell to read it; the CSV has all.";
            figures.push(draw(&self.chain(&all), false, format!("confusion-all-{dataset}"), caption));
        }
        figures
    }

    /// Classes in an order in which those that are taken for each other are neighbours: from each to the one it is confused with most.
    fn chain(&self, classes: &[usize]) -> Vec<usize> {
        let alike = |a: usize, b: usize| {
            let share = |t: usize, a: usize| if self.images(t) > 0.0 { self.share(t, a) } else { 0.0 };
            share(a, b) + share(b, a)
        };
        let mut left = classes.to_vec();
        let mut order = vec![];
        while !left.is_empty() {
            let at = match order.last() {
                Some(&last) => (0..left.len()).reduce(|a, b| if alike(last, left[b]) > alike(last, left[a]) { b } else { a }).unwrap_or(0),
                None => 0,
            };
            order.push(left.remove(at));
        }
        order
    }

    /// The best and the worst known classes; all of them where there are few.
    fn ends(&self, section: &mut Section) {
        let mut order: Vec<usize> = (0..self.names.len()).filter(|&c| self.images(c) > 0.0).collect();
        order.sort_by(|&a, &b| self.share(b, b).total_cmp(&self.share(a, a)));
        let dataset = &self.record.dataset;
        if order.len() <= 2 * ENDS {
            section.table(self.classes(&format!("{dataset}: accuracy by class"), &order));
            return;
        }
        section.table(self.classes(&format!("{dataset}: the {ENDS} best known classes"), &order[..ENDS]));
        let worst: Vec<usize> = order.iter().rev().take(ENDS).copied().collect();
        section.table(self.classes(&format!("{dataset}: the {ENDS} least known classes"), &worst));
        section.table(self.classes(&format!("{dataset}: all {} classes", order.len()), &order));
    }

    fn classes(&self, name: &str, order: &[usize]) -> Table {
        let mut table = Table::new(name, &["class", "top-1 (%)", "95 % interval", "test images", "most often taken for", "as often (%)"]);
        for &c in order {
            let row = &self.counts[c];
            let wrong = (0..row.len()).filter(|&k| k != c && row[k] > 0.0).reduce(|a, b| if row[b] > row[a] { b } else { a });
            let (low, high) = wilson(row[c], self.images(c));
            table.push(vec![
                Cell::text(&self.names[c]),
                Cell::Score(self.share(c, c), 1),
                Cell::text(format!("{low:.1} to {high:.1}")),
                Cell::Count(self.images(c) as i64),
                wrong.map_or(Cell::Empty, |k| Cell::text(&self.names[k])),
                wrong.map_or(Cell::Empty, |k| Cell::Score(self.share(c, k), 1)),
            ]);
        }
        table
    }

    fn pairs(&self, pairs: &[Confused]) -> Table {
        let name = format!("{}: most confused pairs", self.record.dataset);
        let mut table = Table::new(name, &["true class", "taken for", "so often (%)", "images", "the other way (%)"]);
        for pair in pairs.iter().take(PAIRS) {
            let back = self.share(pair.answer, pair.truth);
            table.push(vec![
                Cell::text(&self.names[pair.truth]),
                Cell::text(&self.names[pair.answer]),
                Cell::Score(self.share(pair.truth, pair.answer), 1),
                Cell::Count(pair.count as i64),
                if back.is_finite() { Cell::Score(back, 1) } else { Cell::Empty },
            ]);
        }
        table
    }

    /// Images of the most confused pairs, where they were asked for.
    fn pictures(&self, pairs: &[Confused], images: &mut Thumbnails) -> Result<Vec<Row>> {
        let read = |key: &str| serde_json::from_value::<Vec<usize>>(self.record.detail[key].clone()).unwrap_or_default();
        let (labels, predicted) = (read("labels"), read("predicted"));
        let all: Vec<usize> = (0..labels.len()).collect();
        if labels.is_empty() || labels.len() != predicted.len() {
            return Ok(vec![]);
        }
        let Some(split) = images.split(self.record, &self.names, &all, &labels)? else { return Ok(vec![]) };
        let mut rows = vec![];
        for pair in pairs.iter().take(PICTURED) {
            let own = all.iter().filter(|&&i| labels[i] == pair.truth && predicted[i] == pair.answer).take(IMAGES);
            let picture = |&i: &usize| Ok((images.jpeg(&split, &[i])?.data, format!("image {i}")));
            let title = format!("{}: {} taken for {}", self.record.dataset, self.names[pair.truth], self.names[pair.answer]);
            rows.push(Row { title, pictures: own.map(picture).collect::<Result<_>>()? });
        }
        Ok(rows)
    }
}

/// Wilson's 95 % interval of a share, in percent.
fn wilson(right: f64, count: f64) -> (f64, f64) {
    const Z: f64 = 1.959_963_984_540_054;
    let (p, zz) = (right / count, Z * Z);
    let centre = (p + zz / (2.0 * count)) / (1.0 + zz / count);
    let half = Z / (1.0 + zz / count) * (p * (1.0 - p) / count + zz / (4.0 * count * count)).sqrt();
    (100.0 * (centre - half).max(0.0), 100.0 * (centre + half).min(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_of_shares_are_wilsons() {
        // statsmodels.stats.proportion.proportion_confint(8, 10, method="wilson") = (0.490162, 0.943318)
        let (low, high) = wilson(8.0, 10.0);
        assert!((low - 49.0162).abs() < 1e-3 && (high - 94.3318).abs() < 1e-3, "{low} {high}");
        assert_eq!(wilson(0.0, 10.0).0, 0.0);
    }

    #[test]
    fn the_most_confused_lead_and_neighbours_are_those_that_are_taken_for_each_other() {
        let detail = serde_json::json!({ "classes": ["a", "b", "c", "d"],
            "confusion": [[5, 0, 5, 0], [0, 10, 0, 0], [4, 0, 6, 0], [0, 1, 0, 9]] });
        let record = Record { detail, ..Record::default() };
        let answers = Answers::of(&record).unwrap();
        let pairs: Vec<(usize, usize)> = answers.confused().iter().map(|c| (c.truth, c.answer)).collect();
        assert_eq!(pairs, [(0, 2), (2, 0), (3, 1)]);
        assert_eq!(answers.chain(&[0, 1, 2, 3]), [0, 2, 1, 3]);
        let ragged = serde_json::json!({ "classes": ["a", "b"], "confusion": [[1, 2], [3]] });
        assert!(Answers::of(&Record { detail: ragged, ..Record::default() }).is_none());
    }
}
