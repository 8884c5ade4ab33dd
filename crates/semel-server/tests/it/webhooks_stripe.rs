//! Semel and Stripe's own library are compatible.

use std::{
    io::Write as _,
    process::{Command, Stdio},
    time::{Duration, SystemTime},
};

use semel_http::webhooks::{DEFAULT_TOLERANCE, Verifier};
use serde_json::{Value, json};

use crate::{
    hooks::{SECRET, event, outbox, post_raw, start, status, stored},
    place::{Place, on_both_databases},
    support::{Answer, Server},
};

on_both_databases! {
    an_event_signed_by_the_stripe_library_is_accepted
}

/// Reads a list of `[deed, arguments…]`, and prints the library's result of each.
const SCRIPT: &str = r#"
import json, sys
import stripe

def sign(payload, secret, timestamp):
    return stripe.WebhookSignature.generate_signature_header(payload, secret, timestamp)

def take(payload, header, secret):
    try:
        event = stripe.Webhook.construct_event(payload.encode(), header, secret)
        return [event.id, event.type, event.data.object.id]
    except stripe.SignatureVerificationError as refused:
        return str(refused)

deeds = {"sign": sign, "take": take}
print(json.dumps([deeds[deed](*arguments) for deed, *arguments in json.load(sys.stdin)]))
"#;

/// The library's result of each of these.
fn library(deeds: &[Value]) -> Vec<Value> {
    let python = std::env::var_os("SEMEL_TEST_PYTHON").expect(
        "these tests need Stripe's library: set SEMEL_TEST_PYTHON to what `scripts/python.sh bin` prints, or run \
         `make test`",
    );
    let mut command = Command::new(python);
    let mut process =
        command.args(["-c", SCRIPT]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("Python starts");
    process.stdin.take().unwrap().write_all(json!(deeds).to_string().as_bytes()).unwrap();
    let said = process.wait_with_output().unwrap();
    assert!(said.status.success(), "{}", said.status);
    let said: Vec<Value> = serde_json::from_slice(&said.stdout).unwrap();
    assert_eq!(said.len(), deeds.len());
    said
}

fn now() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs()
}

