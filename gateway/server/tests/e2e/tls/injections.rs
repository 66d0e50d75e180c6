//! What HTTP/2 can say and HTTP/1 must not: nothing of it reaches the engine.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::Authority;
use super::certificates;
use super::frames::{DATA, END_HEADERS, END_STREAM, HEADERS, Raw, block, frame, pseudo};
use crate::support::{Rule, Setup, host};

/// An engine that keeps every byte it is sent, and answers each head with 200.
async fn recorder() -> (SocketAddr, Arc<Mutex<Vec<u8>>>) {
    let listener = TcpListener::bind((host(), 0)).await.unwrap();
    let (address, heard) = (listener.local_addr().unwrap(), Arc::new(Mutex::new(Vec::new())));
    let keeps = heard.clone();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let keeps = keeps.clone();
            tokio::spawn(async move {
                let mut bytes = Vec::new();
                while stream.read_buf(&mut bytes).await.is_ok_and(|n| n > 0) {
                    let ended = bytes.windows(4).any(|four| four == b"\r\n\r\n");
                    keeps.lock().unwrap().append(&mut bytes);
                    if ended {
                        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
                    }
                }
            });
        }
    });
    (address, heard)
}

type Field = (&'static [u8], &'static [u8]);

/// Requests that are broken, by what is broken about them.
fn broken() -> Vec<(&'static str, Vec<Field>, &'static [u8])> {
    let with = |fields: &[Field]| [&pseudo("POST", "/v1/completions")[..], fields].concat();
    let instead = |name: &[u8], value: &'static [u8]| {
        let mut fields = pseudo("POST", "/v1/completions");
        fields.iter_mut().filter(|field| field.0 == name).for_each(|field| field.1 = value);
        fields
    };
    let without = |name: &[u8]| {
        let fields = pseudo("POST", "/v1/completions").into_iter();
        fields.filter(|field| field.0 != name).collect::<Vec<_>>()
    };
    let mut late = with(&[(b"x", b"1")]);
    late.rotate_left(1);
    vec![
        ("CR LF in a value", with(&[(b"x", b"1\r\ninjected: 1")]), b""),
        ("LF in a value", with(&[(b"x", b"1\ninjected: 1")]), b""),
        ("CR in a value", with(&[(b"x", b"1\rinjected: 1")]), b""),
        ("NUL in a value", with(&[(b"x", b"1\0injected")]), b""),
        ("CR LF in a name", with(&[(b"x: 1\r\ninjected", b"1")]), b""),
        ("a colon in a name", with(&[(b"injected: x", b"1")]), b""),
        ("a space in a name", with(&[(b"injected x", b"1")]), b""),
        ("capitals in a name", with(&[(b"Injected", b"1")]), b""),
        ("an empty name", with(&[(b"", b"injected")]), b""),
        ("CR LF in the path", instead(b":path", b"/ HTTP/1.1\r\ninjected: 1\r\n\r\n"), b""),
        ("a space in the path", instead(b":path", b"/ HTTP/1.1 injected"), b""),
        ("an empty path", instead(b":path", b""), b""),
        ("a path that is an URI", instead(b":path", b"http://injected/v1"), b""),
        ("CR LF in the method", instead(b":method", b"GET / HTTP/1.1\r\ninjected: 1\r\n\r\nGET"), b""),
        ("a space in the method", instead(b":method", b"GET /injected"), b""),
        ("CR LF in the authority", instead(b":authority", b"a\r\ninjected: 1"), b""),
        ("a user in the authority", instead(b":authority", b"injected@a.test"), b""),
        ("no authority", without(b":authority"), b""),
        ("no path", without(b":path"), b""),
        ("no method", without(b":method"), b""),
        ("no scheme", without(b":scheme"), b""),
        ("a pseudo field twice", with(&[(b":path", b"/injected")]), b""),
        ("a pseudo field behind others", late, b""),
        ("an unknown pseudo field", with(&[(b":injected", b"1")]), b""),
        ("a pseudo field of answers", with(&[(b":status", b"200")]), b""),
        ("host other than authority", with(&[(b"host", b"injected.test")]), b""),
        ("two hosts", with(&[(b"host", b"a.test"), (b"host", b"injected")]), b""),
        ("connection", with(&[(b"connection", b"injected")]), b""),
        (
            "transfer-encoding",
            with(&[(b"transfer-encoding", b"chunked")]),
            b"0\r\n\r\nGET /injected HTTP/1.1\r\n\r\n",
        ),
        ("upgrade", with(&[(b"upgrade", b"injected")]), b""),
        ("keep-alive", with(&[(b"keep-alive", b"injected")]), b""),
        ("proxy-connection", with(&[(b"proxy-connection", b"injected")]), b""),
        ("te other than trailers", with(&[(b"te", b"injected")]), b""),
        (
            "a length that is too short",
            with(&[(b"content-length", b"1")]),
            b"xGET /injected HTTP/1.1\r\n\r\n",
        ),
        ("a length that is too long", with(&[(b"content-length", b"99")]), b"injected"),
        ("a length that is none", with(&[(b"content-length", b"+8")]), b"injected"),
        ("two lengths", with(&[(b"content-length", b"8"), (b"content-length", b"9")]), b"injected"),
        ("an underscore in a name", with(&[(b"content_length", b"injected")]), b""),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_injected() {
    let (ours, (engine, heard)) = (Authority::new("ours"), recorder().await);
    let setup = Setup::new(&[Rule::new("all", &["round-robin"]).endpoint(engine, "")]);
    let lines = certificates(setup.folder(), &[&ours.issue(&["a.test"])]);
    let gateway = setup.listener(&lines).start().await;
    let cases = broken();
    assert!(cases.len() >= 38);
    let mut refused = 0;
    for (what, fields, body) in cases {
        let mut raw = Raw::open(gateway.address, &ours).await;
        let flags = if body.is_empty() { END_HEADERS | END_STREAM } else { END_HEADERS };
        raw.send(&frame(HEADERS, flags, 1, &block(&fields))).await;
        if !body.is_empty() {
            raw.send(&frame(DATA, END_STREAM, 1, body)).await;
        }
        let status = raw.status(1).await;
        assert!(matches!(status, None | Some(400)), "{what}: {status:?}");
        refused += u32::from(status.is_some());
        let heard = heard.lock().unwrap();
        assert!(heard.is_empty(), "{what}: {}", String::from_utf8_lossy(&heard));
    }
    assert!(refused > 2, "{refused}");
    let labels = ["service=\"\"", "code=\"bad_request\""];
    gateway.until_metric("kvgate_errors_total", &labels, refused.into()).await;
    // what is in order goes through, once, and as it is
    let mut raw = Raw::open(gateway.address, &ours).await;
    let fields = [
        &pseudo("POST", "/v1/x?y=%0d%0a")[..],
        &[(b"te", b"trailers"), (b"x", b"a\tb"), (b"host", b"a.test")],
    ]
    .concat();
    raw.send(&frame(HEADERS, END_HEADERS, 1, &block(&fields))).await;
    raw.send(&frame(DATA, END_STREAM, 1, b"GET /two HTTP/1.1\r\n\r\n")).await;
    assert_eq!(raw.status(1).await, Some(200));
    let heard = String::from_utf8(heard.lock().unwrap().clone()).unwrap();
    let (head, body) = heard.split_once("\r\n\r\n").unwrap();
    assert_eq!(body, "GET /two HTTP/1.1\r\n\r\n");
    let mut lines: Vec<_> = head.lines().map(str::to_lowercase).collect();
    assert_eq!(lines.remove(0), "post /v1/x?y=%0d%0a http/1.1");
    lines.retain(|line| !line.starts_with("x-request-id: ") && !line.starts_with("x-forwarded-"));
    lines.sort();
    assert_eq!(lines, ["content-length: 21", "host: a.test", "x: a\tb"]);
}
