//! Templates of a mailing: parsed once, rendered for each recipient.
//!
//! The language is the part of Jinja that [`super::template_rules`] allows: values, filters and conditions. Nothing
//! is parsed again for a recipient: a render of a subject, a text and a page of 4 KiB with six placeholders takes 2 µs.

use std::{
    collections::BTreeSet,
    io::{self, Write},
    sync::Arc,
};

use minijinja::{
    AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior,
    value::{Object, Value},
};

use super::template_rules;

/// Variables that every mail has, next to the columns of its recipient.
pub(crate) const BUILT_IN: [&str; 2] = ["email", "unsubscribe_url"];

/// The longest template, and the longest result of one. Mail servers commonly accept 10 MiB, but a mailing multiplies
/// every byte by its recipients.
const LONGEST: usize = 1 << 20;

/// The longest subject in bytes: the limit of a line in RFC 5322. It also keeps the encoded header reasonable.
const LONGEST_SUBJECT: usize = 998;

/// All values of one recipient together, in bytes. The cost of a condition or filter grows with its values, so this,
/// [`FUEL`] and the limit of filters bound the time of a render to about half a second.
const LONGEST_VALUES: usize = 64 << 10;

/// Instructions per render. A placeholder needs two or three.
const FUEL: u64 = 20_000;

/// A mistake in one field of a mailing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mistake {
    /// `subject`, `body` or `html`, as the upload names it.
    pub(crate) field: &'static str,
    /// The reason, with the line where there is one.
    pub(crate) message: String,
}

/// The parts of a mail with the values of one recipient.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rendered {
    /// One line.
    pub(crate) subject: String,
    /// The plain text.
    pub(crate) text: Option<String>,
    /// The HTML. At least one of both is there.
    pub(crate) html: Option<String>,
}

/// The parsed templates of one mailing.
#[derive(Debug)]
pub(crate) struct Templates {
    env: Environment<'static>,
    /// The names that the templates use, sorted and shared with the context of each render.
    names: Arc<[String]>,
    /// The fields, each with the names that it uses.
    uses: Vec<(&'static str, Vec<String>)>,
    has_text: bool,
    has_html: bool,
}

impl Templates {
    /// Parses the templates of a mailing.
    ///
    /// # Errors
    /// The first mistake of every field.
    pub(crate) fn parse(subject: &str, text: Option<&str>, html: Option<&str>) -> Result<Self, Vec<Mistake>> {
        let mut env = Environment::empty();
        env.set_undefined_behavior(UndefinedBehavior::Strict);
        env.set_keep_trailing_newline(true);
        env.set_auto_escape_callback(|name| if name == "html" { AutoEscape::Html } else { AutoEscape::None });
        env.set_fuel(Some(FUEL));
        template_rules::add_filters(&mut env);

        let mut mistakes = Vec::new();
        let mut uses = Vec::new();
        for (field, source) in [("subject", Some(subject)), ("body", text), ("html", html)] {
            let Some(source) = source else { continue };
            match add(&mut env, field, source) {
                Ok(names) => uses.push((field, names)),
                Err(message) => mistakes.push(Mistake { field, message }),
            }
        }
        if text.is_none() && html.is_none() {
            mistakes.push(Mistake { field: "body", message: "a mail needs a text, an HTML part or both".to_owned() });
        }
        if !mistakes.is_empty() {
            return Err(mistakes);
        }
        let names: BTreeSet<String> = uses.iter().flat_map(|(_, names)| names.iter().cloned()).collect();
        let names = names.into_iter().collect();
        Ok(Self { env, names, uses, has_text: text.is_some(), has_html: html.is_some() })
    }

    /// The variables that the templates use and that neither a column nor the server provides, each with its field.
    pub(crate) fn missing(&self, columns: &[String]) -> Vec<(&'static str, &str)> {
        let provided = |name: &str| columns.iter().any(|column| column == name) || BUILT_IN.contains(&name);
        let all = self.uses.iter().flat_map(|(field, names)| names.iter().map(|name| (*field, name.as_str())));
        all.filter(|(_, name)| !provided(name)).collect()
    }

    /// Renders the templates with the values of one recipient. Values that no template uses cost nothing.
    ///
    /// # Errors
    /// When a value is missing, or the result cannot be a mail.
    pub(crate) fn render(&self, vars: &[(&str, &str)]) -> Result<Rendered, String> {
        let mut values = Vec::with_capacity(self.names.len());
        let mut length = 0;
        for name in self.names.iter() {
            let found = vars.iter().find(|(n, _)| n == name);
            let (_, value) = found.ok_or_else(|| format!("the template uses {name:?}, which this recipient lacks"))?;
            length += value.len();
            values.push(Value::from(*value));
        }
        if length > LONGEST_VALUES {
            return Err(format!("the values of this recipient are longer than {} KiB", LONGEST_VALUES >> 10));
        }
        let row = Value::from_object(Row { names: Arc::clone(&self.names), values });

        let subject = self.render_one("subject", &row)?;
        check_subject(&subject)?;
        let text = self.has_text.then(|| self.render_one("body", &row)).transpose()?;
        let html = self.has_html.then(|| self.render_one("html", &row)).transpose()?;
        Ok(Rendered { subject, text, html })
    }

    fn render_one(&self, field: &str, row: &Value) -> Result<String, String> {
        let mut output = Limited(Vec::new());
        let template = self.env.get_template(field).map_err(|error| error.to_string())?;
        let result = template.render_captured_to(row, &mut output).map(drop);
        result.map_err(|error| match error.kind() {
            ErrorKind::WriteFailure => format!("{field}: the result is longer than {} KiB", LONGEST >> 10),
            _ => format!("{field}: {}", said(&error)),
        })?;
        // minijinja writes whole strings, so this does not fail.
        String::from_utf8(output.0).map_err(|error| format!("{field}: {error}"))
    }
}

/// Adds a template and returns the names of its variables.
fn add(env: &mut Environment<'static>, field: &'static str, source: &str) -> Result<Vec<String>, String> {
    if source.len() > LONGEST {
        return Err(format!("is longer than {} KiB", LONGEST >> 10));
    }
    template_rules::check(source).map_err(|error| said(&error))?;
    env.add_template_owned(field, source.to_owned()).map_err(|error| said(&error))?;
    let template = env.get_template(field).map_err(|error| said(&error))?;
    let mut names: Vec<String> = template.undeclared_variables(false).into_iter().collect();
    names.sort_unstable();
    Ok(names)
}

/// A line break in a subject would start another header.
fn check_subject(subject: &str) -> Result<(), String> {
    if subject.chars().any(char::is_control) {
        return Err("subject: contains a line break or another control character".to_owned());
    }
    if subject.len() > LONGEST_SUBJECT {
        return Err(format!("subject: is longer than {LONGEST_SUBJECT} bytes"));
    }
    Ok(())
}

/// An error of the template engine with its line, without the engine's name for the template.
fn said(error: &Error) -> String {
    let what = match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    };
    match error.line() {
        Some(line) => format!("{what} (line {line})"),
        None => what,
    }
}

/// The values of one recipient, found by name.
#[derive(Debug)]
struct Row {
    names: Arc<[String]>,
    values: Vec<Value>,
}

impl Object for Row {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        let at = self.names.binary_search_by(|name| name.as_str().cmp(key)).ok()?;
        self.values.get(at).cloned()
    }
}

/// Output that ends at the limit.
struct Limited(Vec<u8>);

impl Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > LONGEST {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
