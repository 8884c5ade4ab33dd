//! The SQL of the service: one text for both databases, or the reason why not.

use semel::{Error, Result};
use semel_store::{Conn, broken, on};

use super::model::{Cliente, Estado, Mudanca, Proposta};
use crate::http::query::Place;
use crate::sql::statements;

/// A new client.
pub(super) struct NewCliente {
    pub(super) nome: String,
    pub(super) email: String,
    pub(super) documento: Option<String>,
}

/// The changed fields of a client; `Some(None)` removes a document.
#[derive(Default)]
pub(super) struct ClienteChange {
    pub(super) nome: Option<String>,
    pub(super) email: Option<String>,
    pub(super) documento: Option<Option<String>>,
}

/// How a change of a client ended.
pub(super) enum Changed {
    Done(Cliente),
    Missing,
    EmailInUse,
}

const INSERT_CLIENTE: &str = "
    INSERT INTO clientes (tenant, nome, email, email_minusculo, documento, idempotencia_key)
    VALUES ($1, $2, $3, $4, $5, $6)
    ON CONFLICT DO NOTHING
    RETURNING id, nome, email, documento, idempotencia_key, criado_em";

const FREE_CLIENTE_KEY: &str = "
    UPDATE clientes SET idempotencia_key = NULL WHERE tenant = $1 AND idempotencia_key = $2";

/// Inserts a client; none if another has the email.
pub(super) async fn insert_cliente(
    conn: &mut Conn<'_>,
    tenant: &str,
    new: &NewCliente,
    key: Option<&str>,
) -> Result<Option<Cliente>> {
    // Tried twice, because an old row may have the key: the ledger gave us the key, so it has expired or was purged.
    for _ in 0..2 {
        let made = on!(conn, c => sqlx::query_as(INSERT_CLIENTE)
            .bind(tenant)
            .bind(&new.nome)
            .bind(&new.email)
            .bind(new.email.to_lowercase())
            .bind(&new.documento)
            .bind(key)
            .fetch_optional(&mut **c)
            .await
            .map_err(broken)?);
        if made.is_some() || !free_key(conn, FREE_CLIENTE_KEY, tenant, key).await? {
            return Ok(made);
        }
    }
    Ok(None)
}

/// Removes the key from its old row, if there is one.
async fn free_key(conn: &mut Conn<'_>, sql: &'static str, tenant: &str, key: Option<&str>) -> Result<bool> {
    let Some(key) = key else { return Ok(false) };
    let freed = on!(conn, c => sqlx::query(sql).bind(tenant).bind(key).execute(&mut **c).await.map_err(broken)?
        .rows_affected());
    Ok(freed > 0)
}

const UPDATE_CLIENTE: &str = "
    UPDATE clientes SET nome = COALESCE($3, nome), email = COALESCE($4, email),
        email_minusculo = COALESCE($5, email_minusculo), documento = CASE WHEN $6 THEN $7 ELSE documento END
    WHERE tenant = $1 AND id = $2
    RETURNING id, nome, email, documento, idempotencia_key, criado_em";

/// Changes a client. After `EmailInUse` the transaction can only be rolled back.
pub(super) async fn update_cliente(
    conn: &mut Conn<'_>,
    tenant: &str,
    id: i64,
    change: &ClienteChange,
) -> Result<Changed> {
    let done = on!(conn, c => sqlx::query_as(UPDATE_CLIENTE)
        .bind(tenant)
        .bind(id)
        .bind(&change.nome)
        .bind(&change.email)
        .bind(change.email.as_ref().map(|email| email.to_lowercase()))
        .bind(change.documento.is_some())
        .bind(change.documento.clone().flatten())
        .fetch_optional(&mut **c)
        .await);
    match done {
        Ok(Some(cliente)) => Ok(Changed::Done(cliente)),
        Ok(None) => Ok(Changed::Missing),
        Err(sqlx::Error::Database(error)) if error.is_unique_violation() => Ok(Changed::EmailInUse),
        Err(error) => Err(broken(error)),
    }
}

const FIND_CLIENTE: &str = "
    SELECT id, nome, email, documento, idempotencia_key, criado_em FROM clientes WHERE tenant = $1 AND id = $2";

pub(super) async fn find_cliente(conn: &mut Conn<'_>, tenant: &str, id: i64) -> Result<Option<Cliente>> {
    on!(conn, c => sqlx::query_as(FIND_CLIENTE).bind(tenant).bind(id).fetch_optional(&mut **c).await.map_err(broken))
}

const LIST_CLIENTES: &str = "
    SELECT id, nome, email, documento, idempotencia_key, criado_em FROM clientes
    WHERE tenant = $1 AND id > $2 ORDER BY id LIMIT $3";

