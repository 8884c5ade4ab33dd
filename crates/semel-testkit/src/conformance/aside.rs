//! An unreadable or unwritable row affects no other: the sweep, listings and workers go on with the rest, and the row
//! is set aside for a person.

use std::time::Duration;

use semel::{
    Backoff, Error, Operation, Policy, State,
    journal::Event,
    look::{Filter, Page, Task},
    machine::{Answer, NotNow, Write},
    prelude::*,
    store::{Decision, LeaseWrite, Limits, Swept, Want},
};
use semel_store::{Database, on};

use super::tools::*;
use crate::{Kind, Lab, key, request, scope, work};

/// When a row that was set aside is tried again.
const AGAIN: Duration = secs(6 * 3600);

const MIB: usize = 1 << 20;

/// An operation with a retention of a minute.
fn short_lived() -> Policy {
    Policy { retention: Some(secs(60)), ..Policy::default() }
}

fn name(n: usize) -> String {
    format!("k{n:02}")
}

/// Claims this many keys at once, each with a payload of this many bytes.
async fn claimed(store: &Database, n: usize, bytes: usize, policy: &Policy) -> Vec<Operation> {
    let mut operations = Vec::new();
    // A few at a time, if they are large.
    for part in (0..n).collect::<Vec<_>>().chunks(if bytes < 1000 { 100 } else { 10 }) {
        let mut asked = Vec::new();
        for n in part {
            let mut request = request(&name(*n), b"", policy.clone());
            request.payload = Some(vec![b'x'; bytes].into());
            asked.push(request.into());
        }
        operations.extend(store.claim(asked).await.unwrap().into_iter().map(|applied| applied.operation.unwrap()));
    }
    operations
}

async fn completed(store: &Database, n: usize, bytes: usize, policy: &Policy) -> Vec<Operation> {
    let operations = claimed(store, n, bytes, policy).await;
    let complete = |op: &Operation| LeaseWrite { id: op.id, fence: op.fence, write: Write::Complete(done("ok")) };
    store.write(operations.iter().map(complete).collect()).await.unwrap();
    operations
}

/// Lets the database refuse a change of a table, for rows that match a condition.
async fn refuse(lab: &Lab, change: &str, table: &str, condition: &str) {
    match lab.kind() {
        Kind::Sqlite => {
            let sql = format!(
                "CREATE TRIGGER refuse_{table} BEFORE {change} ON {table} WHEN {condition}
                 BEGIN SELECT RAISE(ABORT, 'not this one'); END"
            );
            lab.execute(&sql).await.unwrap();
        }
        Kind::Postgres => {
            let function = "CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN RAISE EXCEPTION 'not this one'; END $$";
            lab.execute(function).await.unwrap();
            let sql = format!(
                "CREATE TRIGGER refuse_{table} BEFORE {change} ON {table} FOR EACH ROW WHEN ({condition}) EXECUTE FUNCTION refuse()"
            );
            lab.execute(&sql).await.unwrap();
        }
    }
}

async fn allow(lab: &Lab, table: &str) {
    let on = if lab.kind() == Kind::Postgres { format!(" ON {table}") } else { String::new() };
    lab.execute(&format!("DROP TRIGGER refuse_{table}{on}")).await.unwrap();
}

async fn corrupt(lab: &Lab, column: &str, n: usize) {
    let sql = format!("UPDATE semel_operations SET {column} = substr({column}, 1, 1) WHERE key = '{}'", name(n));
    assert_eq!(lab.execute(&sql).await.unwrap(), 1);
}

/// The rows that are set aside, by task and id, and how often each was tried.
async fn aside(store: &Database) -> Vec<(Task, i64, i64)> {
    let mut found: Vec<_> = store
        .list_set_aside("acme", 100)
        .await
        .unwrap()
        .into_iter()
        .map(|aside| {
            assert!(!aside.reason.is_empty());
            (aside.what, aside.id, aside.tries)
        })
        .collect();
    found.sort_unstable();
    found
}

