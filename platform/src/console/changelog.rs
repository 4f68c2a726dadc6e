//! `/changelog` and `/changelog/rss`: what changed and what ends, for people, programs and feed readers.
//!
//! All three forms are made once, from the releases and the declarations of what is deprecated. Links
//! in the answer headers of deprecated things lead to the anchors of this page, and the ids of the
//! feed's items are those same addresses.

use maud::{Markup, html};
use poem::{Endpoint, Request, Response, http::header};
use serde_json::{Value, json};

use super::{
    docs::Static,
    pages::{document, wants_json},
};
use crate::contract::{
    changelog::{RELEASES, Release},
    deprecation::{Deprecation, http_date},
};

/// The changelog in its three forms.
#[derive(Clone, Debug)]
pub struct Changelog {
    html: Static,
    json: Static,
    feed: Static,
}

impl Changelog {
    /// The releases and what is deprecated, with links below `public_url`.
    pub fn new(deprecations: &[Deprecation], public_url: &str) -> Self {
        Self {
            html: Static::html(document("Changelog", &page(deprecations))),
            json: Static::json(&entries(deprecations, public_url)),
            feed: Static::rss(feed(deprecations, public_url).to_string()),
        }
    }

    /// The feed.
    pub fn feed(&self) -> Static {
        self.feed.clone()
    }
}

impl Endpoint for Changelog {
    type Output = Response;

    async fn call(&self, request: Request) -> poem::Result<Response> {
        let form = if wants_json(&request).await {
            &self.json
        } else {
            &self.html
        };
        let mut response = form.call(request).await?;
        let vary = header::HeaderValue::from_static("accept");
        response.headers_mut().insert(header::VARY, vary);
        Ok(response)
    }
}

fn page(deprecations: &[Deprecation]) -> Markup {
    html! {
        h1 { "Changelog" }
        p { "Also " a href="/changelog/rss" { "as a feed" } ". Requests that use what is deprecated are told so by "
            code { "Deprecation" } ", " code { "Sunset" } " and " code { "X-API-Notice" } "." }
        @for release in RELEASES {
            section id=(release.anchor()) {
                h2 { a href={ "#" (release.anchor()) } { (release.version) } " · " (day(release.date)) }
                (changes(release))
            }
            @for deprecation in release.deprecated(deprecations) {
                section id=(deprecation.id) {
                    h3 { a href={ "#" (deprecation.id) } { "Deprecated: " (deprecation.title) } }
                    p { (marked_up(deprecation.about)) }
                    p { "Deprecated since " (release.version) " of " (day(release.date)) "; the last day is "
                        strong { (day(deprecation.last_day)) } " (UTC), then the answer is " (deprecation.retired.status()) " "
                        a href={ "/error-codes#" (deprecation.retired.name()) } { code { (deprecation.retired.name()) } } "." }
                    p { "Instead: " (marked_up(deprecation.instead)) }
                }
            }
        }
    }
}

fn changes(release: &Release) -> Markup {
    html! { ul { @for change in release.changes { li { (marked_up(change)) } } } }
}

fn day(date: time::Date) -> Markup {
    html! { time datetime=(date) { (date) } }
}

/// Text with its code between backquotes.
fn marked_up(text: &str) -> Markup {
    html! {
        @for (place, part) in text.split('`').enumerate() {
            @if place % 2 == 1 { code { (part) } } @else { (part) }
        }
    }
}

fn entries(deprecations: &[Deprecation], public_url: &str) -> Value {
    let mut data = Vec::new();
    for release in RELEASES {
        data.push(json!({
            "id": release.anchor(), "kind": "release", "version": release.version,
            "date": release.date.to_string(), "changes": release.changes,
            "url": release_url(release, public_url),
        }));
        for deprecation in release.deprecated(deprecations) {
            data.push(json!({
                "id": deprecation.id, "kind": "deprecation", "version": release.version,
                "date": release.date.to_string(), "last_day": deprecation.last_day.to_string(),
                "title": deprecation.title, "description": deprecation.about,
                "instead": deprecation.instead, "code": deprecation.retired.name(),
                "url": deprecation.link(public_url),
            }));
        }
    }
    json!({"data": data})
}

fn release_url(release: &Release, public_url: &str) -> String {
    format!("{public_url}/changelog#{}", release.anchor())
}

fn feed(deprecations: &[Deprecation], public_url: &str) -> rss::Channel {
    let mut items = Vec::new();
    for release in RELEASES {
        items.extend(release.deprecated(deprecations).map(|deprecation| {
            let last_day = deprecation.last_day;
            item(
                release,
                format!("Deprecated: {} (until {last_day})", deprecation.title),
                &html! {
                    p { (marked_up(deprecation.about)) }
                    p { "The last day is " (day(last_day)) " (UTC)." }
                    p { (marked_up(deprecation.instead)) }
                },
                deprecation.link(public_url),
            )
        }));
        items.push(item(
            release,
            format!("BOTIX {}", release.version),
            &changes(release),
            release_url(release, public_url),
        ));
    }
    rss::Channel {
        title: "BOTIX changelog".to_owned(),
        link: format!("{public_url}/changelog"),
        description: "What changed in the BOTIX API, and what ends.".to_owned(),
        language: Some("en".to_owned()),
        pub_date: RELEASES.first().map(|release| published(release)),
        items,
        ..rss::Channel::default()
    }
}

fn item(release: &Release, title: String, description: &Markup, url: String) -> rss::Item {
    rss::Item {
        title: Some(title),
        description: Some(description.0.clone()),
        pub_date: Some(published(release)),
        guid: Some(rss::Guid {
            value: url.clone(),
            permalink: true,
        }),
        link: Some(url),
        ..rss::Item::default()
    }
}

fn published(release: &Release) -> String {
    http_date(release.date.midnight().assume_utc())
}
