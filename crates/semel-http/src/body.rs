//! Bodies: read up to a limit. A body that exceeds it is passed on unchanged.

use std::{
    collections::VecDeque,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf as _, Bytes, BytesMut};
use futures_util::future::poll_fn;
use http_body::{Body as HttpBody, Frame, SizeHint};

use crate::problem::{BODY_INCOMPLETE, BODY_TIMEOUT, BODY_TOO_LARGE, Problem};

/// An answer's body: the frames that were read so far, and the rest.
pub struct Body<B: HttpBody> {
    read: VecDeque<Frame<Bytes>>,
    /// The error after the frames that were read.
    error: Option<B::Error>,
    /// Whether the frames before the error could be sent.
    flushed: bool,
    rest: Option<B>,
}

impl<B: HttpBody> Body<B> {
    /// A body that was read completely.
    pub(crate) fn whole(bytes: Bytes) -> Self {
        let read = if bytes.is_empty() { VecDeque::new() } else { VecDeque::from([Frame::data(bytes)]) };
        Self { read, error: None, flushed: false, rest: None }
    }

    /// An unread body.
    pub(crate) fn untouched(rest: B) -> Self {
        Self { read: VecDeque::new(), error: None, flushed: false, rest: Some(rest) }
    }
}

// Nothing in it is pinned: the rest is polled as `Unpin`.
impl<B: HttpBody> Unpin for Body<B> {}

impl<B: HttpBody<Data = Bytes> + Unpin> HttpBody for Body<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        if let Some(frame) = self.read.pop_front() {
            return Poll::Ready(Some(Ok(frame)));
        }
        if self.error.is_some() && !std::mem::replace(&mut self.flushed, true) {
            // Without this pause a server closes the connection before it has sent even the head.
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        if let Some(error) = self.error.take() {
            self.rest = None;
            return Poll::Ready(Some(Err(error)));
        }
        let Some(rest) = self.rest.as_mut() else { return Poll::Ready(None) };
        let frame = ready!(Pin::new(rest).poll_frame(context));
        if frame.is_none() {
            self.rest = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.read.is_empty() && self.error.is_none() && self.rest.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let read: u64 = self.read.iter().filter_map(Frame::data_ref).map(|data| data.len() as u64).sum();
        let rest = self.rest.as_ref().map_or_else(|| SizeHint::with_exact(0), HttpBody::size_hint);
        let mut hint = SizeHint::new();
        hint.set_lower(read + rest.lower());
        if let Some(upper) = rest.upper() {
            hint.set_upper(read + upper);
        }
        hint
    }
}

/// Reads a request's body. An incomplete or too long body is an error, and nothing is claimed.
pub(crate) async fn read_request<B>(body: B, limit: usize, patience: Duration) -> Result<Bytes, Problem>
where
    B: HttpBody,
{
    // Clients that stop in the middle must not fill the memory.
    let read = tokio::time::timeout(patience, read_within(body, limit)).await;
    read.unwrap_or_else(|_| Err(Problem::new(&BODY_TIMEOUT)))
}

async fn read_within<B>(body: B, limit: usize) -> Result<Bytes, Problem>
where
    B: HttpBody,
{
    let too_large = || {
        Problem::new(&BODY_TOO_LARGE)
            .detail(format!("The body is longer than the {limit} bytes that this path accepts."))
    };
    // A body whose announced length is too long is not read.
    if body.size_hint().lower() > limit as u64 {
        return Err(too_large());
    }
    let mut body = std::pin::pin!(body);
    let (mut read, mut rest) = (Bytes::new(), BytesMut::new());
    while let Some(frame) = poll_fn(|context| body.as_mut().poll_frame(context)).await {
        let frame = frame.map_err(|_| Problem::new(&BODY_INCOMPLETE))?;
        let Ok(mut data) = frame.into_data() else { continue };
        if read.len() + rest.len() + data.remaining() > limit {
            return Err(too_large());
        }
        let data = data.copy_to_bytes(data.remaining());
        // Most bodies have one frame, which is not copied.
        match read.is_empty() {
            true => read = data,
            false => rest.extend_from_slice(&data),
        }
    }
    Ok(if rest.is_empty() { read } else { [&read[..], &rest[..]].concat().into() })
}

/// The result of reading an answer's body.
pub(crate) enum Read<B: HttpBody> {
    /// All of it.
    Whole(Bytes),
    /// It is too long, takes too long, has trailers, or broke off: passed on as it comes.
    Passing(Body<B>),
}

/// Reads an answer's body up to the limit.
pub(crate) async fn read_answer<B>(body: B, limit: usize, patience: Duration) -> Read<B>
where
    B: HttpBody<Data = Bytes> + Unpin,
{
    if body.size_hint().lower() > limit as u64 {
        return Read::Passing(Body::untouched(body));
    }
    let mut passing = Body::untouched(body);
    let whole = tokio::time::timeout(patience, read_whole(&mut passing, limit)).await;
    match whole {
        Ok(true) => {
            let mut frames: Vec<Bytes> = passing.read.into_iter().filter_map(|frame| frame.into_data().ok()).collect();
            // Most bodies have one frame, which is not copied.
            Read::Whole(if frames.len() == 1 { frames.remove(0) } else { frames.concat().into() })
        }
        Ok(false) | Err(_) => Read::Passing(passing),
    }
}

/// Reads the whole body; false if it is too long, has trailers or broke off.
async fn read_whole<B>(body: &mut Body<B>, limit: usize) -> bool
where
    B: HttpBody<Data = Bytes> + Unpin,
{
    let mut size = 0;
    while let Some(rest) = body.rest.as_mut() {
        match poll_fn(|context| Pin::new(&mut *rest).poll_frame(context)).await {
            None => body.rest = None,
            Some(Ok(frame)) => {
                size += frame.data_ref().map_or(usize::MAX / 2, Bytes::len);
                body.read.push_back(frame);
                if size > limit {
                    return false;
                }
            }
            Some(Err(error)) => {
                body.error = Some(error);
                return false;
            }
        }
    }
    true
}
