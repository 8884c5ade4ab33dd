//! JSON that every reader reads alike. Clients, endpoints and handlers read stored JSON later. Texts that are valid
//! JSON and still break or mislead a common reader are refused on arrival.

use std::{borrow::Cow, collections::HashSet, fmt};

/// The deepest nesting of stored JSON. Real events have about ten levels; some readers recurse once per level, and many
/// give up at 100 or 128. The entity and the page around it add a few.
pub const DEEPEST: usize = 64;

/// How much of the place of a flaw is reported: names come from outside.
const LONGEST_SHOWN: usize = 100;

/// Why readers differ about a JSON text, and where. It completes a sentence: `payload has a[0].b twice`.
#[derive(Debug, PartialEq, Eq)]
pub struct Flaw {
    /// The member or element, such as `a[0].b`.
    place: String,
    rule: Rule,
}

#[derive(Debug, PartialEq, Eq)]
enum Rule {
    /// Readers differ about which of two equal names counts.
    Twice,
    /// A reader that recurses runs out of stack, or refuses.
    TooDeep { deepest: usize },
    /// Some readers take it as infinite, others as an error.
    Number,
    /// No UTF-8 text holds half of a pair; many readers refuse the whole text.
    Surrogate,
}

impl fmt::Display for Flaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = if self.place.is_empty() { String::new() } else { format!("at {} ", self.place) };
        match self.rule {
            Rule::Twice => write!(f, "{} twice", self.place),
            Rule::TooDeep { deepest } => write!(f, "{at}more than {deepest} levels of nesting"),
            Rule::Number => write!(f, "{at}a number beyond the range of a double (about 1.8e308)"),
            Rule::Surrogate => write!(f, "{at}half of a surrogate pair (a \\ud800 to \\udfff that stands alone)"),
        }
    }
}

/// A level of nesting.
enum Level<'a> {
    Object { names: HashSet<Cow<'a, str>>, name: Cow<'a, str> },
    List { index: usize },
}

/// The first reason why readers would differ about a JSON text: a duplicate member, more than `deepest` levels, a
/// number beyond a double, a lone surrogate. The text must be valid JSON. Does not recurse.
pub fn flaw(json: &str, deepest: usize) -> Option<Flaw> {
    let bytes = json.as_bytes();
    let mut levels: Vec<Level<'_>> = Vec::new();
    let (mut at, mut expects_name) = (0, false);
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'{' | b'[' if levels.len() == deepest => {
                return Some(Flaw { place: place(&levels), rule: Rule::TooDeep { deepest } });
            }
            b'{' => {
                levels.push(Level::Object { names: HashSet::new(), name: Cow::Borrowed("") });
                expects_name = true;
            }
            b'[' => {
                levels.push(Level::List { index: 0 });
                expects_name = false;
            }
            b'}' | b']' => {
                levels.pop();
                expects_name = false;
            }
            b',' => match levels.last_mut() {
                Some(Level::Object { .. }) => expects_name = true,
                Some(Level::List { index }) => *index += 1,
                None => {}
            },
            b'"' => {
                let end = end_of_string(bytes, at)?;
                let quoted = &json[at..=end];
                let mut twice = false;
                if let (true, Some(Level::Object { names, name })) = (expects_name, levels.last_mut()) {
                    expects_name = false;
                    *name = text(quoted);
                    twice = !names.insert(name.clone());
                }
                if twice || has_lone_surrogate(quoted) {
                    let rule = if twice { Rule::Twice } else { Rule::Surrogate };
                    return Some(Flaw { place: place(&levels), rule });
                }
                at = end;
            }
            b'-' | b'0'..=b'9' => {
                let length = bytes[at..].iter().take_while(|byte| is_of_number(**byte)).count();
                if json[at..at + length].parse::<f64>().is_ok_and(f64::is_infinite) {
                    return Some(Flaw { place: place(&levels), rule: Rule::Number });
                }
                at += length - 1;
            }
            _ => {}
        }
        at += 1;
    }
    None
}

const fn is_of_number(byte: u8) -> bool {
    matches!(byte, b'-' | b'+' | b'.' | b'e' | b'E' | b'0'..=b'9')
}