/// The sweep does not read the stored data of an operation that expires or is archived, so unreadable data blocks
/// neither it nor any other.
pub async fn a_row_that_cannot_be_read_expires_and_is_archived(lab: Lab) {
    let store = lab.open().await;
    let policy = Policy { tombstone: Some(secs(30)), ..short_lived() };
    completed(&store, 50, 10, &policy).await;
    for (column, n) in [("payload", 3), ("outcome", 20), ("fingerprint", 49)] {
        corrupt(&lab, column, n).await;
    }
    lab.pass(secs(30));
    let swept = store.sweep(1000).await.unwrap();
    assert_eq!((swept.archived, swept.set_aside, swept.troubles), (50, 0, vec![]));
    let moved = "SELECT count(*) FROM semel_archive WHERE length(payload) = 1 OR length(outcome) = 1";
    assert_eq!(lab.number(moved).await, 2, "as it was");
    lab.pass(secs(30));
    assert_eq!(store.sweep(1000).await.unwrap().expired, 50);
    for table in ["operations", "archive", "journal"] {
        assert_eq!(lab.number(&format!("SELECT count(*) FROM semel_{table}")).await, 0, "{table}");
    }
}

/// An expired lease whose operation is unreadable is set aside, and the others are ended. It is tried again after
/// hours, or when a person asks for it.
pub async fn an_expired_lease_of_an_unreadable_operation_is_set_aside(lab: Lab) {
    let ledger = lab.ledger().await;
    let store = ledger.store();
    let operations = claimed(store, 50, 10, &Policy::default()).await;
    let (terms, payload) = (operations[7].id, operations[31].id);
    corrupt(&lab, "payload", 31).await;
    let terms_of = format!("UPDATE semel_leases SET terms = '{{' WHERE operation = {terms}");
    assert_eq!(lab.execute(&terms_of).await.unwrap(), 1);
    lab.pass(Policy::default().lease);
    let swept = ledger.sweep().await.unwrap();
    assert_eq!((swept.lapsed, swept.set_aside, swept.troubles.clone()), (48, 2, vec![]), "{swept:?}");
    assert_eq!(aside(store).await, [(Task::Lapse, terms, 1), (Task::Lapse, payload, 1)]);
    assert_eq!(store.count_set_aside().await.unwrap(), [(Task::Lapse, 2)]);
    assert!(store.list_set_aside("another", 100).await.unwrap().is_empty(), "a tenant sees its own");
    let of = store.set_aside_of(&[terms, operations[0].id]).await.unwrap();
    assert_eq!(of.into_keys().collect::<Vec<_>>(), [terms]);

    lab.pass(AGAIN - TICK);
    assert_eq!(store.sweep(1000).await.unwrap().set_aside, 0, "not yet");
    lab.pass(TICK);
    assert_eq!(store.sweep(1000).await.unwrap().set_aside, 2, "tried again, to no avail");
    assert_eq!(aside(store).await, [(Task::Lapse, terms, 2), (Task::Lapse, payload, 2)]);

    let mended = format!("UPDATE semel_operations SET payload = NULL WHERE id = {payload}");
    assert_eq!(lab.execute(&mended).await.unwrap(), 1);
    assert_eq!(store.sweep(1000).await.unwrap().lapsed, 0, "it is not looked at");
    assert_eq!(store.try_set_aside_again().await.unwrap(), 2);
    let swept = store.sweep(1000).await.unwrap();
    assert_eq!((swept.lapsed, swept.set_aside), (1, 1));
    assert_eq!(aside(store).await, [(Task::Lapse, terms, 3)]);
    assert_eq!(store.by_id("acme", payload).await.unwrap().unwrap().state, State::TimedOut);
}

/// A row that the database refuses to change is found by bisection and set aside; the others are handled. It is no
/// longer set aside once it could be removed after all, or was removed otherwise.
pub async fn a_row_that_the_database_refuses_is_set_aside(lab: Lab) {
    let ledger = lab.ledger().await;
    let store = ledger.store();
    let operations = completed(store, 50, 10, &short_lived()).await;
    refuse(&lab, "DELETE", "semel_operations", "old.key IN ('k07', 'k30')").await;
    lab.pass(secs(60));
    let swept = ledger.sweep().await.unwrap();
    assert_eq!((swept.expired, swept.set_aside, swept.troubles.clone()), (48, 2, vec![]), "{swept:?}");
    let (one, other) = (operations[7].id, operations[30].id);
    assert_eq!(aside(store).await, [(Task::Age, one, 1), (Task::Age, other, 1)]);
    let reason = store.set_aside_of(&[one]).await.unwrap().remove(&one).unwrap().remove(0).reason;
    assert!(reason.contains("not this one"), "{reason}");
    assert_eq!(ledger.sweep().await.unwrap(), Swept::default(), "left alone");

    allow(&lab, "semel_operations").await;
    // As a node of an older version would, which does not know the table.
    assert_eq!(lab.execute(&format!("DELETE FROM semel_operations WHERE id = {other}")).await.unwrap(), 1);
    assert_eq!(aside(store).await, [(Task::Age, one, 1)], "what is gone is not shown");
    lab.pass(AGAIN);
    assert_eq!(ledger.sweep().await.unwrap().expired, 1);
    assert_eq!(lab.number("SELECT count(*) FROM semel_set_aside").await, 0);
}

