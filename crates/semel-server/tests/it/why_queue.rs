//! How `semel why` describes enqueued work: the stored data is enough for the story.

use std::time::Duration;

use semel::{
    Backoff, Fingerprint, Key, Kind, Ledger, OnLost, Options, Outcome, Policy, Priority, Scope, State, Unfinished,
    Work, Worker,
    fleet::{Fleet as _, Sign},
    messaging::{Message, Origin, Topic},
    prelude::*,
    store::{Limits, Want},
};
use semel_store::Database;

use crate::{
    desk::{Desk, execute},
    place::{Place, on_both_databases},
    support::{SOON, eventually},
};

on_both_databases! {
    an_enqueued_run_is_shown_from_the_queue_on
    a_pending_operation_is_shown_with_its_time
    a_pause_and_a_missing_handler_are_shown_by_what_waits
    a_cancelled_operation_is_shown_with_its_actor_and_reason
    an_operation_out_of_attempts_is_shown_as_failed_until_a_person_decides
    a_lost_run_under_hold_is_shown_as_in_doubt
    held_messages_and_actions_of_people_are_shown
}

/// A ledger for the test.
fn ledger(desk: &Desk) -> Ledger<Database> {
    Ledger::new(desk.database.clone(), Options { owner: "w1".to_owned(), ..Options::default() }).unwrap()
}

fn work(key: &str) -> Work {
    let scope = Scope::parse("shop/mail").unwrap();
    Work::new(scope, Key::new(key).unwrap(), Fingerprint::of_bytes(b"a")).payload("{}")
}

