//! Level 1 of a mailing: an upload becomes one mailing, however often and in whatever way it is sent.

use std::{
    io::Write as _,
    net::{Shutdown, TcpStream},
    sync::Barrier,
    thread,
};

use serde_json::json;

use crate::{
    fleet::{Fleet, on_every_fleet},
    mailings::{LIMIT, MESSAGE, Node, created, each, form, id, upload},
    support::{Answer, eventually},
};

on_every_fleet! {
    the_same_name_with_the_same_content_is_the_same_mailing
    an_explicit_identity_chooses_the_mailing
    a_resaved_list_points_to_its_oldest_twin
    an_upload_that_is_cut_off_leaves_nothing_and_can_be_repeated
    a_file_that_arrives_many_times_at_once_is_one_mailing
    a_file_that_is_no_list_is_refused_and_not_stored
    a_dry_run_reports_and_stores_nothing
    a_file_name_is_a_label_and_never_a_path
}

const LIST: &str = "email,name\nana@example.com,Ana\nbob@example.com,Bob\n";
const OTHER: &str = "email,name\neva@example.com,Eva\n";

/// A 409 names the mailing that is in the way, and its status.
fn assert_in_the_way(answer: &Answer, problem: &str, mailing: &str) {
    assert_eq!((answer.status, answer.problem().as_str()), (409, problem), "{}", answer.body);
    let said = answer.json();
    assert_eq!((id(&said).as_str(), &said["status"]), (mailing, &json!(409)), "{said}");
    assert_eq!(said["mailingStatus"], "QUEUED", "{said}");
}

/// A 200 names the mailing that the upload is.
fn assert_known(answer: &Answer, mailing: &str) {
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(answer.json(), json!({ "mailingId": mailing, "status": "QUEUED", "created": false }));
}

fn the_same_name_with_the_same_content_is_the_same_mailing(fleet: &mut Fleet) {
    let node = Node::start_as(fleet, "api", &[]);
    let id = node.mailing("a.csv", LIST);
    let parts = fleet.parts();
    assert_known(&node.upload("a.csv", LIST, &MESSAGE), &id);
    assert_in_the_way(&node.upload("a.csv", OTHER, &MESSAGE), "filename-reused", &id);
    assert_in_the_way(&node.upload("b.csv", LIST, &MESSAGE), "content-reused", &id);
    for (field, value) in [("subject", "Olds"), ("body", "Bye"), ("from", "old@example.com"), ("html", "<p>Hi</p>")] {
        let mut fields: Vec<_> = MESSAGE.into_iter().filter(|(name, _)| *name != field).collect();
        fields.push((field, value));
        assert_in_the_way(&node.upload("a.csv", LIST, &fields), "message-differs", &id);
    }
    assert_eq!(each(&node.items("/mailings"), "mailingId"), [id]);
    assert_eq!(fleet.parts(), parts, "the files of refused and repeated uploads are removed");
}

fn an_explicit_identity_chooses_the_mailing(fleet: &mut Fleet) {
    let node = Node::start_as(fleet, "api", &[]);
    let with =
        |identity, name, content| node.upload(name, content, &[&MESSAGE[..], &[("identity", identity)]].concat());
    let first = node.mailing("a.csv", LIST);
    // The source's rule: the name alone.
    let differs = with("filename", "a.csv", OTHER);
    assert_eq!(differs.status, 200);
    let expected = json!({ "mailingId": first, "status": "QUEUED", "created": false, "contentDiffers": true });
    assert_eq!(differs.json(), expected);
    assert_known(&with("filename", "a.csv", LIST), &first);
    assert_known(&with("content", "renamed.csv", LIST), &first);
    // Half matches are new, whole ones are not.
    let second = created(&with("filename+content", "a.csv", OTHER));
    let third = created(&with("filename+content", "b.csv", LIST));
    assert_known(&with("filename+content", "b.csv", LIST), &third);
    // Of several that match, the oldest counts.
    assert_known(&with("content", "c.csv", LIST), &first);
    assert_known(&with("content", "c.csv", OTHER), &second);
    let oldest = with("filename", "a.csv", OTHER).json();
    assert_eq!((&oldest["mailingId"], &oldest["contentDiffers"]), (&json!(first), &json!(true)));
    assert_in_the_way(&node.upload("a.csv", "email\nnew@example.com\n", &MESSAGE), "filename-reused", &first);
    assert_in_the_way(&node.upload("c.csv", LIST, &MESSAGE), "content-reused", &first);
    let fields = [&MESSAGE[1..], &[("subject", "Olds"), ("identity", "content")]].concat();
    assert_in_the_way(&node.upload("c.csv", LIST, &fields), "message-differs", &first);
    let wrong = with("name", "d.csv", OTHER);
    assert_eq!((wrong.status, wrong.problem().as_str()), (422, "invalid-upload"));
    assert_eq!(each(&node.items("/mailings"), "mailingId"), [third, second, first]);
}

