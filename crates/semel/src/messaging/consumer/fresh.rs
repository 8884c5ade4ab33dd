//! Deliveries: handles several in one transaction if several wait.

use std::{
    collections::HashSet,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{
    sync::{Mutex, mpsc},
    task::JoinSet,
};

use super::{
    Handler, Shared,
    attempt::{Handled, Item, Undone},
    fault::Faults,
    letters::{Word, conflict, named, spread},
};
use crate::{
    Claim, Error, Outcome, Replay, State,
    messaging::{
        Acknowledge, ConsumerStore, Delivery, Received, Retry,
        pause::{Pause, Stop},
    },
};

/// How many times a message is retried in place after a transient failure, or a failure that could not be stored.
/// Limited, because a message may be what takes the database down.
pub(super) const MOST_STRIKES: u32 = 3;

/// How long to hold a delivery that can be neither handled nor stored.
const LATER: Duration = Duration::from_secs(30);

/// A delivery with its inbox key.
struct Fresh {
    item: Item,
    acknowledge: Box<dyn Acknowledge>,
}

/// Whether another consumer has or may have the delivery by now. It is not begun then; the broker delivers it again.
fn is_lost(acknowledge: &dyn Acknowledge, message: &Received) -> bool {
    let lost = acknowledge.is_lost();
    if lost {
        tracing::warn!(message_id = named(message), "skipped a delivery whose lease expired before it was begun");
    }
    lost
}

/// A task that handles deliveries until it is stopped.
pub(super) async fn work<S: ConsumerStore, H: Handler<S>>(
    shared: Arc<Shared<S, H>>,
    waiting: Arc<Mutex<mpsc::Receiver<Delivery>>>,
    stop: Stop,
) {
    let batch = shared.options.batch.max(1);
    let mut worker = Worker { shared, stop, words: JoinSet::new(), batch };
    loop {
        let mut deliveries = Vec::new();
        {
            let mut waiting = waiting.lock().await;
            tokio::select! {
                biased;
                () = worker.stop.come() => break,
                n = waiting.recv_many(&mut deliveries, worker.batch) => if n == 0 { break },
            }
        }
        worker.deal_with(deliveries).await;
        while worker.words.try_join_next().is_some() {}
    }
    while worker.words.join_next().await.is_some() {}
}

struct Worker<S: ConsumerStore, H> {
    shared: Arc<Shared<S, H>>,
    stop: Stop,
    /// Acknowledgements that are being sent.
    words: JoinSet<()>,
    /// The most messages per transaction; fewer if they take long.
    batch: usize,
}

impl<S: ConsumerStore, H: Handler<S>> Worker<S, H> {
    async fn deal_with(&mut self, deliveries: Vec<Delivery>) {
        let (mut together, mut later, mut known) = (Vec::new(), Vec::new(), HashSet::new());
        for Delivery { message, redelivered, acknowledge } in deliveries {
            if is_lost(&*acknowledge, &message) {
                continue;
            }
            let name = match self.shared.identify(&message) {
                Ok(name) => name,
                Err(why) => {
                    let letter = self.shared.letter_of_unknown(message, &why);
                    let word = self.shared.put_letter_patiently(&letter, &mut self.stop).await;
                    self.say(acknowledge, word);
                    continue;
                }
            };
            let fresh = Fresh { item: Item::new(message, name), acknowledge };
            if redelivered {
                self.again(fresh).await;
            } else if known.insert((fresh.item.scope.clone(), fresh.item.key.clone())) {
                together.push(fresh);
            } else {
                // A transaction claims each key once. The second message of a key follows and finds the first one's
                // inbox row.
                later.push(fresh);
            }
        }
        self.together(together).await;
        for fresh in later {
            self.alone(fresh).await;
        }
    }

    /// One transaction for all; if it fails, one for each.
    async fn together(&mut self, batch: Vec<Fresh>) {
        if batch.len() > 1 {
            let begun = Instant::now();
            let (items, words): (Vec<_>, Vec<_>) =
                batch.into_iter().map(|fresh| (fresh.item, fresh.acknowledge)).unzip();
            let items = Arc::new(items);
            let ended = self.shared.attempt(&items, None).await;
            self.adapt(items.len(), begun.elapsed());
            // No other task shares them any more.
            let items = Arc::into_inner(items).unwrap_or_default();
            let batch = items.into_iter().zip(words).map(|(item, acknowledge)| Fresh { item, acknowledge });
            match ended {
                Ok(all) => {
                    for (fresh, handled) in batch.zip(all) {
                        self.ended(fresh, &handled).await;
                    }
                }
                Err(_) => {
                    for fresh in batch {
                        self.alone(fresh).await;
                    }
                }
            }
        } else {
            for fresh in batch {
                self.alone(fresh).await;
            }
        }
    }

    /// In its own transaction, retried while the store is unavailable.
    async fn alone(&mut self, Fresh { item, acknowledge }: Fresh) {
        // The messages before it may have taken long.
        if is_lost(&*acknowledge, &item.message) {
            return;
        }
        let items = Arc::new(vec![item]);
        let item = &items[0];
        let (mut pause, mut unknown, mut doubts) = (Pause::new(), false, 0);
        let mut faults = Faults::default();
        let word = loop {
            match self.shared.attempt(&items, None).await {
                Ok(handled) => {
                    // The commit with the unknown result was made.
                    if unknown && handled == [Handled::Duplicate] {
                        self.shared.committed(&item.message);
                    }
                    break match handled.first() {
                        Some(Handled::Conflict(first)) => {
                            let letter = self.shared.letter(item, 0, conflict(*first, item));
                            self.shared.put_letter_patiently(&letter, &mut self.stop).await
                        }
                        Some(Handled::Done) => {
                            self.shared.committed(&item.message);
                            Word::Done
                        }
                        _ => Word::Done,
                    };
                }
                Err(Undone::Refused(refusal)) => {
                    let letter = self.shared.letter(item, 1, self.shared.after(refusal, 1, spread(item)));
                    match self.shared.put_letter(&letter).await {
                        Ok(()) => break Word::Done,
                        Err(error) if !error.is_transient() => break self.shared.letter_refused(&letter, &error),
                        Err(_) if doubts >= MOST_STRIKES => {
                            break self.shared.put_letter_patiently(&letter, &mut self.stop).await;
                        }
                        Err(error) => {
                            self.shared.store_is_away(&error);
                            doubts += 1;
                        }
                    }
                }
                Err(Undone::Store(Error::Stopping)) => break Word::Back,
                Err(Undone::Store(error)) => {
                    unknown |= matches!(error, Error::OutcomeUnknown(_));
                    if self.shared.is_at_fault(&mut faults, item, &error).await {
                        // As a retry it delays no other message, and its runs are counted.
                        let retry = Retry::After(self.shared.options.backoff.after(1, spread(item)));
                        let letter = self.shared.letter(item, 0, (error.to_string(), retry));
                        match self.shared.put_letter(&letter).await {
                            Ok(()) => break Word::Done,
                            Err(error) if !error.is_transient() => break self.shared.letter_refused(&letter, &error),
                            // The store was at fault, not the message.
                            Err(error) => {
                                faults = Faults::default();
                                self.shared.store_is_away(&error);
                            }
                        }
                    }
                }
                // Only retries return these two.
                Err(Undone::Lost | Undone::Conflict(_)) => break Word::Back,
            }
            if !pause.wait(&mut self.stop).await {
                break Word::Back;
            }
        };
        self.say(acknowledge, word);
    }

    /// A consumer may have begun it and crashed because of it. If the inbox does not have it, it becomes a retry, where
    /// runs are counted before they start.
    async fn again(&mut self, Fresh { item, acknowledge }: Fresh) {
        let mut pause = Pause::new();
        let letter = loop {
            match self.shared.store().by_key(&item.scope, &item.key).await {
                Ok(Some(operation)) if operation.state == State::Completed => {
                    let operation = Arc::new(operation);
                    let mismatch = !operation.fingerprint.matches(&item.fingerprint);
                    if let Ok(request) = self.shared.work(&item).into_request(self.shared.ledger.owner()) {
                        let outcome = operation.outcome.clone().unwrap_or_else(|| Outcome::not_kept(""));
                        let (replay, operation) =
                            (Replay { outcome, mismatch, operation: operation.clone() }, operation.clone());
                        let claim = if mismatch { Claim::Mismatch(operation) } else { Claim::<()>::Replay(replay) };
                        self.shared.ledger.note(&claim, &request);
                    }
                    break mismatch.then(|| self.shared.letter(&item, 0, conflict(operation.fingerprint, &item)));
                }
                Err(error) if error.is_transient() => {
                    self.shared.store_is_away(&error);
                    if !pause.wait(&mut self.stop).await {
                        return self.say(acknowledge, Word::Back);
                    }
                }
                Ok(_) | Err(_) => {
                    let reason = "it was delivered before, and its result is unknown".to_owned();
                    break Some(self.shared.letter(&item, 0, (reason, Retry::After(Duration::ZERO))));
                }
            }
        };
        let word = match letter {
            Some(letter) => self.shared.put_letter_patiently(&letter, &mut self.stop).await,
            None => Word::Done,
        };
        self.say(acknowledge, word);
    }

    /// Answers a delivery whose transaction has committed.
    async fn ended(&mut self, Fresh { item, acknowledge }: Fresh, handled: &Handled) {
        let word = match handled {
            Handled::Done => {
                self.shared.committed(&item.message);
                Word::Done
            }
            Handled::Duplicate => Word::Done,
            Handled::Conflict(first) => {
                let letter = self.shared.letter(&item, 0, conflict(*first, &item));
                self.shared.put_letter_patiently(&letter, &mut self.stop).await
            }
        };
        self.say(acknowledge, word);
    }

    /// Acknowledges or returns a delivery, without waiting for the result: if it fails, the message is delivered again
    /// and found in the inbox.
    fn say(&mut self, acknowledge: Box<dyn Acknowledge>, word: Word) {
        let mut stop = self.stop.clone();
        self.words.spawn(async move {
            if word == Word::BackLater {
                stop.sleep(LATER).await;
            }
            let said = if word == Word::Done { acknowledge.ack() } else { acknowledge.requeue() };
            match said.await {
                Ok(()) => crate::crash_point!("consumer.acked"),
                Err(error) => tracing::debug!(%error, "a delivery could not be acknowledged; it is delivered again"),
            }
        });
    }

    /// Slow transactions get fewer messages, so that none comes near its time limit.
    fn adapt(&mut self, n: usize, took: Duration) {
        let long = self.shared.store().longest_transaction() / 8;
        self.batch = match took {
            _ if took > long => (n / 2).max(1),
            _ if took < long / 4 => self.batch.saturating_mul(2).min(self.shared.options.batch.max(1)),
            _ => self.batch,
        };
    }
}
