//! The bound of the whole rule, and the mode that only counts.

use super::{SHED, asks, capped, ids, is_served, is_shed, of, takes_a_place, waiting};
use crate::pairs::Pair;

const OBSERVED: &str = "kvgate_admission_observed_total";

#[tokio::test(flavor = "multi_thread")]
async fn those_that_wait_are_under_way_too() {
    let keys = "max_total = 3\ndecode_max_in_flight = 2\nqueue_depth = 8\nqueue_wait = \"60s\"";
    let pair = Pair::new(1, 1, capped(keys)).await;
    let one = takes_a_place(&pair.gateway, &pair.decode[0], "one").await;
    let two = takes_a_place(&pair.gateway, &pair.decode[0], "two").await;
    let three = asks(&pair.gateway, "three").await;
    waiting(&pair.gateway, "decode", 1).await;
    for _ in 0..3 {
        is_shed(asks(&pair.gateway, "four").await, "pd_overloaded").await;
    }
    assert_eq!(pair.prefill[0].log().len(), 2);
    assert_eq!(of(&pair.gateway, SHED, "prefill").await, 3.0, "where a request begins");
    drop(one);
    is_served(three).await;
    drop(two);
    pair.is_idle().await;
    for n in 0..4 {
        is_served(asks(&pair.gateway, &format!("later {n}")).await).await;
        pair.is_idle().await;
    }
    assert_eq!(ids(&pair.decode[0])[..3], ["one", "two", "three"]);
    assert_eq!(pair.decode[0].log().len(), 7);
}

#[tokio::test(flavor = "multi_thread")]
async fn observing_counts_and_holds_nothing_back() {
    let keys =
        "mode = \"observe\"\nmax_total = 3\ndecode_max_in_flight = 1\nqueue_depth = 1\nqueue_wait = \"10ms\"";
    let pair = Pair::new(1, 1, capped(keys)).await;
    let observed = async |role: &str, verdict: &str| {
        let labels = [format!("role={role:?}"), format!("verdict={verdict:?}")];
        pair.gateway.metric(OBSERVED, &labels.each_ref().map(String::as_str)).await
    };
    let mut held = Vec::new();
    for (n, queue, shed) in [(1, 0.0, 0.0), (2, 1.0, 0.0), (3, 2.0, 0.0)] {
        held.push(takes_a_place(&pair.gateway, &pair.decode[0], &format!("{n}")).await);
        assert_eq!(
            (observed("decode", "queue").await, observed("prefill", "shed").await),
            (queue, shed),
            "{n}"
        );
    }
    // beyond the rule's bound
    is_served(asks(&pair.gateway, "4").await).await;
    assert_eq!(observed("prefill", "shed").await, 1.0);
    assert_eq!(
        (of(&pair.gateway, SHED, "decode").await, of(&pair.gateway, SHED, "prefill").await),
        (0.0, 0.0)
    );
    assert_eq!(pair.decode[0].log().iter().map(|served| served.concurrent).max(), Some(4));
    drop(held);
    pair.is_idle().await;
}
