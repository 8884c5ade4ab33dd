//! What the tests of webhooks share: a sender that signs, and the server it sends to.

use std::{
    net::{SocketAddr, TcpStream},
    process::Command,
    time::{Duration, SystemTime},
};

use semel::{Operation, look::Counted, prelude::*};
use semel_http::webhooks::{DEFAULT_TOLERANCE, Verifier};
use serde_json::{Value, json};

use crate::{
    desk::Desk,
    place::Place,
    proposals::rows,
    support::{Answer, SOON, Server, eventually, send},
};

pub(crate) const SECRET: &str = "whsec_test_secret";

/// The public host name of the server.
pub(crate) const HOST: &str = "hooks.example.com";

/// A server on a place with the source `stripe`.
pub(crate) fn start(place: &Place, variables: &[(&str, &str)]) -> Server {
    start_as(place, "api", variables)
}

pub(crate) fn start_as(place: &Place, roles: &str, variables: &[(&str, &str)]) -> Server {
    Server::start_with(&mut command(place, roles, variables))
}

pub(crate) fn command(place: &Place, roles: &str, variables: &[(&str, &str)]) -> Command {
    let mut command = place.semel(["serve", "--listen", "127.0.0.1:0", "--roles", roles]);
    command.env("SEMEL_WEBHOOKS_STRIPE_KIND", "stripe").env("SEMEL_WEBHOOKS_STRIPE_SECRETS", SECRET);
    // Most laws are about events with an effect: these publish. A test's own setting comes last and wins.
    command.env("SEMEL_WEBHOOKS_STRIPE_HANDLERS", "*=outbox");
    for source in variables.iter().filter_map(|(name, _)| name.strip_suffix("_KIND")) {
        command.env(format!("{source}_HANDLERS"), "*=outbox");
    }
    command.env("SEMEL_SWEEP_EVERY", "100ms").envs(variables.iter().copied());
    command
}

/// A variable of the source `stripe` that forwards everything.
pub(crate) fn forward(url: &str) -> String {
    format!("*={url}")
}

/// An event of Stripe's.
pub(crate) fn event(id: &str, created: i64, note: &str) -> Value {
    json!({
        "id": id, "object": "event", "type": "invoice.paid", "created": created, "livemode": false,
        "data": { "object": { "id": "in_1", "note": note } }, "pending_webhooks": 1,
    })
}

/// The headers of a delivery that Stripe signs now.
pub(crate) fn signed(body: &[u8]) -> Vec<(String, String)> {
    signed_by(&Verifier::stripe([SECRET], DEFAULT_TOLERANCE).unwrap(), None, body, Duration::ZERO)
}

/// The headers of a delivery that was signed so long ago.
pub(crate) fn signed_by(verifier: &Verifier, id: Option<&str>, body: &[u8], ago: Duration) -> Vec<(String, String)> {
    let headers = verifier.sign(id, SystemTime::now() - ago, body).unwrap();
    headers.iter().map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned())).collect()
}

/// Posts a body with headers, as a sender elsewhere does.
pub(crate) fn post_raw(address: SocketAddr, path: &str, headers: &[(String, String)], body: &[u8]) -> Answer {
    let mut connection = TcpStream::connect(address).unwrap();
    let all = headers.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    let all: Vec<_> = [("host", HOST), ("content-type", "application/json")].into_iter().chain(all).collect();
    send(&mut connection, "POST", path, &all, body);
    Answer::read(connection)
}

/// Delivers an event of Stripe's to a path.
pub(crate) fn deliver_to(server: &Server, path: &str, event: &Value) -> Answer {
    let body = event.to_string();
    post_raw(server.address, path, &signed(body.as_bytes()), body.as_bytes())
}

pub(crate) fn deliver(server: &Server, event: &Value) -> Answer {
    deliver_to(server, "/webhooks/stripe", event)
}

/// The status in the answer to a delivery.
pub(crate) fn status(answer: &Answer) -> String {
    assert_eq!(answer.status, 200, "{}", answer.body);
    let json = answer.json();
    assert_eq!(json.as_object().unwrap().len(), 1, "{json}");
    json["status"].as_str().unwrap().to_owned()
}

/// How many messages went to the outbox, by topic.
pub(crate) fn outbox(place: &Place) -> Vec<String> {
    rows(place, "SELECT topic FROM semel_outbox ORDER BY id")
}

/// The operation of an event.
pub(crate) fn stored(place: &Place, kind: &str, id: &str) -> Option<Operation> {
    let scope = semel::Scope::new("default", "webhooks", kind).unwrap();
    let desk = Desk::at(place);
    desk.block(desk.database.by_key(&scope, &semel::Key::new(id).unwrap())).unwrap()
}

/// Waits until an event is in a state.
pub(crate) fn becomes(place: &Place, id: &str, state: semel::State) {
    eventually(SOON, &format!("{id} is {state}"), || stored(place, "stripe", id).is_some_and(|op| op.state == state));
}

/// How often an answer was counted.
pub(crate) fn counted(place: &Place, word: &str) -> i64 {
    let desk = Desk::at(place);
    let counts = desk.block(desk.database.counts("default", 0)).unwrap();
    counts.iter().filter(|count| count.what == Counted::Answer(word.to_owned())).map(|count| count.n).sum()
}

/// The conflicts, each as text.
pub(crate) fn conflicts(place: &Place) -> Vec<String> {
    rows(
        place,
        "SELECT event_id || ' ' || deed || ' ' || count || ' ' || coalesce(came_created, 0) || ' '
            || coalesce(stored_created, 0)
         FROM semel_webhook_conflicts ORDER BY id",
    )
}
