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
    http::request::Parts,
    routing::{get, patch, post},
};
use bytes::Bytes;
use semel::{Ledger, OnLost, OnMismatch, Policy};
use semel_http::{BoxFuture, Idempotency, IdempotencyLayer, Reference, Route};
use semel_store::Database;

use crate::config;
use model::Acao;

/// The part of `/openapi.json` that is this service's.
pub const OPENAPI: &str = include_str!("openapi.json");

/// The parameter by which a client asks for 422 where another body comes under the same key.
const STRICT: &str = "estrito";

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
        let (postgres, sqlite) = (sqlx::migrate!("migrations/postgres"), sqlx::migrate!("migrations/sqlite"));
        ledger.store().migrate("semel_server_migrations", postgres, sqlite).await?;
        Ok(Self { ledger: ledger.clone(), config })
    }

    /// The routes.
    pub fn routes(&self) -> Router {
        let submit = post(|tx, who, key, id, fields| propostas::act(Acao::Submeter, tx, who, key, id, fields));
        let accept = post(|tx, who, key, id, fields| propostas::act(Acao::Aceitar, tx, who, key, id, fields));
        let refuse = post(|tx, who, key, id, fields| propostas::act(Acao::Recusar, tx, who, key, id, fields));
        let cancel = post(|tx, who, key, id, fields| propostas::act(Acao::Cancelar, tx, who, key, id, fields));
        let create_cliente = post(clientes::create).route_layer(self.once(clientes::CREATE, clientes::rebuild));
        let change_cliente = patch(clientes::change).route_layer(self.once(clientes::CHANGE, clientes::rebuild));
        let create_proposta = post(propostas::create).route_layer(self.once(propostas::CREATE, propostas::rebuild));
        let acting = |acao: Acao| self.once(acao.kind(), propostas::rebuild);
        Router::new()
            .route("/api/v1/clientes", create_cliente.get(clientes::list))
            .route("/api/v1/clientes/{id}", change_cliente.get(clientes::show))
            .route("/api/v1/propostas", create_proposta.get(propostas::list))
            .route("/api/v1/propostas/{id}", get(propostas::show))
            .route("/api/v1/propostas/{id}/submeter", submit.route_layer(acting(Acao::Submeter)))
            .route("/api/v1/propostas/{id}/aceitar", accept.route_layer(acting(Acao::Aceitar)))
            .route("/api/v1/propostas/{id}/recusar", refuse.route_layer(acting(Acao::Recusar)))
            .route("/api/v1/propostas/{id}/cancelar", cancel.route_layer(acting(Acao::Cancelar)))
            .route("/api/v1/propostas/{id}/historico", get(propostas::historico))
            .with_state(self.ledger.store().clone())
    }

    /// Deletes what old keyed changes left behind, every `pause`, if the configuration wants them deleted at all.
    pub fn clean_up_every(&self, pause: Duration) {
        if let Some(keep) = self.config.submissions() {
            tokio::spawn(clean_up::every(self.ledger.clone(), keep, pause));
        }
    }

    /// The layer of one kind of operation.
    fn once<F, Fut>(&self, kind: &'static str, rebuild: F) -> IdempotencyLayer<Database>
    where
        F: Fn(Database, Reference, Parts) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = axum::http::Response<Bytes>> + Send + 'static,
    {
        let creates = kind == clientes::CREATE || kind == propostas::CREATE;
        let retention = if creates { self.config.retention } else { self.config.submissions() };
        let on_mismatch = if self.config.estrito { OnMismatch::Reject } else { OnMismatch::Replay };
        let policy = Policy { retention, on_mismatch, on_lost: OnLost::Rerun, ..Policy::default() };
        let database = self.ledger.store().clone();
        let route = Route::atomic()
            .service("proposals")
            .kind(kind)
            .policy(policy)
            .verdict(semel_http::Verdict::only_success)
            .ignore_query([STRICT])
            .adapt(|head, policy| {
                if wants_strictness(head) {
                    policy.on_mismatch = OnMismatch::Reject;
                }
            })
            .rebuild(move |reference, head| -> BoxFuture<'static, _> {
                Box::pin(rebuild(database.clone(), reference, head))
            });
        Idempotency::new(self.ledger.clone()).layer(route)
    }
}

/// A client that names it wants it, unless it says no.
fn wants_strictness(head: &Parts) -> bool {
    let query = head.uri.query().unwrap_or_default();
    url::form_urlencoded::parse(query.as_bytes()).any(|(name, value)| name == STRICT && value != "false")
}
