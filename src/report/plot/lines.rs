//! Lines over a common axis: curves of training, accuracy against the number of images.

use std::fmt::Write as _;

use super::{Anchor, Canvas, cut, label, range, ticks};
use crate::report::colours::Palette;

/// A line of a chart: points, and an interval around them where there is one.
#[derive(Debug, Clone, Default)]
pub struct Series {
    /// What the legend calls it; the name brings the colour.
    pub name: String,
    /// (x, y), by x.
    pub points: Vec<(f64, f64)>,
    /// (low, high) at each point.
    pub band: Vec<(f64, f64)>,
}

/// Lines over a common axis. Points that are not finite break a line.
pub struct Lines<'a> {
    /// Above the chart.
    pub title: &'a str,
    /// What the lower axis counts.
    pub x: &'a str,
    /// What the left axis counts.
    pub y: &'a str,
    /// The lines.
    pub series: &'a [Series],
    /// Draw the points too (few of them).
    pub dots: bool,
}

impl Lines<'_> {
    /// The chart as SVG.
    pub fn draw(&self) -> String {
        let (width, left, right, top, plot) = (560.0, 62.0, 14.0, 34.0, 250.0);
        let finite = |v: &f64| v.is_finite();
        let xs: Vec<f64> = self.series.iter().flat_map(|s| s.points.iter().map(|p| p.0)).filter(finite).collect();
        let ys: Vec<f64> = self
            .series
            .iter()
            .flat_map(|s| s.points.iter().map(|p| p.1).chain(s.band.iter().flat_map(|b| [b.0, b.1])))
            .filter(finite)
            .collect();
        let (x0, x1) = range(&xs, 0.0);
        let (y0, y1) = range(&ys, 0.05);
        let px = |x: f64| left + (x - x0) / (x1 - x0) * (width - left - right);
        let py = |y: f64| top + plot - (y - y0) / (y1 - y0) * plot;
        let rows = self.series.len().div_ceil(3);
        let mut c = Canvas::new(width, top + plot + 44.0 + 18.0 * rows as f64);
        c.title(left, 20.0, self.title);
        for y in ticks(y0, y1, 5) {
            c.line(left, py(y), width - right, py(y));
            c.text(left - 6.0, py(y) + 4.0, 11.0, Anchor::End, &label(y));
        }
        // Epochs are whole: no tick between them.
        let whole = xs.iter().all(|x| x.fract() == 0.0);
        for x in ticks(x0, x1, 7).into_iter().filter(|x| !whole || x.fract() == 0.0) {
            c.line(px(x), top + plot, px(x), top + plot + 4.0);
            c.text(px(x), top + plot + 17.0, 11.0, Anchor::Middle, &label(x));
        }
        c.text((left + width - right) / 2.0, top + plot + 34.0, 12.0, Anchor::Middle, self.x);
        c.turned(14.0, top + plot / 2.0, 12.0, Anchor::Middle, self.y);
        let palette = Palette::of(self.series.iter().map(|s| &s.name));
        for (i, series) in self.series.iter().enumerate() {
            let colour = palette.colour(&series.name);
            let known: Vec<(f64, f64, f64)> = series
                .points
                .iter()
                .zip(&series.band)
                .filter(|(p, b)| p.0.is_finite() && b.0.is_finite() && b.1.is_finite())
                .map(|(p, b)| (p.0, b.0, b.1))
                .collect();
            if known.len() > 1 {
                let up = known.iter().map(|(x, _, high)| format!("{:.1} {:.1}", px(*x), py(*high)));
                let down = known.iter().rev().map(|(x, low, _)| format!("{:.1} {:.1}", px(*x), py(*low)));
                let _ = writeln!(
                    c.body,
                    r#"<path d="M{}Z" fill="{colour}" fill-opacity="0.15"/>"#,
                    up.chain(down).collect::<Vec<_>>().join("L")
                );
            }
            let mut path = String::new();
            let mut pen = 'M';
            for (x, y) in &series.points {
                if !(x.is_finite() && y.is_finite()) {
                    pen = 'M';
                    continue;
                }
                let _ = write!(path, "{pen}{:.1} {:.1}", px(*x), py(*y));
                pen = 'L';
                if self.dots || series.points.len() == 1 {
                    let _ = writeln!(c.body, r#"<circle cx="{:.1}" cy="{:.1}" r="3" fill="{colour}"/>"#, px(*x), py(*y));
                }
            }
            let _ = writeln!(c.body, r#"<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-linejoin="round"/>"#);
            let (lx, ly) = (left + (i % 3) as f64 * 165.0, top + plot + 54.0 + 18.0 * (i / 3) as f64);
            let _ = writeln!(c.body, r#"<path d="M{lx:.1} {:.1}h16" stroke="{colour}" stroke-width="3"/>"#, ly - 4.0);
            c.text(lx + 21.0, ly, 11.0, Anchor::Start, &cut(&series.name, 24));
        }
        c.finish(self.title)
    }
}
