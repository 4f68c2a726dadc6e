//! Typed bodies, in and out.
//!
//! serde reads and writes them, schemars describes them, poem-openapi lists them in the spec. A body
//! that does not fit names the fault's place as a JSON Pointer. [`RawJson`] keeps a value's bytes
//! exactly as they came.

use poem::{IntoResponse, Request, RequestBody, Response, http::StatusCode};
use poem_openapi::{
    ApiExtractor, ApiExtractorType, ApiResponse, ExtractParamOptions,
    error::ContentTypeError,
    registry::{
        MetaHeader, MetaMediaType, MetaRequest, MetaResponse, MetaResponses, MetaSchema,
        MetaSchemaRef, Registry,
    },
};
use schemars::JsonSchema;
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{self, DeserializeOwned},
};
use serde_json::value::RawValue;
use serde_path_to_error::Segment;

use crate::contract::{ApiError, spec};

const JSON: &str = "application/json";

/// A JSON request body.
#[derive(Debug)]
pub struct Body<T>(pub T);

/// The body of an action: absent, empty, `{}`, or an object with the action's options.
#[derive(Debug)]
pub struct Action<T>(pub T);

/// No options.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NoOptions {}

/// A 200 answer with a JSON body.
#[derive(Debug)]
pub struct Reply<T>(pub T);

/// A 201 answer with a JSON body and the `Location` of what was made.
#[derive(Debug)]
pub struct Created<T> {
    /// The path of the new thing, from the root of the server.
    pub location: String,
    /// The new thing.
    pub body: T,
}

/// A 202 answer with a JSON body, and the `Location` where to see what comes of it.
#[derive(Debug)]
pub struct Accepted<T> {
    /// The path of what shows the progress, from the root of the server.
    pub location: String,
    /// What is known already.
    pub body: T,
}

/// A 204 answer.
#[derive(Debug)]
pub struct NoContent;

fn is_json(content_type: &str) -> bool {
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    essence.eq_ignore_ascii_case(JSON)
        || (essence.to_ascii_lowercase().starts_with("application/")
            && essence.to_ascii_lowercase().ends_with("+json"))
}

/// Reads a JSON object and says where it does not fit.
pub fn parse_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    // What fits is read once; only a fault is looked for.
    if let Ok(text) = std::str::from_utf8(bytes)
        && text.trim_ascii_start().starts_with('{')
        && let Ok(value) = serde_json::from_str(text)
    {
        return Ok(value);
    }
    // A well-formed look first: a syntax fault has a line and a column, not a pointer.
    match serde_json::from_slice::<&RawValue>(bytes) {
        // serde would read a list as the members of a struct, one after the other.
        Ok(value) if !value.get().starts_with('{') => {
            return Err(ApiError::invalid_body("", "a JSON object is expected here"));
        }
        Ok(_) => {}
        Err(_) if bytes.is_empty() => {
            return Err(ApiError::invalid_body("", "not JSON: the body is empty"));
        }
        Err(error) => return Err(ApiError::invalid_body("", format!("not JSON: {error}"))),
    }
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let message = error.inner().to_string();
        let detail = message
            .rsplit_once(" at line ")
            .map_or(&*message, |(detail, _)| detail);
        let mut pointer = pointer(error.path(), detail);
        // serde reports a missing or unknown member at the object that should or should not have it.
        if let Some(name) = missing(detail).or_else(|| {
            unknown(detail).filter(|name| !pointer.ends_with(&format!("/{}", escape(name))))
        }) {
            pointer = format!("{pointer}/{}", escape(name));
        }
        ApiError::invalid_body(pointer, detail)
    })
}

fn missing(detail: &str) -> Option<&str> {
    detail.strip_prefix("missing field `")?.split('`').next()
}

/// The name is the client's and may have backquotes of its own; what comes after it is serde's.
fn unknown(detail: &str) -> Option<&str> {
    let rest = detail.strip_prefix("unknown field `")?;
    let end = ["`, expected ", "`, there are no fields"]
        .iter()
        .find_map(|after| rest.rfind(after))?;
    Some(&rest[..end])
}

fn pointer(path: &serde_path_to_error::Path, detail: &str) -> String {
    // A variant that came as bare text is no member: the place is that of the text.
    let is_text = detail.starts_with("invalid type: unit variant, ");
    let mut segments: Vec<_> = path.iter().collect();
    segments.pop_if(|last| is_text && matches!(last, Segment::Enum { .. }));
    segments
        .into_iter()
        .filter_map(|segment| match segment {
            Segment::Seq { index } => Some(format!("/{index}")),
            Segment::Map { key } => Some(format!("/{}", escape(key))),
            Segment::Enum { variant } => Some(format!("/{}", escape(variant))),
            Segment::Unknown => None,
        })
        .collect()
}

fn escape(member: &str) -> String {
    member.replace('~', "~0").replace('/', "~1")
}