/// Puts some completed rows first in the order of the sweep, and lets the database refuse to delete them.
async fn refuse_the_first(lab: &Lab, n: usize) {
    let first = format!("UPDATE semel_operations SET look_at = look_at - 1 WHERE key < '{}'", name(n));
    assert_eq!(lab.execute(&first).await.unwrap(), n as u64);
    refuse(lab, "DELETE", "semel_operations", &format!("old.key < '{}'", name(n))).await;
}

/// Refused rows may be adjacent at the start of every round, more of them than are needed to conclude that no row is
/// the cause. The rows after them are handled.
pub async fn rows_that_are_refused_side_by_side_are_set_aside(lab: Lab) {
    let ledger = lab.ledger().await;
    completed(ledger.store(), 50, 10, &short_lived()).await;
    refuse_the_first(&lab, 10).await;
    lab.pass(secs(60));
    let swept = ledger.sweep().await.unwrap();
    assert_eq!((swept.expired, swept.set_aside, swept.troubles.clone()), (40, 10, vec![]), "{swept:?}");
    assert_eq!(ledger.sweep().await.unwrap(), Swept::default(), "left alone");
    allow(&lab, "semel_operations").await;
    lab.pass(AGAIN);
    assert_eq!(ledger.sweep().await.unwrap().expired, 10);
}

/// The same if they have as many bytes as a round takes, so that no other row is in it.
pub async fn large_rows_that_are_refused_side_by_side_are_set_aside(lab: Lab) {
    let ledger = lab.ledger().await;
    completed(ledger.store(), 14, 3 * MIB / 4, &short_lived()).await;
    refuse_the_first(&lab, 12).await;
    lab.pass(secs(60));
    let swept = ledger.sweep().await.unwrap();
    assert_eq!((swept.expired, swept.set_aside, swept.troubles.clone()), (2, 12, vec![]), "{swept:?}");
}

/// A phase that fails for every row is reported; no row is set aside for it, and the other phases go on.
pub async fn a_failing_phase_blocks_no_other(lab: Lab) {
    let ledger = lab.ledger().await;
    let store = ledger.store();
    let phases = |swept: &Swept| swept.troubles.iter().map(|trouble| trouble.phase).collect::<Vec<_>>();
    completed(store, 20, 10, &short_lived()).await;
    drop(acquire(&ledger, work("orphan", Policy::default())).await);
    refuse(&lab, "DELETE", "semel_operations", "1 = 1").await;
    lab.pass(secs(60));
    let swept = ledger.sweep().await.unwrap();
    assert_eq!(phases(&swept), ["expiry and archive"]);
    assert_eq!((swept.lapsed, swept.expired, swept.set_aside), (1, 0, 0), "{swept:?}");
    assert!(swept.folded > 0);
    allow(&lab, "semel_operations").await;

    drop(acquire(&ledger, work("another", Policy::default())).await);
    refuse(&lab, "DELETE", "semel_deltas", "1 = 1").await;
    // Enough rows to conclude that none of them is the cause.
    let sql = "INSERT INTO semel_deltas (tenant, service, kind, label1, label2, hour, from_state, to_state, answer, bucket, n)
        WITH RECURSIVE counted(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM counted WHERE i < 20)
        SELECT 'default', 's', 'k', '', '', 1, '', 'processing', '', 0, 1 FROM counted";
    lab.execute(sql).await.unwrap();
    lab.pass(Policy::default().lease);
    let swept = ledger.sweep().await.unwrap();
    assert_eq!(phases(&swept), ["counters"]);
    assert_eq!((swept.lapsed, swept.expired, swept.folded, swept.set_aside), (1, 20, 0, 0), "{swept:?}");
    allow(&lab, "semel_deltas").await;

    refuse(&lab, "UPDATE", "semel_leases", "1 = 1").await;
    refuse(&lab, "INSERT", "semel_backlog", "1 = 1").await;
    claimed(store, 20, 10, &Policy::default()).await;
    lab.pass(Policy::default().lease);
    let swept = ledger.sweep().await.unwrap();
    assert_eq!(phases(&swept), ["expired leases"]);
    assert!(swept.folded > 0 && swept.lapsed == 0 && swept.set_aside == 0, "{swept:?}");
    allow(&lab, "semel_backlog").await;
    let swept = ledger.sweep().await.unwrap();
    assert_eq!((swept.lapsed, swept.troubles.len()), (20, 0));
}

