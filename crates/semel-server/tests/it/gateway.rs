//! The laws of requests with a key that go through the gateway.

use std::{
    net::{TcpListener, TcpStream},
    process::Command,
    thread,
};

use rustix::process::Signal;

use crate::{
    desk::execute,
    place::{Place, on_both_databases},
    support::{Answer, SOON, Server, eventually, send, stderr},
    upstream::Upstream,
    wire::Wire,
};

on_both_databases! {
    a_retry_gets_the_same_answer_and_the_upstream_one_request
    a_request_in_flight_is_answered_409_or_waited_for
    a_key_names_one_request_with_its_method_path_host_and_body
    an_upstream_that_cannot_be_reached_leaves_the_key_free
    an_upstream_lost_after_the_request_was_sent_leaves_it_in_doubt
    after_a_decision_the_story_shows_the_answer_to_repeats
    with_rerun_a_lost_request_runs_again
    a_request_continues_when_its_client_disconnects
    a_pinned_operation_cannot_be_purged
    a_gateway_killed_between_effect_and_answer_never_makes_a_second_effect
    a_repeat_of_a_key_whose_row_cannot_be_read_is_neither_executed_nor_replayed
}

pub(crate) fn gateway(place: &Place, upstream: &str) -> Command {
    place.semel(["gateway", "--listen", "127.0.0.1:0", "--upstream", upstream])
}

pub(crate) fn start(place: &Place, upstream: &Upstream) -> Server {
    Server::start_with(&mut gateway(place, &upstream.url))
}

fn start_with(place: &Place, upstream: &Upstream, settings: &[(&str, &str)]) -> Server {
    Server::start_with(gateway(place, &upstream.url).envs(settings.iter().copied()))
}

