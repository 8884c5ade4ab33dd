//! The OpenAPI document, against the running server.

use std::net::{SocketAddr, TcpStream};

use crate::{
    place::Place,
    proposals::Api,
    support::{Answer, send},
};

/// Every path that the server promises, with its methods.
const PATHS: [(&str, &[&str]); 69] = [
    ("/", &["get"]),
    ("/healthz", &["get"]),
    ("/readyz", &["get"]),
    ("/problems/{name}", &["get"]),
    ("/openapi.json", &["get"]),
    ("/api/v1/clientes", &["get", "post"]),
    ("/api/v1/clientes/{id}", &["get", "patch"]),
    ("/api/v1/propostas", &["get", "post"]),
    ("/api/v1/propostas/{id}", &["get"]),
    ("/api/v1/propostas/{id}/submeter", &["post"]),
    ("/api/v1/propostas/{id}/aceitar", &["post"]),
    ("/api/v1/propostas/{id}/recusar", &["post"]),
    ("/api/v1/propostas/{id}/cancelar", &["post"]),
    ("/api/v1/propostas/{id}/historico", &["get"]),
    ("/events", &["get", "post"]),
    ("/events/{eventId}", &["get"]),
    ("/recipients/{kind}", &["get"]),
    ("/recipients/{kind}/{userId}", &["delete", "get", "put"]),
    ("/notifications", &["get"]),
    ("/notifications/stream", &["get"]),
    ("/notifications/{id}", &["get"]),
    ("/notifications/{id}/read", &["post"]),
    ("/notifications/{id}/resolve", &["post"]),
    ("/dead-letters", &["get"]),
    ("/dead-letters/redrive", &["post"]),
    ("/dead-letters/{id}", &["get"]),
    ("/dead-letters/{id}/redrive", &["post"]),
    ("/dead-letters/{id}/discard", &["post"]),
    ("/outbox", &["get"]),
    ("/outbox/summary", &["get"]),
    ("/outbox/{messageId}/redrive", &["post"]),
    ("/outbox/{messageId}/skip", &["post"]),
    ("/v1/operations", &["get", "post"]),
    ("/v1/operations/next", &["post"]),
    ("/v1/operations/{id}", &["delete", "get"]),
    ("/v1/operations/{id}/renew", &["post"]),
    ("/v1/operations/{id}/complete", &["post"]),
    ("/v1/operations/{id}/fail", &["post"]),
    ("/v1/operations/{id}/doubt", &["post"]),
    ("/v1/operations/{id}/release", &["post"]),
    ("/v1/operations/{id}/retry", &["post"]),
    ("/v1/operations/{id}/resolve", &["post"]),
    ("/v1/operations/{id}/cancel", &["post"]),
    ("/jobs", &["get"]),
    ("/jobs/{id}", &["get"]),
    ("/jobs/{id}/cancel", &["post"]),
    ("/functions/v1/stripe-events-monitor", &["get"]),
    ("/webhooks/{source}", &["post"]),
    ("/webhooks/{source}/{function}", &["post"]),
    ("/webhooks/{source}/monitor", &["get"]),
    ("/webhooks/{source}/events", &["get"]),
    ("/webhooks/{source}/events/reprocess", &["get", "post"]),
    ("/webhooks/{source}/events/{id}", &["get"]),
    ("/webhooks/{source}/events/{id}/retry", &["post"]),
    ("/mailings", &["get", "post"]),
    ("/mailings/{id}", &["delete", "get"]),
    ("/mailings/{id}/entries", &["get"]),
    ("/mailings/{id}/entries/{entryId}/resolve", &["post"]),
    ("/mailings/{id}/duplicates", &["get"]),
    ("/mailings/{id}/rejects.csv", &["get"]),
    ("/mailings/{id}/export.csv", &["get"]),
    ("/mailings/{id}/pause", &["post"]),
    ("/mailings/{id}/resume", &["post"]),
    ("/mailings/{id}/retry", &["post"]),
    ("/mailings/{id}/cancel", &["post"]),
    ("/mailings/{id}/test", &["post"]),
    ("/suppressions", &["get", "post"]),
    ("/suppressions/{email}", &["delete"]),
    ("/u/{token}", &["get", "post"]),
];

/// Routes that read no body, deletions that read one, uploads, and routes whose answer has no end.
const BODILESS: [&str; 4] =
    ["/notifications/{id}/read", "/dead-letters/{id}/redrive", "/outbox/{messageId}/redrive", "/u/{token}"];