/// The end of the string that begins at a quote.
fn end_of_string(bytes: &[u8], quote: usize) -> Option<usize> {
    let mut at = quote + 1;
    loop {
        match bytes.get(at)? {
            b'"' => return Some(at),
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
}

/// Whether a `\u` escape of a string is a lone surrogate.
fn has_lone_surrogate(quoted: &str) -> bool {
    let mut rest = quoted;
    while let Some(at) = rest.find('\\') {
        let Some(unit) = unit(&rest[at..]) else {
            // Another escape: the character after the backslash is ASCII.
            rest = rest.get(at + 2..).unwrap_or_default();
            continue;
        };
        rest = &rest[at + ESCAPE..];
        match unit {
            0xD800..=0xDBFF => match self::unit(rest) {
                Some(0xDC00..=0xDFFF) => rest = &rest[ESCAPE..],
                _ => return true,
            },
            0xDC00..=0xDFFF => return true,
            _ => {}
        }
    }
    false
}

/// The length of `\uXXXX`.
const ESCAPE: usize = 6;

/// The code unit of a `\u` escape at the beginning of a text.
fn unit(text: &str) -> Option<u16> {
    let digits = text.strip_prefix("\\u")?.get(..4)?;
    u16::from_str_radix(digits, 16).ok()
}

/// A decoded name: `"\u0061"` is `a`.
fn text(quoted: &str) -> Cow<'_, str> {
    let written = &quoted[1..quoted.len() - 1];
    match written.contains('\\') {
        true => serde_json::from_str::<String>(quoted).map_or(Cow::Borrowed(written), Cow::Owned),
        false => Cow::Borrowed(written),
    }
}

/// The path to the member, in the notation of problems.
fn place(levels: &[Level<'_>]) -> String {
    let mut place = String::new();
    for level in levels {
        match level {
            Level::Object { name, .. } if place.is_empty() => place.push_str(name),
            Level::Object { name, .. } => place.push_str(&format!(".{name}")),
            Level::List { index } => place.push_str(&format!("[{index}]")),
        }
    }
    let shown: String = place.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
    match shown.chars().count() {
        ..=LONGEST_SHOWN => shown,
        // Keep the end: it names the member.
        count => ['…'].into_iter().chain(shown.chars().skip(count - LONGEST_SHOWN + 1)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(json: &str) -> Option<String> {
        flaw(json, DEEPEST).map(|flaw| flaw.to_string())
    }

    #[test]
    fn a_member_given_twice_is_found_at_any_depth() {
        for (json, found) in [
            (r#"{"a":1,"a":1}"#, "a twice"),
            (r#"{"a":{"b":1,"c":{},"b":2}}"#, "a.b twice"),
            (r#"{"a":[{"b":1},{"b":1,"b":[]}]}"#, "a[1].b twice"),
            (r#"[{"a":"{\"a\":1","a":2}]"#, "[0].a twice"),
            (r#"{"a":1,"\u0061":2}"#, "a twice"),
            (r#"{"":1,"":2}"#, " twice"),
            (r#"{ "x" : [ ] , "a" : "," , "a" : 1 }"#, "a twice"),
            (r#"{"a\u0000":1,"a\u0000":2}"#, "a\u{fffd} twice"),
        ] {
            assert_eq!(told(json).as_deref(), Some(found), "{json}");
        }
        let deep = format!("{}{}{}", r#"{"a":"#.repeat(10_000), r#"{"b":1,"b":2}"#, "}".repeat(10_000));
        let Flaw { place, rule } = flaw(&deep, usize::MAX).unwrap();
        assert!(rule == Rule::Twice && place.ends_with(".a.b") && place.chars().count() == LONGEST_SHOWN, "{place}");
    }

    #[test]
    fn numbers_surrogates_and_nesting_are_found_with_their_place() {
        for (json, found) in [
            (r#"{"a":[0,1e999999]}"#, "at a[1] a number beyond"),
            (r#"{"a":-1E+400}"#, "at a a number beyond"),
            ("1e400", "a number beyond"),
            (r#"{"a":{"b":"x\ud800"}}"#, "at a.b half of a surrogate pair"),
            (r#"{"a":"\udc00\ud800"}"#, "at a half of"),
            (r#"{"a":"\ud800\\udc00"}"#, "at a half of"),
            (r#"{"a":"\ud83d\ud83d\ude00"}"#, "at a half of"),
            (r#"{"\ud800":1}"#, r"at \ud800 half of"),
        ] {
            let told = told(json).unwrap_or_default();
            assert!(told.starts_with(found), "{json}: {told}");
        }
        let nested = |levels| format!("{}{}", r#"{"a":["#.repeat(levels / 2), "]}".repeat(levels / 2));
        assert_eq!(told(&nested(DEEPEST)), None);
        assert_eq!(flaw(&nested(DEEPEST), DEEPEST - 1).unwrap().rule, Rule::TooDeep { deepest: DEEPEST - 1 });
        for levels in [DEEPEST + 2, 100_000] {
            let told = told(&nested(levels)).unwrap();
            assert!(told.ends_with("a[0].a[0] more than 64 levels of nesting") && told.len() < 200, "{told}");
        }
    }

    #[test]
    fn json_that_every_reader_reads_alike_has_no_flaw() {
        for json in [
            r#"{"a":{"a":{"a":"a"}},"b":["a","a",{"a":1},{"a":1}]}"#,
            r#"{"a":1,"A":1,"a ":1,"\"a":1}"#,
            r#"["a","a"]"#,
            r#""a""#,
            "1",
            "{}",
            "",
            // Large, small, and with more digits than a double has.
            "[1.7e308,-1e-999999,9007199254740993,0.1000000000000000000000001]",
            r#"["1e999999","[[[[","\\ud800","\ud83d\ude00","\u0000","\"\ud83d\uDE00\""]"#,
            r#"{"a":"#,
            r#"{"a"#,
            "\"\\",
        ] {
            assert_eq!(told(json), None, "{json}");
        }
    }
}
