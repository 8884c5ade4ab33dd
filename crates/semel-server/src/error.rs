//! Errors of the server itself. Answers to requests are in [`crate::http::problem`].

use std::io;

use crate::config::{Listen, Mistakes};

/// A result with the server's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration has mistakes; the error lists all of them.
    #[error(transparent)]
    Config(#[from] Mistakes),

    /// Another process has the port.
    #[error("cannot listen on {listen}: the port is already in use; stop the other process or choose another --listen")]
    PortInUse {
        /// The address that was asked for.
        listen: Listen,
    },

    /// The address could not be bound.
    #[error("cannot listen on {listen}")]
    Bind {
        /// The address that was asked for.
        listen: Listen,
        /// The error of the system.
        source: io::Error,
    },

    /// A name that should resolve to this machine resolves to another one.
    #[error(
        "cannot listen on {listen}: the name resolves to {address}, and without API tokens only loopback addresses are served"
    )]
    NotLoopback {
        /// The address that was asked for.
        listen: Listen,
        /// The address that the name resolves to.
        address: std::net::IpAddr,
    },

    /// The system refused something that every server needs.
    #[error("cannot {what}")]
    System {
        /// The refused action, as a verb and its object.
        what: &'static str,
        /// The error of the system.
        source: io::Error,
    },
}
