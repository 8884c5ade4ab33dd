use base64::{Engine, engine::general_purpose::STANDARD};

use super::super::dkim::Dkim;
use super::mail;

/// Made for this test with `openssl genpkey -algorithm ed25519`.
const ED25519: &str = "-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2VwBCIEILli9M2Ae4BNdNOzTO9xmYFVWHaj1QSLWowZBytyl63P
-----END PRIVATE KEY-----";

#[test]
fn a_signature_is_always_the_same_and_covers_the_list_headers() {
    let dkim = Dkim::new("example.org", "s1", ED25519).unwrap();
    let first = mail("ana@example.com").bytes(Some(&dkim)).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(1100));
    assert_eq!(mail("ana@example.com").bytes(Some(&dkim)).unwrap(), first);
    let text = String::from_utf8(first).unwrap();
    assert!(text.starts_with("DKIM-Signature: v=1; a=ed25519-sha256; c=relaxed/relaxed; d=example.org;"), "{text}");
    assert!(text.contains("t=1790000000;") && text.contains("list-unsubscribe-post;"), "{text}");
    let signature = text.split_once(" b=").unwrap().1.split_once("\r\nFrom").unwrap().0.replace("\r\n  ", "");
    assert_eq!(STANDARD.decode(signature).unwrap().len(), 64);
}

#[test]
fn a_wrong_key_or_name_is_refused_and_not_repeated() {
    assert!(Dkim::new("a;b", "s", ED25519).is_err());
    assert!(Dkim::new("a.b", "", ED25519).is_err());
    let error = Dkim::new("a.b", "s", "-----BEGIN PRIVATE KEY-----\ngeheim\n-----END PRIVATE KEY-----").unwrap_err();
    assert!(!error.contains("geheim"), "{error}");
    let shown = format!("{:?}", Dkim::new("a.b", "s", ED25519).unwrap());
    assert_eq!(shown, "Dkim(s._domainkey.a.b)");
}

/// The expected signature was verified with dkimpy 1.1.8, which is another implementation.
#[test]
fn a_signature_is_one_that_others_verify() {
    let dkim = Dkim::new("example.org", "s1", ED25519).unwrap();
    let message =
        b"From:  Ana  <a@example.org>\r\nSubject: a\r\n\tfolded  line \r\nX-Other: x\r\n\r\nBody \t text  \r\n\r\n\r\n";
    let date = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_790_000_000);
    let signed = String::from_utf8(dkim.sign(message.to_vec(), date).unwrap()).unwrap();
    assert!(signed.ends_with(std::str::from_utf8(message).unwrap()));
    assert!(
        signed.contains(
            " b=6wOeh+/Umrac83erXLFiBtGKRJIpP3mkEKCm0KuD0K0iCh6DcdZIvMafYsMg2dThaQP4KKX2\r\n  in41U8o1ahtzCA=="
        ),
        "{signed}"
    );
}
