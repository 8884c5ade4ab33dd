//! Sending by SMTP, against a server with faults: what each answer means for an entry, and for the mailing.

use std::{thread, time::Duration};

use rustix::process::Signal;
use semel_testkit::smtp::{Fault, SmtpSink, Stage};
use serde_json::Value;

use crate::{
    fleet::{ALL, Fleet, ask, on_every_fleet},
    mailings_kill::{LIMIT, SHORT, check_counts, count, is_over, list, shown, upload},
    support::{Server, eventually},
};

/// A server that sends to a sink.
struct Post {
    server: Server,
    sink: SmtpSink,
}

impl Post {
    fn start(fleet: &Fleet, variables: &[(&str, &str)], faults: impl FnOnce(&SmtpSink)) -> Self {
        let sink = fleet.runtime.block_on(SmtpSink::start());
        faults(&sink);
        let url = sink.url();
        let variables = [&SHORT[..], &[("SEMEL_MAIL_TRANSPORT", url.as_str())], variables].concat();
        Self { server: fleet.start(ALL, &variables), sink }
    }

    fn upload(&self, addresses: usize) -> String {
        upload(self.server.address, "list.csv", &list(addresses)).unwrap()
    }

    fn shown(&self, id: &str) -> Value {
        shown(self.server.address, id).unwrap()
    }

    fn until(&self, id: &str, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        eventually(LIMIT, what, || holds(&self.shown(id)));
        self.shown(id)
    }

    fn post(&self, path: &str, body: &str) -> Value {
        let answer = ask(self.server.address, "POST", path, body).unwrap();
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.json()
    }

    fn entries(&self, id: &str, status: &str) -> Vec<Value> {
        let path = format!("/mailings/{id}/entries?status={status}");
        ask(self.server.address, "GET", &path, "").unwrap().json()["items"].as_array().unwrap().clone()
    }
}

/// The mail of one recipient whose answer is lost.
fn lose_the_answer_of(sink: &SmtpSink, recipient: &'static str) {
    sink.set_faults(move |stage, envelope| match stage {
        Stage::Dot if envelope.to.iter().any(|to| to.contains(recipient)) => Fault::Close,
        _ => Fault::None,
    });
}

