//! Figures as SVG, drawn here, one file a kind: lines, heat maps, values with their intervals, maps of points. Text stays text. What
//! belongs to the page (ink, grid, ground) carries a class, so that the HTML report can recolour it in the dark. PNG comes from the same
//! SVG (resvg) with the font in report/assets/. All colours are in report/colours.rs.

mod heat;
mod joint;
mod lines;
mod points;
mod whiskers;

use std::fmt::Write as _;

pub use heat::Heat;
pub use joint::{Joint, JointPanel};
pub use lines::{Lines, Series};
pub use points::Points;
pub(crate) use points::marker;
pub use whiskers::{Whisker, Whiskers};

use super::colours::{DARK, LIGHT};
use super::map::Map;
use super::table::Table;
use super::text;
use crate::error::{Error, Result};

/// A drawn figure.
#[derive(Debug, Clone)]
pub struct Figure {
    /// The stem of its file.
    pub name: String,
    /// What stands under it.
    pub caption: String,
    /// The picture.
    pub svg: String,
    /// The same for a page as narrow as a phone; where there is none, the picture keeps its width and scrolls.
    pub narrow: Option<String>,
    /// Was it read from a file? Then a page shows it as an image, in which no script runs.
    pub foreign: bool,
    /// The numbers it was drawn from.
    pub numbers: Option<Table>,
    /// The same as a map that answers to the pointer.
    pub map: Option<Map>,
}

/// How the first element of every figure of ours begins.
const GROUND: &str = "<rect class=\"ground\"";

/// How wide charts are on a desk, and on a phone: letters have their size on either. What is wider has a row of its own.
const CHART: f64 = 560.0;
const PHONE: f64 = 360.0;

/// DejaVu Sans cut down to the characters figures use: pictures look the same on machines without fonts.
static FONT: &[u8] = include_bytes!("../assets/DejaVuSans-subset.ttf");

impl Figure {
    /// A figure whose file is called by `name`, made fit for a file system.
    pub fn new(name: impl Into<String>, caption: impl Into<String>, svg: String) -> Figure {
        Figure { name: file_stem(&name.into()), caption: caption.into(), svg, narrow: None, foreign: false, numbers: None, map: None }
    }

    /// A chart that is drawn for a desk and for a phone.
    fn chart(name: impl Into<String>, caption: impl Into<String>, draw: impl Fn(f64) -> String) -> Figure {
        Figure { narrow: Some(draw(PHONE)), ..Figure::new(name, caption, draw(CHART)) }
    }

    /// The figure with the numbers it was drawn from.
    pub fn of(self, numbers: Table) -> Figure {
        Figure { numbers: Some(numbers), ..self }
    }

    /// The picture for a file of its own: it follows the reader's choice of light or dark by itself.
    pub fn file(&self) -> String {
        let style = format!(
            "<style>@media(prefers-color-scheme:dark){{.ink{{fill:{}}}.soft{{fill:{}}}.grid{{stroke:{}}}.ground{{fill:{}}}.halo{{stroke:{}}}}}</style>\n",
            DARK.ink, DARK.soft, DARK.grid, DARK.ground, DARK.ground
        );
        match self.svg.split_once(GROUND).filter(|_| !self.foreign) {
            Some((before, rest)) => format!("{before}{style}{GROUND}{rest}"),
            None => self.svg.clone(),
        }
    }

    /// A figure that was read from a file, which anybody may have changed.
    pub fn foreign(name: impl Into<String>, caption: impl Into<String>, svg: String) -> Figure {
        Figure { foreign: true, ..Figure::new(name, caption, svg) }
    }

    /// Does it need a row of its own?
    pub fn is_wide(&self) -> bool {
        let width = self.svg.split_once(" width=\"").and_then(|(_, rest)| rest.split('"').next()?.parse::<f64>().ok());
        width.is_some_and(|w| w > CHART)
    }

