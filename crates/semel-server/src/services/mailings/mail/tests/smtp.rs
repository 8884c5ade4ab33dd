use std::{sync::Arc, time::Duration};

use semel_testkit::smtp::{Fault, SmtpSink, Stage};

use super::super::verdict::{Sent, Settle};
use super::{mail, transport};
use crate::http::held::tests::lost_after;

#[tokio::test]
async fn a_mail_arrives_byte_by_byte() {
    let sink = SmtpSink::start().await;
    let mail = mail("ana@example.com");
    assert_eq!(transport(&sink.url()).send(&mail).await, Sent::Accepted { external_id: None });
    let arrived = &sink.arrived()[0];
    assert_eq!(arrived.bytes, mail.bytes(None).unwrap());
    assert_eq!((arrived.from.as_str(), arrived.to[0].as_str()), ("news@example.org", "ana@example.com"));
    assert_eq!(arrived.message_id, "m1.1@example.org");
}

#[tokio::test]
async fn connections_are_reused_and_limited() {
    let sink = SmtpSink::start().await;
    let transport = Arc::new(transport(&sink.url()));
    let sends = (0..200).map(|n| {
        let transport = Arc::clone(&transport);
        tokio::spawn(async move { transport.send(&mail(&format!("r{n}@example.com"))).await })
    });
    for send in sends.collect::<Vec<_>>() {
        assert_eq!(send.await.unwrap(), Sent::Accepted { external_id: None });
    }
    assert!(sink.connections() <= 16, "{}", sink.connections());
    assert!(sink.count_by_recipient().values().all(|&count| count == 1));
    assert_eq!(sink.count(), 200);
}

#[tokio::test]
async fn a_refused_recipient_does_not_cost_the_connection() {
    let sink = SmtpSink::start().await;
    let transport = transport(&sink.url());
    sink.refuse_recipients("gone", "550 5.1.1 no such user");
    assert!(matches!(transport.send(&mail("gone@example.com")).await, Sent::Refused { why } if why.contains("5.1.1")));
    assert_eq!(transport.send(&mail("ana@example.com")).await, Sent::Accepted { external_id: None });
    assert_eq!(sink.connections(), 1);
}

#[tokio::test]
async fn a_connection_that_cannot_be_reset_is_not_used_again() {
    for fault in [Fault::Close, Fault::Stall, Fault::Reply("502 5.5.1 no".to_owned())] {
        let sink = SmtpSink::start().await;
        let transport = transport(&format!("{}?timeout=300ms", sink.url()));
        sink.set_faults(move |stage, _| match stage {
            Stage::Recipient => Fault::Reply("550 5.1.1 no such user".to_owned()),
            Stage::Reset => fault.clone(),
            _ => Fault::None,
        });
        assert!(matches!(transport.send(&mail("gone@example.com")).await, Sent::Refused { .. }));
        sink.clear_faults();
        assert_eq!(transport.send(&mail("ana@example.com")).await, Sent::Accepted { external_id: None });
        assert_eq!((sink.connections(), sink.count()), (2, 1));
    }
}

#[tokio::test]
async fn an_idle_connection_that_the_server_closed_is_replaced() {
    let sink = SmtpSink::start().await;
    let transport = transport(&sink.url());
    for fault in [Fault::Close, Fault::ReplyAndClose("421 4.4.2 idle for too long".to_owned())] {
        assert_eq!(transport.send(&mail("ana@example.com")).await, Sent::Accepted { external_id: None });
        // The first MAIL of the next mail fails, the one on the new connection does not.
        let left = std::sync::atomic::AtomicBool::new(true);
        sink.set_faults(move |stage, _| {
            let fails = stage == Stage::Mail && left.swap(false, std::sync::atomic::Ordering::Relaxed);
            if fails { fault.clone() } else { Fault::None }
        });
        assert_eq!(transport.send(&mail("ana@example.com")).await, Sent::Accepted { external_id: None });
        sink.clear_faults();
    }
    assert_eq!(sink.count(), 4);
}

#[tokio::test]
async fn an_international_local_part_needs_smtputf8() {
    let mail = mail("josé@example.com");
    let with = SmtpSink::start().await;
    assert_eq!(transport(&with.url()).send(&mail).await, Sent::Accepted { external_id: None });
    assert_eq!(with.arrived()[0].to, ["josé@example.com"]);
    let without = SmtpSink::start_with(&["8BITMIME"]).await;
    assert!(matches!(transport(&without.url()).send(&mail).await, Sent::Refused { why } if why.contains("SMTPUTF8")));
    assert_eq!(without.count(), 0);
}

#[tokio::test]
async fn credentials_are_sent_and_their_refusal_pauses_without_showing_them() {
    let sink = SmtpSink::start().await;
    let url = sink.url().replace("smtp://", "smtp://ana:geheim@");
    assert_eq!(transport(&url).send(&mail("ana@example.com")).await, Sent::Accepted { external_id: None });
    sink.fail_at(Stage::Auth, Fault::Reply("535 5.7.8 wrong password geheim".to_owned()));
    let Sent::ServerRefuses { why } = transport(&url).send(&mail("ana@example.com")).await else { panic!() };
    assert!(why.contains("535") && !why.contains("geheim"), "{why}");
    let none = SmtpSink::start_with(&["8BITMIME"]).await;
    let url = none.url().replace("smtp://", "smtp://ana:geheim@");
    assert!(matches!(transport(&url).send(&mail("ana@example.com")).await, Sent::ServerRefuses { .. }));
}

#[tokio::test]
async fn required_tls_is_never_skipped() {
    let sink = SmtpSink::start().await;
    let transport = transport(&format!("{}?tls=required", sink.url()));
    let sent = transport.send(&mail("ana@example.com")).await;
    assert!(matches!(sent, Sent::ServerRefuses { why } if why.contains("STARTTLS")));
    assert_eq!(sink.count(), 0);
}

#[tokio::test]
async fn a_lost_smtp_attempt_cannot_be_settled() {
    let sink = SmtpSink::start().await;
    let settled = transport(&sink.url()).settle(&mail("ana@example.com").id, Duration::ZERO).await;
    assert_eq!(settled, Settle::Unknown);
}

#[tokio::test]
async fn a_mail_whose_lease_is_lost_before_its_message_is_not_sent() {
    let sink = SmtpSink::start().await;
    let transport = transport(&sink.url());
    let held = lost_after(0);
    assert!(matches!(transport.send_while(&mail("ana@example.com"), &held).await, Sent::Away { .. }));
    assert_eq!((sink.count(), held.has_stopped()), (0, true));
    // The server was left waiting for the message: its connection is not used again.
    assert_eq!(transport.send(&mail("ana@example.com")).await, Sent::Accepted { external_id: None });
    assert_eq!((sink.count(), sink.connections()), (1, 2));
}
