//! Webhooks: signed deliveries to the real receiver, next to the same handler without deduplication. The size of the
//! tables gives the stored bytes per event.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context as _, Result};
use axum::{
    Router,
    body::Bytes,
    extract::State,
    http::{HeaderMap, StatusCode},
    routing::post,
};
use semel::{
    Ledger,
    messaging::{Message, Topic},
    prelude::*,
};
use semel_http::webhooks::{DEFAULT_TOLERANCE, Verifier};
use semel_server::{
    http::{App, health::AlwaysReady, principal::Local},
    serve::{self, Limits},
    services::webhooks::config::{Deed, Rule, Rules, Secrets, Source, SourceKind, Webhooks},
    services::webhooks::{Handlers, Receiver},
    stop::Stop,
};
use semel_store::{Database, on};
use serde_json::{Value, json};
use tokio::{net::TcpListener, task::JoinSet};

use crate::{
    Plan,
    cpu::Cpu,
    http::{CONNECTIONS, Client},
    load::{Figure, drive},
    report::{Report, Subject},
    site::{Backend, Site, close},
};

/// New events; each goes to the outbox.
pub(crate) const NEW: &str = "new events";
/// The same, verified and put into the outbox without the ledger.
pub(crate) const BARE: &str = "no deduplication";
/// Events that have been processed.
pub(crate) const REPEATS: &str = "duplicates";

/// In this order in every round: compared ones are neighbours.
const ALL: [&str; 3] = [REPEATS, NEW, BARE];

/// The number of connections at a moderate load, and their interval: 200 events per second in all, which the slower of
/// the databases handles on two CPUs with most of its time to spare.
pub(crate) const MODERATE: usize = 8;
const EVERY: Duration = Duration::from_millis(40);

/// The number of repeated events, in turn.
const SEEN: usize = 2_048;

/// The number of events for the measurement of the size.
const SIZED: usize = 4_096;

const SECRET: &str = "whsec_for_the_bench";

pub(crate) async fn measure(plan: &Plan, backend: Backend, report: &mut Report) -> Result<()> {
    let site = Site::fresh(plan, backend).await?;
    let ledger = site.ledger(true).await?;
    let (sender, stop) = open(&ledger).await?;
    let per_event = size(&site, &ledger, &sender).await?;
    report.say(format!(
        "{backend}, webhooks: {per_event:.0} bytes are stored for an event whose body has {}, beside its message",
        body("evt_0").len()
    ));
    let seen: Arc<Vec<String>> = Arc::new((0..SEEN).map(|i| format!("evt_seen_{i}")).collect());
    sender.send_all("/webhooks/stripe", &seen).await?;
    for _ in 0..plan.rounds {
        for tasks in [CONNECTIONS, MODERATE] {
            for how in ALL.into_iter().filter(|how| plan.wants(how, tasks)) {
                let (sender, seen, turn) = (sender.clone(), seen.clone(), Arc::new(AtomicUsize::new(0)));
                let operation = move || {
                    let (sender, seen) = (sender.clone(), seen.clone());
                    let turn = turn.fetch_add(1, Ordering::Relaxed);
                    async move {
                        let new = || format!("evt_{:032x}", fastrand::u128(..));
                        match how {
                            NEW => sender.send("/webhooks/stripe", &new()).await,
                            REPEATS => sender.send("/webhooks/stripe", &seen[turn % SEEN]).await,
                            _ => sender.send("/bare", &new()).await,
                        }
                    }
                };
                let figure = match tasks {
                    MODERATE => paced(plan, site.cpu, operation).await?,
                    _ => drive(plan, site.cpu, tasks, operation).await?,
                };
                report.add(Subject { section: "webhooks", backend, how, tasks }, figure);
                site.tidy(&ledger).await?;
            }
        }
    }
    tell(backend, report);
    stop.ask();
    close(ledger).await;
    site.remove().await
}

