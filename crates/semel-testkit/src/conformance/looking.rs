//! Reading: by id, by key, by label, by state and age, in pages.

use std::{collections::BTreeSet, time::Duration};

use bytes::Bytes;
use semel::{
    Backoff, Fingerprint, Labels, OnLost, Operation, Outcome, Policy, Scope, State, Work,
    look::{Filter, Listing, Page},
    prelude::*,
};

use super::tools::*;
use crate::{Lab, key, scope, work};

async fn list(node: &Node, filter: &Filter) -> Vec<String> {
    let listing = node.store().list(filter, Page::default()).await.unwrap();
    listing.items.iter().map(|op| op.key.as_str().to_owned()).collect()
}

/// An operation is found by its id and its key, within its own tenant only, with the same row.
pub async fn an_operation_is_found_by_its_tenant_only(lab: Lab) {
    let ledger = lab.ledger().await;
    let lease = acquire(&ledger, work("k", Policy::default()).payload("data").order(7)).await;
    let op = lease.operation().clone();
    let store = ledger.store();
    assert_eq!(store.by_id("acme", op.id).await.unwrap().as_ref(), Some(&op));
    assert_eq!(store.by_key(&scope(), &key("k")).await.unwrap().as_ref(), Some(&op));
    assert_eq!(store.by_id("other", op.id).await.unwrap(), None);
    assert_eq!(store.by_id("acme", op.id + 1).await.unwrap(), None);
    assert_eq!(store.by_key(&Scope::new("other", "bank", "transfer").unwrap(), &key("k")).await.unwrap(), None);
    assert_eq!(store.by_key(&scope(), &key("K")).await.unwrap(), None);
    assert_eq!(list(&ledger, &Filter::tenant("other")).await, [""; 0]);
}

/// A listing never shows another tenant's operations, with any filter.
pub async fn a_listing_never_crosses_tenants(lab: Lab) {
    let ledger = lab.ledger().await;
    let red = Labels::default().with(1, "red").unwrap();
    for tenant in ["acme", "other"] {
        for text in ["running", "failed", "completed"] {
            let scope = Scope::new(tenant, "bank", "transfer").unwrap();
            let work = Work::new(scope, key(text), Fingerprint::of_bytes(b"")).labels(red.clone());
            let lease = acquire(&ledger, work).await;
            match text {
                "failed" => assert_eq!(lease.fail(failure("no")).await.unwrap(), SETTLED),
                "completed" => assert_eq!(lease.complete(done("")).await.unwrap(), SETTLED),
                _ => drop(lease),
            }
        }
    }
    for state in [None, Some(State::Processing), Some(State::Failed), Some(State::Completed)] {
        for labels in [Labels::default(), red.clone()] {
            for all in [Filter::scope(&scope()), Filter::tenant("acme")] {
                let filter = Filter { state, labels: labels.clone(), ..all };
                let listing = ledger.store().list(&filter, Page::default()).await.unwrap();
                assert_eq!(listing.items.len(), if state.is_some() { 1 } else { 3 }, "{filter:?}");
                assert!(listing.items.iter().all(|op| op.scope.tenant() == "acme"), "{filter:?}");
            }
        }
    }
    assert_eq!(counted(&ledger, State::Completed).await, 1);
}

/// Each of the four labels finds its operations, and no others; text is compared by its bytes.
pub async fn each_label_finds_its_operations(lab: Lab) {
    let ledger = lab.ledger().await;
    for slot in 1..=4 {
        for text in ["red", "Red", "re%", "42"] {
            let labels = Labels::default().with(slot, text).unwrap();
            drop(acquire(&ledger, work(&format!("{slot} {text}"), Policy::default()).labels(labels)).await);
        }
    }
    let all = Labels(["a", "b", "c", "d"].map(|text| Some(text.to_owned())));
    let lease = acquire(&ledger, work("all", Policy::default()).labels(all.clone())).await;
    assert_eq!(lease.complete(done("")).await.unwrap(), SETTLED);
    assert_eq!(row(&ledger, "all").await.labels, all);
    let labelled = |slot: usize, text: &str| Filter {
        labels: Labels::default().with(slot, text).unwrap(),
        ..Filter::tenant("acme")
    };
    for slot in 1..=4 {
        for text in ["red", "Red", "re%", "42"] {
            assert_eq!(list(&ledger, &labelled(slot, text)).await, [format!("{slot} {text}")]);
        }
        assert_eq!(list(&ledger, &labelled(slot, ["a", "b", "c", "d"][slot - 1])).await, ["all"]);
        assert_eq!(list(&ledger, &labelled(slot, "nothing")).await, [""; 0]);
    }
    let of_state = |state| Filter { state: Some(state), ..labelled(1, "a") };
    assert_eq!(list(&ledger, &of_state(State::Completed)).await, ["all"]);
    assert_eq!(list(&ledger, &of_state(State::Failed)).await, [""; 0]);
    // Several labels at once: all must match.
    assert_eq!(list(&ledger, &Filter { labels: all.clone(), ..Filter::tenant("acme") }).await, ["all"]);
    for slot in 1..=4 {
        let other = Filter { labels: all.clone().with(slot, "red").unwrap(), ..Filter::tenant("acme") };
        assert_eq!(list(&ledger, &other).await, [""; 0], "{slot}");
    }
}

