//! How mails leave: as files, by SMTP, or by the API of a mail service.

use std::{fmt, time::Duration};

use super::{
    dkim::Dkim,
    file::Directory,
    http::Service,
    message::Outgoing,
    smtp::Server,
    transport_url::{Target, TransportUrl},
    verdict::{Sent, Settle},
};
use crate::http::held::Held;

/// Settings that are not part of the URL.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// How many mails are sent at the same time: connections of SMTP, idle connections of HTTP.
    pub(crate) connections: usize,
    /// The time limit of each step; that of the URL comes first.
    pub(crate) timeout: Duration,
    /// Signs the mails of the file and SMTP transports. A mail service signs with its own key.
    pub(crate) dkim: Option<Dkim>,
}

impl Default for Options {
    fn default() -> Self {
        Self { connections: 16, timeout: Duration::from_secs(30), dkim: None }
    }
}

/// The reason of a mail that was not sent because its lease was lost.
pub(super) const MAY_NOT: &str = "the lease was lost before the mail was sent";

/// A way for mails to leave. One value serves all workers of a node.
pub(crate) struct Transport {
    by: By,
    name: String,
    dkim: Option<Dkim>,
}

enum By {
    File(Directory),
    Smtp(Server),
    Http(Box<Service>),
}

impl Transport {
    /// Makes the transport of a URL. Connects to nothing yet.
    ///
    /// # Errors
    /// When the directory does not exist, or the system has no certificates.
    pub(crate) fn of(url: &TransportUrl, options: Options) -> Result<Self, String> {
        let Options { connections, timeout, dkim } = options;
        let timeout = url.timeout.unwrap_or(timeout);
        let by = match url.target.clone() {
            Target::File(path) => By::File(Directory::new(path)?),
            Target::Smtp(server) => By::Smtp(Server::new(server, timeout, connections)?),
            Target::Http(service) => By::Http(Box::new(Service::new(service, timeout, connections)?)),
        };
        Ok(Self { by, name: url.to_string(), dkim })
    }

    /// `file`, `smtp` or `http`.
    pub(crate) fn kind(&self) -> &'static str {
        match self.by {
            By::File(_) => "file",
            By::Smtp(_) => "smtp",
            By::Http(_) => "http",
        }
    }

    /// Its name in a log, without secrets.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// How long the transport recognises a repeated key. Within this time after the first attempt, a repeat with the
    /// same key and content is harmless. `None`: it recognises none.
    pub(crate) fn window(&self) -> Option<Duration> {
        match &self.by {
            By::Http(service) => service.window(),
            By::File(_) | By::Smtp(_) => None,
        }
    }

    /// Sends a mail, once. Dropping the future leaves it unknown whether the mail was sent.
    pub(crate) async fn send(&self, mail: &Outgoing) -> Sent {
        self.send_while(mail, &Held::always()).await
    }

    /// The same, while its lease is held. Each transport checks that as late as possible, right before the message: a
    /// process may be suspended at any moment, also while it connects.
    pub(crate) async fn send_while(&self, mail: &Outgoing, held: &Held) -> Sent {
        let bytes = match &self.by {
            By::Http(_) => Ok(Vec::new()),
            By::File(_) | By::Smtp(_) => mail.bytes(self.dkim.as_ref()),
        };
        let bytes = match bytes {
            Ok(bytes) => bytes,
            Err(why) => return Sent::Refused { why },
        };
        match &self.by {
            By::Http(service) => service.send(mail, held).await,
            By::File(directory) => directory.send(mail, bytes, held).await,
            By::Smtp(server) => server.send(mail, bytes, held).await,
        }
    }

    /// Distinguishes this transport from others: what one of them was given, another knows nothing of. A directory has a
    /// name of its own, since nodes may have different ones at the same path. Keys belong to one account of one service.
    pub(crate) fn recognised_by(&self) -> &str {
        match &self.by {
            By::File(directory) => directory.id(),
            By::Smtp(_) => &self.name,
            By::Http(service) => service.account(),
        }
    }

    /// Whether a repeat has no further effect, so long after the **first** attempt began.
    pub(crate) fn may_repeat(&self, age: Duration) -> bool {
        match &self.by {
            By::File(_) => true,
            By::Smtp(_) => false,
            // The repeat itself takes time, and must arrive inside the window.
            By::Http(service) => service.window().is_some_and(|window| age.saturating_add(service.timeout()) < window),
        }
    }

    /// Decides about a mail whose attempt has no known end, so long after its **first** attempt began.
    pub(crate) async fn settle(&self, id: &str, age: Duration) -> Settle {
        match &self.by {
            By::File(directory) => directory.settle(id).await,
            By::Smtp(_) | By::Http(_) if self.may_repeat(age) => Settle::Resend,
            By::Smtp(_) | By::Http(_) => Settle::Unknown,
        }
    }
}

impl fmt::Debug for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Transport({})", self.name)
    }
}
