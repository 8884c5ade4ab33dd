//! The laws of the server and its ledger.

use rustix::process::Signal;

use crate::{
    place::Place,
    support::{SOON, Server, eventually, semel, stderr},
    wire::Wire,
};

#[test]
fn a_server_whose_database_goes_away_is_not_ready_until_it_is_back() {
    let place = Place::postgres();
    let mut wire = Wire::to_postgres();
    let url = wire.url(&place.url);
    let server = Server::start_with(semel().args(["serve", "--listen", "127.0.0.1:0", "--database-url", &url]));
    assert_eq!(server.get("/readyz").status, 200);
    wire.cut();
    let ready = server.get("/readyz");
    let expected =
        serde_json::json!({ "ready": false, "database": "does not answer", "broker": "embedded", "degraded": [] });
    assert_eq!((ready.status, ready.json()), (503, expected));
    assert_eq!(server.get("/healthz").status, 200);
    wire.mend();
    eventually(SOON, "the server is ready again", || server.get("/readyz").status == 200);
}

#[test]
fn a_database_that_cannot_be_opened_is_reported_in_one_line() {
    let url = "postgres://ana:geheim@127.0.0.1:1/x";
    let output = semel().args(["serve", "--listen", "127.0.0.1:0", "--database-url", url]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let told = stderr(&output);
    assert_eq!(told.lines().count(), 1, "{told}");
    assert!(told.starts_with("semel: cannot open the ledger in postgres://ana:***@127.0.0.1:1/x: "), "{told}");
}

#[test]
fn the_sweeper_ends_the_lease_of_a_killed_process() {
    for place in [Place::sqlite(), Place::postgres()] {
        let (mut process, _) = place.start_gated("k", &["--lease", "1s", "--on-lost", "hold"]);
        process.signal(Signal::KILL);
        process.end();
        let mut command = place.semel(["serve", "--listen", "127.0.0.1:0", "--roles", "sweeper"]);
        let _server = Server::start_with(command.env("SEMEL_SWEEP_EVERY", "100ms"));
        eventually(SOON, "the sweep finds it", || place.state("k") == "in_doubt");
    }
}
