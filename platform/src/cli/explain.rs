//! `botix explain-lists`: how the database would walk each list.

use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Row as _};
use ulid::Ulid;
use uuid::Uuid;

use super::CommandResult;
use crate::{
    app::{self, Store},
    config::Config,
    db::Db,
};

pub(super) async fn run(config: Config) -> CommandResult {
    let db = Store::open(config).await?.db;
    let mut plans = Vec::new();
    for list in app::lists() {
        let pages = [("first", &list.first), ("next", &list.next)];
        let offset = list.offset.iter().map(|texts| match db {
            Db::Postgres(_) => ("offset", &texts.postgres),
            Db::Sqlite { .. } => ("offset", &texts.sqlite),
        });
        for (page, sql) in pages.into_iter().chain(offset) {
            let plan = explain(&db, sql).await?;
            plans.push(json!({"list": list.list, "page": page, "sql": sql, "plan": plan}));
        }
    }
    println!("{:#}", Value::Array(plans));
    Ok(())
}

/// The plan with every parameter unknown: a generic plan in PostgreSQL, the only kind in SQLite.
async fn explain(db: &Db, sql: &str) -> sqlx::Result<String> {
    let lines: Vec<String> = match db {
        Db::Postgres(connections) => {
            let mut conn = connections.pool().acquire().await?;
            // An empty table is read whole whatever the index; the index must be usable, that is asked.
            for setting in [
                "SET enable_seqscan = off",
                "SET plan_cache_mode = force_generic_plan",
            ] {
                sqlx::query(setting).execute(&mut *conn).await?;
            }
            sqlx::raw_sql(AssertSqlSafe(format!("PREPARE list AS {sql}")))
                .execute(&mut *conn)
                .await?;
            let types: Vec<String> = sqlx::query_scalar(
                "SELECT CAST(UNNEST(parameter_types) AS TEXT) FROM pg_prepared_statements \
                 WHERE name = 'list'",
            )
            .fetch_all(&mut *conn)
            .await?;
            let values: Vec<_> = types.iter().map(|of| some_value(of)).collect();
            let values = values.join(", ");
            let rows = sqlx::raw_sql(AssertSqlSafe(format!("EXPLAIN EXECUTE list({values})")))
                .fetch_all(&mut *conn)
                .await?;
            sqlx::raw_sql("DEALLOCATE list").execute(&mut *conn).await?;
            rows.iter()
                .map(|row| row.try_get(0))
                .collect::<Result<_, _>>()?
        }
        Db::Sqlite { readers, .. } => {
            sqlx::query(AssertSqlSafe(format!("EXPLAIN QUERY PLAN {sql}")))
                .fetch_all(readers)
                .await?
                .iter()
                .map(|row| row.try_get("detail"))
                .collect::<Result<_, _>>()?
        }
    };
    Ok(lines.join("\n"))
}

/// A value of a PostgreSQL type. The plan does not depend on it; with NULL or an id of no time at all,
/// though, there would be no partition left to look at.
fn some_value(of: &str) -> String {
    match of {
        "uuid" => format!("'{}'", Uuid::from_bytes(Ulid::generate().to_bytes())),
        "timestamp with time zone" => "now()".to_owned(),
        "bigint" => "20".to_owned(),
        _ => "''".to_owned(),
    }
}
