//! Workers that ask for waiting operations with `next`, and complete each: one or ten per request, on a queue of
//! 100,000.
//!
//! The rate is that of completed operations; the durations are those of the request to `next` alone, because the time
//! of a completion is in the section's pairs.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use tokio::{sync::Notify, task::JoinSet};

use super::{Api, NAME, Server, subject};
use crate::{Plan, cpu::Cpu, http::CONNECTIONS, load::Figure, report::Report, site::Backend, work::new_key};

/// How they are asked for, with the most per request.
const ALL: [(&str, usize); 2] = [("next, one by one, + complete", 1), ("next, ten at a time, + complete", 10)];

/// The length of the queue before each measurement.
const QUEUE: usize = 100_000;

pub(super) async fn measure(plan: &Plan, backend: Backend, report: &mut Report) -> Result<()> {
    if !ALL.iter().any(|(how, _)| plan.wants(how, CONNECTIONS)) {
        return Ok(());
    }
    let server = Server::start(plan, backend).await?;
    let queue = Queue { api: server.api.clone(), waiting: Arc::default() };
    let begun = Instant::now();
    queue.fill().await?;
    report.say(format!(
        "{backend}: {QUEUE} operations were enqueued over HTTP in {:.1} s",
        begun.elapsed().as_secs_f64()
    ));
    for _ in 0..plan.rounds {
        for (how, most) in ALL.into_iter().filter(|(how, _)| plan.wants(how, CONNECTIONS)) {
            queue.fill().await?;
            server.tidy().await?;
            let (figure, empty) = queue.work_off(plan, server.site.cpu, most).await?;
            report.add(subject(backend, how), figure);
            if empty > 0 {
                report.say(format!("{backend}, {how}: {empty} answers were empty although operations were waiting"));
            }
        }
    }
    server.end().await
}

/// The queue, as its clients know it.
#[derive(Clone)]
struct Queue {
    api: Api,
    waiting: Arc<AtomicUsize>,
}

/// The work of one connection.
#[derive(Default)]
struct Worked {
    /// Requests to `next` that were answered with operations: when, and after how long.
    calls: Vec<(Instant, Duration)>,
    completed: Vec<Instant>,
    /// Empty answers although operations were waiting.
    empty: usize,
}

impl Queue {
    /// Enqueues until the queue has its length.
    async fn fill(&self) -> Result<()> {
        let mut running = JoinSet::new();
        for _ in 0..CONNECTIONS {
            let queue = self.clone();
            running.spawn(async move {
                while queue.waiting.fetch_add(1, Ordering::Relaxed) < QUEUE {
                    let key = new_key()?;
                    let later = format!(
                        r#"{{"operationName":"{NAME}","idempotencyKey":"{}","input":{{"n":1}},"later":true}}"#,
                        key.as_str()
                    );
                    queue.api.enqueue(&later).await?;
                }
                // Counted, but not enqueued: the queue was long enough.
                queue.waiting.fetch_sub(1, Ordering::Relaxed);
                anyhow::Ok(())
            });
        }
        while let Some(done) = running.join_next().await {
            done??;
        }
        Ok(())
    }

    /// Measures the workers after the warm-up, until the time is up or the queue is empty. Also returns the number of
    /// empty answers.
    async fn work_off(&self, plan: &Plan, cpu: Cpu, most: usize) -> Result<(Figure, usize)> {
        let begin = Instant::now() + Plan::WARM_UP;
        let end = begin + plan.length;
        // Notified when the last operation is handed out: a fast machine may get there before the time is up.
        let dry = Arc::new(Notify::new());
        let mut running = JoinSet::new();
        for _ in 0..CONNECTIONS {
            running.spawn(self.clone().work(most, end, dry.clone()));
        }
        tokio::time::sleep_until(begin.into()).await;
        let (cpu_before, begun) = (cpu.used(), Instant::now());
        let _ = tokio::time::timeout_at(end.into(), dry.notified()).await;
        let (cpu_used, over) = (cpu.used() - cpu_before, Instant::now());
        let (mut calls, mut completed, mut empty) = (Vec::new(), 0, 0);
        while let Some(done) = running.join_next().await {
            let worked = done??;
            let counts = |at: &Instant| (begun..over).contains(at);
            calls.extend(worked.calls.into_iter().filter(|(at, _)| counts(at)).map(|(_, took)| took));
            completed += worked.completed.iter().filter(|at| counts(at)).count();
            empty += worked.empty;
        }
        ensure!(completed > 0, "nothing was completed after the warm-up");
        let (window, n) = (over - begun, completed as f64);
        let rates = (n / window.as_secs_f64(), n / cpu_used.as_secs_f64());
        Ok((Figure { rate: rates.0, per_cpu: rates.1, ..Figure::new(calls, window, cpu_used) }, empty))
    }

    /// One connection: asks for operations and completes them, one after the other. It completes all that it was given
    /// before it ends, so that no lease expires during a later measurement.
    async fn work(self, most: usize, end: Instant, dry: Arc<Notify>) -> Result<Worked> {
        let ask = format!(r#"{{"operationNames":["{NAME}"],"max":{most}}}"#);
        let mut worked = Worked::default();
        while Instant::now() < end {
            let sent = Instant::now();
            let given = self.api.next(&ask).await?;
            let answered = Instant::now();
            if given.is_empty() {
                if self.waiting.load(Ordering::Relaxed) == 0 {
                    break;
                }
                worked.empty += 1;
                continue;
            }
            worked.calls.push((answered, answered - sent));
            let before = self.waiting.fetch_sub(given.len(), Ordering::Relaxed);
            ensure!(before >= given.len(), "more operations were handed out than enqueued");
            if before == given.len() {
                dry.notify_one();
            }
            for held in given {
                self.api.complete(&held).await?;
                worked.completed.push(Instant::now());
            }
        }
        Ok(worked)
    }
}
