//! Points of several networks side by side: what a figure is drawn from, a file that reports read back, a table for other tools, and what
//! the page's script needs.

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::plot::marker;
use super::table::{Cell, Table};

/// The same images as several networks see them.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Map {
    /// The name of each class.
    pub classes: Vec<String>,
    /// The place of each image in its split.
    pub images: Vec<usize>,
    /// The class of each image.
    pub labels: Vec<usize>,
    /// What the answers of the panels come from; empty where there are none.
    pub answered_by: String,
    /// A network each.
    pub panels: Vec<Panel>,
    /// Small pictures of the images, where they were asked for; never in a file.
    #[serde(skip)]
    pub pictures: Option<Sprite>,
}

/// The map of one network.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Panel {
    /// The network.
    pub name: String,
    /// Above the map.
    pub title: String,
    /// Printed under the title: how far the map may be believed.
    pub note: String,
    /// Where each image lies.
    pub points: Vec<[f64; 2]>,
    /// Which class each image was taken for; empty where nobody asked.
    pub answers: Vec<usize>,
}

/// Pictures of all images of a map in one, row by row.
#[derive(Debug, Clone)]
pub struct Sprite {
    /// A JPEG.
    pub data: Vec<u8>,
    /// Of one picture, in pixels.
    pub side: usize,
    /// Pictures in a row.
    pub columns: usize,
}

/// What a page can show.
const MOST_POINTS: usize = 100_000;

/// Points in a square of side 1, from its upper left corner. One scale for both axes: distances mean the same in every direction.
pub(crate) fn in_unit_square(points: &[[f64; 2]]) -> Vec<[f64; 2]> {
    let ends = |axis: usize| {
        let values = points.iter().map(|p| p[axis]);
        (values.clone().fold(f64::INFINITY, f64::min), values.fold(f64::NEG_INFINITY, f64::max))
    };
    let ((x0, x1), (y0, y1)) = (ends(0), ends(1));
    let span = (x1 - x0).max(y1 - y0).max(f64::MIN_POSITIVE) * 1.06;
    let (cx, cy) = ((x0 + x1) / 2.0, (y0 + y1) / 2.0);
    points.iter().map(|p| [0.5 + (p[0] - cx) / span, 0.5 - (p[1] - cy) / span]).collect()
}

impl Map {
    /// A map from its file; none where the text is no whole map, since anybody may have written it.
    pub fn read(text: &str) -> Option<Map> {
        let map: Map = serde_json::from_str(text).ok()?;
        let (count, classes) = (map.images.len(), map.classes.len());
        let known = |labels: &[usize]| labels.iter().all(|l| *l < classes);
        let whole = |p: &Panel| {
            p.points.len() == count
                && p.points.iter().flatten().all(|v| v.is_finite() && v.abs() < 1e9)
                && (p.answers.is_empty() || p.answers.len() == count)
                && known(&p.answers)
        };
        let sound = (1..=MOST_POINTS).contains(&count) && map.labels.len() == count && known(&map.labels);
        (sound && !map.panels.is_empty() && map.panels.iter().all(whole)).then_some(map)
    }

    /// The text of its file.
    pub fn file(&self) -> String {
        serde_json::to_string(self).expect("plain values serialise") + "\n"
    }

    /// A row an image, for Embedding Atlas, FiftyOne and whatever else reads CSV.
    pub fn table(&self) -> Table {
        let mut table = Table::new("points", &["image", "label", "class"]);
        for panel in &self.panels {
            table.columns.extend([".x", ".y"].map(|axis| format!("{}{axis}", panel.name)));
            if !panel.answers.is_empty() {
                table.columns.push(format!("{}.answer", panel.name));
            }
        }
        for (i, (image, label)) in self.images.iter().zip(&self.labels).enumerate() {
            let mut row = vec![Cell::Count(*image as i64), Cell::Count(*label as i64), Cell::text(&self.classes[*label])];
            for panel in &self.panels {
                row.extend(panel.points[i].map(|v| Cell::Score(v, 4)));
                row.extend(panel.answers.get(i).map(|a| Cell::text(&self.classes[*a])));
            }
            table.push(row);
        }
        table
    }

    /// What the page's script reads.
    pub(crate) fn for_page(&self) -> serde_json::Value {
        let markers: Vec<(String, usize)> = (0..self.classes.len()).map(|c| marker(c, self.classes.len())).collect();
        let panel = |p: &Panel| {
            let flat: Vec<i64> = in_unit_square(&p.points).iter().flatten().map(|v| (v * 1000.0).round() as i64).collect();
            json!({ "title": p.title, "note": p.note, "xy": flat, "answers": p.answers })
        };
        json!({
            "classes": self.classes, "markers": markers, "images": self.images, "labels": self.labels, "by": self.answered_by,
            "panels": self.panels.iter().map(panel).collect::<Vec<_>>(),
            "side": self.pictures.as_ref().map_or(0, |s| s.side), "columns": self.pictures.as_ref().map_or(0, |s| s.columns),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map() -> Map {
        let panel = Panel { name: "a".into(), points: vec![[0.0, 0.0], [2.0, 1.0]], answers: vec![1, 1], ..Panel::default() };
        Map { classes: vec!["cat".into(), "dog".into()], images: vec![7, 9], labels: vec![0, 1], panels: vec![panel], ..Map::default() }
    }

    #[test]
    fn what_is_written_is_read_and_what_is_not_whole_is_not() {
        let text = map().file();
        assert_eq!(Map::read(&text).unwrap().file(), text);
        assert_eq!(map().table().csv().unwrap(), "image,label,class,a.x,a.y,a.answer\n7,0,cat,0,0,dog\n9,1,dog,2,1,dog\n");
        for (from, to) in [("[7,9]", "[7]"), ("\"labels\":[0,1]", "\"labels\":[0,2]"), ("[1,1]", "[1,5]"), ("[2.0,1.0]", "[2.0,1e99]")] {
            let damaged = text.replace(from, to);
            assert!(damaged != text && Map::read(&damaged).is_none(), "{damaged}");
        }
    }

    #[test]
    fn both_axes_have_one_scale() {
        let unit = in_unit_square(&map().panels[0].points);
        assert!((unit[1][0] - unit[0][0] - 2.0 * (unit[0][1] - unit[1][1])).abs() < 1e-12, "{unit:?}");
        assert!(unit.iter().flatten().all(|v| (0.0..=1.0).contains(v)));
    }
}
