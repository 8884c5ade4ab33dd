//! The proposals service under load, over several processes, and killed at any moment.

use std::{
    io::Write as _,
    net::TcpStream,
    sync::{
        Barrier,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use serde_json::json;

use crate::{
    place::Place,
    proposals::{Api, call, replayed, rows},
    support::{Answer, SOON, eventually},
};

/// Sends the same request many times at once, to each of the servers in turn.
fn at_once(servers: &[Api], n: usize, path: &str, key: &str, body: &str) -> Vec<Answer> {
    let barrier = Barrier::new(n);
    thread::scope(|scope| {
        let calls: Vec<_> = (0..n)
            .map(|i| {
                let (address, barrier) = (servers[i % servers.len()].server.address, &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    call(address, "POST", path, Some(key), body).expect("an answer")
                })
            })
            .collect();
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    })
}

/// One creates it, and all the others get the same entity.
fn one_takes_effect(place: &Place, n: usize) {
    let servers = [Api::start(place), Api::start(place)];
    let body = r#"{"nome":"Ana","email":"ana@example.com"}"#;
    let answers = at_once(&servers, n, "/clientes", "k", body);
    let made = answers.iter().filter(|answer| answer.status == 201 && !replayed(answer)).count();
    let again = answers.iter().filter(|answer| answer.status == 200 && replayed(answer)).count();
    assert_eq!((made, again), (1, n - 1));
    assert!(answers.iter().all(|answer| answer.body == answers[0].body), "all bodies are equal");
    assert_eq!(rows(place, "SELECT idempotencia_key FROM clientes"), ["k"]);

    let id = answers[0].json()["id"].clone();
    let proposta = servers[0].post("/propostas", None, &format!(r#"{{"cliente_id":{id},"valor":1}}"#)).json();
    let path = format!("/propostas/{}/submeter", proposta["id"]);
    let answers = at_once(&servers, n, &path, "k", r#"{"versao":1}"#);
    assert!(answers.iter().all(|answer| answer.status == 200 && answer.json()["versao"] == 2));
    assert_eq!(answers.iter().filter(|answer| !replayed(answer)).count(), 1);
    assert_eq!(rows(place, "SELECT para FROM historico WHERE versao > 1"), ["enviada"]);
}

#[test]
fn heavy_two_hundred_at_once_over_two_processes_on_postgres() {
    one_takes_effect(&Place::postgres(), 200);
}

#[test]
fn heavy_forty_at_once_over_two_processes_on_one_sqlite_file() {
    one_takes_effect(&Place::sqlite(), 40);
}

/// Requests race for one email: the loser gets the problem, and nothing else happens.
#[test]
fn heavy_one_email_under_many_keys_makes_one_client() {
    for place in [Place::sqlite(), Place::postgres()] {
        let api = Api::start(&place);
        let body = r#"{"nome":"Ana","email":"ana@example.com"}"#;
        let statuses: Vec<u16> = thread::scope(|scope| {
            let calls: Vec<_> = (0..20)
                .map(|i| {
                    let api = &api;
                    scope.spawn(move || api.post("/clientes", Some(&format!("k{i}")), body).status)
                })
                .collect();
            calls.into_iter().map(|call| call.join().unwrap()).collect()
        });
        assert_eq!(statuses.iter().filter(|status| **status == 201).count(), 1, "{statuses:?}");
        assert_eq!(statuses.iter().filter(|status| **status == 409).count(), 19, "{statuses:?}");
    }
}

const KEYS: usize = 60;

fn body(i: usize) -> String {
    json!({ "nome": "Ana", "email": format!("ana{i}@example.com") }).to_string()
}

/// Sends every key until the server is dead or all are answered; returns how many were.
fn send_all(api: &Api) -> usize {
    let address = api.server.address;
    thread::scope(|scope| {
        let senders: Vec<_> = (0..4)
            .map(|sender| {
                scope.spawn(move || {
                    (sender..KEYS)
                        .step_by(4)
                        .filter(|i| call(address, "POST", "/clientes", Some(&format!("k{i}")), &body(*i)).is_some())
                        .count()
                })
            })
            .collect();
        senders.into_iter().map(|sender| sender.join().unwrap()).sum()
    })
}

/// Sends one key after the other until the server is dead; returns how many. It is killed long before the last.
fn send_until_dead(api: &Api) -> usize {
    const LAST: usize = 10_000;
    let (address, next) = (api.server.address, AtomicUsize::new(0));
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    assert!(i < LAST, "the server was not killed");
                    if call(address, "POST", "/clientes", Some(&format!("k{i}")), &body(i)).is_none() {
                        return;
                    }
                }
            });
        }
    });
    next.into_inner()
}

