//! Maps that hold the same images several times, once for each network: colours tell classes, shapes networks.

use super::points::{Entry, SHAPES, SIDE, class_path, side_by_side};
use crate::report::colours::{self, LIGHT};
use crate::report::map::in_unit_square;

/// One map of all networks of a run. The points of the first network come first, in the order of the images.
pub struct JointPanel {
    /// Above the map.
    pub title: String,
    /// Printed under the title: how far the map may be believed.
    pub note: String,
    /// Where each image lies, network by network.
    pub points: Vec<[f64; 2]>,
}

/// Such maps side by side.
pub struct Joint<'a> {
    /// Above all maps.
    pub title: &'a str,
    /// The maps.
    pub panels: &'a [JointPanel],
    /// The class of each image.
    pub labels: &'a [usize],
    /// What the networks are called.
    pub networks: &'a [String],
    /// The name of each class.
    pub classes: &'a [String],
}

impl Joint<'_> {
    fn colour(&self, class: usize) -> String {
        if self.classes.len() <= colours::APART { colours::numbered(class) } else { colours::hue(class, self.classes.len()) }
    }

    /// The maps as SVG.
    pub fn draw(&self) -> String {
        let shape = |network: usize| SHAPES[network % SHAPES.len()];
        let networks = self.networks.iter().enumerate().map(|(m, name)| Entry { name, colour: LIGHT.ink.to_string(), shape: shape(m) });
        let classes = self.classes.iter().enumerate().map(|(k, name)| Entry { name, colour: self.colour(k), shape: SHAPES[0] });
        let legend: Vec<Entry> = networks.chain(classes).collect();
        side_by_side(
            self.title,
            self.panels,
            |panel: &JointPanel| (&panel.title, &panel.note),
            &legend,
            |c, panel, x, top| {
                let places = in_unit_square(&panel.points);
                for (m, network) in self.networks.iter().enumerate() {
                    for (class, name) in self.classes.iter().enumerate() {
                        let own = places.iter().skip(m * self.labels.len()).zip(self.labels).filter(|(_, label)| **label == class);
                        let places = own.map(|(p, _)| (x + SIDE * p[0], top + SIDE * p[1]));
                        class_path(c, places, shape(m), &self.colour(class), &format!("{name}, {network}"));
                    }
                }
            },
        )
    }
}
