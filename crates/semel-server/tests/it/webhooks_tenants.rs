//! The laws of tenants: the events of two tenants are separate.

use std::sync::Arc;

use axum::{
    Router,
    body::{Body, to_bytes},
    http::Request,
};
use semel::{Ledger, Options};
use semel_server::{
    http::{App, health::AlwaysReady},
    services::webhooks::config::{self, Secrets, SourceKind},
    services::webhooks::{Handlers, Receiver},
};
use semel_store::{Database, Settings};
use serde_json::Value;
use tower::ServiceExt as _;

use crate::{
    hooks::event,
    place::{Place, on_both_databases},
    proposals_tenants::Believes,
    support::SOON,
};

on_both_databases! {
    another_tenant_sees_nothing
}

const EVENT: &str = "/webhooks/stripe/events/evt_1";

fn another_tenant_sees_nothing(place: &Place) {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap().block_on(async {
        let database = Database::open(&place.url, Settings::default()).await.unwrap();
        let ledger = Ledger::new(database, Options::default()).unwrap();
        let mut source = config::Source::new(SourceKind::Stripe, Secrets(vec![crate::hooks::SECRET.into()]));
        source.tenant = "acme".to_owned();
        let webhooks = config::Webhooks { sources: [("stripe".to_owned(), source)].into() };
        let receiver = Receiver::open(&ledger, webhooks, &Handlers::default()).await.unwrap();
        let (readiness, authenticate) = (Arc::new(AlwaysReady), Arc::new(Believes));
        let (routes, signed) = (receiver.routes_for_people(), receiver.routes());
        let app = App { readiness, authenticate, routes, signed }.into_router();

        let body = event("evt_1", 1_700_000_000, "a").to_string();
        let mut delivery = Request::post("/webhooks/stripe").body(Body::from(body.clone())).unwrap();
        for (name, value) in crate::hooks::signed(body.as_bytes()) {
            let name: axum::http::HeaderName = name.parse().unwrap();
            delivery.headers_mut().insert(name, value.parse().unwrap());
        }
        assert_eq!(app.clone().oneshot(delivery).await.unwrap().status(), 200, "the sender needs no credentials");

        for path in
            ["/functions/v1/stripe-events-monitor", "/webhooks/stripe/monitor", "/webhooks/stripe/events", EVENT]
        {
            assert_eq!(ask(&app, "acme", "GET", path, "").await.0, 200, "{path}");
            assert_eq!(ask(&app, "umbrella", "GET", path, "").await.0, 404, "{path}");
        }
        let (_, told) = ask(&app, "acme", "GET", "/webhooks/stripe/monitor", "").await;
        assert_eq!(told["totals"]["total"], 1);
        let retry = format!("{EVENT}/retry");
        assert_eq!(ask(&app, "umbrella", "POST", &retry, r#"{"reason":"x"}"#).await.0, 404);
        assert_eq!(ask(&app, "acme", "POST", &retry, r#"{"reason":"x"}"#).await.0, 409);
        ledger.stop(SOON).await;
    });
}

async fn ask(app: &Router, tenant: &str, method: &str, path: &str, body: &str) -> (u16, Value) {
    let who = format!("{tenant}/user");
    let body = Body::from(body.to_owned());
    let request = Request::builder().method(method).uri(path).header("x-who", who).body(body).unwrap();
    let response = app.clone().oneshot(request).await.unwrap();
    let status = response.status().as_u16();
    let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
    (status, serde_json::from_slice(&body).unwrap())
}
