//! Group commit: calls that wait while a batch is in flight go together in the next one.
//!
//! A lane is a bounded queue and one task. The task takes whatever has queued up while the last
//! batch was in flight (there is no timer: an idle lane sends a single call at once), flushes it
//! as one, and answers each caller after that flush is durable. A batch that is refused is halved
//! until only the culprit fails.

use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};

use crate::{Error, Result};

/// How large a batch may grow.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Calls in one batch. Larger ones gain nothing (the fsync is already shared by many) and
    /// hold locks longer.
    pub calls: usize,
    /// Bytes in one batch, so that large payloads do not add up to a statement of gigabytes.
    pub bytes: usize,
    /// Calls that may wait in the queue; beyond it, callers wait to enter it.
    pub queue: usize,
    /// Whether callers that were just answered are given a moment to come back before the next
    /// batch leaves. Otherwise they miss it by microseconds and travel in two groups for ever, each
    /// waiting for the other's flush. Not where two lanes overlap: their flushes leave time enough.
    pub regroup: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self { calls: 512, bytes: 4 << 20, queue: 4096, regroup: false }
    }
}

struct Call<I, O> {
    input: I,
    bytes: usize,
    answer: oneshot::Sender<Result<O>>,
}

/// The callers' end of a lane.
pub struct Lane<I, O> {
    queue: mpsc::Sender<Call<I, O>>,
}

impl<I, O> Clone for Lane<I, O> {
    fn clone(&self) -> Self {
        Self { queue: self.queue.clone() }
    }
}

impl<I, O> Lane<I, O> {
    /// Queues a call of about `bytes` bytes. The answer comes through the receiver, also when the
    /// caller has stopped waiting for it: the call is made all the same.
    ///
    /// # Errors
    /// [`Error::Stopping`] when the lane has ended.
    pub async fn send(&self, input: I, bytes: usize) -> Result<oneshot::Receiver<Result<O>>> {
        let (answer, receiver) = oneshot::channel();
        self.queue.send(Call { input, bytes, answer }).await.map_err(|_| Error::Stopping)?;
        Ok(receiver)
    }

    /// Makes a call and waits for its answer.
    ///
    /// # Errors
    /// What the flush answered, or [`Error::Stopping`].
    pub async fn call(&self, input: I, bytes: usize) -> Result<O> {
        self.send(input, bytes).await?.await.map_err(|_| Error::Stopping)?
    }
}

/// Makes a lane. The future is its task and ends when every [`Lane`] handle is gone and the
/// queue is empty.
pub fn lane<I, O, F, Fut>(limits: Limits, flush: F) -> (Lane<I, O>, impl Future<Output = ()>)
where
    I: Clone,
    F: Fn(Vec<I>) -> Fut,
    Fut: Future<Output = Result<Vec<O>>>,
{
    let (sender, receiver) = mpsc::channel(limits.queue);
    (Lane { queue: sender }, serve(limits, receiver, flush))
}

async fn serve<I, O, F, Fut>(limits: Limits, mut queue: mpsc::Receiver<Call<I, O>>, flush: F)
where
    I: Clone,
    F: Fn(Vec<I>) -> Fut,
    Fut: Future<Output = Result<Vec<O>>>,
{
    // The call that did not fit into the last batch, if any.
    let mut left_over = None;
    let mut last = Last::default();
    loop {
        let first = match left_over.take() {
            Some(call) => call,
            None => match queue.recv().await {
                Some(call) => call,
                None => return,
            },
        };
        let mut bytes = first.bytes;
        let mut batch = vec![first];
        let deadline = limits.regroup.then(|| Instant::now() + last.patience());
        while batch.len() < limits.calls {
            match queue.try_recv() {
                Ok(call) if bytes + call.bytes > limits.bytes => {
                    left_over = Some(call);
                    break;
                }
                Ok(call) => {
                    bytes += call.bytes;
                    batch.push(call);
                }
                // Far less than what a timer can measure: the threads of the callers run now.
                Err(_) if batch.len() < last.callers && deadline.is_some_and(|end| Instant::now() < end) => {
                    tokio::task::yield_now().await;
                    std::thread::yield_now();
                }
                Err(_) => break,
            }
        }
        let (begun, size) = (Instant::now(), batch.len());
        flush_halving(batch, &flush).await;
        last = Last { took: begun.elapsed(), callers: size + queue.len() };
    }
}

/// What is known of the batch before.
#[derive(Default)]
struct Last {
    took: Duration,
    /// Its callers, and those who waited meanwhile.
    callers: usize,
}

impl Last {
    /// How long its callers may take to come back: little next to what a flush of their own costs.
    fn patience(&self) -> Duration {
        (self.took / 8).min(Duration::from_millis(1))
    }
}

/// Flushes a batch; one that the store refuses is halved until only the culprit fails.
async fn flush_halving<I, O, F, Fut>(batch: Vec<Call<I, O>>, flush: &F)
where
    I: Clone,
    F: Fn(Vec<I>) -> Fut,
    Fut: Future<Output = Result<Vec<O>>>,
{
    let mut todo = vec![batch];
    while let Some(mut batch) = todo.pop() {
        let size = batch.len();
        match flush(batch.iter().map(|call| call.input.clone()).collect()).await {
            Ok(answers) if answers.len() == size => {
                for (call, answer) in batch.into_iter().zip(answers) {
                    // A caller that has gone away is nobody's error.
                    let _ = call.answer.send(Ok(answer));
                }
            }
            Err(Error::Refused(_) | Error::Corrupt(_)) if size > 1 => {
                let second = batch.split_off(size / 2);
                todo.push(second);
                todo.push(batch);
            }
            result => {
                let error = result.err().unwrap_or(Error::Corrupt("a batch was answered in part"));
                for call in batch {
                    let _ = call.answer.send(Err(error.clone()));
                }
            }
        }
    }
}
