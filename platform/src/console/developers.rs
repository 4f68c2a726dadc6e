//! `/developers`: how a project's webhooks stand, for people who have an API key of it.
//!
//! The key is asked for each time and kept nowhere, neither in a cookie nor in an address: the page is the answer to
//! the form. It reads and changes nothing.

use maud::{Markup, html};
use poem::{
    Endpoint, Request, Response,
    http::{HeaderValue, Method, StatusCode, header},
};

use super::pages::document;
use crate::{
    contract::auth::{Caller, Keys},
    db::{self, Db},
    webhooks::standing::{EndpointStanding, MOST, Signal, Standing},
};

/// A form may have so many bytes.
const MAX_FORM: usize = 1_024;

/// The page.
#[derive(Clone, Debug)]
pub struct Developers {
    /// The database.
    pub db: Db,
    /// Whose keys they are.
    pub keys: Keys,
}

impl Endpoint for Developers {
    type Output = Response;

    async fn call(&self, mut request: Request) -> poem::Result<Response> {
        if *request.method() != Method::POST {
            return Ok(answer(StatusCode::OK, &form(None)));
        }
        let body = request.take_body().into_bytes_limit(MAX_FORM).await;
        let api_key = body.ok().and_then(|body| {
            let mut fields = url::form_urlencoded::parse(&body);
            let (_, key) = fields.find(|(name, _)| name == "api_key")?;
            Some(key.trim().to_owned())
        });
        let Some(api_key) = api_key else {
            return Ok(answer(
                StatusCode::BAD_REQUEST,
                &form(Some("The form was not complete.")),
            ));
        };
        Ok(match self.look(&api_key).await {
            Ok(Some((caller, standing))) => answer(StatusCode::OK, &overview(&caller, &standing)),
            Ok(None) => answer(
                StatusCode::UNAUTHORIZED,
                &form(Some("This key is unknown, was revoked, or may not read.")),
            ),
            Err(error) => {
                tracing::warn!(%error, "the console could not be read");
                answer(
                    StatusCode::SERVICE_UNAVAILABLE,
                    &form(Some("The store cannot be reached. Try again in a moment.")),
                )
            }
        })
    }
}

impl Developers {
    async fn look(&self, api_key: &str) -> sqlx::Result<Option<(Caller, Standing)>> {
        let looking = async {
            let Some(caller) = self.keys.find(api_key).await? else {
                return Ok(None);
            };
            if caller.require(&Method::GET, "/webhook-deliveries").is_err() {
                return Ok(None);
            }
            let standing = Standing::of(&self.db, caller.project).await?;
            Ok(Some((caller, standing)))
        };
        db::within(2 * db::PATIENCE, looking).await.flatten()
    }
}

/// A page that nobody keeps, and that loads and runs nothing.
fn answer(status: StatusCode, content: &Markup) -> Response {
    let mut response = Response::builder()
        .status(status)
        .content_type("text/html; charset=utf-8")
        .body(document("Developers", content));
    for (name, value) in [
        (header::CACHE_CONTROL, "no-store"),
        (
            header::CONTENT_SECURITY_POLICY,
            "default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'self'; \
             frame-ancestors 'none'; base-uri 'none'",
        ),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ] {
        response
            .headers_mut()
            .insert(name, HeaderValue::from_static(value));
    }
    response
}

fn form(what_is_wrong: Option<&str>) -> Markup {
    html! {
        h1 { "Developers" }
        p { "How the webhooks of your project stand. The key is used for this one look, and kept nowhere." }
        @if let Some(wrong) = what_is_wrong { p role="alert" { strong { (wrong) } } }
        form method="post" action="/developers" {
            label { "API key " input type="password" name="api_key" required autocomplete="off" size="50"; }
            " " button { "Look" }
        }
    }
}

fn overview(caller: &Caller, standing: &Standing) -> Markup {
    html! {
        h1 { "Webhooks of " code { (caller.project) } }
        (endpoints(&standing.endpoints))
        (signals(&standing.signals))
        (waiting(standing))
        section id="dead-letters" {
            h2 { "Dead letters a day" }
            table {
                thead { tr { th { "Day (UTC)" } th { "Dead letters" } } }
                tbody {
                    @for (day, count) in &standing.dead_letters {
                        tr { td { (day.to_string().get(..10).unwrap_or_default()) } td { (counted(*count)) } }
                    }
                }
            }
        }
    }
}

fn endpoints(endpoints: &[EndpointStanding]) -> Markup {
    html! {
        section id="endpoints" {
            h2 { "Endpoints" }
            @if endpoints.is_empty() { p { "There are none." } } @else {
                table {
                    thead { tr { th { "Endpoint" } th { "URL" } th { "How it stands" } } }
                    tbody {
                        @for endpoint in endpoints {
                            tr {
                                td { code { (endpoint.id) } }
                                td { (endpoint.url) }
                                td { (stands(endpoint)) }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn stands(endpoint: &EndpointStanding) -> Markup {
    html! {
        @match (endpoint.enabled, &endpoint.disabled_reason, endpoint.failing_since) {
            (false, Some(reason), _) => { strong { "disabled" } ": " (reason) }
            (false, None, _) => { "disabled" }
            (true, _, Some(since)) => { strong { "failing" } " since " time datetime=(since) { (since) } }
            (true, _, None) => { "enabled" }
        }
    }
}

fn waiting(standing: &Standing) -> Markup {
    html! {
        section id="waiting" {
            h2 { "Deliveries that are open" }
            table {
                thead { tr { th { "State" } th { "Deliveries" } } }
                tbody {
                    @for (state, count) in &standing.open {
                        tr { td { code { (state) } } td { (counted(*count)) } }
                    }
                }
            }
            @if let Some(since) = standing.oldest_pending {
                p { "The oldest that was not tried yet is of " time datetime=(since) { (since) } "." }
            }
        }
    }
}

fn signals(signals: &[Signal]) -> Markup {
    html! {
        section id="signals" {
            h2 { "Signals" }
            @if signals.is_empty() { p { "No endpoint began to fail or was disabled lately." } } @else {
                table {
                    thead { tr { th { "When" } th { "What" } th { "Data" } } }
                    tbody {
                        @for signal in signals {
                            tr {
                                td { time datetime=(signal.created_at) { (signal.created_at) } }
                                td { code { (signal.event_type) } br; code { (signal.id) } }
                                td { code.raw { (signal.data.0.get()) } }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// A count that ended at [`MOST`].
fn counted(count: i64) -> String {
    if count >= MOST {
        format!("{MOST} or more")
    } else {
        count.to_string()
    }
}
