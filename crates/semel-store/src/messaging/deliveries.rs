//! The messages of one embedded queue, as they come to one consumer.
//!
//! A task takes them in batches, as many as there is room for. It works beside the consumer that waits for the next
//! message: a wait may be given up at any moment, and a row that was taken in it would be lost until its lease ends.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

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
    hands::{Hands, Keeper},
    rows::Came,
    unread::Unread,
};
use crate::Database;

/// How often to look without being woken: for what others have let lapse, and for wakes that were lost.
const POLL: Duration = Duration::from_secs(1);

/// How long a broker that closes waits for what is being put back.
const LEAVE: Duration = Duration::from_secs(5);

/// How long to wait for more room while the consumer has something to do: a batch costs little more than a single one.
const GATHER: Duration = Duration::from_millis(1);

/// The messages of one queue.
pub(super) struct Embedded {
    rows: mpsc::UnboundedReceiver<Came>,
    hands: Arc<Hands>,
    said: Lane<Said, bool>,
    queue: String,
    /// Who reads it. Unknown until the consumer has said its name, or asks for a message without having said one.
    consumer: watch::Sender<Option<String>>,
    /// Dropped with the rest, and so ends the task.
    _stop: watch::Sender<()>,
    task: JoinHandle<()>,
    leaving: Arc<Leaving>,
    /// Renews what is in hand for as long as it is there.
    _keeper: Arc<Keeper>,
}

/// How many consumers are gone whose messages have not been put back yet.
pub(super) struct Leaving(watch::Sender<usize>);

impl Default for Leaving {
    fn default() -> Self {
        Self(watch::Sender::new(0))
    }
}

impl Leaving {
    /// Waits until there are none; not for ever, for the messages come again in any case.
    pub(super) async fn ended(&self) {
        let mut leaving = self.0.subscribe();
        let _ = tokio::time::timeout(LEAVE, leaving.wait_for(|n| *n == 0)).await;
    }
}

impl Drop for Embedded {
    fn drop(&mut self) {
        // A task that panicked puts nothing back.
        if !self.task.is_finished() {
            self.leaving.0.send_modify(|n| *n += 1);
        }
    }
}

/// What all consumers of a broker have in common.
pub(super) struct House {
    pub(super) store: Database,
    pub(super) visibility: Duration,
    pub(super) said: Lane<Said, bool>,
    pub(super) down: Arc<Mutex<Option<String>>>,
    pub(super) leaving: Arc<Leaving>,
    pub(super) keeper: Arc<Keeper>,
}

impl Embedded {
    pub(super) fn begin(house: House, queue: String, prefetch: u16) -> Self {
        let House { store, visibility, said, down, leaving, keeper } = house;
        let hands = Hands::new(usize::from(prefetch.max(1)), visibility);
        keeper.keep(&hands);
        let (sender, rows) = mpsc::unbounded_channel();
        let (_stop, stopped) = watch::channel(());
        let (consumer, named) = watch::channel(None);
        let wake = store.messages().wakes.wait_for(News::Queue(queue.clone()));
        let prefetch = usize::from(prefetch.max(1));
        let fetch = Fetch {
            store,
            queue: queue.clone(),
            consumer: named,
            prefetch,
            hands: hands.clone(),
            sender,
            wake,
            down,
            leaving: leaving.clone(),
        };
        let task = tokio::spawn(fetch.run(stopped));
        Self { rows, hands, said, queue, consumer, _stop, task, leaving, _keeper: keeper }
    }

    /// The task ends only with us. If it panicked, so do we: nothing would ever come any more, and whoever keeps the
    /// consumer should know.
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
            // One that has not said a name is known by its queue's.
            self.consumer.send_if_modified(|name| {
                let unnamed = name.is_none();
                name.get_or_insert_with(|| self.queue.clone());
                unnamed
            });
            let Some(row) = self.rows.recv().await else { match self.ended().await {} };
            let Came { id, token, redelivered, message } = row;
            self.hands.hand((id, token));
            let (hands, said) = (self.hands.clone(), self.said.clone());
            let acknowledge = Box::new(Word { id, token, hands, said, spoken: false });
            Delivery { message, redelivered, acknowledge }
        })
    }

    fn serve(&mut self, consumer: &str) {
        self.consumer.send_replace(Some(consumer.to_owned()));
    }
}

