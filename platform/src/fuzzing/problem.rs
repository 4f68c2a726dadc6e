//! Error answers: always the whole problem body, and pointers that name a place in the request.

use std::collections::BTreeMap;

use futures::executor::block_on;
use poem::{error::ResponseError as _, http::header};
use serde::{
    Deserialize,
    de::{self, Deserializer, MapAccess, SeqAccess, Visitor},
};
use serde_json::Value;

use super::Input;
use crate::{
    contract::{ApiError, Code, RawJson, payload::parse_json, text::Text},
    db::Timestamp,
    webhooks::custom_headers::CustomHeaders,
};

/// Reads the parts of an error, or a body that should fit [`Probe`].
pub fn problem_body(data: &[u8]) {
    let mut input = Input(data);
    if input.byte() % 2 == 1 {
        return body(input.rest());
    }
    let code = Code::ALL[usize::from(input.byte()) % Code::ALL.len()];
    let seconds = u64::from_be_bytes(input.array());
    let (pointer, detail, place) = (input.text(), input.text(), input.text());
    let allow = input.text();
    for error in [
        ApiError::new(code, detail.clone().into_owned()),
        ApiError::new(code, "").with_detail(detail.clone().into_owned()),
        ApiError::new(code, detail.clone().into_owned()).with_retry_after(seconds),
        ApiError::new(code, detail.clone().into_owned()).as_idempotency_unavailable(),
        ApiError::invalid_body(&*pointer, &*detail),
        ApiError::invalid_body(&*pointer, &*detail).below(&place),
        ApiError::invalid_parameter(&pointer, &detail),
        ApiError::method_not_allowed(&*allow),
    ] {
        answer(&error);
    }
    let below = ApiError::invalid_body(&*pointer, &*detail).below(&place);
    assert_eq!(below.pointers(), [format!("{place}{pointer}")]);
}

/// The answer has the members of RFC 9457 and ours, no others, and says the same as the error.
fn answer(error: &ApiError) {
    let code = error.code();
    let response = error.as_response();
    assert_eq!(response.status().as_u16(), code.status());
    assert_eq!(response.content_type(), Some("application/problem+json"));
    let challenge = response.headers().contains_key(header::WWW_AUTHENTICATE);
    assert_eq!(challenge, code == Code::Unauthenticated);
    let written = block_on(response.into_body().into_vec()).expect("a body in memory is read");

    let Ok(Value::Object(problem)) = serde_json::from_slice(&written) else {
        panic!("{error:?} was written as {}", written.escape_ascii());
    };
    let mut members: Vec<&str> = problem.keys().map(String::as_str).collect();
    members.sort_unstable();
    let expected = [
        "code",
        "detail",
        "errors",
        "request_id",
        "status",
        "title",
        "type",
    ];
    assert_eq!(members, expected);
    let text = |name: &str| problem[name].as_str().expect("it is text");
    assert_eq!(problem["status"], code.status());
    assert_eq!(text("title"), code.title());
    assert_eq!(text("code"), code.name());
    assert!(text("type").ends_with(&format!("/error-codes#{}", code.name())));
    assert_eq!(
        format!("{}: {}", code.name(), text("detail")),
        error.to_string()
    );
    assert!(text("request_id").starts_with("req_") && text("request_id").len() == 30);
    let faults = problem["errors"].as_array().expect("it is a list");
    let pointers: Vec<&str> = faults
        .iter()
        .map(|fault| {
            let fault = fault.as_object().expect("it is an object");
            assert_eq!(fault.len(), 2);
            assert!(fault["detail"].is_string());
            fault["pointer"].as_str().expect("it is text")
        })
        .collect();
    assert_eq!(pointers, error.pointers());
}

/// What bodies are made of: members of every kind, with a fault possible in each.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "read by the deserializer alone")]
struct Probe {
    text: Option<Text<8>>,
    number: Option<u8>,
    list: Option<Vec<Probe>>,
    map: Option<BTreeMap<String, Probe>>,
    inner: Option<Inner>,
    choice: Option<Choice>,
    step: Option<Step>,
    raw: Option<RawJson>,
    headers: Option<CustomHeaders>,
    at: Option<Timestamp>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "read by the deserializer alone")]
