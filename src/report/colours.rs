//! Every colour of a report: of the page, of what figures compare, of heat maps and of classes.
//!
//! A method has one colour in all figures. A setting that is named after a method (`l_mcl_warm`, `l_mcl resnet8`) has the method's.
//! What is named after none takes the colours that are free in its report, in order.

/// What belongs to the page. Figures carry the light values, and classes by which the HTML report changes them in the dark.
pub(crate) struct Page {
    pub ground: &'static str,
    /// Text and numbers.
    pub ink: &'static str,
    /// Text of less weight.
    pub soft: &'static str,
    pub grid: &'static str,
    /// Behind the heads of tables and behind code.
    pub card: &'static str,
    pub link: &'static str,
}

/// By day.
pub(crate) const LIGHT: Page =
    Page { ground: "#ffffff", ink: "#1f2328", soft: "#59636e", grid: "#d0d7de", card: "#f6f8fa", link: "#0b5cad" };

/// By night.
pub(crate) const DARK: Page =
    Page { ground: "#0d1117", ink: "#e6edf3", soft: "#9198a1", grid: "#30363d", card: "#161b22", link: "#6cb6ff" };

impl Page {
    /// The colours as CSS variables.
    pub(crate) fn css(&self) -> String {
        let Page { ground, ink, soft, grid, card, link } = self;
        format!("--ground:{ground};--ink:{ink};--soft:{soft};--grid:{grid};--card:{card};--link:{link}")
    }
}

/// The line at zero in a figure of differences.
pub(crate) const ZERO: &str = "#7f7f9f";

/// Numbers in cells of a heat map, which keep their colour in the dark.
pub(crate) const ON_PALE: &str = LIGHT.ink;
/// Numbers in the dark cells of a heat map.
pub(crate) const ON_DEEP: &str = "#ffffff";

/// Who has which colour, and the order in which the others take what is free. The first ten stay apart for colour-blind readers, on light
/// and on dark ground. To change the colour of a method, change its line.
const NAMED: [(&str, &str); 13] = [
    ("baseline", "#4477aa"),
    ("dml", "#ee6677"),
    ("mcl", "#228833"),
    ("l_mcl", "#ccbb44"),
    ("one", "#66ccee"),
    ("okddip", "#aa3377"),
    ("afd", "#e08214"),
    ("kdcl", "#8c6d5a"),
    ("pcl", "#7f7f9f"),
    ("ffsd", "#44aa99"),
    ("ckd_mkt", "#b39ddb"),
    // Ways to match layers, which ablations set beside each other.
    ("all_to_all", "#d48fb0"),
    ("one_to_one", "#6a51c9"),
];

/// How many of the colours stay apart for everybody.
pub(crate) const APART: usize = 10;

/// The i-th colour, for what has no name that other figures know.
pub(crate) fn numbered(i: usize) -> String {
    // Beyond the list the golden angle gives hues that are never close to the few before them.
    NAMED.get(i).map_or_else(|| hsl((i as f64 * 137.5) % 360.0, 0.55, 0.5), |(_, colour)| colour.to_string())
}

/// The colour a name brings with it: that of the longest known name it is, or begins with before a space or a sign.
fn own(name: &str) -> Option<&'static str> {
    let begins = |known: &str| name.strip_prefix(known).is_some_and(|rest| !rest.starts_with(char::is_alphanumeric));
    NAMED.iter().filter(|(known, _)| begins(known)).max_by_key(|(known, _)| known.len()).map(|(_, colour)| *colour)
}

/// The colours of all figures of a report.
#[derive(Debug, Clone)]
pub struct Palette {
    colours: Vec<(String, String)>,
}

impl Palette {
    /// Gives every name a colour: a method's own to all that is named after it, and to the others what no method here has, in order. Names
    /// that share a colour in one figure are told apart by dashes and markers.
    pub fn of<S: AsRef<str>>(names: impl IntoIterator<Item = S>) -> Palette {
        Palette::by_method(names.into_iter().map(|name| (name.as_ref().to_string(), name.as_ref().to_string())))
    }

    /// As `of`, for names with the method that each stands for: runs and networks are called what their owner likes.
    pub fn by_method(named: impl IntoIterator<Item = (String, String)>) -> Palette {
        let (names, methods): (Vec<String>, Vec<String>) = named.into_iter().unzip();
        let claims: Vec<Option<&str>> = methods.iter().map(|method| own(method)).collect();
        let mut taken: Vec<String> = claims.iter().copied().flatten().map(String::from).collect();
        let mut colours = vec![];
        for (name, claim) in names.into_iter().zip(claims) {
            let colour = claim.map_or_else(|| free(&taken), String::from);
            taken.push(colour.clone());
            colours.push((name, colour));
        }
        Palette { colours }
    }

