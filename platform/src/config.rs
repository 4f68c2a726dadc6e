//! Typed settings: defaults, then a TOML file, then `BOTIX_*` variables, then flags.
//!
//! Every layer is checked by the same types, so a wrong value or an unknown key stops the start with
//! one line that names it, whatever layer it came from. `__` nests in variable names
//! (`BOTIX_WEBHOOKS__LADDER`). Durations are written `30s`, `15m`, `24h`. `DATABASE_URL` and
//! `REDIS_URL`, as hosting platforms set them, count where the `BOTIX_` name is absent. Names that
//! start with `BOTIX_TEST_` belong to the test suites and are not settings.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use figment::{
    Figment,
    providers::{Env, Format as _, Serialized, Toml},
};
use secrecy::{ExposeSecret as _, SecretBox, SecretString};
use serde::{Deserialize, Deserializer, de};
use time::{Date, macros::format_description};

/// All settings of one process.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The address to listen on; port 0 lets the system choose one.
    #[serde(default = "default_listen")]
    pub listen: SocketAddr,
    /// One more address, for `/healthz`, `/readyz` and `/metrics` alone; absent: none.
    #[serde(default)]
    pub monitor_listen: Option<SocketAddr>,
    /// `sqlite:PATH` or `postgres://…`.
    #[serde(default = "default_database_url")]
    pub database_url: SecretString,
    /// Connections to keep to PostgreSQL, or readers of SQLite.
    #[serde(default = "default_pool")]
    pub database_connections: u32,
    /// Redis, shared by all nodes; absent: SQL and in-process take its place.
    #[serde(default)]
    pub redis_url: Option<SecretString>,
    /// The key that encrypts stored secrets and from which cursor and artefact keys are derived.
    #[serde(default)]
    pub master_key: Option<MasterKey>,
    /// What links and inspector URLs start with; absent: the listen address.
    #[serde(default)]
    pub public_url: Option<url::Url>,
    /// Filter of the log, in the syntax of `tracing-subscriber`.
    #[serde(default = "default_log")]
    pub log: String,
    /// How often what has had its time is removed, what was lost is looked for, and gauges are read.
    #[serde(default = "default_sweep_every", deserialize_with = "duration")]
    pub sweep_every: Duration,
    /// How webhooks go out.
    #[serde(default)]
    pub webhooks: Webhooks,
    /// How answers are kept.
    #[serde(default)]
    pub idempotency: Idempotency,
    /// How much a project may ask.
    #[serde(default)]
    pub rate_limit: RateLimit,
    /// How cursors are signed.
    #[serde(default)]
    pub cursors: Cursors,
    /// When the deprecated list mode ends.
    #[serde(default)]
    pub offset_pagination: OffsetPagination,
}

/// Settings of webhooks on their way out.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Webhooks {
    /// Delays after attempts 1, 2, 3, 4; the attempt after the last one is the final one.
    #[serde(deserialize_with = "durations")]
    pub ladder: Vec<Duration>,
    /// Time a target has to accept a connection, TLS included.
    #[serde(deserialize_with = "duration")]
    pub connect_timeout: Duration,
    /// Time a target has for its whole answer, counted from the start of the attempt.
    #[serde(deserialize_with = "duration")]
    pub read_timeout: Duration,
    /// Lets targets be loopback and private addresses.
    pub allow_private_targets: bool,
    /// Requests in flight per endpoint and process.
    pub endpoint_concurrency: usize,
    /// Deliveries in flight per process.
    pub concurrency: usize,
}

impl Default for Webhooks {
    fn default() -> Self {
        Self {
            ladder: [60, 15 * 60, 60 * 60, 24 * 60 * 60]
                .map(Duration::from_secs)
                .to_vec(),
            connect_timeout: Duration::from_secs(10),
            read_timeout: Duration::from_secs(30),
            allow_private_targets: false,
            endpoint_concurrency: 64,
            concurrency: 1_000,
        }
    }
}

