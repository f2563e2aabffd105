//! What the channels of images are normalised with: by a flag, or by what a network's file says.

use std::path::Path;
use std::str::FromStr;

use crate::data::imagenet;
use crate::error::{Error, Result};

/// What the channels of an image between 0 and 1 are normalised with: (x - mean) / std.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Normalisation {
    /// Of red, green and blue.
    pub mean: [f64; 3],
    /// Standard deviations, likewise.
    pub std: [f64; 3],
}

impl Normalisation {
    /// Images stay as they are.
    pub const NONE: Normalisation = Normalisation { mean: [0.0; 3], std: [1.0; 3] };

    /// Refuses what no image can be normalised with.
    pub fn new(mean: [f64; 3], std: [f64; 3]) -> Result<Normalisation> {
        if let Some(bad) = mean.iter().find(|m| !m.is_finite()) {
            return Err(Error::input(format!("channel mean {bad}; accepted: finite numbers")));
        }
        if let Some(bad) = std.iter().find(|s| !(**s > 0.0 && s.is_finite())) {
            return Err(Error::input(format!("channel standard deviation {bad}; accepted: finite numbers above 0")));
        }
        Ok(Normalisation { mean, std })
    }
}

impl FromStr for Normalisation {
    type Err = Error;

    fn from_str(text: &str) -> Result<Normalisation> {
        let three = |text: &str| -> Option<[f64; 3]> {
            let numbers: Option<Vec<f64>> = text.split(',').map(|n| n.trim().parse().ok()).collect();
            numbers?.try_into().ok()
        };
        match text {
            "imagenet" => Ok(Normalisation { mean: imagenet::MEAN, std: imagenet::STD }),
            "none" => Ok(Normalisation::NONE),
            _ => text
                .split_once('/')
                .and_then(|(mean, std)| Normalisation::new(three(mean)?, three(std)?).ok())
                .ok_or_else(|| {
                    Error::input(format!(
                        "normalisation `{text}`; accepted: imagenet, none, or means and deviations above 0, e.g. 0.485,0.456,0.406/0.229,0.224,0.225"
                    ))
                }),
        }
    }
}

/// The three numbers of a flag, or what the file says.
pub(super) fn three(flag: &str, given: &[f64], stored: Option<[f64; 3]>, file: &Path) -> Result<[f64; 3]> {
    match (given, stored) {
        ([], Some(stored)) => Ok(stored),
        ([], None) => Err(Error::input(format!(
            "{} does not say what its inputs were normalised with; add --normalisation imagenet (as most ImageNet networks want), or --mean R,G,B and --std R,G,B as in its training",
            file.display()
        ))),
        ([r, g, b], _) => Ok([*r, *g, *b]),
        (other, _) => Err(Error::input(format!("{flag} has {} numbers; accepted: three, for red, green and blue", other.len()))),
    }
}
