//! Small HTML pages without any outside host.

use maud::{DOCTYPE, Markup, html};
use poem::{FromRequest as _, Request, Response, handler, http::header, web::Accept};
use serde_json::json;

use crate::contract::Code;

const STYLE: &str = "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;\
color:#1b1f24;background:#fff}table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.4rem .6rem;\
border-bottom:1px solid #d8dee4;vertical-align:top}code{font:14px ui-monospace,monospace}.raw{overflow-wrap:anywhere}\
tr:target,section:target{background:#fff8c5}@media(prefers-color-scheme:dark){body{color:#e6edf3;background:#0d1117}\
td,th{border-color:#30363d}a{color:#79b8ff}tr:target,section:target{background:#3b2f00}}";

/// An HTML page with the style of all.
pub fn page(title: &str, content: &Markup) -> Response {
    Response::builder()
        .content_type("text/html; charset=utf-8")
        .body(document(title, content))
}

/// The text of an HTML page.
pub fn document(title: &str, content: &Markup) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                link rel="icon" href="data:,";
                link rel="alternate" type="application/rss+xml" title="BOTIX changelog" href="/changelog/rss";
                title { (title) " · BOTIX" }
                style { (maud::PreEscaped(STYLE)) }
            }
            body { (content) }
        }
    };
    page.into_string()
}

/// Whether a client would rather have JSON than a page.
pub async fn wants_json(request: &Request) -> bool {
    let accepted = Accept::from_request_without_body(request).await;
    let ranges = accepted.map_or_else(|_| Vec::new(), |Accept(ranges)| ranges);
    let first = ranges.iter().find_map(|range| match range.essence_str() {
        "application/json" | "application/problem+json" => Some(true),
        "text/html" | "text/*" | "*/*" => Some(false),
        _ => None,
    });
    first == Some(true)
}

/// What there is.
#[handler]
pub fn home() -> Response {
    page(
        "Home",
        &html! {
            h1 { "BOTIX" }
            p { "A messaging and CRM platform with safe retries, stable lists and no lost webhook." }
            ul {
                li { a href="/docs" { "API documentation" } }
                li { a href="/developers" { "How your webhooks stand" } }
                li { a href="/openapi.json" { "OpenAPI 3.1" } ", " a href="/openapi-3.0.json" { "OpenAPI 3.0" } }
                li { a href="/error-codes" { "Error codes" } }
                li { a href="/changelog" { "Changelog" } ", " a href="/changelog/rss" { "as a feed" } }
            }
        },
    )
}

/// The list of error codes: HTML, or JSON for those who accept it.
#[handler]
pub async fn error_codes(request: &Request) -> Response {
    let response = if wants_json(request).await {
        let codes: Vec<_> = Code::ALL
            .iter()
            .map(|code| {
                json!({"code": code.name(), "status": code.status(), "title": code.title(),
                    "description": code.about()})
            })
            .collect();
        Response::builder()
            .content_type("application/json")
            .body(json!({"data": codes}).to_string())
    } else {
        page(
            "Error codes",
            &html! {
                h1 { "Error codes" }
                p { "Errors are " code { "application/problem+json" } "; match on " code { "code" } "." }
                table {
                    thead { tr { th { "Code" } th { "Status" } th { "Meaning" } } }
                    tbody {
                        @for code in Code::ALL {
                            tr id=(code.name()) {
                                td { a href={ "#" (code.name()) } { code { (code.name()) } } }
                                td { (code.status()) }
                                td { strong { (code.title()) } br; (code.about()) }
                            }
                        }
                    }
                }
            },
        )
    };
    response.with_header(header::VARY, "accept")
}

trait WithHeader {
    fn with_header(self, name: header::HeaderName, value: &'static str) -> Self;
}

impl WithHeader for Response {
    fn with_header(mut self, name: header::HeaderName, value: &'static str) -> Self {
        self.headers_mut()
            .insert(name, header::HeaderValue::from_static(value));
        self
    }
}
