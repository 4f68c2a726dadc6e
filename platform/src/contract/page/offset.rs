//! The deprecated offset mode: `?pagination=offset&offset=N&limit=M`, on the lists that had it.
//!
//! An offset is counted off row by row, so it is bounded, and rows that come or go meanwhile shift
//! what it means: a walk by offsets may skip and repeat. A list has the mode by `Listed::HAS_OFFSET`,
//! one line; everything else is here: its bounds, its parameters, and the declaration from which
//! headers, changelog and spec are made. A page of this mode carries the cursor that continues after
//! its last row, so a client migrates in the middle of a walk.

use poem::http::Method;
use serde_json::json;
use time::Date;

use crate::contract::{
    ApiError, Code,
    changelog::V0_1_0,
    deprecation::{Deprecation, Operation},
};

use super::request::{DEFAULT_LIMIT, LARGEST_LIMIT};

/// The stable id of the declaration.
pub(super) const ID: &str = "offset-pagination";

const LARGEST: i64 = 10_000;

/// Declares the mode deprecated on these collections; without a last day, the usual one.
pub fn deprecation<'l>(
    collections: impl IntoIterator<Item = &'l str>,
    last_day: Option<Date>,
) -> Deprecation {
    let mut on: Vec<_> = collections
        .into_iter()
        .map(|collection| Operation::new(Method::GET, &format!("/{collection}")))
        .collect();
    on.dedup();
    let since = &V0_1_0;
    Deprecation {
        id: ID,
        what: "pagination=offset",
        title: "Offset pagination",
        about: "`?pagination=offset&offset=N&limit=M` counts off the rows before a page one by one, \
                and skips or repeats rows when others come or go meanwhile.",
        instead: "Leave the three parameters out and pass each page's `next_cursor` on as `cursor`. \
                  A page of the old mode has a `next_cursor` too, so a walk may go on with it.",
        since,
        last_day: last_day.unwrap_or_else(|| since.end_of_notice()),
        on,
        when: Some(("pagination", "offset")),
        parameters: vec![
            json!({"name": "pagination", "in": "query",
                "description": "`offset` asks for the deprecated mode.",
                "schema": {"type": "string", "enum": ["cursor", "offset"], "default": "cursor"}}),
            json!({"name": "offset", "in": "query",
                "description": "Rows to leave out before the page; with `pagination=offset` alone.",
                "schema": {"type": "integer", "minimum": 0, "maximum": LARGEST, "default": 0}}),
            json!({"name": "limit", "in": "query",
                "description": "Rows on a page; with `pagination=offset` alone, else `cursor_limit`.",
                "schema": {"type": "integer", "minimum": 1, "maximum": LARGEST_LIMIT, "default": DEFAULT_LIMIT}}),
        ],
        codes: &[Code::OffsetTooLarge],
        retired: Code::OffsetPaginationRetired,
    }
}

/// Reads `offset`.
pub(super) fn read_offset(text: Option<&str>) -> Result<i64, ApiError> {
    let Some(text) = text else { return Ok(0) };
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(ApiError::invalid_parameter(
            "offset",
            "is a number from 0 to 10,000",
        ));
    }
    // Digits that overflow are a number too, and a large one.
    text.parse()
        .ok()
        .filter(|offset| *offset <= LARGEST)
        .ok_or_else(|| ApiError::new(Code::OffsetTooLarge, Code::OffsetTooLarge.about()))
}

/// Reads `limit`.
pub(super) fn read_limit(text: Option<&str>) -> Result<i64, ApiError> {
    text.map_or(Ok(DEFAULT_LIMIT), |text| {
        super::request::read_limit(text)
            .ok_or_else(|| ApiError::invalid_parameter("limit", "is a number from 1 to 200"))
    })
}
