//! Closes a connection so that the client can still read its answer.
//!
//! A body that is too large is refused before all of it has arrived. If the socket is closed while the client is still
//! sending, the kernel resets the connection, and the client often loses the answer: it sees a broken pipe and sends
//! the same body again. So after such a refusal the server closes only its own half and reads on for a moment.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::http::Response;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::{Sleep, sleep},
};

/// How long a refused client may continue to send before the connection is closed.
const LONGEST: Duration = Duration::from_secs(2);

/// Whether the client of a connection may still be sending a refused body.
#[derive(Clone, Debug, Default)]
pub(super) struct Sending(Arc<AtomicBool>);

impl Sending {
    /// Records the answer to a request: a refusal may have been sent before the whole body arrived.
    pub(super) fn note<B>(&self, has_body: bool, answer: &Response<B>) {
        let refused = answer.status().is_client_error() || answer.status().is_server_error();
        self.0.store(has_body && refused, Relaxed);
    }
}

/// A connection that reads on for a moment before it is closed, if its client may still be sending.
#[derive(Debug)]
pub(super) struct Lingering {
    stream: TcpStream,
    sending: Sending,
    /// Set once our half is closed.
    until: Option<Pin<Box<Sleep>>>,
}

impl Lingering {
    pub(super) fn new(stream: TcpStream, sending: Sending) -> Self {
        Self { stream, sending, until: None }
    }
}

impl AsyncRead for Lingering {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Lingering {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, data)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, data)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(Pin::new(&mut this.stream).poll_shutdown(cx))?;
        if !this.sending.0.load(Relaxed) {
            return Poll::Ready(Ok(()));
        }
        let until = this.until.get_or_insert_with(|| Box::pin(sleep(LONGEST)));
        let mut thrown_away = [0; 16 * 1024];
        loop {
            if until.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Ok(()));
            }
            let mut chunk = ReadBuf::new(&mut thrown_away);
            let read = ready!(Pin::new(&mut this.stream).poll_read(cx, &mut chunk));
            if read.is_err() || chunk.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
        }
    }
}
