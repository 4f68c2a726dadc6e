use poem::{
    Request,
    http::{HeaderMap, Method, Uri},
};
use serde_json::json;
use time::macros::date;

use super::{Deprecation, Deprecations, Operation};
use crate::contract::{Code, changelog::V0_1_0};

/// A second deprecated thing: an operation as a whole.
fn old_rows() -> Deprecation {
    Deprecation {
        id: "old-rows",
        what: "GET /old/{id}/rows",
        title: "Old rows",
        about: "They are old.",
        instead: "Read `/rows`.",
        since: &V0_1_0,
        last_day: date!(2027 - 01 - 31),
        on: vec![Operation::new(Method::GET, "/old/{id}/rows")],
        when: None,
        parameters: Vec::new(),
        codes: &[],
        retired: Code::NotFound,
    }
}

fn old_mode() -> Deprecation {
    Deprecation {
        id: "old-mode",
        what: "mode=old",
        last_day: date!(2027 - 06 - 01),
        when: Some(("mode", "old")),
        ..old_rows()
    }
}

fn get(uri: &'static str) -> Request {
    Request::builder().uri(Uri::from_static(uri)).finish()
}

#[test]
fn a_thing_works_through_its_last_day_and_not_after_it() {
    let thing = old_rows();
    assert!(thing.check(date!(2026 - 01 - 01)).is_ok());
    assert!(thing.check(date!(2027 - 01 - 31)).is_ok());
    let refused = thing.check(date!(2027 - 02 - 01));
    assert_eq!(refused.map_err(|error| error.code()), Err(Code::NotFound));
}

#[test]
fn only_who_uses_a_thing_is_told() {
    let all = Deprecations::new(vec![old_rows(), old_mode()], "http://api.test");
    for (uri, used) in [
        ("/old/1/rows", &["old-rows"][..]),
        ("/old/1/rows?mode=new", &["old-rows"]),
        ("/old/1/rows?mode=old", &["old-rows", "old-mode"]),
        ("/old/1/rows?mode=old&mode=new", &["old-rows"]),
        (
            "/old/1/rows?a=mode%3Dold&%6Dode=%6Fld",
            &["old-rows", "old-mode"],
        ),
        ("/old/1", &[]),
        ("/rows?mode=old", &[]),
    ] {
        let found: Vec<_> = all.used_by(&get(uri)).used.iter().map(|d| d.id).collect();
        assert_eq!(found, used, "{uri}");
    }
}

#[test]
fn the_headers_join_what_is_there_and_name_the_earliest_end() {
    let all = Deprecations::new(vec![old_mode(), old_rows()], "http://api.test");
    let mut headers = HeaderMap::new();
    headers.insert("link", "<http://api.test/n>; rel=\"next\"".parse().unwrap());
    all.used_by(&get("/old/1/rows?mode=old"))
        .write(&mut headers);
    assert_eq!(headers.len(), 4);
    assert_eq!(
        headers["link"],
        "<http://api.test/n>; rel=\"next\", \
         <http://api.test/changelog#old-mode>; rel=\"deprecation\", \
         <http://api.test/changelog#old-rows>; rel=\"deprecation\""
    );
    assert_eq!(
        headers["x-api-notice"],
        "mode=old deprecated, migrate by 2027-06-01, \
         GET /old/{id}/rows deprecated, migrate by 2027-01-31"
    );
    assert_eq!(headers["deprecation"], "@1796083200");
    assert_eq!(headers["sunset"], "Sun, 31 Jan 2027 23:59:59 GMT");
}

#[test]
fn it_never_ended_before_it_was_deprecated() {
    let early = Deprecation {
        last_day: date!(2026 - 11 - 30),
        ..old_rows()
    };
    assert!(early.deprecated_at() <= early.sunset());
    assert_eq!(
        early.deprecated_at(),
        date!(2026 - 11 - 30).midnight().assume_utc()
    );
}

#[test]
fn a_whole_operation_is_marked_in_the_spec() {
    let mut operation = json!({"responses": {"200": {"headers": {}}}});
    assert!(old_rows().is_on("get", "/old/{id}/rows"));
    assert!(!old_rows().is_on("post", "/old/{id}/rows"));
    assert!(!old_rows().is_on("get", "/rows"));
    old_rows().mark(&mut operation);
    assert_eq!(operation["deprecated"], true);
    assert!(operation["responses"]["200"]["headers"]["Sunset"].is_object());
}
