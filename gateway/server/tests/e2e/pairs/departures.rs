//! How fast engines are rid of what nobody waits for: told, not asserted, but for what would be plainly wrong.

use std::time::{Duration, Instant};

use kvgate_sim::{Ended, Fault};

use super::{Pair, request, stream};
use crate::support::{Connection, until};

const TRIES: usize = 40;

#[tokio::test(flavor = "multi_thread")]
async fn engines_are_rid_of_clients_that_left_in_no_time() {
    let stalled = Fault { delay_ms: 600_000, ..Fault::default() };
    let silent = Fault { stall_after: Some(2), ..Fault::default() };
    let pair = Pair::small().await;
    for (phase, at_prefill, fault) in [
        ("prefill", true, stalled),
        ("decode before its first byte", false, stalled),
        ("stream", false, silent),
    ] {
        let engine = if at_prefill { &pair.prefill[0] } else { &pair.decode[0] };
        let mut took = Vec::new();
        for _ in 0..TRIES {
            engine.fault(fault, 1);
            let nth = engine.log().len();
            let ended = || engine.log().get(nth).map(|served| served.ended);
            let mut client = Connection::open(pair.gateway.address).await;
            client.send(&request(&stream(1))).await;
            if phase == "stream" {
                assert_eq!(client.head().await.unwrap().status, 200);
                assert!(client.piece().await.unwrap().is_some());
            }
            until(phase, async || ended() == Some(Ended::Open)).await;
            let left = Instant::now();
            drop(client);
            while ended() != Some(Ended::Aborted) {
                assert!(left.elapsed() < Duration::from_secs(1), "{phase}");
                tokio::time::sleep(Duration::from_micros(100)).await;
            }
            took.push(left.elapsed());
        }
        took.sort_unstable();
        println!("{phase}: ended at the engine after {:?}, at most {:?}", took[TRIES / 2], took[TRIES - 1]);
        pair.is_idle().await;
    }
    assert_eq!(pair.decode[0].log().len(), 2 * TRIES, "no decode without a client");
    let gone = 3.0 * TRIES as f64;
    pair.gateway.until_metric("kvgate_requests_total", &["outcome=\"client_gone\""], gone).await;
}
