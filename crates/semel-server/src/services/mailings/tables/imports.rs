//! The SQL of imports: new entries, rejected rows, duplicates.

use semel::{Error, Result};
use semel_store::{Conn, broken, codec, from_row, on};
use serde_json::json;
use sqlx::{Error as SqlError, PgConnection};

use crate::sql::statements;

/// A row of a list that may become an entry.
#[derive(Clone, Debug)]
pub(in super::super) struct NewEntry {
    pub(in super::super) line: i64,
    pub(in super::super) email: String,
    /// As it was written, if that differs.
    pub(in super::super) original: Option<String>,
    pub(in super::super) token: [u8; 16],
    /// JSON: the values of the row.
    pub(in super::super) cells: Vec<u8>,
    /// What is counted if it becomes an entry.
    pub(in super::super) has_plus_tag: bool,
    pub(in super::super) has_mixed_scripts: bool,
}

const COPY_POSTGRES: &str = "
    COPY mailing_entries (mailing, line, email, original, token, cells, created_at, updated_at)
    FROM STDIN (FORMAT binary)";

/// Whether rows could be copied.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Copied {
    /// All of them.
    All,
    /// None, because one of the addresses has an entry. The transaction has failed.
    Known,
}

/// Copies entries whose addresses are probably new. Only PostgreSQL has COPY.
pub(in super::super) async fn copy(
    conn: &mut PgConnection,
    mailing: i64,
    rows: &[NewEntry],
    now: i64,
) -> Result<Copied> {
    let mut copy = conn.copy_in_raw(COPY_POSTGRES).await.map_err(broken)?;
    let sent = copy.send(binary(mailing, rows, now)).await;
    let done = match sent {
        Ok(_) => copy.finish().await.map(drop),
        Err(error) => Err(error),
    };
    match done {
        Ok(()) => Ok(Copied::All),
        Err(SqlError::Database(error)) if error.is_unique_violation() => Ok(Copied::Known),
        Err(error) => Err(broken(error)),
    }
}

/// The rows in PostgreSQL's binary format: a header, per row the number of fields, per field its length and its bytes.
fn binary(mailing: i64, rows: &[NewEntry], now: i64) -> Vec<u8> {
    let mut out = Vec::with_capacity(rows.len() * 160 + 32);
    out.extend_from_slice(b"PGCOPY\n\xff\r\n\0\0\0\0\0\0\0\0\0");
    for row in rows {
        out.extend_from_slice(&8_i16.to_be_bytes());
        field(&mut out, Some(&mailing.to_be_bytes()));
        field(&mut out, Some(&row.line.to_be_bytes()));
        field(&mut out, Some(row.email.as_bytes()));
        field(&mut out, row.original.as_ref().map(String::as_bytes));
        field(&mut out, Some(&row.token));
        field(&mut out, Some(&codec::encode(&row.cells)));
        field(&mut out, Some(&now.to_be_bytes()));
        field(&mut out, Some(&now.to_be_bytes()));
    }
    out.extend_from_slice(&(-1_i16).to_be_bytes());
    out
}

fn field(out: &mut Vec<u8>, value: Option<&[u8]>) {
    let length = value.map_or(-1, |value| i32::try_from(value.len()).unwrap_or(i32::MAX));
    out.extend_from_slice(&length.to_be_bytes());
    out.extend_from_slice(value.unwrap_or_default());
}

// Differs because JSON texts become rows in another way, and bytes are decoded by other functions.
const INSERT_POSTGRES: &str = "
    INSERT INTO mailing_entries (mailing, line, email, original, token, cells, created_at, updated_at)
    SELECT $1, r.line, r.email, r.original, decode(r.token, 'hex'), decode(r.cells, 'hex'), $2, $2
    FROM json_to_recordset($3::json) AS r (line BIGINT, email TEXT, original TEXT, token TEXT, cells TEXT)
    ORDER BY r.line
    ON CONFLICT (mailing, email) DO NOTHING RETURNING line";
const INSERT_SQLITE: &str = "
    INSERT INTO mailing_entries (mailing, line, email, original, token, cells, created_at, updated_at)
    SELECT $1, value ->> 'line', value ->> 'email', value ->> 'original', unhex(value ->> 'token'),
           unhex(value ->> 'cells'), $2, $2
    FROM json_each($3) WHERE TRUE
    ORDER BY value ->> 'line'
    ON CONFLICT (mailing, email) DO NOTHING RETURNING line";

/// Inserts entries; returns the lines of those whose address had none.
pub(in super::super) async fn insert(
    conn: &mut Conn<'_>,
    mailing: i64,
    rows: &[&NewEntry],
    now: i64,
) -> Result<Vec<i64>> {
    let sql = match conn {
        Conn::Postgres(_) => INSERT_POSTGRES,
        Conn::Sqlite(_) => INSERT_SQLITE,
    };
    let row = |row: &&NewEntry| {
        json!({ "line": row.line, "email": row.email, "original": row.original, "token": hex::encode(row.token),
                "cells": hex::encode(codec::encode(&row.cells)) })
    };
    let rows = text(&rows.iter().map(row).collect::<Vec<_>>())?;
    on!(conn, c => sqlx::query_scalar(sql).bind(mailing).bind(now).bind(rows)
        .fetch_all(&mut **c).await.map_err(broken))
}

fn text(rows: &[serde_json::Value]) -> Result<String> {
    serde_json::to_string(rows).map_err(|error| Error::Invalid(error.to_string()))
}

