//! Which callers get a stored answer if nothing before the layer authenticates.

use std::time::Duration;

use semel::{OnLost, Policy, prelude::*};
use semel_http::{Credentials, Route};
use semel_testkit::Kind;

use crate::{
    client::{Ask, keyed},
    shop::{Shop, at_once, on_both_databases, secs},
};

on_both_databases!(
    a_repeat_with_other_credentials_is_neither_carried_out_nor_replayed,
    a_repeat_that_is_refused_for_its_credentials_is_counted_as_such,
    another_caller_learns_nothing_of_a_request_in_flight_or_in_doubt,
    of_two_first_requests_with_different_credentials_one_wins,
    a_key_that_was_released_is_free_for_other_credentials,
    a_failed_request_is_tried_again_by_its_own_caller_only,
    operations_stored_without_credentials_are_replayed_to_every_caller,
    a_retention_below_the_minimum_is_refused,
);

fn guarded(route: Route) -> Route {
    route.same_credentials(Credentials::new(b"a secret of the database").unwrap())
}

fn by(token: &str) -> Ask {
    keyed("k").header("Authorization", format!("Bearer {token}"))
}

async fn a_repeat_with_other_credentials_is_neither_carried_out_nor_replayed(kind: Kind) {
    let shop = Shop::open(kind).await;
    for route in [Route::leased(), Route::leased().pinned().kind("pinned")] {
        let (client, before) = (shop.serve(guarded(route)).await, shop.desk.runs());
        assert_eq!(client.send(&by("ann")).await.status, 201);
        for other in [by("bob"), keyed("k"), by("ann").header("Authorization", "Bearer ann")] {
            let told = client.send(&other).await;
            told.is_problem(409, "credentials-differ");
            assert_eq!((told.json()["retryable"].as_bool(), &told.json()["first_seen"]), (Some(false), &().into()));
        }
        // Credentials are compared before the contents.
        client.send(&by("bob").body("other")).await.is_problem(409, "credentials-differ");
        client.send(&by("ann").body("other")).await.is_problem(422, "payload-mismatch");
        assert!(client.send(&by("ann")).await.is_replay());
        assert_eq!(shop.desk.runs() - before, 1);
    }
}

async fn a_repeat_that_is_refused_for_its_credentials_is_counted_as_such(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(guarded(Route::leased())).await;
    assert_eq!(client.send(&by("ann")).await.status, 201);
    client.send(&by("bob")).await.is_problem(409, "credentials-differ");
    assert!(client.send(&by("ann")).await.is_replay());
    // A failed request may be retried, but not by another caller, whose claim gets the lease and releases it.
    let failing = |token: &str| keyed("failed").header("Authorization", token).gets(500);
    assert_eq!(client.send(&failing("ann")).await.status, 500);
    shop.lab.pass(secs(60));
    client.send(&failing("bob")).await.is_problem(409, "credentials-differ");
    shop.ledger.flush().await;
    for (key, words) in [("k", &["credentials_differ", "replay"][..]), ("failed", &["credentials_differ"])] {
        let id = shop.operation(key).await.unwrap().id;
        let (_, repeats) = shop.ledger.store().journal(id).await.unwrap();
        let answers: Vec<_> = repeats.iter().flat_map(|(_, seen)| &seen.first).map(|seen| &*seen.answer).collect();
        assert_eq!(answers, words, "{key}");
    }
}

async fn another_caller_learns_nothing_of_a_request_in_flight_or_in_doubt(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(guarded(Route::leased())).await;
    let first = client.spawn(&by("ann").header("X-Hold", "1").header("X-Panic", "1"));
    shop.desk.arrival().await;
    client.send(&by("bob").header("Prefer", "wait=30")).await.is_problem(409, "credentials-differ");
    client.send(&by("ann")).await.is_problem(409, "in-flight");
    shop.desk.let_go();
    first.await.unwrap();
    client.send(&by("bob")).await.is_problem(409, "credentials-differ");
    client.send(&by("ann")).await.is_problem(409, "in-doubt");
    assert_eq!(shop.desk.runs(), 1);
}

async fn of_two_first_requests_with_different_credentials_one_wins(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(guarded(Route::leased())).await;
    for n in 0..20 {
        let ask = |token: &str| keyed(&format!("k{n}")).header("Authorization", token);
        let both = [client.spawn(&ask("ann")), client.spawn(&ask("bob"))];
        let mut statuses = Vec::new();
        for answer in both {
            let answer = answer.await.unwrap();
            if answer.status != 201 {
                answer.is_problem(409, "credentials-differ");
            }
            statuses.push(answer.status);
        }
        statuses.sort_unstable();
        assert_eq!(statuses, [201, 409]);
    }
    assert_eq!(shop.desk.runs(), 20);
}

async fn a_key_that_was_released_is_free_for_other_credentials(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(guarded(Route::leased().verdict(semel_http::Verdict::only_success))).await;
    assert_eq!(client.send(&by("expired").header("X-Status", "401")).await.status, 401);
    assert_eq!(client.send(&by("refreshed")).await.status, 201);
    assert!(client.send(&by("refreshed")).await.is_replay());
    client.send(&by("expired")).await.is_problem(409, "credentials-differ");
    assert_eq!(shop.desk.runs(), 2);
}

async fn a_failed_request_is_tried_again_by_its_own_caller_only(kind: Kind) {
    let shop = Shop::open(kind).await;
    let policy = at_once(Policy { on_lost: OnLost::Rerun, ..Policy::default() });
    let client = shop.serve(guarded(Route::leased().policy(policy))).await;
    assert_eq!(client.send(&by("ann").header("X-Status", "500")).await.status, 500);
    client.send(&by("bob")).await.is_problem(409, "credentials-differ");
    assert_eq!((client.send(&by("ann")).await.status, shop.desk.runs()), (201, 2));
}

async fn operations_stored_without_credentials_are_replayed_to_every_caller(kind: Kind) {
    let shop = Shop::open(kind).await;
    let before = shop.serve(Route::leased()).await;
    assert_eq!(before.send(&by("ann")).await.status, 201);
    let after = shop.serve(guarded(Route::leased())).await;
    for token in ["ann", "bob"] {
        assert!(after.send(&by(token)).await.is_replay());
    }
    assert_eq!(shop.desk.runs(), 1);
}

async fn a_retention_below_the_minimum_is_refused(kind: Kind) {
    let shop = Shop::open(kind).await;
    for (retention, status, runs) in [
        (Some(Duration::ZERO), 500, 0),
        (Some(Duration::from_nanos(1)), 500, 0),
        (Some(Duration::from_millis(1)), 500, 0),
        (Some(Duration::from_secs(1)), 201, 1),
    ] {
        let client = shop.serve(Route::leased().policy(Policy { retention, ..Policy::default() })).await;
        assert_eq!(client.send(&keyed("k")).await.status, status, "{retention:?}");
        assert_eq!(shop.desk.runs(), runs, "{retention:?}");
    }
}
