//! Runnable operations: from when on a worker finds them, and which worker gets them.

use std::time::Duration;

use semel::{
    Backoff, Failure, Fingerprint, Lease, OnLost, OnMismatch, Policy, Retry, Scope, Settled, Timestamp, Verdict, Work,
    look::DueKind,
    machine::Answer,
    prelude::*,
    store::{Decision, Limits, Want},
};
use semel_store::Database;

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

/// Takes due operations of a scope, at most this many.
async fn take_of(node: &Node, scope: Scope, most: u32, policy: Policy) -> Vec<Lease<Database>> {
    let want = Want { scope, policy, most, since: None, lease: None, limits: Limits::default() };
    soon(node.take(vec![want])).await.unwrap().into_iter().map(|(_, lease)| lease).collect()
}

/// Takes due operations of the suite's scope.
async fn take(node: &Node, policy: Policy) -> Vec<Lease<Database>> {
    take_of(node, scope(), 64, policy).await
}

fn keys(taken: &[Lease<Database>]) -> Vec<String> {
    taken.iter().map(|lease| lease.operation().key.as_str().to_owned()).collect()
}

/// The keys of the operations that a node finds due. It completes them.
async fn run(node: &Node) -> Vec<String> {
    let taken = take(node, policy()).await;
    let keys = keys(&taken);
    for lease in taken {
        assert_eq!(lease.complete(done("")).await.unwrap(), SETTLED);
    }
    keys
}

/// When the first operation of the suite's scope is due and how long that is from now, as seen by each of some nodes.
async fn first_due(nodes: &[&Node]) -> Option<(Timestamp, Duration)> {
    let mut seen = Vec::new();
    for node in nodes {
        let kinds = node.due_kinds(scope().service(), ("", "")).await.unwrap();
        let ours = kinds
            .into_iter()
            .find(|due| (due.kind.as_str(), due.tenant.as_str()) == (scope().kind(), scope().tenant()));
        seen.push(ours.map(|due| (due.next, due.wait)));
    }
    assert!(seen.iter().all(|first| *first == seen[0]), "nodes disagree: {seen:?}");
    seen.remove(0)
}

fn retry() -> Decision {
    Decision::Resolve { verdict: Verdict::Retry, expected: None }
}

/// A failed operation is due exactly at the end of its backoff, on every node, and every node knows that time before.
/// The node that takes it removes it from the backlog.
pub async fn a_failed_operation_is_due_after_its_backoff_on_every_node(lab: Lab) {
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    let lease = acquire(&a, work("k", policy())).await;
    assert_eq!(first_due(&[&a, &b]).await, None, "it runs");
    assert_eq!(lease.fail(failure("no")).await.unwrap(), SETTLED);
    let until = row(&a, "k").await.not_before.unwrap();
    let waits = until.since(Lab::START);
    assert!(!waits.is_zero());
    assert_eq!(first_due(&[&a, &b]).await, Some((until, waits)));
    lab.pass(waits - TICK);
    assert_eq!(first_due(&[&a, &b]).await, Some((until, TICK)));
    assert_eq!((run(&a).await, run(&b).await), (vec![], vec![]));
    lab.pass(TICK);
    assert_eq!(first_due(&[&a, &b]).await, Some((until, Duration::ZERO)));
    let taken = take(&a, policy()).await;
    assert_eq!(keys(&taken), ["k"]);
    let id = taken[0].operation().id;
    assert_eq!((first_due(&[&a, &b]).await, run(&b).await), (None, vec![]));
    for lease in taken {
        assert_eq!(lease.complete(done("")).await.unwrap(), SETTLED);
    }
    assert_eq!(first_due(&[&a, &b]).await, None);
    b.flush().await;
    let (_, repeats) = a.store().journal(id).await.unwrap();
    assert_eq!(repeats, [], "nothing has brought the key again");
}