/// Settings of the idempotency records.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Idempotency {
    /// How long a finished answer is kept.
    #[serde(deserialize_with = "duration")]
    pub ttl: Duration,
    /// How long a key stays captured in Redis by a process that died; renewed while the request runs.
    #[serde(deserialize_with = "duration")]
    pub lease: Duration,
}

impl Default for Idempotency {
    fn default() -> Self {
        Self {
            ttl: Duration::from_hours(24),
            lease: Duration::from_mins(1),
        }
    }
}

/// Settings of the rate limit, per project.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RateLimit {
    /// Requests allowed per window.
    pub requests: u32,
    /// The window.
    #[serde(deserialize_with = "duration")]
    pub window: Duration,
}

impl Default for RateLimit {
    fn default() -> Self {
        Self {
            requests: 6_000,
            window: Duration::from_mins(1),
        }
    }
}

/// Settings of the keys that sign cursors.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Cursors {
    /// The numbers of the keys, derived from the master key: the first signs, a second one verifies.
    #[serde(deserialize_with = "numbers")]
    pub keys: Vec<u32>,
}

impl Default for Cursors {
    fn default() -> Self {
        Self { keys: vec![1] }
    }
}

/// Settings of the deprecated offset mode of lists.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OffsetPagination {
    /// Its last day, in UTC; absent: six months after the release that deprecated it.
    #[serde(deserialize_with = "day")]
    pub sunset: Option<Date>,
}

/// 32 secret bytes, written in base64.
#[derive(Debug)]
pub struct MasterKey(SecretBox<[u8; 32]>);

impl MasterKey {
    /// A fresh random key.
    pub fn generate() -> Self {
        Self(SecretBox::new(Box::new(rand::random())))
    }

    /// Reads base64 of exactly 32 bytes.
    pub fn parse(text: &str) -> Result<Self, String> {
        let bytes = STANDARD
            .decode(text.trim())
            .map_err(|_| "a master key is base64 of 32 bytes")?;
        let bytes: [u8; 32] = bytes
            .try_into()
            .map_err(|_| "a master key has 32 bytes, no more and no fewer")?;
        Ok(Self(SecretBox::new(Box::new(bytes))))
    }

    /// The key in base64, to be written to its file.
    pub fn to_base64(&self) -> String {
        STANDARD.encode(self.0.expose_secret())
    }

    /// A key of its own for one purpose (HKDF-SHA256 with the purpose as info).
    pub fn derive(&self, purpose: &str) -> [u8; 32] {
        let mut key = [0; 32];
        hkdf::Hkdf::<sha2::Sha256>::new(None, self.0.expose_secret())
            .expand(purpose.as_bytes(), &mut key)
            .expect("32 bytes are a valid length for HKDF-SHA256");
        key
    }
}

impl<'de> Deserialize<'de> for MasterKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::parse(&String::deserialize(deserializer)?).map_err(de::Error::custom)
    }
}

/// What the command line may override.
#[derive(Debug, Default, serde::Serialize)]
pub struct Overrides {
    /// See [`Config::listen`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listen: Option<String>,
    /// See [`Config::database_url`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub database_url: Option<String>,
    /// See [`Config::public_url`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub public_url: Option<String>,
}

/// Why the settings could not be read: one line that names the setting.
#[derive(Debug, thiserror::Error)]
#[error("configuration: {0}")]
pub struct ConfigError(String);

