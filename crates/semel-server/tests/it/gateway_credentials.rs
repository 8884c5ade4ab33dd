//! The laws of credentials: which callers get a stored answer from the gateway.

use std::{process::Command, thread};

use crate::{
    gateway::{ask, gateway},
    place::{Place, on_both_databases},
    support::{Answer, SOON, Server, eventually, stderr},
    upstream::Upstream,
};

on_both_databases! {
    a_stored_answer_is_for_the_credentials_of_the_first_request
    of_two_concurrent_callers_with_other_credentials_one_is_refused
    several_cookie_fields_reach_the_upstream_as_one
}

fn started(mut command: Command, settings: &[(&str, &str)]) -> Server {
    Server::start_with(command.envs(settings.iter().copied()))
}

fn post(server: &Server, path: &str, headers: &[(&str, &str)]) -> Answer {
    Answer::read(ask(server, "POST", path, &[&[("idempotency-key", "k")], headers].concat(), "{}"))
}

const ANN: (&str, &str) = ("authorization", "Bearer ann");
const BOB: (&str, &str) = ("authorization", "Bearer bob");

fn a_stored_answer_is_for_the_credentials_of_the_first_request(place: &Place) {
    let upstream = Upstream::start();
    let server = started(gateway(place, &upstream.url), &[]);
    assert_eq!(post(&server, "/orders", &[ANN]).status, 201);
    // Another gateway on the same database uses the same secret.
    let other = started(gateway(place, &upstream.url), &[]);
    for server in [&server, &other] {
        for headers in [&[BOB][..], &[], &[ANN, ANN]] {
            let told = post(server, "/orders", headers);
            assert_eq!((told.status, told.problem().as_str()), (409, "credentials-differ"), "{headers:?}");
            assert_eq!(told.header("idempotent-replayed"), None);
        }
        let again = post(server, "/orders", &[ANN, ("cookie", "theme=dark")]);
        assert_eq!((again.status, again.header("idempotent-replayed")), (201, Some("true")));
    }
    assert_eq!(upstream.effects(), 1);
    let shown = place.say(["operations", "show", "k", "--scope", "gateway/request"]);
    assert!(!shown.contains("Bearer") && !shown.contains("ann"), "{shown}");
    let why = ["why", "k", "--scope", "gateway/request"];
    let refused = "6 of these were refused: they had other credentials than the first request";
    eventually(SOON, "the repeats are counted", || place.say(why).contains(refused));
    let told = place.json(["why", "k", "--scope", "gateway/request", "--json"]);
    assert_eq!(told["repeats"]["duplicate"]["first"][0]["answer"], "credentials_differ", "{told}");
    assert!(server.get("/semel/problems/credentials-differ").body.contains("refreshed"));
}

/// Of several fields, an upstream could read another one than was compared.
fn several_cookie_fields_reach_the_upstream_as_one(place: &Place) {
    let upstream = Upstream::start();
    let server = started(gateway(place, &upstream.url), &[("SEMEL_GATEWAY_COOKIES", "session")]);
    let cookies = |lines: &[&'static str]| {
        let headers: Vec<_> = lines.iter().map(|line| ("cookie", *line)).collect();
        post(&server, "/orders", &headers).status
    };
    assert_eq!(cookies(&["session=a", "theme=dark; lang=pt"]), 201);
    assert_eq!(upstream.seen()[0].header("cookie"), ["session=a; theme=dark; lang=pt"]);
    for same in [&["theme=light; session=a"][..], &["lang=en", "session=a"], &["t=\"x, y; z\"", "session=a"]] {
        assert_eq!(cookies(same), 201, "{same:?}");
    }
    for other in [
        &["session=b"][..],
        &["session=a", "session=b"],
        &["session=b", "session=a"],
        &["session=a; Session=b"],
        &["t=\"x; session=a\""],
        &["t=x, session=b; session=a"],
    ] {
        assert_eq!(cookies(other), 409, "{other:?}");
    }
    assert_eq!(upstream.effects(), 1);
}

