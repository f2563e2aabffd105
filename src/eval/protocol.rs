//! Evaluation protocols: one TOML each under protocols/eval, compiled in as the defaults of its kind; a file of the user's changes keys.

use std::path::Path;

use clap::Args;
use serde::Serialize;
use serde::de::DeserializeOwned;
use toml::{Table, Value};

use crate::error::{Error, Result};
use crate::files;

/// The shipped protocols: the name on the command line, and the text.
pub const SHIPPED: &[(&str, &str)] = &[
    ("paper", include_str!("../../protocols/eval/linear-probe.toml")),
    ("sweep", include_str!("../../protocols/eval/sweep.toml")),
    ("lbfgs", include_str!("../../protocols/eval/lbfgs.toml")),
    ("knn", include_str!("../../protocols/eval/knn.toml")),
    ("few-shot", include_str!("../../protocols/eval/few-shot.toml")),
    ("tsne", include_str!("../../protocols/eval/tsne.toml")),
    ("export-coco", include_str!("../../protocols/eval/export-coco.toml")),
];

/// The flags of every measurement on frozen features; each command has a `--protocol` of its own kinds beside them.
#[derive(Debug, Clone, Default, Args)]
pub struct HowArgs {
    /// Change a key of the protocol, e.g. --set image_size=96 (may be repeated)
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
    /// Side the images are brought to [default: the protocol's, or the network's own]
    #[arg(long)]
    pub image_size: Option<i64>,
    /// Do not keep or use extracted features
    #[arg(long)]
    pub no_cache: bool,
}

impl HowArgs {
    /// The protocol called `name`, of one of `kinds`, with what these flags change.
    pub fn protocol(&self, name: &str, kinds: &[&str]) -> Result<Protocol> {
        let mut protocol = Protocol::read(name, kinds, &self.sets)?;
        if let Some(side) = self.image_size {
            protocol.set("image_size", side);
        }
        Ok(protocol)
    }
}

/// A protocol as it will be followed.
pub struct Protocol {
    pub name: String,
    pub kind: String,
    /// Every key but `kind`.
    table: Table,
}

impl Protocol {
    /// `asked` is the name of a shipped protocol of one of `kinds`, or a file; `sets` are `key=value`.
    pub fn read(asked: &str, kinds: &[&str], sets: &[String]) -> Result<Protocol> {
        let shipped =
            |name: &str| SHIPPED.iter().find(|(n, _)| *n == name).map(|(_, text)| text.parse::<Table>().expect("shipped protocols parse"));
        let own = match shipped(asked).filter(|_| kinds.contains(&asked)) {
            Some(table) => table,
            None if Path::new(asked).is_file() => {
                let text = std::fs::read_to_string(asked).map_err(Error::open(asked))?;
                text.parse().map_err(|e: toml::de::Error| Error::file(asked, e.to_string().trim_end()))?
            }
            None => return Err(Error::input(format!("unknown protocol `{asked}`; known: {}, or a TOML file", kinds.join(", ")))),
        };
        let kind = own.get("kind").and_then(Value::as_str).unwrap_or(kinds[0]).to_string();
        if !kinds.contains(&kind.as_str()) {
            return Err(Error::file(asked, format!("kind = \"{kind}\"; accepted here: {}", kinds.join(", "))));
        }
        let mut table = shipped(&kind).expect("every kind ships a protocol");
        let known: Vec<String> = table.keys().filter(|k| *k != "kind").cloned().collect();
        let unknown = |key: &str, place: String| Error::input(format!("{place}: unknown key `{key}`; known: {}", known.join(", ")));
        for (key, value) in own {
            if key != "kind" && !known.contains(&key) {
                return Err(unknown(&key, format!("protocol {asked}")));
            }
            table.insert(key, value);
        }
        for set in sets {
            let (key, text) = set
                .split_once('=')
                .ok_or_else(|| Error::input(format!("--set {set}: no `=`; accepted: key=value, for example epochs=10")))?;
            let key = key.trim();
            if !known.iter().any(|k| k == key) {
                return Err(unknown(key, format!("--set {set}")));
            }
            let parsed: Result<Table, _> = format!("value = {text}").parse();
            let value = parsed.ok().and_then(|mut t| t.remove("value")).unwrap_or_else(|| Value::String(text.trim().to_string()));
            table.insert(key.to_string(), value);
        }
        table.remove("kind");
        Ok(Protocol { name: asked.to_string(), kind, table })
    }

    /// The keys as the command's own struct.
    pub fn options<T: DeserializeOwned>(&self) -> Result<T> {
        self.table.clone().try_into().map_err(|e: toml::de::Error| Error::input(format!("protocol {}: {}", self.name, e.message())))
    }

    /// Changes a key, for flags that have one of their own.
    pub fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.table.insert(key.to_string(), value.into());
    }

    pub fn json(&self) -> serde_json::Value {
        let mut json = serde_json::to_value(&self.table).expect("plain values serialise");
        json["kind"] = self.kind.clone().into();
        json
    }

    /// Changes when any key changes.
    pub fn hash(&self) -> String {
        files::sha256(self.json().to_string().as_bytes())[..16].to_string()
    }
}

/// Refuses values that parse but make no sense: `require(epochs > 0, "epochs", epochs, "1 or more")`.
pub fn require(ok: bool, key: &str, value: impl Serialize, accepted: &str) -> Result<()> {
    if ok {
        return Ok(());
    }
    let value = serde_json::to_string(&value).unwrap_or_default();
    Err(Error::input(format!("protocol: {key} = {value}; accepted: {accepted}")))
}
