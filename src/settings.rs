//! One setting given beside a file, as text: `train.epochs=3`. Recipes and protocols are changed in the same way.

use toml::{Table, Value};

use crate::error::{Error, Result};

/// A value and where it goes.
#[derive(Debug, Clone, PartialEq)]
pub struct Setting {
    /// The sections it lies in and, last, its key: never empty.
    pub path: Vec<String>,
    /// What it is set to.
    pub value: Value,
}

impl Setting {
    /// Reads `a.b=value`: the value is TOML, or a string where it is not. `accepted` tells what would have been right.
    pub fn parse(text: &str, accepted: &str) -> Result<Setting> {
        let refuse = |what: String| Error::input(format!("{what}; accepted: {accepted}"));
        let (path, value) = text.split_once('=').ok_or_else(|| refuse("no `=`".into()))?;
        let path: Vec<String> = path.trim().split('.').map(String::from).collect();
        if path.iter().any(|key| key.is_empty()) {
            return Err(refuse(format!("`{}` names no key", path.join("."))));
        }
        let parsed: Result<Table, _> = format!("value = {value}").parse();
        let value = match parsed.ok().and_then(|mut t| t.remove("value")) {
            Some(value) => value,
            // A list was meant, and its texts lack the quotes that the shell took or nobody wrote.
            None if value.trim_start().starts_with('[') => {
                let quoted = format!("'{}={}'", path.join("."), with_quotes(value));
                return Err(Error::input(format!("`{}` is no list: texts in a list stand in quotes, as in {quoted}", value.trim())));
            }
            None => Value::String(value.trim().to_string()),
        };
        Ok(Setting { path, value })
    }

    /// `a.b`.
    pub fn key(&self) -> String {
        self.path.join(".")
    }

    /// Writes the value into `table`, making the sections it lies in. Err: the key that is there and is no section.
    pub fn apply(self, table: &mut Table) -> Result<(), String> {
        let (last, parents) = self.path.split_last().expect("a path is never empty");
        let mut at = table;
        for key in parents {
            let next = at.entry(key.clone()).or_insert_with(|| Value::Table(Table::new()));
            at = next.as_table_mut().ok_or_else(|| key.clone())?;
        }
        at.insert(last.clone(), self.value);
        Ok(())
    }
}

/// `[a, 1]` as `["a",1]`.
fn with_quotes(list: &str) -> String {
    let items = list.trim().trim_start_matches('[').trim_end_matches(']').split(',').map(|item| item.trim().trim_matches(['"', '\'']));
    let quote = |item: &str| if item.parse::<f64>().is_ok() { item.to_string() } else { format!("\"{item}\"") };
    format!("[{}]", items.filter(|item| !item.is_empty()).map(quote).collect::<Vec<_>>().join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_toml_or_text() {
        let parse = |text: &str| Setting::parse(text, "key=value").map(|s| (s.key(), s.value)).map_err(|e| e.to_string());
        assert_eq!(parse("a.b=3"), Ok(("a.b".into(), Value::Integer(3))));
        assert_eq!(parse(" k = [1, 2]"), Ok(("k".into(), Value::Array(vec![1.into(), 2.into()]))));
        assert_eq!(parse("k=some words"), Ok(("k".into(), "some words".into())));
        assert_eq!(parse("k=a=b"), Ok(("k".into(), "a=b".into())));
        let refused = parse("cohort.archs=[resnet8, resnet8]").unwrap_err();
        assert!(refused.contains(r#"stand in quotes, as in 'cohort.archs=["resnet8","resnet8"]'"#), "{refused}");
        assert_eq!(parse("k"), Err("no `=`; accepted: key=value".into()));
        assert_eq!(parse("a..b=1"), Err("`a..b` names no key; accepted: key=value".into()));
    }

    #[test]
    fn sections_are_made_and_values_are_none() {
        let mut table: Table = "x = 1".parse().unwrap();
        Setting::parse("a.b.c=2", "").unwrap().apply(&mut table).unwrap();
        assert_eq!(table["a"]["b"]["c"], Value::Integer(2));
        assert_eq!(Setting::parse("x.y=2", "").unwrap().apply(&mut table), Err("x".into()));
    }
}
