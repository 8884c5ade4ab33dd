//! The laws of `semel mailing` and `semel suppressions`.

use std::process::Output;

use serde_json::Value;

use crate::{
    desk::serve,
    place::{Place, ended, on_both_databases},
    proposals::rows,
    support::{Server, stderr},
};

on_both_databases! {
    a_list_that_is_uploaded_twice_is_one_mailing
    a_dry_run_stores_nothing
    every_wrong_field_of_an_upload_is_reported
    a_watch_ends_when_the_mailing_is_completed
    a_watch_of_a_paused_mailing_ends_with_1_and_says_how_to_resume_it
    an_entry_that_is_not_in_doubt_is_not_resolved
    suppressed_addresses_are_added_listed_and_removed
    a_file_of_suppressed_addresses_is_imported_and_wrong_lines_are_refused
}

const LIST: &str = "email,name\nana@example.com,Ana\nbob@example.com,Bob\nANA@example.com,Ana\nnobody,No\n";

/// Runs a command with the data directory of the test's server.
fn run(place: &Place, arguments: &[&str]) -> Output {
    place.semel(arguments).env("SEMEL_DATA_DIR", place.path("data")).output().unwrap()
}

fn say(place: &Place, arguments: &[&str]) -> String {
    let (code, said, wrong) = ended(&run(place, arguments));
    assert_eq!(code, 0, "{wrong}");
    said
}

fn json(place: &Place, arguments: &[&str]) -> Value {
    serde_json::from_str(&say(place, &[arguments, &["--json"]].concat())).unwrap()
}

/// A server with these roles. The first one makes the ledger.
fn server(place: &Place, roles: &str) -> Server {
    serve(place, roles, &[("SEMEL_DATA_DIR", place.path("data").to_str().unwrap())])
}

/// Uploads a list that no worker sends yet.
fn uploaded(place: &Place) -> String {
    std::fs::write(place.path("news.csv"), LIST).unwrap();
    let made = json(place, &["mailing", "upload", "news.csv", "--subject", "Hello {{ name }}"]);
    assert_eq!((&made["created"], &made["status"]), (&true.into(), &"QUEUED".into()));
    made["mailingId"].as_str().unwrap().to_owned()
}

fn count(place: &Place, sql: &'static str) -> usize {
    rows(place, sql).len()
}

fn a_list_that_is_uploaded_twice_is_one_mailing(place: &Place) {
    let _server = server(place, "api");
    let id = uploaded(place);
    let again = say(place, &["mailing", "upload", "news.csv", "--subject", "Hello {{ name }}"]);
    assert!(again.starts_with(&format!("known: mailing {id} (QUEUED): its list and its message")), "{again}");
    assert!(again.contains(&format!("to watch it: semel mailing watch {id}")), "{again}");
    let other = run(place, &["mailing", "upload", "news.csv", "--subject", "Bye"]);
    assert_eq!(other.status.code(), Some(1));
    assert!(stderr(&other).contains("with another subject") && stderr(&other).contains(&id), "{}", stderr(&other));
    let renamed = run(place, &["mailing", "upload", "news.csv", "--subject", "Hello {{ name }}", "--name", "b.csv"]);
    assert!(stderr(&renamed).contains("under another file name"), "{}", stderr(&renamed));
    assert_eq!(count(place, "SELECT id FROM mailings"), 1);
    let created = say(place, &["mailing", "upload", "news.csv", "--name", "b.csv", "--identity", "filename+content"]);
    assert!(created.starts_with("created: mailing "), "{created}");
    let listed = json(place, &["mailing", "list"]);
    let names: Vec<_> = listed["items"].as_array().unwrap().iter().map(|item| &item["filename"]).collect();
    assert_eq!(names, ["b.csv", "news.csv"]);
    let table = say(place, &["mailing", "list", "--limit", "1"]);
    assert!(table.contains("b.csv") && table.contains("there are more") && !table.contains(&id), "{table}");
}

