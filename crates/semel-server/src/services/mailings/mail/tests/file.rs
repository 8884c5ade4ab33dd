use std::{fs, time::Duration};

use super::super::verdict::{Sent, Settle};
use super::{mail, transport};

#[tokio::test]
async fn a_mail_is_written_once_whatever_happened_before() {
    let dir = tempfile::tempdir().unwrap();
    let transport = transport(&format!("file:{}", dir.path().display()));
    let mail = mail("ana@example.com");
    // An attempt that died while it wrote.
    fs::write(dir.path().join(format!(".{}.1-0.tmp", mail.id)), b"half").unwrap();
    assert_eq!(transport.settle(&mail.id, Duration::ZERO).await, Settle::Resend);
    for _ in 0..2 {
        assert_eq!(transport.send(&mail).await, Sent::Accepted { external_id: None });
    }
    assert_eq!(transport.settle(&mail.id, Duration::MAX).await, Settle::Sent { external_id: None });
    assert_eq!(fs::read(dir.path().join(format!("{}.eml", mail.id))).unwrap(), mail.bytes(None).unwrap());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3, "the mail, the old leftover and the directory's id");
}

#[tokio::test]
async fn an_id_that_is_no_file_name_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let transport = transport(&format!("file:{}", dir.path().display()));
    for id in ["", "..", "../x", "a/b", "a\0", ".hidden", &"x".repeat(201)] {
        let mut mail = mail("ana@example.com");
        mail.id = id.to_owned();
        assert!(matches!(transport.send(&mail).await, Sent::Refused { .. }), "{id:?}");
    }
}

#[tokio::test]
async fn a_directory_that_is_gone_is_away() {
    let dir = tempfile::tempdir().unwrap();
    let transport = transport(&format!("file:{}", dir.path().display()));
    drop(dir);
    let mail = mail("ana@example.com");
    assert!(matches!(transport.send(&mail).await, Sent::Away { .. }));
    assert_eq!(transport.settle(&mail.id, Duration::ZERO).await, Settle::Resend);
}
