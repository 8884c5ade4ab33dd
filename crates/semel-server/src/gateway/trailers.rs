//! Trailers: headers after a body. The gateway removes them in both directions.
//!
//! Some servers and clients merge them into the headers (RFC 9110, 6.5.1). The gateway checks headers before the body,
//! so a trailer could forge what no header may: the tenant and the fence to the upstream, a replay to the client. A
//! keyed request is read whole and an answer stored whole, without trailers.

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
                // The end of the body is still awaited: a body that breaks off there is incomplete.
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
