//! The laws of handlers: their rows commit with the event, or not at all.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use axum::{
    Router,
    body::{Body, to_bytes},
    http::Request,
};
use semel::{Ledger, Options, State, Unfinished, Worker};
use semel_http::{
    BoxFuture, Mode,
    webhooks::{DEFAULT_TOLERANCE, Verifier},
};
use semel_server::{
    services::webhooks::config::{self, Deed, Rule, Rules, Secrets, SourceKind},
    services::webhooks::{Event, Handler, Handlers, Receiver, Run},
};
use semel_store::{Conn, Database, Settings, on};
use serde_json::{Value, json};
use tokio::sync::watch;
use tower::ServiceExt as _;

use crate::{
    desk::execute,
    hooks::{SECRET, event, stored},
    place::{Place, on_both_databases},
    proposals::rows,
    support::SOON,
};

on_both_databases! {
    a_handlers_rows_commit_with_the_event_or_not_at_all
    an_event_that_is_not_ready_is_retried_without_counting_an_attempt
    a_handler_may_work_without_a_transaction
    the_derived_keys_of_a_handler_depend_on_the_data
    the_age_of_a_signature_uses_the_receivers_clock
}

/// Writes a row for each event, and then does as the event says.
struct Writes {
    mode: Mode,
    runs: Arc<AtomicU32>,
    keys: Arc<Mutex<Vec<String>>>,
}

async fn insert(conn: &mut Conn<'_>, id: &str) {
    on!(conn, c => {
        sqlx::query("INSERT INTO paid (event_id) VALUES ($1)").bind(id).execute(&mut **c).await.map(drop)
    })
    .unwrap();
}

impl Handler for Writes {
    fn mode(&self) -> Mode {
        self.mode
    }

    fn handle<'a>(&'a self, event: &'a Event, run: &'a Run) -> BoxFuture<'a, Result<Value, Unfinished>> {
        Box::pin(async move {
            let before = self.runs.fetch_add(1, Ordering::Relaxed);
            assert_eq!(run.tx.is_some(), self.mode == Mode::Atomic);
            self.keys.lock().unwrap().push(run.derived_key("charge"));
            if let Some(tx) = &run.tx {
                let mut held = tx.connection().await.unwrap();
                insert(&mut held.get().unwrap(), &event.id).await;
            }
            let body: Value = serde_json::from_slice(&event.body).unwrap();
            match body["data"]["object"]["note"].as_str().unwrap() {
                "fail" => Err(Unfinished::failed("as it was told")),
                "panic" => panic!("as it was told"),
                "unknown" => Err(Unfinished::Doubted("as it was told".to_owned())),
                "early" if before == 0 => Err(Unfinished::released(Duration::from_millis(50))),
                note => Ok(json!({ "note": note, "attempt": run.context.operation().attempt() })),
            }
        })
    }
}

/// A program that embeds Semel.
struct Program {
    app: Router,
    receiver: Receiver,
    ledger: Ledger<Database>,
    runs: Arc<AtomicU32>,
    keys: Arc<Mutex<Vec<String>>>,
}

impl Program {
    async fn start(place: &Place, mode: Mode) -> Self {
        let database = Database::open(&place.url, Settings::default()).await.unwrap();
        let ledger = Ledger::new(database, Options::default()).unwrap();
        let mut source = config::Source::new(SourceKind::Stripe, Secrets(vec![SECRET.into()]));
        source.handlers = Rules(vec![Rule { kind: "*".to_owned(), deed: Deed::Handler("writes".to_owned()) }]);
        let webhooks = config::Webhooks { sources: [("stripe".to_owned(), source)].into() };
        let (runs, keys) = (Arc::<AtomicU32>::default(), Arc::<Mutex<Vec<String>>>::default());
        let handlers = Handlers::default().with("writes", Writes { mode, runs: runs.clone(), keys: keys.clone() });
        let receiver = Receiver::open(&ledger, webhooks, &handlers).await.unwrap();
        Self { app: receiver.routes(), receiver, ledger, runs, keys }
    }

    async fn deliver(&self, event: &Value) -> (u16, Value) {
        deliver(&self.app, event, SystemTime::now()).await
    }
}

async fn deliver(app: &Router, event: &Value, signed_at: SystemTime) -> (u16, Value) {
    let body = event.to_string();
    let verifier = Verifier::stripe([SECRET], DEFAULT_TOLERANCE).unwrap();
    let mut request = Request::post("/webhooks/stripe").body(Body::from(body.clone())).unwrap();
    *request.headers_mut() = verifier.sign(None, signed_at, body.as_bytes()).unwrap();
    let response = app.clone().oneshot(request).await.unwrap();
    let status = response.status().as_u16();
    let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
    (status, serde_json::from_slice(&body).unwrap())
}

/// The program's own tables.
fn make_tables(place: &Place) {
    drop(crate::desk::Desk::at(place));
    execute(place, "CREATE TABLE paid (event_id TEXT NOT NULL)");
}

fn on_a_runtime(work: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap().block_on(work);
}

fn paid(place: &Place) -> Vec<String> {
    rows(place, "SELECT event_id FROM paid ORDER BY event_id")
}

