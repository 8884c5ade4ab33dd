//! The OpenAPI document, against the running server.

use crate::{
    place::Place,
    proposals::{Api, call},
};

/// Every path that the server promises, with its methods.
const PATHS: [(&str, &[&str]); 14] = [
    ("/", &["get"]),
    ("/healthz", &["get"]),
    ("/readyz", &["get"]),
    ("/problems/{name}", &["get"]),
    ("/openapi.json", &["get"]),
    ("/api/v1/clientes", &["get", "post"]),
    ("/api/v1/clientes/{id}", &["get", "patch"]),
    ("/api/v1/propostas", &["get", "post"]),
    ("/api/v1/propostas/{id}", &["get"]),
    ("/api/v1/propostas/{id}/submeter", &["post"]),
    ("/api/v1/propostas/{id}/aceitar", &["post"]),
    ("/api/v1/propostas/{id}/recusar", &["post"]),
    ("/api/v1/propostas/{id}/cancelar", &["post"]),
    ("/api/v1/propostas/{id}/historico", &["get"]),
];

#[test]
fn the_openapi_document_of_proposals_and_server_is_the_truth() {
    let place = Place::sqlite();
    let api = Api::start(&place);
    api.proposta();
    let document = api.server.get("/openapi.json");
    assert_eq!((document.status, document.header("content-type")), (200, Some("application/json")));
    let document = document.json();
    assert_eq!(document["openapi"], "3.1.0");
    assert_eq!(document["info"]["version"], env!("CARGO_PKG_VERSION"));
    let paths = document["paths"].as_object().unwrap();
    for (path, methods) in PATHS {
        let documented: Vec<_> = paths[path].as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(documented, methods, "{path}");
    }
    assert_eq!(paths.len(), PATHS.len(), "nothing else is promised");

    for (path, methods) in paths {
        let real = path.replace("{id}", "1").replace("{name}", "in-flight");
        for (method, operation) in methods.as_object().unwrap() {
            let answer = match (method.as_str(), real.strip_prefix("/api/v1")) {
                ("get", _) => api.server.get(&real),
                (method, Some(path)) => call(api.server.address, &method.to_uppercase(), path, None, "{").unwrap(),
                (method, None) => panic!("{method} {path} cannot be tried"),
            };
            let status = answer.status.to_string();
            assert!(operation["responses"].get(&status).is_some(), "{method} {path} answers {status}");
            let refused = method != "get";
            for limit in ["408", "413"] {
                assert_eq!(operation["responses"].get(limit).is_some(), refused, "{method} {path}: {limit}");
            }
            assert_eq!(answer.status, if refused { 400 } else { 200 }, "{method} {path}: {}", answer.body);
        }
    }
    for schema in ["NovaProposta", "Proposta"] {
        let valor = &document["components"]["schemas"][schema]["properties"]["valor"];
        // 0.29 is no multiple of 0.01 to who reads both as floats.
        assert!(valor["multipleOf"].is_null() && valor["description"].as_str().unwrap().contains("two decimals"));
    }
    for name in ["email-em-uso", "versao-desatualizada", "estado-invalido", "invalid-fields", "invalid-json"] {
        assert_eq!(api.server.get(&format!("/problems/{name}")).status, 200, "{name}");
    }
}
