//! What nobody runs and somebody should: from when on it is found, and by whom.

use std::time::Duration;

use semel::{
    Backoff, Claim, Failure, Fingerprint, OnLost, OnMismatch, Policy, Retry, Scope, Settled, State, Store as _,
    Verdict, Work,
    look::{Due, DueKind},
    machine::Answer,
    store::Decision,
};

use super::tools::*;
use crate::{Kind, Lab, key, scope, work, work_with};

fn policy() -> Policy {
    Policy {
        backoff: Backoff { first: secs(10), cap: secs(40) },
        max_attempts: Some(2),
        max_crashes: 3,
        on_mismatch: OnMismatch::SupersedeIfNewer,
        retention: None,
        ..Policy::default()
    }
}

async fn look(node: &Node) -> Due {
    node.due(&scope(), 64).await.unwrap()
}

fn keys(due: &Due) -> Vec<String> {
    due.operations.iter().map(|op| op.key.as_str().to_owned()).collect()
}

/// The keys of what is due, as each of some nodes sees it.
async fn due(nodes: &[&Node]) -> Vec<String> {
    let mut seen = Vec::new();
    for node in nodes {
        seen.push(keys(&look(node).await));
    }
    assert!(seen.iter().all(|keys| *keys == seen[0]), "nodes disagree: {seen:?}");
    seen.remove(0)
}

fn retry() -> Decision {
    Decision::Resolve { verdict: Verdict::Retry, expected: None }
}

/// What failed is due at the very end of its backoff, on every node, and until then everybody knows when that is;
/// whoever claims it takes it off the list.
pub async fn what_failed_is_due_after_its_backoff_on_every_node(lab: Lab) {
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    let lease = acquire(&a, work("k", policy())).await;
    assert_eq!(due(&[&a, &b]).await, [""; 0], "somebody runs it");
    assert_eq!(lease.fail(failure("no")).await.unwrap(), SETTLED);
    let until = row(&a, "k").await.not_before.unwrap();
    let waits = until.since(Lab::START);
    assert!(!waits.is_zero());
    let looked = look(&b).await;
    assert_eq!((looked.operations.len(), looked.next, looked.wait), (0, Some(until), Some(waits)));
    lab.pass(waits - TICK);
    assert_eq!(look(&b).await.wait, Some(TICK));
    assert_eq!(due(&[&a, &b]).await, [""; 0]);
    lab.pass(TICK);
    assert_eq!(due(&[&a, &b]).await, ["k"]);
    let found = look(&b).await;
    assert_eq!((found.next, found.wait), (None, None), "nothing else waits");
    let Claim::Acquired(lease) = a.claim_due(&found.operations[0], policy()).await.unwrap() else { panic!() };
    assert_eq!(due(&[&a, &b]).await, [""; 0]);
    assert!(matches!(b.claim_due(&found.operations[0], policy()).await.unwrap(), Claim::InFlight(_)));
    assert_eq!(lease.complete(done("")).await.unwrap(), SETTLED);
    assert_eq!(due(&[&a, &b]).await, [""; 0]);
    b.flush().await;
    let (_, repeats) = a.store().journal(found.operations[0].id).await.unwrap();
    assert_eq!(repeats, [], "nobody has brought the key again");
}

