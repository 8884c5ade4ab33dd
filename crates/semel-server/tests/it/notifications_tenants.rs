//! The events, recipients and notifications of two tenants are separate.
//!
//! The program has no API tokens yet, so the application is built here with its own authentication.

use std::sync::Arc;

use axum::{
    Router,
    body::{Body, to_bytes},
    http::Request,
};
use semel::{
    Ledger, Options,
    messaging::{Broker as _, ConsumerOptions, Relay, RelayOptions},
};
use semel_server::{
    http::{App, health::AlwaysReady},
    services::notifications::Notifications,
    services::notifications::config,
};
use semel_store::{Database, EmbeddedBroker, Settings};
use serde_json::{Value, json};
use tokio::sync::watch;
use tower::ServiceExt as _;

use crate::{
    notifications::of_restaurant,
    place::{Place, on_both_databases},
    proposals_tenants::Believes,
    support::SOON,
};

on_both_databases! {
    tenants_are_isolated
}

async fn ask(app: &Router, who: &str, method: &str, path: &str, body: Value) -> (u16, Value) {
    let body = if body.is_null() { Body::empty() } else { Body::from(body.to_string()) };
    let who = format!("{who}/user");
    let request = Request::builder().method(method).uri(path).header("x-who", who).body(body).unwrap();
    let response = app.clone().oneshot(request).await.unwrap();
    let status = response.status().as_u16();
    let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
    (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
}

fn tenants_are_isolated(place: &Place) {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap().block_on(async {
        let database = Database::open(&place.url, Settings::default()).await.unwrap();
        let ledger = Ledger::new(database.clone(), Options::default()).unwrap();
        let broker = Arc::new(EmbeddedBroker::new(database.clone()));
        let notifications =
            Notifications::open(&ledger, broker.clone(), config::Notifications::default()).await.unwrap();
        broker.declare(notifications.queues()).await.unwrap();
        let (stop, stopping) = watch::channel(false);
        let mut tasks = tokio::task::JoinSet::new();
        tasks.spawn(Relay::new(database, broker, RelayOptions::default()).run(stopping.clone()));
        for listener in notifications.listeners(&ConsumerOptions::default()) {
            tasks.spawn(listener.run(stopping.clone()));
        }
        let (readiness, authenticate) = (Arc::new(AlwaysReady), Arc::new(Believes));
        let app =
            App { readiness, authenticate, routes: notifications.routes(), signed: axum::Router::new() }.into_router();

        for (tenant, channels) in [("acme", ["PUSH"]), ("umbrella", ["SMS"])] {
            let body = json!({ "groupId": 5, "channels": channels });
            assert_eq!(ask(&app, tenant, "PUT", "/recipients/restaurant/10", body).await.0, 200);
            let (status, answer) = ask(&app, tenant, "POST", "/events", of_restaurant("evt-001", 5)).await;
            assert_eq!((status, &answer["created"]), (202, &json!(true)), "{tenant}");
        }
        assert_eq!(ask(&app, "third", "GET", "/events/evt-001", Value::Null).await.0, 404);
        assert_eq!(ask(&app, "third", "GET", "/recipients/restaurant/10", Value::Null).await.0, 404);
        assert_eq!(ask(&app, "third", "DELETE", "/recipients/restaurant/10", Value::Null).await.0, 404);

        let heard = async |tenant: &str| {
            while ask(&app, tenant, "GET", "/events/evt-001", Value::Null).await.1["kinds"][0]["listenerDone"] != true {
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            }
            ask(&app, tenant, "GET", "/notifications", Value::Null).await.1["items"].as_array().unwrap().clone()
        };
        let acme = tokio::time::timeout(SOON, heard("acme")).await.unwrap();
        let umbrella = tokio::time::timeout(SOON, heard("umbrella")).await.unwrap();
        assert_eq!((acme.len(), &acme[0]["notificationType"]), (1, &json!("PUSH")));
        assert_eq!((umbrella.len(), &umbrella[0]["notificationType"]), (1, &json!("SMS")));

        let path = format!("/notifications/{}/read", acme[0]["id"]);
        assert_eq!(ask(&app, "umbrella", "POST", &path, Value::Null).await.0, 404);
        assert!(ask(&app, "acme", "GET", "/notifications", Value::Null).await.1["items"][0]["readAt"].is_null());
        assert_eq!(ask(&app, "acme", "POST", &path, Value::Null).await.0, 200);
        stop.send_replace(true);
        tokio::time::timeout(SOON, async { while tasks.join_next().await.is_some() {} }).await.unwrap();
    });
}