/// What deduplication adds, in the median round.
fn tell(backend: Backend, report: &mut Report) {
    let of = |how, tasks| Subject { section: "webhooks", backend, how, tasks };
    for how in [NEW, REPEATS] {
        if let Some((p50, p99)) = report.added(of(how, MODERATE), of(BARE, MODERATE)) {
            report.say(format!("{backend}, {how} at a moderate load: {p50:+.2} ms (p50), {p99:+.2} ms (p99)"));
        }
        if let Some(cpu) = report.added_cpu(of(how, CONNECTIONS), of(BARE, CONNECTIONS)) {
            report.say(format!("{backend}, {how} with {CONNECTIONS} connections: {cpu:+.3} ms of CPU time per event"));
        }
    }
}

/// A server with the receiver, and with the same handler without it; and its sender.
async fn open(ledger: &Ledger<Database>) -> Result<(Sender, Stop)> {
    let mut source = Source::new(SourceKind::Stripe, Secrets(vec![SECRET.into()]));
    source.handlers = Rules(vec![Rule { kind: "*".into(), deed: Deed::Outbox(None) }]);
    let config = Webhooks { sources: BTreeMap::from([("stripe".to_owned(), source)]) };
    let receiver = Receiver::open(ledger, config, &Handlers::default()).await?;
    let verifier = Verifier::stripe([SECRET], DEFAULT_TOLERANCE)?;
    let bare = Router::new().route("/bare", post(bare)).with_state((ledger.clone(), verifier.clone()));
    let app = App {
        readiness: Arc::new(AlwaysReady),
        authenticate: Arc::new(Local),
        routes: Router::new(),
        signed: receiver.routes().merge(bare),
    };
    let (socket, stop) = (TcpListener::bind("127.0.0.1:0").await?, Stop::new());
    let sender = Sender { client: Client::of(socket.local_addr()?), verifier };
    tokio::spawn(serve::run(socket, app.into_router(), stop.clone(), Limits::default()));
    Ok((sender, stop))
}

