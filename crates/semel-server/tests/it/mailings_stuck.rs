//! No mailing is stuck, whatever a person does and whenever, and no server burns a list.

use std::sync::atomic::{AtomicUsize, Ordering};

use semel_testkit::smtp::{Fault, SmtpSink, Stage};
use serde_json::Value;

use crate::{
    fleet::{ALL, Fleet, ask, on_every_fleet, stop},
    mailings::{LIMIT, MESSAGE, Node, created, each, upload},
    mailings_kill::{SHORT, check_entries, count, is_over, list},
    proposals::rows,
    support::eventually,
};

on_every_fleet! {
    a_mailing_that_waits_for_its_time_is_cancelled_and_deleted_at_once
    a_failed_mailing_can_be_paused_cancelled_and_deleted
    mails_that_a_lost_node_was_sending_are_settled_although_the_mailing_is_cancelled
    another_transport_does_not_repeat_what_one_may_have_sent
    a_server_that_refuses_everybody_does_not_burn_the_list
    a_server_with_few_connections_gets_all_mails
}

fn deleted(node: &Node, id: &str) {
    eventually(LIMIT, "it is deleted", || {
        ask(node.address(), "DELETE", &format!("/mailings/{id}"), "").is_some_and(|answer| answer.status < 300)
    });
    assert_eq!(node.get(&format!("/mailings/{id}")).status, 404);
}

fn a_mailing_that_waits_for_its_time_is_cancelled_and_deleted_at_once(fleet: &mut Fleet) {
    let node = Node::start(fleet);
    let fields = [&MESSAGE[..], &[("sendAt", "2999-01-01T00:00:00Z")]].concat();
    let id = created(&node.upload("later.csv", list(5), &fields));
    node.until(&id, "it is imported", |mailing| mailing["phase"] == "sending");
    node.act(&id, "cancel");
    let mailing = node.until(&id, "its entries are cancelled", |mailing| count(mailing, "cancelled") == 5);
    assert_eq!(mailing["status"], "CANCELLED");
    deleted(&node, &id);
}

fn a_failed_mailing_can_be_paused_cancelled_and_deleted(fleet: &mut Fleet) {
    let node = Node::start(fleet);
    // Broken beyond what is looked at before it is stored.
    let broken = [list(5_000).as_bytes(), b"\xff\xfe\n"].concat();
    let id = node.mailing("broken.csv", &broken);
    node.until_status(&id, "FAILED");
    node.act(&id, "pause");
    node.act(&id, "resume");
    // It runs again, and fails again.
    node.until_status(&id, "FAILED");
    node.act(&id, "pause");
    node.act(&id, "cancel");
    node.until(&id, "nothing is pending", |mailing| count(mailing, "pending") == 0);
    deleted(&node, &id);
}

/// A node that is killed while it sends so many mails by SMTP.
fn killed_while_sending(fleet: &Fleet, sink: &SmtpSink) -> String {
    let transport = sink.url();
    let node = Node::start_as(fleet, ALL, &[("SEMEL_MAIL_TRANSPORT", transport.as_str())]);
    let id = node.mailing("list.csv", list(40));
    node.until(&id, "mails are being sent", |mailing| count(mailing, "sending") == 16);
    let mut node = node;
    node.server.process.0.kill().unwrap();
    id
}

/// A server that never answers to a message.
fn silent(fleet: &Fleet) -> SmtpSink {
    let sink = fleet.runtime.block_on(SmtpSink::start());
    sink.fail_at(Stage::Dot, Fault::Delay(std::time::Duration::from_secs(600)));
    sink
}

