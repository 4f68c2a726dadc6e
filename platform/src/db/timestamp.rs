//! A moment in whole microseconds: `TIMESTAMPTZ` in PostgreSQL, `INTEGER` in SQLite, RFC 3339 in JSON.

use std::{
    fmt,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use poem_openapi::{
    registry::{MetaSchema, MetaSchemaRef},
    types::{ToJSON, Type},
};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use sqlx::{Postgres, Sqlite, encode::IsNull, error::BoxDynError};
use time::{
    OffsetDateTime, UtcOffset, format_description::well_known::Rfc3339, macros::format_description,
};

/// Microseconds from the Unix epoch to the epoch of PostgreSQL's `TIMESTAMPTZ`.
const POSTGRES_EPOCH: i64 = 946_684_800_000_000;

/// A moment, in microseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(i64);

/// A text that is no time in RFC 3339.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("a time is written in RFC 3339: 2026-12-01T09:30:00Z")]
pub struct TimestampError;

impl Timestamp {
    /// This moment.
    pub fn now() -> Self {
        Self::from(SystemTime::now())
    }

    /// From microseconds since the Unix epoch.
    pub const fn from_micros(micros: i64) -> Self {
        Self(micros)
    }

    /// Microseconds since the Unix epoch.
    pub const fn micros(self) -> i64 {
        self.0
    }

    /// Whole seconds since the Unix epoch, rounded down.
    pub const fn seconds(self) -> i64 {
        self.0.div_euclid(1_000_000)
    }

    /// Whole seconds since the Unix epoch, rounded up: never earlier than the moment.
    pub const fn seconds_ceil(self) -> i64 {
        (self.0 + 999_999).div_euclid(1_000_000)
    }

    /// The time from `earlier` to this moment; zero when it lies after it.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }
}

impl std::ops::Add<Duration> for Timestamp {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        let micros = i64::try_from(duration.as_micros()).unwrap_or(i64::MAX);
        Self(self.0.saturating_add(micros))
    }
}

impl std::ops::Sub<Duration> for Timestamp {
    type Output = Self;

    fn sub(self, duration: Duration) -> Self {
        let micros = i64::try_from(duration.as_micros()).unwrap_or(i64::MAX);
        Self(self.0.saturating_sub(micros))
    }
}

impl From<SystemTime> for Timestamp {
    fn from(time: SystemTime) -> Self {
        let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        Self(i64::try_from(since.as_micros()).unwrap_or(i64::MAX))
    }
}

impl From<Timestamp> for SystemTime {
    fn from(timestamp: Timestamp) -> Self {
        UNIX_EPOCH + Duration::from_micros(u64::try_from(timestamp.0).unwrap_or(0))
    }
}

impl fmt::Display for Timestamp {
    /// RFC 3339 in UTC with six decimals: `2026-12-01T09:30:00.000001Z`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let format = format_description!(
            "[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:6]Z"
        );
        let text = OffsetDateTime::from_unix_timestamp_nanos(i128::from(self.0) * 1_000)
            .ok()
            .and_then(|time| time.format(&format).ok())
            .ok_or(fmt::Error)?;
        f.write_str(&text)
    }
}

impl std::str::FromStr for Timestamp {
    type Err = TimestampError;

    fn from_str(text: &str) -> Result<Self, TimestampError> {
        let time = OffsetDateTime::parse(text, &Rfc3339).map_err(|_| TimestampError)?;
        // An offset can carry a time out of the four-digit years, where it could not be written.
        time.checked_to_offset(UtcOffset::UTC)
            .filter(|time| (0..=9999).contains(&time.year()))
            .ok_or(TimestampError)?;
        Ok(Self(
            i64::try_from(time.unix_timestamp_nanos().div_euclid(1_000)).unwrap_or(i64::MAX),
        ))
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(|_| de::Error::custom("a time is written in RFC 3339"))
    }
}

impl schemars::JsonSchema for Timestamp {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Timestamp".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({"type": "string", "format": "date-time"})
    }
}

impl Type for Timestamp {
    const IS_REQUIRED: bool = true;
    type RawValueType = Self;
    type RawElementValueType = Self;

