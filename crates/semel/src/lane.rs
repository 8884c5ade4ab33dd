//! Group commit: calls that wait while a batch is in flight share the next one.
//!
//! A lane is a bounded queue and one task. The task takes all calls that were queued while the last batch was in flight
//! (there is no timer: an idle lane sends a single call at once), flushes them as one, and answers each caller after
//! that flush is durable. A refused batch is halved until only the offending call fails. If enabled, a large batch does
//! not wait for the one before it.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::Arc,
    task::Poll,
    time::{Duration, Instant},
};

use tokio::sync::{Notify, mpsc, oneshot};

use crate::{Error, Result};

/// The limits of a batch.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The most calls per batch. Larger batches gain nothing (many calls share the fsync already) and hold locks
    /// longer.
    pub calls: usize,
    /// The most bytes per batch, so that large payloads do not add up to a statement of gigabytes.
    pub bytes: usize,
    /// The most queued calls; further callers wait to enter.
    pub queue: usize,
    /// Whether callers that were just answered get a moment to call again before the next batch leaves. Otherwise they
    /// miss it by microseconds and stay in two groups, each waiting for the other's flush. Not needed if two lanes
    /// overlap: their flushes leave time enough.
    pub regroup: bool,
    /// The number of calls from which a batch leaves while another is in flight: a store that waits for its disk with
    /// one can work on the other. At most two are in flight.
    pub alongside: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { calls: 512, bytes: 4 << 20, queue: 4096, regroup: false, alongside: usize::MAX }
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
    alongside: usize,
    /// Notified when enough calls wait for a second batch.
    crowd: Arc<Notify>,
}

impl<I, O> Clone for Lane<I, O> {
    fn clone(&self) -> Self {
        Self { queue: self.queue.clone(), alongside: self.alongside, crowd: self.crowd.clone() }
    }
}

impl<I, O> Lane<I, O> {
    /// Queues a call of about `bytes` bytes. The answer comes through the receiver. The call is made even if the caller
    /// stops waiting.
    ///
    /// # Errors
    /// [`Error::Stopping`] if the lane has ended.
    pub async fn send(&self, input: I, bytes: usize) -> Result<oneshot::Receiver<Result<O>>> {
        let (answer, receiver) = oneshot::channel();
        self.queue.send(Call { input, bytes, answer }).await.map_err(|_| Error::Stopping)?;
        if self.queue.max_capacity() - self.queue.capacity() >= self.alongside {
            self.crowd.notify_one();
        }
        Ok(receiver)
    }

    /// Makes a call and waits for its answer.
    ///
    /// # Errors
    /// The error of the flush, or [`Error::Stopping`].
    pub async fn call(&self, input: I, bytes: usize) -> Result<O> {
        self.send(input, bytes).await?.await.map_err(|_| Error::Stopping)?
    }
}

/// Creates a lane. The future is its task, which ends when every [`Lane`] handle is dropped and the queue is empty.
pub fn lane<I, O, F, Fut>(limits: Limits, flush: F) -> (Lane<I, O>, impl Future<Output = ()>)
where
    I: Clone,
    F: Fn(Vec<I>) -> Fut,
    Fut: Future<Output = Result<Vec<O>>>,
{
    // A limit of zero would never end.
    let limits = Limits { calls: limits.calls.max(1), alongside: limits.alongside.max(1), ..limits };
    let ((sender, receiver), crowd) = (mpsc::channel(limits.queue), Arc::<Notify>::default());
    (Lane { queue: sender, alongside: limits.alongside, crowd: crowd.clone() }, serve(limits, receiver, crowd, flush))
}

async fn serve<I, O, F, Fut>(limits: Limits, mut queue: mpsc::Receiver<Call<I, O>>, crowd: Arc<Notify>, flush: F)
where
    I: Clone,
    F: Fn(Vec<I>) -> Fut,
    Fut: Future<Output = Result<Vec<O>>>,
{
    let (mut next, mut flights, mut last) = (Batch::new(limits), Flights::default(), Last::default());
    let mut open = true;
    while open || !next.is_empty() || !flights.is_empty() {
        tokio::select! {
            biased;
            (took, calls) = flights.landing(), if !flights.is_empty() => {
                last = Last { took, callers: calls + next.len() + queue.len() };
            }
            // Calls that are queued meanwhile do not wake the task, unless there are enough for a second batch.
            () = crowd.notified(), if flights.len() == 1 => {}
            call = queue.recv(), if flights.is_empty() => match call {
                Some(call) => next.add(call),
                None => open = false,
            },
        }
        let worth_it = if flights.is_empty() { 1 } else { limits.alongside };
        if flights.len() < 2 && next.len() + queue.len() >= worth_it {
            next.fill(&mut queue);
            if limits.regroup {
                regroup(&mut next, &mut queue, &last).await;
            }
            flights.depart(next.len(), flush_halving(next.take(), &flush));
        }
    }
}