fn a_dry_run_stores_nothing(place: &Place) {
    let _server = server(place, "api");
    std::fs::write(place.path("news.csv"), LIST).unwrap();
    let arguments = ["mailing", "upload", "news.csv", "--subject", "Hello {{ name }}", "--dry-run"];
    let said = say(place, &arguments);
    for part in [
        "2 addresses would get",
        "1 duplicate row, 1 rejected row",
        "line 5: no-at-sign",
        "Hello Ana",
        "would be a new mailing",
    ] {
        assert!(said.contains(part), "{said}");
    }
    assert_eq!(json(place, &arguments)["total"], 2);
    assert_eq!(count(place, "SELECT id FROM mailings"), 0);
    assert_eq!(count(place, "SELECT upload FROM mailing_chunks"), 0);
    let files = std::fs::read_dir(place.path("uploads")).into_iter().flatten();
    assert_eq!(files.count(), 0);
}

fn every_wrong_field_of_an_upload_is_reported(place: &Place) {
    let _server = server(place, "api");
    std::fs::write(place.path("news.csv"), LIST).unwrap();
    std::fs::write(place.path("body.txt"), b"\xff").unwrap();
    let flags = ["--policy", "maybe", "--send-at", "soon", "--subject", "{{ x", "--body-file", "body.txt"];
    let wrong = run(place, &[&["mailing", "upload", "news.csv"][..], &flags].concat());
    assert_eq!(wrong.status.code(), Some(1));
    for part in ["--policy: must be", "--send-at: ", "--subject: ", "--body: is not UTF-8"] {
        assert!(stderr(&wrong).contains(part), "{}", stderr(&wrong));
    }
    let absent = run(place, &["mailing", "upload", "absent.csv"]);
    assert!(stderr(&absent).contains("cannot read absent.csv"), "{}", stderr(&absent));
    std::fs::write(place.path("page.csv"), "<html>").unwrap();
    let page = run(place, &["mailing", "upload", "page.csv"]);
    assert!(stderr(&page).contains("HTML page"), "{}", stderr(&page));
    assert_eq!(count(place, "SELECT id FROM mailings"), 0);
}

fn a_watch_ends_when_the_mailing_is_completed(place: &Place) {
    let _server = server(place, "api,relay,worker,sweeper");
    let id = uploaded(place);
    let watched = say(place, &["mailing", "watch", &id]);
    assert!(watched.contains("COMPLETED: 2 of 2 sent") && watched.contains("1 duplicate row"), "{watched}");
    assert_eq!(json(place, &["mailing", "show", &id])["counts"]["sent"], 2);
    let test = say(place, &["mailing", "test", &id, "tester@example.com"]);
    assert!(test.starts_with("a test mail was sent to tester@example.com"), "{test}");
    std::fs::write(place.path("two.txt"), "eva@example.com\n").unwrap();
    let second = say(place, &["mailing", "upload", "two.txt", "--watch"]);
    assert!(second.starts_with("created: ") && second.contains("COMPLETED: 1 of 1 sent"), "{second}");
}

fn a_watch_of_a_paused_mailing_ends_with_1_and_says_how_to_resume_it(place: &Place) {
    let _server = server(place, "api");
    let id = uploaded(place);
    let paused = say(place, &["mailing", "pause", &id, "--reason", "a mistake"]);
    assert!(paused.contains("PAUSED"), "{paused}");
    let (code, said, _) = ended(&run(place, &["mailing", "watch", &id]));
    assert_eq!(code, 1);
    assert!(said.contains(&format!("to resume it: semel mailing resume {id}")), "{said}");
    let deleted = run(place, &["mailing", "delete", &id]);
    assert!(stderr(&deleted).contains("cancel it first"), "{}", stderr(&deleted));
    assert_eq!(json(place, &["mailing", "resume", &id])["status"], "QUEUED");
    assert_eq!(json(place, &["mailing", "cancel", &id])["status"], "CANCELLED");
    let retried = run(place, &["mailing", "retry", &id]);
    assert_eq!(retried.status.code(), Some(1));
    let audit = rows(place, "SELECT action || ' ' || reason FROM semel_audit ORDER BY id");
    assert_eq!(audit, ["mailings.create ", "mailings.pause a mistake", "mailings.resume ", "mailings.cancel "]);
}

