//! A batch on its way, and what is said of its rows.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use super::{
    super::{Broker, Lent, Mark, MarkRow, Published, Taken},
    RelayOptions,
    keeper::InHand,
    marker::Finished,
};
use crate::{Backoff, Uptime, crash_point};

/// The wait of a message about which no word came back. Nothing is wrong with most of them, so it begins short; one
/// that cuts its connection every time must be seldom enough to let the others go.
const UNKNOWN: Backoff = Backoff { first: Duration::from_millis(200), cap: Duration::from_secs(60) };

/// How many messages without a word are remembered. Beyond it they are forgotten, and wait a little less.
const REMEMBERED: usize = 10_000;

/// How often it is told of a topic that no queue takes it.
const TOLD_EVERY: Duration = Duration::from_secs(60);

/// Of how many topics it is remembered when that was told last. Beyond it they are forgotten, and told of a little sooner.
const TOPICS: usize = 1_000;

/// How a batch ended.
pub(super) struct Summary {
    /// On how many messages the broker had a word, whichever.
    pub(super) answered: usize,
    /// How many were sent without one.
    pub(super) unknown: usize,
    /// What was said of one that had none.
    pub(super) why: Option<String>,
}

/// Brings batches to the broker.
pub(super) struct Publisher {
    broker: Arc<dyn Broker>,
    options: RelayOptions,
    /// How often there was no word about a row.
    unknown: Mutex<HashMap<i64, u32>>,
    /// When it was last told of a topic that no queue takes it.
    told: Mutex<HashMap<String, Instant>>,
}

impl Publisher {
    pub(super) fn new(broker: Arc<dyn Broker>, options: RelayOptions) -> Self {
        Self { broker, options, unknown: Mutex::default(), told: Mutex::default() }
    }

    /// Publishes what was leased by a take that was sent at `sent`.
    ///
    /// Sending ends with the first lease, renewed or not: a relay that was paused past it must not send what another has
    /// published by now. Only the broker's word is waited for longer.
    pub(super) async fn publish(&self, taken: Taken, sent: Uptime, in_hand: InHand) -> (Finished, Summary) {
        let envelopes = taken.rows.iter().map(|row| row.envelope.clone()).collect();
        // A tenth for the marks, and for clocks that do not go alike.
        let answers = self.broker.publish(envelopes, sent + self.options.lease * 9 / 10);
        let answers = tokio::time::timeout(self.options.patience, answers).await.unwrap_or_default();
        let mut answers = answers.into_iter();
        let mut summary = Summary { answered: 0, unknown: 0, why: None };
        let mut marks = Vec::with_capacity(taken.rows.len());
        for row in &taken.rows {
            let answer = answers.next().unwrap_or_else(|| Published::Unknown("the broker said nothing in time".into()));
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

    /// Says of all rows that they were not begun.
    pub(super) fn put_back(&self, taken: Taken, in_hand: InHand) -> Finished {
        let mark = |row: Lent| MarkRow { id: row.id, token: taken.token, mark: Mark::PutBack };
        let marks = taken.rows.into_iter().map(mark).collect();
        Finished { marks, until: Uptime::now() + self.options.lease, in_hand }
    }

    /// Whether it is to be told that no queue takes a topic: its messages come together, and again and again.
    fn is_news(&self, topic: &str) -> bool {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.get(topic).is_some_and(|at| at.elapsed() < TOLD_EVERY) {
            return false;
        }
        if told.len() >= TOPICS {
            told.clear();
        }
        told.insert(topic.to_owned(), Instant::now());
        true
    }

    /// What the broker's word means for a row.
    fn mark(&self, row: &Lent, answer: Published) -> Mark {
        let mut unknown = self.unknown.lock().unwrap_or_else(PoisonError::into_inner);
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
            Published::Refused(error) if attempt >= self.options.max_failures => {
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
