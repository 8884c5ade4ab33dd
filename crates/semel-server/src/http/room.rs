//! Memory for the bodies of requests: all of them share a budget.
//!
//! Room is taken as bytes arrive, never for an announced length: a connection that announces 8 MiB and sends nothing
//! takes no room. A body that gets no more room is refused at once with 503. It does not wait: of many that hold some
//! room and wait for more, none might ever get it (a deadlock). The room is released when the request is answered.
//!
//! [`keep_within`] covers every route of the server, and the gateway wraps the bodies that it reads whole, so that no
//! route can forget it.

use std::{
    error::Error as StdError,
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{
    body::{Body, HttpBody},
    extract::{Request, State},
    middleware::Next,
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use hyper::body::{Frame, SizeHint};
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::problem::{NO_ROOM, Problem};

/// The part of a body that needs no room. Ordinary requests are shorter, so they are answered even if long ones have
/// used up the budget. The number of connections bounds it.
const FREE: usize = 16 << 10;

/// How many kibibytes are taken at a time.
const STEP: usize = 16;

/// When a refused request should be sent again: most bodies arrive and are answered within less.
const SOON: Duration = Duration::from_secs(1);

/// The budget of a process for bodies. Clones share it.
#[derive(Clone, Debug)]
pub struct Budget(Arc<Semaphore>);

impl Budget {
    /// The default: 256 of the longest requests with a key, or 32 of the longest lists of events.
    pub const DEFAULT: usize = 256 << 20;

    /// A budget of so many bytes.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        Self(Arc::new(Semaphore::new((bytes / 1024).min(Semaphore::MAX_PERMITS))))
    }

    /// Lets a request's body take room as it is read. The room is released with the last clone of the returned value;
    /// one clone is in the request's extensions, for work that continues after its client has gone.
    pub fn watch(&self, request: Request) -> (Request, Held) {
        let held = Held(Arc::new(Mutex::new(Taken {
            room: Room::of(self.0.clone()),
            read: 0,
            refused: false,
            streamed: false,
        })));
        let (mut head, body) = request.into_parts();
        head.extensions.insert(held.clone());
        (Request::from_parts(head, Body::new(Watched { body, held: held.clone() })), held)
    }
}

impl Default for Budget {
    fn default() -> Self {
        Self::new(Self::DEFAULT)
    }
}

/// The room that a request's body has taken.
#[derive(Clone, Debug)]
pub struct Held(Arc<Mutex<Taken>>);

#[derive(Debug)]
struct Taken {
    room: Room,
    read: usize,
    refused: bool,
    /// Whether the handler stores the body as it arrives.
    streamed: bool,
}

impl Held {
    /// The handler stores the body as it arrives and keeps no more of it than a part: it needs no room.
    pub fn stream(&self) {
        self.0.lock().streamed = true;
    }

    fn grow(&self, more: usize) -> Result<(), NoRoom> {
        let mut taken = self.0.lock();
        if taken.streamed {
            return Ok(());
        }
        taken.read += more;
        let beyond = taken.read.saturating_sub(FREE);
        if beyond > 0 {
            let grown = taken.room.grow(beyond);
            taken.refused |= grown.is_err();
            return grown;
        }
        Ok(())
    }

    /// The answer to the request: the given one, unless its body got no room. The handler then saw a body that broke
    /// off, and did nothing.
    pub fn answer(&self, given: Response) -> Response {
        if self.0.lock().refused { no_room().into_response() } else { given }
    }
}

/// The problem of a body that gets no more room.
fn no_room() -> Problem {
    Problem::new(&NO_ROOM).retry_after(SOON)
}

/// Keeps the bodies of all requests within a budget.
pub async fn keep_within(State(budget): State<Budget>, request: Request, next: Next) -> Response {
    let (request, held) = budget.watch(request);
    let given = next.run(request).await;
    held.answer(given)
}

/// Room from a pool, which grows on demand.
#[derive(Debug)]
pub struct Room {
    all: Arc<Semaphore>,
    taken: Option<OwnedSemaphorePermit>,
}

impl Room {
    /// No room yet, from a pool that counts kibibytes.
    #[must_use]
    pub fn of(all: Arc<Semaphore>) -> Self {
        Self { all, taken: None }
    }

    /// Whether there is any.
    #[must_use]
    pub fn has_some(&self) -> bool {
        self.taken.is_some()
    }

    /// Waits for the first step. Waiting is safe only here, where no room is held.
    ///
    /// # Errors
    /// When the pool is closed.
    pub async fn begin(&mut self) -> Result<(), NoRoom> {
        if self.taken.is_none() {
            let first = self.all.clone().acquire_many_owned(permits(STEP)).await;
            self.taken = Some(first.map_err(|_| NoRoom)?);
        }
        Ok(())
    }

    /// Grows to so many bytes in all, without waiting.
    ///
    /// # Errors
    /// When the pool has too little left.
    pub fn grow(&mut self, bytes: usize) -> Result<(), NoRoom> {
        let taken = self.taken.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let needed = (bytes / 1024 + 1).next_multiple_of(STEP);
        if needed > taken {
            let more = self.all.clone().try_acquire_many_owned(permits(needed - taken)).map_err(|_| NoRoom)?;
            match &mut self.taken {
                Some(taken) => taken.merge(more),
                none => *none = Some(more),
            }
        }
        Ok(())
    }
}

fn permits(kibibytes: usize) -> u32 {
    u32::try_from(kibibytes).unwrap_or(u32::MAX)
}

/// There is no more room.
#[derive(Clone, Copy, Debug)]
pub struct NoRoom;

impl fmt::Display for NoRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no room for the rest of the body")
    }
}

