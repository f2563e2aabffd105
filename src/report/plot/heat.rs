//! A matrix as coloured cells: confusions, agreement of networks, weights between layers.

use super::{Anchor, Canvas, cut, range};
use crate::report::colours;

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
}

/// Cells from this side on hold their number.
const LETTERED: f64 = 30.0;

impl Heat<'_> {
    /// The map as SVG.
    pub fn draw(&self) -> String {
        let (nr, nc) = (self.rows.len(), self.columns.len());
        let cell = (460.0 / nc.max(nr).max(1) as f64).clamp(3.0, 54.0);
        let letters = |names: &[String]| names.iter().map(|n| n.chars().count()).max().unwrap_or(0).min(18) as f64;
        // Names only where there is room for them.
        let named = cell >= 11.0;
        let (left, head) = if named { (letters(self.rows) * 6.6 + 34.0, letters(self.columns) * 6.6 + 14.0) } else { (40.0, 12.0) };
        let top = 30.0 + head;
        let width = (left + cell * nc as f64 + 20.0).max(self.title.chars().count() as f64 * 8.2 + 20.0);
        let mut c = Canvas::new(width, top + cell * nr as f64 + 34.0);
        let all: Vec<f64> = self.values.iter().flatten().copied().filter(|v| v.is_finite()).collect();
        let (low, high) = self.limits.unwrap_or_else(|| range(&all, 0.0));
        c.title(10.0, 20.0, self.title);
        // One ground for the lowest colour: most cells of a large confusion matrix are 0 and need none of their own.
        let grounded = cell < LETTERED && all.len() == nr * nc;
        if grounded {
            c.rect(left, top, cell * nc as f64, cell * nr as f64, &colours::heat(0.0), "");
        }
        for (r, row) in self.values.iter().enumerate() {
            let y = top + cell * r as f64;
            if named {
                c.text(left - 6.0, y + cell / 2.0 + 4.0, 11.0, Anchor::End, &cut(&self.rows[r], 18));
            }
            for (k, &value) in row.iter().enumerate().filter(|(_, v)| v.is_finite()) {
                let x = left + cell * k as f64;
                let part = ((value - low) / (high - low)).clamp(0.0, 1.0);
                if part == 0.0 && grounded {
                    continue;
                }
                let title = format!("{} / {}: {value:.d$}", self.rows[r], self.columns[k], d = self.decimals);
                c.rect(x, y, cell, cell, &colours::heat(part), &title);
                if cell >= LETTERED {
                    let ink = if part > 0.55 { colours::ON_DEEP } else { colours::ON_PALE };
                    c.styled(
                        x + cell / 2.0,
                        y + cell / 2.0 + 4.0,
                        11.0,
                        Anchor::Middle,
                        &format!("{value:.d$}", d = self.decimals),
                        &format!("fill=\"{ink}\""),
                    );
                }
            }
        }
        if named {
            for (k, name) in self.columns.iter().enumerate() {
                let (x, y) = (left + cell * (k as f64 + 0.5) + 4.0, top - 6.0);
                c.turned(x, y, 11.0, Anchor::Start, &cut(name, 18));
            }
        }
        c.text(left + cell * nc as f64 / 2.0, top + cell * nr as f64 + 20.0, 12.0, Anchor::Middle, self.x);
        c.turned(14.0, top + cell * nr as f64 / 2.0, 12.0, Anchor::Middle, self.y);
        c.finish(self.title)
    }
}
