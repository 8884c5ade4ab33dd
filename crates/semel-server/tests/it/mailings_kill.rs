//! Mailings whose nodes are killed: nobody gets two mails under never-twice, and nobody is missing where the transport
//! can find out. What truly arrived is counted by a separate SMTP server, or in the directory of files.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    thread,
    time::{Duration, Instant},
};

use semel_testkit::{faults::torture, smtp::SmtpSink};
use serde_json::Value;

use crate::{
    fleet::{ALL, Fleet, ask},
    support::{SOON, Server, eventually},
};

/// The connections of a node: so many mails may be in doubt after a kill.
const CONNECTIONS: usize = 16;

/// How long a mailing may take, even one of the long version on a busy machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(240);

pub(crate) const SHORT: [(&str, &str); 3] =
    [("SEMEL_MAILINGS_LEASE", "2s"), ("SEMEL_MAILINGS_BACKOFF", "1s"), ("SEMEL_SWEEP_EVERY", "500ms")];

/// Slow enough that every kill meets a mailing under way.
const RATE: (&str, &str) = ("SEMEL_MAILINGS_RATE", "1000/s");

/// How many addresses, and how many kills.
fn size() -> (usize, usize) {
    if torture() { (20_000, 20) } else { (2_500, 3) }
}

/// Uploads a list until a server answers; returns the id of the mailing.
pub(crate) fn upload(address: SocketAddr, filename: &str, list: &str) -> Option<String> {
    let mut body = String::new();
    for (name, value) in
        [("subject", "Hi {{ name }}"), ("body", "Hello {{ name }}"), ("from", "News <news@example.com>")]
    {
        body += &format!("--b\r\ncontent-disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n");
    }
    body += &format!(
        "--b\r\ncontent-disposition: form-data; name=\"file\"; filename=\"{filename}\"\r\n\r\n{list}\r\n--b--\r\n"
    );
    let mut connection = TcpStream::connect(address).ok()?;
    let head = format!(
        "POST /mailings HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\
         content-type: multipart/form-data; boundary=b\r\n\r\n",
        body.len()
    );
    connection.write_all(head.as_bytes()).ok()?;
    connection.write_all(body.as_bytes()).ok()?;
    connection.set_read_timeout(Some(SOON)).ok()?;
    let mut text = String::new();
    connection.read_to_string(&mut text).ok()?;
    let (_, body) = text.split_once("\r\n\r\n")?;
    let answer: Value = serde_json::from_str(body).ok()?;
    Some(answer["mailingId"].as_str()?.to_owned())
}

pub(crate) fn list(n: usize) -> String {
    (0..n).fold("email,name\n".to_owned(), |list, i| list + &format!("user{i}@example.com,User {i}\n"))
}

pub(crate) fn shown(address: SocketAddr, id: &str) -> Option<Value> {
    let answer = ask(address, "GET", &format!("/mailings/{id}"), "").filter(|answer| answer.status == 200)?;
    Some(answer.json())
}

pub(crate) fn count(mailing: &Value, name: &str) -> usize {
    usize::try_from(mailing["counts"][name].as_u64().unwrap()).unwrap()
}

/// Kills a working node again and again; returns the mailing when it is over, or only waits for decisions.
fn killed_again_and_again(fleet: &Fleet, variables: &[(&str, &str)], addresses: usize, kills: usize) -> Value {
    let variables = [&SHORT[..], &[RATE], variables].concat();
    let api = fleet.start("api,relay,sweeper", &variables);
    let id = upload(api.address, "list.csv", &list(addresses)).unwrap();
    let mut workers: Vec<Server> = (0..2).map(|_| fleet.start("worker", &variables)).collect();
    let mut random = fastrand::Rng::new();
    let end = Instant::now() + LIMIT;
    for _ in 0..kills {
        // At a random moment of the sending.
        let before = shown(api.address, &id).map_or(0, |mailing| count(&mailing, "sent"));
        eventually(LIMIT, "mails are being sent", || {
            shown(api.address, &id).is_some_and(|mailing| count(&mailing, "sent") > before)
        });
        thread::sleep(Duration::from_millis(random.u64(0..200)));
        assert!(!is_over(&shown(api.address, &id).unwrap()), "the mailing was over before all kills");
        let killed = random.usize(0..workers.len());
        workers.remove(killed).process.0.kill().unwrap();
        workers.push(fleet.start("worker", &variables));
    }
    let mut last = Value::Null;
    while Instant::now() < end {
        if let Some(mailing) = shown(api.address, &id) {
            last = mailing;
            if is_over(&last) {
                return last;
            }
        }
        thread::sleep(Duration::from_millis(200));
    }
    panic!("not over in time: {last}");
}

pub(crate) fn is_over(mailing: &Value) -> bool {
    mailing["status"] == "COMPLETED" || mailing["waitingFor"] == "decision"
}

/// Counts always add up.
pub(crate) fn check_counts(mailing: &Value, total: usize) {
    let names = ["pending", "sending", "sent", "failed", "invalid", "suppressed", "cancelled", "inDoubt"];
    let sum: usize = names.iter().map(|name| count(mailing, name)).sum();
    assert_eq!((sum, count(mailing, "total")), (total, total), "{mailing}");
}

