//! What is deprecated: one declaration each, and everything that follows from it.
//!
//! A [`Deprecation`] says what ends, since when, on which day, and what to use instead. From it come
//! the headers on every answer to a request that uses the thing, errors included (`X-API-Notice`,
//! `Deprecation` of RFC 9745, `Sunset` of RFC 8594 and a `Link` to the changelog), the refusal after
//! its last day, its entry in the changelog and the feed, and its marks in the published spec.
//! Whether a request uses the thing is read off its method, path and query, so a handler need not
//! know: the layer in front of all handlers asks, refuses and writes. Days are days in UTC.

use std::sync::Arc;

use poem::{
    Request,
    http::{HeaderMap, HeaderName, HeaderValue, Method},
};
use serde_json::{Value, json};
use time::{Date, OffsetDateTime, Time, macros::format_description};

use crate::contract::{ApiError, Code, changelog::Release, routes::Template};

/// The declaration of a deprecated thing.
#[derive(Clone, Debug)]
pub struct Deprecation {
    /// Its anchor in the changelog, which never changes.
    pub id: &'static str,
    /// What it is, as a client writes it.
    pub what: &'static str,
    /// Its name.
    pub title: &'static str,
    /// Why it ends.
    pub about: &'static str,
    /// What to do instead.
    pub instead: &'static str,
    /// The release that deprecated it.
    pub since: &'static Release,
    /// The last day on which it works.
    pub last_day: Date,
    /// The operations that have it.
    pub on: Vec<Operation>,
    /// The query parameter and its value that ask for it; without, the operations themselves end.
    pub when: Option<(&'static str, &'static str)>,
    /// The parameters that end with it, as OpenAPI describes them.
    pub parameters: Vec<Value>,
    /// The codes that it alone fails with.
    pub codes: &'static [Code],
    /// The code that refuses it after the last day.
    pub retired: Code,
}

/// An operation of the public API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operation {
    method: Method,
    path: Template,
}

impl Operation {
    /// A method on a path below `/public/v1`, which may have parameters: `/contacts/{id}`.
    pub fn new(method: Method, path: &str) -> Self {
        Self {
            method,
            path: Template::of(path),
        }
    }

    fn is(&self, method: &str, path: &str) -> bool {
        self.method.as_str().eq_ignore_ascii_case(method) && self.path.fits(path)
    }
}

impl Deprecation {
    /// Whether an operation has it; the method in either case, the path with or without values.
    pub fn is_on(&self, method: &str, path: &str) -> bool {
        self.on.iter().any(|operation| operation.is(method, path))
    }

    fn is_asked_for(&self, query: &str) -> bool {
        self.when.is_none_or(|(name, value)| {
            // Of a repeated parameter the last counts, as for those who read it.
            url::form_urlencoded::parse(query.as_bytes())
                .filter(|(known, _)| known == name)
                .last()
                .is_some_and(|(_, given)| given == value)
        })
    }

    /// The last second of the last day.
    pub fn sunset(&self) -> OffsetDateTime {
        let last_second = Time::from_hms(23, 59, 59).unwrap_or(Time::MIDNIGHT);
        self.last_day.with_time(last_second).assume_utc()
    }

    /// Since when it is deprecated: never after its end, wherever an early one was set.
    fn deprecated_at(&self) -> OffsetDateTime {
        self.since.date.min(self.last_day).midnight().assume_utc()
    }

    fn check(&self, today: Date) -> Result<(), ApiError> {
        if today <= self.last_day {
            return Ok(());
        }
        let detail = format!(
            "{} worked until {}. {}",
            self.what, self.last_day, self.instead
        );
        Err(ApiError::new(self.retired, detail))
    }

    /// Where the changelog explains it.
    pub fn link(&self, public_url: &str) -> String {
        format!("{public_url}/changelog#{}", self.id)
    }

    /// Whether an operation fails with a code on its account alone.
    pub fn fails_with(&self, code: Code) -> bool {
        self.retired == code || self.codes.contains(&code)
    }

    /// Marks an operation that has it in the published spec.
    pub fn mark(&self, operation: &mut Value) {
        if self.when.is_none() {
            operation["deprecated"] = true.into();
        }
        if !self.parameters.is_empty() && !operation["parameters"].is_array() {
            operation["parameters"] = json!([]);
        }
        for parameter in &self.parameters {
            let mut parameter = parameter.clone();
            let about = parameter["description"].as_str().unwrap_or_default();
            parameter["description"] = format!(
                "{about} Deprecated since {}, works until {}: see `/changelog#{}`. {}",
                self.since.version, self.last_day, self.id, self.instead
            )
            .into();
            parameter["required"] = false.into();
            parameter["deprecated"] = true.into();
            if let Some(parameters) = operation["parameters"].as_array_mut() {
                parameters.push(parameter);
            }
        }
        let answers = operation["responses"].as_object_mut();
        for answer in answers.into_iter().flat_map(|answers| answers.values_mut()) {
            self.mark_answer(answer);
        }
    }

