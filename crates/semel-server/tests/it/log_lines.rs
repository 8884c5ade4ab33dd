//! The laws of the log: one line for each run that did not complete, with the names that `semel why` takes, and no
//! secret.

use std::{thread, time::Duration};

use rustix::process::Signal;
use semel::State;
use semel_http::webhooks::Verifier;

use crate::{
    desk::execute,
    endpoint::{Does, Endpoint},
    gateway::{ask, gateway},
    hooks::{SECRET, becomes, command, deliver, event, forward, post_raw, signed, signed_by, status, stored},
    place::{Place, on_both_databases},
    proposals::rows,
    serve_faults::{log, logged},
    support::{Answer, SOON, Server, eventually, send},
    upstream::Upstream,
};

on_both_databases! {
    a_failed_run_is_one_line_that_names_source_event_attempt_and_error
    an_unreachable_endpoint_is_shown_by_the_event_its_attempt_and_the_log
    a_lost_lease_is_one_line_of_the_node_that_finds_it
    events_without_a_source_are_logged_once
    a_channel_without_an_endpoint_is_not_logged
    a_delivery_that_a_stop_releases_is_one_line
    an_operation_in_doubt_is_one_line
    a_missing_upstream_answer_is_logged_with_the_key_and_the_story_has_the_request
    a_failed_run_of_a_job_is_one_line_that_names_job_kind_attempt_and_error
    a_dead_letter_is_one_line_that_names_the_message
    a_message_out_of_attempts_is_logged_with_the_attempt_and_the_error
    newer_data_that_cannot_be_settled_is_logged_with_the_event_and_the_key
    a_body_claim_that_cannot_be_settled_is_logged_with_the_event_and_the_key
    other_data_under_a_known_id_is_one_line_that_names_the_event
    requests_are_logged_only_if_configured
    messages_that_no_queue_takes_are_one_line_a_minute_that_names_the_topic
    a_retry_that_a_person_asks_for_is_a_line_that_names_source_and_event
}

/// A server whose log is kept.
fn start(place: &Place, roles: &str, variables: &[(&str, &str)]) -> Server {
    let mut command = command(place, roles, variables);
    logged(&mut command, place);
    Server::start_with(&mut command)
}

/// The lines of the log that have all of these words.
fn lines(place: &Place, words: &[&str]) -> Vec<String> {
    let lines = log(place);
    let has = |line: &&str| words.iter().all(|word| line.contains(word));
    lines.lines().filter(has).map(str::to_owned).collect()
}

/// Waits until there are so many lines with these words, and checks that there are no more.
fn told(place: &Place, times: usize, words: &[&str]) -> Vec<String> {
    eventually(SOON, &format!("{words:?} in {}", log(place)), || lines(place, words).len() >= times);
    let told = lines(place, words);
    assert_eq!(told.len(), times, "{words:?}: {told:#?}");
    told
}

/// The value of a field in a line.
fn field<'a>(line: &'a str, name: &str) -> &'a str {
    let fields = line.split([' ', '{', '}']);
    let found = fields.filter_map(|field| field.split_once('=')).find(|(found, _)| *found == name);
    found.unwrap_or_else(|| panic!("no {name} in {line}")).1.trim_matches('"')
}

fn nothing_secret(place: &Place, secrets: &[&str]) {
    let log = log(place);
    for secret in secrets.iter().chain(&[SECRET]) {
        assert!(!log.contains(secret), "{secret} is in the log: {log}");
    }
}

fn a_failed_run_is_one_line_that_names_source_event_attempt_and_error(place: &Place) {
    let endpoint = Endpoint::that([Does::Answers(500), Does::Answers(404), Does::Answers(500)]);
    let url = forward(&format!("{}?token=s3same", endpoint.url()));
    let server = start(place, "api", &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &url)]);
    for _ in 0..3 {
        assert_eq!(deliver(&server, &event("evt_1", 1_700_000_000, "a note of the customer")).status, 500);
    }
    let said = [
        ("1", "500 Internal Server Error", "a run failed; it may run again"),
        ("2", "404 Not Found", "a run failed; it may run again"),
        ("3", "500 Internal Server Error", "a run failed for the last time"),
    ];
    for (attempt, error, message) in said {
        let number = format!("attempt={attempt} ");
        let [line] = &told(place, 1, &["a run failed", &number])[..] else { panic!() };
        assert!(line.contains(message) && line.contains(error), "{line}");
        assert_eq!((field(line, "source"), field(line, "event")), ("stripe", "evt_1"), "{line}");
        assert_eq!(field(line, "scope"), "default/webhooks/stripe", "{line}");
        assert!(line.find(message) < line.find("scope="), "as in every line, the text comes before the fields: {line}");
        let story = place.say(["why", field(line, "key")]);
        assert!(story.contains("evt_1") && story.contains("failed"), "{story}");
    }
    told(place, 3, &["evt_1"]);
    nothing_secret(place, &["a note of the customer", "s3same", "in_1"]);
}