impl Config {
    /// Reads every layer; `file` is the `--config` file.
    pub fn load(file: Option<&Path>, overrides: &Overrides) -> Result<Self, ConfigError> {
        let mut figment = Figment::new();
        if let Some(file) = file {
            if !file.is_file() {
                return Err(ConfigError(format!(
                    "--config {}: no such file",
                    file.display()
                )));
            }
            // Looked at alone first: a fault of syntax does not say which file it is in.
            Figment::from(Toml::file_exact(file))
                .extract::<figment::value::Dict>()
                .map_err(|error| {
                    let what = error.to_string().replace('\n', " ");
                    ConfigError(format!("--config {}: {what}", file.display()))
                })?;
            figment = figment.merge(Toml::file_exact(file));
        }
        let figment = figment
            .merge(Env::raw().only(&["DATABASE_URL", "REDIS_URL"]))
            .merge(
                Env::prefixed("BOTIX_")
                    .filter(|name| !name.starts_with("TEST_"))
                    .split("__"),
            )
            .merge(Serialized::defaults(overrides));
        let config: Self = figment.extract().map_err(|error| describe(&error))?;
        config.check()
    }

    fn check(self) -> Result<Self, ConfigError> {
        let wrong = |key: &str, why: &str| Err(ConfigError(format!("{key}: {why}")));
        if !self.is_postgres() && self.sqlite_path().is_none() {
            return wrong("database_url", "starts with sqlite: or postgres://");
        }
        if self.webhooks.ladder.len() != 4 {
            return wrong(
                "webhooks.ladder",
                "has four delays: after attempts 1, 2, 3 and 4",
            );
        }
        if self.webhooks.endpoint_concurrency == 0 {
            return wrong("webhooks.endpoint_concurrency", "is at least 1");
        }
        if self.webhooks.concurrency == 0 {
            return wrong("webhooks.concurrency", "is at least 1");
        }
        if self.database_connections < 2 {
            return wrong("database_connections", "is at least 2");
        }
        for (key, time) in [
            ("webhooks.connect_timeout", self.webhooks.connect_timeout),
            ("webhooks.read_timeout", self.webhooks.read_timeout),
            ("sweep_every", self.sweep_every),
            ("idempotency.ttl", self.idempotency.ttl),
            ("idempotency.lease", self.idempotency.lease),
        ] {
            if time.is_zero() {
                return wrong(key, "is longer than nothing");
            }
        }
        let keys = &self.cursors.keys;
        if !matches!(keys.len(), 1 | 2) || keys.contains(&0) || keys.first() == keys.get(1) {
            return wrong(
                "cursors.keys",
                "is the number, from 1, of the key that signs, and of at most one other that verifies",
            );
        }
        if self.idempotency.lease < Duration::from_secs(1) {
            return wrong("idempotency.lease", "is at least 1s");
        }
        if tracing_subscriber::EnvFilter::try_new(&self.log).is_err() {
            return wrong("log", "is a filter like info,botix=debug");
        }
        let redis = self
            .redis_url
            .as_ref()
            .map(secrecy::ExposeSecret::expose_secret);
        if redis.is_some_and(|url| !url.starts_with("redis://") && !url.starts_with("rediss://")) {
            return wrong("redis_url", "starts with redis:// or rediss://");
        }
        if self.rate_limit.requests == 0 {
            return wrong("rate_limit.requests", "is at least 1");
        }
        if self.rate_limit.window < Duration::from_secs(1) {
            return wrong("rate_limit.window", "is at least 1s");
        }
        if self.is_postgres() && self.master_key.is_none() {
            return wrong(
                "master_key",
                "BOTIX_MASTER_KEY is required with PostgreSQL: base64 of 32 bytes, the same on every node",
            );
        }
        if let Some(url) = &self.public_url
            && (!matches!(url.scheme(), "http" | "https") || url.host().is_none())
        {
            return wrong("public_url", "is an http or https URL");
        }
        Ok(self)
    }

    /// Whether the database is PostgreSQL.
    pub fn is_postgres(&self) -> bool {
        let url = self.database_url.expose_secret();
        url.starts_with("postgres://") || url.starts_with("postgresql://")
    }

