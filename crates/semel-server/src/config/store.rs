//! The database of the ledger and the message broker.

use std::{fmt, path::PathBuf};

use super::{secret_url::SecretUrl, value::Value};

/// The database of the ledger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DatabaseUrl {
    /// A SQLite file.
    Sqlite(PathBuf),
    /// A PostgreSQL server.
    Postgres(SecretUrl),
}

impl Value for DatabaseUrl {
    const EXAMPLE: &'static str = "sqlite:./semel-data/semel.db";

    fn parse(text: &str) -> Result<Self, String> {
        if text.starts_with("postgres://") || text.starts_with("postgresql://") {
            return SecretUrl::parse(text).map(Self::Postgres);
        }
        let path = text.strip_prefix("sqlite:").ok_or("must begin with sqlite:, postgres:// or postgresql://")?;
        // Other tools write these two files as sqlite://semel.db and sqlite:///var/lib/semel.db.
        let path = path.strip_prefix("//").unwrap_or(path);
        match path {
            "" => Err("must name a file after sqlite:".to_owned()),
            // Every process, and every connection of a pool, would have its own ledger.
            ":memory:" => Err("must name a file: an in-memory database loses all operations".to_owned()),
            path if path.contains('?') => Err("takes no options after the path of a SQLite file".to_owned()),
            path => Ok(Self::Sqlite(path.into())),
        }
    }

    fn to_toml(&self) -> toml::Value {
        self.to_string().into()
    }
}

impl DatabaseUrl {
    /// The whole URL with its password: for the driver, never for a log.
    #[must_use]
    pub fn expose(&self) -> String {
        match self {
            Self::Sqlite(path) => format!("sqlite:{}", path.display()),
            Self::Postgres(url) => url.expose().to_owned(),
        }
    }

    /// Its place, for people: the file's path, or the URL with its password hidden.
    #[must_use]
    pub fn place(&self) -> String {
        match self {
            Self::Sqlite(path) => path.display().to_string(),
            Self::Postgres(url) => url.to_string(),
        }
    }
}

/// As written in the configuration, with the password hidden.
impl fmt::Display for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sqlite(path) => write!(f, "sqlite:{}", path.display()),
            Self::Postgres(url) => url.fmt(f),
        }
    }
}

/// The message broker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BrokerUrl {
    /// A queue in the ledger's own database.
    Embedded,
    /// A RabbitMQ server.
    Amqp(SecretUrl),
}

impl Value for BrokerUrl {
    const EXAMPLE: &'static str = "embedded";

    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "embedded" => Ok(Self::Embedded),
            url if url.starts_with("amqp://") || url.starts_with("amqps://") => SecretUrl::parse(url).map(Self::Amqp),
            _ => Err("must be the word embedded, or begin with amqp:// or amqps://".to_owned()),
        }
    }

    fn to_toml(&self) -> toml::Value {
        self.to_string().into()
    }
}

/// As written in the configuration, with the password hidden.
impl fmt::Display for BrokerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embedded => f.write_str("embedded"),
            Self::Amqp(url) => url.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sqlite_url_names_a_file() {
        for (text, path) in [
            ("sqlite:semel.db", "semel.db"),
            ("sqlite:/var/lib/semel.db", "/var/lib/semel.db"),
            ("sqlite://semel.db", "semel.db"),
            ("sqlite:///var/lib/semel.db", "/var/lib/semel.db"),
        ] {
            assert_eq!(DatabaseUrl::parse(text), Ok(DatabaseUrl::Sqlite(path.into())));
        }
        for text in ["sqlite:", "sqlite::memory:", "sqlite:a.db?mode=ro", "semel.db", "mysql://db/x", ""] {
            assert!(DatabaseUrl::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_broker_is_embedded_or_amqp() {
        assert_eq!(BrokerUrl::parse("embedded"), Ok(BrokerUrl::Embedded));
        assert!(matches!(BrokerUrl::parse("amqp://guest:guest@localhost"), Ok(BrokerUrl::Amqp(_))));
        assert!(BrokerUrl::parse("kafka://x").is_err());
    }
}
