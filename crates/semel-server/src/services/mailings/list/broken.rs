//! The reasons for which a file cannot be read any further.

use std::fmt;

/// A file that cannot be read. In contrast to a rejected row, nothing after this place can be trusted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Broken {
    /// Stable, in kebab case: clients may depend on it.
    pub(crate) code: &'static str,
    /// The physical line, from 1, if there is one to name.
    pub(crate) line: Option<u64>,
    /// For a person: the problem and, where we know it, the remedy.
    pub(crate) message: String,
}

impl Broken {
    pub(super) fn new(code: &'static str, message: impl Into<String>) -> Broken {
        Broken { code, line: None, message: message.into() }
    }

    pub(super) fn at(self, line: u64) -> Broken {
        Broken { line: Some(line), ..self }
    }

    pub(crate) fn empty() -> Broken {
        Broken::new("empty", "the file has no rows: all its lines are blank, except perhaps a header")
    }

    /// `around`: the bytes by which to guess the encoding that the file has instead.
    pub(super) fn not_utf8(line: u64, around: &[u8]) -> Broken {
        let guess = if looks_like_windows_1252(around) {
            "it looks like Windows-1252 or Latin-1, so save it again with the encoding UTF-8"
        } else {
            "save it again with the encoding UTF-8"
        };
        Broken::new("not-utf8", format!("the file is not UTF-8: {guess}")).at(line)
    }

    pub(super) fn nul_bytes(line: u64) -> Broken {
        let message = "the file contains NUL bytes: it is no text, or it is UTF-16 and must be saved again as UTF-8";
        Broken::new("nul-bytes", message).at(line)
    }
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "line {line}: {}", self.message),
            None => f.write_str(&self.message),
        }
    }
}

impl std::error::Error for Broken {}

/// Western European text has letters above 0xC0, none of the five bytes that Windows-1252 leaves undefined, and no
/// control characters. UTF-8 text seldom passes, since its second bytes fall on undefined ones; a wrong guess only
/// changes the message.
fn looks_like_windows_1252(bytes: &[u8]) -> bool {
    let is_undefined = |byte: u8| matches!(byte, 0x81 | 0x8d | 0x8f | 0x90 | 0x9d);
    let is_control = |byte: u8| byte < 0x20 && !matches!(byte, b'\t' | b'\r' | b'\n');
    let is_letter = |byte: u8| byte >= 0xc0 && byte != 0xd7 && byte != 0xf7;
    bytes.iter().any(|&byte| is_letter(byte)) && !bytes.iter().any(|&byte| is_undefined(byte) || is_control(byte))
}

/// Counts physical lines over pieces of a text. CRLF, LF and a lone CR end one line each.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lines {
    /// The line of the next byte, from 1.
    pub(super) line: u64,
    /// The last byte was a CR: an LF that follows belongs to the same line break.
    pub(super) after_cr: bool,
}

impl Lines {
    pub(super) fn from(line: u64) -> Lines {
        Lines { line, after_cr: false }
    }

    pub(super) fn pass(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.line += u64::from(byte == b'\r' || (byte == b'\n' && !self.after_cr));
            self.after_cr = byte == b'\r';
        }
    }

    /// The line of what follows `bytes` in a text that begins on `line`.
    pub(super) fn after(line: u64, bytes: &[u8]) -> u64 {
        let mut lines = Lines::from(line);
        lines.pass(bytes);
        lines.line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crlf_lf_and_lone_cr_end_one_line_each_at_any_split() {
        let text = b"a\r\nb\nc\rd\r\r\n\n\re";
        for split in 0..text.len() {
            let mut lines = Lines::from(1);
            lines.pass(&text[..split]);
            lines.pass(&text[split..]);
            assert_eq!(lines.line, 8, "split at {split}");
        }
    }

    #[test]
    fn the_message_names_the_line() {
        assert_eq!(Broken::new("x", "wrong").at(7).to_string(), "line 7: wrong");
        assert_eq!(Broken::new("x", "wrong").to_string(), "wrong");
    }

    #[test]
    fn western_european_bytes_are_recognised_as_windows_1252() {
        assert!(Broken::not_utf8(1, b"Jo\xe3o").message.contains("Windows-1252"));
        assert!(!Broken::not_utf8(1, b"\xff\x81\x01").message.contains("Windows-1252"));
    }
}
