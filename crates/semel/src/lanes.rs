//! The ledger's lanes: claims, writes under leases, and claims of busy keys. A store with one writer has a single lane
//! for claims and writes.

use std::{future::Future, sync::Arc};

use crate::{
    Error, Result,
    lane::{Lane, Limits, lane},
    machine::Request,
    store::{Applied, LeaseWrite, Store},
};

/// A call in a lane.
#[derive(Clone)]
pub(crate) enum Call {
    Claim(Arc<Request>),
    Write(LeaseWrite),
}

/// The number of waiting claims from which a second batch leaves beside the one in flight. A claim costs the store
/// three times as much as a completion: with 512 callers the claims lane was the bottleneck while a CPU was idle.
const ALONGSIDE: usize = 96;

pub(crate) struct Lanes {
    pub(crate) claims: Lane<Call, Applied>,
    pub(crate) writes: Lane<Call, Applied>,
    /// For claims of keys that another transaction has locked: only they wait.
    pub(crate) aside: Lane<Call, Applied>,
}

impl Lanes {
    /// Opens the lanes and gives their tasks to `spawn`. `flush` sends a batch to the store.
    pub(crate) fn open<F, Fut, T>(one: bool, flush: F, mut spawn: impl FnMut(BoxedTask) -> T) -> Self
    where
        F: Fn(Vec<Call>) -> Fut + Clone + Send + Sync + 'static,
        Fut: Future<Output = Result<Vec<Applied>>> + Send + 'static,
    {
        let limits = Limits { regroup: one, ..Limits::default() };
        let alongside = if one { usize::MAX } else { ALONGSIDE };
        let (claims, serve) = lane(Limits { alongside, ..limits }, flush.clone());
        spawn(Box::pin(serve));
        if one {
            return Self { writes: claims.clone(), aside: claims.clone(), claims };
        }
        let (writes, serve) = lane(limits, flush.clone());
        spawn(Box::pin(serve));
        let (aside, serve) = lane(limits, flush);
        spawn(Box::pin(serve));
        Self { claims, writes, aside }
    }
}

/// A lane's task.
pub(crate) type BoxedTask = std::pin::Pin<Box<dyn Future<Output = ()> + Send>>;

/// Sends a batch to the store: by type, or both together.
pub(crate) async fn flush<S: Store>(store: &S, batch: &[Call]) -> Result<Vec<Applied>> {
    let (mut claims, mut writes) = (Vec::new(), Vec::new());
    for call in batch {
        match call {
            Call::Claim(request) => claims.push(request.clone()),
            Call::Write(write) => writes.push(write.clone()),
        }
    }
    let asked = (claims.len(), writes.len());
    let (claimed, written) = match asked {
        (_, 0) => (store.claim(claims).await?, Vec::new()),
        (0, _) => (Vec::new(), store.write(writes).await?),
        _ => store.flush(claims, writes).await?,
    };
    if (claimed.len(), written.len()) != asked {
        return Err(Error::Contradiction("a batch was answered in part"));
    }
    let (mut claimed, mut written) = (claimed.into_iter(), written.into_iter());
    let answers = batch.iter().filter_map(|call| match call {
        Call::Claim(_) => claimed.next(),
        Call::Write(_) => written.next(),
    });
    Ok(answers.collect())
}
