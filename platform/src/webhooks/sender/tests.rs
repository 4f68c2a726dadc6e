//! What comes back: every kind of answer, and of none.

mod connecting;

use std::time::UNIX_EPOCH;

use tokio::io::AsyncWriteExt;
use tokio::sync::mpsc;

use super::receiver::Receiver;
use super::*;

const OPEN: TargetPolicy = TargetPolicy {
    allow_private: true,
};
const STRICT: TargetPolicy = TargetPolicy {
    allow_private: false,
};
/// Far longer than any exchange that is meant to end by itself.
const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(150);

fn sender(policy: TargetPolicy) -> Sender {
    Sender::new(policy, LONG, LONG, None).unwrap()
}

/// For receivers that never finish.
fn impatient() -> Sender {
    Sender::new(OPEN, LONG, SHORT, None).unwrap()
}

fn webhook(url: Url) -> OutgoingRequest {
    let mut headers = HeaderMap::new();
    headers.insert("x-botix-event", "contact.created".parse().unwrap());
    OutgoingRequest {
        url,
        headers,
        body: Bytes::from_static(b"{\"a\":1.0}"),
    }
}

async fn send_to(receiver: &Receiver) -> Sent {
    sender(OPEN).send(webhook(receiver.url())).await
}

fn kind(sent: &Sent) -> Option<ErrorKind> {
    sent.error.as_ref().map(|error| error.kind)
}

fn header<'a>(sent: &'a Sent, name: &str) -> Option<&'a str> {
    sent.response_headers
        .iter()
        .find(|(n, _)| n == name)
        .map(|(_, value)| value.as_str())
}

#[tokio::test]
async fn each_answer_has_the_outcome_of_its_row() {
    let minute = Duration::from_mins(1);
    let past = format!("retry-after: {}\r\n", httpdate::fmt_http_date(UNIX_EPOCH));
    for (status, extra, outcome) in [
        (200, "", Outcome::Delivered),
        (204, "", Outcome::Delivered),
        (
            101,
            "upgrade: x\r\nconnection: upgrade\r\n",
            Outcome::Failed,
        ),
        (301, "", Outcome::Failed),
        (400, "", Outcome::Rejected { status: 400 }),
        (403, "", Outcome::Rejected { status: 403 }),
        (410, "", Outcome::Gone),
        (429, "", Outcome::Throttled { retry_after: None }),
        (
            429,
            "retry-after: 60\r\n",
            Outcome::Throttled {
                retry_after: Some(minute),
            },
        ),
        (
            429,
            "retry-after: 5\r\nretry-after: 60\r\n",
            Outcome::Throttled {
                retry_after: Some(minute),
            },
        ),
        (429, past.as_str(), Outcome::Throttled { retry_after: None }),
        (
            429,
            "retry-after: later\r\n",
            Outcome::Throttled { retry_after: None },
        ),
        (500, "", Outcome::Failed),
        (503, "retry-after: 60\r\n", Outcome::Failed),
    ] {
        let receiver = Receiver::answering(format!(
            "HTTP/1.1 {status} Whatever\r\n{extra}content-length: 0\r\n\r\n"
        ))
        .await;
        let sent = send_to(&receiver).await;
        assert_eq!(sent.outcome, outcome, "{status} {extra}");
        assert_eq!((sent.status, &sent.error), (Some(status), &None));
        assert_eq!(receiver.requests().len(), 1);
    }
}