/// An operation that is out of attempts, parked or in doubt is never due, also after many sweeps; after a
/// person's retry it is due at once.
pub async fn an_operation_that_waits_for_a_person_is_never_due(lab: Lab) {
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
        assert_eq!((first_due(&[&ledger]).await, run(&ledger).await), (None, vec![]));
        lab.pass(secs(3600));
        ledger.sweep().await.unwrap();
    }
    let mut never = Vec::new();
    for text in ["exhausted", "for good", "doubted", "crashed", "held"] {
        let id = row(&ledger, text).await.id;
        never.extend(ledger.store().never_due(&[id, id + 1]).await.unwrap().contains(&id).then_some(text));
    }
    assert_eq!(never, ["exhausted", "for good", "crashed"], "the others are in doubt");
    for text in ["exhausted", "for good", "doubted", "crashed", "held"] {
        let op = row(&ledger, text).await;
        assert_eq!(decide(&ledger, op.id, retry()).await.answer, Answer::Resolved, "{text}");
        assert!(ledger.store().never_due(&[op.id]).await.unwrap().is_empty(), "{text}");
        let mut taken = take(&ledger, once.clone()).await;
        assert_eq!(keys(&taken), [text]);
        let lease = taken.remove(0);
        assert_eq!(lease.operation().payload.as_deref(), Some(text.as_bytes()));
        assert_eq!(lease.complete(done("")).await.unwrap(), SETTLED);
    }
    let failed = acquire(&ledger, work("failed", once)).await;
    assert_eq!(failed.fail(failure("no")).await.unwrap(), SETTLED);
    let id = row(&ledger, "failed").await.id;
    decide(&ledger, id, retry()).await;
    decide(&ledger, id, Decision::Resolve { verdict: Verdict::Failed, expected: None }).await;
    assert_eq!(first_due(&[&ledger]).await, None, "a person's verdict failed is final");
}

/// Newer data is due when the older run ends, in any way; an operation whose lease expired is due when the sweep
/// has found it; a released one after its delay.
pub async fn an_operation_without_a_delay_is_due_at_once(lab: Lab) {
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
        let mut taken = take(&b, policy()).await;
        assert_eq!(keys(&taken), [how]);
        let lease = taken.remove(0);
        assert_eq!(lease.operation().payload.as_deref(), Some(&b"v2"[..]), "{how}");
        assert_eq!(lease.complete(done("")).await.unwrap(), SETTLED);
    }
    drop(acquire(&a, version("lost", 1)).await);
    lab.pass(policy().lease);
    assert_eq!(first_due(&[&a, &b]).await, None, "no node has noticed yet");
    assert_eq!(b.sweep().await.unwrap().lapsed, 1);
    // A claim that meets an expired lease and is refused leaves the operation due as well.
    drop(acquire(&a, version("lost too", 5)).await);
    lab.pass(policy().lease);
    assert_eq!(ask(&b, version("lost too", 4)).await, "mismatch");
    let taken = take(&a, policy()).await;
    assert_eq!(keys(&taken), ["lost", "lost too"]);
    for lease in taken {
        let delay = if lease.operation().key.as_str() == "lost" { Duration::ZERO } else { secs(5) };
        assert_eq!(lease.release(delay).await.unwrap(), SETTLED);
    }
    assert_eq!(run(&b).await, ["lost"], "released, and released with a delay");
    lab.pass(secs(5));
    assert_eq!(run(&b).await, ["lost too"]);
}

/// A worker whose policy allows fewer attempts finds an operation exhausted, and it is no longer due; unless a person
/// has let it run again meanwhile.
pub async fn an_operation_exhausted_under_a_stricter_policy_is_no_longer_due(lab: Lab) {
    let ledger = lab.ledger().await;
    for text in ["one", "two"] {
        assert_eq!(acquire(&ledger, work(text, policy())).await.fail(failure("no")).await.unwrap(), SETTLED);
    }
    lab.pass(secs(10));
    let one = row(&ledger, "one").await;
    decide(&ledger, row(&ledger, "two").await.id, retry()).await;
    let strict = Policy { max_attempts: Some(1), ..policy() };
    assert_eq!(keys(&take(&ledger, strict).await), ["two"]);
    assert_eq!(first_due(&[&ledger]).await, None, "the other one is no longer due");
    let one = semel::Operation { never_due: true, ..one };
    assert_eq!(row(&ledger, "one").await, one, "nothing else about it has changed");
}

