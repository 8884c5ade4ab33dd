//! `/api/v1/clientes`.

use axum::{
    extract::State,
    http::{StatusCode, request::Parts},
    response::Response,
};
use bytes::Bytes;
use semel::Result as StoreResult;
use semel_http::{Attempt, Principal, Problem, Reference, Transaction};
use semel_store::Database;

use super::{
    answers::{Id, Page, created, done, missing, patiently, rebuilt, referred, shown},
    email,
    model::Cliente,
    problems::EMAIL_EM_USO,
    tables::{self, Changed, ClienteChange, NewCliente},
};
use crate::http::{
    fields::{Fields, is_blank, text},
    problem::of_store,
    query::Query,
};

pub(super) const PATH: &str = "/api/v1/clientes";
pub(super) const CREATE: &str = "criar_cliente";
pub(super) const CHANGE: &str = "alterar_cliente";

/// `POST /api/v1/clientes`
pub(super) async fn create(
    Transaction(tx): Transaction<Database>,
    principal: Principal,
    attempt: Option<Attempt>,
    mut fields: Fields,
) -> Result<Response, Problem> {
    let (nome, email) = (fields.must("nome", nome), fields.must("email", address));
    let documento = fields.may("documento", documento).flatten();
    fields.finish()?;
    let new = NewCliente { nome: nome.unwrap_or_default(), email: email.unwrap_or_default(), documento };

    let mut held = tx.connection().await.map_err(of_store)?;
    let mut conn = held.get().map_err(of_store)?;
    let key = attempt.as_ref().map(|attempt| attempt.key().as_str());
    let made = tables::insert_cliente(&mut conn, &principal.tenant, &new, key).await.map_err(of_store)?;
    let cliente = made.ok_or_else(|| Problem::new(&EMAIL_EM_USO))?;
    Ok(created(PATH, cliente.id, &cliente))
}

/// `PATCH /api/v1/clientes/{id}`
pub(super) async fn change(
    Transaction(tx): Transaction<Database>,
    principal: Principal,
    attempt: Option<Attempt>,
    Id(id): Id,
    mut fields: Fields,
) -> Result<Response, Problem> {
    let change = ClienteChange {
        nome: fields.may("nome", nome),
        email: fields.may("email", address),
        documento: fields.may("documento", documento),
    };
    fields.finish()?;

    let mut held = tx.connection().await.map_err(of_store)?;
    let mut conn = held.get().map_err(of_store)?;
    let tenant = &principal.tenant;
    let cliente = match tables::update_cliente(&mut conn, tenant, id, &change).await.map_err(of_store)? {
        Changed::Done(cliente) => cliente,
        Changed::Missing => return Err(missing()),
        Changed::EmailInUse => return Err(Problem::new(&EMAIL_EM_USO)),
    };
    if let Some(attempt) = attempt {
        let key = attempt.key().as_str();
        tables::insert_operacao(&mut conn, tenant, key, CHANGE, id, &cliente).await.map_err(of_store)?;
    }
    Ok(done(StatusCode::OK, id, &cliente))
}

/// `GET /api/v1/clientes/{id}`
pub(super) async fn show(
    State(database): State<Database>,
    principal: Principal,
    Id(id): Id,
) -> Result<Response, Problem> {
    let found = patiently(find(&database, &principal.tenant, id)).await?;
    Ok(shown(&found.ok_or_else(missing)?))
}

/// `GET /api/v1/clientes`
pub(super) async fn list(
    State(database): State<Database>,
    principal: Principal,
    mut query: Query,
) -> Result<Response, Problem> {
    let place = query.place();
    query.finish()?;
    let read = patiently(database.read(async |conn| tables::list_clientes(conn, &principal.tenant, place).await));
    Ok(shown(&Page::of(read.await?, place)))
}

/// The answer to a repeat.
pub(super) async fn rebuild(database: Database, reference: Reference, head: Parts) -> Response<Bytes> {
    let (Some(id), Some(principal)) = (referred(&reference), head.extensions.get::<Principal>()) else {
        return missing().into_http();
    };
    rebuilt(patiently(find(&database, &principal.tenant, id)).await)
}

async fn find(database: &Database, tenant: &str, id: i64) -> StoreResult<Option<Cliente>> {
    database.read(async |conn| tables::find_cliente(conn, tenant, id).await).await
}

fn nome(raw: &str) -> Result<String, String> {
    let nome = text(raw)?;
    match nome.chars().count() {
        _ if is_blank(&nome) => Err("must not be empty".to_owned()),
        ..=255 => Ok(nome),
        _ => Err("must have at most 255 characters".to_owned()),
    }
}

fn address(raw: &str) -> Result<String, String> {
    let address = text(raw)?;
    email::valid(&address)?;
    Ok(address)
}

fn documento(raw: &str) -> Result<Option<String>, String> {
    if raw == "null" {
        return Ok(None);
    }
    let documento = text(raw)?;
    if documento.chars().count() > 20 {
        return Err("must have at most 20 characters".to_owned());
    }
    Ok(Some(documento))
}
