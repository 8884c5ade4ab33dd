//! The splitting of a file into records and cells, over csv-core. No meaning yet: bytes in, bytes out.

use csv_core::{ReadRecordResult, Reader, ReaderBuilder};
use serde::{Deserialize, Serialize};

use super::broken::{Broken, Lines};

/// No cell of a mailing list is that long: it shows that a quote was opened and not closed.
pub(super) const MAX_FIELD: usize = 64 << 10;
/// The limit of memory for one row, quotes and delimiters included.
pub(super) const MAX_ROW: usize = 256 << 10;

/// A place between two records, from which reading can resume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Place {
    /// Bytes of the file before this place.
    pub(crate) offset: u64,
    /// The physical line that begins here, from 1.
    pub(crate) line: u64,
    /// Rows returned before this place, accepted and rejected.
    pub(crate) rows: u64,
    /// Blank lines and rows of empty cells that were skipped before this place.
    pub(crate) blank: u64,
}

/// One record: its cells are slices of one text without quotes and delimiters.
pub(super) struct Record<'a> {
    /// The physical line on which it begins.
    pub(super) line: u64,
    /// All cells, one after the other.
    pub(super) bytes: &'a [u8],
    /// Where each cell ends in `bytes`.
    pub(super) ends: &'a [usize],
}

impl<'a> Record<'a> {
    /// The cells as text.
    pub(super) fn cells(&self) -> Result<Cells<'a>, Broken> {
        if let Some(nul) = self.bytes.iter().position(|&byte| byte == 0) {
            return Err(Broken::nul_bytes(Lines::after(self.line, &self.bytes[..nul])));
        }
        let not_utf8 = |at: usize| Broken::not_utf8(Lines::after(self.line, &self.bytes[..at]), self.bytes);
        let text = std::str::from_utf8(self.bytes).map_err(|error| not_utf8(error.valid_up_to()))?;
        // Two halves of a character on both sides of a delimiter are one character here, but not in the file.
        match self.ends.iter().find(|&&end| !text.is_char_boundary(end)) {
            Some(&end) => Err(not_utf8(end)),
            None => Ok(Cells { text, ends: self.ends }),
        }
    }
}

/// The cells of a record, as text.
#[derive(Clone, Copy)]
pub(super) struct Cells<'a> {
    text: &'a str,
    ends: &'a [usize],
}

impl<'a> Cells<'a> {
    /// The cell without the spaces around it; empty if the record has fewer cells.
    pub(super) fn get(&self, index: usize) -> &'a str {
        let start = if index == 0 { 0 } else { self.ends.get(index - 1).copied().unwrap_or(self.text.len()) };
        let end = self.ends.get(index).copied().unwrap_or(self.text.len());
        self.text[start..end].trim()
    }

    pub(super) fn iter(self) -> impl Iterator<Item = &'a str> {
        (0..self.ends.len()).map(move |index| self.get(index))
    }

    pub(super) fn is_blank(&self) -> bool {
        self.text.trim().is_empty()
    }

    /// Whether the record has this many cells. Further cells are allowed if they are empty: spreadsheets write them
    /// for columns that once had content.
    pub(super) fn fits(&self, columns: usize) -> bool {
        self.ends.len() >= columns && (columns..self.ends.len()).all(|index| self.get(index).is_empty())
    }
}

enum State {
    /// Between two records.
    Boundary,
    /// Part of a record was read.
    Inside,
    /// A blank line or a record ended. If it ended with CR, the LF of a CRLF may follow, perhaps in the next chunk:
    /// only after it the place is one from which to resume.
    Ended { is_blank: bool },
}

/// Reads records from chunks of any size.
pub(super) struct Records {
    reader: Reader,
    state: State,
    place: Place,
    /// What was fed and not read; `at` is the first such byte.
    input: Vec<u8>,
    at: usize,
    is_finished: bool,
    /// Offset and line of `input[at]`.
    offset: u64,
    lines: Lines,
    /// The record in work: the line where it began, its bytes in the file, its cells and their ends.
    line: u64,
    raw: usize,
    out: Vec<u8>,
    filled: usize,
    ends: Vec<usize>,
    cells: usize,
}

impl Records {
    pub(super) fn resume(delimiter: u8, place: Place) -> Records {
        let mut reader = ReaderBuilder::new().delimiter(delimiter).build();
        // A new reader drops a byte order mark, but only if the first chunk has all of it. That would make the rows
        // depend on the chunks, and the shape has dropped the mark already. A reader that has read keeps it, and a
        // blank line is nothing to it.
        reader.read_record(b"\n", &mut [0], &mut [0]);
        Records {
            reader,
            state: State::Boundary,
            place,
            input: Vec::new(),
            at: 0,
            is_finished: false,
            offset: place.offset,
            lines: Lines::from(place.line),
            line: place.line,
            raw: 0,
            out: vec![0; 4 << 10],
            filled: 0,
            ends: vec![0; 64],
            cells: 0,
        }
    }

