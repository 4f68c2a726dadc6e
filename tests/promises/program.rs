//! The program: its commands, its configuration, its health, and a demonstration that ends.

use crate::harness::command::{MASTER_KEY, Watched, program};
use crate::harness::server::{Setup, TestServer};
use crate::harness::tcp_proxy::Wire;
use crate::harness::{Backend, eventually, fresh_phone, is_id, on_both_databases};
use crate::idempotency::begin;
use reqwest::Method;
use serde_json::json;
use std::os::unix::fs::PermissionsExt;
use std::process::Output;
use std::time::Duration;

on_both_databases!(
    projects_and_keys_are_made_beside_a_running_server,
    keys_are_stored_only_as_hashes,
    migrating_twice_changes_nothing,
    the_server_says_that_it_is_alive_and_ready,
    a_stop_finishes_the_request_in_flight,
    a_wrong_setting_stops_the_start_with_one_line,
);

async fn run(mut command: std::process::Command) -> Output {
    tokio::task::spawn_blocking(move || command.output().expect("the program starts"))
        .await
        .expect("it runs")
}

async fn projects_and_keys_are_made_beside_a_running_server(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let made = server
        .run_json(&["project", "create", "--name", "Café & Söhne"])
        .await;
    let project = made["project_id"].as_str().expect("an id");
    assert!(is_id("prj", project));
    assert!(
        made["api_key"]
            .as_str()
            .is_some_and(|key| key.starts_with("btx_live_"))
    );
    let listed = server.run(&["project", "list"]).await;
    let listed = String::from_utf8(listed.stdout).expect("UTF-8");
    assert!(
        listed.contains(project) && listed.contains("Café & Söhne"),
        "{listed}"
    );
    let key = server
        .run_json(&[
            "key",
            "create",
            "--project",
            project,
            "--scopes",
            "read,write",
        ])
        .await;
    assert!(is_id("key", key["key_id"].as_str().expect("an id")));
    for wrong in [
        &["key", "create", "--project", project, "--scopes", "root"][..],
        &["key", "create", "--project", project, "--scopes", ""][..],
        &[
            "key",
            "create",
            "--project",
            "prj_00000000000000000000000000",
            "--scopes",
            "read",
        ][..],
        &["key", "create", "--project", "nonsense", "--scopes", "read"][..],
        &["nonsense"][..],
    ] {
        let output = server.run(wrong).await;
        assert!(!output.status.success(), "{wrong:?}");
        assert!(output.stdout.is_empty(), "{wrong:?}");
        assert!(!output.stderr.is_empty(), "{wrong:?}");
    }
}

async fn keys_are_stored_only_as_hashes(backend: Backend) {
    let mut server = TestServer::start(backend, &[]).await;
    let project = server.project("shop").await;
    let endpoint = json!({"url": "https://example.com/"});
    let endpoint = project
        .api
        .post("/webhook-endpoints")
        .json(&endpoint)
        .send()
        .await
        .expect(201);
    let secret = endpoint.member("secret");
    server.stop().await;
    let stored = server.stored_bytes().await;
    let holds = |needle: &str| {
        stored
            .windows(needle.len())
            .any(|part| part == needle.as_bytes())
    };
    assert!(
        holds(&project.id) || holds("shop"),
        "the dump shows what is stored"
    );
    assert!(!holds(project.api.api_key()), "the API key");
    assert!(
        !holds(&project.api.api_key()["btx_live_".len()..]),
        "the API key"
    );
    assert!(!holds(&secret), "the endpoint's secret");
    assert!(
        !holds(&secret["whsec_".len()..]),
        "the endpoint's secret in other words"
    );
    let log = server.stderr();
    assert!(
        !log.contains(project.api.api_key()),
        "the API key in the log"
    );
    assert!(!log.contains(&secret), "the secret in the log");
}

