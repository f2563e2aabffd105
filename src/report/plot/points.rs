//! Maps of points, coloured by class: t-SNE.

use std::fmt::Write as _;

use super::{Anchor, Canvas, cut, escape, range};
use crate::report::colours::{self, LIGHT};

/// One map of a `Points` figure.
pub struct Panel {
    /// Above the map.
    pub title: String,
    /// Printed under the title: how far the map may be believed.
    pub note: String,
    /// Where each image lies.
    pub points: Vec<[f64; 2]>,
}

/// Maps of the same points side by side, coloured by class.
pub struct Points<'a> {
    /// Above all maps.
    pub title: &'a str,
    /// The maps.
    pub panels: &'a [Panel],
    /// The class of each point.
    pub labels: &'a [i64],
    /// The name of each class.
    pub classes: &'a [String],
}

/// Up to ten classes have a colour each; more of them have a colour and one of five shapes, told apart in the legend.
fn marker(class: usize, count: usize) -> (String, &'static str) {
    if count <= colours::APART {
        return (colours::numbered(class), "m-1.6 0a1.6 1.6 0 1 0 3.2 0a1.6 1.6 0 1 0 -3.2 0z");
    }
    const SHAPES: [&str; 5] = [
        "m-1.7 0a1.7 1.7 0 1 0 3.4 0a1.7 1.7 0 1 0 -3.4 0z",
        "m-1.6 -1.6h3.2v3.2h-3.2z",
        "m0 -2.1l2 3.5h-4z",
        "m0 -2.3l2 2.3l-2 2.3l-2 -2.3z",
        "m-2.1 -.6h1.5v-1.5h1.2v1.5h1.5v1.2h-1.5v1.5h-1.2v-1.5h-1.5z",
    ];
    let hues = count.div_ceil(SHAPES.len());
    let (hue, shape) = (class % hues, class / hues);
    let colour = colours::hue(hue, hues);
    (colour, SHAPES[shape.min(SHAPES.len() - 1)])
}

impl Points<'_> {
    /// The maps as SVG.
    pub fn draw(&self) -> String {
        let (side, gap, columns) = (380.0, 18.0, self.panels.len().clamp(1, 2));
        let width = gap + columns as f64 * (side + gap);
        let rows = self.panels.len().div_ceil(columns);
        let top = 34.0;
        let panel_height = side + 48.0;
        // As many legend columns as the longest name leaves room for.
        let longest = self.classes.iter().map(|n| n.chars().count()).max().unwrap_or(0).min(22) as f64;
        let legend_columns = ((width - 2.0 * gap) / (longest * 6.0 + 24.0)).floor().clamp(1.0, 8.0) as usize;
        let legend_rows = self.classes.len().div_ceil(legend_columns);
        let legend_top = top + rows as f64 * panel_height + 10.0;
        let mut c = Canvas::new(width, legend_top + legend_rows as f64 * 14.0 + 12.0);
        c.title(gap, 22.0, self.title);
        for (i, panel) in self.panels.iter().enumerate() {
            let (x, y) = (gap + (i % columns) as f64 * (side + gap), top + (i / columns) as f64 * panel_height);
            self.panel(&mut c, panel, x, y, side);
        }
        for (k, name) in self.classes.iter().enumerate() {
            let (x, y) = (
                gap + (k / legend_rows) as f64 * (width - 2.0 * gap) / legend_columns as f64,
                legend_top + (k % legend_rows) as f64 * 14.0 + 8.0,
            );
            let (colour, shape) = marker(k, self.classes.len());
            let _ = writeln!(
                c.body,
                r#"<path transform="translate({:.1} {:.1}) scale(2)" d="M0 0{shape}" fill="{colour}"/>"#,
                x + 5.0,
                y - 4.0
            );
            c.text(x + 14.0, y, 10.0, Anchor::Start, &cut(name, 22));
        }
        c.finish(self.title)
    }

    fn panel(&self, c: &mut Canvas, panel: &Panel, x: f64, y: f64, side: f64) {
        c.text(x, y + 14.0, 12.5, Anchor::Start, &cut(&panel.title, 54));
        c.text(x, y + 30.0, 11.0, Anchor::Start, &panel.note);
        let top = y + 38.0;
        let _ = writeln!(
            c.body,
            r#"<rect class="grid" x="{x:.1}" y="{top:.1}" width="{side}" height="{side}" fill="none" stroke="{}"/>"#,
            LIGHT.grid
        );
        // One scale for both axes: distances in a map mean the same in every direction.
        let (x0, x1) = range(&panel.points.iter().map(|p| p[0]).collect::<Vec<_>>(), 0.03);
        let (y0, y1) = range(&panel.points.iter().map(|p| p[1]).collect::<Vec<_>>(), 0.03);
        let span = (x1 - x0).max(y1 - y0);
        let (cx, cy) = ((x0 + x1) / 2.0, (y0 + y1) / 2.0);
        let place = |p: &[f64; 2]| (x + side * (0.5 + (p[0] - cx) / span), top + side * (0.5 - (p[1] - cy) / span));
        for class in 0..self.classes.len() {
            let (colour, shape) = marker(class, self.classes.len());
            let mut path = String::new();
            for (p, _) in panel.points.iter().zip(self.labels).filter(|(_, l)| **l as usize == class) {
                let (px, py) = place(p);
                let _ = write!(path, "M{px:.1} {py:.1}{shape}");
            }
            if !path.is_empty() {
                let _ = writeln!(
                    c.body,
                    r#"<path d="{path}" fill="{colour}" fill-opacity="0.8"><title>{}</title></path>"#,
                    escape(&self.classes[class])
                );
            }
        }
    }
}
