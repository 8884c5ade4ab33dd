//! Claims of new keys and their completions: two requests per pair, each durable. Next to two requests with the same
//! bodies to a route that does nothing and, on PostgreSQL, to what a person would write by hand without Semel: pgbench
//! with an INSERT and an UPDATE of one row, each a commit, in a narrow table with one key.

use anyhow::Result;
use sqlx::{Connection as _, PgConnection};

use super::{NAME, Server, completion, subject};
use crate::{
    Plan,
    http::{CONNECTIONS, answer},
    limit,
    load::drive,
    report::Report,
    site::{Backend, Site},
    work::new_key,
};

pub(crate) const PAIRS: &str = "claim + complete";
const NOTHING: &str = "two requests without work";
pub(crate) const PGBENCH: &str = "pgbench: INSERT, UPDATE by key";

/// In this order in every round: compared ones are neighbours.
const ALL: [&str; 3] = [NOTHING, PAIRS, PGBENCH];

// pgbench's clients are compared with as many connections.
const _: () = assert!(limit::CLIENTS == CONNECTIONS);

/// The table of a hand-written ledger. Its keys are random, like ours.
const TABLE: &str = "CREATE TABLE own_operations (key TEXT PRIMARY KEY, state TEXT NOT NULL, result TEXT)";

pub(super) async fn measure(plan: &Plan, backend: Backend, report: &mut Report) -> Result<()> {
    let server = Server::start(plan, backend).await?;
    if backend == Backend::Postgres {
        on_postgres(&server.site, TABLE).await?;
    }
    for _ in 0..plan.rounds {
        for how in ALL.into_iter().filter(|how| plan.wants(how, CONNECTIONS)) {
            let figure = match how {
                PGBENCH if backend == Backend::Sqlite => continue,
                PGBENCH => {
                    let figure = limit::run(plan, &server.site, &script()).await?;
                    on_postgres(&server.site, "VACUUM own_operations").await?;
                    figure
                }
                _ => {
                    let api = server.api.clone();
                    let pair = move || {
                        let api = api.clone();
                        async move {
                            let claim =
                                format!(r#"{{"operationName":"{NAME}","idempotencyKey":"{}"}}"#, new_key()?.as_str());
                            if how == PAIRS {
                                return api.complete(&api.claim(&claim).await?).await;
                            }
                            api.nothing(&claim).await?;
                            api.nothing(&completion(1)).await
                        }
                    };
                    drive(plan, server.site.cpu, CONNECTIONS, pair).await?
                }
            };
            report.add(subject(backend, how), figure);
            server.tidy().await?;
        }
    }
    tell(backend, report);
    server.end().await
}

/// A pair's rate and CPU time next to two requests without work, in the median round.
fn tell(backend: Backend, report: &mut Report) {
    let (ours, bare) = (subject(backend, PAIRS), subject(backend, NOTHING));
    if let (Some((rate, _)), Some(cpu)) = (report.ratios(ours, bare), report.added_cpu(ours, bare)) {
        report
            .say(format!("{backend}, {PAIRS} over HTTP: {rate:.2} of the rate of {NOTHING}, {cpu:+.3} ms of CPU time"));
    }
}

/// The script of one pair. It has no lease and no fence: a lost answer or a dead client would block the key.
fn script() -> String {
    format!(
        "INSERT INTO own_operations (key, state) VALUES (gen_random_uuid()::text, 'processing')
ON CONFLICT (key) DO NOTHING RETURNING key \\gset
UPDATE own_operations SET state = 'completed', result = '{}' WHERE key = :key AND state = 'processing';
",
        answer()
    )
}

/// Runs a statement outside of a transaction.
async fn on_postgres(site: &Site, sql: &'static str) -> Result<()> {
    let mut connection = PgConnection::connect(&site.url).await?;
    sqlx::raw_sql(sql).execute(&mut connection).await?;
    Ok(connection.close().await?)
}