fn of_two_concurrent_callers_with_other_credentials_one_is_refused(place: &Place) {
    let upstream = Upstream::start();
    let server = started(gateway(place, &upstream.url), &[]);
    let told = thread::scope(|scope| {
        let server = &server;
        let asked = [ANN, BOB].map(|who| scope.spawn(move || post(server, "/slow", &[who, ("prefer", "wait=10")])));
        eventually(SOON, "one has begun, and the other is told", || {
            upstream.effects() == 1 && asked.iter().any(thread::ScopedJoinHandle::is_finished)
        });
        upstream.open_gate();
        let mut told = asked.map(|asked| asked.join().unwrap().status);
        told.sort_unstable();
        told
    });
    assert_eq!((told, upstream.effects()), ([201, 409], 1));
}

#[test]
fn after_a_401_the_key_is_free_for_other_credentials() {
    let (place, upstream) = (Place::sqlite(), Upstream::start());
    let server = started(gateway(&place, &upstream.url), &[]);
    // The upstream refused it, so nothing was done, and the key is free for the new credentials.
    assert_eq!(post(&server, "/401", &[ANN]).status, 401);
    assert_eq!(post(&server, "/orders", &[BOB]).status, 201);
    assert_eq!(post(&server, "/orders", &[BOB]).header("idempotent-replayed"), Some("true"));
}

#[test]
fn cookies_that_are_named_are_credentials() {
    let (place, upstream) = (Place::sqlite(), Upstream::start());
    let server = started(gateway(&place, &upstream.url), &[("SEMEL_GATEWAY_COOKIES", "session")]);
    assert_eq!(post(&server, "/orders", &[("cookie", "session=1; theme=dark")]).status, 201);
    assert_eq!(post(&server, "/orders", &[("cookie", "theme=light; session=1")]).status, 201);
    for other in [&[("cookie", "session=2; theme=dark")][..], &[("cookie", "theme=dark")], &[]] {
        assert_eq!(post(&server, "/orders", other).problem(), "credentials-differ", "{other:?}");
    }
    assert_eq!(upstream.effects(), 1);
}

#[test]
fn shared_answers_and_those_of_a_tenant_are_for_any_credentials() {
    let trusted = ("SEMEL_GATEWAY_TRUSTED_PROXIES", "127.0.0.1");
    for settings in [&[("SEMEL_GATEWAY_SHARED", "true")][..], &[("SEMEL_GATEWAY_TENANT_HEADER", "x-tenant"), trusted]] {
        let (place, upstream) = (Place::sqlite(), Upstream::start());
        let server = started(gateway(&place, &upstream.url), settings);
        for (who, replayed) in [(ANN, None), (BOB, Some("true"))] {
            let answer = post(&server, "/orders", &[who, ("x-tenant", "acme")]);
            assert_eq!((answer.status, answer.header("idempotent-replayed")), (201, replayed), "{settings:?}");
        }
    }
}

#[test]
fn settings_without_protection_are_refused_with_the_reason() {
    let place = Place::sqlite();
    let trusted = ("SEMEL_GATEWAY_TRUSTED_PROXIES", "127.0.0.1");
    for (name, value, why) in [
        ("SEMEL_GATEWAY_RETENTION", "0s", "a later retry is executed again"),
        ("SEMEL_GATEWAY_RETENTION", "1ns", "must be at least 1m"),
        ("SEMEL_GATEWAY_RETENTION", "1ms", "must be at least 1m"),
        ("SEMEL_GATEWAY_RETENTION", "59s", "must be at least 1m"),
        ("SEMEL_PROPOSALS_RETENTION", "0s", "a later retry is executed again"),
        ("SEMEL_GATEWAY_TENANT_HEADER", "Authorization", "must be a dedicated header"),
        ("SEMEL_GATEWAY_TENANT_HEADER", "Cookie", "must be a dedicated header"),
        ("SEMEL_GATEWAY_TENANT_HEADER", "Host", "must be a dedicated header"),
        ("SEMEL_HTTP_BODY_BUDGET", "1MiB", "must be at least 8MiB"),
        ("SEMEL_GATEWAY_COOKIES", "a b", "must be names of cookies"),
    ] {
        let output = gateway(&place, "http://127.0.0.1:3").envs([trusted, (name, value)]).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{name}={value}");
        assert!(stderr(&output).contains(why), "{name}={value}: {}", stderr(&output));
    }
    let useless = [("SEMEL_GATEWAY_SHARED", "true"), ("SEMEL_GATEWAY_COOKIES", "session")];
    let output = gateway(&place, "http://127.0.0.1:3").envs(useless).output().unwrap();
    assert!(stderr(&output).contains("are ignored"), "{}", stderr(&output));
}
