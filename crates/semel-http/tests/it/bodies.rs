//! Bodies that are too long, incomplete or slow.

use std::{convert::Infallible, io, time::Duration};

use axum::{
    body::{Body, Bytes},
    extract::Request,
    http::{HeaderMap, StatusCode},
    response::{IntoResponse as _, Response},
};
use futures_util::{StreamExt as _, stream};
use http_body::Frame;
use http_body_util::StreamBody;
use semel::State;
use semel_http::{Reference, Route};
use semel_testkit::Kind;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::{
    client::{Client, eventually, keyed, read, soon},
    shop::{Shop, on_both_databases},
};

on_both_databases!(
    a_body_over_the_limit_is_refused_and_claims_nothing,
    an_incomplete_body_claims_nothing,
    an_answer_over_the_limit_is_sent_once_and_not_stored,
    a_stream_over_the_limit_is_sent_once_and_not_stored,
    server_sent_events_are_passed_on_as_they_come,
    a_slow_answer_is_passed_on_and_not_stored,
    an_answer_with_trailers_is_passed_on_and_not_stored,
    a_request_whose_answer_breaks_off_is_not_run_again,
    a_101_answer_is_not_stored,
    an_answer_in_many_pieces_is_stored_whole,
    a_reference_is_kept_instead_of_the_answer,
    pipelined_repeats_are_replayed,
);

async fn a_body_over_the_limit_is_refused_and_claims_nothing(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased().request_limit(10)).await;
    let long = client.send(&keyed("k").body("12345678901")).await;
    long.is_problem(413, "body-too-large");
    let chunked = b"Transfer-Encoding: chunked\r\n\r\n6\r\n123456\r\n6\r\n123456\r\n0\r\n\r\n";
    client.raw(&[&keyed("k").head()[..], chunked].concat()).await.is_problem(413, "body-too-large");
    // An announced length over the limit is refused before the body is sent.
    let announced = [&keyed("k").head()[..], b"Content-Length: 5000000000\r\n\r\n"].concat();
    client.raw(&announced).await.is_problem(413, "body-too-large");
    assert_eq!((shop.desk.runs(), shop.operations().await), (0, 0));
    assert_eq!(client.send(&keyed("k").body("1234567890")).await.status, 201);
}

async fn an_incomplete_body_claims_nothing(kind: Kind) {
    let shop = Shop::open(kind).await;
    for route in [Route::leased(), Route::atomic()] {
        let client = shop.serve(route.clone()).await;
        let mut half = client.start(&[&keyed("k").head()[..], b"Content-Length: 10\r\n\r\n12345"].concat()).await;
        half.shutdown().await.unwrap();
        let mut said = Vec::new();
        let _ = soon(half.read_to_end(&mut said)).await;
        let said = String::from_utf8_lossy(&said);
        assert!(said.is_empty() || said.starts_with("HTTP/1.1 400"), "{said}");
        // Nor does a client that gets 100 Continue and disconnects.
        let expecting = b"Content-Length: 10\r\nExpect: 100-continue\r\n\r\n";
        let mut waits = client.start(&[&keyed("k").head()[..], expecting].concat()).await;
        let mut asked = [0; 12];
        soon(waits.read_exact(&mut asked)).await.unwrap();
        assert_eq!(&asked, b"HTTP/1.1 100");
        drop(waits);
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert_eq!((shop.desk.runs(), shop.operations().await), (0, 0));
        // Nor does a client that stalls.
        let client = shop.serve(route.request_patience(Duration::from_millis(50))).await;
        let mut silent = client.start(&[&keyed("k").head()[..], b"Content-Length: 10\r\n\r\n12345"].concat()).await;
        let mut said = [0; 12];
        soon(silent.read_exact(&mut said)).await.unwrap();
        assert_eq!((&said, shop.operations().await), (b"HTTP/1.1 408", 0));
    }
}

/// Serves a handler whose answer has a Location and this body.
async fn answers(shop: &Shop, route: Route, body: impl Fn() -> Body + Clone + Send + Sync + 'static) -> Client {
    let desk = shop.desk.clone();
    shop.serve_with(route, move |request: Request| {
        desk.count();
        let mut response = (StatusCode::CREATED, [("location", "/orders/7")], body()).into_response();
        if let Some(kind) = request.headers().get("x-type") {
            response.headers_mut().insert("content-type", kind.clone());
        }
        async move { response }
    })
    .await
}

/// Checks that a repeat gets response-not-kept with the Location, and that the handler ran once.
async fn is_not_kept(shop: &Shop, client: Client) {
    eventually(|| async { shop.operation("k").await.is_some_and(|row| row.state == State::Completed) }).await;
    let again = client.send(&keyed("k")).await;
    again.is_problem(409, "response-not-kept");
    assert_eq!(again.header("location").as_deref(), Some("/orders/7"));
    assert_eq!(again.json()["retryable"], false);
    assert!(again.json()["first_seen"].is_string());
    client.send(&keyed("k").body("other")).await.is_problem(422, "payload-mismatch");
    assert_eq!(shop.desk.runs(), 1);
}

