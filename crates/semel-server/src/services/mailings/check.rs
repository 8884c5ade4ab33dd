//! The fields of an upload, and their checks.

use semel::Timestamp;

use super::{
    Service,
    identity::Identity,
    list::{broken::Broken, filename::clean, shape::Shape},
    message::{Given, Message},
    problems::{INVALID_FILE, INVALID_UPLOAD},
};
use crate::http::{fields::Wrong, problem::Problem, query};

/// How much of a file is looked at before it is stored.
pub(super) const FIRST: usize = 64 << 10;

/// The longest text field: templates.
pub(super) const LONGEST_TEXT: usize = 1 << 20;

/// What mailings do if the upload does not say it.
pub(super) const DEFAULT_POLICY: &str = "never-twice";

/// The fields of an upload as they arrive.
#[derive(Default)]
pub(super) struct Texts {
    pub(super) given: Given,
    pub(super) filename: Option<String>,
    pub(super) identity: Option<String>,
    pub(super) policy: Option<String>,
    pub(super) column: Option<String>,
    pub(super) send_at: Option<String>,
    pub(super) dry_run: Option<String>,
}

/// The fields of an upload that were checked.
pub(super) struct Checked {
    pub(super) filename: String,
    pub(super) shape: Shape,
    pub(super) given: Given,
    /// The message with its defaults, and what is wrong with it. That counts only for a new mailing: a repeat is
    /// answered although a default was removed since.
    pub(super) message: Message,
    pub(super) faults: Option<Problem>,
    pub(super) identity: Identity,
    pub(super) policy: Option<&'static str>,
    /// Whether the upload names the column of the addresses.
    pub(super) names_column: bool,
    pub(super) send_at: Option<Timestamp>,
    pub(super) dry_run: bool,
}

impl Service {
    /// Checks the fields with the beginning of the file.
    pub(super) fn check(&self, first: &[u8], texts: Texts, mut wrong: Wrong) -> Result<Checked, Problem> {
        let filename = texts.filename.as_deref().and_then(clean);
        if filename.is_none() {
            wrong.note("file", "has no usable file name");
        }
        let filename = filename.unwrap_or_default();
        let identity = texts.identity.as_deref().map(Identity::parse).transpose();
        let identity = identity.map_err(|message| wrong.note("identity", message)).ok().flatten().unwrap_or_default();
        let policy = match texts.policy.as_deref() {
            None => None,
            Some("never-twice") => Some("never-twice"),
            Some("never-miss") => Some("never-miss"),
            Some(_) => {
                wrong.note("policy", "must be never-twice or never-miss");
                None
            }
        };
        let send_at = texts.send_at.as_deref().map(query::time).transpose();
        let send_at = send_at.map_err(|message| wrong.note("sendAt", message)).ok().flatten();
        let dry_run = match texts.dry_run.as_deref() {
            None | Some("false") => false,
            Some("true") => true,
            Some(_) => {
                wrong.note("dryRun", "must be true or false");
                false
            }
        };
        if !wrong.is_empty() {
            self.check_message(&texts.given, &filename, None, &mut wrong);
            return Err(wrong.problem(&INVALID_UPLOAD));
        }
        let shape = Shape::look(first, first.len() < FIRST, texts.column.as_deref());
        let shape = shape.map_err(|broken| invalid_file(&broken))?;
        let message = self.check_message(&texts.given, &filename, Some(&shape), &mut wrong);
        let faults = wrong.check(&INVALID_UPLOAD).err();
        let names_column = texts.column.is_some();
        let given = texts.given;
        Ok(Checked { filename, shape, given, message, faults, identity, policy, names_column, send_at, dry_run })
    }

    /// The message with its defaults. Its mistakes are noted.
    fn check_message(&self, given: &Given, filename: &str, shape: Option<&Shape>, wrong: &mut Wrong) -> Message {
        let message = given.complete(&self.config, filename, self.transport.kind() == "file", wrong);
        if let Err(why) = message.from.parse::<lettre::message::Mailbox>()
            && !message.from.is_empty()
        {
            wrong.note("from", format!("is not a sender such as News <news@example.com>: {why}"));
        }
        // Rendered, it would be refused for every entry: better now than after the import.
        if message.subject.chars().any(char::is_control) {
            wrong.note("subject", "must not have a line break or another control character");
        }
        match message.templates() {
            Ok(templates) => {
                for (field, name) in shape.map(|shape| templates.missing(&shape.columns)).unwrap_or_default() {
                    let columns = shape.map(|shape| shape.columns.join(", ")).unwrap_or_default();
                    wrong.note(field, format!("uses {{{{ {name} }}}}, but the file has only the columns {columns}"));
                }
            }
            Err(mistakes) => {
                // A missing body was noted above.
                let is_empty = message.text.is_none() && message.html.is_none();
                let others = mistakes.into_iter().filter(|(field, _)| !(is_empty && field == "body"));
                others.for_each(|(field, message)| wrong.note(&field, message));
            }
        }
        message
    }
}

/// The problem of an upload without a file.
pub(super) fn without_file(mut wrong: Wrong) -> Problem {
    wrong.note("file", "is missing: the list, as multipart/form-data");
    wrong.problem(&INVALID_UPLOAD)
}

/// The problem of a file that is no list.
pub(super) fn invalid_file(broken: &Broken) -> Problem {
    let problem = Problem::new(&INVALID_FILE).detail(format!("{broken}")).with("code", broken.code);
    match broken.line {
        Some(line) => problem.with("line", line),
        None => problem,
    }
}
