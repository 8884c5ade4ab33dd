//! Load: tasks that repeat an operation for a while.

use std::{
    future::Future,
    time::{Duration, Instant},
};

use anyhow::Result;
use tokio::task::JoinSet;

use crate::{Plan, cpu::Cpu};

/// The result of one measurement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Figure {
    /// Operations per second.
    pub(crate) rate: f64,
    /// The median duration, in milliseconds.
    pub(crate) p50: f64,
    /// The 99th percentile of the duration, in milliseconds.
    pub(crate) p99: f64,
    /// Operations per second of CPU time, of client and server together.
    pub(crate) per_cpu: f64,
}

impl Figure {
    /// From the operations that ended within a window.
    pub(crate) fn new(mut took: Vec<Duration>, window: Duration, cpu: Duration) -> Self {
        took.sort_unstable();
        let at = |part: f64| {
            let place = (took.len() as f64 * part) as usize;
            took.get(place).or(took.last()).map_or(f64::NAN, |took| took.as_secs_f64() * 1e3)
        };
        let n = took.len() as f64;
        Self { rate: n / window.as_secs_f64(), p50: at(0.5), p99: at(0.99), per_cpu: n / cpu.as_secs_f64() }
    }
}

/// Runs `tasks` tasks that repeat an operation, and measures after the warm-up.
pub(crate) async fn drive<F, Fut>(plan: &Plan, cpu: Cpu, tasks: usize, operation: F) -> Result<Figure>
where
    F: Fn() -> Fut + Clone + Send + 'static,
    Fut: Future<Output = Result<()>> + Send,
{
    drive_after(Plan::WARM_UP, plan, cpu, tasks, operation).await
}

/// The same, with a given warm-up.
pub(crate) async fn drive_after<F, Fut>(
    warm_up: Duration,
    plan: &Plan,
    cpu: Cpu,
    tasks: usize,
    operation: F,
) -> Result<Figure>
where
    F: Fn() -> Fut + Clone + Send + 'static,
    Fut: Future<Output = Result<()>> + Send,
{
    let begin = Instant::now() + warm_up;
    let end = begin + plan.length;
    let mut running = JoinSet::new();
    for _ in 0..tasks {
        let operation = operation.clone();
        running.spawn(async move {
            let mut took = Vec::new();
            loop {
                let sent = Instant::now();
                if sent >= end {
                    return Ok::<_, anyhow::Error>(took);
                }
                operation().await?;
                let answered = Instant::now();
                if (begin..end).contains(&answered) {
                    took.push(answered - sent);
                }
            }
        });
    }
    tokio::time::sleep_until(begin.into()).await;
    let (cpu_before, begun) = (cpu.used(), Instant::now());
    tokio::time::sleep_until(end.into()).await;
    // On a busy machine the two readings may be a little further apart than the window.
    let cpu_used = (cpu.used() - cpu_before).mul_f64(plan.length.as_secs_f64() / begun.elapsed().as_secs_f64());
    let mut took = Vec::new();
    while let Some(done) = running.join_next().await {
        took.extend(done??);
    }
    Ok(Figure::new(took, plan.length, cpu_used))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_has_rate_and_percentiles() {
        let took = (1..=100).rev().map(Duration::from_millis).collect();
        let figure = Figure::new(took, Duration::from_secs(2), Duration::from_secs(4));
        assert_eq!((figure.rate, figure.p50, figure.p99, figure.per_cpu), (50.0, 51.0, 100.0, 25.0));
    }
}