fn a_handlers_rows_commit_with_the_event_or_not_at_all(place: &Place) {
    make_tables(place);
    on_a_runtime(async {
        let program = Program::start(place, Mode::Atomic).await;
        assert_eq!(program.deliver(&event("good", 1, "thanks")).await, (200, json!({ "status": "processed" })));
        for (id, note) in [("fails", "fail"), ("panics", "panic"), ("doubts", "unknown")] {
            let (status, problem) = program.deliver(&event(id, 1, note)).await;
            assert_eq!((status, &problem["type"]), (500, &json!("/problems/webhook-failed")), "{note}");
            assert!(!problem.to_string().contains("as it was told"), "what went wrong is not the sender's business");
        }
        assert_eq!(program.deliver(&event("good", 1, "thanks")).await, (200, json!({ "status": "skipped" })));
        program.ledger.stop(SOON).await;
    });
    assert_eq!(paid(place), ["good"]);
    for id in ["fails", "panics", "doubts"] {
        let failed = stored(place, "stripe", id).unwrap();
        assert_eq!((failed.state, failed.failures), (State::Failed, 1), "{id}");
        assert!(failed.error.unwrap().contains("as it was told"), "{id}");
    }
    let outcome: Value =
        serde_json::from_slice(&stored(place, "stripe", "good").unwrap().outcome.unwrap().body).unwrap();
    assert_eq!(outcome, json!({ "result": "handled", "value": { "note": "thanks", "attempt": 1 } }));
}

fn an_event_that_is_not_ready_is_retried_without_counting_an_attempt(place: &Place) {
    make_tables(place);
    on_a_runtime(async {
        let program = Program::start(place, Mode::Atomic).await;
        let (stop, stopping) = watch::channel(false);
        let worker = program.receiver.kinds().into_iter().fold(Worker::new(&program.ledger), Worker::on);
        let worker = tokio::spawn(worker.run(stopping));
        let begun = Instant::now();
        assert_eq!(program.deliver(&event("evt_1", 1, "early")).await, (200, json!({ "status": "accepted" })));
        let done = async {
            while program.runs.load(Ordering::Relaxed) < 2 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(SOON, done).await.expect("the worker tries it again");
        assert!(begun.elapsed() >= Duration::from_secs(1), "never without a pause: {:?}", begun.elapsed());
        // Ends after its runs have ended.
        stop.send_replace(true);
        worker.await.unwrap();
        assert_eq!(program.deliver(&event("evt_1", 1, "early")).await, (200, json!({ "status": "skipped" })));
        program.ledger.stop(SOON).await;
    });
    assert_eq!(paid(place), ["evt_1"]);
    assert_eq!(stored(place, "stripe", "evt_1").unwrap().failures, 0);
}

fn a_handler_may_work_without_a_transaction(place: &Place) {
    on_a_runtime(async {
        let program = Program::start(place, Mode::Leased).await;
        assert_eq!(program.deliver(&event("evt_1", 1, "thanks")).await, (200, json!({ "status": "processed" })));
        let (status, _) = program.deliver(&event("evt_2", 1, "unknown")).await;
        assert_eq!(status, 500);
        program.ledger.stop(SOON).await;
    });
    assert_eq!(
        stored(place, "stripe", "evt_2").unwrap().state,
        State::Failed,
        "it can be run again: there is no doubt"
    );
}

/// The same on every attempt, and another for newer data under the same id.
fn the_derived_keys_of_a_handler_depend_on_the_data(place: &Place) {
    on_a_runtime(async {
        let program = Program::start(place, Mode::Leased).await;
        for (created, note, status) in [(1, "fail", 500), (1, "fail", 500), (2, "thanks", 200)] {
            assert_eq!(program.deliver(&event("evt_1", created, note)).await.0, status);
        }
        let keys = program.keys.lock().unwrap().clone();
        assert!(keys.len() == 3 && keys[0] == keys[1] && keys[1] != keys[2], "{keys:?}");
        program.ledger.stop(SOON).await;
    });
}

fn the_age_of_a_signature_uses_the_receivers_clock(place: &Place) {
    on_a_runtime(async {
        let database = Database::open(&place.url, Settings::default()).await.unwrap();
        let ledger = Ledger::new(database, Options::default()).unwrap();
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        let source = config::Source::new(SourceKind::Stripe, Secrets(vec![SECRET.into()]));
        let webhooks = config::Webhooks { sources: [("stripe".to_owned(), source)].into() };
        let receiver = Receiver::open_at(&ledger, webhooks, &Handlers::default(), Arc::new(move || now)).await.unwrap();
        let at = |id: &'static str, seconds: i64| {
            let signed_at = if seconds < 0 {
                now - Duration::from_secs(seconds.unsigned_abs())
            } else {
                now + Duration::from_secs(seconds.unsigned_abs())
            };
            let app = receiver.routes();
            async move { deliver(&app, &event(id, 1, "a"), signed_at).await }
        };
        assert_eq!(at("a", -300).await.0, 200);
        assert_eq!(at("b", 300).await.0, 200);
        assert_eq!(at("c", -301).await.1["reason"], "too_old");
        assert_eq!(at("d", 301).await.1["reason"], "too_new");
        ledger.stop(SOON).await;
    });
    assert!(stored(place, "stripe", "c").is_none() && stored(place, "stripe", "d").is_none());
}