/// What is out of attempts, parked or in doubt is never due, however long one waits and however often the sweep comes
/// by; when a person lets it run again, it is, at once.
pub async fn what_a_person_must_decide_about_is_never_due(lab: Lab) {
    let ledger = lab.ledger().await;
    let once = Policy { max_attempts: Some(1), tombstone: Some(secs(50)), ..policy() };
    let settle = async |text: &str, on_lost: OnLost| {
        let policy = Policy { on_lost, max_crashes: 1, ..once.clone() };
        acquire(&ledger, work(text, policy).payload(text.to_owned())).await
    };
    let lease = settle("exhausted", OnLost::Rerun).await;
    assert_eq!(lease.fail(failure("no")).await.unwrap(), SETTLED);
    let never = Failure { error: "no way".into(), retry: Retry::Never };
    assert_eq!(settle("for good", OnLost::Rerun).await.fail(never).await.unwrap(), SETTLED);
    assert_eq!(settle("doubted", OnLost::Rerun).await.doubt("?").await.unwrap(), SETTLED);
    drop(settle("crashed", OnLost::Rerun).await);
    drop(settle("held", OnLost::Hold).await);
    lab.pass(policy().lease);
    assert_eq!(ledger.sweep().await.unwrap().lapsed, 2);
    for _ in 0..4 {
        let looked = look(&ledger).await;
        assert_eq!((looked.operations.len(), looked.next, looked.wait), (0, None, None));
        lab.pass(secs(3600));
        ledger.sweep().await.unwrap();
    }
    for text in ["exhausted", "for good", "doubted", "crashed", "held"] {
        let op = row(&ledger, text).await;
        assert_eq!(decide(&ledger, op.id, retry()).await.answer, Answer::Resolved, "{text}");
        assert_eq!(due(&[&ledger]).await, [text]);
        let found = look(&ledger).await.operations.remove(0);
        assert_eq!(found, row(&ledger, text).await, "whole: {text}");
        let Claim::Acquired(lease) = ledger.claim_due(&found, once.clone()).await.unwrap() else { panic!("{text}") };
        assert_eq!(lease.operation().payload.as_deref(), Some(text.as_bytes()));
        assert_eq!(lease.complete(done("")).await.unwrap(), SETTLED);
    }
    let failed = acquire(&ledger, work("failed", once)).await;
    assert_eq!(failed.fail(failure("no")).await.unwrap(), SETTLED);
    let id = row(&ledger, "failed").await.id;
    decide(&ledger, id, retry()).await;
    decide(&ledger, id, Decision::Resolve { verdict: Verdict::Failed, expected: None }).await;
    assert_eq!(due(&[&ledger]).await, [""; 0], "a person's no is a no");
}

/// Newer data is due when the older run ends, however it ends; a lease that was lost once is due when the sweep has
/// found it; what was put back, when it should be.
pub async fn what_waits_for_nothing_is_due_at_once(lab: Lab) {
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    let version = |text: &str, n: i64| work_with(text, &format!("v{n}"), policy()).order(n).payload(format!("v{n}"));
    for how in ["complete", "fail", "release"] {
        let lease = acquire(&a, version(how, 1)).await;
        assert_eq!(ask(&b, version(how, 2)).await, "in_flight");
        let settled = match how {
            "complete" => lease.complete(done("")).await,
            "fail" => lease.fail(Failure { error: "no".into(), retry: Retry::Never }).await,
            _ => lease.release(secs(1000)).await,
        };
        assert_eq!(settled.unwrap(), Settled::Yes { successor: true });
        let found = look(&b).await.operations;
        assert_eq!(found.iter().map(|op| op.payload.as_deref()).collect::<Vec<_>>(), [Some(&b"v2"[..])], "{how}");
        let Claim::Acquired(lease) = b.claim_due(&found[0], policy()).await.unwrap() else { panic!("{how}") };
        assert_eq!(lease.complete(done("")).await.unwrap(), SETTLED);
    }
    drop(acquire(&a, version("lost", 1)).await);
    lab.pass(policy().lease);
    assert_eq!(due(&[&a, &b]).await, [""; 0], "nobody has noticed yet");
    assert_eq!(b.sweep().await.unwrap().lapsed, 1);
    assert_eq!(due(&[&a, &b]).await, ["lost"]);
    // A claim that meets a lapsed lease and gets nothing leaves it due as well.
    drop(acquire(&a, version("lost too", 5)).await);
    lab.pass(policy().lease);
    assert_eq!(ask(&b, version("lost too", 4)).await, "mismatch");
    assert_eq!(due(&[&a, &b]).await, ["lost", "lost too"]);
    for text in ["lost", "lost too"] {
        let op = row(&a, text).await;
        let Claim::Acquired(lease) = a.claim_due(&op, policy()).await.unwrap() else { panic!("{text}") };
        assert_eq!(lease.release(if text == "lost" { Duration::ZERO } else { secs(5) }).await.unwrap(), SETTLED);
    }
    assert_eq!(due(&[&a, &b]).await, ["lost"], "put back, and put back for later");
    lab.pass(secs(5));
    assert_eq!(due(&[&a, &b]).await, ["lost", "lost too"]);
}