    /// The colour of a name. One that was not among those the palette was made of has its method's, or ink.
    pub fn colour<'a>(&'a self, name: &str) -> &'a str {
        let known = self.colours.iter().find(|(known, _)| known == name).map(|(_, colour)| colour.as_str());
        known.or_else(|| own(name)).unwrap_or(LIGHT.ink)
    }

    /// The colour of each name, and how many before it in the list have the same.
    pub(crate) fn styles<'a>(&'a self, names: &[&str]) -> Vec<(&'a str, usize)> {
        let colours: Vec<&str> = names.iter().map(|name| self.colour(name)).collect();
        colours.iter().enumerate().map(|(i, colour)| (*colour, colours[..i].iter().filter(|c| *c == colour).count())).collect()
    }
}

/// The first colour that looks like none of those taken; where there are too many for that, the first that is not among them.
fn free(taken: &[String]) -> String {
    const LIKE: f64 = 60.0;
    let apart = |a: &str, b: &str| {
        let part = |c: &str, i: usize| f64::from(u8::from_str_radix(&c[1 + 2 * i..3 + 2 * i], 16).unwrap_or(0));
        (0..3).map(|i| (part(a, i) - part(b, i)).powi(2)).sum::<f64>().sqrt()
    };
    let first = |least: f64, count: usize| (0..count).map(numbered).find(|c| taken.iter().all(|t| apart(c, t) > least));
    first(LIKE, 80).or_else(|| first(0.0, taken.len() + 80)).unwrap_or_else(|| LIGHT.ink.to_string())
}

/// From near white over blue to near black (0 to 1), readable in grey too.
pub(crate) fn heat(part: f64) -> String {
    const STOPS: [[f64; 3]; 4] = [[244.0, 247.0, 251.0], [143.0, 190.0, 220.0], [43.0, 110.0, 170.0], [12.0, 32.0, 76.0]];
    let at = part * 3.0;
    let (i, f) = ((at as usize).min(2), at - (at as usize).min(2) as f64);
    let mix = |k: usize| (STOPS[i][k] + (STOPS[i + 1][k] - STOPS[i][k]) * f).round() as u8;
    format!("#{:02x}{:02x}{:02x}", mix(0), mix(1), mix(2))
}

/// The i-th of `count` hues around the circle; neighbours differ in lightness too.
pub(crate) fn hue(i: usize, count: usize) -> String {
    hsl(i as f64 / count as f64 * 360.0, 0.62, if i.is_multiple_of(2) { 0.42 } else { 0.58 })
}

fn hsl(h: f64, s: f64, l: f64) -> String {
    let a = s * l.min(1.0 - l);
    let f = |n: f64| {
        let k = (n + h / 30.0) % 12.0;
        ((l - a * (k - 3.0).min(9.0 - k).clamp(-1.0, 1.0)) * 255.0).round() as u8
    };
    format!("#{:02x}{:02x}{:02x}", f(0.0), f(8.0), f(4.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_method_keeps_its_colour_whoever_stands_beside_it() {
        let all = Palette::of(["baseline", "dml", "mcl", "l_mcl"]);
        let few = Palette::of(["ours", "l_mcl_warm", "mcl, resnet8", "baseline_warm"]);
        assert_eq!(all.colour("l_mcl"), few.colour("l_mcl_warm"));
        assert_eq!(all.colour("mcl"), few.colour("mcl, resnet8"));
        assert_eq!(all.colour("baseline"), few.colour("baseline_warm"));
        // A name without a colour of its own takes the first that is free here.
        assert_eq!(few.colour("ours"), all.colour("dml"));
        assert_ne!(Palette::of(["one_to_one"]).colour("one_to_one"), Palette::of(["one"]).colour("one"));
        assert_eq!(own("mclx"), None);
    }

    #[test]
    fn no_two_names_of_a_figure_look_alike() {
        let names: Vec<String> =
            ["l_mcl a", "l_mcl b"].map(String::from).into_iter().chain((0..40).map(|i| format!("layer {i}"))).collect();
        let palette = Palette::of(&names);
        assert_eq!(palette.colour("l_mcl a"), palette.colour("l_mcl b"));
        let mut seen = palette.styles(&names.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!((seen[0].1, seen[1].1), (0, 1), "the second is drawn in another way");
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), names.len());
    }
}
