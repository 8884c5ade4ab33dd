//! The laws of the canonical form.

mod properties;

use super::*;

fn canonicalize(bytes: &[u8]) -> Result<Canonical, JsonError> {
    canonicalize_without(bytes, &[])
}

fn canonical(text: &str) -> String {
    String::from_utf8(canonicalize(text.as_bytes()).unwrap().bytes).unwrap()
}

fn without(text: &str, pointers: &[&str]) -> String {
    let canonical = canonicalize_without(text.as_bytes(), pointers).unwrap();
    String::from_utf8(canonical.bytes).unwrap()
}

fn literals(text: &str) -> Vec<(usize, String)> {
    let literals = canonicalize(text.as_bytes()).unwrap().literals;
    literals.into_iter().map(|literal| (literal.at, literal.text)).collect()
}

fn refusal(text: impl AsRef<[u8]>) -> JsonError {
    canonicalize(text.as_ref()).unwrap_err()
}

#[test]
fn the_example_of_rfc_8785_comes_out_as_printed_there() {
    let text = r#"{
      "numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
      "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",
      "literals": [null, true, false]
    }"#;
    let expected = concat!(
        r#"{"literals":[null,true,false],"#,
        r#""numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],"#,
        r#""string":"€$\u000f\nA'B\"\\\\\"/"}"#,
    );
    assert_eq!(canonical(text), expected);
}

#[test]
fn members_are_sorted_by_utf_16_code_units() {
    // The sorting example of RFC 8785. By UTF-8 bytes the emoji would come last.
    let text = r#"{
      "\u20ac": "Euro Sign",
      "\r": "Carriage Return",
      "\ufb33": "Hebrew Letter Dalet With Dagesh",
      "1": "One",
      "\ud83d\ude00": "Emoji: Grinning Face",
      "\u0080": "Control",
      "\u00f6": "Latin Small Letter O With Diaeresis"
    }"#;
    let expected = concat!(
        "{\"\\r\":\"Carriage Return\",\"1\":\"One\",\"\u{80}\":\"Control\",",
        "\"ö\":\"Latin Small Letter O With Diaeresis\",\"€\":\"Euro Sign\",",
        "\"😀\":\"Emoji: Grinning Face\",\"\u{fb33}\":\"Hebrew Letter Dalet With Dagesh\"}",
    );
    assert_eq!(canonical(text), expected);
}

