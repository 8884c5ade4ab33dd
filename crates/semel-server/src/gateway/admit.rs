//! Checks and prepares a request before it reaches the layer.

use std::net::SocketAddr;

use axum::{
    extract::ConnectInfo,
    http::{HeaderMap, HeaderName, HeaderValue, Method, header, request::Parts},
};
use semel::Scope;
use semel_http::{Principal, Role, key::IDEMPOTENCY_KEY, may_not_repeat};

use super::{
    headers::{FENCE, remove_hop_by_hop, remove_twins, set_forwarded, upgrade},
    problems::TENANT_UNKNOWN,
    proxy::Wanted,
};
use crate::{
    config::Networks,
    http::problem::{HOST_NOT_ALLOWED, METHOD_NOT_ALLOWED, Problem},
};

/// How to find the tenant of a request.
pub(super) struct Admission {
    pub(super) tenant: String,
    pub(super) tenant_header: Option<HeaderName>,
    pub(super) trusted: Networks,
    /// The upstream's name, for a client that names no host.
    pub(super) upstream: Option<HeaderValue>,
}

/// Whether the layer will look for the request's key in the ledger.
fn is_keyed(head: &Parts) -> bool {
    head.headers.contains_key(IDEMPOTENCY_KEY) && may_not_repeat(&head.method)
}

impl Admission {
    /// Prepares a request for the layer and the upstream, or refuses it. Returns whether the layer will look for its
    /// key.
    pub(super) fn admit(&self, head: &mut Parts) -> Result<bool, Problem> {
        if head.method == Method::CONNECT {
            return Err(Problem::new(&METHOD_NOT_ALLOWED));
        }
        if let Some(protocol) = upgrade(&head.headers) {
            head.extensions.insert(Wanted(protocol));
        }
        let keyed = is_keyed(head);
        remove_hop_by_hop(&mut head.headers);
        // Only the gateway may set the fence.
        head.headers.remove(FENCE);
        remove_twins(&mut head.headers, self.tenant_header.as_ref());
        self.settle_host(head)?;

        let peer = head.extensions.get::<ConnectInfo<SocketAddr>>().map(|peer| peer.0);
        let trusted = peer.is_some_and(|peer| self.trusted.contains(peer.ip()));
        match self.tenant_of(&mut head.headers, trusted) {
            Some(tenant) => {
                let principal = Principal { tenant, subject: "gateway".to_owned(), role: Role::Admin };
                head.extensions.insert(principal);
            }
            None if keyed => return Err(Problem::new(&TENANT_UNKNOWN)),
            None => {}
        }
        if keyed {
            // The gateway reads the body, so it also answers `Expect`.
            head.headers.remove(header::EXPECT);
        }
        if let Some(peer) = peer {
            set_forwarded(&mut head.headers, peer, trusted);
        }
        Ok(keyed)
    }

    /// One request has one host.
    fn settle_host(&self, head: &mut Parts) -> Result<(), Problem> {
        if head.headers.get_all(header::HOST).iter().nth(1).is_some() {
            // Client and upstream could each choose another of the two.
            return Err(Problem::new(&HOST_NOT_ALLOWED).detail("The request has more than one Host header."));
        }
        // A request line may name a host of its own (`GET http://host/ HTTP/1.1`), and then that one counts.
        let named = head.uri.authority().map(|authority| authority.as_str());
        // Credentials before the host are not part of a Host header and must not reach the upstream.
        let named = named.map(|named| named.rsplit_once('@').map_or(named, |(_, host)| host));
        if let Some(host) = named.and_then(|host| HeaderValue::from_str(host).ok()) {
            head.headers.insert(header::HOST, host);
        } else if let Some(host) = &self.upstream {
            head.headers.entry(header::HOST).or_insert_with(|| host.clone());
        }
        Ok(())
    }