/// A claim by a policy that allows less than what it ran under is told that it is exhausted, and it is due no more;
/// unless a person has let it run again in the meantime.
pub async fn what_a_stricter_policy_gives_up_is_no_longer_due(lab: Lab) {
    let ledger = lab.ledger().await;
    for text in ["one", "two"] {
        assert_eq!(acquire(&ledger, work(text, policy())).await.fail(failure("no")).await.unwrap(), SETTLED);
    }
    lab.pass(secs(10));
    assert_eq!(due(&[&ledger]).await.len(), 2);
    let strict = Policy { max_attempts: Some(1), ..policy() };
    let one = row(&ledger, "one").await;
    assert!(matches!(ledger.claim_due(&one, strict.clone()).await.unwrap(), Claim::Exhausted(_)));
    assert_eq!(due(&[&ledger]).await, ["two"]);
    assert_eq!(row(&ledger, "one").await, one, "nothing else about it has changed");

    let two = row(&ledger, "two").await;
    decide(&ledger, two.id, retry()).await;
    ledger.store().not_due(two.id, two.fence).await.unwrap();
    assert_eq!(due(&[&ledger]).await, ["two"], "that was about an earlier run");
    assert!(matches!(ledger.claim_due(&two, strict).await.unwrap(), Claim::Acquired(_)));
}

/// What is due is told of in its order, whole, of one scope, and no more of it at once than fits.
pub async fn what_is_due_is_told_in_order_and_in_bounds(lab: Lab) {
    let ledger = lab.ledger().await;
    let put_back = async |tenant: &str, service: &str, text: &str| {
        let scope = Scope::new(tenant, service, "transfer").unwrap();
        let work = Work::new(scope, key(text), Fingerprint::of_bytes(b"")).order(7).payload(text.to_owned());
        let lease = acquire(&ledger, work.policy(policy())).await;
        assert_eq!(lease.release(Duration::ZERO).await.unwrap(), SETTLED);
        lab.pass(TICK);
    };
    put_back("acme", "post", "elsewhere").await;
    for n in 0..5 {
        put_back("acme", "bank", &n.to_string()).await;
    }
    let found = look(&ledger).await;
    assert_eq!(keys(&found), ["0", "1", "2", "3", "4"]);
    assert_eq!((found.next, found.wait), (None, None));
    for op in &found.operations {
        assert_eq!((&op.scope, op.order), (&scope(), Some(7)));
        assert_eq!(op.payload.as_deref(), Some(op.key.as_str().as_bytes()));
    }
    // Past the store, because it is quicker.
    let grow = async |text: &str, mib: usize| {
        let bytes = match lab.kind() {
            Kind::Sqlite => format!("unhex('0100' || hex(zeroblob({mib} << 20)))"),
            Kind::Postgres => format!("decode('0100' || repeat('00', {mib} << 20), 'hex')"),
        };
        let grown = format!("UPDATE semel_operations SET payload = {bytes} WHERE service = 'bank' AND key = '{text}'");
        assert_eq!(lab.execute(&grown).await.unwrap(), 1);
    };
    for text in ["0", "1", "2", "3"] {
        grow(text, 5).await;
    }
    let found = look(&ledger).await;
    assert_eq!(keys(&found), ["0", "1", "2"], "a fourth would be too much");
    assert_eq!((found.next, found.wait), (Some(Lab::START + TICK * 4), Some(Duration::ZERO)), "it is due already");
    assert!(found.operations.iter().all(|op| op.payload.as_ref().is_some_and(|payload| payload.len() == 5 << 20)));
    grow("0", 17).await;
    assert_eq!(keys(&look(&ledger).await), ["0"], "one that is too large alone is not left for ever");

    for n in 0..70 {
        put_back("acme", "many", &format!("k{n:02}")).await;
    }
    let expected = |n: usize| (0..n).map(|n| format!("k{n:02}")).collect::<Vec<_>>();
    for (limit, n) in [(0, 1), (1, 1), (10, 10), (64, 64), (u32::MAX, 64)] {
        let due = ledger.due(&Scope::new("acme", "many", "transfer").unwrap(), limit).await.unwrap();
        assert_eq!((keys(&due), due.wait), (expected(n), Some(Duration::ZERO)), "{limit}");
    }
    let of = async |tenant: &str, service: &str, kind: &str| {
        keys(&ledger.due(&Scope::new(tenant, service, kind).unwrap(), 64).await.unwrap())
    };
    assert_eq!(of("acme", "post", "transfer").await, ["elsewhere"]);
    for (service, kind) in [("Bank", "transfer"), ("bank", "Transfer"), ("bank", "transfe"), ("bank", "transfer.x")] {
        assert_eq!(of("acme", service, kind).await, [""; 0], "{service} {kind}");
    }
    assert_eq!(of("Acme", "bank", "transfer").await, [""; 0]);
}

