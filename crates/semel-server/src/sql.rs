//! The SQL of services: each file with statements lists them, and one test prepares every statement on both databases.

/// Lists the statements of a file: constants by name, and other texts each with a name. A name that ends in `_POSTGRES`
/// or `_SQLITE` is of a statement for that database alone.
macro_rules! statements {
    ($($name:ident),* $(,)? $(; $($label:literal = $text:expr),+ $(,)?)?) => {
        /// The statements of this file.
        #[cfg(test)]
        pub(crate) fn statements() -> Vec<$crate::sql::Statement> {
            vec![
                $($crate::sql::Statement::new(file!(), stringify!($name), $name),)*
                $($($crate::sql::Statement::new(file!(), $label, $text),)+)?
            ]
        }
    };
}
pub(crate) use statements;

/// A statement of a service.
#[cfg(test)]
pub(crate) struct Statement {
    /// The file and the name.
    name: String,
    text: String,
}

#[cfg(test)]
impl Statement {
    pub(crate) fn new(file: &str, name: &str, text: impl Into<String>) -> Self {
        let file = file.split_once("src/").map_or(file, |(_, file)| file);
        Self { name: format!("src/{file}: {name}"), text: text.into() }
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, path::Path};

    use semel_testkit::{
        Kind, Lab,
        statements::{constants, prepare},
    };

    use super::Statement;
    use crate::{gateway, services};

    /// The gateway is a separate program and not in the list of services.
    fn all() -> Vec<Statement> {
        let of_services = services::ALL.into_iter().flat_map(|service| service.statements);
        of_services.flat_map(|list| list()).chain(gateway::secret::statements()).collect()
    }

    /// Prepares all statements but those of the other database.
    async fn on(kind: Kind, others: &str) -> Vec<(String, usize)> {
        let lab = Lab::new(kind).await;
        services::migrate(&lab.open().await).await.unwrap();
        let ours = all().into_iter().filter(|statement| !statement.name.ends_with(others));
        prepare(&lab, &ours.map(|statement| (statement.name, statement.text)).collect::<Vec<_>>()).await
    }

    /// SQLite silently reads an unbound parameter as NULL, so both variants of a statement must have the same number of
    /// parameters.
    #[tokio::test]
    async fn every_statement_of_a_service_prepares_on_both_databases() {
        let (postgres, sqlite) = (on(Kind::Postgres, "_SQLITE").await, on(Kind::Sqlite, "_POSTGRES").await);
        let [shared, of_sqlite] = [(postgres, "_POSTGRES"), (sqlite, "_SQLITE")]
            .map(|(counted, own)| counted.into_iter().filter(|(name, _)| !name.ends_with(own)).collect::<Vec<_>>());
        assert!(shared.len() > 40);
        assert_eq!(shared, of_sqlite);
    }

    #[test]
    fn every_constant_with_sql_is_listed() {
        let listed: BTreeSet<String> = all().into_iter().map(|statement| statement.name).collect();
        let missing: Vec<_> = constants(Path::new("src")).into_iter().filter(|name| !listed.contains(name)).collect();
        assert!(missing.is_empty(), "not in the statements of its file:\n{}", missing.join("\n"));
    }
}
