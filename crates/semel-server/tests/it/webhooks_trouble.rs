//! Trouble of our own database in the middle of a run counts no attempt: the event was not tried.

use std::{
    sync::mpsc::{Sender, channel},
    thread::{self, JoinHandle},
    time::Duration,
};

use rustix::process::Signal;
use semel::State;
use semel_http::webhooks::Verifier;
use sqlx::{ConnectOptions as _, Executor as _, postgres::PgConnectOptions, sqlite::SqliteConnectOptions};

use crate::{
    endpoint::Endpoint,
    hooks::{becomes, conflicts, deliver, event, forward, outbox, post_raw, signed_by, start_as, status, stored},
    notifications_crash_pauses::is_still,
    place::Place,
    support::{Answer, SOON, eventually},
    webhooks_crash::start_dying,
};

/// Holds a lock until it is told to release it.
pub(crate) struct Holder {
    let_go: Sender<()>,
    thread: JoinHandle<()>,
}

impl Holder {
    pub(crate) fn of<C: sqlx::Connection>(
        connect: impl Future<Output = sqlx::Result<C>> + Send + 'static,
        lock: impl AsyncFnOnce(&mut C) + Send + 'static,
    ) -> Self {
        let (locked, is_locked) = channel();
        let (let_go, is_let_go) = channel::<()>();
        let thread = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let mut connection = connect.await.unwrap();
                lock(&mut connection).await;
                locked.send(()).unwrap();
                let _ = is_let_go.recv();
                connection.close().await.unwrap();
            });
        });
        is_locked.recv().unwrap();
        Self { let_go, thread }
    }

    pub(crate) fn let_go(self) {
        self.let_go.send(()).unwrap();
        self.thread.join().unwrap();
    }
}

fn is_answered_503(answer: &Answer) {
    assert_eq!((answer.status, answer.problem().as_str()), (503, "store-unavailable"), "{}", answer.body);
    assert_eq!(answer.header("retry-after"), Some("1"));
}

#[test]
fn a_statement_that_timed_out_counts_no_attempt() {
    let place = Place::postgres();
    let server = start_as(&place, "api,worker", &[("SEMEL_WEBHOOKS_STRIPE_MAX_ATTEMPTS", "1")]);
    let options: PgConnectOptions = place.url.parse().unwrap();
    let holder = Holder::of(async move { options.connect().await }, async |connection| {
        connection.execute("BEGIN; LOCK TABLE semel_outbox IN ACCESS EXCLUSIVE MODE").await.map(drop).unwrap();
    });
    is_answered_503(&deliver(&server, &event("evt_1", 1_700_000_000, "a")));
    let waits = stored(&place, "stripe", "evt_1").unwrap();
    assert_eq!((waits.failures, waits.crashes), (0, 0), "{:?}", waits.error);
    holder.let_go();
    becomes(&place, "evt_1", State::Completed);
    assert_eq!(stored(&place, "stripe", "evt_1").unwrap().failures, 0);
    assert_eq!(outbox(&place).len(), 1);
}

/// Once: a deadlock that is found at the commit.
const DEADLOCK: &str = "CREATE SEQUENCE commits; CREATE FUNCTION deadlock() RETURNS trigger LANGUAGE plpgsql AS \
    $$ BEGIN IF nextval('commits') = 1 THEN RAISE EXCEPTION 'on purpose' USING ERRCODE = '40P01'; END IF; \
       RETURN NULL; END $$; \
    CREATE CONSTRAINT TRIGGER deadlock AFTER INSERT ON semel_outbox DEFERRABLE INITIALLY DEFERRED \
    FOR EACH ROW EXECUTE FUNCTION deadlock()";

