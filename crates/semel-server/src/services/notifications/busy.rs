//! Names that another transaction held a moment ago: the ids of events, and the aggregates whose order is kept.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use super::accept::Submission;

/// How long a name is remembered. Afterwards the next request finds out again, which costs its batch some short waits.
const REMEMBERED: Duration = Duration::from_secs(5);

/// How many names are remembered; beyond that, all are forgotten.
const MOST: usize = 10_000;

/// Names whose row another transaction holds.
#[derive(Default)]
pub(super) struct Busy(Mutex<HashMap<String, Instant>>);

impl Busy {
    /// Whether a name of a submission was busy a moment ago.
    pub(super) fn knows(&self, submission: &Submission) -> bool {
        let names = self.0.lock();
        let is_busy = |name: String| names.get(&name).is_some_and(|since| since.elapsed() < REMEMBERED);
        !names.is_empty() && of(submission).any(is_busy)
    }

    /// Remembers the names of a submission: one of them is busy.
    pub(super) fn note(&self, submission: &Submission) {
        let mut names = self.0.lock();
        names.retain(|_, since| since.elapsed() < REMEMBERED);
        if names.len() >= MOST {
            names.clear();
        }
        names.extend(of(submission).map(|name| (name, Instant::now())));
    }
}

/// The names of the rows that a submission may have to wait for.
fn of(submission: &Submission) -> impl Iterator<Item = String> {
    let tenant = &submission.tenant;
    submission.events.iter().flat_map(move |event| {
        let keys = event.messages.iter().filter_map(|(_, message)| message.ordering_key.as_ref());
        let keys = keys.map(move |key| format!("{tenant} key {key}"));
        keys.chain([format!("{tenant} event {}", event.id.as_str())])
    })
}
