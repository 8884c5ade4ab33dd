//! Reads a JSON text (RFC 8259) into a tree that keeps what canonicalisation must see: numbers as
//! written, and where everything stood.

use std::borrow::Cow;

use super::{JsonError, MAX_DEPTH};

/// A value as it was read. Text without escapes is borrowed from the input.
pub(super) enum Value<'a> {
    /// `null`, `true` or `false`, which are canonical already.
    Word(&'static str),
    /// Grammatically a number; the writer checks its value.
    Number {
        text: &'a str,
        at: usize,
    },
    String(Cow<'a, str>),
    Array(Vec<Value<'a>>),
    /// Sorted by the UTF-16 code units of the names, no name twice.
    Object(Vec<Member<'a>>),
    /// Taken out by a pointer. It keeps its place, so that later pointers still count array
    /// elements right.
    Excluded,
}

pub(super) struct Member<'a> {
    pub(super) name: Cow<'a, str>,
    /// The opening quote of the name.
    at: usize,
    pub(super) value: Value<'a>,
}

/// Reads the one value that `bytes` hold.
pub(super) fn read(bytes: &[u8]) -> Result<Value<'_>, JsonError> {
    if bytes.starts_with(b"\xEF\xBB\xBF") {
        return Err(JsonError::ByteOrderMark);
    }
    let text = std::str::from_utf8(bytes).map_err(|error| JsonError::InvalidUtf8 { at: error.valid_up_to() })?;
    let mut reader = Reader { text, at: 0, depth: 0 };
    reader.skip_space();
    let value = reader.value()?;
    reader.skip_space();
    if reader.at < text.len() {
        return Err(JsonError::TrailingData { at: reader.at });
    }
    Ok(value)
}

struct Reader<'a> {
    text: &'a str,
    /// The next byte. Always on a character boundary, for it only ever stops before or after an
    /// ASCII byte.
    at: usize,
    depth: usize,
}

