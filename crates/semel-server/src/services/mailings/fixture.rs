//! The service on a SQLite database of its own, for unit tests.

use bytes::Bytes;
use futures_util::stream;
use semel_testkit::{Kind, Lab};
use tempfile::TempDir;

use super::{Service, check::Texts, upload::Upload};
use crate::{
    config::{self, Environment, Flags},
    http::fields::Wrong,
    services,
};

/// Dropped with the service's database and files.
pub(super) struct Fixture {
    pub(super) service: Service,
    _lab: Lab,
    _dir: TempDir,
}

impl Fixture {
    pub(super) async fn new() -> Self {
        let (lab, dir) = (Lab::new(Kind::Sqlite).await, tempfile::tempdir().unwrap());
        let ledger = lab.ledger().await;
        services::migrate(ledger.store()).await.unwrap();
        let report = config::read(&Flags::default(), &Environment::default(), dir.path());
        let service = Service::open(&ledger, report.config().unwrap()).unwrap();
        Self { service, _lab: lab, _dir: dir }
    }

    /// A list that was received.
    pub(super) async fn upload(&self, list: &'static str) -> Upload {
        let (staged, first) =
            self.service.store(stream::iter([Ok(Bytes::from_static(list.as_bytes()))])).await.unwrap();
        let texts = Texts { filename: Some("a.csv".to_owned()), ..Texts::default() };
        self.service.accept(staged, &first, texts, Wrong::default()).await.unwrap()
    }
}
