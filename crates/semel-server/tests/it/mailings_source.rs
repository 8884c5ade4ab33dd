//! The source document: its four tests and its four scenarios, in its order and its words.

use std::{collections::BTreeSet, net::TcpStream, time::Duration};

use serde_json::{Value, json};
use sqlx::{ConnectOptions as _, Executor as _, postgres::PgConnectOptions, sqlite::SqliteConnectOptions};

use crate::{
    desk::execute,
    fleet::{Fleet, IN_TIME, on_every_fleet},
    mailings::{FORM, LIMIT, MESSAGE, Node, created, each, form, id},
    mailings_http::Provider,
    mailings_kill::{count, list},
    support::{eventually, send},
};

on_every_fleet! {
    test_1_a_duplicate_upload_returns_the_same_mailing
    test_2_each_email_of_a_csv_is_inserted_once
    test_3_two_workers_do_not_process_a_mailing_at_once
    test_4_stale_locks_are_recovered_without_duplication
    scenario_1_a_client_that_retries_gets_the_same_mailing
    scenario_2_a_csv_with_duplicate_emails_makes_one_entry_each
    scenario_3_a_duplicate_message_sends_nothing_twice
    scenario_4_a_crash_half_way_is_recovered_and_resumed
}

/// The queue of the source.
const QUEUE: &str = "mailing.process";

fn message(id: &str) -> Vec<u8> {
    json!({ "mailingId": id }).to_string().into_bytes()
}

fn test_1_a_duplicate_upload_returns_the_same_mailing(fleet: &mut Fleet) {
    let node = Node::start(fleet);
    // Also by the rule of the source, by which the name alone counts.
    for (file, identity) in [("test.csv", &[][..]), ("named.csv", &[("identity", "filename")])] {
        let fields = [&MESSAGE[..], identity].concat();
        let content = format!("email\nuser@{file}.com\n");
        let first = created(&node.upload(file, &content, &fields));
        let second = node.upload(file, &content, &fields).json();
        assert_eq!((&second["created"], id(&second)), (&json!(false), first));
        assert_eq!(node.items(&format!("/mailings?filename={file}")).len(), 1);
    }
}

fn test_2_each_email_of_a_csv_is_inserted_once(fleet: &mut Fleet) {
    let node = Node::start(fleet);
    let csv = "\nemail\nuser@test.com\nadmin@test.com\nuser@test.com\nadmin@test.com\n";
    let id = node.mailing("test.csv", csv);
    let mailing = node.completed(&id);
    assert_eq!((count(&mailing, "total"), &mailing["duplicateRows"]), (2, &json!(2)));
    assert_eq!(each(&node.entries(&id), "email"), ["user@test.com", "admin@test.com"]);
}

/// The processes that have claimed the runs of mailings which are under way.
fn owners(fleet: &Fleet) -> Vec<String> {
    fleet.texts("SELECT owner FROM semel_operations WHERE service = 'mailings' AND state = 'processing'")
}

fn test_3_two_workers_do_not_process_a_mailing_at_once(fleet: &mut Fleet) {
    let rate = [("SEMEL_MAILINGS_RATE", "50/s")];
    let nodes = [Node::start_as(fleet, "api,relay,sweeper,worker", &rate), Node::start_as(fleet, "worker", &rate)];
    let node = &nodes[0];
    let id = node.mailing("test.csv", list(100));
    node.until(&id, "it is being sent", |mailing| count(mailing, "sent") > 0);
    // Both workers are told to process it, again and again.
    let body = message(&id);
    let mut seen = BTreeSet::new();
    while node.shown(&id)["status"] != "COMPLETED" {
        fleet.say_to(QUEUE, &[&body, &body]);
        let now = owners(fleet);
        assert!(now.len() <= 1, "{now:?}");
        seen.extend(now);
        let status = node.shown(&id)["status"].clone();
        assert!(status == "PROCESSING" || status == "COMPLETED", "{status}: a live run is not recovered");
    }
    assert_eq!(seen.len(), 1, "one worker from its beginning to its end");
    assert_eq!((count(&node.shown(&id), "sent"), node.mails().len()), (100, 100));
    assert!(each(&node.entries(&id), "attempts").iter().all(|attempts| attempts == "1"));
}

