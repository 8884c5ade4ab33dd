//! The open streams of this node. One read of the database serves all of them.

use std::{collections::HashMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use semel::crash_point;
use semel_store::Database;
use tokio::sync::{Notify, watch};

use super::{model::Kind, tables::notifications};

/// The poll interval without a wake-up: another node may have added to the stream.
const POLL: Duration = Duration::from_secs(1);

/// Tenant, kind and user.
type Who = (String, String, String);

/// The streams that are open.
pub(super) struct Feed {
    open: Mutex<Open>,
    /// How many streams a tenant may have.
    most: usize,
    /// Wakes the reader.
    look: Notify,
    /// Turns true when all streams must end.
    ended: watch::Sender<bool>,
}

#[derive(Default)]
struct Open {
    streams: HashMap<Who, Vec<Arc<Notify>>>,
    by_tenant: HashMap<String, usize>,
}

/// A seat of an open stream.
pub(super) struct Seat {
    feed: Arc<Feed>,
    who: Who,
    news: Arc<Notify>,
    ended: watch::Receiver<bool>,
}

impl Feed {
    pub(super) fn new(most: usize) -> Arc<Self> {
        let (look, ended) = (Notify::new(), watch::Sender::new(false));
        Arc::new(Self { open: Mutex::default(), most, look, ended })
    }

    /// Wakes the reader: there may be news.
    pub(super) fn look(&self) {
        self.look.notify_one();
    }

    /// Ends all streams.
    pub(super) fn end(&self) {
        self.ended.send_replace(true);
    }

    /// Takes a seat, unless the tenant has as many as allowed.
    pub(super) fn join(self: &Arc<Self>, tenant: &str, kind: Kind, user_id: &str) -> Option<Seat> {
        let (who, news) = ((tenant.to_owned(), kind.name().to_owned(), user_id.to_owned()), Arc::new(Notify::new()));
        {
            let mut open = self.open.lock();
            let count = open.by_tenant.entry(tenant.to_owned()).or_default();
            if *count >= self.most {
                return None;
            }
            *count += 1;
            open.streams.entry(who.clone()).or_default().push(news.clone());
        }
        self.look();
        Some(Seat { feed: self.clone(), who, news, ended: self.ended.subscribe() })
    }

    fn is_empty(&self) -> bool {
        self.open.lock().streams.is_empty()
    }

    fn wake_all(&self) {
        let open = self.open.lock();
        open.streams.values().flatten().for_each(|news| news.notify_one());
    }

    fn wake(&self, who: &[Who]) {
        let open = self.open.lock();
        who.iter().filter_map(|who| open.streams.get(who)).flatten().for_each(|news| news.notify_one());
    }

    /// Reads news until all streams must end.
    pub(super) async fn work(self: Arc<Self>, database: Database) {
        let mut ended = self.ended.subscribe();
        // The last position that was read.
        let mut last = None;
        loop {
            if self.is_empty() {
                last = None;
            } else if let Err(error) = self.round(&database, &mut last).await {
                tracing::debug!(%error, "the streams could not be read; the next round tries again");
            }
            let idle = self.is_empty();
            tokio::select! {
                () = self.look.notified() => {}
                () = tokio::time::sleep(POLL), if !idle => {}
                _ = ended.wait_for(|ended| *ended) => return,
            }
        }
    }

    async fn round(&self, database: &Database, last: &mut Option<i64>) -> semel::Result<()> {
        let seen = *last;
        let look = database.read(async |conn| {
            let place = notifications::last_place(conn).await?;
            let news = match seen {
                Some(seen) if seen < place => notifications::who_has_news(conn, seen, place).await?,
                _ => Vec::new(),
            };
            Ok((place, news))
        });
        let (place, news) = look.await?;
        match seen {
            Some(_) => self.wake(&news),
            // The first read after a pause does not know what arrived meanwhile: every stream reads for itself.
            None => self.wake_all(),
        }
        crash_point!("streams.looked");
        *last = Some(place);
        Ok(())
    }
}

impl Seat {
    /// Waits for news, at most for `most`; `false` if the stream must end.
    pub(super) async fn wait(&mut self, most: Duration) -> bool {
        tokio::select! {
            () = self.news.notified() => true,
            () = tokio::time::sleep(most) => true,
            _ = self.ended.wait_for(|ended| *ended) => false,
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        *self.ended.borrow()
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut open = self.feed.open.lock();
        if let Some(streams) = open.streams.get_mut(&self.who) {
            streams.retain(|news| !Arc::ptr_eq(news, &self.news));
            if streams.is_empty() {
                open.streams.remove(&self.who);
            }
        }
        if let Some(count) = open.by_tenant.get_mut(&self.who.0) {
            *count -= 1;
            if *count == 0 {
                open.by_tenant.remove(&self.who.0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_streams_of_a_tenant_are_limited_and_ended_ones_make_room() {
        let feed = Feed::new(2);
        let first = feed.join("a", Kind::Admin, "1").unwrap();
        let second = feed.join("a", Kind::Admin, "1").unwrap();
        assert!(feed.join("a", Kind::Customer, "2").is_none());
        assert!(feed.join("b", Kind::Admin, "1").is_some(), "another tenant");
        drop(first);
        let third = feed.join("a", Kind::Customer, "2").unwrap();
        drop((second, third));
        assert!(feed.is_empty() && feed.open.lock().by_tenant.is_empty());
    }

    #[tokio::test]
    async fn a_wake_up_reaches_only_the_streams_of_its_user() {
        let feed = Feed::new(10);
        let (mut mine, mut other) =
            (feed.join("a", Kind::Admin, "1").unwrap(), feed.join("a", Kind::Admin, "2").unwrap());
        feed.wake(&[("a".to_owned(), "admin".to_owned(), "1".to_owned())]);
        let long = Duration::from_secs(600);
        assert!(mine.wait(long).await);
        feed.end();
        assert!(!other.wait(long).await);
    }
}
