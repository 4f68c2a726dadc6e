//! The way there: names, targets that are not allowed, connections and TLS.

use rcgen::CertifiedKey;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;

use super::*;
use crate::webhooks::target::name_server_with;

#[tokio::test]
async fn a_refused_connection_is_told_apart() {
    let address = TcpListener::bind("127.0.0.1:0")
        .await
        .unwrap()
        .local_addr()
        .unwrap();
    for scheme in ["http", "https"] {
        let url = Url::parse(&format!("{scheme}://{address}/")).unwrap();
        let sent = sender(OPEN).send(webhook(url)).await;
        assert_eq!(
            (sent.outcome.clone(), kind(&sent)),
            (Outcome::Failed, Some(ErrorKind::Connect))
        );
        let detail = sent.error.unwrap().detail;
        assert!(
            detail.contains("refused") && !detail.contains("http"),
            "{detail}"
        );
    }
}

#[tokio::test]
async fn a_connection_that_does_not_come_up_is_a_connect_timeout() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = Url::parse(&format!("https://{}/", silent.local_addr().unwrap())).unwrap();
    let sender = Sender::new(OPEN, SHORT, LONG, None).unwrap();
    let sent = sender.send(webhook(url)).await;
    assert_eq!(
        (sent.outcome.clone(), kind(&sent)),
        (Outcome::Failed, Some(ErrorKind::ConnectTimeout))
    );
}

#[tokio::test]
async fn a_name_that_does_not_resolve_is_a_dns_error() {
    let server = name_server_with(&[]).await;
    let sender = Sender::new(STRICT, LONG, LONG, Some(&[server])).unwrap();
    for host in ["nope.invalid", "missing.example"] {
        let sent = sender
            .send(webhook(Url::parse(&format!("https://{host}/")).unwrap()))
            .await;
        assert_eq!(
            (sent.outcome.clone(), kind(&sent)),
            (Outcome::Failed, Some(ErrorKind::Dns)),
            "{host}"
        );
    }
}

#[tokio::test]
async fn a_target_inside_is_refused_before_anything_is_sent() {
    let receiver = Receiver::answering("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
    let port = receiver.address.port();
    let server = name_server_with(&[
        ("inside.example", &[&["127.0.0.1"]]),
        ("mixed.example", &[&["127.0.0.1", "8.8.8.8"]]),
    ])
    .await;
    let sender = Sender::new(STRICT, LONG, LONG, Some(&[server])).unwrap();
    for host in [
        "127.0.0.1",
        "0x7f.1",
        "2130706433",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "localhost",
        "inside.example",
        "mixed.example",
    ] {
        let url = Url::parse(&format!("http://{host}:{port}/")).unwrap();
        let sent = sender.send(webhook(url)).await;
        assert_eq!(
            (sent.status, &sent.outcome),
            (None, &Outcome::TargetRefused),
            "{host}"
        );
        assert_eq!(kind(&sent), Some(ErrorKind::TargetNotAllowed), "{host}");
    }
    assert_eq!(receiver.connections(), 0);
}

#[tokio::test]
async fn the_address_that_was_resolved_is_the_one_connected_to() {
    let receiver = Receiver::answering("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
    let server = name_server_with(&[("hook.example", &[&["127.0.0.1"]])]).await;
    let sender = Sender::new(OPEN, LONG, LONG, Some(&[server])).unwrap();
    let url = Url::parse(&format!("http://hook.example:{}/", receiver.address.port())).unwrap();
    assert_eq!(sender.send(webhook(url)).await.outcome, Outcome::Delivered);
    assert!(receiver.requests()[0].contains("host: hook.example:"));
}

#[tokio::test]
async fn a_url_that_is_no_web_address_is_refused() {
    for url in [
        "ftp://example.com/",
        "https://user:pass@example.com/",
        "file:///etc/passwd",
    ] {
        let sent = sender(OPEN).send(webhook(Url::parse(url).unwrap())).await;
        assert_eq!(sent.outcome, Outcome::TargetRefused, "{url}");
    }
}

/// Serves one TLS connection with `answer` after the client has written, on a thread of its own.
/// Gives the port and the certificate.
fn tls_receiver(alpn: &[&str], answer: &'static [u8]) -> (u16, CertificateDer<'static>) {
    use std::io::{Read, Write};
    let CertifiedKey { cert, signing_key } =
        rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = PrivatePkcs8KeyDer::from(signing_key.serialize_der());
    let mut config =
        ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![cert.der().clone()], key.into())
            .unwrap();
    config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut tls = StreamOwned::new(ServerConnection::new(Arc::new(config)).unwrap(), stream);
        let mut buffer = [0; 16_384];
        if tls.read(&mut buffer).is_ok() && tls.write_all(answer).is_ok() {
            while matches!(tls.read(&mut buffer), Ok(read) if read > 0) {}
        }
    });
    (port, cert.der().clone())
}

