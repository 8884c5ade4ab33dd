//! Picks each field's value from the layers, and records the fields that were read and the mistakes.

use std::{borrow::Cow, collections::BTreeSet, path::PathBuf};

use super::{
    Config, Environment, Flags, Mistake, Origin, Report,
    environment::NotText,
    file::{self, Fields},
    report::Entry,
    value::Value,
};

/// The variables that are not fields.
const OTHER_VARIABLES: [&str; 1] = ["SEMEL_CONFIG"];

/// The fields whose variable must not be empty. An empty database URL would fall back to a local file, and each machine
/// would have its own ledger.
const NEVER_EMPTY: [&str; 1] = ["database_url"];

/// The similarity from which a name is suggested. Found by trying: `lisen`, `databse_url` and `broker` are above it,
/// `port` and `address` below.
const ALIKE: f64 = 0.8;

pub(crate) struct Reader<'a> {
    flags: &'a Flags,
    environment: &'a Environment,
    file: Fields,
    entries: Vec<Entry>,
    mistakes: Vec<Mistake>,
    /// The fields whose value could not be read.
    unread: BTreeSet<String>,
    /// Former names of fields.
    former: BTreeSet<&'static str>,
    warnings: Vec<String>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(flags: &'a Flags, environment: &'a Environment) -> Self {
        let mut mistakes = Vec::new();
        let file = match open(flags, environment) {
            Ok(Some((path, text))) => file::read(&path, &text, environment, &mut mistakes),
            Ok(None) => Fields::new(),
            Err(mistake) => {
                mistakes.push(mistake);
                Fields::new()
            }
        };
        Self {
            flags,
            environment,
            file,
            entries: Vec::new(),
            mistakes,
            unread: BTreeSet::new(),
            former: BTreeSet::new(),
            warnings: Vec::new(),
        }
    }

    /// Reads one field by its full name. After a mistake the default is used, so that the other fields are checked too.
    pub(crate) fn field<T: Value>(&mut self, name: impl Into<Cow<'static, str>>, default: impl FnOnce() -> T) -> T {
        let name = name.into();
        let (given, mut messages, origin) = self.given(&name);
        let read = given.and_then(|value| T::from_toml(&value).map_err(|message| messages.push(message)).ok());
        if read.is_none() && !messages.is_empty() {
            self.unread.insert(name.to_string());
        }
        let wrong = |message| Mistake::of(&name, origin.clone(), message);
        self.mistakes.extend(messages.into_iter().map(wrong));
        let value = read.unwrap_or_else(default);
        self.entries.push(Entry { name, shown: value.to_toml(), origin });
        value
    }

    /// Reads a field that was renamed. A former name is still read, with a warning that names the new one; of several,
    /// the largest value is used.
    pub(crate) fn renamed<T: Value + Ord>(
        &mut self,
        name: &'static str,
        former: &[&'static str],
        default: impl FnOnce() -> T,
    ) -> T {
        let mut largest = None;
        for old in former {
            self.former.insert(old);
            let (given, messages, origin) = self.given(old);
            if origin == Origin::Default {
                continue;
            }
            self.warnings.push(format!("{old} ({origin}) is now called {name}: rename it"));
            match given.map(|value| T::from_toml(&value)).transpose() {
                Ok(value) => largest = larger(largest, value.map(|value| (value, origin.clone()))),
                Err(message) => self.mistakes.push(Mistake::of(old, origin.clone(), message)),
            }
            self.mistakes.extend(messages.into_iter().map(|message| Mistake::of(old, origin.clone(), message)));
        }
        match largest {
            Some((value, origin)) if self.given(name).2 == Origin::Default => {
                self.entries.push(Entry { name: name.into(), shown: value.to_toml(), origin });
                value
            }
            _ => self.field(name, default),
        }
    }

    /// Reports a mistake in a field that was read. A field that could not be read has a mistake already, and only its
    /// default was checked.
    pub(crate) fn mistake(&mut self, name: &str, message: String) {
        if self.unread.contains(name) {
            return;
        }
        let read = self.entries.iter().find(|entry| entry.name == name);
        let origin = read.map_or(Origin::Default, |entry| entry.origin.clone());
        self.mistakes.push(Mistake::of(name, origin, message));
    }

    /// The number of mistakes so far.
    pub(crate) fn mistakes(&self) -> usize {
        self.mistakes.len()
    }

    /// The names of user-defined sections within a section: those in the file, and those for which the environment sets
    /// `field`. A name that needs quotes in TOML is quoted.
    pub(crate) fn sections(&self, within: &str, field: &str) -> BTreeSet<String> {
        let prefix = format!("{within}.");
        let name = |field: &str| {
            let rest = field.strip_prefix(&prefix)?;
            let end = match rest.strip_prefix('"') {
                Some(quoted) => quoted.find('"')? + 2,
                None => rest.find('.').unwrap_or(rest.len()),
            };
            Some(rest[..end].to_owned())
        };
        let mut names: BTreeSet<String> = self.file.keys().filter_map(|field| name(field)).collect();
        let (before, after) = (variable(&prefix), variable(&format!(".{field}")).replace("SEMEL_", ""));
        let is_set = |name: &&str| matches!(self.environment.get(name), Ok(Some(text)) if !text.is_empty());
        let set = self.environment.ours().filter(is_set);
        let told = set.filter_map(|name| name.strip_prefix(&before)?.strip_suffix(&after));
        for told in told {
            if !names.iter().any(|name| variable(name) == format!("SEMEL_{told}")) {
                names.insert(told.to_lowercase());
            }
        }
        names
    }

    /// Ends the reading: fields that were given but never read are unknown.
    pub(super) fn finish(mut self, config: Config) -> Report {
        let known: Vec<&str> = self.entries.iter().map(|entry| &*entry.name).collect();
        for (name, given) in &self.file {
            if !known.contains(&name.as_str()) && !self.former.contains(name.as_str()) {
                self.mistakes.push(Mistake::of(name, given.origin.clone(), unknown(name, &known)));
            }
        }
        let variables: Vec<String> = known.iter().chain(&self.former).map(|name| variable(name)).collect();
        let variables: Vec<&str> = variables.iter().map(String::as_str).chain(OTHER_VARIABLES).collect();
        let strange = self.environment.ours().filter(|name| !variables.contains(name)).map(|name| {
            match nearest(name, &variables) {
                Some(near) => format!("the environment variable {name} is not used by Semel; did you mean {near}?"),
                None => format!("the environment variable {name} is not used by Semel"),
            }
        });
        self.warnings.extend(strange);
        Report { config, entries: self.entries, mistakes: self.mistakes, warnings: self.warnings }
    }

    /// The value from the highest layer that has one, its mistakes, and that layer.
    fn given(&mut self, name: &str) -> (Option<toml::Value>, Vec<String>, Origin) {
        if let Some(text) = self.flags.get(name) {
            // The section is implied by the command that has such a flag.
            let flag = name.trim_start_matches("gateway.").trim_start_matches("http.").replace(['_', '.'], "-");
            return (Some(text.into()), Vec::new(), Origin::Flag(format!("--{flag}")));
        }
        let variable = variable(name);
        match self.environment.get(&variable) {
            Ok(None) => {}
            Ok(Some("")) if NEVER_EMPTY.contains(&name) => {
                let empty = "is set and empty: give it a value, or unset it".to_owned();
                return (None, vec![empty], Origin::Variable(variable));
            }
            // Empty counts as unset: compose files and scripts cannot leave a variable out.
            Ok(Some("")) => {}
            Ok(Some(text)) => return (Some(text.into()), Vec::new(), Origin::Variable(variable)),
            Err(NotText) => return (None, vec!["is not valid UTF-8".to_owned()], Origin::Variable(variable)),
        }
        match self.file.get(name) {
            Some(given) => (given.value.clone(), given.mistakes.clone(), given.origin.clone()),
            None => (None, Vec::new(), Origin::Default),
        }
    }
}

