//! What reading the configuration found.

use std::{borrow::Cow, fmt, path::PathBuf};

use serde_json::json;

use super::{Config, Deed};

/// The result of reading the configuration: usable only if there are no mistakes in it.
#[derive(Clone, Debug)]
pub struct Report {
    pub(super) config: Config,
    pub(super) entries: Vec<Entry>,
    pub(super) mistakes: Vec<Mistake>,
    pub(super) warnings: Vec<String>,
}

impl Report {
    /// The configuration, if nothing is wrong with it.
    ///
    /// # Errors
    /// With every mistake, if there is one.
    pub fn config(&self) -> Result<&Config, Mistakes> {
        if self.mistakes.is_empty() { Ok(&self.config) } else { Err(Mistakes(self.mistakes.clone())) }
    }

    /// Notes each rule of a webhook that names a handler as a mistake: for a program that has no handlers.
    #[must_use]
    pub fn without_handlers(mut self) -> Self {
        for (source, config) in &self.config.webhooks.sources {
            let field = format!("webhooks.{source}.handlers");
            let read = self.entries.iter().find(|entry| entry.name == field);
            let origin = read.map_or(Origin::Default, |entry| entry.origin.clone());
            let handlers = config.handlers.0.iter().filter_map(|rule| match &rule.deed {
                Deed::Handler(handler) => Some(handler),
                _ => None,
            });
            self.mistakes.extend(handlers.map(|handler| {
                let message = format!(
                    "there is no handler called {handler:?}: handlers are for a Rust program that Semel is built into; \
                     here a rule can store an event, send it to the outbox or forward it to a URL"
                );
                Mistake::of(&field, origin.clone(), message)
            }));
        }
        self
    }

    /// Whether nobody said anything about a field.
    #[must_use]
    pub fn is_default(&self, field: &str) -> bool {
        self.entries.iter().any(|entry| entry.name == field && entry.origin == Origin::Default)
    }

    /// What is wrong and what is odd, for programs: `{ok, mistakes, warnings}`.
    #[must_use]
    pub fn verdict(&self) -> serde_json::Value {
        let mistake =
            |it: &Mistake| json!({ "field": it.field, "origin": it.origin.to_string(), "message": it.message });
        let mistakes: Vec<_> = self.mistakes.iter().map(mistake).collect();
        json!({ "ok": mistakes.is_empty(), "mistakes": mistakes, "warnings": self.warnings })
    }

    /// What is odd but does no harm, one sentence each.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }
}

/// One field as it is in effect; secrets already hidden.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) name: Cow<'static, str>,
    pub(super) shown: toml::Value,
    pub(super) origin: Origin,
}

/// Where a value came from.
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
    /// Nobody said anything.
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

/// One thing that is wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// The field's full name, if it is about a field.
    pub field: Option<String>,
    /// Where the wrong value stands.
    pub origin: Origin,
    /// What is wrong and what would be right; never repeats a value that may hold a password.
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

/// Everything that is wrong with a configuration; never empty.
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