/// Puts an operation of a kind back, to be claimed after so long.
async fn put_back(node: &Node, scope: Scope, text: &str, delay: Duration) {
    let work = Work::new(scope, key(text), Fingerprint::of_bytes(b"")).payload(text.to_owned());
    assert_eq!(acquire(node, work.policy(policy())).await.release(delay).await.unwrap(), SETTLED);
}

/// However much is due of one kind or tenant, and for however long, what is due of another one is found at once; and
/// which kinds there are is told with when the first of each is due, of one service and every tenant.
pub async fn what_is_due_of_one_kind_hides_nothing_of_another(lab: Lab) {
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    let scope = |tenant: &str, service: &str, kind: &str| Scope::new(tenant, service, kind).unwrap();
    for n in 0..70 {
        put_back(&a, scope("acme", "bank", "much"), &n.to_string(), secs(7)).await;
    }
    put_back(&a, scope("acme", "bank", "much"), "first", secs(5)).await;
    put_back(&a, scope("other", "bank", "much"), "theirs", secs(9)).await;
    put_back(&a, scope("other", "bank", "little"), "one", secs(9)).await;
    put_back(&a, scope("acme", "bank", "little.more"), "two", Duration::ZERO).await;
    put_back(&a, scope("acme", "post", "elsewhere"), "three", Duration::ZERO).await;
    // Of these, nothing will ever be due.
    let ended = async |kind: &str| {
        let work = Work::new(scope("acme", "bank", kind), key("k"), Fingerprint::of_bytes(b""));
        acquire(&a, work.policy(policy())).await
    };
    assert_eq!(ended("completed").await.complete(done("")).await.unwrap(), SETTLED);
    assert_eq!(ended("doubted").await.doubt("?").await.unwrap(), SETTLED);
    let never = Failure { error: "no way".into(), retry: Retry::Never };
    assert_eq!(ended("parked").await.fail(never).await.unwrap(), SETTLED);
    let running = ended("running").await;

    let told = async |after: &str| {
        let after = after.split_once('/').unwrap_or((after, ""));
        let (a, b) = (a.due_kinds("bank", after).await.unwrap(), b.due_kinds("bank", after).await.unwrap());
        assert_eq!(a, b, "nodes disagree");
        a
    };
    let kind = |kind: &str, tenant: &str, after: u64, wait: u64| DueKind {
        kind: kind.to_owned(),
        tenant: tenant.to_owned(),
        next: Lab::START + secs(after),
        wait: secs(wait),
    };
    let all = [
        kind("little", "other", 9, 9),
        kind("little.more", "acme", 0, 0),
        kind("much", "acme", 5, 5),
        kind("much", "other", 9, 9),
    ];
    assert_eq!(told("").await, all);
    for (after, from) in [
        ("littl", 0),
        ("little", 0),
        ("little/other", 1),
        ("little.more/acme", 2),
        ("mucg", 2),
        ("much/acme", 3),
        ("much/nobody", 3),
        ("much/other", 4),
        ("z", 4),
    ] {
        assert_eq!(told(after).await, all[from..], "after {after}");
    }
    lab.pass(secs(9));
    let waits: Vec<_> = told("").await.iter().map(|kind| kind.wait).collect();
    assert_eq!(waits, [Duration::ZERO; 4]);
    for (tenant, kind, keys_of_it) in
        [("other", "little", "one"), ("acme", "little.more", "two"), ("other", "much", "theirs")]
    {
        let found = b.due(&scope(tenant, "bank", kind), 64).await.unwrap();
        assert_eq!((keys(&found), found.wait), (vec![keys_of_it.to_owned()], None));
        let Claim::Acquired(lease) = b.claim_due(&found.operations[0], policy()).await.unwrap() else { panic!() };
        assert_eq!(lease.complete(done("")).await.unwrap(), SETTLED);
    }
    assert_eq!(keys(&b.due(&scope("acme", "bank", "much"), 1).await.unwrap()), ["first"]);
    assert_eq!(running.release(secs(3)).await.unwrap(), SETTLED);
    assert_eq!(told("").await, [kind("much", "acme", 5, 0), kind("running", "acme", 12, 3)]);
}