fn an_unreachable_endpoint_is_shown_by_the_event_its_attempt_and_the_log(place: &Place) {
    // A closed port.
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = forward(&format!("http://{address}/s3same"));
    let server = start(place, "api", &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &url)]);
    assert_eq!(status(&deliver(&server, &event("evt_1", 1_700_000_000, "a"))), "accepted");
    let shown = crate::desk::shown(&server, "/webhooks/stripe/events/evt_1");
    let error = shown["last_error"].as_str().unwrap_or_else(|| panic!("{shown}"));
    assert!(error.starts_with("the endpoint cannot be reached: "), "{error}");
    assert_eq!((&shown["processing_status"], &shown["retry_count"]), (&"pending".into(), &0.into()));
    assert_eq!((&shown["attempts"][0]["end"], &shown["attempts"][0]["error"]), (&"released".into(), &error.into()));
    let [line] = &told(place, 1, &["a run was released", "cannot be reached"])[..] else { panic!() };
    assert_eq!((field(line, "source"), field(line, "event"), field(line, "attempt")), ("stripe", "evt_1", "1"));
    let story = place.say(["why", field(line, "key")]);
    assert!(story.contains("the endpoint cannot be reached"), "{story}");
    nothing_secret(place, &["s3same"]);

    // Once it has taken effect, there is nothing to report.
    let _endpoint = Endpoint::on(std::net::TcpListener::bind(address).unwrap(), []);
    assert_eq!(status(&deliver(&server, &event("evt_1", 1_700_000_000, "a"))), "processed");
    assert_eq!(stored(place, "stripe", "evt_1").unwrap().error, None);
}

/// Of a source that is no longer configured. Pending body claims are not events and are not reported.
fn events_without_a_source_are_logged_once(place: &Place) {
    let endpoint = Endpoint::that([Does::Answers(500); 2]);
    let url = forward(&endpoint.url());
    let gone = [
        ("SEMEL_WEBHOOKS_GONE_KIND", "stripe"),
        ("SEMEL_WEBHOOKS_GONE_SECRETS", SECRET),
        ("SEMEL_WEBHOOKS_GONE_HANDLERS", url.as_str()),
        ("SEMEL_WEBHOOKS_GONE_BACKOFF", "1ms"),
    ];
    let server = start(place, "api", &gone);
    for id in ["evt_1", "evt_2"] {
        let body = event(id, 1_700_000_000, "a").to_string();
        assert_eq!(post_raw(server.address, "/webhooks/gone", &signed(body.as_bytes()), body.as_bytes()).status, 500);
    }
    drop(server);
    execute(
        place,
        "INSERT INTO semel_backlog (operation, tenant, service, kind, state, due)
         SELECT -id, tenant, service, 'gone/body', 'pending', 1 FROM semel_operations WHERE key = 'evt_1'",
    );
    let _worker = start(place, "worker", &[]);
    let [line] = &told(place, 1, &["no handler for"])[..] else { panic!() };
    assert_eq!((field(line, "service"), field(line, "kind"), field(line, "tenant")), ("webhooks", "gone", "default"));
    // Some rounds later.
    thread::sleep(Duration::from_secs(3));
    told(place, 1, &["no handler for"]);
}

/// Its notifications wait for an endpoint: that is no mistake.
fn a_channel_without_an_endpoint_is_not_logged(place: &Place) {
    crate::deliveries::one(place);
    let _server = start(place, "api,worker", &[]);
    let waits = || rows(place, "SELECT key FROM semel_backlog AS b JOIN semel_operations AS o ON o.id = b.operation");
    eventually(SOON, "it is enqueued", || waits().len() == 1);
    // Some rounds later.
    thread::sleep(Duration::from_secs(3));
    told(place, 0, &["no handler for"]);
}