const REASONED: [&str; 3] = ["/mailings/{id}", "/suppressions/{email}", "/v1/operations/{id}"];
const UPLOADS: [&str; 1] = ["/mailings"];
const ENDLESS: [&str; 1] = ["/notifications/stream"];

/// A path with a value for each parameter, an existing one if possible.
fn filled(path: &str) -> String {
    let names = [("{name}", "in-flight"), ("{id}", "1"), ("{messageId}", "1"), ("{eventId}", "e"), ("{kind}", "admin")];
    let filled = names.iter().fold(path.to_owned(), |path, (name, value)| path.replace(name, value));
    let filled = filled.replace("{entryId}", "1").replace("{email}", "ana@example.com").replace("{token}", "t");
    filled.replace("{userId}", "u").replace("{source}", "stripe").replace("{function}", "f")
}

#[test]
fn the_openapi_document_matches_the_routes() {
    let place = Place::sqlite();
    let source = [("SEMEL_WEBHOOKS_STRIPE_KIND", "stripe"), ("SEMEL_WEBHOOKS_STRIPE_SECRETS", "whsec_test_secret")];
    let api = Api::start_with(&place, &source);
    api.proposta();
    let document = api.server.get("/openapi.json");
    assert_eq!((document.status, document.header("content-type")), (200, Some("application/json")));
    let document = document.json();
    assert_eq!(document["openapi"], "3.1.0");
    assert_eq!(document["info"]["version"], env!("CARGO_PKG_VERSION"));
    let paths = document["paths"].as_object().unwrap();
    for (path, methods) in PATHS {
        let documented: Vec<_> = paths[path].as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(documented, methods, "{path}");
    }
    assert_eq!(paths.len(), PATHS.len(), "nothing else is promised");

    for (path, methods) in paths.iter().filter(|(path, _)| !ENDLESS.contains(&path.as_str())) {
        for (method, operation) in methods.as_object().unwrap() {
            let answer = ask(api.server.address, method, &filled(path));
            let status = answer.status.to_string();
            assert!(operation["responses"].get(&status).is_some(), "{method} {path} answers {status}: {}", answer.body);
            let takes_none = match method.as_str() {
                "get" => true,
                "delete" => !REASONED.contains(&path.as_str()),
                _ => BODILESS.contains(&path.as_str()),
            };
            let (reads, uploads) = (!takes_none, method == "post" && UPLOADS.contains(&path.as_str()));
            for (limit, expected) in [("408", reads), ("413", reads)] {
                assert_eq!(operation["responses"].get(limit).is_some(), expected, "{method} {path}: {limit}");
            }
            let found = path.starts_with("/api/v1") || !path.contains('{');
            let expected = match (reads, found) {
                _ if uploads => vec![422],
                (true, _) => vec![400],
                (false, true) => vec![200],
                (false, false) => vec![200, 204, 404],
            };
            assert!(expected.contains(&answer.status), "{method} {path}: {} {}", answer.status, answer.body);
        }
    }
    for schema in ["NovaProposta", "Proposta"] {
        let valor = &document["components"]["schemas"][schema]["properties"]["valor"];
        // For a reader that parses both as floats, 0.29 is not a multiple of 0.01.
        assert!(valor["multipleOf"].is_null() && valor["description"].as_str().unwrap().contains("two decimals"));
    }
    for name in [
        "delivery-running",
        "delivery-settled",
        "event-completed",
        "event-running",
        "event-without-rule",
        "job-ended",
        "not-held",
        "role-not-allowed",
    ] {
        assert_eq!(api.server.get(&format!("/problems/{name}")).status, 200, "{name}");
    }
    for name in ["email-em-uso", "versao-desatualizada", "estado-invalido", "invalid-fields", "invalid-json"] {
        assert_eq!(api.server.get(&format!("/problems/{name}")).status, 200, "{name}");
    }
}

/// Sends an unreadable body, if the route reads one.
fn ask(address: SocketAddr, method: &str, path: &str) -> Answer {
    let mut connection = TcpStream::connect(address).unwrap();
    let body: &[u8] = if method == "get" { b"" } else { b"{" };
    send(&mut connection, &method.to_uppercase(), path, &[("host", "localhost")], body);
    Answer::read(connection)
}
