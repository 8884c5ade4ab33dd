//! The flags of the commands that read the configuration.

use std::path::PathBuf;

/// The flags that locate the ledger, for servers.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct StoreFlags {
    /// Read settings from this TOML file [env: SEMEL_CONFIG]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// The data directory [env: SEMEL_DATA_DIR] [default: ./semel-data]
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<String>,

    /// The ledger: sqlite:PATH or postgres://… [env: SEMEL_DATABASE_URL] [default: semel.db in the data dir]
    #[arg(long, value_name = "URL")]
    pub database_url: Option<String>,
}

/// The flags of the server. All are optional texts here, so that a wrong one is reported together with all other
/// mistakes.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Flags {
    /// The location of the ledger.
    #[command(flatten)]
    pub store: StoreFlags,

    /// Serve HTTP on this address; port 0 selects a free one [env: SEMEL_LISTEN] [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDR")]
    pub listen: Option<String>,

    /// The message broker: embedded, or amqp://… [env: SEMEL_BROKER_URL] [default: embedded]
    #[arg(long, value_name = "URL")]
    pub broker_url: Option<String>,

    /// The roles of this node: api, relay, worker, sweeper [env: SEMEL_ROLES] [default: all]
    #[arg(long, value_name = "LIST")]
    pub roles: Option<String>,

    /// Where mails of mailings go: file:DIR, smtp://…, smtps://… or http(s)://…
    /// [env: SEMEL_MAIL_TRANSPORT] [default: files in mail/ in the data dir]
    #[arg(long, value_name = "URL")]
    pub mail_transport: Option<String>,

    /// Log each request [env: SEMEL_HTTP_LOG_REQUESTS] [default: false]
    #[arg(long)]
    pub log_requests: bool,

    /// The upstream; a flag of `semel gateway` only.
    #[arg(skip)]
    pub upstream: Option<String>,
}

impl Flags {
    /// The value of a field by flag.
    pub(super) fn get(&self, field: &str) -> Option<&str> {
        match field {
            "listen" => self.listen.as_deref(),
            "data_dir" => self.store.data_dir.as_deref(),
            "database_url" => self.store.database_url.as_deref(),
            "broker_url" => self.broker_url.as_deref(),
            "mail_transport" => self.mail_transport.as_deref(),
            "roles" => self.roles.as_deref(),
            "http.log_requests" => self.log_requests.then_some("true"),
            "gateway.upstream" => self.upstream.as_deref(),
            _ => None,
        }
    }
}

impl From<StoreFlags> for Flags {
    fn from(store: StoreFlags) -> Self {
        Self { store, ..Self::default() }
    }
}
