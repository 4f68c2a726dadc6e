//! The published specification: complete, the same in the repository, and readable without any
//! outside host.

use crate::harness::Backend;
use crate::harness::api::{BASE, ERROR_CODES};
use crate::harness::command::program;
use crate::harness::server::TestServer;
use reqwest::Method;
use serde_json::{Map, Value};
use std::process::Stdio;

const METHODS: [&str; 5] = ["get", "post", "put", "patch", "delete"];

/// What is served now, by the path below `/public/v1`.
const OPERATIONS: [(&str, &[&str]); 30] = [
    ("/contacts", &["post", "get"]),
    ("/contacts/{id}", &["get", "patch", "delete"]),
    ("/contacts/count", &["get"]),
    ("/events", &["post", "get"]),
    ("/events/{id}", &["get"]),
    ("/event-types", &["get"]),
    ("/webhook-endpoints", &["post", "get"]),
    ("/webhook-endpoints/{id}", &["get", "patch", "delete"]),
    ("/webhook-endpoints/{id}/resume", &["post"]),
    ("/webhook-endpoints/{id}/rotate-secret", &["post"]),
    ("/webhook-endpoints/{id}/test", &["post"]),
    ("/webhook-deliveries", &["get"]),
    ("/webhook-deliveries/{id}", &["get"]),
    ("/webhook-deliveries/{id}/attempts", &["get"]),
    ("/webhook-deliveries/{id}/retry", &["post"]),
    ("/webhook-deliveries/{id}/redirect", &["post"]),
    ("/webhook-attempts", &["get"]),
    ("/webhook-dead-letters", &["get"]),
    ("/webhook-dead-letters/{id}", &["get"]),
    ("/webhook-dead-letters/{id}/redeliver", &["post"]),
    ("/webhook-dead-letters/redeliver", &["post"]),
    ("/webhook-redeliveries", &["get"]),
    ("/webhook-redeliveries/{id}", &["get"]),
    ("/plugins", &["post", "get"]),
    ("/plugins/{id}", &["get", "patch", "delete"]),
    ("/plugins/{id}/versions", &["post", "get"]),
    ("/plugins/{id}/activate", &["post"]),
    ("/inspector/bins", &["post", "get"]),
    ("/inspector/bins/{id}", &["get", "delete"]),
    ("/inspector/bins/{id}/requests", &["get"]),
];

fn printed(version: &str) -> Vec<u8> {
    let output = program()
        .args(["openapi", "--version", version])
        .current_dir(std::env::temp_dir())
        .output()
        .expect("the program starts");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    output.stdout
}

fn spec(version: &str) -> Value {
    serde_json::from_slice(&printed(version)).expect("JSON")
}

/// Follows `$ref` inside the document.
fn resolved<'a>(spec: &'a Value, value: &'a Value) -> &'a Value {
    match value["$ref"].as_str() {
        Some(target) => spec
            .pointer(&target[1..])
            .unwrap_or_else(|| panic!("{target} exists")),
        None => value,
    }
}

/// Every operation below the base, by its path without the base and its method.
fn operations(spec: &Value) -> Vec<(String, String, &Map<String, Value>)> {
    let mut found = Vec::new();
    for (path, item) in spec["paths"].as_object().expect("paths") {
        let path = path.strip_prefix(BASE).unwrap_or(path).to_owned();
        for method in METHODS {
            if let Some(operation) = item[method].as_object() {
                found.push((path.clone(), method.to_owned(), operation));
            }
        }
    }
    found
}

/// The path with every parameter called `{id}`.
fn anonymous(path: &str) -> String {
    path.split('/')
        .map(|part| if part.starts_with('{') { "{id}" } else { part })
        .collect::<Vec<_>>()
        .join("/")
}

fn parameter<'a>(
    spec: &'a Value,
    operation: &'a Map<String, Value>,
    name: &str,
) -> Option<&'a Value> {
    let parameters = operation.get("parameters")?.as_array()?;
    let mut all = parameters.iter().map(|parameter| resolved(spec, parameter));
    all.find(|parameter| {
        parameter["name"]
            .as_str()
            .is_some_and(|known| known.eq_ignore_ascii_case(name))
    })
}

#[test]
fn the_repository_holds_the_spec_that_the_program_prints() {
    for (version, file) in [("3.1", "openapi-3.1.json"), ("3.0", "openapi-3.0.json")] {
        let path = format!("{}/../openapi/{file}", env!("CARGO_MANIFEST_DIR"));
        let held = std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
        assert!(
            held == printed(version),
            "openapi/{file} has drifted: botix openapi --version {version} > openapi/{file}"
        );
    }
    // Nobody reads it to its end.
    let mut unread = program()
        .arg("openapi")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    drop(unread.stdout.take());
    let unread = unread.wait_with_output().expect("an end");
    assert!(
        unread.status.success() && unread.stderr.is_empty(),
        "{unread:?}"
    );
    let default = program()
        .arg("openapi")
        .output()
        .expect("the program starts");
    assert_eq!(default.stdout, printed("3.1"));
}