fn a_delivery_that_a_stop_releases_is_one_line(place: &Place) {
    crate::deliveries::one(place);
    let endpoint = Endpoint::that([Does::Hangs]);
    let url = endpoint.url();
    let mut server = start(place, "api,worker", &crate::deliveries::email(&url, "rerun"));
    endpoint.is_called(1);
    server.process.signal(Signal::TERM);
    assert!(server.process.end().success());
    let [line] = &told(place, 1, &["a run was ended and is released"])[..] else { panic!() };
    assert_eq!(field(line, "scope"), "default/notifications/deliver.EMAIL");
    assert_eq!((field(line, "notification"), field(line, "attempt")), ("1", "1"), "{line}");
    assert!(line.contains("the node stopped while it ran"), "{line}");
}

fn a_lost_lease_is_one_line_of_the_node_that_finds_it(place: &Place) {
    let endpoint = Endpoint::that([Does::Hangs]);
    let url = forward(&endpoint.url());
    let variables = [
        ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", url.as_str()),
        ("SEMEL_WEBHOOKS_STRIPE_LEASE", "1s"),
        ("SEMEL_WEBHOOKS_STRIPE_MAX_CRASHES", "1"),
    ];
    let mut first = crate::hooks::start_as(place, "api", &variables);
    let (address, paid) = (first.address, event("evt_1", 1_700_000_000, "a").to_string());
    thread::spawn(move || {
        let mut connection = std::net::TcpStream::connect(address).unwrap();
        let signed = signed(paid.as_bytes());
        let headers: Vec<_> = signed.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        send(&mut connection, "POST", "/webhooks/stripe", &headers, paid.as_bytes());
        thread::sleep(SOON);
    });
    endpoint.is_called(1);
    first.process.signal(Signal::KILL);
    first.process.end();
    let _second = start(place, "sweeper", &variables);
    becomes(place, "evt_1", State::TimedOut);
    let [line] = &told(place, 1, &["a lease was lost"])[..] else { panic!() };
    assert!(line.contains("for the last time") && line.contains("expired"), "{line}");
    assert_eq!((field(line, "scope"), field(line, "attempt")), ("default/webhooks/stripe", "1"));
    assert_eq!(field(line, "key"), stored(place, "stripe", "evt_1").unwrap().short_hash());
}

fn an_operation_in_doubt_is_one_line(place: &Place) {
    let upstream = Upstream::start();
    let mut command = gateway(place, &upstream.url);
    logged(&mut command, place);
    let server = Server::start_with(&mut command);
    let key = ("idempotency-key", "s3same-key");
    let lost = Answer::read(ask(&server, "POST", "/lose", &[key], "s3same-body"));
    assert_eq!(lost.status, 502, "{}", lost.body);
    let [line] = &told(place, 1, &["in doubt"])[..] else { panic!() };
    assert_eq!((field(line, "scope"), field(line, "attempt")), ("default/gateway/request", "1"), "{line}");
    assert!(!field(line, "error").is_empty(), "{line}");
    let story = place.say(["why", field(line, "key")]);
    assert!(story.contains("s3same-key"), "the hash in the log is that of the key: {story}");
    nothing_secret(place, &["s3same"]);
}

fn a_failed_run_of_a_job_is_one_line_that_names_job_kind_attempt_and_error(place: &Place) {
    // A job that cannot be done, as an older version may have left it.
    drop(start(place, "api", &[]));
    let (id, kind) = ("00000000-0000-7000-8000-000000000000", "redrive-dead-letters");
    execute(
        place,
        &format!(
            "INSERT INTO semel_jobs (id, tenant, kind, params, actor, state)
             VALUES ('{id}', 'default', '{kind}', '{{\"odd\":1}}', 'ana', 'running')"
        ),
    );
    let server = start(place, "api,worker", &[]);
    let path = format!("/jobs/{id}");
    eventually(SOON, "it fails", || {
        let answer = server.get(&path);
        answer.status == 200 && answer.json()["state"] == "failed"
    });
    let [line] = &told(place, 1, &["a run failed for the last time", id])[..] else { panic!() };
    assert_eq!((field(line, "id"), field(line, "kind"), field(line, "attempt")), (id, kind, "1"), "{line}");
    assert!(line.contains("error=\"") && line.contains("params"), "{line}");
    let log = log(place);
    assert!(!log.contains("Failure {"), "{log}");
}