fn a_lost_answer_is_in_doubt_until_a_person_decides(fleet: &mut Fleet) {
    let post = Post::start(fleet, &[], |sink| lose_the_answer_of(sink, "user1@"));
    let id = post.upload(3);
    let mailing = post.until(&id, "it waits for a decision", |mailing| mailing["waitingFor"] == "decision");
    assert_eq!((mailing["status"].as_str(), count(&mailing, "inDoubt")), (Some("PROCESSING"), 1), "{mailing}");
    assert_eq!(count(&mailing, "sent"), 2);
    check_counts(&mailing, 3);
    let entry = &post.entries(&id, "IN_DOUBT")[0];
    assert_eq!(entry["email"], "user1@example.com");
    let line = entry["entryId"].as_i64().unwrap();
    // It is not sent again by itself.
    assert_eq!(post.sink.count(), 3);
    post.post(&format!("/mailings/{id}/entries/{line}/resolve"), r#"{"as":"sent","reason":"their log has it"}"#);
    let mailing = post.until(&id, "it is completed", |mailing| mailing["status"] == "COMPLETED");
    assert_eq!(count(&mailing, "sent"), 3);
    let again = ask(post.server.address, "POST", &format!("/mailings/{id}/entries/{line}/resolve"), r#"{"as":"sent"}"#);
    assert_eq!(again.unwrap().problem(), "entry-not-in-doubt");
    assert_eq!(post.sink.count(), 3);
}

fn an_entry_in_doubt_is_sent_again_if_a_person_says_so(fleet: &mut Fleet) {
    let post = Post::start(fleet, &[], |sink| lose_the_answer_of(sink, "user1@"));
    let id = post.upload(3);
    post.until(&id, "it waits for a decision", |mailing| mailing["waitingFor"] == "decision");
    let line = post.entries(&id, "IN_DOUBT")[0]["entryId"].as_i64().unwrap();
    post.sink.clear_faults();
    post.post(&format!("/mailings/{id}/entries/{line}/resolve"), r#"{"as":"resend"}"#);
    let mailing = post.until(&id, "it is completed", |mailing| mailing["status"] == "COMPLETED");
    assert_eq!(count(&mailing, "sent"), 3);
    let arrived: Vec<_> = post.sink.arrived().into_iter().filter(|mail| mail.to[0].contains("user1@")).collect();
    assert_eq!(arrived.len(), 2);
    assert_eq!(arrived[0].bytes, arrived[1].bytes, "a resent mail has the same bytes");
}

fn under_never_miss_a_lost_answer_is_sent_again(fleet: &mut Fleet) {
    let post = Post::start(fleet, &[], |sink| {
        let lost = std::sync::atomic::AtomicBool::new(false);
        sink.set_faults(move |stage, envelope| match stage {
            Stage::Dot
                if envelope.to[0].contains("user1@") && !lost.swap(true, std::sync::atomic::Ordering::SeqCst) =>
            {
                Fault::Close
            }
            _ => Fault::None,
        });
    });
    let body = list(3).replace("\n", "\r\n");
    let id = upload_with(&post.server, &body, "never-miss");
    let mailing = post.until(&id, "it is completed", |mailing| mailing["status"] == "COMPLETED");
    assert_eq!((count(&mailing, "sent"), count(&mailing, "inDoubt")), (3, 0));
    assert_eq!(post.sink.count_by_recipient()["user1@example.com"], 2);
}

fn upload_with(server: &Server, list: &str, policy: &str) -> String {
    let mut body = String::new();
    for (name, value) in [("subject", "Hi"), ("body", "Hello"), ("from", "news@example.com"), ("policy", policy)] {
        body += &format!("--b\r\ncontent-disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n");
    }
    body +=
        &format!("--b\r\ncontent-disposition: form-data; name=\"file\"; filename=\"l.csv\"\r\n\r\n{list}\r\n--b--\r\n");
    let mut connection = std::net::TcpStream::connect(server.address).unwrap();
    let headers = [("host", "localhost"), ("content-type", "multipart/form-data; boundary=b")];
    crate::support::send(&mut connection, "POST", "/mailings", &headers, body.as_bytes());
    let answer = crate::support::Answer::read(connection);
    assert_eq!(answer.status, 201, "{}", answer.body);
    answer.json()["mailingId"].as_str().unwrap().to_owned()
}

fn a_refused_recipient_is_invalid_and_a_busy_one_is_tried_again(fleet: &mut Fleet) {
    let post = Post::start(fleet, &[("SEMEL_MAILINGS_MAX_ATTEMPTS", "2")], |sink| {
        sink.set_faults(|stage, envelope| match (stage, envelope.to.last().map(String::as_str)) {
            (Stage::Recipient, Some("user0@example.com")) => Fault::Reply("550 no such user".into()),
            (Stage::Recipient, Some("user1@example.com")) => Fault::Reply("450 busy".into()),
            _ => Fault::None,
        });
    });
    let id = post.upload(3);
    let mailing = post.until(&id, "it is completed", |mailing| mailing["status"] == "COMPLETED");
    assert_eq!(["invalid", "failed", "sent"].map(|name| count(&mailing, name)), [1, 1, 1], "{mailing}");
    let failed = &post.entries(&id, "FAILED")[0];
    assert_eq!((failed["email"].as_str(), failed["attempts"].as_i64()), (Some("user1@example.com"), Some(2)));
    assert!(failed["error"].as_str().unwrap().contains("450"), "{failed}");
    assert_eq!(post.entries(&id, "INVALID")[0]["attempts"], 1);
    // A retry resets FAILED and INVALID, and nothing else.
    post.sink.clear_faults();
    post.post(&format!("/mailings/{id}/retry"), "{}");
    let mailing = post.until(&id, "it is completed", |mailing| mailing["status"] == "COMPLETED");
    assert_eq!((count(&mailing, "sent"), mailing["run"].as_i64()), (3, Some(2)), "{mailing}");
    assert!(post.sink.count_by_recipient().values().all(|mails| *mails == 1));
    check_counts(&mailing, 3);
}

fn a_server_that_refuses_us_pauses_the_mailing_and_burns_nothing(fleet: &mut Fleet) {
    let post = Post::start(fleet, &[], |sink| sink.fail_at(Stage::Mail, Fault::Reply("530 authenticate first".into())));
    let id = post.upload(50);
    let mailing = post.until(&id, "it is paused", |mailing| mailing["status"] == "PAUSED");
    assert!(mailing["error"].as_str().unwrap().contains("530"), "{mailing}");
    assert_eq!((count(&mailing, "pending"), post.sink.count()), (50, 0));
    post.sink.clear_faults();
    post.post(&format!("/mailings/{id}/resume"), "{}");
    let mailing = post.until(&id, "it is completed", |mailing| mailing["status"] == "COMPLETED");
    assert_eq!((count(&mailing, "sent"), post.sink.count()), (50, 50));
    let sent = post.entries(&id, "SENT");
    assert!(sent.iter().all(|entry| entry["attempts"] == 1), "the refused attempts do not count");
}

fn a_server_that_is_away_costs_no_attempts(fleet: &mut Fleet) {
    let post = Post::start(fleet, &[], |sink| sink.fail_at(Stage::Connect, Fault::Close));
    let id = post.upload(20);
    thread::sleep(Duration::from_secs(3));
    let mailing = post.shown(&id);
    assert_eq!((mailing["status"].as_str(), count(&mailing, "pending")), (Some("PROCESSING"), 20), "{mailing}");
    assert_eq!(fleet.count("mailing_entries WHERE status = 'PENDING' AND mail_date IS NOT NULL"), 0, "none was tried");
    post.sink.clear_faults();
    let mailing = post.until(&id, "it is completed", |mailing| mailing["status"] == "COMPLETED");
    assert_eq!((count(&mailing, "sent"), post.sink.count()), (20, 20));
    assert!(post.entries(&id, "SENT").iter().all(|entry| entry["attempts"] == 1));
}

fn pauses_and_resumes_send_each_mail_once(fleet: &mut Fleet) {
    let post = Post::start(fleet, &[("SEMEL_MAILINGS_RATE", "400/s")], |_| {});
    let id = post.upload(600);
    for _ in 0..10 {
        thread::sleep(Duration::from_millis(40));
        for action in ["pause", "resume"] {
            // It may be completed by now.
            ask(post.server.address, "POST", &format!("/mailings/{id}/{action}"), "{}").unwrap();
        }
    }
    let mailing = post.until(&id, "it is completed", |mailing| mailing["status"] == "COMPLETED");
    check_counts(&mailing, 600);
    assert_eq!((count(&mailing, "sent"), post.sink.count()), (600, 600));
}

fn a_cancel_leaves_the_rest_unsent(fleet: &mut Fleet) {
    let post = Post::start(fleet, &[("SEMEL_MAILINGS_RATE", "100/s")], |_| {});
    let id = post.upload(2_000);
    post.until(&id, "some are sent", |mailing| count(mailing, "sent") > 0);
    post.post(&format!("/mailings/{id}/cancel"), r#"{"reason":"wrong list"}"#);
    let over = |m: &Value| m["status"] == "CANCELLED" && count(m, "pending") + count(m, "sending") == 0;
    let mailing = post.until(&id, "the rest is cancelled", over);
    check_counts(&mailing, 2_000);
    assert_eq!(count(&mailing, "sent") + count(&mailing, "cancelled"), 2_000, "{mailing}");
    assert_eq!(post.sink.count(), count(&mailing, "sent"));
}

/// A small mailing does not wait for a large one.
fn a_small_mailing_is_sent_beside_a_large_one(fleet: &mut Fleet) {
    let post = Post::start(fleet, &[("SEMEL_MAILINGS_CONNECTIONS", "4")], |sink| {
        sink.fail_at(Stage::Dot, Fault::Delay(Duration::from_millis(5)));
    });
    let large = post.upload(20_000);
    post.until(&large, "the large one is being sent", |mailing| count(mailing, "sent") > 0);
    let small = upload_with(&post.server, "email\na@small.com\nb@small.com\n", "never-twice");
    post.until(&small, "the small one is sent", is_over);
    assert!(!is_over(&post.shown(&large)), "the large one was over first: this shows nothing");
    post.post(&format!("/mailings/{large}/cancel"), "{}");
}

/// A node that is frozen past its lease wakes up: it can neither mark nor settle, and sends nothing that it has not
/// marked.
fn a_frozen_node_sends_nothing_twice(fleet: &mut Fleet) {
    let post = Post::start(fleet, &[("SEMEL_MAILINGS_RATE", "300/s")], |_| {});
    let id = post.upload(1_500);
    post.until(&id, "some are sent", |mailing| count(mailing, "sent") > 0);
    let url = post.sink.url();
    let variables = [&SHORT[..], &[("SEMEL_MAIL_TRANSPORT", url.as_str())]].concat();
    let other = fleet.start(ALL, &variables);
    post.server.process.signal(Signal::STOP);
    let goes_on =
        || shown(other.address, &id).is_some_and(|mailing| is_over(&mailing) || count(&mailing, "sent") > 1_000);
    match fleet.place.url.starts_with("postgres") {
        true => eventually(LIMIT, "the other node goes on", goes_on),
        // A process that is frozen in a transaction holds SQLite's only writer, and everybody waits.
        false => thread::sleep(Duration::from_secs(5)),
    }
    post.server.process.signal(Signal::CONT);
    eventually(LIMIT, "it is over", || shown(other.address, &id).is_some_and(|mailing| is_over(&mailing)));
    let mailing = shown(other.address, &id).unwrap();
    check_counts(&mailing, 1_500);
    let twice: Vec<_> = post.sink.count_by_recipient().into_iter().filter(|(_, mails)| *mails > 1).collect();
    assert!(twice.is_empty(), "{twice:?}");
    assert_eq!(count(&mailing, "sent") + count(&mailing, "inDoubt"), 1_500);
    assert!(count(&mailing, "inDoubt") <= 16, "{mailing}");
}

on_every_fleet! {
    a_lost_answer_is_in_doubt_until_a_person_decides
    an_entry_in_doubt_is_sent_again_if_a_person_says_so
    under_never_miss_a_lost_answer_is_sent_again
    a_refused_recipient_is_invalid_and_a_busy_one_is_tried_again
    a_server_that_refuses_us_pauses_the_mailing_and_burns_nothing
    a_server_that_is_away_costs_no_attempts
    pauses_and_resumes_send_each_mail_once
    a_cancel_leaves_the_rest_unsent
    a_small_mailing_is_sent_beside_a_large_one
    a_frozen_node_sends_nothing_twice
}