    /// The tenant of a request. A tenant header counts only if it occurs once and comes from a trusted proxy.
    fn tenant_of(&self, headers: &mut HeaderMap, trusted: bool) -> Option<String> {
        let Some(name) = &self.tenant_header else { return Some(self.tenant.clone()) };
        if !trusted {
            headers.remove(name);
        }
        let mut given = headers.get_all(name).iter();
        let (tenant, None) = (given.next()?.to_str().ok()?, given.next()) else { return None };
        Scope::new(tenant, super::SERVICE, super::KIND).ok()?;
        // A comma: two headers were joined by a proxy.
        (!tenant.contains(',')).then(|| tenant.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use axum::http::Request;

    use super::*;

    fn admit(peer: &str, method: &str, lines: &[(&str, &str)]) -> Result<Parts, &'static str> {
        let uri = "http://ana:secret@example.com/a";
        let mut request = Request::builder().method(method).uri(uri).header("host", "other");
        for (name, value) in lines {
            request = request.header(*name, *value);
        }
        let (mut head, ()) = request.body(()).unwrap().into_parts();
        head.extensions.insert(ConnectInfo(SocketAddr::new(peer.parse().unwrap(), 1)));
        let admission = Admission {
            tenant: "default".to_owned(),
            tenant_header: Some(HeaderName::from_static("x-tenant")),
            trusted: super::super::tests::networks("10.0.0.0/8"),
            upstream: None,
        };
        admission.admit(&mut head).map(|_| head).map_err(|problem| problem.kind().name)
    }

    fn tenant(head: &Parts) -> Option<&str> {
        head.extensions.get::<Principal>().map(|principal| principal.tenant.as_str())
    }

    #[test]
    fn a_tenant_is_read_from_a_trusted_proxy_only() {
        let said = [("idempotency-key", "k"), ("x-tenant", "ana")];
        let head = admit("10.1.2.3", "POST", &said).unwrap();
        assert_eq!((tenant(&head), &head.headers["x-tenant"]), (Some("ana"), &"ana".parse().unwrap()));
        assert_eq!(admit("11.1.2.3", "POST", &said).unwrap_err(), "tenant-unknown");
        assert_eq!(admit("10.1.2.3", "POST", &[("idempotency-key", "k")]).unwrap_err(), "tenant-unknown");
        let twice = [("idempotency-key", "k"), ("x-tenant", "ana"), ("x-tenant", "bob")];
        assert_eq!(admit("10.1.2.3", "POST", &twice).unwrap_err(), "tenant-unknown");
        for strange in ["a/b", "ana,bob", "ana, bob"] {
            let said = [("idempotency-key", "k"), ("x-tenant", strange)];
            assert_eq!(admit("10.1.2.3", "POST", &said).unwrap_err(), "tenant-unknown", "{strange}");
        }
    }

    #[test]
    fn a_request_without_a_key_passes_without_its_untrusted_tenant_and_fence() {
        let head = admit("11.1.2.3", "POST", &[("x-tenant", "ana"), ("semel-fence", "9")]).unwrap();
        assert_eq!(tenant(&head), None);
        assert!(!head.headers.contains_key("x-tenant") && !head.headers.contains_key("semel-fence"));
    }

    #[test]
    fn the_host_of_the_target_counts_without_a_password() {
        let head = admit("11.1.2.3", "GET", &[]).unwrap();
        assert_eq!(
            (&head.headers["host"], &head.headers["x-forwarded-host"]),
            (&"example.com".parse().unwrap(), &"example.com".parse().unwrap())
        );
    }

    #[test]
    fn an_underscore_twin_of_a_header_is_removed_even_from_a_trusted_proxy() {
        let said = [("x-tenant", "ana"), ("x_tenant", "bob"), ("semel_fence", "9"), ("x_forwarded_for", "1.2.3.4")];
        let head = admit("10.1.2.3", "GET", &said).unwrap();
        assert_eq!(tenant(&head), Some("ana"));
        assert!(head.headers.keys().all(|name| !name.as_str().contains('_')), "{:?}", head.headers);
    }

    #[test]
    fn connect_and_a_second_host_are_refused() {
        assert_eq!(admit("10.0.0.1", "CONNECT", &[]).unwrap_err(), "method-not-allowed");
        assert_eq!(admit("10.0.0.1", "GET", &[("host", "a")]).unwrap_err(), "host-not-allowed");
    }
}
