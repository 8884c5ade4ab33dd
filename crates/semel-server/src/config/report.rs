//! The result of reading the configuration.

use std::{borrow::Cow, fmt, path::PathBuf};

use serde_json::json;

use super::Config;
use crate::service::Sections;

/// The result of reading the configuration: usable only without mistakes.
#[derive(Clone, Debug)]
pub struct Report {
    pub(super) config: Config,
    pub(super) entries: Vec<Entry>,
    pub(super) mistakes: Vec<Mistake>,
    pub(super) warnings: Vec<String>,
}

impl Report {
    /// The configuration, if it has no mistakes.
    ///
    /// # Errors
    /// With all mistakes, if there are any.
    pub fn config(&self) -> Result<&Config, Mistakes> {
        if self.mistakes.is_empty() { Ok(&self.config) } else { Err(Mistakes(self.mistakes.clone())) }
    }

    /// Reports a mistake that the program found.
    pub(crate) fn mistake(&mut self, field: &str, message: String) {
        let read = self.entries.iter().find(|entry| entry.name == field);
        let origin = read.map_or(Origin::Default, |entry| entry.origin.clone());
        self.mistakes.push(Mistake::of(field, origin, message));
    }

    /// The sections of the services, even if they have mistakes.
    pub(crate) fn services(&self) -> &Sections {
        &self.config.services
    }

    /// Whether a field has its default.
    #[must_use]
    pub fn is_default(&self, field: &str) -> bool {
        self.entries.iter().any(|entry| entry.name == field && entry.origin == Origin::Default)
    }

    /// Mistakes and warnings for programs: `{ok, mistakes, warnings}`.
    #[must_use]
    pub fn verdict(&self) -> serde_json::Value {
        let mistake =
            |it: &Mistake| json!({ "field": it.field, "origin": it.origin.to_string(), "message": it.message });
        let mistakes: Vec<_> = self.mistakes.iter().map(mistake).collect();
        json!({ "ok": mistakes.is_empty(), "mistakes": mistakes, "warnings": self.warnings })
    }

    /// Warnings, one sentence each.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }
}

/// One field with its value in effect, secrets hidden.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) name: Cow<'static, str>,
    pub(super) shown: toml::Value,
    pub(super) origin: Origin,
}

/// The source of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A flag of the command line.
    Flag(String),
    /// An environment variable.
    Variable(String),
    /// A line of the TOML file.
    File {
        /// The file as it was named.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
    },
    /// The default.
    Default,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag(flag) => f.write_str(flag),
            Self::Variable(variable) => f.write_str(variable),
            Self::File { path, line } => write!(f, "{}, line {line}", path.display()),
            Self::Default => f.write_str("default"),
        }
    }
}

/// One mistake and its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// The field's full name, if it is about a field.
    pub field: Option<String>,
    /// The source of the wrong value.
    pub origin: Origin,
    /// The mistake and its remedy. Never repeats a value that may contain a password.
    pub message: String,
}

impl Mistake {
    pub(super) fn of(field: &str, origin: Origin, message: String) -> Self {
        Self { field: Some(field.to_owned()), origin, message }
    }
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.field {
            Some(field) => write!(f, "{field} ({}): {}", self.origin, self.message),
            None => write!(f, "{}: {}", self.origin, self.message),
        }
    }
}

/// All mistakes of a configuration; never empty.
#[derive(Clone, Debug, thiserror::Error)]
pub struct Mistakes(Vec<Mistake>);

impl Mistakes {
    /// The mistakes, in the order they were found.
    pub fn iter(&self) -> impl Iterator<Item = &Mistake> {
        self.0.iter()
    }
}

impl fmt::Display for Mistakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.len() {
            1 => f.write_str("the configuration has a mistake:")?,
            count => write!(f, "the configuration has {count} mistakes:")?,
        }
        self.0.iter().try_for_each(|mistake| write!(f, "\n  {mistake}"))
    }
}
