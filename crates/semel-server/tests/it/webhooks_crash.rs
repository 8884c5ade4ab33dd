//! A server that dies at every point of an event's way. Whether the sender sends it again or not: it takes effect,
//! once. The other files of this name have the rest.

use std::{
    collections::BTreeSet,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    os::unix::process::ExitStatusExt as _,
    thread,
    time::Duration,
};

use rustix::process::Signal;
use semel::State;
use semel_http::webhooks::Verifier;
use serde_json::{Value, json};

use crate::{
    endpoint::{Does, Endpoint},
    hooks::{
        HOST, becomes, command, deliver, event, forward, outbox, signed, signed_by, start, start_as, status, stored,
    },
    place::Place,
    support::{Answer, SOON, Server, eventually},
};

/// The lease of a dead server expires soon. A living one renews it.
pub(crate) const LEASE: (&str, &str) = ("SEMEL_WEBHOOKS_STRIPE_LEASE", "1s");
pub(crate) const BACKOFF: (&str, &str) = ("SEMEL_WEBHOOKS_STRIPE_BACKOFF", "1ms");

/// Starts a server that dies, or is suspended, at a point.
pub(crate) fn start_dying(place: &Place, roles: &str, point: &str, variables: &[(&str, &str)]) -> Server {
    let _ = std::fs::remove_file(place.path("points"));
    let mut command = command(place, roles, variables);
    Server::start_with(command.env("SEMEL_CRASH", point).env("SEMEL_CRASH_LOG", place.path("points")))
}

/// Waits until a server has died at a point. A run that never reached the point shows nothing, and fails.
pub(crate) fn died_at(place: &Place, point: &str, server: &mut Server) {
    let status = server.process.end();
    assert_eq!(status.signal(), Some(Signal::KILL.as_raw()), "{point}: {status}");
    assert!(place.lines("points").iter().any(|line| line == point), "{point} was never reached");
}

/// Posts a signed body; the answer, if the server lived to give one.
pub(crate) fn try_post(address: SocketAddr, path: &str, headers: &[(String, String)], body: &str) -> Option<Answer> {
    let mut connection = TcpStream::connect(address).ok()?;
    connection.set_read_timeout(Some(SOON)).ok()?;
    let length = body.len().to_string();
    let own =
        [("host", HOST), ("content-type", "application/json"), ("content-length", &length), ("connection", "close")];
    let mut head = format!("POST {path} HTTP/1.1\r\n");
    for (name, value) in own.into_iter().chain(headers.iter().map(|(name, value)| (name.as_str(), value.as_str()))) {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    connection.write_all(format!("{head}\r\n{body}").as_bytes()).ok()?;
    let mut text = String::new();
    connection.read_to_string(&mut text).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some(Answer { status, head: head.to_ascii_lowercase(), body: body.to_owned() })
}

pub(crate) fn try_deliver(address: SocketAddr, event: &Value) -> Option<Answer> {
    let body = event.to_string();
    try_post(address, "/webhooks/stripe", &signed(body.as_bytes()), &body)
}

/// Who retries the event after the crash.
#[derive(Clone, Copy, Debug)]
enum Again {
    /// Its sender, until it is answered 200; there is no worker.
    Sender,
    /// A worker; its sender does not retry.
    Worker,
}

/// The points at which a publishing server dies. Every event passes each of them.
const PUBLISHING: [&str; 7] = [
    "webhooks.after_store",
    "atomic.begun",
    "webhooks.after_effect",
    "atomic.before_complete",
    "atomic.before_commit",
    "atomic.after_commit",
    "webhooks.before_answer",
];

/// The points at which a forwarding server dies, and the total number of calls to the endpoint.
const FORWARDING: [(&str, usize); 6] = [
    ("webhooks.after_store", 1),
    ("work.before", 1),
    ("webhooks.after_effect", 2),
    ("settle.before", 2),
    ("settle.after", 1),
    ("webhooks.before_answer", 1),
];

/// The event is sent again until it is done. There is no worker.
fn sent_again(server: &Server, event: &Value) {
    let mut said = Vec::new();
    eventually(SOON, "it is processed", || {
        said.push(status(&deliver(server, event)));
        ["processed", "skipped"].contains(&said.last().unwrap().as_str())
    });
    let before = &said[..said.len() - 1];
    assert!(before.iter().all(|word| word == "rejected"), "until the lease of its dead server expires: {said:?}");
}

fn dies(place: &Place, point: &str, again: Again, variables: &[(&str, &str)]) {
    let mut server = start_dying(place, "api", point, variables);
    let paid = event("evt_1", 1_700_000_000, "a");
    let answer = try_deliver(server.address, &paid);
    assert!(answer.is_none(), "{point}: it was answered: {answer:?}");
    died_at(place, point, &mut server);
    // The others have the default lease, which they can renew even on a slow disk.
    let variables: Vec<_> = variables.iter().copied().filter(|variable| *variable != LEASE).collect();
    match again {
        Again::Sender => sent_again(&start(place, &variables), &paid),
        Again::Worker => {
            let _worker = start_as(place, "worker,sweeper", &variables);
            becomes(place, "evt_1", State::Completed);
        }
    }
    assert_eq!(status(&deliver(&start(place, &variables), &paid)), "skipped", "{point}");
    let stored = stored(place, "stripe", "evt_1").unwrap();
    assert_eq!((stored.state, stored.failures), (State::Completed, 0), "{point}: a crash is no failure");
}

fn dies_publishing(place: &Place, point: &str, again: Again) {
    dies(place, point, again, &[LEASE, BACKOFF]);
    assert_eq!(outbox(place), ["webhook.stripe.invoice.paid"], "{point} {again:?}");
}

/// The endpoint honours the key: calls under the same one are one effect.
fn dies_forwarding(place: &Place, (point, calls): (&str, usize), again: Again) {
    let endpoint = Endpoint::that([]);
    let url = forward(&endpoint.url());
    dies(place, point, again, &[LEASE, BACKOFF, ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &url)]);
    let keys = endpoint.keys();
    assert_eq!(keys.len(), calls, "{point} {again:?}");
    assert_eq!(keys.iter().collect::<BTreeSet<_>>().len(), 1, "{point} {again:?}: {keys:?}");
}

