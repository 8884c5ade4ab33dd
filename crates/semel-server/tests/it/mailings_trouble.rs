//! Trouble of one recipient, one row or one server harms no other mail, and what may have been sent is never called unsent.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use semel_testkit::smtp::{Fault, SmtpSink, Stage};
use serde_json::json;
use sqlx::{Connection as _, PgConnection};

use crate::{
    fleet::{ALL, Fleet, on_every_fleet},
    mailings::{LIMIT, MESSAGE, Node, created, each},
    mailings_http::{Provider, Reply, accepted, refused, sending, waits},
    mailings_kill::{check_counts, count, is_over, list, upload},
    proposals::rows,
    support::eventually,
};

on_every_fleet! {
    a_recipient_that_breaks_the_connection_keeps_no_other_waiting
    a_retry_that_is_due_later_delays_no_fresh_mail_of_a_limited_transport
    an_outage_of_the_provider_costs_the_list_no_attempts
    a_redirect_pauses_the_mailing_and_its_mail_is_in_doubt
    words_about_one_recipient_pause_no_mailing_that_the_server_serves
    a_mail_that_may_have_been_sent_is_in_doubt_when_the_mailing_is_cancelled
    a_mail_that_may_have_been_sent_is_in_doubt_when_its_address_is_suppressed
    a_resend_does_not_wait_for_the_retry_of_another_entry
}

const ONE: [(&str, &str); 1] = [("SEMEL_MAILINGS_CONNECTIONS", "1")];

/// Few attempts, and short waits between them.
const BRIEF: [(&str, &str); 2] = [("SEMEL_MAILINGS_BACKOFF", "100ms"), ("SEMEL_MAILINGS_MAX_ATTEMPTS", "2")];

/// A node that sends by SMTP with one connection, to a server with this fault.
fn post(
    fleet: &Fleet,
    variables: &[(&str, &str)],
    fault: impl Fn(Stage, &str) -> Fault + Send + Sync + 'static,
) -> (Node, SmtpSink) {
    let sink = fleet.runtime.block_on(SmtpSink::start());
    sink.set_faults(move |stage, envelope| fault(stage, envelope.to.first().map_or("", String::as_str)));
    let transport = sink.url();
    let transport = [("SEMEL_MAIL_TRANSPORT", transport.as_str())];
    (Node::start_as(fleet, ALL, &[&transport[..], &ONE, variables].concat()), sink)
}

fn a_recipient_that_breaks_the_connection_keeps_no_other_waiting(fleet: &mut Fleet) {
    let (node, sink) = post(fleet, &[("SEMEL_MAILINGS_MAX_ATTEMPTS", "3")], |stage, to| match stage {
        Stage::Recipient if to.contains("user0@") => Fault::Close,
        Stage::Recipient if to.contains("user1@") => Fault::ReplyAndClose("421 4.3.2 no more".to_owned()),
        _ => Fault::None,
    });
    let id = upload(node.address(), "list.csv", &list(6)).unwrap();
    let mailing = node.completed(&id);
    assert_eq!((count(&mailing, "sent"), count(&mailing, "failed")), (4, 2), "{mailing}");
    assert_eq!(sink.count(), 4);
    assert_eq!(each(&node.entries(&id), "attempts")[..3], ["3", "3", "1"]);
}

fn a_retry_that_is_due_later_delays_no_fresh_mail_of_a_limited_transport(fleet: &mut Fleet) {
    let variables = [("SEMEL_MAILINGS_RATE", "20/s"), ("SEMEL_MAILINGS_BACKOFF", "10m")];
    let (node, _sink) = post(fleet, &variables, |stage, to| match stage {
        Stage::Recipient if to.contains("user0@") => Fault::Reply("450 4.2.0 greylisted".to_owned()),
        _ => Fault::None,
    });
    let id = upload(node.address(), "list.csv", &list(60)).unwrap();
    // The retry is due in ten minutes, the last of the others after three seconds.
    let mailing = node.until(&id, "the others are sent", |mailing| count(mailing, "sent") == 59);
    assert_eq!(count(&mailing, "pending"), 1, "{mailing}");
}

