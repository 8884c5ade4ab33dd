//! Laws that hold for any payload.

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::{Map, Value, json};

use super::super::JsonError;
use super::{canonical, canonicalize};

/// Any JSON value whose numbers survive serde_json.
fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        any::<i32>().prop_map(|n| json!(f64::from(n) / 64.0)),
        any::<String>().prop_map(Value::from),
        "[\\x00-\\x1f\"\\\\/aé€😀\u{fb33}]{0,4}".prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 60, 6, |inner| {
        let name = prop_oneof!["[ab1]{0,2}", "[\u{80}é€😀\u{fb33}\u{ffff}]{1,2}", any::<String>()];
        prop_oneof![
            vec(inner.clone(), 0..6).prop_map(Value::from),
            btree_map(name, inner, 0..6).prop_map(|map| Value::Object(Map::from_iter(map))),
        ]
    })
}

/// Prints a value with member order, white space and escapes that `dice` decide.
fn print(value: &Value, dice: &mut impl Iterator<Item = u8>, out: &mut String) {
    out.push_str(["", " ", "\n\t", "\r "][usize::from(dice.next().unwrap() % 4)]);
    match value {
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                out.push(if index == 0 { '[' } else { ',' });
                print(item, dice, out);
            }
            out.push_str(if items.is_empty() { "[]" } else { "]" });
        }
        Value::Object(members) => {
            let mut members: Vec<_> = members.iter().map(|member| (dice.next(), member)).collect();
            members.sort_by_key(|(roll, _)| *roll);
            for (index, (_, (name, member))) in members.iter().enumerate() {
                out.push(if index == 0 { '{' } else { ',' });
                print(&Value::from(name.as_str()), dice, out);
                out.push(':');
                print(member, dice, out);
            }
            out.push_str(if members.is_empty() { "{}" } else { "}" });
        }
        Value::String(text) if dice.next().unwrap() > 127 => {
            out.push('"');
            text.encode_utf16().for_each(|unit| out.push_str(&format!("\\u{unit:04X}")));
            out.push('"');
        }
        scalar => out.push_str(&scalar.to_string()),
    }
    out.push_str([" ", "", "\n"][usize::from(dice.next().unwrap() % 3)]);
}

proptest! {
    #[test]
    fn order_white_space_and_escapes_do_not_matter(
        value in value(),
        dice in vec(any::<u8>(), 1..200),
    ) {
        let mut printed = String::new();
        print(&value, &mut dice.into_iter().cycle(), &mut printed);
        let plain = canonicalize(value.to_string().as_bytes()).unwrap();
        prop_assert_eq!(&canonicalize(printed.as_bytes()).unwrap(), &plain);
        // Nothing was lost, according to another reader.
        let read_back: Value = serde_json::from_slice(&plain.bytes).unwrap();
        prop_assert_eq!(as_doubles(read_back), as_doubles(value));
    }

    #[test]
    fn canonical_text_is_its_own_canonical_form(value in value()) {
        let once = canonicalize(value.to_string().as_bytes()).unwrap();
        let twice = canonicalize(&once.bytes).unwrap();
        prop_assert_eq!(&twice.bytes, &once.bytes);
        prop_assert!(twice.literals.is_empty());
    }

    #[test]
    fn every_finite_double_survives(bits in any::<u64>()) {
        let double = f64::from_bits(bits);
        prop_assume!(double.is_finite());
        let once = canonical(&format!("{double:e}"));
        prop_assert_eq!(once.parse::<f64>().unwrap(), double);
        prop_assert_eq!(canonical(&once), once);
    }

    #[test]
    fn integers_are_exact_or_refused(number in any::<i128>(), shift in 0..127_u32) {
        let number: i128 = number >> shift;
        let text = number.to_string();
        match canonicalize(text.as_bytes()) {
            Ok(canonical) if canonical.literals.is_empty() => {
                prop_assert_eq!(canonical.bytes, text.into_bytes());
            }
            Ok(_) => prop_assert_eq!(number as f64 as i128, number),
            Err(error) => {
                prop_assert_eq!(error, JsonError::InexactInteger { at: 0 });
                prop_assert!(number.unsigned_abs() > 1 << 53);
                prop_assert_ne!(number as f64 as i128, number);
            }
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in vec(any::<u8>(), 0..200)) {
        let _ = canonicalize(&bytes);
    }

    /// Nearly valid JSON reaches cases that random bytes do not.
    #[test]
    fn nearly_json_is_taken_or_refused_as_by_another_reader(
        value in value(),
        dice in vec(any::<u8>(), 1..50),
        edits in vec((any::<Index>(), 0..2_usize, "[\\[\\]{},:\"\\\\u0dD8.eE+\n-]{0,2}"), 1..4),
    ) {
        let mut text = String::new();
        print(&value, &mut dice.into_iter().cycle(), &mut text);
        for (place, removed, inserted) in edits {
            let place = text.floor_char_boundary(place.index(text.len() + 1));
            let (before, after) = text.split_at(place);
            let after = after.chars().skip(removed);
            text = before.chars().chain(inserted.chars()).chain(after).collect();
        }
        let theirs = serde_json::from_str::<Value>(&text);
        match canonicalize(text.as_bytes()) {
            Ok(_) => prop_assert!(theirs.is_ok(), "only we take {text}"),
            Err(error) => {
                prop_assert!(error.offset().is_some_and(|at| at <= text.len()));
                let stricter = matches!(
                    error,
                    JsonError::DuplicateMember { .. } | JsonError::InexactInteger { .. }
                );
                prop_assert!(theirs.is_err() || stricter, "only we refuse {text}: {error}");
            }
        }
    }
}

/// `1.0` and `1` are one number here: the canonical form has one spelling for both.
fn as_doubles(value: Value) -> Value {
    match value {
        Value::Number(number) => json!(number.as_f64()),
        Value::Array(items) => items.into_iter().map(as_doubles).collect(),
        Value::Object(members) => members.into_iter().map(|(name, value)| (name, as_doubles(value))).collect(),
        other => other,
    }
}