#[test]
fn a_deadlock_at_the_commit_counts_no_attempt() {
    let place = Place::postgres();
    let server = start_as(&place, "api,worker", &[("SEMEL_WEBHOOKS_STRIPE_MAX_ATTEMPTS", "1")]);
    let options: PgConnectOptions = place.url.parse().unwrap();
    Holder::of(async move { options.connect().await }, async |connection| {
        sqlx::raw_sql(DEADLOCK).execute(connection).await.map(drop).unwrap();
    })
    .let_go();
    is_answered_503(&deliver(&server, &event("evt_1", 1_700_000_000, "a")));
    becomes(&place, "evt_1", State::Completed);
    assert_eq!(stored(&place, "stripe", "evt_1").unwrap().failures, 0);
    assert_eq!(outbox(&place).len(), 1);
}

/// Another process holds the file's only writer, from after the event was stored until its run has given up.
#[test]
fn a_file_locked_by_another_process_counts_no_attempt() {
    /// Longer than the wait for a writer.
    const PAST_PATIENCE: Duration = Duration::from_secs(7);
    let (place, endpoint, secret) = (Place::sqlite(), Endpoint::that([]), "a secret of the hub");
    let url = forward(&endpoint.url());
    let variables = [
        ("SEMEL_WEBHOOKS_GITHUB_KIND", "github"),
        ("SEMEL_WEBHOOKS_GITHUB_SECRETS", secret),
        ("SEMEL_WEBHOOKS_GITHUB_HANDLERS", url.as_str()),
        ("SEMEL_WEBHOOKS_GITHUB_MAX_ATTEMPTS", "1"),
    ];
    let server = start_dying(&place, "api", "webhooks.after_store:1:stop", &variables);
    let body = br#"{"ref":"main"}"#;
    let mut headers = signed_by(&Verifier::github([secret]).unwrap(), Some("guid-1"), body, Duration::ZERO);
    headers.push(("x-github-event".to_owned(), "push".to_owned()));
    thread::scope(|scope| {
        let answer = scope.spawn(|| post_raw(server.address, "/webhooks/github", &headers, body));
        eventually(SOON, "it stands still", || is_still(&server));
        let options = SqliteConnectOptions::new().filename(place.url.strip_prefix("sqlite:").unwrap());
        let holder = Holder::of(async move { options.connect().await }, async |connection| {
            connection.execute("BEGIN EXCLUSIVE").await.map(drop).unwrap();
        });
        server.process.signal(Signal::CONT);
        thread::sleep(PAST_PATIENCE);
        holder.let_go();
        is_answered_503(&answer.join().unwrap());
    });
    let _worker = start_as(&place, "worker", &variables);
    eventually(SOON, "it is processed", || {
        stored(&place, "github", "guid-1").is_some_and(|event| event.state == State::Completed)
    });
    assert_eq!(stored(&place, "github", "guid-1").unwrap().failures, 0);
    assert_eq!(endpoint.calls().len(), 1);
}

/// Other data may be newer, and while another transaction holds the event's row it cannot be stored: no delivery is
/// answered 200.
#[test]
fn newer_data_for_a_row_that_another_transaction_holds_is_answered_503() {
    let place = Place::postgres();
    let server = start_as(&place, "api,worker", &[]);
    assert_eq!(status(&deliver(&server, &event("evt_1", 100, "a"))), "processed");
    let options: PgConnectOptions = place.url.parse().unwrap();
    let holder = Holder::of(async move { options.connect().await }, async |connection| {
        connection.execute("BEGIN; SELECT id FROM semel_operations FOR UPDATE").await.map(drop).unwrap();
    });
    is_answered_503(&deliver(&server, &event("evt_1", 200, "b")));
    assert_eq!(stored(&place, "stripe", "evt_1").unwrap().order, Some(100), "nothing of it is stored");
    assert_eq!(conflicts(&place), ["evt_1 skipped 1 200 100"], "and nothing is said to be taken");
    // The stored data itself is still answered as a duplicate.
    assert_eq!(status(&deliver(&server, &event("evt_1", 100, "a"))), "skipped");
    holder.let_go();
    assert_eq!(status(&deliver(&server, &event("evt_1", 200, "b"))), "processed");
    assert_eq!(stored(&place, "stripe", "evt_1").unwrap().order, Some(200));
    assert_eq!(conflicts(&place), ["evt_1 taken 2 200 100"]);
    assert_eq!(outbox(&place).len(), 2);
}
