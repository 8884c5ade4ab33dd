//! The effective configuration, for people and for programs; secrets are hidden in both.

use serde_json::json;
use toml::Value;

use super::{Report, expand::escape};

impl Report {
    /// As a TOML file that gives the same configuration (except for hidden secrets), with the source of each value.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let mut text = String::new();
        let mut section = "";
        // Fields outside any section come first: a TOML section ends only where the next one begins.
        let mut entries: Vec<_> = self.entries.iter().map(|entry| (split(&entry.name), entry)).collect();
        entries.sort_by_key(|((within, _), _)| !within.is_empty());
        for ((within, name), entry) in entries {
            if within != section {
                text.push_str(&format!("\n[{within}]\n"));
                section = within;
            }
            text.push_str(&format!("{name} = {}  # {}\n", escaped(&entry.shown), entry.origin));
        }
        text
    }

    /// As JSON: the configuration, and the source of each value by the field's full name.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        let mut config = json!({});
        let mut origins = json!({});
        for entry in &self.entries {
            let at = entry.name.split('.').fold(&mut config, |within, name| &mut within[name]);
            *at = json!(entry.shown);
            origins[&*entry.name] = entry.origin.to_string().into();
        }
        json!({ "config": config, "origins": origins })
    }
}

/// A full name as section and field.
fn split(name: &str) -> (&str, &str) {
    name.rsplit_once('.').unwrap_or(("", name))
}

fn escaped(value: &Value) -> Value {
    match value {
        Value::String(text) => Value::String(escape(text)),
        Value::Array(items) => Value::Array(items.iter().map(escaped).collect()),
        Value::Table(table) => Value::Table(table.iter().map(|(name, value)| (name.clone(), escaped(value))).collect()),
        other => other.clone(),
    }
}
