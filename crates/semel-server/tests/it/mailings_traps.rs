//! Ways in which mailings go wrong elsewhere: imports that are killed between batches, and restarts between pauses.

use semel_testkit::faults::torture;
use serde_json::json;

use crate::{
    fleet::{ALL, Fleet, on_every_fleet, stop},
    mailings::{MESSAGE, Node, created, upload},
    mailings_http::Provider,
    mailings_kill::{SHORT, count, list},
};

on_every_fleet! {
    pauses_and_restarts_send_each_mail_once
    an_import_killed_between_batches_goes_on_without_loss_or_duplicates
}

/// More rows than a batch has on either database.
const ROWS: usize = 12_000;

fn an_import_killed_between_batches_goes_on_without_loss_or_duplicates(fleet: &mut Fleet) {
    let mail = fleet.place.path("mail");
    std::fs::create_dir(&mail).unwrap();
    let transport = format!("file:{}", mail.display());
    let variables = [&SHORT[..], &[("SEMEL_MAIL_TRANSPORT", transport.as_str())]].concat();
    // Every tenth row repeats an address of the first batch or of its own, every hundredth is no address.
    let row = |n: usize| match n {
        n if n % 100 == 99 => format!("nobody{n}\n"),
        n if n % 10 == 9 => format!("USER{}@example.com\n", n / 20 * 10),
        n => format!("user{n}@example.com\n"),
    };
    let list = (0..ROWS).fold("email\n".to_owned(), |list, n| list + &row(n));
    // Far from now, so that nothing is sent.
    let fields = [&MESSAGE[..], &[("sendAt", "2999-01-01T00:00:00Z")]].concat();
    let point = "mailing.imported_batch";
    let mut dying = fleet.start_dying(ALL, point, &variables);
    let id = created(&upload(dying.address, "a.csv", &list, &fields));
    fleet.died_at(point, &mut dying);
    assert!((1..ROWS * 9 / 10).contains(&fleet.count("mailing_entries")), "it died between two batches");
    let node = Node::start_as(fleet, ALL, &variables);
    let mailing = node.until(&id, "it is imported", |mailing| mailing["phase"] == "sending");
    let (rejected, duplicates) = (ROWS / 100, ROWS / 10 - ROWS / 100);
    assert_eq!((&mailing["rejectedRows"], &mailing["duplicateRows"]), (&json!(rejected), &json!(duplicates)));
    let total = ROWS - rejected - duplicates;
    assert_eq!((count(&mailing, "total"), count(&mailing, "pending")), (total, total));
    let rows = ["mailing_entries", "mailing_rejects", "mailing_duplicates"].map(|table| fleet.count(table));
    assert_eq!(rows, [total, rejected, duplicates], "the counts are those of the rows");
    let wrong = "mailing_entries WHERE email <> 'user' || (line - 2) || '@example.com'";
    assert_eq!(fleet.count(wrong), 0, "each entry has the line of its address");
}

fn pauses_and_restarts_send_each_mail_once(fleet: &mut Fleet) {
    let rounds = if torture() { 20 } else { 4 };
    let addresses = 10 * rounds + 20;
    let provider = Provider::start();
    let transport = provider.transport("window=1h");
    let variables = [("SEMEL_MAIL_TRANSPORT", transport.as_str()), ("SEMEL_MAILINGS_RATE", "20/s")];
    let mut node = Node::start_as(fleet, ALL, &variables);
    let id = node.mailing("a.csv", list(addresses));
    for round in 1..=rounds {
        node.until(&id, "more is sent", |mailing| count(mailing, "sent") >= round * 10);
        assert_eq!(node.act(&id, "pause")["status"], "PAUSED");
        // A graceful stop: mails under way end, and those that were not begun are given back.
        stop(node.server);
        node = Node::start_as(fleet, ALL, &variables);
        assert_eq!(node.act(&id, "resume")["status"], "QUEUED");
    }
    let mailing = node.completed(&id);
    assert_eq!((count(&mailing, "sent"), count(&mailing, "total")), (addresses, addresses));
    provider.assert_one_key_each(addresses);
    assert_eq!(provider.asked().len(), addresses, "no request was repeated");
}