pub(crate) fn ask(server: &Server, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> TcpStream {
    let mut connection = TcpStream::connect(server.address).unwrap();
    let headers = [&[("host", "shop.example")], headers].concat();
    send(&mut connection, method, path, &headers, body.as_bytes());
    connection
}

/// A keyed request in JSON.
fn post(server: &Server, path: &str, key: &str, body: &str) -> Answer {
    Answer::read(ask(server, "POST", path, &[("idempotency-key", key), ("content-type", "application/json")], body))
}

pub(crate) const SCOPE: &str = "gateway/request";

/// The state of an operation.
pub(crate) fn state_of(place: &Place, scope: &str, key: &str) -> String {
    let shown = place.json(["operations", "show", key, "--scope", scope, "--json"]);
    shown["state"].as_str().unwrap().to_owned()
}

fn a_repeat_of_a_key_whose_row_cannot_be_read_is_neither_executed_nor_replayed(place: &Place) {
    let upstream = Upstream::start();
    let first = start(place, &upstream);
    assert_eq!(post(&first, "/orders", "damaged", "{}").status, 201);
    execute(place, "UPDATE semel_operations SET outcome = substr(outcome, 1, 1) WHERE key = 'damaged'");
    // Another process has no answer in memory.
    let server = start(place, &upstream);
    for _ in 0..2 {
        let told = post(&server, "/orders", "damaged", "{}");
        assert_eq!((told.status, told.problem().as_str()), (500, "row-unreadable"), "{}", told.body);
        assert_eq!(told.json()["id"], "damaged");
        assert_eq!(told.header("idempotent-replayed"), None);
    }
    assert_eq!(post(&server, "/orders", "whole", "{}").status, 201);
    assert_eq!(upstream.seen().len(), 2, "the damaged one was sent once");
}

fn a_retry_gets_the_same_answer_and_the_upstream_one_request(place: &Place) {
    let upstream = Upstream::start();
    let server = start(place, &upstream);
    let first = post(&server, "/orders?a=1", "\"k\"", "{}");
    assert_eq!((first.status, first.body.as_str()), (201, "/orders 1"));
    assert_eq!(first.header("idempotent-replayed"), None);
    // By another process too, which shares the ledger only.
    let other = start(place, &upstream);
    for again in [post(&server, "/orders?a=1", "k", "{}"), post(&other, "/orders?a=1", "k", "{}")] {
        assert_eq!((again.status, again.body.as_str()), (201, "/orders 1"));
        assert_eq!(again.header("location"), Some("/orders/1"));
        assert_eq!(again.header("idempotent-replayed"), Some("true"));
    }
    let seen = upstream.seen();
    let [seen] = &seen[..] else { panic!("{seen:?}") };
    assert_eq!(seen.line, "POST /orders?a=1 HTTP/1.1");
    assert_eq!(seen.header("idempotency-key"), ["\"k\""]);
    assert_eq!(seen.header("host"), ["shop.example"]);
    assert_eq!(seen.body, b"{}");
}

fn a_pinned_operation_cannot_be_purged(place: &Place) {
    let upstream = Upstream::start();
    let server = start_with(place, &upstream, &[("SEMEL_GATEWAY_PINNED", "true")]);
    assert_eq!(post(&server, "/orders", "k", "{}").status, 201);
    let shown = place.say(["operations", "show", "k", "--scope", SCOPE]);
    assert!(shown.contains("\npinned       yes\n"), "{shown}");
    for decision in [&["purge"][..], &["resolve", "--as", "retry"]] {
        let refused = place.run([&["operations"], decision, &["k", "--scope", SCOPE, "--reason", "x"]].concat());
        assert!(!refused.status.success());
        assert!(stderr(&refused).contains("is pinned: it cannot be changed until "), "{}", stderr(&refused));
    }
    for _ in 0..2 {
        assert_eq!(post(&server, "/orders", "k", "{}").header("idempotent-replayed"), Some("true"));
    }
    assert_eq!(upstream.effects(), 1);
}

fn a_request_in_flight_is_answered_409_or_waited_for(place: &Place) {
    let upstream = Upstream::start();
    let server = start(place, &upstream);
    let key = ("idempotency-key", "k");
    let first = ask(&server, "POST", "/slow", &[key], "a");
    eventually(SOON, "the upstream is at it", || upstream.effects() == 1);
    let meanwhile = Answer::read(ask(&server, "POST", "/slow", &[key], "a"));
    assert_eq!((meanwhile.status, meanwhile.problem().as_str()), (409, "in-flight"));
    assert_eq!(meanwhile.header("retry-after"), Some("1"));
    let other = Answer::read(ask(&server, "POST", "/slow", &[key], "b"));
    assert_eq!((other.status, other.problem().as_str()), (422, "payload-mismatch"));
    let waiting = ask(&server, "POST", "/slow", &[key, ("prefer", "wait=10")], "a");
    let waiting = thread::spawn(move || Answer::read(waiting));
    upstream.open_gate();
    assert_eq!(Answer::read(first).body, "/slow 1");
    let waited = waiting.join().unwrap();
    assert_eq!((waited.status, waited.body.as_str()), (201, "/slow 1"));
    assert_eq!(waited.header("idempotent-replayed"), Some("true"));
    assert_eq!(upstream.effects(), 1);
}

fn a_key_names_one_request_with_its_method_path_host_and_body(place: &Place) {
    let upstream = Upstream::start();
    let server = start(place, &upstream);
    assert_eq!(post(&server, "/orders", "k", "{}").status, 201);
    for (method, path, body) in
        [("POST", "/orders", "{ }"), ("POST", "/others", "{}"), ("PATCH", "/orders", "{}"), ("POST", "/orders?a", "{}")]
    {
        let headers = [("idempotency-key", "k"), ("content-type", "application/json")];
        let answer = Answer::read(ask(&server, method, path, &headers, body));
        assert_eq!((answer.status, answer.problem().as_str()), (422, "payload-mismatch"), "{method} {path} {body}");
    }
    let headers = [("host", "other.example"), ("idempotency-key", "k"), ("content-type", "application/json")];
    let mut connection = TcpStream::connect(server.address).unwrap();
    send(&mut connection, "POST", "/orders", &headers, b"{}");
    assert_eq!(Answer::read(connection).problem(), "payload-mismatch", "another host");
    assert_eq!(upstream.effects(), 1);
}

fn an_upstream_that_cannot_be_reached_leaves_the_key_free(place: &Place) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let server = Server::start_with(&mut gateway(place, &format!("http://{address}")));
    let answer = post(&server, "/orders", "k", "{}");
    assert_eq!((answer.status, answer.problem().as_str()), (502, "upstream-unreachable"));
    assert_eq!(answer.json()["retryable"], true);
    assert_eq!(server.get("/other").problem(), "upstream-unreachable", "without a key, too");
    let upstream = Upstream::start_on(TcpListener::bind(address).unwrap());
    assert_eq!(post(&server, "/orders", "k", "{}").status, 201);
    assert_eq!(upstream.effects(), 1);
}

