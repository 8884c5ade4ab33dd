//! What people do with mailings: those who send them, and those who do not want them.

use std::time::SystemTime;

use semel::Timestamp;
use serde_json::{Value, json};

use crate::{
    fleet::{ALL, Fleet, ask, on_every_fleet},
    mailings::{LIMIT, MESSAGE, Node, created, each},
    mailings_kill::{check_counts, check_entries, count, list},
    support::eventually,
};

on_every_fleet! {
    suppressed_addresses_are_added_listed_and_removed
    a_link_unsubscribes_by_post_only_and_twice_is_once
    a_mailing_whose_time_has_long_passed_is_sent_when_a_person_resumes_it
    a_mailing_waits_for_its_time_and_an_address_suppressed_meanwhile_gets_no_mail
    a_test_mail_goes_to_its_address_only
    a_mailing_that_is_paused_before_its_import_imports_nothing
    a_mailing_that_runs_is_not_deleted_and_a_deleted_one_leaves_no_rows
    a_missing_variable_is_reported_before_anything_is_stored
    line_breaks_reach_no_header_and_markup_no_page
}

const LIST: &str = "email,name\nana@example.com,Ana\nbob@example.com,Bob\n";

fn suppressed(node: &Node) -> Vec<String> {
    each(&node.items("/suppressions"), "email")
}

fn suppressed_addresses_are_added_listed_and_removed(fleet: &mut Fleet) {
    let node = Node::start_as(fleet, "api", &[]);
    let add = |emails: Value| node.post("/suppressions", &json!({ "emails": emails, "reason": "asked" }).to_string());
    let three = json!(["Bob@Example.com", "ana@example.com", "eva@m\u{fc}nchen.de"]);
    assert_eq!(add(three.clone()).json(), json!({ "added": 3, "known": 0 }));
    assert_eq!(add(three).json(), json!({ "added": 0, "known": 3 }));
    assert_eq!(suppressed(&node), ["ana@example.com", "bob@example.com", "eva@xn--mnchen-3ya.de"]);
    let page = node.json("/suppressions?limit=2");
    assert_eq!(each(page["items"].as_array().unwrap(), "reason"), ["asked", "asked"]);
    let rest = node.items(&format!("/suppressions?limit=2&cursor={}", page["next"].as_str().unwrap()));
    assert_eq!(each(&rest, "email"), ["eva@xn--mnchen-3ya.de"]);
    assert_eq!(each(&node.items("/suppressions?email=BOB@example.com"), "email"), ["bob@example.com"]);
    // One wrong address refuses the request as a whole.
    for wrong in [json!(["zoe@example.com", "nobody"]), json!([]), json!("zoe@example.com"), json!(null)] {
        let refused = add(wrong);
        assert_eq!((refused.status, refused.problem().as_str()), (422, "invalid-fields"), "{}", refused.body);
    }
    let remove = |email: &str| ask(node.address(), "DELETE", &format!("/suppressions/{email}"), "").unwrap().status;
    assert_eq!([remove("BOB@example.com"), remove("bob@example.com"), remove("nobody")], [200, 404, 404]);
    assert_eq!(suppressed(&node), ["ana@example.com", "eva@xn--mnchen-3ya.de"]);
    let audit = fleet.texts("SELECT action || ' ' || subject || ' ' || reason FROM semel_audit ORDER BY id");
    assert_eq!(audit, ["suppressions.add 3 addresses asked", "suppressions.remove 1 address "]);
}

/// The value of a header in a mail.
fn header<'a>(mail: &'a str, name: &str) -> Option<&'a str> {
    let head = mail.split("\r\n\r\n").next().unwrap();
    head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
}

/// The path of the link in a mail.
fn link(mail: &str) -> String {
    let url = header(mail, "List-Unsubscribe").unwrap().trim_matches(['<', '>']);
    url.strip_prefix("https://mail.example.com/news").unwrap().to_owned()
}

const PUBLIC: (&str, &str) = ("SEMEL_PUBLIC_URL", "https://mail.example.com/news/");

