//! The statements that both databases share, as text that one can read and run by hand.
//!
//! A batch is one JSON parameter. Only its conversion into rows differs, so a statement writes `{rows $1: id int, body
//! bytes}` and each database gets its own form of it: `json_to_recordset` on PostgreSQL, `jsonb_each` on SQLite. Bytes
//! are in hex. `{keys}` and `{ids}`, which every replay reads, are arrays on PostgreSQL, which are cheaper. Statements
//! that differ in more than this are in `postgres.rs` and `sqlite.rs`, each with the reason.
//!
//! - `operations`: claims, writes and the sweep
//! - `work`: due operations and the limits of the fleet
//! - `look`: listings, journals and counters

mod look;
mod operations;
mod work;

pub(crate) use self::{look::LookSql, operations::Sql, work::WorkSql};

/// The database that a text is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    Postgres,
    Sqlite,
}

macro_rules! statements {
    ($(#[doc = $about:literal])+ $struct:ident: $($(#[doc = $doc:literal])+ $name:ident = $text:expr;)+) => {
        $(#[doc = $about])+
        pub(crate) struct $struct { $($(#[doc = $doc])+ pub(crate) $name: &'static str,)+ }

        impl $struct {
            /// The texts for a database. They live as long as the process: sqlx requires static text, and there are a
            /// few dozen of them.
            pub(crate) fn new(dialect: $crate::sql::Dialect) -> Self {
                Self { $($name: Box::leak($crate::sql::render($text, dialect).into_boxed_str()),)+ }
            }

            /// All of them by name, for the test that prepares each on both databases.
            #[cfg(test)]
            pub(crate) fn all(&self) -> Vec<(&'static str, &'static str)> {
                vec![$((stringify!($name), self.$name),)+]
            }
        }
    };
}
pub(crate) use statements;

/// Replaces `{rows $1: id int, body bytes}` by the database's conversion of a JSON array, `{now $2}` by the time (a
/// parameter if a test has set it, and on SQLite), `{locked id FROM … WHERE …}` by a part of a cross join whose rows
/// are locked, and `{unlocked SELECT id …}` by "is one of these"; the last two skip rows that another transaction has
/// locked.
pub(crate) fn render(text: &str, dialect: Dialect) -> String {
    let (keys, ids) = match dialect {
        Dialect::Postgres => (
            "(SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[]) AS k(tenant, service, kind, key))",
            "(SELECT id FROM unnest($1::bigint[]) AS i(id))",
        ),
        Dialect::Sqlite => ("{rows $1: tenant text, service text, kind text, key text}", "{rows $1: id int}"),
    };
    let text = text.replace("{keys}", keys).replace("{ids}", ids);
    let text = each(&text, "{now ", |parameter| match dialect {
        Dialect::Postgres => {
            format!("coalesce({parameter}, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)")
        }
        Dialect::Sqlite => format!("max({parameter}, (SELECT clock FROM semel_meta WHERE only = 1))"),
    });
    let text = each(&text, "{rows ", |inside| {
        let (parameter, columns) = inside.split_once(':').unwrap_or((inside, ""));
        let columns: Vec<(&str, &str)> =
            columns.split(',').filter_map(|column| column.trim().split_once(' ')).collect();
        rows(parameter.trim(), &columns, dialect)
    });
    let text = each(&text, "{locked ", |select| match dialect {
        // A part with locks runs row by row, in the order of the part before it. A join would be planned, and a plan
        // for a small table scans the whole table after it has grown. The lock is that of an update of non-key columns:
        // rows with a KEY SHARE lock, whose repeats are being noted, are not skipped.
        Dialect::Postgres => format!("LATERAL (SELECT {select} FOR NO KEY UPDATE SKIP LOCKED) AS o"),
        // There is one writer, and CROSS JOIN keeps the order.
        Dialect::Sqlite => {
            let (_, from) = select.split_once(" FROM ").unwrap_or(("", select));
            from.replacen("WHERE", "ON", 1)
        }
    });
    // As an array, see `TAKE_DELTAS`.
    each(&text, "{unlocked ", |chosen| match dialect {
        Dialect::Postgres => format!("= ANY (ARRAY({chosen} FOR UPDATE SKIP LOCKED))"),
        Dialect::Sqlite => format!("IN ({chosen})"),
    })
}

/// Replaces the text between an opening and the next closing brace.
fn each(text: &str, opening: &str, replace: impl Fn(&str) -> String) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(opening) {
        let (inside, after) = after.split_once('}').unwrap_or((after, ""));
        out.push_str(before);
        out.push_str(&replace(inside));
        rest = after;
    }
    out.push_str(rest);
    out
}

fn rows(parameter: &str, columns: &[(&str, &str)], dialect: Dialect) -> String {
    let list = |each: &dyn Fn(&(&str, &str)) -> String| columns.iter().map(each).collect::<Vec<_>>().join(", ");
    match dialect {
        Dialect::Postgres => {
            let selected = list(&|(name, kind)| match *kind {
                "bytes" => format!("decode({name}, 'hex') AS {name}"),
                _ => (*name).to_owned(),
            });
            let declared = list(&|(name, kind)| match *kind {
                "int" => format!("{name} bigint"),
                "bool" => format!("{name} boolean"),
                _ => format!("{name} text"),
            });
            format!("(SELECT {selected} FROM json_to_recordset({parameter}::json) AS j({declared}))")
        }
        Dialect::Sqlite => {
            let selected = list(&|(name, kind)| match *kind {
                "bytes" => format!("unhex(value ->> '{name}') AS {name}"),
                _ => format!("value ->> '{name}' AS {name}"),
            });
            format!("(SELECT {selected} FROM jsonb_each({parameter}))")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_becomes_rows_on_both_databases() {
        let text = "DELETE FROM t WHERE id IN (SELECT r.id FROM {rows $1: id int, body bytes} AS r)";
        assert_eq!(
            render(text, Dialect::Postgres),
            "DELETE FROM t WHERE id IN (SELECT r.id FROM (SELECT id, decode(body, 'hex') AS body \
             FROM json_to_recordset($1::json) AS j(id bigint, body text)) AS r)"
        );
        assert_eq!(
            render(text, Dialect::Sqlite),
            "DELETE FROM t WHERE id IN (SELECT r.id FROM (SELECT value ->> 'id' AS id, unhex(value ->> 'body') AS body \
             FROM jsonb_each($1)) AS r)"
        );
    }

    #[test]
    fn no_statement_is_left_half_rendered() {
        for dialect in [Dialect::Postgres, Dialect::Sqlite] {
            let (operations, work, look) = (Sql::new(dialect), WorkSql::new(dialect), LookSql::new(dialect));
            for (name, text) in [operations.all(), work.all(), look.all()].concat() {
                assert!(!text.contains("{rows") && !text.contains('}'), "{name}: {text}");
            }
        }
    }
}
