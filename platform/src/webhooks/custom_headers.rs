//! Headers of a tenant's own on its webhooks: within bounds, and never the platform's.

use std::collections::{BTreeMap, HashSet};

use poem::http::{HeaderName, HeaderValue, header::CONTENT_TYPE};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, de};

use crate::contract::reserved_headers::is_reserved;

/// What is shown in place of a value.
pub const MASK: &str = "********";

/// Headers that an endpoint wants on its webhooks, by name.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
#[serde(transparent)]
#[schemars(inline)]
pub struct CustomHeaders(BTreeMap<String, String>);

impl CustomHeaders {
    /// The headers, ready to send.
    pub fn iter(&self) -> impl Iterator<Item = (HeaderName, HeaderValue)> {
        self.0
            .iter()
            .filter_map(|(name, value)| Some((name.parse().ok()?, value.parse().ok()?)))
    }

    /// As a tenant gives them, with the values that `known` has where only a [`MASK`] is given; or what is
    /// wrong with them.
    pub fn given(mut self, known: &Self) -> Result<Self, String> {
        let mut names = HashSet::new();
        for (name, value) in &mut self.0 {
            if !names.insert(name.to_ascii_lowercase()) {
                return Err(format!("`{name}` is there twice"));
            }
            if value == MASK {
                let of_name = |(other, _): &(&String, &String)| other.eq_ignore_ascii_case(name);
                let found = known.0.iter().find(of_name);
                let (_, behind) = found.ok_or_else(|| {
                    format!("`{name}` has no value yet that the mask could stand for")
                })?;
                value.clone_from(behind);
            }
        }
        Ok(self)
    }

    /// The same names, with their values hidden.
    #[must_use]
    pub fn masked(self) -> Self {
        Self(
            self.0
                .into_keys()
                .map(|name| (name, MASK.to_owned()))
                .collect(),
        )
    }
}

impl<'de> Deserialize<'de> for CustomHeaders {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let given = BTreeMap::<String, String>::deserialize(deserializer)?;
        if given.len() > 20
            || given
                .iter()
                .map(|(name, value)| name.len() + value.len())
                .sum::<usize>()
                > 8_192
        {
            return Err(de::Error::custom(
                "an endpoint has at most 20 headers of 8,192 bytes together",
            ));
        }
        for (name, value) in &given {
            let Ok(parsed) = name.parse::<HeaderName>() else {
                return Err(de::Error::custom(format_args!(
                    "`{name}` is no header name"
                )));
            };
            // Without a plugin the body is the platform's, and it knows what that is.
            if is_reserved(&parsed) || parsed == CONTENT_TYPE {
                return Err(de::Error::custom(format_args!(
                    "`{name}` is the platform's to send"
                )));
            }
            if value.parse::<HeaderValue>().is_err() {
                return Err(de::Error::custom(format_args!(
                    "the value of `{name}` is no header value"
                )));
            }
        }
        Ok(Self(given))
    }
}
