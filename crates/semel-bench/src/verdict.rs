//! The aims, each with the measured ratio.

use crate::{
    growth, http,
    limit::{CLIENTS, PGBENCH},
    mailings, messages, operations,
    pairs::{BATCHED, UNBATCHED},
    replays::REPLAYS,
    report::{Report, Subject},
    site::Backend::{self, Postgres, Sqlite},
    webhooks, worker,
};

/// An aim, and its measurement.
pub(crate) struct Verdict {
    pub(crate) aim: String,
    /// The measured ratio, if both of its sides were measured.
    pub(crate) ratio: Option<f64>,
    /// By CPU time instead of time: for runs on a busy machine.
    pub(crate) cpu_ratio: Option<f64>,
    pub(crate) bound: Bound,
}

#[derive(Clone, Copy)]
pub(crate) enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

impl Verdict {
    /// Whether the aim was met; `None` if it was not measured.
    pub(crate) fn is_met(&self) -> Option<bool> {
        self.ratio.map(|ratio| match self.bound {
            Bound::AtLeast(bound) => ratio >= bound,
            Bound::AtMost(bound) => ratio <= bound,
        })
    }
}

/// The noise of two equal measurements: "not slower" means "within it".
const NOISE: f64 = 0.9;

pub(crate) fn verdicts(report: &Report) -> Vec<Verdict> {
    let pair = |backend, how, tasks| Subject { section: "pairs", backend, how, tasks };
    let replays = |backend, how, tasks| Subject { section: "replays", backend, how, tasks };
    let growth = |backend, how| Subject { section: "growth", backend, how, tasks: growth::TASKS };
    let against = |aim: String, bound: Bound, ours: Subject, theirs: Subject| {
        let (ratio, cpu_ratio) = report.ratios(ours, theirs).unzip();
        Verdict { aim, ratio, cpu_ratio, bound }
    };
    let unbatched = |backend: Backend, tasks: usize, times: f64| {
        let aim = format!("{backend}, {tasks} tasks: times the unbatched rate");
        against(aim, Bound::AtLeast(times), pair(backend, BATCHED, tasks), pair(backend, UNBATCHED, tasks))
    };
    let mut all = vec![
        unbatched(Postgres, 64, 4.0),
        unbatched(Postgres, 512, 8.0),
        against(
            "PostgreSQL, 512 tasks: times the rate of pgbench".into(),
            Bound::AtLeast(1.0),
            pair(Postgres, BATCHED, 512),
            pair(Postgres, PGBENCH, CLIENTS),
        ),
        unbatched(Sqlite, 64, 10.0),
    ];
    for backend in [Postgres, Sqlite] {
        all.push(unbatched(backend, 1, NOISE));
    }
    for backend in [Postgres, Sqlite] {
        for tasks in crate::replays::TASKS {
            let aim = format!("{backend}, {tasks} tasks: replays, times the rate of new keys");
            let (ours, theirs) = (replays(backend, REPLAYS, tasks), replays(backend, BATCHED, tasks));
            all.push(against(aim, Bound::AtLeast(1.5), ours, theirs));
        }
    }
    for backend in [Postgres, Sqlite] {
        for (ours, theirs, bound) in [
            (http::LEASED, http::OWN, 3.0),
            (http::ATOMIC, http::BARE, 0.7),
            (http::REPLAYS, http::SELECT, 1.0),
            (http::PINNED, http::NOTHING, 0.6),
        ] {
            let aim = format!("{backend}, HTTP: {ours}, times the rate of {theirs}");
            let of = |how| Subject { section: "http", backend, how, tasks: http::CONNECTIONS };
            all.push(against(aim, Bound::AtLeast(bound), of(ours), of(theirs)));
        }
    }
    for backend in [Postgres, Sqlite] {
        let of = |how| Subject { section: "messages", backend, how, tasks: 1 };
        let aim = format!("{backend}: {}, times the rate of a {}", messages::RELAY, messages::BARE);
        all.push(against(aim, Bound::AtLeast(0.7), of(messages::RELAY), of(messages::BARE)));
        all.push(Verdict {
            aim: format!("{backend}: {}, milliseconds (p50)", messages::WAIT),
            ratio: report.p50(of(messages::WAIT)),
            cpu_ratio: None,
            bound: Bound::AtMost(10.0),
        });
    }
    let of = |how| Subject { section: "webhooks", backend: Postgres, how, tasks: webhooks::MODERATE };
    all.push(Verdict {
        aim: "PostgreSQL, webhooks at a moderate load: milliseconds that deduplication adds (p50)".into(),
        ratio: report.added(of(webhooks::NEW), of(webhooks::BARE)).map(|(p50, _)| p50),
        cpu_ratio: None,
        bound: Bound::AtMost(2.0),
    });
    let peers = [
        (worker::ALL_BULK, worker::GRAPHILE_BULK, "graphile_worker"),
        (worker::ALL_BULK, worker::GRAPHILE_KEYED, "graphile_worker with keys"),
        (worker::ALL_SINGLE, worker::GRAPHILE_SINGLE, "graphile_worker"),
    ];
    for (ours, theirs, peer) in peers {
        let aim = format!("PostgreSQL, jobs {ours}: times the rate of {peer}");
        let of = |how| worker::subject(Postgres, how, worker::SEATS);
        all.push(against(aim, Bound::AtLeast(2.0), of(ours), of(theirs)));
    }
    let (ours, own) = (worker::subject(Postgres, worker::ALL_SINGLE, worker::SEATS), worker::PGBENCH_JOBS);
    all.push(against(
        format!("PostgreSQL, jobs {}: times the rate of {own}", worker::ALL_SINGLE),
        Bound::AtLeast(1.0),
        ours,
        worker::subject(Postgres, own, CLIENTS),
    ));
    for backend in [Postgres, Sqlite] {
        let of = |how| worker::subject(backend, how, worker::BATCH);
        let aim = format!("{backend}: cost of taking a batch with 1 million waiting, times that with a thousand");
        all.push(against(aim, Bound::AtMost(1.5), of(worker::SHORT), of(worker::LONG)));
        if backend == Postgres {
            let aim = format!("{backend}: the same while another transaction holds a snapshot");
            all.push(against(aim, Bound::AtMost(1.5), of(worker::SHORT), of(worker::HELD)));
        }
        let of = |how| worker::subject(backend, how, 1);
        let waits = [
            (worker::SAME, "p50", report.p50(of(worker::SAME)), 3.0),
            (worker::OTHER, "p99", report.p99(of(worker::OTHER)), 150.0),
        ];
        for (how, part, ratio, most) in waits {
            let aim = format!("{backend}: {how}, milliseconds ({part})");
            all.push(Verdict { aim, ratio, cpu_ratio: None, bound: Bound::AtMost(most) });
        }
    }
    let of = |how| mailings::subject(Postgres, how);
    let aim = "PostgreSQL, mailings: rows imported, times the rate of a bare COPY".to_owned();
    all.push(against(aim, Bound::AtLeast(0.7), of(mailings::IMPORT), of(mailings::COPY)));
    for backend in [Postgres, Sqlite] {
        let of = |how| mailings::subject(backend, how);
        for (ours, bare) in [(mailings::SEND_SMTP, mailings::BARE_SMTP), (mailings::SEND_FILE, mailings::BARE_FILE)] {
            let aim = format!("{backend}, mailings: {ours}, times the rate of {bare}");
            all.push(against(aim, Bound::AtLeast(0.6), of(ours), of(bare)));
        }
    }
    let of = |how| operations::subject(Postgres, how);
    let aim =
        format!("PostgreSQL, operations: {} over HTTP, times the rate of {}", operations::PAIRS, operations::PGBENCH);
    all.push(against(aim, Bound::AtLeast(0.7), of(operations::PAIRS), of(operations::PGBENCH)));
    for backend in [Postgres, Sqlite] {
        let aim = format!("{backend}: cost per claim + complete in the large table, times that at 10 thousand rows");
        // A higher cost is a lower rate: the small table's rate comes first.
        all.push(against(aim, Bound::AtMost(1.5), growth(backend, growth::SMALL), growth(backend, growth::LARGE)));
    }
    all
}
