//! An order is taken once, however often it is sent: the HTTP layer with atomic mode in one screen.
//!
//! `cargo run -p semel-examples --example orders -- sqlite:orders.db 127.0.0.1:3000`, and then, as often as you like:
//! `curl -i localhost:3000/orders -H 'Idempotency-Key: 4f7c2a9e' -d 'two lamps'`

use std::{env::args, time::Duration};

use anyhow::Result;
use axum::{Router, http::StatusCode, routing::post};
use semel::{Ledger, Options};
use semel_http::{Idempotency, Problem, Route, Transaction, problem::INTERNAL};
use semel_store::{Database, Settings, Tx, on};

/// Takes an order. Its row is written in the request's transaction, which commits together with the answer.
async fn take_order(Transaction(tx): Transaction<Database>, item: String) -> Result<(StatusCode, String), Problem> {
    let id = insert(&tx, &item).await.map_err(|_| Problem::new(&INTERNAL))?;
    Ok((StatusCode::CREATED, format!("order {id}: {item}\n")))
}

async fn insert(tx: &Tx, item: &str) -> Result<i64> {
    let sql = "INSERT INTO orders (item) VALUES ($1) RETURNING id";
    let mut connection = tx.connection().await?;
    Ok(on!(connection.get()?, db => sqlx::query_scalar(sql).bind(item).fetch_one(db).await)?)
}

async fn make_table(tx: &Tx, id: &str) -> Result<()> {
    let sql = format!("CREATE TABLE IF NOT EXISTS orders (id {id}, item TEXT NOT NULL)");
    let mut connection = tx.connection().await?;
    on!(connection.get()?, db => sqlx::query(sqlx::AssertSqlSafe(sql)).execute(db).await.map(drop))?;
    Ok(())
}

#[tokio::main]
async fn main() -> Result<()> {
    let url = args().nth(1).unwrap_or_else(|| "sqlite:orders.db".into());
    let address = args().nth(2).unwrap_or_else(|| "127.0.0.1:3000".into());
    let id = if url.starts_with("sqlite:") { "INTEGER PRIMARY KEY" } else { "BIGSERIAL PRIMARY KEY" };

    let ledger = Ledger::new(Database::open(&url, Settings::default()).await?, Options::default())?;
    ledger.transact(move |tx| async move { make_table(&tx, id).await }).await?;
    ledger.sweep_every(Duration::from_secs(10));

    // This service knows no users. One that does puts a `Principal` into its requests, and uses `Idempotency::new`.
    let once = Idempotency::for_everyone(ledger.clone(), "default");
    let app = Router::new().route("/orders", post(take_order)).layer(once.layer(Route::atomic().required()));

    let listener = tokio::net::TcpListener::bind(address).await?;
    println!("listening on http://{}", listener.local_addr()?);
    let told = async { drop(tokio::signal::ctrl_c().await) };
    axum::serve(listener, app).with_graceful_shutdown(told).await?;
    ledger.stop(Duration::from_secs(10)).await;
    Ok(())
}
