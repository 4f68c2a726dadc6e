//! Walking a list from the first page to the last.

use super::{contacts, ids, next_cursor, next_link, walk, walked};
use crate::harness::server::{Setup, TestServer};
use crate::harness::tcp_proxy::Wire;
use crate::harness::{Backend, eventually, on_every_fault, on_every_store};
use reqwest::Method;
use serde_json::json;

on_every_store!(
    a_list_is_newest_first,
    rows_a_microsecond_apart_come_once_each,
    rows_sharing_a_microsecond_come_once_each,
    a_page_as_large_as_the_list_is_the_last,
    the_default_page_has_twenty_rows,
    a_limit_out_of_range_is_refused,
    the_limit_may_change_between_pages,
    the_link_header_leads_to_the_next_page,
    a_deleted_row_under_the_cursor_does_not_disturb_the_walk,
    rows_created_meanwhile_do_not_enter_the_walk,
    a_cursor_survives_a_restart,
    a_cursor_may_be_used_again,
);

on_every_fault!(a_walk_goes_on_after_the_database_was_lost_between_pages);

async fn a_list_is_newest_first(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let mut made = contacts(&api, 7).await;
    made.reverse();
    for limit in [1, 2, 3, 7, 200] {
        let pages = walk(&api, "/contacts", limit).await;
        assert_eq!(walked(&pages), made, "pages of {limit}");
        assert_eq!(pages.len(), 7usize.div_ceil(limit));
    }
    let empty = server.project("empty").await.api;
    let page = empty.get("/contacts").send().await.expect(200);
    assert_eq!(
        page.json(),
        json!({"data": [], "next_cursor": null, "has_more": false})
    );
}

async fn rows_a_microsecond_apart_come_once_each(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let mut made = contacts(&api, 50).await;
    let rank = "(SELECT count(*) FROM contacts AS older WHERE older.id < contacts.id)";
    server
        .execute(
            &format!(
                "UPDATE contacts SET created_at = TIMESTAMPTZ '2026-01-01 00:00:00.999980Z' \
                 + {rank} * INTERVAL '1 microsecond'"
            ),
            &format!("UPDATE contacts SET created_at = 1767225600999980 + {rank}"),
        )
        .await;
    let pages = walk(&api, "/contacts", 1).await;
    let rows: Vec<_> = pages
        .iter()
        .map(|page| page.json()["data"][0].clone())
        .collect();
    let times: Vec<_> = rows
        .iter()
        .map(|row| row["created_at"].to_string())
        .collect();
    assert!(times.windows(2).all(|pair| pair[0] > pair[1]), "{times:?}");
    let mut seen = walked(&pages);
    seen.sort();
    made.sort();
    assert_eq!(seen, made);
}

async fn rows_sharing_a_microsecond_come_once_each(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let mut made = contacts(&api, 50).await;
    server
        .execute(
            "UPDATE contacts SET created_at = TIMESTAMPTZ '2026-01-01 00:00:00.123456Z'",
            "UPDATE contacts SET created_at = 1767225600123456",
        )
        .await;
    made.sort();
    made.reverse();
    for limit in [1, 7] {
        let pages = walk(&api, "/contacts", limit).await;
        assert_eq!(
            walked(&pages),
            made,
            "pages of {limit}, in the order of their ids"
        );
    }
    let page = api
        .get("/contacts?cursor_limit=1")
        .send()
        .await
        .expect(200)
        .json();
    assert_eq!(page["data"][0]["created_at"], "2026-01-01T00:00:00.123456Z");
}

async fn a_page_as_large_as_the_list_is_the_last(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    contacts(&api, 6).await;
    for (limit, pages) in [(1, 6), (2, 3), (3, 2), (6, 1), (5, 2)] {
        let walk = walk(&api, "/contacts", limit).await;
        assert_eq!(walk.len(), pages, "pages of {limit}: none of them empty");
    }
}

async fn the_default_page_has_twenty_rows(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    contacts(&api, 21).await;
    let page = api.get("/contacts").send().await.expect(200);
    assert_eq!(ids(&page.json()).len(), 20);
    assert!(next_cursor(&page).is_some());
    let page = api
        .get("/contacts?cursor_limit=200")
        .send()
        .await
        .expect(200);
    assert_eq!(ids(&page.json()).len(), 21);
    assert!(next_cursor(&page).is_none());
}

async fn a_limit_out_of_range_is_refused(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    for list in [
        "/contacts",
        "/events",
        "/webhook-endpoints",
        "/webhook-deliveries",
        "/webhook-attempts",
        "/webhook-dead-letters",
        "/plugins",
        "/inspector/bins",
    ] {
        for limit in [
            "-1",
            "0",
            "201",
            "9223372036854775808",
            "18446744073709551616",
            "abc",
            "1.5",
            "1e1",
            "",
            "0x10",
            "%2B5",
            "%205",
        ] {
            let page = api.get(&format!("{list}?cursor_limit={limit}"));
            page.send().await.problem("INVALID_CURSOR_LIMIT");
        }
        for limit in [1, 200] {
            let page = api.get(&format!("{list}?cursor_limit={limit}"));
            page.send().await.expect(200);
        }
    }
}

