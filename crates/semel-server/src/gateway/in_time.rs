//! The body of a request with a key, which must come in time: it is read here, before anything is claimed.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::BoxError;
use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::time::{Sleep, sleep};

/// A body that breaks off when its time is up. Without it, clients that send a byte now and then could hold as many
/// bodies as they like.
pub(super) struct InTime {
    body: Incoming,
    end: Pin<Box<Sleep>>,
}

impl InTime {
    pub(super) fn new(body: Incoming, limit: Duration) -> Self {
        Self { body, end: Box::pin(sleep(limit)) }
    }
}

impl Body for InTime {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match Pin::new(&mut self.body).poll_frame(context) {
            Poll::Pending => {
                self.end.as_mut().poll(context).map(|()| Some(Err("the body did not come in time".into())))
            }
            Poll::Ready(frame) => Poll::Ready(frame.map(|frame| frame.map_err(Into::into))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