impl<'a> Reader<'a> {
    fn value(&mut self) -> Result<Value<'a>, JsonError> {
        match self.peek() {
            Some(b'{') => self.nested(Self::object),
            Some(b'[') => self.nested(Self::array),
            Some(b'"') => Ok(Value::String(self.string()?)),
            Some(b'-' | b'0'..=b'9') => self.number(),
            Some(b'n') => self.word("null"),
            Some(b't') => self.word("true"),
            Some(b'f') => self.word("false"),
            _ => Err(self.expected("a value")),
        }
    }

    /// Reads an array or object, unless that would be one level too many: a text of 10,000 brackets
    /// must end in an error, not in a stack overflow.
    fn nested(&mut self, read: fn(&mut Self) -> Result<Value<'a>, JsonError>) -> Result<Value<'a>, JsonError> {
        if self.depth == MAX_DEPTH {
            return Err(JsonError::TooDeep { at: self.at });
        }
        self.depth += 1;
        self.at += 1;
        self.skip_space();
        let value = read(self)?;
        self.depth -= 1;
        Ok(value)
    }

    fn array(&mut self) -> Result<Value<'a>, JsonError> {
        let mut items = Vec::new();
        if self.take(b']') {
            return Ok(Value::Array(items));
        }
        loop {
            items.push(self.value()?);
            self.skip_space();
            if self.take(b']') {
                return Ok(Value::Array(items));
            }
            self.require(b',', "a comma or the end of the array")?;
            self.skip_space();
        }
    }

    fn object(&mut self) -> Result<Value<'a>, JsonError> {
        let mut members = Vec::new();
        if self.take(b'}') {
            return Ok(Value::Object(members));
        }
        loop {
            members.push(self.member()?);
            self.skip_space();
            if self.take(b'}') {
                return sorted(members).map(Value::Object);
            }
            self.require(b',', "a comma or the end of the object")?;
            self.skip_space();
        }
    }

    fn member(&mut self) -> Result<Member<'a>, JsonError> {
        let at = self.at;
        if self.peek() != Some(b'"') {
            return Err(self.expected("the name of a member"));
        }
        let name = self.string()?;
        self.skip_space();
        self.require(b':', "a colon")?;
        self.skip_space();
        let value = self.value()?;
        Ok(Member { name, at, value })
    }

    /// Reads a string whose opening quote is the next byte.
    fn string(&mut self) -> Result<Cow<'a, str>, JsonError> {
        self.at += 1;
        let mut unescaped: Option<String> = None;
        loop {
            let plain = self.take_while(|byte| byte != b'"' && byte != b'\\' && byte >= b' ');
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(match unescaped {
                        None => Cow::Borrowed(plain),
                        Some(before) => Cow::Owned(before + plain),
                    });
                }
                Some(b'\\') => {
                    let character = self.escape()?;
                    let text = unescaped.get_or_insert_default();
                    text.push_str(plain);
                    text.push(character);
                }
                Some(_) => return Err(self.expected("an escape instead of a control character")),
                None => return Err(self.expected("the end of the string")),
            }
        }
    }

    /// Reads an escape whose backslash is the next byte.
    fn escape(&mut self) -> Result<char, JsonError> {
        let at = self.at;
        self.at += 1;
        let character = match self.peek() {
            Some(same @ (b'"' | b'\\' | b'/')) => char::from(same),
            Some(b'b') => '\u{8}',
            Some(b'f') => '\u{c}',
            Some(b'n') => '\n',
            Some(b'r') => '\r',
            Some(b't') => '\t',
            Some(b'u') => return self.unicode_escape(at),
            _ => return Err(self.expected("the letter of an escape")),
        };
        self.at += 1;
        Ok(character)
    }

    /// Reads the rest of the `\u` escape that began at `at`, and the second half of its pair where
    /// it has one.
    fn unicode_escape(&mut self, at: usize) -> Result<char, JsonError> {
        let first = self.code_unit()?;
        let starts_pair = (0xD800..0xDC00).contains(&first);
        let second = if starts_pair && self.text[self.at..].starts_with("\\u") {
            self.at += 1;
            Some(self.code_unit()?)
        } else {
            None
        };
        // Two units that are not a pair decode to an error first, so the second is never silently
        // dropped.
        match char::decode_utf16([first].into_iter().chain(second)).next() {
            Some(Ok(character)) => Ok(character),
            _ => Err(JsonError::LoneSurrogate { at }),
        }
    }

    /// Reads `uXXXX`.
    fn code_unit(&mut self) -> Result<u16, JsonError> {
        self.at += 1;
        let mut unit = 0;
        for _ in 0..4 {
            let digit = self.peek().and_then(|byte| char::from(byte).to_digit(16));
            let Some(digit) = digit else {
                return Err(self.expected("four hexadecimal digits"));
            };
            unit = unit << 4 | digit as u16;
            self.at += 1;
        }
        Ok(unit)
    }

    fn number(&mut self) -> Result<Value<'a>, JsonError> {
        let at = self.at;
        self.take(b'-');
        // A leading zero stands alone: in `01` the 1 is left over and refused by the caller.
        if !self.take(b'0') {
            self.digits()?;
        }
        if self.take(b'.') {
            self.digits()?;
        }
        if self.take(b'e') || self.take(b'E') {
            let _sign = self.take(b'+') || self.take(b'-');
            self.digits()?;
        }
        Ok(Value::Number { text: &self.text[at..self.at], at })
    }

    fn digits(&mut self) -> Result<(), JsonError> {
        match self.take_while(|byte| byte.is_ascii_digit()) {
            "" => Err(self.expected("a digit")),
            _ => Ok(()),
        }
    }

    fn word(&mut self, word: &'static str) -> Result<Value<'a>, JsonError> {
        if !self.text[self.at..].starts_with(word) {
            return Err(self.expected("a value"));
        }
        self.at += word.len();
        Ok(Value::Word(word))
    }

    fn skip_space(&mut self) {
        self.take_while(|byte| matches!(byte, b' ' | b'\t' | b'\n' | b'\r'));
    }

    fn take_while(&mut self, wanted: impl Fn(u8) -> bool) -> &'a str {
        let rest = &self.text[self.at..];
        let end = rest.bytes().position(|byte| !wanted(byte)).unwrap_or(rest.len());
        self.at += end;
        &rest[..end]
    }

    fn take(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        self.at += usize::from(found);
        found
    }

    fn require(&mut self, byte: u8, expected: &'static str) -> Result<(), JsonError> {
        if self.take(byte) { Ok(()) } else { Err(self.expected(expected)) }
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn expected(&self, expected: &'static str) -> JsonError {
        JsonError::Syntax { at: self.at, expected }
    }
}

/// Sorts members as RFC 8785 asks and refuses a name that occurs twice. Names are compared as they
/// read, not as they were escaped: `"a"` and `"\u0061"` are one name.
fn sorted(mut members: Vec<Member<'_>>) -> Result<Vec<Member<'_>>, JsonError> {
    members.sort_by(|a, b| a.name.encode_utf16().cmp(b.name.encode_utf16()));
    // The sort is stable, so of two equal names the later one comes second.
    let repeated = members.windows(2).filter(|pair| pair[0].name == pair[1].name);
    match repeated.map(|pair| pair[1].at).min() {
        Some(at) => Err(JsonError::DuplicateMember { at }),
        None => Ok(members),
    }
}
