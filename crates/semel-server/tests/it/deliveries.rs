//! The laws of deliveries: a notification arrives once at an endpoint that honours keys, and is never repeated without
//! a decision at one that does not.

use std::{
    collections::HashSet,
    net::{TcpListener, TcpStream},
    time::{Duration, Instant},
};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::{
    desk::{execute, post, serve, shown},
    endpoint::{Does, Endpoint},
    place::{Place, on_both_databases},
    proposals::rows,
    support::{Answer, SOON, Server, eventually, send},
};

on_both_databases! {
    an_event_reaches_the_endpoint_of_its_recipients_channel
    a_stop_waits_for_the_calls_that_are_open
    a_notification_is_delivered_with_all_that_the_endpoint_needs
    many_notifications_on_two_nodes_arrive_once_each
    a_channel_without_an_endpoint_stays_pending
    a_refusal_by_the_endpoint_is_final_and_shown_with_its_status
    an_endpoint_that_is_busy_is_called_again_under_the_same_key
    a_delivery_fails_after_its_last_attempt
    an_endpoint_that_cannot_be_reached_is_tried_again
    a_409_from_the_endpoint_is_retried_under_the_same_key
    no_redirection_is_followed
    a_cut_connection_is_in_doubt_under_hold_and_stays_so
    a_cut_connection_is_called_again_under_rerun
    no_answer_in_time_is_in_doubt_under_hold
    a_node_killed_after_the_call_leaves_doubt_under_hold
    a_node_killed_after_the_call_calls_again_with_the_same_key_under_rerun
    a_node_killed_at_any_point_leaves_status_and_operation_in_agreement
    a_person_can_resolve_a_delivery_as_sent
    a_person_can_have_a_delivery_sent_again
    a_person_can_resolve_a_delivery_as_failed
    a_settled_delivery_cannot_be_resolved
    a_notification_resolved_as_sent_is_not_sent_by_a_later_endpoint
    a_running_delivery_cannot_be_resolved
    an_unreachable_endpoint_counts_no_attempt
    a_waiting_delivery_is_shown_with_its_error_and_attempt
    deliveries_of_a_killed_node_continue_within_seconds
}

/// The notification that waits, as the service shows it.
fn waiting(server: &Server) -> Value {
    shown(server, "/notifications?status=PENDING")["items"][0].clone()
}

fn a_waiting_delivery_is_shown_with_its_error_and_attempt(place: &Place) {
    one(place);
    // It is unreachable: nothing was sent, and the first attempt is still to be made.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = format!("http://{address}/deliver");
    let mut variables = email(&url, "hold");
    variables.push(("SEMEL_NOTIFICATIONS_CHANNELS_EMAIL_BACKOFF", "10m"));
    variables.push(("RUST_LOG", "warn"));
    let log = place.path("log");
    let mut command = place.semel(["serve", "--listen", "127.0.0.1:0", "--roles", ROLES]);
    let said = std::fs::File::create(&log).unwrap();
    let server = Server::start_with(command.envs(variables.iter().copied()).stderr(said));
    eventually(SOON, "it says why", || {
        waiting(&server)["lastError"].as_str().is_some_and(|why| why.contains("reached"))
    });
    assert_eq!((&waiting(&server)["attempt"], &waiting(&server)["status"]), (&json!(1), &json!("PENDING")));
    assert_eq!(waiting(&server)["error"], serde_json::Value::Null, "that is why one has ended, and this one has not");
    // It is reachable and busy: one attempt was made, and the next is far away.
    let endpoint = Endpoint::on(TcpListener::bind(address).unwrap(), [Does::Answers(503)]);
    eventually(SOON, "it says why", || waiting(&server)["lastError"].as_str().is_some_and(|why| why.contains("503")));
    assert_eq!((&waiting(&server)["attempt"], endpoint.calls().len()), (&json!(1), 1));
    drop(server);
    // The log has a line for each, with the ids and without the content.
    let log = std::fs::read_to_string(log).unwrap();
    for said in ["could not be reached", "503"] {
        let parts = [said, "notification=1", "event=\"e1\"", "attempt=1", "error="];
        let told = log.lines().any(|line| parts.iter().all(|part| line.contains(part)));
        assert!(told, "no line has {parts:?}: {log}");
    }
    assert!(!log.contains("table"), "the payload is in the log: {log}");
}