/// In parallel: they mostly wait for leases to expire.
const BESIDE: usize = 3;

fn at_each<P: Copy + Send + Sync>(points: &[P], place: fn() -> Place, dies: fn(&Place, P, Again)) {
    let runs: Vec<_> = points.iter().flat_map(|point| [(*point, Again::Sender), (*point, Again::Worker)]).collect();
    for some in runs.chunks(BESIDE) {
        thread::scope(|scope| {
            for (point, again) in some {
                scope.spawn(move || dies(&place(), *point, *again));
            }
        });
    }
}

/// The body was claimed before the lost run, or the server died before it could complete that claim. It still belongs
/// to that event only.
fn an_event_whose_run_was_lost_keeps_its_body(place: &Place, point: &str) {
    let endpoint = Endpoint::that([]);
    let url = forward(&endpoint.url());
    let variables = [
        ("SEMEL_WEBHOOKS_GITHUB_KIND", "github"),
        ("SEMEL_WEBHOOKS_GITHUB_SECRETS", "geheim-geheim"),
        ("SEMEL_WEBHOOKS_GITHUB_HANDLERS", url.as_str()),
        ("SEMEL_WEBHOOKS_GITHUB_LEASE", "1s"),
    ];
    let body = json!({ "ref": "main" }).to_string();
    let push = |server: &Server, id: &str| {
        let verifier = Verifier::github(["geheim-geheim"]).unwrap();
        let mut headers = signed_by(&verifier, Some(id), body.as_bytes(), Duration::ZERO);
        headers.push(("x-github-event".to_owned(), "push".to_owned()));
        try_post(server.address, "/webhooks/github", &headers, &body)
    };
    let mut server = start_dying(place, "api", point, &variables);
    assert!(push(&server, "guid-1").is_none());
    died_at(place, point, &mut server);
    let server = start(place, &variables);
    assert_eq!(status(&push(&server, "guid-2").unwrap()), "rejected", "the bytes are another's");
    assert!(stored(place, "github", "guid-2").is_none());
    eventually(SOON, "it is processed", || status(&push(&server, "guid-1").unwrap()) == "processed");
    assert_eq!(endpoint.keys().into_iter().collect::<BTreeSet<_>>().len(), 1);
}

