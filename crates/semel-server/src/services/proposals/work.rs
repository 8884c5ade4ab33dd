//! The service's work: deletes expired records of keyed changes.

use std::time::Duration;

use semel::{Context, Kind, Ledger, OnLost, Outcome, Policy, Result, Schedule, Scope, Unfinished, micros, prelude::*};
use semel_store::{Database, Tx};

use super::{SERVICE, tables};
use crate::unfinished::unfinished;

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
        async move { run(&ledger, keep).await }
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

/// One run. An outage of the database counts no attempt: after three, the records would stay until the next run.
async fn run(ledger: &Ledger<Database>, keep: Duration) -> Result<Outcome, Unfinished> {
    let deleted = delete_all(ledger, keep).await.map_err(unfinished)?;
    Ok(Outcome::kept(format!("{deleted} deleted")))
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

#[cfg(test)]
mod tests {
    use semel_testkit::{Kind, Lab};

    use super::*;

    #[tokio::test]
    async fn a_clean_up_during_an_outage_counts_no_attempt() {
        for kind in [Kind::Sqlite, Kind::Postgres] {
            let lab = Lab::new(kind).await;
            let ledger = lab.ledger().await;
            crate::services::migrate(ledger.store()).await.unwrap();
            let keep = Duration::from_secs(60);
            assert_eq!(run(&ledger, keep).await, Ok(Outcome::kept("0 deleted")));
            // Its store accepts nothing any more.
            ledger.stop(Duration::ZERO).await;
            let ended = run(&ledger, keep).await;
            assert!(matches!(ended, Err(Unfinished::Released { .. })), "{kind:?}: {ended:?}");
        }
    }
}
