//! The laws of events that no rule takes, and of those whose message reaches nobody.

use semel::State;
use serde_json::{Value, json};

use crate::{
    desk::{execute, listed, post, shown},
    endpoint::Endpoint,
    hooks::{becomes, deliver, event, forward, outbox, start, start_as, status, stored},
    place::{Place, on_both_databases},
    proposals::rows,
    support::{SOON, Server, eventually, stderr},
    webhooks_monitor::STRIPE,
};

on_both_databases! {
    an_event_that_no_rule_takes_is_stored_and_runs_once_there_is_a_rule
    what_took_effect_runs_once_more_only_if_its_result_is_named
    two_who_ask_for_the_same_event_have_it_run_once
    an_archived_event_runs_with_the_data_that_it_came_with
    a_stored_event_is_run_again_from_the_command_line
    a_message_that_reaches_nobody_is_told_by_its_event_and_by_the_verdict
    a_message_of_an_earlier_run_that_is_skipped_says_nothing_of_the_last
    an_endpoint_that_is_away_is_told_by_the_verdict_until_a_run_completes
    an_effect_by_another_rule_hides_no_endpoint_that_is_away
}

/// No rule at all: an empty variable counts as none.
pub(crate) const NO_RULES: [(&str, &str); 1] = [("SEMEL_WEBHOOKS_STRIPE_HANDLERS", "")];

const EVENT: &str = "/webhooks/stripe/events/evt_1";
const RETRY: &str = "/webhooks/stripe/events/evt_1/retry";

/// Has an event stored by a server without rules.
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
    assert_eq!(told["decisions"][0]["what"], "it runs once more: there is a rule now", "{told}");
    let audit = rows(place, "SELECT action || ' ' || reason FROM semel_audit ORDER BY id");
    assert_eq!(audit, ["operations.rerun there is a rule now"]);
    // It has taken effect, and a word too many changes nothing.
    assert_eq!(post(&server, RETRY, r#"{"reason":"again"}"#).problem(), "event-completed");
    assert_eq!(endpoint.calls().len(), 1);
    assert_eq!(endpoint.calls()[0].body["id"], "evt_1");
}

fn what_took_effect_runs_once_more_only_if_its_result_is_named(place: &Place) {
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

fn two_who_ask_for_the_same_event_have_it_run_once(place: &Place) {
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
    let rerun = ["webhooks", "rerun", "stripe", "evt_1", "--reason", "there is a rule now"];
    assert!(place.say(rerun).contains("runs again"));
    let twice = place.run(rerun);
    assert!(stderr(&twice).contains("nothing was changed: it is pending"), "{}", stderr(&twice));
    let _worker = start_as(place, "worker", &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", "*=outbox:news")]);
    becomes(place, "evt_1", State::Completed);
    assert_eq!(outbox(place), ["news"]);
    let done = place.run(rerun);
    assert!(stderr(&done).contains("it was published, and took effect"), "{}", stderr(&done));
    let absent = place.run(["webhooks", "rerun", "stripe", "evt_2", "--reason", "a"]);
    assert!(stderr(&absent).contains("there is no event evt_2 of stripe"), "{}", stderr(&absent));
    let which = place.run(["webhooks", "reprocess", "stripe", "--reason", "a"]);
    assert!(stderr(&which).contains("which events?"), "{}", stderr(&which));
    let job = place.json(["webhooks", "reprocess", "stripe", "--type", "invoice.paid", "--reason", "a", "--json"]);
    assert_eq!((&job["kind"], &job["params"]["type"]), (&json!("reprocess-webhook-events"), &json!("invoice.paid")));
}

fn a_message_that_reaches_nobody_is_told_by_its_event_and_by_the_verdict(place: &Place) {
    let server = start_as(place, "api,relay", &[]);
    assert_eq!(status(&deliver(&server, &event("evt_1", 1_700_000_000, "a"))), "processed");
    eventually(SOON, "no queue takes it", || result(&server)["result"] == "unroutable");
    let told = result(&server);
    assert!(told["error"].is_string() && told["next"].as_str().unwrap().contains("listen on the topic"), "{told}");
    let health = shown(&server, STRIPE)["health"].clone();
    assert_eq!(health["status"], "degraded");
    let reason = health["reasons"][0].as_str().unwrap();
    assert!(
        reason.contains("1 message is unroutable: no queue takes the topic webhook.stripe.invoice.paid"),
        "{reason}"
    );

    let [id] = &listed(&server, "/outbox", "messageId")[..] else { panic!() };
    let skip = format!("/outbox/{}/skip", id.as_str().unwrap());
    assert_eq!(post(&server, &skip, r#"{"reason":"nobody listens"}"#).status, 204);
    assert_eq!(result(&server)["result"], "skipped");
    assert_eq!(
        shown(&server, EVENT)["decisions"][0]["what"],
        format!("its message {} was skipped: nobody listens", id.as_str().unwrap())
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

fn a_message_of_an_earlier_run_that_is_skipped_says_nothing_of_the_last(place: &Place) {
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

/// As if the event had come so many seconds ago.
fn ago(place: &Place, id: &str, seconds: i64) {
    execute(
        place,
        &format!("UPDATE semel_operations SET created_at = created_at - {seconds}000000 WHERE key = '{id}'"),
    );
}

fn an_endpoint_that_is_away_is_told_by_the_verdict_until_a_run_completes(place: &Place) {
    // A port that nobody listens on any more.
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
    // Also when the last run was long ago: the pauses grow.
    execute(
        place,
        "UPDATE semel_operations SET claimed_at = claimed_at - 600000000, created_at = created_at - 600000000",
    );
    assert_eq!(health()["status"], "degraded");

    let _endpoint = Endpoint::on(std::net::TcpListener::bind(address).unwrap(), []);
    assert_eq!(status(&deliver(&server, &event("evt_2", 1_700_000_000, "a"))), "processed");
    assert_eq!(health(), json!({ "status": "ok", "reasons": [] }), "it can be reached; evt_1 has its turn to come");
}

fn an_effect_by_another_rule_hides_no_endpoint_that_is_away(place: &Place) {
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
