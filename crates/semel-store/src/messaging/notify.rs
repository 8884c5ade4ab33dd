//! Who is woken when there is something new.
//!
//! Whoever waits in this process is woken at once, after the commit. On PostgreSQL a background task tells the other
//! nodes: never in a caller's transaction (a NOTIFY in each would cost writers a third of their speed), and whatever
//! comes up while one is on its way goes with the next. A wake is a hint: those who wait also look by themselves every
//! so often, so one that is lost (a connection that broke, a pooler that knows no LISTEN) costs a moment, nothing else.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use semel::{Result, Token, messaging::Wake};
use sqlx::postgres::{PgListener, PgPoolOptions};
use tokio::{sync::Notify, task::AbortHandle};

use crate::{
    connection::broken,
    postgres::{Postgres, Seats},
};

/// What there is news of.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum News {
    /// Rows of the outbox.
    Outbox,
    /// Retries.
    Retries,
    /// Messages in a queue.
    Queue(String),
    /// Operations that may be due. Only this process is told: workers of other nodes look by themselves.
    Due,
}

impl News {
    fn text(&self) -> String {
        match self {
            Self::Outbox => "outbox".into(),
            Self::Retries => "retries".into(),
            Self::Queue(name) => format!("queue {name}"),
            Self::Due => "due".into(),
        }
    }

    fn parse(text: &str) -> Option<Self> {
        match text {
            "outbox" => Some(Self::Outbox),
            "retries" => Some(Self::Retries),
            _ => text.strip_prefix("queue ").map(|name| Self::Queue(name.to_owned())),
        }
    }
}

/// Between two notifications. The first after a pause goes at once; under load there is no point in more.
const PACE: Duration = Duration::from_millis(5);

/// Before the listener tries again to connect.
const RETRY: Duration = Duration::from_secs(1);

/// The channel. Channels are a database's, and tables a schema's.
pub(super) const CHANNEL: &str = "SELECT left('semel_' || current_schema(), 63)";

/// Tells whoever listens to it.
pub(super) const NOTIFY: &str =
    "SELECT pg_notify(left('semel_' || current_schema(), 63), t) FROM unnest($1::text[]) AS n(t)";

/// Those who wait in this process, and the way to the other nodes.
pub(crate) struct Wakes {
    waiting: Mutex<HashMap<News, Vec<Wake>>>,
    nodes: Option<Nodes>,
}

/// The other nodes, on PostgreSQL.
struct Nodes {
    seats: Arc<Seats>,
    /// Which node this is: it need not listen to itself.
    name: String,
    /// What has not been told yet.
    news: Mutex<BTreeSet<News>>,
    any: Arc<Notify>,
    teller: Mutex<Option<AbortHandle>>,
    listener: Mutex<Option<AbortHandle>>,
}

impl Wakes {
    /// Of a database that only this process writes, or where nobody can be told.
    pub(crate) fn alone() -> Arc<Self> {
        Arc::new(Self { waiting: Mutex::default(), nodes: None })
    }

    /// Of a database that can tell others.
    pub(crate) fn among_nodes(db: &Postgres) -> Arc<Self> {
        let name = Token::random().map_or([0; 16], |token| token.0).iter().map(|byte| format!("{byte:02x}")).collect();
        let nodes = Nodes {
            seats: db.messages.clone(),
            name,
            news: Mutex::default(),
            any: Arc::default(),
            teller: Mutex::default(),
            listener: Mutex::default(),
        };
        Arc::new(Self { waiting: Mutex::default(), nodes: Some(nodes) })
    }

    /// Something to wait with: each who waits has his own, so that all are woken.
    pub(crate) fn wait_for(self: &Arc<Self>, news: News) -> Wake {
        let wake = Wake::default();
        let is_of_all = news != News::Due;
        lock(&self.waiting).entry(news).or_default().push(wake.clone());
        if let Some(nodes) = self.nodes.as_ref().filter(|_| is_of_all) {
            begin(&nodes.listener, listen(Arc::downgrade(self), nodes.seats.clone(), nodes.name.clone()));
        }
        wake
    }

