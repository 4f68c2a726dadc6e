//! What an endpoint listens to.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, de};

use super::events::is_event_type;

/// What an endpoint listens to: `*`, `contact.*`, or whole event types.
#[derive(Clone, Debug, Serialize)]
#[serde(transparent)]
pub struct Patterns(Vec<String>);

impl Patterns {
    /// Everything.
    pub fn all() -> Self {
        Self(vec!["*".to_owned()])
    }

    /// Whether an event type is among them.
    pub fn matches(&self, event_type: &str) -> bool {
        self.0.iter().any(|pattern| matches(pattern, event_type))
    }

    /// Whether an event type is among them by its own name or its family's: `*` alone is not enough.
    pub fn name(&self, event_type: &str) -> bool {
        let mut named = self.0.iter().filter(|pattern| *pattern != "*");
        named.any(|pattern| matches(pattern, event_type))
    }
}

fn matches(pattern: &str, event_type: &str) -> bool {
    match pattern.strip_suffix('*') {
        // `contact.` of `contact.*`, or nothing of `*`.
        Some(start) => event_type.starts_with(start),
        None => event_type == pattern,
    }
}

impl<'de> Deserialize<'de> for Patterns {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let patterns = Vec::<String>::deserialize(deserializer)?;
        if patterns.is_empty() || patterns.len() > 100 {
            return Err(de::Error::custom(
                "an endpoint has 1 to 100 event types; `*` is all of them",
            ));
        }
        for pattern in &patterns {
            let fits = pattern == "*"
                || is_event_type(pattern)
                || pattern
                    .strip_suffix(".*")
                    .is_some_and(|start| is_event_type(&format!("{start}.x")));
            if !fits {
                return Err(de::Error::custom(format_args!(
                    "`{pattern}` is no event type: write `*`, `contact.*` or `contact.created`"
                )));
            }
        }
        Ok(Self(patterns))
    }
}

impl JsonSchema for Patterns {
    fn schema_name() -> Cow<'static, str> {
        "EventTypePatterns".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "array", "minItems": 1, "maxItems": 100, "items": {"type": "string"}, "examples": [["contact.*"]]})
    }
}

#[cfg(test)]
mod tests {
    use super::Patterns;

    fn patterns(json: &str) -> Option<Patterns> {
        serde_json::from_str(json).ok()
    }

    #[test]
    fn patterns_match_by_whole_parts() {
        let some = patterns(r#"["contact.*", "order.paid"]"#).expect("patterns");
        assert!(
            some.matches("contact.created")
                && some.matches("contact.a.b")
                && some.matches("order.paid")
        );
        assert!(!some.matches("contacts.created") && !some.matches("order.paid.late"));
        assert!(patterns("[]").is_none());
        assert!(patterns(r#"["*"]"#).is_some_and(|all| all.matches("anything.at_all")));
        let both = patterns(r#"["*", "contact.*"]"#).expect("patterns");
        assert!(both.name("contact.created") && !both.name("order.paid"));
        assert!(patterns(r#"["con*"]"#).is_none() && patterns(r#"["*.created"]"#).is_none());
    }
}