#[test]
fn each_spec_names_its_version() {
    assert_eq!(spec("3.1")["openapi"], "3.1.0");
    let older = spec("3.0");
    let version = older["openapi"].as_str().expect("a version");
    assert!(version.starts_with("3.0."), "{version}");
    assert!(older.get("webhooks").is_none(), "3.0 has no webhooks");
    for spec in [spec("3.1"), older] {
        assert!(spec["info"]["title"].is_string());
        assert!(spec["info"]["version"].is_string());
    }
}

#[test]
fn every_route_is_in_the_spec() {
    for version in ["3.1", "3.0"] {
        let spec = spec(version);
        let specified: Vec<_> = operations(&spec)
            .into_iter()
            .map(|(path, method, _)| (anonymous(&path), method))
            .collect();
        for (path, methods) in OPERATIONS {
            for method in methods {
                let known = specified.iter().any(|(p, m)| p == path && m == method);
                assert!(known, "{version}: {method} {path}");
            }
        }
        let mut ids: Vec<_> = operations(&spec)
            .into_iter()
            .map(|(path, method, operation)| {
                let id = operation.get("operationId").and_then(Value::as_str);
                id.unwrap_or_else(|| panic!("operationId of {method} {path}"))
                    .to_owned()
            })
            .collect();
        let all = ids.len();
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), all, "operation ids are unique");
    }
}

#[test]
fn every_mutation_names_its_idempotency_key() {
    for version in ["3.1", "3.0"] {
        let spec = spec(version);
        for (path, method, operation) in operations(&spec) {
            let key = parameter(&spec, operation, "Idempotency-Key");
            if method == "get" {
                assert!(key.is_none(), "{version}: {method} {path}");
                continue;
            }
            let key = key.unwrap_or_else(|| panic!("{version}: {method} {path}"));
            assert_eq!(key["in"], "header", "{method} {path}");
            assert_eq!(key["required"], true, "{method} {path}");
        }
    }
}

#[test]
fn every_list_names_its_cursor_parameters() {
    for version in ["3.1", "3.0"] {
        let spec = spec(version);
        for list in [
            "/contacts",
            "/events",
            "/webhook-endpoints",
            "/webhook-deliveries",
            "/webhook-deliveries/{id}/attempts",
            "/webhook-attempts",
            "/webhook-dead-letters",
            "/webhook-redeliveries",
            "/plugins",
            "/plugins/{id}/versions",
            "/inspector/bins",
            "/inspector/bins/{id}/requests",
        ] {
            let all = operations(&spec);
            let (_, _, operation) = all
                .iter()
                .find(|(path, method, _)| anonymous(path) == list && method == "get")
                .unwrap_or_else(|| panic!("{version}: {list}"));
            for name in ["cursor", "cursor_limit"] {
                let parameter = parameter(&spec, operation, name);
                let parameter = parameter.unwrap_or_else(|| panic!("{version}: {name} of {list}"));
                assert_eq!(parameter["in"], "query", "{list}");
                assert_ne!(parameter["required"], true, "{list}");
            }
            let answer = resolved(&spec, &operation["responses"]["200"]);
            let schema = resolved(
                &spec,
                &answer["content"]["application/json; charset=utf-8"]["schema"],
            );
            let schema = match schema {
                Value::Null => resolved(&spec, &answer["content"]["application/json"]["schema"]),
                schema => schema,
            };
            for member in ["data", "next_cursor", "has_more"] {
                assert!(
                    schema["properties"].get(member).is_some(),
                    "{version}: {member} of {list}: {schema}"
                );
            }
        }
    }
}

#[test]
fn every_operation_names_its_errors() {
    for version in ["3.1", "3.0"] {
        let spec = spec(version);
        for (path, method, operation) in operations(&spec) {
            let responses = operation["responses"].as_object().expect("responses");
            let mut expected = vec!["401"];
            if method != "get" {
                expected.extend(["400", "403", "409", "503"]);
            }
            if path.contains('{') {
                expected.push("404");
            }
            for status in expected {
                let response = responses
                    .get(status)
                    .unwrap_or_else(|| panic!("{version}: {status} of {method} {path}"));
                let response = resolved(&spec, response);
                let content = response["content"].as_object();
                let problem = content.is_some_and(|kinds| {
                    kinds
                        .keys()
                        .any(|kind| kind.starts_with("application/problem+json"))
                });
                assert!(
                    problem,
                    "{version}: {status} of {method} {path}: {response}"
                );
            }
        }
        // The codes of the one table are in the document too.
        let text = spec.to_string();
        for (code, _) in ERROR_CODES {
            assert!(text.contains(code), "{version}: {code}");
        }
    }
}

