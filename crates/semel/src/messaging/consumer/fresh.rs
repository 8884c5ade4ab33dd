//! Deliveries, several in a transaction where several wait.

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
    letters::{Word, conflict, named, spread},
    trouble::Trouble,
};
use crate::{
    Claim, Error, Outcome, Replay, State,
    messaging::{
        Acknowledge, Delivery, MessageStore, Received, Retry,
        pause::{Pause, Stop},
    },
};

/// How often a message is run again whose failure may have been the store's: it could not be written down, or it was a
/// passing one. A message that takes its database down with it must not be run for ever.
pub(super) const BENEFITS_OF_THE_DOUBT: u32 = 3;

/// How long a delivery is held that can be neither handled nor kept.
const LATER: Duration = Duration::from_secs(30);

/// A delivery that is known.
struct Fresh {
    item: Item,
    acknowledge: Box<dyn Acknowledge>,
}

/// Whether a delivery is, or may be, another consumer's by now: then it is not begun, and comes again by itself.
fn is_lost(acknowledge: &dyn Acknowledge, message: &Received) -> bool {
    let lost = acknowledge.is_lost();
    if lost {
        tracing::warn!(message_id = named(message), "a delivery was lost before it was begun: its lease had ended");
    }
    lost
}

/// A worker: handles deliveries until it is time to stop.
pub(super) async fn work<S: MessageStore, H: Handler<S>>(
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

struct Worker<S: MessageStore, H> {
    shared: Arc<Shared<S, H>>,
    stop: Stop,
    /// Acknowledgements on their way to the broker.
    words: JoinSet<()>,
    /// How many messages share a transaction at most: fewer where they take long.
    batch: usize,
}

impl<S: MessageStore, H: Handler<S>> Worker<S, H> {
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
                // A key is claimed once per transaction: the second finds what the first has done.
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
            // Nobody else has them any more.
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

    /// A transaction of its own, as often as the store is away.
    async fn alone(&mut self, Fresh { item, acknowledge }: Fresh) {
        // The messages before it may have taken long.
        if is_lost(&*acknowledge, &item.message) {
            return;
        }
        let items = Arc::new(vec![item]);
        let item = &items[0];
        let (mut pause, mut unknown, mut doubts) = (Pause::new(), false, 0);
        let mut trouble = Trouble::default();
        let word = loop {
            match self.shared.attempt(&items, None).await {
                Ok(handled) => {
                    // The commit whose fate was unknown was made.
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
                        Err(_) if doubts >= BENEFITS_OF_THE_DOUBT => {
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
                    if self.shared.is_its_own(&mut trouble, item, &error).await {
                        // Where it costs the others no time, and is counted.
                        let retry = Retry::After(self.shared.options.backoff.after(1, spread(item)));
                        let letter = self.shared.letter(item, 0, (error.to_string(), retry));
                        match self.shared.put_letter(&letter).await {
                            Ok(()) => break Word::Done,
                            Err(error) if !error.is_transient() => break self.shared.letter_refused(&letter, &error),
                            // It was the store after all.
                            Err(error) => {
                                trouble = Trouble::default();
                                self.shared.store_is_away(&error);
                            }
                        }
                    }
                }
                // Only a retry can be lost, and only it has conflicts of this kind.
                Err(Undone::Lost | Undone::Conflict(_)) => break Word::Back,
            }
            if !pause.wait(&mut self.stop).await {
                break Word::Back;
            }
        };
        self.say(acknowledge, word);
    }

    /// It may have been begun by somebody who died of it. If the inbox does not know it, it goes to the retries, where
    /// it is counted before it runs.
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
                    let reason = "it was delivered before, and nobody said what became of it".to_owned();
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

    /// What becomes of a delivery whose transaction is committed.
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

    /// Acknowledges a delivery, or gives it back. Without waiting: if the broker does not hear it, the message comes
    /// again and is found in the inbox.
    fn say(&mut self, acknowledge: Box<dyn Acknowledge>, word: Word) {
        let mut stop = self.stop.clone();
        self.words.spawn(async move {
            if word == Word::BackLater {
                stop.sleep(LATER).await;
            }
            let said = if word == Word::Done { acknowledge.ack() } else { acknowledge.put_back() };
            match said.await {
                Ok(()) => crate::crash_point!("consumer.acked"),
                Err(error) => tracing::debug!(%error, "the broker did not hear what became of a delivery"),
            }
        });
    }

    /// Fewer share a transaction where that took long, so that none comes near its limit and others get their turn.
    fn adapt(&mut self, n: usize, took: Duration) {
        let long = self.shared.store().longest_transaction() / 8;
        self.batch = match took {
            _ if took > long => (n / 2).max(1),
            _ if took < long / 4 => self.batch.saturating_mul(2).min(self.shared.options.batch.max(1)),
            _ => self.batch,
        };
    }
}
