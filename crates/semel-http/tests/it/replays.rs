//! Replays of stored answers.

use axum::{
    extract::Request,
    http::{HeaderMap, HeaderValue, StatusCode},
    response::IntoResponse as _,
};
use semel_http::Route;
use semel_testkit::Kind;

use crate::{
    client::keyed,
    shop::{Shop, on_both_databases, secs},
};

on_both_databases!(
    a_replay_repeats_status_headers_and_body,
    headers_of_one_message_are_not_replayed,
    an_empty_answer_is_replayed,
    only_the_layer_sets_idempotent_replayed,
    a_stored_answer_has_no_content_encoding,
    a_known_key_is_replayed_without_validating_the_body,
    an_answer_is_kept_for_its_retention,
    an_outcome_in_an_unknown_format_is_not_run_again,
    a_pinned_answer_is_replayed_without_the_database,
);

fn headers(lines: &[(&'static str, &[u8])]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in lines {
        headers.append(*name, HeaderValue::from_bytes(value).unwrap());
    }
    headers
}

async fn a_replay_repeats_status_headers_and_body(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop
        .serve_with(Route::leased(), |_| async {
            let lines: [(&str, &[u8]); 8] = [
                ("content-type", b"application/json; charset=utf-8"),
                ("link", b"<a>"),
                ("link", b"<b>"),
                ("location", b"/orders/1"),
                ("link", b"<a>"),
                ("x-raw", b"caf\xe9 \xff"),
                ("etag", b"\"1\""),
                ("cache-control", b"public, max-age=60"),
            ];
            (StatusCode::ACCEPTED, headers(&lines), vec![0, 159, 146, 150]).into_response()
        })
        .await;
    let first = client.send(&keyed("k")).await;
    let again = client.send(&keyed("k")).await;
    assert_eq!((first.status, first.is_replay()), (202, false));
    assert_eq!(first.header("cache-control").as_deref(), Some("public, max-age=60"));
    assert_eq!((again.status, again.is_replay()), (202, true));
    assert_eq!(again.body, first.body);
    assert_eq!(again.all("link"), ["<a>", "<b>", "<a>"]);
    for name in ["content-type", "location", "etag", "x-raw", "content-length"] {
        let of = |answer: &crate::client::Answer| {
            answer.headers.iter().filter(|(known, _)| known == name).cloned().collect::<Vec<_>>()
        };
        assert_eq!(of(&again), of(&first), "{name}");
        assert_eq!(of(&again).len(), 1, "{name}");
    }
    assert_eq!(again.header("cache-control").as_deref(), Some("no-store"));
}

async fn headers_of_one_message_are_not_replayed(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop
        .serve_with(Route::leased(), |_| async {
            let lines: [(&str, &[u8]); 14] = [
                ("set-cookie", b"session=1"),
                ("set-cookie", b"theme=2"),
                ("date", b"Tue, 01 Jan 2019 00:00:00 GMT"),
                ("connection", b"x-hop"),
                ("x-hop", b"1"),
                ("keep-alive", b"timeout=5"),
                ("traceparent", b"00-1-2-00"),
                ("tracestate", b"a=1"),
                ("x-request-id", b"7"),
                ("x-b3-traceid", b"7"),
                ("server", b"first"),
                ("alt-svc", b"h3=\":443\""),
                ("access-control-allow-origin", b"https://one.example"),
                ("x-stays", b"yes"),
            ];
            headers(&lines).into_response()
        })
        .await;
    let first = client.send(&keyed("k")).await;
    assert_eq!(first.all("set-cookie").len(), 2, "the first caller gets all headers");
    assert_eq!(first.header("traceparent").as_deref(), Some("00-1-2-00"));
    let again = client.send(&keyed("k")).await;
    let mut names: Vec<&str> = again.headers.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    // Date, connection and content-length are those of the replay.
    let own = ["cache-control", "connection", "content-length", "date", "idempotent-replayed", "x-stays"];
    assert_eq!(names, own, "{again:?}");
    assert_ne!(again.header("date"), first.header("date"));
    assert_eq!(again.header("connection").as_deref(), Some("close"));
}

async fn an_empty_answer_is_replayed(kind: Kind) {
    let shop = Shop::open(kind).await;
    for (status, length) in [(200, Some("0")), (204, None), (303, Some("0")), (205, Some("0")), (404, Some("0"))] {
        let desk = shop.desk.clone();
        let answer = move |_: Request| {
            desk.count();
            async move { StatusCode::from_u16(status).unwrap().into_response() }
        };
        let client = shop.serve_with(Route::leased(), answer).await;
        let runs = shop.desk.runs();
        let key = status.to_string();
        assert_eq!(client.send(&keyed(&key)).await.status, status);
        let again = client.send(&keyed(&key)).await;
        assert_eq!((again.status, again.text().as_str(), again.is_replay()), (status, "", true));
        assert_eq!(again.header("content-length").as_deref(), length, "{status}");
        assert_eq!(shop.desk.runs(), runs + 1);
    }
}

async fn only_the_layer_sets_idempotent_replayed(kind: Kind) {
    let shop = Shop::open(kind).await;
    let echo = |request: Request| async move {
        let seen: Vec<_> = request.headers().keys().filter(|name| name.as_str().starts_with("idempotent")).collect();
        let seen = format!("{seen:?}");
        seen.into_response()
    };
    let client = shop.serve_with(Route::leased(), echo).await;
    let order = keyed("k").header("Idempotent-Replayed", "true").header("idempotent-replayed", "yes");
    let first = client.send(&order).await;
    assert_eq!((first.text().as_str(), first.header("idempotent-replayed")), ("[]", None));
    let unkeyed = client.send(&crate::client::post("/orders").header("Idempotent-Replayed", "true")).await;
    assert_eq!((unkeyed.text().as_str(), unkeyed.header("idempotent-replayed")), ("[]", None));
    assert_eq!(client.send(&order).await.all("idempotent-replayed"), ["true"]);
}

async fn a_stored_answer_has_no_content_encoding(kind: Kind) {
    let shop = Shop::open(kind).await;
    let zip = |request: Request| async move {
        match request.headers().contains_key("accept-encoding") {
            true => ([("content-encoding", "br")], "brotli").into_response(),
            false => "plain".into_response(),
        }
    };
    let client = shop.serve_with(Route::leased(), zip).await;
    let first = client.send(&keyed("k").header("Accept-Encoding", "br, gzip")).await;
    let again = client.send(&keyed("k")).await;
    assert_eq!((first.text().as_str(), again.text().as_str()), ("plain", "plain"));
    let unkeyed = client.send(&crate::client::post("/orders").header("Accept-Encoding", "br")).await;
    assert_eq!(unkeyed.text(), "brotli", "without a key Accept-Encoding reaches the handler");
}

async fn a_known_key_is_replayed_without_validating_the_body(kind: Kind) {
    let shop = Shop::open(kind).await;
    let desk = shop.desk.clone();
    let handler = move |request: Request| {
        let desk = desk.clone();
        async move {
            // The first run succeeds; a second one would be 422.
            let status = if desk.count() == 1 { StatusCode::CREATED } else { StatusCode::UNPROCESSABLE_ENTITY };
            drop(request);
            status.into_response()
        }
    };
    let client = shop.serve_with(Route::leased().replay_mismatches(), handler).await;
    assert_eq!(client.send(&keyed("k").json("{}")).await.status, 201);
    assert_eq!(client.send(&keyed("k").json("not json")).await.status, 201);
    assert_eq!(shop.desk.runs(), 1);
}

async fn an_answer_is_kept_for_its_retention(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased()).await;
    let first = client.spawn(&keyed("k").header("X-Hold", "1"));
    shop.desk.arrival().await;
    shop.lab.pass(secs(10));
    shop.desk.let_go();
    first.await.unwrap();
    // The retention counts from the end of the first run.
    shop.lab.pass(secs(24 * 3600 - 1));
    assert!(client.send(&keyed("k")).await.is_replay());
    shop.lab.pass(secs(1));
    let later = client.send(&keyed("k")).await;
    assert_eq!((later.is_replay(), shop.desk.runs()), (false, 2));
}