    /// The file of an SQLite database.
    pub fn sqlite_path(&self) -> Option<PathBuf> {
        let rest = self.database_url.expose_secret().strip_prefix("sqlite:")?;
        let path = rest.strip_prefix("//").unwrap_or(rest);
        let path = path.split_once('?').map_or(path, |(path, _)| path);
        (!path.is_empty() && path != ":memory:").then(|| PathBuf::from(path))
    }
}

/// One line that names the setting, without the value: it may be a secret.
fn describe(error: &figment::Error) -> ConfigError {
    let first = error
        .clone()
        .into_iter()
        .next()
        .unwrap_or_else(|| error.clone());
    let path = first.path.join(".");
    let origin = first
        .metadata
        .as_ref()
        .map(|metadata| {
            if metadata.name.contains("environment") {
                format!(" (from {})", environment_name(&first.path))
            } else {
                format!(" (from {})", metadata.name)
            }
        })
        .unwrap_or_default();
    let what = match &first.kind {
        figment::error::Kind::UnknownField(field, known) => {
            let full = if path.is_empty() || path.ends_with(field.as_str()) {
                if path.is_empty() {
                    field.clone()
                } else {
                    path.clone()
                }
            } else {
                format!("{path}.{field}")
            };
            let name = environment_name(&full.split('.').map(str::to_owned).collect::<Vec<_>>());
            return ConfigError(format!(
                "unknown key {full} ({name}); known here: {}",
                known.join(", ")
            ));
        }
        figment::error::Kind::InvalidType(_, expected) => format!("expected {expected}"),
        figment::error::Kind::Message(message) => message.clone(),
        other => other.to_string(),
    };
    let what = what.replace('\n', " ");
    ConfigError(if path.is_empty() {
        what
    } else {
        format!("{path}{origin}: {what}")
    })
}

fn environment_name(path: &[String]) -> String {
    format!("BOTIX_{}", path.join("__").to_uppercase())
}

const A_DURATION: &str = "a duration is written 30s, 15m or 24h";

fn parse_duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text.trim()).map_err(|_| A_DURATION.to_owned())
}

fn duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    parse_duration(&text(deserializer, A_DURATION)?).map_err(de::Error::custom)
}

fn durations<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Duration>, D::Error> {
    text(deserializer, A_DURATION)?
        .split(',')
        .map(parse_duration)
        .collect::<Result<_, _>>()
        .map_err(de::Error::custom)
}

fn numbers<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u32>, D::Error> {
    let wrong = "numbers are written \"2,1\"";
    text(deserializer, wrong)?
        .split(',')
        .map(|number| number.trim().parse().map_err(|_| de::Error::custom(wrong)))
        .collect()
}

/// A text, or a number that the environment provider took for one, as text.
fn text<'de, D: Deserializer<'de>>(deserializer: D, wrong: &str) -> Result<String, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Text {
        Text(String),
        Number(u64),
    }
    match Text::deserialize(deserializer) {
        Ok(Text::Text(text)) => Ok(text),
        Ok(Text::Number(number)) => Ok(number.to_string()),
        Err(_) => Err(de::Error::custom(wrong)),
    }
}

/// A day, from 1970 on, as headers can name no earlier one.
fn day<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Date>, D::Error> {
    let wrong = || de::Error::custom("a day is written \"2027-06-01\"");
    let text = String::deserialize(deserializer).map_err(|_| wrong())?;
    Date::parse(text.trim(), format_description!("[year]-[month]-[day]"))
        .ok()
        .filter(|date| date.year() >= 1970)
        .map(Some)
        .ok_or_else(wrong)
}

fn default_listen() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 8080))
}

fn default_database_url() -> SecretString {
    "sqlite:botix-data/botix.db".into()
}

fn default_sweep_every() -> Duration {
    Duration::from_secs(15)
}

fn default_pool() -> u32 {
    32
}

fn default_log() -> String {
    "info,apalis=warn,apalis_core=warn,apalis_postgres=warn,sqlx=warn,hickory=warn".to_owned()
}
