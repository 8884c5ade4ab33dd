//! The service's work: deletes expired records of keyed changes.

use std::time::Duration;

use semel::{Context, Kind, Ledger, OnLost, Outcome, Policy, Result, Schedule, Scope, Unfinished, micros, prelude::*};
use semel_store::{Database, Tx};

use super::{SERVICE, tables};

/// The kind of a clean-up.
const CLEAN_UP: &str = "clean-up";

/// How many rows one transaction deletes: on SQLite it holds the only writer.
const AT_ONCE: u64 = 1_000;

/// The shortest and the longest interval. In between, it is a tenth of the retention.
const OFTEN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(3600));

/// The retention of a clean-up's operation.
const REMEMBERED: Duration = Duration::from_secs(3600);

/// Deletes records older than `keep`, in short transactions. The next run continues one that was cut off.
pub(super) fn clean_up(ledger: &Ledger<Database>, keep: Duration) -> Kind<Database> {
    let ledger = ledger.clone();
    let handler = move |_: Context<Database>| {
        let ledger = ledger.clone();
        async move {
            let deleted = delete_all(&ledger, keep).await.map_err(|error| Unfinished::failed(error.to_string()))?;
            Ok(Outcome::kept(format!("{deleted} deleted")))
        }
    };
    let policy =
        Policy { retention: Some(REMEMBERED), on_lost: OnLost::Rerun, max_attempts: Some(3), ..Policy::default() };
    Kind::leased(SERVICE, CLEAN_UP, handler).policy(policy).at_once(1).at_once_in_all(1)
}

/// Its schedule.
pub(super) fn schedule(keep: Duration) -> Result<Schedule> {
    let scope = Scope::new(Scope::DEFAULT_TENANT, SERVICE, CLEAN_UP)?;
    Schedule::every(CLEAN_UP, (keep / 10).clamp(OFTEN.0, OFTEN.1), scope)
}

async fn delete_all(ledger: &Ledger<Database>, keep: Duration) -> Result<u64> {
    let before = ledger.store().now().await?.as_micros().saturating_sub(micros(keep));
    let mut deleted = 0;
    loop {
        let gone = ledger.transact(move |tx| async move { delete(&tx, before).await }).await?;
        deleted += gone;
        if gone < AT_ONCE {
            return Ok(deleted);
        }
    }
}

async fn delete(tx: &Tx, before: i64) -> Result<u64> {
    let mut held = tx.connection().await?;
    tables::delete_operacoes(&mut held.get()?, before, AT_ONCE.cast_signed()).await
}
