//! Trailers: headers that come after a body. They go no further than the gateway, in either direction.
//!
//! Some servers and clients merge them into the headers (RFC 9110, 6.5.1). The gateway's headers were looked at before
//! the body came, so a trailer could say what no header may: the tenant and the fence to the upstream, that an answer is
//! a replay to the client. A keyed request is read whole and an answer kept whole, where trailers have no place either.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};

/// A body without its trailers.
pub(super) struct WithoutTrailers<B>(pub(super) B);

impl<B: Body<Data = Bytes> + Unpin> Body for WithoutTrailers<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        loop {
            match ready!(Pin::new(&mut self.0).poll_frame(context)) {
                // The end comes after them, and is waited for: what breaks off there is not whole.
                Some(Ok(frame)) if frame.is_trailers() => {}
                other => return Poll::Ready(other),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.size_hint()
    }
}