fn mails_that_a_lost_node_was_sending_are_settled_although_the_mailing_is_cancelled(fleet: &mut Fleet) {
    let sink = silent(fleet);
    let id = killed_while_sending(fleet, &sink);
    let api = Node::start_as(fleet, "api", &[]);
    api.act(&id, "cancel");
    let transport = sink.url();
    let node = Node::start_as(fleet, ALL, &[("SEMEL_MAIL_TRANSPORT", transport.as_str())]);
    let is_settled = |mailing: &Value| count(mailing, "inDoubt") == 16 && count(mailing, "cancelled") == 24;
    check_entries(fleet, &node.until(&id, "they are in doubt, the others cancelled", is_settled));
    let line = node.items(&format!("/mailings/{id}/entries?status=IN_DOUBT"))[0]["entryId"].clone();
    let resolve = format!("/mailings/{id}/entries/{line}/resolve");
    assert_eq!(node.post(&resolve, r#"{"as":"resend"}"#).problem(), "mailing-not-in-this-state");
    assert_eq!(node.post(&resolve, r#"{"as":"sent"}"#).status, 200);
    let resolved = node.shown(&id);
    assert_eq!(count(&resolved, "sent"), 1, "{resolved}");
    check_entries(fleet, &resolved);
}

fn another_transport_does_not_repeat_what_one_may_have_sent(fleet: &mut Fleet) {
    let sink = silent(fleet);
    let id = killed_while_sending(fleet, &sink);
    // To files, which could find out about mails of their own.
    let node = Node::start(fleet);
    let mailing = node.until(&id, "it waits for decisions", |mailing| mailing["waitingFor"] == "decision");
    assert_eq!((count(&mailing, "inDoubt"), count(&mailing, "sent")), (16, 24), "{mailing}");
    assert_eq!(node.mails().len(), 24);
}

fn a_server_that_refuses_everybody_does_not_burn_the_list(fleet: &mut Fleet) {
    let sink = fleet.runtime.block_on(SmtpSink::start());
    sink.fail_at(Stage::Recipient, Fault::Reply("550 5.7.0 we do not like you today".into()));
    let transport = sink.url();
    let node = Node::start_as(fleet, ALL, &[("SEMEL_MAIL_TRANSPORT", transport.as_str())]);
    let id = node.mailing("list.csv", list(500));
    let mailing = node.until_status(&id, "PAUSED");
    assert!((50..=66).contains(&count(&mailing, "invalid")), "{mailing}");
    assert!(mailing["error"].as_str().unwrap().contains("in a row"), "{mailing}");
    sink.clear_faults();
    node.act(&id, "retry");
    let mailing = node.completed(&id);
    assert_eq!(count(&mailing, "sent"), 500);
    check_entries(fleet, &mailing);
}

#[test]
fn a_node_that_dies_after_each_mark_does_not_count_mails_in_doubt_as_progress() {
    let fleet = Fleet::sqlite();
    let sink = fleet.runtime.block_on(SmtpSink::start());
    let transport = sink.url();
    let variables = [&SHORT[..], &[("SEMEL_MAIL_TRANSPORT", transport.as_str())]].concat();
    for crashes in 0..2 {
        let mut dying = fleet.start_dying(ALL, "mailing.marked", &variables);
        if crashes == 0 {
            upload(dying.address, "list.csv", list(100), &MESSAGE);
        }
        fleet.died_at("mailing.marked", &mut dying);
        let counted = format!("semel_operations WHERE kind = 'run' AND crashes = {crashes}");
        assert_eq!(fleet.count(&counted), 1, "the run is parked after ten crashes");
    }
    assert_eq!((fleet.count("mailing_entries WHERE status = 'IN_DOUBT'"), sink.count()), (16, 0));
}

/// A mailing of which one entry is sent and 19 wait, and whose server is stopped; then something happens to its database.
fn resumed_after(fleet: &Fleet, change: &'static str) {
    let sink = fleet.runtime.block_on(SmtpSink::start());
    sink.set_faults(|stage, envelope| match (stage, envelope.to.first()) {
        (Stage::Recipient, Some(to)) if to != "user0@example.com" => Fault::Stall,
        _ => Fault::None,
    });
    let transport = sink.url();
    let variables = [("SEMEL_MAIL_TRANSPORT", transport.as_str())];
    let node = Node::start_as(fleet, ALL, &variables);
    let id = node.mailing("list.csv", list(20));
    node.until(&id, "one is sent", |mailing| count(mailing, "sent") == 1);
    stop(node.server);
    sink.clear_faults();
    rows(&fleet.place, change);
    let node = Node::start_as(fleet, ALL, &variables);
    let mailing = node.until_status(&id, "PAUSED");
    assert!(mailing["error"].as_str().unwrap().contains("resume it"), "{mailing}");
    assert_eq!((count(&mailing, "pending"), sink.count()), (19, 1), "{mailing}");
    node.act(&id, "resume");
    assert_eq!((count(&node.completed(&id), "sent"), sink.count()), (20, 20));
}

#[test]
fn a_mailing_that_last_ran_more_than_a_day_ago_waits_for_a_person() {
    resumed_after(&Fleet::sqlite(), "UPDATE mailings SET rate_since = rate_since - 86400000000");
}

#[test]
fn a_mailing_whose_database_is_on_another_server_waits_for_a_person() {
    resumed_after(&Fleet::postgres(), "UPDATE semel_epoch SET system = system + 1");
}

#[test]
fn a_graceful_stop_gives_back_the_mails_whose_message_has_not_begun() {
    let fleet = Fleet::sqlite();
    let sink = fleet.runtime.block_on(SmtpSink::start());
    sink.fail_at(Stage::Recipient, Fault::Stall);
    let transport = sink.url();
    let node = Node::start_as(&fleet, ALL, &[("SEMEL_MAIL_TRANSPORT", transport.as_str())]);
    let id = node.mailing("list.csv", list(40));
    node.until(&id, "mails are being sent", |mailing| count(mailing, "sending") == 16);
    stop(node.server);
    sink.clear_faults();
    let node = Node::start_as(&fleet, ALL, &[("SEMEL_MAIL_TRANSPORT", transport.as_str())]);
    let mailing = node.until(&id, "it is over", is_over);
    assert_eq!((count(&mailing, "sent"), sink.count()), (40, 40), "{mailing}");
    assert!(each(&node.entries(&id), "attempts").iter().all(|attempts| attempts == "1"));
}

/// The server takes four connections, and refuses more.
fn a_server_with_few_connections_gets_all_mails(fleet: &mut Fleet) {
    let sink = fleet.runtime.block_on(SmtpSink::start());
    let connected = AtomicUsize::new(0);
    sink.set_faults(move |stage, _| match stage {
        Stage::Connect if connected.fetch_add(1, Ordering::SeqCst) >= 4 => {
            Fault::Reply("421 too many connections".into())
        }
        Stage::Dot => Fault::Delay(std::time::Duration::from_millis(5)),
        _ => Fault::None,
    });
    let transport = sink.url();
    let node = Node::start_as(fleet, ALL, &[("SEMEL_MAIL_TRANSPORT", transport.as_str())]);
    let id = node.mailing("list.csv", list(200));
    let mailing = node.completed(&id);
    assert_eq!((count(&mailing, "sent"), sink.count()), (200, 200), "{mailing}");
}