fn a_link_unsubscribes_by_post_only_and_twice_is_once(fleet: &mut Fleet) {
    let node = Node::start_as(fleet, ALL, &[PUBLIC]);
    node.completed(&node.mailing("a.csv", LIST));
    let mails = node.mails();
    let ana = mails.iter().find(|mail| header(mail, "To") == Some("ana@example.com")).unwrap();
    assert_eq!(header(ana, "List-Unsubscribe-Post"), Some("List-Unsubscribe=One-Click"));
    let path = link(ana);
    assert!(path.starts_with("/u/") && path.rsplit('-').next().unwrap().len() == 32, "{path}");
    assert_ne!(mails.iter().map(|mail| link(mail)).find(|other| *other != path), None, "each mail has its own link");
    // Mail scanners open every link.
    let page = node.get(&path);
    assert_eq!((page.status, page.header("content-type")), (200, Some("text/html; charset=utf-8")));
    assert!(page.body.contains("<form method=\"post\">") && !page.body.contains("ana@"), "{}", page.body);
    assert!(suppressed(&node).is_empty(), "GET changes nothing");
    let last = if path.ends_with('0') { "1" } else { "0" };
    let guessed = format!("{}{last}", &path[..path.len() - 1]);
    let foreign = path.replacen("-2-", "-3-", 1);
    for wrong in [&guessed, &foreign, &path[..path.len() - 2], &format!("{path}00"), "/u/1-2-", "/u/x", "/u/1-2-zz"] {
        assert_eq!([node.get(wrong).status, node.post(wrong, "").status], [404, 404], "{wrong}");
    }
    assert!(suppressed(&node).is_empty());
    for _ in 0..2 {
        // A mail program posts a form, and has no origin of ours.
        let done = node.post(&path, "List-Unsubscribe=One-Click");
        assert_eq!(done.status, 200, "{}", done.body);
    }
    assert_eq!(suppressed(&node), ["ana@example.com"]);
    let mailing = node.completed(&node.mailing("b.csv", "email\nANA@example.com\neva@example.com\n"));
    assert_eq!((count(&mailing, "sent"), count(&mailing, "suppressed")), (1, 1), "{mailing}");
    assert_eq!(node.mails().len(), 3);
}

/// A time from now, as an upload gives it.
fn at(seconds: i64) -> String {
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_micros();
    Timestamp::from_micros(i64::try_from(now).unwrap() + seconds * 1_000_000).to_string()
}