/// A counter row that cannot be folded is set aside; the others are folded, and no total changes.
pub async fn a_counter_row_that_is_refused_is_set_aside(lab: Lab) {
    let ledger = lab.ledger().await;
    let sql = "INSERT INTO semel_deltas (tenant, service, kind, label1, label2, hour, from_state, to_state, answer, bucket, n)
        WITH RECURSIVE counted(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM counted WHERE i < 100)
        SELECT 'acme', 's', CASE WHEN i = 42 THEN 'poison' ELSE 'k' END, '', '', 1, '', 'processing', '', 0, 1 FROM counted";
    lab.execute(sql).await.unwrap();
    refuse(&lab, "INSERT", "semel_counters", "new.kind = 'poison'").await;
    let counts = async || ledger.store().counts("acme", 0).await.unwrap();
    let before = counts().await;
    let swept = ledger.sweep().await.unwrap();
    assert_eq!((swept.folded, swept.set_aside, swept.troubles.len()), (99, 1, 0), "{swept:?}");
    assert_eq!(ledger.store().count_set_aside().await.unwrap(), [(Task::Fold, 1)]);
    assert_eq!(lab.number("SELECT count(*) FROM semel_deltas").await, 1);
    assert_eq!(counts().await, before);
    allow(&lab, "semel_counters").await;
    lab.pass(AGAIN);
    assert_eq!(ledger.sweep().await.unwrap().folded, 1);
    assert_eq!(counts().await, before);
    assert_eq!(lab.number("SELECT count(*) FROM semel_set_aside").await, 0);
}

/// Missing leases are looked for a thousand operations at a time. Rows that the database refuses to change are
/// reported, and do not block those after them.
pub async fn missing_leases_are_found_among_many_and_after_rows_that_are_refused(lab: Lab) {
    /// More than one look reads, and so many that the refused ones and the last are never in one look.
    const ALL: usize = 1100;
    /// More than enough for a full pass.
    const ROUNDS: usize = 20;
    let ledger = lab.ledger().await;
    let store = ledger.store();
    let operations = claimed(store, ALL, 1, &Policy::default()).await;
    let lose = async |from: i64, to: i64| {
        let sql = format!("DELETE FROM semel_leases WHERE operation BETWEEN {from} AND {to}");
        assert_eq!(lab.execute(&sql).await.unwrap() as i64, to - from + 1);
    };
    let (first, last) = (operations[0].id, operations[ALL - 1].id);
    assert_eq!(last - first, ALL as i64 - 1);
    refuse(&lab, "UPDATE", "semel_operations", &format!("old.id < {}", first + 20)).await;
    lose(first, first + 19).await;
    let mut rounds = 0;
    while ledger.sweep().await.unwrap().troubles.is_empty() {
        rounds += 1;
        assert!(rounds < ROUNDS, "the refused rows are not found");
    }
    lose(last, last).await;
    let mut rounds = 0;
    while ledger.sweep().await.unwrap().lapsed == 0 {
        rounds += 1;
        assert!(rounds < ROUNDS, "refused rows block the pass");
    }
    assert_eq!(store.by_id("acme", last).await.unwrap().unwrap().state, State::InDoubt);

    // In one go, as a person asks for it.
    lose(last - 1, last - 1).await;
    let mut swept = Swept::default();
    let refused = store.end_missing_leases(&mut swept).await.unwrap_err().to_string();
    assert!(refused.contains("not this one"), "{refused}");
    assert_eq!(swept.lapsed, 1, "the others are checked");
    allow(&lab, "semel_operations").await;
    store.try_set_aside_again().await.unwrap();
    store.sweep(1000).await.unwrap();
    store.end_missing_leases(&mut swept).await.unwrap();
    assert_eq!(lab.number("SELECT count(*) FROM semel_operations WHERE state = 'in_doubt'").await, 22);
}