/// Runs the due operations of the kind until `k` is in a state after so many failures.
fn run(desk: &Desk, ledger: &Ledger<Database>, fails: bool, until: (State, u32)) {
    let kind = Kind::leased("shop", "mail", move |_| async move {
        if fails { Err(Unfinished::failed("no luck")) } else { Ok(Outcome::kept("done")) }
    });
    desk.block(async {
        let (stop, stopped) = tokio::sync::watch::channel(false);
        let worker = tokio::spawn(Worker::new(ledger).on(kind).run(stopped));
        let (scope, key) = (Scope::parse("shop/mail").unwrap(), Key::new("k").unwrap());
        let reached = async {
            loop {
                let row = ledger.store().by_key(&scope, &key).await.unwrap().unwrap();
                if (row.state, row.failures) == until {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(SOON, reached).await.expect("it ends");
        stop.send_replace(true);
        worker.await.unwrap();
    });
}

/// The story, without its times.
fn told(place: &Place) -> Vec<String> {
    let story = place.say(["why", "k", "--scope", "shop/mail"]);
    let cut = |line: &str| match line.split_once("Z  ") {
        Some((time, rest)) if time.starts_with("20") => rest.to_owned(),
        _ => line.to_owned(),
    };
    story.lines().map(cut).collect()
}

fn an_enqueued_run_is_shown_from_the_queue_on(place: &Place) {
    let desk = Desk::at(place);
    let ledger = ledger(&desk);
    desk.block(ledger.enqueue(work("k").priority(Priority::new(1).unwrap()))).unwrap();
    run(&desk, &ledger, false, (State::Completed, 0));
    let told = told(place);
    assert_eq!(told[0], "k in default/shop/mail: it took effect");
    assert_eq!(told[2..4], ["enqueued, priority 1", "first run by w1"]);
    assert!(told[4].starts_with("completed by w1 after ") && told[4].ends_with(": 4 bytes of outcome"), "{told:#?}");
    let json = place.json(["why", "k", "--scope", "shop/mail", "--json"]);
    assert_eq!((&json["standing"], &json["operation"]["priority"]), (&"completed".into(), &1.into()));
    let run = &json["attempts"][0];
    assert_eq!((&run["startedAt"], &run["owner"]), (&json["operation"]["claimedAt"], &"w1".into()));
    assert!(run["startedAt"].as_str() > json["operation"]["createdAt"].as_str(), "{json:#}");
}

fn a_pending_operation_is_shown_with_its_time(place: &Place) {
    let desk = Desk::at(place);
    let ledger = ledger(&desk);
    desk.block(ledger.enqueue(work("k").delay(Duration::from_secs(3600)))).unwrap();
    let told = told(place);
    assert_eq!(told[0], "k in default/shop/mail: it waits to be run");
    assert!(told[2].starts_with("enqueued, not before 20"), "{told:#?}");
    assert!(told[4].starts_with("A worker runs it after 20"), "{told:#?}");
    let json = place.json(["why", "k", "--scope", "shop/mail", "--json"]);
    assert_eq!(
        (&json["operation"]["claimedAt"], &json["attempts"]),
        (&serde_json::Value::Null, &serde_json::json!([]))
    );
    let shown = place.say(["operations", "show", "k", "--scope", "shop/mail"]);
    assert!(shown.contains("\nnot before   20") && !shown.contains("\nclaimed "), "{shown}");
}

fn a_pause_and_a_missing_handler_are_shown_by_what_waits(place: &Place) {
    let desk = Desk::at(place);
    let ledger = ledger(&desk);
    desk.block(ledger.enqueue(work("k"))).unwrap();
    let json = || place.json(["why", "k", "--scope", "shop/mail", "--json"]);
    assert_eq!(told(place)[4], "No node that is running has a handler for shop/mail: see semel work nodes.");
    assert_eq!((&json()["paused"], &json()["hasHandler"]), (&serde_json::Value::Null, &false.into()));
    let sign = |kinds: &str| Sign { kinds: vec![kinds.to_owned()], ..Sign::default() };
    for kinds in ["shop/mail", "shop/*"] {
        desk.block(ledger.store().leave_sign(kinds, &sign(kinds), None)).unwrap();
        assert_eq!((told(place).len(), &json()["hasHandler"]), (5, &true.into()), "{kinds}");
        execute(place, "DELETE FROM semel_nodes");
    }
    place.say(["work", "pause", "shop", "mail", "--reason", "the server is away"]);
    let line = &told(place)[4];
    assert!(line.starts_with("No worker runs it: shop/mail is paused since 20"), "{line}");
    assert!(line.contains(" by ana@") && line.contains(", because: the server is away. "), "{line}");
    assert!(line.contains("semel work resume shop mail ") && line.ends_with("--reason '…'"), "{line}");
    assert_eq!(json()["paused"]["reason"], "the server is away");
    place.say(["work", "cancel", "k", "--scope", "shop/mail", "--reason", "not needed"]);
    assert!(!told(place).iter().any(|line| line.contains("paused")), "{:#?}", told(place));
}

fn a_cancelled_operation_is_shown_with_its_actor_and_reason(place: &Place) {
    let desk = Desk::at(place);
    let ledger = ledger(&desk);
    desk.block(async {
        ledger.enqueue(work("k")).await.unwrap();
        let id = ledger.store().by_key(&Scope::parse("shop/mail").unwrap(), &Key::new("k").unwrap()).await;
        ledger.cancel(id.unwrap().unwrap().id, "ana", "wrong address").await.unwrap();
    });
    let told = told(place);
    assert_eq!(told[0], "k in default/shop/mail: it was cancelled");
    assert_eq!(told[2..4], ["enqueued", "cancelled by ana, because: wrong address"], "told once: {told:#?}");
    let did = &place.json(["why", "k", "--scope", "shop/mail", "--json"])["audit"][0];
    assert_eq!((&did["action"], &did["actor"]), (&"operations.cancel".into(), &"ana".into()));
    assert_eq!((&did["before"]["state"], &did["after"]["state"]), (&"pending".into(), &"failed".into()));
}

fn an_operation_out_of_attempts_is_shown_as_failed_until_a_person_decides(place: &Place) {
    let desk = Desk::at(place);
    let ledger = ledger(&desk);
    let policy = Policy { max_attempts: Some(2), backoff: Backoff::NONE, ..Policy::default() };
    desk.block(ledger.enqueue(work("k").policy(policy))).unwrap();
    run(&desk, &ledger, true, (State::Failed, 2));
    let told = told(place);
    assert_eq!(told[0], "k in default/shop/mail: it failed");
    assert_eq!(
        told[2..5],
        ["enqueued", "the run by w1 failed: no luck", "claimed again by w1: attempt 2, after a run that failed",]
    );
    assert!(told[5].starts_with("the run by w1 failed after "), "{told:#?}");
    assert!(told[7].starts_with("Its policy allows no further attempt: it runs again only if"), "{told:#?}");
}

fn a_lost_run_under_hold_is_shown_as_in_doubt(place: &Place) {
    let desk = Desk::at(place);
    let ledger = ledger(&desk);
    let policy = Policy { lease: Duration::from_secs(1), on_lost: OnLost::Hold, ..Policy::default() };
    desk.block(async {
        ledger.enqueue(work("k").policy(policy.clone())).await.unwrap();
        let scope = Scope::parse("shop/mail").unwrap();
        let (most, since, limits) = (1, None, Limits::default());
        let want = Want { scope, most, since, policy, lease: None, limits };
        // A worker that is killed settles nothing.
        std::mem::forget(ledger.take(vec![want]).await.unwrap());
    });
    eventually(SOON, "the sweep finds it", || {
        place.say(["sweep"]);
        told(place)[0] == "k in default/shop/mail: it is in doubt whether it took effect"
    });
    let told = told(place);
    assert_eq!(
        told[2..5],
        ["enqueued", "first run by w1", "the lease of w1 expired; it is in doubt whether it took effect",]
    );
    assert!(told[6].starts_with("A person must resolve it: semel operations resolve k --scope "), "{told:#?}");
}

/// A held message is shown by the operation that wrote it; an action of a person is shown even if no note of it is
/// left.
fn held_messages_and_actions_of_people_are_shown(place: &Place) {
    let desk = Desk::at(place);
    let ledger = ledger(&desk);
    desk.block(ledger.enqueue(work("k"))).unwrap();
    run(&desk, &ledger, false, (State::Completed, 0));
    let scope = Scope::parse("shop/mail").unwrap();
    let operation = desk.block(ledger.store().by_key(&scope, &Key::new("k").unwrap())).unwrap().unwrap();
    let origin = Some(Origin { operation: operation.id, fence: operation.fence });
    let not_before = Some(operation.created_at + Duration::from_secs(3600));
    let topic = Topic::new("news").unwrap();
    desk.put(Message { origin, not_before, ..Message::new("default", topic, "made", "{}") });
    let told = || told(place);
    assert!(
        told()[6].starts_with("Its message ") && told()[6].ends_with(" to the topic news is waiting."),
        "{:#?}",
        told()
    );
    let json = place.json(["why", "k", "--scope", "shop/mail", "--json"]);
    assert_eq!((&json["messages"][0]["topic"], &json["messages"][0]["state"]), (&"news".into(), &"waiting".into()));

    desk.block(ledger.enqueue(work("other"))).unwrap();
    assert_eq!(place.json(["why", "other", "--scope", "shop/mail", "--json"])["messages"], serde_json::json!([]));
    place.say(["operations", "resolve", "other", "--scope", "shop/mail", "--as", "failed", "--reason", "not wanted"]);
    let story = place.say(["why", "other", "--scope", "shop/mail"]);
    assert_eq!(story.matches("not wanted").count(), 1, "{story}");
    execute(place, "DELETE FROM semel_journal");
    let story = place.say(["why", "other", "--scope", "shop/mail"]);
    assert!(story.contains("Z  fail by ana@") && story.contains(": not wanted\n"), "{story}");
}