/// Sends a key until it is answered for good.
fn send_until_done(api: &Api, i: usize, end: Instant) {
    let key = format!("k{i}");
    loop {
        let answer = api.post("/clientes", Some(&key), &body(i));
        // A stalled disk makes the database unavailable for a while.
        if matches!(answer.status, 409 | 503) {
            let problems: &[&str] = match answer.status {
                409 => &["in-flight", "backing-off"],
                _ => &["store-unavailable", "outcome-unknown"],
            };
            assert!(problems.contains(&answer.problem().as_str()), "{}", answer.body);
            assert!(Instant::now() < end, "{key} is never done: {}", answer.body);
            thread::sleep(Duration::from_millis(100));
            continue;
        }
        assert!(matches!(answer.status, 200 | 201), "{}", answer.body);
        assert_eq!(answer.json()["email"], format!("ana{i}@example.com"));
        assert_eq!(answer.json()["idempotencia_key"], key);
        return;
    }
}

/// Killed before a commit, after one, and at any moment; then every key is sent again.
fn killed_servers_neither_lose_nor_double_a_key(place: &Place) {
    for point in ["atomic.before_commit:3", "atomic.after_commit:3"] {
        let mut api = Api::start_with(place, &[("SEMEL_CRASH", point)]);
        let answered = send_all(&api);
        assert!(answered < KEYS, "the server died at {point}");
        api.server.process.end();
    }
    let mut api = Api::start(place);
    let sent = thread::scope(|scope| {
        let process = &api.server.process;
        scope.spawn(|| {
            let before = rows(place, "SELECT nome FROM clientes").len();
            eventually(SOON, "some of it is done", || rows(place, "SELECT nome FROM clientes").len() > before + 5);
            process.signal(Signal::KILL);
        });
        send_until_dead(&api)
    });
    api.server.process.end();

    let api = Api::start(place);
    // A key in flight when its server died is free after its lease of 30 s and a short wait.
    let (all, end) = (sent.max(KEYS), Instant::now() + Duration::from_secs(180));
    for i in 0..all {
        send_until_done(&api, i, end);
    }
    assert_eq!(rows(place, "SELECT nome FROM clientes").len(), all);
}

#[test]
fn killed_servers_neither_lose_nor_double_a_key_on_sqlite() {
    killed_servers_neither_lose_nor_double_a_key(&Place::sqlite());
}

#[test]
fn killed_servers_neither_lose_nor_double_a_key_on_postgres() {
    killed_servers_neither_lose_nor_double_a_key(&Place::postgres());
}

/// The server dies after the commit and before the answer: the retry gets the entity.
#[test]
fn a_submission_killed_after_its_commit_is_not_made_twice() {
    for place in [Place::sqlite(), Place::postgres()] {
        let path = format!("{}/submeter", Api::start(&place).proposta());
        let mut api = Api::start_with(&place, &[("SEMEL_CRASH", "atomic.after_commit:1")]);
        assert!(call(api.server.address, "POST", &path, Some("s"), r#"{"versao":1}"#).is_none());
        api.server.process.end();
        let api = Api::start(&place);
        let again = api.post(&path, Some("s"), r#"{"versao":1}"#);
        assert_eq!((again.status, replayed(&again), &again.json()["versao"]), (200, true, &json!(2)));
        assert_eq!(rows(&place, "SELECT tipo_operacao FROM idempotencia_operacoes"), ["submeter_proposta"]);
    }
}

/// At any moment.
#[test]
fn clients_that_hang_up_neither_lose_nor_double_a_key() {
    for place in [Place::sqlite(), Place::postgres()] {
        let api = Api::start(&place);
        for i in 0..KEYS {
            let body = body(i);
            let mut connection = TcpStream::connect(api.server.address).unwrap();
            let length = body.len();
            let text = format!(
                "POST /api/v1/clientes HTTP/1.1\r\nhost: localhost\r\nidempotency-key: k{i}\r\n\
                 content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
            );
            connection.write_all(text.as_bytes()).unwrap();
            thread::sleep(Duration::from_micros(u64::try_from(i).unwrap() * 100));
        }
        let end = Instant::now() + SOON;
        for i in 0..KEYS {
            send_until_done(&api, i, end);
        }
        assert_eq!(rows(&place, "SELECT nome FROM clientes").len(), KEYS);
    }
}

/// A client that sends its body slowly delays no other, with a key or without.
#[test]
fn a_slow_body_delays_no_other_request() {
    let place = Place::sqlite();
    let api = Api::start(&place);
    let _slow: Vec<_> = ["", "idempotency-key: slow\r\n"]
        .into_iter()
        .map(|key| {
            let mut connection = TcpStream::connect(api.server.address).unwrap();
            let head =
                format!("POST /api/v1/clientes HTTP/1.1\r\nhost: localhost\r\n{key}content-length: 50\r\n\r\n{{");
            connection.write_all(head.as_bytes()).unwrap();
            connection
        })
        .collect();
    // Time for the server to see them.
    thread::sleep(Duration::from_millis(200));
    let begun = Instant::now();
    assert_eq!(api.post("/clientes", Some("k"), &body(1)).status, 201);
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
}
