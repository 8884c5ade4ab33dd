//! Level 2 of a mailing: the rows of a file become one entry per address, and every other row is accounted for.

use serde_json::json;

use crate::{
    fleet::{Fleet, on_every_fleet},
    mailings::{MESSAGE, Node, created, each},
    mailings_kill::{check_counts, count},
};

on_every_fleet! {
    every_dialect_of_csv_gives_the_same_entries
    each_address_has_one_entry_and_duplicates_have_their_lines
    rejected_rows_are_reported_with_line_column_and_code
    a_file_that_is_broken_late_fails_the_mailing_with_the_line
    entries_are_paged_and_filtered_and_exported
    mailings_are_listed_newest_first_paged_and_filtered
}

fn every_dialect_of_csv_gives_the_same_entries(fleet: &mut Fleet) {
    let node = Node::start(fleet);
    // Each with the lines on which the two addresses stand.
    let files: [(&str, [i64; 2]); 14] = [
        ("email,name\nana@example.com,Ana\nbob@example.com,Bob\n", [2, 3]),
        ("name;E-Mail\nAna;ana@example.com\nBob;bob@example.com\n", [2, 3]),
        ("name\tEMAIL\nAna\tana@example.com\nBob\tbob@example.com", [2, 3]),
        ("name|Email Address\nAna|ana@example.com\nBob|bob@example.com\n", [2, 3]),
        ("sep=;\r\nemail;name\r\nana@example.com;Ana, A.\r\nbob@example.com;Bob, B.\r\n", [3, 4]),
        ("\u{feff}email,name\nana@example.com,Ana\nbob@example.com,Bob\n", [2, 3]),
        ("email,name\r\nana@example.com,Ana\r\nbob@example.com,Bob\r\n", [2, 3]),
        ("email,name\rana@example.com,Ana\rbob@example.com,Bob\r", [2, 3]),
        ("\n\n  \nemail,name\nana@example.com,Ana\n\n,\nbob@example.com,Bob\n", [5, 8]),
        ("email,name\nana@example.com,\"Ana\nof \"\"Rome\"\", Italy\"\nbob@example.com,Bob\n", [2, 4]),
        ("email\nana@example.com\nbob@example.com", [2, 3]),
        ("ana@example.com\nbob@example.com\n", [1, 2]),
        ("Ana,ana@example.com,\nBob,bob@example.com,\n", [1, 2]),
        ("first,second\nana@example.com,x\nbob@example.com,y\n", [2, 3]),
    ];
    let upload = |(n, (file, _)): (usize, &(&str, [i64; 2]))| {
        let column = if file.starts_with("first") { &[("column", "first")][..] } else { &[] };
        created(&node.upload(&format!("{n}.csv"), file, &[&MESSAGE[..], column].concat()))
    };
    let ids: Vec<String> = files.iter().enumerate().map(upload).collect();
    for (id, (file, lines)) in ids.iter().zip(files) {
        let mailing = node.completed(id);
        assert_eq!((count(&mailing, "sent"), &mailing["rejectedRows"]), (2, &json!(0)), "{file:?}: {mailing}");
        let entries = node.entries(id);
        assert_eq!(each(&entries, "email"), ["ana@example.com", "bob@example.com"], "{file:?}");
        assert_eq!(each(&entries, "line"), lines.map(|line| line.to_string()), "{file:?}");
    }
    assert_eq!(node.mails().len(), 2 * files.len());
    assert_eq!(fleet.parts(), 0, "an imported file is removed");
}

fn each_address_has_one_entry_and_duplicates_have_their_lines(fleet: &mut Fleet) {
    let node = Node::start(fleet);
    let list = "email\n\
                Zoe@Example.com\n\
                ana+x@example.com\n\
                zoe@example.com\n\
                u@m\u{fc}nchen.de\n\
                \u{a0}ZOE@EXAMPLE.COM\u{200b}\n\
                u@xn--mnchen-3ya.de\n\
                ana@example.com\n";
    let id = node.mailing("a.csv", list);
    let mailing = node.completed(&id);
    check_counts(&mailing, 4);
    assert_eq!([&mailing["duplicateRows"], &mailing["rejectedRows"]], [&json!(3), &json!(0)]);
    let entries = node.entries(&id);
    // By the line of first appearance, as it was written, and normalised.
    assert_eq!(each(&entries, "line"), ["2", "3", "5", "8"]);
    assert_eq!(
        each(&entries, "original"),
        ["Zoe@Example.com", "ana+x@example.com", "u@m\u{fc}nchen.de", "ana@example.com"]
    );
    assert_eq!(
        each(&entries, "email"),
        ["zoe@example.com", "ana+x@example.com", "u@xn--mnchen-3ya.de", "ana@example.com"]
    );
    let lines = |line: i64, first: i64| json!({ "line": line, "firstLine": first });
    let path = format!("/mailings/{id}/duplicates");
    assert_eq!(node.items(&path), [lines(4, 2), lines(6, 2), lines(7, 5)]);
    let page = node.json(&format!("{path}?limit=2"));
    assert_eq!(page["items"].as_array().unwrap().len(), 2);
    let rest = node.items(&format!("{path}?limit=2&cursor={}", page["next"].as_str().unwrap()));
    assert_eq!(rest, [lines(7, 5)]);
    assert_eq!(node.mails().len(), 4);
}

