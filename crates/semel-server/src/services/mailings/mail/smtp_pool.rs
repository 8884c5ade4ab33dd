//! Connections to a mail server.
//!
//! lettre has a pooled transport, but its errors do not say at which step a mail failed, and that decides whether the
//! mail may have been sent. So we hold its connections ourselves.

use std::{
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use lettre::transport::smtp::{
    authentication::{Credentials, Mechanism},
    client::{AsyncSmtpConnection, TlsParameters},
    extension::ClientId,
};
use parking_lot::Mutex;
use tokio::{
    net::TcpStream,
    sync::{Semaphore, SemaphorePermit},
};

use super::{
    smtp::Failed,
    smtp_stream::Bounded,
    transport_url::{Smtp, Tls},
};

/// How long a connection may be idle. Servers close idle ones after minutes, and limit how many a client has.
const IDLE: Duration = Duration::from_secs(30);

/// Connections to one server.
pub(super) struct Pool {
    target: Smtp,
    hello: ClientId,
    tls: Option<TlsParameters>,
    timeout: Duration,
    permits: Semaphore,
    idle: Mutex<Idle>,
}

#[derive(Default)]
struct Idle {
    /// The longest idle first. The most recently used one is taken first, so that the others can end.
    connections: Vec<(AsyncSmtpConnection, Instant)>,
    /// Whether a task closes them in time.
    is_pruned: bool,
}

impl Pool {
    /// A pool of at most so many connections. None is opened yet.
    pub(super) fn new(target: Smtp, timeout: Duration, connections: usize) -> Result<Self, String> {
        let tls = match target.tls {
            Tls::None => None,
            _ => Some(TlsParameters::new_rustls(target.host.clone()).map_err(|error| error.to_string())?),
        };
        let permits = Semaphore::new(connections.max(1));
        Ok(Self { target, hello: ClientId::default(), tls, timeout, permits, idle: Mutex::default() })
    }

    /// The password, which a server must not get into a log.
    pub(super) fn secret(&self) -> Option<&str> {
        self.target.login.as_ref().map(|(_, password)| password.as_str())
    }

    /// The time limit of each step.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Waits until one more connection may be used.
    pub(super) async fn permit(&self) -> Option<SemaphorePermit<'_>> {
        self.permits.acquire().await.ok()
    }

    /// An idle connection. The server may have closed it.
    pub(super) fn take(&self) -> Option<AsyncSmtpConnection> {
        let mut idle = self.idle.lock();
        let (connection, since) = idle.connections.pop()?;
        if since.elapsed() < IDLE {
            return Some(connection);
        }
        // The others are idle for longer.
        idle.connections.clear();
        None
    }

    /// Keeps a connection on which no mail is open.
    pub(super) fn give(self: &Arc<Self>, connection: AsyncSmtpConnection) {
        let mut idle = self.idle.lock();
        idle.connections.push((connection, Instant::now()));
        if !idle.is_pruned {
            idle.is_pruned = true;
            tokio::spawn(prune(Arc::downgrade(self), IDLE));
        }
    }

    /// Opens a connection: TCP, greeting, EHLO, TLS and authentication, within one time limit.
    pub(super) async fn connect(&self) -> Result<AsyncSmtpConnection, Failed> {
        match tokio::time::timeout(self.timeout, self.open()).await {
            Ok(opened) => opened,
            Err(_) => Err(Failed::Lost(format!("no connection within {}", humantime::format_duration(self.timeout)))),
        }
    }

    async fn open(&self) -> Result<AsyncSmtpConnection, Failed> {
        let wrapped = self.tls.clone().filter(|_| self.target.tls == Tls::Wrapped);
        let server = (self.target.host.as_str(), self.target.port);
        let mut connection = match wrapped {
            // The certificate says whose server this is.
            Some(tls) => {
                AsyncSmtpConnection::connect_tokio1(server, Some(self.timeout), &self.hello, Some(tls), None).await?
            }
            None => {
                let stream = TcpStream::connect(server).await.map_err(|error| Failed::Lost(error.to_string()))?;
                AsyncSmtpConnection::connect_with_transport(Box::new(Bounded::new(stream)), &self.hello).await?
            }
        };
        if let (Tls::Required | Tls::Opportunistic, Some(tls)) = (self.target.tls, &self.tls) {
            if connection.can_starttls() {
                connection.starttls(tls.clone(), &self.hello).await?;
            } else if self.target.tls == Tls::Required {
                return Err(Failed::Unusable("the server does not offer STARTTLS".to_owned()));
            }
        }
        if let Some((user, password)) = &self.target.login {
            let known = [Mechanism::Plain, Mechanism::Login];
            if connection.server_info().get_auth_mechanism(&known).is_none() {
                return Err(Failed::Unusable("the server offers neither AUTH PLAIN nor LOGIN".to_owned()));
            }
            connection.auth(&known, &Credentials::new(user.clone(), password.clone())).await?;
        }
        Ok(connection)
    }
}

/// Closes connections that are idle for too long. It ends when there are none, or when the pool is gone.
async fn prune(pool: Weak<Pool>, limit: Duration) {
    loop {
        tokio::time::sleep(limit).await;
        let Some(pool) = pool.upgrade() else { return };
        let mut idle = pool.idle.lock();
        idle.connections.retain(|(_, since)| since.elapsed() < limit);
        if idle.connections.is_empty() {
            idle.is_pruned = false;
            return;
        }
    }
}
