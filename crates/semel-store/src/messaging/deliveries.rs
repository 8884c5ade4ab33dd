//! The deliveries of one embedded queue to one consumer.
//!
//! A task takes messages in batches, as many as there is room for. It runs beside the consumer: a wait for the next
//! message may be cancelled at any moment, and a row taken in it would be lost until its lease expires.

use std::{convert::Infallible, sync::Arc, time::Duration};

use parking_lot::Mutex;
use semel::{
    Error, Result, Uptime, crash_point,
    lane::Lane,
    messaging::{Acknowledge, BoxFuture, Deliveries, Delivery, Wake},
};
use tokio::{
    sync::{mpsc, watch},
    task::{JoinError, JoinHandle},
};

use super::{
    News,
    embedded::Said,
    rows::Came,
    unacked::{Keeper, Unacked},
    unread::Unread,
};
use crate::Database;

/// The polling interval: for expired leases of others, and for lost wakes.
const POLL: Duration = Duration::from_secs(1);

/// How long a broker that closes waits for messages to be returned.
const LEAVE: Duration = Duration::from_secs(5);

/// How long to wait for more room while the consumer is busy: a batch costs little more than a single message.
const GATHER: Duration = Duration::from_millis(1);

/// The messages of one queue.
pub(super) struct Embedded {
    rows: mpsc::UnboundedReceiver<Came>,
    unacked: Arc<Unacked>,
    said: Lane<Said, bool>,
    queue: String,
    /// The consumer's name. Unknown until the consumer has set it, or asks for a message without having set one.
    consumer: watch::Sender<Option<String>>,
    /// Dropped with the rest, which ends the task.
    _stop: watch::Sender<()>,
    task: JoinHandle<()>,
    leaving: Arc<Leaving>,
    /// Renews its messages while it exists.
    _keeper: Arc<Keeper>,
}

/// How many dropped consumers have messages that are not returned yet.
pub(super) struct Leaving(watch::Sender<usize>);

impl Default for Leaving {
    fn default() -> Self {
        Self(watch::Sender::new(0))
    }
}

impl Leaving {
    /// Waits until there are none, for a limited time: their leases expire in any case.
    pub(super) async fn ended(&self) {
        let mut leaving = self.0.subscribe();
        let _ = tokio::time::timeout(LEAVE, leaving.wait_for(|n| *n == 0)).await;
    }
}

impl Drop for Embedded {
    fn drop(&mut self) {
        // A task that panicked returns nothing.
        if !self.task.is_finished() {
            self.leaving.0.send_modify(|n| *n += 1);
        }
    }
}

/// The state that all consumers of a broker share.
pub(super) struct House {
    pub(super) store: Database,
    pub(super) lease: Duration,
    pub(super) said: Lane<Said, bool>,
    pub(super) down: Arc<Mutex<Option<String>>>,
    pub(super) leaving: Arc<Leaving>,
    pub(super) keeper: Arc<Keeper>,
}

impl Embedded {
    pub(super) fn begin(house: House, queue: String, prefetch: u16) -> Self {
        let House { store, lease, said, down, leaving, keeper } = house;
        let unacked = Unacked::new(usize::from(prefetch.max(1)), lease);
        keeper.keep(&unacked);
        let (sender, rows) = mpsc::unbounded_channel();
        let (_stop, stopped) = watch::channel(());
        let (consumer, named) = watch::channel(None);
        let wake = store.wakes().wait_for(News::Queue(queue.clone()));
        let prefetch = usize::from(prefetch.max(1));
        let fetch = Fetch {
            store,
            queue: queue.clone(),
            consumer: named,
            prefetch,
            unacked: unacked.clone(),
            sender,
            wake,
            down,
            leaving: leaving.clone(),
        };
        let task = tokio::spawn(fetch.run(stopped));
        Self { rows, unacked, said, queue, consumer, _stop, task, leaving, _keeper: keeper }
    }

    /// The task ends only with this consumer. If it panicked, this panics too: no message would ever come, and the
    /// owner of the consumer should notice.
    async fn ended(&mut self) -> Infallible {
        match (&mut self.task).await.map_err(JoinError::try_into_panic) {
            Err(Ok(panic)) => std::panic::resume_unwind(panic),
            // The runtime ends.
            Ok(()) | Err(Err(_)) => std::future::pending().await,
        }
    }
}

impl Deliveries for Embedded {
    fn next(&mut self) -> BoxFuture<'_, Delivery> {
        Box::pin(async {
            // Without a name it uses that of its queue.
            self.consumer.send_if_modified(|name| {
                let unnamed = name.is_none();
                name.get_or_insert_with(|| self.queue.clone());
                unnamed
            });
            let Some(row) = self.rows.recv().await else { match self.ended().await {} };
            let Came { id, token, redelivered, message } = row;
            self.unacked.received((id, token));
            let (unacked, said) = (self.unacked.clone(), self.said.clone());
            let acknowledge = Box::new(Word { id, token, unacked, said, spoken: false });
            Delivery { message, redelivered, acknowledge }
        })
    }

    fn serve(&mut self, consumer: &str) {
        self.consumer.send_replace(Some(consumer.to_owned()));
    }
}