/// Kinds are told of in pages, so that however many there are, each is told of.
pub async fn kinds_are_told_of_in_bounds(lab: Lab) {
    let ledger = lab.ledger().await;
    let numbers = match lab.kind() {
        Kind::Sqlite => "WITH RECURSIVE i(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM i WHERE i < 2500) SELECT",
        Kind::Postgres => "WITH i AS (SELECT i FROM generate_series(1, 2500) AS i) SELECT",
    };
    // Past the store, because it is quicker: two of each kind.
    let fill = format!(
        "INSERT INTO semel_backlog (operation, tenant, service, kind, state, due)
         {numbers} i, 't' || (i / 2 % 2), 'bank', 'k' || (10000 + i / 2), 'failed', i FROM i"
    );
    assert_eq!(lab.execute(&fill).await.unwrap(), 2500);
    let (mut after, mut pages) = ((String::new(), String::new()), Vec::new());
    loop {
        let page = ledger.due_kinds("bank", (&after.0, &after.1)).await.unwrap();
        let Some(last) = page.last() else { break };
        after = (last.kind.clone(), last.tenant.clone());
        pages.push(page);
    }
    assert_eq!(pages.iter().map(Vec::len).collect::<Vec<_>>(), [DueKind::MOST as usize, 251]);
    for (n, told) in pages.concat().into_iter().enumerate() {
        let first = i64::try_from(n).unwrap() * 2;
        assert_eq!((told.kind, told.next.as_micros()), (format!("k{}", 10000 + n), first.max(1)));
    }
}

