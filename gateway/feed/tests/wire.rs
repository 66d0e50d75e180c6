//! The wire format on bytes alone.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use bytes::{Bytes, BytesMut};
use kvgate_feed::zmtp::{
    Endpoint, Error,
    wire::{self, Decoder, Item, Limits},
};
use proptest::prelude::*;

const LIMITS: Limits = Limits { frame: 4096, message: 8192, parts: 6 };

/// Everything a decoder says about `input`, fed in pieces of the given sizes (the last repeats).
fn run(input: &[u8], sizes: &[usize]) -> (Vec<Item>, Option<String>) {
    let (mut decoder, mut buf, mut items) = (Decoder::new(LIMITS), BytesMut::new(), Vec::new());
    let (mut rest, mut sizes) =
        (input, sizes.iter().copied().chain(std::iter::repeat(*sizes.last().unwrap())));
    while !rest.is_empty() {
        let (piece, tail) = rest.split_at(sizes.next().unwrap().clamp(1, rest.len()));
        buf.extend_from_slice(piece);
        rest = tail;
        loop {
            match decoder.decode(&mut buf) {
                Ok(Some(item)) => items.push(item),
                Ok(None) => break assert!(decoder.need() > 0),
                Err(e) => return (items, Some(e.to_string())),
            }
        }
    }
    (items, None)
}

fn message() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let part = prop_oneof![3 => 0..40usize, 1 => 200..400usize, 1 => 1000..1300usize];
    prop::collection::vec(part.prop_flat_map(|n| prop::collection::vec(any::<u8>(), n)), 1..=6)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(512) })]

    #[test]
    fn any_bytes_in_any_pieces_mean_the_same(
        input in prop::collection::vec(prop_oneof![3 => 0..8u8, 1 => any::<u8>()], 0..600),
        sizes in prop::collection::vec(1..50usize, 1..20),
    ) {
        let whole = run(&input, &[usize::MAX]);
        prop_assert_eq!(&whole, &run(&input, &sizes));
        prop_assert_eq!(&whole, &run(&input, &[1]));
    }

    #[test]
    fn what_is_put_is_decoded(messages in prop::collection::vec(message(), 1..8), sizes in prop::collection::vec(1..3000usize, 1..9)) {
        let mut out = BytesMut::new();
        for m in &messages {
            wire::put_message(&mut out, &m.iter().map(Vec::as_slice).collect::<Vec<_>>());
            wire::put_command(&mut out, "PONG", b"x");
        }
        let pong = Item::Command(Bytes::from_static(b"\x04PONGx"));
        let want: Vec<_> = messages.into_iter().flat_map(|m| [Item::Message(m.into_iter().map(Bytes::from).collect()), pong.clone()]).collect();
        prop_assert_eq!(run(&out, &sizes), (want, None));
    }

    #[test]
    fn no_greeting_or_ready_panics(input in prop::collection::vec(any::<u8>(), 0..100), cut in 0..64usize) {
        let mut good = wire::greeting(1).to_vec();
        good.truncate(cut);
        good.extend(&input);
        let verdicts: Vec<_> = (0..=good.len()).map(|n| wire::check_greeting(&good[..n])).collect();
        let first_error = verdicts.iter().position(Result::is_err).unwrap_or(usize::MAX);
        prop_assert!(verdicts.iter().enumerate().all(|(n, v)| v.is_err() == (n >= first_error)), "an error never heals");
        let _ = wire::command(&input).map(|(_, data)| (wire::socket_type(data).is_ok(), wire::reason(data)));
    }

    #[test]
    fn endpoints_survive_printing(text in "(tcp|ipc)://[a-z0-9.:@/\\[\\]*-]{0,20}") {
        if let Ok(endpoint) = text.parse::<Endpoint>() {
            prop_assert_eq!(endpoint.to_string().parse::<Endpoint>().unwrap(), endpoint);
        }
    }
}

#[test]
fn limits_bite_on_the_announcement() {
    let long = |size: u64| [&[2u8][..], &size.to_be_bytes()].concat();
    for size in [4097, 1 << 33, 1 << 40, 1 << 62, 1 << 63, u64::MAX] {
        let error = Decoder::new(LIMITS).decode(&mut long(size)[..].into()).unwrap_err();
        assert!(matches!(error, Error::FrameTooBig { size: s, max: 4096 } if s == size), "{error}");
    }
    assert!(
        matches!(run(&[3, 0, 0, 0, 0, 0, 0, 0, 0], &[1]), (items, None) if items.is_empty()),
        "a long form of size 0 is fine"
    );
    let parts = [1u8, 0].repeat(7);
    assert_eq!(run(&parts, &[99]).1.unwrap(), "message exceeds the limit of 6 parts");
    let big = [&[3u8][..], &4096u64.to_be_bytes(), &[0; 4096]].concat().repeat(3);
    assert_eq!(run(&big, &[999]).1.unwrap(), "message exceeds the limit of 8192 bytes");
    assert_eq!(run(&[8, 0], &[1]).1.unwrap(), "protocol violation: reserved flag bits");
    assert_eq!(run(&[5, 0], &[1]).1.unwrap(), "protocol violation: command with MORE");
}

#[test]
fn endpoints() {
    for (text, want) in [
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557"),
        ("tcp://[::1]:5557", "tcp://[::1]:5557"),
        ("tcp://::1:5557", "tcp://[::1]:5557"),
        ("tcp://engine-0.pool.svc:5557", "tcp://engine-0.pool.svc:5557"),
        ("ipc:///run/kv.sock", "ipc:///run/kv.sock"),
        ("ipc://@kv", "ipc://@kv"),
    ] {
        assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), want);
    }
    for bad in [
        "",
        "udp://a:1",
        "tcp://a",
        "tcp://a:0",
        "tcp://a:65536",
        "tcp://*:5557",
        "tcp://:5557",
        "tcp://[::1:5557",
        "tcp://eth0;a:1",
        "tcp://a:1/b",
        "ipc://",
        "ipc://@",
        "ipc://*",
    ] {
        let error = bad.parse::<Endpoint>().unwrap_err();
        assert_eq!(error.kind(), "endpoint", "{bad}");
    }
}