/// A receiver without Semel: verifies, parses, and puts the message into the outbox.
async fn bare(
    State((ledger, verifier)): State<(Ledger<Database>, Verifier)>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<String, (StatusCode, String)> {
    let failed = |error: &dyn std::fmt::Display| (StatusCode::INTERNAL_SERVER_ERROR, error.to_string());
    let _signed = verifier.verify(&headers, &body, SystemTime::now()).map_err(|error| failed(&error))?;
    let event: Value = serde_json::from_slice(&body).map_err(|error| failed(&error))?;
    let (id, kind) = (event["id"].as_str().unwrap_or_default(), event["type"].as_str().unwrap_or_default());
    let topic = Topic::new(&format!("webhook.stripe.{kind}")).map_err(|error| failed(&error))?;
    let mut message = Message::new("default", topic, kind, body.clone());
    let named = [("event-id", id), ("event-type", kind), ("event-source", "stripe"), ("webhook-function", "stripe")];
    let created = event["created"].to_string();
    let named = named.into_iter().chain([("content-type", "application/json"), ("event-created", created.as_str())]);
    message.headers = named.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    let store = ledger.store().clone();
    let put = ledger.transact(move |tx| async move { store.put(&tx, vec![message]).await });
    put.await.map_err(|error| failed(&error))?;
    Ok(r#"{"status":"processed"}"#.to_owned())
}

/// Stripe, as the server sees it.
#[derive(Clone)]
struct Sender {
    client: Client,
    verifier: Verifier,
}

impl Sender {
    async fn send(&self, path: &str, id: &str) -> Result<()> {
        let body = body(id);
        let signed = self.verifier.sign(None, SystemTime::now(), body.as_bytes())?;
        let signature = signed.get("stripe-signature").and_then(|value| value.to_str().ok()).context("no signature")?;
        self.client.send_with("POST", path, &format!("stripe-signature: {signature}\r\n"), &body).await
    }

    async fn send_all(&self, path: &'static str, ids: &[String]) -> Result<()> {
        for some in ids.chunks(CONNECTIONS) {
            let mut running = JoinSet::new();
            for id in some {
                let (sender, id) = (self.clone(), id.clone());
                running.spawn(async move { sender.send(path, &id).await });
            }
            while let Some(done) = running.join_next().await {
                done??;
            }
        }
        Ok(())
    }
}

/// An event of about a kilobyte, as Stripe sends them for an invoice of one line.
fn body(id: &str) -> String {
    let line = json!({
        "id": "il_1MtHbELkdIwHu7ixl4OzzPMv", "object": "line_item", "amount": 1000, "currency": "usd",
        "description": "My First Invoice Item", "discountable": true, "livemode": false, "metadata": {},
        "period": { "end": 1_680_640_231, "start": 1_680_640_231 }, "quantity": 1, "type": "invoiceitem",
    });
    let invoice = json!({
        "id": "in_1MtHbELkdIwHu7ixl4OzzPMv", "object": "invoice", "account_country": "US", "amount_due": 1000,
        "amount_paid": 1000, "amount_remaining": 0, "attempt_count": 1, "attempted": true, "currency": "usd",
        "customer": "cus_NeZwdNtLEOXuvB", "customer_email": "jenny@example.com", "lines": { "data": [line] },
        "status": "paid", "total": 1000,
    });
    json!({
        "id": id, "object": "event", "api_version": "2024-04-10", "created": 1_680_640_231, "livemode": false,
        "data": { "object": invoice }, "pending_webhooks": 1, "type": "invoice.paid",
        "request": { "id": "req_123", "idempotency_key": "idempotency-key-123" },
    })
    .to_string()
}

/// Sends on all connections at a fixed rate, spread evenly, and measures after the warm-up.
async fn paced<F, Fut>(plan: &Plan, cpu: Cpu, operation: F) -> Result<Figure>
where
    F: Fn() -> Fut + Clone + Send + 'static,
    Fut: Future<Output = Result<()>> + Send,
{
    // Twice as long as a load without pauses: there are few events in it.
    let (now, length) = (Instant::now(), 2 * plan.length);
    let (begin, end) = (now + Plan::WARM_UP, now + Plan::WARM_UP + length);
    let mut running = JoinSet::new();
    for i in 0..MODERATE {
        let operation = operation.clone();
        let mut next = now + EVERY * u32::try_from(i)? / u32::try_from(MODERATE)?;
        running.spawn(async move {
            let mut took = Vec::new();
            while next < end {
                tokio::time::sleep_until(next.into()).await;
                let sent = Instant::now();
                operation().await?;
                if next >= begin {
                    took.push(sent.elapsed());
                }
                next += EVERY;
            }
            anyhow::Ok(took)
        });
    }
    tokio::time::sleep_until(begin.into()).await;
    let before = cpu.used();
    tokio::time::sleep_until(end.into()).await;
    let used = cpu.used() - before;
    let mut took = Vec::new();
    while let Some(done) = running.join_next().await {
        took.extend(done??);
    }
    Ok(Figure::new(took, length, used))
}

/// The stored bytes per event: the growth of the tables, except for the outbox, which is emptied. As many events came
/// before: a database reuses freed space, and a new one has none.
async fn size(site: &Site, ledger: &Ledger<Database>, sender: &Sender) -> Result<f64> {
    let mut grown = Vec::new();
    for round in 0..=1 {
        let ids: Vec<_> = (0..SIZED).map(|i| format!("evt_sized_{round}{i:021}")).collect();
        sender.send_all("/webhooks/stripe", &ids).await?;
        ledger.flush().await;
        ledger.sweep().await?;
        grown.push(bytes(site, ledger).await?);
    }
    Ok((grown[1] - grown[0]) as f64 / SIZED as f64)
}

/// The size of all tables and indexes but the outbox's.
async fn bytes(site: &Site, ledger: &Ledger<Database>) -> Result<i64> {
    let sql = match site.backend {
        Backend::Postgres => {
            site.vacuum().await?;
            "SELECT sum(pg_total_relation_size(c.oid))::bigint FROM pg_class c
             WHERE c.relkind = 'r' AND c.relnamespace = current_schema()::regnamespace
               AND c.relname NOT LIKE 'semel_outbox%'"
        }
        Backend::Sqlite => {
            "SELECT sum(d.pgsize) FROM dbstat d LEFT JOIN sqlite_schema s ON s.name = d.name
             WHERE coalesce(s.tbl_name, '') NOT LIKE 'semel_outbox%'"
        }
    };
    let mut reader = ledger.store().reader().await?;
    let bytes: Result<i64, _> = on!(reader.conn(), c => sqlx::query_scalar(sql).fetch_one(&mut *c).await);
    reader.leave();
    Ok(bytes?)
}
