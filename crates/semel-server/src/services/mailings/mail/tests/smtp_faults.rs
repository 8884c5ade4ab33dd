//! Each failure of a server at each stage has one meaning. The mail is in doubt exactly when it may have arrived.

use semel_testkit::smtp::{Fault, SmtpSink, Stage};

use super::super::verdict::Sent;
use super::{mail, transport};

const STAGES: [Stage; 7] =
    [Stage::Connect, Stage::Hello, Stage::Mail, Stage::Recipient, Stage::Data, Stage::Body, Stage::Dot];

/// The name of the result after this fault, and whether the mail arrived.
async fn result(stage: Stage, fault: Fault) -> (&'static str, bool) {
    let sink = SmtpSink::start().await;
    sink.fail_at(stage, fault);
    let sent = transport(&format!("{}?timeout=300ms", sink.url())).send(&mail("ana@example.com")).await;
    (name(&sent), sink.count() > 0)
}

fn name(sent: &Sent) -> &'static str {
    match sent {
        Sent::Accepted { .. } => "accepted",
        Sent::Refused { .. } => "refused",
        Sent::NotNow { .. } => "not now",
        Sent::TooMany { .. } => "too many",
        Sent::Failing { .. } => "failing",
        Sent::RefusedOrUs { .. } => "refused, or we",
        Sent::Strange { .. } => "strange",
        Sent::ServerRefuses { .. } => "server refuses",
        Sent::Away { .. } => "away",
        Sent::Unknown { .. } => "unknown",
        Sent::InFlight { .. } => "in flight",
        Sent::KeyConflict { .. } => "key conflict",
    }
}

#[tokio::test]
async fn a_lost_connection_is_in_doubt_only_from_the_first_byte_of_the_message() {
    for stage in STAGES {
        // After the sender was accepted the attempt counts: one recipient must not keep the others waiting.
        let expected = match stage {
            Stage::Body | Stage::Dot => "unknown",
            Stage::Recipient | Stage::Data => "failing",
            _ => "away",
        };
        for fault in [Fault::Close, Fault::Stall] {
            let shown = format!("{stage:?} {fault:?}");
            let (sent, arrived) = result(stage, fault).await;
            assert_eq!(sent, expected, "{shown}");
            assert_eq!(arrived, stage == Stage::Dot, "{shown}");
        }
    }
}

#[tokio::test]
async fn each_reply_code_has_one_meaning_at_each_stage() {
    for (stage, reply, expected) in [
        (Stage::Connect, "421 4.7.0 too many connections", "away"),
        (Stage::Connect, "554 5.7.1 you are listed", "server refuses"),
        (Stage::Hello, "450 4.3.2 later", "away"),
        (Stage::Hello, "550 5.7.1 no", "server refuses"),
        (Stage::Mail, "421 4.3.2 shutting down", "away"),
        (Stage::Mail, "451 4.7.1 too fast", "too many"),
        (Stage::Mail, "530 5.7.0 authenticate first", "server refuses"),
        (Stage::Mail, "550 5.7.1 sender not allowed", "server refuses"),
        (Stage::Recipient, "421 4.3.2 shutting down", "failing"),
        (Stage::Recipient, "450 4.2.0 greylisted", "not now"),
        (Stage::Recipient, "550 5.1.1 no such user", "refused"),
        (Stage::Recipient, "554 5.7.1 Relay access denied", "refused, or we"),
        (Stage::Recipient, "530 5.7.0 authenticate first", "server refuses"),
        (Stage::Data, "451 4.3.0 later", "not now"),
        (Stage::Data, "554 5.5.1 no", "refused"),
        (Stage::Data, "250 2.0.0 odd", "failing"),
        (Stage::Dot, "421 4.3.2 shutting down", "not now"),
        (Stage::Dot, "452 4.3.1 disk full", "not now"),
        (Stage::Dot, "554 5.7.1 spam", "refused"),
        (Stage::Dot, "250 2.0.0 Ok: queued as 4ABC", "accepted"),
        (Stage::Dot, "hello", "unknown"),
    ] {
        let (sent, arrived) = result(stage, Fault::Reply(reply.to_owned())).await;
        assert_eq!(sent, expected, "{stage:?} {reply}");
        assert_eq!(arrived, sent == "accepted", "{stage:?} {reply}");
    }
}

#[tokio::test]
async fn a_reply_without_an_end_is_not_read_for_long() {
    let endless = "2".repeat(4 << 20);
    for stage in [Stage::Connect, Stage::Mail, Stage::Dot] {
        let begun = std::time::Instant::now();
        let sink = SmtpSink::start().await;
        sink.fail_at(stage, Fault::Reply(endless.clone()));
        let sent = transport(&format!("{}?timeout=60s", sink.url())).send(&mail("ana@example.com")).await;
        assert!(matches!(name(&sent), "away" | "unknown"), "{stage:?} {sent:?}");
        assert!(begun.elapsed().as_secs() < 30, "{stage:?}: it ended by its length, not by its time limit");
    }
}

#[tokio::test]
async fn the_queue_id_of_the_server_is_the_external_id() {
    let sink = SmtpSink::start().await;
    sink.fail_at(Stage::Dot, Fault::Reply("250 2.0.0 Ok: queued as 4ABC".to_owned()));
    let sent = transport(&sink.url()).send(&mail("ana@example.com")).await;
    assert_eq!(sent, Sent::Accepted { external_id: Some("4ABC".to_owned()) });
}

#[tokio::test]
async fn a_server_that_is_not_there_is_away() {
    let sink = SmtpSink::start().await;
    let url = sink.url();
    drop(sink);
    tokio::task::yield_now().await;
    assert_eq!(name(&transport(&url).send(&mail("ana@example.com")).await), "away");
    assert_eq!(name(&transport("smtp://no.invalid").send(&mail("ana@example.com")).await), "away");
}
