//! Values with their intervals: gains and differences.

use std::fmt::Write as _;

use super::{Anchor, Canvas, label, range, ticks};
use crate::report::colours::{Palette, ZERO};

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
    /// The colours of the series: made of all names that the figures beside this one show, so that each keeps its own.
    pub palette: &'a Palette,
    /// A name, and the value of each series; none where there is none.
    pub rows: &'a [(String, Vec<Option<Whisker>>)],
}

impl Whiskers<'_> {
    /// The figure as SVG.
    pub fn draw(&self) -> String {
        let letters = self.rows.iter().map(|r| r.0.chars().count()).max().unwrap_or(0);
        let (left, right, top, each) = (letters as f64 * 6.6 + 20.0, 16.0, 34.0, 11.0);
        let width = left + 500.0;
        let height = |row: &(String, Vec<Option<Whisker>>)| 12.0 + each * row.1.len() as f64;
        let plot: f64 = self.rows.iter().map(height).sum();
        let ends =
            |w: &Whisker| [Some((w.value, w.value)), w.thick, w.thin].into_iter().flatten().flat_map(|(a, b)| [a, b]).collect::<Vec<_>>();
        let all: Vec<f64> =
            self.rows.iter().flat_map(|r| r.1.iter().flatten().flat_map(ends)).chain([0.0]).filter(|v| v.is_finite()).collect();
        let (x0, x1) = range(&all, 0.04);
        let px = |x: f64| left + (x - x0) / (x1 - x0) * (width - left - right);
        let places = legend(self.series, width - 30.0);
        let lines = places.last().map_or(0, |p| p.1);
        let mut c = Canvas::new(width, top + plot + 66.0 + 18.0 * lines as f64);
        c.title(10.0, 20.0, self.title);
        for x in ticks(x0, x1, 8) {
            c.line(px(x), top, px(x), top + plot);
            c.text(px(x), top + plot + 16.0, 11.0, Anchor::Middle, &label(x));
        }
        let _ = writeln!(c.body, r#"<path d="M{x:.1} {top:.1}V{:.1}" stroke="{ZERO}" stroke-width="1.5"/>"#, top + plot, x = px(0.0));
        let mut y = top;
        for row in self.rows {
            c.text(left - 10.0, y + height(row) / 2.0 + 4.0, 11.0, Anchor::End, &row.0);
            for (i, whisker) in row.1.iter().enumerate() {
                let at = y + 6.0 + each * (i as f64 + 0.5);
                let Some(w) = whisker else { continue };
                for (interval, stroke) in [(w.thin, 1.2), (w.thick, 3.5)] {
                    if let Some((low, high)) = interval {
                        let _ = writeln!(
                            c.body,
                            r#"<path d="M{:.1} {at:.1}H{:.1}" stroke="{}" stroke-width="{stroke}"/>"#,
                            px(low),
                            px(high),
                            self.palette.colour(&self.series[i])
                        );
                    }
                }
                let _ = writeln!(
                    c.body,
                    r#"<circle cx="{:.1}" cy="{at:.1}" r="4" fill="{}"><title>{:+.2}</title></circle>"#,
                    px(w.value),
                    self.palette.colour(&self.series[i]),
                    w.value
                );
            }
            y += height(row);
        }
        c.text((left + width - right) / 2.0, top + plot + 34.0, 12.0, Anchor::Middle, self.x);
        for (i, (name, (x, line))) in self.series.iter().zip(places).enumerate() {
            let (lx, ly) = (20.0 + x, top + plot + 56.0 + 18.0 * line as f64);
            let _ =
                writeln!(c.body, r#"<circle cx="{lx:.1}" cy="{:.1}" r="4" fill="{}"/>"#, ly - 4.0, self.palette.colour(&self.series[i]));
            c.text(lx + 9.0, ly, 11.0, Anchor::Start, name);
        }
        c.finish(self.title)
    }
}

/// Where the names of a legend go: from the left, and on which line.
fn legend(names: &[String], width: f64) -> Vec<(f64, usize)> {
    let (mut x, mut line) = (0.0, 0);
    let mut places = vec![];
    for name in names {
        let own = name.chars().count() as f64 * 6.6 + 32.0;
        if x > 0.0 && x + own > width {
            (x, line) = (0.0, line + 1);
        }
        places.push((x, line));
        x += own;
    }
    places
}
