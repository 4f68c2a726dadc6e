//! What the business's members are made of: each type reads only what it allows.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, de};

use crate::contract::{RawJson, text::Text};

/// A phone number in E.164: a plus, a digit from 1 to 9, and up to 14 more digits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Phone(String);

impl<'de> Deserialize<'de> for Phone {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let digits = text.strip_prefix('+').unwrap_or_default().as_bytes();
        let fits = (2..=15).contains(&digits.len())
            && digits[0] != b'0'
            && digits.iter().all(u8::is_ascii_digit);
        if fits {
            Ok(Self(text))
        } else {
            Err(de::Error::custom(
                "a phone number is written in E.164: +4915112345678",
            ))
        }
    }
}

impl From<Phone> for String {
    fn from(value: Phone) -> Self {
        value.0
    }
}

impl JsonSchema for Phone {
    fn schema_name() -> Cow<'static, str> {
        "Phone".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "pattern": r"^\+[1-9][0-9]{1,14}$", "examples": ["+4915112345678"]})
    }
}

/// An e-mail address: something, an `@`, something, without blanks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Email(String);

impl<'de> Deserialize<'de> for Email {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Text::<254>::deserialize(deserializer)?.0;
        let fits = text.split_once('@').is_some_and(|(name, host)| {
            !name.is_empty() && !host.is_empty() && !host.contains('@')
        }) && !text.chars().any(|c| c.is_whitespace() || c.is_control());
        if fits {
            Ok(Self(text))
        } else {
            Err(de::Error::custom("an e-mail address is written name@host"))
        }
    }
}

impl From<Email> for String {
    fn from(value: Email) -> Self {
        value.0
    }
}

impl JsonSchema for Email {
    fn schema_name() -> Cow<'static, str> {
        "Email".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "format": "email", "maxLength": 254})
    }
}

/// Free members of a contact: a JSON object of at most 16 KiB, kept byte for byte.
#[derive(Clone, Debug, Serialize)]
#[serde(transparent)]
pub struct Attributes(RawJson);

impl<'de> Deserialize<'de> for Attributes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = RawJson::deserialize(deserializer)?;
        if !raw.is_object() {
            return Err(de::Error::custom("attributes are a JSON object"));
        }
        if raw.as_str().len() > 16_384 {
            return Err(de::Error::custom("attributes have at most 16,384 bytes"));
        }
        Ok(Self(raw))
    }
}

impl Default for Attributes {
    fn default() -> Self {
        Self(RawJson::empty_object())
    }
}

impl JsonSchema for Attributes {
    fn schema_name() -> Cow<'static, str> {
        "Attributes".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "object", "additionalProperties": true})
    }
}

/// Tags of a contact: at most 100, of at most 64 characters each.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
#[serde(transparent)]
#[schemars(inline)]
pub struct Tags(#[schemars(length(max = 100))] Vec<Text<64>>);

impl<'de> Deserialize<'de> for Tags {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let tags = Vec::<Text<64>>::deserialize(deserializer)?;
        if tags.len() > 100 {
            return Err(de::Error::custom("a contact has at most 100 tags"));
        }
        Ok(Self(tags))
    }
}
