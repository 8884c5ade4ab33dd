//! Events from end to end: `POST /events` until every notification is committed.

use std::{
    sync::{Arc, atomic::AtomicUsize, atomic::Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use semel::{
    Ledger,
    messaging::{Broker, ConsumerOptions, RelayOptions},
};
use semel_amqp::Amqp;
use semel_server::{
    config::{Environment, Flags, read},
    http::{App, health::AlwaysReady, principal::Local},
    node::Node,
    serve::{self, Limits},
    services::notifications::{Notifications, config},
    stop::Stop,
};
use semel_store::{Database, EmbeddedBroker, on};
use tokio::{net::TcpListener, task::JoinSet};

use crate::{
    Plan,
    http::{CONNECTIONS, Client},
    load::Figure,
    report::{Report, Subject},
    site::{Backend, Site, close},
};

/// Through the broker in the database.
pub(crate) const EMBEDDED: &str = "events, embedded broker";
/// Through RabbitMQ.
pub(crate) const RABBITMQ: &str = "events, RabbitMQ";

/// Notifications per event: one recipient, two channels.
const EACH: i64 = 2;

/// The number of ordering keys. Events of one key are published one after the other.
const RESTAURANTS: usize = 100;

pub(crate) async fn measure(plan: &Plan, backend: Backend, report: &mut Report) -> Result<()> {
    let most = if plan.rounds == 1 { 2_000 } else { 10_000 };
    for _ in 0..plan.rounds {
        for how in [EMBEDDED, RABBITMQ].into_iter().filter(|how| plan.wants(how, CONNECTIONS)) {
            let site = Site::fresh(plan, backend).await?;
            let ledger = site.ledger(true).await?;
            let broker: Arc<dyn Broker> = if how == EMBEDDED {
                Arc::new(EmbeddedBroker::new(ledger.store().clone()))
            } else {
                let url = plan.rabbitmq_url.as_deref().context("SEMEL_TEST_RABBITMQ_URL is not set")?;
                Arc::new(Amqp::connect(url, semel_amqp::Options::default())?)
            };
            let figure = run(&site, &ledger, broker, most).await?;
            report.add(Subject { section: "messages", backend, how, tasks: CONNECTIONS }, figure);
            close(ledger).await;
            site.remove().await?;
        }
    }
    Ok(())
}

async fn run(site: &Site, ledger: &Ledger<Database>, broker: Arc<dyn Broker>, most: usize) -> Result<Figure> {
    let told = read(&Flags::default(), &Environment::from_iter::<[(&str, &str); 0]>([]), "");
    let config = told.config().map_err(|mistakes| anyhow::anyhow!("{mistakes}"))?;
    let config: config::Notifications = config.services.get();
    let stop = Stop::new();
    let node = Node::new(broker.clone(), &stop);
    let notifications = Notifications::open(ledger, broker, config.clone()).await?;
    node.declare(notifications.queues());
    node.relay(ledger.store().clone(), RelayOptions::default());
    for listener in notifications.listeners(&ConsumerOptions::default()) {
        node.spawn("listener", listener.run(node.stopping()));
    }
    let app = App {
        readiness: Arc::new(AlwaysReady),
        authenticate: Arc::new(Local),
        routes: notifications.routes(),
        signed: axum::Router::new(),
    };
    let socket = TcpListener::bind("127.0.0.1:0").await?;
    let client = Client::of(socket.local_addr()?);
    let server = tokio::spawn(serve::run(socket, app.into_router(), stop.clone(), Limits::default()));
    for group in 0..RESTAURANTS {
        let recipient = format!(r#"{{"groupId":{group},"channels":["PUSH","EMAIL"]}}"#);
        client.send("PUT", &format!("/recipients/restaurant/{group}"), None, &recipient).await?;
    }
    // Queues are declared and consumers are running before the clock starts.
    tokio::time::sleep(Duration::from_millis(500)).await;

    let (cpu, begun) = (site.cpu.used(), Instant::now());
    let next = Arc::new(AtomicUsize::new(0));
    let mut clients = JoinSet::new();
    for _ in 0..CONNECTIONS {
        let (client, next) = (client.clone(), next.clone());
        clients.spawn(async move {
            let mut took = Vec::new();
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n >= most {
                    return anyhow::Ok(took);
                }
                let group = n % RESTAURANTS;
                let event = format!(
                    r#"{{"eventId":"evt-{n}","aggregateType":"RESTAURANT","aggregateId":{group},"eventType":"RESERVATION_REQUESTED","payload":{{"n":{n}}}}}"#
                );
                let sent = Instant::now();
                client.send("POST", "/events", None, &event).await?;
                took.push(sent.elapsed());
            }
        });
    }
    let mut took = Vec::new();
    while let Some(done) = clients.join_next().await {
        took.extend(done??);
    }
    let wanted = i64::try_from(most)? * EACH;
    let patience = Instant::now() + Duration::from_secs(120);
    while committed(ledger.store()).await? < wanted {
        anyhow::ensure!(Instant::now() < patience, "notifications are missing after two minutes");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let done = Figure::new(took, begun.elapsed(), site.cpu.used() - cpu);
    stop.ask();
    node.stop().await;
    server.await?;
    Ok(done)
}

async fn committed(database: &Database) -> Result<i64> {
    let mut reader = database.reader().await?;
    let count: Result<i64, _> =
        on!(reader.conn(), c => sqlx::query_scalar("SELECT count(*) FROM notifications").fetch_one(&mut *c).await);
    reader.leave();
    Ok(count?)
}
