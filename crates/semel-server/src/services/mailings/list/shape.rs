//! The shape of a file, from its beginning: delimiter, header and the column of the addresses.

use serde::{Deserialize, Serialize};

use super::address::Email;
use super::broken::{Broken, Lines};
use super::header::{self, Head};
use super::kind;
use super::records::{Place, Records};

/// In the order of preference when nothing else decides.
const DELIMITERS: [u8; 4] = [b',', b';', b'\t', b'|'];
/// Rows by which the delimiter is chosen. More would not change the choice.
const SAMPLE: usize = 100;
/// The byte order mark of UTF-8.
const BOM: &[u8] = b"\xef\xbb\xbf";

/// How to read the rows of a file. An import stores it in its checkpoint, so that every part of the file is read in
/// the same way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Shape {
    /// Bytes before the rows: the byte order mark, a `sep=;` line, the header and the blank lines before it.
    pub(crate) skip: u64,
    /// The physical line after these bytes, from 1.
    pub(crate) line: u64,
    /// One of comma, semicolon, tab and `|`.
    pub(crate) delimiter: u8,
    /// The header as the file writes it, without the spaces around its cells, if there is one.
    pub(crate) header: Option<Vec<String>>,
    /// The index of the address column.
    pub(crate) email: usize,
    /// The names of the template variables, one for each column, all different.
    pub(crate) columns: Vec<String>,
}

impl Shape {
    /// Looks at the beginning of a file.
    ///
    /// `first`: up to 64 KiB; `is_whole`: the file has no more than that. `column`: the address column by its name or
    /// by its number from 1, if the client said which; else it is found by its name, or by the address in the first
    /// row of a file without a header.
    pub(crate) fn look(first: &[u8], is_whole: bool, column: Option<&str>) -> Result<Shape, Broken> {
        kind::check(first)?;
        check_text(first, is_whole)?;
        let start = Start::find(first)?;
        let sample = |delimiter| Sample::take(first, &start, delimiter, is_whole);
        let samples = match start.delimiter {
            Some(delimiter) => vec![sample(delimiter)],
            None => DELIMITERS.map(sample).into(),
        };
        // A line of nothing but delimiters is blank, though not to the other delimiters.
        if is_whole && samples.iter().any(|sample| sample.rows.is_empty() && sample.broken.is_none()) {
            return Err(no_rows(first, is_whole));
        }
        // Of equal ones `max_by_key` takes the last, hence the reversal.
        let best = samples.into_iter().rev().max_by_key(|sample| sample.score(column));
        let shape = best.ok_or_else(|| no_rows(first, is_whole))?.shape(&start, first, is_whole, column)?;
        shape.check_rows(first, is_whole)?;
        Ok(shape)
    }

    /// Looks for rows behind the sample that cannot be read: the import would fail there.
    fn check_rows(&self, first: &[u8], is_whole: bool) -> Result<(), Broken> {
        let mut records = Records::resume(self.delimiter, self.start());
        records.feed(first.get(usize::try_from(self.skip).unwrap_or(0)..).unwrap_or_default());
        if is_whole {
            records.finish();
        }
        while let Some(record) = records.next()? {
            record.cells()?;
        }
        Ok(())
    }

    /// The place before the first row.
    pub(crate) fn start(&self) -> Place {
        Place { offset: self.skip, line: self.line, rows: 0, blank: 0 }
    }

    /// The name of a column as the file writes it, or `col1` for the first one of a file without a header.
    pub(crate) fn label(&self, index: usize) -> String {
        let label = self.header.as_ref().and_then(|header| header.get(index)).filter(|label| !label.is_empty());
        label.or(self.columns.get(index)).cloned().unwrap_or_default()
    }
}

fn check_text(first: &[u8], is_whole: bool) -> Result<(), Broken> {
    if let Some(nul) = first.iter().position(|&byte| byte == 0) {
        return Err(Broken::nul_bytes(Lines::after(1, &first[..nul])));
    }
    match std::str::from_utf8(first) {
        // The beginning may end within a character.
        Err(error) if is_whole || error.error_len().is_some() => {
            Err(Broken::not_utf8(Lines::after(1, &first[..error.valid_up_to()]), first))
        }
        _ => Ok(()),
    }
}

fn no_rows(first: &[u8], is_whole: bool) -> Broken {
    let is_blank = first.strip_prefix(BOM).unwrap_or(first).trim_ascii().is_empty();
    match (is_whole, is_blank) {
        (true, _) if first.is_empty() => Broken::new("empty", "the file is empty"),
        (true, _) => Broken::new("empty", "the file has no rows: all its lines are blank"),
        (false, true) => Broken::new("empty", "the file begins with nothing but blank lines"),
        (false, false) => {
            let message = "the first row is too long: probably a quote is opened and never closed";
            Broken::new("first-row-too-long", message).at(1)
        }
    }
}

