//! A third party that saw a delivery can replay it with other headers and to another path, if neither is signed. That
//! must not harm the events of others.

use std::{collections::BTreeSet, sync::Barrier, thread, time::Duration};

use semel::State;
use semel_http::webhooks::{DEFAULT_TOLERANCE, HmacScheme, Verifier};
use serde_json::{Value, json};

use crate::{
    endpoint::{Does, Endpoint},
    hooks::{conflicts, outbox, signed_by, status, stored},
    place::{Place, on_both_databases},
    proposals::rows,
    support::{Answer, SOON, Server, eventually},
    webhooks_crash::{died_at, start_dying, try_post},
};

on_both_databases! {
    a_redelivery_runs_with_the_type_and_function_of_the_first_delivery
    the_body_of_another_event_supersedes_nothing
    the_body_of_another_event_is_not_stored_as_newer_data
    the_body_of_a_failed_event_is_not_accepted_under_another_id
    the_body_of_a_rolled_back_event_is_not_accepted_under_another_id
    a_known_body_under_invented_ids_stores_no_rows
    the_same_bytes_under_many_ids_at_once_take_effect_once
    the_same_bytes_under_many_ids_at_once_are_not_lost_with_the_first
    a_delivery_that_died_midway_is_accepted_when_it_is_sent_again
}

const SECRET: &str = "a secret of the forge";

const SOURCES: [(&str, &str); 8] = [
    ("SEMEL_WEBHOOKS_GITHUB_KIND", "github"),
    ("SEMEL_WEBHOOKS_GITHUB_SECRETS", SECRET),
    ("SEMEL_WEBHOOKS_SHOP_KIND", "hmac"),
    ("SEMEL_WEBHOOKS_SHOP_SECRETS", SECRET),
    ("SEMEL_WEBHOOKS_SHOP_HEADER", "x-shop-signature"),
    ("SEMEL_WEBHOOKS_SHOP_SIGNED", "{body}"),
    ("SEMEL_WEBHOOKS_SHOP_ID_HEADER", "x-shop-id"),
    ("SEMEL_WEBHOOKS_SHOP_CREATED_POINTER", "/created"),
];

fn start(place: &Place, roles: &str, more: &[(&str, &str)]) -> Server {
    let mut command = place.semel(["serve", "--listen", "127.0.0.1:0", "--roles", roles]);
    for source in SOURCES.iter().filter_map(|(name, _)| name.strip_suffix("_KIND")) {
        command.env(format!("{source}_HANDLERS"), "*=outbox");
    }
    Server::start_with(command.envs(SOURCES).envs(more.iter().copied()))
}

/// Posts a body to a path, signed by its source, with an unsigned id and type.
fn try_to_post(server: &Server, path: &str, id: &str, kind: &str, body: &Value) -> Option<Answer> {
    let verifier = if path.starts_with("github") {
        Verifier::github([SECRET])
    } else {
        let (header, id_header) = ("x-shop-signature".into(), Some("x-shop-id".into()));
        let scheme = HmacScheme { header, id_header, signed: "{body}".into(), ..HmacScheme::default() };
        Verifier::hmac(&scheme, [SECRET], DEFAULT_TOLERANCE)
    };
    let body = body.to_string();
    let mut headers = signed_by(&verifier.unwrap(), Some(id), body.as_bytes(), Duration::ZERO);
    headers.push(("x-github-event".to_owned(), kind.to_owned()));
    try_post(server.address, &format!("/webhooks/{path}"), &headers, &body)
}

fn post(server: &Server, path: &str, id: &str, kind: &str, body: &Value) -> Answer {
    try_to_post(server, path, id, kind, body).unwrap()
}

fn push(server: &Server, id: &str, body: &Value) -> Answer {
    post(server, "github", id, "push", body)
}

fn shop(server: &Server, id: &str, body: &Value) -> Answer {
    post(server, "shop", id, "", body)
}

fn order(created: i64) -> Value {
    json!({ "created": created })
}

/// The keys of all events of a source.
fn events(place: &Place, source: &str) -> BTreeSet<String> {
    let all = rows(place, "SELECT kind || ' ' || key FROM semel_operations WHERE service = 'webhooks'");
    all.iter().filter_map(|row| row.strip_prefix(&format!("{source} "))).map(str::to_owned).collect()
}