/// Acknowledges or returns a message.
struct Word {
    id: i64,
    token: i64,
    unacked: Arc<Unacked>,
    said: Lane<Said, bool>,
    spoken: bool,
}

impl Word {
    async fn say(mut self: Box<Self>, word: Said) -> Result<()> {
        self.spoken = true;
        let room = self.unacked.remove((self.id, self.token));
        let ours = self.said.call(word, size_of::<Said>()).await;
        drop(room);
        match ours? {
            true => Ok(()),
            false => Err(Error::Refused("its lease has expired, and it is delivered again".into())),
        }
    }
}

impl Acknowledge for Word {
    fn ack(self: Box<Self>) -> BoxFuture<'static, Result<()>> {
        let word = Said::Done { id: self.id, token: self.token };
        Box::pin(self.say(word))
    }

    fn requeue(self: Box<Self>) -> BoxFuture<'static, Result<()>> {
        let word = Said::NotBegun { id: self.id, token: self.token };
        Box::pin(self.say(word))
    }

    fn is_lost(&self) -> bool {
        self.unacked.is_lost((self.id, self.token))
    }
}

impl Drop for Word {
    fn drop(&mut self) {
        if !self.spoken {
            self.unacked.abandon((self.id, self.token));
        }
    }
}

/// The task.
struct Fetch {
    store: Database,
    queue: String,
    consumer: watch::Receiver<Option<String>>,
    prefetch: usize,
    unacked: Arc<Unacked>,
    sender: mpsc::UnboundedSender<Came>,
    wake: Wake,
    down: Arc<Mutex<Option<String>>>,
    leaving: Arc<Leaving>,
}

impl Fetch {
    async fn run(self, mut stopped: watch::Receiver<()>) {
        loop {
            tokio::select! {
                // The consumer is gone. Messages that are being taken are returned with the rest.
                _ = stopped.changed() => break,
                () = self.room() => {
                    // Not in the select: a take that is dropped half-way would hide its rows until their lease expires.
                    if self.take().await == 0 {
                        tokio::select! {
                            _ = stopped.changed() => break,
                            () = self.wake.woken() => {}
                            () = tokio::time::sleep(POLL) => {}
                        }
                    }
                }
            }
        }
        self.let_go().await;
        self.leaving.0.send_modify(|n| *n = n.saturating_sub(1));
    }

    /// Waits until there is room for another message, or for a few more.
    async fn room(&self) {
        let _ = self.unacked.room.acquire().await;
        let room = self.unacked.room.available_permits();
        if room < self.prefetch.div_ceil(2) && room > 0 {
            tokio::time::sleep(GATHER).await;
        }
    }

    /// Takes as many as there is room for; returns how many there were. `None` if unreadable ones could not be set
    /// aside: then a pause is due.
    async fn take(&self) -> usize {
        let room = self.unacked.room.available_permits();
        if room == 0 {
            return 0;
        }
        // Measured from before the request, so that this lease ends before the database's.
        let sent = Uptime::now();
        let taken = self.store.deliver_rows(&self.queue, room, self.unacked.lease).await;
        *self.down.lock() = taken.as_ref().err().map(ToString::to_string);
        let (rows, unread) = match taken {
            Ok(taken) => taken,
            Err(error) => {
                tracing::warn!(queue = self.queue, %error, "messages cannot be taken");
                return 0;
            }
        };
        let n = rows.len() + unread.len();
        if n > 0 {
            crash_point!("queue.taken");
        }
        for row in rows {
            // Only this task takes room, so it is still there.
            if let Ok(room) = self.unacked.room.try_acquire() {
                room.forget();
            }
            self.unacked.take((row.id, row.token), sent);
            // The consumer may be gone: then it is returned with the rest.
            let _ = self.sender.send(row);
        }
        match unread.is_empty() || self.put_aside(unread).await {
            true => n,
            false => 0,
        }
    }

    /// Sets unreadable messages aside, under the consumer's name; true if done. They take no room, so this must come
    /// before the next take: otherwise all unreadable messages would be leased at once.
    async fn put_aside(&self, unread: Vec<Unread>) -> bool {
        let mut named = self.consumer.clone();
        let consumer = named.wait_for(Option::is_some).await.ok().and_then(|name| name.clone());
        // The consumer is gone. Another one gets them when their lease expires.
        let Some(consumer) = consumer else { return false };
        match self.store.put_aside_queue(&consumer, unread).await {
            Ok(()) => true,
            Err(error) => {
                let queue = &*self.queue;
                tracing::warn!(queue, %error, "unreadable messages could not be set aside; they are taken again");
                false
            }
        }
    }

    /// Returns unacknowledged messages.
    async fn let_go(&self) {
        let rows: Vec<(i64, i64, bool)> =
            self.unacked.let_go().into_iter().map(|(id, token, received)| (id, token, !received)).collect();
        if rows.is_empty() {
            return;
        }
        if let Err(error) = self.store.requeue_rows(&rows).await {
            // Their lease expires.
            tracing::debug!(queue = self.queue, %error, "messages could not be returned to their queue");
        }
    }
}
