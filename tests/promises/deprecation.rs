//! What is deprecated says so: on every answer to whoever uses it, in the changelog and its feed and in
//! the specification, everywhere with the same days, and works until the last of them has ended.

use crate::harness::Backend;
use crate::harness::api::{Answer, Api};
use crate::harness::command::program;
use crate::harness::on_both_databases;
use crate::harness::server::TestServer;
use reqwest::Method;
use serde_json::Value;
use std::time::{Duration, UNIX_EPOCH};
use time::{Date, OffsetDateTime, macros::date};

on_both_databases!(
    it_works_on_its_last_day,
    after_its_last_day_it_is_gone_and_still_says_where_it_went,
);

const SUNSET: &str = "BOTIX_OFFSET_PAGINATION__SUNSET";
const OLD: &str = "/contacts?pagination=offset";
const RELEASED: Date = date!(2026 - 12 - 01);
const LAST_DAY: Date = date!(2027 - 06 - 01);

fn seconds(date: Date) -> u64 {
    let seconds = date.midnight().assume_utc().unix_timestamp();
    seconds.try_into().expect("after 1970")
}

/// Asserts that an answer has the four headers, exactly, and gives where the changelog explains them.
#[track_caller]
fn says_deprecated(answer: &Answer, since: Date, last_day: Date) -> String {
    let shown = answer.describe();
    assert_eq!(
        answer.header("x-api-notice").expect("a notice"),
        format!("pagination=offset deprecated, migrate by {last_day}"),
        "{shown}"
    );
    let deprecation = answer.header("deprecation").expect("Deprecation");
    assert_eq!(deprecation, format!("@{}", seconds(since)), "{shown}");
    let sunset = answer.header("sunset").expect("Sunset");
    let moment = httpdate::parse_http_date(sunset).expect("an HTTP date");
    assert_eq!(httpdate::fmt_http_date(moment), sunset);
    let last_second = UNIX_EPOCH + Duration::from_secs(seconds(last_day) + 24 * 60 * 60 - 1);
    assert_eq!(moment, last_second, "{shown}");
    assert_eq!(answer.headers.get_all("link").iter().count(), 1, "{shown}");
    let links = answer.header("link").expect("Link");
    let explained: Vec<_> = links
        .split(", ")
        .filter_map(|link| {
            link.strip_suffix(">; rel=\"deprecation\"")?
                .strip_prefix('<')
        })
        .collect();
    assert_eq!(explained.len(), 1, "{links}");
    explained[0].to_owned()
}

#[track_caller]
fn says_nothing(answer: &Answer) {
    for header in ["x-api-notice", "deprecation", "sunset"] {
        assert_eq!(answer.header(header), None, "{}", answer.describe());
    }
    let links = answer.header("link").unwrap_or_default();
    assert!(!links.contains("deprecation"), "{links}");
}