/// Bodies that would change if they were parsed and written again on the way.
fn bodies() -> [String; 4] {
    let plain = event("evt_1", 1_700_000_000, "a").to_string();
    let wide = serde_json::to_string_pretty(&event("evt_2", 1_700_000_000, "Zoë 🎉")).unwrap();
    let escaped = event("evt_3", 1_700_000_000, "x").to_string().replace("\"x\"", r#""\u005a\u00eb\/ 1""#);
    let spaced = event("evt_4", 1_700_000_000, "a").to_string() + " \r\n";
    [plain, wide, escaped, spaced]
}

fn post(server: &Server, header: &Value, body: &str) -> Answer {
    let headers = [("stripe-signature".to_owned(), header.as_str().unwrap().to_owned())];
    post_raw(server.address, "/webhooks/stripe", &headers, body.as_bytes())
}

fn an_event_signed_by_the_stripe_library_is_accepted(place: &Place) {
    let (server, bodies) = (start(place, &[]), bodies());
    let signed = library(&bodies.each_ref().map(|body| json!(["sign", body, SECRET, now()])));
    for (body, header) in bodies.iter().zip(&signed) {
        assert_eq!(status(&post(&server, header, body)), "processed", "{body}");
    }
    assert_eq!(outbox(place).len(), bodies.len());
    assert_eq!(stored(place, "stripe", "evt_2").unwrap().payload.unwrap(), bodies[1]);
    // Sent again, it has a new signature; its data is the same.
    let body = &bodies[0];
    let again = library(&[
        json!(["sign", body, SECRET, now() - 250]),
        json!(["sign", body, SECRET, now() - 310]),
        json!(["sign", body, SECRET, now() + 400]),
        json!(["sign", body, "whsec_another", now()]),
    ]);
    assert_eq!(status(&post(&server, &again[0], body)), "skipped");
    for (header, reason) in again[1..].iter().zip(["too_old", "too_new", "wrong"]) {
        let refused = post(&server, header, body);
        assert_eq!((refused.status, refused.problem().as_str()), (400, "signature-refused"));
        assert_eq!(refused.json()["reason"], reason);
    }
    assert_eq!(post(&server, &signed[0], &bodies[1]).status, 400, "a signature is of one body");
}

#[test]
fn semel_and_the_stripe_library_sign_alike() {
    let verifier = Verifier::stripe([SECRET], DEFAULT_TOLERANCE).unwrap();
    let bodies = [&bodies()[..], &[String::new(), "\u{feff}{}".to_owned(), "x".repeat(100_000)]].concat();
    let times = [0, 1, 1_533_204_620, now()];
    let pairs: Vec<_> = bodies.iter().flat_map(|body| times.map(|at| (body, at))).collect();
    let theirs = library(&pairs.iter().map(|(body, at)| json!(["sign", body, SECRET, at])).collect::<Vec<_>>());
    for ((body, at), theirs) in pairs.into_iter().zip(theirs) {
        let at = SystemTime::UNIX_EPOCH + Duration::from_secs(at);
        let ours = verifier.sign(None, at, body.as_bytes()).unwrap();
        assert_eq!(ours["stripe-signature"].to_str().unwrap(), theirs.as_str().unwrap());
    }
}

#[test]
fn the_stripe_library_accepts_signatures_of_semel() {
    let verifier = Verifier::stripe([SECRET, "whsec_another"], DEFAULT_TOLERANCE).unwrap();
    let bodies = bodies();
    let signed = bodies.each_ref().map(|body| {
        let headers = verifier.sign(None, SystemTime::now(), body.as_bytes()).unwrap();
        headers["stripe-signature"].to_str().unwrap().to_owned()
    });
    let deeds: Vec<_> =
        bodies.iter().zip(&signed).map(|(body, header)| json!(["take", body, header, SECRET])).collect();
    for (i, taken) in library(&deeds).into_iter().enumerate() {
        assert_eq!(taken, json!([format!("evt_{}", i + 1), "invoice.paid", "in_1"]));
    }
    let wrong =
        library(&[json!(["take", bodies[0], signed[1], SECRET]), json!(["take", bodies[0], signed[0], "other"])]);
    assert!(
        wrong.iter().all(|said| said.as_str().is_some_and(|said| said.contains("No signatures found"))),
        "{wrong:?}"
    );
}

/// Also with other parts in the header.
#[test]
fn semel_and_the_stripe_library_accept_the_same_headers() {
    let (body, at) = (event("evt_1", 1_700_000_000, "a").to_string(), now());
    let [right, wrong] =
        library(&[json!(["sign", body, SECRET, at]), json!(["sign", body, "whsec_another", at])]).try_into().unwrap();
    let (right, wrong) = (right.as_str().unwrap(), wrong.as_str().unwrap());
    let (good, bad) = (right.rsplit_once('=').unwrap().1, wrong.rsplit_once('=').unwrap().1);
    let headers = [
        (true, format!("t={at},v1={good}")),
        (true, format!("t={at},v1={bad},v1={good}")),
        (true, format!("t={at},v1={good},v1={bad}")),
        (true, format!("t={at},v0={bad},v1={good}")),
        (true, format!("v1={good},t={at}")),
        (false, format!("t={at},v1={bad}")),
        (false, format!("t={at},v0={good}")),
        (false, format!("t={at},v1={bad},v0={good}")),
        (false, format!("t={},v1={good}", at - 1)),
        (false, format!("v1={good}")),
        (false, format!("t={at}")),
        (false, format!("t={at},v1=")),
        (false, format!("t={at},v1={}", &good[1..])),
        (false, "t=,v1=".to_owned()),
        (false, String::new()),
    ];
    let verifier = Verifier::stripe([SECRET], DEFAULT_TOLERANCE).unwrap();
    let theirs = library(&headers.iter().map(|(_, header)| json!(["take", body, header, SECRET])).collect::<Vec<_>>());
    for ((taken, header), theirs) in headers.into_iter().zip(theirs) {
        let name = axum::http::HeaderName::from_static("stripe-signature");
        let sent = [(name, header.parse().unwrap())].into_iter().collect();
        let ours = verifier.verify(&sent, body.as_bytes(), SystemTime::now());
        assert_eq!((ours.is_ok(), theirs.is_array()), (taken, taken), "{header}: {ours:?} {theirs}");
    }
}
