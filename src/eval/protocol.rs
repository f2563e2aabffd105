//! Protocols: how a measurement is made, one TOML each under protocols/eval. What ships is compiled in by the file that follows it and
//! gives the defaults of its kind; a file of the user's, and single keys, change it.

use std::path::Path;

use clap::Args;
use serde::Serialize;
use serde::de::DeserializeOwned;
use toml::{Table, Value};

use crate::error::{Error, Result, did_you_mean, in_words};
use crate::files;
use crate::limits;
use crate::settings::Setting;

/// A protocol that is compiled in. Its name on the command line is also the kind that a file of the user's names.
#[derive(Debug)]
pub struct Shipped {
    /// On the command line, and `kind` in the text.
    pub name: &'static str,
    /// The TOML, header included.
    pub text: &'static str,
    /// Keys that only say how many rows are made: rows of other values of theirs are measured alike.
    pub repeats: &'static [&'static str],
}

impl Shipped {
    /// The first line of its header: what it is.
    pub fn about(&self) -> &'static str {
        self.text.lines().next().unwrap_or_default().trim_start_matches("# ")
    }

    fn table(&self) -> Table {
        let mut table: Table = self.text.parse().expect("shipped protocols parse");
        table.remove("kind");
        table
    }

    /// The protocol as it ships, nothing changed.
    pub fn protocol(&self) -> Protocol {
        Protocol { name: self.name.to_string(), kind: self.name, table: self.table() }
    }
}

/// The flags of every measurement that follows a protocol.
#[derive(Debug, Clone, Default, Args)]
pub struct HowArgs {
    // The registry of measurements writes the help text: it knows which protocols ship.
    #[arg(long, value_name = "NAME|FILE")]
    pub(crate) protocol: Option<String>,
    /// Change a key of the protocol, e.g. --set image_size=96 (may be repeated)
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(crate) sets: Vec<String>,
    /// Side the images are brought to [default: the protocol's, or the network's own]
    #[arg(long)]
    pub(crate) image_size: Option<i64>,
    /// Do not keep or use extracted features
    #[arg(long)]
    pub(crate) no_cache: bool,
}

impl HowArgs {
    /// The protocol asked for, else the one called `default`, with what these flags change.
    pub(crate) fn protocol(&self, shipped: &[Shipped], default: &str) -> Result<Protocol> {
        let mut protocol = Protocol::read(self.protocol.as_deref().unwrap_or(default), shipped)?;
        apply_sets(&mut protocol, &self.sets)?;
        if let Some(side) = self.image_size {
            protocol.set("image_size", side);
        }
        if protocol.image_size() != 0 {
            limits::side("protocol: image_size", protocol.image_size())?;
        }
        Ok(protocol)
    }
}

/// A protocol as it will be followed.
#[derive(Debug, Clone)]
pub struct Protocol {
    /// As it was asked for: the name of a shipped one, or a file.
    pub name: String,
    /// The shipped protocol whose keys it has.
    kind: &'static str,
    /// Every key but `kind`.
    table: Table,
}

impl Protocol {
    /// `asked` is the name of one of `shipped`, or a file whose `kind` is one of these names (without it, the first).
    pub fn read(asked: &str, shipped: &[Shipped]) -> Result<Protocol> {
        let names = || shipped.iter().map(|s| s.name).collect::<Vec<_>>().join(", ");
        if let Some(found) = shipped.iter().find(|s| s.name == asked) {
            return Ok(found.protocol());
        }
        if !Path::new(asked).is_file() {
            let hint = did_you_mean(asked, shipped.iter().map(|s| s.name));
            return Err(Error::input(format!("unknown protocol `{asked}`{hint}; known: {}, or a TOML file", names())));
        }
        let text = files::read_text(Path::new(asked))?;
        let mut own: Table = text.parse().map_err(|e: toml::de::Error| {
            let line = e.span().map_or(String::new(), |span| format!("line {}: ", text[..span.start].matches('\n').count() + 1));
            Error::file(asked, format!("{line}{}", e.message()))
        })?;
        let kind = match own.remove("kind") {
            None => &shipped[0],
            Some(kind) => {
                let found = shipped.iter().find(|s| kind.as_str() == Some(s.name));
                found.ok_or_else(|| Error::file(asked, format!("kind = {kind}; accepted here: {}", names())))?
            }
        };
        let mut protocol = Protocol { name: asked.to_string(), ..kind.protocol() };
        for (key, value) in own {
            protocol.known(&key).map_err(|e| Error::input(format!("protocol {asked}: {e}")))?;
            protocol.set(&key, value);
        }
        Ok(protocol)
    }