/// The counts are those of the entries. For a mailing that rests: the test reads one after the other.
pub(crate) fn check_entries(fleet: &Fleet, mailing: &Value) {
    let id = mailing["mailingId"].as_str().unwrap();
    let entries = fleet.texts(&format!(
        "SELECT e.status || ' ' || count(*) FROM mailing_entries AS e JOIN mailings AS m ON m.number = e.mailing
         WHERE m.id = '{id}' GROUP BY e.status ORDER BY e.status"
    ));
    let statuses = [
        ("CANCELLED", "cancelled"),
        ("FAILED", "failed"),
        ("INVALID", "invalid"),
        ("IN_DOUBT", "inDoubt"),
        ("PENDING", "pending"),
        ("SENDING", "sending"),
        ("SENT", "sent"),
        ("SUPPRESSED", "suppressed"),
    ];
    let counts = statuses.map(|(status, name)| (status, count(mailing, name)));
    let counts = counts.iter().filter(|(_, n)| *n > 0).map(|(status, n)| format!("{status} {n}"));
    assert_eq!(counts.collect::<Vec<_>>(), entries, "{mailing}");
}

#[test]
fn nobody_gets_two_mails_by_smtp_when_workers_are_killed() {
    let fleet = Fleet::postgres_rabbitmq();
    let sink = fleet.runtime.block_on(SmtpSink::start());
    let (addresses, kills) = size();
    let mailing = killed_again_and_again(&fleet, &[("SEMEL_MAIL_TRANSPORT", &sink.url())], addresses, kills);
    check_counts(&mailing, addresses);
    check_entries(&fleet, &mailing);
    let arrived = sink.count_by_recipient();
    let twice: Vec<_> = arrived.iter().filter(|(_, mails)| **mails > 1).collect();
    assert!(twice.is_empty(), "{twice:?}");
    let in_doubt = count(&mailing, "inDoubt");
    assert!(in_doubt <= kills * CONNECTIONS, "{in_doubt} are in doubt after {kills} kills");
    assert_eq!(count(&mailing, "sent") + in_doubt, addresses, "{mailing}");
    // What is said to be sent has arrived.
    let sent = fleet.texts("SELECT email FROM mailing_entries WHERE status = 'SENT'");
    let missing: Vec<_> = sent.iter().filter(|email| !arrived.contains_key(*email)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

fn by_file(fleet: &Fleet) {
    let (addresses, kills) = size();
    let mail = fleet.place.path("mail");
    std::fs::create_dir(&mail).unwrap();
    let transport = format!("file:{}", mail.display());
    let mailing = killed_again_and_again(fleet, &[("SEMEL_MAIL_TRANSPORT", &transport)], addresses, kills);
    check_counts(&mailing, addresses);
    check_entries(fleet, &mailing);
    assert_eq!((mailing["status"].as_str(), count(&mailing, "sent")), (Some("COMPLETED"), addresses), "{mailing}");
    let files = std::fs::read_dir(&mail).unwrap().flatten();
    let mails = files.filter(|file| file.file_name().to_string_lossy().ends_with(".eml")).count();
    assert_eq!(mails, addresses);
}

#[test]
fn everybody_gets_one_file_when_workers_are_killed_on_postgres() {
    by_file(&Fleet::postgres_rabbitmq());
}

#[test]
fn everybody_gets_one_file_when_workers_are_killed_on_sqlite() {
    by_file(&Fleet::sqlite());
}

/// Where a node dies, and on which occasion.
const POINTS: [&str; 9] = [
    "mailing.stored",
    "mailing.committed",
    "mailing.begun",
    "mailing.importing_batch",
    "mailing.imported_batch",
    "mailing.marked:2",
    "mailing.sent:3",
    "step.before_commit:3",
    "mailing.finishing",
];

/// A node dies at a point; after its restart the same upload and the same mailing end well.
fn dies(fleet: &Fleet, point: &str) {
    let mail = fleet.place.path("mail");
    std::fs::create_dir(&mail).unwrap();
    let transport = format!("file:{}", mail.display());
    let variables = [&SHORT[..], &[("SEMEL_MAIL_TRANSPORT", transport.as_str())]].concat();
    let list = list(100);
    let mut server = fleet.start_dying(ALL, point, &variables);
    upload(server.address, "list.csv", &list);
    fleet.died_at(point, &mut server);
    let server = fleet.start(ALL, &variables);
    let id = upload(server.address, "list.csv", &list).unwrap();
    eventually(LIMIT, "the mailing is completed", || shown(server.address, &id).is_some_and(|m| is_over(&m)));
    let mailing = shown(server.address, &id).unwrap();
    check_counts(&mailing, 100);
    check_entries(fleet, &mailing);
    assert_eq!((mailing["status"].as_str(), count(&mailing, "sent")), (Some("COMPLETED"), 100), "{point}: {mailing}");
    let all = ask(server.address, "GET", "/mailings", "").unwrap().json();
    assert_eq!(all["items"].as_array().unwrap().len(), 1, "{point}: one mailing, however often it is uploaded");
    assert_eq!(
        std::fs::read_dir(&mail)
            .unwrap()
            .flatten()
            .filter(|f| f.path().extension().is_some_and(|e| e == "eml"))
            .count(),
        100
    );
}

fn at_each(fleet: fn() -> Fleet) {
    for points in POINTS.chunks(5) {
        thread::scope(|scope| {
            for point in points {
                thread::Builder::new()
                    .name((*point).to_owned())
                    .spawn_scoped(scope, move || dies(&fleet(), point))
                    .unwrap();
            }
        });
    }
}

#[test]
fn a_node_dies_at_every_point_on_sqlite() {
    at_each(Fleet::sqlite);
}

#[test]
fn a_node_dies_at_every_point_on_postgres_and_rabbitmq() {
    at_each(Fleet::postgres_rabbitmq);
}

#[test]
fn every_point_of_mailings_has_a_node_that_dies_there() {
    let named: Vec<&str> = POINTS.iter().map(|point| point.split(':').next().unwrap()).collect();
    let all = semel::crash::SERVER_POINTS.iter().filter(|point| point.starts_with("mailing."));
    let missing: Vec<_> = all.filter(|point| !named.contains(*point)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