async fn an_answer_over_the_limit_is_sent_once_and_not_stored(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = answers(&shop, Route::leased().answer_limit(1000), || Body::from("x".repeat(1001))).await;
    let first = client.send(&keyed("k")).await;
    assert_eq!((first.status, first.body.len(), first.whole), (201, 1001, true));
    assert_eq!(first.header("content-length").as_deref(), Some("1001"));
    is_not_kept(&shop, client).await;
    let shop = Shop::open(kind).await;
    let client = answers(&shop, Route::leased().answer_limit(1000), || Body::from("x".repeat(1000))).await;
    client.send(&keyed("k")).await;
    assert_eq!(client.send(&keyed("k")).await.body.len(), 1000, "an answer of exactly the limit is stored");
}

/// A stream of `n` pieces.
fn pieces(n: usize, size: usize) -> Body {
    Body::from_stream(stream::iter((0..n).map(move |_| Ok::<_, Infallible>(Bytes::from(vec![b'x'; size])))))
}

async fn a_stream_over_the_limit_is_sent_once_and_not_stored(kind: Kind) {
    for route in [Route::leased(), Route::atomic()] {
        let shop = Shop::open(kind).await;
        let client = answers(&shop, route.answer_limit(1000), || pieces(300, 10)).await;
        let first = client.send(&keyed("k")).await;
        assert_eq!((first.status, first.body.len(), first.whole), (201, 3000, true));
        is_not_kept(&shop, client).await;
    }
}

async fn server_sent_events_are_passed_on_as_they_come(kind: Kind) {
    let shop = Shop::open(kind).await;
    let go = std::sync::Arc::new(tokio::sync::Semaphore::new(0));
    let held = go.clone();
    let events = move || {
        let held = held.clone();
        let one = stream::once(async { Ok::<_, Infallible>(Bytes::from("data: 1\n\n")) });
        Body::from_stream(one.chain(stream::once(async move {
            held.acquire().await.unwrap().forget();
            Ok(Bytes::from("data: 2\n\n"))
        })))
    };
    // A long time limit for answers does not hold events back.
    let client = answers(&shop, Route::leased().answer_patience(Duration::from_secs(600)), events).await;
    let mut stream = client.start(&keyed("k").header("X-Type", "Text/Event-Stream; charset=utf-8").bytes()).await;
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains("data: 1") {
        assert_ne!(soon(stream.read_buf(&mut seen)).await.unwrap(), 0);
    }
    // It is completed while the stream is still open.
    is_not_kept(&shop, client).await;
    go.add_permits(1);
    soon(stream.read_to_end(&mut seen)).await.unwrap();
    assert!(String::from_utf8_lossy(&seen).contains("data: 2"));
}

async fn a_slow_answer_is_passed_on_and_not_stored(kind: Kind) {
    let shop = Shop::open(kind).await;
    let slow = || {
        Body::from_stream(stream::iter(0..3).then(|i| async move {
            tokio::time::sleep(Duration::from_millis(100)).await;
            Ok::<_, Infallible>(Bytes::from(i.to_string()))
        }))
    };
    let client = answers(&shop, Route::leased().answer_patience(Duration::from_millis(150)), slow).await;
    let first = client.send(&keyed("k")).await;
    assert_eq!((first.text().as_str(), first.whole), ("012", true));
    is_not_kept(&shop, client).await;
}

async fn an_answer_with_trailers_is_passed_on_and_not_stored(kind: Kind) {
    let shop = Shop::open(kind).await;
    let trailed = || {
        let mut trailers = HeaderMap::new();
        trailers.insert("x-sum", "7".parse().unwrap());
        let frames = [Frame::data(Bytes::from("data")), Frame::trailers(trailers)];
        Body::new(StreamBody::new(stream::iter(frames.into_iter().map(Ok::<_, Infallible>))))
    };
    let desk = shop.desk.clone();
    let client = shop
        .serve_with(Route::leased(), move |_| {
            desk.count();
            async move {
                (StatusCode::CREATED, [("location", "/orders/7"), ("trailer", "x-sum")], trailed()).into_response()
            }
        })
        .await;
    let mut stream = client.start(&keyed("k").header("TE", "trailers").bytes()).await;
    let mut seen = Vec::new();
    soon(stream.read_to_end(&mut seen)).await.unwrap();
    let seen = String::from_utf8_lossy(&seen).to_ascii_lowercase();
    assert!(seen.contains("data") && seen.contains("x-sum: 7"), "{seen}");
    is_not_kept(&shop, client).await;
}