fn a_dead_letter_is_one_line_that_names_the_message(place: &Place) {
    let _server = start(place, "api,relay,worker", &[]);
    let body = r#"{"event_id":"x","event_type":"T","aggregate_type":"QUUX","recipientType":"BROADCAST","payload":{}}"#;
    let ids = crate::notifications_fanout::say(place, "notification.customer", &[body]);
    let [line] = &told(place, 1, &["a message became a dead letter"])[..] else { panic!() };
    assert_eq!((field(line, "message_id"), field(line, "consumer")), (ids[0].as_str(), "notification.customer"));
    assert!(!line.contains("attempt="), "it was not understood, so nothing was attempted: {line}");
}

fn a_message_out_of_attempts_is_logged_with_the_attempt_and_the_error(place: &Place) {
    let server = start(place, "api,relay,worker", &[("SEMEL_MESSAGES_MAX_ATTEMPTS", "2")]);
    let recipient = r#"{"groupId":"5","channels":["PUSH"]}"#;
    let put = crate::fleet::ask(server.address, "PUT", "/recipients/restaurant/10", recipient).unwrap();
    assert_eq!(put.status, 200, "{}", put.body);
    execute(place, "ALTER TABLE notifications RENAME TO notifications_away");
    let body = r#"{"event_id":"x","event_type":"T","aggregate_type":"RESTAURANT","recipientType":"BROADCAST",
        "restaurant_id":5,"payload":{"note":"s3same"}}"#;
    let id = crate::notifications_fanout::say(place, "notification.restaurant", &[body]).remove(0);
    let [dead] = &told(place, 1, &["a message became a dead letter"])[..] else { panic!() };
    let [failed] = &told(place, 1, &["a message failed; it is retried"])[..] else { panic!() };
    // The first run and its retry.
    for (line, attempt) in [(failed, "1"), (dead, "2")] {
        assert_eq!((field(line, "message_id"), field(line, "consumer")), (id.as_str(), "notification.restaurant"));
        assert_eq!(field(line, "attempt"), attempt, "{line}");
        let (_, error) = line.split_once(" error=").unwrap_or_else(|| panic!("no error in {line}"));
        assert!(error.contains("notifications"), "the table that is not there is named: {line}");
    }
    nothing_secret(place, &["s3same"]);
}

/// Makes the database refuse to complete the operations of a condition.
fn refuse_to_complete(place: &Place, condition: &str) {
    let when = format!("NEW.state = 'completed' AND {condition}");
    execute(
        place,
        &match place.url.starts_with("sqlite:") {
            true => format!(
                "CREATE TRIGGER refuse BEFORE UPDATE ON semel_operations WHEN {when}
                 BEGIN SELECT RAISE(ABORT, 'not this one'); END"
            ),
            false => format!(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql
                     AS $$ BEGIN RAISE EXCEPTION 'not this one'; END $$;
                 CREATE TRIGGER refuse BEFORE UPDATE ON semel_operations FOR EACH ROW WHEN ({when})
                     EXECUTE FUNCTION refuse()"
            ),
        },
    );
}

fn newer_data_that_cannot_be_settled_is_logged_with_the_event_and_the_key(place: &Place) {
    let endpoint = Endpoint::that([Does::Waits]);
    let server = start(place, "api", &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &forward(&endpoint.url()))]);
    thread::scope(|scope| {
        let older = scope.spawn(|| status(&deliver(&server, &event("evt_1", 100, "older"))));
        endpoint.is_called(1);
        assert_eq!(status(&deliver(&server, &event("evt_1", 200, "newer"))), "accepted");
        refuse_to_complete(place, "NEW.payload_order = 200");
        endpoint.let_go();
        assert_eq!(older.join().unwrap(), "processed");
    });
    let [line] = &told(place, 1, &["newer data could not be run to its end"])[..] else { panic!() };
    assert_eq!((field(line, "source"), field(line, "event")), ("stripe", "evt_1"), "{line}");
    assert_eq!((field(line, "scope"), field(line, "attempt")), ("default/webhooks/stripe", "1"), "{line}");
    assert_eq!(field(line, "key"), stored(place, "stripe", "evt_1").unwrap().short_hash(), "{line}");
    assert!(line.contains("not this one"), "{line}");
}

