//! The upper bound: pgbench with the same two statements, one row each, on the same tables.

use std::{
    fs,
    path::Path,
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use semel::Policy;
use tempfile::TempDir;
use tokio::process::Command;

use crate::{Plan, load::Figure, site::Site, work};

pub(crate) const PGBENCH: &str = "pgbench";

/// The number of clients that PostgreSQL serves well on a small machine.
pub(crate) const CLIENTS: usize = 64;

pub(crate) async fn measure(plan: &Plan, site: &Site) -> Result<Figure> {
    run(plan, site, &pair()).await
}

/// Runs a script with pgbench; one operation is the whole script.
pub(crate) async fn run(plan: &Plan, site: &Site, text: &str) -> Result<Figure> {
    let folder = TempDir::new()?;
    let script = folder.path().join("script.sql");
    fs::write(&script, text)?;
    let whole = Plan::WARM_UP + plan.length;
    let (cpu_before, begun) = (site.cpu.used(), Instant::now());
    let output = Command::new(&plan.pgbench)
        .args(["--no-vacuum", "--protocol=prepared", "--jobs=2", "--log", "--log-prefix=log"])
        .arg(format!("--client={CLIENTS}"))
        .arg(format!("--time={}", whole.as_secs()))
        .arg("--file")
        .arg(&script)
        .arg(&site.url)
        .current_dir(folder.path())
        .stdin(Stdio::null())
        .output()
        .await
        .with_context(|| format!("running {}", plan.pgbench.display()))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "pgbench failed: {errors}");
    let cpu_used = site.cpu.used() - cpu_before;
    let part = plan.length.as_secs_f64() / begun.elapsed().as_secs_f64();
    let took = read_logs(folder.path(), plan.length)?;
    ensure!(!took.is_empty(), "pgbench did nothing: {errors}");
    Ok(Figure::new(took, plan.length, cpu_used.mul_f64(part)))
}

/// The durations of the pairs that ended in the last `window` of the run.
fn read_logs(folder: &Path, window: Duration) -> Result<Vec<Duration>> {
    let mut pairs = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("log.")) {
            let text = fs::read_to_string(&path)?;
            pairs.extend(text.lines().filter_map(read_line));
        }
    }
    let end = pairs.iter().map(|(ended, _)| *ended).max().unwrap_or_default();
    let counts = |(ended, _): &(Duration, Duration)| *ended + window > end;
    Ok(pairs.into_iter().filter(counts).map(|(_, took)| took).collect())
}

/// A line is: client, number, microseconds, script, seconds and microseconds of its end.
fn read_line(line: &str) -> Option<(Duration, Duration)> {
    let fields: Vec<u64> = line.split(' ').map_while(|field| field.parse().ok()).collect();
    let [_, _, took, _, seconds, micros, ..] = fields[..] else { return None };
    Some((Duration::from_secs(seconds) + Duration::from_micros(micros), Duration::from_micros(took)))
}

/// The script of one pair. Two statements, two commits: the statements of the lanes, with one row each.
fn pair() -> String {
    let [tenant, service, kind] = work::SCOPE;
    let policy = Policy::default();
    let (lease, max_run) = (policy.lease.as_micros(), policy.max_run.as_micros());
    let retention = policy.retention.unwrap_or_default().as_micros();
    let (terms, events, outcome) = (policy.to_terms(), work::EVENTS - 1, String::from_utf8_lossy(&work::OUTCOME));
    format!(
        "\\set event random(0, {events})
WITH clock AS MATERIALIZED (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS now),
asked AS MATERIALIZED (SELECT nextval('semel_fence') AS fence, gen_random_uuid()::text AS key),
made AS (
    INSERT INTO semel_operations
        (id, tenant, service, kind, key, fingerprint, label1, label3,
         state, fence, owner, created_at, claimed_at, look_at)
    SELECT fence, '{tenant}', '{service}', '{kind}', key, sha256(key::bytea), 'order.event-' || :event,
           'process-' || gen_random_uuid(), 'processing', fence, 'pgbench', now, now, now + {retention}
    FROM asked, clock
    ON CONFLICT (tenant, service, kind, key) DO NOTHING
    RETURNING id, tenant, service, kind, label1, label2
), leased AS (
    INSERT INTO semel_leases (operation, fence, token, deadline, run_until, term, retention, terms)
    SELECT id, id, uuid_send(gen_random_uuid()), now + {lease}, now + {max_run}, {lease}, {retention}, '{terms}'
    FROM made, clock
), counted AS (
    INSERT INTO semel_deltas (tenant, service, kind, label1, label2, hour, from_state, to_state, answer, bucket, n)
    SELECT tenant, service, kind, coalesce(label1, ''), coalesce(label2, ''), now / 3600000000,
           '', 'processing', '', 0, 1
    FROM made, clock
)
SELECT id FROM made \\gset
WITH clock AS MATERIALIZED (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS now),
gone AS (
    DELETE FROM semel_leases WHERE operation = :id AND fence = :id AND NOT successor
    RETURNING operation, fence, retention, tombstone
), done AS (
    UPDATE semel_operations AS o
    SET state = 'completed', settled_at = now, expires_at = now + g.retention, archive_at = now + g.tombstone,
        outcome = '\\x0100'::bytea || '{outcome}'::bytea, outcome_kept = TRUE, error = NULL, checkpoint = NULL
    FROM gone AS g, clock
    WHERE o.id = g.operation AND o.fence = g.fence
    RETURNING o.tenant, o.service, o.kind, o.label1, o.label2, o.claimed_at, now
), counted AS (
    INSERT INTO semel_deltas (tenant, service, kind, label1, label2, hour, from_state, to_state, answer, bucket, n)
    SELECT tenant, service, kind, coalesce(label1, ''), coalesce(label2, ''), now / 3600000000,
           'processing', 'completed', '',
           floor(ln(greatest(now - claimed_at, 1)::float8) / ln(2::float8) * 4)::bigint, 1
    FROM done
)
SELECT now FROM done;
"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_line_has_the_time_and_the_duration() {
        let read = read_line("3 17 2500 0 1700000000 250000");
        assert_eq!(read, Some((Duration::from_micros(1_700_000_000_250_000), Duration::from_micros(2500))));
        assert_eq!(read_line("3 17 failed 0 1700000000 250000"), None);
    }
}
