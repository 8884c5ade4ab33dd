//! A private database for one test.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use semel::{Fingerprint, Key, Labels, Ledger, Options, Policy, Scope, Timestamp, Token, Work, machine::Request};
use semel_store::{Clock, Conn, Database, Settings, on};
use sqlx::{
    AssertSqlSafe, Connection as _, PgConnection, SqliteConnection, postgres::PgConnectOptions,
    sqlite::SqliteConnectOptions,
};

/// Which database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A SQLite file.
    Sqlite,
    /// A schema on the PostgreSQL server of `SEMEL_TEST_POSTGRES_URL`.
    Postgres,
}

/// A fresh database, removed when the lab is dropped.
pub struct Lab {
    /// Its URL.
    pub url: String,
    /// Its clock, which stands still until the test moves it.
    pub clock: Clock,
    kind: Kind,
    scratch: Scratch,
}

enum Scratch {
    Folder(#[expect(dead_code, reason = "it goes with the lab")] tempfile::TempDir),
    Schema { server: String, name: String },
}

/// The address of the PostgreSQL server to test with.
///
/// # Panics
/// If there is none: a missing server fails the tests, it does not skip them.
#[must_use]
pub fn postgres_server() -> String {
    #[expect(clippy::expect_used, reason = "tests must not be skipped silently")]
    std::env::var("SEMEL_TEST_POSTGRES_URL").expect(
        "SEMEL_TEST_POSTGRES_URL is not set: run the tests with `make test`, or under `scripts/postgres.sh run`",
    )
}

#[expect(clippy::unwrap_used, reason = "a test that cannot set up its database fails")]
impl Lab {
    /// Noon of a past day: far from the real time, so that a statement without the test's clock is detected.
    pub const START: Timestamp = Timestamp::from_micros(1_600_000_000_000_000);

    /// A fresh database with a manual clock.
    pub async fn new(kind: Kind) -> Self {
        Self::with_clock(kind, Clock::manual(Self::START)).await
    }

    /// A fresh database with the real clock.
    pub async fn in_real_time(kind: Kind) -> Self {
        Self::with_clock(kind, Clock::default()).await
    }

    /// A role whose default schema is the lab's, for programs without connection options. PostgreSQL only.
    pub async fn guest(&self) -> Guest {
        let Scratch::Schema { server, name } = &self.scratch else { panic!("SQLite has no roles") };
        let role = format!("{name}_guest");
        let mut conn = PgConnection::connect(server).await.unwrap();
        let create = format!(
            "CREATE ROLE {role} LOGIN; GRANT ALL ON SCHEMA {name} TO {role}; ALTER ROLE {role} SET search_path = {name}"
        );
        sqlx::raw_sql(AssertSqlSafe(create)).execute(&mut conn).await.unwrap();
        let (scheme, rest) = server.split_once("://").unwrap();
        let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
        Guest { url: format!("{scheme}://{role}@{host}"), role, server: server.clone() }
    }

    async fn with_clock(kind: Kind, clock: Clock) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let (url, scratch) = match kind {
            Kind::Sqlite => {
                let folder = tempfile::Builder::new().prefix("semel-").tempdir().unwrap();
                (format!("sqlite:{}/ledger.db", folder.path().display()), Scratch::Folder(folder))
            }
            Kind::Postgres => {
                let server = postgres_server();
                let number = NUMBER.fetch_add(1, Ordering::Relaxed);
                let name = format!("lab_{}_{number}_{}", std::process::id(), fastrand_suffix());
                let mut conn = PgConnection::connect(&server).await.unwrap();
                let create = format!("CREATE SCHEMA {name}");
                sqlx::query(sqlx::AssertSqlSafe(create)).execute(&mut conn).await.unwrap();
                let mark = if server.contains('?') { '&' } else { '?' };
                let url = format!("{server}{mark}options=-csearch_path%3D{name}");
                (url, Scratch::Schema { server, name })
            }
        };
        Self { url, clock, kind, scratch }
    }

    /// Which database it is.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The same lab with the real clock. Nothing may have been opened yet.
    #[must_use]
    pub fn with_real_clock(mut self) -> Self {
        self.clock = Clock::default();
        self
    }

    /// The settings of [`Lab::open`].
    #[must_use]
    pub fn settings(&self) -> Settings {
        Settings { clock: self.clock.clone(), ..Settings::default() }
    }

    /// Opens the database: each call is another node.
    pub async fn open(&self) -> Database {
        Database::open(&self.url, self.settings()).await.unwrap()
    }

    /// A ledger on the database: each call is another node.
    pub async fn ledger(&self) -> Ledger<Database> {
        self.ledger_of("node").await
    }