impl StdError for NoRoom {}

impl NoRoom {
    /// Whether a body ended in an error because there was no more room for it.
    #[must_use]
    pub fn is_why(error: &(dyn StdError + 'static)) -> bool {
        std::iter::successors(Some(error), |error| (*error).source()).any(|error| error.is::<Self>())
    }
}

/// A body that takes room as it arrives.
struct Watched {
    body: Body,
    held: Held,
}

impl HttpBody for Watched {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        let size = match &frame {
            Some(Ok(frame)) => frame.data_ref().map_or(0, Bytes::len),
            _ => 0,
        };
        match self.held.grow(size) {
            Ok(()) => Poll::Ready(frame),
            Err(no_room) => Poll::Ready(Some(Err(axum::Error::new(no_room)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use axum::body::to_bytes;
    use futures_util::stream;

    use super::*;

    fn request(sizes: &[usize]) -> Request {
        let chunks: Vec<_> = sizes.iter().map(|size| Ok::<_, axum::Error>(Bytes::from(vec![0; *size]))).collect();
        Request::new(Body::from_stream(stream::iter(chunks)))
    }

    async fn read(budget: &Budget, sizes: &[usize]) -> (Result<Bytes, axum::Error>, Held) {
        let (request, held) = budget.watch(request(sizes));
        (to_bytes(request.into_body(), usize::MAX).await, held)
    }

    #[tokio::test]
    async fn room_is_taken_as_bytes_arrive_and_given_back_with_the_answer() {
        let budget = Budget::new(64 << 10);
        let (first, held) = read(&budget, &[FREE, 40 << 10]).await;
        assert_eq!(first.unwrap().len(), FREE + (40 << 10));
        assert_eq!(budget.0.available_permits(), 16);
        let (second, refused) = read(&budget, &[FREE, 10 << 10, 10 << 10]).await;
        assert!(NoRoom::is_why(&second.unwrap_err()), "it holds some and gets no more");
        let answer = refused.answer(Response::new(Body::empty()));
        assert_eq!((answer.status().as_u16(), &answer.headers()["retry-after"]), (503, &"1".parse().unwrap()));
        drop(refused);
        assert_eq!(held.answer(Response::new(Body::empty())).status(), 200);
        drop(held);
        assert_eq!(budget.0.available_permits(), 64);
    }

    #[tokio::test]
    async fn a_short_body_needs_no_room() {
        let budget = Budget::new(0);
        assert!(read(&budget, &[FREE]).await.0.is_ok());
        assert!(read(&budget, &[FREE, 1]).await.0.is_err());
    }

    #[tokio::test]
    async fn work_that_outlives_its_client_keeps_its_room() {
        let budget = Budget::new(64 << 10);
        let (request, held) = budget.watch(request(&[FREE + 1]));
        let (head, body) = request.into_parts();
        to_bytes(body, usize::MAX).await.unwrap();
        drop(held);
        assert_eq!(budget.0.available_permits(), 48);
        drop(head);
        assert_eq!(budget.0.available_permits(), 64);
    }
}