async fn an_outcome_in_an_unknown_format_is_not_run_again(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased()).await;
    let work = semel::Work::new(
        semel::Scope::new("acme", "http", "POST /orders").unwrap(),
        semel::Key::new("k").unwrap(),
        semel::Fingerprint::of_bytes(b"of a newer node"),
    );
    let semel::Claim::Acquired(lease) = shop.ledger.claim(work).await.unwrap() else { panic!() };
    let _ = lease.complete(semel::Outcome::kept("\u{ff}newer")).await.unwrap();
    let client_of_replays = shop.serve(Route::leased().replay_mismatches()).await;
    client_of_replays.send(&keyed("k")).await.is_problem(409, "response-not-kept");
    client.send(&keyed("k")).await.is_problem(422, "payload-mismatch");
    assert_eq!(shop.desk.runs(), 0);
}

async fn a_pinned_answer_is_replayed_without_the_database(kind: Kind) {
    for route in [Route::leased().pinned(), Route::atomic().pinned()] {
        let shop = Shop::open(kind).await;
        let client = shop.serve(route).await;
        let first = client.send(&keyed("k")).await;
        assert_eq!((client.send(&keyed("k")).await.is_replay(), shop.desk.runs()), (true, 1));
        shop.lab.execute("ALTER TABLE semel_operations RENAME TO taken").await.unwrap();
        let again = client.send(&keyed("k")).await;
        assert_eq!((again.status, again.is_replay(), &again.body), (first.status, true, &first.body));
        assert_eq!(client.send(&keyed("k").body("other")).await.status, 422);
        shop.lab.execute("ALTER TABLE taken RENAME TO semel_operations").await.unwrap();
    }
}
