//! Work for later in a worker process: enqueued, and run by the library's own worker.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use semel::{Context, Fingerprint, Key, Kind, Policy, Result, Scope, Unfinished, Work};
use semel_store::{Database, Tx};
use tokio::sync::watch;

use super::{
    Mode, Open, Report,
    bank::take_in,
    scenario::{leased_queue, queue},
    worker::{Worker, outcome, report},
};

/// Work of one of the two queues, with its own policy or the worker's.
fn job(mode: Mode, key: &str, policy: Option<&Policy>) -> Result<Work> {
    let scope: Scope = if mode == Mode::Atomic { queue() } else { leased_queue() };
    let fingerprint = Fingerprint::of_bytes(key.as_bytes());
    let work = Work::new(scope, Key::new(key)?, fingerprint).payload(key.to_owned());
    Ok(match policy {
        Some(policy) => work.policy(policy.clone()),
        None => work,
    })
}

impl Worker {
    pub(super) async fn enqueue(
        &self,
        keys: &[String],
        mode: Mode,
        policy: Option<&Policy>,
        with_rows: Option<Open>,
    ) -> Result<()> {
        let works = keys.iter().map(|key| job(mode, key, policy)).collect::<Result<Vec<_>>>()?;
        let Some(open) = with_rows else {
            for work in works {
                self.ledger.enqueue(work).await?;
            }
            return Ok(());
        };
        let (ledger, rows) = (self.ledger.clone(), keys.to_vec());
        let written = self.ledger.transact(move |tx| async move {
            for key in &rows {
                take_in(&tx, key, semel::Fence(0)).await.map_err(semel::Error::Refused)?;
            }
            ledger.enqueue_in(&tx, works).await?;
            report(&Report::Begun { key: rows[0].clone(), fence: 0 });
            if open == Open::ForEver {
                std::future::pending::<()>().await;
            }
            Ok(())
        });
        written.await
    }

    /// Runs due operations until it is stopped, under the policy of their enqueue, or under this one.
    pub(super) async fn work(self: &Arc<Self>, at_once: usize, policy: &Policy) {
        let bank = self.bank.clone();
        let leased = Kind::leased("bank", "leased", move |context: Context<Database>| {
            let name = context.operation().key.as_str().to_owned();
            bank.take(&name, context.fence(), &context.derived_key("effect"));
            async move { Ok(outcome(&name, context.fence().0)) }
        });
        let atomic = Kind::atomic("bank", "queue", |context: Context<Database>, tx: Tx| async move {
            let name = context.operation().key.as_str().to_owned();
            take_in(&tx, &name, context.fence()).await.map_err(Unfinished::failed)?;
            Ok(outcome(&name, context.fence().0))
        });
        let (stop, stops) = watch::channel(false);
        let kinds = [leased, atomic].map(|kind| kind.at_once(at_once).policy(policy.clone()));
        let worker = kinds.into_iter().fold(semel::Worker::new(&self.ledger), semel::Worker::on);
        let working = tokio::spawn(worker.run(stops));
        while !self.stop.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        stop.send_replace(true);
        let _ = working.await;
    }
}