/// The endpoint may take half a minute to answer: the lease of its call is shorter and renewed.
fn deliveries_of_a_killed_node_continue_within_seconds(place: &Place) {
    one(place);
    let endpoint = Endpoint::that([]);
    let url = endpoint.url();
    let mut variables = email(&url, "rerun");
    variables.push(("SEMEL_NOTIFICATIONS_CHANNELS_EMAIL_TIMEOUT", "30s"));
    let _other = serve(place, "api", &[]);
    let dying = [&variables[..], &[("SEMEL_CRASH", "deliver.sent:1")]].concat();
    serve(place, ROLES, &dying).process.end();
    let killed = Instant::now();
    let _server = serve(place, ROLES, &variables);
    eventually(Duration::from_secs(60), "it is sent", || statuses(place) == ["SENT"]);
    assert!(killed.elapsed() < Duration::from_secs(22), "{:?}", killed.elapsed());
    assert_eq!(endpoint.calls().len(), 2);
}

/// The settings of the channel EMAIL.
pub(crate) fn email<'a>(url: &'a str, on_lost: &'a str) -> Vec<(&'a str, &'a str)> {
    vec![
        ("SEMEL_NOTIFICATIONS_CHANNELS_EMAIL_URL", url),
        ("SEMEL_NOTIFICATIONS_CHANNELS_EMAIL_ON_LOST", on_lost),
        ("SEMEL_NOTIFICATIONS_CHANNELS_EMAIL_TIMEOUT", "20s"),
        ("SEMEL_NOTIFICATIONS_CHANNELS_EMAIL_BACKOFF", "50ms"),
        ("SEMEL_NOTIFICATIONS_CHANNELS_EMAIL_MAX_ATTEMPTS", "3"),
        ("SEMEL_SWEEP_EVERY", "200ms"),
    ]
}

const ROLES: &str = "api,worker,sweeper";

fn start(place: &Place, endpoint: &Endpoint, on_lost: &str) -> Server {
    serve(place, ROLES, &email(&endpoint.url(), on_lost))
}

/// Bytes as they are stored, in a statement.
pub(crate) fn stored(place: &Place, text: &str) -> String {
    let hex = hex::encode([&[1, 0], text.as_bytes()].concat());
    if place.url.starts_with("sqlite:") { format!("X'{hex}'") } else { format!("'\\x{hex}'::bytea") }
}

