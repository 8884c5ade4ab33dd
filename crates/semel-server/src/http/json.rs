//! JSON that two readers could read differently.

use std::{borrow::Cow, collections::HashSet};

/// How much is told of where a member stands: names come from outside.
const LONGEST_TOLD: usize = 100;

/// Where one stands in a JSON text.
enum Level<'a> {
    Object { names: HashSet<Cow<'a, str>>, name: Cow<'a, str> },
    List { index: usize },
}

/// The first member that an object of a JSON text gives twice, such as `payload.restaurant_id`: of two, each reader
/// could believe another. The text must be valid JSON; of any other it says nothing. It goes down any depth without
/// recursion.
pub fn given_twice(json: &str) -> Option<String> {
    let bytes = json.as_bytes();
    let mut levels: Vec<Level<'_>> = Vec::new();
    let (mut at, mut expects_name) = (0, false);
    while let Some(byte) = bytes.get(at) {
        match byte {
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
                if let (true, Some(Level::Object { names, name })) = (expects_name, levels.last_mut()) {
                    expects_name = false;
                    *name = text(&json[at..=end]);
                    if !names.insert(name.clone()) {
                        return Some(place(&levels));
                    }
                }
                at = end;
            }
            _ => {}
        }
        at += 1;
    }
    None
}

/// Where the string that begins at a quote ends.
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

/// A name, whichever way it is written: `"\u0061"` is `a`.
fn text(quoted: &str) -> Cow<'_, str> {
    let written = &quoted[1..quoted.len() - 1];
    match written.contains('\\') {
        true => serde_json::from_str::<String>(quoted).map_or(Cow::Borrowed(written), Cow::Owned),
        false => Cow::Borrowed(written),
    }
}

/// The way to the member, in the notation that problems have for fields.
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
        ..=LONGEST_TOLD => shown,
        // The end says which member it is.
        count => ['…'].into_iter().chain(shown.chars().skip(count - LONGEST_TOLD + 1)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_given_twice_is_found_at_any_depth() {
        for (json, found) in [
            (r#"{"a":1,"a":1}"#, "a"),
            (r#"{"a":{"b":1,"c":{},"b":2}}"#, "a.b"),
            (r#"{"a":[{"b":1},{"b":1,"b":[]}]}"#, "a[1].b"),
            (r#"[{"a":"{\"a\":1","a":2}]"#, "[0].a"),
            (r#"{"a":1,"\u0061":2}"#, "a"),
            (r#"{"":1,"":2}"#, ""),
            (r#"{ "x" : [ ] , "a" : "," , "a" : 1 }"#, "a"),
            (r#"{"\ud800":1,"\ud800":2}"#, r"\ud800"),
            (r#"{"a\u0000":1,"a\u0000":2}"#, "a\u{fffd}"),
        ] {
            assert_eq!(given_twice(json).as_deref(), Some(found), "{json}");
        }
        let deep = format!("{}{}{}", r#"{"a":"#.repeat(10_000), r#"{"b":1,"b":2}"#, "}".repeat(10_000));
        let told = given_twice(&deep).unwrap();
        assert!(told.ends_with(".a.b") && told.chars().count() == LONGEST_TOLD, "{told}");
    }

    #[test]
    fn what_is_given_once_is_not_found() {
        for json in [
            r#"{"a":{"a":{"a":"a"}},"b":["a","a",{"a":1},{"a":1}]}"#,
            r#"{"a":1,"A":1,"a ":1,"\"a":1}"#,
            r#"["a","a"]"#,
            r#""a""#,
            "1",
            "{}",
            "",
            r#"{"a":"#,
            r#"{"a"#,
            "\"\\",
        ] {
            assert_eq!(given_twice(json), None, "{json}");
        }
    }
}
