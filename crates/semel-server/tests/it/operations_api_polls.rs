//! The laws of requests that wait for work over the HTTP API of operations.

use std::{
    io::Read as _,
    net::{Shutdown, TcpStream},
    thread,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::{
    operations_api::{Api, Held, handed, id, in_seconds, micros, pay, try_ask, with},
    operations_api_tokens::TOKENS,
    place::{Place, on_both_databases},
    support::{SOON, eventually, send, within},
};

on_both_databases! {
    a_waiting_request_gets_what_is_enqueued_at_its_node
    a_waiting_request_gets_what_is_enqueued_at_another_node
    a_waiting_request_gets_an_operation_when_its_time_has_come
    a_waiting_request_gets_a_retry
    a_request_that_waits_in_vain_gets_nothing_at_its_end
    a_request_that_does_not_wait_is_answered_at_once
    of_several_waiting_requests_each_gets_its_own_operation
    a_waiting_request_is_not_answered_with_operations_of_other_names
    a_request_whose_connection_is_closed_claims_nothing
    waiting_requests_end_when_the_server_stops
    a_waiting_request_repeated_with_its_token_gets_the_same_lease
}

/// The longest wait of these tests, and far more than an enqueue takes to wake a request on a busy machine.
const WAIT: u64 = 15;
const WOKEN: Duration = Duration::from_secs(5);

fn waiting() -> Value {
    json!({ "operationNames": ["pay"], "wait": WAIT })
}

/// Waits until so many looks for work have found none or some.
fn have_looked(place: &Place, times: usize) {
    let looks = || place.lines("points").iter().filter(|point| *point == "take.after").count();
    eventually(SOON, "the requests have looked", || looks() >= times);
}

/// What a waiting request gets, and how long after `work` began.
fn meanwhile(place: &Place, node: &Api, body: &Value, work: impl FnOnce()) -> (Vec<Held>, Duration) {
    thread::scope(|scope| {
        let asked = scope.spawn(|| node.next(body));
        have_looked(place, 1);
        let began = Instant::now();
        work();
        (asked.join().unwrap(), began.elapsed())
    })
}

fn a_waiting_request_gets_what_is_enqueued_at_its_node(place: &Place) {
    let api = Api::start(place);
    let mut enqueued = Value::Null;
    let (held, after) = meanwhile(place, &api, &waiting(), || enqueued = api.enqueue(&pay(1)));
    assert_eq!((held[0].id, held.len()), (id(&enqueued), 1));
    assert!(after < WOKEN, "{after:?}");
    assert_eq!(held[0].operation["input"], 1);
    api.complete(&held[0], json!(1));
}

fn a_waiting_request_gets_what_is_enqueued_at_another_node(place: &Place) {
    let (api, other) = (Api::start(place), Api::start(place));
    let (held, after) = meanwhile(place, &api, &waiting(), || drop(other.enqueue(&pay(1))));
    assert_eq!(held.len(), 1);
    assert!(after < WOKEN, "{after:?}");
}

fn a_waiting_request_gets_an_operation_when_its_time_has_come(place: &Place) {
    let api = Api::start(place);
    let at = in_seconds(1);
    api.enqueue(&with(&pay(1), json!({ "notBefore": at })));
    let (held, after) = meanwhile(place, &api, &waiting(), || {});
    assert_eq!(held.len(), 1);
    assert!(micros(&held[0].operation["updatedAt"]) >= micros(&json!(at)));
    assert!(after < WOKEN, "{after:?}");
}

fn a_waiting_request_gets_a_retry(place: &Place) {
    let api = Api::start(place);
    api.enqueue(&pay(1));
    let first = api.next(&waiting()).remove(0);
    let _ = std::fs::remove_file(place.path("points"));
    let (held, after) = meanwhile(place, &api, &waiting(), || drop(api.fail(&first, "once")));
    assert_eq!((held[0].id, &held[0].operation["retryCount"]), (first.id, &json!(1)));
    assert!(after < WOKEN, "{after:?}");
}

fn a_request_that_waits_in_vain_gets_nothing_at_its_end(place: &Place) {
    let api = Api::start(place);
    let began = Instant::now();
    let answer = api.post("/next", &json!({ "operationNames": ["pay"], "wait": 1 }));
    let took = began.elapsed();
    assert_eq!((answer.status, answer.json()), (200, json!({ "operations": [] })));
    assert!(took >= Duration::from_secs(1) && took < Duration::from_secs(1) + WOKEN, "{took:?}");
}

fn a_request_that_does_not_wait_is_answered_at_once(place: &Place) {
    let api = Api::start(place);
    for body in [json!({ "operationNames": ["pay"] }), json!({ "operationNames": ["pay"], "wait": 0 })] {
        let began = Instant::now();
        assert!(api.next(&body).is_empty());
        assert!(began.elapsed() < WOKEN);
    }
}

fn of_several_waiting_requests_each_gets_its_own_operation(place: &Place) {
    const REQUESTS: usize = 8;
    let api = Api::start(place);
    let mut ids = thread::scope(|scope| {
        let asked: Vec<_> = (0..REQUESTS).map(|_| scope.spawn(|| api.next(&waiting()))).collect();
        have_looked(place, REQUESTS);
        for n in 0..REQUESTS {
            api.enqueue(&pay(n));
        }
        asked.into_iter().flat_map(|asked| asked.join().unwrap()).map(|held| held.id).collect::<Vec<_>>()
    });
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), REQUESTS);
}

