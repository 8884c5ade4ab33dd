//! A request to another service that is sent only while its lease is held.
//!
//! A node that was suspended while it waited for a connection wakes up with the connection open: the request would go
//! out before the renewer has cancelled the work, although another node may have done it by now. So the clock is
//! checked at the last moment, when hyper takes the body's first bytes: it writes the head along with them.

use std::{
    error::Error,
    fmt,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    task::{Context, Poll},
};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};

/// Whether a request may still be sent. Clones share the result.
#[derive(Clone)]
pub(crate) struct Held {
    is_lost: Arc<dyn Fn() -> bool + Send + Sync>,
    state: Arc<AtomicU8>,
}

/// The state of a request: not begun, begun, and held back before it began.
const WAITS: u8 = 0;
const BEGUN: u8 = 1;
const STOPPED: u8 = 2;

impl Held {
    /// A lease; `is_lost` checks it.
    pub(crate) fn new(is_lost: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self { is_lost: Arc::new(is_lost), state: Arc::default() }
    }

    /// The lease of a run.
    pub(crate) fn of<S: semel::Store>(context: &semel::Context<S>) -> Self {
        let context = context.clone();
        Self::new(move || context.is_lost())
    }

    /// No lease: the request may always be sent.
    pub(crate) fn always() -> Self {
        Self::new(|| false)
    }

    /// Checks whether the request may be sent: from then on it counts as begun.
    ///
    /// # Errors
    /// When the lease is lost, or the request was [stopped](Self::stop). From then on [`Held::has_stopped`] is true.
    pub(crate) fn check(&self) -> Result<(), LeaseLost> {
        if (self.is_lost)() {
            self.state.store(STOPPED, Ordering::SeqCst);
        }
        match self.state.compare_exchange(WAITS, BEGUN, Ordering::SeqCst, Ordering::SeqCst) {
            Err(STOPPED) => Err(LeaseLost),
            _ => Ok(()),
        }
    }

    /// Holds the request back if it has not begun. Whether not a byte of it was sent, and none will be.
    pub(crate) fn stop(&self) -> bool {
        // An error means that it has begun, or was held back before.
        let _ = self.state.compare_exchange(WAITS, STOPPED, Ordering::SeqCst, Ordering::SeqCst);
        self.has_stopped()
    }

    /// Whether the request was held back: not a byte of it was sent.
    pub(crate) fn has_stopped(&self) -> bool {
        self.state.load(Ordering::SeqCst) == STOPPED
    }
}

/// Why a request was not sent.
#[derive(Debug)]
pub(crate) struct LeaseLost;

impl fmt::Display for LeaseLost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the lease was lost before anything was sent")
    }
}

impl Error for LeaseLost {}

/// A body whose first bytes are given only while the lease is held.
pub(crate) struct WhileHeld<B> {
    body: B,
    held: Held,
    begun: bool,
}

impl<B> WhileHeld<B> {
    pub(crate) fn new(body: B, held: Held) -> Self {
        Self { body, held, begun: false }
    }
}

impl<B: Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + Unpin> Body for WhileHeld<B> {
    type Data = Bytes;
    type Error = Box<dyn Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if !self.begun
            && let Err(lost) = self.held.check()
        {
            return Poll::Ready(Some(Err(lost.into())));
        }
        let frame = Pin::new(&mut self.body).poll_frame(context);
        self.begun |= frame.is_ready();
        frame.map_err(Into::into)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::{net::SocketAddr, sync::atomic::AtomicUsize};

    use tokio::{io::AsyncReadExt as _, net::TcpListener, task::JoinHandle};

    use super::*;

    /// A service that accepts one connection and returns the bytes it received.
    pub(crate) async fn listener() -> (SocketAddr, JoinHandle<Vec<u8>>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let came = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut bytes = Vec::new();
            let _ = stream.read_to_end(&mut bytes).await;
            bytes
        });
        (address, came)
    }

    #[test]
    fn a_request_is_stopped_only_before_it_begins() {
        let (early, late) = (Held::always(), Held::always());
        assert!(early.stop() && early.clone().check().is_err());
        assert!(late.check().is_ok() && !late.stop() && !late.has_stopped());
    }

    /// A lease that is lost after so many checks.
    pub(crate) fn lost_after(questions: usize) -> Held {
        let asked = AtomicUsize::new(0);
        Held::new(move || asked.fetch_add(1, Ordering::Relaxed) >= questions)
    }
}
