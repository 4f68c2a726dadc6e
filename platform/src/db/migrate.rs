//! Migrations of this project and of the job queue, each with its own history table.

use apalis_postgres::PostgresStorage;
use apalis_sqlite::SqliteStorage;
use sqlx::{
    ConnectOptions as _,
    migrate::{MigrateError, Migrator},
};

use super::Db;

static POSTGRES: Migrator = sqlx::migrate!("../migrations/postgres");
static SQLITE: Migrator = sqlx::migrate!("../migrations/sqlite");

/// The history table of this project's own migrations; the job queue keeps sqlx's default name.
const HISTORY: &str = "botix_migrations";

pub(super) async fn run(db: &Db) -> Result<(), MigrateError> {
    match db {
        Db::Postgres(connections) => {
            // A connection of its own: what changes a large table may take longer than any other statement.
            let options = (*connections.pool().connect_options()).clone();
            let options = options.options([("statement_timeout", "0")]);
            let mut connection = options.connect().await?;
            PostgresStorage::migrations().run(&mut connection).await?;
            own(&POSTGRES).run(&mut connection).await
        }
        Db::Sqlite { writer, .. } => {
            // Only the migrations: the queue's own set-up would also turn `synchronous` off.
            SqliteStorage::migrations().run(writer).await?;
            own(&SQLITE).run(writer).await
        }
    }
}

fn own(migrator: &Migrator) -> Migrator {
    let mut own = Migrator::with_migrations(migrator.iter().cloned().collect());
    own.dangerous_set_table_name(HISTORY);
    own
}
