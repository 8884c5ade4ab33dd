//! The laws of the job that runs stored events through the present rules.

use std::{collections::BTreeSet, thread};

use serde_json::{Value, json};

use crate::{
    desk::{ended, execute, post, post_to, shown},
    endpoint::Endpoint,
    hooks::{deliver, event, forward, start_as, status},
    place::{Place, on_both_databases},
    proposals::rows,
    support::{SOON, Server, eventually},
    webhooks_stored::NO_RULES,
};

on_both_databases! {
    stored_events_are_run_by_type_and_time
    a_job_that_would_run_nothing_or_everything_by_mistake_is_refused
    a_job_whose_node_is_killed_midway_runs_each_event_once
}

const REPROCESS: &str = "/webhooks/stripe/events/reprocess";

/// Stores events, by many senders at once.
fn store(place: &Place, events: &[Value]) {
    let server = start_as(place, "api", &NO_RULES);
    thread::scope(|scope| {
        for part in events.chunks(events.len().div_ceil(8)) {
            let server = &server;
            scope.spawn(move || part.iter().for_each(|event| assert_eq!(status(&deliver(server, event)), "processed")));
        }
    });
}

fn of_type(id: &str, kind: &str) -> Value {
    let mut event = event(id, 1_700_000_000, id);
    event["type"] = json!(kind);
    event
}

fn result_of(server: &Server, id: &str) -> Value {
    shown(server, &format!("/webhooks/stripe/events/{id}"))["processing_result"]["result"].clone()
}

/// Creates a job, and waits until it has ended; returns how many events it ran.
fn done(server: &Server, body: &Value) -> Value {
    let answer = post(server, REPROCESS, &body.to_string());
    assert_eq!(answer.status, 202, "{}", answer.body);
    let job = ended(server, answer.json()["jobId"].as_str().unwrap());
    assert_eq!(job["state"], "done", "{job}");
    job["done"].clone()
}

fn stored_events_are_run_by_type_and_time(place: &Place) {
    let [old, paid, made, other] =
        [("old", "invoice.paid"), ("paid", "invoice.paid"), ("made", "customer.created"), ("other", "charge.made")]
            .map(|(id, kind)| of_type(id, kind));
    store(place, &[old, paid, made, other]);
    execute(place, "UPDATE semel_operations SET created_at = 1700000000000000 WHERE key = 'old'");
    let endpoint = Endpoint::that([]);
    let rules = format!("charge.*=store; {}", forward(&endpoint.url()));
    let server = start_as(place, "api,worker", &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &rules)]);
    let called = || endpoint.calls().iter().map(|call| call.body["id"].clone()).collect::<Vec<_>>();

    let recent = json!({ "reason": "a rule was added", "type": "invoice.paid", "since": "2024-01-01T00:00:00Z" });
    assert_eq!(done(&server, &recent), 1);
    eventually(SOON, "it is forwarded", || result_of(&server, "paid") == "forwarded");
    assert_eq!(called(), ["paid"]);
    assert_eq!(done(&server, &recent), 0, "it has taken effect");

    assert_eq!(done(&server, &json!({ "reason": "all of it", "until": "2024-01-01T00:00:00Z" })), 1);
    eventually(SOON, "it is forwarded", || result_of(&server, "old") == "forwarded");
    assert_eq!(done(&server, &json!({ "reason": "the rest", "all": true })), 1);
    eventually(SOON, "it is forwarded", || result_of(&server, "made") == "forwarded");
    assert_eq!(result_of(&server, "other"), "stored", "no rule takes it but to store it");
    assert_eq!(called(), ["paid", "old", "made"]);

    // With a named result, completed events run, too.
    assert_eq!(done(&server, &json!({ "reason": "they lost it", "type": "invoice.paid", "result": "forwarded" })), 2);
    endpoint.is_called(5);
    let audit = rows(place, "SELECT reason FROM semel_audit WHERE action = 'operations.rerun' ORDER BY id");
    assert_eq!(audit, ["a rule was added", "all of it", "the rest", "they lost it", "they lost it"]);
}