    fn name() -> std::borrow::Cow<'static, str> {
        "string_date-time".into()
    }

    fn schema_ref() -> MetaSchemaRef {
        MetaSchemaRef::Inline(Box::new(MetaSchema::new_with_format("string", "date-time")))
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

impl ToJSON for Timestamp {
    fn to_json(&self) -> Option<serde_json::Value> {
        Some(self.to_string().into())
    }
}

impl sqlx::Type<Sqlite> for Timestamp {
    fn type_info() -> sqlx::sqlite::SqliteTypeInfo {
        <i64 as sqlx::Type<Sqlite>>::type_info()
    }
}

impl sqlx::Encode<'_, Sqlite> for Timestamp {
    fn encode_by_ref(
        &self,
        buffer: &mut <Sqlite as sqlx::Database>::ArgumentBuffer,
    ) -> Result<IsNull, BoxDynError> {
        <i64 as sqlx::Encode<Sqlite>>::encode_by_ref(&self.0, buffer)
    }
}

impl sqlx::Decode<'_, Sqlite> for Timestamp {
    fn decode(value: <Sqlite as sqlx::Database>::ValueRef<'_>) -> Result<Self, BoxDynError> {
        <i64 as sqlx::Decode<Sqlite>>::decode(value).map(Self)
    }
}

impl sqlx::Type<Postgres> for Timestamp {
    fn type_info() -> sqlx::postgres::PgTypeInfo {
        sqlx::postgres::PgTypeInfo::with_name("TIMESTAMPTZ")
    }
}

impl sqlx::postgres::PgHasArrayType for Timestamp {
    fn array_type_info() -> sqlx::postgres::PgTypeInfo {
        sqlx::postgres::PgTypeInfo::with_name("_TIMESTAMPTZ")
    }
}

impl sqlx::Encode<'_, Postgres> for Timestamp {
    fn encode_by_ref(
        &self,
        buffer: &mut sqlx::postgres::PgArgumentBuffer,
    ) -> Result<IsNull, BoxDynError> {
        <i64 as sqlx::Encode<Postgres>>::encode_by_ref(&(self.0 - POSTGRES_EPOCH), buffer)
    }
}

impl sqlx::Decode<'_, Postgres> for Timestamp {
    fn decode(value: sqlx::postgres::PgValueRef<'_>) -> Result<Self, BoxDynError> {
        <i64 as sqlx::Decode<Postgres>>::decode(value)
            .map(|micros| Self(micros.saturating_add(POSTGRES_EPOCH)))
    }
}

#[cfg(test)]
mod tests {
    use super::Timestamp;

    #[test]
    fn a_timestamp_is_written_with_six_decimals_and_read_back() {
        let timestamp = Timestamp::from_micros(1_764_550_000_120_000);
        assert_eq!(timestamp.to_string(), "2025-12-01T00:46:40.120000Z");
        assert_eq!(
            "2025-12-01T00:46:40.12Z".parse::<Timestamp>().ok(),
            Some(timestamp)
        );
        assert_eq!(
            "2025-12-01T01:46:40.12+01:00".parse::<Timestamp>().ok(),
            Some(timestamp)
        );
    }

    #[test]
    fn what_is_read_can_be_written() {
        for text in ["9999-12-31T23:59:59.999999Z", "0000-01-01T00:00:00Z"] {
            let read = text.parse::<Timestamp>().map(|time| time.to_string());
            assert!(
                read.is_ok_and(|written| written.starts_with(&text[..19])),
                "{text}"
            );
        }
        for text in [
            "9999-12-31T23:59:59-23:59",
            "0000-01-01T00:00:00+01:00",
            "yesterday",
            "",
        ] {
            assert!(text.parse::<Timestamp>().is_err(), "{text}");
        }
    }

    #[test]
    fn rounding_up_is_never_earlier() {
        assert_eq!(Timestamp::from_micros(2_000_001).seconds_ceil(), 3);
        assert_eq!(Timestamp::from_micros(2_000_000).seconds_ceil(), 2);
    }
}