/// An operation as listed: without large columns.
fn brief(op: &Operation) -> Operation {
    let outcome = op.outcome.as_ref().map(|outcome| Outcome { kept: outcome.kept, body: Bytes::new() });
    let error = op.error.as_ref().map(|error| error.chars().take(512).collect());
    Operation { payload: None, checkpoint: None, outcome, error, ..op.clone() }
}

/// Filters by state, age, service and kind, alone and together, give the same as a scan of all rows.
pub async fn a_listing_has_exactly_the_matching_operations(lab: Lab) {
    let ledger = lab.ledger().await;
    let mut all = Vec::new();
    for (n, (service, kind)) in [("bank", "transfer"), ("bank", "refund"), ("post", "letter")].into_iter().enumerate() {
        for (m, state) in State::ALL.into_iter().enumerate() {
            let policy =
                Policy { on_lost: OnLost::Rerun, backoff: Backoff::NONE, lease: secs(10_000), ..Policy::default() };
            let short = Policy { lease: secs(1), ..policy.clone() };
            let scope = Scope::new("acme", service, kind).unwrap();
            let lasts = if state == State::TimedOut { short } else { Policy { max_run: secs(20_000), ..policy } };
            let work = Work::new(scope, key(&format!("{n}{m}")), Fingerprint::of_bytes(b"")).policy(lasts).payload("x");
            let lease = acquire(&ledger, work).await;
            match state {
                State::Pending => assert_eq!(lease.release(Duration::ZERO).await.unwrap(), SETTLED),
                State::Completed => assert_eq!(lease.complete(done("large")).await.unwrap(), SETTLED),
                State::Failed => assert_eq!(lease.fail(failure(&"no".repeat(400))).await.unwrap(), SETTLED),
                State::InDoubt => assert_eq!(lease.doubt("?").await.unwrap(), SETTLED),
                State::Processing | State::TimedOut => drop(lease),
            }
            lab.pass(secs(1));
            ledger.sweep().await.unwrap();
            all.push(
                ledger
                    .store()
                    .by_key(&Scope::new("acme", service, kind).unwrap(), &key(&format!("{n}{m}")))
                    .await
                    .unwrap()
                    .unwrap(),
            );
            assert_eq!(all.last().unwrap().state, state);
        }
    }
    all.reverse();
    let states = State::ALL.into_iter().map(Some).chain([None]);
    let times = [None, Some(Lab::START), Some(Lab::START + secs(9)), Some(Lab::START + secs(100))];
    for state in states {
        for service in [None, Some("bank"), Some("post"), Some("Bank")] {
            for kind in [None, Some("transfer"), Some("letter")] {
                for before in times {
                    let owned = |text: Option<&str>| text.map(str::to_owned);
                    let filter =
                        Filter { service: owned(service), kind: owned(kind), state, before, ..Filter::tenant("acme") };
                    let fits = |op: &&Operation| {
                        state.is_none_or(|state| op.state == state)
                            && service.is_none_or(|service| op.scope.service() == service)
                            && kind.is_none_or(|kind| op.scope.kind() == kind)
                            && before.is_none_or(|before| op.created_at < before)
                    };
                    let listing = ledger.store().list(&filter, Page::default()).await.unwrap();
                    let expected: Vec<_> = all.iter().filter(fits).map(brief).collect();
                    assert_eq!(listing.items, expected, "{filter:?}");
                    assert_eq!(listing.next, None);
                }
            }
        }
    }
}

