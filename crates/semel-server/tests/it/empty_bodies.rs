//! The laws of requests without a body: the answer says so, and names the missing fields.

use crate::{
    hooks,
    place::Place,
    support::{Answer, send},
};

#[test]
fn a_missing_body_is_reported_on_every_route_that_needs_one() {
    let place = Place::sqlite();
    let server = hooks::start(&place, &[]);
    let ask = |method: &str, path: &str, body: &str| {
        let mut connection = std::net::TcpStream::connect(server.address).unwrap();
        let key = format!("key-{}", body.len());
        let headers = [("host", "localhost"), ("idempotency-key", &*key), ("content-length", "0")];
        // With a body, its length is added.
        let headers = if body.is_empty() { &headers[..] } else { &headers[..2] };
        send(&mut connection, method, path, headers, body.as_bytes());
        Answer::read(connection)
    };
    for (method, path, wanted) in [
        ("POST", "/events", "an event, as a JSON object, or a list of events"),
        ("PUT", "/recipients/restaurant/1", "a JSON object with "),
        ("POST", "/notifications/1/resolve", "a JSON object with status and reason"),
        ("POST", "/dead-letters/1/discard", "a JSON object with reason"),
        ("POST", "/outbox/01890a5d-ac96-774b-bcce-b302099a8057/skip", "a JSON object with reason"),
        ("POST", "/webhooks/stripe/events/evt_1/retry", "a JSON object with reason"),
        ("POST", "/webhooks/stripe/events/reprocess", "a JSON object with reason"),
        ("POST", "/api/v1/clientes", "a JSON object with nome and "),
        ("POST", "/api/v1/propostas", "a JSON object with "),
        ("POST", "/api/v1/propostas/1/submeter", "a JSON object with "),
    ] {
        let told = ask(method, path, "");
        assert_eq!((told.status, told.problem().as_str()), (400, "invalid-json"), "{path}: {}", told.body);
        let detail = told.json()["detail"].as_str().unwrap().to_owned();
        assert!(detail.starts_with(&format!("The body is empty. It must be {wanted}")), "{path}: {detail}");
    }
    // If no field is required, an empty body counts as an empty object.
    for body in ["", "{}"] {
        let told = ask("POST", "/dead-letters/redrive", body);
        assert_eq!((told.status, told.problem().as_str()), (422, "invalid-fields"), "{}", told.body);
        assert!(told.json()["errors"][0]["field"] == "all", "{}", told.body);
        assert_eq!(ask("PATCH", "/api/v1/clientes/1", body).problem(), "not-found");
    }
}