fn a_redelivery_runs_with_the_type_and_function_of_the_first_delivery(place: &Place) {
    let endpoint = Endpoint::that([Does::Answers(500)]);
    let rule = format!("push={}", endpoint.url());
    let server = start(place, "api", &[("SEMEL_WEBHOOKS_GITHUB_HANDLERS", &rule)]);
    let body = json!({ "ref": "main" });
    assert_eq!(push(&server, "guid-1", &body).status, 500);
    assert_eq!(status(&post(&server, "github/elsewhere", "guid-1", "zzz", &body)), "processed");
    let calls = endpoint.calls();
    let said = |call: &crate::endpoint::Call| {
        ["semel-webhook-type", "semel-webhook-function"].map(|name| call.header(name).to_owned())
    };
    assert_eq!(calls.iter().map(said).collect::<Vec<_>>(), vec![["push", "github"]; 2]);
    assert!(outbox(place).is_empty(), "it went where its rule says, and nowhere else");
    assert_eq!(status(&push(&server, "guid-1", &body)), "skipped");
}

fn the_body_of_another_event_supersedes_nothing(place: &Place) {
    let endpoint = Endpoint::that([Does::Answers(500)]);
    let rule = format!("*={}", endpoint.url());
    let server = start(place, "api", &[("SEMEL_WEBHOOKS_SHOP_HANDLERS", &rule)]);
    assert_eq!(shop(&server, "x", &order(100)).status, 500);
    assert_eq!(status(&shop(&server, "y", &order(200))), "processed");
    assert_eq!(status(&shop(&server, "x", &order(200))), "skipped");
    assert!(conflicts(place).is_empty());
    assert_eq!(status(&shop(&server, "x", &order(100))), "processed");
    let called: Vec<_> = endpoint.calls().iter().map(|call| call.body["created"].as_i64().unwrap()).collect();
    assert_eq!(called, [100, 200, 100]);
    // Its own newer data still supersedes it.
    assert_eq!(status(&shop(&server, "x", &order(300))), "processed");
    assert_eq!(status(&shop(&server, "z", &order(100))), "skipped", "what was done stays done");
    assert_eq!(endpoint.calls().len(), 4);
}

fn the_body_of_another_event_is_not_stored_as_newer_data(place: &Place) {
    let endpoint = Endpoint::that([Does::Answers(202), Does::Waits]);
    let rule = format!("*={}", endpoint.url());
    let server = start(place, "api", &[("SEMEL_WEBHOOKS_SHOP_HANDLERS", &rule)]);
    assert_eq!(status(&shop(&server, "y", &order(200))), "processed");
    thread::scope(|scope| {
        let first = scope.spawn(|| status(&shop(&server, "x", &order(100))));
        endpoint.is_called(2);
        assert_eq!(status(&shop(&server, "x", &order(200))), "skipped");
        assert!(stored(place, "shop", "x").unwrap().successor.is_none());
        endpoint.let_go();
        assert_eq!(first.join().unwrap(), "processed");
    });
    assert_eq!(stored(place, "shop", "x").unwrap().order, Some(100));
    assert_eq!(endpoint.calls().len(), 2);
}

fn the_body_of_a_failed_event_is_not_accepted_under_another_id(place: &Place) {
    let endpoint = Endpoint::that([Does::Answers(500)]);
    let rule = format!("*={}", endpoint.url());
    let server = start(place, "api", &[("SEMEL_WEBHOOKS_GITHUB_HANDLERS", &rule)]);
    is_not_accepted_under_another_id(place, &server, || ());
    assert_eq!(endpoint.calls().len(), 3);
}

/// The run's transaction was rolled back, but the body still belongs to the event.
fn the_body_of_a_rolled_back_event_is_not_accepted_under_another_id(place: &Place) {
    let server = start(place, "api", &[]);
    rows(place, "ALTER TABLE semel_outbox RENAME TO out_of_reach");
    is_not_accepted_under_another_id(place, &server, || {
        drop(rows(place, "ALTER TABLE out_of_reach RENAME TO semel_outbox"))
    });
    assert_eq!(outbox(place).len(), 2);
}

fn is_not_accepted_under_another_id(place: &Place, server: &Server, mend: impl FnOnce()) {
    let (mine, theirs) = (json!({ "ref": "mine" }), json!({ "ref": "theirs" }));
    assert_eq!(push(server, "1001", &mine).status, 500);
    assert_eq!(status(&push(server, "1002", &mine)), "rejected");
    assert!(stored(place, "github", "1002").is_none());
    mend();
    assert_eq!(status(&push(server, "1002", &theirs)), "processed");
    assert_eq!(status(&push(server, "1001", &mine)), "processed");
    assert_eq!(status(&push(server, "1003", &mine)), "skipped");
    assert_eq!(events(place, "github"), ["1001", "1002"].map(str::to_owned).into());
}

