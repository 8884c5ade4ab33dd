//! The laws of events without a matching rule, and of those whose message is unroutable.

use semel::State;
use serde_json::{Value, json};

use crate::{
    desk::{execute, listed, post, shown},
    endpoint::Endpoint,
    hooks::{SECRET, becomes, deliver, event, forward, outbox, start, start_as, status, stored},
    place::{Place, on_both_databases},
    proposals::rows,
    support::{SOON, Server, eventually, stderr, stdout},
    webhooks_monitor::STRIPE,
};

on_both_databases! {
    an_event_that_no_rule_takes_is_stored_and_runs_once_there_is_a_rule
    a_completed_event_runs_again_only_if_its_result_is_named
    concurrent_retries_of_one_event_run_it_once
    an_archived_event_runs_with_the_data_that_it_came_with
    a_stored_event_is_run_again_from_the_command_line
    the_command_line_and_the_routes_refuse_with_the_same_text
    a_failed_event_is_run_again_from_the_command_line
    a_stored_event_is_shown_as_stored_with_the_command_to_run_it
    the_story_of_an_event_that_ran_twice_is_in_the_order_of_time
    events_are_listed_by_their_result
    stored_events_are_counted_apart
    an_unroutable_message_is_reported_by_its_event_and_by_the_monitor
    a_skipped_message_of_an_earlier_run_does_not_change_the_last_result
    an_unreachable_endpoint_is_degraded_until_a_run_completes
    an_unreachable_endpoint_is_reported_despite_effects_of_other_rules
}

/// No rule at all: an empty variable counts as none.
pub(crate) const NO_RULES: [(&str, &str); 1] = [("SEMEL_WEBHOOKS_STRIPE_HANDLERS", "")];

const EVENT: &str = "/webhooks/stripe/events/evt_1";
const RETRY: &str = "/webhooks/stripe/events/evt_1/retry";

/// Stores an event by a server without rules.
fn store(place: &Place) -> Value {
    let server = start_as(place, "api", &NO_RULES);
    let paid = event("evt_1", 1_700_000_000, "a");
    assert_eq!(status(&deliver(&server, &paid)), "processed");
    assert_eq!(status(&deliver(&server, &paid)), "skipped");
    paid
}

fn result(server: &Server) -> Value {
    shown(server, EVENT)["processing_result"].clone()
}