#[tokio::test]
async fn the_request_is_a_post_of_exactly_the_body_with_the_given_headers() {
    let receiver = Receiver::answering("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
    let mut request = webhook(receiver.url());
    for (name, value) in [
        ("content-length", "1"),
        ("transfer-encoding", "chunked"),
        ("host", "evil.example"),
        ("connection", "x-botix-event"),
        ("expect", "100-continue"),
    ] {
        request.headers.insert(name, value.parse().unwrap());
    }
    let sent = sender(OPEN).send(request).await;
    assert_eq!(sent.outcome, Outcome::Delivered);
    assert_eq!(sent.response_body, b"ok");

    let requests = receiver.requests();
    let (head, body) = requests[0].split_once("\r\n\r\n").unwrap();
    assert_eq!(body, "{\"a\":1.0}");
    let mut lines: Vec<&str> = head.lines().collect();
    assert_eq!(lines.remove(0), "POST /hook HTTP/1.1");
    lines.sort_unstable();
    let host = format!("host: {}", receiver.address);
    assert_eq!(
        lines,
        [
            "accept: */*",
            "content-length: 9",
            &host,
            "x-botix-event: contact.created"
        ]
    );
}

#[tokio::test]
async fn a_redirect_is_not_followed() {
    let elsewhere = Receiver::answering("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
    for status in [301, 302, 303, 307, 308] {
        let location = elsewhere.url();
        let receiver = Receiver::answering(format!(
            "HTTP/1.1 {status} Moved\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n"
        ))
        .await;
        let sent = send_to(&receiver).await;
        assert_eq!((sent.status, sent.outcome), (Some(status), Outcome::Failed));
    }
    assert_eq!(elsewhere.connections(), 0);
}

#[tokio::test]
async fn an_endless_body_is_read_to_the_limit_and_its_connection_closed() {
    let (closed, mut was_closed) = mpsc::unbounded_channel();
    let receiver = Receiver::start(move |mut stream| {
        let closed = closed.clone();
        async move {
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await;
            let mut written = 0_usize;
            while stream.write_all(&vec![b'x'; 65_536]).await.is_ok() {
                written += 65_536;
            }
            let _ = closed.send(written);
            None
        }
    })
    .await;
    let sent = send_to(&receiver).await;
    assert_eq!((sent.outcome, sent.error), (Outcome::Delivered, None));
    assert_eq!(sent.response_body, [b'x'; MAX_BODY]);
    // Only what the sockets buffer was ever taken.
    assert!(was_closed.recv().await.unwrap() < 64 << 20);
}

#[tokio::test]
async fn a_body_beyond_the_limit_is_judged_by_its_status() {
    for (status, outcome) in [
        (200, Outcome::Delivered),
        (500, Outcome::Failed),
        (410, Outcome::Gone),
    ] {
        let receiver = Receiver::start(move |mut stream| async move {
            let head = format!("HTTP/1.1 {status} X\r\ncontent-length: 1000000000\r\n\r\n");
            let _ = stream.write_all(head.as_bytes()).await;
            let _ = stream.write_all(&[b'x'; MAX_BODY + 1]).await;
            Some(stream)
        })
        .await;
        let sent = send_to(&receiver).await;
        assert_eq!(
            (sent.outcome, sent.response_body.len()),
            (outcome, MAX_BODY)
        );
        assert_eq!(sent.error, None);
    }
}

#[tokio::test]
async fn a_body_that_comes_byte_by_byte_is_read_whole() {
    let receiver = Receiver::start(|mut stream| async move {
        stream.set_nodelay(true).unwrap();
        for byte in b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n0123456789" {
            stream.write_all(&[*byte]).await.unwrap();
            tokio::task::yield_now().await;
        }
        Some(stream)
    })
    .await;
    let sent = send_to(&receiver).await;
    assert_eq!(
        (sent.outcome, sent.response_body.as_slice()),
        (Outcome::Delivered, &b"0123456789"[..])
    );
}

#[tokio::test]
async fn a_2xx_whose_body_breaks_is_a_failure_and_keeps_what_arrived() {
    for answer in [
        "HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\nnonsense\r\n",
    ] {
        let receiver = Receiver::answering(answer).await;
        let sent = send_to(&receiver).await;
        assert_eq!(
            (sent.status, &sent.outcome),
            (Some(200), &Outcome::Failed),
            "{answer}"
        );
        assert_eq!(kind(&sent), Some(ErrorKind::BrokenResponse), "{answer}");
        assert_eq!(sent.response_body, b"abc", "{answer}");
    }
}

#[tokio::test]
async fn a_refusal_whose_body_breaks_is_a_failure_but_may_ask_to_wait() {
    for (status, outcome) in [
        (403, Outcome::Failed),
        (410, Outcome::Failed),
        (
            429,
            Outcome::Throttled {
                retry_after: Some(Duration::from_mins(2)),
            },
        ),
    ] {
        let receiver = Receiver::answering(format!(
            "HTTP/1.1 {status} No\r\nretry-after: 120\r\ncontent-length: 10\r\n\r\nabc"
        ))
        .await;
        let sent = send_to(&receiver).await;
        assert_eq!(
            (&sent.outcome, kind(&sent)),
            (&outcome, Some(ErrorKind::BrokenResponse))
        );
    }
}

#[tokio::test]
async fn an_answer_that_is_not_http_or_breaks_off_is_a_broken_response() {
    let many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "a: b\r\n".repeat(1_000));
    let large = format!("HTTP/1.1 200 OK\r\na: {}\r\n\r\n", "b".repeat(1 << 20));
    for answer in [
        "",
        "HTTP/1.1 200",
        "SSH-2.0-OpenSSH_9.6\r\n",
        "HTTP/1.1 200 OK\r\na\0b: c\r\n\r\n",
        &many,
        &large,
    ] {
        let receiver = Receiver::answering(answer).await;
        let sent = send_to(&receiver).await;
        let seen = &answer[..answer.len().min(40)];
        assert_eq!(
            (sent.status, &sent.outcome),
            (None, &Outcome::Failed),
            "{seen:?}"
        );
        assert_eq!(
            kind(&sent),
            Some(ErrorKind::BrokenResponse),
            "{seen:?} {:?}",
            sent.error
        );
        assert_eq!(receiver.requests().len(), 1, "{seen:?}");
    }
}

