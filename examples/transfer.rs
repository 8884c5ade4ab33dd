//! Money moves once, however often the order arrives: atomic mode in one screen.
//!
//! `cargo run -p semel-examples --example transfer`

use anyhow::Result;
use semel::{Claim, Fingerprint, Key, Ledger, Options, Outcome, Ran, Scope, Unfinished, Work};
use semel_store::{Conn, Database, Settings, Tx};

/// Moves 10 from Ann to Bob, in the transaction that also records that it happened.
async fn move_the_money(tx: &Tx) -> Result<Outcome> {
    let mut connection = tx.connection().await?;
    let Conn::Sqlite(db) = connection.get()? else { anyhow::bail!("this example uses SQLite") };
    sqlx::query("UPDATE accounts SET balance = balance - 10 WHERE name = 'ann'").execute(&mut *db).await?;
    sqlx::query("UPDATE accounts SET balance = balance + 10 WHERE name = 'bob'").execute(&mut *db).await?;
    Ok(Outcome::kept("moved 10 from ann to bob"))
}

/// The same order arrives three times.
#[tokio::main]
pub(crate) async fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let url = format!("sqlite:{}", folder.path().join("bank.db").display());
    let ledger = Ledger::new(Database::open(&url, Settings::default()).await?, Options::default())?;
    let bank = sqlx::SqlitePool::connect(&url).await?;
    sqlx::raw_sql(
        "CREATE TABLE accounts (name TEXT, balance INTEGER); INSERT INTO accounts VALUES ('ann', 100), ('bob', 0)",
    )
    .execute(&bank)
    .await?;

    for _ in 0..3 {
        let order = b"10 from ann to bob";
        let work =
            Work::new(Scope::new("acme", "bank", "transfer")?, Key::new("order-4711")?, Fingerprint::of_bytes(order));
        let answer = ledger
            .run_atomic(work, |_ctx, tx| async move {
                move_the_money(&tx).await.map_err(|error| Unfinished::failed(error.to_string()))
            })
            .await?;
        match answer {
            Claim::Acquired(Ran::Completed(outcome)) => {
                println!("took effect: {}", String::from_utf8_lossy(&outcome.body))
            }
            Claim::Replay(replay) => println!("came again: {}", String::from_utf8_lossy(&replay.outcome.body)),
            other => anyhow::bail!("unexpected: {}", other.word()),
        }
    }

    let (balance,): (i64,) = sqlx::query_as("SELECT balance FROM accounts WHERE name = 'bob'").fetch_one(&bank).await?;
    println!("bob has {balance}");
    anyhow::ensure!(balance == 10, "the money moved {} times", balance / 10);
    Ok(())
}
