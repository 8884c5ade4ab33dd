//! A node for tests to kill: `semel-worker DATABASE_URL EFFECTS_FILE`, see `faults::worker`.

use std::path::Path;

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [url, effects] = &arguments[..] else { panic!("semel-worker DATABASE_URL EFFECTS_FILE") };
    semel_testkit::faults::worker::serve(url, Path::new(effects)).await;
}
