//! Headers: removes the hop-by-hop ones, and adds those of a proxy.

use std::net::SocketAddr;

use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use semel_http::{
    headers::{HOP_BY_HOP, MISMATCH, REPLAYED, items},
    key::IDEMPOTENCY_KEY,
};

use crate::serve::framing::only;

/// The header with the fence, by which the upstream can refuse an older attempt.
pub(super) const FENCE: HeaderName = HeaderName::from_static("semel-fence");

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// Headers about the origin of a request.
const ABOUT_THE_WAY: [HeaderName; 6] = [
    X_FORWARDED_FOR,
    X_FORWARDED_HOST,
    X_FORWARDED_PROTO,
    HeaderName::from_static("x-forwarded-port"),
    HeaderName::from_static("x-real-ip"),
    header::FORWARDED,
];

/// Headers that `Connection` may not remove: without one of them, the upstream could read the request differently from
/// the gateway.
const STAYS: [HeaderName; 6] = [
    header::HOST,
    header::CONTENT_LENGTH,
    header::CONTENT_TYPE,
    header::AUTHORIZATION,
    header::COOKIE,
    IDEMPOTENCY_KEY,
];

/// Headers about the key. An upstream that set them could make a first answer look like a replay.
const ABOUT_THE_KEY: [HeaderName; 2] = [REPLAYED, MISMATCH];

/// Removes hop-by-hop headers. Trailers are not forwarded, so they are not announced.
pub(super) fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = items(headers, &header::CONNECTION).filter_map(|name| name.parse().ok()).collect();
    for name in HOP_BY_HOP.iter().chain(named.iter().filter(|name| !STAYS.contains(name))) {
        headers.remove(name);
    }
}

/// Removes headers that only the layer may set.
pub(super) fn remove_about_the_key(headers: &mut HeaderMap) {
    for name in &ABOUT_THE_KEY {
        headers.remove(name);
    }
}

/// Removes headers that map to the same variable as a guarded one. CGI and WSGI servers turn both `X_Tenant` and
/// `X-Tenant` into `HTTP_X_TENANT`, so a header that is removed or set under one name could be forged under the other.
pub(super) fn remove_twins(headers: &mut HeaderMap, tenant: Option<&HeaderName>) {
    let guarded = |name: &HeaderName| {
        let plain = plain(name);
        let imitates = plain != name.as_str() && (is_guarded(&plain) || plain.starts_with("x-forwarded-"));
        // The tenant header may itself contain an underscore; then its twin has a hyphen.
        let is_tenant = tenant == Some(name);
        !is_tenant && (imitates || tenant.is_some_and(|tenant| self::plain(tenant) == plain))
    };
    let twins: Vec<HeaderName> = headers.keys().filter(|name| guarded(name)).cloned().collect();
    for name in twins {
        headers.remove(name);
    }
}

/// Whether a header means something to the gateway in a request.
fn is_guarded(plain: &str) -> bool {
    let is = |name: &HeaderName| plain == name.as_str();
    is(&FENCE) || STAYS.iter().chain(&HOP_BY_HOP).chain(&ABOUT_THE_WAY).any(is)
}

/// Whether a header, or one that a server may take for it, means something to the gateway.
pub(crate) fn is_known(plain: &str) -> bool {
    is_guarded(plain) || ABOUT_THE_KEY.iter().any(|name| plain == name.as_str())
}

/// A name with `-` for every character that becomes `_` in a variable's name. Most servers replace only `-` and `_`,
/// some replace everything except letters and digits.
pub(crate) fn plain(name: &HeaderName) -> String {
    name.as_str().chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect()
}

/// The protocol of an upgrade: WebSocket or none. Over `h2c`, requests would pass the tunnel unchecked, with any tenant
/// and fence.
pub(super) fn upgrade(headers: &HeaderMap) -> Option<HeaderValue> {
    let asked = items(headers, &header::CONNECTION).any(|token| token.eq_ignore_ascii_case("upgrade"));
    only(headers, &header::UPGRADE, "websocket").filter(|_| asked).cloned()
}

/// Restores the upgrade headers that [`remove_hop_by_hop`] removed.
pub(super) fn set_upgrade(headers: &mut HeaderMap, protocol: HeaderValue) {
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, protocol);
}

/// Sets the forwarding headers. Those of the request are kept only if it comes from a trusted proxy.
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
    fn hop_by_hop_headers_are_removed() {
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
    fn an_upgrade_needs_both_headers() {
        assert_eq!(
            upgrade(&headers(&[("upgrade", "websocket"), ("connection", "keep-alive, Upgrade")])).unwrap(),
            "websocket"
        );
        assert_eq!(upgrade(&headers(&[("upgrade", "websocket")])), None);
        assert_eq!(upgrade(&headers(&[("connection", "upgrade")])), None);
    }

    #[test]
    fn only_an_upgrade_to_websocket_is_accepted() {
        let asked = ("connection", "upgrade");
        assert_eq!(upgrade(&headers(&[asked, ("upgrade", "WebSocket")])).unwrap(), "WebSocket");
        for other in ["h2c", "websocket, h2c", "h2c, websocket", "websocket/13", "TLS/1.0", ""] {
            assert_eq!(upgrade(&headers(&[asked, ("upgrade", other)])), None, "{other}");
        }
        assert_eq!(upgrade(&headers(&[asked, ("upgrade", "websocket"), ("upgrade", "h2c")])), None);
    }

    #[test]
    fn a_twin_of_a_guarded_header_is_removed() {
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
    fn forwarding_headers_are_kept_from_a_trusted_proxy_only() {
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
