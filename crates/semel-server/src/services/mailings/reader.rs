//! The rows of a mailing's file. A row of which no mail can be made is a reject, before anything is sent.

use std::time::{Duration, Instant};

use super::{
    list::{
        broken::Broken,
        rows::{Kind, Place, Row, Rows},
        shape::Shape,
    },
    mail::template::{Templates, variables},
    message::Message,
};

/// How long a reader works before its thread does something else. One row takes half a second at worst: see
/// `mail::template`.
const LONGEST: Duration = Duration::from_secs(1);

/// Reads rows from parts of a file. It computes, and so belongs to a blocking thread.
pub(super) struct Reader {
    rows: Rows,
    columns: Vec<String>,
    templates: Option<Templates>,
    link: Option<String>,
    is_over: bool,
    until: Instant,
}

/// What a reader has.
pub(super) enum Next {
    Row(Row),
    /// No whole row: it needs more of the file.
    Hungry,
    /// No row now: it has worked for long enough.
    Tired,
    /// No row any more.
    Over,
}

impl Reader {
    /// Reads from a place. Without a message, or if its templates are wrong, no row is tried.
    pub(super) fn at(shape: &Shape, place: Place, message: Option<&Message>) -> Self {
        Self {
            rows: Rows::resume(shape, place),
            columns: shape.columns.clone(),
            templates: message.and_then(|message| message.templates().ok()),
            link: message.and_then(Message::sample_link),
            is_over: false,
            until: Instant::now() + LONGEST,
        }
    }

    /// Its work begins, or begins again.
    pub(super) fn begin(&mut self) {
        self.until = Instant::now() + LONGEST;
    }

    /// More of the file; `None` at its end.
    pub(super) fn feed(&mut self, part: Option<&[u8]>) {
        match part {
            Some(part) => self.rows.feed(part),
            None => {
                self.rows.finish();
                self.is_over = true;
            }
        }
    }

    pub(super) fn place(&self) -> Place {
        self.rows.place()
    }

    /// The next row. A file without rows is broken: its first 64 KiB may have had only a header and blank lines.
    pub(super) fn next(&mut self) -> Result<Next, Broken> {
        if Instant::now() >= self.until {
            return Ok(Next::Tired);
        }
        let Some(row) = self.rows.next()? else {
            return match self.is_over {
                true if self.place().rows == 0 => Err(Broken::empty()),
                true => Ok(Next::Over),
                false => Ok(Next::Hungry),
            };
        };
        let Some(why) = self.refusal(&row) else { return Ok(Next::Row(row)) };
        Ok(Next::Row(Row { line: row.line, kind: Kind::Reject { column: None, code: "not-rendered", value: why } }))
    }

    /// Why no mail can be made of a row.
    fn refusal(&self, row: &Row) -> Option<String> {
        let (Some(templates), Kind::Entry { email, values }) = (&self.templates, &row.kind) else { return None };
        templates.try_out(&variables(&self.columns, values, &email.normal, self.link.as_deref())).err()
    }
}
