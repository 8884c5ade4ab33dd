//! Wakes tasks that wait for new rows.
//!
//! Tasks of this process are woken at once, after the commit. On PostgreSQL a background task notifies the other nodes:
//! never in a caller's transaction (a NOTIFY in each would cost writers a third of their speed). News that arrives
//! during a notification goes with the next. Programs that enqueue and publish by SQL have no such task: their functions
//! notify in their transaction (migration 15). A wake is a hint: waiting tasks also poll, so a lost wake (a broken
//! connection, a pooler without LISTEN) costs a moment, nothing else.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Weak},
    time::Duration,
};

use parking_lot::Mutex;
use semel::{
    Result, Scope, Token,
    machine::{Request, Write},
    messaging::Wake,
    store::{DueTeller, DueWake, LeaseWrite},
};
use sqlx::postgres::{PgListener, PgPoolOptions};
use tokio::{sync::Notify, task::AbortHandle};

use crate::{
    Database,
    connection::broken,
    postgres::{Postgres, Seats},
};

/// The types of news.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum News {
    /// Rows of the outbox.
    Outbox,
    /// Retries.
    Retries,
    /// Messages in a queue.
    Queue(String),
    /// Operations of a scope that are due, or of any that may be. A node wakes only itself, and workers of other nodes
    /// poll; those that a program enqueues by SQL wake all nodes.
    Due(Option<Scope>),
}

impl News {
    fn text(&self) -> String {
        match self {
            Self::Outbox => "outbox".into(),
            Self::Retries => "retries".into(),
            Self::Queue(name) => format!("queue {name}"),
            Self::Due(_) => "due".into(),
        }
    }

    fn parse(text: &str) -> Option<Self> {
        match text {
            "outbox" => Some(Self::Outbox),
            "retries" => Some(Self::Retries),
            "due" => Some(Self::Due(None)),
            _ => text.strip_prefix("queue ").map(|name| Self::Queue(name.to_owned())),
        }
    }
}

/// The interval between two notifications. The first after a pause is sent at once.
const PACE: Duration = Duration::from_millis(5);

/// The delay before the listener reconnects.
const RETRY: Duration = Duration::from_secs(1);

/// The prefix of the channel's name. Channels belong to a database, tables to a schema.
pub(super) const CHANNEL: &str = "SELECT left('semel_' || current_schema(), 63)";

/// Notifies the listeners of a channel.
pub(super) const NOTIFY: &str =
    "SELECT pg_notify(left('semel_' || current_schema(), 63), t) FROM unnest($1::text[]) AS n(t)";

/// The waiting tasks of this process, and the way to other nodes.
pub(crate) struct Wakes {
    waiting: Mutex<HashMap<News, Vec<Wake>>>,
    workers: Mutex<Vec<DueTeller>>,
    nodes: Option<Nodes>,
}

/// The other nodes, on PostgreSQL.
struct Nodes {
    seats: Arc<Seats>,
    /// The id of this node: it ignores its own notifications.
    name: String,
    /// News that has not been sent yet.
    news: Mutex<BTreeSet<News>>,
    any: Arc<Notify>,
    notifier: Mutex<Option<AbortHandle>>,
    listener: Mutex<Option<AbortHandle>>,
}

impl Wakes {
    /// For a database that only this process writes, or without notifications.
    pub(crate) fn alone() -> Arc<Self> {
        Arc::new(Self { waiting: Mutex::default(), workers: Mutex::default(), nodes: None })
    }

    /// For a database with notifications.
    pub(crate) fn among_nodes(db: &Postgres) -> Arc<Self> {
        let name = hex::encode(Token::random().map_or([0; 16], |token| token.0));
        let nodes = Nodes {
            seats: db.messages.clone(),
            name,
            news: Mutex::default(),
            any: Arc::default(),
            notifier: Mutex::default(),
            listener: Mutex::default(),
        };
        Arc::new(Self { waiting: Mutex::default(), workers: Mutex::default(), nodes: Some(nodes) })
    }

    /// A new waiter: each task has its own, so that all are woken.
    pub(crate) fn wait_for(self: &Arc<Self>, news: News) -> Wake {
        let wake = Wake::default();
        self.waiting.lock().entry(news).or_default().push(wake.clone());
        self.listen();
        wake
    }

    /// A new waiter for due operations.
    pub(crate) fn wait_for_due(self: &Arc<Self>) -> DueWake {
        let wake = DueWake::default();
        self.workers.lock().push(wake.teller());
        self.listen();
        wake
    }

    /// Listens for news of other nodes, and of programs that use SQL.
    fn listen(self: &Arc<Self>) {
        if let Some(nodes) = &self.nodes {
            begin(&nodes.listener, listen(Arc::downgrade(self), nodes.seats.clone(), nodes.name.clone()));
        }
    }

    /// Wakes all waiters, here and, but for due operations, on other nodes.
    pub(crate) fn wake(self: &Arc<Self>, news: News) {
        self.wake_here(&news);
        if let Some(nodes) = self.nodes.as_ref().filter(|_| !matches!(news, News::Due(_))) {
            nodes.news.lock().insert(news);
            nodes.any.notify_one();
            begin(&nodes.notifier, notify_nodes(Arc::downgrade(self), nodes.any.clone(), nodes.seats.clone()));
        }
    }

