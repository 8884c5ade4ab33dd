//! Headers by their part in the protocol: those of one connection, and those of the layer.

use http::{HeaderMap, HeaderName, header};

/// Set on an answer that was stored before.
pub const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

/// Set on the stored answer of another payload.
pub const MISMATCH: HeaderName = HeaderName::from_static("idempotency-mismatch");

/// Headers of one connection, whether or not `Connection` names them.
pub const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("http2-settings"),
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// The items of a header that is a list, without its empty ones.
pub fn items<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    let lines = headers.get_all(name).iter().filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(',')).map(str::trim).filter(|item| !item.is_empty())
}
