//! A matrix as coloured cells: confusions, agreement of networks, weights between layers.

use super::{Anchor, Canvas, Figure, below, heading, label, range};
use crate::report::{Cell, Table, colours, text};

/// A matrix as coloured cells.
pub struct Heat<'a> {
    /// Above the map.
    pub title: &'a str,
    /// What the columns are.
    pub x: &'a str,
    /// What the rows are.
    pub y: &'a str,
    /// A name for each column.
    pub columns: &'a [String],
    /// A name for each row.
    pub rows: &'a [String],
    /// [row][column]; not finite is left blank.
    pub values: &'a [Vec<f64>],
    /// Where the colours start and end; the data's own range for none.
    pub limits: Option<(f64, f64)>,
    /// Of the number in a cell.
    pub decimals: usize,
    /// What the colours mean, with the unit.
    pub unit: &'a str,
    /// Do the colours follow the root of the value? Then small values beside large ones can be seen.
    pub root: bool,
}

/// Cells from this side on hold their number.
const LETTERED: f64 = 17.0;
/// Cells from this side on are named.
const NAMED: f64 = 11.0;
/// What a name may take.
const LABEL: f64 = 150.0;

impl Heat<'_> {
    /// The map with its numbers.
    pub fn figure(&self, name: impl Into<String>, caption: impl Into<String>) -> Figure {
        Figure::new(name, caption, self.draw()).of(self.numbers())
    }

    /// Cell by cell; those of no value, and zeros of large matrices, are left out.
    fn numbers(&self) -> Table {
        let (y, x) = (if self.y.is_empty() { "row" } else { self.y }, if self.x.is_empty() { "column" } else { self.x });
        let mut table = Table::new(self.title, &[y, x, self.unit]);
        let sparse = self.rows.len() * self.columns.len() > 900;
        for (name, row) in self.rows.iter().zip(self.values) {
            for (column, &value) in self.columns.iter().zip(row).filter(|(_, v)| v.is_finite() && !(sparse && **v == 0.0)) {
                table.push(vec![Cell::text(name), Cell::text(column), Cell::Score(value, 4)]);
            }
        }
        table
    }

    fn draw(&self) -> String {
        let (nr, nc) = (self.rows.len(), self.columns.len());
        let cell = (500.0 / nc.max(nr).max(1) as f64).clamp(3.0, 54.0);
        // A few columns beside many rows are wide enough for their numbers.
        let across = if nc * 3 < nr { cell.max(54.0) } else { cell };
        let room = |names: &[String]| names.iter().map(|n| text::width(n, 11.0, false)).fold(0.0, f64::max).min(LABEL);
        // Names only where there is room for them.
        let named = cell >= NAMED;
        let (left, head) = if named { (room(self.rows) + 34.0, room(self.columns) + 14.0) } else { (40.0, 12.0) };
        let width = (left + across * nc as f64 + 20.0).max(320.0);
        let lines = heading(self.title, width - 20.0);
        let top = below(&lines) + head;
        let mut c = Canvas::new(width, top + cell * nr as f64 + 62.0);
        let all: Vec<f64> = self.values.iter().flatten().copied().filter(|v| v.is_finite()).collect();
        let (low, high) = self.limits.unwrap_or_else(|| range(&all, 0.0));
        c.title(10.0, &lines);
        // What is read from a file may have more rows than names.
        let name = |names: &'_ [String], i: usize| names.get(i).map_or(String::new(), String::clone);
        // One ground for the lowest colour: most cells of a large confusion matrix are 0 and need none of their own.
        let grounded = cell < LETTERED && all.len() == nr * nc;
        if grounded {
            c.rect(left, top, across * nc as f64, cell * nr as f64, &colours::heat(0.0), "");
        }
        // Numbers of several digits need more than a number of two.
        let longest = all.iter().map(|v| text::width(&format!("{v:.d$}", d = self.decimals), 11.0, false)).fold(0.0, f64::max);
        let size = (11.0 * (across - 3.0) / longest.max(1.0)).clamp(7.5, 11.0);
        for (r, row) in self.values.iter().enumerate() {
            let y = top + cell * r as f64;
            if named {
                c.text(left - 6.0, y + cell / 2.0 + 4.0, 11.0, Anchor::End, &text::cut(&name(self.rows, r), 11.0, false, LABEL));
            }
            for (k, &value) in row.iter().enumerate().filter(|(_, v)| v.is_finite()) {
                let x = left + across * k as f64;
                let part = ((value - low) / (high - low)).clamp(0.0, 1.0);
                let part = if self.root { part.sqrt() } else { part };
                if part == 0.0 && grounded {
                    continue;
                }
                let title = format!("{} / {}: {value:.d$}", name(self.rows, r), name(self.columns, k), d = self.decimals.max(1));
                c.rect(x, y, across, cell, &colours::heat(part), &title);
                // Where colours follow the root, most numbers are 0 and hide the others.
                if cell >= LETTERED && !(self.root && format!("{value:.d$}", d = self.decimals) == "0") {
                    let ink = if part > 0.55 { colours::ON_DEEP } else { colours::ON_PALE };
                    c.styled(
                        x + across / 2.0,
                        y + cell / 2.0 + size * 0.36,
                        size,
                        Anchor::Middle,
                        &format!("{value:.d$}", d = self.decimals),
                        &format!("fill=\"{ink}\""),
                    );
                }
            }
        }
        if named {
            for (k, name) in self.columns.iter().enumerate() {
                let (x, y) = (left + across * (k as f64 + 0.5) + 4.0, top - 6.0);
                c.turned(x, y, 11.0, Anchor::Start, &text::cut(name, 11.0, false, LABEL));
            }
        }
        let bottom = top + cell * nr as f64;
        c.text(left + across * nc as f64 / 2.0, bottom + 18.0, 12.0, Anchor::Middle, self.x);
        c.turned(14.0, top + cell * nr as f64 / 2.0, 12.0, Anchor::Middle, self.y);
        self.key(&mut c, bottom + 34.0, (low, high));
        c.finish(self.title)
    }

    /// What the colours mean.
    fn key(&self, c: &mut Canvas, y: f64, (low, high): (f64, f64)) {
        let steps = 12;
        let from = 14.0 + text::width(&label(low), 11.0, false);
        c.soft(10.0, y + 10.0, 11.0, Anchor::Start, &label(low));
        for i in 0..steps {
            let part = (i as f64 + 0.5) / steps as f64;
            let part = if self.root { part.sqrt() } else { part };
            c.rect(from + 8.0 * i as f64, y, 8.2, 12.0, &colours::heat(part), "");
        }
        let words = format!("{}  {}", label(high), self.unit);
        c.soft(from + 8.0 * steps as f64 + 6.0, y + 10.0, 11.0, Anchor::Start, words.trim());
    }
}
