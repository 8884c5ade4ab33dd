//! The length of an answer. If two sides read it differently, the rest of one answer counts as the next one (response
//! splitting). So the gateway sends every answer with one length or chunked, for any input from the upstream.

use axum::http::{HeaderMap, HeaderValue, Response, StatusCode, header};

use crate::serve::framing::has_strange_coding;

/// Whether an answer states its length in two ways. Its connection is not reused: which of the two the upstream meant
/// is unknown (RFC 9112, 6.1).
pub(super) fn is_ambiguous(headers: &HeaderMap) -> bool {
    headers.contains_key(header::TRANSFER_ENCODING) && headers.contains_key(header::CONTENT_LENGTH)
}

/// Leaves an answer with the one length by which its body was read, or says why it cannot be forwarded.
pub(super) fn settle_length<B>(response: &mut Response<B>) -> Result<(), &'static str> {
    let bodiless = response.status() == StatusCode::NO_CONTENT || response.status().is_informational();
    let headers = response.headers_mut();
    if has_strange_coding(headers) {
        return Err("its transfer coding is not chunked");
    }
    if bodiless || headers.contains_key(header::TRANSFER_ENCODING) {
        // The body was read by its chunks. A length beside them may be wrong.
        headers.remove(header::CONTENT_LENGTH);
    } else if let Some(length) = single_length(headers) {
        headers.insert(header::CONTENT_LENGTH, length);
    }
    Ok(())
}

/// The length, if it is given more than once. hyper has refused lengths that differ.
fn single_length(headers: &HeaderMap) -> Option<HeaderValue> {
    let mut lines = headers.get_all(header::CONTENT_LENGTH).iter();
    let (first, second) = (lines.next()?, lines.next());
    let one = first.as_bytes().split(|byte| *byte == b',').next()?.trim_ascii();
    (second.is_some() || one != first.as_bytes()).then(|| HeaderValue::from_bytes(one).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settled(status: u16, lines: &[(&'static str, &'static str)]) -> Result<Vec<String>, &'static str> {
        let mut response = Response::new(());
        *response.status_mut() = StatusCode::from_u16(status).unwrap();
        for (name, value) in lines {
            response.headers_mut().append(*name, HeaderValue::from_static(value));
        }
        settle_length(&mut response)?;
        let lengths = response.headers().get_all("content-length").iter();
        Ok(lengths.map(|length| length.to_str().unwrap().to_owned()).collect())
    }

    #[test]
    fn an_answer_has_one_length_or_chunks() {
        let (length, chunks) = (("content-length", "5"), ("transfer-encoding", "chunked"));
        assert_eq!(settled(200, &[length]).unwrap(), ["5"]);
        assert_eq!(settled(200, &[length, length]).unwrap(), ["5"]);
        assert_eq!(settled(200, &[("content-length", "5, 5")]).unwrap(), ["5"]);
        assert_eq!(settled(304, &[length]).unwrap(), ["5"], "the length of the body that is not sent");
        for lines in [&[chunks][..], &[chunks, length], &[length, chunks]] {
            assert_eq!(settled(200, lines).unwrap(), [""; 0]);
        }
        assert_eq!(settled(204, &[length]).unwrap(), [""; 0]);
        for coding in ["gzip, chunked", "chunked, chunked", "identity", ""] {
            assert!(settled(200, &[length, ("transfer-encoding", coding)]).is_err(), "{coding}");
        }
    }
}
