use super::super::message::address;
use super::mail;

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap()
}

#[test]
fn the_bytes_of_a_mail_are_always_the_same() {
    let first = mail("ana@example.com").bytes(None).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(1100));
    assert_eq!(mail("ana@example.com").bytes(None).unwrap(), first);
    let mut other = mail("ana@example.com");
    other.id = "m2".to_owned();
    assert_ne!(other.bytes(None).unwrap(), first, "another boundary");
}

#[test]
fn a_mail_has_its_headers_and_both_parts() {
    let mail = text(mail("ana@example.com").bytes(None).unwrap());
    for line in [
        "From: Semel <news@example.org>",
        "To: ana@example.com",
        "Subject: =?utf-8?b?T2zDoSwgSm9zw6k=?=",
        "Message-ID: <m1.1@example.org>",
        "Date: Mon, 21 Sep 2026 14:13:20 +0000",
        "MIME-Version: 1.0",
        "List-Unsubscribe: <https://example.org/u?t=abc>",
        "List-Unsubscribe-Post: List-Unsubscribe=One-Click",
        "Content-Type: multipart/alternative;",
        "Content-Type: text/plain; charset=utf-8",
        "Content-Type: text/html; charset=utf-8",
    ] {
        assert!(mail.contains(&format!("{line}\r\n")), "{line}\n{mail}");
    }
}

#[test]
fn a_mail_with_one_part_has_no_boundary() {
    let mut only = mail("ana@example.com");
    only.rendered.html = None;
    only.unsubscribe = None;
    let bytes = text(only.bytes(None).unwrap());
    assert!(bytes.contains("text/plain") && !bytes.contains("boundary") && !bytes.contains("List-Unsubscribe"));
    only.rendered.html = only.rendered.text.take();
    assert!(text(only.bytes(None).unwrap()).contains("text/html"));
    only.rendered.html = None;
    assert!(only.bytes(None).is_err());
}

#[test]
fn no_value_can_add_a_header_or_a_lone_line_break() {
    let mut hostile = mail("ana@example.com");
    hostile.rendered.text = Some("a\r.\rb\n.\nc\r\n.\r\nd".to_owned());
    hostile.rendered.subject = "x\r\nBcc: all@example.org".to_owned();
    let bytes = text(hostile.bytes(None).unwrap());
    assert!(!bytes.contains("\nBcc"), "{bytes}");
    let rest = bytes.replace("\r\n", "");
    assert!(!rest.contains('\r') && !rest.contains('\n'));
    for url in ["https://a/\r\nBcc: x", "https://a/>, <mailto:x", "", "https://a/ä", &"x".repeat(1000)] {
        hostile.unsubscribe = Some(url.to_owned());
        assert!(hostile.bytes(None).is_err(), "{url:?}");
    }
    hostile.unsubscribe = None;
    hostile.message_id = "a>\r\nBcc: x".to_owned();
    assert!(hostile.bytes(None).is_err());
}

#[test]
fn a_long_unsubscribe_url_stays_on_one_line() {
    let mut long = mail("ana@example.com");
    let url = format!("https://example.org/{}", "u".repeat(600));
    long.unsubscribe = Some(url.clone());
    assert!(text(long.bytes(None).unwrap()).contains(&format!("List-Unsubscribe: <{url}>\r\n")));
}

#[test]
fn only_an_international_local_part_needs_smtputf8() {
    assert_eq!(address("ana@bücher.example").unwrap().to_string(), "ana@xn--bcher-kva.example");
    assert_eq!(address("josé@example.com").unwrap().to_string(), "josé@example.com");
    for wrong in ["", "a", "a@", "@b.c", "a b@c.d", "a@b.c\r\nRCPT TO:<x@y.z>", "a@b.c>", "a@b c.d"] {
        assert!(address(wrong).is_err(), "{wrong:?}");
    }
}