/// What has expired counts as absent: it is not due, also before the sweep has removed it, and keeps nothing waiting.
pub async fn what_has_expired_is_not_due(lab: Lab) {
    let ledger = lab.ledger().await;
    let short = Policy { retention: Some(secs(60)), ..policy() };
    for n in 0..70 {
        let lease = acquire(&ledger, work(&format!("expired {n}"), short.clone())).await;
        assert_eq!(lease.fail(failure("no")).await.unwrap(), SETTLED);
    }
    lab.pass(secs(60) - TICK);
    assert_eq!(look(&ledger).await.operations.len(), 64);
    let lease = acquire(&ledger, work("kept", policy())).await;
    assert_eq!(lease.fail(Failure { error: "no".into(), retry: Retry::After(TICK) }).await.unwrap(), SETTLED);
    lab.pass(TICK);
    assert_eq!(due(&[&ledger]).await, ["kept"]);
    let first = async || ledger.due_kinds("bank", ("", "")).await.unwrap().remove(0).next;
    assert!(first().await < Lab::START + secs(60), "the kinds know nothing of it before the sweep");
    assert_eq!(ledger.sweep().await.unwrap().expired, 70);
    assert_eq!(due(&[&ledger]).await, ["kept"]);
    assert_eq!(first().await, Lab::START + secs(60));
    assert_eq!(row(&ledger, "kept").await.state, State::Failed);
}

/// A claim at once does not wait for a backoff; nothing else about it is different.
pub async fn a_claim_at_once_waits_for_no_backoff(lab: Lab) {
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    for attempt in 1..=2 {
        let lease = acquire(&b, work("k", policy()).at_once()).await;
        assert_eq!(lease.operation().attempt(), attempt);
        assert_eq!(ask(&a, work("k", policy()).at_once()).await, "in_flight");
        assert_eq!(lease.fail(failure("no")).await.unwrap(), SETTLED);
        let expected = if attempt == 1 { "not_yet" } else { "exhausted" };
        assert_eq!(ask(&a, work("k", policy())).await, expected);
    }
    assert_eq!(ask(&a, work("k", policy()).at_once()).await, "exhausted");
    let lease = acquire(&a, work("later", policy()).payload("data")).await;
    assert_eq!(lease.release(secs(1000)).await.unwrap(), SETTLED);
    assert_eq!(ask(&b, work("later", policy())).await, "not_yet");
    assert_eq!(acquire(&b, work("later", policy()).at_once()).await.doubt("?").await.unwrap(), SETTLED);
    assert_eq!(ask(&b, work("later", policy()).at_once()).await, "in_doubt");
}

/// What was put on the list before it had a time to be claimed gets one when the tables are brought up to date.
pub async fn a_list_from_before_it_had_times_is_brought_up_to_date(lab: Lab) {
    let ledger = lab.ledger().await;
    let never = Failure { error: "no way".into(), retry: Retry::Never };
    assert_eq!(acquire(&ledger, work("failed", policy())).await.fail(failure("no")).await.unwrap(), SETTLED);
    assert_eq!(acquire(&ledger, work("parked", policy())).await.fail(never).await.unwrap(), SETTLED);
    assert_eq!(acquire(&ledger, work("doubted", policy())).await.doubt("?").await.unwrap(), SETTLED);
    let put_back = acquire(&ledger, work("pending", policy()).payload("data")).await;
    assert_eq!(put_back.release(Duration::ZERO).await.unwrap(), SETTLED);
    for older in [
        "DROP INDEX semel_backlog_queue",
        "ALTER TABLE semel_backlog DROP COLUMN due",
        "ALTER TABLE semel_backlog DROP COLUMN kind",
        "ALTER TABLE semel_backlog DROP COLUMN service",
        "DELETE FROM semel_migrations WHERE version = 4",
    ] {
        lab.execute(older).await.unwrap();
    }
    let ledger = lab.ledger().await;
    assert_eq!(due(&[&ledger]).await, ["pending"]);
    assert_eq!(look(&ledger).await.next, row(&ledger, "failed").await.not_before);
    lab.pass(secs(10));
    assert_eq!(due(&[&ledger]).await, ["pending", "failed"]);
    let scopes = lab.texts("SELECT DISTINCT service || '/' || kind FROM semel_backlog").await;
    assert_eq!(scopes, [format!("{}/{}", scope().service(), scope().kind())]);
    let wrong = lab.execute("UPDATE semel_backlog SET due = 1 WHERE state = 'in_doubt'").await;
    assert!(wrong.is_err(), "nobody should come and run what is in doubt");
}
