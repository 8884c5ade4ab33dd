//! Sends a request to the upstream, and knows whether it was sent.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    body::Body,
    http::{Request, Response},
};
use bytes::Bytes;
use hyper::{
    body::{Frame, Incoming, SizeHint},
    client::conn::http1::{self, SendRequest},
};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::{
    net::TcpStream,
    time::{Instant, sleep_until, timeout},
};

use super::{config, framing::is_ambiguous, pool::Pool, trailers::WithoutTrailers};
use crate::http::held::{Held, LeaseLost, WhileHeld};

/// The buffer for an answer whose client is slow, and so the longest head of an answer. hyper's default is 400 KiB
/// each.
const LONGEST_BUFFER: usize = 64 << 10;

/// The service behind the gateway. Clones share its connections.
#[derive(Clone)]
pub(super) struct Upstream {
    address: Arc<config::Upstream>,
    connect_timeout: Duration,
    /// How long the upstream may take to begin its answer.
    timeout: Duration,
    pool: Pool,
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// Not a byte of the request was sent.
    Unreachable(String),
    /// It may have arrived; there was no answer.
    Lost(hyper::Error),
    /// It may have arrived; there was no answer in time.
    Timeout,
    /// The client's body broke off.
    BodyIncomplete,
    /// The client stopped in the middle of its body.
    BodyTimeout,
}

impl Upstream {
    pub(super) fn new(address: config::Upstream, connect_timeout: Duration, timeout: Duration) -> Self {
        Self { address: Arc::new(address), connect_timeout, timeout, pool: Pool::default() }
    }

    /// Sends a request while its lease is held, and waits until the answer begins.
    pub(super) async fn send(&self, request: Request<Body>, held: &Held) -> Result<Response<Incoming>, Failure> {
        let progress = Progress::default();
        let watched = |body| Watched { body: WithoutTrailers(body), progress: progress.clone() };
        let request = request.map(|body| Body::new(WhileHeld::new(watched(body), held.clone())));
        let request = match self.pool.take() {
            Some(connection) => match self.send_by(connection, request, &progress, held).await {
                // The upstream closed the connection before it was used. Try a new one.
                Err(NotSent::Unsent(request)) => *request,
                Err(NotSent::Failed(failure)) => return Err(failure),
                Ok(response) => return Ok(response),
            },
            None => request,
        };
        let connection = self.connect().await?;
        self.send_by(connection, request, &progress, held).await.map_err(|not_sent| match not_sent {
            NotSent::Unsent(_) => Failure::Unreachable("it closed the connection at once".to_owned()),
            NotSent::Failed(failure) => failure,
        })
    }

    async fn connect(&self) -> Result<SendRequest<Body>, Failure> {
        let unreachable = |error: &dyn std::fmt::Display| Failure::Unreachable(error.to_string());
        let stream = TcpStream::connect((self.address.host(), self.address.port()));
        let stream = timeout(self.connect_timeout, stream).await;
        let stream = stream.map_err(|_| unreachable(&"no connection in time"))?.map_err(|error| unreachable(&error))?;
        // Requests are written whole: waiting to fill a packet only adds delay.
        let _ = stream.set_nodelay(true);
        let handshake = http1::Builder::new().max_buf_size(LONGEST_BUFFER).handshake(TokioIo::new(stream)).await;
        let (sender, connection) = handshake.map_err(|error| unreachable(&error))?;
        tokio::spawn(async move {
            if let Err(error) = connection.with_upgrades().await {
                tracing::debug!(%error, "a connection to the upstream ended early");
            }
        });
        Ok(sender)
    }

