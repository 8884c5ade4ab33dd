use super::*;

fn normal(text: &str) -> String {
    Email::parse(text).unwrap_or_else(|bad| panic!("{text:?}: {bad}")).normal
}

fn code(text: &str) -> &'static str {
    Email::parse(text).map(|email| email.normal).expect_err(text).code()
}

#[test]
fn the_normal_form_is_lower_case_and_the_original_keeps_its_case() {
    let email = Email::parse(" Ann.Smith@Example.COM\r\n").unwrap();
    assert_eq!((email.normal.as_str(), email.original.as_str()), ("ann.smith@example.com", "Ann.Smith@Example.COM"));
}

#[test]
fn invisible_characters_are_dropped_around_and_inside() {
    for text in ["\u{feff}a@x.com", "\u{a0}a@x.com\u{a0}", "a\u{200b}@x\u{feff}.com\u{200d}", "\u{202a}a@x.com\u{202c}"]
    {
        let email = Email::parse(text).unwrap();
        assert_eq!((email.normal.as_str(), email.original.as_str()), ("a@x.com", "a@x.com"), "{text:?}");
    }
    assert_eq!(code("a\u{202e}@x.com"), "control-character");
}

#[test]
fn a_space_inside_is_refused_also_a_no_break_one() {
    for text in ["a b@x.com", "a\u{a0}b@x.com", "a@x .com", "a @x.com", "a\u{2028}@x.com"] {
        assert_eq!(code(text), "space-inside", "{text:?}");
    }
}

#[test]
fn the_limits_of_length_are_those_of_smtp_and_dns() {
    assert_eq!(normal(&format!("{}@x.com", "a".repeat(64))).len(), 70);
    assert_eq!(code(&format!("{}@x.com", "a".repeat(65))), "local-part-too-long");
    assert_eq!(normal(&format!("{}@x.com", "ü".repeat(32))).len(), 70);
    assert_eq!(code(&format!("{}@x.com", "ü".repeat(33))), "local-part-too-long");
    assert_eq!(normal(&format!("a@{}.com", "b".repeat(63))).len(), 69);
    assert_eq!(code(&format!("a@{}.com", "b".repeat(64))), "domain-label-too-long");
    let label = "b".repeat(61);
    let long = |last: usize| format!("{}@{label}.{label}.{}.com", "a".repeat(64), "c".repeat(last));
    assert_eq!(normal(&long(61)).len(), 254);
    assert_eq!(code(&long(62)), "address-too-long");
}

#[test]
fn dots_must_separate_something() {
    for text in ["a..b@x.com", ".a@x.com", "a.@x.com", "a@x..com", "a@.x.com", "a@x.com.", "a@x.", "a@ü..de"] {
        assert_eq!(code(text), "misplaced-dot", "{text}");
    }
}

#[test]
fn other_forms_of_the_standards_are_refused_by_name() {
    for (text, expected) in [
        ("", "empty-address"),
        (" \u{feff}\n", "empty-address"),
        ("\"a b\"@x.com", "quoted-local-part"),
        ("a(work)@x.com", "comment-not-supported"),
        ("a@x.com (Ann)", "comment-not-supported"),
        ("Ann <a@x.com>", "display-name-not-supported"),
        ("\"Smith, Ann\" <a@x.com>", "display-name-not-supported"),
        ("<a@x.com>", "display-name-not-supported"),
        ("mailto:a@x.com", "mailto-not-supported"),
        ("MailTo:a@x.com", "mailto-not-supported"),
        ("a@[192.0.2.1]", "ip-address"),
        ("a@[IPv6:::1]", "ip-address"),
        ("a@192.0.2.1", "ip-address"),
        ("a@b", "domain-without-dot"),
        ("a@localhost", "domain-without-dot"),
        ("a@b@c", "several-at-signs"),
        ("a@@b.c", "several-at-signs"),
        ("a@b.c;d@e.f", "several-addresses"),
        ("a@b.c, d@e.f", "several-addresses"),
        ("a@b.c d@e.f", "several-addresses"),
        ("ann", "no-at-sign"),
        ("@x.com", "empty-local-part"),
        ("a@", "empty-domain"),
        ("a,b@x.com", "bad-local-character"),
        ("a:b@x.com", "bad-local-character"),
        ("a@x.com;", "bad-domain"),
        ("a@-x.com", "bad-domain"),
        ("a@x-.com", "bad-domain"),
        ("a@x_y.com", "bad-domain"),
        ("a@xn--a.com", "bad-domain"),
        ("a@x.com/path", "bad-domain"),
    ] {
        assert_eq!(code(text), expected, "{text:?}");
    }
}

#[test]
fn control_characters_cannot_enter_a_header() {
    for text in ["a@x.com\r\nBcc: b@y.com", "a\n@x.com", "a\0@x.com", "a@x.com\0", "a\u{7f}@x.com", "a\u{85}@x.com"] {
        assert_eq!(code(text), "control-character", "{text:?}");
    }
}

#[test]
fn local_parts_in_utf_8_are_normalised_to_nfc() {
    assert_eq!(normal("Ü@x.de"), "ü@x.de");
    assert_eq!(normal("u\u{308}@x.de"), "ü@x.de");
    assert_eq!(Email::parse("U\u{308}@x.de").unwrap().original, "Ü@x.de");
}

#[test]
fn domains_become_punycode() {
    assert_eq!(normal("a@Bücher.example"), "a@xn--bcher-kva.example");
    assert_eq!(normal("a@XN--bcher-KVA.example"), "a@xn--bcher-kva.example");
    assert_eq!(normal("a@ｘ。com"), "a@x.com");
}

#[test]
fn look_alikes_stay_distinct() {
    assert_ne!(normal("\u{430}@x.com"), normal("a@x.com"));
    assert_ne!(normal("a@\u{445}.com"), normal("a@x.com"));
}

#[test]
fn tags_and_signs_are_part_of_the_address() {
    assert_ne!(normal("a+x@g.com"), normal("a@g.com"));
    assert_ne!(normal("a.b@g.com"), normal("ab@g.com"));
    for text in ["+a@x.com", "-a@x.com", "=a@x.com", "o'neil@x-y.org", "1@2.3x", "a@r3---sn.x.com"] {
        assert_eq!(normal(text), text);
    }
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(2_000))]

    #[test]
    fn the_normal_form_is_its_own_normal_form(local in "\\PC{1,12}", domain in "[\\PC]{1,8}\\.(com|de|рф|İx)") {
        if let Ok(email) = Email::parse(&format!("{local}@{domain}")) {
            assert_eq!(normal(&email.normal), email.normal);
            assert_eq!(normal(&email.original), email.normal);
        }
    }

    #[test]
    fn any_text_has_an_answer(text in proptest::prelude::any::<String>()) {
        if let Ok(email) = Email::parse(&text) {
            assert!(email.normal.len() <= MAX_TOTAL && !email.normal.contains(char::is_control));
        }
    }
}
