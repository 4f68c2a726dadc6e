//! What an error of a statement means for whoever ran it.

use std::io;

/// The error of a statement that was not answered.
pub fn silence() -> sqlx::Error {
    let text = "PostgreSQL did not answer; the connection is closed";
    sqlx::Error::Io(io::Error::new(io::ErrorKind::TimedOut, text))
}

/// The error of a statement that only PostgreSQL has, on SQLite; whoever asks it looked which one it is before.
pub fn only_postgres() -> sqlx::Error {
    sqlx::Error::Protocol("a statement for PostgreSQL".to_owned())
}

/// Whether an error means that the connection is gone.
pub fn is_broken(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_) | sqlx::Error::Protocol(_) | sqlx::Error::WorkerCrashed => true,
        // The server ended it, or is about to.
        sqlx::Error::Database(error) => error
            .code()
            .is_some_and(|code| code.starts_with("57P") || code.starts_with("08")),
        _ => false,
    }
}

/// Whether an error means that the store is out of reach, rather than that a statement is wrong.
pub fn is_unavailable(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_)
        | sqlx::Error::Tls(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::PoolClosed
        | sqlx::Error::WorkerCrashed
        | sqlx::Error::Protocol(_) => true,
        sqlx::Error::Database(error) => error.code().is_some_and(|code| match code.len() {
            // PostgreSQL: connection, resources, intervention and time-outs, read-only, conflicts.
            5 => {
                ["08", "53", "57"]
                    .iter()
                    .any(|class| code.starts_with(class))
                    || matches!(&*code, "25P03" | "25006" | "40001" | "40P01")
            }
            // SQLite, by the low byte: busy, locked, I/O, full, cannot open.
            _ => code
                .parse::<u32>()
                .is_ok_and(|code| matches!(code & 0xff, 5 | 6 | 10 | 13 | 14)),
        }),
        _ => false,
    }
}

/// Whether a statement gave way to another transaction: a deadlock, or no serial order.
pub fn is_conflict(error: &sqlx::Error) -> bool {
    error
        .as_database_error()
        .and_then(sqlx::error::DatabaseError::code)
        .is_some_and(|code| matches!(&*code, "40001" | "40P01"))
}

/// Whether an error is a violated unique constraint or primary key.
pub fn is_unique_violation(error: &sqlx::Error) -> bool {
    error
        .as_database_error()
        .is_some_and(sqlx::error::DatabaseError::is_unique_violation)
}