/// Due operations are taken in order, complete, of one scope, and within the limit of bytes.
pub async fn due_operations_are_taken_in_order_and_within_limits(lab: Lab) {
    let ledger = lab.ledger().await;
    let of = |service: &str| Scope::new("acme", service, "transfer").unwrap();
    let put_back = async |service: &str, text: &str| {
        let work = Work::new(of(service), key(text), Fingerprint::of_bytes(b"")).order(7).payload(text.to_owned());
        let lease = acquire(&ledger, work.policy(policy())).await;
        assert_eq!(lease.release(Duration::ZERO).await.unwrap(), SETTLED);
        lab.pass(TICK);
    };
    // By SQL, because it is faster.
    let grow = async |text: &str, mib: usize| {
        let bytes = match lab.kind() {
            Kind::Sqlite => format!("unhex('0100' || hex(zeroblob({mib} << 20)))"),
            Kind::Postgres => format!("decode('0100' || repeat('00', {mib} << 20), 'hex')"),
        };
        let grown = format!("UPDATE semel_operations SET payload = {bytes} WHERE service = 'bank' AND key = '{text}'");
        assert_eq!(lab.execute(&grown).await.unwrap(), 1);
    };
    put_back("post", "elsewhere").await;
    for n in 0..5 {
        put_back("bank", &n.to_string()).await;
    }
    for text in ["0", "1", "2", "3"] {
        grow(text, 5).await;
    }
    let taken = take(&ledger, policy()).await;
    assert_eq!(keys(&taken), ["0", "1", "2"], "a fourth would be too much");
    for op in taken.iter().map(Lease::operation) {
        assert_eq!((&op.scope, op.order), (&scope(), Some(7)));
        assert!(op.payload.as_ref().is_some_and(|payload| payload.len() == 5 << 20));
    }
    assert_eq!(first_due(&[&ledger]).await, Some((Lab::START + TICK * 4, Duration::ZERO)), "there are more already");
    assert_eq!(keys(&take(&ledger, policy()).await), ["3", "4"]);
    for text in ["large", "next"] {
        put_back("bank", text).await;
    }
    grow("large", 17).await;
    assert_eq!(keys(&take(&ledger, policy()).await), ["large"], "one that is too large alone is not left for ever");
    assert_eq!(keys(&take(&ledger, policy()).await), ["next"]);

    for n in 0..70 {
        put_back("many", &format!("k{n:02}")).await;
    }
    let mut expected = (0..70).map(|n| format!("k{n:02}"));
    for (most, n) in [(0, 0), (1, 1), (10, 10), (u32::MAX, 59)] {
        let taken = take_of(&ledger, of("many"), most, policy()).await;
        assert_eq!(keys(&taken), expected.by_ref().take(n).collect::<Vec<_>>(), "{most}");
    }
    let of = async |tenant: &str, service: &str, kind: &str| {
        keys(&take_of(&ledger, Scope::new(tenant, service, kind).unwrap(), 64, policy()).await)
    };
    for (service, kind) in [("Post", "transfer"), ("post", "Transfer"), ("post", "transfe"), ("post", "transfer.x")] {
        assert_eq!(of("acme", service, kind).await, [""; 0], "{service} {kind}");
    }
    assert_eq!(of("Acme", "post", "transfer").await, [""; 0]);
    assert_eq!(of("acme", "post", "transfer").await, ["elsewhere"]);
}

/// Releases an operation of a kind, with this delay.
async fn put_back(node: &Node, scope: Scope, text: &str, delay: Duration) {
    let work = Work::new(scope, key(text), Fingerprint::of_bytes(b"")).payload(text.to_owned());
    assert_eq!(acquire(node, work.policy(policy())).await.release(delay).await.unwrap(), SETTLED);
}