/// What stands before the first line of content.
struct Start {
    skip: usize,
    line: u64,
    delimiter: Option<u8>,
}

impl Start {
    /// Skips the byte order mark and the line `sep=;`, by which Excel is told the delimiter.
    fn find(first: &[u8]) -> Result<Start, Broken> {
        let text = first.strip_prefix(BOM).unwrap_or(first);
        let skip = first.len() - text.len();
        let end = text.iter().position(|byte| matches!(byte, b'\r' | b'\n')).unwrap_or(text.len());
        let line = text[..end].trim_ascii_end();
        // A tab after `sep=` is the delimiter and not a space to trim.
        let line = if text[..end] == b"sep=\t"[..] { &text[..end] } else { line };
        let line = line.strip_prefix(b"\"").and_then(|line| line.strip_suffix(b"\"")).unwrap_or(line);
        let delimiter = match line {
            [name @ .., delimiter] if name.eq_ignore_ascii_case(b"sep=") => *delimiter,
            _ => return Ok(Start { skip, line: 1, delimiter: None }),
        };
        if !DELIMITERS.contains(&delimiter) {
            let message = "the line `sep=` names an unknown delimiter: use comma, semicolon, tab or `|`";
            return Err(Broken::new("unknown-delimiter", message).at(1));
        }
        let line_break = match &text[end..] {
            [b'\r', b'\n', ..] => 2,
            [] => 0,
            _ => 1,
        };
        Ok(Start { skip: skip + end + line_break, line: 2, delimiter: Some(delimiter) })
    }
}

/// The first rows as one delimiter splits them.
struct Sample {
    delimiter: u8,
    /// Without blank ones. Empty if the beginning of the file has no complete row.
    rows: Vec<Vec<String>>,
    /// The line on which the first row begins, and the place after it.
    line: u64,
    after_first: Place,
    /// The file is broken after these rows.
    broken: Option<Broken>,
}

impl Sample {
    fn take(first: &[u8], start: &Start, delimiter: u8, is_whole: bool) -> Sample {
        let place = Place { offset: start.skip as u64, line: start.line, rows: 0, blank: 0 };
        let mut records = Records::resume(delimiter, place);
        records.feed(&first[start.skip..]);
        if is_whole {
            records.finish();
        }
        let mut sample = Sample { delimiter, rows: Vec::new(), line: start.line, after_first: place, broken: None };
        sample.broken = sample.fill(&mut records).err();
        sample
    }

    fn fill(&mut self, records: &mut Records) -> Result<(), Broken> {
        while self.rows.len() <= SAMPLE {
            let Some(record) = records.next()? else { break };
            let cells = record.cells()?;
            if cells.is_blank() {
                continue;
            }
            let row = cells.iter().map(str::to_owned).collect();
            if self.rows.is_empty() {
                self.line = record.line;
                self.after_first = records.place();
            }
            self.rows.push(row);
        }
        Ok(())
    }

    fn head(&self, column: Option<&str>) -> Result<Head, Broken> {
        let first: Vec<&str> = self.rows.first().into_iter().flatten().map(String::as_str).collect();
        header::read(&first, column).map_err(|broken| broken.at(self.line))
    }

    /// The right delimiter lets the address column be found, and gives most rows an address and the same number of
    /// cells. The number of columns decides last: a comma within the names of a `;` file must not win.
    fn score(&self, column: Option<&str>) -> (u8, usize, usize) {
        let (found, columns) = match self.head(column) {
            Ok(head) => (2, head.columns.len()),
            Err(broken) => {
                let is_none = matches!(broken.code, "no-address-column" | "unknown-column");
                (u8::from(!is_none), self.rows.first().map_or(0, Vec::len))
            }
        };
        let fits = |row: &&Vec<String>| row.len() >= columns && row[columns..].iter().all(String::is_empty);
        let has_address = |row: &&Vec<String>| row.iter().any(|cell| Email::parse(cell).is_ok());
        (found, self.rows.iter().filter(fits).filter(has_address).count(), columns)
    }

    fn shape(self, start: &Start, first: &[u8], is_whole: bool, column: Option<&str>) -> Result<Shape, Broken> {
        if self.rows.is_empty() {
            return Err(self.broken.unwrap_or_else(|| no_rows(first, is_whole)));
        }
        let Head { header, columns, email } = self.head(column)?;
        if header.is_some() && self.rows.len() == 1 && is_whole {
            return Err(self.broken.unwrap_or_else(|| Broken::new("empty", "the file has a header and no rows")));
        }
        let (skip, line) = match header {
            Some(_) => (self.after_first.offset, self.after_first.line),
            None => (start.skip as u64, start.line),
        };
        Ok(Shape { skip, line, delimiter: self.delimiter, header, email, columns })
    }
}

#[cfg(test)]
#[path = "shape_tests.rs"]
mod tests;