/// Answered as soon as it was stored, and killed right after that.
fn an_accepted_event_is_not_lost(place: &Place) {
    let endpoint = Endpoint::that([Does::Waits]);
    let url = forward(&endpoint.url());
    let variables =
        [LEASE, BACKOFF, ("SEMEL_WEBHOOKS_STRIPE_ASYNC", "true"), ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", url.as_str())];
    let mut server = start(place, &variables);
    assert_eq!(status(&deliver(&server, &event("evt_1", 1_700_000_000, "a"))), "accepted");
    server.process.signal(Signal::KILL);
    server.process.end();
    endpoint.let_go();
    let _worker = start_as(place, "worker,sweeper", &variables);
    becomes(place, "evt_1", State::Completed);
    let keys = endpoint.keys();
    assert_eq!(keys.iter().collect::<BTreeSet<_>>().len(), 1, "{keys:?}");
}

/// The same with the outbox, and with a crash at each point before or after the answer.
fn an_event_processed_after_its_answer_takes_effect_once(place: &Place, point: &str) {
    let variables = [LEASE, BACKOFF, ("SEMEL_WEBHOOKS_STRIPE_ASYNC", "true")];
    let mut server = start_dying(place, "api", point, &variables);
    // It may be answered or not: the run goes on in parallel.
    let answer = try_deliver(server.address, &event("evt_1", 1_700_000_000, "a"));
    assert!(answer.is_none_or(|answer| status(&answer) == "accepted"));
    died_at(place, point, &mut server);
    let _worker = start_as(place, "worker,sweeper", &variables);
    becomes(place, "evt_1", State::Completed);
    assert_eq!(outbox(place), ["webhook.stripe.invoice.paid"], "{point}");
}

macro_rules! on {
    ($($database:ident)+) => {
        $(mod $database {
            use super::*;

            #[test]
            fn a_server_dies_at_every_point_of_publishing() {
                at_each(&PUBLISHING, Place::$database, dies_publishing);
            }

            #[test]
            fn a_server_dies_at_every_point_of_forwarding() {
                at_each(&FORWARDING, Place::$database, dies_forwarding);
            }

            #[test]
            fn a_server_dies_while_its_event_has_claimed_its_body() {
                for point in ["webhooks.after_effect", "settle.before"] {
                    an_event_whose_run_was_lost_keeps_its_body(&Place::$database(), point);
                }
            }

            #[test]
            fn a_server_dies_right_after_its_answer() {
                an_accepted_event_is_not_lost(&Place::$database());
                for point in ["webhooks.before_answer", "webhooks.after_effect", "atomic.after_commit"] {
                    an_event_processed_after_its_answer_takes_effect_once(&Place::$database(), point);
                }
            }
        })+
    };
}
on!(sqlite postgres);

/// Every crash point of webhooks has a server in these tests that dies at it.
#[test]
fn every_point_is_covered_by_a_test() {
    let of_webhooks = semel::crash::SERVER_POINTS.iter().filter(|point| point.starts_with("webhooks."));
    let forwarding: Vec<_> = FORWARDING.iter().map(|(point, _)| *point).collect();
    let missing: Vec<_> = of_webhooks.filter(|p| !PUBLISHING.contains(p) || !forwarding.contains(p)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// A conflict is durable before it is answered; its counter is not, and may be lost with the server.
#[test]
fn an_answered_conflict_is_counted_after_the_server_dies() {
    for place in [Place::sqlite(), Place::postgres()] {
        let mut server = start_dying(&place, "api", "repeats.before", &[]);
        assert_eq!(status(&deliver(&server, &event("evt_1", 1_700_000_000, "a"))), "processed");
        assert_eq!(status(&deliver(&server, &event("evt_1", 1_700_000_000, "other"))), "skipped");
        died_at(&place, "repeats.before", &mut server);
        let told = start_as(&place, "api", &[]).get("/webhooks/stripe/monitor").json();
        let conflicts = &told["conflicts"];
        assert_eq!((&conflicts["count"], conflicts["items"].as_array().map(Vec::len)), (&json!(1), Some(1)));
    }
}