/// Gives callers that were just answered a moment to call again.
async fn regroup<I, O>(next: &mut Batch<I, O>, queue: &mut mpsc::Receiver<Call<I, O>>, last: &Last) {
    let end = Instant::now() + last.patience();
    while (1..last.callers).contains(&next.len()) && !next.is_full() && Instant::now() < end {
        // Shorter than any timer: the threads of the callers run now.
        tokio::task::yield_now().await;
        std::thread::yield_now();
        next.fill(queue);
    }
}

/// Facts about the last batch.
#[derive(Default)]
struct Last {
    took: Duration,
    /// Its callers, and those that waited meanwhile.
    callers: usize,
}

impl Last {
    /// How long its callers may take to call again: little compared with the cost of a separate flush.
    fn patience(&self) -> Duration {
        (self.took / 8).min(Duration::from_millis(1))
    }
}

/// The calls that leave next.
struct Batch<I, O> {
    limits: Limits,
    calls: Vec<Call<I, O>>,
    bytes: usize,
    /// The call that did not fit, if any: the first of the next batch.
    left_over: Option<Call<I, O>>,
}

impl<I, O> Batch<I, O> {
    fn new(limits: Limits) -> Self {
        Self { limits, calls: Vec::new(), bytes: 0, left_over: None }
    }

    fn len(&self) -> usize {
        self.calls.len()
    }

    fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    fn is_full(&self) -> bool {
        self.calls.len() >= self.limits.calls || self.left_over.is_some()
    }

    fn add(&mut self, call: Call<I, O>) {
        if !self.calls.is_empty() && self.bytes + call.bytes > self.limits.bytes {
            self.left_over = Some(call);
        } else {
            self.bytes += call.bytes;
            self.calls.push(call);
        }
    }

    /// Adds the queued calls.
    fn fill(&mut self, queue: &mut mpsc::Receiver<Call<I, O>>) {
        while !self.is_full()
            && let Ok(call) = queue.try_recv()
        {
            self.add(call);
        }
    }

    /// The calls; a call that did not fit starts the next batch.
    fn take(&mut self) -> Vec<Call<I, O>> {
        let calls = std::mem::take(&mut self.calls);
        self.bytes = 0;
        if let Some(call) = self.left_over.take() {
            self.add(call);
        }
        calls
    }
}

/// The batches that are in flight.
struct Flights<F>(Vec<Flight<F>>);

struct Flight<F> {
    flush: Pin<Box<F>>,
    begun: Instant,
    calls: usize,
}

impl<F> Default for Flights<F> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<F: Future<Output = ()>> Flights<F> {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn depart(&mut self, calls: usize, flush: F) {
        self.0.push(Flight { flush: Box::pin(flush), begun: Instant::now(), calls });
    }

    /// Waits until one has ended; returns its duration and number of calls.
    fn landing(&mut self) -> impl Future<Output = (Duration, usize)> {
        poll_fn(|cx| {
            let landed = |flight: &mut Flight<F>| flight.flush.as_mut().poll(cx).is_ready();
            let Some(place) = self.0.iter_mut().position(landed) else { return Poll::Pending };
            let Flight { begun, calls, .. } = self.0.swap_remove(place);
            Poll::Ready((begun.elapsed(), calls))
        })
    }
}

/// Flushes a batch; a refused one is halved until only the offending call fails.
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
                    // A caller that has gone away is not an error.
                    let _ = call.answer.send(Ok(answer));
                }
            }
            Err(Error::Refused(_) | Error::Corrupt(_) | Error::Contradiction(_)) if size > 1 => {
                let second = batch.split_off(size / 2);
                todo.push(second);
                todo.push(batch);
            }
            result => {
                let error = result.err().unwrap_or(Error::Contradiction("a batch was answered in part"));
                for call in batch {
                    let _ = call.answer.send(Err(error.clone()));
                }
            }
        }
    }
}

/// Flushes a batch in its own task: a panic fails its callers, not the lane.
///
/// # Errors
/// The answer of the flush, or an error if its task ended early.
pub async fn guarded<O: Send + 'static>(flush: impl Future<Output = Result<O>> + Send + 'static) -> Result<O> {
    let done = tokio::spawn(flush).await;
    done.unwrap_or_else(|error| Err(Error::Unavailable(format!("a batch ended early: {error}"))))
}
