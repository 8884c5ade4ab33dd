//! The database calls of messaging beyond the ledger, split by caller. As with a [`Store`](crate::Store), an answer
//! comes after the change is durable.

mod letters;
mod outbox;
mod relay;

use std::sync::Arc;

use tokio::sync::Notify;

pub use letters::{ConsumerStore, LetterStore, Redriven};
pub use outbox::{Backlog, OutboxFilter, OutboxListing, OutboxRow, OutboxState, OutboxStore, UnreadableMessage};
pub use relay::{Lent, Mark, MarkRow, RelayStore, Taken, Tended};

/// Wakes a task that waits for new rows. Cheap to clone; wakes between two waits are remembered as one.
#[derive(Clone, Default)]
pub struct Wake(Arc<Notify>);

impl Wake {
    /// Wakes.
    pub fn wake(&self) {
        self.0.notify_one();
    }

    /// Whether another clone exists. If not, no task waits.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// Waits for a wake, or returns if there was one since the last wait.
    pub async fn woken(&self) {
        self.0.notified().await;
    }
}