/// Filters by scope, labels, state, time and archive together give the same as a scan of all rows; also if a clock went
/// back for a while, so that the order of first claims differs from that of ids.
pub async fn filters_hold_together(lab: Lab) {
    let ledger = lab.ledger().await;
    let hour = secs(3600);
    let mut all = Vec::new();
    for n in 0..36_usize {
        let scope = Scope::new("acme", "bank", ["transfer", "refund"][n % 2]).unwrap();
        let mut labels = Labels::default().with(1, ["red", "blue", "green"][n % 3]).unwrap();
        if n % 4 < 2 {
            labels = labels.with(3, ["x", "y"][n % 4]).unwrap();
        }
        let buried = Policy { retention: None, tombstone: Some(secs(1)), ..Policy::default() };
        let policy = if n % 5 == 0 { buried } else { Policy { retention: None, ..Policy::default() } };
        let work = Work::new(scope.clone(), key(&format!("{n}")), Fingerprint::of_bytes(b"")).policy(policy);
        let lease = acquire(&ledger, work.labels(labels)).await;
        let settled = if n % 7 == 3 { lease.fail(failure("no")).await } else { lease.complete(done("")).await };
        assert_eq!(settled.unwrap(), SETTLED);
        lab.pass(secs(1));
        ledger.sweep().await.unwrap();
        let op = ledger.store().by_key(&scope, &key(&format!("{n}"))).await.unwrap().unwrap();
        assert_eq!(op.archived, n % 5 == 0 && op.state == State::Completed);
        all.push(op);
        // PostgreSQL's clock is the server's own, and goes back and forth by up to an hour here; SQLite's never goes
        // back.
        let back = if lab.kind() == crate::Kind::Postgres { n as u64 * 5 % 7 * 580 } else { 0 };
        lab.clock.set(Lab::START + secs(600 * (n as u64 + 10) - back));
    }
    all.reverse();
    assert!(all.iter().filter(|op| op.archived).count() > 5);
    let times: Vec<_> = [0, 9, 16, 19, 24, 35].map(|n: usize| Some(all[n].created_at)).into_iter().collect();
    let labels = [(None, None), (Some("red"), None), (None, Some("y")), (Some("blue"), Some("x")), (Some("no"), None)];
    let (mut asked, mut found) = (0, 0);
    for archived in [None, Some(true), Some(false)] {
        for since in times.iter().copied().chain([None, Some(Lab::START + hour * 1000)]) {
            for before in [None, times[1], times[4]] {
                for state in [None, Some(State::Completed), Some(State::Failed), Some(State::Processing)] {
                    for (label1, label3) in labels {
                        for kind in [None, Some("transfer")] {
                            let owned = |text: Option<&str>| text.map(str::to_owned);
                            let labels = Labels([owned(label1), None, owned(label3), None]);
                            let service = owned(kind.map(|_| "bank"));
                            let (tenant, kind) = ("acme".to_owned(), owned(kind));
                            let filter = Filter { tenant, service, kind, labels, state, since, before, archived };
                            let fits = |op: &&Operation| {
                                archived.is_none_or(|archived| op.archived == archived)
                                    && since.is_none_or(|since| op.created_at >= since)
                                    && before.is_none_or(|before| op.created_at < before)
                                    && state.is_none_or(|state| op.state == state)
                                    && filter.kind.as_ref().is_none_or(|kind| op.scope.kind() == kind)
                                    && (0..4)
                                        .all(|n| filter.labels.0[n].is_none() || filter.labels.0[n] == op.labels.0[n])
                            };
                            let expected: Vec<_> = all.iter().filter(fits).map(|op| op.id).collect();
                            let page = Page { after: None, limit: 500 };
                            let listing = ledger.store().list(&filter, page).await.unwrap();
                            let ids: Vec<_> = listing.items.iter().map(|op| op.id).collect();
                            assert_eq!(ids, expected, "{filter:?}");
                            asked += 1;
                            found += usize::from(!ids.is_empty());
                        }
                    }
                }
            }
        }
    }
    assert!(found > asked / 6, "most filters fit nothing: {found} of {asked}");
}

/// A page of archived operations, or of a time range, continues where the one before ended.
pub async fn filtered_pages_are_complete(lab: Lab) {
    let ledger = lab.ledger().await;
    let buried = Policy { retention: None, tombstone: Some(TICK), ..Policy::default() };
    let mut since = Lab::START;
    for n in 0..30 {
        let kept = Policy { retention: None, ..Policy::default() };
        let policy = if n % 3 == 0 { kept } else { buried.clone() };
        assert_eq!(acquire(&ledger, work(&format!("{n}"), policy)).await.complete(done("")).await.unwrap(), SETTLED);
        lab.pass(secs(3600));
        if n == 11 {
            since = ledger.store().now().await.unwrap();
        }
    }
    assert_eq!(ledger.sweep().await.unwrap().archived, 20);
    for (archived, since, there) in
        [(Some(true), None, 20), (Some(false), None, 10), (None, Some(since), 18), (Some(true), Some(since), 12)]
    {
        for all in [Filter::scope(&scope()), Filter::tenant("acme")] {
            let filter = Filter { archived, since, ..all };
            let (mut seen, mut page) = (Vec::new(), Page { after: None, limit: 7 });
            loop {
                let Listing { items, next, .. } = ledger.store().list(&filter, page).await.unwrap();
                seen.extend(items.iter().map(|op| op.id));
                page.after = next;
                if next.is_none() {
                    break;
                }
            }
            assert!(seen.is_sorted_by(|a, b| a > b), "newest first, none twice");
            assert_eq!(seen.len(), there, "{filter:?}");
        }
    }
}