fn sender_trusting(certificate: CertificateDer<'static>) -> Sender {
    let mut roots = RootCertStore::empty();
    roots.add(certificate).unwrap();
    Sender::trusting(roots, OPEN, LONG, LONG, None).unwrap()
}

#[tokio::test]
async fn https_speaks_whichever_http_the_receiver_chooses() {
    // HTTP/2: SETTINGS, its acknowledgement, and HEADERS of stream 1 with `:status: 200`, all ended.
    const HTTP2: &[u8] = &[
        0, 0, 0, 4, 0, 0, 0, 0, 0, //
        0, 0, 0, 4, 1, 0, 0, 0, 0, //
        0, 0, 1, 1, 5, 0, 0, 0, 1, 0x88,
    ];
    const HTTP1: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
    for (alpn, answer) in [(&["h2"][..], HTTP2), (&["http/1.1"], HTTP1), (&[], HTTP1)] {
        let (port, certificate) = tls_receiver(alpn, answer);
        let url = Url::parse(&format!("https://localhost:{port}/")).unwrap();
        let sent = sender_trusting(certificate).send(webhook(url)).await;
        assert_eq!(
            (sent.outcome, sent.error),
            (Outcome::Delivered, None),
            "{alpn:?}"
        );
    }
}

#[tokio::test]
async fn an_untrusted_or_misnamed_certificate_is_a_tls_error() {
    let (port, _) = tls_receiver(&[], b"");
    let url = Url::parse(&format!("https://localhost:{port}/")).unwrap();
    let untrusted = sender(OPEN).send(webhook(url)).await;
    assert_eq!(
        (untrusted.outcome.clone(), kind(&untrusted)),
        (Outcome::Failed, Some(ErrorKind::Tls))
    );

    let (port, certificate) = tls_receiver(&[], b"");
    let url = Url::parse(&format!("https://127.0.0.1:{port}/")).unwrap();
    let misnamed = sender_trusting(certificate).send(webhook(url)).await;
    assert_eq!(
        (misnamed.outcome.clone(), kind(&misnamed)),
        (Outcome::Failed, Some(ErrorKind::Tls))
    );
}

#[tokio::test]
async fn a_receiver_without_tls_or_one_that_hangs_up_is_a_tls_error() {
    let hangs_up = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let hanging = hangs_up.local_addr().unwrap();
    tokio::spawn(async move { while hangs_up.accept().await.is_ok() {} });
    let speaks_first = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let speaking = speaks_first.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = speaks_first.accept().await {
            let _ = stream.write_all(b"220 mail.example ESMTP\r\n").await;
        }
    });
    for address in [hanging, speaking] {
        let url = Url::parse(&format!("https://{address}/")).unwrap();
        let sent = sender(OPEN).send(webhook(url)).await;
        assert_eq!(
            (sent.outcome.clone(), kind(&sent)),
            (Outcome::Failed, Some(ErrorKind::Tls)),
            "{:?}",
            sent.error
        );
    }
}