/// How a consumer says what became of a message.
struct Word {
    id: i64,
    token: i64,
    hands: Arc<Hands>,
    said: Lane<Said, bool>,
    spoken: bool,
}

impl Word {
    async fn say(mut self: Box<Self>, word: Said) -> Result<()> {
        self.spoken = true;
        let room = self.hands.remove((self.id, self.token));
        let ours = self.said.call(word, size_of::<Said>()).await;
        drop(room);
        match ours? {
            true => Ok(()),
            false => Err(Error::Refused("its lease had ended, and it is delivered again".into())),
        }
    }
}

impl Acknowledge for Word {
    fn ack(self: Box<Self>) -> BoxFuture<'static, Result<()>> {
        let word = Said::Done { id: self.id, token: self.token };
        Box::pin(self.say(word))
    }

    fn put_back(self: Box<Self>) -> BoxFuture<'static, Result<()>> {
        let word = Said::NotBegun { id: self.id, token: self.token };
        Box::pin(self.say(word))
    }

    fn is_lost(&self) -> bool {
        self.hands.is_lost((self.id, self.token))
    }
}

impl Drop for Word {
    fn drop(&mut self) {
        if !self.spoken {
            self.hands.abandon((self.id, self.token));
        }
    }
}

/// The task.
struct Fetch {
    store: Database,
    queue: String,
    consumer: watch::Receiver<Option<String>>,
    prefetch: usize,
    hands: Arc<Hands>,
    sender: mpsc::UnboundedSender<Came>,
    wake: Wake,
    down: Arc<Mutex<Option<String>>>,
    leaving: Arc<Leaving>,
}

impl Fetch {
    async fn run(self, mut stopped: watch::Receiver<()>) {
        loop {
            tokio::select! {
                // Its other end is gone. What is being taken has been taken: it is put back with the rest.
                _ = stopped.changed() => break,
                () = self.room() => {
                    // Not in the select: a taking that is dropped half-way would hide its rows from everybody.
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
        let _ = self.hands.room.acquire().await;
        let room = self.hands.room.available_permits();
        if room < self.prefetch.div_ceil(2) && room > 0 {
            tokio::time::sleep(GATHER).await;
        }
    }

    /// Takes what there is room for; how many there were. None, if what could not be read could not be put aside: then a
    /// pause is due.
    async fn take(&self) -> usize {
        let room = self.hands.room.available_permits();
        if room == 0 {
            return 0;
        }
        // Counted from before it is sent, so that our lease ends before the database's.
        let sent = Uptime::now();
        let taken = self.store.deliver_rows(&self.queue, room, self.hands.visibility).await;
        *self.down.lock().unwrap_or_else(PoisonError::into_inner) = taken.as_ref().err().map(ToString::to_string);
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
            // Only this task takes room, so there is what was there before.
            if let Ok(room) = self.hands.room.try_acquire() {
                room.forget();
            }
            self.hands.take((row.id, row.token), sent);
            // Nobody may be there to have it any more: then it is put back with the rest.
            let _ = self.sender.send(row);
        }
        match unread.is_empty() || self.put_aside(unread).await {
            true => n,
            false => 0,
        }
    }

    /// Puts aside what was taken and cannot be read, under the consumer's name; whether that is done. It takes no room, so
    /// it must be done before the next messages are taken: otherwise all that cannot be read would be leased at once.
    async fn put_aside(&self, unread: Vec<Unread>) -> bool {
        let mut named = self.consumer.clone();
        let consumer = named.wait_for(Option::is_some).await.ok().and_then(|name| name.clone());
        // The consumer is gone. They come to another one when their lease has ended.
        let Some(consumer) = consumer else { return false };
        match self.store.put_aside_queue(&consumer, unread).await {
            Ok(()) => true,
            Err(error) => {
                let queue = &*self.queue;
                tracing::warn!(queue, %error, "messages that cannot be read could not be put aside; they come again");
                false
            }
        }
    }

    /// Gives back what is not acknowledged.
    async fn let_go(&self) {
        let rows: Vec<(i64, i64, bool)> =
            self.hands.let_go().into_iter().map(|(id, token, handed)| (id, token, !handed)).collect();
        if rows.is_empty() {
            return;
        }
        if let Err(error) = self.store.put_back_rows(&rows).await {
            // Their time ends by itself.
            tracing::debug!(queue = self.queue, %error, "messages could not be put back");
        }
    }
}