fn a_body_claim_that_cannot_be_settled_is_logged_with_the_event_and_the_key(place: &Place) {
    const FORGE: &str = "s3same of the forge";
    let variables = [("SEMEL_WEBHOOKS_GITHUB_KIND", "github"), ("SEMEL_WEBHOOKS_GITHUB_SECRETS", FORGE)];
    let server = start(place, "api", &variables);
    refuse_to_complete(place, "NEW.kind = 'github/body'");
    let (verifier, body) = (Verifier::github([FORGE]).unwrap(), br#"{"ref":"s3same"}"#);
    let mut headers = signed_by(&verifier, Some("guid-1"), body, Duration::ZERO);
    headers.push(("x-github-event".to_owned(), "push".to_owned()));
    assert_eq!(status(&post_raw(server.address, "/webhooks/github", &headers, body)), "processed");
    let [line] = &told(place, 1, &["the claim of an event's body could not be settled"])[..] else { panic!() };
    assert_eq!((field(line, "source"), field(line, "event")), ("github", "guid-1"), "{line}");
    assert_eq!(field(line, "scope"), "default/webhooks/github/body", "{line}");
    let story = place.say(["why", field(line, "key")]);
    assert!(story.contains("default/webhooks/github/body"), "the key is that of the bytes: {story}");
    nothing_secret(place, &["s3same"]);
}

fn other_data_under_a_known_id_is_one_line_that_names_the_event(place: &Place) {
    let server = start(place, "api", &[]);
    assert_eq!(status(&deliver(&server, &event("evt_1", 1_700_000_000, "a"))), "processed");
    assert_eq!(status(&deliver(&server, &event("evt_1", 1_700_000_000, "b"))), "skipped");
    let [line] = &told(place, 1, &["other data came under"])[..] else { panic!() };
    assert_eq!((field(line, "source"), field(line, "event")), ("stripe", "evt_1"), "{line}");
    assert_eq!(field(line, "key"), stored(place, "stripe", "evt_1").unwrap().short_hash(), "{line}");
}

fn a_missing_upstream_answer_is_logged_with_the_key_and_the_story_has_the_request(place: &Place) {
    let upstream = Upstream::start();
    let start = |timeout: &str| {
        let mut command = gateway(place, &upstream.url);
        logged(command.env("SEMEL_GATEWAY_TIMEOUT", timeout), place);
        Server::start_with(&mut command)
    };
    let asked = |server: &Server, key: &str, (method, path): (&str, &str), (status, words): (u16, &str)| {
        let answer = Answer::read(ask(server, method, path, &[("idempotency-key", key)], ""));
        assert_eq!(answer.status, status, "{}", answer.body);
        if status == 201 {
            return place.say(["why", key, "--scope", "gateway/request"]);
        }
        let line = lines(place, &[words]).pop().unwrap_or_else(|| panic!("{words} in {}", log(place)));
        // One incident is one line, and the story has the details: the upstream did not answer.
        assert_eq!(told(place, 1, &[&format!("key=\"{}\"", field(&line, "key"))]), [line.as_str()]);
        let story = place.say(["why", field(&line, "key")]);
        assert!(story.contains(words) && !story.contains("answered 50"), "{story}");
        assert!(story.contains(key), "the hash in the log is that of the key: {story}");
        story
    };
    let has_request = |story: &str, request: &str| {
        let request = format!("The request: {request}");
        assert!(story.lines().any(|line| line.starts_with(&request)), "{request}: {story}");
    };

    // Time enough for the upstream to act.
    let server = start("1m");
    let lost = (502, "the connection to the upstream was lost");
    has_request(&asked(&server, "s3same-lost", ("POST", "/lose"), lost), "POST /lose");
    let long = format!("/silent/{}", "x".repeat(200));
    let story = asked(&server, "s3same-long", ("POST", &long), (201, ""));
    has_request(&story, "POST (a long path, whose hash is ");
    nothing_secret(place, &["s3same"]);
    drop(server);

    let server = start("200ms");
    let late = (504, "the upstream did not answer in time");
    for (key, method, path, request) in [
        ("s3same-0", "POST", "/silent", "POST /silent"),
        ("s3same-1", "PATCH", "/silent?a=1", "PATCH /silent"),
        ("s3same-2", "post", "/silent", "(an uncommon method) /silent"),
    ] {
        has_request(&asked(&server, key, (method, path), late), request);
    }
    let shown = place.say(["operations", "show", "s3same-0", "--scope", "gateway/request"]);
    assert!(shown.contains("request      POST /silent"), "{shown}");
    // Nothing was sent, so there is no operation; the line still has the hash of the key.
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut command = gateway(place, &format!("http://{address}"));
    logged(&mut command, place);
    let unreachable = Server::start_with(&mut command);
    let away = Answer::read(ask(&unreachable, "POST", "/orders", &[("idempotency-key", "s3same-away")], ""));
    assert_eq!(away.status, 502, "{}", away.body);
    let [line] = &told(place, 1, &["the upstream cannot be reached"])[..] else { panic!() };
    assert_eq!(field(line, "key"), semel::short_hash("default", "gateway", "request", "s3same-away"), "{line}");
    drop(unreachable);
    // Without a key there is no hash.
    assert_eq!(Answer::read(ask(&server, "GET", "/silent", &[], "")).status, 504);
    let line = lines(place, &["the upstream did not answer in time"]).pop().unwrap();
    assert!(!line.contains("key="), "{line}");
    nothing_secret(place, &["s3same"]);
}

fn messages_that_no_queue_takes_are_one_line_a_minute_that_names_the_topic(place: &Place) {
    let server = start(place, "api,relay", &[]);
    for id in ["evt_1", "evt_2", "evt_3"] {
        assert_eq!(status(&deliver(&server, &event(id, 1_700_000_000, "a"))), "processed");
    }
    let unroutable = |id: &str| {
        let path = format!("/webhooks/stripe/events/{id}");
        crate::desk::shown(&server, &path)["processing_result"]["result"] == "unroutable"
    };
    eventually(SOON, "no queue takes them", || ["evt_1", "evt_2", "evt_3"].into_iter().all(unroutable));
    let [line] = &told(place, 1, &["WARN", "no queue takes"])[..] else { panic!() };
    assert_eq!(field(line, "topic"), "webhook.stripe.invoice.paid", "{line}");
    let story = place.say(["why", "evt_1", "--scope", "webhooks/stripe"]);
    assert!(story.contains("its message has no queue") && !story.contains("it took effect"), "{story}");
    assert!(story.contains("webhook.stripe.invoice.paid") && story.contains("bind a queue to the topic"), "{story}");
}

fn a_retry_that_a_person_asks_for_is_a_line_that_names_source_and_event(place: &Place) {
    let endpoint = Endpoint::that([Does::Answers(500)]);
    let server = start(place, "api", &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &forward(&endpoint.url()))]);
    assert_eq!(deliver(&server, &event("evt_1", 1_700_000_000, "a")).status, 500);
    let retry = crate::desk::post(&server, "/webhooks/stripe/events/evt_1/retry", r#"{"reason":"now"}"#);
    assert_eq!(retry.status, 202, "{}", retry.body);
    let [line] = &told(place, 1, &["an event runs again on a person's request"])[..] else { panic!() };
    assert_eq!((field(line, "source"), field(line, "event")), ("stripe", "evt_1"), "{line}");
}

