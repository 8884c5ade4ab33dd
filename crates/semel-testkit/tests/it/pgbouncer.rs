//! PgBouncer in front of PostgreSQL: its session mode works, its other modes are refused at the start.

use semel_store::{Database, Settings};
use semel_testkit::{Kind, Lab, conformance, faults::PgBouncer};
use sqlx::{Connection as _, PgConnection};

/// Some laws of a store, behind a PgBouncer in session mode. Only the number of connections is configured there.
macro_rules! behind_pgbouncer {
    ($($module:ident::$law:ident),+ $(,)?) => {
        $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $law() {
            let mut lab = Lab::new(Kind::Postgres).await;
            let guest = lab.guest().await;
            let bouncer = PgBouncer::start(&guest.url, "pool_mode = session\ndefault_pool_size = 100");
            lab.url = bouncer.url(&guest.url);
            conformance::$module::$law(lab).await;
        })+
    };
}

behind_pgbouncer!(
    claims::each_of_the_seven_answers_is_given,
    batches::crossing_batches_both_succeed,
    fences::every_write_of_a_zombie_is_refused,
    stores::nodes_that_start_together_migrate_once,
    stores::a_database_can_be_opened_again,
);

async fn refused(lab: &Lab, url: &str) {
    let error = Database::open(url, Settings::default()).await.err().expect("it must be refused");
    let text = error.to_string();
    assert!(!error.is_transient() && text.contains("pool_mode = session"), "{text}");
    let made = lab.number("SELECT count(*) FROM pg_tables WHERE schemaname = current_schema()").await;
    assert_eq!(made, 0, "nothing was changed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_modes_of_a_pooler_are_refused_at_the_start() {
    for config in [
        "pool_mode = transaction",
        "pool_mode = transaction\nserver_round_robin = 1\nmin_pool_size = 3",
        "pool_mode = transaction\ndefault_pool_size = 1",
        "pool_mode = statement",
    ] {
        println!("{config}");
        let lab = Lab::new(Kind::Postgres).await;
        let guest = lab.guest().await;
        let bouncer = PgBouncer::start(&guest.url, config);
        refused(&lab, &bouncer.url(&guest.url)).await;
    }
}

/// Others use the pooler at the same time, and its sessions in turn.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transaction_mode_is_refused_while_others_use_the_pooler() {
    let lab = Lab::new(Kind::Postgres).await;
    let guest = lab.guest().await;
    let bouncer = PgBouncer::start(&guest.url, "pool_mode = transaction\ndefault_pool_size = 4");
    let url = bouncer.url(&guest.url);
    let mut others = tokio::task::JoinSet::new();
    for _ in 0..3 {
        let mut other = PgConnection::connect_with(&plain(&url)).await.unwrap();
        others.spawn(async move { while sqlx::raw_sql("SELECT pg_sleep(0.001)").execute(&mut other).await.is_ok() {} });
    }
    refused(&lab, &url).await;
}

/// Options that PgBouncer accepts.
fn plain(url: &str) -> sqlx::postgres::PgConnectOptions {
    url.parse::<sqlx::postgres::PgConnectOptions>().unwrap().extra_float_digits(None)
}
