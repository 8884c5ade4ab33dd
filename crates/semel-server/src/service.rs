//! A service is one value with everything that the server needs to know about it.
//!
//! The server is a list of services ([`ALL`](crate::services::ALL)) and a fold over it: the configuration, the problem
//! pages, the OpenAPI document, the migrations and the tasks of a node are gathered from the list. Adding a service
//! adds its folder and one line there.

use std::{any::Any, collections::BTreeMap, fmt, sync::Arc, time::Duration};

use axum::Router;
use semel::{
    Kind, Ledger, Schedule,
    messaging::{Broker, Queue},
};
use semel_http::BoxFuture;
use semel_store::{Database, Projection};
use tokio::sync::watch;

use crate::{
    config::{Config, NodeRole, Reader},
    http::problem,
    jobs::{JobKind, Jobs},
    view::Telling,
};

/// A service, before it is opened.
pub struct Service {
    /// Its name: the service in the scopes of its operations.
    pub name: &'static str,
    /// Reads its section of the configuration.
    pub(crate) section: Option<ReadsSection>,
    /// The problems that only its routes answer with.
    pub problems: &'static [&'static problem::Kind],
    /// Its parts of `/openapi.json`.
    pub openapi: &'static [&'static str],
    /// How its operations are described to people.
    pub telling: Telling,
    /// Its tables.
    pub migrations: &'static [Migration],
    /// Rows of its tables that follow its operations.
    pub projections: &'static [Projection],
    /// The lists of its SQL, one per file: a test prepares every statement on both databases.
    #[cfg(test)]
    pub(crate) statements: &'static [fn() -> Vec<crate::sql::Statement>],
    /// Opens it on a ledger. Its tables are up to date.
    pub open: for<'a> fn(&'a Parts<'a>) -> BoxFuture<'a, semel::Result<Opened>>,
}

/// Reads the section of a service.
pub(crate) type ReadsSection = fn(&mut Reader<'_>) -> Arc<dyn Section>;

/// A migration, for both databases. Its name begins with its number, which is unique among all services.
pub struct Migration {
    /// `NUMBER_what_it_does`
    pub name: &'static str,
    /// For PostgreSQL.
    pub postgres: &'static str,
    /// For SQLite.
    pub sqlite: &'static str,
}

/// The migrations of these names, from the folder `migrations` beside the calling file.
macro_rules! migrations {
    ($($name:literal),* $(,)?) => {
        &[$($crate::service::Migration {
            name: $name,
            postgres: include_str!(concat!("migrations/postgres/", $name, ".sql")),
            sqlite: include_str!(concat!("migrations/sqlite/", $name, ".sql")),
        }),*]
    };
}
pub(crate) use migrations;

/// The parts of the server that a service is opened with.
pub struct Parts<'a> {
    /// The ledger, and the database below it.
    pub ledger: &'a Ledger<Database>,
    /// The broker of its messages.
    pub broker: Arc<dyn Broker>,
    /// The whole configuration; a service reads its own section of it.
    pub config: &'a Config,
    /// Enqueues background jobs.
    pub jobs: &'a Jobs,
}

/// The parts that an open service adds to its node.
#[derive(Default)]
pub struct Opened {
    /// Routes for authenticated callers: each request has a principal.
    pub routes: Router,
    /// Routes without authentication: their requests are signed.
    pub signed: Router,
    /// The queues that its messages need.
    pub queues: Vec<Queue>,
    /// The work of the worker for it.
    pub kinds: Vec<Kind<Database>>,
    /// Its schedules, which the worker enqueues.
    pub schedules: Vec<Schedule>,
    /// Its background jobs.
    pub jobs: Vec<Arc<dyn JobKind>>,
    /// Its other tasks on a node.
    pub tasks: Vec<Task>,
    /// Its own part of the sweep, on nodes with the role sweeper.
    pub sweeps: Vec<Sweep>,
}

/// The time limit of a round. Each does bounded work: one takes longer only if a file system or a database hangs.
pub(crate) const LONGEST_ROUND: Duration = Duration::from_secs(300);

/// A service's part of the sweep. It must be safe on any number of nodes at the same time, and lose nothing if a round is
/// ended early.
pub struct Sweep {
    /// Its name in the log if it fails.
    pub name: &'static str,
    /// One round.
    pub run: Box<dyn Fn() -> BoxFuture<'static, semel::Result<()>> + Send + Sync>,
}

impl Sweep {
    /// A part of the sweep.
    pub fn new<Fut>(name: &'static str, run: impl Fn() -> Fut + Send + Sync + 'static) -> Self
    where
        Fut: Future<Output = semel::Result<()>> + Send + 'static,
    {
        Self { name, run: Box::new(move || Box::pin(run())) }
    }

