//! The laws of the log during an outage of the database.

use std::{process::Command, thread, time::Duration};

use semel_testkit::faults::Server as Postgres;

use crate::{
    hooks::{command, deliver, event, status},
    place::Place,
    proposals::call,
    serve_faults::{ALL, log, logged},
    support::{Server, eventually},
};

/// A PostgreSQL that was killed first replays its log.
const LATE: Duration = Duration::from_secs(60);

/// The lines of the log from some place on, without the lines of every minute, because a busy machine may take some,
/// and without those about the event's message, which is unroutable here.
fn lines(place: &Place, from: usize) -> Vec<String> {
    let others = ["still cannot be used", "no queue takes"];
    let is_meant = |line: &&str| !others.iter().any(|other| line.contains(other));
    log(place)[from..].lines().filter(is_meant).map(str::to_owned).collect()
}

#[test]
fn a_database_outage_is_logged_once_at_its_start_and_once_at_its_end() {
    let postgres = Postgres::start("");
    let place = Place::at(postgres.url());
    let mut serve: Command = command(&place, ALL, &[("SEMEL_SWEEP_EVERY", "500ms"), ("SEMEL_MESSAGES_POLL", "200ms")]);
    logged(&mut serve, &place);
    let server = Server::start_with(&mut serve);
    assert_eq!(status(&deliver(&server, &event("evt_1", 100, "one"))), "processed");
    let before = log(&place).len();
    postgres.crash();
    // Every part of the server retries meanwhile, and so do callers and probes.
    for _ in 0..3 {
        assert_eq!(server.get("/readyz").status, 503);
        let answer =
            call(server.address, "POST", "/clientes", Some("k-1"), r#"{"nome":"Ana","email":"a@example.com"}"#)
                .unwrap();
        assert_eq!(answer.status, 503, "{answer:?} {:?}", lines(&place, before));
        assert_eq!(deliver(&server, &event("evt_2", 100, "two")).status, 503);
        thread::sleep(Duration::from_millis(500));
    }
    let away = lines(&place, before);
    assert_eq!(away.len(), 1, "{away:#?}");
    assert!(away[0].contains("WARN") && away[0].contains("the database cannot be used"), "{away:?}");
    postgres.restart();
    eventually(LATE, "the server is ready again", || server.get("/readyz").status == 200);
    let mut answer = None;
    eventually(LATE, "the event is taken", || {
        let delivered = deliver(&server, &event("evt_2", 100, "two"));
        let is_taken = delivered.status == 200;
        answer = Some(delivered);
        is_taken
    });
    assert_eq!(status(&answer.unwrap()), "processed");
    // A server that has just started may be unreachable once more: that is another outage.
    eventually(LATE, "the log says so", || matches!(lines(&place, before).len(), 2 | 4));
    let all = lines(&place, before);
    assert!(matches!(all.len(), 2 | 4), "{all:#?}");
    for outage in all.chunks(2) {
        assert!(outage[0].contains("WARN") && outage[0].contains("the database cannot be used"), "{all:?}");
        assert!(outage[1].contains("INFO") && outage[1].contains("can be used again"), "{all:?}");
        assert!(outage[1].contains("lines_left_out="), "{all:?}");
    }
}
