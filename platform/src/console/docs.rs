//! `/docs` and the published specs: documents that do not change while the process lives.

use bytes::Bytes;
use poem::{Endpoint, Request, Response};
use serde_json::Value;

/// A document that is the same for everybody.
#[derive(Clone, Debug)]
pub struct Static {
    content_type: &'static str,
    body: Bytes,
}

impl Static {
    /// An HTML page.
    pub fn html(body: String) -> Self {
        Self {
            content_type: "text/html; charset=utf-8",
            body: body.into(),
        }
    }

    /// A JSON document.
    pub fn json(document: &Value) -> Self {
        Self {
            content_type: "application/json",
            body: format!("{document:#}\n").into(),
        }
    }

    /// An RSS feed.
    pub fn rss(body: String) -> Self {
        Self {
            content_type: "application/rss+xml; charset=utf-8",
            body: body.into(),
        }
    }
}

impl Endpoint for Static {
    type Output = Response;

    async fn call(&self, _: Request) -> poem::Result<Response> {
        Ok(Response::builder()
            .content_type(self.content_type)
            .body(self.body.clone()))
    }
}

/// Swagger UI over the document that we publish, rather than the one poem-openapi began with.
pub fn page(html: &str, bare: &str) -> String {
    html.replace(bare, "null")
        .replacen("spec: spec,", "url: '/openapi.json',", 1)
        .replacen("<html", "<!doctype html>\n<html lang=\"en\"", 1)
        .replacen(
            "<title>Swagger UI</title>",
            "<title>BOTIX API</title><meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
             <link rel=\"icon\" href=\"data:,\">",
            1,
        )
}