fn a_known_body_under_invented_ids_stores_no_rows(place: &Place) {
    let endpoint = Endpoint::that([Does::Answers(500)]);
    let rule = format!("*={}", endpoint.url());
    let once = ("SEMEL_WEBHOOKS_GITHUB_MAX_ATTEMPTS", "1");
    let server = start(place, "api", &[("SEMEL_WEBHOOKS_GITHUB_HANDLERS", &rule), once]);
    let body = json!({ "ref": "main" });
    assert_eq!(push(&server, "guid", &body).status, 500);
    let before = rows(place, "SELECT key FROM semel_operations").len();
    for i in 0..100 {
        assert_eq!(status(&push(&server, &format!("made-up-{i}"), &body)), "max_retries");
    }
    assert_eq!(rows(place, "SELECT key FROM semel_operations").len(), before);
    assert!(conflicts(place).is_empty());
    assert_eq!(endpoint.calls().len(), 1);
}

/// Sends the same body under many ids, to two servers at once. Returns the answers.
fn at_once(servers: [&Server; 2], body: &Value) -> Vec<Answer> {
    const EACH: usize = 8;
    let barrier = Barrier::new(2 * EACH);
    let send = |server: &Server, id: usize| {
        barrier.wait();
        push(server, &format!("id-{id}"), body)
    };
    thread::scope(|scope| {
        let sent: Vec<_> = (0..2 * EACH)
            .map(|id| {
                let (server, send) = (servers[id % 2], &send);
                scope.spawn(move || send(server, id))
            })
            .collect();
        sent.into_iter().map(|sent| sent.join().unwrap()).collect()
    })
}

fn the_same_bytes_under_many_ids_at_once_take_effect_once(place: &Place) {
    let (one, two) = (start(place, "api", &[]), start(place, "api", &[]));
    for round in 0..5 {
        let answers = at_once([&one, &two], &json!({ "round": round }));
        let said: Vec<_> = answers.iter().map(status).collect();
        assert_eq!(said.iter().filter(|said| *said == "processed").count(), 1, "{said:?}");
        assert_eq!(outbox(place).len(), round + 1);
        let known = events(place, "github");
        assert_eq!(known.len(), round + 1, "the others left none");
        // Every free id can still be used by any event.
        if round == 4 {
            for id in (0..16).map(|id| format!("id-{id}")).filter(|id| !known.contains(id)) {
                assert_eq!(status(&push(&one, &id, &json!({ "own": id }))), "processed");
            }
        }
    }
}

fn the_same_bytes_under_many_ids_at_once_are_not_lost_with_the_first(place: &Place) {
    let endpoint = Endpoint::that([Does::Answers(500)]);
    let rule = format!("*={}", endpoint.url());
    let variables = [("SEMEL_WEBHOOKS_GITHUB_HANDLERS", &*rule), ("SEMEL_WEBHOOKS_GITHUB_BACKOFF", "10ms")];
    let (one, two) = (start(place, "api,worker", &variables), start(place, "api", &variables));
    let answers = at_once([&one, &two], &json!({ "ref": "main" }));
    assert_eq!(answers.iter().filter(|answer| answer.status == 500).count(), 1);
    assert!(answers.iter().all(|answer| [200, 500].contains(&answer.status)));
    let known = events(place, "github");
    let [first] = &known.iter().collect::<Vec<_>>()[..] else { panic!("{known:?}") };
    eventually(SOON, "it is tried again", || {
        stored(place, "github", first).is_some_and(|event| event.state == State::Completed)
    });
    let keys = endpoint.keys();
    assert_eq!((keys.len(), &keys[0]), (2, &keys[1]));
}

/// Its body was claimed, and its event was not stored.
fn a_delivery_that_died_midway_is_accepted_when_it_is_sent_again(place: &Place) {
    let (point, body) = ("claim.after", json!({ "ref": "main" }));
    let mut server = start_dying(place, "api", point, &SOURCES);
    assert!(try_to_post(&server, "github", "guid-1", "push", &body).is_none());
    died_at(place, point, &mut server);
    assert!(stored(place, "github", "guid-1").is_none());
    let server = start(place, "api", &[]);
    let other = push(&server, "guid-2", &body);
    assert_eq!(other.status, 503, "nothing is stored that it could be told 200 of: {}", other.body);
    assert_eq!((other.problem().as_str(), other.header("retry-after")), ("store-unavailable", Some("1")));
    assert_eq!(status(&push(&server, "guid-1", &body)), "processed");
    assert_eq!(status(&push(&server, "guid-2", &body)), "skipped");
    assert_eq!(outbox(place).len(), 1);
    assert_eq!(events(place, "github"), ["guid-1".to_owned()].into());
}