/// One round handles no more than a few megabytes; the rest follows in the next one.
pub async fn a_round_is_bounded_in_bytes(lab: Lab) {
    let ledger = lab.ledger().await;
    let store = ledger.store();
    let policy = Policy { tombstone: Some(secs(30)), ..short_lived() };
    completed(store, 12, MIB, &policy).await;
    let rounds = async |pick: fn(&Swept) -> u64| {
        let mut rounds = Vec::new();
        loop {
            let swept = store.sweep(1000).await.unwrap();
            assert_eq!((swept.set_aside, swept.troubles.len()), (0, 0));
            rounds.push(pick(&swept));
            if !swept.more {
                return rounds;
            }
        }
    };
    lab.pass(secs(30));
    let archived = rounds(|swept| swept.archived).await;
    assert!(archived.iter().all(|n| *n <= 8) && archived.iter().sum::<u64>() == 12, "{archived:?}");
    lab.pass(secs(30));
    let expired = rounds(|swept| swept.expired).await;
    assert!(expired.iter().all(|n| *n <= 8) && expired.iter().sum::<u64>() == 12, "{expired:?}");
    claimed(store, 12, MIB, &Policy::default()).await;
    lab.pass(Policy::default().lease);
    let lapsed = rounds(|swept| swept.lapsed).await;
    assert!(lapsed.iter().all(|n| *n <= 8) && lapsed.iter().sum::<u64>() == 12, "{lapsed:?}");
    assert_eq!(ledger.sweep().await.unwrap(), Swept::default());
}

/// A row that another transaction has locked is skipped, not set aside, and swept after that has ended. (On SQLite the
/// sweep waits, since there is one writer.)
pub async fn a_locked_row_is_swept_later(lab: Lab) {
    let (store, other) = (lab.open().await, lab.open().await);
    completed(&store, 50, 10, &short_lived()).await;
    lab.pass(secs(60));
    let tx = other.begin(secs(5)).await.unwrap();
    let lock = "UPDATE semel_operations SET owner = owner WHERE key = 'k07'";
    let mut held = tx.connection().await.unwrap();
    on!(held.get().unwrap(), c => sqlx::query(lock).execute(c).await.map(drop)).unwrap();
    drop(held);
    let sweeping = store.clone();
    let sweep = tokio::spawn(async move { sweeping.sweep(1000).await.unwrap() });
    let mut expired = 0;
    match lab.kind() {
        Kind::Postgres => {
            let swept = soon(sweep).await.unwrap();
            assert_eq!((swept.expired, swept.set_aside, swept.troubles.len(), swept.more), (49, 0, 0, false));
            expired += swept.expired;
            other.roll_back(&tx).await;
        }
        Kind::Sqlite => {
            other.roll_back(&tx).await;
            expired += soon(sweep).await.unwrap().expired;
        }
    }
    expired += store.sweep(1000).await.unwrap().expired;
    assert_eq!(expired, 50);
    assert_eq!(lab.number("SELECT count(*) FROM semel_set_aside").await, 0);
}

/// The leases of a node are renewed together. One whose operation is unreadable is renewed or lost like any other, and
/// its late renewal is noted.
pub async fn an_unreadable_operation_blocks_no_renewal(lab: Lab) {
    let store = lab.open().await;
    let policy = Policy { lease: secs(60), ..Policy::default() };
    let operations = claimed(&store, 3, 10, &policy).await;
    let leases: Vec<_> = operations.iter().map(|op| (op.id, op.fence)).collect();
    let lapsed =
        format!("UPDATE semel_leases SET deadline = {} WHERE operation = {}", Lab::START.as_micros(), leases[0].0);
    assert_eq!(lab.execute(&lapsed).await.unwrap(), 1);
    corrupt(&lab, "payload", 0).await;
    corrupt(&lab, "payload", 1).await;
    lab.pass(secs(40));
    let renewed = Answer::Renewed { deadline: Lab::START + secs(100), cancelled: false };
    assert_eq!(store.renew(leases.clone()).await.unwrap(), [Answer::Lost, renewed.clone(), renewed]);
    store.tell_renewals().await.unwrap();
    for ((id, _), got) in leases.iter().zip([0, 1, 1]) {
        let notes = store.journal(*id).await.unwrap().0;
        assert_eq!(notes.len(), got, "{notes:?}");
        assert!(notes.iter().all(|note| note.event == Event::RenewedLate && note.actor == "somebody"), "{notes:?}");
    }
}