fn an_upstream_lost_after_the_request_was_sent_leaves_it_in_doubt(place: &Place) {
    let upstream = Upstream::start();
    let server = start(place, &upstream);
    let lost = post(&server, "/lose", "k", "{}");
    assert_eq!((lost.status, lost.problem().as_str()), (502, "upstream-lost"));
    assert_eq!(lost.json()["retryable"], false);
    for _ in 0..2 {
        let again = post(&server, "/lose", "k", "{}");
        assert_eq!((again.status, again.problem().as_str()), (409, "in-doubt"));
    }
    assert_eq!(upstream.effects(), 1);
    assert_eq!(state_of(place, SCOPE, "k"), "in_doubt");
    let listed = place.say(["operations", "list", "--state", "in_doubt"]);
    assert!(listed.contains("gateway/request"), "{listed}");
    // A person finds out that nothing happened.
    place.say([
        "operations",
        "resolve",
        "k",
        "--scope",
        SCOPE,
        "--as",
        "retry",
        "--reason",
        "the upstream's log has nothing",
    ]);
    assert_eq!(post(&server, "/lose", "k", "{}").problem(), "upstream-lost");
    assert_eq!(upstream.effects(), 2);
}

/// A person knows that it took effect, and has no answer to store.
fn after_a_decision_the_story_shows_the_answer_to_repeats(place: &Place) {
    let upstream = Upstream::start();
    let server = start(place, &upstream);
    assert_eq!(post(&server, "/lose", "k", "{}").problem(), "upstream-lost");
    let decided =
        ["operations", "resolve", "k", "--scope", SCOPE, "--as", "completed", "--reason", "it is in the books"];
    place.say(decided);
    assert_eq!(post(&server, "/lose", "k", "{}").problem(), "response-not-kept");
    let story = place.say(["why", "k", "--scope", SCOPE]);
    assert!(story.contains("Every repeat is answered 409 response-not-kept: it took effect"), "{story}");
    assert!(story.contains("the connection to the upstream was lost"), "{story}");
    assert!(!story.contains("answered with this outcome") && !story.contains("0 bytes"), "{story}");
    assert!(!story.contains("answered 502"), "{story}");
}

fn with_rerun_a_lost_request_runs_again(place: &Place) {
    let upstream = Upstream::start();
    let server = start_with(place, &upstream, &[("SEMEL_GATEWAY_ON_LOST", "rerun")]);
    for effects in 1..=3 {
        let lost = post(&server, "/lose", "k", "{}");
        assert_eq!((lost.status, lost.problem().as_str()), (502, "upstream-lost"));
        assert_eq!(lost.json()["retryable"], true);
        assert_eq!(upstream.effects(), effects);
    }
    assert_eq!(post(&server, "/500", "other", "{}").status, 500);
    assert_eq!(post(&server, "/500", "other", "{}").status, 500);
    assert_eq!(upstream.effects(), 5);
    let fences: Vec<i64> = upstream.seen().iter().map(|seen| seen.header("semel-fence")[0].parse().unwrap()).collect();
    assert!(fences.is_sorted_by(|a, b| a < b), "every attempt has a higher fence: {fences:?}");
}

