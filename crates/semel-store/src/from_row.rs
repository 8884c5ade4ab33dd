//! Rows without sqlx's procedural macros: those would build tokio, rustls, SQLite and sqlx a second time, for the
//! compiler's own use, and double the time of a clean build.

/// Reads a struct from a row of either database: a column per field, or an expression of the row.
///
/// ```
/// struct Stored { id: i64, name: String, state: State }
/// # struct State(String);
///
/// semel_store::from_row!(Stored, row => { id, name, state: State(row.try_get("state")?) });
/// ```
#[macro_export]
macro_rules! from_row {
    ($type:ty, $row:ident => { $($field:ident $(: $read:expr)?),* $(,)? }) => {
        $crate::from_row!(@for sqlx::postgres::PgRow, $type, $row, { $($field $(: $read)?),* });
        $crate::from_row!(@for sqlx::sqlite::SqliteRow, $type, $row, { $($field $(: $read)?),* });
    };
    ($type:ty { $($field:ident),* $(,)? }) => {
        $crate::from_row!($type, row => { $($field),* });
    };
    (@for $from:ty, $type:ty, $row:ident, { $($field:ident $(: $read:expr)?),* }) => {
        impl sqlx::FromRow<'_, $from> for $type {
            fn from_row($row: &$from) -> Result<Self, sqlx::Error> {
                #[allow(unused_imports, reason = "an expression may need it, a plain column does not")]
                use sqlx::Row as _;
                Ok(Self { $($field: $crate::from_row!(@read $row, $field $(, $read)?)),* })
            }
        }
    };
    (@read $row:ident, $field:ident) => { sqlx::Row::try_get($row, stringify!($field))? };
    (@read $row:ident, $field:ident, $read:expr) => { $read };
}
