//! What may be asked of a dataset beyond its name, and the keys of its own that each dataset reads from `[data]`.

use std::cell::Cell;

use serde::de::value::Error as Stop;
use serde::de::{DeserializeOwned, Deserializer, Error as _, Visitor};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// What may be asked of a dataset beyond its name.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Options {
    /// Which of its two tasks `synthetic` draws; the other sets have one.
    pub task: Task,
    /// Side of the images drawn by `synthetic` (32) or cropped from those of `imagenet` and `image_folder` (224).
    pub size: Option<usize>,
    /// Keys of the dataset's own; a key that it does not know is refused.
    pub own: toml::Table,
}

/// The two tasks of a dataset that has two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Task {
    /// What networks are pre-trained on.
    #[default]
    Source,
    /// Other classes, for measuring transfer.
    Transfer,
}

/// How a dataset's own keys are read: a struct in its file, with `#[serde(default, deny_unknown_fields)]`.
pub struct OwnOptions {
    keys: fn() -> &'static [&'static str],
    check: fn(&str, &toml::Table) -> Result<()>,
}

/// For a dataset without keys of its own.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Nothing {}

impl OwnOptions {
    /// A dataset without keys of its own.
    pub const NONE: OwnOptions = OwnOptions::of::<Nothing>();

    /// The keys are the fields of this struct.
    pub const fn of<T: DeserializeOwned>() -> OwnOptions {
        OwnOptions { keys: fields::<T>, check: |dataset, table| read::<T>(dataset, table).map(drop) }
    }

    /// The names of the keys.
    pub fn keys(&self) -> &'static [&'static str] {
        (self.keys)()
    }

    /// Refuses a key that is unknown or a value that is not for it.
    pub fn check(&self, dataset: &str, table: &toml::Table) -> Result<()> {
        (self.check)(dataset, table)
    }
}

/// The keys as the dataset's struct, or the line that names the dataset, the key and what would be accepted.
pub(super) fn read<T: DeserializeOwned>(dataset: &str, table: &toml::Table) -> Result<T> {
    let known = fields::<T>();
    if let Some(key) = table.keys().find(|key| !known.contains(&key.as_str())) {
        let accepted = if known.is_empty() { "none".to_string() } else { known.join(", ") };
        return Err(Error::input(format!("dataset {dataset}: unknown key `{key}` in [data]; keys of its own: {accepted}")));
    }
    let fault = |e: toml::de::Error| {
        let what = e.to_string();
        let lines: Vec<&str> = what.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        Error::input(format!("dataset {dataset}: [data]: {}", lines.join(" ")))
    };
    toml::Table::try_into(table.clone()).map_err(fault)
}

/// The fields of a struct, by asking it to read itself from something that only listens to what it wants.
fn fields<T: DeserializeOwned>() -> &'static [&'static str] {
    let heard = Cell::new(&[][..]);
    let _ = T::deserialize(Listener(&heard)); // always an error: there is nothing to read
    heard.get()
}

struct Listener<'a>(&'a Cell<&'static [&'static str]>);

impl<'de> Deserializer<'de> for Listener<'_> {
    type Error = Stop;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        _: V,
    ) -> std::result::Result<V::Value, Stop> {
        self.0.set(fields);
        Err(Stop::custom("heard"))
    }

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> std::result::Result<V::Value, Stop> {
        Err(Stop::custom("options are a struct"))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct newtype_struct seq
        tuple tuple_struct map enum identifier ignored_any
    }
}