fn an_event_that_no_rule_takes_is_stored_and_runs_once_there_is_a_rule(place: &Place) {
    store(place);
    assert!(outbox(place).is_empty());
    let server = start_as(place, "api,worker", &NO_RULES);
    assert_eq!(result(&server), json!({ "result": "stored" }));
    assert_eq!(shown(&server, STRIPE)["health"]["status"], "ok");
    let early = post(&server, RETRY, r#"{"reason":"now"}"#);
    assert_eq!((early.status, early.problem().as_str()), (409, "event-without-rule"));
    drop(server);

    let endpoint = Endpoint::that([]);
    let server = start_as(place, "api,worker", &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &forward(&endpoint.url()))]);
    assert!(post(&server, RETRY, "{}").json()["detail"].as_str().unwrap().contains("reason is missing"));
    let again = post(&server, RETRY, r#"{"reason":"there is a rule now"}"#);
    assert_eq!((again.status, &again.json()["processing_status"]), (202, &json!("pending")), "{}", again.body);
    eventually(SOON, "it is forwarded", || result(&server)["result"] == "forwarded");
    let told = shown(&server, EVENT);
    let ends: Vec<_> = told["attempts"].as_array().unwrap().iter().map(|run| run["end"].clone()).collect();
    assert_eq!(ends, ["completed", "completed"], "{told}");
    let first = &told["attempts"][0];
    assert!(first["ended_at"].is_string() && first["node"].is_string(), "{first}");
    assert!(first["ended_at"].as_str() < told["attempts"][1]["started_at"].as_str(), "{told}");
    assert_eq!(told["decisions"][0]["what"], "it runs once more: there is a rule now", "{told}");
    let audit = rows(place, "SELECT action || ' ' || reason FROM semel_audit ORDER BY id");
    assert_eq!(audit, ["operations.rerun there is a rule now"]);
    // It has taken effect, and another request changes nothing.
    assert_eq!(post(&server, RETRY, r#"{"reason":"again"}"#).problem(), "event-completed");
    assert_eq!(endpoint.calls().len(), 1);
    assert_eq!(endpoint.calls()[0].body["id"], "evt_1");
}

fn a_completed_event_runs_again_only_if_its_result_is_named(place: &Place) {
    let endpoint = Endpoint::that([]);
    let server = start_as(place, "api,worker", &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &forward(&endpoint.url()))]);
    assert_eq!(status(&deliver(&server, &event("evt_1", 1_700_000_000, "a"))), "processed");
    for body in [r#"{"reason":"a"}"#, r#"{"reason":"a","result":"stored"}"#, r#"{"reason":"a","result":"published"}"#] {
        let refused = post(&server, RETRY, body);
        assert_eq!((refused.status, refused.problem().as_str()), (409, "event-completed"), "{body}");
        assert_eq!(refused.json()["result"], "forwarded");
    }
    assert_eq!(post(&server, RETRY, r#"{"reason":"a","result":"done"}"#).problem(), "invalid-fields");
    assert_eq!(endpoint.calls().len(), 1);
    assert_eq!(post(&server, RETRY, r#"{"reason":"they lost it","result":"forwarded"}"#).status, 202);
    endpoint.is_called(2);
    let keys = endpoint.keys();
    assert_eq!(keys[0], keys[1], "an endpoint that has it still can tell");
    becomes(place, "evt_1", State::Completed);
}

fn concurrent_retries_of_one_event_run_it_once(place: &Place) {
    store(place);
    let rule = [("SEMEL_WEBHOOKS_STRIPE_HANDLERS", "*=outbox:news")];
    let nodes = [start_as(place, "api,worker", &rule), start_as(place, "api,worker", &rule)];
    std::thread::scope(|scope| {
        let asked: Vec<_> = (0..8)
            .map(|n| {
                let node = &nodes[n % 2];
                scope.spawn(move || post(node, RETRY, r#"{"reason":"there is a rule now"}"#).status)
            })
            .collect();
        let answers: Vec<_> = asked.into_iter().map(|asked| asked.join().unwrap()).collect();
        assert!(answers.contains(&202) && answers.iter().all(|status| [202, 409].contains(status)), "{answers:?}");
    });
    becomes(place, "evt_1", State::Completed);
    assert_eq!(outbox(place), ["news"]);
    assert_eq!(rows(place, "SELECT action FROM semel_audit WHERE action = 'operations.rerun'").len(), 1);
}

fn an_archived_event_runs_with_the_data_that_it_came_with(place: &Place) {
    store(place);
    execute(place, "UPDATE semel_operations SET archive_at = 1, look_at = 1");
    let sweeper = start_as(place, "sweeper", &NO_RULES);
    eventually(SOON, "it is archived", || stored(place, "stripe", "evt_1").unwrap().archived);
    drop(sweeper);
    let endpoint = Endpoint::that([]);
    let server = start_as(place, "api,worker", &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &forward(&endpoint.url()))]);
    assert_eq!(result(&server), json!({ "result": "stored" }));
    assert_eq!(post(&server, RETRY, r#"{"reason":"there is a rule now"}"#).status, 202);
    endpoint.is_called(1);
    assert_eq!(endpoint.calls()[0].body, event("evt_1", 1_700_000_000, "a"));
    becomes(place, "evt_1", State::Completed);
    assert!(!shown(&server, EVENT)["archived"].as_bool().unwrap());
}

fn a_stored_event_is_run_again_from_the_command_line(place: &Place) {
    store(place);
    let command = |arguments: &[&str]| person(place, "*=outbox:news", arguments);
    let rerun = ["webhooks", "rerun", "stripe", "evt_1", "--reason", "there is a rule now"];
    let done = command(&rerun);
    assert!(done.status.success() && stdout(&done).contains("runs again"), "{}", stderr(&done));
    let _worker = start_as(place, "worker", &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", "*=outbox:news")]);
    becomes(place, "evt_1", State::Completed);
    assert_eq!(outbox(place), ["news"]);
    let done = command(&rerun);
    assert!(stderr(&done).contains("nothing was changed: This event completed with the result published"));
    let job = command(&["webhooks", "reprocess", "stripe", "--type", "invoice.paid", "--reason", "a", "--json"]);
    let job: Value = serde_json::from_str(stdout(&job)).unwrap();
    assert_eq!((&job["kind"], &job["params"]["type"]), (&json!("reprocess-webhook-events"), &json!("invoice.paid")));
}

/// A command of a person whose configuration has the source `stripe`, with these rules.
fn person(place: &Place, rules: &str, arguments: &[&str]) -> std::process::Output {
    let mut command = place.semel(arguments);
    command.env("SEMEL_WEBHOOKS_STRIPE_KIND", "stripe").env("SEMEL_WEBHOOKS_STRIPE_SECRETS", SECRET);
    command.env("SEMEL_WEBHOOKS_STRIPE_HANDLERS", rules).output().unwrap()
}

fn the_command_line_and_the_routes_refuse_with_the_same_text(place: &Place) {
    store(place);
    let server = start_as(place, "api", &NO_RULES);
    let (one, many) = (["webhooks", "rerun"], ["webhooks", "reprocess"]);
    let by_type = |kind| ["stripe", "--type", kind];
    for (command, arguments, path, body) in [
        (one, &["nowhere", "evt_1"][..], "/webhooks/nowhere/events/evt_1/retry", json!({ "reason": "a" })),
        (many, &["nowhere", "--all"], "/webhooks/nowhere/events/reprocess", json!({ "reason": "a", "all": true })),
        (one, &["stripe", "evt_2"], "/webhooks/stripe/events/evt_2/retry", json!({ "reason": "a" })),
        (one, &["stripe", "evt_1"], RETRY, json!({ "reason": "a" })),
        (one, &["stripe", "evt_1", "--result", "forwarded"], RETRY, json!({ "reason": "a", "result": "forwarded" })),
        (
            many,
            &by_type("invoice.paid"),
            "/webhooks/stripe/events/reprocess",
            json!({ "reason": "a", "type": "invoice.paid" }),
        ),
    ] {
        let answer = post(&server, path, &body.to_string());
        assert!((400..500).contains(&answer.status), "{path}: {}", answer.body);
        let said = person(place, "", &[&command, arguments, &["--reason", "a"]].concat());
        assert_eq!(said.status.code(), Some(1), "{arguments:?}");
        let words = format!("nothing was changed: {}", answer.json()["detail"].as_str().unwrap());
        assert!(stderr(&said).contains(&words), "{words} in {}", stderr(&said));
    }
    assert!(
        rows(place, "SELECT action FROM semel_audit").is_empty()
            && rows(place, "SELECT key FROM semel_operations WHERE service = 'background-jobs'").is_empty()
    );
    let which = person(place, "", &["webhooks", "reprocess", "stripe", "--reason", "a"]);
    assert!(stderr(&which).contains("which events?"), "{}", stderr(&which));
    assert_eq!(which.status.code(), Some(2), "the flags are wrong");
    // A server with --dev has this source; no configuration does.
    let dev = place.run(["webhooks", "rerun", "stripe", "evt_1", "--reason", "a"]);
    assert!(stderr(&dev).contains("--dev is in no configuration"), "{}", stderr(&dev));
}

fn a_failed_event_is_run_again_from_the_command_line(place: &Place) {
    let endpoint = Endpoint::that([crate::endpoint::Does::Answers(500)]);
    let url = forward(&endpoint.url());
    let once = [("SEMEL_WEBHOOKS_STRIPE_HANDLERS", url.as_str()), ("SEMEL_WEBHOOKS_STRIPE_MAX_ATTEMPTS", "1")];
    let server = start_as(place, "api", &once);
    assert_eq!(deliver(&server, &event("evt_1", 1_700_000_000, "a")).status, 500);
    let done = person(place, &url, &["webhooks", "rerun", "stripe", "evt_1", "--reason", "it is mended"]);
    assert!(done.status.success(), "{}", stderr(&done));
    let _worker = start_as(place, "worker", &once);
    becomes(place, "evt_1", State::Completed);
}

fn a_stored_event_is_shown_as_stored_with_the_command_to_run_it(place: &Place) {
    store(place);
    let why = ["why", "evt_1", "--scope", "webhooks/stripe"];
    let story = place.say(why);
    assert!(story.starts_with("evt_1 in default/webhooks/stripe: it was stored, and no rule matched\n"), "{story}");
    assert!(!story.contains("took effect") && story.contains(": stored\n"), "{story}");
    let advice = "To run it through the present rules: semel webhooks rerun stripe evt_1 --reason '…'\n";
    assert!(story.ends_with(advice), "{story}");
    let here = place.say([&why[..], &["--database-url", &place.url]].concat());
    assert!(here.contains(" evt_1 --database-url ") && here.ends_with(" --reason '…'\n"), "{here}");
    let done = person(place, "*=outbox:news", &["webhooks", "rerun", "stripe", "evt_1", "--reason", "a"]);
    assert!(done.status.success(), "{}", stderr(&done));
    let _worker = start_as(place, "worker", &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", "*=outbox:news")]);
    becomes(place, "evt_1", State::Completed);
    assert!(place.say(why).starts_with("evt_1 in default/webhooks/stripe: it took effect\n"));
}

fn the_story_of_an_event_that_ran_twice_is_in_the_order_of_time(place: &Place) {
    store(place);
    execute(place, "UPDATE semel_operations SET archive_at = 1, look_at = 1");
    let sweeper = start_as(place, "sweeper", &NO_RULES);
    eventually(SOON, "it is archived", || stored(place, "stripe", "evt_1").unwrap().archived);
    drop(sweeper);
    let story = || place.say(["why", "evt_1", "--scope", "webhooks/stripe"]);
    let words = |story: &str| {
        let timed = story.lines().filter_map(|line| line.split_once("Z  "));
        let timed: Vec<_> =
            timed.map(|(at, line)| (at.to_owned(), line.split(' ').next().unwrap().to_owned())).collect();
        assert!(timed.is_sorted_by_key(|(at, _)| at.clone()), "{story}");
        timed.into_iter().map(|(_, word)| word).collect::<Vec<_>>()
    };
    assert_eq!(words(&story()), ["first", "completed", "the"], "it completed before its data went to the archive");
    let done = person(place, "*=outbox:news", &["webhooks", "rerun", "stripe", "evt_1", "--reason", "a"]);
    assert!(done.status.success(), "{}", stderr(&done));
    let _worker = start_as(place, "worker", &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", "*=outbox:news")]);
    becomes(place, "evt_1", State::Completed);
    assert_eq!(words(&story()), ["first", "completed", "the", "decided", "claimed", "completed"], "{}", story());
}

fn events_are_listed_by_their_result(place: &Place) {
    let rules = [("SEMEL_WEBHOOKS_STRIPE_HANDLERS", "customer.*=outbox:news")];
    let server = start_as(place, "api", &rules);
    for id in ["evt_1", "evt_2", "evt_3"] {
        assert_eq!(status(&deliver(&server, &event(id, 1_700_000_000, id))), "processed");
        assert_eq!(status(&deliver(&server, &crate::webhooks_monitor::customer(&format!("cus_{id}")))), "processed");
    }
    // An archived event is found, too.
    execute(place, "UPDATE semel_operations SET archive_at = 1, look_at = 1 WHERE key = 'evt_2'");
    let sweeper = start_as(place, "sweeper", &NO_RULES);
    eventually(SOON, "it is archived", || stored(place, "stripe", "evt_2").unwrap().archived);
    drop(sweeper);
    let events = |query: &str| listed(&server, &format!("/webhooks/stripe/events?{query}"), "event_id");
    assert_eq!(events("result=stored"), ["evt_3", "evt_2", "evt_1"]);
    assert_eq!(events("result=stored&limit=1"), ["evt_3", "evt_2", "evt_1"], "page by page");
    assert_eq!(events("result=stored&archived=false"), ["evt_3", "evt_1"]);
    assert_eq!(events("result=published&limit=2"), ["cus_evt_3", "cus_evt_2", "cus_evt_1"]);
    assert_eq!(events("result=stored&type=customer.created"), Vec::<Value>::new());
    assert_eq!(events("result=stored&status=failed"), Vec::<Value>::new());
    assert_eq!(events("result=").len(), 6);
    let wrong = server.get("/webhooks/stripe/events?result=done");
    assert_eq!((wrong.status, wrong.problem().as_str()), (400, "invalid-query"), "{}", wrong.body);
}

fn stored_events_are_counted_apart(place: &Place) {
    let server = start_as(place, "api", &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", "customer.*=outbox:news")]);
    assert_eq!(status(&deliver(&server, &event("evt_1", 1_700_000_000, "a"))), "processed");
    assert_eq!(status(&deliver(&server, &event("evt_1", 1_700_000_000, "a"))), "skipped");
    assert_eq!(status(&deliver(&server, &crate::webhooks_monitor::customer("cus_1"))), "processed");
    eventually(SOON, "it is counted", || shown(&server, STRIPE)["stored"] == 1);
    let told = shown(&server, STRIPE);
    assert_eq!((&told["totals"]["completed"], &told["stored"]), (&json!(2), &json!(1)), "{told}");
    for (query, n) in [("event_type=invoice.paid", 1), ("event_type=customer.created", 0)] {
        assert_eq!(shown(&server, &format!("{STRIPE}?{query}"))["stored"], n, "{query}");
    }
}

fn an_unroutable_message_is_reported_by_its_event_and_by_the_monitor(place: &Place) {
    let server = start_as(place, "api,relay", &[]);
    assert_eq!(status(&deliver(&server, &event("evt_1", 1_700_000_000, "a"))), "processed");
    eventually(SOON, "no queue takes it", || result(&server)["result"] == "unroutable");
    let told = result(&server);
    assert!(
        told["error"].is_string() && told["next"].as_str().unwrap().contains("bind a queue to the topic"),
        "{told}"
    );
    let health = shown(&server, STRIPE)["health"].clone();
    assert_eq!(health["status"], "degraded");
    let reason = health["reasons"][0].as_str().unwrap();
    assert!(
        reason.contains("1 message is unroutable: no queue is bound to the topic webhook.stripe.invoice.paid"),
        "{reason}"
    );

    let [id] = &listed(&server, "/outbox", "messageId")[..] else { panic!() };
    let skip = format!("/outbox/{}/skip", id.as_str().unwrap());
    assert_eq!(post(&server, &skip, r#"{"reason":"no consumer"}"#).status, 204);
    assert_eq!(result(&server)["result"], "skipped");
    assert_eq!(
        shown(&server, EVENT)["decisions"][0]["what"],
        format!("its message {} was skipped: no consumer", id.as_str().unwrap())
    );
    assert_eq!(shown(&server, STRIPE)["health"]["status"], "ok");
    drop(server);

    let server = start_as(place, "api", &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", "*=outbox:news")]);
    assert_eq!(status(&deliver(&server, &event("evt_2", 1_700_000_000, "a"))), "processed");
    let sent = || shown(&server, "/webhooks/stripe/events/evt_2")["processing_result"]["result"].clone();
    assert_eq!(sent(), "waiting", "no relay runs");
    let _relay = start_as(place, "relay", &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", "*=outbox:news")]);
    eventually(SOON, "it is published", || sent() == "published");
}

fn a_skipped_message_of_an_earlier_run_does_not_change_the_last_result(place: &Place) {
    let server = start_as(place, "api,relay", &[]);
    assert_eq!(status(&deliver(&server, &event("evt_1", 1_700_000_000, "a"))), "processed");
    eventually(SOON, "no queue takes it", || result(&server)["result"] == "unroutable");
    let [old] = &listed(&server, "/outbox", "messageId")[..] else { panic!() };
    drop(server);

    let server = start_as(place, "api,worker", &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", "*=outbox:news")]);
    assert_eq!(post(&server, RETRY, r#"{"reason":"a rule","result":"published"}"#).status, 202);
    eventually(SOON, "it ran by the new rule", || result(&server)["topic"] == "news");
    assert_eq!(post(&server, &format!("/outbox/{}/skip", old.as_str().unwrap()), r#"{"reason":"old"}"#).status, 204);
    assert_eq!(result(&server)["result"], "waiting", "the message of the last run is in the outbox");
}

/// As if the event had arrived so many seconds ago.
fn ago(place: &Place, id: &str, seconds: i64) {
    execute(
        place,
        &format!("UPDATE semel_operations SET created_at = created_at - {seconds}000000 WHERE key = '{id}'"),
    );
}

fn an_unreachable_endpoint_is_degraded_until_a_run_completes(place: &Place) {
    // A closed port.
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = forward(&format!("http://{address}/"));
    let server = start(place, &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &url)]);
    let health = || shown(&server, STRIPE)["health"].clone();
    assert_eq!(status(&deliver(&server, &event("evt_1", 1_700_000_000, "a"))), "accepted");
    ago(place, "evt_1", 40);
    let told = health();
    assert_eq!(told["status"], "degraded", "{told}");
    let reason = told["reasons"][0].as_str().unwrap();
    assert!(reason.contains("1 event has not taken effect") && reason.contains("cannot be reached"), "{reason}");
    // Also if the last run was long ago: the backoff grows.
    execute(
        place,
        "UPDATE semel_operations SET claimed_at = claimed_at - 600000000, created_at = created_at - 600000000",
    );
    assert_eq!(health()["status"], "degraded");

    let _endpoint = Endpoint::on(std::net::TcpListener::bind(address).unwrap(), []);
    assert_eq!(status(&deliver(&server, &event("evt_2", 1_700_000_000, "a"))), "processed");
    assert_eq!(health(), json!({ "status": "ok", "reasons": [] }), "it can be reached; evt_1 has its turn to come");
}

fn an_unreachable_endpoint_is_reported_despite_effects_of_other_rules(place: &Place) {
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let rules = format!("invoice.*=http://{address}/; customer.*=outbox:news");
    let server = start(place, &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &rules)]);
    assert_eq!(status(&deliver(&server, &event("evt_1", 1_700_000_000, "a"))), "accepted");
    ago(place, "evt_1", 40);
    let mut made = event("evt_2", 1_700_000_000, "a");
    made["type"] = json!("customer.created");
    assert_eq!(status(&deliver(&server, &made)), "processed");
    let told = shown(&server, STRIPE)["health"].clone();
    assert!(told["reasons"][0].as_str().unwrap_or_default().contains("cannot be reached"), "{told}");
}
