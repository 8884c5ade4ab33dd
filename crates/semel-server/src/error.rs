//! What can break in the server itself. Answers to a request are not here but in [`crate::http::problem`].

use std::io;

use crate::config::{Listen, Mistakes};

/// A result whose error is the server's.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why the server could not do as told.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration is wrong; every mistake in it is listed.
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
        /// What the system said.
        source: io::Error,
    },

    /// A name that should mean this machine leads elsewhere.
    #[error(
        "cannot listen on {listen}: the name leads to {address}, and no tokens are configured, so only loopback is served"
    )]
    NotLoopback {
        /// The address that was asked for.
        listen: Listen,
        /// Where the name leads.
        address: std::net::IpAddr,
    },

    /// The system refused something that every server needs.
    #[error("cannot {what}")]
    System {
        /// What was refused, as a verb and its object.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
}