/// If many operations of one kind or tenant are due, those of another are found at once; the listing of kinds has
/// the first due time of each, of one service and every tenant.
pub async fn due_operations_of_one_kind_delay_none_of_another(lab: Lab) {
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
    // Of these, none will ever be due.
    let ended = async |kind: &str| {
        let work = Work::new(scope("acme", "bank", kind), key("k"), Fingerprint::of_bytes(b""));
        acquire(&a, work.policy(policy())).await
    };
    assert_eq!(ended("completed").await.complete(done("")).await.unwrap(), SETTLED);
    assert_eq!(ended("doubted").await.doubt("?").await.unwrap(), SETTLED);
    let never = Failure { error: "no way".into(), retry: Retry::Never };
    assert_eq!(ended("parked").await.fail(never).await.unwrap(), SETTLED);
    let running = ended("running").await;

    let got = async |after: &str| {
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
    assert_eq!(got("").await, all);
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
        assert_eq!(got(after).await, all[from..], "after {after}");
    }
    lab.pass(secs(9));
    let waits: Vec<_> = got("").await.iter().map(|kind| kind.wait).collect();
    assert_eq!(waits, [Duration::ZERO; 4]);
    for (tenant, kind, key) in [("other", "little", "one"), ("acme", "little.more", "two"), ("other", "much", "theirs")]
    {
        let mut taken = take_of(&b, scope(tenant, "bank", kind), 64, policy()).await;
        assert_eq!(keys(&taken), [key]);
        assert_eq!(taken.remove(0).complete(done("")).await.unwrap(), SETTLED);
    }
    assert_eq!(keys(&take_of(&b, scope("acme", "bank", "much"), 1, policy()).await), ["first"]);
    assert_eq!(running.release(secs(3)).await.unwrap(), SETTLED);
    assert_eq!(got("").await, [kind("much", "acme", 7, 0), kind("running", "acme", 12, 3)]);
}

/// Kinds are listed in pages, so that any number of them can be listed.
pub async fn kinds_of_work_are_counted_up_to_a_limit(lab: Lab) {
    let ledger = lab.ledger().await;
    let numbers = match lab.kind() {
        Kind::Sqlite => "WITH RECURSIVE i(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM i WHERE i < 2500) SELECT",
        Kind::Postgres => "WITH i AS (SELECT i FROM generate_series(1, 2500) AS i) SELECT",
    };
    // By SQL, because it is faster: two of each kind.
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
    for (n, got) in pages.concat().into_iter().enumerate() {
        let first = i64::try_from(n).unwrap() * 2;
        assert_eq!((got.kind, got.next.as_micros()), (format!("k{}", 10000 + n), first.max(1)));
    }
}

/// An expired operation counts as absent: it is not taken, also before the sweep has deleted it.
pub async fn an_expired_operation_is_not_due(lab: Lab) {
    let ledger = lab.ledger().await;
    let short = Policy { retention: Some(secs(60)), ..policy() };
    for n in 0..70 {
        let lease = acquire(&ledger, work(&format!("expired {n}"), short.clone())).await;
        assert_eq!(lease.fail(failure("no")).await.unwrap(), SETTLED);
    }
    let kept = acquire(&ledger, work("kept", policy())).await;
    lab.pass(secs(60) - TICK);
    assert_eq!(kept.fail(Failure { error: "no".into(), retry: Retry::After(TICK) }).await.unwrap(), SETTLED);
    lab.pass(TICK);
    let first = async || first_due(&[&ledger]).await.map(|(next, _)| next);
    assert!(first().await.unwrap() < Lab::START + secs(60), "the kinds know nothing of it before the sweep");
    assert_eq!(run(&ledger).await, ["kept"]);
    assert_eq!(ledger.sweep().await.unwrap().expired, 70);
    assert_eq!(first().await, None);
}

/// A claim at once does not wait for a backoff; otherwise it is like any claim.
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

/// A row of the backlog without a due time gets one when the tables are migrated.
pub async fn backlog_rows_without_due_times_are_migrated(lab: Lab) {
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
    assert_eq!(run(&ledger).await, ["pending"]);
    assert_eq!(first_due(&[&ledger]).await.map(|(next, _)| next), row(&ledger, "failed").await.not_before);
    let scopes = lab.texts("SELECT DISTINCT service || '/' || kind FROM semel_backlog").await;
    assert_eq!(scopes, [format!("{}/{}", scope().service(), scope().kind())]);
    let wrong = lab.execute("UPDATE semel_backlog SET due = 1 WHERE state = 'in_doubt'").await;
    assert!(wrong.is_err(), "an operation in doubt is never due");
    lab.pass(secs(10));
    assert_eq!(run(&ledger).await, ["failed"]);
}