#[test]
fn members_are_sorted_at_every_level_and_a_prefix_comes_first() {
    let text = r#"{"b":[{"z":1,"a":2}],"ab":{},"a":{"y":[],"":null}}"#;
    assert_eq!(canonical(text), r#"{"a":{"":null,"y":[]},"ab":{},"b":[{"a":2,"z":1}]}"#);
}

/// Appendix B of RFC 8785: a double's bits, and how it is printed.
const NUMBERS: &[(u64, &str)] = &[
    (0x0000000000000000, "0"),
    (0x8000000000000000, "0"),
    (0x0000000000000001, "5e-324"),
    (0x8000000000000001, "-5e-324"),
    (0x7fefffffffffffff, "1.7976931348623157e+308"),
    (0xffefffffffffffff, "-1.7976931348623157e+308"),
    (0x4340000000000000, "9007199254740992"),
    (0xc340000000000000, "-9007199254740992"),
    (0x4430000000000000, "295147905179352830000"),
    (0x44b52d02c7e14af5, "9.999999999999997e+22"),
    (0x44b52d02c7e14af6, "1e+23"),
    (0x44b52d02c7e14af7, "1.0000000000000001e+23"),
    (0x444b1ae4d6e2ef4e, "999999999999999700000"),
    (0x444b1ae4d6e2ef4f, "999999999999999900000"),
    (0x444b1ae4d6e2ef50, "1e+21"),
    (0x3eb0c6f7a0b5ed8c, "9.999999999999997e-7"),
    (0x3eb0c6f7a0b5ed8d, "0.000001"),
    (0x41b3de4355555553, "333333333.3333332"),
    (0x41b3de4355555554, "333333333.33333325"),
    (0x41b3de4355555555, "333333333.3333333"),
    (0x41b3de4355555556, "333333333.3333334"),
    (0x41b3de4355555557, "333333333.33333343"),
    (0xbecbf647612f3696, "-0.0000033333333333333333"),
    (0x43143ff3c1cb0959, "1424953923781206.2"),
];

#[test]
fn numbers_are_printed_as_in_appendix_b_of_rfc_8785() {
    for &(bits, expected) in NUMBERS {
        let double = f64::from_bits(bits);
        assert_eq!(canonical(&format!("{double:e}")), expected);
        assert_eq!(canonical(expected), expected);
        assert_eq!(literals(expected), [], "{expected} is canonical already");
    }
}

#[test]
fn numbers_that_are_merged_leave_their_literals_with_their_place() {
    assert_eq!(canonical("[1,1.0,1e0]"), "[1,1,1]");
    assert_eq!(literals("[1,1.0,1e0]"), [(3, "1.0".into()), (5, "1e0".into())]);
    assert_eq!(literals("[-0,-0.0,1E2]"), [(1, "-0".into()), (3, "-0.0".into()), (5, "1E2".into())]);
    // A value between two doubles and one that underflows keep their literals too.
    assert_eq!(literals("0.1000000000000000055"), [(0, "0.1000000000000000055".into())]);
    assert_eq!(literals("1e-400"), [(0, "1e-400".into())]);
}

#[test]
fn literals_stay_with_their_member_in_any_order() {
    let sorted = canonicalize(br#"{"a":1.0,"b":1}"#).unwrap();
    assert_eq!(canonicalize(br#"{"b":1, "a":1.0}"#).unwrap(), sorted);
    let moved = canonicalize(br#"{"a":1,"b":1.0}"#).unwrap();
    assert_eq!(moved.bytes, sorted.bytes);
    assert_ne!(moved.literals, sorted.literals);
}

#[test]
fn strings_are_escaped_in_one_way_and_never_normalised() {
    assert_eq!(canonical(r#""\u0000\b\t\n\u000B\f\r\u001F\"\\\/""#), r#""\u0000\b\t\n\u000b\f\r\u001f\"\\/""#);
    // Neither DEL nor the line separators of JavaScript are escaped.
    assert_eq!(canonical(r#""\u007f\u2028\uFFFF""#), "\"\u{7f}\u{2028}\u{ffff}\"");
    assert_eq!(canonical(r#""\uD83D\uDE00""#), "\"😀\"");
    assert_ne!(canonical(r#""\u00e9""#), canonical(r#""e\u0301""#));
}

#[test]
fn white_space_around_anything_is_dropped() {
    assert_eq!(canonical(" \t\r\n{ \"a\" : [ 1 , { } , [ ] ] } \n"), r#"{"a":[1,{},[]]}"#);
}

#[test]
fn duplicate_members_are_refused_at_the_second_name() {
    assert_eq!(refusal(r#"{"a":1,"b":2,"a":3}"#), JsonError::DuplicateMember { at: 13 });
    // Equal once unescaped, and equal deep inside.
    assert_eq!(refusal(r#"{"a":1,"\u0061":1}"#), JsonError::DuplicateMember { at: 7 });
    assert_eq!(refusal(r#"[{"x":{"":0,"":0}}]"#), JsonError::DuplicateMember { at: 12 });
    assert_eq!(refusal(r#"{"b":0,"a":0,"b":0,"a":0}"#), JsonError::DuplicateMember { at: 13 });
}

#[test]
fn integers_between_two_doubles_are_refused() {
    for inexact in ["9007199254740993", "-9007199254740993", "18446744073709551615"] {
        assert_eq!(refusal(inexact), JsonError::InexactInteger { at: 0 }, "{inexact}");
    }
    let googol_and_one = format!("[1,1{}1]", "0".repeat(99));
    assert_eq!(refusal(googol_and_one), JsonError::InexactInteger { at: 3 });
    // 2^53 + 2, 2^63 and 2^64 are doubles, though ECMAScript prints the last two rounded.
    assert_eq!(literals("9007199254740994"), []);
    assert_eq!(canonical("9223372036854775808"), "9223372036854776000");
    assert_eq!(literals("18446744073709551616"), [(0, "18446744073709551616".into())]);
}

#[test]
fn numbers_beyond_all_doubles_are_refused() {
    for huge in ["1e400", "-1e400", "1e99999999999999999999", &"9".repeat(400)] {
        assert_eq!(refusal(huge), JsonError::NumberOverflow { at: 0 });
    }
    assert_eq!(canonical("0e99999999999999999999"), "0");
}

#[test]
fn nesting_is_read_to_128_levels_and_refused_beyond_on_a_quarter_of_a_stack() {
    let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    let objects = format!("{}1{}", r#"{"a":"#.repeat(128), "}".repeat(128));
    let check = move || {
        assert_eq!(canonical(&nested(128)), nested(128));
        assert_eq!(canonical(&objects), objects);
        assert_eq!(refusal(nested(129)), JsonError::TooDeep { at: 128 });
        assert_eq!(refusal("[".repeat(1_000_000)), JsonError::TooDeep { at: 128 });
        assert_eq!(refusal(r#"{"a":"#.repeat(1_000_000)), JsonError::TooDeep { at: 640 });
        // Siblings are not nesting.
        let siblings = format!("[{}[]]", "[],".repeat(500));
        assert_eq!(canonical(&siblings), siblings);
    };
    std::thread::Builder::new().stack_size(512 << 10).spawn(check).unwrap().join().unwrap();
}

#[test]
fn bytes_that_are_no_json_text_are_refused_where_they_go_wrong() {
    assert_eq!(refusal(b"[\"\xff\"]"), JsonError::InvalidUtf8 { at: 2 });
    assert_eq!(refusal(b"\"\xed\xa0\x80\""), JsonError::InvalidUtf8 { at: 1 });
    assert_eq!(refusal(b"\xef\xbb\xbf{}"), JsonError::ByteOrderMark);
    for text in ["{} x", "1 2", "[],", "nullx"] {
        assert!(matches!(refusal(text), JsonError::TrailingData { .. }), "{text}");
    }
    assert_eq!(refusal("01"), JsonError::TrailingData { at: 1 });
}

#[test]
fn lone_surrogates_are_refused_at_their_escape() {
    for text in [r#"["\ud800"]"#, r#"["\udc00"]"#, r#"["\ud800\u0041"]"#, r#"["\ud800\ud800"]"#, r#"["\udc00\ud800"]"#]
    {
        assert_eq!(refusal(text), JsonError::LoneSurrogate { at: 2 }, "{text}");
    }
    assert!(matches!(refusal(r#"["\ud800\n"]"#), JsonError::LoneSurrogate { at: 2 }));
    assert!(matches!(refusal(r#"["\ud800\u00"]"#), JsonError::Syntax { at: 12, .. }));
}

#[test]
fn syntax_errors_name_the_byte_and_the_expected_token() {
    // `!` marks the byte that is reported.
    let containers = ["!", " !", "[!", "[1,!]", "[1 !2]", "{!", "{!a:1}", "{\"a\"!}", "{\"a\":!}"];
    let words = ["!nul", "!True", "!NaN", "!'a'", "!// c", "!\u{a0}1", "{\"a\":1,!}"];
    let numbers = ["!+1", "!.5", "1.!", "1.!e1", "1e!", "1e+!", "-!", "-!a", "[1.!]"];
    let strings = ["\"a!", "\"!\n\"", "\"\\!x\"", "\"\\u!+123\"", "\"\\u12!\"", "\"é\\!"];
    for marked in [&containers[..], &words, &numbers, &strings].concat() {
        let at = marked.find('!').unwrap();
        let text = &marked.replacen('!', "", 1);
        let error = refusal(text);
        assert!(matches!(error, JsonError::Syntax { .. }), "{text}: {error}");
        assert_eq!(error.offset(), Some(at), "{text}: {error}");
    }
    assert_eq!(refusal("[1,]").to_string(), "expected a value at byte 3");
}

#[test]
fn pointers_exclude_members_and_elements() {
    let text = r#"{"id":"evt","pending_webhooks":2,"a":{"b":1,"c":[10,11,12]}}"#;
    assert_eq!(without(text, &["/pending_webhooks"]), r#"{"a":{"b":1,"c":[10,11,12]},"id":"evt"}"#);
    assert_eq!(without(text, &["/a/b", "/a/c/0", "/a/c/1", "/id"]), r#"{"a":{"c":[12]},"pending_webhooks":2}"#);
    assert_eq!(without(text, &["/a", "/a/b", "/a"]), r#"{"id":"evt","pending_webhooks":2}"#);
    assert_eq!(without(r#"[[1],[2,3]]"#, &["/1/0", "/0"]), "[[3]]");
}

#[test]
fn pointers_that_lead_nowhere_exclude_nothing() {
    let text = r#"{"a":[1],"b":"x"}"#;
    assert_eq!(without(text, &["/c", "/a/1", "/a/01", "/a/+0", "/a/-", "/b/x", "/a/0/x", "/"]), text);
}

#[test]
fn pointers_unescape_tildes_and_slashes_once() {
    let text = r#"{"":1,"/":2,"a/b":3,"~":4,"~1":5}"#;
    assert_eq!(without(text, &["/", "/~1", "/a~1b", "/~0"]), r#"{"~1":5}"#);
    assert_eq!(without(text, &["/~01"]), r#"{"":1,"/":2,"a/b":3,"~":4}"#);
}

#[test]
fn bad_pointers_are_refused_before_the_payload_is_read() {
    for pointer in ["", "a", "a/b", "#/a", "/~", "/a~2", "/a/~~0"] {
        let expected = JsonError::InvalidPointer { pointer: pointer.into() };
        assert_eq!(canonicalize_without(b"not json", &["/a", pointer]).unwrap_err(), expected);
    }
}

#[test]
fn an_excluded_value_may_hold_any_number_but_must_be_well_formed() {
    assert_eq!(without(r#"{"at":1763244960123456789,"x":1e999,"y":1}"#, &["/at", "/x"]), r#"{"y":1}"#);
    let broken = canonicalize_without(br#"{"at":{"a":1,"a":2}}"#, &["/at"]).unwrap_err();
    assert_eq!(broken, JsonError::DuplicateMember { at: 13 });
}
