//! The deprecated offset mode: the same rows in the same order as the walk by cursors, within bounds,
//! and a way from the middle of it into that walk.

use super::{contacts, ids, next_cursor, next_link, walk, walked};
use crate::harness::server::TestServer;
use crate::harness::{Backend, on_both_databases};
use reqwest::Method;
use serde_json::json;

on_both_databases!(
    pages_by_offset_agree_with_the_walk_by_cursors,
    a_page_by_offset_carries_the_cursor_that_continues_after_it,
    an_offset_goes_up_to_ten_thousand,
    a_page_by_offset_takes_1_to_200_rows,
    the_two_modes_do_not_mix,
    a_list_that_never_had_the_mode_refuses_it,
);

async fn pages_by_offset_agree_with_the_walk_by_cursors(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    contacts(&api, 23).await;
    contacts(&server.project("other").await.api, 3).await;
    // Rows that share a moment come in the order of their ids in both modes.
    server
        .execute(
            "UPDATE contacts SET created_at = TIMESTAMPTZ '2026-01-01 00:00:00.123456Z'",
            "UPDATE contacts SET created_at = 1767225600123456",
        )
        .await;
    let all = walked(&walk(&api, "/contacts", 200).await);
    assert_eq!(all.len(), 23);
    for limit in [1, 5, 22, 23, 200] {
        for offset in [0, 1, 5, 22, 23, 24] {
            let page = api.get(&format!(
                "/contacts?pagination=offset&offset={offset}&limit={limit}"
            ));
            let page = page.send().await.expect(200);
            let rest = &all[offset.min(23)..];
            let expected = &rest[..limit.min(rest.len())];
            assert_eq!(ids(&page.json()), expected, "{}", page.describe());
            let more = next_cursor(&page).is_some();
            assert_eq!(more, rest.len() > limit, "{}", page.describe());
        }
    }
    let page = api.get("/contacts?pagination=offset").send().await;
    assert_eq!(ids(&page.expect(200).json()), all[..20]);
    let page = api.get("/contacts?pagination=cursor").send().await;
    assert_eq!(ids(&page.expect(200).json()), all[..20]);
}

async fn a_page_by_offset_carries_the_cursor_that_continues_after_it(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    contacts(&api, 9).await;
    let all = walked(&walk(&api, "/contacts", 200).await);
    let page = api.get("/contacts?pagination=offset&offset=2&limit=3");
    let page = page.send().await.expect(200);
    assert_eq!(ids(&page.json()), all[2..5]);
    let cursor = next_cursor(&page).expect("more");
    // Rows that are new shift every offset, and not the walk.
    contacts(&api, 2).await;
    let rest = api.get(&format!("/contacts?cursor={cursor}")).send().await;
    assert_eq!(ids(&rest.expect(200).json()), all[5..]);

    let mut seen = ids(&page.json());
    let mut answer = page;
    while let Some(link) = next_link(&answer) {
        for gone in ["pagination", "offset=", "&limit=", "?limit="] {
            assert!(!link.contains(gone), "{gone} in {link}");
        }
        assert!(link.contains("cursor_limit=3"), "its size stays: {link}");
        answer = api.outside(Method::GET, &link).send().await.expect(200);
        seen.extend(ids(&answer.json()));
    }
    assert_eq!(seen, all[2..]);
}

async fn an_offset_goes_up_to_ten_thousand(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    contacts(&api, 2).await;
    let page = api.get("/contacts?pagination=offset&offset=10000").send();
    assert_eq!(
        page.await.expect(200).json(),
        json!({"data": [], "next_cursor": null, "has_more": false})
    );
    for offset in ["10001", "9223372036854775808", "99999999999999999999999"] {
        let page = api.get(&format!("/contacts?pagination=offset&offset={offset}"));
        page.send().await.problem("OFFSET_TOO_LARGE");
    }
    for offset in [
        "-1", "-0", "", "abc", "1.5", "1e1", "0x10", "%2B5", "%205", "٣",
    ] {
        let page = api.get(&format!("/contacts?pagination=offset&offset={offset}"));
        let problem = page.send().await.problem("INVALID_PARAMETER");
        let detail = problem["detail"].as_str().expect("a detail");
        assert!(detail.starts_with("offset:"), "{detail}");
    }
}

async fn a_page_by_offset_takes_1_to_200_rows(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    for limit in [
        "-1",
        "0",
        "201",
        "18446744073709551616",
        "abc",
        "1.5",
        "",
        "%2B5",
        "%205",
    ] {
        let page = api.get(&format!("/contacts?pagination=offset&limit={limit}"));
        let problem = page.send().await.problem("INVALID_PARAMETER");
        let detail = problem["detail"].as_str().expect("a detail");
        assert!(detail.starts_with("limit:"), "{detail}");
    }
    for limit in [1, 200] {
        let page = api.get(&format!("/contacts?pagination=offset&limit={limit}"));
        page.send().await.expect(200);
    }
}

async fn the_two_modes_do_not_mix(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    contacts(&api, 2).await;
    let page = api.get("/contacts?cursor_limit=1").send().await.expect(200);
    let cursor = next_cursor(&page).expect("more");
    for (query, named) in [
        (format!("pagination=offset&cursor={cursor}"), "cursor:"),
        ("pagination=offset&cursor=".to_owned(), "cursor:"),
        (
            "pagination=offset&cursor_limit=5".to_owned(),
            "cursor_limit:",
        ),
        ("offset=0".to_owned(), "offset:"),
        ("pagination=cursor&offset=5".to_owned(), "offset:"),
        (format!("cursor={cursor}&offset=5"), "offset:"),
        ("limit=5".to_owned(), "limit:"),
        ("pagination=".to_owned(), "pagination:"),
        ("pagination=Offset".to_owned(), "pagination:"),
        ("pagination=page".to_owned(), "pagination:"),
    ] {
        let page = api.get(&format!("/contacts?{query}")).send().await;
        let problem = page.problem("INVALID_PARAMETER");
        let detail = problem["detail"].as_str().expect("a detail");
        assert!(detail.starts_with(named), "{query}: {detail}");
    }
}

async fn a_list_that_never_had_the_mode_refuses_it(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    for list in [
        "/events",
        "/event-types",
        "/webhook-endpoints",
        "/webhook-deliveries",
        "/webhook-attempts",
        "/webhook-dead-letters",
        "/plugins",
        "/inspector/bins",
    ] {
        for query in [
            "pagination=offset",
            "pagination=offset&offset=99999",
            "offset=1",
        ] {
            let answer = api.get(&format!("{list}?{query}")).send().await;
            for header in ["x-api-notice", "deprecation", "sunset"] {
                assert_eq!(answer.header(header), None, "{}", answer.describe());
            }
            answer.problem("INVALID_PARAMETER");
        }
        let page = api.get(&format!("{list}?pagination=cursor")).send().await;
        page.expect(200);
    }
}
