//! Laws of mailings at their edges: uploads, files, links, pages of entries.

use std::{io::Write as _, net::TcpStream};

use crate::{
    desk::{execute, serve},
    place::{Place, on_both_databases},
    proposals::rows,
    support::{Answer, SOON, Server, eventually, send},
};

on_both_databases! {
    the_link_in_a_mail_works_after_its_mailing_is_deleted
    the_file_of_a_cancelled_mailing_is_removed_by_the_sweep
    an_upload_is_recognised_among_a_thousand_mailings_of_its_name
    a_conflict_names_the_status_of_the_mailing_beside_that_of_http
    a_dry_run_says_what_the_upload_would_be
    a_test_mail_is_audited_and_its_failures_differ
    entries_with_a_status_are_found_far_behind_the_others
    entries_are_listed_and_exported_although_the_message_cannot_be_read
    the_progress_of_an_import_is_the_part_of_the_file
    a_list_of_suppressed_addresses_is_streamed
    a_batch_that_the_database_refuses_is_imported_as_smaller_ones
}

const LIST: &str = "email,name\nana@example.com,Ana\nbob@example.com,Bob\n";

fn server(place: &Place, roles: &str) -> Server {
    let data = place.path("data");
    let variables = [
        ("SEMEL_DATA_DIR", data.to_str().unwrap()),
        ("SEMEL_SWEEP_EVERY", "200ms"),
        ("SEMEL_PUBLIC_URL", "https://mail.example.com"),
    ];
    serve(place, roles, &variables)
}

/// A form with a file and other fields.
fn form(fields: &[(&str, &str)], filename: &str, list: &str) -> String {
    let field = |(name, value): &(&str, &str)| {
        format!("--b\r\ncontent-disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n")
    };
    let fields: String = fields.iter().map(field).collect();
    format!(
        "{fields}--b\r\ncontent-disposition: form-data; name=\"file\"; filename=\"{filename}\"\r\n\r\n{list}\r\n--b--\r\n"
    )
}

fn upload(server: &Server, fields: &[(&str, &str)], filename: &str, list: &str) -> Answer {
    let mut connection = TcpStream::connect(server.address).unwrap();
    let headers = [("host", "localhost"), ("content-type", "multipart/form-data; boundary=b")];
    send(&mut connection, "POST", "/mailings", &headers, form(fields, filename, list).as_bytes());
    Answer::read(connection)
}

fn ask(server: &Server, method: &str, path: &str) -> Answer {
    let mut connection = TcpStream::connect(server.address).unwrap();
    send(&mut connection, method, path, &[("host", "localhost"), ("content-type", "application/json")], b"");
    Answer::read(connection)
}

fn created(server: &Server) -> String {
    let made = upload(server, &[], "news.csv", LIST);
    assert_eq!(made.status, 201, "{}", made.body);
    made.json()["mailingId"].as_str().unwrap().to_owned()
}

fn until(server: &Server, id: &str, status: &str) {
    eventually(SOON, status, || server.get(&format!("/mailings/{id}")).json()["status"] == status);
}

#[test]
fn an_upload_that_takes_long_keeps_its_parts_while_more_arrive() {
    let place = Place::postgres();
    let _server = server(&place, "api,sweeper");
    rows(
        &place,
        "INSERT INTO mailing_chunks (upload, part, data, created_at)
         VALUES ('slow', 0, 'a', 1), ('slow', 1, 'b', CAST(extract(epoch FROM now()) * 1000000 AS BIGINT)),
                ('lost', 0, 'a', 1), ('lost', 1, 'b', 1)",
    );
    let uploads = || rows(&place, "SELECT upload FROM mailing_chunks ORDER BY upload, part");
    eventually(SOON, "the upload that was cut off is removed", || !uploads().contains(&"lost".to_owned()));
    assert_eq!(uploads(), ["slow", "slow"]);
}

#[test]
fn a_mailing_whose_file_lost_a_part_fails_and_sends_nothing() {
    let place = Place::postgres();
    let id = created(&server(&place, "api"));
    rows(&place, "DELETE FROM mailing_chunks");
    let server = server(&place, "api,relay,worker,sweeper");
    until(&server, &id, "FAILED");
    let mailing = server.get(&format!("/mailings/{id}")).json();
    assert!(mailing["error"].as_str().unwrap().contains("the stored file is incomplete"), "{mailing}");
    assert_eq!(mailing["counts"]["total"], 0);
}