fn a_job_that_would_run_nothing_or_everything_by_mistake_is_refused(place: &Place) {
    let server = start_as(place, "api", &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", "invoice.*=outbox")]);
    for (body, said) in [
        (json!({}), "reason is missing"),
        (json!({ "reason": "a" }), "must be a filter by type, function, since or until"),
        (json!({ "reason": "a", "all": true, "type": "invoice.paid" }), "must be a filter"),
        (json!({ "reason": "a", "type": "customer.made" }), "type matches no rule"),
        (json!({ "reason": "a", "since": "yesterday" }), "since must be a time such as"),
        (json!({ "reason": "a", "all": true, "result": "completed" }), "result must be one of stored"),
        (json!({ "reason": "a", "all": true, "typ": "x" }), "typ"),
    ] {
        let refused = post(&server, REPROCESS, &body.to_string());
        assert_eq!(refused.problem(), "invalid-fields", "{body}");
        assert!(refused.json()["detail"].as_str().unwrap().contains(said), "{body}: {}", refused.body);
    }
    assert_eq!(post(&server, "/webhooks/none/events/reprocess", r#"{"reason":"a","all":true}"#).status, 404);
    assert!(rows(place, "SELECT key FROM semel_operations WHERE service = 'background-jobs'").is_empty());
    // With a key, one job.
    let keyed = || {
        let key = [("idempotency-key", "\"once\"")];
        let answer = post_to(server.address, REPROCESS, &key, r#"{"reason":"a","all":true}"#);
        assert_eq!(answer.status, 202, "{}", answer.body);
        answer.json()["jobId"].clone()
    };
    assert_eq!(keyed(), keyed());
    // An event may have the path's name as its id.
    assert_eq!(status(&deliver(&server, &of_type("reprocess", "invoice.paid"))), "processed");
    assert_eq!(shown(&server, REPROCESS)["event_id"], "reprocess");
}

/// Killed before the commit of its second step, and after it.
fn a_job_whose_node_is_killed_midway_runs_each_event_once(place: &Place) {
    let events: Vec<_> = (0..230).map(|n| of_type(&format!("evt_{n}"), "invoice.paid")).collect();
    store(place, &events);
    // The leases of the killed nodes expire soon.
    let [rule, lease] = [("SEMEL_WEBHOOKS_STRIPE_HANDLERS", "*=outbox"), ("SEMEL_WEBHOOKS_STRIPE_LEASE", "1s")];
    let asked = start_as(place, "api", &[rule]);
    let answer = post(&asked, REPROCESS, r#"{"reason":"a rule was added","type":"invoice.paid"}"#);
    let id = answer.json()["jobId"].as_str().unwrap().to_owned();
    for (point, done) in [("step.before_commit:2", 100), ("step.after_commit:1", 200)] {
        let mut worker = start_as(place, "worker,sweeper", &[rule, lease, ("SEMEL_CRASH", point)]);
        worker.process.end();
        let job = shown(&asked, &format!("/jobs/{id}"));
        assert_eq!((&job["state"], &job["done"]), (&json!("running"), &json!(done)), "{point}");
    }
    let _worker = start_as(place, "worker,sweeper", &[rule, lease]);
    let job = ended(&asked, &id);
    assert_eq!((&job["state"], &job["done"], &job["total"]), (&json!("done"), &json!(230), &json!(230)), "{job}");
    let published = || rows(place, "SELECT headers FROM semel_outbox");
    let stored = "SELECT key FROM semel_operations WHERE service = 'webhooks' AND state <> 'completed'";
    eventually(SOON * 3, "all of them ran", || published().len() >= 230 && rows(place, stored).is_empty());
    let ids: BTreeSet<_> = published()
        .iter()
        .map(|headers| serde_json::from_str::<Value>(headers).unwrap()["event-id"].to_string())
        .collect();
    assert_eq!((published().len(), ids.len()), (230, 230), "each once");
}
