//! Prepares every SQL statement on the real databases.

use std::{fmt::Display, fs, path::Path};

use sqlx::{
    AssertSqlSafe, ConnectOptions as _, Connection as _, Either, Executor as _, PgConnection, SqlSafeStr as _,
    Statement as _, sqlite::SqliteConnectOptions,
};

use crate::Lab;

/// Prepares statements, given by name and text, on the database of a lab; returns the number of parameters of each.
///
/// # Panics
/// If the database refuses some of them: it names each.
pub async fn prepare<N: Clone + Display, T: AsRef<str>>(lab: &Lab, statements: &[(N, T)]) -> Vec<(N, usize)> {
    let (mut counted, mut refused) = (Vec::new(), Vec::new());
    let mut note = |name: &N, text: &str, prepared: sqlx::Result<usize>| match prepared {
        Ok(parameters) => counted.push((name.clone(), parameters)),
        Err(error) => refused.push(format!("{name}: {error}\n{text}")),
    };
    match lab.url.strip_prefix("sqlite:") {
        Some(path) => {
            let mut conn = SqliteConnectOptions::new().filename(path).connect().await.expect("a connection");
            for (name, text) in statements {
                let text = text.as_ref();
                let prepared = conn.prepare(AssertSqlSafe(text).into_sql_str()).await;
                note(name, text, prepared.map(|prepared| of(prepared.parameters())));
            }
        }
        None => {
            let mut conn = PgConnection::connect(&lab.url).await.expect("a connection");
            for (name, text) in statements {
                let text = text.as_ref();
                let prepared = conn.prepare(AssertSqlSafe(text).into_sql_str()).await;
                note(name, text, prepared.map(|prepared| of(prepared.parameters())));
            }
        }
    }
    assert!(refused.is_empty(), "{}", refused.join("\n"));
    counted
}

fn of<T>(parameters: Option<Either<&[T], usize>>) -> usize {
    parameters.map_or(0, |parameters| parameters.either(<[T]>::len, |n| n))
}

/// The constants and statics with SQL in the sources below a folder, of any type, each as `file: NAME`. A constant has
/// SQL if one of its strings begins with the first word of a statement.
///
/// # Panics
/// If a file cannot be read.
#[must_use]
pub fn constants(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("a folder").flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).expect("a source");
                found.extend(in_source(&text).map(|name| format!("{}: {name}", path.display())));
            }
        }
    }
    found.sort_unstable();
    found
}

fn in_source(text: &str) -> impl Iterator<Item = &str> {
    ["const ", "static "].into_iter().flat_map(|word| text.split(word).skip(1)).filter_map(|after| {
        let (name, typed) = after.split_once(": ")?;
        let (of, value) = typed.split_once(" =")?;
        let (value, _) = value.split_once(";\n")?;
        let is_name = name.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_');
        (is_name && !of.contains('\n') && has_sql(value)).then_some(name)
    })
}

/// Whether a string of a constant begins like a statement. Every other part between quotes is a string.
fn has_sql(value: &str) -> bool {
    const FIRST: [&str; 5] = ["SELECT ", "INSERT INTO ", "UPDATE ", "DELETE FROM ", "WITH "];
    value.split('"').skip(1).step_by(2).any(|text| FIRST.iter().any(|word| text.trim_start().starts_with(word)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_with_sql_are_found_and_others_are_not() {
        let source = "
            const FIND: &str = \"SELECT id FROM t\";
            pub(crate) const LIST: &str =
                concat!(\"
                    SELECT \", columns!(), \" FROM t\");
            pub(super) const STATUS: Projection = Projection {
                service: \"shop\",
                update: \"
                    UPDATE t SET state = o.state\",
            };
            static BOTH: [&str; 2] = [\"SELECT 1\", \"SELECT 2\"];
            fn first<const N: usize>(all: &'static [i64; N]) {
                let text: &'static str = \"SELECT 3\";
            }
            const NAME: &str = \"a name\";
            const PART: &str = \" AND id = $2\";
            fn update() { \"UPDATE t\"; }
        ";
        assert_eq!(in_source(source).collect::<Vec<_>>(), ["FIND", "LIST", "STATUS", "BOTH"]);
    }
}