fn a_resaved_list_points_to_its_oldest_twin(fleet: &mut Fleet) {
    let node = Node::start(fleet);
    let first = node.mailing("a.csv", LIST);
    node.completed(&first);
    let saved_again =
        "\u{feff}name;E-Mail\r\nBob;BOB@example.com \r\n\"Ana\";ana@EXAMPLE.com\r\nAna;ana@example.com\r\n";
    let second = node.mailing("b.csv", saved_again);
    assert_eq!(node.completed(&second)["sameListAs"], json!(first));
    assert_eq!(node.shown(&first)["sameListAs"], json!(second));
    let third = node.mailing("c.csv", "email\nbob@example.com\nana@example.com\n");
    assert_eq!(node.completed(&third)["sameListAs"], json!(first), "the oldest one");
    let other = node.mailing("d.csv", "email\nbob@example.com\n");
    assert!(node.completed(&other)["sameListAs"].is_null());
}

fn an_upload_that_is_cut_off_leaves_nothing_and_can_be_repeated(fleet: &mut Fleet) {
    let node = Node::start_as(fleet, "api", &[]);
    // Longer than one stored part.
    let list: String = (0..40_000).map(|n| format!("person.number.{n}@example.com\n")).collect();
    let body = form("a.csv", &list, &MESSAGE);
    let head = format!(
        "POST /mailings HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\
         content-type: multipart/form-data; boundary=b\r\n\r\n",
        body.len()
    );
    let begin = |bytes: usize| {
        let mut connection = TcpStream::connect(node.address()).unwrap();
        connection.write_all(head.as_bytes()).unwrap();
        connection.write_all(&body[..bytes]).unwrap();
        connection
    };
    let begun = begin(body.len() * 6 / 10);
    eventually(LIMIT, "a part of it is stored", || fleet.parts() > 0);
    assert!(node.items("/mailings").is_empty(), "an upload under way is not visible");
    drop(begun);
    eventually(LIMIT, "its parts are removed", || fleet.parts() == 0);
    // The announced length is wrong, and the sender still listens.
    let short = begin(body.len() - 3);
    short.shutdown(Shutdown::Write).unwrap();
    let refused = Answer::read(short);
    assert_eq!((refused.status, refused.problem().as_str()), (400, "body-incomplete"), "{}", refused.body);
    assert_eq!(fleet.parts(), 0);
    assert!(node.items("/mailings").is_empty());
    assert_eq!(fleet.count("semel_outbox"), 0, "nothing is queued");
    created(&node.upload("a.csv", &list, &MESSAGE));
}