pub(super) async fn list_clientes(conn: &mut Conn<'_>, tenant: &str, place: Place) -> Result<Vec<Cliente>> {
    on!(conn, c => sqlx::query_as(LIST_CLIENTES)
        .bind(tenant)
        .bind(place.after)
        .bind(place.limit + 1)
        .fetch_all(&mut **c)
        .await
        .map_err(broken))
}

const INSERT_PROPOSTA: &str = "
    INSERT INTO propostas (tenant, cliente_id, valor_centavos, estado, versao, idempotencia_key)
    SELECT tenant, id, $3, $4, 1, $5 FROM clientes WHERE tenant = $1 AND id = $2
    ON CONFLICT DO NOTHING
    RETURNING id, cliente_id, valor_centavos, estado, versao, idempotencia_key, criado_em";

const FREE_PROPOSTA_KEY: &str = "
    UPDATE propostas SET idempotencia_key = NULL WHERE tenant = $1 AND idempotencia_key = $2";

/// Inserts a proposal; none if there is no such client.
pub(super) async fn insert_proposta(
    conn: &mut Conn<'_>,
    tenant: &str,
    cliente_id: i64,
    cents: i64,
    key: Option<&str>,
) -> Result<Option<Proposta>> {
    // Tried twice, as for a client.
    for _ in 0..2 {
        let made = on!(conn, c => sqlx::query_as(INSERT_PROPOSTA)
            .bind(tenant)
            .bind(cliente_id)
            .bind(cents)
            .bind(Estado::Rascunho.name())
            .bind(key)
            .fetch_optional(&mut **c)
            .await
            .map_err(broken)?);
        if made.is_some() || !free_key(conn, FREE_PROPOSTA_KEY, tenant, key).await? {
            return Ok(made);
        }
    }
    Ok(None)
}

const FIND_PROPOSTA: &str = "
    SELECT id, cliente_id, valor_centavos, estado, versao, idempotencia_key, criado_em FROM propostas
    WHERE tenant = $1 AND id = $2";

pub(super) async fn find_proposta(conn: &mut Conn<'_>, tenant: &str, id: i64) -> Result<Option<Proposta>> {
    on!(conn, c => sqlx::query_as(FIND_PROPOSTA).bind(tenant).bind(id).fetch_optional(&mut **c).await.map_err(broken))
}

/// The filter of a list.
#[derive(Clone, Copy, Default)]
pub(super) struct Filter {
    pub(super) cliente_id: Option<i64>,
    pub(super) estado: Option<Estado>,
}

/// A text for each set of filters: `$4 IS NULL OR …` would keep SQLite from using the index.
macro_rules! list_propostas {
    ($filters:literal) => {
        concat!(
            "SELECT id, cliente_id, valor_centavos, estado, versao, idempotencia_key, criado_em FROM propostas
             WHERE tenant = $1 AND id > $2",
            $filters,
            " ORDER BY id LIMIT $3"
        )
    };
}

const LIST_PROPOSTAS: &str = list_propostas!("");
const LIST_PROPOSTAS_OF_CLIENTE: &str = list_propostas!(" AND cliente_id = $4");
const LIST_PROPOSTAS_IN: &str = list_propostas!(" AND estado = $4");
const LIST_PROPOSTAS_OF_CLIENTE_IN: &str = list_propostas!(" AND cliente_id = $4 AND estado = $5");

pub(super) async fn list_propostas(
    conn: &mut Conn<'_>,
    tenant: &str,
    filter: Filter,
    place: Place,
) -> Result<Vec<Proposta>> {
    let sql = match (filter.cliente_id, filter.estado) {
        (None, None) => LIST_PROPOSTAS,
        (Some(_), None) => LIST_PROPOSTAS_OF_CLIENTE,
        (None, Some(_)) => LIST_PROPOSTAS_IN,
        (Some(_), Some(_)) => LIST_PROPOSTAS_OF_CLIENTE_IN,
    };
    on!(conn, c => {
        let mut query = sqlx::query_as(sql).bind(tenant).bind(place.after).bind(place.limit + 1);
        if let Some(cliente_id) = filter.cliente_id {
            query = query.bind(cliente_id);
        }
        if let Some(estado) = filter.estado {
            query = query.bind(estado.name());
        }
        query.fetch_all(&mut **c).await.map_err(broken)
    })
}

const MOVE_PROPOSTA: &str = "
    UPDATE propostas SET estado = $5, versao = versao + 1
    WHERE tenant = $1 AND id = $2 AND versao = $3 AND estado = $4
    RETURNING id, cliente_id, valor_centavos, estado, versao, idempotencia_key, criado_em";

/// Changes a proposal's state if it still has the version and state that was read; none if it has changed.
pub(super) async fn move_proposta(
    conn: &mut Conn<'_>,
    tenant: &str,
    seen: &Proposta,
    to: Estado,
) -> Result<Option<Proposta>> {
    on!(conn, c => sqlx::query_as(MOVE_PROPOSTA)
        .bind(tenant)
        .bind(seen.id)
        .bind(seen.versao)
        .bind(seen.estado.name())
        .bind(to.name())
        .fetch_optional(&mut **c)
        .await
        .map_err(broken))
}