fn rejected_rows_are_reported_with_line_column_and_code(fleet: &mut Fleet) {
    let node = Node::start(fleet);
    let list = "name,Email\n\
                Ana,ana@example.com\n\
                =1+1,=cmd|' /C calc'!A0\n\
                Bob,@example.com\n\
                +Eve,+eve@example.com\n\
                short\n\
                Joe,joe@example.com,more\n\
                \"Two\nlines\",a@b\n\
                Zoe,zoe@example.com\n";
    let id = node.mailing("a.csv", list);
    let mailing = node.completed(&id);
    assert_eq!((count(&mailing, "sent"), &mailing["rejectedRows"]), (3, &json!(5)), "{mailing}");
    let report = node.get(&format!("/mailings/{id}/rejects.csv"));
    assert_eq!((report.status, report.header("content-type")), (200, Some("text/csv; charset=utf-8")));
    let report = unchunked(&report.body);
    let rows: Vec<&str> = report.lines().collect();
    let expected = [
        "line,column,code,value",
        "3,Email,no-at-sign,'=cmd|' /C calc'!A0",
        "4,Email,empty-local-part,'@example.com",
        "6,,wrong-number-of-columns,short",
        "7,,wrong-number-of-columns,\"Joe,joe@example.com,more\"",
        "8,Email,domain-without-dot,a@b",
    ];
    assert_eq!(rows, expected);
    // An address may begin like a formula: it gets its mail, and is disarmed in the export only.
    assert_eq!(each(&node.entries(&id), "email"), ["ana@example.com", "+eve@example.com", "zoe@example.com"]);
    let export = unchunked(&node.get(&format!("/mailings/{id}/export.csv")).body);
    assert!(export.contains("\r\n5,'+eve@example.com,SENT,1,"), "{export}");
}

/// The text of a body in chunks.
fn unchunked(body: &str) -> String {
    let (mut rest, mut text) = (body, String::new());
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        text += &after[..size];
        rest = &after[size + 2..];
    }
    text
}

fn a_file_that_is_broken_late_fails_the_mailing_with_the_line(fleet: &mut Fleet) {
    let node = Node::start(fleet);
    let begun = |n: usize| (0..n).fold("email\n".to_owned(), |list, n| format!("{list}user{n}@example.com\n"));
    let fine = begun(5_000);
    assert!(fine.len() > 64 << 10);
    for (name, end, why) in [
        ("latin.csv", &b"jos\xe9@example.com\n"[..], "not UTF-8"),
        ("nul.csv", b"a\0@example.com\n", "NUL bytes"),
        ("quote.csv", b"\"open@example.com\nmore@example.com\n", "never closed"),
    ] {
        let id = node.mailing(name, [fine.as_bytes(), end].concat());
        let mailing = node.until_status(&id, "FAILED");
        let error = mailing["error"].as_str().unwrap();
        assert!(error.contains("line 5002") && error.contains(why), "{error}");
        assert_eq!((mailing["phase"].as_str(), count(&mailing, "sent")), (Some("importing"), 0), "{mailing}");
    }
    assert!(node.mails().is_empty(), "nothing is sent of a broken file");
    // It stays failed after a retry, and the others go on.
    let failed = each(&node.items("/mailings?status=FAILED"), "mailingId");
    assert_eq!(failed.len(), 3);
    assert_eq!(node.act(&failed[0], "retry")["status"], "QUEUED");
    assert_eq!(node.until_status(&failed[0], "FAILED")["run"], 2);
    node.completed(&node.mailing("fine.csv", "email\nana@example.com\n"));
}