// Differs because JSON texts become rows in another way.
const DUPLICATES_POSTGRES: &str = "
    INSERT INTO mailing_duplicates (mailing, line, first_line)
    SELECT $1, r.line, e.line FROM json_to_recordset($2::json) AS r (line BIGINT, email TEXT)
    JOIN mailing_entries AS e ON e.mailing = $1 AND e.email = r.email
    WHERE e.line <> r.line
      AND e.email = ANY (ARRAY (SELECT x.email FROM json_to_recordset($2::json) AS x (email TEXT)))";
const DUPLICATES_SQLITE: &str = "
    INSERT INTO mailing_duplicates (mailing, line, first_line)
    SELECT $1, r.value ->> 'line', e.line FROM json_each($2) AS r
    CROSS JOIN mailing_entries AS e ON e.mailing = $1 AND e.email = r.value ->> 'email'
    WHERE e.line <> r.value ->> 'line'";

/// Stores which of these rows are further ones of a known address; returns their number.
pub(in super::super) async fn duplicates(conn: &mut Conn<'_>, mailing: i64, rows: &[&NewEntry]) -> Result<i64> {
    let sql = match conn {
        Conn::Postgres(_) => DUPLICATES_POSTGRES,
        Conn::Sqlite(_) => DUPLICATES_SQLITE,
    };
    let rows = text(&rows.iter().map(|row| json!({ "line": row.line, "email": row.email })).collect::<Vec<_>>())?;
    let found = on!(conn, c => sqlx::query(sql).bind(mailing).bind(rows)
        .execute(&mut **c).await.map(|done| done.rows_affected()).map_err(broken)?);
    Ok(i64::try_from(found).unwrap_or(i64::MAX))
}

/// A refused row.
#[derive(Clone, Debug)]
pub(in super::super) struct Reject {
    pub(in super::super) line: i64,
    pub(in super::super) column: Option<String>,
    pub(in super::super) code: String,
    pub(in super::super) value: String,
}

// Differs because JSON texts become rows in another way, and bytes are decoded by other functions.
const REJECT_POSTGRES: &str = "
    INSERT INTO mailing_rejects (mailing, line, column_name, code, value)
    SELECT $1, r.line, r.column_name, r.code, decode(r.value, 'hex')
    FROM json_to_recordset($2::json) AS r (line BIGINT, column_name TEXT, code TEXT, value TEXT)
    ON CONFLICT (mailing, line) DO NOTHING";
const REJECT_SQLITE: &str = "
    INSERT INTO mailing_rejects (mailing, line, column_name, code, value)
    SELECT $1, value ->> 'line', value ->> 'column_name', value ->> 'code', unhex(value ->> 'value')
    FROM json_each($2) WHERE TRUE
    ON CONFLICT (mailing, line) DO NOTHING";

/// Stores refused rows.
pub(in super::super) async fn reject(conn: &mut Conn<'_>, mailing: i64, rows: &[Reject]) -> Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let sql = match conn {
        Conn::Postgres(_) => REJECT_POSTGRES,
        Conn::Sqlite(_) => REJECT_SQLITE,
    };
    let row = |row: &Reject| {
        json!({ "line": row.line, "column_name": row.column, "code": row.code,
                "value": hex::encode(codec::encode(row.value.as_bytes())) })
    };
    let rows = text(&rows.iter().map(row).collect::<Vec<_>>())?;
    on!(conn, c => sqlx::query(sql).bind(mailing).bind(rows).execute(&mut **c).await.map(drop).map_err(broken))
}

type RejectRow = (i64, Option<String>, String, Vec<u8>);

const REJECTS: &str = "
    SELECT line, column_name, code, value FROM mailing_rejects WHERE mailing = $1 AND line > $2 ORDER BY line LIMIT $3";

/// Refused rows after a line.
pub(in super::super) async fn rejects(conn: &mut Conn<'_>, mailing: i64, after: i64, most: i64) -> Result<Vec<Reject>> {
    let rows: Vec<RejectRow> = on!(conn, c => sqlx::query_as(REJECTS).bind(mailing).bind(after).bind(most)
        .fetch_all(&mut **c).await.map_err(broken)?);
    let read = |(line, column, code, value): RejectRow| {
        let value = codec::decode(value).map(|value| String::from_utf8_lossy(&value).into_owned());
        Reject { line, column, code, value: value.unwrap_or_else(|error| error.to_string()) }
    };
    Ok(rows.into_iter().map(read).collect())
}

/// A further row of a known address.
#[derive(Clone, Copy, Debug, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub(in super::super) struct Duplicate {
    pub(in super::super) line: i64,
    pub(in super::super) first_line: i64,
}

from_row!(Duplicate { line, first_line });

const DUPLICATE_LINES: &str = "
    SELECT line, first_line FROM mailing_duplicates WHERE mailing = $1 AND line > $2 ORDER BY line LIMIT $3";

/// Duplicates after a line.
pub(in super::super) async fn duplicate_lines(
    conn: &mut Conn<'_>,
    mailing: i64,
    after: i64,
    most: i64,
) -> Result<Vec<Duplicate>> {
    on!(conn, c => sqlx::query_as(DUPLICATE_LINES).bind(mailing).bind(after).bind(most)
        .fetch_all(&mut **c).await.map_err(broken))
}

statements!(
    INSERT_POSTGRES,
    INSERT_SQLITE,
    DUPLICATES_POSTGRES,
    DUPLICATES_SQLITE,
    REJECT_POSTGRES,
    REJECT_SQLITE,
    REJECTS,
    DUPLICATE_LINES,
);