/// A page with an unreadable row lists it as such, and all others; also if it is the last of its page.
pub async fn a_listing_shows_unreadable_operations(lab: Lab) {
    let ledger = lab.ledger().await;
    let operations = claimed(ledger.store(), 7, 10, &Policy::default()).await;
    let terms = format!("UPDATE semel_leases SET terms = '{{' WHERE operation = {}", operations[3].id);
    assert_eq!(lab.execute(&terms).await.unwrap(), 1);
    corrupt(&lab, "fingerprint", 4).await;
    let processing = Some(State::Processing);
    for filter in
        [Filter::tenant("acme"), Filter::scope(&scope()), Filter { state: processing, ..Filter::tenant("acme") }]
    {
        for limit in 1..=8 {
            let (mut ids, mut unreadable, mut page) = (Vec::new(), Vec::new(), Page { after: None, limit });
            loop {
                let listing = ledger.store().list(&filter, page).await.unwrap();
                assert!(listing.items.len() + listing.unreadable.len() <= limit as usize);
                ids.extend(listing.items.iter().map(|op| op.id));
                unreadable.extend(listing.unreadable);
                let Some(next) = listing.next else { break };
                page.after = Some(next);
            }
            let expected: Vec<_> = [6, 5, 2, 1, 0].iter().map(|n| operations[*n].id).collect();
            assert_eq!(ids, expected, "{limit} at a time");
            let got: Vec<_> = unreadable.iter().map(|row| (row.id, row.key.as_str(), row.state.as_str())).collect();
            assert_eq!(got, [(operations[4].id, "k04", "processing"), (operations[3].id, "k03", "processing")]);
            assert!(unreadable.iter().all(|row| row.tenant == "acme" && row.created_at == Lab::START));
            assert!(unreadable.iter().all(|row| row.why.contains("cannot be read")), "{unreadable:?}");
        }
    }
    // Reading it alone is an error, with its readable columns.
    let why = ledger.store().by_id("acme", operations[4].id).await.unwrap_err();
    assert!(matches!(why, Error::Corrupt(_)), "{why}");
    let got = ledger.store().unreadable_by_id("acme", operations[4].id, &why).await.unwrap().unwrap();
    assert_eq!((got.key.as_str(), got.state.as_str()), ("k04", "processing"));
    assert_eq!(ledger.store().unreadable_by_key(&scope(), &key("k04"), &why).await.unwrap(), Some(got));
    assert_eq!(ledger.store().unreadable_by_id("another", operations[4].id, &why).await.unwrap(), None);
}

/// A due operation that is unreadable is set aside, and the next one is taken. It is due again when it is tried again
/// and readable.
pub async fn an_unreadable_due_operation_blocks_no_other(lab: Lab) {
    let ledger = lab.ledger().await;
    let store = ledger.store();
    let policy = Policy { backoff: Backoff::NONE, retention: None, ..Policy::default() };
    let operations = claimed(store, 4, 10, &policy).await;
    for op in &operations {
        let write = Write::Fail(failure("no"));
        store.write(vec![LeaseWrite { id: op.id, fence: op.fence, write }]).await.unwrap();
        lab.pass(secs(1));
    }
    let ids: Vec<_> = operations.iter().map(|op| op.id).collect();
    let take = async |most| {
        let want =
            Want { scope: scope(), policy: policy.clone(), most, since: None, lease: None, limits: Limits::default() };
        let taken = ledger.take(vec![want]).await.unwrap();
        taken.iter().map(|(_, lease)| lease.operation().id).collect::<Vec<_>>()
    };
    corrupt(&lab, "payload", 0).await;
    assert_eq!(take(1).await, [0_i64; 0]);
    assert_eq!(aside(store).await, [(Task::Run, ids[0], 1)]);
    assert_eq!(take(1).await, [ids[1]], "the next in line");
    // Beside readable ones, and if all due ones are unreadable.
    corrupt(&lab, "payload", 2).await;
    assert_eq!(take(64).await, [ids[3]]);
    assert_eq!(aside(store).await, [(Task::Run, ids[0], 1), (Task::Run, ids[2], 1)]);
    let kinds = store.due_kinds(scope().service(), ("", "")).await.unwrap();
    assert!(kinds.iter().all(|kind| kind.wait > Duration::ZERO), "no worker is sent to try: {kinds:?}");

    lab.execute("UPDATE semel_operations SET payload = NULL WHERE key = 'k00'").await.unwrap();
    assert_eq!(store.try_set_aside_again().await.unwrap(), 2);
    ledger.sweep().await.unwrap();
    assert_eq!(take(64).await, [ids[0]]);
    assert_eq!(aside(store).await, [(Task::Run, ids[2], 2)]);
}