fn a_request_continues_when_its_client_disconnects(place: &Place) {
    let upstream = Upstream::start();
    let server = start(place, &upstream);
    let client = ask(&server, "POST", "/slow", &[("idempotency-key", "k")], "a");
    eventually(SOON, "the upstream is at it", || upstream.effects() == 1);
    drop(client);
    upstream.open_gate();
    eventually(SOON, "the outcome is stored", || state_of(place, SCOPE, "k") == "completed");
    let again = Answer::read(ask(&server, "POST", "/slow", &[("idempotency-key", "k")], "a"));
    assert_eq!((again.status, again.body.as_str()), (201, "/slow 1"));
    assert_eq!(upstream.effects(), 1);
}

fn a_gateway_killed_between_effect_and_answer_never_makes_a_second_effect(place: &Place) {
    let upstream = Upstream::start();
    let lease = [("SEMEL_GATEWAY_LEASE", "1s")];
    let mut server = start_with(place, &upstream, &lease);
    let _client = ask(&server, "POST", "/slow", &[("idempotency-key", "k")], "a");
    eventually(SOON, "the upstream is at it", || upstream.effects() == 1);
    server.process.signal(Signal::KILL);
    server.process.end();
    upstream.open_gate();
    let server = start_with(place, &upstream, &lease);
    let ask = || Answer::read(ask(&server, "POST", "/slow", &[("idempotency-key", "k")], "a"));
    eventually(SOON, "it is known to be in doubt", || match ask().problem().as_str() {
        "in-flight" => false,
        problem => problem == "in-doubt",
    });
    assert_eq!(ask().problem(), "in-doubt");
    assert_eq!(upstream.effects(), 1);
}

#[test]
fn the_status_of_the_upstream_decides_about_the_key() {
    let (place, upstream) = (Place::sqlite(), Upstream::start());
    let server = start_with(&place, &upstream, &[("SEMEL_GATEWAY_NOT_EXECUTED_STATUSES", "503,507")]);
    for (status, state, second, effects) in [
        (200, "completed", 200, 1),
        (302, "completed", 302, 1),
        (404, "completed", 404, 1),
        (401, "free", 401, 2),
        (403, "free", 403, 2),
        (409, "free", 409, 2),
        (429, "free", 429, 2),
        (500, "in_doubt", 409, 1),
        (502, "in_doubt", 409, 1),
        (503, "free", 503, 2),
        (507, "free", 507, 2),
    ] {
        let before = upstream.effects();
        let (path, key) = (format!("/{status}"), format!("key {status}").replace(' ', "-"));
        let first = post(&server, &path, &key, "{}");
        assert_eq!((first.status, first.header("idempotent-replayed")), (status, None));
        assert!(first.body.starts_with(&path), "the first caller gets the upstream's own answer");
        if state != "free" {
            assert_eq!(state_of(&place, SCOPE, &key), state, "{status}");
        }
        assert_eq!(post(&server, &path, &key, "{}").status, second, "{status}");
        assert_eq!(upstream.effects() - before, effects, "{status}");
    }
}

#[test]
fn an_upstream_that_does_not_answer_in_time_leaves_it_in_doubt() {
    let (place, upstream) = (Place::sqlite(), Upstream::start());
    let server = start_with(&place, &upstream, &[("SEMEL_GATEWAY_TIMEOUT", "300ms")]);
    let late = post(&server, "/silent", "k", "{}");
    assert_eq!((late.status, late.problem().as_str()), (504, "upstream-timeout"));
    assert_eq!(post(&server, "/silent", "k", "{}").problem(), "in-doubt");
    let unkeyed = Answer::read(ask(&server, "POST", "/silent", &[], "{}"));
    assert_eq!((unkeyed.status, unkeyed.problem().as_str()), (504, "upstream-timeout"));
    eventually(SOON, "each has reached the upstream", || upstream.effects() >= 2);
    assert_eq!(upstream.effects(), 2);
}