fn the_link_in_a_mail_works_after_its_mailing_is_deleted(place: &Place) {
    let server = server(place, "api,relay,worker,sweeper");
    let id = created(&server);
    until(&server, &id, "COMPLETED");
    let token = rows(
        place,
        match place.url.starts_with("sqlite:") {
            true => "SELECT mailing || '-' || line || '-' || lower(hex(token)) FROM mailing_entries ORDER BY line",
            false => "SELECT mailing || '-' || line || '-' || encode(token, 'hex') FROM mailing_entries ORDER BY line",
        },
    );
    assert_eq!(ask(&server, "DELETE", &format!("/mailings/{id}")).status, 200);
    eventually(SOON, "the sweep removes the mailing", || rows(place, "SELECT id FROM mailings").is_empty());
    assert!(rows(place, "SELECT email FROM mailing_entries").is_empty());
    let page = server.get(&format!("/u/{}", token[0]));
    assert_eq!(page.status, 200, "{}", page.body);
    assert!(page.body.contains("Do you want") && !page.body.contains("You will get no more"), "{}", page.body);
    assert!(rows(place, "SELECT email FROM mail_suppressions").is_empty());
    assert_eq!(ask(&server, "POST", &format!("/u/{}", token[0])).status, 200);
    assert_eq!(rows(place, "SELECT email FROM mail_suppressions"), ["ana@example.com"]);
    let guess = token[1].rsplit_once('-').unwrap().0;
    assert_eq!(server.get(&format!("/u/{guess}-{}", "00".repeat(16))).status, 404);
    rows(place, "UPDATE mailing_links SET until = 1");
    eventually(SOON, "the sweep removes old links", || rows(place, "SELECT email FROM mailing_links").is_empty());
}

fn the_file_of_a_cancelled_mailing_is_removed_by_the_sweep(place: &Place) {
    let server = server(place, "api,sweeper");
    let id = created(&server);
    let path = format!("/mailings/{id}");
    let stored = || !server.get(&path).json()["storageUrl"].is_null();
    assert!(stored());
    rows(place, "UPDATE mailings SET status = 'CANCELLED', active = FALSE");
    eventually(SOON, "the sweep removes the file", || !stored());
    assert!(rows(place, "SELECT upload FROM mailing_chunks").is_empty());
    let files = std::fs::read_dir(place.path("uploads")).into_iter().flatten();
    assert_eq!(files.count(), 0);
}

fn an_upload_is_recognised_among_a_thousand_mailings_of_its_name(place: &Place) {
    let server = server(place, "api");
    created(&server);
    rows(
        place,
        "INSERT INTO mailings (tenant, id, filename, content_hash, content_bytes, message, message_hash, message_domain,
                               policy, shape, address_column, created_at, updated_at)
         WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000)
         SELECT tenant, id || '-' || i, filename, content_hash || i, 1, message, message_hash, message_domain, policy,
                shape, address_column, created_at, updated_at
         FROM mailings, n",
    );
    let upload = || upload(&server, &[("identity", "filename+content")], "news.csv", "email\neva@example.com\n");
    let first = upload();
    assert_eq!(first.status, 201, "{}", first.body);
    let again = upload();
    assert_eq!((again.status, &again.json()["mailingId"]), (200, &first.json()["mailingId"]), "{}", again.body);
}

fn a_conflict_names_the_status_of_the_mailing_beside_that_of_http(place: &Place) {
    let server = server(place, "api");
    let id = created(&server);
    let conflicts = [
        (upload(&server, &[], "news.csv", "email\neva@example.com\n"), "filename-reused"),
        (upload(&server, &[], "other.csv", LIST), "content-reused"),
        (upload(&server, &[("subject", "Another")], "news.csv", LIST), "message-differs"),
    ];
    for (answer, problem) in conflicts {
        let said = answer.json();
        assert_eq!((answer.problem().as_str(), &said["status"]), (problem, &409.into()), "{said}");
        assert_eq!((&said["mailingStatus"], &said["mailingId"]), (&"QUEUED".into(), &id.as_str().into()), "{said}");
    }
}

