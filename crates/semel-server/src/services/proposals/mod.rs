//! Clients and proposals under Idempotency-Key.
//!
//! Every POST and PATCH is in atomic mode: its rows and its key commit together. The outcome is a reference to the
//! entity, not the answer, so that a repeat shows the entity as it is now.

mod answers;
mod clientes;
pub mod config;
mod email;
mod model;
pub mod problems;
mod propostas;
mod tables;
mod valor;
mod work;

use std::sync::Arc;

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

use crate::{
    http::query::Query,
    service::{Opened, Service, migrations},
    view::{Telling, about},
};
use model::Acao;

/// The service of their operations.
pub(crate) const SERVICE: &str = "proposals";

/// The service, for the list of all services.
pub static PROPOSALS: Service = Service {
    name: SERVICE,
    section: Some(|reader| Arc::new(config::Proposals::read(reader))),
    problems: &problems::ALL,
    openapi: &[include_str!("openapi.json")],
    telling: TELLING,
    migrations: migrations!("0001_proposals"),
    projections: &[],
    #[cfg(test)]
    statements: &[tables::statements],
    open: |parts| {
        Box::pin(async {
            let config: config::Proposals = parts.config.services.get();
            let routes = Proposals::open(parts.ledger, config).await?.routes();
            let kinds = config.submissions().map(|keep| work::clean_up(parts.ledger, keep)).into_iter().collect();
            let schedules = config.submissions().map(work::schedule).into_iter().collect::<semel::Result<_>>()?;
            Ok(Opened { routes, kinds, schedules, ..Opened::default() })
        })
    },
};

/// How requests are described: by method and path.
const TELLING: Telling = Telling {
    noun: ("request", "requests"),
    labels: about::REQUEST_LABELS,
    about: |operation| about::request(operation),
    ..Telling::PLAIN
};

/// The parameter with which a client asks for 422 if another body comes under the same key.
const STRICT: &str = "estrito";

/// Its values that turn it off.
const OFF: [&str; 3] = ["false", "0", "no"];

/// The longest body. Fields have at most 255 characters; on SQLite a body is parsed while its transaction holds the
/// only writer.
const BODY_LIMIT: usize = 64 << 10;

/// In the extensions of a request that asked for strictness.
#[derive(Clone, Copy)]
struct Strict;

/// The service, with its tables up to date.
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

    /// A keyed route of one kind.
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

/// Reads the query of a request that changes something, and removes it: the rest is compared with the first request of
/// a key. A misspelled parameter is refused first.
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
