//! What the admin surface shows of the inventory and its feeds, and to whom.

use serde_json::json;

use crate::support::{
    BLOCK, Connection, Publisher, Request, Rule, Setup, cleared, engine, fetch, prompt, silent_engine,
    stored, until,
};

const PATH: &str = "/netlox/v1/config/ai/kv/inventory";

#[tokio::test(flavor = "multi_thread")]
async fn the_inventory_is_shown_as_the_engine_names_it() {
    let (engine, mut publisher) = (silent_engine().await, Publisher::bind().await);
    let rule = Rule::kv("words").top("id = 7").followed(&engine, &publisher.endpoint());
    let gateway = Setup::new(&[rule, Rule::new("plain", &["round-robin"]).endpoint(engine.address(), "")]);
    let gateway = gateway.start().await;
    let empty = json!({"service_id": "words", "ep_idx": 0, "hash_algo": "auto", "blocks": [], "total": 0});
    assert_eq!(gateway.inventory("words", 0).await, empty, "before the first event");
    publisher.subscribed().await;
    let exact = (1 << 53) + 1;
    publisher.publish(0, &[stored(&[exact, u64::MAX], None, &prompt(1, 2 * BLOCK))]).await;
    publisher.publish(1, &[stored(&[3], Some(2), &prompt(2, BLOCK))]).await;
    gateway.until_blocks("words", 0, 3).await;
    let answer = gateway.ask(&format!("{PATH}?service_id=words&ep_idx=0")).await;
    assert_eq!(answer.field("content-type"), Some("application/json"));
    let text = String::from_utf8(answer.body.to_vec()).unwrap();
    assert!(
        text.contains("\"hash_uint64\":9007199254740993") && text.contains(&u64::MAX.to_string()),
        "{text}"
    );
    let page = answer.json();
    let blocks = page["blocks"].as_array().unwrap();
    for (at, block) in blocks.iter().enumerate() {
        assert_eq!((&block["block_idx"], &block["copies"]), (&json!(at), &json!(1)));
        let orphan = (block["hash_uint64"] == 3).then_some(json!(true));
        assert_eq!(block.get("orphan"), orphan.as_ref(), "{block}");
    }
    let keys = |value: &serde_json::Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&page), ["service_id", "ep_idx", "hash_algo", "blocks", "total"]);
    // an orphan earns no credit until its parent turns up
    assert_eq!(gateway.metric("loxilb_pd_kv_blocks", &["service=\"words\"", "ep_idx=\"0\""]).await, 2.0);
    assert_eq!(gateway.complete(&prompt(2, 40)).await.tier(), "round-robin");
    let by_id = gateway.inventory("7", 0).await;
    assert_eq!((&by_id["service_id"], &by_id["blocks"]), (&json!("7"), &page["blocks"]));
    publisher.publish(2, &[cleared()]).await;
    gateway.until_blocks("words", 0, 0).await;
    assert_eq!(gateway.inventory("words", 0).await, empty, "after a clear");
    for (query, status) in [
        ("", 400),
        ("?service_id=words", 400),
        ("?ep_idx=0", 400),
        ("?service_id=words&ep_idx=-1", 400),
        ("?service_id=words&ep_idx=x", 400),
        ("?service_id=words&ep_idx=1", 404),
        ("?service_id=8&ep_idx=0", 404),
        ("?service_id=plain&ep_idx=0", 404),
    ] {
        let answer = gateway.ask(&format!("{PATH}{query}")).await;
        assert_eq!((answer.status, keys(&answer.json())), (status, vec!["error".to_owned()]), "{query}");
    }
    let refused = fetch(gateway.admin, &Request::json(PATH, &json!({}))).await;
    assert_eq!((refused.status, keys(&refused.json())), (405, vec!["error".to_owned()]));
    assert_eq!(gateway.ask("/nowhere").await.status, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn feeds_are_shown_as_they_are() {
    let engine = engine().await;
    let gateway = Setup::new(&[Rule::kv("words").engine(&engine)]).start().await;
    let ep = format!("ep=\"{}\"", engine.address());
    let labels = ["service=\"words\"", ep.as_str()];
    let of = async |name: &str| gateway.metric(&format!("loxilb_kv_subscriber_{name}"), &labels).await;
    assert_eq!((of("connected").await, of("reconnect_total").await), (1.0, 0.0));
    assert_eq!(of("recv_error_total").await, 0.0);
    gateway.complete(&prompt(1, 50)).await;
    gateway.until_metric("loxilb_pd_kv_blocks", &["service=\"words\"", "ep_idx=\"0\""], 3.0).await;
    engine.cut_events().await;
    gateway.until_metric("loxilb_kv_subscriber_reconnect_total", &labels, 1.0).await;
    assert_eq!((of("connected").await, of("recv_error_total").await), (1.0, 1.0));
    engine.stop().await;
    gateway.until_metric("loxilb_kv_subscriber_connected", &labels, 0.0).await;
    assert_eq!((of("reconnect_total").await, of("recv_error_total").await), (1.0, 2.0));
    let feeds = gateway.ready().await["feeds"].clone();
    assert_eq!(feeds[0]["connected"], false, "{feeds}");
    // the same page, under the name of the system whose dashboards are used
    let theirs = gateway.ask("/netlox/v1/metrics").await;
    assert!(String::from_utf8(theirs.body.to_vec()).unwrap().contains("loxilb_pd_kv_blocks{"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_admin_surface_asks_for_its_token() {
    let engine = engine().await;
    let setup = Setup::new(&[Rule::new("words", &["round-robin"]).engine(&engine)]);
    std::fs::write(setup.folder().join("token"), "s3cret\n").unwrap();
    let gateway = setup.process("token_file = \"token\"\n").start_unready().await;
    let pages = ["/metrics", "/netlox/v1/metrics", "/readyz", &format!("{PATH}?service_id=words&ep_idx=0")];
    for page in pages {
        for wrong in ["", "Bearer", "Bearer ", "Bearer s3cre", "Bearer s3cret!", "Basic s3cret", "s3cret"] {
            let mut request = Request::get(page);
            if !wrong.is_empty() {
                request = request.field("authorization", wrong);
            }
            let answer = fetch(gateway.admin, &request).await;
            assert_eq!((answer.status, answer.complete), (401, true), "{page} {wrong:?}");
            assert!(answer.json()["error"].is_string());
        }
        let twice = Request::get(page).field("authorization", "Bearer s3cret");
        let answer = fetch(gateway.admin, &twice.clone().field("authorization", "Bearer s3cret")).await;
        assert_eq!(answer.status, 401, "{page} twice");
        let right = fetch(gateway.admin, &twice).await;
        assert!(matches!(right.status, 200 | 404), "{page} {right:?}");
    }
    assert_eq!(gateway.ask("/livez").await.status, 200, "whoever restarts it has no token");
    // none of it is reached through the data plane, and no token either
    let through = gateway.send(&Request::get("/metrics").field("authorization", "Bearer s3cret")).await;
    assert!(through.body.starts_with(b"# HELP vllm:"), "the engine's own: {through:?}");
    until("a slow caller keeps nobody waiting", async || {
        let _idle = Connection::open(gateway.admin).await;
        gateway.ask("/livez").await.status == 200
    })
    .await;
}
