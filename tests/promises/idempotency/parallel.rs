//! One key at the same time, and clients that do not wait for the answer.

use super::{begin, whole_contacts};
use crate::harness::server::TestServer;
use crate::harness::tcp_proxy::{TcpProxy, Wire};
use crate::harness::{Backend, eventually, fresh_key, fresh_phone, on_every_store};
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

on_every_store!(
    a_hundred_requests_with_one_key_execute_once,
    many_keys_at_once_execute_each_once,
    a_running_key_is_in_progress_and_then_replays,
    a_connection_lost_before_the_answer_replays,
    a_client_that_closes_does_not_stop_the_work,
    a_client_that_resets_its_stream_does_not_stop_the_work,
);

async fn a_hundred_requests_with_one_key_execute_once(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let request = api.post("/contacts").json(&json!({"phone": fresh_phone()}));
    let racing = (0..100).map(|_| tokio::spawn(request.clone().send()));
    let mut executed = Vec::new();
    let mut replayed = Vec::new();
    for answer in futures::future::join_all(racing).await {
        let answer = answer.expect("an answer");
        if answer.status == 409 {
            answer.problem("IDEMPOTENCY_KEY_IN_PROGRESS");
        } else if answer.is_replay() {
            replayed.push(answer.expect(201).body);
        } else {
            executed.push(answer.expect(201).body);
        }
    }
    assert_eq!(executed.len(), 1, "executions");
    assert!(replayed.iter().all(|body| *body == executed[0]));
    assert_eq!(whole_contacts(&api).await.len(), 1);
    let after = request.send().await.expect(201);
    assert!(after.is_replay());
    assert_eq!(after.body, executed[0]);
}

/// The same body under a hundred keys: no key stands in another's way, and one row comes of it.
async fn many_keys_at_once_execute_each_once(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let request = api.post("/contacts").json(&json!({"phone": fresh_phone()}));
    let racing = (0..100).map(|_| tokio::spawn(request.clone().key(&fresh_key()).send()));
    let mut created = 0;
    for answer in futures::future::join_all(racing).await {
        let answer = answer.expect("an answer");
        if answer.status == 201 {
            created += 1;
        } else {
            answer.problem("CONTACT_EXISTS");
        }
    }
    assert_eq!(created, 1);
    assert_eq!(whole_contacts(&api).await.len(), 1);
}

async fn a_running_key_is_in_progress_and_then_replays(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let request = api.post("/contacts").json(&json!({"phone": fresh_phone()}));
    let lock = server.block_contact_writes().await;
    let running = begin(&server, &request).await;
    let second = request.clone().send().await;
    second.problem("IDEMPOTENCY_KEY_IN_PROGRESS");
    lock.release().await;
    let first = running
        .await
        .expect("a client")
        .expect("an answer")
        .expect(201);
    let again = request.send().await.expect(201);
    assert!(again.is_replay());
    assert_eq!(again.body, first.body);
    assert_eq!(whole_contacts(&api).await.len(), 1);
}

async fn a_connection_lost_before_the_answer_replays(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let proxy = TcpProxy::start(format!("127.0.0.1:{}", server.port)).await;
    proxy.set(Wire::AnswersLost);
    let key = fresh_key();
    let body = json!({"phone": fresh_phone()});
    let lost = api
        .through(proxy.port)
        .post("/contacts")
        .key(&key)
        .json(&body);
    lost.try_send().await.err().expect("no answer arrives");
    assert_eq!(whole_contacts(&api).await.len(), 1, "it was committed");
    let retry = api
        .post("/contacts")
        .key(&key)
        .json(&body)
        .send()
        .await
        .expect(201);
    assert!(retry.is_replay());
    assert_eq!(whole_contacts(&api).await, [retry.member("id")]);
}

async fn a_client_that_closes_does_not_stop_the_work(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let key = fresh_key();
    let body = format!("{{\"phone\":\"{}\"}}", fresh_phone());
    let request = api
        .post("/contacts")
        .key(&key)
        .body("application/json", body.clone());
    let lock = server.block_contact_writes().await;
    let mut client = TcpStream::connect(("127.0.0.1", server.port))
        .await
        .expect("a connection");
    let bytes = format!(
        "POST /public/v1/contacts HTTP/1.1\r\nhost: here\r\nauthorization: Bearer {}\r\n\
         idempotency-key: {key}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        api.api_key(),
        body.len(),
    );
    client.write_all(bytes.as_bytes()).await.expect("a request");
    server.at_work().await;
    drop(client);
    lock.release().await;
    eventually("the work completes though nobody waits", async || {
        (!api.all("/contacts").await.is_empty()).then_some(())
    })
    .await;
    let retry = request.send().await.expect(201);
    assert!(retry.is_replay());
    assert_eq!(whole_contacts(&api).await, [retry.member("id")]);
}

async fn a_client_that_resets_its_stream_does_not_stop_the_work(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let request = api.post("/contacts").json(&json!({"phone": fresh_phone()}));
    let http2 = api.over_http2();
    let running = http2
        .post("/contacts")
        .json(&json!({"phone": fresh_phone()}));
    let lock = server.block_contact_writes().await;
    let client = begin(&server, &running).await;
    client.abort();
    lock.release().await;
    eventually("the work completes though nobody waits", async || {
        (!api.all("/contacts").await.is_empty()).then_some(())
    })
    .await;
    let retry = running.send().await.expect(201);
    assert!(retry.is_replay());
    request.send().await.expect(201);
    assert_eq!(whole_contacts(&api).await.len(), 2);
}
