//! The cost of a page does not depend on its position: what the databases say they would do. The
//! program prints the texts of its own list queries with their plans on the configured database.

use super::contacts;
use crate::harness::server::TestServer;
use crate::harness::{Backend, on_every_store};

on_every_store!(every_page_of_every_list_uses_its_index);

async fn every_page_of_every_list_uses_its_index(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    contacts(&api, 30).await;
    let lists = server.run_json(&["explain-lists"]).await;
    let lists = lists.as_array().expect("a list of plans");
    for page in ["first", "next", "offset"] {
        assert!(
            lists
                .iter()
                .any(|row| row["list"] == "contacts" && row["page"] == page),
            "the {page} page of contacts"
        );
    }
    for row in lists {
        let plan = match &row["plan"] {
            serde_json::Value::String(text) => text.clone(),
            other => serde_json::to_string_pretty(other).expect("JSON"),
        };
        let shown = format!(
            "{} ({} page): {}\n{plan}",
            row["list"], row["page"], row["sql"]
        );
        match backend {
            Backend::Sqlite => {
                let indexed = plan.contains("USING INDEX") || plan.contains("USING COVERING INDEX");
                assert!(indexed, "{shown}");
                for costly in ["SCAN ", "USE TEMP B-TREE", "AUTOMATIC"] {
                    assert!(!plan.contains(costly), "{costly}: {shown}");
                }
            }
            Backend::Postgres | Backend::PostgresAndRedis => {
                let indexed = plan.contains("Index Scan") || plan.contains("Index Only Scan");
                assert!(indexed && plan.contains("Index Cond"), "{shown}");
                for costly in ["Sort  (", "Seq Scan", "Bitmap", "Filter:"] {
                    assert!(!plan.contains(costly), "{costly}: {shown}");
                }
                // The days are walked side by side, but for what lies on one day.
                let list = row["list"].as_str().expect("a name");
                if ["webhook-attempts", "events"]
                    .iter()
                    .any(|name| list.starts_with(name))
                {
                    let days = plan.matches("Index Cond").count();
                    assert!(plan.contains("Merge Append"), "{shown}");
                    let one_day = list.contains("delivery_id");
                    assert!(if one_day { days == 1 } else { days > 8 }, "{shown}");
                }
            }
        }
        if row["page"] == "next" {
            let sql = row["sql"].as_str().expect("the text");
            assert!(sql.contains("(created_at, id) <"), "{shown}");
            // The index takes the position itself: the rows before it are not even looked at.
            let (bound, kind) = match backend {
                Backend::Sqlite => ("(created_at,id)<(?,?)", ""),
                Backend::Postgres | Backend::PostgresAndRedis => {
                    ("ROW(created_at, id) <", "Index Cond")
                }
            };
            let mut looked_up = plan.lines().filter(|line| line.contains(kind)).peekable();
            let condition = looked_up.peek().is_some()
                && looked_up.all(|line| without_tables(line).contains(bound));
            assert!(condition, "{bound}: {shown}");
        }
    }
}

/// A condition without the tables before its columns, which each partition has its own of.
fn without_tables(condition: &str) -> String {
    let mut plain = String::new();
    for part in condition.split_inclusive('.') {
        match part.strip_suffix('.') {
            Some(before) => {
                let name = |c: char| c.is_alphanumeric() || c == '_';
                plain.push_str(before.trim_end_matches(name));
            }
            None => plain.push_str(part),
        }
    }
    plain
}
