//! Headers: which go no further than one connection, and what a proxy adds.

use std::net::SocketAddr;

use axum::http::{HeaderMap, HeaderName, HeaderValue, header};

use crate::serve::framing::only;

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
const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("http2-settings"),
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHORIZATION,
    header::TE,
    // Trailers are not passed on, so they are not announced.
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// What `Connection` may not take away: a client could make the request mean something else behind us than it meant
/// here.
const STAYS: [HeaderName; 6] = [
    header::HOST,
    header::CONTENT_LENGTH,
    header::CONTENT_TYPE,
    header::AUTHORIZATION,
    header::COOKIE,
    HeaderName::from_static("idempotency-key"),
];

/// What an answer may say of a key. An upstream that said so could make a first answer look like a replayed one.
const ABOUT_THE_KEY: [HeaderName; 2] =
    [HeaderName::from_static("idempotent-replayed"), HeaderName::from_static("idempotency-mismatch")];

/// Removes what goes no further than one connection.
pub(super) fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = tokens(headers, &header::CONNECTION).filter_map(|name| name.parse().ok()).collect();
    for name in HOP_BY_HOP.iter().chain(named.iter().filter(|name| !STAYS.contains(name))) {
        headers.remove(name);
    }
}

/// Removes what only the layer may say in an answer.
pub(super) fn remove_about_the_key(headers: &mut HeaderMap) {
    for name in &ABOUT_THE_KEY {
        headers.remove(name);
    }
}

/// Removes the headers that are another's twin to a server that hands them on as variables, as CGI and WSGI do: there
/// `X_Tenant` and `X-Tenant` are both `HTTP_X_TENANT`, so what is removed or set under one name could be said by the
/// other.
pub(super) fn remove_twins(headers: &mut HeaderMap, tenant: Option<&HeaderName>) {
    let guarded = |name: &HeaderName| {
        let plain = plain(name);
        let is = |other: &HeaderName| plain == other.as_str();
        let listed = is(&FENCE) || STAYS.iter().chain(&HOP_BY_HOP).chain(&ABOUT_THE_WAY).any(is);
        let imitates = plain != name.as_str() && (listed || plain.starts_with("x-forwarded-"));
        // A tenant's header may itself be written with an underscore; then its twin has none.
        let is_tenant = tenant == Some(name);
        !is_tenant && (imitates || tenant.is_some_and(|tenant| self::plain(tenant) == plain))
    };
    let twins: Vec<HeaderName> = headers.keys().filter(|name| guarded(name)).cloned().collect();
    for name in twins {
        headers.remove(name);
    }
}

/// A name with `-` for whatever becomes `_` in a variable's name. Most servers do so with `-` and `_` only, some with
/// all that is neither letter nor digit.
fn plain(name: &HeaderName) -> String {
    name.as_str().chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect()
}

/// The protocol that the sender wants to change to, or has changed to. It is WebSocket or none: by `h2c` requests
/// would go down the tunnel unseen, with whatever tenant and fence a client likes.
pub(super) fn upgrade(headers: &HeaderMap) -> Option<HeaderValue> {
    let asked = tokens(headers, &header::CONNECTION).any(|token| token.eq_ignore_ascii_case("upgrade"));
    only(headers, &header::UPGRADE, "websocket").filter(|_| asked).cloned()
}

/// Puts back what [`remove_hop_by_hop`] took away, where the protocol is to be changed.
pub(super) fn set_upgrade(headers: &mut HeaderMap, protocol: HeaderValue) {
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, protocol);
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
            ("connection", "close, X-Hop, Idempotency-Key, Cookie"),
            ("connection", "host, authorization"),
            ("authorization", "a"),
            ("http2-settings", "AAMAAABkAAQAAP__"),
            ("x-hop", "1"),
            ("idempotency-key", "k"),
            ("te", "trailers"),
            ("trailer", "x-tenant"),
            ("transfer-encoding", "chunked"),
            ("cookie", "c"),
        ]);
        remove_hop_by_hop(&mut headers);
        let mut names = names(&headers);
        names.sort_unstable();
        assert_eq!(names, ["authorization", "cookie", "host", "idempotency-key"]);
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
    fn no_protocol_but_websocket_is_changed_to() {
        let asked = ("connection", "upgrade");
        assert_eq!(upgrade(&headers(&[asked, ("upgrade", "WebSocket")])).unwrap(), "WebSocket");
        for other in ["h2c", "websocket, h2c", "h2c, websocket", "websocket/13", "TLS/1.0", ""] {
            assert_eq!(upgrade(&headers(&[asked, ("upgrade", other)])), None, "{other}");
        }
        assert_eq!(upgrade(&headers(&[asked, ("upgrade", "websocket"), ("upgrade", "h2c")])), None);
    }

    #[test]
    fn a_twin_of_a_guarded_header_goes_no_further() {
        let tenant = HeaderName::from_static("x-tenant");
        let twins = [
            "x_tenant",
            "x.tenant",
            "semel_fence",
            "idempotency_key",
            "x_forwarded_for",
            "x-forwarded_prefix",
            "x_real_ip",
            "content_length",
            "transfer_encoding",
        ];
        let stay = ["idempotency-key", "x-forwarded-for", "x-forwarded-prefix", "x-tenant", "x_own"];
        let mut headers =
            headers(&[twins.as_slice(), &stay].concat().into_iter().map(|name| (name, "1")).collect::<Vec<_>>());
        remove_twins(&mut headers, Some(&tenant));
        let mut names = names(&headers);
        names.sort_unstable();
        assert_eq!(names, stay);
    }

    #[test]
    fn a_tenants_header_with_an_underscore_has_a_twin_without() {
        let mut headers = headers(&[("x-tenant", "1"), ("x_tenant", "2")]);
        remove_twins(&mut headers, Some(&HeaderName::from_static("x_tenant")));
        assert_eq!(names(&headers), ["x_tenant"]);
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
}
