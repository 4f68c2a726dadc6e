//! Typed identifiers: a ULID in the database (`UUID` / `BLOB`), `prefix_<ULID>` everywhere else.
//!
//! The prefix belongs to the type, so an id of one kind can never be taken for another's.

use std::{cmp::Ordering, fmt, hash, marker::PhantomData, str::FromStr};

use poem_openapi::{
    registry::{MetaSchema, MetaSchemaRef},
    types::{ParseError, ParseFromParameter, ParseResult, ToJSON, Type},
};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use sqlx::{Postgres, Sqlite, encode::IsNull, error::BoxDynError};
use ulid::Ulid;
use uuid::Uuid;

/// What an id names.
pub trait Kind: 'static {
    /// What ids of this kind start with, without the underscore: `con`.
    const PREFIX: &'static str;
}

/// The id of a `K`.
pub struct Id<K>(Ulid, PhantomData<fn() -> K>);

/// A text that is no id of the kind that was asked for.
#[derive(Debug, thiserror::Error)]
#[error("an id here is {0}_ and 26 upper-case Crockford characters")]
pub struct IdError(&'static str);

impl<K: Kind> Id<K> {
    /// A new id of this moment.
    pub fn generate() -> Self {
        Self(Ulid::generate(), PhantomData)
    }

    /// The id without its prefix.
    pub fn ulid(&self) -> Ulid {
        self.0
    }

    /// From the bare value.
    pub fn from_ulid(ulid: Ulid) -> Self {
        Self(ulid, PhantomData)
    }

    fn uuid(self) -> Uuid {
        Uuid::from_bytes(self.0.to_bytes())
    }
}

impl<K: Kind> From<Id<K>> for Uuid {
    fn from(id: Id<K>) -> Self {
        id.uuid()
    }
}

impl<K> Clone for Id<K> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<K> Copy for Id<K> {}

impl<K> PartialEq for Id<K> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl<K> Eq for Id<K> {}

impl<K> PartialOrd for Id<K> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<K> Ord for Id<K> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.cmp(&other.0)
    }
}

impl<K> hash::Hash for Id<K> {
    fn hash<H: hash::Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

impl<K: Kind> fmt::Display for Id<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // In one piece: a text that grows is allocated again and again.
        const { assert!(K::PREFIX.len() < 8, "a prefix is short") };
        let mut ulid = [0; ulid::ULID_LEN];
        let mut text = [0; 8 + ulid::ULID_LEN];
        let mut end = 0;
        for part in [K::PREFIX, "_", self.0.array_to_str(&mut ulid)] {
            text[end..end + part.len()].copy_from_slice(part.as_bytes());
            end += part.len();
        }
        f.write_str(std::str::from_utf8(&text[..end]).map_err(|_| fmt::Error)?)
    }
}

impl<K: Kind> fmt::Debug for Id<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl<K: Kind> FromStr for Id<K> {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        text.strip_prefix(K::PREFIX)
            .and_then(|rest| rest.strip_prefix('_'))
            .and_then(|bare| {
                let ulid = Ulid::from_string(bare).ok()?;
                // The one spelling that was given out: upper case, no aliases for 0 and 1.
                (ulid.to_string() == bare).then_some(Self(ulid, PhantomData))
            })
            .ok_or(IdError(K::PREFIX))
    }
}

impl<K: Kind> Serialize for Id<K> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de, K: Kind> Deserialize<'de> for Id<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(de::Error::custom)
    }
}

impl<K: Kind> schemars::JsonSchema for Id<K> {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        format!("{}_id", K::PREFIX).into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({"type": "string", "pattern": pattern::<K>()})
    }
}

fn pattern<K: Kind>() -> String {
    format!("^{}_[0-7][0-9A-HJKMNP-TV-Z]{{25}}$", K::PREFIX)
}

impl<K: Kind> Type for Id<K> {
    const IS_REQUIRED: bool = true;
    type RawValueType = Self;
    type RawElementValueType = Self;