#[test]
fn every_call_is_authenticated_by_a_bearer_key() {
    for version in ["3.1", "3.0"] {
        let spec = spec(version);
        let schemes = spec["components"]["securitySchemes"]
            .as_object()
            .expect("schemes");
        let bearer = schemes
            .iter()
            .find(|(_, scheme)| scheme["type"] == "http" && scheme["scheme"] == "bearer");
        let (name, _) = bearer.expect("a bearer scheme");
        for (path, method, operation) in operations(&spec) {
            let security = operation.get("security").unwrap_or(&spec["security"]);
            let security = security
                .as_array()
                .unwrap_or_else(|| panic!("security of {method} {path}"));
            assert!(
                security.iter().any(|rule| rule.get(name).is_some()),
                "{method} {path}"
            );
        }
    }
}

#[test]
fn every_built_in_event_is_a_webhook_of_the_spec() {
    let spec = spec("3.1");
    let webhooks = spec["webhooks"].as_object().expect("webhooks");
    for event_type in [
        "contact.created",
        "contact.updated",
        "contact.deleted",
        "payment.succeeded",
        "payment.failed",
        "subscription.created",
        "subscription.cancelled",
        "webhook.test",
        "endpoint.failing",
        "endpoint.disabled",
    ] {
        let webhook = webhooks
            .get(event_type)
            .unwrap_or_else(|| panic!("{event_type}"));
        let operation = webhook["post"].as_object().expect("a POST");
        let body = resolved(&spec, &operation["requestBody"]);
        assert!(body["content"].is_object(), "{event_type}");
        for header in [
            "X-Botix-Event",
            "X-Botix-Signature",
            "X-Delivery-Attempt",
            "webhook-id",
        ] {
            let named = parameter(&spec, operation, header);
            assert!(
                named.is_some_and(|parameter| parameter["in"] == "header"),
                "{header} of {event_type}"
            );
        }
    }
}

#[test]
fn every_reference_leads_somewhere() {
    fn follow(spec: &Value, value: &Value) {
        match value {
            Value::Object(members) => {
                if let Some(Value::String(target)) = members.get("$ref") {
                    assert!(target.starts_with("#/"), "{target} is outside the document");
                    assert!(spec.pointer(&target[1..]).is_some(), "{target} exists");
                }
                members.values().for_each(|value| follow(spec, value));
            }
            Value::Array(items) => items.iter().for_each(|value| follow(spec, value)),
            _ => {}
        }
    }
    for version in ["3.1", "3.0"] {
        let spec = spec(version);
        follow(&spec, &spec);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_server_serves_the_spec_that_the_program_prints() {
    let server = TestServer::start(Backend::Sqlite, &[]).await;
    let api = server.project("shop").await.api.anonymous();
    for (path, version) in [("/openapi.json", "3.1"), ("/openapi-3.0.json", "3.0")] {
        let answer = api.outside(Method::GET, path).send().await.expect(200);
        assert!(
            answer
                .header("content-type")
                .expect("a type")
                .starts_with("application/json")
        );
        // The servers member tells where this one runs; all else is the same.
        let mut answered = answer.json();
        let mut printed = spec(version);
        for document in [&mut answered, &mut printed] {
            document
                .as_object_mut()
                .expect("an object")
                .remove("servers");
        }
        assert_eq!(answered, printed, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_documentation_loads_nothing_from_outside() {
    let server = TestServer::start(Backend::Sqlite, &[]).await;
    let api = server.project("shop").await.api.anonymous();
    let page = api.outside(Method::GET, "/docs").send().await.expect(200);
    assert!(
        page.header("content-type")
            .expect("a type")
            .starts_with("text/html")
    );
    let html = page.text();
    let mut loaded = Vec::new();
    for attribute in ["src=", "href=", "url(", "import("] {
        for (at, _) in html.match_indices(attribute) {
            let value = html[at + attribute.len()..].trim_start_matches(['"', '\'']);
            let end = value
                .find(['"', '\'', ')', '>', ' '])
                .unwrap_or(value.len());
            loaded.push(&value[..end]);
        }
    }
    for target in loaded {
        assert!(!target.starts_with("//"), "{target}");
        let outside = target.starts_with("http://") || target.starts_with("https://");
        assert!(!outside || target.starts_with(&server.url()), "{target}");
        if target.starts_with('/') {
            api.outside(Method::GET, target).send().await.expect(200);
        }
    }
    assert!(
        html.contains("/openapi"),
        "it shows the spec of this server"
    );
    assert!(html.to_lowercase().contains("swagger"), "it is Swagger UI");
}
