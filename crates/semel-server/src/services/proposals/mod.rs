//! Clients and proposals under Idempotency-Key.
//!
//! Every POST and PATCH is in atomic mode: what it writes and the memory of its key commit together. What is
//! remembered is not the answer but the entity, so that a repeat shows it as it is now.

mod answers;
mod clean_up;
mod clientes;
mod email;
mod model;
mod propostas;
mod tables;
mod valor;

use std::time::Duration;

use axum::{
    Router,
    extract::Request,
    http::{Uri, header, request::Parts},
    middleware::{self, Next},
    response::Response,
    routing::{MethodRouter, get, patch, post},
};
use bytes::Bytes;
use semel::{Ledger, OnLost, OnMismatch, Policy};
use semel_http::{BoxFuture, Idempotency, Problem, Reference, Route};
use semel_store::Database;
use tokio::sync::watch;

use crate::{config, http::query::Query};
use model::Acao;

/// The service of their operations.
pub(crate) const SERVICE: &str = "proposals";

/// The part of `/openapi.json` that is this service's.
pub const OPENAPI: &str = include_str!("openapi.json");

/// The parameter by which a client asks for 422 where another body comes under the same key.
const STRICT: &str = "estrito";

/// What says that it does not.
const OFF: [&str; 3] = ["false", "0", "no"];

/// The longest body. Fields have at most 255 characters; and on SQLite a body is parsed while its transaction holds the
/// only writer.
const BODY_LIMIT: usize = 64 << 10;

/// A request that asked for strictness has it among its extensions.
#[derive(Clone, Copy)]
struct Strict;

/// The service, its tables brought up to date.
pub struct Proposals {
    ledger: Ledger<Database>,
    config: config::Proposals,
}

impl Proposals {
    /// Opens the service on a ledger.
    ///
    /// # Errors
    /// When the database cannot be reached.
    pub async fn open(ledger: &Ledger<Database>, config: config::Proposals) -> semel::Result<Self> {
        super::migrate(ledger.store()).await?;
        Ok(Self { ledger: ledger.clone(), config })
    }

    /// The routes.
    pub fn routes(&self) -> Router {
        let submit = post(|tx, who, key, id, fields| propostas::act(Acao::Submeter, tx, who, key, id, fields));
        let accept = post(|tx, who, key, id, fields| propostas::act(Acao::Aceitar, tx, who, key, id, fields));
        let refuse = post(|tx, who, key, id, fields| propostas::act(Acao::Recusar, tx, who, key, id, fields));
        let cancel = post(|tx, who, key, id, fields| propostas::act(Acao::Cancelar, tx, who, key, id, fields));
        let create_cliente = self.once(post(clientes::create), clientes::CREATE, clientes::rebuild);
        let change_cliente = self.once(patch(clientes::change), clientes::CHANGE, clientes::rebuild);
        let create_proposta = self.once(post(propostas::create), propostas::CREATE, propostas::rebuild);
        let acting = |acao: Acao, route| self.once(route, acao.kind(), propostas::rebuild);
        Router::new()
            .route("/api/v1/clientes", create_cliente.get(clientes::list))
            .route("/api/v1/clientes/{id}", change_cliente.get(clientes::show))
            .route("/api/v1/propostas", create_proposta.get(propostas::list))
            .route("/api/v1/propostas/{id}", get(propostas::show))
            .route("/api/v1/propostas/{id}/submeter", acting(Acao::Submeter, submit))
            .route("/api/v1/propostas/{id}/aceitar", acting(Acao::Aceitar, accept))
            .route("/api/v1/propostas/{id}/recusar", acting(Acao::Recusar, refuse))
            .route("/api/v1/propostas/{id}/cancelar", acting(Acao::Cancelar, cancel))
            .route("/api/v1/propostas/{id}/historico", get(propostas::historico))
            .with_state(self.ledger.store().clone())
    }

    /// Deletes what old keyed changes left behind, every `pause` until `stop` turns true; nothing to do if the
    /// configuration does not want them deleted at all.
    pub fn clean_up_every(
        &self,
        pause: Duration,
        stop: watch::Receiver<bool>,
    ) -> Option<impl Future<Output = ()> + Send + use<>> {
        let keep = self.config.submissions()?;
        Some(clean_up::every(self.ledger.clone(), keep, pause, stop))
    }

    /// One kind of operation, under its keys.
    fn once<F, Fut>(&self, route: MethodRouter<Database>, kind: &'static str, rebuild: F) -> MethodRouter<Database>
    where
        F: Fn(Database, Reference, Parts) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = axum::http::Response<Bytes>> + Send + 'static,
    {
        let creates_at = match kind {
            clientes::CREATE => Some(clientes::PATH),
            propostas::CREATE => Some(propostas::PATH),
            _ => None,
        };
        let retention = if creates_at.is_some() { self.config.retention } else { self.config.submissions() };
        let on_mismatch = if self.config.estrito { OnMismatch::Reject } else { OnMismatch::Replay };
        let policy = Policy { retention, on_mismatch, on_lost: OnLost::Rerun, ..Policy::default() };
        let database = self.ledger.store().clone();
        let keyed = Route::atomic()
            .service(SERVICE)
            .kind(kind)
            .policy(policy)
            .verdict(semel_http::Verdict::only_success)
            .request_limit(BODY_LIMIT)
            .adapt(|head, policy| {
                if head.extensions.get::<Strict>().is_some() {
                    policy.on_mismatch = OnMismatch::Reject;
                }
            })
            .rebuild(move |reference, head| -> BoxFuture<'static, _> {
                let location = creates_at.and_then(|path| answers::location(path, answers::referred(&reference)?));
                let rebuilt = rebuild(database.clone(), reference, head);
                Box::pin(async move {
                    let mut answer = rebuilt.await;
                    if let Some(location) = location.filter(|_| answer.status().is_success()) {
                        answer.headers_mut().insert(header::LOCATION, location);
                    }
                    answer
                })
            });
        let keyed = Idempotency::new(self.ledger.clone()).layer(keyed);
        route.route_layer(keyed).route_layer(middleware::from_fn(read_query))
    }
}

/// Reads the query of a request that does something, and takes it off: what is left is what is compared with the first
/// request of a key. A slip in the name of a parameter is refused before anything else.
async fn read_query(mut request: Request, next: Next) -> Result<Response, Problem> {
    let Some(text) = request.uri().query() else { return Ok(next.run(request).await) };
    let mut query = Query::parse(text);
    let strict = query.take(STRICT, |said| Ok(!OFF.iter().any(|off| said.eq_ignore_ascii_case(off))));
    query.finish()?;
    if strict == Some(true) {
        request.extensions_mut().insert(Strict);
    }
    if let Ok(uri) = Uri::try_from(request.uri().path()) {
        *request.uri_mut() = uri;
    }
    Ok(next.run(request).await)
}
