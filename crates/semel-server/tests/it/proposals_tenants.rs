//! The proposals of two tenants are separate, and the history names the user.
//!
//! The program has no API tokens yet, so the application is built here with its own authentication.

use std::sync::Arc;

use axum::{
    Router,
    body::{Body, to_bytes},
    http::{Request, request::Parts},
};
use semel::{Ledger, Options};
use semel_server::{
    http::{
        App, BoxFuture,
        health::AlwaysReady,
        principal::{Authenticate, Principal, Role},
        problem::Problem,
    },
    services::proposals::Proposals,
    services::proposals::config,
};
use semel_store::{Database, Settings};
use serde_json::{Value, json};
use tower::ServiceExt as _;

use crate::place::{Place, on_both_databases};

on_both_databases! {
    tenants_are_isolated
    the_history_shows_the_user_of_each_change
}

/// Trusts the header `x-who: tenant/subject`.
pub(crate) struct Believes;

impl Authenticate for Believes {
    fn authenticate<'a>(&'a self, request: &'a Parts) -> BoxFuture<'a, Result<Principal, Problem>> {
        let (tenant, subject) = request.headers["x-who"].to_str().unwrap().split_once('/').unwrap();
        let principal = Principal { tenant: tenant.to_owned(), subject: subject.to_owned(), role: Role::Admin };
        Box::pin(async { Ok(principal) })
    }
}

/// The application on a place's database, and its callers.
struct Asks {
    app: Router,
}

impl Asks {
    async fn new(place: &Place) -> Self {
        let database = Database::open(&place.url, Settings::default()).await.unwrap();
        let ledger = Ledger::new(database, Options::default()).unwrap();
        let proposals = Proposals::open(&ledger, config::Proposals::default()).await.unwrap();
        let (readiness, authenticate) = (Arc::new(AlwaysReady), Arc::new(Believes));
        Self {
            app: App { readiness, authenticate, routes: proposals.routes(), signed: axum::Router::new() }.into_router(),
        }
    }

    async fn ask(&self, who: &str, method: &str, path: &str, body: Value) -> (u16, Value) {
        let request = Request::builder()
            .method(method)
            .uri(format!("/api/v1{path}"))
            .header("x-who", who)
            .header("idempotency-key", "one-key-for-all")
            .body(Body::from(body.to_string()))
            .unwrap();
        let response = self.app.clone().oneshot(request).await.unwrap();
        let status = response.status().as_u16();
        let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
        (status, serde_json::from_slice(&body).unwrap())
    }
}

fn run(work: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap().block_on(work);
}

fn tenants_are_isolated(place: &Place) {
    run(async {
        let asks = Asks::new(place).await;
        let cliente = json!({ "nome": "Ana", "email": "ana@example.com" });
        // The same key, the same email: each tenant has its own.
        let (status, one) = asks.ask("a/ana", "POST", "/clientes", cliente.clone()).await;
        let (other_status, other) = asks.ask("b/bia", "POST", "/clientes", cliente).await;
        assert_eq!((status, other_status), (201, 201));
        assert_ne!(one["id"], other["id"]);

        let path = format!("/clientes/{}", one["id"]);
        assert_eq!(asks.ask("b/bia", "GET", &path, json!({})).await.0, 404);
        assert_eq!(asks.ask("b/bia", "PATCH", &path, json!({ "nome": "B" })).await.0, 404);
        let foreign = json!({ "cliente_id": one["id"], "valor": 1 });
        assert_eq!(asks.ask("b/bia", "POST", "/propostas", foreign.clone()).await.0, 422);
        let (status, proposta) = asks.ask("a/ana", "POST", "/propostas", foreign).await;
        assert_eq!(status, 201);

        let path = format!("/propostas/{}", proposta["id"]);
        assert_eq!(asks.ask("b/bia", "GET", &path, json!({})).await.0, 404);
        assert_eq!(asks.ask("b/bia", "GET", &format!("{path}/historico"), json!({})).await.0, 404);
        assert_eq!(asks.ask("b/bia", "POST", &format!("{path}/submeter"), json!({ "versao": 1 })).await.0, 404);
        for (who, clientes, propostas) in [("a/ana", 1, 1), ("b/bia", 1, 0)] {
            let count = async |path| asks.ask(who, "GET", path, json!({})).await.1["itens"].as_array().unwrap().len();
            assert_eq!((count("/clientes").await, count("/propostas").await), (clientes, propostas), "{who}");
        }
    });
}

fn the_history_shows_the_user_of_each_change(place: &Place) {
    run(async {
        let asks = Asks::new(place).await;
        let (_, cliente) =
            asks.ask("t/ana", "POST", "/clientes", json!({ "nome": "C", "email": "c@example.com" })).await;
        let (_, proposta) =
            asks.ask("t/ana", "POST", "/propostas", json!({ "cliente_id": cliente["id"], "valor": 1 })).await;
        let path = format!("/propostas/{}", proposta["id"]);
        assert_eq!(asks.ask("t/bia", "POST", &format!("{path}/submeter"), json!({ "versao": 1 })).await.0, 200);
        // Another user's repeat is still a repeat: the key is the tenant's.
        assert_eq!(asks.ask("t/cea", "POST", &format!("{path}/submeter"), json!({ "versao": 1 })).await.0, 200);
        let (_, history) = asks.ask("t/ana", "GET", &format!("{path}/historico"), json!({})).await;
        let who: Vec<_> = history["itens"].as_array().unwrap().iter().map(|change| &change["usuario"]).collect();
        assert_eq!(who, ["ana", "bia"]);
    });
}