const INSERT_MUDANCA: &str = "
    INSERT INTO historico (tenant, proposta_id, versao, de, para, usuario) VALUES ($1, $2, $3, $4, $5, $6)";

/// Records a change of a proposal and its user.
pub(super) async fn insert_mudanca(
    conn: &mut Conn<'_>,
    tenant: &str,
    from: Option<Estado>,
    now: &Proposta,
    usuario: Option<&str>,
) -> Result<()> {
    on!(conn, c => sqlx::query(INSERT_MUDANCA)
        .bind(tenant)
        .bind(now.id)
        .bind(now.versao)
        .bind(from.map(Estado::name))
        .bind(now.estado.name())
        .bind(usuario)
        .execute(&mut **c)
        .await
        .map(drop)
        .map_err(broken))
}

const LIST_HISTORICO: &str = "
    SELECT de, para, versao, usuario, quando FROM historico
    WHERE tenant = $1 AND proposta_id = $4 AND versao > $2 ORDER BY versao LIMIT $3";

pub(super) async fn list_historico(conn: &mut Conn<'_>, tenant: &str, id: i64, place: Place) -> Result<Vec<Mudanca>> {
    on!(conn, c => sqlx::query_as(LIST_HISTORICO)
        .bind(tenant)
        .bind(place.after)
        .bind(place.limit + 1)
        .bind(id)
        .fetch_all(&mut **c)
        .await
        .map_err(broken))
}

/// An existing row belongs to a key that has expired or was purged; otherwise the ledger would not have given it.
macro_rules! insert_operacao {
    ($json:literal) => {
        concat!(
            "INSERT INTO idempotencia_operacoes (tenant, idempotencia_key, tipo_operacao, entidade_id, resultado)
             VALUES ($1, $2, $3, $4, ",
            $json,
            ") ON CONFLICT (tenant, idempotencia_key, tipo_operacao)
             DO UPDATE SET entidade_id = excluded.entidade_id, resultado = excluded.resultado,
                           created_at = excluded.created_at"
        )
    };
}

/// Differs because PostgreSQL has a JSON type and needs a cast.
const INSERT_OPERACAO_POSTGRES: &str = insert_operacao!("$5::jsonb");
const INSERT_OPERACAO_SQLITE: &str = insert_operacao!("$5");

/// Stores the entity as a keyed change left it.
pub(super) async fn insert_operacao(
    conn: &mut Conn<'_>,
    tenant: &str,
    key: &str,
    tipo: &str,
    id: i64,
    entity: &impl serde::Serialize,
) -> Result<()> {
    let resultado = serde_json::to_string(entity).map_err(|error| Error::Invalid(error.to_string()))?;
    let sql = match conn {
        Conn::Postgres(_) => INSERT_OPERACAO_POSTGRES,
        Conn::Sqlite(_) => INSERT_OPERACAO_SQLITE,
    };
    on!(conn, c => sqlx::query(sql)
        .bind(tenant)
        .bind(key)
        .bind(tipo)
        .bind(id)
        .bind(resultado)
        .execute(&mut **c)
        .await
        .map(drop)
        .map_err(broken))
}

const DELETE_OPERACOES: &str = "
    DELETE FROM idempotencia_operacoes
    WHERE id IN (SELECT id FROM idempotencia_operacoes WHERE created_at < $1 ORDER BY created_at LIMIT $2)";

/// Deletes at most so many records of keyed changes before a time, of all tenants; returns how many.
pub(super) async fn delete_operacoes(conn: &mut Conn<'_>, before: i64, most: i64) -> Result<u64> {
    on!(conn, c => sqlx::query(DELETE_OPERACOES)
        .bind(before)
        .bind(most)
        .execute(&mut **c)
        .await
        .map(|done| done.rows_affected())
        .map_err(broken))
}

statements!(
    INSERT_CLIENTE,
    FREE_CLIENTE_KEY,
    UPDATE_CLIENTE,
    FIND_CLIENTE,
    LIST_CLIENTES,
    INSERT_PROPOSTA,
    FREE_PROPOSTA_KEY,
    FIND_PROPOSTA,
    LIST_PROPOSTAS,
    LIST_PROPOSTAS_OF_CLIENTE,
    LIST_PROPOSTAS_IN,
    LIST_PROPOSTAS_OF_CLIENTE_IN,
    MOVE_PROPOSTA,
    INSERT_MUDANCA,
    LIST_HISTORICO,
    INSERT_OPERACAO_POSTGRES,
    INSERT_OPERACAO_SQLITE,
    DELETE_OPERACOES
);
