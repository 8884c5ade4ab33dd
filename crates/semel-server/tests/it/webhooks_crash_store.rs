//! A database that fails while webhooks arrive: a delivery that is not stored is not answered 200.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use semel::State;
use semel_testkit::faults::{self, torture};

use crate::{
    endpoint::{Does, Endpoint},
    hooks::{becomes, deliver, event, forward, outbox, start_as, status, stored},
    place::Place,
    proposals::rows,
    support::{SOON, eventually},
    webhooks_crash::{BACKOFF, LEASE, try_deliver},
    wire::Wire,
};

#[test]
fn a_delivery_that_cannot_be_stored_is_answered_503() {
    for in_background in ["false", "true"] {
        let (place, mut wire) = (Place::postgres(), Wire::to_postgres());
        let url = wire.url(&place.url);
        let variables = [("SEMEL_DATABASE_URL", url.as_str()), ("SEMEL_WEBHOOKS_STRIPE_ASYNC", in_background)];
        let server = start_as(&place, "api,worker", &variables);
        let paid = event("evt_1", 1_700_000_000, "a");
        wire.cut();
        let away = deliver(&server, &paid);
        assert_eq!((away.status, away.problem().as_str()), (503, "store-unavailable"), "{}", away.body);
        assert_eq!(away.header("retry-after"), Some("1"));
        assert!(wire.was_tried());
        // Reads are answered 503, too, and the monitor does not report ok.
        for path in ["/webhooks/stripe/monitor", "/webhooks/stripe/events", "/webhooks/stripe/events/evt_1"] {
            let away = server.get(path);
            assert_eq!((away.status, away.problem().as_str()), (503, "store-unavailable"), "{path}: {}", away.body);
            assert_eq!(away.header("retry-after"), Some("1"), "{path}");
        }
        assert!(stored(&place, "stripe", "evt_1").is_none());
        // A delivery that is no event is still refused as such: nothing has to be stored for that.
        assert_eq!(deliver(&server, &serde_json::json!({ "id": "evt_1" })).status, 400);
        wire.mend();
        eventually(SOON, "it is taken again", || deliver(&server, &paid).status == 200);
        becomes(&place, "evt_1", State::Completed);
        assert_eq!(outbox(&place).len(), 1);
    }
}

/// The endpoint accepted it, but that cannot be stored: the sender is not answered 200.
#[test]
fn an_outcome_that_cannot_be_stored_is_no_200() {
    let (place, mut wire, endpoint) = (Place::postgres(), Wire::to_postgres(), Endpoint::that([Does::Waits]));
    let (url, rule) = (wire.url(&place.url), forward(&endpoint.url()));
    let variables = [("SEMEL_DATABASE_URL", url.as_str()), ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &rule), LEASE, BACKOFF];
    let server = start_as(&place, "api,worker,sweeper", &variables);
    thread::scope(|scope| {
        let answer = scope.spawn(|| deliver(&server, &event("evt_1", 1_700_000_000, "a")));
        endpoint.is_called(1);
        wire.cut();
        endpoint.let_go();
        let answer = answer.join().unwrap();
        assert!(
            answer.status == 503 || status(&answer) == "rejected",
            "its run is over, and the stored copy is tried again: {} {}",
            answer.status,
            answer.body
        );
    });
    assert_eq!(stored(&place, "stripe", "evt_1").unwrap().state, State::Processing);
    wire.mend();
    becomes(&place, "evt_1", State::Completed);
    assert_eq!(endpoint.keys().into_iter().collect::<BTreeSet<_>>().len(), 1);
}

/// PostgreSQL is killed while events arrive, and returns with all committed data.
#[test]
fn every_event_that_was_answered_200_is_in_the_ledger_once() {
    let postgres = faults::Server::start("");
    let place = Place::at(postgres.url());
    let server = start_as(&place, "api,worker,sweeper", &[LEASE, BACKOFF]);
    let (stop, number, kills) = (AtomicBool::new(false), AtomicUsize::new(0), if torture() { 20 } else { 2 });
    // Every sent event, and whether its sender was answered 200.
    let sent: Mutex<BTreeMap<String, bool>> = Mutex::default();
    let send = || {
        while !stop.load(Ordering::SeqCst) {
            let id = format!("evt_{}", number.fetch_add(1, Ordering::SeqCst));
            let answer = try_deliver(server.address, &event(&id, 1_700_000_000, "a")).unwrap();
            assert!([200, 500, 503].contains(&answer.status), "{}", answer.body);
            sent.lock().unwrap().insert(id, answer.status == 200);
            // Refusals are quick: without a pause there would be very many of them.
            thread::sleep(Duration::from_millis(if answer.status == 200 { 0 } else { 50 }));
        }
    };
    let told = |well: bool| sent.lock().unwrap().values().filter(|told| **told == well).count();
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(send);
        }
        for _ in 0..kills {
            let before = told(true);
            eventually(SOON, "events come in", || told(true) > before + 50);
            let refused = told(false);
            postgres.kill();
            eventually(SOON, "it is noticed", || told(false) > refused + 4);
            postgres.restart();
        }
        let before = told(true);
        eventually(SOON, "events come in again", || told(true) > before + 50);
        stop.store(true, Ordering::SeqCst);
    });
    let in_ledger = || -> BTreeSet<String> {
        rows(&place, "SELECT key FROM semel_operations WHERE service = 'webhooks'").into_iter().collect()
    };
    let (sent, stored) = (sent.into_inner().unwrap(), in_ledger());
    let lost: Vec<_> = sent.iter().filter(|(id, told)| **told && !stored.contains(*id)).collect();
    assert!(lost.is_empty(), "they were answered 200: {lost:?}");
    // The others are sent again, as their sender would.
    for id in sent.iter().filter(|(_, told)| !**told).map(|(id, _)| id) {
        eventually(SOON, "it is taken", || deliver(&server, &event(id, 1_700_000_000, "a")).status == 200);
    }
    let open = "SELECT key FROM semel_operations WHERE service = 'webhooks' AND state <> 'completed'";
    eventually(SOON, "all is done", || rows(&place, open).is_empty());
    assert_eq!(in_ledger().len(), sent.len());
    assert_eq!(outbox(&place).len(), sent.len(), "one message for each");
}

/// SQLite is unavailable while another process holds its only writer.
#[test]
fn no_delivery_is_answered_200_while_another_process_holds_the_file() {
    let place = Place::sqlite();
    let server = start_as(&place, "api", &[]);
    let path = place.url.strip_prefix("sqlite:").unwrap().to_owned();
    let (locked, is_locked) = std::sync::mpsc::channel();
    let (unlock, is_unlocked) = std::sync::mpsc::channel::<()>();
    let holder = thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            use sqlx::{ConnectOptions as _, Executor as _};
            let options = sqlx::sqlite::SqliteConnectOptions::new().filename(path).busy_timeout(SOON);
            let mut connection = options.connect().await.unwrap();
            connection.execute("BEGIN EXCLUSIVE").await.unwrap();
            locked.send(()).unwrap();
            let _ = is_unlocked.recv();
            connection.execute("ROLLBACK").await.unwrap();
        });
    });
    is_locked.recv().unwrap();
    let began = Instant::now();
    let away = deliver(&server, &event("evt_1", 1_700_000_000, "a"));
    assert_eq!((away.status, away.problem().as_str()), (503, "store-unavailable"), "{}", away.body);
    assert!(began.elapsed() < SOON);
    unlock.send(()).unwrap();
    holder.join().unwrap();
    let paid = event("evt_1", 1_700_000_000, "a");
    eventually(SOON, "it is processed", || deliver(&server, &paid).status == 200);
}
