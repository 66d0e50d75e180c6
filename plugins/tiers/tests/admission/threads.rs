use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvgate_core::*;
use serde_json::json;

use crate::support::*;

/// Eight tasks on four threads ask again and again; a fifth of them leave while they wait.
async fn storm(world: &World, rule: &Arc<Rule>, cap: u64) -> u64 {
    let served = Arc::new(AtomicU64::new(0));
    let tasks = (0..8u64).map(|task| {
        let (rule, served) = (rule.clone(), served.clone());
        tokio::spawn(async move {
            for turn in 0..150u64 {
                let key = format!("{}", turn % 3);
                let facts = facts(&[("x-conversation-id", &key), ("x-key", &key)]);
                let untried = Mask::none();
                let choosing = rule.choose(facts, Role::Any, &untried);
                let flight = if (task + turn).is_multiple_of(5) {
                    tokio::select! { biased; flight = choosing => Some(flight), () = tokio::task::yield_now() => None }
                } else {
                    Some(choosing.await)
                };
                for endpoint in &rule.endpoints {
                    assert!(endpoint.engine.in_flight() <= cap);
                }
                tokio::task::yield_now().await;
                served.fetch_add(u64::from(flight.is_some_and(|f| f.is_ok())), Ordering::Relaxed);
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    assert_eq!(world.in_flight(), 0);
    assert_eq!(world.metric("kvgate_admission_queue_length", &[]), 0);
    served.load(Ordering::Relaxed)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn caps_are_exact_whichever_tier_chooses_and_nobody_is_forgotten() {
    let keys = json!({"max_in_flight": 2, "queue_depth": 8, "queue_wait": "1h", "max_total": 8});
    for tier in ["chwbl", "session", "least-connections", "round-robin", "gpu-aware"] {
        let world = World::default();
        let endpoints: Vec<_> = (0..3).map(|at| (at, Role::Any)).collect();
        let rule = world.rule_of("rule", &endpoints, &keys, &[(tier, json!({}))]);
        assert!(storm(&world, &rule, 2).await >= 8 * 120, "{tier}");
        let persist = json!({"by": "header", "name": "x-key"});
        let pinned = world.rule_of("rule", &endpoints, &keys, &[("persist", persist)]);
        assert!(storm(&world, &pinned, 2).await >= 8 * 120);
    }
}
