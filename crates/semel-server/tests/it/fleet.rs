//! Several real servers on one database and one broker, and their traffic. `fleet_count` counts the results,
//! `fleet_queues` has the queues as another program sees them.

use std::{
    collections::BTreeMap,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    os::unix::process::ExitStatusExt as _,
    process::Stdio,
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use semel_testkit::faults::Vhost;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::{
    notifications::of_restaurant,
    place::Place,
    support::{Answer, SOON, Server},
};

/// Runs each law with each database and each broker.
macro_rules! on_every_fleet {
    ($($law:ident)+) => {
        mod sqlite {
            $(#[test] fn $law() { super::$law(&mut crate::fleet::Fleet::sqlite()) })+
        }
        mod postgres {
            $(#[test] fn $law() { super::$law(&mut crate::fleet::Fleet::postgres()) })+
        }
        mod postgres_rabbitmq {
            $(#[test] fn $law() { super::$law(&mut crate::fleet::Fleet::postgres_rabbitmq()) })+
        }
    };
}
pub(crate) use on_every_fleet;

/// Every role.
pub(crate) const ALL: &str = "api,relay,worker,sweeper";

/// The leases of a dead node expire soon. They are long enough for a busy machine: a living node renews them.
const SHORT_LEASES: [(&str, &str); 4] = [
    ("SEMEL_MESSAGES_RELAY_LEASE", "2s"),
    ("SEMEL_MESSAGES_VISIBILITY", "2s"),
    ("SEMEL_MESSAGES_RETRY_LEASE", "2s"),
    ("SEMEL_MESSAGES_POLL", "200ms"),
];

/// How long a fleet may take until everything has arrived.
pub(crate) const IN_TIME: Duration = Duration::from_secs(60);

/// The recipients in each group, and their channels.
pub(crate) const AUDIENCE: [(&str, [&str; 2]); 3] =
    [("ana", ["PUSH", "EMAIL"]), ("bo", ["PUSH", "IN_APP"]), ("cy", ["SMS", "IN_APP"])];

/// As many ordering keys as there are groups.
pub(crate) const GROUPS: u64 = 4;

/// Servers, and what they were given to do.
pub(crate) struct Fleet {
    pub(crate) place: Place,
    pub(crate) runtime: Runtime,
    /// The broker as the servers know it, and, if it is RabbitMQ, as the test does.
    pub(crate) broker: String,
    pub(crate) rabbitmq: Option<String>,
    /// Dropped with the fleet.
    _vhost: Option<Vhost>,
    /// All recipients: kind, group, user, channels.
    pub(crate) audience: Vec<(u64, String, Vec<String>)>,
    /// Every event that was sent, and the group that it is about.
    pub(crate) events: Mutex<BTreeMap<String, u64>>,
    /// How many dead letters there must be in the end.
    pub(crate) dead: usize,
}

impl Fleet {
    pub(crate) fn sqlite() -> Self {
        Self::on(Place::sqlite(), None)
    }

    pub(crate) fn postgres() -> Self {
        Self::on(Place::postgres(), None)
    }

    pub(crate) fn postgres_rabbitmq() -> Self {
        Self::on(Place::postgres(), Some(Vhost::new()))
    }

    pub(crate) fn sqlite_rabbitmq() -> Self {
        Self::on(Place::sqlite(), Some(Vhost::new()))
    }

    fn on(place: Place, vhost: Option<Vhost>) -> Self {
        let url = vhost.as_ref().map(|vhost| vhost.url().to_owned());
        Self { _vhost: vhost, ..Self::with(place, url) }
    }

    /// On a RabbitMQ of this URL, or on the embedded broker.
    pub(crate) fn with(place: Place, rabbitmq: Option<String>) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        Self {
            place,
            runtime,
            broker: rabbitmq.clone().unwrap_or_else(|| "embedded".to_owned()),
            rabbitmq,
            _vhost: None,
            audience: Vec::new(),
            events: Mutex::default(),
            dead: 0,
        }
    }

    /// Starts a server with short leases. Points that it reaches are noted in the file `points`.
    pub(crate) fn start(&self, roles: &str, variables: &[(&str, &str)]) -> Server {
        self.start_as_it_is(roles, &[&SHORT_LEASES, variables].concat())
    }

    /// Starts a server with the default leases.
    pub(crate) fn start_as_it_is(&self, roles: &str, variables: &[(&str, &str)]) -> Server {
        let mut command = self.place.semel(["serve", "--listen", "127.0.0.1:0", "--roles", roles]);
        command
            .env("SEMEL_BROKER_URL", &self.broker)
            .env("SEMEL_CRASH_LOG", self.place.path("points"))
            .envs(variables.iter().copied())
            // Quiet by default; the log can be turned on.
            .env("RUST_LOG", std::env::var("RUST_LOG").unwrap_or_else(|_| "warn".to_owned()))
            .stderr(Stdio::inherit());
        Server::start_with(&mut command)
    }

    /// Starts a server that dies at a point.
    pub(crate) fn start_dying(&self, roles: &str, point: &str, variables: &[(&str, &str)]) -> Server {
        let _ = std::fs::remove_file(self.place.path("points"));
        self.start(roles, &[&[("SEMEL_CRASH", point)], variables].concat())
    }

    /// Waits until a server has died at a point. A run that never reached the point shows nothing, and fails.
    pub(crate) fn died_at(&self, point: &str, server: &mut Server) {
        let status = server.process.end();
        assert_eq!(status.signal(), Some(Signal::KILL.as_raw()), "{point}: {status}");
        let name = point.split(':').next().unwrap();
        assert!(self.place.lines("points").iter().any(|line| line == name), "{point} was never reached");
    }

    /// Fills the directory: the same people in every group.
    pub(crate) fn invite(&mut self, api: &Server) {
        for group in 1..=GROUPS {
            for (user, channels) in AUDIENCE {
                self.invite_one(api, group, &format!("{user}{group}"), &channels);
            }
        }
    }

    pub(crate) fn invite_one(&mut self, api: &Server, group: u64, user: &str, channels: &[&str]) {
        let body = json!({ "groupId": group.to_string(), "channels": channels }).to_string();
        let put = ask(api.address, "PUT", &format!("/recipients/restaurant/{user}"), &body).unwrap();
        assert_eq!(put.status, 200, "{}", put.body);
        self.audience.push((group, user.to_owned(), channels.iter().map(|channel| (*channel).to_owned()).collect()));
    }

    /// Sends events once, all in one request; returns whether they were accepted. If not, they may still be stored, and
    /// must be sent again.
    pub(crate) fn try_send(&self, address: SocketAddr, events: &[(String, u64)]) -> bool {
        self.events.lock().unwrap().extend(events.iter().cloned());
        let body: Vec<Value> = events.iter().map(|(id, group)| of_restaurant(id, *group)).collect();
        ask(address, "POST", "/events", &Value::Array(body).to_string()).is_some_and(|answer| answer.status == 202)
    }

    /// Sends events until they are accepted.
    pub(crate) fn send(&self, address: SocketAddr, events: &[(String, u64)]) {
        let end = Instant::now() + SOON;
        while !self.try_send(address, events) {
            assert!(Instant::now() < end, "events are not accepted");
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// So many events, spread over the groups.
pub(crate) fn events(name: &str, n: usize) -> Vec<(String, u64)> {
    let event = |(i, group)| (format!("{name}-{i}"), group);
    (0..n).zip((1..=GROUPS).cycle()).map(event).collect()
}

/// Stops a server; it must stop in time, and report no problem.
pub(crate) fn stop(mut server: Server) {
    server.process.signal(Signal::TERM);
    let status = server.process.end();
    assert_eq!(status.code(), Some(0), "{status}");
}

/// A request, and its answer if the server lived to give one.
pub(crate) fn ask(address: SocketAddr, method: &str, path: &str, body: &str) -> Option<Answer> {
    let mut connection = TcpStream::connect(address).ok()?;
    let length = body.len();
    let text = format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    );
    connection.write_all(text.as_bytes()).ok()?;
    connection.set_read_timeout(Some(SOON)).ok()?;
    let mut text = String::new();
    connection.read_to_string(&mut text).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some(Answer { status, head: head.to_ascii_lowercase(), body: body.to_owned() })
}
