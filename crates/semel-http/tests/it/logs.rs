//! Keys, bodies and credentials are not logged.

use std::{
    io,
    sync::{Arc, Mutex},
};

use semel_http::Route;
use semel_testkit::Kind;

use crate::{
    client::{keyed, post},
    shop::{Shop, on_both_databases},
};

on_both_databases!(keys_bodies_and_credentials_are_not_logged);

/// Records the log.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

async fn keys_bodies_and_credentials_are_not_logged(kind: Kind) {
    let log = Log::default();
    let written = log.clone();
    // Under nextest each test is a process. Otherwise only the first test has a log, and the other ends here.
    let made = tracing_subscriber::fmt().with_max_level(tracing::Level::TRACE).with_ansi(false);
    if made.with_writer(move || written.clone()).try_init().is_err() {
        return;
    }
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::atomic()).await;
    let key = "secret-key";
    let ask = || post("/orders").key(key).body("secret-body").header("Authorization", "Bearer secret-token");
    client.send(&ask().header("X-Panic", "1")).await.is_problem(500, "internal");
    client.send(&ask()).await.is_problem(409, "backing-off");
    shop.lab.pass(crate::shop::secs(1));
    assert_eq!(client.send(&ask()).await.status, 201);
    assert!(client.send(&ask()).await.is_replay());
    client.send(&ask().body("other")).await.is_problem(422, "payload-mismatch");
    client.send(&keyed("secret-key, b")).await.is_problem(400, "key-invalid");
    shop.ledger.stop(std::time::Duration::ZERO).await;
    client.send(&ask()).await.is_problem(503, "store-unavailable");
    let log = String::from_utf8_lossy(&log.0.lock().unwrap()).into_owned();
    assert!(log.contains("could not be executed"), "something is logged: {log}");
    let told: Vec<&str> = log.lines().filter(|line| line.contains("secret-") && !is_of_hyper(line)).collect();
    assert!(told.is_empty(), "{told:#?}");
}

/// hyper traces raw bytes itself; those lines are excluded.
fn is_of_hyper(line: &str) -> bool {
    line.contains("hyper::")
}