    /// Runs its rounds until the receiver turns true. In a task of its own: one that fails or hangs delays no other.
    pub(crate) async fn run_every(self, every: Duration, longest: Duration, mut stop: watch::Receiver<bool>) {
        loop {
            let round = async {
                tokio::time::sleep(every).await;
                tokio::time::timeout(longest, (self.run)()).await
            };
            let why = tokio::select! {
                biased;
                // A dropped sender counts as a stop request.
                _ = stop.wait_for(|stop| *stop) => return,
                ended = round => match ended {
                    Ok(Ok(())) => continue,
                    Ok(Err(error)) => error.to_string(),
                    Err(_) => format!("it took more than {longest:?}"),
                },
            };
            tracing::warn!(error = why, sweep = self.name, "a service's part of the sweep failed; it is tried again");
        }
    }
}

/// A task that runs until the node stops.
pub struct Task {
    /// Its name in the log if it ends early.
    pub name: &'static str,
    /// A node runs it if it has one of these roles.
    pub roles: &'static [NodeRole],
    /// Whether it consumes messages: it starts when the queues exist.
    pub consumes: bool,
    /// Runs it until the receiver turns true.
    pub run: Box<dyn FnOnce(watch::Receiver<bool>) -> BoxFuture<'static, ()> + Send>,
}

impl Task {
    /// A task for nodes with one of these roles.
    pub fn new<Fut>(
        name: &'static str,
        roles: &'static [NodeRole],
        run: impl FnOnce(watch::Receiver<bool>) -> Fut + Send + 'static,
    ) -> Self
    where
        Fut: Future<Output = ()> + Send + 'static,
    {
        Self { name, roles, consumes: false, run: Box::new(move |stop| Box::pin(run(stop))) }
    }

    /// The same task, started when the queues exist.
    pub fn consuming(self) -> Self {
        Self { consumes: true, ..self }
    }
}

/// The section of a service in the configuration.
pub trait Section: Any + fmt::Debug + Send + Sync {}

impl<T: Any + fmt::Debug + Send + Sync> Section for T {}

/// The sections of all services, each found by its type.
#[derive(Clone, Debug, Default)]
pub struct Sections(BTreeMap<&'static str, Arc<dyn Section>>);

impl Sections {
    pub(crate) fn insert(&mut self, service: &'static str, section: Arc<dyn Section>) {
        self.0.insert(service, section);
    }

    /// The section of this type, or its default if it was not read.
    #[must_use]
    pub fn get<T: Section + Clone + Default>(&self) -> T {
        let mut all = self.0.values().map(|section| &**section as &dyn Any);
        all.find_map(|section| section.downcast_ref::<T>()).cloned().unwrap_or_default()
    }

    /// Changes the section of this type.
    pub(crate) fn change<T: Section + Clone + Default>(&mut self, change: impl FnOnce(T) -> T) {
        for section in self.0.values_mut() {
            if let Some(former) = (&**section as &dyn Any).downcast_ref::<T>().cloned() {
                *section = Arc::new(change(former));
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{future::pending, sync::atomic::AtomicUsize, sync::atomic::Ordering::SeqCst};

    use super::*;

    #[tokio::test]
    async fn a_round_of_a_sweep_that_hangs_or_fails_is_followed_by_another() {
        for hangs in [true, false] {
            let (rounds, stop) = (Arc::new(AtomicUsize::new(0)), watch::Sender::new(false));
            let (begun, stopping) = (rounds.clone(), stop.subscribe());
            let sweep = Sweep::new("test", move || {
                let (begun, stop) = (begun.clone(), stop.clone());
                async move {
                    // The third round hangs, and is ended by the stop.
                    if begun.fetch_add(1, SeqCst) == 2 {
                        stop.send_replace(true);
                        pending::<()>().await;
                    }
                    if hangs {
                        pending::<()>().await;
                    }
                    Err(semel::Error::Unavailable("away".into()))
                }
            });
            sweep.run_every(Duration::ZERO, Duration::from_millis(5), stopping).await;
            assert_eq!(rounds.load(SeqCst), 3);
        }
    }

    #[test]
    fn a_section_is_found_and_changed_by_its_type() {
        let mut sections = Sections::default();
        sections.insert("numbers", Arc::new(1_u32));
        sections.insert("words", Arc::new("one".to_owned()));
        sections.change(|n: u32| n + 1);
        assert_eq!((sections.get::<u32>(), sections.get::<String>()), (2, "one".to_owned()));
        assert_eq!(sections.get::<u64>(), 0, "what was not read is as it is by default");
    }
}
