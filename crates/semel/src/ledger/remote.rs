//! Leases that programs outside this process hold: they name the operation and the fence with every call.

use super::{Ledger, outside_transactions, stored_bytes};
use crate::{
    Error, Fence, Operation, Result, Timestamp, crash_point, log,
    machine::{Answer, Write},
    store::{Applied, LeaseWrite, Store},
};

/// The result of a renewal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewed {
    /// The lease ends at this time, unless it is renewed again.
    Until {
        /// The new deadline.
        deadline: Timestamp,
        /// A cancellation of the run was requested.
        cancelled: bool,
    },
    /// The lease is no longer held.
    LeaseLost,
}

impl<S: Store> Ledger<S> {
    /// A write under the lease with this fence. Sending it again is harmless: [`Answer::Settled`] also says that the same
    /// write was made before, [`Answer::Lost`] that another one was, or that another holds the lease. `held` is the
    /// operation as it was read: its size, and its name in the log.
    ///
    /// # Errors
    /// [`Error::OutcomeUnknown`] if the store did not answer, and errors of the store.
    pub async fn write_as(&self, held: &Operation, fence: Fence, write: Write) -> Result<Applied> {
        outside_transactions()?;
        let write = match write {
            Write::Complete(outcome) => Write::Complete(outcome.to_store()),
            other => other.bounded(),
        };
        crash_point!("settle.before");
        let sent = self.write_of(LeaseWrite { id: held.id, fence, write: write.clone() }, stored_bytes(held)).await;
        crash_point!("settle.after");
        let applied = match sent {
            Err(error) if error.is_transient() => return Err(Error::OutcomeUnknown(error.to_string())),
            sent => sent?,
        };
        self.wake(held.id);
        match applied.answer {
            Answer::Lost => log::lost(held, "a write came late"),
            _ if held.fence == fence => log::settled(held, &write),
            _ => {}
        }
        Ok(applied)
    }

    /// Renews the lease with this fence.
    ///
    /// # Errors
    /// Errors of the store.
    pub async fn renew_as(&self, id: i64, fence: Fence) -> Result<Renewed> {
        Ok(match self.renew(id, fence).await? {
            Answer::Renewed { deadline, cancelled } => Renewed::Until { deadline, cancelled },
            _ => Renewed::LeaseLost,
        })
    }
}