fn requests_are_logged_only_if_configured(place: &Place) {
    let server = start(place, "api", &[]);
    assert_eq!(server.get("/healthz").status, 200);
    drop(server);
    assert!(lines(place, &["request", "/healthz"]).is_empty(), "request logging is off");

    let mut command = command(place, "api", &[]);
    logged(command.arg("--log-requests"), place);
    let server = Server::start_with(&mut command);
    assert_eq!(status(&deliver(&server, &event("evt_1", 1_700_000_000, "a"))), "processed");
    assert_eq!(server.get("/webhooks/stripe/events/evt_1?function=stripe").status, 200);
    assert_eq!(server.get("/s3same/path?s3same=1").status, 404);
    told(place, 1, &["request", "method=\"POST\"", "route=\"/webhooks/stripe\"", "status=200", "took="]);
    told(place, 1, &["request", "method=\"GET\"", "route=\"/webhooks/stripe/events/{id}\"", "status=200"]);
    told(place, 1, &["request", "route=\"-\"", "status=404"]);
    nothing_secret(place, &["s3same", "evt_1"]);

    let upstream = Upstream::start();
    let mut command = gateway(place, &upstream.url);
    logged(command.env("SEMEL_HTTP_LOG_REQUESTS", "true"), place);
    let server = Server::start_with(&mut command);
    assert_eq!(Answer::read(ask(&server, "POST", "/orders", &[("idempotency-key", "s3same")], "{}")).status, 201);
    told(place, 1, &["request", "method=\"POST\"", "status=201"]);
    nothing_secret(place, &["s3same"]);
}