/// Orphans every mailing, every other one without a last attempt, and keeps the rows locked while both nodes sweep: both
/// have seen all orphans when the first of them can recover one.
fn orphan_all_for_both_at_once(fleet: &Fleet) {
    let orphan = "UPDATE mailings SET status = 'PROCESSING',
                         last_attempt = CASE WHEN number % 2 = 0 THEN updated_at - 60000000 END";
    fleet.runtime.block_on(async {
        let two_sweeps = tokio::time::sleep(Duration::from_millis(1_200));
        match fleet.place.url.strip_prefix("sqlite:") {
            Some(path) => {
                let options = SqliteConnectOptions::new().filename(path).busy_timeout(IN_TIME);
                let mut connection = options.connect().await.unwrap();
                connection.execute(orphan).await.unwrap();
                connection.execute("BEGIN IMMEDIATE").await.unwrap();
                two_sweeps.await;
                connection.execute("COMMIT").await.unwrap();
            }
            None => {
                let mut connection = fleet.place.url.parse::<PgConnectOptions>().unwrap().connect().await.unwrap();
                connection.execute(orphan).await.unwrap();
                connection.execute("BEGIN; SELECT number FROM mailings FOR UPDATE").await.unwrap();
                two_sweeps.await;
                connection.execute("COMMIT").await.unwrap();
            }
        }
    });
}

fn test_4_stale_locks_are_recovered_without_duplication(fleet: &mut Fleet) {
    const MAILINGS: usize = 12;
    let api = Node::start_as(fleet, "api", &[]);
    let make = |n| api.mailing(&format!("{n}.csv"), format!("email\nuser{n}@example.com\n"));
    let ids: Vec<String> = (0..MAILINGS).map(make).collect();
    // Their messages were consumed, and their workers are gone.
    execute(&fleet.place, "DELETE FROM semel_outbox");
    let _sweepers = [Node::start_as(fleet, "sweeper", &[]), Node::start_as(fleet, "sweeper", &[])];
    orphan_all_for_both_at_once(fleet);
    eventually(LIMIT, "all are recovered", || fleet.count("mailings WHERE status = 'PENDING'") == MAILINGS);
    assert_eq!(fleet.count("semel_outbox"), MAILINGS, "exactly one message each");
    for id in &ids {
        let mailing = api.shown(id);
        assert_eq!((&mailing["status"], &mailing["lastAttempt"]), (&json!("PENDING"), &json!(null)));
    }
    let topics = fleet.texts("SELECT DISTINCT topic FROM semel_outbox");
    assert_eq!(topics, [QUEUE]);
    // The messages name different mailings: all of them are completed, each by one mail.
    let _worker = Node::start_as(fleet, "relay,worker", &[]);
    for id in &ids {
        assert_eq!(api.completed(id)["run"], 1);
    }
    assert_eq!(api.mails().len(), MAILINGS);
    eventually(LIMIT, "every message is consumed", || fleet.queued_in(QUEUE) + fleet.count("semel_outbox") == 0);
}

fn scenario_1_a_client_that_retries_gets_the_same_mailing(fleet: &mut Fleet) {
    let node = Node::start(fleet);
    let csv = "email\nuser@example.com\n";
    let mut lost = TcpStream::connect(node.address()).unwrap();
    send(&mut lost, "POST", "/mailings", &FORM, &form("monthly.csv", csv, &MESSAGE));
    // The answer never arrives.
    eventually(LIMIT, "the mailing exists", || node.items("/mailings").len() == 1);
    drop(lost);
    let retry = node.upload("monthly.csv", csv, &MESSAGE);
    assert_eq!((retry.status, &retry.json()["created"]), (200, &json!(false)));
    assert_eq!(each(&node.items("/mailings"), "mailingId"), [id(&retry.json())]);
    node.completed(&id(&retry.json()));
    assert_eq!(node.mails().len(), 1);
}