    /// The side that images are brought to; 0 for the network's own.
    pub(crate) fn image_size(&self) -> i64 {
        self.table.get("image_size").and_then(Value::as_integer).unwrap_or(0)
    }

    /// The name of the shipped protocol whose keys this one has.
    pub fn kind(&self) -> &'static str {
        self.kind
    }

    fn known(&self, key: &str) -> Result<()> {
        if self.table.contains_key(key) {
            return Ok(());
        }
        let known: Vec<&str> = self.table.keys().map(String::as_str).collect();
        let hint = did_you_mean(key, known.iter().copied());
        Err(Error::input(format!("unknown key `{key}`{hint}; known: {}", known.join(", "))))
    }

    /// Changes a key by `key=value`; a value that is no TOML is taken as text.
    pub fn change(&mut self, change: &str) -> Result<()> {
        let setting = Setting::parse(change, "key=value, for example epochs=10")?;
        self.known(&setting.key())?;
        self.set(&setting.key(), setting.value);
        Ok(())
    }

    /// Changes a key, for flags that have one of their own.
    pub(crate) fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.table.insert(key.to_string(), value.into());
    }

    /// The keys as the struct of a measurement with one kind of protocol.
    pub fn options<T: DeserializeOwned>(&self) -> Result<T> {
        self.parse(self.table.clone())
    }

    /// The keys as an enum with a variant a kind, named by `kind`.
    pub(crate) fn options_by_kind<T: DeserializeOwned>(&self) -> Result<T> {
        let mut table = self.table.clone();
        table.insert("kind".to_string(), self.kind.into());
        self.parse(table)
    }

    fn parse<T: DeserializeOwned>(&self, table: Table) -> Result<T> {
        table.try_into().map_err(|e: toml::de::Error| Error::input(format!("protocol {}: {}", self.name, in_words(&e.to_string()))))
    }

    /// Every key and the kind, as a row keeps them.
    pub fn json(&self) -> serde_json::Value {
        let mut json = serde_json::to_value(&self.table).expect("plain values serialise");
        json["kind"] = self.kind.into();
        json
    }

    /// Changes when any key changes.
    pub fn hash(&self) -> String {
        files::sha256(self.json().to_string().as_bytes())[..16].to_string()
    }
}

/// What `--set KEY=VALUE` on a command line changes; a refusal names the flag.
pub(crate) fn apply_sets(protocol: &mut Protocol, sets: &[String]) -> Result<()> {
    sets.iter().try_for_each(|set| protocol.change(set).map_err(|e| Error::input(format!("--set {set}: {e}"))))
}

/// Is no value given twice? The same seed twice is one draw, not two.
pub(crate) fn all_different<T: PartialEq>(values: &[T]) -> bool {
    values.iter().enumerate().all(|(i, value)| !values[..i].contains(value))
}

/// Refuses values that parse but make no sense: `require(epochs > 0, "epochs", epochs, "1 or more")`.
pub(crate) fn require(ok: bool, key: &str, value: impl Serialize, accepted: &str) -> Result<()> {
    if ok {
        return Ok(());
    }
    let value = serde_json::to_string(&value).unwrap_or_default();
    Err(Error::input(format!("protocol: {key} = {value}; accepted: {accepted}")))
}