#[test]
fn an_answer_that_is_too_large_to_keep_reaches_the_first_caller_whole() {
    let (place, upstream) = (Place::sqlite(), Upstream::start());
    let server = start(&place, &upstream);
    let first = post(&server, "/large", "k", "{}");
    assert_eq!((first.status, first.body.len()), (201, 2 << 20));
    let again = post(&server, "/large", "k", "{}");
    assert_eq!((again.status, again.problem().as_str()), (409, "response-not-kept"));
    assert_eq!(again.header("location"), Some("/large/1"));
    assert_eq!(upstream.effects(), 1);
}

#[test]
fn a_request_whose_answer_breaks_off_is_not_executed_again() {
    let (place, upstream) = (Place::sqlite(), Upstream::start());
    let server = start(&place, &upstream);
    let _ = std::io::Read::read_to_end(
        &mut ask(&server, "POST", "/half", &[("idempotency-key", "k")], "{}"),
        &mut Vec::new(),
    );
    let again = Answer::read(ask(&server, "POST", "/half", &[("idempotency-key", "k")], "{}"));
    assert_eq!((again.status, again.problem().as_str()), (409, "response-not-kept"));
    assert_eq!(upstream.effects(), 1);
}

#[test]
fn a_fence_from_a_client_is_removed() {
    let (place, upstream) = (Place::sqlite(), Upstream::start());
    let server = start(&place, &upstream);
    let forged = ("semel-fence", "999999");
    let hop = ("connection", "idempotency-key");
    Answer::read(ask(&server, "POST", "/orders", &[("idempotency-key", "k"), forged, hop], "{}"));
    Answer::read(ask(&server, "POST", "/orders", &[forged], "{}"));
    let seen = upstream.seen();
    let [fence] = seen[0].header("semel-fence")[..] else { panic!("{seen:?}") };
    assert!(fence != "999999" && fence.parse::<i64>().unwrap() > 0);
    assert_eq!(seen[0].header("idempotency-key"), ["k"]);
    assert_eq!(seen[1].header("semel-fence"), [""; 0]);
}

#[test]
fn an_invalid_key_and_an_oversized_body_are_not_passed_on() {
    let (place, upstream) = (Place::sqlite(), Upstream::start());
    let server = start_with(&place, &upstream, &[("SEMEL_GATEWAY_REQUEST_LIMIT", "1KiB")]);
    let twice = [("idempotency-key", "a"), ("idempotency-key", "b")];
    assert_eq!(Answer::read(ask(&server, "POST", "/orders", &twice, "{}")).problem(), "key-invalid");
    let large = "x".repeat(1025);
    assert_eq!(post(&server, "/orders", "k", &large).problem(), "body-too-large");
    assert_eq!(upstream.effects(), 0);
    assert_eq!(Answer::read(ask(&server, "POST", "/orders", &[], &large)).status, 201, "without a key it is streamed");
    assert_eq!(post(&server, "/orders", "k", &large[..1024]).status, 201, "the key was not used up");
}

#[test]
fn a_body_that_times_out_leaves_the_key_free() {
    let (place, upstream) = (Place::sqlite(), Upstream::start());
    let server = start_with(&place, &upstream, &[("SEMEL_GATEWAY_TIMEOUT", "300ms")]);
    let mut connection = TcpStream::connect(server.address).unwrap();
    let head =
        b"POST /orders HTTP/1.1\r\nhost: a\r\nconnection: close\r\nidempotency-key: k\r\ncontent-length: 2\r\n\r\n{";
    std::io::Write::write_all(&mut connection, head).unwrap();
    assert_eq!(Answer::read(connection).problem(), "body-timeout");
    assert_eq!(upstream.effects(), 0);
    drop(server);
    // By a gateway with time for an answer.
    assert_eq!(post(&start(&place, &upstream), "/orders", "k", "{}").status, 201);
}

