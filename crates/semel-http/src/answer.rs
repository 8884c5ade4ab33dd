//! Stored answers, and their replay.

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use semel::Outcome;

use crate::headers::{HOP_BY_HOP, MISMATCH, REPLAYED, items};

/// The version of the stored layout.
const VERSION: u8 = 1;

/// Headers of one message. [`is_passing`] adds those of one connection, of CORS and of tracing.
const PASSING: [HeaderName; 9] = [
    header::PROXY_AUTHENTICATE,
    header::DATE,
    header::SERVER,
    header::CONTENT_LENGTH,
    header::SET_COOKIE,
    header::ALT_SVC,
    header::VARY,
    REPLAYED,
    MISMATCH,
];

fn is_passing(name: &HeaderName, answer: &HeaderMap) -> bool {
    const TRACING: [&str; 7] =
        ["traceparent", "tracestate", "baggage", "b3", "x-request-id", "x-correlation-id", "x-amzn-trace-id"];
    let text = name.as_str();
    PASSING.contains(name)
        || HOP_BY_HOP.contains(name)
        || TRACING.contains(&text)
        || text.starts_with("x-b3-")
        || text.starts_with("access-control-")
        || items(answer, &header::CONNECTION).any(|named| named.eq_ignore_ascii_case(text))
}

/// An answer without the headers of its first message.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: Vec<(HeaderName, HeaderValue)>,
    pub(crate) body: Bytes,
}

impl Answer {
    pub(crate) fn new(status: StatusCode, headers: &HeaderMap, body: Bytes) -> Self {
        let kept = headers.iter().filter(|(name, _)| !is_passing(name, headers));
        Self { status, headers: kept.map(|(name, value)| (name.clone(), value.clone())).collect(), body }
    }

    /// An answer to be replayed.
    pub(crate) fn kept(&self) -> Outcome {
        Outcome::kept(self.encode())
    }

    /// An answer that is not kept: only its status and its location.
    pub(crate) fn not_kept(&self) -> Outcome {
        let headers = self.headers.iter().filter(|(name, _)| *name == header::LOCATION).cloned().collect();
        Outcome::not_kept(Self { status: self.status, headers, body: Bytes::new() }.encode())
    }

    fn encode(&self) -> Bytes {
        let mut out = BytesMut::with_capacity(64 + self.body.len());
        out.put_u8(VERSION);
        out.put_u16(self.status.as_u16());
        out.put_u32(u32::try_from(self.headers.len()).unwrap_or(u32::MAX));
        for (name, value) in &self.headers {
            for part in [name.as_str().as_bytes(), value.as_bytes()] {
                out.put_u32(u32::try_from(part.len()).unwrap_or(u32::MAX));
                out.put_slice(part);
            }
        }
        out.put_slice(&self.body);
        out.freeze()
    }

    /// None if the bytes have another layout, which a newer node may have written. The operation took effect
    /// all the same.
    pub(crate) fn decode(mut bytes: Bytes) -> Option<Self> {
        if bytes.try_get_u8().ok()? != VERSION {
            return None;
        }
        let status = StatusCode::from_u16(bytes.try_get_u16().ok()?).ok()?;
        let count = bytes.try_get_u32().ok()?;
        let mut headers = Vec::new();
        for _ in 0..count {
            let mut part = || {
                let size = bytes.try_get_u32().ok()? as usize;
                (size <= bytes.len()).then(|| bytes.split_to(size))
            };
            let (name, value) = (part()?, part()?);
            headers.push((HeaderName::from_bytes(&name).ok()?, HeaderValue::from_maybe_shared(value).ok()?));
        }
        Some(Self { status, headers, body: bytes })
    }

    /// The answer as a replay.
    pub(crate) fn replay(self, mismatch: bool) -> Response<Bytes> {
        let mut response = Response::new(self.body);
        *response.status_mut() = self.status;
        for (name, value) in self.headers {
            response.headers_mut().append(name, value);
        }
        mark(response, mismatch)
    }

    /// The location of the result.
    pub(crate) fn location(&self) -> Option<&HeaderValue> {
        self.headers.iter().find(|(name, _)| *name == header::LOCATION).map(|(_, value)| value)
    }
}

/// Marks an answer as a replay. No cache may take it for a fresh one.
pub(crate) fn mark<B>(mut response: Response<B>, mismatch: bool) -> Response<B> {
    let headers = response.headers_mut();
    headers.insert(REPLAYED, HeaderValue::from_static("true"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    if mismatch {
        headers.insert(MISMATCH, HeaderValue::from_static("true"));
    }
    response
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn headers(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, HeaderValue::from_static(value));
        }
        headers
    }

    #[test]
    fn headers_of_one_message_are_not_kept() {
        let first = headers(&[
            ("content-type", "text/plain"),
            ("link", "<a>"),
            ("connection", "close, X-Hop"),
            ("x-hop", "1"),
            ("date", "now"),
            ("set-cookie", "session=1"),
            ("link", "<b>"),
            ("traceparent", "00-1"),
            ("x-b3-traceid", "1"),
            ("access-control-allow-origin", "*"),
            ("content-length", "2"),
            ("idempotent-replayed", "true"),
            ("location", "/a/1"),
        ]);
        let answer = Answer::new(StatusCode::CREATED, &first, Bytes::from_static(b"ok"));
        let again = Answer::decode(answer.kept().body).unwrap().replay(false);
        assert_eq!(again.status(), 201);
        let lines: Vec<_> =
            again.headers().iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
        assert_eq!(
            lines,
            [
                ("content-type", "text/plain"),
                ("link", "<a>"),
                ("link", "<b>"),
                ("location", "/a/1"),
                ("idempotent-replayed", "true"),
                ("cache-control", "no-store"),
            ]
        );
        assert_eq!(again.body().as_ref(), b"ok");
        let not_kept = answer.not_kept();
        assert!(!not_kept.kept);
        assert_eq!(Answer::decode(not_kept.body).unwrap().location().unwrap(), "/a/1");
    }

    proptest! {
        #[test]
        fn prop_kept_answers_come_back(status in 200u16..600, values in prop::collection::vec(prop::collection::vec(0x80u8..=0xff, 0..20), 0..5), body in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut map = HeaderMap::new();
            for value in values {
                map.append("x-raw", HeaderValue::from_bytes(&value).unwrap());
            }
            let answer = Answer::new(StatusCode::from_u16(status).unwrap(), &map, body.into());
            prop_assert_eq!(Answer::decode(answer.encode()), Some(answer));
        }

        #[test]
        fn prop_no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let _ = Answer::decode(bytes.into());
        }
    }
}