#[tokio::test]
async fn bodies_are_kept_as_bytes_whatever_they_hold() {
    let mut zeros_gzipped = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3];
    zeros_gzipped.extend([0xed, 0xc1, 0x01, 0x01, 0, 0, 0]);
    for body in [
        b"a\0b\0".to_vec(),
        vec![0xff, 0xfe, 0xc3, 0x28],
        zeros_gzipped,
    ] {
        let mut answer = format!(
            "HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: {}\r\n\r\n",
            body.len()
        )
        .into_bytes();
        answer.extend(&body);
        let sent = send_to(&Receiver::answering(answer).await).await;
        assert_eq!(
            (sent.outcome.clone(), &sent.response_body),
            (Outcome::Delivered, &body)
        );
        assert_eq!(header(&sent, "content-encoding"), Some("gzip"));
    }
}

#[tokio::test]
async fn header_values_beyond_ascii_are_kept_and_their_sum_is_bounded() {
    let mut answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n".to_vec();
    answer.extend(b"x-utf8: caf\xc3\xa9\r\nx-latin: caf\xe9\r\n");
    for _ in 0..20 {
        answer.extend(format!("x-long: {}\r\n", "y".repeat(1_000)).bytes());
    }
    answer.extend(b"\r\n");
    let sent = send_to(&Receiver::answering(answer).await).await;
    assert_eq!(sent.outcome, Outcome::Delivered);
    assert_eq!(header(&sent, "x-utf8"), Some("caf\u{e9}"));
    assert_eq!(header(&sent, "x-latin"), Some("caf\u{e9}"));
    let kept: usize = sent
        .response_headers
        .iter()
        .map(|(name, value)| name.len() + value.len())
        .sum();
    assert!(
        (MAX_HEADERS - 1_100..=MAX_HEADERS).contains(&kept),
        "{kept}"
    );
}

#[tokio::test]
async fn a_receiver_that_stalls_anywhere_is_a_read_timeout() {
    for (begun, status, body) in [
        ("", None, ""),
        ("HTTP/1.1 200 OK\r\n", None, ""),
        ("HTTP/1.1 100 Continue\r\n\r\n", None, ""),
        ("HTTP/1.1 200 OK\r\n\r\nabc", Some(200), "abc"),
        (
            "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc",
            Some(200),
            "abc",
        ),
    ] {
        let receiver = Receiver::start(move |mut stream| async move {
            let _ = stream.write_all(begun.as_bytes()).await;
            Some(stream)
        })
        .await;
        let sent = impatient().send(webhook(receiver.url())).await;
        assert_eq!(kind(&sent), Some(ErrorKind::ReadTimeout), "{begun:?}");
        assert_eq!(
            (sent.outcome, sent.status),
            (Outcome::Failed, status),
            "{begun:?}"
        );
        assert_eq!(sent.response_body, body.as_bytes(), "{begun:?}");
        assert!(sent.duration >= SHORT);
    }
}

#[tokio::test]
async fn no_trickle_stretches_the_deadline() {
    let receiver = Receiver::start(|mut stream| async move {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await;
        while stream.write_all(b"x").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        None
    })
    .await;
    let sent = impatient().send(webhook(receiver.url())).await;
    assert_eq!(
        (sent.outcome.clone(), kind(&sent)),
        (Outcome::Failed, Some(ErrorKind::ReadTimeout))
    );
}

#[tokio::test]
async fn connections_are_kept_for_the_next_webhook() {
    let receiver = Receiver::start(|mut stream| async move {
        stream
            .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            .await
            .unwrap();
        Some(stream)
    })
    .await;
    let sender = sender(OPEN);
    for _ in 0..3 {
        assert_eq!(
            sender.send(webhook(receiver.url())).await.outcome,
            Outcome::Delivered
        );
    }
    assert_eq!((receiver.requests().len(), receiver.connections()), (3, 1));
}
