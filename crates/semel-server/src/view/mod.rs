//! Shows an operation: as JSON, and as a story in plain sentences, in order of time.
//!
//! - [`View`]: all stored data about one operation
//! - [`Telling`]: how the operations of a service are described, given by the service
//! - `about`: describes an operation by its stored data
//! - `json`: the operation and its parts as JSON; `fields`: as a table for people
//! - `story`: what happened, and what happens next; `runs`: its runs one by one, and how it began
//! - `words`: times, durations and texts for people

pub(crate) mod about;
pub(crate) mod fields;
pub(crate) mod json;
mod runs;
pub(crate) mod story;
pub(crate) mod words;

#[cfg(test)]
mod stories;

use std::time::Duration;

use semel::{
    Operation, Result, State, Timestamp,
    fleet::NodeSeen,
    journal::{Note, Repeat, Repeats},
    look::SetAside,
    machine::CANCELLED,
    prelude::*,
};
use semel_store::{Audited, Database, HeldMessage, Paused};

pub(crate) use self::runs::{Attempt, Decision, End};

/// How the operations of a service are described. Part of a [`Service`](crate::service::Service).
#[derive(Clone, Copy)]
pub struct Telling {
    /// The noun for one operation and for several.
    pub noun: (&'static str, &'static str),
    /// The names of the four labels, if they have one.
    pub labels: [Option<&'static str>; 4],
    /// The subject of an operation: `("request", "POST /orders")`, say.
    pub about: fn(&Operation) -> Option<(&'static str, String)>,
    /// The meaning of a completion, if it is not simply that it took effect. The text has the flags with which the next
    /// command finds the ledger.
    pub completed: fn(&View, &str) -> Option<Meaning>,
}

impl Telling {
    /// For operations of no service here. Those of `semel once` may be in any scope.
    pub const PLAIN: Self = Self {
        noun: ("operation", "operations"),
        labels: [None; 4],
        about: |operation| about::command(operation),
        completed: |_, _| None,
    };
}

/// The meaning of a completion.
pub struct Meaning {
    /// The verdict, in a few words.
    pub verdict: &'static str,
    /// The description of the outcome, if it is not the default.
    pub kept: Option<&'static str>,
    /// The next step, as a sentence.
    pub next: String,
}

/// All stored data about one operation.
pub struct View {
    /// The operation, whole.
    pub operation: Operation,
    /// Its journal: the newest notes, oldest first.
    pub notes: Vec<Note>,
    /// The repeats of its key.
    pub repeats: Vec<(Repeat, Repeats)>,
    /// Its messages that were not published at once.
    pub messages: Vec<HeldMessage>,
    /// The actions of people.
    pub audit: Vec<Audited>,
    /// The entries of `semel_set_aside`.
    pub aside: Vec<SetAside>,
    /// Whether it waits and no worker runs it: it is parked, or out of attempts by the policy of its last run.
    pub never_due: bool,
    /// The pause of its kind, if it waits and its kind is paused.
    pub paused: Option<Paused>,
    /// Whether a living node has a handler for it, if it waits.
    pub has_handler: Option<bool>,
    /// The database's time.
    pub now: Timestamp,
}

impl View {
    /// Reads all data of an operation.
    ///
    /// # Errors
    /// When the database cannot be reached.
    pub async fn read(store: &Database, operation: Operation) -> Result<Self> {
        let (id, tenant) = (operation.id, operation.scope.tenant().to_owned());
        let (notes, repeats) = store.journal(id).await?;
        let messages = store.held_messages(&tenant, id).await?;
        let audit = store.audited(&tenant, id).await?;
        let aside = set_aside(store, id).await?;
        let never_due = operation.is_given_up();
        let (mut paused, mut has_handler) = (None, None);
        if matches!(operation.state, State::Pending | State::Failed | State::TimedOut)
            && !never_due
            && !operation.is_left_to_callers()
        {
            let (service, kind) = (operation.scope.service(), operation.scope.kind());
            paused = store.pause_of(service, kind).await?;
            has_handler = Some(store.nodes().await?.iter().any(|node| node.age <= GONE && runs(node, service, kind)));
        }
        let now = store.now().await?;
        Ok(Self { operation, notes, repeats, messages, audit, aside, never_due, paused, has_handler, now })
    }

    /// An operation with its row only.
    pub(crate) fn bare(operation: Operation, now: Timestamp) -> Self {
        let (notes, repeats, messages, audit, aside, never_due) = Default::default();
        let (paused, has_handler) = Default::default();
        Self { operation, notes, repeats, messages, audit, aside, never_due, paused, has_handler, now }
    }

    /// Its present standing.
    pub(crate) fn standing(&self) -> Standing {
        let (op, now) = (&self.operation, self.now);
        match op.state {
            State::Processing if lease_has_expired(op, now) => Standing::LeaseLapsed,
            State::Processing => Standing::Running,
            State::Completed => Standing::Completed,
            State::InDoubt => Standing::InDoubt,
            State::Failed if is_cancelled(op) => Standing::Cancelled,
            State::Pending | State::Failed | State::TimedOut if op.parked || self.never_due => Standing::Parked,
            State::Pending => Standing::Waiting,
            State::Failed | State::TimedOut if op.not_before.is_some_and(|at| at > now) => Standing::BackingOff,
            State::Failed | State::TimedOut => Standing::Runnable,
        }
    }

    /// How its service describes it.
    pub(crate) fn telling(&self) -> Telling {
        crate::services::telling(self.operation.scope.service())
    }
}

/// How long after its last sign of life a node counts as gone: three signs are missing.
pub(crate) const GONE: Duration = Duration::from_secs(35);

/// Whether a node has a handler for a kind, by its sign of life. One handler may take several kinds of its service.
pub(crate) fn runs(node: &NodeSeen, service: &str, kind: &str) -> bool {
    [kind, "*"].iter().any(|kind| node.sign.kinds.contains(&format!("{service}/{kind}")))
}

/// Whether a person has cancelled it: nothing is left to decide.
pub(crate) fn is_cancelled(op: &Operation) -> bool {
    op.state == State::Failed && op.parked && op.error.as_deref() == Some(CANCELLED)
}

/// The entries of an operation in `semel_set_aside`.
pub(crate) async fn set_aside(store: &Database, id: i64) -> Result<Vec<SetAside>> {
    Ok(store.set_aside_of(&[id]).await?.remove(&id).unwrap_or_default())
}

/// The standing of an operation at a moment. The state alone does not say whether its lease has expired, or what it
/// waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It waits for its next run, or for its `not_before`.
    Waiting,
    /// A worker or a caller runs it.
    Running,
    /// Its lease has expired, and neither the sweep nor a claim has ended it yet.
    LeaseLapsed,
    /// It has completed.
    Completed,
    /// Its last run failed or was lost, and it waits for the end of its backoff.
    BackingOff,
    /// Its last run failed or was lost, and it may run again.
    Runnable,
    /// No worker runs it, and no claim under the policy of its last run: a person decides.
    Parked,
    /// It was cancelled.
    Cancelled,
    /// It is unknown whether it took effect.
    InDoubt,
}

impl Standing {
    /// Its name in JSON.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Running => "running",
            Self::LeaseLapsed => "leaseLapsed",
            Self::Completed => "completed",
            Self::BackingOff => "backingOff",
            Self::Runnable => "runnable",
            Self::Parked => "parked",
            Self::Cancelled => "cancelled",
            Self::InDoubt => "inDoubt",
        }
    }
}

/// Whether an operation is processing under a lease that has expired, or that is missing.
pub(crate) fn lease_has_expired(op: &Operation, now: Timestamp) -> bool {
    op.state == State::Processing && op.lease.as_ref().is_none_or(|lease| lease.deadline <= now)
}