async fn migrating_twice_changes_nothing(backend: Backend) {
    let mut server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let contact = json!({"phone": fresh_phone()});
    api.post("/contacts")
        .json(&contact)
        .send()
        .await
        .expect(201);
    for _ in 0..2 {
        let output = server.run(&["migrate"]).await;
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    server.stop().await;
    let output = server.run(&["migrate"]).await;
    assert!(output.status.success());
    server.restart().await;
    assert_eq!(api.all("/contacts").await.len(), 1);
}

async fn the_server_says_that_it_is_alive_and_ready(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api.anonymous();
    for path in ["/healthz", "/readyz"] {
        api.outside(Method::GET, path).send().await.expect(200);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_its_database_is_alive_but_not_ready() {
    let (setup, wire) = Setup::new(Backend::Postgres).await.over_a_wire().await;
    let server = setup.start().await;
    let api = server.project("shop").await.api.anonymous();
    let get = async |path: &str| api.outside(Method::GET, path).send().await.status;
    assert_eq!(get("/readyz").await, 200);
    wire.set(Wire::Cut);
    eventually("it is not ready", async || {
        (get("/readyz").await == 503).then_some(())
    })
    .await;
    assert_eq!(get("/healthz").await, 200);
    wire.set(Wire::Whole);
    eventually("it is ready again", async || {
        (get("/readyz").await == 200).then_some(())
    })
    .await;
}

async fn a_stop_finishes_the_request_in_flight(backend: Backend) {
    let mut server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let request = api.post("/contacts").json(&json!({"phone": fresh_phone()}));
    let lock = server.block_contact_writes().await;
    let running = begin(&server, &request).await;
    server.terminate();
    eventually("it takes nothing new", async || {
        let new = tokio::net::TcpStream::connect(("127.0.0.1", server.port)).await;
        new.is_err().then_some(())
    })
    .await;
    lock.release().await;
    let answer = running
        .await
        .expect("a client")
        .expect("an answer")
        .expect(201);
    assert!(server.ended().await.success());
    server.restart().await;
    let again = request.send().await.expect(201);
    assert!(again.is_replay());
    assert_eq!(again.body, answer.body);
}

async fn a_wrong_setting_stops_the_start_with_one_line(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let database = server.setting("BOTIX_DATABASE_URL").to_owned();
    let file = server.file("botix.toml", b"colour = \"green\"\n");
    let broken_file = server.file("broken.toml", b"listen = \n");
    let taken = format!("127.0.0.1:{}", server.port);
    let serve = |settings: &[(&str, &str)], arguments: &[&str]| {
        let mut command = program();
        command
            .current_dir(server.folder())
            .env("BOTIX_LISTEN", "127.0.0.1:0")
            .env("BOTIX_DATABASE_URL", &database)
            .env("BOTIX_MASTER_KEY", MASTER_KEY)
            .envs(settings.iter().copied())
            .arg("serve")
            .args(arguments);
        command
    };
    for (settings, arguments, named) in [
        (&[("BOTIX_COLOUR", "green")][..], &[][..], "colour"),
        (&[("BOTIX_WEBHOOKS__COLOUR", "green")], &[], "colour"),
        (&[("BOTIX_LISTEN", "nowhere")], &[], "listen"),
        (
            &[("BOTIX_DATABASE_URL", "mysql://here/there")],
            &[],
            "database_url",
        ),
        (&[("BOTIX_MASTER_KEY", "c2hvcnQ=")], &[], "master_key"),
        (&[("BOTIX_MASTER_KEY", "!!!")], &[], "master_key"),
        (
            &[("BOTIX_WEBHOOKS__LADDER", "1m,soon,1h,24h")],
            &[],
            "ladder",
        ),
        (&[("BOTIX_WEBHOOKS__LADDER", "1m,15m,1h")], &[], "ladder"),
        (
            &[("BOTIX_WEBHOOKS__READ_TIMEOUT", "30")],
            &[],
            "read_timeout",
        ),
        (
            &[("BOTIX_WEBHOOKS__ALLOW_PRIVATE_TARGETS", "perhaps")],
            &[],
            "allow_private_targets",
        ),
        (
            &[("BOTIX_WEBHOOKS__ENDPOINT_CONCURRENCY", "0")],
            &[],
            "endpoint_concurrency",
        ),
        (
            &[("BOTIX_MONITOR_LISTEN", "everywhere")],
            &[],
            "monitor_listen",
        ),
        (
            &[("BOTIX_MONITOR_LISTEN", &taken)],
            &[],
            "botix_monitor_listen",
        ),
        (&[("BOTIX_IDEMPOTENCY__TTL", "-1s")], &[], "ttl"),
        (&[("BOTIX_PUBLIC_URL", "nonsense")], &[], "public_url"),
        (&[], &["--config", &file], "colour"),
        (&[], &["--config", &broken_file], "broken.toml"),
        (&[], &["--config", "no-such-file.toml"], "no-such-file.toml"),
        (&[], &["--roles", "api,cook"], "cook"),
    ] {
        let command = serve(settings, arguments);
        let output = tokio::time::timeout(crate::harness::DEADLINE, run(command)).await;
        let output =
            output.unwrap_or_else(|_| panic!("{settings:?} {arguments:?} starts a server"));
        let stderr = String::from_utf8_lossy(&output.stderr).to_lowercase();
        assert!(!output.status.success(), "{settings:?} {arguments:?}");
        assert!(
            stderr.contains(named),
            "{settings:?} {arguments:?}: {named} in {stderr}"
        );
        if !arguments.contains(&"--roles") {
            assert_eq!(
                stderr.trim().lines().count(),
                1,
                "{settings:?} {arguments:?}: {stderr}"
            );
        }
        if let Some((_, secret)) = settings
            .iter()
            .find(|(name, _)| *name == "BOTIX_MASTER_KEY")
        {
            assert!(!stderr.contains(secret), "a key is never shown");
        }
    }
}

#[tokio::test]
async fn the_embedded_mode_makes_a_master_key_beside_the_database() {
    let folder = tempfile::tempdir().expect("a folder");
    let create = || {
        let mut command = program();
        let database = format!("sqlite:{}/data/botix.db", folder.path().display());
        command
            .current_dir(folder.path())
            .env("BOTIX_DATABASE_URL", database)
            .args(["project", "create", "--name", "shop"]);
        command
    };
    let private_files = || {
        let files = std::fs::read_dir(folder.path().join("data")).expect("a folder");
        let keys = files.map(|file| file.expect("a file")).filter(|file| {
            let name = file.file_name().to_string_lossy().into_owned();
            name.contains("key")
        });
        keys.map(|file| (file.path(), std::fs::read(file.path()).expect("a file")))
            .collect::<Vec<_>>()
    };
    let output = run(create()).await;
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let made = private_files();
    assert_eq!(made.len(), 1, "one file of a key");
    let permissions = std::fs::metadata(&made[0].0)
        .expect("a file")
        .permissions()
        .mode();
    assert_eq!(permissions & 0o777, 0o600);
    assert!(run(create()).await.status.success());
    assert_eq!(private_files(), made, "made once");
}

#[tokio::test]
async fn postgres_requires_a_master_key() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut command = program();
    command
        .current_dir(folder.path())
        .env("BOTIX_DATABASE_URL", "postgres://nobody@127.0.0.1:1/none")
        .arg("serve");
    let output = run(command).await;
    assert!(!output.status.success());
    let stderr = String::from_utf8_lossy(&output.stderr).to_lowercase();
    assert!(stderr.contains("master_key"), "{stderr}");
}

#[tokio::test]
async fn the_plain_names_are_honoured_where_the_prefixed_are_absent() {
    let folder = tempfile::tempdir().expect("a folder");
    let create = |plain: &str, prefixed: Option<&str>| {
        let mut command = program();
        let url = |name: &str| format!("sqlite:{}/{name}.db", folder.path().display());
        command
            .current_dir(folder.path())
            .env("DATABASE_URL", url(plain));
        if let Some(prefixed) = prefixed {
            command.env("BOTIX_DATABASE_URL", url(prefixed));
        }
        command.args(["project", "create", "--name", "shop"]);
        command
    };
    let exists = |name: &str| folder.path().join(format!("{name}.db")).exists();
    assert!(run(create("plain", None)).await.status.success());
    assert!(exists("plain"));
    assert!(
        run(create("ignored", Some("prefixed")))
            .await
            .status
            .success()
    );
    assert!(exists("prefixed") && !exists("ignored"));
}

fn demo(folder: &std::path::Path, arguments: &[&str]) -> Watched {
    let mut command = program();
    command
        .current_dir(folder)
        .env("BOTIX_LISTEN", "127.0.0.1:0")
        .arg("demo")
        .args(arguments);
    Watched::start(command, folder.join("output.txt"))
}

#[tokio::test]
async fn the_demo_delivers_a_transformed_and_signed_webhook_and_ends() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut demo = demo(folder.path(), &["--once"]);
    let status = demo.ended_within(Duration::from_mins(1)).await;
    let output = demo.output();
    assert!(status.success(), "{status}: {output}");
    let shown = output.to_lowercase();
    for part in [
        "contact.created",
        "x-botix-signature",
        "x-acme-signature",
        "summary",
        "webhook-signature",
    ] {
        assert!(shown.contains(part), "{part} in {output}");
    }
}

#[tokio::test]
async fn the_demo_keeps_serving_every_url_it_prints() {
    let folder = tempfile::tempdir().expect("a folder");
    let demo = demo(folder.path(), &[]);
    let docs = eventually("the demo prints its URLs", async || {
        let output = demo.output();
        let words = output.split(|c: char| c.is_whitespace() || "\"'<>()`,".contains(c));
        let url = words
            .clone()
            .find(|word| word.starts_with("http://127.0.0.1:") && word.ends_with("/docs"));
        url.map(str::to_owned)
    })
    .await;
    let base = docs.trim_end_matches("/docs").to_owned();
    let api = crate::harness::api::Api::new(base, String::new()).anonymous();
    api.outside(Method::GET, &docs)
        .send()
        .await
        .expect_success();
    api.outside(Method::GET, "/healthz")
        .send()
        .await
        .expect(200);
}