fn an_outage_of_the_provider_costs_the_list_no_attempts(fleet: &mut Fleet) {
    let provider = Provider::that(|_| refused(500, "down"));
    let transport = provider.transport("window=1h");
    let variables = [&ONE[..], &BRIEF, &[("SEMEL_MAIL_TRANSPORT", transport.as_str())]].concat();
    let node = Node::start_as(fleet, ALL, &variables);
    let id = upload(node.address(), "list.csv", &list(30)).unwrap();
    // Until eight entries have failed, each costs one of two attempts. Then each round tries one of them.
    eventually(LIMIT, "the outage is long", || provider.asked().len() >= 8 + 16);
    let mailing = node.shown(&id);
    assert_eq!((&mailing["status"], &mailing["error"]), (&"PROCESSING".into(), &"HTTP 500: down".into()), "{mailing}");
    provider.now_accepts();
    let mailing = node.completed(&id);
    assert_eq!(count(&mailing, "sent"), 30, "{mailing}");
    assert!(mailing["error"].is_null(), "{mailing}");
    provider.assert_one_key_each(30);
}

#[test]
fn mails_that_the_server_cannot_bear_keep_no_others_waiting_and_end() {
    let fleet = Fleet::sqlite();
    let tries = Arc::new(AtomicUsize::new(0));
    let tried = tries.clone();
    let (node, _sink) = post(&fleet, &BRIEF, move |stage, to| match stage {
        Stage::Recipient if !to.starts_with("good") => {
            tried.fetch_add(1, Ordering::SeqCst);
            Fault::Close
        }
        _ => Fault::None,
    });
    let good = "good1@example.com,\ngood2@example.com,\n";
    let id = upload(node.address(), "some.csv", &(list(9) + good)).unwrap();
    let mailing = node.completed(&id);
    assert_eq!((count(&mailing, "sent"), count(&mailing, "failed")), (2, 9), "{mailing}");
    // If no mail gets through, this may be an outage: no entry is given up, for a day.
    let before = tries.load(Ordering::SeqCst);
    let id = upload(node.address(), "all.csv", &list(10)).unwrap();
    eventually(LIMIT, "the outage is long", || tries.load(Ordering::SeqCst) >= before + 8 + 16);
    assert_eq!(count(&node.shown(&id), "failed"), 0);
    eventually(LIMIT, "they are given up", || {
        let sql = "UPDATE mailing_entries SET mail_date = mail_date - 86400000000 WHERE status = 'PENDING'";
        rows(&fleet.place, sql);
        count(&node.shown(&id), "failed") == 10
    });
}

#[test]
fn a_step_that_takes_too_long_loses_no_answer() {
    let fleet = Fleet::postgres();
    let (node, sink) = post(&fleet, &[("SEMEL_MAILINGS_RATE", "20/s")], |_, _| Fault::None);
    let id = upload(node.address(), "list.csv", &list(30)).unwrap();
    node.until(&id, "it is being sent", |mailing| count(mailing, "sent") > 0);
    // A disk that stalls once, for longer than a step may take: the lease is two seconds.
    for sql in [
        "CREATE SEQUENCE stalls",
        "CREATE FUNCTION stall() RETURNS trigger LANGUAGE plpgsql AS
         $$ BEGIN IF nextval('stalls') = 1 THEN PERFORM pg_sleep(2.5); END IF; RETURN NEW; END $$",
        "CREATE TRIGGER stall BEFORE UPDATE ON mailing_entries FOR EACH ROW
         WHEN (NEW.status = 'SENT') EXECUTE FUNCTION stall()",
    ] {
        rows(&fleet.place, sql);
    }
    let mailing = node.until(&id, "it is over", is_over);
    assert_eq!((count(&mailing, "sent"), sink.count()), (30, 30), "{mailing}");
    assert_eq!(fleet.count("semel_operations WHERE kind = 'run' AND failures > 0"), 0, "no attempt of the run");
}

fn a_redirect_pauses_the_mailing_and_its_mail_is_in_doubt(fleet: &mut Fleet) {
    let provider =
        Provider::that(|_| Reply::Answer(303, "location: http://127.0.0.1:1/done\r\n", "see there".to_owned()));
    let (node, id) = sending(fleet, &provider, "", 20);
    let mailing = node.until_status(&id, "PAUSED");
    assert_eq!((count(&mailing, "inDoubt"), count(&mailing, "pending")), (1, 19), "{mailing}");
    assert_eq!(provider.asked().len(), 1);
}

fn words_about_one_recipient_pause_no_mailing_that_the_server_serves(fleet: &mut Fleet) {
    let (node, _sink) = post(fleet, &[], |stage, to| match stage {
        Stage::Recipient if to.contains("user3@") => Fault::Reply("550 5.7.1 blacklisted recipient".to_owned()),
        _ => Fault::None,
    });
    let id = upload(node.address(), "list.csv", &list(6)).unwrap();
    let mailing = node.completed(&id);
    assert_eq!((count(&mailing, "sent"), count(&mailing, "invalid")), (5, 1), "{mailing}");
}