fn a_mailing_waits_for_its_time_and_an_address_suppressed_meanwhile_gets_no_mail(fleet: &mut Fleet) {
    let node = Node::start(fleet);
    let with = |name, time: &str| {
        node.upload(name, LIST, &[&MESSAGE[..], &[("sendAt", time), ("identity", "filename")]].concat())
    };
    let time = at(3);
    let id = created(&with("soon.csv", &time));
    let mailing = node.until(&id, "it is imported", |mailing| mailing["phase"] == "sending");
    assert_eq!((count(&mailing, "pending"), &mailing["sendAt"]), (2, &json!(time)), "{mailing}");
    assert_eq!(node.post("/suppressions", r#"{"emails":["bob@example.com"]}"#).status, 200);
    let mailing = node.completed(&id);
    assert_eq!((count(&mailing, "sent"), count(&mailing, "suppressed")), (1, 1), "{mailing}");
    let entries = node.entries(&id);
    assert_eq!(each(&entries, "status"), ["SENT", "SUPPRESSED"]);
    assert!(entries[0]["lastAttempt"].as_str().unwrap() >= time.as_str(), "{}", entries[0]);
    assert_eq!(fleet.count("semel_outbox") + fleet.queued_in("mailing.process"), 0, "it was not recovered meanwhile");
    // A time that has long passed waits for a person: perhaps the database was restored from a backup.
    let late = created(&with("late.csv", &at(-2 * 24 * 3600)));
    let mailing = node.until_status(&late, "PAUSED");
    assert!(mailing["error"].as_str().unwrap().contains("sendAt"), "{mailing}");
    assert_eq!(node.mails().len(), 1);
    let wrong = with("wrong.csv", "tomorrow");
    assert_eq!((wrong.status, wrong.problem().as_str()), (422, "invalid-upload"));
}

fn a_test_mail_goes_to_its_address_only(fleet: &mut Fleet) {
    let node = Node::start_as(fleet, ALL, &[PUBLIC, ("SEMEL_MAILINGS_RATE", "1/h")]);
    let id = created(&node.upload("a.csv", LIST, &[("subject", "Hi {{ name }}"), ("body", "{{ unsubscribe_url }}")]));
    node.until(&id, "the first mail is sent", |mailing| count(mailing, "sent") == 1);
    let before = node.shown(&id)["counts"].clone();
    let sent = node.post(&format!("/mailings/{id}/test"), r#"{"email":"Tester@example.com"}"#);
    assert_eq!(sent.status, 200, "{}", sent.body);
    let mails = node.mails();
    let [first, test] = &mails[..] else { panic!("two mails") };
    assert_eq!((header(test, "To"), header(test, "Subject")), (Some("tester@example.com"), Some("Hi Ana")));
    assert_ne!(header(first, "Message-ID"), header(test, "Message-ID"));
    assert_eq!(node.shown(&id)["counts"], before, "a test leaves no trace");
    // The tester must not unsubscribe the person whose row was used.
    assert_ne!(link(first), link(test));
    assert_eq!(node.post(&link(test), "").status, 404);
    let body = test.split_once("\r\n\r\n").unwrap().1;
    assert!(!body.contains(&link(first)) && body.contains("/u/"), "{body}");
    assert!(suppressed(&node).is_empty());
    for wrong in [r#"{"email":"nobody"}"#, "{}"] {
        assert_eq!(node.post(&format!("/mailings/{id}/test"), wrong).status, 422);
    }
}

fn a_mailing_that_is_paused_before_its_import_imports_nothing(fleet: &mut Fleet) {
    let api = Node::start_as(fleet, "api", &[]);
    let id = api.mailing("a.csv", LIST);
    assert_eq!(api.act(&id, "pause")["status"], "PAUSED");
    assert_eq!(api.act(&id, "pause")["status"], "PAUSED", "twice is once");
    let early = api.post(&format!("/mailings/{id}/test"), r#"{"email":"tester@example.com"}"#);
    assert_eq!((early.status, early.problem().as_str()), (409, "no-entries"));
    let node = Node::start(fleet);
    eventually(LIMIT, "the run has ended", || fleet.count("mailings WHERE active") == 0);
    let mailing = node.shown(&id);
    assert_eq!((count(&mailing, "total"), &mailing["phase"]), (0, &json!("importing")), "{mailing}");
    assert_eq!(node.act(&id, "resume")["status"], "QUEUED");
    let mailing = node.completed(&id);
    assert_eq!((count(&mailing, "sent"), &mailing["run"]), (2, &json!(2)), "{mailing}");
    for action in ["pause", "resume", "retry", "cancel"] {
        let refused = node.post(&format!("/mailings/{id}/{action}"), "{}");
        assert_eq!((refused.status, refused.problem().as_str()), (409, "mailing-not-in-this-state"), "{action}");
        assert_eq!(refused.json()["mailingStatus"], "COMPLETED");
    }
    assert_eq!(node.mails().len(), 2);
}

fn a_mailing_that_runs_is_not_deleted_and_a_deleted_one_leaves_no_rows(fleet: &mut Fleet) {
    let node = Node::start_as(fleet, ALL, &[("SEMEL_MAILINGS_RATE", "20/s")]);
    let list = list(100) + "user1@example.com,Again\nnobody,No\n";
    let id = node.mailing("a.csv", &list);
    let delete = || ask(node.address(), "DELETE", &format!("/mailings/{id}"), "").unwrap();
    node.until(&id, "some are sent", |mailing| count(mailing, "sent") > 0);
    let refused = delete();
    assert_eq!((refused.status, refused.problem().as_str()), (409, "mailing-not-in-this-state"), "{}", refused.body);
    assert_eq!(node.act(&id, "cancel")["status"], "CANCELLED");
    let over = |m: &Value| count(m, "pending") + count(m, "sending") == 0;
    let mailing = node.until(&id, "the rest is cancelled", over);
    check_counts(&mailing, 100);
    check_entries(fleet, &mailing);
    assert_eq!(count(&mailing, "sent") + count(&mailing, "cancelled"), 100, "{mailing}");
    eventually(LIMIT, "it can be deleted", || delete().status == 200);
    assert_eq!((node.get(&format!("/mailings/{id}")).status, delete().status), (404, 404));
    assert!(node.items("/mailings").is_empty());
    eventually(LIMIT, "its rows are gone", || {
        ["mailings", "mailing_entries", "mailing_rejects", "mailing_duplicates"].iter().all(|t| fleet.count(t) == 0)
    });
    // The name and the content are free again; nothing of the deleted one is sent.
    let again = node.mailing("a.csv", &list);
    node.until(&again, "some are sent", |mailing| count(mailing, "sent") > 0);
    node.act(&again, "cancel");
    assert_ne!(again, id);
    let of_deleted = |mail: &&String| header(mail, "Message-ID").unwrap().contains(&id);
    assert_eq!(node.mails().iter().filter(of_deleted).count(), count(&mailing, "sent"));
}

fn a_missing_variable_is_reported_before_anything_is_stored(fleet: &mut Fleet) {
    let node = Node::start_as(fleet, "api", &[]);
    for (fields, said) in [
        (&[("body", "Hello {{ city }}")][..], "city"),
        (&[("subject", "Hello {{ nome }}")], "nome"),
        (&[("html", "<p>{{ Name }}</p>")], "Name"),
        (&[("body", "{{ name"), ("subject", "{% x %}")], "subject"),
        (&[("body", "{% for x in name %}{{ x }}{% endfor %}")], "body"),
    ] {
        let refused = node.upload("a.csv", LIST, fields);
        assert_eq!((refused.status, refused.problem().as_str()), (422, "invalid-upload"), "{fields:?}");
        assert!(refused.json()["errors"].to_string().contains(said), "{}", refused.body);
    }
    assert_eq!((fleet.parts(), fleet.count("mailings")), (0, 0));
    // Without a body, only files have one by default.
    let smtp = Node::start_as(fleet, "api", &[("SEMEL_MAIL_TRANSPORT", "smtp://127.0.0.1:1")]);
    let refused = smtp.upload("a.csv", LIST, &[]);
    let errors = refused.json()["errors"].to_string();
    assert!(["body", "from", "subject"].iter().all(|field| errors.contains(field)), "{errors}");
    created(&node.upload("a.csv", LIST, &[]));
}

fn line_breaks_reach_no_header_and_markup_no_page(fleet: &mut Fleet) {
    let node = Node::start(fleet);
    for field in ["subject", "from"] {
        let mut fields: Vec<_> = MESSAGE.into_iter().filter(|(name, _)| *name != field).collect();
        fields.push((field, "News <news@example.com>\r\nBcc: eve@example.com"));
        let refused = node.upload("a.csv", LIST, &fields);
        assert_eq!((refused.status, refused.problem().as_str()), (422, "invalid-upload"), "{field}: {}", refused.body);
    }
    let list = "email,name\n\
                ana@example.com,\"Ana\r\nBcc: eve@example.com\"\n\
                bob@example.com,<script>alert(1)</script>\n\
                \"eve@example.com\r\nBcc: x@example.com\",Eve\n";
    let fields = [("subject", "Hi {{ name }}"), ("html", "<p>{{ name }}</p>"), ("from", "news@example.com")];
    let id = created(&node.upload("a.csv", list, &fields));
    let mailing = node.completed(&id);
    check_counts(&mailing, 1);
    assert_eq!((count(&mailing, "sent"), mailing["rejectedRows"].as_i64()), (1, Some(2)), "{mailing}");
    // Each row is rendered before anything is sent.
    let rejects = node.get(&format!("/mailings/{id}/rejects.csv")).body;
    assert!(rejects.contains("not-rendered") && rejects.contains("line break"), "{rejects}");
    let mails = node.mails();
    assert!(mails.len() == 1 && header(&mails[0], "Bcc").is_none());
    let body = mails[0].split_once("\r\n\r\n").unwrap().1;
    assert!(!body.contains("<script>") && body.contains("&lt;script&gt;"), "{body}");
}

fn a_mailing_whose_time_has_long_passed_is_sent_when_a_person_resumes_it(fleet: &mut Fleet) {
    let node = Node::start(fleet);
    let time = at(-2 * 24 * 3600);
    let fields = [&MESSAGE[..], &[("sendAt", time.as_str())]].concat();
    let id = created(&node.upload("late.csv", LIST, &fields));
    node.until_status(&id, "PAUSED");
    node.act(&id, "resume");
    assert_eq!(count(&node.completed(&id), "sent"), 2);
}
