//! The SQL of services: each file with statements lists them, and one test prepares every statement on both databases.

/// Lists the statements of a file: constants by name, and other texts each with a name. A part of a constant is named
/// after it: `FIRST.all`. A name that ends in `_POSTGRES` or `_SQLITE` is of a statement for that database alone.
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
    texts: Texts,
}

#[cfg(test)]
impl Statement {
    pub(crate) fn new(file: &str, name: &str, texts: impl Into<Texts>) -> Self {
        let file = file.split_once("src/").map_or(file, |(_, file)| file);
        Self { name: format!("src/{file}: {name}"), texts: texts.into() }
    }
}

/// A statement for PostgreSQL and for SQLite.
#[cfg(test)]
pub(crate) struct Texts([String; 2]);

#[cfg(test)]
impl From<&str> for Texts {
    fn from(text: &str) -> Self {
        Self([text.to_owned(), text.to_owned()])
    }
}

#[cfg(test)]
impl From<String> for Texts {
    fn from(text: String) -> Self {
        Self([text.clone(), text])
    }
}

#[cfg(test)]
impl From<semel_store::Projection> for Texts {
    fn from(projection: semel_store::Projection) -> Self {
        Self(projection.texts())
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, path::Path};

    use semel_testkit::{
        Kind, Lab,
        statements::{constants, prepare},
    };

    use super::{Statement, Texts};
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
        let text = |Texts([postgres, sqlite]): Texts| match kind {
            Kind::Postgres => postgres,
            Kind::Sqlite => sqlite,
        };
        prepare(&lab, &ours.map(|statement| (statement.name, text(statement.texts))).collect::<Vec<_>>()).await
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
        let constant = |Statement { name, .. }| match name.rsplit_once('.') {
            Some((constant, part)) if !part.starts_with("rs: ") => constant.to_owned(),
            _ => name,
        };
        let listed: BTreeSet<String> = all().into_iter().map(constant).collect();
        let missing: Vec<_> = constants(Path::new("src")).into_iter().filter(|name| !listed.contains(name)).collect();
        assert!(missing.is_empty(), "not in the statements of its file:\n{}", missing.join("\n"));
    }
}