    fn name() -> std::borrow::Cow<'static, str> {
        format!("string_{}", K::PREFIX).into()
    }

    fn schema_ref() -> MetaSchemaRef {
        let mut schema = MetaSchema::new("string");
        schema.pattern = Some(pattern::<K>());
        MetaSchemaRef::Inline(Box::new(schema))
    }

    fn as_raw_value(&self) -> Option<&Self::RawValueType> {
        Some(self)
    }

    fn raw_element_iter<'a>(
        &'a self,
    ) -> Box<dyn Iterator<Item = &'a Self::RawElementValueType> + 'a> {
        Box::new(std::iter::once(self))
    }
}

impl<K: Kind> ToJSON for Id<K> {
    fn to_json(&self) -> Option<serde_json::Value> {
        Some(self.to_string().into())
    }
}

impl<K: Kind> ParseFromParameter for Id<K> {
    fn parse_from_parameter(value: &str) -> ParseResult<Self> {
        value
            .parse()
            .map_err(|error: IdError| ParseError::custom(error.to_string()))
    }
}

impl<K> sqlx::Type<Sqlite> for Id<K> {
    fn type_info() -> sqlx::sqlite::SqliteTypeInfo {
        <Uuid as sqlx::Type<Sqlite>>::type_info()
    }

    fn compatible(ty: &sqlx::sqlite::SqliteTypeInfo) -> bool {
        <Uuid as sqlx::Type<Sqlite>>::compatible(ty)
    }
}

impl<K: Kind> sqlx::Encode<'_, Sqlite> for Id<K> {
    fn encode_by_ref(
        &self,
        buffer: &mut <Sqlite as sqlx::Database>::ArgumentBuffer,
    ) -> Result<IsNull, BoxDynError> {
        sqlx::Encode::<Sqlite>::encode_by_ref(&self.uuid(), buffer)
    }
}

impl<K: Kind> sqlx::Decode<'_, Sqlite> for Id<K> {
    fn decode(value: <Sqlite as sqlx::Database>::ValueRef<'_>) -> Result<Self, BoxDynError> {
        let uuid = <Uuid as sqlx::Decode<Sqlite>>::decode(value)?;
        Ok(Self::from_ulid(Ulid::from_bytes(uuid.into_bytes())))
    }
}

impl<K> sqlx::Type<Postgres> for Id<K> {
    fn type_info() -> sqlx::postgres::PgTypeInfo {
        <Uuid as sqlx::Type<Postgres>>::type_info()
    }
}

impl<K> sqlx::postgres::PgHasArrayType for Id<K> {
    fn array_type_info() -> sqlx::postgres::PgTypeInfo {
        <Uuid as sqlx::postgres::PgHasArrayType>::array_type_info()
    }
}

impl<K: Kind> sqlx::Encode<'_, Postgres> for Id<K> {
    fn encode_by_ref(
        &self,
        buffer: &mut sqlx::postgres::PgArgumentBuffer,
    ) -> Result<IsNull, BoxDynError> {
        sqlx::Encode::<Postgres>::encode_by_ref(&self.uuid(), buffer)
    }
}

impl<K: Kind> sqlx::Decode<'_, Postgres> for Id<K> {
    fn decode(value: sqlx::postgres::PgValueRef<'_>) -> Result<Self, BoxDynError> {
        let uuid = <Uuid as sqlx::Decode<Postgres>>::decode(value)?;
        Ok(Self::from_ulid(Ulid::from_bytes(uuid.into_bytes())))
    }
}

#[cfg(test)]
mod tests {
    use super::{Id, Kind};

    struct Thing;

    impl Kind for Thing {
        const PREFIX: &'static str = "thg";
    }

    #[test]
    fn an_id_reads_back_only_in_the_spelling_it_was_given_out() {
        let id = Id::<Thing>::generate();
        let text = id.to_string();
        assert_eq!(text.parse::<Id<Thing>>().ok(), Some(id));
        assert!(text.to_lowercase().parse::<Id<Thing>>().is_err());
        assert!(text.replacen("thg", "con", 1).parse::<Id<Thing>>().is_err());
        assert!(text[..text.len() - 1].parse::<Id<Thing>>().is_err());
        assert!(
            "thg_8ZZZZZZZZZZZZZZZZZZZZZZZZZ"
                .parse::<Id<Thing>>()
                .is_err()
        );
    }
}
