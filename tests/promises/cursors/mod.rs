//! Stable lists: every row once whatever happens meanwhile, and a cursor that cannot be bent.

mod binding;
mod offset;
mod plans;
mod walk;

use crate::harness::api::{Answer, Api};
use crate::harness::fresh_phone;
use serde_json::{Value, json};

/// Makes contacts, each after the one before, and gives their ids, oldest first.
pub async fn contacts(api: &Api, n: usize) -> Vec<String> {
    let mut ids = Vec::new();
    for _ in 0..n {
        let body = json!({"phone": fresh_phone()});
        let created = api.post("/contacts").json(&body).send().await.expect(201);
        ids.push(created.member("id"));
    }
    ids
}

/// The ids of a page's rows, in their order.
pub fn ids(page: &Value) -> Vec<String> {
    let rows = page["data"].as_array().expect("a list");
    rows.iter()
        .map(|row| row["id"].as_str().expect("an id").to_owned())
        .collect()
}

/// The page's cursor, checked against what every page promises.
pub fn next_cursor(answer: &Answer) -> Option<String> {
    let page = answer.json();
    let mut members: Vec<_> = page.as_object().expect("an object").keys().collect();
    members.sort();
    assert_eq!(members, ["data", "has_more", "next_cursor"]);
    let cursor = page["next_cursor"].as_str().map(str::to_owned);
    assert_eq!(page["has_more"], cursor.is_some(), "{}", answer.describe());
    assert_eq!(
        next_link(answer).is_some(),
        cursor.is_some(),
        "{}",
        answer.describe()
    );
    if let Some(cursor) = &cursor {
        let url_safe = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        assert!(
            cursor.chars().all(url_safe),
            "unescaped in a query: {cursor}"
        );
    }
    cursor
}

/// Where `Link: <…>; rel="next"` leads.
pub fn next_link(answer: &Answer) -> Option<String> {
    let links = answer.header("link")?;
    let next = links
        .split(',')
        .find(|link| link.contains("rel=\"next\""))?;
    let start = next.find('<').expect("a target") + 1;
    Some(next[start..next.find('>').expect("a target")].to_owned())
}

/// Walks a list to its end and gives every page's answer.
pub async fn walk(api: &Api, path: &str, limit: usize) -> Vec<Answer> {
    let mut pages = Vec::new();
    let mut cursor = String::new();
    let join = if path.contains('?') { '&' } else { '?' };
    loop {
        let page = api.get(&format!("{path}{join}cursor_limit={limit}{cursor}"));
        let answer = page.send().await.expect(200);
        let next = next_cursor(&answer);
        pages.push(answer);
        match next {
            Some(next) => cursor = format!("&cursor={next}"),
            None => return pages,
        }
        assert!(pages.len() < 1_000, "a walk that never ends");
    }
}

pub fn walked(pages: &[Answer]) -> Vec<String> {
    pages.iter().flat_map(|page| ids(&page.json())).collect()
}