/// Pages have no gaps and no duplicates, also while rows are being added.
pub async fn pages_are_complete_while_rows_are_added(lab: Lab) {
    let ledger = lab.ledger().await;
    let add = async |from: usize, to: usize| {
        let asked = (from..to).map(|n| crate::request(&format!("k{n:03}"), b"", Policy::default()).into()).collect();
        ledger.store().claim(asked).await.unwrap();
    };
    add(0, 100).await;
    let filters = [
        Filter::tenant("acme"),
        Filter::scope(&scope()),
        Filter { state: Some(State::Processing), ..Filter::tenant("acme") },
    ];
    let mut added = 100;
    for filter in filters {
        let there = added;
        let (mut seen, mut pages, mut page) = (Vec::new(), 0, Page { after: None, limit: 7 });
        loop {
            let Listing { items, next, .. } = ledger.store().list(&filter, page).await.unwrap();
            assert!(items.len() <= 7);
            assert!(items.is_sorted_by(|a, b| a.id > b.id), "newest first");
            seen.extend(items.iter().map(|op| op.key.as_str().to_owned()));
            pages += 1;
            add(added, added + 3).await;
            added += 3;
            match next {
                Some(next) => page.after = Some(next),
                None => break,
            }
        }
        assert_eq!(pages, there.div_ceil(7));
        assert_eq!(seen.len(), there, "no gap, no double, nothing that came later");
        assert_eq!(seen.iter().collect::<BTreeSet<_>>().len(), there);
    }
}

/// A page is as long as requested, between 1 and 500, and the last one says so.
pub async fn a_page_has_1_to_500_items_and_the_last_has_no_next(lab: Lab) {
    let ledger = lab.ledger().await;
    let asked = |range: std::ops::Range<usize>| {
        range.map(|n| crate::request(&format!("k{n}"), b"", Policy::default()).into()).collect()
    };
    ledger.store().claim(asked(0..500)).await.unwrap();
    let list = async |limit| {
        let listing = ledger.store().list(&Filter::tenant("acme"), Page { after: None, limit }).await.unwrap();
        (listing.items.len(), listing.next.is_some())
    };
    assert_eq!(list(500).await, (500, false), "exactly one page: there is no next");
    assert_eq!(list(499).await, (499, true));
    ledger.store().claim(asked(500..502)).await.unwrap();
    assert_eq!(list(0).await, (1, true));
    assert_eq!(list(u32::MAX).await, (500, true));
    assert_eq!(Page::default().limit, 50);
}

/// Every kind with a prefix is returned once, in byte order, however many operations it has; none of another service or
/// tenant. At most the first `MOST_KINDS`.
pub async fn kinds_are_found_by_their_prefix(lab: Lab) {
    let ledger = lab.ledger().await;
    for (tenant, service, kind) in [
        ("acme", "bank", "a.x"),
        ("acme", "bank", "a.x/body"),
        ("acme", "bank", "a.B"),
        ("acme", "bank", "a"),
        ("acme", "bank", "a-b"),
        ("acme", "bank", "a/body"),
        ("acme", "bank", "aa.x"),
        ("acme", "bank", "A.x"),
        ("acme", "bank", "a_x"),
        ("acme", "post", "a.post"),
        ("other", "bank", "a.other"),
    ] {
        let scope = Scope::new(tenant, service, kind).unwrap();
        for text in ["1", "2"] {
            let work = Work::new(scope.clone(), key(text), Fingerprint::of_bytes(b""));
            assert_eq!(acquire(&ledger, work).await.complete(done("")).await.unwrap(), SETTLED);
        }
    }
    let got = async |prefix: &str| ledger.store().kinds("acme", "bank", prefix).await.unwrap();
    assert_eq!(got("a.").await, ["a.B", "a.x", "a.x/body"]);
    assert_eq!(got("a").await, ["a", "a-b", "a.B", "a.x", "a.x/body", "a/body", "a_x", "aa.x"]);
    assert_eq!(got("").await.len(), 9);
    assert_eq!((got("b").await, got("a.x/body/").await), (vec![], vec![]));
    let most = semel_store::Database::MOST_KINDS;
    for n in 0..=most {
        let scope = Scope::new("acme", "bank", &format!("many.{n:04}")).unwrap();
        drop(acquire(&ledger, Work::new(scope, key("k"), Fingerprint::of_bytes(b""))).await);
    }
    let many = got("many.").await;
    assert_eq!((many.len(), many.is_sorted()), (most as usize, true));
}