/// Writes JSON; the types of this crate have no value that cannot be written.
pub fn to_json<T: Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).unwrap_or_else(|error| {
        tracing::error!(%error, "an answer could not be written as JSON");
        b"null".to_vec()
    })
}

fn media_type<T: JsonSchema>() -> MetaMediaType {
    MetaMediaType {
        content_type: JSON,
        schema: MetaSchemaRef::Reference(T::schema_name().into_owned()),
    }
}

fn request_of<T: JsonSchema>(required: bool) -> MetaRequest {
    MetaRequest {
        description: None,
        content: vec![media_type::<T>()],
        required,
    }
}

impl<'a, T: JsonSchema + DeserializeOwned + Send> ApiExtractor<'a> for Body<T> {
    const TYPES: &'static [ApiExtractorType] = &[ApiExtractorType::RequestObject];
    type ParamType = ();
    type ParamRawType = ();

    fn register(registry: &mut Registry) {
        spec::note_schema::<T>(registry, spec::Use::Read);
    }

    fn request_meta() -> Option<MetaRequest> {
        Some(request_of::<T>(true))
    }

    async fn from_request(
        request: &'a Request,
        body: &mut RequestBody,
        _: ExtractParamOptions<()>,
    ) -> poem::Result<Self> {
        check_content_type(request)?;
        let bytes = <Vec<u8> as poem::FromRequest>::from_request(request, body).await?;
        Ok(Self(parse_json(&bytes)?))
    }
}

fn check_content_type(request: &Request) -> poem::Result<()> {
    match request.content_type() {
        Some(content_type) if is_json(content_type) => Ok(()),
        Some(other) => Err(ContentTypeError::NotSupported {
            content_type: other.to_owned(),
        }
        .into()),
        None => Err(ContentTypeError::ExpectContentType.into()),
    }
}

impl<'a, T: JsonSchema + DeserializeOwned + Default + Send> ApiExtractor<'a> for Action<T> {
    const TYPES: &'static [ApiExtractorType] = &[ApiExtractorType::RequestObject];
    type ParamType = ();
    type ParamRawType = ();

    fn register(registry: &mut Registry) {
        spec::note_schema::<T>(registry, spec::Use::Read);
    }

    fn request_meta() -> Option<MetaRequest> {
        Some(request_of::<T>(false))
    }

    async fn from_request(
        request: &'a Request,
        body: &mut RequestBody,
        _: ExtractParamOptions<()>,
    ) -> poem::Result<Self> {
        let bytes = <Vec<u8> as poem::FromRequest>::from_request(request, body).await?;
        if bytes.is_empty() {
            return Ok(Self(T::default()));
        }
        // Most clients name no type for an action that they send an empty object with.
        if request.content_type().is_some() {
            check_content_type(request)?;
        }
        Ok(Self(parse_json(&bytes)?))
    }
}

fn json_response(status: StatusCode, body: Vec<u8>) -> Response {
    Response::builder()
        .status(status)
        .content_type(JSON)
        .body(body)
}

impl<T: Serialize + Send> IntoResponse for Reply<T> {
    fn into_response(self) -> Response {
        json_response(StatusCode::OK, to_json(&self.0))
    }
}

impl<T: Serialize + JsonSchema + Send> ApiResponse for Reply<T> {
    fn meta() -> MetaResponses {
        answers(
            200,
            "The thing asked for.",
            vec![media_type::<T>()],
            Vec::new(),
        )
    }

    fn register(registry: &mut Registry) {
        spec::note_schema::<T>(registry, spec::Use::Written);
    }
}

fn located_response(status: StatusCode, location: &str, body: Vec<u8>) -> Response {
    let mut response = json_response(status, body);
    if let Ok(location) = location.parse() {
        response.headers_mut().insert("location", location);
    }
    response
}

fn location(description: &str) -> MetaHeader {
    MetaHeader {
        name: "Location".to_owned(),
        description: Some(description.to_owned()),
        required: true,
        deprecated: false,
        schema: MetaSchemaRef::Inline(Box::new(MetaSchema::new("string"))),
    }
}

impl<T: Serialize + Send> IntoResponse for Created<T> {
    fn into_response(self) -> Response {
        located_response(StatusCode::CREATED, &self.location, to_json(&self.body))
    }
}

impl<T: Serialize + JsonSchema + Send> ApiResponse for Created<T> {
    fn meta() -> MetaResponses {
        let location = location("The path of what was made.");
        answers(201, "Made.", vec![media_type::<T>()], vec![location])
    }

    fn register(registry: &mut Registry) {
        spec::note_schema::<T>(registry, spec::Use::Written);
    }
}

impl<T: Serialize + Send> IntoResponse for Accepted<T> {
    fn into_response(self) -> Response {
        located_response(StatusCode::ACCEPTED, &self.location, to_json(&self.body))
    }
}

impl<T: Serialize + JsonSchema + Send> ApiResponse for Accepted<T> {
    fn meta() -> MetaResponses {
        let location = location("The path of what shows the progress.");
        answers(
            202,
            "Accepted; it is done soon.",
            vec![media_type::<T>()],
            vec![location],
        )
    }

