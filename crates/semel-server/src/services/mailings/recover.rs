//! Recovery, with every sweep: a mailing whose run was lost is queued again. It is shown as PENDING, unless a person has
//! paused or cancelled it: such a mailing needs a run, too, to settle what was being sent and to cancel its entries.
//!
//! The worker takes over a run whose lease has expired by itself. Recovery makes the state visible, and covers a mailing
//! without any run, such as one whose operation was purged by hand.

use semel::{Error, Operation, Result, State, Timestamp, prelude::*};
use semel_store::Conn;

use super::{
    Service,
    run::{key, scope},
    tables::mailings::{self, Mailing},
    upload::queued,
};

/// How many mailings a round recovers at most. There are more only after an outage of many nodes.
const AT_ONCE: i64 = 1_000;

/// A message that has not arrived after this time is sent again, in microseconds.
const FORGOTTEN_AFTER: i64 = 5 * 60 * 1_000_000;

impl Service {
    /// One round.
    pub(super) async fn recover(&self) -> Result<()> {
        let now = self.database.now().await?.as_micros();
        let look = async |conn: &mut Conn<'_>| mailings::lost(conn, now, now - FORGOTTEN_AFTER, AT_ONCE).await;
        for (tenant, id) in self.database.read(look).await? {
            // One that cannot be recovered now does not keep the others.
            if let Err(error) = self.recover_one(&tenant, &id).await {
                tracing::warn!(%error, mailing = id, "a mailing could not be recovered yet");
            }
        }
        Ok(())
    }

    /// Recovers a mailing, if its run is still lost.
    async fn recover_one(&self, tenant: &str, id: &str) -> Result<()> {
        let Some(seen) = self.database.read(async |conn| mailings::find(conn, tenant, id).await).await? else {
            return Ok(());
        };
        let run = self.database.by_key(&scope(&seen.tenant)?, &key(&seen.id, seen.run)?).await?;
        let now = self.database.now().await?;
        if !is_orphaned(&seen, run.as_ref(), now) && !is_forgotten(&seen, run.as_ref(), now) {
            return Ok(());
        }
        let (store, now) = (self.database.clone(), now.as_micros());
        let recovered = self.ledger.transact(move |tx| async move {
            {
                let mut held = tx.connection().await?;
                let mut conn = held.get()?;
                // One that another transaction holds is recovered by a later sweep.
                let Some(mut mailing) = mailings::lock_if_free(&mut conn, &seen.tenant, &seen.id).await? else {
                    return Ok::<_, Error>(());
                };
                // Another node was first, or the run goes on.
                if (mailing.updated_at, mailing.run, mailing.status.as_str())
                    != (seen.updated_at, seen.run, seen.status.as_str())
                {
                    return Ok(());
                }
                if !mailing.is_stopped() {
                    (mailing.status, mailing.last_attempt) = ("PENDING".to_owned(), None);
                }
                if !mailing.active {
                    (mailing.run, mailing.active, mailing.waiting) = (mailing.run + 1, true, false);
                }
                mailings::save(&mut conn, &mailing, now).await?;
            }
            store.put(&tx, vec![queued(&seen.tenant, &seen.id)?]).await?;
            tracing::warn!(mailing = seen.id, "the run of a mailing was lost; the mailing is queued again");
            Ok(())
        });
        recovered.await
    }
}

/// Whether a mailing that is PROCESSING has no run, or a lost one.
fn is_orphaned(mailing: &Mailing, run: Option<&Operation>, now: Timestamp) -> bool {
    if mailing.status != "PROCESSING" {
        return false;
    }
    match run {
        None => true,
        Some(run) => match run.state {
            State::Processing => run.lease.as_ref().is_none_or(|lease| lease.deadline < now),
            State::TimedOut => true,
            // Released: it goes on later. Without a last attempt its status is not ours.
            _ => mailing.last_attempt.is_none(),
        },
    }
}

/// Whether a mailing has no run although it should have one for some time: its message became a dead letter, or the
/// broker lost it, or the run failed before it had cancelled all entries. A second message does no harm.
fn is_forgotten(mailing: &Mailing, run: Option<&Operation>, now: Timestamp) -> bool {
    let has_none = !mailing.active || run.is_none();
    mailing.status != "PROCESSING" && has_none && now.as_micros() - mailing.updated_at > FORGOTTEN_AFTER
}
