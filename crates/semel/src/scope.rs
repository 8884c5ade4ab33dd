//! Scope and key.

use std::{fmt, sync::Arc};

use crate::Error;

/// Tenant + service + kind. Equal keys in two scopes are different operations.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Scope {
    tenant: Arc<str>,
    service: Arc<str>,
    kind: Arc<str>,
}

impl Scope {
    /// The tenant of requests without authentication.
    pub const DEFAULT_TENANT: &str = "default";

    /// A scope. Tenant and service are 1-64 bytes without `/` (so that a scope can be written as
    /// `tenant/service/kind`), kind is 1-200 bytes; none has control characters.
    ///
    /// # Errors
    /// [`Error::Invalid`], naming the part that is wrong.
    pub fn new(tenant: &str, service: &str, kind: &str) -> Result<Self, Error> {
        Ok(Self {
            tenant: part("tenant", tenant, 64, false)?,
            service: part("service", service, 64, false)?,
            kind: part("kind", kind, 200, true)?,
        })
    }

    /// Reads `tenant/service/kind`, or `service/kind` of the default tenant.
    ///
    /// # Errors
    /// [`Error::Invalid`] when a part is missing or not allowed.
    pub fn parse(text: &str) -> Result<Self, Error> {
        match text.splitn(3, '/').collect::<Vec<_>>()[..] {
            [tenant, service, kind] => Self::new(tenant, service, kind),
            [service, kind] => Self::new(Self::DEFAULT_TENANT, service, kind),
            _ => Err(Error::Invalid(format!("a scope is written service/kind or tenant/service/kind, not {text:?}"))),
        }
    }

    /// The tenant.
    #[must_use]
    pub fn tenant(&self) -> &str {
        &self.tenant
    }

    /// The service.
    #[must_use]
    pub fn service(&self) -> &str {
        &self.service
    }

    /// The kind of operation within the service.
    #[must_use]
    pub fn kind(&self) -> &str {
        &self.kind
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.tenant, self.service, self.kind)
    }
}

fn part(name: &str, text: &str, most: usize, slash: bool) -> Result<Arc<str>, Error> {
    let wrong = |why: &str| Err(Error::Invalid(format!("{name}: {why}")));
    match text {
        "" => wrong("is empty"),
        _ if text.len() > most => wrong(&format!("is longer than {most} bytes")),
        _ if text.chars().any(char::is_control) => wrong("has control characters"),
        _ if !slash && text.contains('/') => wrong("has a slash in it"),
        _ => Ok(text.into()),
    }
}

/// The caller's name for an operation: 1-255 bytes of UTF-8 without control characters.
///
/// `Debug` shows a short hash only: keys are the callers' data and stay out of logs.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(Arc<str>);

impl Key {
    /// The longest key, in bytes.
    pub const MAX_BYTES: usize = 255;

    /// A key.
    ///
    /// # Errors
    /// [`Error::Invalid`], with the reason.
    pub fn new(text: &str) -> Result<Self, Error> {
        part("key", text, Self::MAX_BYTES, true).map(Self)
    }

    /// The key as the caller wrote it.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({} bytes)", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_1_to_255_bytes_without_control_characters() {
        assert!(Key::new("").is_err());
        assert!(Key::new(&"k".repeat(255)).is_ok());
        assert!(Key::new(&"k".repeat(256)).is_err());
        assert!(Key::new(&"é".repeat(128)).is_err(), "bytes count, not characters");
        assert!(Key::new("a\nb").is_err());
        assert!(Key::new("a\0b").is_err());
        assert!(Key::new("chave única 🎉").is_ok());
    }

    #[test]
    fn debug_output_does_not_show_the_key() {
        let key = Key::new("card-4242").unwrap();
        assert!(!format!("{key:?}").contains("4242"));
    }

    #[test]
    fn a_printed_scope_is_parsed_back() {
        let scope = Scope::new("acme", "http", "POST /orders/{id}").unwrap();
        assert_eq!(Scope::parse(&scope.to_string()).unwrap(), scope);
        assert_eq!(Scope::parse("cli/once").unwrap().tenant(), "default");
        assert!(Scope::parse("once").is_err());
        assert!(Scope::parse("a//c").is_err());
    }

    #[test]
    fn text_moved_between_parts_makes_another_scope() {
        assert!(Scope::new("a/b", "c", "d").is_err());
        assert_ne!(Scope::new("a", "b", "c/d").unwrap().to_string(), Scope::new("a", "b", "c").unwrap().to_string());
    }
}
