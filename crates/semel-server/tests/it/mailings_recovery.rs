//! Mailings whose run, or whose message, was lost: recovery queues them again, whatever a person did meanwhile.

use std::{fs, sync::Barrier, thread};

use serde_json::Value;

use crate::{
    desk::execute,
    fleet::{Fleet, ask, stop},
    mailings::{LIMIT, MESSAGE, Node, created, each, id},
    mailings_kill::{count, list},
    support::eventually,
};

/// Runs each law on both databases, on SQLite with RabbitMQ.
macro_rules! on_both {
    ($($law:ident)+) => {
        mod sqlite_rabbitmq {
            $(#[test] fn $law() { super::$law(&crate::fleet::Fleet::sqlite_rabbitmq()) })+
        }
        mod postgres {
            $(#[test] fn $law() { super::$law(&crate::fleet::Fleet::postgres()) })+
        }
    };
}

on_both! {
    a_mailing_whose_message_was_lost_can_be_paused_cancelled_and_deleted
    entries_are_cancelled_although_the_run_failed_before
    a_failed_mailing_says_when_it_is_tried_again_and_recovers_alone
    a_mailing_whose_entry_is_sent_again_is_queued_and_not_lost
    an_upload_that_meets_a_delete_is_the_old_mailing_or_a_new_one
}

/// Makes mailings as old as if their messages were lost.
fn age(fleet: &Fleet) {
    execute(&fleet.place, "UPDATE mailings SET updated_at = updated_at - 600000000");
}

fn a_mailing_whose_message_was_lost_can_be_paused_cancelled_and_deleted(fleet: &Fleet) {
    let api = Node::start_as(fleet, "api", &[]);
    let [paused, cancelled] = ["a", "b"].map(|name| api.mailing(&format!("{name}.csv"), format!("{name}@example.com")));
    execute(&fleet.place, "DELETE FROM semel_outbox");
    api.act(&paused, "pause");
    api.act(&cancelled, "cancel");
    age(fleet);
    let node = Node::start(fleet);
    eventually(LIMIT, "their runs have ended", || fleet.count("mailings WHERE active") == 0);
    assert_eq!((node.shown(&paused)["status"].clone(), count(&node.shown(&paused), "total")), ("PAUSED".into(), 0));
    for id in [&paused, &cancelled] {
        node.act(id, "cancel");
        eventually(LIMIT, "it is deleted", || {
            ask(node.address(), "DELETE", &format!("/mailings/{id}"), "").is_some_and(|answer| answer.status == 200)
        });
    }
}

fn entries_are_cancelled_although_the_run_failed_before(fleet: &Fleet) {
    let node = Node::start(fleet);
    let fields = [&MESSAGE[..], &[("sendAt", "2999-01-01T00:00:00Z")]].concat();
    let id = created(&node.upload("later.csv", list(5), &fields));
    eventually(LIMIT, "it waits for its time", || fleet.count("mailings WHERE waiting") == 1);
    // The state after a cancel of a mailing whose run then failed for good.
    execute(&fleet.place, "UPDATE mailings SET status = 'CANCELLED', task = 'cancel', active = FALSE, waiting = FALSE");
    age(fleet);
    let mailing = node.until(&id, "its entries are cancelled", |mailing| count(mailing, "cancelled") == 5);
    assert_eq!((&mailing["status"], &mailing["run"]), (&"CANCELLED".into(), &2.into()), "{mailing}");
}

/// Hides the stored file of a mailing, or shows it again.
fn hide(fleet: &Fleet, hidden: bool) {
    let (from, to) = if hidden { ("", "-hidden") } else { ("-hidden", "") };
    match fleet.place.url.starts_with("sqlite:") {
        true => {
            fs::rename(fleet.place.path(&format!("uploads{from}")), fleet.place.path(&format!("uploads{to}"))).unwrap()
        }
        false => execute(
            &fleet.place,
            &format!("UPDATE mailing_chunks SET upload = replace(upload, '{from}', '') || '{to}'"),
        ),
    }
}

fn a_failed_mailing_says_when_it_is_tried_again_and_recovers_alone(fleet: &Fleet) {
    let api = Node::start_as(fleet, "api", &[]);
    let id = api.mailing("a.csv", list(3));
    hide(fleet, true);
    let node = Node::start_as(fleet, "relay,worker", &[]);
    let failed = api.until_status(&id, "FAILED");
    let [at, failed_at] = ["retryAt", "updatedAt"].map(|name| failed[name].as_str().unwrap_or_default());
    assert!(at > failed_at, "{failed}");
    hide(fleet, false);
    // A watcher stays until it is completed.
    let watched = fleet.place.say(["mailing", "watch", &id]);
    assert!(watched.contains("COMPLETED: 3 of 3 sent"), "{watched}");
    let mailing = api.shown(&id);
    assert_eq!((&mailing["run"], &mailing["retryAt"]), (&1.into(), &Value::Null), "{mailing}");
    assert_eq!(node.mails().len(), 3);
}

fn a_mailing_whose_entry_is_sent_again_is_queued_and_not_lost(fleet: &Fleet) {
    let node = Node::start(fleet);
    let id = node.mailing("a.csv", list(1));
    node.completed(&id);
    eventually(LIMIT, "its message is published", || fleet.count("semel_outbox") == 0);
    stop(node.server);
    // No message arrives any more.
    let node = Node::start_as(fleet, "api,sweeper", &[]);
    let other = node.mailing("b.csv", list(2));
    execute(&fleet.place, "UPDATE mailing_entries SET status = 'IN_DOUBT'");
    execute(&fleet.place, "UPDATE mailings SET status = 'PROCESSING', sent = 0, in_doubt = 1 WHERE total = 1");
    let resolved = node.post(&format!("/mailings/{id}/entries/2/resolve"), r#"{"as":"resend"}"#).json();
    assert_eq!((&resolved["status"], &resolved["run"]), (&"QUEUED".into(), &2.into()), "{resolved}");
    // Recovery looks at the mailings in their order.
    execute(&fleet.place, "UPDATE mailings SET status = 'PROCESSING' WHERE total = 0");
    node.until_status(&other, "PENDING");
    let mailing = node.shown(&id);
    assert_eq!((&mailing["status"], &mailing["lastAttempt"]), (&resolved["status"], &resolved["lastAttempt"]));
    assert_eq!(fleet.count("semel_outbox"), 3, "one message of the first, two of the other");
}

fn an_upload_that_meets_a_delete_is_the_old_mailing_or_a_new_one(fleet: &Fleet) {
    let node = Node::start_as(fleet, "api", &[]);
    let upload = || node.upload("a.csv", list(2), &MESSAGE);
    let (mut old, mut files) = (created(&upload()), 1);
    for _ in 0..8 {
        execute(&fleet.place, "UPDATE mailings SET status = 'COMPLETED', active = FALSE");
        let both = Barrier::new(2);
        let (uploaded, deleted) = thread::scope(|scope| {
            let deleted = scope.spawn(|| {
                both.wait();
                ask(node.address(), "DELETE", &format!("/mailings/{old}"), "").unwrap()
            });
            both.wait();
            (upload(), deleted.join().unwrap())
        });
        assert_eq!(deleted.status, 200, "{}", deleted.body);
        let is_new = uploaded.status == 201;
        assert!(is_new || uploaded.status == 200, "{}", uploaded.body);
        assert_eq!(is_new, id(&uploaded.json()) != old);
        // The mailing that the delete has met is gone; a new one exists, with its file.
        let left = each(&node.items("/mailings"), "mailingId");
        assert_eq!(left, if is_new { vec![id(&uploaded.json())] } else { vec![] });
        old = if is_new { left[0].clone() } else { created(&upload()) };
        files += 1;
        assert_eq!(fleet.parts(), files, "only a new mailing keeps its file");
    }
}
