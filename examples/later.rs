//! An order and its confirmation commit together, a worker sends the confirmation, and a schedule counts the orders.
//!
//! `cargo run -p semel-examples --example later`

use std::time::Duration;

use anyhow::Result;
use semel::{Context, Fingerprint, Key, Kind, Ledger, Options, Outcome, Schedule, Scope, Work, Worker};
use semel_store::{Database, Settings, Tx, on};
use tokio::sync::{mpsc, watch};

/// Writes the order and enqueues its confirmation in one transaction: both are there, or neither.
async fn order(ledger: Ledger<Database>, tx: Tx, item: &str) -> Result<()> {
    let mut connection = tx.connection().await?;
    let sql = "INSERT INTO orders (item) VALUES ($1) RETURNING id";
    let id: i64 = on!(connection.get()?, db => sqlx::query_scalar(sql).bind(item).fetch_one(db).await)?;
    drop(connection);
    let body = format!("order {id}: {item}");
    let mail = Work::new(Scope::new("acme", "shop", "mail")?, Key::new(&body)?, Fingerprint::of_bytes(body.as_bytes()));
    ledger.enqueue_in(&tx, vec![mail.payload(body)]).await?;
    Ok(())
}

#[tokio::main]
pub(crate) async fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let url = format!("sqlite:{}", folder.path().join("shop.db").display());
    let ledger = Ledger::new(Database::open(&url, Settings::default()).await?, Options::default())?;
    ledger.sweep_every(Duration::from_secs(15));
    let shop = sqlx::SqlitePool::connect(&url).await?;
    sqlx::raw_sql("CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT)").execute(&shop).await?;

    // Any number of processes may run such a worker: one of them runs each operation.
    let (done, mut all_done) = mpsc::unbounded_channel();
    let handler = move |context: Context<Database>| {
        let (done, operation) = (done.clone(), context.operation().clone());
        async move {
            let text = operation.payload.unwrap_or_default();
            let _ = done.send(format!("{}: {}", operation.scope.kind(), String::from_utf8_lossy(&text)));
            Ok(Outcome::kept("done"))
        }
    };
    let (mail, count) =
        (Kind::leased("shop", "mail", handler.clone()).at_once(8), Kind::leased("shop", "count", handler));
    let each_second = Schedule::every("count", Duration::from_secs(1), Scope::new("acme", "shop", "count")?)?;
    let (stop, stops) = watch::channel(false);
    let worker =
        tokio::spawn(Worker::new(&ledger).on(mail).on(count).every(each_second.payload("all orders")).run(stops));

    for item in ["two lamps", "a chair"] {
        let used = ledger.clone();
        ledger.transact(move |tx| async move { order(used, tx, item).await }).await?;
    }
    for _ in 0..3 {
        println!("{}", all_done.recv().await.unwrap_or_default());
    }
    stop.send_replace(true);
    worker.await?;
    Ok(())
}