/// The larger of two values, each with where it came from.
fn larger<T: Ord>(a: Option<(T, Origin)>, b: Option<(T, Origin)>) -> Option<(T, Origin)> {
    a.into_iter().chain(b).max_by(|(a, _), (b, _)| a.cmp(b))
}

/// The file's path and text, if one was named.
fn open(flags: &Flags, environment: &Environment) -> Result<Option<(PathBuf, String)>, Mistake> {
    let named = match &flags.store.config {
        Some(path) => (Some(path.clone()), Origin::Flag("--config".to_owned())),
        None => {
            let path = environment.get("SEMEL_CONFIG").map(|path| path.filter(|path| !path.is_empty()));
            let origin = Origin::Variable("SEMEL_CONFIG".to_owned());
            match path {
                Ok(path) => (path.map(PathBuf::from), origin),
                Err(NotText) => return Err(Mistake::of("config", origin, "is not valid UTF-8".to_owned())),
            }
        }
    };
    let (Some(path), origin) = named else { return Ok(None) };
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(Some((path, text))),
        Err(error) => Err(Mistake::of("config", origin, format!("cannot read {}: {error}", path.display()))),
    }
}

/// The environment variable of a field.
fn variable(field: &str) -> String {
    format!("SEMEL_{}", field.replace(['.', '-'], "_").to_uppercase())
}

