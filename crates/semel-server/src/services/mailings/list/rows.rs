//! The rows of a list, from chunks of any size.

use super::address::Email;
use super::broken::Broken;
pub(crate) use super::records::Place;
use super::records::{Cells, Records};
use super::shape::Shape;
use super::text::excerpt;

/// Enough to find the row in the file; rejects are stored by the thousand.
const MAX_REJECT_CHARS: usize = 200;

/// A row of the list that is not blank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Row {
    /// The physical line on which it begins, from 1.
    pub(crate) line: u64,
    /// Accepted or rejected.
    pub(crate) kind: Kind,
}

/// What became of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A row with a valid address.
    Entry {
        /// The address.
        email: Email,
        /// One value for each of [`Shape::columns`], the address among them, without the spaces around it.
        values: Vec<String>,
    },
    /// A row that cannot be used. The rows after it can.
    Reject {
        /// The column at fault as the file names it, if it is one column: at most 200 characters of its name.
        column: Option<String>,
        /// Stable, in kebab case: a code of `BadAddress`, or `wrong-number-of-columns`.
        code: &'static str,
        /// The cell or the row at fault, at most 200 characters of it.
        value: String,
    },
}

/// Reads the rows of a list: feed it chunks, take rows until there are none, feed again.
///
/// The rows and their places do not depend on the size of the chunks. Memory holds the chunk and one record: take all
/// rows of a chunk before the next one is fed.
pub(crate) struct Rows {
    records: Records,
    judge: Judge,
    broken: Option<Broken>,
}

impl Rows {
    /// Reads from the first row after the header. The first chunk begins at byte [`Shape::skip`] of the file.
    pub(crate) fn new(shape: &Shape) -> Rows {
        Rows::resume(shape, shape.start())
    }

    /// Reads on from a place that [`Rows::place`] returned. The first chunk begins at its offset.
    pub(crate) fn resume(shape: &Shape, place: Place) -> Rows {
        Rows { records: Records::resume(shape.delimiter, place), judge: Judge::new(shape), broken: None }
    }

    /// Appends a chunk of the file.
    pub(crate) fn feed(&mut self, chunk: &[u8]) {
        self.records.feed(chunk);
    }

    /// Says that the file ends after the last chunk.
    pub(crate) fn finish(&mut self) {
        self.records.finish();
    }

    /// The place after the last row that was returned, from which [`Rows::resume`] returns the rows that follow.
    pub(crate) fn place(&self) -> Place {
        self.records.place()
    }

    /// The next row. `None`: it needs more input, or the file is at its end after `finish`. A broken file stays broken.
    // Not an iterator: `None` may be followed by rows.
    #[allow(clippy::should_implement_trait)]
    pub(crate) fn next(&mut self) -> Result<Option<Row>, Broken> {
        if let Some(broken) = &self.broken {
            return Err(broken.clone());
        }
        self.read().inspect_err(|broken| self.broken = Some(broken.clone()))
    }

    fn read(&mut self) -> Result<Option<Row>, Broken> {
        loop {
            let Some(record) = self.records.next()? else { return Ok(None) };
            let cells = record.cells()?;
            let row = (!cells.is_blank()).then(|| Row { line: record.line, kind: self.judge.kind(cells) });
            self.records.count(row.is_none());
            if row.is_some() {
                return Ok(row);
            }
        }
    }
}

/// Tells entries from rejects.
struct Judge {
    columns: usize,
    email: usize,
    email_label: String,
    delimiter: char,
}

impl Judge {
    fn new(shape: &Shape) -> Judge {
        Judge {
            columns: shape.columns.len(),
            email: shape.email,
            email_label: excerpt(&shape.label(shape.email), MAX_REJECT_CHARS),
            delimiter: char::from(shape.delimiter),
        }
    }

    fn kind(&self, cells: Cells<'_>) -> Kind {
        if !cells.fits(self.columns) {
            let row = cells.iter().collect::<Vec<_>>().join(self.delimiter.encode_utf8(&mut [0; 4]));
            let value = excerpt(&row, MAX_REJECT_CHARS);
            return Kind::Reject { column: None, code: "wrong-number-of-columns", value };
        }
        let cell = cells.get(self.email);
        match Email::parse(cell) {
            Ok(email) => Kind::Entry { email, values: cells.iter().take(self.columns).map(str::to_owned).collect() },
            Err(bad) => {
                let value = excerpt(cell, MAX_REJECT_CHARS);
                Kind::Reject { column: Some(self.email_label.clone()), code: bad.code(), value }
            }
        }
    }
}