fn a_file_that_arrives_many_times_at_once_is_one_mailing(fleet: &mut Fleet) {
    const UPLOADS: usize = 24;
    let nodes = [Node::start_as(fleet, "api", &[]), Node::start_as(fleet, "api", &[])];
    let before = nodes[0].mailing("other.csv", OTHER);
    let (addresses, barrier) = (nodes.each_ref().map(Node::address), Barrier::new(UPLOADS));
    // Half of them have another name.
    let name = |n: usize| if n % 4 < 2 { "a.csv" } else { "b.csv" };
    let answers: Vec<Answer> = thread::scope(|scope| {
        let one = |n: usize| {
            barrier.wait();
            upload(addresses[n % 2], name(n), LIST, &MESSAGE)
        };
        let threads: Vec<_> = (0..UPLOADS).map(|n| scope.spawn(move || one(n))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let made: Vec<_> = (0..UPLOADS).filter(|n| answers[*n].status == 201).collect();
    assert_eq!(made.len(), 1, "{answers:?}");
    let id = created(&answers[made[0]]);
    for (n, answer) in answers.iter().enumerate().filter(|(n, _)| *n != made[0]) {
        match name(n) == name(made[0]) {
            true => assert_known(answer, &id),
            false => assert_in_the_way(answer, "content-reused", &id),
        }
    }
    assert_eq!(each(&nodes[1].items("/mailings"), "mailingId"), [id, before]);
    assert_eq!((fleet.parts(), fleet.count("semel_outbox")), (2, 2), "one file and one message each");
}

fn a_file_that_is_no_list_is_refused_and_not_stored(fleet: &mut Fleet) {
    let node = Node::start_as(fleet, "api", &[]);
    let many = "ana@example.com\n".repeat(10_000);
    let files: [(&[u8], &str, Option<u64>); 14] = [
        (b"email,name\nana@example.com,Jo\xe3o\n", "not-utf8", Some(2)),
        (b"\xff\xfee\0m\0a\0i\0l\0", "not-utf8", Some(1)),
        (b"PK\x03\x04\x14\0\x06\0[Content_Types].xml", "is-xlsx", None),
        (b"%PDF-1.7", "is-pdf", None),
        (b"<html><body>", "is-html", None),
        (b"\x1f\x8b\x08", "is-archive", None),
        (b"email\nana@example.com\nbob\0@example.com\n", "nul-bytes", Some(3)),
        (b"name,city\nAna,Rome\n", "no-address-column", Some(1)),
        (b"email,e-mail\na@x.com,b@x.com\n", "ambiguous-address-column", None),
        (b"", "empty", None),
        (b"\n\n \r\n", "empty", None),
        (b"email,name\n", "empty", None),
        (b"email\n\"ana@example.com\n", "unclosed-quote", Some(2)),
        (&[many.as_bytes(), b"\0"].concat(), "late", None),
    ];
    for (file, code, line) in &files[..13] {
        let refused = node.upload("list.csv", file, &MESSAGE);
        assert_eq!((refused.status, refused.problem().as_str()), (422, "invalid-file"), "{code}: {}", refused.body);
        let said = refused.json();
        assert_eq!(said["code"], *code, "{said}");
        if line.is_some() {
            assert_eq!(said["line"], json!(line), "{said}");
        }
    }
    // What the first 64 KiB show is found before the rest has arrived.
    let begun = [b"email\n\0", many.as_bytes()].concat();
    assert_eq!(node.upload("list.csv", begun, &MESSAGE).json()["code"], "nul-bytes");
    let column =
        |column| node.upload("list.csv", "a,b\nana@example.com,x\n", &[&MESSAGE[..], &[("column", column)]].concat());
    assert_eq!(column("c").json()["code"], "unknown-column");
    assert_eq!((fleet.parts(), fleet.count("mailings")), (0, 0), "nothing is stored");
    created(&column("a"));
    created(&node.upload("late.csv", files[13].0, &MESSAGE));
}

fn a_dry_run_reports_and_stores_nothing(fleet: &mut Fleet) {
    let node = Node::start_as(fleet, "api", &[]);
    let list = format!("{LIST}BOB@example.com,Bob\nnobody,No\n");
    let report = node.upload("../a.csv", &list, &[("subject", "Hi {{ name }}"), ("dryRun", "true")]);
    assert_eq!(report.status, 200, "{}", report.body);
    let report = report.json();
    assert_eq!((&report["filename"], &report["delimiter"]), (&json!("a.csv"), &json!(",")));
    assert_eq!(
        [&report["total"], &report["duplicateRows"], &report["rejectedRows"]],
        [2, 1, 1].map(|n| json!(n)).each_ref()
    );
    assert_eq!(report["rejects"][0]["code"], "no-at-sign");
    assert_eq!(report["preview"]["subject"], "Hi Ana");
    // A file that is broken at its end.
    let broken = [LIST.repeat(3_000).as_bytes(), b"\"open\n"].concat();
    let refused = node.upload("a.csv", broken, &[("dryRun", "true")]);
    assert_eq!((refused.status, refused.json()["code"].as_str()), (422, Some("unclosed-quote")), "{}", refused.body);
    assert_eq!((fleet.parts(), fleet.count("mailings"), fleet.count("semel_outbox")), (0, 0, 0));
}

fn a_file_name_is_a_label_and_never_a_path(fleet: &mut Fleet) {
    let node = Node::start_as(fleet, "api", &[]);
    let long = format!("{}.csv", "x".repeat(300));
    let names = [
        ("../../etc/passwd", "passwd"),
        ("C:/x/CON.csv", "CON.csv"),
        ("cafe\u{301}\u{202e}.csv", "caf\u{e9}.csv"),
        (long.as_str(), &format!("{}.csv", "x".repeat(251))),
    ];
    for (n, (given, shown)) in names.into_iter().enumerate() {
        let id = node.mailing(given, format!("email\nuser{n}@example.com\n"));
        assert_eq!(node.shown(&id)["filename"], json!(shown));
        // The cleaned name is the one that counts.
        assert_eq!(node.upload(shown, OTHER, &MESSAGE).problem(), "filename-reused");
    }
    for given in ["", "..", "a/"] {
        let refused = node.upload(given, OTHER, &MESSAGE);
        assert_eq!((refused.status, refused.problem().as_str()), (422, "invalid-upload"), "{given}: {}", refused.body);
    }
    // Names composed in another way are the same.
    let id = node.upload("caf\u{e9}.csv", "email\nuser2@example.com\n", &MESSAGE);
    assert_eq!((id.status, &id.json()["created"]), (200, &json!(false)));
}