fn scenario_2_a_csv_with_duplicate_emails_makes_one_entry_each(fleet: &mut Fleet) {
    let node = Node::start(fleet);
    let csv = "user@example.com\nadmin@example.com\nuser@example.com\nadmin@example.com\n";
    let id = node.mailing("emails.csv", csv);
    assert_eq!(count(&node.completed(&id), "total"), 2);
    assert_eq!(each(&node.entries(&id), "email"), ["user@example.com", "admin@example.com"]);
    assert_eq!(node.mails().len(), 2);
}

fn scenario_3_a_duplicate_message_sends_nothing_twice(fleet: &mut Fleet) {
    let provider = Provider::start();
    let transport = provider.transport("window=1h");
    let variables = [("SEMEL_MAIL_TRANSPORT", transport.as_str())];
    let api = Node::start_as(fleet, "api,relay", &variables);
    let id = api.mailing("emails.csv", list(30));
    let body = message(&id);
    // The queue has it several times before any worker listens.
    eventually(IN_TIME, "its message is published", || fleet.count("semel_outbox") == 0);
    fleet.say_to(QUEUE, &[&body, &body, &body, b"not json", &message("unknown")]);
    let _workers = [Node::start_as(fleet, "worker", &variables), Node::start_as(fleet, "worker", &variables)];
    let mailing = api.completed(&id);
    // And once more, when it is over.
    fleet.say_to(QUEUE, &[&body]);
    eventually(LIMIT, "every message is acknowledged", || {
        fleet.queued_in(QUEUE) == 0 && fleet.count("semel_dead_letters") == 1
    });
    assert_eq!((count(&mailing, "sent"), provider.asked().len()), (30, 30), "each mail is sent once");
    assert_eq!(api.shown(&id)["updatedAt"], mailing["updatedAt"], "a message after the end changes nothing");
    assert_eq!(fleet.count("semel_operations WHERE service = 'mailings'"), 1);
}

fn scenario_4_a_crash_half_way_is_recovered_and_resumed(fleet: &mut Fleet) {
    const ADDRESSES: usize = 100;
    let provider = Provider::start();
    let transport = provider.transport("window=1h");
    let variables = [("SEMEL_MAIL_TRANSPORT", transport.as_str()), ("SEMEL_MAILINGS_RATE", "100/s")];
    let api = Node::start_as(fleet, "api,relay", &variables);
    let id = api.mailing("emails.csv", list(ADDRESSES));
    let mut first = Node::start_as(fleet, "worker", &variables);
    let half = |mailing: &Value| count(mailing, "sent") >= ADDRESSES / 2;
    assert_eq!(api.until(&id, "half of it is sent", half)["status"], "PROCESSING");
    first.server.process.0.kill().unwrap();
    drop(first);
    let locked = api.shown(&id);
    assert_eq!(locked["status"], "PROCESSING", "locked");
    assert!(!locked["lastAttempt"].is_null());
    let _sweeper = Node::start_as(fleet, "sweeper", &variables);
    let recovered = api.until_status(&id, "PENDING");
    assert!(recovered["lastAttempt"].is_null(), "{recovered}");
    eventually(LIMIT, "it is queued again", || fleet.queued_in(QUEUE) == 1);
    let _second = Node::start_as(fleet, "worker", &variables);
    let mailing = api.completed(&id);
    assert_eq!((count(&mailing, "sent"), count(&mailing, "total")), (ADDRESSES, ADDRESSES));
    // The service sends one mail per key. What was settled before the crash was not even asked for again.
    provider.assert_one_key_each(ADDRESSES);
    assert!(provider.asked().len() <= ADDRESSES + 16, "{}", provider.asked().len());
}
