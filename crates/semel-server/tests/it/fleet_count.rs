//! The expected results, whatever happened on the way: counted in the database itself.

use std::{
    collections::BTreeMap,
    thread,
    time::{Duration, Instant},
};

use serde_json::json;
use sqlx::{AssertSqlSafe, ConnectOptions as _, postgres::PgConnectOptions, sqlite::SqliteConnectOptions};

use crate::{
    fleet::{Fleet, IN_TIME, ask, stop},
    support::Server,
};

impl Fleet {
    /// Waits until nothing is in flight, and counts: every expected notification exists, none twice, and nothing is
    /// left over. The servers are stopped; one of them answers requests.
    pub(crate) fn all_is_well(&self, servers: Vec<Server>) {
        self.until("everything has arrived", |fleet| fleet.is_quiet());
        self.api_agrees(&servers[0]);
        servers.into_iter().for_each(stop);
        self.counts();
        if self.rabbitmq.is_some() {
            assert_eq!(self.queued(), 0, "nothing is left in the queues");
        }
    }

    /// The count, without waiting.
    pub(crate) fn counts(&self) {
        let (mut notifications, mut fanouts, mut events) = (Vec::new(), Vec::new(), Vec::new());
        for (event, group) in &*self.events.lock().unwrap() {
            let audience: Vec<_> = self.audience.iter().filter(|(its, ..)| its == group).collect();
            for (_, user, channels) in &audience {
                let one = |channel| format!("{event}/restaurant/{user}/{channel}");
                notifications.extend(channels.iter().map(one));
            }
            let wanted: usize = audience.iter().map(|(.., channels)| channels.len()).sum();
            fanouts.push(format!("{event}/restaurant/{}/{wanted}", audience.len()));
            events.push(event.clone());
        }
        // As lists: one that is there twice is one too many.
        let sorted = |mut list: Vec<String>| {
            list.sort_unstable();
            list
        };
        let there = "SELECT event_id || '/' || kind || '/' || user_id || '/' || notification_type FROM notifications";
        same("notifications", &sorted(self.texts(there)), &sorted(notifications));
        let there = "SELECT event_id || '/' || kind || '/' || recipients || '/' || notifications
                     FROM notification_fanouts WHERE done_at IS NOT NULL";
        same("fan-outs that are done", &sorted(self.texts(there)), &sorted(fanouts));
        let there = self.texts("SELECT event_id FROM notification_events");
        same("events", &sorted(there), &sorted(events));
        let in_app = self.count("notifications WHERE notification_type = 'IN_APP' AND status <> 'SENT'");
        assert_eq!(in_app, 0, "what is for the app has its place in the stream");
        for table in ["semel_outbox", "semel_queue", "semel_retries"] {
            assert_eq!(self.count(table), 0, "{table}");
        }
        assert_eq!(self.count("semel_dead_letters"), self.dead, "{:?}", self.reasons());
    }

    /// The reasons of dead letters.
    pub(crate) fn reasons(&self) -> Vec<String> {
        self.texts("SELECT reason FROM semel_dead_letters ORDER BY reason")
    }

    /// Both levels of every event are done, by the service's own answers.
    fn api_agrees(&self, api: &Server) {
        let wanted: BTreeMap<u64, usize> =
            self.audience.iter().fold(BTreeMap::new(), |mut sums, (group, _, channels)| {
                *sums.entry(*group).or_default() += channels.len();
                sums
            });
        for (event, group) in &*self.events.lock().unwrap() {
            let answer = ask(api.address, "GET", &format!("/events/{event}"), "").unwrap();
            assert_eq!(answer.status, 200, "{event}: {}", answer.body);
            let shown = answer.json();
            assert_eq!(
                (&shown["outbox"]["status"], &shown["processedEvent"]["status"]),
                (&json!("PROCESSED"), &json!("SUCCESS"))
            );
            let kind = &shown["kinds"][0];
            let wanted = wanted.get(group).copied().unwrap_or_default();
            assert_eq!((&kind["listenerDone"], &kind["notifications"]), (&json!(true), &json!(wanted)), "{event}");
        }
    }

    /// Whether every event is done and nothing is in flight.
    fn is_quiet(&self) -> bool {
        let sent = self.events.lock().unwrap().len();
        self.count("notification_fanouts WHERE done_at IS NOT NULL") >= sent
            && ["semel_outbox", "semel_queue", "semel_retries"].iter().all(|table| self.count(table) == 0)
            && self.count("semel_dead_letters") >= self.dead
            && self.count("notifications WHERE notification_type = 'IN_APP' AND status <> 'SENT'") == 0
            && (self.rabbitmq.is_none() || self.queued() == 0)
    }

    /// Polls until it holds; on a timeout, shows the state.
    pub(crate) fn until(&self, what: &str, mut holds: impl FnMut(&Self) -> bool) {
        let end = Instant::now() + IN_TIME;
        while !holds(self) {
            assert!(Instant::now() < end, "not in time: {what}; {}", self.told());
            thread::sleep(Duration::from_millis(30));
        }
    }

    fn told(&self) -> String {
        let counts =
            ["notifications", "notification_fanouts WHERE done_at IS NULL", "semel_queue", "semel_dead_letters"];
        let counts: Vec<_> = counts.map(|from| format!("{from}: {}", self.count(from))).into();
        let outbox = self.texts("SELECT state || ' ' || count(*) FROM semel_outbox GROUP BY state");
        let retries = "SELECT consumer || ': failures ' || failures || ', starts ' || starts || ', ' || reason
                       FROM semel_retries LIMIT 5";
        let (retries, queued) = (self.texts(retries), self.rabbitmq.as_ref().map(|_| self.queued()));
        format!("{counts:?}, outbox {outbox:?}, retries {retries:?}, RabbitMQ {queued:?}, dead {:?}", self.reasons())
    }

    pub(crate) fn count(&self, from: &str) -> usize {
        self.texts(&format!("SELECT CAST(count(*) AS TEXT) FROM {from}"))[0].parse().unwrap()
    }

    /// What a query finds, as texts.
    pub(crate) fn texts(&self, sql: &str) -> Vec<String> {
        let sql = AssertSqlSafe(sql.to_owned());
        self.runtime.block_on(async {
            match self.place.url.strip_prefix("sqlite:") {
                Some(path) => {
                    let options = SqliteConnectOptions::new().filename(path).busy_timeout(IN_TIME);
                    sqlx::query_scalar(sql).fetch_all(&mut options.connect().await.unwrap()).await.unwrap()
                }
                None => {
                    let options: PgConnectOptions = self.place.url.parse().unwrap();
                    sqlx::query_scalar(sql).fetch_all(&mut options.connect().await.unwrap()).await.unwrap()
                }
            }
        })
    }
}

/// Two sorted lists are the same; if not, the difference, not both of them.
fn same(what: &str, there: &[String], wanted: &[String]) {
    if there == wanted {
        return;
    }
    let missing: Vec<_> = wanted.iter().filter(|one| there.binary_search(one).is_err()).take(10).collect();
    let unwanted: Vec<_> = there.iter().filter(|one| wanted.binary_search(one).is_err()).take(10).collect();
    let twice: Vec<_> = there.windows(2).filter(|two| two[0] == two[1]).map(|two| &two[0]).take(10).collect();
    panic!("{what}: {} of {}; missing {missing:?}, unwanted {unwanted:?}, twice {twice:?}", there.len(), wanted.len());
}
