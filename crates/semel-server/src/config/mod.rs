//! The configuration: one typed struct, read from four layers.
//!
//! A flag beats the environment (`SEMEL_*`), which beats the TOML file, which beats the default. Every field has a
//! variable named after it: `sweep.every` is `SEMEL_SWEEP_EVERY`. Only the value in effect is checked. An unknown field
//! is refused in every layer, and all mistakes are reported at once.
//!
//! The section of a service lives in the service's folder and is read because the service is in the
//! [list](crate::services::ALL). Unknown fields, variables, origins and `semel config show` follow from that. The gateway
//! is a separate program and not in the list; its section lives in its folder, too.

mod endpoint;
mod environment;
mod expand;
mod file;
mod flags;
mod glob;
mod http;
mod listen;
mod networks;
mod reader;
mod report;
mod roles;
mod secret_url;
mod show;
mod size;
mod store;
mod value;

use std::{path::PathBuf, time::Duration};

pub use endpoint::Endpoint;
pub use environment::Environment;
pub use flags::{Flags, StoreFlags};
pub(crate) use glob::glob;
pub use http::Http;
pub use listen::Listen;
pub use networks::Networks;
pub(crate) use reader::Reader;
pub use report::{Mistake, Mistakes, Origin, Report};
pub use roles::{NodeRole, Roles};
pub use secret_url::SecretUrl;
pub use size::Size;
pub use store::{BrokerUrl, DatabaseUrl};
pub(crate) use value::{Tenant, Value, wrong_type};

use crate::{
    gateway::config::{self as gateway, Gateway},
    service::Sections,
    services,
};

/// The shortest interval of sweeps. A round costs a transaction even if there is nothing to do; more frequent rounds
/// would compete with callers.
const SHORTEST_SWEEP: Duration = Duration::from_millis(100);

/// The configuration of this process. Its debug output shows no password.
#[derive(Clone, Debug)]
pub struct Config {
    /// The address of the HTTP server.
    pub listen: Listen,
    /// The limits of connections.
    pub http: Http,
    /// The directory for the node's files.
    pub data_dir: PathBuf,
    /// The database of the ledger.
    pub database_url: DatabaseUrl,
    /// The message broker.
    pub broker_url: BrokerUrl,
    /// The roles of this node.
    pub roles: Roles,
    /// The sweep of the ledger.
    pub sweep: Sweep,
    /// The sections of the services.
    pub services: Sections,
    /// The reverse proxy.
    pub gateway: Gateway,
}

/// The section `[sweep]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sweep {
    /// The time between two rounds.
    pub every: Duration,
}

/// The default data directory of a server. Commands for people have another one, see [`crate::cli`].
pub const DATA_DIR: &str = "./semel-data";

/// Reads the configuration from all layers; `data_dir` is the default directory for files.
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
    let mut of_services = Sections::default();
    for service in services::ALL {
        if let Some(read) = service.section {
            of_services.insert(service.name, read(&mut reader));
        }
    }
    let gateway = gateway::read(&mut reader, &listen);

    if !listen.is_loopback() {
        reader.mistake(
            "listen",
            format!(
                "{listen} can be reached from other machines, but no API tokens are configured, so only loopback is \
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
        services: of_services,
        gateway,
    })
}