struct Inner {
    needed: bool,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(dead_code, reason = "read by the deserializer alone")]
enum Choice {
    Plain,
    Holding(Inner),
    Named { value: u8 },
}

/// serde reads the variants of a tagged choice from a copy that has lost its places, so what is wrong
/// deeper than here could not be pointed at: bodies keep them flat.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase", deny_unknown_fields)]
#[allow(dead_code, reason = "read by the deserializer alone")]
enum Step {
    Wait { seconds: u8 },
    Send { to: Text<8> },
}

/// A body is read, or refused with a pointer to what is there, or to the member that is missing.
fn body(json: &[u8]) {
    let error = match parse_json::<Probe>(json) {
        Err(error) => error,
        Ok(probe) => {
            if let Some(raw) = probe.raw {
                let raw = raw.as_str().as_bytes();
                assert!(json.windows(raw.len()).any(|window| window == raw));
            }
            return;
        }
    };
    answer(&error);
    assert_eq!(error.code(), Code::InvalidBody);
    let [pointer] = error.pointers()[..] else {
        panic!("{error} points at {:?}", error.pointers());
    };
    if pointer.is_empty() {
        return;
    }
    // Numbers and surrogates that no reader takes are well-formed and may stand behind the fault.
    let Ok(shape) = serde_json::from_slice::<Shape>(json) else {
        return;
    };
    let tokens = tokens(pointer);
    let missing = error.to_string().contains(": missing field `");
    assert!(
        shape.has(&tokens) || missing && shape.has(&tokens[..tokens.len() - 1]),
        "{error}: {pointer} is nowhere in {}",
        json.escape_ascii()
    );
}

/// The reference tokens of a JSON Pointer, by RFC 6901.
fn tokens(pointer: &str) -> Vec<String> {
    let tokens = pointer.strip_prefix('/').expect("a pointer begins with /");
    let escapes = tokens.split('~').skip(1);
    for escape in escapes {
        assert!(
            escape.starts_with(['0', '1']),
            "{pointer} is escaped wrongly"
        );
    }
    tokens
        .split('/')
        .map(|token| token.replace("~1", "/").replace("~0", "~"))
        .collect()
}

/// JSON down to its members, those that are repeated included: a fault may be in any of them.
enum Shape {
    Members(Vec<(String, Shape)>),
    Items(Vec<Shape>),
    Leaf,
}

impl Shape {
    fn has(&self, tokens: &[String]) -> bool {
        let Some((first, rest)) = tokens.split_first() else {
            return true;
        };
        match self {
            Self::Members(members) => members
                .iter()
                .any(|(name, member)| name == first && member.has(rest)),
            Self::Items(items) => first
                .parse::<usize>()
                .is_ok_and(|index| items.get(index).is_some_and(|item| item.has(rest))),
            Self::Leaf => false,
        }
    }
}

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ShapeVisitor)
    }
}

struct ShapeVisitor;

impl<'de> Visitor<'de> for ShapeVisitor {
    type Value = Shape;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Shape, E> {
        Ok(Shape::Leaf)
    }

    fn visit_bool<E: de::Error>(self, _: bool) -> Result<Shape, E> {
        Ok(Shape::Leaf)
    }

    fn visit_i64<E: de::Error>(self, _: i64) -> Result<Shape, E> {
        Ok(Shape::Leaf)
    }

    fn visit_u64<E: de::Error>(self, _: u64) -> Result<Shape, E> {
        Ok(Shape::Leaf)
    }

    fn visit_f64<E: de::Error>(self, _: f64) -> Result<Shape, E> {
        Ok(Shape::Leaf)
    }

    fn visit_str<E: de::Error>(self, _: &str) -> Result<Shape, E> {
        Ok(Shape::Leaf)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Shape, A::Error> {
        let mut shapes = Vec::new();
        while let Some(shape) = items.next_element()? {
            shapes.push(shape);
        }
        Ok(Shape::Items(shapes))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Shape, A::Error> {
        let mut shapes = Vec::new();
        while let Some(member) = members.next_entry()? {
            shapes.push(member);
        }
        Ok(Shape::Members(shapes))
    }
}
