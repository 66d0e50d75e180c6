//! Every case over real sockets, and what the app behind is asked.
#![allow(clippy::unwrap_used, clippy::panic)]

#[allow(dead_code)]
mod cases;
mod support;

use cases::play::play;
use cases::{all, splits};
use support::{config, start};

#[tokio::test(flavor = "multi_thread")]
async fn every_case_is_answered_as_it_must_be() {
    let server = start(config());
    let cases = all();
    assert!(cases.len() >= 150, "{}", cases.len());
    let mut refused = 0;
    for case in &cases {
        for cuts in splits(&case.bytes) {
            play(server.address, case, &cuts).await;
            assert_eq!(server.app.take(), case.passes, "{}, cut at {cuts:?}", case.name);
            refused += usize::from(case.then.is_some());
        }
    }
    // malformed bodies are answered by the app
    let by_edge = server.refused.lock().unwrap().len();
    assert!(by_edge > 500 && by_edge < refused, "{by_edge} of {refused}");
    server.edge.drain();
    server.edge.closed().await;
}