    pub(super) fn feed(&mut self, chunk: &[u8]) {
        self.input.drain(..self.at);
        self.at = 0;
        self.input.extend_from_slice(chunk);
    }

    pub(super) fn finish(&mut self) {
        self.is_finished = true;
    }

    pub(super) fn place(&self) -> Place {
        self.place
    }

    /// Counts the last record as a row, or as a blank one.
    pub(super) fn count(&mut self, is_blank: bool) {
        if is_blank {
            self.place.blank += 1;
        } else {
            self.place.rows += 1;
        }
    }

    /// The next record that is not a blank line. `None`: it needs more input, or there is no more after `finish`.
    pub(super) fn next(&mut self) -> Result<Option<Record<'_>>, Broken> {
        loop {
            match self.state {
                State::Boundary => match self.input.get(self.at) {
                    None => return Ok(None),
                    Some(b'\r' | b'\n') => {
                        self.pass(1);
                        self.state = State::Ended { is_blank: true };
                    }
                    Some(_) => {
                        (self.line, self.raw, self.filled, self.cells) = (self.lines.line, 0, 0, 0);
                        self.state = State::Inside;
                    }
                },
                State::Inside => {
                    if !self.read()? {
                        return Ok(None);
                    }
                    self.state = State::Ended { is_blank: false };
                }
                State::Ended { is_blank } => {
                    if self.lines.after_cr {
                        match self.input.get(self.at) {
                            Some(b'\n') => self.pass(1),
                            None if !self.is_finished => return Ok(None),
                            _ => {}
                        }
                    }
                    self.state = State::Boundary;
                    (self.place.offset, self.place.line) = (self.offset, self.lines.line);
                    if !is_blank {
                        let (bytes, ends) = (&self.out[..self.filled], &self.ends[..self.cells]);
                        return Ok(Some(Record { line: self.line, bytes, ends }));
                    }
                    self.count(true);
                }
            }
        }
    }

    /// Reads on in the current record. True when it is complete.
    fn read(&mut self) -> Result<bool, Broken> {
        loop {
            // One byte past the limit suffices to see that a row is too long, whatever the size of the chunks.
            let rest = &self.input[self.at..];
            let input = &rest[..rest.len().min(MAX_ROW + 1 - self.raw)];
            if input.is_empty() {
                return if self.is_finished { self.close() } else { Ok(false) };
            }
            let (out, ends) = (&mut self.out[self.filled..], &mut self.ends[self.cells..]);
            let (result, read, written, ended) = self.reader.read_record(input, out, ends);
            self.pass(read);
            self.raw += read;
            self.filled += written;
            self.cells += ended;
            self.check_size()?;
            match result {
                ReadRecordResult::Record => return Ok(true),
                ReadRecordResult::OutputFull => self.out.resize(self.out.len() * 2, 0),
                ReadRecordResult::OutputEndsFull => self.ends.resize(self.ends.len() * 2, 0),
                ReadRecordResult::InputEmpty | ReadRecordResult::End => {}
            }
        }
    }

    /// Ends the last record of a file without a final line break. Inside quotes, a line break does not end a record,
    /// which is how an unclosed quote shows.
    fn close(&mut self) -> Result<bool, Broken> {
        loop {
            let (out, ends) = (&mut self.out[self.filled..], &mut self.ends[self.cells..]);
            match self.reader.read_record(b"\n", out, ends) {
                (ReadRecordResult::Record, _, _, ended) => {
                    self.cells += ended;
                    return Ok(true);
                }
                (ReadRecordResult::OutputFull, 0, ..) => self.out.resize(self.out.len() * 2, 0),
                (ReadRecordResult::OutputEndsFull, 0, ..) => self.ends.resize(self.ends.len() * 2, 0),
                _ => {
                    let quoted = &self.out[self.last_end()..self.filled];
                    let opened = self.lines.line - Lines::after(0, quoted);
                    return Err(Broken::new("unclosed-quote", "a quote is opened here and never closed").at(opened));
                }
            }
        }
    }

    fn pass(&mut self, bytes: usize) {
        self.lines.pass(&self.input[self.at..self.at + bytes]);
        self.at += bytes;
        self.offset += bytes as u64;
    }

    fn last_end(&self) -> usize {
        self.ends[..self.cells].last().copied().unwrap_or(0)
    }

    /// The check of the cells comes first, so that the answer does not depend on the chunks.
    fn check_size(&self) -> Result<(), Broken> {
        if self.raw <= MAX_FIELD {
            return Ok(());
        }
        let mut start = 0;
        for &end in self.ends[..self.cells].iter().chain([&self.filled]) {
            if end - start > MAX_FIELD {
                let message = "a cell of this row has more than 64 KiB: probably a quote is opened and never closed";
                return Err(Broken::new("field-too-long", message).at(self.line));
            }
            start = end;
        }
        if self.raw > MAX_ROW {
            return Err(Broken::new("row-too-long", "this row has more than 256 KiB").at(self.line));
        }
        Ok(())
    }
}