#[test]
fn heavy_equal_requests_by_two_gateways_make_one_effect() {
    let (place, upstream) = (Place::postgres(), Upstream::start());
    let servers = [start(&place, &upstream), start(&place, &upstream)];
    let headers = [("idempotency-key", "k"), ("prefer", "wait=20")];
    let asked: Vec<_> = (0..60).map(|n| ask(&servers[n % 2], "POST", "/slow", &headers, "a")).collect();
    eventually(SOON, "the upstream is at it", || upstream.effects() == 1);
    upstream.open_gate();
    let answers: Vec<_> = asked.into_iter().map(Answer::read).collect();
    assert!(answers.iter().all(|answer| (answer.status, answer.body.as_str()) == (201, "/slow 1")), "{answers:?}");
    let replayed = answers.iter().filter(|answer| answer.header("idempotent-replayed").is_some()).count();
    assert_eq!((replayed, upstream.effects()), (59, 1));
}

#[test]
fn equal_keys_of_two_tenants_are_independent() {
    let (place, upstream) = (Place::sqlite(), Upstream::start());
    let settings = [("SEMEL_GATEWAY_TENANT_HEADER", "x-tenant"), ("SEMEL_GATEWAY_TRUSTED_PROXIES", "127.0.0.0/8")];
    let server = start_with(&place, &upstream, &settings);
    let of =
        |tenant| Answer::read(ask(&server, "POST", "/orders", &[("idempotency-key", "k"), ("x-tenant", tenant)], "{}"));
    assert_eq!(
        (of("ana").body, of("bob").body, of("ana").body),
        ("/orders 1".into(), "/orders 2".into(), "/orders 1".into())
    );
    assert_eq!(post(&server, "/orders", "k", "{}").problem(), "tenant-unknown");
    assert_eq!(upstream.effects(), 2);
    assert_eq!(state_of(&place, "ana/gateway/request", "k"), "completed");
}

#[test]
fn a_tenant_header_counts_from_a_trusted_proxy_only() {
    let (place, upstream) = (Place::sqlite(), Upstream::start());
    let settings = [("SEMEL_GATEWAY_TENANT_HEADER", "x-tenant"), ("SEMEL_GATEWAY_TRUSTED_PROXIES", "10.0.0.0/8")];
    let server = start_with(&place, &upstream, &settings);
    let said = [("idempotency-key", "k"), ("x-tenant", "ana"), ("x-forwarded-for", "10.0.0.1")];
    assert_eq!(Answer::read(ask(&server, "POST", "/orders", &said, "{}")).problem(), "tenant-unknown");
    assert_eq!(upstream.effects(), 0);
    assert_eq!(Answer::read(ask(&server, "POST", "/orders", &said[1..], "{}")).status, 201);
    let seen = upstream.seen();
    assert_eq!((seen[0].header("x-tenant"), seen[0].header("x-forwarded-for")), (vec![], vec!["127.0.0.1"]));
}

#[test]
fn during_a_ledger_outage_keyed_requests_are_refused_and_others_pass() {
    let (place, upstream) = (Place::postgres(), Upstream::start());
    let mut wire = Wire::to_postgres();
    let url = wire.url(&place.url);
    let server = Server::start_with(gateway(&place, &upstream.url).args(["--database-url", &url]));
    wire.cut();
    let refused = post(&server, "/orders", "k", "{}");
    assert_eq!((refused.status, refused.problem().as_str()), (503, "store-unavailable"));
    assert_eq!(upstream.effects(), 0);
    assert_eq!(Answer::read(ask(&server, "POST", "/orders", &[], "{}")).status, 201);
    assert_eq!(server.get("/semel/readyz").status, 503);
    wire.mend();
    eventually(SOON, "the ledger is back", || post(&server, "/orders", "k", "{}").status == 201);
    assert_eq!(upstream.effects(), 2);
}
