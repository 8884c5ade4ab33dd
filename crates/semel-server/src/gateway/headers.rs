//! Headers: which go no further than one connection, and what a proxy adds.

use std::net::SocketAddr;

use axum::http::{HeaderMap, HeaderName, HeaderValue, header};

/// Where the upstream finds the number by which it can refuse an older attempt.
pub(super) const FENCE: HeaderName = HeaderName::from_static("semel-fence");

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// What is said about where a request came from.
const ABOUT_THE_WAY: [HeaderName; 6] = [
    X_FORWARDED_FOR,
    X_FORWARDED_HOST,
    X_FORWARDED_PROTO,
    HeaderName::from_static("x-forwarded-port"),
    HeaderName::from_static("x-real-ip"),
    header::FORWARDED,
];

/// What is about one connection, whether or not `Connection` says so.
const HOP_BY_HOP: [HeaderName; 7] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// What `Connection` may not take away: a client could make the request mean something else behind us than it meant
/// here.
const STAYS: [HeaderName; 4] =
    [header::HOST, header::CONTENT_LENGTH, header::CONTENT_TYPE, HeaderName::from_static("idempotency-key")];

/// Removes what goes no further than one connection.
pub(super) fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = tokens(headers, &header::CONNECTION).filter_map(|name| name.parse().ok()).collect();
    for name in HOP_BY_HOP.iter().chain(named.iter().filter(|name| !STAYS.contains(name))) {
        headers.remove(name);
    }
}

/// The protocol that the sender wants to change to, or has changed to.
pub(super) fn upgrade(headers: &HeaderMap) -> Option<HeaderValue> {
    let asked = tokens(headers, &header::CONNECTION).any(|token| token.eq_ignore_ascii_case("upgrade"));
    headers.get(header::UPGRADE).filter(|_| asked).cloned()
}

/// Puts back what [`remove_hop_by_hop`] took away, where the protocol is to be changed.
pub(super) fn set_upgrade(headers: &mut HeaderMap, protocol: HeaderValue) {
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, protocol);
}

/// Whether the sender reads headers that come after a body.
pub(super) fn takes_trailers(headers: &HeaderMap) -> bool {
    tokens(headers, &header::TE).any(|token| token.eq_ignore_ascii_case("trailers"))
}

/// Whether the body was sent in a coding that is not undone here.
pub(super) fn has_strange_coding(headers: &HeaderMap) -> bool {
    tokens(headers, &header::TRANSFER_ENCODING).any(|coding| !coding.eq_ignore_ascii_case("chunked"))
}

/// Says where the request came from. What it says itself stays only if it comes from a trusted proxy.
pub(super) fn set_forwarded(headers: &mut HeaderMap, peer: SocketAddr, trusted: bool) {
    if !trusted {
        for name in &ABOUT_THE_WAY {
            headers.remove(name);
        }
    }
    if let Ok(address) = HeaderValue::from_str(&peer.ip().to_canonical().to_string()) {
        headers.append(X_FORWARDED_FOR, address);
    }
    if let Some(host) = headers.get(header::HOST).cloned() {
        headers.entry(X_FORWARDED_HOST).or_insert(host);
    }
    headers.entry(X_FORWARDED_PROTO).or_insert(HeaderValue::from_static("http"));
}

/// The words of a header that is a list.
fn tokens<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    let lines = headers.get_all(name).iter().filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(',')).map(str::trim).filter(|token| !token.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, HeaderValue::from_static(value));
        }
        headers
    }

    fn names(headers: &HeaderMap) -> Vec<&str> {
        headers.keys().map(HeaderName::as_str).collect()
    }

    #[test]
    fn what_is_about_one_connection_goes_no_further() {
        let mut headers = headers(&[
            ("host", "a"),
            ("connection", "close, X-Hop, Idempotency-Key"),
            ("connection", "host"),
            ("x-hop", "1"),
            ("idempotency-key", "k"),
            ("te", "trailers"),
            ("transfer-encoding", "chunked"),
            ("cookie", "c"),
        ]);
        remove_hop_by_hop(&mut headers);
        let mut names = names(&headers);
        names.sort_unstable();
        assert_eq!(names, ["cookie", "host", "idempotency-key"]);
    }

    #[test]
    fn another_protocol_is_asked_for_by_both_headers() {
        assert_eq!(
            upgrade(&headers(&[("upgrade", "websocket"), ("connection", "keep-alive, Upgrade")])).unwrap(),
            "websocket"
        );
        assert_eq!(upgrade(&headers(&[("upgrade", "websocket")])), None);
        assert_eq!(upgrade(&headers(&[("connection", "upgrade")])), None);
    }

    #[test]
    fn only_a_trusted_proxy_is_believed_about_the_way() {
        let peer = "[::ffff:10.0.0.1]:1".parse().unwrap();
        let sent =
            [("host", "a"), ("x-forwarded-for", "1.2.3.4"), ("x-forwarded-proto", "https"), ("forwarded", "for=x")];
        let mut believed = headers(&sent);
        set_forwarded(&mut believed, peer, true);
        let way: Vec<_> = believed.get_all("x-forwarded-for").iter().collect();
        assert_eq!(way, ["1.2.3.4", "10.0.0.1"]);
        assert_eq!(
            (&believed["x-forwarded-proto"], &believed["x-forwarded-host"]),
            (&"https".parse().unwrap(), &"a".parse().unwrap())
        );
        let mut other = headers(&sent);
        set_forwarded(&mut other, peer, false);
        assert_eq!(other.get_all("x-forwarded-for").iter().collect::<Vec<_>>(), ["10.0.0.1"]);
        assert_eq!(other["x-forwarded-proto"], "http");
        assert!(!other.contains_key("forwarded"));
    }

    #[test]
    fn only_chunks_are_undone() {
        assert!(!has_strange_coding(&headers(&[("transfer-encoding", "Chunked")])));
        assert!(has_strange_coding(&headers(&[("transfer-encoding", "gzip, chunked")])));
    }
}