    fn register(registry: &mut Registry) {
        spec::note_schema::<T>(registry, spec::Use::Written);
    }
}

impl IntoResponse for NoContent {
    fn into_response(self) -> Response {
        Response::builder().status(StatusCode::NO_CONTENT).finish()
    }
}

impl ApiResponse for NoContent {
    fn meta() -> MetaResponses {
        answers(204, "Done; there is no body.", Vec::new(), Vec::new())
    }

    fn register(_: &mut Registry) {}
}

/// The description of an answer of one status.
pub fn answers(
    status: u16,
    description: &'static str,
    content: Vec<MetaMediaType>,
    headers: Vec<MetaHeader>,
) -> MetaResponses {
    MetaResponses {
        responses: vec![MetaResponse {
            description,
            status: Some(status),
            status_range: None,
            content,
            headers,
        }],
    }
}

/// Any JSON value, kept as the bytes it came in: number spelling, key order and escapes included.
#[derive(Clone, Debug, Serialize)]
#[serde(transparent)]
pub struct RawJson(pub Box<RawValue>);

/// How deep a value may be nested: deeper ones break the parsers of those who read them.
const DEEPEST: usize = 128;

impl<'de> Deserialize<'de> for RawJson {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = Box::<RawValue>::deserialize(deserializer)?;
        if is_too_deep(raw.get()) {
            return Err(de::Error::custom(format_args!(
                "a value is nested at most {DEEPEST} deep"
            )));
        }
        Ok(Self(raw))
    }
}

/// Whether well-formed JSON is nested deeper than [`DEEPEST`].
fn is_too_deep(json: &str) -> bool {
    // Few brackets cannot be deep, wherever they stand; counting them is much faster than reading.
    let opened = json.bytes().filter(|byte| matches!(byte, b'{' | b'['));
    opened.count() > DEEPEST && depth(json) > DEEPEST
}

/// How deep well-formed JSON is nested.
fn depth(json: &str) -> usize {
    let (mut deepest, mut depth, mut in_string, mut escaped) = (0_usize, 0_usize, false, false);
    for byte in json.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'{' | b'[' if !in_string => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b'}' | b']' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

impl RawJson {
    /// `{}`.
    pub fn empty_object() -> Self {
        Self(RawValue::from_string("{}".to_owned()).unwrap_or_default())
    }

    /// The bytes.
    pub fn as_str(&self) -> &str {
        self.0.get()
    }

    /// Whether the value is an object.
    pub fn is_object(&self) -> bool {
        self.as_str().starts_with('{')
    }
}

impl JsonSchema for RawJson {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "AnyJson".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        true.into()
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::{depth, is_json, parse_json};

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code, reason = "read by the deserializer alone")]
    struct Outer {
        inner: Inner,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code, reason = "read by the deserializer alone")]
    struct Inner {
        list: Vec<u8>,
        choice: Option<Choice>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "lowercase")]
    #[allow(dead_code, reason = "read by the deserializer alone")]
    enum Choice {
        Number(u8),
    }

    #[test]
    fn a_fault_in_a_body_is_pointed_at() {
        for (body, pointer) in [
            (r#"{"inner":{"list":[1,"x"]}}"#, "/inner/list/1"),
            (r#"{"inner":{}}"#, "/inner/list"),
            (r#"{"inner":{"list":[],"a/b":1}}"#, "/inner/a~1b"),
            ("{\"inner\":{\"list\":[],\"a`b\":1}}", "/inner/a`b"),
            (
                "{\"a`, expected `b\":1,\"inner\":{\"list\":[]}}",
                "/a`, expected `b",
            ),
            (r#"{"inner":{"list":[300]}}"#, "/inner/list/0"),
            (
                r#"{"inner":{"list":[],"choice":{"number":300}}}"#,
                "/inner/choice/number",
            ),
            (
                r#"{"inner":{"list":[],"choice":"number"}}"#,
                "/inner/choice",
            ),
            ("{", ""),
            ("", ""),
            ("[{\"list\":[]}]", ""),
        ] {
            let error = parse_json::<Outer>(body.as_bytes()).expect_err(body);
            assert_eq!(error.pointers(), [pointer], "{body}");
        }
    }

    #[test]
    fn depth_counts_brackets_outside_of_strings() {
        for (json, deep) in [
            ("1", 0),
            ("{}", 1),
            (r#"[{"a":[]}]"#, 3),
            (r#"["[[\"[", []]"#, 2),
        ] {
            assert_eq!(depth(json), deep, "{json}");
        }
    }

    #[test]
    fn json_is_told_by_its_media_type() {
        assert!(is_json("application/json"));
        assert!(is_json("Application/JSON; charset=utf-8"));
        assert!(is_json("application/vnd.botix+json"));
        assert!(!is_json("text/plain"));
        assert!(!is_json("application/jsonx"));
    }
}
