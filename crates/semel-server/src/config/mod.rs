//! The configuration: one typed struct, read from four layers.
//!
//! A flag beats the environment (`SEMEL_*`), which beats the TOML file, which beats the default. Every field has a
//! variable, named after it: `sweep.every` is `SEMEL_SWEEP_EVERY`. Only the value in effect is checked, but a field
//! that does not exist is refused wherever it stands, and all mistakes are reported at once.
//!
//! A service adds its section by adding a struct to [`Config`] and reading its fields in [`read`]; unknown fields,
//! variables, origins and `semel config show` follow from that.

mod channels;
mod environment;
mod expand;
mod file;
mod flags;
mod gateway;
mod http;
mod listen;
mod messages;
mod networks;
mod notifications;
mod proposals;
mod reader;
mod report;
mod roles;
mod secret_url;
mod show;
mod store;
mod value;
mod webhooks;

use std::{path::PathBuf, time::Duration};

pub use channels::{Channel, Channels, Endpoint, LONGEST_BACKOFF};
pub use environment::Environment;
pub use flags::{Flags, StoreFlags};
pub use gateway::{Cookies, Gateway, Size, Statuses, Upstream};
pub use http::Http;
pub use listen::Listen;
pub use messages::Messages;
pub use networks::Networks;
pub use notifications::{KINDS, Notifications, Routes};
pub use proposals::Proposals;
pub use report::{Mistake, Mistakes, Origin, Report};
pub use roles::{NodeRole, Roles};
pub use secret_url::SecretUrl;
pub use store::{BrokerUrl, DatabaseUrl};
pub(crate) use webhooks::is_function;
pub use webhooks::{
    Archive, Deed, Functions, Hmac, Pointer, Rule, Rules, Secrets, Source, SourceKind, TimeOfDay, Webhooks,
};

use reader::Reader;

/// How often a sweep may run at most. A round costs a transaction even when there is nothing to do; below this it
/// would compete with the callers it serves.
const SHORTEST_SWEEP: Duration = Duration::from_millis(100);

/// What this process was told to do. Printing it for debugging shows no password.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Where HTTP is served.
    pub listen: Listen,
    /// What connections may cost.
    pub http: Http,
    /// Where this node keeps its files.
    pub data_dir: PathBuf,
    /// Where the ledger is.
    pub database_url: DatabaseUrl,
    /// Where messages go.
    pub broker_url: BrokerUrl,
    /// Which parts of the work this node does.
    pub roles: Roles,
    /// The background round over the ledger.
    pub sweep: Sweep,
    /// How messages are carried and taken.
    pub messages: Messages,
    /// The proposals service.
    pub proposals: Proposals,
    /// The notifications service.
    pub notifications: Notifications,
    /// The webhooks service.
    pub webhooks: Webhooks,
    /// The reverse proxy.
    pub gateway: Gateway,
}

/// The section `[sweep]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sweep {
    /// The time between two rounds.
    pub every: Duration,
}

/// Where a server keeps its files unless told otherwise. A command for people has another place, see
/// [`crate::cli`].
pub const DATA_DIR: &str = "./semel-data";

/// Reads the configuration from all layers; `data_dir` is the place for files when none of them names one.
#[must_use]
pub fn read(flags: &Flags, environment: &Environment, data_dir: impl Into<PathBuf>) -> Report {
    let mut reader = Reader::new(flags, environment);

    let listen = reader.field("listen", Listen::default);
    let data_dir = reader.field("data_dir", || data_dir.into());
    let database_url = reader.field("database_url", || DatabaseUrl::Sqlite(data_dir.join("semel.db")));
    let broker_url = reader.field("broker_url", || BrokerUrl::Embedded);
    let roles = reader.field("roles", Roles::all);
    let http = Http::read(&mut reader);
    let sweep = Sweep { every: reader.field("sweep.every", || Duration::from_secs(15)) };
    let messages = Messages::read(&mut reader);
    let proposals = Proposals::read(&mut reader);
    let notifications = Notifications::read(&mut reader);
    let webhooks = Webhooks::read(&mut reader);
    let gateway = gateway::read(&mut reader, &listen);

    if !listen.is_loopback() {
        reader.mistake(
            "listen",
            format!(
                "{listen} can be reached from other machines, but no tokens are configured, so only loopback is \
                 served: use 127.0.0.1, [::1] or localhost"
            ),
        );
    }
    if sweep.every < SHORTEST_SWEEP {
        reader.mistake("sweep.every", format!("must be at least {}", humantime::format_duration(SHORTEST_SWEEP)));
    }

    reader.finish(Config {
        listen,
        http,
        data_dir,
        database_url,
        broker_url,
        roles,
        sweep,
        messages,
        proposals,
        notifications,
        webhooks,
        gateway,
    })
}
