//! `/api/v1/propostas`.

use axum::{
    extract::State,
    http::{StatusCode, request::Parts},
    response::Response,
};
use bytes::Bytes;
use semel::Result as StoreResult;
use semel_http::{Attempt, Principal, Problem, Reference, Transaction};
use semel_store::{Conn, Database};

use super::{
    answers::{Id, Page, created, done, missing, patiently, rebuilt, referred, shown},
    model::{Acao, Estado, Proposta},
    problems::{ESTADO_INVALIDO, VERSAO_DESATUALIZADA},
    tables::{self, Filter},
    valor::Valor,
};
use crate::http::{
    fields::{Fields, Wrong, integer},
    principal::Local,
    problem::{INVALID_FIELDS, of_store},
    query::{Query, number},
};

pub(super) const PATH: &str = "/api/v1/propostas";
pub(super) const CREATE: &str = "criar_proposta";

/// `POST /api/v1/propostas`
pub(super) async fn create(
    Transaction(tx): Transaction<Database>,
    principal: Principal,
    attempt: Option<Attempt>,
    mut fields: Fields,
) -> Result<Response, Problem> {
    let (cliente_id, valor) = (fields.must("cliente_id", integer), fields.must("valor", Valor::parse));
    fields.finish()?;
    let (cliente_id, cents) = (cliente_id.unwrap_or_default(), valor.map_or(0, Valor::cents));

    let mut held = tx.connection().await.map_err(of_store)?;
    let mut conn = held.get().map_err(of_store)?;
    let tenant = &principal.tenant;
    let key = attempt.as_ref().map(|attempt| attempt.key().as_str());
    let made = tables::insert_proposta(&mut conn, tenant, cliente_id, cents, key).await.map_err(of_store)?;
    let Some(proposta) = made else {
        let mut wrong = Wrong::default();
        wrong.note("cliente_id", "is the id of no cliente");
        return Err(wrong.problem(&INVALID_FIELDS));
    };
    tables::insert_mudanca(&mut conn, tenant, None, &proposta, usuario(&principal)).await.map_err(of_store)?;
    Ok(created(PATH, proposta.id, &proposta))
}

/// `POST /api/v1/propostas/{id}/submeter`, `/aceitar`, `/recusar`, `/cancelar`
pub(super) async fn act(
    acao: Acao,
    tx: Transaction<Database>,
    principal: Principal,
    attempt: Option<Attempt>,
    id: Id,
    mut fields: Fields,
) -> Result<Response, Problem> {
    let (Transaction(tx), Id(id)) = (tx, id);
    let versao = fields.must("versao", integer);
    fields.finish()?;

    let mut held = tx.connection().await.map_err(of_store)?;
    let mut conn = held.get().map_err(of_store)?;
    let tenant = &principal.tenant;
    let (before, now) = advance(&mut conn, tenant, id, acao, versao.unwrap_or_default()).await?;
    tables::insert_mudanca(&mut conn, tenant, Some(before), &now, usuario(&principal)).await.map_err(of_store)?;
    if let Some(attempt) = attempt {
        let key = attempt.key().as_str();
        tables::insert_operacao(&mut conn, tenant, key, acao.kind(), id, &now).await.map_err(of_store)?;
    }
    Ok(done(StatusCode::OK, id, &now))
}

/// Changes the state of a proposal; returns its former state, and the proposal as it is now.
async fn advance(
    conn: &mut Conn<'_>,
    tenant: &str,
    id: i64,
    acao: Acao,
    versao: i64,
) -> Result<(Estado, Proposta), Problem> {
    loop {
        let seen = tables::find_proposta(conn, tenant, id).await.map_err(of_store)?.ok_or_else(missing)?;
        if seen.versao != versao {
            let detail = format!("The proposta has versao {}, not {versao}: it has changed.", seen.versao);
            return Err(Problem::new(&VERSAO_DESATUALIZADA).detail(detail).with("versao", seen.versao));
        }
        let Some(to) = acao.from(seen.estado) else {
            let estado = seen.estado.name();
            let detail = format!("The proposta is {estado}, which does not allow this.");
            return Err(Problem::new(&ESTADO_INVALIDO).detail(detail).with("estado", estado));
        };
        // The update decides. If another request was faster, the next read sees a higher versao.
        if let Some(now) = tables::move_proposta(conn, tenant, &seen, to).await.map_err(of_store)? {
            return Ok((seen.estado, now));
        }
    }
}

/// `GET /api/v1/propostas/{id}`
pub(super) async fn show(
    State(database): State<Database>,
    principal: Principal,
    Id(id): Id,
) -> Result<Response, Problem> {
    let found = patiently(find(&database, &principal.tenant, id)).await?;
    Ok(shown(&found.ok_or_else(missing)?))
}

/// `GET /api/v1/propostas`
pub(super) async fn list(
    State(database): State<Database>,
    principal: Principal,
    mut query: Query,
) -> Result<Response, Problem> {
    let filter = Filter {
        cliente_id: query.take("cliente_id", |id| number(id).ok_or("must be a whole number")),
        estado: query.take("estado", |name| {
            Estado::parse(name).ok_or("must be one of rascunho, enviada, aceita, recusada, cancelada")
        }),
    };
    let place = query.place();
    query.finish()?;
    let read =
        patiently(database.read(async |conn| tables::list_propostas(conn, &principal.tenant, filter, place).await));
    Ok(shown(&Page::of(read.await?, place)))
}

/// `GET /api/v1/propostas/{id}/historico`
pub(super) async fn historico(
    State(database): State<Database>,
    principal: Principal,
    Id(id): Id,
    mut query: Query,
) -> Result<Response, Problem> {
    let place = query.place();
    query.finish()?;
    let read = patiently(database.read(async |conn| {
        let found = tables::find_proposta(conn, &principal.tenant, id).await?;
        let read = tables::list_historico(conn, &principal.tenant, id, place).await?;
        Ok(found.map(|_| read))
    }));
    Ok(shown(&Page::of(read.await?.ok_or_else(missing)?, place)))
}

/// The answer to a repeat.
pub(super) async fn rebuild(database: Database, reference: Reference, head: Parts) -> Response<Bytes> {
    let (Some(id), Some(principal)) = (referred(&reference), head.extensions.get::<Principal>()) else {
        return missing().into_http();
    };
    rebuilt(patiently(find(&database, &principal.tenant, id)).await)
}

async fn find(database: &Database, tenant: &str, id: i64) -> StoreResult<Option<Proposta>> {
    database.read(async |conn| tables::find_proposta(conn, tenant, id).await).await
}

/// The verified user; none on a server without API tokens.
fn usuario(principal: &Principal) -> Option<&str> {
    Some(principal.subject.as_str()).filter(|subject| *subject != Local::SUBJECT)
}
