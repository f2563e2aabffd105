//! Values with their intervals: gains and differences.

use std::fmt::Write as _;

use super::{Anchor, Canvas, Figure, below, heading, label, legend, range, ticks};
use crate::report::colours::{LIGHT, Palette, ZERO};
use crate::report::table::signed;
use crate::report::{Cell, Table, text};

/// A value with a thick and a thin interval, of two kinds.
#[derive(Debug, Clone, Copy)]
pub struct Whisker {
    /// The dot.
    pub value: f64,
    /// The inner interval, where there is one.
    pub thick: Option<(f64, f64)>,
    /// The outer interval, where there is one.
    pub thin: Option<(f64, f64)>,
}

/// Values with their intervals, in rows that share an axis; zero is marked.
pub struct Whiskers<'a> {
    /// Above the figure.
    pub title: &'a str,
    /// What the axis counts.
    pub x: &'a str,
    /// What is told apart in every row.
    pub series: &'a [String],
    /// The colours of the report.
    pub palette: &'a Palette,
    /// A name, and the value of each series; none where there is none.
    pub rows: &'a [(String, Vec<Option<Whisker>>)],
    /// What the thick bars are.
    pub thick: &'a str,
    /// What the thin bars are.
    pub thin: &'a str,
}

/// Of a row's name, and of each of its values.
const NAME: f64 = 18.0;
const EACH: f64 = 12.0;

impl Whiskers<'_> {
    /// The figure with its numbers.
    pub fn figure(&self, name: impl Into<String>, caption: impl Into<String>) -> Figure {
        Figure::chart(name, caption, |width| self.draw(width)).of(self.numbers())
    }

    fn numbers(&self) -> Table {
        let mut table = Table::new(
            self.title,
            &[
                "measured",
                "setting",
                self.x,
                &format!("{}: low", self.thick),
                &format!("{}: high", self.thick),
                &format!("{}: low", self.thin),
                &format!("{}: high", self.thin),
            ],
        );
        for (row, values) in self.rows {
            for (name, whisker) in self.series.iter().zip(values) {
                let Some(w) = whisker else { continue };
                let ends = |i: Option<(f64, f64)>| i.map_or([Cell::Empty, Cell::Empty], |(a, b)| [Cell::Score(a, 4), Cell::Score(b, 4)]);
                let [a, b] = ends(w.thick);
                let [c, d] = ends(w.thin);
                table.push(vec![Cell::text(row), Cell::text(name), Cell::Score(w.value, 4), a, b, c, d]);
            }
        }
        table.without_empty_columns()
    }

    fn draw(&self, width: f64) -> String {
        let (left, right) = (16.0, 16.0);
        let lines = heading(self.title, width - 24.0);
        let top = below(&lines);
        let height = |row: &(String, Vec<Option<Whisker>>)| NAME + 8.0 + EACH * row.1.len() as f64;
        let plot: f64 = self.rows.iter().map(height).sum();
        let ends =
            |w: &Whisker| [Some((w.value, w.value)), w.thick, w.thin].into_iter().flatten().flat_map(|(a, b)| [a, b]).collect::<Vec<_>>();
        let all: Vec<f64> =
            self.rows.iter().flat_map(|r| r.1.iter().flatten().flat_map(ends)).chain([0.0]).filter(|v| v.is_finite()).collect();
        let (x0, x1) = range(&all, 0.04);
        let px = |x: f64| left + (x - x0) / (x1 - x0) * (width - left - right);
        let drawn = |of: &dyn Fn(&Whisker) -> bool| self.rows.iter().any(|r| r.1.iter().flatten().any(of));
        let bars: Vec<(&str, f64)> = [(self.thick, 4.0, drawn(&|w| w.thick.is_some())), (self.thin, 1.4, drawn(&|w| w.thin.is_some()))]
            .into_iter()
            .filter(|(name, _, there)| *there && !name.is_empty())
            .map(|(name, stroke, _)| (name, stroke))
            .collect();
        let places = legend(self.series, width - 30.0, 32.0);
        let named = places.last().map_or(0, |p| p.1 + 1);
        let of_bars = legend(&bars.iter().map(|b| b.0).collect::<Vec<_>>(), width - 30.0, 46.0);
        let more = of_bars.last().map_or(0, |p| p.1 + 1);
        let mut c = Canvas::new(width, top + plot + 48.0 + 18.0 * (named + more) as f64);
        c.title(12.0, &lines);
        for x in ticks(x0, x1, (width / 70.0) as usize) {
            c.line(px(x), top, px(x), top + plot);
            c.text(px(x), top + plot + 16.0, 11.0, Anchor::Middle, &label(x));
        }
        let _ = writeln!(c.body, r#"<path d="M{x:.1} {top:.1}V{:.1}" stroke="{ZERO}" stroke-width="1.5"/>"#, top + plot, x = px(0.0));
        let names: Vec<&str> = self.series.iter().map(String::as_str).collect();
        let styles = self.palette.styles(&names);
        let mut y = top;
        for row in self.rows {
            c.before(left, y + 14.0, 11.0, &text::cut(&row.0, 11.0, false, width - left - right));
            for (i, whisker) in row.1.iter().enumerate() {
                let at = y + NAME + EACH * (i as f64 + 0.5);
                let (Some(w), (colour, style)) = (whisker, styles[i]) else { continue };
                for (interval, stroke) in [(w.thin, 1.4), (w.thick, 4.0)] {
                    if let Some((low, high)) = interval {
                        let (a, b) = (px(low), px(high));
                        let _ = writeln!(c.body, r#"<path d="M{a:.1} {at:.1}H{b:.1}" stroke="{colour}" stroke-width="{stroke}"/>"#);
                    }
                }
                c.marker(px(w.value), at, 4.0, style, colour, &self.told(&row.0, names[i], w));
            }
            y += height(row);
        }
        c.text(width / 2.0, top + plot + 34.0, 12.0, Anchor::Middle, self.x);
        for ((name, (colour, style)), (x, line)) in names.iter().zip(&styles).zip(places) {
            let (lx, ly) = (20.0 + x, top + plot + 56.0 + 18.0 * line as f64);
            c.marker(lx, ly - 4.0, 4.0, *style, colour, name);
            c.text(lx + 9.0, ly, 11.0, Anchor::Start, &text::cut(name, 11.0, false, width - 40.0));
        }
        for ((name, stroke), (x, line)) in bars.iter().zip(of_bars) {
            let (lx, ly) = (16.0 + x, top + plot + 56.0 + 18.0 * (named + line) as f64);
            let _ = writeln!(c.body, r#"<path d="M{lx:.1} {:.1}h22" stroke="{}" stroke-width="{stroke}"/>"#, ly - 4.0, LIGHT.soft);
            c.soft(lx + 28.0, ly, 11.0, Anchor::Start, name);
        }
        c.finish(self.title)
    }

    fn told(&self, row: &str, name: &str, w: &Whisker) -> String {
        let interval = |of: Option<(f64, f64)>, what: &str| match of {
            Some((low, high)) => format!("; {what}: {} to {}", signed(low), signed(high)),
            None => String::new(),
        };
        format!("{name}, {row}: {}{}{}", signed(w.value), interval(w.thick, self.thick), interval(w.thin, self.thin))
    }
}
