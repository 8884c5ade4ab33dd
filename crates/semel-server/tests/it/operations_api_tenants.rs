//! The operations of two tenants are separate.
//!
//! The program has no API tokens yet, so the application is built here with its own authentication.

use std::sync::Arc;

use axum::{
    Router,
    body::{Body, to_bytes},
    http::Request,
};
use semel::{Ledger, Options};
use semel_server::{
    config::{self, Environment, Flags},
    http::{App, health::AlwaysReady},
    jobs::Jobs,
    service::Parts,
    services::operations::OPERATIONS,
};
use semel_store::{Database, EmbeddedBroker, Settings};
use serde_json::{Value, json};
use tower::ServiceExt as _;

use crate::{
    operations_api::{pay, with},
    operations_api_tokens::TOKENS,
    place::{Place, on_both_databases},
    proposals_tenants::Believes,
};

on_both_databases! {
    another_tenant_sees_and_changes_no_operation
}

async fn ask(app: &Router, tenant: &str, method: &str, path: &str, body: Value) -> (u16, Value) {
    let request = Request::builder().method(method).uri(format!("/v1/operations{path}"));
    let request = request.header("x-who", format!("{tenant}/user")).header("content-type", "application/json");
    let body = if body.is_null() { Body::empty() } else { Body::from(body.to_string()) };
    let response = app.clone().oneshot(request.body(body).unwrap()).await.unwrap();
    let status = response.status().as_u16();
    let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
    (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
}

fn another_tenant_sees_and_changes_no_operation(place: &Place) {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap().block_on(async {
        let database = Database::open(&place.url, Settings::default()).await.unwrap();
        let ledger = Ledger::new(database.clone(), Options::default()).unwrap();
        let environment: Environment = [("SEMEL_DATABASE_URL", &place.url)].into_iter().collect();
        let report = config::read(&Flags::default(), &environment, place.dir.path());
        let jobs = Jobs::open(&ledger).await.unwrap();
        let broker = Arc::new(EmbeddedBroker::new(database));
        let parts = Parts { ledger: &ledger, broker, config: report.config().unwrap(), jobs: &jobs };
        let opened = (OPERATIONS.open)(&parts).await.unwrap();
        let (readiness, authenticate) = (Arc::new(AlwaysReady), Arc::new(Believes));
        let app = App { readiness, authenticate, routes: opened.routes, signed: opened.signed }.into_router();

        let mut claimed = Vec::new();
        for tenant in ["acme", "umbrella"] {
            let work = with(&pay(1), json!({ "claimToken": TOKENS[0] }));
            let (status, answer) = ask(&app, tenant, "POST", "", work).await;
            assert_eq!(status, 201, "one key and one token are two operations: {answer}");
            claimed.push(answer["operation"].clone());
        }
        assert_ne!(claimed[0]["id"], claimed[1]["id"]);
        let later = json!({ "operationName": "ship", "input": 1, "later": true });
        assert_eq!(ask(&app, "acme", "POST", "", later).await.0, 202);
        let next = json!({ "operationNames": ["ship", "pay"], "claimToken": TOKENS[1], "max": 9 });
        let (_, none) = ask(&app, "umbrella", "POST", "/next", next.clone()).await;
        assert_eq!(none, json!({ "operations": [] }));
        let (_, handed) = ask(&app, "acme", "POST", "/next", next.clone()).await;
        assert_eq!(handed["operations"].as_array().unwrap().len(), 1, "{handed}");
        assert_eq!(ask(&app, "umbrella", "POST", "/next", next).await.1, none);

        for op in [&claimed[0], &handed["operations"][0]["operation"]] {
            let (id, fence) = (&op["id"], json!({ "fence": op["fence"] }));
            let reason = json!({ "reason": "r" });
            for (method, path, body) in [
                ("GET", "", Value::Null),
                ("DELETE", "", reason.clone()),
                ("POST", "/renew", fence.clone()),
                ("POST", "/complete", fence.clone()),
                ("POST", "/fail", with(&fence, json!({ "errorMessage": "e" }))),
                ("POST", "/doubt", with(&fence, reason.clone())),
                ("POST", "/retry", reason.clone()),
                ("POST", "/cancel", reason.clone()),
                ("POST", "/resolve", with(&reason, json!({ "as": "completed" }))),
            ] {
                let (status, answer) = ask(&app, "umbrella", method, &format!("/{id}{path}"), body).await;
                assert_eq!((status, &answer["type"]), (404, &json!("/problems/not-found")), "{method} {path}");
            }
            // A released first run leaves no record, so this answer tells nothing.
            ask(&app, "umbrella", "POST", &format!("/{id}/release"), fence.clone()).await;
            assert_eq!(ask(&app, "acme", "GET", &format!("/{id}"), Value::Null).await.1["status"], "PENDING");
            assert_eq!(ask(&app, "acme", "POST", &format!("/{id}/renew"), fence).await.0, 200);
        }
        let key = claimed[0]["idempotencyKey"].as_str().unwrap();
        for query in ["", "?status=PENDING", &format!("?key={key}")] {
            let (_, page) = ask(&app, "umbrella", "GET", query, Value::Null).await;
            let items = page["items"].as_array().unwrap();
            assert_eq!((items.len(), &items[0]["id"]), (1, &claimed[1]["id"]), "{query}");
        }
    });
}
