//! Uploads that are hostile, broken or repeated in another way: none harms the node, and none leaves a file.

use std::{
    io::Write as _,
    net::TcpStream,
    path::Path,
    time::{Duration, SystemTime},
};

use serde_json::json;
use sqlx::{ConnectOptions as _, Executor as _, PgConnection, postgres::PgConnectOptions};

use crate::{
    fleet::{ALL, Fleet},
    mailings::{FORM, LIMIT, MESSAGE, Node, created, form, id},
    mailings_kill::{count, list},
    proposals::rows,
    support::{Answer, SOON, eventually, send},
};

/// Runs each law on both databases.
macro_rules! on_both {
    ($($law:ident)+) => {
        mod sqlite {
            $(#[test] fn $law() { super::$law(&crate::fleet::Fleet::sqlite()) })+
        }
        mod postgres {
            $(#[test] fn $law() { super::$law(&crate::fleet::Fleet::postgres()) })+
        }
    };
}

on_both! {
    a_template_that_is_too_deep_is_refused_and_the_node_lives
    a_body_that_is_no_form_is_refused_before_it_is_read
    wrong_fields_are_refused_and_nothing_is_stored
    a_known_upload_is_answered_although_its_defaults_are_gone
    a_repeat_with_another_policy_column_or_time_is_refused
    a_list_whose_rows_are_found_missing_late_fails_as_empty
    what_the_first_64_kib_show_is_refused
    a_dry_run_counts_what_would_happen
    a_file_name_may_be_extended
    blank_rows_and_doubtful_addresses_are_counted
    a_list_without_a_good_row_says_so
}

const LIST: &str = "email,name\nana@example.com,Ana\nbob@example.com,Bob\n";

fn assert_refused(answer: &Answer, status: u16, problem: &str) {
    assert_eq!((answer.status, answer.problem().as_str()), (status, problem), "{}", answer.body);
}

fn a_template_that_is_too_deep_is_refused_and_the_node_lives(fleet: &Fleet) {
    let node = Node::start_as(fleet, "api", &[]);
    for body in [
        format!("{{{{ {}a }}}}", "not ".repeat(200_000)),
        format!("{{{{ a{} }}}}", " or a".repeat(150_000)),
        format!("{{% if email %}}{}{{% endif %}}", "{% elif email %}".repeat(60_000)),
    ] {
        let refused = node.upload("a.csv", LIST, &[("subject", "s"), ("body", &body)]);
        assert_refused(&refused, 422, "invalid-upload");
        assert_eq!(refused.json()["errors"][0]["field"], "body", "{}", refused.body);
    }
    assert_eq!(fleet.parts(), 0);
    created(&node.upload("a.csv", LIST, &MESSAGE));
}

/// The unit tests of the form count the bytes that are held.
fn a_body_that_is_no_form_is_refused_before_it_is_read(fleet: &Fleet) {
    let node = Node::start_as(fleet, "api", &[]);
    let head = "POST /mailings HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10000000000\r\n\
                content-type: multipart/form-data; boundary=b\r\n\r\n";
    for begun in ["", "--b\r\nx-head: "] {
        let mut connection = TcpStream::connect(node.address()).unwrap();
        connection.write_all(head.as_bytes()).unwrap();
        connection.write_all(begun.as_bytes()).unwrap();
        // The server may answer, and close, while this is written.
        let _ = connection.write_all(&[b'x'; 200 << 10]);
        assert_refused(&Answer::read(connection), 422, "invalid-upload");
    }
}

fn wrong_fields_are_refused_and_nothing_is_stored(fleet: &Fleet) {
    let node = Node::start_as(fleet, "api", &[("SEMEL_MAILINGS_MAX_FILE", "1MiB")]);
    let wrong = |fields: &[(&str, &str)]| {
        let refused = node.upload("a.csv", LIST, &[&MESSAGE[..], fields].concat());
        assert_refused(&refused, 422, "invalid-upload");
        refused.json()["errors"].as_array().unwrap().iter().map(|error| error["field"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(wrong(&[("subjekt", "x"), ("policy", "maybe")]), ["subjekt", "policy"]);
    assert_eq!(wrong(&[("body", "again")]), ["body"]);
    assert_eq!(wrong(&[("policy", "never-miss"), ("policy", "never-twice")]), ["policy"]);
    assert_eq!(wrong(&[("html", &"x".repeat((1 << 20) + 1))]), ["html"]);
    assert_eq!(wrong(&[("column", ""); 40]).last(), Some(&json!("…")));
    let twice = [&MESSAGE[..], &[("x\"; filename=\"b.csv\"; name=\"file", LIST)]].concat();
    assert_refused(&node.upload("a.csv", LIST, &twice), 422, "invalid-upload");
    assert_refused(&node.upload("a.csv", list(60_000), &MESSAGE), 413, "file-too-large");
    assert_eq!((fleet.parts(), fleet.count("mailings")), (0, 0));
    created(&node.upload("a.csv", LIST, &MESSAGE));
}

fn a_known_upload_is_answered_although_its_defaults_are_gone(fleet: &Fleet) {
    let subject = &MESSAGE[..1];
    let defaults = [("SEMEL_MAILINGS_BODY", "Hello {{ name }}"), ("SEMEL_MAILINGS_FROM", "news@example.com")];
    let id = created(&Node::start_as(fleet, "api", &defaults).upload("a.csv", LIST, subject));
    // Now to SMTP, without a default text.
    let node = Node::start_as(fleet, "api", &[("SEMEL_MAIL_TRANSPORT", "smtp://localhost:1")]);
    let again = node.upload("a.csv", LIST, subject);
    assert_eq!(again.status, 200, "{}", again.body);
    assert_eq!(again.json(), json!({ "mailingId": id, "status": "QUEUED", "created": false }));
    let dry = node.upload("a.csv", LIST, &[subject, &[("dryRun", "true")]].concat());
    assert_eq!((dry.status, &dry.json()["wouldBe"]["result"]), (200, &json!("known")), "{}", dry.body);
    assert_refused(&node.upload("b.csv", LIST, subject), 409, "content-reused");
    for dry_run in ["true", "false"] {
        let new = node.upload("b.csv", "email\neva@example.com\n", &[subject, &[("dryRun", dry_run)]].concat());
        assert_refused(&new, 422, "invalid-upload");
    }
    assert_eq!((fleet.parts(), fleet.count("mailings")), (1, 1), "the file of the mailing only");
}

fn a_repeat_with_another_policy_column_or_time_is_refused(fleet: &Fleet) {
    let node = Node::start_as(fleet, "api", &[]);
    let list = "email,other\nana@example.com,x@example.com\n";
    let with = |fields: &[(&str, &str)]| node.upload("a.csv", list, &[&MESSAGE[..], fields].concat());
    let given = [("policy", "never-miss"), ("column", "email"), ("sendAt", "2999-01-01T00:00:00Z")];
    let first = created(&with(&given));
    for known in [&given[..], &given[..1], &[("column", "1")], &[]] {
        let answer = with(known);
        assert_eq!((answer.status, id(&answer.json())), (200, first.clone()), "{known:?}: {}", answer.body);
    }
    for (field, value) in [("policy", "never-twice"), ("column", "other"), ("sendAt", "2999-01-02T00:00:00Z")] {
        let refused = with(&[(field, value)]);
        assert_refused(&refused, 409, "message-differs");
        let said = refused.json();
        assert_eq!(id(&said), first);
        assert!(said["detail"].as_str().unwrap().contains(&format!("another {field}.")), "{said}");
        let dry = with(&[(field, value), ("dryRun", "true")]).json();
        let expected = json!({ "result": "message-differs", "mailingId": first, "mailingStatus": "QUEUED",
                               "differsIn": [field] });
        assert_eq!(dry["wouldBe"], expected);
    }
    assert_eq!(fleet.parts(), 1);
}

fn a_list_whose_rows_are_found_missing_late_fails_as_empty(fleet: &Fleet) {
    let node = Node::start(fleet);
    let list = format!("email\n{}", "\n".repeat(70 << 10));
    let refused = node.upload("a.csv", &list, &[("dryRun", "true")]);
    assert_refused(&refused, 422, "invalid-file");
    assert_eq!(refused.json()["code"], "empty");
    let id = node.mailing("a.csv", &list);
    let mailing = node.until_status(&id, "FAILED");
    assert!(mailing["error"].as_str().unwrap().contains("(empty)"), "{mailing}");
}

fn what_the_first_64_kib_show_is_refused(fleet: &Fleet) {
    let node = Node::start_as(fleet, "api", &[]);
    for rows in [3, 500] {
        let broken = format!("{}\"open@example.com,x\nmore@example.com,y\n", list(rows));
        let refused = node.upload("a.csv", &broken, &MESSAGE);
        assert_refused(&refused, 422, "invalid-file");
        let said = refused.json();
        assert_eq!((&said["code"], &said["line"]), (&json!("unclosed-quote"), &json!(rows + 2)), "{said}");
    }
    assert_eq!((fleet.parts(), fleet.count("mailings")), (0, 0));
}

fn a_dry_run_counts_what_would_happen(fleet: &Fleet) {
    let node = Node::start(fleet);
    assert_eq!(node.post("/suppressions", r#"{"emails":["bob@example.com","eva@example.com"]}"#).status, 200);
    let list = "email,age\nana@example.com,1\n\nbob@example.com,2\n,\ncarl@example.com,three\nbob@example.com,4\n\
                dora+x@example.com,5\nu@ex\u{430}mple.com,6\n";
    let fields = [("subject", "{{ age }}"), ("body", "{{ age|int }}"), ("from", "news@example.com")];
    let report = node.upload("a.csv", list, &[&fields[..], &[("dryRun", "true")]].concat()).json();
    for (name, expected) in
        [("total", 4), ("suppressed", 1), ("duplicateRows", 1), ("rejectedRows", 1), ("blankRows", 2)]
    {
        assert_eq!(report[name], expected, "{name} of {report}");
    }
    assert_eq!((&report["exact"], &report["warnings"]), (&json!(true), &json!({ "plusTags": 1, "mixedScripts": 1 })));
    let reject = &report["rejects"][0];
    assert_eq!((&reject["line"], &reject["code"]), (&json!(6), &json!("not-rendered")), "{report}");
    // The mailing does what the dry run said.
    let mailing = node.completed(&created(&node.upload("a.csv", list, &fields)));
    assert_eq!([count(&mailing, "total"), count(&mailing, "suppressed"), count(&mailing, "sent")], [4, 1, 3]);
    for name in ["duplicateRows", "rejectedRows", "blankRows", "warnings"] {
        assert_eq!(mailing[name], report[name], "{name}");
    }
}

fn a_file_name_may_be_extended(fleet: &Fleet) {
    let node = Node::start_as(fleet, "api", &[]);
    let body = String::from_utf8(form("a.csv", LIST, &MESSAGE)).unwrap();
    let body = body.replace("name=\"file\"; filename=\"a.csv\"", "filename*=UTF-8''caf%C3%A9.csv; name=\"file\"");
    let mut connection = TcpStream::connect(node.address()).unwrap();
    send(&mut connection, "POST", "/mailings", &FORM, body.as_bytes());
    let id = created(&Answer::read(connection));
    assert_eq!(node.shown(&id)["filename"], "caf\u{e9}.csv");
}

fn blank_rows_and_doubtful_addresses_are_counted(fleet: &Fleet) {
    let node = Node::start(fleet);
    // More than a batch, and none of the doubtful ones is counted twice.
    let list = format!("{}\n\n,\nana+x@example.com,A\nANA+x@example.com,A\nu@ex\u{430}mple.com,U\n", list(12_000));
    let fields = [&MESSAGE[..], &[("sendAt", "2999-01-01T00:00:00Z")]].concat();
    let id = created(&node.upload("a.csv", list, &fields));
    let mailing = node.until(&id, "it is imported", |mailing| mailing["phase"] == "sending");
    assert_eq!((&mailing["blankRows"], &mailing["duplicateRows"]), (&json!(3), &json!(1)));
    assert_eq!(mailing["warnings"], json!({ "plusTags": 1, "mixedScripts": 1 }));
}

fn a_list_without_a_good_row_says_so(fleet: &Fleet) {
    let node = Node::start(fleet);
    // The name of the column is repeated for each reject, but not all of it.
    let header = format!("email{}", ".".repeat(60_000));
    let ids = ["a", "b"].map(|name| node.mailing(&format!("{name}.csv"), format!("{header}\nnobody\n{name}\n")));
    for id in &ids {
        let mailing = node.completed(id);
        assert_eq!((count(&mailing, "total"), &mailing["rejectedRows"]), (0, &json!(2)));
        assert!(mailing["error"].as_str().unwrap().contains("rejects.csv"), "{mailing}");
        assert_eq!(mailing["sameListAs"], json!(null), "empty lists are no twins");
        let report = node.get(&format!("/mailings/{id}/rejects.csv")).body;
        assert!(report.contains(&header[..200]) && report.len() < 1_000, "{report}");
    }
}

/// A transaction of the test itself on PostgreSQL.
struct Held<'a> {
    fleet: &'a Fleet,
    connection: PgConnection,
}

impl<'a> Held<'a> {
    fn begin(fleet: &'a Fleet, statements: &'static str) -> Self {
        let options: PgConnectOptions = fleet.place.url.parse().unwrap();
        let connection = fleet.runtime.block_on(async {
            let mut connection = options.connect().await.unwrap();
            connection.execute("BEGIN").await.unwrap();
            connection.execute(statements).await.unwrap();
            connection
        });
        Self { fleet, connection }
    }

    fn commit(mut self) {
        self.fleet.runtime.block_on(self.connection.execute("COMMIT")).unwrap();
    }
}

#[test]
fn entries_of_a_mailing_that_another_sweeper_removes_are_not_orphaned() {
    let fleet = Fleet::postgres();
    {
        let node = Node::start(&fleet);
        node.completed(&node.mailing("a.csv", list(3_000)));
    }
    // A later one shows that the sweep has passed the first.
    rows(&fleet.place, "UPDATE mailings SET deleted_at = 1");
    rows(
        &fleet.place,
        "INSERT INTO mailings (tenant, id, filename, content_hash, content_bytes, message, message_hash, message_domain,
                               policy, shape, address_column, created_at, updated_at, deleted_at)
         SELECT tenant, 'x', 'x', 'x', 1, message, message_hash, message_domain, policy, shape, address_column, 1, 1, 1 FROM mailings",
    );
    // The other sweeper, in its first transaction: it has removed the first rows, and did not commit yet.
    let other = Held::begin(
        &fleet,
        "SELECT number FROM mailings ORDER BY number LIMIT 1 FOR UPDATE; DELETE FROM mailing_entries WHERE line <= 2001",
    );
    let _node = Node::start_as(&fleet, "sweeper", &[]);
    eventually(SOON, "the later one is removed", || fleet.count("mailings WHERE id = 'x'") == 0);
    other.commit();
    eventually(LIMIT, "all of the first is removed", || fleet.count("mailings") == 0);
    assert_eq!(fleet.count("mailing_entries"), 0);
}

#[test]
fn a_tenant_whose_row_is_locked_is_answered_soon_and_leaves_no_file() {
    let fleet = Fleet::postgres();
    let node = Node::start_as(&fleet, "api", &[]);
    node.mailing("first.csv", "email\neva@example.com\n");
    let parts = fleet.parts();
    let holder = Held::begin(&fleet, "SELECT tenant FROM mailing_tenants FOR UPDATE");
    let refused = node.upload("a.csv", LIST, &MESSAGE);
    assert_eq!(refused.status, 503, "{}", refused.body);
    assert!(refused.header("retry-after").is_some());
    assert_eq!(fleet.parts(), parts, "the file of the refused upload is removed");
    // A client that hangs up leaves nothing, too.
    let mut connection = TcpStream::connect(node.address()).unwrap();
    send(&mut connection, "POST", "/mailings", &FORM, &form("a.csv", LIST, &MESSAGE));
    eventually(SOON, "its file is stored", || fleet.parts() > parts);
    drop(connection);
    eventually(SOON, "its file is removed", || fleet.parts() == parts);
    holder.commit();
    created(&node.upload("a.csv", LIST, &MESSAGE));
}

#[test]
fn a_locked_mailing_delays_no_other() {
    let fleet = Fleet::postgres();
    let api = Node::start_as(&fleet, "api", &[]);
    let locked = api.mailing("locked.csv", LIST);
    let holder = Held::begin(&fleet, "SELECT number FROM mailings FOR UPDATE");
    let other = api.mailing("other.csv", "email\neva@example.com\n");
    let node = Node::start_as(&fleet, ALL, &[]);
    node.completed(&other);
    assert_eq!(count(&node.shown(&locked), "sent"), 0);
    holder.commit();
    node.completed(&locked);
}

#[test]
fn a_long_upload_that_is_cut_off_leaves_none_of_its_parts() {
    let fleet = Fleet::postgres();
    let node = Node::start_as(&fleet, "api", &[]);
    let head = "POST /mailings HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000\r\n\
                content-type: multipart/form-data; boundary=b\r\n\r\n\
                --b\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a.csv\"\r\n\r\nemail\n";
    let mut connection = TcpStream::connect(node.address()).unwrap();
    connection.write_all(head.as_bytes()).unwrap();
    let rows = "person.with.a.name.of.some.length@example.com\n".repeat(1_000);
    // More parts than are removed in one transaction.
    for _ in 0..(70 << 19) / rows.len() {
        connection.write_all(rows.as_bytes()).unwrap();
    }
    eventually(LIMIT, "its parts are stored", || fleet.parts() > 64);
    drop(connection);
    eventually(LIMIT, "all of them are removed", || fleet.parts() == 0);
}

#[test]
fn files_that_no_mailing_needs_are_removed_from_the_directory_when_they_are_old() {
    let fleet = Fleet::sqlite();
    let node = Node::start_as(&fleet, "api", &[]);
    let id = node.mailing("a.csv", LIST);
    let used = node.shown(&id)["storageUrl"].as_str().unwrap().strip_prefix("file:").unwrap().to_owned();
    let dir = fleet.place.path("uploads");
    let age = |path: &Path, hours: u64| {
        let file = std::fs::File::options().append(true).create(true).open(path).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(hours * 3600)).unwrap();
    };
    for (name, hours) in [("cut.part", 7), ("lost.csv", 7), ("young.part", 5), (used.as_str(), 7)] {
        age(&dir.join(name), hours);
    }
    // One that cannot be removed keeps no other.
    std::fs::create_dir(dir.join("a-directory")).unwrap();
    let _sweeper = Node::start_as(&fleet, "sweeper", &[]);
    let names = || {
        let files = std::fs::read_dir(&dir).unwrap().flatten().map(|file| file.file_name().into_string().unwrap());
        let mut names: Vec<_> = files.filter(|name| name != "a-directory").collect();
        names.sort_unstable();
        names
    };
    let mut left = [used, "young.part".to_owned()];
    left.sort_unstable();
    eventually(SOON, "the old ones are removed", || names() == left);
}

/// The peak of a process's memory, in KiB, since it was last reset.
fn peak(node: &Node) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{}/status", node.server.process.pid().as_raw_pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// Some 60 MB of rows: held as a whole, they would take several times that.
fn a_list_of_300_000_is_imported_in_bounded_memory(fleet: &Fleet, limit: usize) {
    let node = Node::start(fleet);
    let far = [&MESSAGE[..], &[("sendAt", "2999-01-01T00:00:00Z")]].concat();
    let imported = |name: &str, rows: usize| {
        let text = "x".repeat(170);
        let list = (0..rows).fold("email,text\n".to_owned(), |list, n| list + &format!("user{n}@example.com,{text}\n"));
        let id = created(&node.upload(name, &list, &far));
        eventually(4 * LIMIT, "it is imported", || node.shown(&id)["phase"] == "sending");
        assert_eq!(count(&node.shown(&id), "total"), rows);
        node.upload(name, &list, &[&far[..], &[("dryRun", "true")]].concat()).json()
    };
    imported("short.csv", 1_000);
    let before = peak(&node);
    assert_eq!(imported("long.csv", 300_000)["total"], 300_000);
    let grown = peak(&node) - before;
    assert!(grown < limit, "{grown} KiB more than a short list");
}

/// SQLite's writer caches 64 MiB of pages besides.
#[test]
fn heavy_a_list_of_300_000_is_imported_in_bounded_memory_on_sqlite() {
    a_list_of_300_000_is_imported_in_bounded_memory(&Fleet::sqlite(), 164 << 10);
}

#[test]
fn heavy_a_list_of_300_000_is_imported_in_bounded_memory_on_postgres() {
    a_list_of_300_000_is_imported_in_bounded_memory(&Fleet::postgres(), 100 << 10);
}