async fn the_limit_may_change_between_pages(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let mut made = contacts(&api, 10).await;
    made.reverse();
    let mut seen = Vec::new();
    let mut cursor = String::new();
    for limit in [1, 4, 2, 200] {
        let page = api.get(&format!("/contacts?cursor_limit={limit}{cursor}"));
        let answer = page.send().await.expect(200);
        seen.extend(ids(&answer.json()));
        if let Some(next) = next_cursor(&answer) {
            cursor = format!("&cursor={next}");
        }
    }
    assert_eq!(seen, made);
}

async fn the_link_header_leads_to_the_next_page(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let mut made = contacts(&api, 5).await;
    made.reverse();
    let mut seen = Vec::new();
    let mut answer = api.get("/contacts?cursor_limit=2").send().await.expect(200);
    loop {
        seen.extend(ids(&answer.json()));
        let Some(link) = next_link(&answer) else {
            break;
        };
        assert!(
            link.contains("cursor_limit=2"),
            "the page keeps its size: {link}"
        );
        answer = api.outside(Method::GET, &link).send().await.expect(200);
    }
    assert_eq!(seen, made);
}

async fn a_deleted_row_under_the_cursor_does_not_disturb_the_walk(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let mut made = contacts(&api, 9).await;
    made.reverse();
    let page = api.get("/contacts?cursor_limit=3").send().await.expect(200);
    let cursor = next_cursor(&page).expect("more");
    // The last row of the page, on which the cursor stands, and the one after it.
    for id in &made[2..4] {
        api.delete(&format!("/contacts/{id}"))
            .send()
            .await
            .expect(204);
    }
    let rest = api.get(&format!("/contacts?cursor_limit=200&cursor={cursor}"));
    let rest = rest.send().await.expect(200);
    assert_eq!(ids(&rest.json()), made[4..]);
}

async fn rows_created_meanwhile_do_not_enter_the_walk(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let mut made = contacts(&api, 6).await;
    made.reverse();
    let mut seen = Vec::new();
    let mut cursor = String::new();
    loop {
        let page = api.get(&format!("/contacts?cursor_limit=2{cursor}"));
        let answer = page.send().await.expect(200);
        seen.extend(ids(&answer.json()));
        let Some(next) = next_cursor(&answer) else {
            break;
        };
        cursor = format!("&cursor={next}");
        contacts(&api, 3).await;
    }
    assert_eq!(seen, made);
}

async fn a_cursor_survives_a_restart(backend: Backend) {
    let mut server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let made = contacts(&api, 2).await;
    let page = api.get("/contacts?cursor_limit=1").send().await.expect(200);
    let cursor = next_cursor(&page).expect("more");
    server.stop().await;
    server.restart().await;
    let rest = api
        .get(&format!("/contacts?cursor={cursor}"))
        .send()
        .await
        .expect(200);
    assert_eq!(ids(&rest.json()), made[..1]);
}

async fn a_cursor_may_be_used_again(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    contacts(&api, 3).await;
    let page = api.get("/contacts?cursor_limit=1").send().await.expect(200);
    let path = format!(
        "/contacts?cursor_limit=1&cursor={}",
        next_cursor(&page).expect("more")
    );
    let first = api.get(&path).send().await.expect(200);
    let again = api.get(&path).send().await.expect(200);
    assert_eq!(first.json()["data"], again.json()["data"]);
}

async fn a_walk_goes_on_after_the_database_was_lost_between_pages(backend: Backend, fault: Wire) {
    let server = Setup::new(backend).await.wired().await.start().await;
    let api = server.project("shop").await.api;
    let mut made = contacts(&api, 9).await;
    // Half of them share a microsecond.
    server
        .execute(
            "UPDATE contacts SET created_at = TIMESTAMPTZ '2026-01-01 00:00:00.123456Z' \
             WHERE id IN (SELECT id FROM contacts ORDER BY id LIMIT 5)",
            "",
        )
        .await;
    made.reverse();
    let page = api.get("/contacts?cursor_limit=3").send().await.expect(200);
    let mut seen = ids(&page.json());
    let mut cursor = next_cursor(&page);
    // The row on which the cursor stands.
    let gone = api.delete(&format!("/contacts/{}", made[2]));
    gone.send().await.expect(204);
    while let Some(at) = cursor {
        let next = format!("/contacts?cursor_limit=3&cursor={at}");
        server.to_postgres().set(fault);
        let lost = api.get(&next).send().await;
        lost.problem("UNAVAILABLE");
        server.to_postgres().set(Wire::Whole);
        let page = eventually("the next page", async || {
            let answer = api.get(&next).send().await;
            (answer.status != 503).then_some(answer)
        })
        .await
        .expect(200);
        seen.extend(ids(&page.json()));
        cursor = next_cursor(&page);
    }
    assert_eq!(seen, made);
}