/// The server with its public URL, and a caller with two contacts.
async fn server(env: &[(&str, &str)]) -> (TestServer, Api) {
    let server = TestServer::start(Backend::Sqlite, env).await;
    let api = server.project("shop").await.api;
    crate::cursors::contacts(&api, 2).await;
    (server, api)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_answer_to_its_users_carries_all_four_headers() {
    let (server, api) = server(&[]).await;
    for (caller, query, status) in [
        (&api, "", 200),
        (&api, "&limit=1", 200),
        (&api, "&offset=5", 200),
        (&api, "&offset=10001", 400),
        (&api, "&offset=-1", 400),
        (&api, "&limit=0", 400),
        (&api, "&cursor=abc", 400),
        (&api.anonymous(), "", 401),
    ] {
        let answer = caller.get(&format!("{OLD}{query}")).send().await;
        let answer = answer.expect(status);
        let explained = says_deprecated(&answer, RELEASED, LAST_DAY);
        assert_eq!(
            explained,
            format!("{}/changelog#offset-pagination", server.url())
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_link_to_the_changelog_joins_the_link_to_the_next_page() {
    let (_server, api) = server(&[]).await;
    let page = api.get(&format!("{OLD}&limit=1")).send().await.expect(200);
    says_deprecated(&page, RELEASED, LAST_DAY);
    let links = page.header("link").expect("Link");
    assert_eq!(links.split(", ").count(), 2, "{links}");
    assert!(crate::cursors::next_link(&page).is_some(), "{links}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_walks_by_cursors_is_told_nothing() {
    let (_server, api) = server(&[]).await;
    for path in [
        "/contacts",
        "/contacts?cursor_limit=1",
        "/contacts?pagination=cursor",
        "/contacts?cursor=abc",
        "/contacts?offset=1",
        "/contacts/count",
        "/contacts/count?pagination=offset",
        "/events?pagination=offset",
    ] {
        says_nothing(&api.get(path).send().await);
    }
}

async fn it_works_on_its_last_day(backend: Backend) {
    // Once more where midnight passes in between.
    loop {
        let today = OffsetDateTime::now_utc().date();
        let server = TestServer::start(backend, &[(SUNSET, &today.to_string())]).await;
        let api = server.project("shop").await.api;
        let answer = api.get(OLD).send().await;
        if OffsetDateTime::now_utc().date() == today {
            says_deprecated(&answer.expect(200), RELEASED.min(today), today);
            return;
        }
    }
}

async fn after_its_last_day_it_is_gone_and_still_says_where_it_went(backend: Backend) {
    let today = OffsetDateTime::now_utc().date();
    let yesterday = today.previous_day().expect("a day");
    let server = TestServer::start(backend, &[(SUNSET, &yesterday.to_string())]).await;
    let api = server.project("shop").await.api;
    crate::cursors::contacts(&api, 2).await;
    for query in ["", "&limit=1", "&offset=10001", "&limit=0"] {
        let answer = api.get(&format!("{OLD}{query}")).send().await.expect(410);
        says_deprecated(&answer, RELEASED.min(yesterday), yesterday);
        let problem = answer.problem("OFFSET_PAGINATION_RETIRED");
        let detail = problem["detail"].as_str().expect("a detail");
        assert!(detail.contains(&yesterday.to_string()), "{detail}");
        assert!(detail.contains("`cursor`"), "what to do instead: {detail}");
    }
    let anonymous = api.anonymous().get(OLD).send().await;
    anonymous.problem("UNAUTHENTICATED");
    // What replaces it is untouched.
    let page = api.get("/contacts?cursor_limit=1").send().await.expect(200);
    says_nothing(&page);
    assert!(crate::cursors::next_cursor(&page).is_some());
}

#[test]
fn a_last_day_that_is_no_day_stops_the_start_with_its_name() {
    for wrong in [
        "soon",
        "2027-13-01",
        "2027-02-29",
        "2027-6-1",
        "1.6.2027",
        "",
    ] {
        let output = program()
            .args(["serve", "--database-url", "sqlite:never-made/botix.db"])
            .current_dir(std::env::temp_dir())
            .env(SUNSET, wrong)
            .output()
            .expect("the program starts");
        assert!(!output.status.success(), "{wrong}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(SUNSET), "{wrong}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_changelog_explains_it_where_its_answers_point() {
    for (env, last_day) in [
        (&[][..], LAST_DAY),
        (&[(SUNSET, "2099-12-31")][..], date!(2099 - 12 - 31)),
    ] {
        let (server, api) = server(env).await;
        let answer = api.get(OLD).send().await.expect(200);
        let explained = says_deprecated(&answer, RELEASED, last_day);
        let (page, anchor) = explained.split_once('#').expect("an anchor");
        let api = api.anonymous();
        let html = api.outside(Method::GET, page).send().await.expect(200);
        let content_type = html.header("content-type").expect("a type");
        assert!(content_type.starts_with("text/html"), "{content_type}");
        let html = html.text();
        let section = html
            .split("<section ")
            .find(|section| section.starts_with(&format!("id=\"{anchor}\"")))
            .unwrap_or_else(|| panic!("a section {anchor}: {html}"));
        for told in [
            &last_day.to_string(),
            &RELEASED.to_string(),
            "pagination=offset",
        ] {
            assert!(section.contains(told), "{told} in {section}");
        }
        let json = api.outside(Method::GET, page);
        let json = json.header("accept", "application/json").send().await;
        let json = json.expect(200).json();
        let entries = json["data"].as_array().expect("entries");
        let entry = entries.iter().find(|entry| entry["id"] == anchor);
        let entry = entry.expect("the entry");
        assert_eq!(entry["kind"], "deprecation");
        assert_eq!(entry["date"], RELEASED.to_string());
        assert_eq!(entry["last_day"], last_day.to_string());
        assert_eq!(entry["url"], explained);
        assert_eq!(explained, format!("{}/changelog#{anchor}", server.url()));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_feed_of_the_changelog_is_rss_with_an_item_for_each_entry() {
    let (server, api) = server(&[]).await;
    let api = api.anonymous();
    let answer = api.outside(Method::GET, "/changelog/rss").send().await;
    let answer = answer.expect(200);
    let content_type = answer.header("content-type").expect("a type");
    assert!(
        content_type.starts_with("application/rss+xml"),
        "{content_type}"
    );
    assert!(answer.text().contains("<rss version=\"2.0\""));
    let feed = rss::Channel::read_from(answer.body.as_slice()).expect("RSS");
    assert_eq!(feed.link, format!("{}/changelog", server.url()));
    assert!(!feed.title.is_empty() && !feed.description.is_empty());

    let json = api.outside(Method::GET, "/changelog");
    let json = json
        .header("accept", "application/json")
        .send()
        .await
        .json();
    let entries = json["data"].as_array().expect("entries");
    assert_eq!(feed.items.len(), entries.len());
    for entry in entries {
        let url = entry["url"].as_str().expect("a URL");
        let item = feed.items.iter().find(|item| item.link() == Some(url));
        let item = item.unwrap_or_else(|| panic!("{url} in {feed}"));
        let guid = item.guid().expect("a guid");
        assert!(guid.value == url && guid.permalink, "{guid:?}");
        let published = item.pub_date().expect("pubDate");
        let published = httpdate::parse_http_date(published).expect("an RFC 822 date");
        assert_eq!(
            published,
            UNIX_EPOCH + Duration::from_secs(seconds(RELEASED))
        );
        assert!(item.title().is_some_and(|title| !title.is_empty()));
        if let Some(last_day) = entry["last_day"].as_str() {
            assert_eq!(last_day, LAST_DAY.to_string());
            let told = item.description().expect("a description");
            assert!(told.contains(last_day), "{told}");
        }
    }
    assert!(entries.iter().any(|entry| entry["kind"] == "deprecation"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_changelog_is_linked_from_the_home_page_and_loads_nothing_from_outside() {
    let (server, api) = server(&[]).await;
    let api = api.anonymous();
    let home = api
        .outside(Method::GET, "/")
        .send()
        .await
        .expect(200)
        .text();
    for target in ["/changelog", "/changelog/rss"] {
        assert!(home.contains(&format!("<a href=\"{target}\"")), "{home}");
    }
    let page = api.outside(Method::GET, "/changelog").send().await.text();
    assert!(page.contains("<a href=\"/changelog/rss\""), "{page}");
    for (at, _) in page.match_indices("://") {
        let start = page[..at]
            .rfind(['"', '\'', ' ', '>'])
            .map_or(0, |at| at + 1);
        assert!(
            page[start..].starts_with(&server.url()),
            "{}",
            &page[start..]
        );
    }
}

fn spec(version: &str) -> Value {
    let output = program()
        .args(["openapi", "--version", version])
        .output()
        .expect("the program starts");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[test]
fn the_spec_marks_it_on_the_lists_that_have_it_alone() {
    for version in ["3.1", "3.0"] {
        let spec = spec(version);
        for (path, item) in spec["paths"].as_object().expect("paths") {
            for (method, operation) in item.as_object().expect("operations") {
                let has_it = path == "/contacts" && method == "get";
                let parameters = operation["parameters"].as_array();
                let deprecated: Vec<_> = parameters
                    .into_iter()
                    .flatten()
                    .filter(|parameter| parameter["deprecated"] == true)
                    .collect();
                let names: Vec<_> = deprecated.iter().map(|p| p["name"].as_str()).collect();
                let text = operation.to_string();
                for code in ["OFFSET_TOO_LARGE", "OFFSET_PAGINATION_RETIRED"] {
                    assert_eq!(text.contains(code), has_it, "{code} of {method} {path}");
                }
                if !has_it {
                    assert!(names.is_empty(), "{method} {path}: {names:?}");
                    continue;
                }
                assert_eq!(names, ["pagination", "offset", "limit"].map(Some));
                for parameter in deprecated {
                    assert_eq!(parameter["in"], "query");
                    assert_ne!(parameter["required"], true);
                    let about = parameter["description"].as_str().expect("a description");
                    assert!(about.contains(&LAST_DAY.to_string()), "{about}");
                    assert!(about.contains("/changelog#offset-pagination"), "{about}");
                }
                for status in ["200", "400", "410"] {
                    let headers = &operation["responses"][status]["headers"];
                    for header in ["X-API-Notice", "Deprecation", "Sunset", "Link"] {
                        assert!(headers[header].is_object(), "{header} of {status}");
                    }
                }
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_served_spec_names_the_last_day_of_the_settings() {
    let (_server, api) = server(&[(SUNSET, "2099-12-31")]).await;
    let served = api.anonymous().outside(Method::GET, "/openapi.json");
    let served = served.send().await.expect(200).text();
    assert!(served.contains("works until 2099-12-31"));
    assert!(!served.contains(&LAST_DAY.to_string()));
}
