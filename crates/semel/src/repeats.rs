//! Claims that came again, gathered for a second and written together.
//!
//! A replay must cost no write of its own, so repeats are counted in memory and flushed once a
//! second: a process that is killed loses at most that second of them. The states of operations
//! are never counted here.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::Notify;

use crate::{
    Labels, Operation, Scope, Timestamp, crash_point,
    journal::{Repeat, Repeats, Sighting},
    look::Group,
    machine::Request,
    store::{AnswerCount, SeenAgain, Store},
};

/// How long a repeat may wait for its write.
const EVERY: Duration = Duration::from_secs(1);

/// How many operations may have unwritten repeats before they are written at once.
const MOST: usize = 16_384;

#[derive(Default)]
struct Gathered {
    repeats: HashMap<(i64, Repeat), Repeats>,
    answers: HashMap<Counted, i64>,
}

/// What an answer is counted by: the scope, the first two labels, and its word. The group of the
/// counters in a form that costs nothing to make.
type Counted = (Scope, [Option<String>; 2], &'static str);

#[derive(Default)]
pub(crate) struct Gatherer {
    gathered: Mutex<Gathered>,
    full: Notify,
}

impl Gatherer {
    /// Notes that a claim of `operation` was answered `word` instead of getting the lease.
    pub(crate) fn note(&self, operation: &Operation, request: &Request, word: &'static str, at: Timestamp) {
        let repeat =
            if operation.fingerprint.matches(&request.fingerprint) { Repeat::Duplicate } else { Repeat::Conflict };
        // A duplicate has the operation's own fingerprint; only a conflict's is worth keeping.
        let fingerprint = match repeat {
            Repeat::Duplicate => String::new(),
            Repeat::Conflict => request.fingerprint.to_hex(),
        };
        let sighting = Sighting { at, answer: word.into(), fingerprint };
        let [label1, label2, ..] = &operation.labels.0;
        let counted = (operation.scope.clone(), [label1.clone(), label2.clone()], word);
        let mut gathered = self.lock();
        // With the store away for long, further operations are only counted by their answer.
        if gathered.repeats.len() < 2 * MOST {
            gathered.repeats.entry((operation.id, repeat)).or_default().add(sighting);
        }
        *gathered.answers.entry(counted).or_default() += 1;
        if gathered.repeats.len() >= MOST {
            drop(gathered);
            self.full.notify_one();
        }
    }

    /// Writes what has gathered, every second. Never ends.
    pub(crate) async fn work<S: Store>(self: Arc<Self>, store: S) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(EVERY) => {}
                () = self.full.notified() => {}
            }
            self.flush(&store).await;
        }
    }

    /// Writes what has gathered. What cannot be written now is kept for the next time, as long as
    /// there is room for it.
    pub(crate) async fn flush<S: Store>(&self, store: &S) {
        let Gathered { repeats, answers } = std::mem::take(&mut *self.lock());
        if repeats.is_empty() && answers.is_empty() {
            return;
        }
        crash_point!("repeats.before");
        let seen = repeats.iter().map(|((id, repeat), repeats)| SeenAgain {
            id: *id,
            repeat: *repeat,
            repeats: repeats.clone(),
        });
        let counts = answers.iter().map(|((scope, [label1, label2], answer), n)| {
            let labels = Labels([label1.clone(), label2.clone(), None, None]);
            AnswerCount { group: Group::new(scope, &labels), answer, n: *n }
        });
        if let Err(error) = store.note_repeats(seen.collect(), counts.collect()).await {
            tracing::warn!(%error, "repeats could not be written; trying again");
            self.put_back(Gathered { repeats, answers });
            return;
        }
        crash_point!("repeats.noted");
    }

    fn put_back(&self, earlier: Gathered) {
        let mut now = self.lock();
        for (id, mut repeats) in earlier.repeats {
            match now.repeats.remove(&id) {
                Some(later) => repeats.merge(later),
                None if now.repeats.len() >= MOST => continue,
                None => {}
            }
            now.repeats.insert(id, repeats);
        }
        for (counted, n) in earlier.answers {
            *now.answers.entry(counted).or_default() += n;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Gathered> {
        self.gathered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
