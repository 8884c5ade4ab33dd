//! What the tests of messages, jobs and deliveries share: database access from outside, and requests.

use std::{
    fmt::Display,
    net::{SocketAddr, TcpStream},
    process::Command,
};

use bytes::Bytes;
use semel::{
    Fingerprint,
    messaging::{Message, NewLetter, Received, Retry},
    prelude::*,
    store::Commit,
};
use semel_store::{Database, Settings};
use serde_json::Value;
use sqlx::{
    AssertSqlSafe, ConnectOptions as _, Executor as _, postgres::PgConnectOptions, sqlite::SqliteConnectOptions,
};
use tokio::runtime::Runtime;

use crate::{
    place::Place,
    support::{Answer, SOON, Server, eventually, send},
};

/// A place's database, opened by the test itself.
pub(crate) struct Desk {
    runtime: Runtime,
    pub(crate) database: Database,
}

impl Desk {
    pub(crate) fn at(place: &Place) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let database = runtime.block_on(Database::open(&place.url, Settings::default())).unwrap();
        Self { runtime, database }
    }

    pub(crate) fn block<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime.block_on(work)
    }

    /// Writes a message to the outbox, in its own transaction.
    pub(crate) fn put(&self, message: Message) {
        self.block(async {
            let tx = self.database.begin(SOON).await.unwrap();
            self.database.put(&tx, vec![message]).await.unwrap();
            assert!(matches!(self.database.commit(&tx).await, Commit::Done));
        });
    }

    /// Adds a dead letter.
    pub(crate) fn dead(&self, letter: NewLetter) {
        self.block(self.database.put_letter(letter)).unwrap();
    }
}

/// A letter of the consumer `mail`, with its own body.
pub(crate) fn letter(key: &str) -> NewLetter {
    let body = Bytes::from(format!("{{\"key\":\"{key}\"}}"));
    NewLetter {
        tenant: "default".to_owned(),
        consumer: "mail".to_owned(),
        key: key.to_owned(),
        fingerprint: Fingerprint::of_bytes(&body),
        message: Received {
            id: Some(format!("id-{key}")),
            tenant: Some("default".to_owned()),
            queue: "mail.out".to_owned(),
            kind: "mail".to_owned(),
            body,
            headers: [("colour".to_owned(), "red".to_owned())].into(),
            number: Some(7),
            put_at: None,
            origin: None,
        },
        failures: 10,
        reason: "the mailbox is full".to_owned(),
        retry: Retry::Dead,
    }
}

/// A server on a place's database.
pub(crate) fn serve(place: &Place, roles: &str, variables: &[(&str, &str)]) -> Server {
    let mut command: Command = place.semel(["serve", "--listen", "127.0.0.1:0", "--roles", roles]);
    Server::start_with(command.envs(variables.iter().copied()))
}

pub(crate) fn post(server: &Server, path: &str, body: &str) -> Answer {
    post_to(server.address, path, &[], body)
}

pub(crate) fn post_to(address: SocketAddr, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
    let mut connection = TcpStream::connect(address).unwrap();
    let all = [&[("host", "localhost"), ("content-type", "application/json")], headers].concat();
    send(&mut connection, "POST", path, &all, body.as_bytes());
    Answer::read(connection)
}

/// The JSON at a path that must exist.
pub(crate) fn shown(server: &Server, path: &str) -> Value {
    let answer = server.get(path);
    assert_eq!(answer.status, 200, "{path}: {}", answer.body);
    answer.json()
}

/// The values of a member, on all pages of a list.
pub(crate) fn listed(server: &Server, path: &str, member: &str) -> Vec<Value> {
    let mark = if path.contains('?') { '&' } else { '?' };
    let (mut all, mut page) = (Vec::new(), shown(server, path));
    loop {
        all.extend(page["items"].as_array().unwrap().iter().map(|item| item[member].clone()));
        match page["next"].as_str() {
            Some(next) => page = shown(server, &format!("{path}{mark}cursor={next}")),
            None => return all,
        }
    }
}

/// Waits until a job has ended; the job.
pub(crate) fn ended(server: &Server, id: impl Display) -> Value {
    let path = format!("/jobs/{id}");
    eventually(SOON, "the job ends", || shown(server, &path)["state"] != "running");
    shown(server, &path)
}

/// Runs a statement on a place's database.
pub(crate) fn execute(place: &Place, sql: &str) {
    let sql = AssertSqlSafe(sql.to_owned());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        match place.url.strip_prefix("sqlite:") {
            Some(path) => {
                let options = SqliteConnectOptions::new().filename(path).busy_timeout(SOON);
                options.connect().await.unwrap().execute(sql).await.unwrap();
            }
            None => {
                let options: PgConnectOptions = place.url.parse().unwrap();
                options.connect().await.unwrap().execute(sql).await.unwrap();
            }
        }
    });
}