fn a_dry_run_says_what_the_upload_would_be(place: &Place) {
    let server = server(place, "api");
    let would_be = |fields: &[(&str, &str)], name, list| {
        let report = upload(&server, &[&[("dryRun", "true")], fields].concat(), name, list);
        assert_eq!(report.status, 200, "{}", report.body);
        report.json()["wouldBe"].clone()
    };
    assert_eq!(would_be(&[], "news.csv", LIST), serde_json::json!({ "result": "created" }));
    let id = created(&server);
    let known = |result: &str| serde_json::json!({ "result": result, "mailingId": id, "mailingStatus": "QUEUED" });
    assert_eq!(would_be(&[], "news.csv", LIST), known("known"));
    assert_eq!(would_be(&[], "other.csv", LIST), known("content-reused"));
    let other = "email\neva@example.com\n";
    assert_eq!(would_be(&[], "news.csv", other), known("filename-reused"));
    assert_eq!(would_be(&[("identity", "filename")], "news.csv", other)["contentDiffers"], true);
    assert_eq!(rows(place, "SELECT id FROM mailings").len(), 1);
}

fn a_test_mail_is_audited_and_its_failures_differ(place: &Place) {
    let test = |server: &Server, id: &str| {
        crate::desk::post(server, &format!("/mailings/{id}/test"), r#"{"email": "me@example.com"}"#)
    };
    let api = server(place, "api");
    let id = created(&api);
    let early = test(&api, &id);
    assert_eq!((early.status, early.problem().as_str()), (409, "no-entries"), "{}", early.body);
    assert_eq!(early.json()["retryable"], true);
    drop(api);
    let server = server(place, "api,relay,worker,sweeper");
    until(&server, &id, "COMPLETED");
    assert_eq!(test(&server, &id).status, 200);
    execute(place, "UPDATE mailing_entries SET cells = substr(cells, 1, 0)");
    let wrong = test(&server, &id);
    assert_eq!((wrong.status, wrong.problem().as_str()), (422, "test-not-rendered"), "{}", wrong.body);
    let audit = rows(place, "SELECT action || ' ' || actor || ' ' || subject FROM semel_audit ORDER BY id");
    assert_eq!(audit, [format!("mailings.create local {id}"), format!("mailings.test local {id}")]);
}

fn entries_with_a_status_are_found_far_behind_the_others(place: &Place) {
    let server = server(place, "api,relay,worker,sweeper");
    let id = created(&server);
    until(&server, &id, "COMPLETED");
    rows(place, "UPDATE mailing_entries SET line = 350000, status = 'IN_DOUBT' WHERE line = 3");
    let page = |query: &str| server.get(&format!("/mailings/{id}/entries?{query}")).json();
    let doubted = page("status=IN_DOUBT");
    assert_eq!((&doubted["items"][0]["line"], &doubted["next"]), (&350_000.into(), &serde_json::Value::Null));
    let first = page("limit=1");
    assert_eq!((&first["items"][0]["line"], &first["next"]), (&2.into(), &"2".into()));
    assert_eq!(page("limit=1&cursor=2")["items"][0]["line"], 350_000);
    let shown = place.semel(["mailing", "show", &id]).env("SEMEL_DATA_DIR", place.path("data")).output().unwrap();
    assert!(shown.status.success());
}

fn entries_are_listed_and_exported_although_the_message_cannot_be_read(place: &Place) {
    let server = server(place, "api,relay,worker,sweeper");
    let id = created(&server);
    until(&server, &id, "COMPLETED");
    execute(place, "UPDATE mailings SET message = substr(message, 1, 0)");
    let entries = server.get(&format!("/mailings/{id}/entries")).json();
    assert_eq!(entries["items"][0]["messageId"], format!("{id}.2@semel.invalid"), "{entries}");
    let export = server.get(&format!("/mailings/{id}/export.csv"));
    assert!(export.status == 200 && export.body.contains("bob@example.com,SENT"), "{}", export.body);
    let test = crate::desk::post(&server, &format!("/mailings/{id}/test"), r#"{"email": "me@example.com"}"#);
    assert_eq!((test.status, test.problem().as_str()), (500, "row-unreadable"), "{}", test.body);
}

fn the_progress_of_an_import_is_the_part_of_the_file(place: &Place) {
    let server = server(place, "api");
    let id = created(&server);
    assert_eq!(server.get(&format!("/mailings/{id}")).json()["progress"], 0.0);
    rows(place, r#"UPDATE mailings SET place = '{"place":{"offset":25}}', content_bytes = 50"#);
    assert_eq!(server.get(&format!("/mailings/{id}")).json()["progress"], 0.5);
}

fn a_list_of_suppressed_addresses_is_streamed(place: &Place) {
    let server = server(place, "api");
    let import = |query: &str, list: &str| {
        let mut connection = TcpStream::connect(server.address).unwrap();
        let headers = [("host", "localhost"), ("content-type", "text/csv; charset=utf-8")];
        send(&mut connection, "POST", &format!("/suppressions{query}"), &headers, list.as_bytes());
        Answer::read(connection)
    };
    // More than the limit of the JSON form.
    let all: String = (0..12_000).map(|n| format!("person{n}@example.com\n")).collect();
    let first = import("?reason=asked", &format!("email\n{all}nobody\n"));
    assert_eq!(first.status, 200, "{}", first.body);
    let said = first.json();
    assert_eq!((&said["added"], &said["known"], &said["rejectedRows"]), (&12_000.into(), &0.into(), &1.into()));
    assert_eq!(said["rejects"][0]["line"], 12_002);
    assert_eq!(import("", &all).json()["known"], 12_000);
    assert_eq!(rows(place, "SELECT DISTINCT reason FROM mail_suppressions"), ["asked"]);
    let page = import("", "<html>");
    assert_eq!((page.status, page.problem().as_str()), (422, "invalid-file"), "{}", page.body);
    assert_eq!(import("?colum=1", &all).status, 400);
    let json = crate::desk::post(&server, "/suppressions", r#"{"emails": ["ana@example.com"]}"#);
    assert_eq!(json.json()["added"], 1, "{}", json.body);
}

/// The database refuses more than two new entries in one transaction.
fn a_batch_that_the_database_refuses_is_imported_as_smaller_ones(place: &Place) {
    let api = server(place, "api");
    let list = "email\na@example.com\nb@example.com\nnobody\na@example.com\nc@example.com\nd@example.com\n";
    let id = upload(&api, &[], "news.csv", list).json()["mailingId"].as_str().unwrap().to_owned();
    let more = "(SELECT count(*) FROM mailing_entries) >= 2 + (SELECT total FROM mailings)";
    let refuses = match place.url.starts_with("sqlite:") {
        true => format!("WHEN {more} BEGIN SELECT RAISE(ABORT, 'many'); END"),
        false => {
            let body = format!("BEGIN IF {more} THEN RAISE 'many'; END IF; RETURN NEW; END");
            execute(place, &format!("CREATE FUNCTION few() RETURNS trigger LANGUAGE plpgsql AS $${body}$$"));
            "FOR EACH ROW EXECUTE FUNCTION few()".to_owned()
        }
    };
    execute(place, &format!("CREATE TRIGGER few BEFORE INSERT ON mailing_entries {refuses}"));
    let server = server(place, "api,relay,worker,sweeper");
    until(&server, &id, "COMPLETED");
    let mailing = server.get(&format!("/mailings/{id}")).json();
    let numbers = ["duplicateRows", "rejectedRows", "run"].map(|name| mailing[name].clone());
    assert_eq!((&mailing["counts"]["sent"], numbers), (&4.into(), [1, 1, 1].map(Into::into)), "{mailing}");
    assert_eq!(rows(place, "SELECT CAST(failures AS TEXT) FROM semel_operations WHERE kind = 'run'"), ["0"]);
}

#[test]
fn a_tenant_whose_uploads_trickle_is_told_to_come_back() {
    let place = Place::sqlite();
    let server = server(&place, "api");
    let head = "POST /mailings HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\
                content-type: multipart/form-data; boundary=b\r\n\r\n--b\r\n";
    let trickling: Vec<_> = (0..8)
        .map(|_| {
            let mut connection = TcpStream::connect(server.address).unwrap();
            connection.write_all(head.as_bytes()).unwrap();
            connection
        })
        .collect();
    let dry_run = || upload(&server, &[("dryRun", "true")], "news.csv", LIST);
    eventually(SOON, "all places of the tenant are taken", || dry_run().status == 503);
    let refused = dry_run();
    assert_eq!((refused.problem().as_str(), refused.header("retry-after")), ("too-many-uploads", Some("5")));
    drop(trickling);
    eventually(SOON, "the places are free again", || dry_run().status == 200);
}