    /// The figure as PNG, `scale` pixels per unit.
    pub fn png(&self, scale: f32) -> Result<Vec<u8>> {
        let failed = |e: String| Error::failed(format!("figure {}: {e}", self.name));
        let mut options = resvg::usvg::Options { font_family: "DejaVu Sans".into(), ..Default::default() };
        options.fontdb_mut().load_font_data(FONT.to_vec());
        // Every generic family means the one font there is.
        options.fontdb_mut().set_sans_serif_family("DejaVu Sans");
        let tree = resvg::usvg::Tree::from_str(&self.svg, &options).map_err(|e| failed(e.to_string()))?;
        let size = tree.size().to_int_size().scale_by(scale).ok_or_else(|| failed(format!("no size at scale {scale}")))?;
        let mut pixels = resvg::tiny_skia::Pixmap::new(size.width(), size.height()).ok_or_else(|| failed("too large".into()))?;
        resvg::render(&tree, resvg::tiny_skia::Transform::from_scale(scale, scale), &mut pixels.as_mut());
        pixels.encode_png().map_err(|e| failed(e.to_string()))
    }
}

/// Letters, digits, dots and dashes; anything else becomes a dash.
pub fn file_stem(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' }).collect()
}

/// Text as it stands in SVG and HTML.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// An SVG being written.
struct Canvas {
    width: f64,
    height: f64,
    body: String,
}

#[derive(Clone, Copy, PartialEq)]
enum Anchor {
    Start,
    Middle,
    End,
}

impl Canvas {
    fn new(width: f64, height: f64) -> Canvas {
        Canvas { width, height, body: String::new() }
    }

    fn text(&mut self, x: f64, y: f64, size: f64, anchor: Anchor, text: &str) {
        self.styled(x, y, size, anchor, text, &ink());
    }

