//! Servers that cannot keep the guarantees.

use semel_store::{Database, Settings};
use semel_testkit::faults::Server;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_with_fsync_off_is_refused() {
    let server = Server::start("fsync = off");
    let error = Database::open(&server.url(), Settings::default()).await.err().expect("it must be refused");
    assert!(error.to_string().contains("fsync"), "{error}");
    assert!(!error.is_transient(), "trying again does not help");
}