/// A person can purge an unreadable operation, by the rules for any other; it is audited.
pub async fn an_unreadable_operation_can_be_purged(lab: Lab) {
    let ledger = lab.ledger().await;
    let pinned = Policy { pinned: true, ..Policy::default() };
    completed(ledger.store(), 1, 10, &pinned).await;
    corrupt(&lab, "payload", 0).await;
    let running = acquire(&ledger, work("running", Policy::default()).payload("data")).await;
    lab.execute("UPDATE semel_operations SET payload = substr(payload, 1, 1) WHERE key = 'running'").await.unwrap();
    let id = lab.number("SELECT id FROM semel_operations WHERE key = 'k00'").await;
    let purge = async |id| decide(&ledger, id, Decision::Purge).await.answer;
    assert_eq!(purge(id).await, Answer::NotNow(NotNow::Pinned));
    assert_eq!(purge(running.operation().id).await, Answer::NotNow(NotNow::Running));
    assert_eq!(purge(1 << 40).await, Answer::NotNow(NotNow::Absent));
    assert_eq!(lab.number("SELECT count(*) FROM semel_audit").await, 0);
    lab.pass(Policy::default().lease);
    assert_eq!(purge(running.operation().id).await, Answer::Purged);
    assert_eq!(ask(&ledger, work("running", Policy::default())).await, "acquired", "the key is free");
    assert_eq!(lab.texts("SELECT action FROM semel_audit").await, ["operations.purge"]);
    let before = lab.texts("SELECT before FROM semel_audit").await.remove(0);
    assert!(before.contains("running") && before.contains("unreadable"), "{before}");
    assert_eq!(story(&ledger, running.operation().id).await, [semel::journal::Event::Purged]);
    assert_eq!(counted(&ledger, State::Processing).await, 1, "the new one");
    let others = ["leases", "operations"].map(|table| format!("SELECT count(*) FROM semel_{table}"));
    assert_eq!((lab.number(&others[0]).await, lab.number(&others[1]).await), (1, 2));
}

/// An unreadable journal note says so, and one of a newer version is omitted; the others are returned.
pub async fn an_unreadable_note_is_returned_with_all_others(lab: Lab) {
    let ledger = lab.ledger().await;
    let policy = Policy { backoff: Backoff::NONE, ..Policy::default() };
    let lease = acquire(&ledger, work("k", policy.clone())).await;
    let id = lease.operation().id;
    assert_eq!(lease.fail(failure("first")).await.unwrap(), SETTLED);
    assert_eq!(acquire(&ledger, work("k", policy.clone())).await.fail(failure("second")).await.unwrap(), SETTLED);
    let texts = async || notes(&ledger, id).await.into_iter().map(|note| note.detail).collect::<Vec<_>>();
    assert_eq!(texts().await, ["first", "attempt 2 after failed", "second"]);
    let first = "UPDATE semel_journal SET detail = substr(detail, 1, 1) WHERE id = (SELECT min(id) FROM semel_journal)";
    assert_eq!(lab.execute(first).await.unwrap(), 1);
    lab.execute("UPDATE semel_journal SET event = 'of tomorrow' WHERE event = 'taken_over'").await.unwrap();
    let got = texts().await;
    assert_eq!((got.len(), got[1].as_str()), (2, "second"));
    assert!(got[0].starts_with("(unreadable: "), "{got:?}");
}