    /// Wakes the waiters here.
    fn wake_here(&self, news: &News) {
        if let News::Due(scope) = news {
            self.workers.lock().retain(|worker| worker.tell(scope.as_ref()));
            return;
        }
        let mut waiting = self.waiting.lock();
        let Some(wakes) = waiting.get_mut(news) else { return };
        wakes.retain(Wake::is_shared);
        wakes.iter().for_each(Wake::wake);
        if wakes.is_empty() {
            waiting.remove(news);
        }
    }

    /// Wakes all waiters of all kinds.
    fn wake_all(&self) {
        self.waiting.lock().values().flatten().for_each(Wake::wake);
        self.wake_here(&News::Due(None));
    }
}

impl Drop for Wakes {
    fn drop(&mut self) {
        let Some(nodes) = &self.nodes else { return };
        for task in [&nodes.notifier, &nodes.listener] {
            if let Some(task) = task.lock().take() {
                task.abort();
            }
        }
    }
}

/// Starts a background task, unless it runs. (Its runtime may have ended since, with its tasks.)
fn begin(task: &Mutex<Option<AbortHandle>>, work: impl Future<Output = ()> + Send + 'static) {
    let mut task = task.lock();
    if task.as_ref().is_some_and(|task| !task.is_finished()) {
        return;
    }
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        *task = Some(runtime.spawn(work).abort_handle());
    }
}

/// Sends news to other nodes: one statement at a time, with all there is.
async fn notify_nodes(wakes: Weak<Wakes>, any: Arc<Notify>, seats: Arc<Seats>) {
    loop {
        any.notified().await;
        let Some(texts) = wakes.upgrade().and_then(|wakes| wakes.untold()) else { return };
        if !texts.is_empty()
            && let Err(error) = seats.answered(notify(&seats, texts)).await
        {
            // They poll soon.
            tracing::debug!(%error, "other nodes could not be notified");
        }
        tokio::time::sleep(PACE).await;
    }
}

impl Wakes {
    fn untold(&self) -> Option<Vec<String>> {
        let nodes = self.nodes.as_ref()?;
        let news = std::mem::take(&mut *nodes.news.lock());
        Some(news.iter().map(|news| format!("{} {}", nodes.name, news.text())).collect())
    }
}

async fn notify(seats: &Arc<Seats>, texts: Vec<String>) -> Result<()> {
    let mut seat = seats.take().await?;
    sqlx::query(NOTIFY).bind(texts).execute(&mut *seat).await.map_err(broken)?;
    seat.leave();
    Ok(())
}

/// Receives news of other nodes, on its own connection, while the database is open.
async fn listen(wakes: Weak<Wakes>, seats: Arc<Seats>, name: String) {
    loop {
        if let Err(error) = hear(&wakes, &seats, &name).await {
            tracing::debug!(%error, "the listener lost its connection");
        }
        let Some(_) = wakes.upgrade() else { return };
        tokio::time::sleep(RETRY).await;
    }
}

async fn hear(wakes: &Weak<Wakes>, seats: &Seats, name: &str) -> Result<(), sqlx::Error> {
    let pool = PgPoolOptions::new().max_connections(1).connect_with(seats.options().clone()).await?;
    let channel: String = sqlx::query_scalar(CHANNEL).fetch_one(&pool).await?;
    let mut listener = PgListener::connect_with(&pool).await?;
    listener.eager_reconnect(false);
    listener.listen(&channel).await?;
    // News that was sent before this connection listened.
    match wakes.upgrade() {
        Some(wakes) => wakes.wake_all(),
        None => return Ok(()),
    }
    loop {
        // The connection was lost: news may have been missed.
        let Some(notification) = listener.try_recv().await? else { return Ok(()) };
        let Some(wakes) = wakes.upgrade() else { return Ok(()) };
        match notification.payload().split_once(' ') {
            Some((node, _)) if node == name => {}
            Some((_, text)) => {
                if let Some(news) = News::parse(text) {
                    wakes.wake_here(&news);
                }
            }
            None => {}
        }
    }
}

impl Database {
    /// Wakes workers of this process, if something was enqueued.
    pub(crate) fn wake_for_enqueued(&self, requests: &[Arc<Request>]) {
        let news: BTreeSet<News> = requests.iter().filter_map(|request| enqueued(request)).collect();
        news.into_iter().for_each(|news| self.wakes().wake(news));
    }

    /// Wakes workers of this process, if something may run again.
    pub(crate) fn wake_for_released(&self, writes: &[LeaseWrite]) {
        let runs_again = |write: &LeaseWrite| {
            use Write::{Fail, HandOver, PutOff, Release, Withdraw};
            matches!(write.write, Fail(_) | Release { .. } | PutOff { .. } | HandOver(_) | Withdraw)
        };
        if writes.iter().any(runs_again) {
            self.tell_due();
        }
    }

    /// Wakes workers of this process.
    pub(crate) fn tell_due(&self) {
        self.wakes().wake(News::Due(None));
    }
}

/// The news of an enqueue, if it is one. The worker looks when a delayed one is due.
pub(crate) fn enqueued(request: &Request) -> Option<News> {
    let later = request.later?;
    let is_due = later.not_before.is_none() && later.delay.is_zero();
    let scope = &request.scope;
    let listed = || Scope::new(scope.tenant(), scope.service(), &request.listed_kind()).ok();
    Some(News::Due(is_due.then(listed).flatten()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_encoded_wake_up_is_decoded_to_itself() {
        for news in [News::Outbox, News::Retries, News::Due(None), News::Queue("a queue".into())] {
            assert_eq!(News::parse(&news.text()), Some(news));
        }
        assert_eq!(News::parse("something of a newer version"), None);
    }
}