    /// Wakes everybody, here and on other nodes.
    pub(crate) fn tell(self: &Arc<Self>, news: News) {
        self.wake(&news);
        if let Some(nodes) = self.nodes.as_ref().filter(|_| news != News::Due) {
            lock(&nodes.news).insert(news);
            nodes.any.notify_one();
            begin(&nodes.teller, tell_nodes(Arc::downgrade(self), nodes.any.clone(), nodes.seats.clone()));
        }
    }

    /// Wakes those who wait here.
    fn wake(&self, news: &News) {
        let mut waiting = lock(&self.waiting);
        let Some(wakes) = waiting.get_mut(news) else { return };
        wakes.retain(Wake::is_shared);
        wakes.iter().for_each(Wake::wake);
        if wakes.is_empty() {
            waiting.remove(news);
        }
    }

    /// Wakes all, whatever they wait for.
    fn wake_all(&self) {
        lock(&self.waiting).values().flatten().for_each(Wake::wake);
    }
}

impl Drop for Wakes {
    fn drop(&mut self) {
        let Some(nodes) = &self.nodes else { return };
        for task in [&nodes.teller, &nodes.listener] {
            if let Some(task) = lock(task).take() {
                task.abort();
            }
        }
    }
}

/// Begins a background task, unless it runs. (Its runtime may have ended since, with all that ran in it.)
fn begin(task: &Mutex<Option<AbortHandle>>, work: impl Future<Output = ()> + Send + 'static) {
    let mut task = lock(task);
    if task.as_ref().is_some_and(|task| !task.is_finished()) {
        return;
    }
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        *task = Some(runtime.spawn(work).abort_handle());
    }
}

/// Tells other nodes what has come up: one statement at a time, with all there is.
async fn tell_nodes(wakes: Weak<Wakes>, any: Arc<Notify>, seats: Arc<Seats>) {
    loop {
        any.notified().await;
        let Some(texts) = wakes.upgrade().and_then(|wakes| wakes.untold()) else { return };
        if !texts.is_empty()
            && let Err(error) = seats.answered(notify(&seats, texts)).await
        {
            // They look by themselves before long.
            tracing::debug!(%error, "other nodes could not be notified");
        }
        tokio::time::sleep(PACE).await;
    }
}

impl Wakes {
    fn untold(&self) -> Option<Vec<String>> {
        let nodes = self.nodes.as_ref()?;
        let news = std::mem::take(&mut *lock(&nodes.news));
        Some(news.iter().map(|news| format!("{} {}", nodes.name, news.text())).collect())
    }
}

async fn notify(seats: &Arc<Seats>, texts: Vec<String>) -> Result<()> {
    let mut seat = seats.take().await?;
    sqlx::query(NOTIFY).bind(texts).execute(&mut *seat).await.map_err(broken)?;
    seat.leave();
    Ok(())
}

/// Hears what other nodes tell, on a connection of its own, for as long as the database is open.
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
    // Whatever was told before anybody listened.
    match wakes.upgrade() {
        Some(wakes) => wakes.wake_all(),
        None => return Ok(()),
    }
    loop {
        // Nothing came because the connection was lost: something may have been told meanwhile.
        let Some(told) = listener.try_recv().await? else { return Ok(()) };
        let Some(wakes) = wakes.upgrade() else { return Ok(()) };
        match told.payload().split_once(' ') {
            Some((node, _)) if node == name => {}
            Some((_, text)) => {
                if let Some(news) = News::parse(text) {
                    wakes.wake(&news);
                }
            }
            None => {}
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn news_are_understood_on_the_other_side() {
        for news in [News::Outbox, News::Retries, News::Queue("a queue".into())] {
            assert_eq!(News::parse(&news.text()), Some(news));
        }
        assert_eq!(News::parse("something of a newer version"), None);
    }
}