    /// A ledger of a node with this name.
    pub async fn ledger_of(&self, owner: &str) -> Ledger<Database> {
        let options = Options { owner: owner.to_owned(), ..Options::default() };
        Ledger::new(self.open().await, options).unwrap()
    }

    /// Runs a statement without the store, as a person at the database's prompt.
    ///
    /// # Errors
    /// Errors of the database.
    pub async fn execute(&self, sql: &str) -> Result<u64, sqlx::Error> {
        let mut conn = self.connect().await?;
        let sql = AssertSqlSafe(sql);
        on!(conn.conn(), c => sqlx::query(sql).execute(c).await.map(|done| done.rows_affected()))
    }

    /// The first column of a query, as text, likewise.
    pub async fn texts(&self, sql: &str) -> Vec<String> {
        let mut conn = self.connect().await.unwrap();
        let sql = AssertSqlSafe(sql);
        on!(conn.conn(), c => sqlx::query_scalar(sql).fetch_all(c).await.unwrap())
    }

    /// The single number of a query, likewise.
    pub async fn number(&self, sql: &str) -> i64 {
        let mut conn = self.connect().await.unwrap();
        let sql = AssertSqlSafe(sql);
        on!(conn.conn(), c => sqlx::query_scalar(sql).fetch_one(c).await.unwrap())
    }

    async fn connect(&self) -> Result<Prompt, sqlx::Error> {
        Ok(match self.url.strip_prefix("sqlite:") {
            Some(path) => {
                Prompt::Sqlite(SqliteConnection::connect_with(&SqliteConnectOptions::new().filename(path)).await?)
            }
            None => {
                // Some poolers do not know that setting.
                let options = self.url.parse::<PgConnectOptions>()?.extra_float_digits(None);
                Prompt::Postgres(PgConnection::connect_with(&options).await?)
            }
        })
    }

    /// Lets time pass.
    pub fn pass(&self, time: Duration) {
        self.clock.advance(time);
    }
}

/// A connection without the store.
enum Prompt {
    Postgres(PgConnection),
    Sqlite(SqliteConnection),
}

impl Prompt {
    fn conn(&mut self) -> Conn<'_> {
        match self {
            Self::Postgres(conn) => Conn::Postgres(conn),
            Self::Sqlite(conn) => Conn::Sqlite(conn),
        }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        let Scratch::Schema { server, name } = &self.scratch else { return };
        clean_up(server.clone(), format!("SET lock_timeout = '2s'; DROP SCHEMA {name} CASCADE"));
    }
}

/// A role with a lab's schema, removed when this is dropped.
pub struct Guest {
    /// Its URL.
    pub url: String,
    role: String,
    server: String,
}

impl Drop for Guest {
    fn drop(&mut self) {
        let role = &self.role;
        let drop = format!("SET lock_timeout = '2s'; DROP OWNED BY {role} CASCADE; DROP ROLE {role}");
        clean_up(self.server.clone(), drop);
    }
}

/// In a thread with its own runtime: a drop cannot wait, and the test's runtime may be gone.
fn clean_up(server: String, sql: String) {
    let done = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
        runtime.block_on(async {
            let mut conn = PgConnection::connect(&server).await.ok()?;
            sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut conn).await.ok()
        })
    });
    let _ = done.join();
}

fn fastrand_suffix() -> String {
    let token = Token::random().map_or([0; 16], |token| token.0);
    hex::encode(&token[..4])
}

/// The scope of the suite.
#[must_use]
#[expect(clippy::unwrap_used, reason = "it is constant")]
pub fn scope() -> Scope {
    Scope::new("acme", "bank", "transfer").unwrap()
}

/// A key.
#[must_use]
#[expect(clippy::unwrap_used, reason = "tests use good keys")]
pub fn key(text: &str) -> Key {
    Key::new(text).unwrap()
}

/// Work under a key with the same text as payload, and a policy.
#[must_use]
pub fn work(text: &str, policy: Policy) -> Work {
    work_with(text, text, policy)
}

/// Work under a key, with another payload.
#[must_use]
pub fn work_with(text: &str, payload: &str, policy: Policy) -> Work {
    Work::new(scope(), key(text), Fingerprint::of_bytes(payload.as_bytes())).policy(policy)
}

/// A claim as the store gets it.
#[must_use]
#[expect(clippy::unwrap_used, reason = "tests have randomness")]
pub fn request(text: &str, payload: &[u8], policy: Policy) -> Request {
    Request {
        scope: scope(),
        key: key(text),
        fingerprint: Fingerprint::of_bytes(payload),
        order: None,
        payload: None,
        labels: Labels::default(),
        policy,
        at_once: false,
        later: None,
        lease: None,
        token: Token::random().unwrap(),
        sent_again: false,
        owner: "somebody".into(),
    }
}