fn entries_are_paged_and_filtered_and_exported(fleet: &mut Fleet) {
    let node = Node::start(fleet);
    let added = node.post("/suppressions", r#"{"emails":["user3@example.com"]}"#);
    assert_eq!(added.json(), json!({ "added": 1, "known": 0 }), "{}", added.body);
    let list = (0..7).fold("email\n".to_owned(), |list, n| format!("{list}User{n}@example.com\n"));
    let id = node.mailing("a.csv", list);
    let mailing = node.completed(&id);
    check_counts(&mailing, 7);
    assert_eq!(["sent", "suppressed"].map(|name| count(&mailing, name)), [6, 1], "{mailing}");
    assert_eq!((&mailing["progress"], &mailing["storageUrl"]), (&json!(1.0), &json!(null)));
    let path = format!("/mailings/{id}/entries");
    let (mut lines, mut page) = (Vec::new(), node.json(&format!("{path}?status=SENT&limit=2")));
    while let Some(next) = page["next"].as_str().map(str::to_owned) {
        lines.extend(each(page["items"].as_array().unwrap(), "line"));
        page = node.json(&format!("{path}?status=SENT&limit=2&cursor={next}"));
    }
    lines.extend(each(page["items"].as_array().unwrap(), "line"));
    assert_eq!(lines, ["2", "3", "4", "6", "7", "8"]);
    assert_eq!(each(&node.items(&format!("{path}?status=SUPPRESSED")), "email"), ["user3@example.com"]);
    // An address is found however it is written.
    assert_eq!(each(&node.items(&format!("{path}?email=USER5@example.com")), "line"), ["7"]);
    assert!(node.items(&format!("{path}?email=user5@example.com&status=FAILED")).is_empty());
    assert!(node.items(&format!("{path}?email=stranger@example.com")).is_empty());
    for wrong in ["status=Sent", "email=nobody", "limit=0", "cursor=x", "page=2"] {
        let refused = node.get(&format!("{path}?{wrong}"));
        assert_eq!((refused.status, refused.problem().as_str()), (400, "invalid-query"), "{wrong}");
    }
    let export = unchunked(&node.get(&format!("/mailings/{id}/export.csv")).body);
    let rows: Vec<Vec<&str>> = export.lines().map(|row| row.split(',').collect()).collect();
    assert_eq!(rows[0], ["line", "email", "status", "attempts", "time", "messageId", "externalId", "error"]);
    assert_eq!(rows.len(), 8);
    for (row, entry) in rows[1..].iter().zip(node.entries(&id)) {
        let shown = ["line", "original", "status"].map(|name| each(std::slice::from_ref(&entry), name).remove(0));
        assert_eq!(row[..3], shown, "{row:?}");
        assert_eq!((row[4], row[5]), (entry["updatedAt"].as_str().unwrap(), entry["messageId"].as_str().unwrap()));
        assert!(!row[5].contains("user"), "a Message-ID has no address inside: {}", row[5]);
    }
    for path in ["entries", "duplicates", "rejects.csv", "export.csv"] {
        assert_eq!(node.get(&format!("/mailings/unknown/{path}")).status, 404);
    }
}

fn mailings_are_listed_newest_first_paged_and_filtered(fleet: &mut Fleet) {
    let node = Node::start_as(fleet, "api", &[]);
    let ids: Vec<String> =
        (0..5).map(|n| node.mailing(&format!("{n}.csv"), format!("email\nuser{n}@example.com\n"))).collect();
    node.act(&ids[1], "pause");
    let newest_first: Vec<_> = ids.iter().rev().cloned().collect();
    let (mut listed, mut page) = (Vec::new(), node.json("/mailings?limit=2"));
    while let Some(next) = page["next"].as_str().map(str::to_owned) {
        listed.extend(each(page["items"].as_array().unwrap(), "mailingId"));
        page = node.json(&format!("/mailings?limit=2&cursor={next}"));
    }
    listed.extend(each(page["items"].as_array().unwrap(), "mailingId"));
    assert_eq!(listed, newest_first);
    assert_eq!(each(&node.items("/mailings?status=PAUSED"), "mailingId"), [ids[1].clone()]);
    assert_eq!(node.items("/mailings?status=QUEUED").len(), 4);
    assert_eq!(each(&node.items("/mailings?filename=3.csv"), "mailingId"), [ids[3].clone()]);
    assert!(node.items("/mailings?filename=3.csv&status=PAUSED").is_empty());
    for wrong in ["status=DONE", "limit=501", "name=3.csv", "cursor=-1"] {
        assert_eq!(node.get(&format!("/mailings?{wrong}")).problem(), "invalid-query", "{wrong}");
    }
}
