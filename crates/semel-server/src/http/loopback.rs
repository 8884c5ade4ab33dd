//! Keeps foreign web pages out of a server that trusts this machine.
//!
//! Any page in a local browser can send requests to a loopback port. Its `Origin` shows this. If its own name resolves
//! to 127.0.0.1 (DNS rebinding), the browser treats it as same-origin, and the `Host` shows it.

use std::net::{Ipv4Addr, Ipv6Addr};

use axum::{
    extract::Request,
    http::{HeaderMap, HeaderName, Uri, header},
    middleware::Next,
    response::Response,
};

use super::problem::{CROSS_ORIGIN, HOST_NOT_ALLOWED, Problem};

/// Refuses a request to another host name or from another origin.
pub(super) async fn refuse_foreign(request: Request, next: Next) -> Result<Response, Problem> {
    check(request.uri(), request.headers())?;
    Ok(next.run(request).await)
}

/// Checks the host and the origin of a request.
pub(crate) fn check(uri: &Uri, headers: &HeaderMap) -> Result<(), Problem> {
    let refused = || {
        let problem = Problem::new(&HOST_NOT_ALLOWED);
        match headers.get_all(header::HOST).iter().count() {
            0 => {
                problem.detail("The Host header is missing. No API tokens are configured, so only loopback is served.")
            }
            1 => problem,
            _ => problem.detail("There is more than one Host header."),
        }
    };
    let host =
        only(headers, &header::HOST).and_then(Authority::parse).filter(Authority::is_loopback).ok_or_else(refused)?;
    // A request line may name a host of its own (`GET http://host/ HTTP/1.1`), and then that one counts.
    if let Some(authority) = uri.authority()
        && Authority::parse(authority.as_str()).as_ref() != Some(&host)
    {
        return Err(Problem::new(&HOST_NOT_ALLOWED));
    }
    if headers.contains_key(header::ORIGIN) {
        let origin =
            only(headers, &header::ORIGIN).and_then(|origin| Authority::parse(origin.strip_prefix("http://")?));
        if origin.as_ref() != Some(&host) {
            return Err(Problem::new(&CROSS_ORIGIN));
        }
    }
    Ok(())
}

/// The value of a header that occurs exactly once: readers differ about which of two counts.
fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (Some(value), None) => value.to_str().ok(),
        _ => None,
    }
}

/// A host and its port, 80 unless given.
#[derive(Debug, PartialEq, Eq)]
struct Authority {
    host: Host,
    port: u16,
}

#[derive(Debug, PartialEq, Eq)]
enum Host {
    V4(Ipv4Addr),
    V6(Ipv6Addr),
    Name(String),
}

impl Authority {
    fn parse(text: &str) -> Option<Self> {
        let (host, port) = match text.strip_prefix('[') {
            Some(bracketed) => {
                let (host, rest) = bracketed.split_once(']')?;
                (Host::V6(host.parse().ok()?), rest)
            }
            None => {
                let (host, port) = text.split_at(text.find(':').unwrap_or(text.len()));
                (host.parse().map_or_else(|_| Host::Name(host.to_ascii_lowercase()), Host::V4), port)
            }
        };
        let port = match port.strip_prefix(':') {
            None if port.is_empty() => 80,
            Some(digits) if digits.bytes().all(|b| b.is_ascii_digit()) => digits.parse().ok()?,
            _ => return None,
        };
        Some(Self { host, port })
    }

    fn is_loopback(&self) -> bool {
        match &self.host {
            Host::V4(address) => address.is_loopback(),
            Host::V6(address) => address.is_loopback(),
            Host::Name(name) => name == "localhost",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(uri: &str, headers: &[(HeaderName, &str)]) -> Option<&'static str> {
        refusal(uri, headers).map(|problem| problem.kind().name)
    }

    fn refusal(uri: &str, headers: &[(HeaderName, &str)]) -> Option<Problem> {
        let headers = headers.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).fold(
            HeaderMap::new(),
            |mut headers, (name, value)| {
                headers.append(name, value);
                headers
            },
        );
        check(&uri.parse().unwrap(), &headers).err()
    }

    #[test]
    fn only_loopback_hosts_are_answered() {
        for host in ["localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:8080", "127.255.0.9:1", "[::1]", "[::1]:8080"]
        {
            assert_eq!(answer("/", &[(header::HOST, host)]), None, "{host}");
        }
        for host in [
            "example.com",
            "example.com:8080",
            "localhost.example.com",
            "127.0.0.1.example.com",
            "127.0.0.1@example.com",
            "localhost:x",
            "localhost:",
            "localhost:80:80",
            "10.0.0.1",
            "0.0.0.0",
            "[::]",
            "[::1",
            "[::1]x",
            "",
            "127.1",
            "localhost.",
        ] {
            assert_eq!(answer("/", &[(header::HOST, host)]), Some("host-not-allowed"), "{host}");
        }
    }

    #[test]
    fn a_host_missing_or_given_twice_is_refused() {
        assert_eq!(answer("/", &[]), Some("host-not-allowed"));
        let twice = [(header::HOST, "localhost"), (header::HOST, "localhost")];
        assert_eq!(answer("/", &twice), Some("host-not-allowed"));
        assert_eq!(answer("http://evil.example/", &[(header::HOST, "localhost")]), Some("host-not-allowed"));
        assert_eq!(answer("http://localhost/", &[(header::HOST, "localhost")]), None);
        for (headers, told) in [
            (&[][..], "is missing"),
            (&twice, "more than one"),
            (&[(header::HOST, "evil.example")], "names another machine"),
        ] {
            let body = refusal("/", headers).unwrap().into_http().into_body();
            assert!(String::from_utf8_lossy(&body).contains(told), "{told}: {body:?}");
        }
    }

    #[test]
    fn only_the_servers_own_origin_may_call() {
        let from = |origin| answer("/", &[(header::HOST, "localhost:8080"), (header::ORIGIN, origin)]);
        assert_eq!(from("http://localhost:8080"), None);
        for origin in [
            "http://localhost:3000",
            "http://localhost",
            "http://127.0.0.1:8080",
            "https://localhost:8080",
            "http://evil.example",
            "null",
            "",
            "http://localhost:8080.evil.example",
            "http://localhost:8080/",
        ] {
            assert_eq!(from(origin), Some("cross-origin"), "{origin}");
        }
        assert_eq!(answer("/", &[(header::HOST, "localhost:80"), (header::ORIGIN, "http://localhost")]), None);
    }
}
