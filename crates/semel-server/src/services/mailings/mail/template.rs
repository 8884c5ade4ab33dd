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

use super::template_rules::{self, Measure};

/// Variables that every mail has, next to the columns of its recipient.
pub(crate) const BUILT_IN: [&str; 2] = ["email", "unsubscribe_url"];

/// The variables of a row. A column named like a built-in one does not hide it: the link to unsubscribe must be ours.
pub(crate) fn variables<'a>(
    columns: &'a [String],
    values: &'a [String],
    email: &'a str,
    unsubscribe: Option<&'a str>,
) -> Vec<(&'a str, &'a str)> {
    let [own_email, own_link] = BUILT_IN;
    let cells = columns.iter().zip(values).map(|(column, value)| (column.as_str(), value.as_str()));
    let cells = cells.filter(|(column, _)| !BUILT_IN.contains(column));
    cells.chain([(own_email, email), (own_link, unsubscribe.unwrap_or_default())]).collect()
}

/// The longest template, and the longest result of one. Mail servers commonly accept 10 MiB, but a mailing multiplies
/// every byte by its recipients.
const LONGEST: usize = 1 << 20;

/// The longest subject in bytes: the limit of a line in RFC 5322. It also keeps the encoded header reasonable.
const LONGEST_SUBJECT: usize = 998;

/// All values of one recipient together, in bytes. The cost of a condition or filter grows with its values, so this,
/// [`FUEL`] and the limit of filters bound the time of a render to about half a second.
const LONGEST_VALUES: usize = 64 << 10;

/// Instructions per render. A placeholder needs two or three.
const FUEL: u32 = 20_000;

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
    parts: Vec<Part>,
}

/// A template of a mailing.
#[derive(Debug)]
struct Part {
    field: &'static str,
    /// The names that it uses.
    names: Vec<String>,
    bytes: usize,
    measure: Measure,
}

impl Part {
    /// Whether the result may be refused for values of so many bytes. A result has each value at most once per tag: a
    /// filter may treble it, and the escaping of HTML makes six bytes of one.
    fn may_fail(&self, values: usize) -> bool {
        let longest = 6 * self.bytes + 18 * self.measure.tags * values;
        let is_short = longest <= LONGEST && 3 * values <= LONGEST_VALUES;
        !(self.measure.is_safe && is_short && 2 * self.measure.tokens <= FUEL as usize)
    }
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
        env.set_fuel(Some(FUEL.into()));
        template_rules::add_filters(&mut env);

        let mut mistakes = Vec::new();
        let mut parts = Vec::new();
        for (field, source) in [("subject", Some(subject)), ("body", text), ("html", html)] {
            let Some(source) = source else { continue };
            match add(&mut env, field, source) {
                Ok(part) => parts.push(part),
                Err(message) => mistakes.push(Mistake { field, message }),
            }
        }
        if text.is_none() && html.is_none() {
            mistakes.push(Mistake { field: "body", message: "a mail needs a text, an HTML part or both".to_owned() });
        }
        if !mistakes.is_empty() {
            return Err(mistakes);
        }
        let names: BTreeSet<String> = parts.iter().flat_map(|part| part.names.iter().cloned()).collect();
        let names = names.into_iter().collect();
        Ok(Self { env, names, parts })
    }

    /// The variables that the templates use and that neither a column nor the server provides, each with its field.
    pub(crate) fn missing(&self, columns: &[String]) -> Vec<(&'static str, &str)> {
        let provided = |name: &str| columns.iter().any(|column| column == name) || BUILT_IN.contains(&name);
        let all = self.parts.iter().flat_map(|part| part.names.iter().map(|name| (part.field, name.as_str())));
        all.filter(|(_, name)| !provided(name)).collect()
    }

    /// Renders the templates with the values of one recipient. Values that no template uses cost nothing.
    ///
    /// # Errors
    /// When a value is missing, or the result cannot be a mail.
    pub(crate) fn render(&self, vars: &[(&str, &str)]) -> Result<Rendered, String> {
        let (row, _) = self.row(vars)?;
        let subject = self.render_one("subject", &row)?;
        check_subject(&subject)?;
        let mut rendered = Rendered { subject, text: None, html: None };
        for part in &self.parts {
            match part.field {
                "body" => rendered.text = Some(self.render_one("body", &row)?),
                "html" => rendered.html = Some(self.render_one("html", &row)?),
                _ => {}
            }
        }
        Ok(rendered)
    }

    /// Whether a mail can be made of these values. Text and HTML are rendered only if they may fail: an import tries
    /// every row.
    ///
    /// # Errors
    /// That of [`Templates::render`].
    pub(crate) fn try_out(&self, vars: &[(&str, &str)]) -> Result<(), String> {
        let (row, length) = self.row(vars)?;
        check_subject(&self.render_one("subject", &row)?)?;
        let mut parts = self.parts.iter().filter(|part| part.field != "subject" && part.may_fail(length));
        parts.try_for_each(|part| self.render_one(part.field, &row).map(drop))
    }

    /// The values that the templates use, and their bytes.
    fn row(&self, vars: &[(&str, &str)]) -> Result<(Value, usize), String> {
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
        Ok((Value::from_object(Row { names: Arc::clone(&self.names), values }), length))
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

/// Adds a template.
fn add(env: &mut Environment<'static>, field: &'static str, source: &str) -> Result<Part, String> {
    if source.len() > LONGEST {
        return Err(format!("is longer than {} KiB", LONGEST >> 10));
    }
    let measure = template_rules::check(source).map_err(|error| said(&error))?;
    env.add_template_owned(field, source.to_owned()).map_err(|error| said(&error))?;
    let template = env.get_template(field).map_err(|error| said(&error))?;
    let mut names: Vec<String> = template.undeclared_variables(false).into_iter().collect();
    names.sort_unstable();
    Ok(Part { field, names, bytes: source.len(), measure })
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