    async fn send_by(
        &self,
        mut connection: SendRequest<Body>,
        request: Request<Body>,
        progress: &Progress,
        held: &Held,
    ) -> Result<Response<Incoming>, NotSent> {
        // Without a body nothing is polled before the write, so the lease is checked here.
        held.check().map_err(|lost| NotSent::Failed(Failure::Unreachable(lost.to_string())))?;
        progress.made();
        let sent = connection.try_send_request(request);
        tokio::pin!(sent);
        let answer = loop {
            let until = progress.last() + self.timeout;
            tokio::select! {
                answer = &mut sent => break answer,
                // If the client sent more of its body meanwhile, the upstream gets its full time again.
                () = sleep_until(until) => if progress.last() + self.timeout <= Instant::now() {
                    return Err(NotSent::Failed(match progress.body() {
                        BodyState::Awaited => Failure::BodyTimeout,
                        BodyState::Broken => Failure::BodyIncomplete,
                        BodyState::Going => Failure::Timeout,
                    }));
                },
            }
        };
        match answer {
            Ok(response) => {
                if !is_ambiguous(response.headers()) {
                    self.pool.give_back(connection);
                }
                Ok(response)
            }
            // hyper returns the request only if it has written nothing of it.
            Err(mut error) => Err(match error.take_message() {
                Some(request) => NotSent::Unsent(Box::new(request)),
                None if held.has_stopped() => NotSent::Failed(Failure::Unreachable(LeaseLost.to_string())),
                None if progress.body() == BodyState::Broken => NotSent::Failed(Failure::BodyIncomplete),
                None => NotSent::Failed(Failure::Lost(error.into_error())),
            }),
        }
    }
}

enum NotSent {
    /// Nothing was written; the request is returned.
    Unsent(Box<Request<Body>>),
    Failed(Failure),
}

/// When a request last made progress, and which side it waits for.
#[derive(Clone)]
struct Progress(Arc<Mutex<(Instant, BodyState)>>);

/// The state of the client's body: does the request wait for the client or for the upstream?
#[derive(Clone, Copy, PartialEq, Eq)]
enum BodyState {
    /// Everything requested has arrived.
    Going,
    /// More was requested, and the client has not sent it.
    Awaited,
    /// It ended with an error.
    Broken,
}

impl Default for Progress {
    fn default() -> Self {
        Self(Arc::new(Mutex::new((Instant::now(), BodyState::Going))))
    }
}

impl Progress {
    fn made(&self) {
        self.0.lock().0 = Instant::now();
    }

    fn last(&self) -> Instant {
        self.0.lock().0
    }

    fn body(&self) -> BodyState {
        self.0.lock().1
    }

    fn body_is(&self, state: BodyState) {
        self.0.lock().1 = state;
    }
}

/// A request's body that records its progress: a long upload is not idle.
struct Watched {
    body: WithoutTrailers<Body>,
    progress: Progress,
}

impl hyper::body::Body for Watched {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        if frame.is_ready() {
            self.progress.made();
        }
        self.progress.body_is(match &frame {
            Poll::Pending => BodyState::Awaited,
            Poll::Ready(Some(Err(_))) => BodyState::Broken,
            Poll::Ready(_) => BodyState::Going,
        });
        frame
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
    use super::*;
    use crate::http::held::tests::{listener, lost_after};

    /// The lease is lost while the connection is made, or between that and the first byte.
    #[tokio::test]
    async fn a_request_whose_lease_is_lost_before_it_is_written_is_not_sent() {
        for (questions, body) in [(0, "body"), (0, ""), (1, "body")] {
            let (address, came) = listener().await;
            let limit = Duration::from_secs(60);
            let upstream = Upstream::new(config::Upstream::at(address), limit, limit);
            let request = Request::post("/").body(Body::from(body)).unwrap();
            let sent = upstream.send(request, &lost_after(questions)).await;
            let Err(Failure::Unreachable(why)) = sent else { panic!("{questions} {body:?}: {sent:?}") };
            assert!(why.contains("the lease was lost"), "{why}");
            drop(upstream);
            assert_eq!(came.await.unwrap(), b"", "{questions} {body:?}");
        }
    }
}