/// An event that was fanned out to these users by a channel.
pub(crate) fn fanned_out(place: &Place, users: u32, channel: &str) {
    let payload = stored(place, r#"{"table":5}"#);
    execute(
        place,
        &format!(
            "INSERT INTO notification_fanouts
                 (tenant, event_id, kind, aggregate_type, event_type, payload, revision)
             VALUES ('default', 'e1', 'customer', 'CUSTOMER', 'RESERVATION_MADE', {payload}, 0)"
        ),
    );
    execute(
        place,
        &format!(
            "WITH RECURSIVE counted (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM counted WHERE n < {users})
             INSERT INTO notifications (tenant, event_id, kind, user_id, notification_type)
             SELECT 'default', 'e1', 'customer', 'u' || n, '{channel}' FROM counted"
        ),
    );
}

pub(crate) fn statuses(place: &Place) -> Vec<String> {
    rows(place, "SELECT status FROM notifications ORDER BY id")
}

fn error(place: &Place) -> String {
    rows(place, "SELECT COALESCE(error, '') FROM notifications ORDER BY id").remove(0)
}

fn becomes(place: &Place, status: &str) {
    eventually(SOON, &format!("it is {status}"), || statuses(place) == [status]);
}

/// A database with its tables, and one notification by EMAIL.
pub(crate) fn one(place: &Place) {
    drop(serve(place, "api", &[]));
    fanned_out(place, 1, "EMAIL");
}

/// All the way: directory, event, outbox, broker, fan-out, call.
fn an_event_reaches_the_endpoint_of_its_recipients_channel(place: &Place) {
    let endpoint = Endpoint::that([]);
    let server = serve(place, "api,relay,worker", &email(&endpoint.url(), "hold"));
    let mut connection = TcpStream::connect(server.address).unwrap();
    let body = r#"{"groupId":"g1","channels":["EMAIL","SMS"],"addresses":{"EMAIL":"ana@example.com"}}"#;
    send(&mut connection, "PUT", "/recipients/customer/u1", &[("host", "localhost")], body.as_bytes());
    let put = Answer::read(connection);
    assert!((200..300).contains(&put.status), "{}", put.body);
    let event = json!({
        "eventId": "e1", "aggregateType": "CUSTOMER", "aggregateId": "g1", "eventType": "RESERVATION_MADE",
        "payload": { "table": 5 },
    });
    for _ in 0..2 {
        assert_eq!(post(&server, "/events", &event.to_string()).status, 202);
    }
    eventually(SOON, "the mail is sent", || {
        rows(place, "SELECT notification_type FROM notifications WHERE status = 'SENT'") == ["EMAIL"]
    });
    let calls = endpoint.calls();
    assert_eq!((calls.len(), &calls[0].body["address"]), (1, &json!("ana@example.com")));
    assert_eq!((&calls[0].body["userId"], &calls[0].body["payload"]), (&json!("u1"), &json!({ "table": 5 })));
    assert_eq!(rows(place, "SELECT notification_type FROM notifications WHERE status = 'PENDING'"), ["SMS"]);
}

fn a_stop_waits_for_the_calls_that_are_open(place: &Place) {
    one(place);
    let endpoint = Endpoint::that([Does::Waits]);
    let mut server = start(place, &endpoint, "hold");
    endpoint.is_called(1);
    server.process.signal(Signal::TERM);
    // The stop has begun when no connection is accepted any more.
    eventually(SOON, "the server stops", || TcpStream::connect(server.address).is_err());
    endpoint.let_go();
    assert!(server.process.end().success());
    assert_eq!((statuses(place), endpoint.calls().len()), (vec!["SENT".to_owned()], 1));
}

fn a_notification_is_delivered_with_all_that_the_endpoint_needs(place: &Place) {
    one(place);
    let address = stored(place, r#"{"EMAIL":"ana@example.com"}"#);
    execute(
        place,
        &format!(
            "INSERT INTO notification_recipients (tenant, kind, user_id, group_id, channels, addresses, since)
             VALUES ('default', 'customer', 'u1', 'g', 'EMAIL', {address}, 1)"
        ),
    );
    let endpoint = Endpoint::that([]);
    let _server = start(place, &endpoint, "hold");
    becomes(place, "SENT");
    let calls = endpoint.calls();
    assert_eq!(calls.len(), 1);
    let expected = json!({
        "notificationId": calls[0].body["notificationId"], "eventId": "e1", "aggregateType": "CUSTOMER",
        "eventType": "RESERVATION_MADE", "kind": "customer", "userId": "u1", "notificationType": "EMAIL",
        "address": "ana@example.com", "payload": { "table": 5 },
    });
    assert_eq!(calls[0].body, expected);
    assert!(calls[0].key().starts_with("semel_") && calls[0].key().len() > 20, "{}", calls[0].key());
    assert!(calls[0].header("semel-fence").parse::<i64>().unwrap() > 0);
    assert_eq!(calls[0].header("content-type"), "application/json");
    assert_eq!(
        rows(place, "SELECT CAST(count(*) AS TEXT) FROM notifications WHERE sent_at > created_at - 1000"),
        ["1"]
    );
}

fn many_notifications_on_two_nodes_arrive_once_each(place: &Place) {
    drop(serve(place, "api", &[]));
    fanned_out(place, 200, "EMAIL");
    let endpoint = Endpoint::that([]);
    let _nodes = [start(place, &endpoint, "hold"), start(place, &endpoint, "hold")];
    eventually(SOON, "all are sent", || statuses(place).iter().all(|status| status == "SENT"));
    let keys = endpoint.keys();
    assert_eq!((keys.len(), keys.into_iter().collect::<HashSet<_>>().len()), (200, 200));
}

fn a_channel_without_an_endpoint_stays_pending(place: &Place) {
    one(place);
    execute(
        place,
        "INSERT INTO notifications (tenant, event_id, kind, user_id, notification_type)
         VALUES ('default', 'e1', 'customer', 'u1', 'SMS')",
    );
    let endpoint = Endpoint::that([]);
    let _server = start(place, &endpoint, "hold");
    eventually(SOON, "the one with an endpoint is sent", || statuses(place) == ["SENT", "PENDING"]);
    assert_eq!(endpoint.calls().len(), 1);
}

fn a_refusal_by_the_endpoint_is_final_and_shown_with_its_status(place: &Place) {
    one(place);
    let endpoint = Endpoint::that([Does::Answers(422)]);
    let _server = start(place, &endpoint, "hold");
    becomes(place, "FAILED");
    assert!(error(place).contains("422"), "{}", error(place));
    assert_eq!(endpoint.calls().len(), 1);
}

fn an_endpoint_that_is_busy_is_called_again_under_the_same_key(place: &Place) {
    one(place);
    let endpoint = Endpoint::that([Does::Answers(503), Does::Answers(429)]);
    let _server = start(place, &endpoint, "hold");
    becomes(place, "SENT");
    let keys = endpoint.keys();
    assert_eq!(keys, [keys[0].clone(), keys[0].clone(), keys[0].clone()]);
    let fences: Vec<i64> = endpoint.calls().iter().map(|call| call.header("semel-fence").parse().unwrap()).collect();
    assert!(fences.is_sorted() && fences[0] < fences[2], "a later attempt has a higher fence: {fences:?}");
    assert_eq!(error(place), "");
}

fn a_delivery_fails_after_its_last_attempt(place: &Place) {
    one(place);
    let endpoint = Endpoint::that([Does::Answers(500); 9]);
    let _server = start(place, &endpoint, "hold");
    becomes(place, "FAILED");
    assert_eq!(endpoint.calls().len(), 3, "as often as max_attempts says");
    assert!(error(place).contains("500"), "{}", error(place));
    let why = place.json(["why", "--scope", "notifications/deliver.EMAIL", "1", "--json"]);
    assert_eq!(why["standing"], "parked", "{why:#}");
    assert!(told(place).contains("\nIts policy allows no further attempt: it runs again only if"), "{}", told(place));
}

fn an_endpoint_that_cannot_be_reached_is_tried_again(place: &Place) {
    one(place);
    // The port is closed, and opened again later.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let _server = serve(place, ROLES, &email(&format!("http://{address}/deliver"), "hold"));
    eventually(SOON, "it was tried", || error(place).contains("could not be reached"));
    assert_eq!(statuses(place), ["PENDING"]);
    let endpoint = Endpoint::on(TcpListener::bind(address).unwrap(), []);
    becomes(place, "SENT");
    assert_eq!(endpoint.calls().len(), 1);
}

fn a_409_from_the_endpoint_is_retried_under_the_same_key(place: &Place) {
    one(place);
    let endpoint = Endpoint::that([Does::Answers(409)]);
    let _server = start(place, &endpoint, "hold");
    endpoint.is_called(1);
    becomes(place, "SENT");
    assert_eq!(endpoint.keys().len(), 2);
    assert_eq!(endpoint.keys()[0], endpoint.keys()[1]);
}

fn no_redirection_is_followed(place: &Place) {
    one(place);
    let endpoint = Endpoint::that([Does::Answers(307)]);
    let _server = start(place, &endpoint, "hold");
    becomes(place, "FAILED");
    assert_eq!(endpoint.calls().len(), 1, "the key goes to no other server");
}

fn a_cut_connection_is_in_doubt_under_hold_and_stays_so(place: &Place) {
    drop(serve(place, "api", &[]));
    fanned_out(place, 2, "EMAIL");
    let endpoint = Endpoint::that([Does::Cuts, Does::Cuts]);
    let server = start(place, &endpoint, "hold");
    eventually(SOON, "both are in doubt", || statuses(place) == ["IN_DOUBT", "IN_DOUBT"]);
    assert!(error(place).contains("lost"), "{}", error(place));
    drop(server);
    // A node that has delivered something else since has read everything.
    execute(
        place,
        "INSERT INTO notifications (tenant, event_id, kind, user_id, notification_type)
         VALUES ('default', 'e1', 'customer', 'u9', 'EMAIL')",
    );
    let _server = start(place, &endpoint, "hold");
    eventually(SOON, "the new one is sent", || statuses(place) == ["IN_DOUBT", "IN_DOUBT", "SENT"]);
    assert_eq!(endpoint.calls().len(), 3, "there were no further calls");
}

fn a_cut_connection_is_called_again_under_rerun(place: &Place) {
    one(place);
    let endpoint = Endpoint::that([Does::Cuts]);
    let _server = start(place, &endpoint, "rerun");
    becomes(place, "SENT");
    let keys = endpoint.keys();
    assert_eq!(keys, [keys[0].clone(), keys[0].clone()]);
}

fn no_answer_in_time_is_in_doubt_under_hold(place: &Place) {
    one(place);
    let endpoint = Endpoint::that([Does::Hangs]);
    let url = endpoint.url();
    let mut variables = email(&url, "hold");
    variables.push(("SEMEL_NOTIFICATIONS_CHANNELS_EMAIL_TIMEOUT", "500ms"));
    let _server = serve(place, ROLES, &variables);
    becomes(place, "IN_DOUBT");
    assert!(error(place).contains("500ms"), "{}", error(place));
    assert_eq!(endpoint.calls().len(), 1);
}

/// A node that dies after the endpoint has accepted the call and before that is stored.
fn killed_after_the_call(place: &Place, endpoint: &Endpoint, on_lost: &str) {
    let url = endpoint.url();
    let mut variables = email(&url, on_lost);
    // The lease of a call is as long as its timeout, up to ten seconds: the next node has to wait for its expiry.
    variables.push(("SEMEL_NOTIFICATIONS_CHANNELS_EMAIL_TIMEOUT", "5s"));
    variables.push(("SEMEL_CRASH", "deliver.sent:1"));
    serve(place, ROLES, &variables).process.end();
    assert_eq!((endpoint.calls().len(), statuses(place)), (1, vec!["PENDING".to_owned()]));
}

fn a_node_killed_after_the_call_leaves_doubt_under_hold(place: &Place) {
    one(place);
    let endpoint = Endpoint::that([]);
    killed_after_the_call(place, &endpoint, "hold");
    let server = start(place, &endpoint, "hold");
    becomes(place, "IN_DOUBT");
    assert_eq!(endpoint.calls().len(), 1, "never twice by itself");
    let told = shown(&server, "/notifications/1");
    assert_eq!((&told["attempt"], &told["lastError"]), (&json!(1), &serde_json::Value::Null), "{told}");
    assert!(told["error"].as_str().unwrap().contains("expired"), "{told}");
}

fn a_node_killed_after_the_call_calls_again_with_the_same_key_under_rerun(place: &Place) {
    one(place);
    let endpoint = Endpoint::that([]);
    killed_after_the_call(place, &endpoint, "rerun");
    let _server = start(place, &endpoint, "rerun");
    becomes(place, "SENT");
    let keys = endpoint.keys();
    assert_eq!(keys, [keys[0].clone(), keys[0].clone()], "an endpoint that honours keys sees a repeat");
}

/// Killed before, in and after the commit that settles a delivery: the notification's status always equals the
/// operation's state.
fn a_node_killed_at_any_point_leaves_status_and_operation_in_agreement(place: &Place) {
    one(place);
    // A node without the channel enqueues the delivery and cannot run it, so the first run to settle is the delivery's.
    let without_channel = serve(place, ROLES, &[]);
    let waiting = "SELECT state FROM semel_operations WHERE kind = 'deliver.EMAIL'";
    eventually(SOON, "the delivery is enqueued", || rows(place, waiting) == ["pending"]);
    drop(without_channel);
    // The first call fails, the next one is taken.
    let endpoint = Endpoint::that([Does::Answers(503)]);
    let url = endpoint.url();
    let mut variables = email(&url, "rerun");
    variables.push(("SEMEL_NOTIFICATIONS_CHANNELS_EMAIL_TIMEOUT", "5s"));
    for point in ["settle.before:1", "store.projected:1", "store.write.saved:1", "settle.after:1"] {
        let dying = [&variables[..], &[("SEMEL_CRASH", point)]].concat();
        serve(place, ROLES, &dying).process.end();
        let agree = "SELECT n.status || ' ' || o.state FROM notifications AS n
                     JOIN semel_operations AS o ON o.service = 'notifications' AND o.key = CAST(n.id AS TEXT)
                      AND o.kind = 'deliver.EMAIL'";
        let stand = rows(place, agree).remove(0);
        assert!(
            ["PENDING processing", "PENDING failed", "PENDING timed_out", "SENT completed"].contains(&stand.as_str()),
            "{point}: {stand}"
        );
    }
    let _server = serve(place, ROLES, &variables);
    eventually(Duration::from_secs(60), "it is sent", || statuses(place) == ["SENT"]);
    let keys: HashSet<_> = endpoint.keys().into_iter().collect();
    assert_eq!(keys.len(), 1, "every call went under the same key");
}

/// A notification in doubt, and the path to resolve it.
fn in_doubt(place: &Place, endpoint: &Endpoint) -> (Server, String) {
    one(place);
    let server = start(place, endpoint, "hold");
    becomes(place, "IN_DOUBT");
    let id = endpoint.calls()[0].body["notificationId"].clone();
    (server, format!("/notifications/{id}/resolve"))
}

/// The story of the delivery, as the ledger tells it.
fn told(place: &Place) -> String {
    place.say(["why", "--scope", "notifications/deliver.EMAIL", "1", "--quiet"])
}

fn a_person_can_resolve_a_delivery_as_sent(place: &Place) {
    let endpoint = Endpoint::that([Does::Cuts]);
    let (server, path) = in_doubt(place, &endpoint);
    for body in ["{}", r#"{"status":"SENT"}"#, r#"{"status":"GONE","reason":"x"}"#, r#"{"status":"SENT","reason":" "}"#]
    {
        assert_eq!(post(&server, &path, body).problem(), "invalid-fields", "{body}");
    }
    let answer = post(&server, &path, r#"{"status":"SENT","reason":"Ana has it"}"#);
    assert_eq!((answer.status, &answer.json()["status"]), (200, &json!("SENT")), "{}", answer.body);
    assert_eq!(statuses(place), ["SENT"]);
    assert_eq!((endpoint.calls().len(), error(place)), (1, String::new()));
    let story = told(place);
    assert!(story.contains("Ana has it") && story.contains("local"), "{story}");
    let again = post(&server, &path, r#"{"status":"SENT","reason":"again"}"#);
    assert_eq!(again.status, 200, "saying the same again is harmless: {}", again.body);
}

fn a_person_can_have_a_delivery_sent_again(place: &Place) {
    let endpoint = Endpoint::that([Does::Cuts]);
    let (server, path) = in_doubt(place, &endpoint);
    assert_eq!(post(&server, &path, r#"{"status":"PENDING","reason":"it has nothing"}"#).status, 200);
    becomes(place, "SENT");
    let keys = endpoint.keys();
    assert_eq!(keys, [keys[0].clone(), keys[0].clone()]);
}

fn a_person_can_resolve_a_delivery_as_failed(place: &Place) {
    let endpoint = Endpoint::that([Does::Cuts]);
    let (server, path) = in_doubt(place, &endpoint);
    assert_eq!(post(&server, &path, r#"{"status":"FAILED","reason":"too late"}"#).status, 200);
    assert_eq!((statuses(place), error(place)), (vec!["FAILED".to_owned()], "too late".to_owned()));
    // A failed one can still be sent again.
    assert_eq!(post(&server, &path, r#"{"status":"PENDING","reason":"not too late"}"#).status, 200);
    becomes(place, "SENT");
    assert_eq!(endpoint.calls().len(), 2);
}

fn a_settled_delivery_cannot_be_resolved(place: &Place) {
    one(place);
    let endpoint = Endpoint::that([]);
    let server = start(place, &endpoint, "hold");
    becomes(place, "SENT");
    let id = &endpoint.calls()[0].body["notificationId"];
    for status in ["FAILED", "PENDING"] {
        let body = json!({ "status": status, "reason": "x" }).to_string();
        let answer = post(&server, &format!("/notifications/{id}/resolve"), &body);
        assert_eq!((answer.status, answer.problem().as_str()), (409, "delivery-settled"), "{}", answer.body);
        assert_eq!(answer.json()["notificationStatus"], "SENT");
    }
    let body = r#"{"status":"SENT","reason":"x"}"#;
    for id in ["999999", "x"] {
        assert_eq!(post(&server, &format!("/notifications/{id}/resolve"), body).status, 404, "{id}");
    }
    assert_eq!((statuses(place), endpoint.calls().len()), (vec!["SENT".to_owned()], 1));
}

fn a_notification_resolved_as_sent_is_not_sent_by_a_later_endpoint(place: &Place) {
    let server = serve(place, "api", &[]);
    fanned_out(place, 3, "EMAIL");
    execute(
        place,
        "INSERT INTO notifications (tenant, event_id, kind, user_id, notification_type)
         VALUES ('default', 'e1', 'customer', 'u1', 'IN_APP')",
    );
    let ids = rows(place, "SELECT CAST(id AS TEXT) FROM notifications ORDER BY id");
    let say = |server: &Server, id: &str, status: &str| {
        let body = json!({ "status": status, "reason": "our own mailer" }).to_string();
        post(server, &format!("/notifications/{id}/resolve"), &body)
    };
    // PENDING is its status already; and IN_APP notifications get their place without a decision.
    for (id, status) in [(&ids[0], "PENDING"), (&ids[3], "SENT")] {
        let answer = say(&server, id, status);
        assert_eq!(answer.problem(), "delivery-settled", "{}", answer.body);
        assert_eq!(answer.json()["notificationStatus"], "PENDING");
        let detail = answer.json()["detail"].as_str().unwrap().to_owned();
        assert!(detail.starts_with("This notification is PENDING") && !answer.body.contains("settled."), "{detail}");
    }
    for _ in 0..2 {
        for (id, status) in [(&ids[0], "SENT"), (&ids[1], "FAILED")] {
            let answer = say(&server, id, status);
            assert_eq!((answer.status, &answer.json()["status"]), (200, &json!(status)), "{}", answer.body);
        }
    }
    assert_eq!(statuses(place), ["SENT", "FAILED", "PENDING", "PENDING"]);
    let sent = rows(place, "SELECT CAST(id AS TEXT) FROM notifications WHERE sent_at IS NOT NULL");
    assert_eq!(sent, [ids[0].clone()]);
    let story = place.say(["why", "--scope", "notifications/deliver.EMAIL", &ids[0], "--quiet"]);
    assert!(story.contains("our own mailer") && story.contains("local"), "{story}");
    assert_eq!(say(&server, &ids[0], "FAILED").problem(), "delivery-settled");
    drop(server);

    // The ledger knows, even if the statuses were not written.
    execute(place, "UPDATE notifications SET status = 'PENDING', sent_at = NULL, error = NULL");
    let endpoint = Endpoint::that([]);
    let _server = start(place, &endpoint, "hold");
    eventually(SOON, "all are looked at", || statuses(place) == ["SENT", "FAILED", "SENT", "SENT"]);
    let called: Vec<_> = endpoint.calls().iter().map(|call| call.body["notificationId"].to_string()).collect();
    assert_eq!(called, [ids[2].clone()], "only the one without a decision");
}

fn a_running_delivery_cannot_be_resolved(place: &Place) {
    one(place);
    let endpoint = Endpoint::that([Does::Waits]);
    let server = start(place, &endpoint, "hold");
    endpoint.is_called(1);
    let path = format!("/notifications/{}/resolve", endpoint.calls()[0].body["notificationId"]);
    for status in ["SENT", "FAILED"] {
        let answer = post(&server, &path, &json!({ "status": status, "reason": "x" }).to_string());
        assert_eq!((answer.status, answer.problem().as_str()), (409, "delivery-running"), "{}", answer.body);
    }
    assert_eq!(statuses(place), ["PENDING"]);
    endpoint.let_go();
    becomes(place, "SENT");
    assert_eq!(endpoint.calls().len(), 1);
}

fn an_unreachable_endpoint_counts_no_attempt(place: &Place) {
    one(place);
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = format!("http://{address}/deliver");
    let mut variables = email(&url, "hold");
    variables.push(("SEMEL_NOTIFICATIONS_CHANNELS_EMAIL_MAX_ATTEMPTS", "2"));
    let _server = serve(place, ROLES, &variables);
    eventually(SOON, "it says why", || error(place).contains("could not be reached"));
    eventually(SOON, "it was tried as often as it may fail", || told(place).matches("released by").count() >= 2);
    assert_eq!(statuses(place), ["PENDING"]);
    // Both attempts are left: one that fails, and one that does not.
    let endpoint = Endpoint::on(TcpListener::bind(address).unwrap(), [Does::Answers(503)]);
    becomes(place, "SENT");
    assert_eq!(endpoint.calls().len(), 2);
}