async fn a_request_whose_answer_breaks_off_is_not_run_again(kind: Kind) {
    for route in [Route::leased(), Route::atomic()] {
        let shop = Shop::open(kind).await;
        let broken = || {
            let first = stream::iter([Ok(Bytes::from("half"))]);
            Body::from_stream(first.chain(stream::iter([Err(io::Error::other("broken"))])))
        };
        let client = answers(&shop, route, broken).await;
        let first = client.send(&keyed("k")).await;
        assert_eq!((first.status, first.text().as_str(), first.whole), (201, "half", false));
        is_not_kept(&shop, client).await;
    }
}

async fn a_101_answer_is_not_stored(kind: Kind) {
    let shop = Shop::open(kind).await;
    let desk = shop.desk.clone();
    let client = shop
        .serve_with(Route::leased(), move |_| {
            desk.count();
            let headers = [("connection", "upgrade"), ("upgrade", "chat"), ("location", "/orders/7")];
            async move { (StatusCode::SWITCHING_PROTOCOLS, headers).into_response() }
        })
        .await;
    let upgrade =
        b"POST /orders HTTP/1.1\r\nHost: shop\r\nConnection: upgrade\r\nUpgrade: chat\r\nIdempotency-Key: k\r\n\
                    Content-Length: 0\r\n\r\n";
    let stream = client.start(upgrade).await;
    assert_eq!(soon(read(stream)).await.status, 101);
    is_not_kept(&shop, client).await;
}

async fn an_answer_in_many_pieces_is_stored_whole(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = answers(&shop, Route::leased(), || pieces(100_000, 5)).await;
    let first = client.send(&keyed("k")).await;
    assert_eq!((first.body.len(), first.whole), (500_000, true));
    let again = client.send(&keyed("k")).await;
    assert!(again.is_replay());
    assert_eq!(again.body, first.body);
}

async fn a_reference_is_kept_instead_of_the_answer(kind: Kind) {
    let shop = Shop::open(kind).await;
    let now = std::sync::Arc::new(std::sync::Mutex::new("new".to_owned()));
    let (made, read) = (now.clone(), now.clone());
    let route = Route::leased().replay_mismatches().rebuild(move |Reference(name), head| {
        let state = read.lock().unwrap().clone();
        let said = format!("{} is {state} ({})", String::from_utf8_lossy(&name), head.uri.path());
        Box::pin(async move { axum::http::Response::new(Bytes::from(said)) })
    });
    let desk = shop.desk.clone();
    let client = shop
        .serve_with(route, move |request: Request| {
            desk.count();
            let named = !request.headers().contains_key("x-nameless");
            let said = format!("order 7 is {}", made.lock().unwrap());
            async move {
                let mut response: Response = (StatusCode::CREATED, said).into_response();
                if named {
                    response.extensions_mut().insert(Reference::new("order 7"));
                }
                response
            }
        })
        .await;
    let first = client.send(&keyed("k")).await;
    assert_eq!((first.status, first.text().as_str()), (201, "order 7 is new"));
    *now.lock().unwrap() = "sent".to_owned();
    let again = client.send(&keyed("k")).await;
    assert!(again.is_replay());
    assert_eq!((again.status, again.text().as_str()), (200, "order 7 is sent (/orders)"));
    assert_eq!(again.header("cache-control").as_deref(), Some("no-store"));
    let other = client.send(&keyed("k").body("other")).await;
    assert_eq!(other.header("idempotency-mismatch").as_deref(), Some("true"));
    assert_eq!(other.text(), again.text());
    let stored = shop.operation("k").await.unwrap().outcome.unwrap();
    assert_eq!(stored.body, "order 7", "nothing else is stored");
    // Without a reference the answer cannot be rebuilt, but the request is completed.
    assert_eq!(client.send(&keyed("nameless").header("X-Nameless", "1")).await.status, 201);
    client.send(&keyed("nameless")).await.is_problem(409, "response-not-kept");
    assert_eq!(shop.desk.runs(), 2);
}

async fn pipelined_repeats_are_replayed(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased()).await;
    let one = b"POST /orders HTTP/1.1\r\nHost: shop\r\nIdempotency-Key: k\r\nContent-Length: 1\r\n\r\na";
    let mut stream = client.start(&[&one[..], &one[..], &keyed("k").body("a").bytes()].concat()).await;
    let mut seen = Vec::new();
    soon(stream.read_to_end(&mut seen)).await.unwrap();
    let seen = String::from_utf8_lossy(&seen).to_ascii_lowercase();
    assert_eq!(seen.matches("http/1.1 201").count(), 3, "{seen}");
    assert_eq!(seen.matches("idempotent-replayed: true").count(), 2, "{seen}");
    assert_eq!(shop.desk.runs(), 1);
}