fn a_waiting_request_is_not_answered_with_operations_of_other_names(place: &Place) {
    let api = Api::start(place);
    let (held, _) = meanwhile(place, &api, &waiting(), || {
        api.enqueue(&with(&pay(1), json!({ "operationName": "ship" })));
        api.enqueue(&with(&pay(1), json!({ "scope": "shop" })));
        api.enqueue(&pay("mine"));
    });
    assert_eq!((held.len(), &held[0].operation["input"]), (1, &json!("mine")));
    assert_eq!(api.next(&json!({ "operationNames": ["ship"] })).len(), 1);
    assert_eq!(api.next(&json!({ "operationNames": ["pay"], "scope": "shop" })).len(), 1);
}

fn a_request_whose_connection_is_closed_claims_nothing(place: &Place) {
    let api = Api::start(place);
    let body = waiting().to_string();
    let mut open: Vec<_> = (0..4)
        .map(|_| {
            let mut connection = TcpStream::connect(api.server.address).unwrap();
            let headers = [("host", "localhost"), ("content-type", "application/json")];
            send(&mut connection, "POST", "/v1/operations/next", &headers, body.as_bytes());
            connection
        })
        .collect();
    have_looked(place, open.len());
    for connection in &mut open {
        connection.set_read_timeout(Some(SOON)).unwrap();
        connection.shutdown(Shutdown::Write).unwrap();
        // The server closes its side as soon as it has noticed.
        assert_eq!(connection.read_to_end(&mut Vec::new()).unwrap(), 0);
    }
    for n in 0..open.len() {
        let enqueued = api.enqueue(&pay(n));
        let held = api.next(&waiting());
        assert_eq!((held[0].id, held.len()), (id(&enqueued), 1));
        assert_eq!(
            (&held[0].operation["retryCount"], held[0].operation["attempts"].as_array().unwrap().len()),
            (&json!(0), 1)
        );
    }
}

fn waiting_requests_end_when_the_server_stops(place: &Place) {
    let mut api = Api::start(place);
    let address = api.server.address;
    let asked: Vec<_> = (0..3)
        .map(|_| thread::spawn(move || try_ask(address, "POST", "/next", &with(&waiting(), json!({ "wait": 30 })))))
        .collect();
    have_looked(place, asked.len());
    let began = Instant::now();
    api.server.process.signal(Signal::TERM);
    for asked in asked {
        let answer = within(SOON, || asked.join().unwrap()).expect("it ends").expect("an answer");
        assert!(handed(&answer).is_empty());
    }
    assert_eq!(api.server.process.end().code(), Some(0));
    assert!(began.elapsed() < WOKEN, "{:?}", began.elapsed());
}

fn a_waiting_request_repeated_with_its_token_gets_the_same_lease(place: &Place) {
    let api = Api::start(place);
    let request = with(&waiting(), json!({ "claimToken": TOKENS[0] }));
    let (held, _) = meanwhile(place, &api, &request, || drop(api.enqueue(&pay(1))));
    api.enqueue(&pay(2));
    assert_eq!(api.next(&request), held, "it does not wait for more");
}