fn an_entry_that_is_not_in_doubt_is_not_resolved(place: &Place) {
    let _server = server(place, "api");
    let id = uploaded(place);
    let refused = |arguments: &[&str]| {
        let (code, _, wrong) = ended(&run(place, &[&["mailing", "resolve"], arguments].concat()));
        (code, wrong)
    };
    let (code, wrong) = refused(&[&id, "7", "--as", "sent"]);
    assert_eq!(code, 1);
    assert!(wrong.contains(&format!("nothing was changed: the mailing {id} has no entry of line 7")), "{wrong}");
    let (code, wrong) = refused(&["unknown", "7", "--as", "resend"]);
    assert_eq!(code, 1);
    assert!(wrong.contains("has no mailing unknown") && wrong.contains("semel mailing list"), "{wrong}");
    assert_eq!(refused(&[&id, "7", "--as", "lost"]).0, 2);
    let (code, _, wrong) = ended(&run(place, &["mailing", "show", &id, "--tenant", "other"]));
    assert!(code == 1 && wrong.contains("the tenant other has no mailing"), "{wrong}");
}

fn suppressed_addresses_are_added_listed_and_removed(place: &Place) {
    let _server = server(place, "api");
    let add = ["suppressions", "add", "Ana@Example.com", "bob@example.com", "--reason", "asked for it"];
    assert_eq!(say(place, &add), "2 added, 0 known\n");
    assert_eq!(say(place, &add), "0 added, 2 known\n");
    let listed = json(place, &["suppressions", "list", "--limit", "1"]);
    assert_eq!((&listed["items"][0]["email"], &listed["next"]), (&"ana@example.com".into(), &"ana@example.com".into()));
    let table = say(place, &["suppressions", "list", "--after", "ana@example.com"]);
    assert!(table.contains("bob@example.com") && table.contains("asked for it") && !table.contains("ana@"), "{table}");
    assert_eq!(say(place, &["suppressions", "remove", "ANA@example.com"]), "ana@example.com gets mails again\n");
    let again = run(place, &["suppressions", "remove", "ana@example.com"]);
    assert_eq!(again.status.code(), Some(1));
    assert!(stderr(&again).contains("ana@example.com is not suppressed"), "{}", stderr(&again));
    assert_eq!(run(place, &["suppressions", "add", "nobody"]).status.code(), Some(2));
}

fn a_file_of_suppressed_addresses_is_imported_and_wrong_lines_are_refused(place: &Place) {
    let _server = server(place, "api");
    std::fs::write(place.path("news.csv"), LIST).unwrap();
    let (code, said, wrong) = ended(&run(place, &["suppressions", "import", "news.csv"]));
    assert_eq!((code, said.as_str()), (0, "2 added, 1 known, 1 line refused\n"));
    assert!(wrong.contains("line 5 is refused: no-at-sign: nobody"), "{wrong}");
    // Longer than one part, and than the beginning by which the file is judged.
    let lines: String = (0..4_500).map(|n| format!("person.number.{n}@example.com\n")).collect();
    std::fs::write(place.path("all.txt"), &lines).unwrap();
    assert_eq!(say(place, &["suppressions", "import", "all.txt"]), "4500 added, 0 known, 0 lines refused\n");
    assert_eq!(say(place, &["suppressions", "import", "all.txt"]), "0 added, 4500 known, 0 lines refused\n");
    assert_eq!(count(place, "SELECT email FROM mail_suppressions"), 4_502);
    std::fs::write(place.path("broken.txt"), [lines.as_bytes(), b"\xff@x.com\n"].concat()).unwrap();
    let broken = run(place, &["suppressions", "import", "broken.txt"]);
    assert_eq!(broken.status.code(), Some(1));
    assert!(stderr(&broken).contains("ended early (0 added, 4500 known"), "{}", stderr(&broken));
}
