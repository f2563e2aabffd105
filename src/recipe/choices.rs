//! Keys of a recipe that are words.

use serde::{Deserialize, Serialize};
use toml::Value;

/// `train.choose`: what the held-out images choose among.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Choose {
    /// The networks' own classifiers.
    #[default]
    Own,
    /// Every stage that ships as a network of its own, too.
    Any,
    /// Nothing: the last epoch ships, as the paper has it, and the held-out images are only watched.
    Last,
}

impl Choose {
    pub(super) fn is_own(&self) -> bool {
        *self == Choose::Own
    }
}

/// `data.on_device`: "auto", true or false.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OnDevice(Option<bool>);

impl OnDevice {
    /// None for "auto".
    pub fn asked(self) -> Option<bool> {
        self.0
    }

    pub(super) fn is_auto(&self) -> bool {
        self.0.is_none()
    }
}

impl Serialize for OnDevice {
    fn serialize<S: serde::Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        match self.0 {
            None => to.serialize_str("auto"),
            Some(asked) => to.serialize_bool(asked),
        }
    }
}

impl<'de> Deserialize<'de> for OnDevice {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> std::result::Result<OnDevice, D::Error> {
        match Value::deserialize(from)? {
            Value::Boolean(asked) => Ok(OnDevice(Some(asked))),
            Value::String(word) if word == "auto" => Ok(OnDevice(None)),
            other => Err(serde::de::Error::custom(format!("on_device = {other}; accepted: \"auto\", true, false"))),
        }
    }
}