/// A mailing with one entry whose answer was lost and whose retry is due later.
fn with_a_lost_answer(fleet: &Fleet) -> (Node, Provider, String) {
    let provider = Provider::that(|asked| match asked.to.as_str() {
        "user1@example.com" => Reply::Lost,
        _ => accepted(asked),
    });
    let transport = provider.transport("window=1h");
    let variables = [("SEMEL_MAIL_TRANSPORT", transport.as_str()), ("SEMEL_MAILINGS_BACKOFF", "6s")];
    let node = Node::start_as(fleet, ALL, &variables);
    let id = upload(node.address(), "list.csv", &list(3)).unwrap();
    node.until(&id, "one is left", |mailing| count(mailing, "sent") == 2 && count(mailing, "pending") == 1);
    (node, provider, id)
}

fn a_mail_that_may_have_been_sent_is_in_doubt_when_the_mailing_is_cancelled(fleet: &mut Fleet) {
    let (node, _provider, id) = with_a_lost_answer(fleet);
    node.act(&id, "cancel");
    let mailing = node.until(&id, "nothing is pending", |mailing| count(mailing, "pending") == 0);
    assert_eq!((count(&mailing, "inDoubt"), count(&mailing, "cancelled")), (1, 0), "{mailing}");
    check_counts(&mailing, 3);
}

fn a_mail_that_may_have_been_sent_is_in_doubt_when_its_address_is_suppressed(fleet: &mut Fleet) {
    let (node, provider, id) = with_a_lost_answer(fleet);
    let suppressed = node.post("/suppressions", &json!({ "emails": ["user1@example.com"] }).to_string());
    assert!(suppressed.status < 300, "{}", suppressed.body);
    let mailing = node.until(&id, "it waits for a decision", waits);
    assert_eq!((count(&mailing, "inDoubt"), count(&mailing, "suppressed")), (1, 0), "{mailing}");
    assert_eq!(provider.asked().iter().filter(|asked| asked.to == "user1@example.com").count(), 1);
}

fn a_resend_does_not_wait_for_the_retry_of_another_entry(fleet: &mut Fleet) {
    let (node, sink) = post(fleet, &[("SEMEL_MAILINGS_BACKOFF", "10m")], |stage, to| match stage {
        Stage::Recipient if to.contains("user0@") => Fault::Reply("450 4.2.0 greylisted".to_owned()),
        Stage::Dot if to.contains("user1@") => Fault::Close,
        _ => Fault::None,
    });
    let id = upload(node.address(), "list.csv", &list(3)).unwrap();
    node.until(&id, "one is in doubt", |mailing| count(mailing, "inDoubt") == 1 && count(mailing, "pending") == 1);
    sink.clear_faults();
    let line = node.items(&format!("/mailings/{id}/entries?status=IN_DOUBT"))[0]["entryId"].clone();
    let resolved = node.post(&format!("/mailings/{id}/entries/{line}/resolve"), r#"{"as":"resend"}"#);
    assert_eq!(resolved.status, 200, "{}", resolved.body);
    node.until(&id, "it is sent again", |mailing| count(mailing, "sent") == 2);
}

#[test]
fn a_locked_mailing_keeps_no_other_from_being_sent() {
    let fleet = Fleet::postgres();
    let variables = [("SEMEL_MAILINGS_RATE", "40/s")];
    let node = Node::start_as(&fleet, ALL, &variables);
    let first = node.mailing("first.csv", list(100));
    node.until(&first, "it is being sent", |mailing| count(mailing, "sent") > 5);
    let second = fleet.runtime.block_on(async {
        let mut other = PgConnection::connect(&fleet.place.url).await.unwrap();
        let mut tx = other.begin().await.unwrap();
        let sql = "SELECT number FROM mailings WHERE id = $1 FOR UPDATE";
        sqlx::query(sql).bind(&first).execute(&mut *tx).await.unwrap();
        let second = thread::scope(|scope| {
            let other = || {
                let second = created(&node.upload("second.csv", list(20), &MESSAGE));
                node.until(&second, "the other is completed", |mailing| mailing["status"] == "COMPLETED");
                second
            };
            scope.spawn(other).join().unwrap()
        });
        tx.rollback().await.unwrap();
        second
    });
    node.completed(&first);
    assert_eq!(node.mails().len(), 120);
    for (id, addresses) in [(&first, 100), (&second, 20)] {
        assert_eq!(count(&node.shown(id), "sent"), addresses);
    }
}