fn unknown(name: &str, known: &[&str]) -> String {
    let within = format!("{name}.");
    if known.iter().any(|field| field.starts_with(&within)) {
        return format!("is a section: write [{name}] and its fields below");
    }
    // A field in an existing section was meant for that section; suggesting another section's field would not help.
    let (section, field) = name.rsplit_once('.').unwrap_or(("", name));
    let within = |known: &str| known.rsplit_once('.').unwrap_or(("", known)).0 == section;
    let beside: Vec<&str> = known.iter().filter(|known| within(known)).map(|known| last(known)).collect();
    let sections: BTreeSet<&str> = known.iter().filter_map(|known| Some(known.rsplit_once('.')?.0)).collect();
    let sections: Vec<&str> = sections.into_iter().collect();
    let near = match (section, beside.is_empty()) {
        // It may be a field outside any section, or an empty section.
        ("", _) => match nearest(name, &[&beside[..], &sections[..]].concat()) {
            Some(near) if sections.contains(&near) => Some(format!("[{near}]")),
            near => near.or_else(|| nearest(name, known)).map(str::to_owned),
        },
        (_, true) => match nearest(section, &sections) {
            Some(near) if known.contains(&&*format!("{near}.{field}")) => Some(format!("{near}.{field}")),
            Some(near) => Some(format!("[{near}]")),
            None => nearest(name, known).map(str::to_owned),
        },
        _ => nearest(field, &beside).map(|near| format!("{section}.{near}")),
    };
    match near {
        Some(near) => format!("there is no such field; did you mean {near}?"),
        None => "there is no such field".to_owned(),
    }
}

/// The last part of a field's full name.
fn last(name: &str) -> &str {
    name.rsplit_once('.').map_or(name, |(_, last)| last)
}

/// The name most like a wrong one, if any is much like it.
fn nearest<'a>(wrong: &str, names: &[&'a str]) -> Option<&'a str> {
    // All variables share the prefix, which must not count as similarity.
    let heart = |name: &str| name.trim_start_matches("SEMEL_").to_lowercase();
    let likeness = |name: &str| strsim::jaro_winkler(&heart(wrong), &heart(name));
    names
        .iter()
        .map(|name| (*name, likeness(name)))
        .filter(|(_, likeness)| *likeness >= ALIKE)
        .max_by(|(_, a), (_, b)| a.total_cmp(b))
        .map(|(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_section_is_answered_with_the_correct_name() {
        let known = ["listen", "gateway.upstream", "gateway.lease", "sweep.every", "webhooks.s.kind"];
        for (wrong, near) in [
            ("gatewayy", "[gateway]"),
            ("gatewayy.quux", "[gateway]"),
            ("gatewayy.lease", "gateway.lease"),
            ("sweeep.every", "sweep.every"),
            ("lisen", "listen"),
        ] {
            assert_eq!(unknown(wrong, &known), format!("there is no such field; did you mean {near}?"));
        }
        assert_eq!(unknown("empty", &known), "there is no such field");
    }

    #[test]
    fn a_typo_is_recognised_and_another_word_is_not() {
        let names = ["listen", "data_dir", "database_url", "broker_url", "roles", "sweep.every"];
        for (wrong, near) in [
            ("lisen", Some("listen")),
            ("databse_url", Some("database_url")),
            ("databaseUrl", Some("database_url")),
            ("broker", Some("broker_url")),
            ("data-dir", Some("data_dir")),
            ("sweep.evry", Some("sweep.every")),
            ("port", None),
            ("address", None),
        ] {
            assert_eq!(nearest(wrong, &names), near, "{wrong}");
        }
        assert_eq!(nearest("SEMEL_ROLE", &["SEMEL_LISTEN", "SEMEL_ROLES"]), Some("SEMEL_ROLES"));
        assert_eq!(nearest("SEMEL_QUUX", &["SEMEL_LISTEN", "SEMEL_ROLES"]), None);
    }
}