    fn mark_answer(&self, answer: &mut Value) {
        let when = self
            .when
            .map(|(name, value)| format!("With `{name}={value}`: "))
            .unwrap_or_default();
        for (name, about) in [
            (
                "X-API-Notice",
                "what is deprecated, and the last day to migrate.",
            ),
            (
                "Deprecation",
                "since when, `@` and Unix seconds (RFC 9745).",
            ),
            ("Sunset", "the last moment at which it works (RFC 8594)."),
        ] {
            answer["headers"][name] =
                json!({"description": format!("{when}{about}"), "schema": {"type": "string"}});
        }
        let other = answer["headers"]["Link"]["description"]
            .as_str()
            .map(|about| format!("{about} "))
            .unwrap_or_default();
        answer["headers"]["Link"] = json!({
            "description": format!("{other}{when}the entry in the changelog, `rel=\"deprecation\"`."),
            "schema": {"type": "string"}
        });
    }
}

/// All that is deprecated in this process.
#[derive(Clone, Debug)]
pub struct Deprecations {
    all: Arc<[Deprecation]>,
    public_url: Arc<str>,
}

impl Deprecations {
    /// These, explained below `public_url`.
    pub fn new(all: Vec<Deprecation>, public_url: &str) -> Self {
        Self {
            all: all.into(),
            public_url: public_url.into(),
        }
    }

    /// Every declaration.
    pub fn all(&self) -> &[Deprecation] {
        &self.all
    }

    /// Whether an operation has the deprecated thing of this id.
    pub fn is_on(&self, id: &str, method: &Method, path: &str) -> bool {
        self.all
            .iter()
            .any(|deprecation| deprecation.id == id && deprecation.is_on(method.as_str(), path))
    }

    /// What a request uses.
    pub fn used_by(&self, request: &Request) -> Used<'_> {
        let (method, uri) = (request.method(), request.uri());
        let query = uri.query().unwrap_or_default();
        Used {
            used: self
                .all
                .iter()
                .filter(|known| known.is_on(method.as_str(), uri.path()))
                .filter(|known| known.is_asked_for(query))
                .collect(),
            public_url: &self.public_url,
        }
    }
}

/// The deprecated things that one request uses.
#[derive(Debug)]
pub struct Used<'d> {
    used: Vec<&'d Deprecation>,
    public_url: &'d str,
}

impl Used<'_> {
    /// Fails with the code of a thing that has ended.
    pub fn check(&self) -> Result<(), ApiError> {
        let today = OffsetDateTime::now_utc().date();
        self.used.iter().try_for_each(|used| used.check(today))
    }

    /// Writes the headers, beside what the answer has of the same names. `Deprecation` and `Sunset`
    /// take one value each: of several things, the earliest.
    pub fn write(&self, headers: &mut HeaderMap) {
        for used in &self.used {
            let notice = format!("{} deprecated, migrate by {}", used.what, used.last_day);
            join(headers, HeaderName::from_static("x-api-notice"), &notice);
            let link = format!("<{}>; rel=\"deprecation\"", used.link(self.public_url));
            join(headers, poem::http::header::LINK, &link);
        }
        let since = self.used.iter().map(|used| used.deprecated_at()).min();
        let sunset = self.used.iter().map(|used| used.sunset()).min();
        if let (Some(since), Some(sunset)) = (since, sunset) {
            let since = format!("@{}", since.unix_timestamp());
            join(headers, HeaderName::from_static("deprecation"), &since);
            join(
                headers,
                HeaderName::from_static("sunset"),
                &http_date(sunset),
            );
        }
    }
}

/// Adds a value to a header's list, in one line: not every client looks at a second one.
fn join(headers: &mut HeaderMap, name: HeaderName, value: &str) {
    let joined = match headers.get(&name).and_then(|present| present.to_str().ok()) {
        Some(present) => format!("{present}, {value}"),
        None => value.to_owned(),
    };
    if let Ok(joined) = HeaderValue::from_str(&joined) {
        headers.insert(name, joined);
    }
}

/// A moment as HTTP (RFC 9110) and feeds (RFC 822) write it: `Tue, 01 Dec 2026 00:00:00 GMT`.
pub fn http_date(moment: OffsetDateTime) -> String {
    let format = format_description!(
        "[weekday repr:short], [day] [month repr:short] [year] [hour]:[minute]:[second] GMT"
    );
    moment
        .to_offset(time::UtcOffset::UTC)
        .format(&format)
        .unwrap_or_default()
}

#[cfg(test)]
mod tests;
