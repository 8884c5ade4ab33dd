//! The mailings, entries and suppressed addresses of two tenants are separate.
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
    services::mailings::MAILINGS,
};
use semel_store::{Database, EmbeddedBroker, Settings};
use serde_json::{Value, json};
use tower::ServiceExt as _;

use crate::{
    mailings::{FORM, MESSAGE, form},
    place::{Place, on_both_databases},
    proposals_tenants::Believes,
};

on_both_databases! {
    another_tenant_sees_and_changes_nothing
}

async fn ask(app: &Router, tenant: &str, method: &str, path: &str, body: Vec<u8>) -> (u16, Value) {
    let kind = if path == "/mailings" { FORM[1].1 } else { "application/json" };
    let request = Request::builder().method(method).uri(path).header("x-who", format!("{tenant}/user"));
    let response = app.clone().oneshot(request.header("content-type", kind).body(Body::from(body)).unwrap()).await;
    let response = response.unwrap();
    let status = response.status().as_u16();
    let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
    (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
}

fn another_tenant_sees_and_changes_nothing(place: &Place) {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap().block_on(async {
        let database = Database::open(&place.url, Settings::default()).await.unwrap();
        let ledger = Ledger::new(database.clone(), Options::default()).unwrap();
        let environment: Environment = [("SEMEL_DATABASE_URL", &place.url)].into_iter().collect();
        let report = config::read(&Flags::default(), &environment, place.dir.path());
        let jobs = Jobs::open(&ledger).await.unwrap();
        let broker = Arc::new(EmbeddedBroker::new(database));
        let parts = Parts { ledger: &ledger, broker, config: report.config().unwrap(), jobs: &jobs };
        let opened = (MAILINGS.open)(&parts).await.unwrap();
        let (readiness, authenticate) = (Arc::new(AlwaysReady), Arc::new(Believes));
        let app = App { readiness, authenticate, routes: opened.routes, signed: opened.signed }.into_router();

        let file = form("a.csv", "email\nana@example.com\n", &MESSAGE);
        let mut ids = Vec::new();
        for tenant in ["acme", "umbrella"] {
            let (status, made) = ask(&app, tenant, "POST", "/mailings", file.clone()).await;
            assert_eq!((status, &made["created"]), (201, &json!(true)), "the same file is new to {tenant}");
            ids.push(made["mailingId"].as_str().unwrap().to_owned());
        }
        assert_eq!(ask(&app, "acme", "POST", "/mailings", file).await.1["mailingId"], json!(ids[0]));
        let (_, listed) = ask(&app, "acme", "GET", "/mailings", Vec::new()).await;
        let listed = listed["items"].as_array().unwrap();
        assert_eq!((listed.len(), &listed[0]["mailingId"]), (1, &json!(ids[0])));

        let own = format!("/mailings/{}", ids[0]);
        for (method, path, body) in [
            ("GET", "", ""),
            ("GET", "/entries", ""),
            ("GET", "/duplicates", ""),
            ("GET", "/rejects.csv", ""),
            ("GET", "/export.csv", ""),
            ("POST", "/pause", "{}"),
            ("POST", "/resume", "{}"),
            ("POST", "/retry", "{}"),
            ("POST", "/cancel", "{}"),
            ("POST", "/test", r#"{"email":"eve@example.com"}"#),
            ("POST", "/entries/2/resolve", r#"{"as":"sent"}"#),
            ("DELETE", "", ""),
        ] {
            let (status, said) = ask(&app, "umbrella", method, &format!("{own}{path}"), body.into()).await;
            assert_eq!(status, 404, "{method} {path}: {said}");
        }
        let (status, shown) = ask(&app, "acme", "GET", &own, Vec::new()).await;
        assert_eq!((status, &shown["status"]), (200, &json!("QUEUED")));

        let add = r#"{"emails":["ana@example.com"]}"#;
        assert_eq!(ask(&app, "acme", "POST", "/suppressions", add.into()).await.1["added"], 1);
        assert_eq!(ask(&app, "umbrella", "GET", "/suppressions", Vec::new()).await.1["items"], json!([]));
        assert_eq!(ask(&app, "umbrella", "DELETE", "/suppressions/ana@example.com", Vec::new()).await.0, 404);
        assert_eq!(ask(&app, "acme", "DELETE", "/suppressions/ana@example.com", Vec::new()).await.0, 200);
    });
}