    /// What the figure shows, at its upper edge, in the lines that `heading` made.
    fn title(&mut self, x: f64, lines: &[String]) {
        for (i, line) in lines.iter().enumerate() {
            self.styled(x, 20.0 + HEADING * i as f64, 14.0, Anchor::Start, line, &format!(r#"{} font-weight="bold""#, ink()));
        }
    }

    /// Text that stands before lines and stays readable.
    fn before(&mut self, x: f64, y: f64, size: f64, text: &str) {
        let halo = format!(r#"class="ink halo" fill="{}" stroke="{}" stroke-width="4" paint-order="stroke""#, LIGHT.ink, LIGHT.ground);
        self.styled(x, y, size, Anchor::Start, text, &halo);
    }

    /// Text of less weight.
    fn soft(&mut self, x: f64, y: f64, size: f64, anchor: Anchor, text: &str) {
        self.styled(x, y, size, anchor, text, &format!(r#"class="soft" fill="{}""#, LIGHT.soft));
    }

    /// The k-th way to mark a point.
    fn marker(&mut self, x: f64, y: f64, radius: f64, k: usize, colour: &str, title: &str) {
        let r = radius;
        let shape = match k % 4 {
            0 => format!("M{:.1} {y:.1}a{r} {r} 0 1 0 {d} 0a{r} {r} 0 1 0 -{d} 0z", x - r, d = 2.0 * r),
            1 => format!("M{:.1} {:.1}h{d}v{d}h-{d}z", x - r, y - r, d = 2.0 * r),
            2 => format!("M{x:.1} {:.1}l{a:.1} {h:.1}h-{d:.1}z", y - 1.25 * r, a = 1.2 * r, h = 2.1 * r, d = 2.4 * r),
            _ => format!("M{x:.1} {:.1}l{a:.1} {a:.1}l-{a:.1} {a:.1}l-{a:.1} -{a:.1}z", y - 1.35 * r, a = 1.35 * r),
        };
        let _ = writeln!(self.body, r#"<path d="{shape}" fill="{colour}"><title>{}</title></path>"#, escape(title));
    }

    fn styled(&mut self, x: f64, y: f64, size: f64, anchor: Anchor, text: &str, style: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let _ =
            writeln!(self.body, r#"<text x="{x:.1}" y="{y:.1}" font-size="{size}" text-anchor="{anchor}" {style}>{}</text>"#, escape(text));
    }

    /// Text that reads from below to above.
    fn turned(&mut self, x: f64, y: f64, size: f64, anchor: Anchor, text: &str) {
        self.styled(x, y, size, anchor, text, &format!(r#"{} transform="rotate(-90 {x:.1} {y:.1})""#, ink()));
    }

    fn line(&mut self, x1: f64, y1: f64, x2: f64, y2: f64) {
        let _ = writeln!(self.body, r#"<path class="grid" d="M{x1:.1} {y1:.1}L{x2:.1} {y2:.1}" stroke="{}" fill="none"/>"#, LIGHT.grid);
    }

    fn rect(&mut self, x: f64, y: f64, w: f64, h: f64, fill: &str, title: &str) {
        let _ = writeln!(
            self.body,
            r#"<rect x="{x:.2}" y="{y:.2}" width="{w:.2}" height="{h:.2}" fill="{fill}"><title>{}</title></rect>"#,
            escape(title)
        );
    }

    fn finish(self, label: &str) -> String {
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {w:.0} {h:.0}\" width=\"{w:.0}\" height=\"{h:.0}\" font-family=\"DejaVu Sans, system-ui, sans-serif\" role=\"img\" aria-label=\"{}\">\n{GROUND} width=\"{w:.0}\" height=\"{h:.0}\" fill=\"{ground}\"/>\n{}</svg>\n",
            escape(label),
            self.body,
            w = self.width,
            h = self.height,
            ground = LIGHT.ground
        )
    }
}

/// How text of the page's colour is written.
fn ink() -> String {
    format!(r#"class="ink" fill="{}""#, LIGHT.ink)
}

/// Round numbers from `low` to `high`, about `count` of them.
fn ticks(low: f64, high: f64, count: usize) -> Vec<f64> {
    let span = (high - low).max(1e-12);
    let raw = span / count.max(1) as f64;
    let power = 10f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0].iter().map(|m| m * power).find(|s| *s >= raw * 0.8).unwrap_or(10.0 * power);
    let first = (low / step).ceil() as i64;
    (first..).map(|i| i as f64 * step).take_while(|t| *t <= high + step * 1e-6).collect()
}

fn label(value: f64) -> String {
    if value == 0.0 {
        return "0".into();
    }
    if value.abs() >= 1e5 || value.abs() < 1e-3 {
        return format!("{value:.0e}");
    }
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

/// A title in lines that fit a figure of this width.
fn heading(title: &str, width: f64) -> Vec<String> {
    text::wrap(title, 14.0, true, width)
}

/// From line to line of a title.
const HEADING: f64 = 18.0;

/// Where a figure begins under a title of so many lines.
fn below(lines: &[String]) -> f64 {
    16.0 + HEADING * lines.len().max(1) as f64
}

/// Where the names of a legend go: from the left, and on which line. `more` is what stands beside a name.
fn legend<S: AsRef<str>>(names: &[S], width: f64, more: f64) -> Vec<(f64, usize)> {
    let (mut x, mut line) = (0.0, 0);
    let mut places = vec![];
    for name in names {
        let own = text::width(name.as_ref(), 11.0, false) + more;
        if x > 0.0 && x + own > width {
            (x, line) = (0.0, line + 1);
        }
        places.push((x, line));
        x += own;
    }
    places
}

/// How lines of one colour are told apart.
const DASHES: [&str; 4] = ["", "6 3", "2 3", "9 3 2 3"];

/// From the least to the greatest, widened by a share of the span; something where there is nothing.
fn range(values: &[f64], margin: f64) -> (f64, f64) {
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if !low.is_finite() {
        return (0.0, 1.0);
    }
    let span = if high > low { high - low } else { low.abs().max(1.0) * 0.1 };
    let pad = if high > low { span * margin } else { span };
    (low - pad, high + pad)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::colours::Palette;

    #[test]
    fn ticks_are_round_and_inside() {
        assert_eq!(ticks(0.0, 100.0, 5), [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]);
        let found = ticks(0.12, 0.38, 5);
        assert!(found.iter().zip([0.15, 0.2, 0.25, 0.3, 0.35]).all(|(a, b)| (a - b).abs() < 1e-12) && found.len() == 5, "{found:?}");
        assert_eq!(label(0.25), "0.25");
        assert_eq!(label(1.0), "1");
    }

    #[test]
    fn figures_hold_their_text_escaped_and_become_png() {
        let series = [Series { name: "a < b & c".into(), points: vec![(0.0, 1.0), (1.0, f64::NAN), (2.0, 3.0)], band: vec![] }];
        let palette = Palette::of(["a"]);
        let figure = Lines { title: "T", x: "epoch", y: "%", series: &series, palette: &palette, band: "" }.figure("x/y", "");
        let svg = &figure.svg;
        assert!(svg.contains("a &lt; b &amp; c") && !svg.contains("NaN"), "{svg}");
        assert!(figure.file().contains("prefers-color-scheme:dark") && !svg.contains("prefers"));
        assert!(!figure.is_wide());
        let png = figure.png(1.0).unwrap();
        assert_eq!(&png[1..4], b"PNG");
    }
}
