//! The embedded broker passes the broker's conformance suite.
#![expect(clippy::unwrap_used, reason = "these are tests")]

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use semel::messaging::{BoxFuture, Broker};
use semel_store::EmbeddedBroker;
use semel_testkit::{Kind, Lab, conformance::brokers::BrokerLab};

semel_testkit::broker_suite!(sqlite, EmbeddedLab::new(Kind::Sqlite));
semel_testkit::broker_suite!(postgres, EmbeddedLab::new(Kind::Postgres));

/// A database; every opening of it is one more node.
struct EmbeddedLab {
    lab: Lab,
    names: AtomicU32,
}

impl EmbeddedLab {
    async fn new(kind: Kind) -> Self {
        Self { lab: Lab::in_real_time(kind).await, names: AtomicU32::new(0) }
    }
}

impl BrokerLab for EmbeddedLab {
    fn broker(&self) -> BoxFuture<'_, Arc<dyn Broker>> {
        Box::pin(async { Arc::new(EmbeddedBroker::new(self.lab.open().await)) as Arc<dyn Broker> })
    }

    fn name(&self) -> String {
        format!("queue.{}", self.names.fetch_add(1, Ordering::Relaxed))
    }

    /// For a broker, a database without its table is unusable.
    fn cut(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            self.lab.execute("ALTER TABLE semel_queue RENAME TO semel_queue_away").await.unwrap();
        })
    }

    fn mend(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            self.lab.execute("ALTER TABLE semel_queue_away RENAME TO semel_queue").await.unwrap();
        })
    }

    async fn end(self) {}
}
