//! Publishes a batch and turns the broker's answers into marks.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use super::{
    super::{Broker, Lent, Mark, MarkRow, Published, Taken},
    RelayOptions,
    keeper::InHand,
    marker::Finished,
};
use crate::{Backoff, Uptime, crash_point};

/// The delay of an unconfirmed message. It starts short, because most of these messages are fine. It grows, because a
/// message that breaks its connection each time must leave time for the others.
const UNKNOWN: Backoff = Backoff { first: Duration::from_millis(200), cap: Duration::from_secs(60) };

/// How many unconfirmed messages are remembered. Further ones wait a little less.
const REMEMBERED: usize = 10_000;

/// How often an unroutable topic is logged.
const LOG_EVERY: Duration = Duration::from_secs(60);

/// For how many topics the time of the last log line is remembered. Further ones are logged a little sooner.
const TOPICS: usize = 1_000;

/// The result of a batch.
pub(super) struct Summary {
    /// The number of messages that the broker answered.
    pub(super) answered: usize,
    /// The number of messages sent without an answer.
    pub(super) unknown: usize,
    /// The error of one without an answer.
    pub(super) why: Option<String>,
}

/// Publishes batches.
pub(super) struct Publisher {
    broker: Arc<dyn Broker>,
    options: RelayOptions,
    /// How often a row was not confirmed.
    unknown: Mutex<HashMap<i64, u32>>,
    /// When an unroutable topic was last logged.
    logged: Mutex<HashMap<String, Instant>>,
}

impl Publisher {
    pub(super) fn new(broker: Arc<dyn Broker>, options: RelayOptions) -> Self {
        Self { broker, options, unknown: Mutex::default(), logged: Mutex::default() }
    }

    /// Publishes the rows of a take that was sent at `sent`.
    ///
    /// Sending ends with the first lease, renewed or not: a relay that was paused past it must not send what another
    /// relay has published since. Only confirmations are awaited for longer.
    pub(super) async fn publish(&self, taken: Taken, sent: Uptime, in_hand: InHand) -> (Finished, Summary) {
        let envelopes = taken.rows.iter().map(|row| row.envelope.clone()).collect();
        // Leaves a tenth for the marks and for clock drift.
        let answers = self.broker.publish(envelopes, sent + self.options.lease * 9 / 10);
        let answers = tokio::time::timeout(self.options.patience, answers).await.unwrap_or_default();
        let mut answers = answers.into_iter();
        let mut summary = Summary { answered: 0, unknown: 0, why: None };
        let mut marks = Vec::with_capacity(taken.rows.len());
        for row in &taken.rows {
            let answer =
                answers.next().unwrap_or_else(|| Published::Unknown("the broker did not confirm in time".into()));
            match &answer {
                Published::Confirmed | Published::Refused(_) | Published::Unroutable(_) => summary.answered += 1,
                Published::Unknown(why) => {
                    summary.unknown += 1;
                    summary.why = Some(why.clone());
                }
                Published::NotSent(why) => summary.why = Some(why.clone()),
            }
            marks.push(MarkRow { id: row.id, token: taken.token, mark: self.mark(row, answer) });
        }
        if marks.iter().any(|mark| mark.mark == Mark::Sent) {
            crash_point!("relay.published");
        }
        (Finished { marks, until: Uptime::now() + self.options.lease, in_hand }, summary)
    }

    /// Marks all rows as not begun.
    pub(super) fn release(&self, taken: Taken, in_hand: InHand) -> Finished {
        let mark = |row: Lent| MarkRow { id: row.id, token: taken.token, mark: Mark::PutBack };
        let marks = taken.rows.into_iter().map(mark).collect();
        Finished { marks, until: Uptime::now() + self.options.lease, in_hand }
    }

    /// Whether to log an unroutable topic: its messages come together, and repeatedly.
    fn is_news(&self, topic: &str) -> bool {
        let mut logged = self.logged.lock();
        if logged.get(topic).is_some_and(|at| at.elapsed() < LOG_EVERY) {
            return false;
        }
        if logged.len() >= TOPICS {
            logged.clear();
        }
        logged.insert(topic.to_owned(), Instant::now());
        true
    }

    /// Turns the broker's answer into a mark.
    fn mark(&self, row: &Lent, answer: Published) -> Mark {
        let mut unknown = self.unknown.lock();
        if !matches!(answer, Published::Unknown(_)) {
            unknown.remove(&row.id);
        }
        let (message_id, attempt) = (row.envelope.message.id, row.failures.saturating_add(1));
        match answer {
            Published::Confirmed => Mark::Sent,
            Published::NotSent(_) => Mark::PutBack,
            Published::Unroutable(error) => {
                let topic = row.envelope.message.topic.as_str();
                if self.is_news(topic) {
                    let every = self.options.unroutable;
                    tracing::warn!(topic, %message_id, error, "no queue takes a message; it is tried again every {every:?}");
                }
                Mark::Unroutable { error, after: self.options.unroutable }
            }
            Published::Refused(error) if attempt >= self.options.max_attempts => {
                tracing::warn!(
                    %message_id, attempt, error,
                    "the broker refused a message too often; it waits for a person"
                );
                Mark::Park { error }
            }
            Published::Refused(error) => {
                tracing::warn!(%message_id, attempt, error, "the broker refused a message; it is tried again");
                Mark::Retry { error, after: self.options.backoff.after(attempt, row.id) }
            }
            Published::Unknown(error) => {
                if unknown.len() >= REMEMBERED {
                    unknown.clear();
                }
                let times = unknown.entry(row.id).or_default();
                *times += 1;
                Mark::Later { error, after: UNKNOWN.after(*times, row.id) }
            }
        }
    }
}
