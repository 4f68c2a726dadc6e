//! A database per test in the `PostgreSQL` that `tests/run` started, dropped when the test ends.

use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};

const VARIABLE: &str = "BOTIX_TEST_POSTGRES_URL";

pub struct Database {
    superuser_url: String,
    name: String,
}

impl Database {
    pub async fn create() -> Self {
        let superuser_url = std::env::var(VARIABLE).unwrap_or_else(|_| {
            panic!("{VARIABLE} is not set: run the suites with tests/run, which starts a private PostgreSQL")
        });
        let name = format!("promise_{:016x}", rand::random::<u64>());
        run(&superuser_url, &format!("CREATE DATABASE {name}")).await;
        Self {
            superuser_url,
            name,
        }
    }

    /// Where the database is; `port` puts a proxy in the way.
    pub fn url(&self, port: Option<u16>) -> String {
        let mut url = url::Url::parse(&self.superuser_url).expect("a postgres:// URL");
        url.set_path(&self.name);
        if let Some(port) = port {
            url.set_port(Some(port)).expect("a URL that takes a port");
        }
        url.into()
    }

    /// Host and port of the real server.
    pub fn address(&self) -> String {
        let url = url::Url::parse(&self.superuser_url).expect("a postgres:// URL");
        let host = url.host_str().expect("a host");
        format!("{host}:{}", url.port().unwrap_or(5432))
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let url = self.superuser_url.clone();
        let drop_it = format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.name);
        // A runtime of its own: a test that ends in a panic has no other to give.
        let dropped = std::thread::spawn(move || {
            tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime")
                .block_on(run(&url, &drop_it));
        })
        .join();
        if dropped.is_err() {
            eprintln!("the database {} is left behind", self.name);
        }
    }
}

async fn run(url: &str, statement: &str) {
    let mut connection = PgConnection::connect(url)
        .await
        .unwrap_or_else(|error| panic!("{VARIABLE}: {error}"));
    connection
        .execute(AssertSqlSafe(statement.to_owned()))
        .await
        .unwrap_or_else(|error| panic!("{statement}: {error}"));
}
