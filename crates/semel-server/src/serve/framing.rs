//! Refuses requests about whose end two readers could differ.

use axum::{
    body::Body,
    http::{HeaderMap, HeaderName, HeaderValue, Response, header},
    response::IntoResponse as _,
};

use crate::http::problem::{Problem, TRANSFER_CODING};

/// The answer to a request whose transfer coding is not exactly `chunked`. It closes the connection: a reader that
/// decodes the body differently would see another next request than we do (request smuggling).
pub(super) fn refuse_strange_coding(headers: &HeaderMap) -> Option<Response<Body>> {
    has_strange_coding(headers).then(|| {
        let mut refused = Problem::new(&TRANSFER_CODING).into_response();
        refused.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        refused
    })
}

/// Whether the body has a transfer coding that is not decoded here, or that readers decode differently.
pub(crate) fn has_strange_coding(headers: &HeaderMap) -> bool {
    let name = header::TRANSFER_ENCODING;
    headers.contains_key(&name) && only(headers, &name, "chunked").is_none()
}

/// The header's value, if it is exactly this word.
pub(crate) fn only<'a>(headers: &'a HeaderMap, name: &HeaderName, word: &str) -> Option<&'a HeaderValue> {
    let mut lines = headers.get_all(name).iter();
    let (line, None) = (lines.next()?, lines.next()) else { return None };
    line.as_bytes().trim_ascii().eq_ignore_ascii_case(word.as_bytes()).then_some(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transfer_coding_other_than_chunked_is_refused() {
        let headers = |codings: &[&[u8]]| {
            let mut headers = HeaderMap::new();
            for coding in codings {
                headers.append("transfer-encoding", HeaderValue::from_bytes(coding).unwrap());
            }
            headers
        };
        assert!(!has_strange_coding(&headers(&[b"Chunked"])));
        assert!(!has_strange_coding(&headers(&[])));
        for other in ["gzip, chunked", "chunked, chunked", "chunked,", ""] {
            assert!(has_strange_coding(&headers(&[other.as_bytes()])), "{other}");
        }
        for twice in [&b"chunked"[..], b"\xff"] {
            assert!(has_strange_coding(&headers(&[b"chunked", twice])));
        }
        let refused = refuse_strange_coding(&headers(&[b"gzip"])).unwrap();
        assert_eq!((refused.status().as_u16(), &refused.headers()["connection"]), (501, &"close".parse().unwrap()));
    }
}
